"""Executors that are killed while others read their shuffles: a program with a cluster.

Two executors with a core each run the job at parallelism 4, so of each level two tasks run before
two others. One of the late ones kills its executor, and with it what that one has shuffled. Its
producers run again and, since spots are random, send something else than the early tasks have read.
Spark does not notice, so the job has to.

``python -m tests.spark.spark_executors <directory> <compare: true|false> <orders>`` prints for each
order, as JSON, what happened and what :func:`judge` says of the end.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from stateformat.backends.runtime import EpochProgress, Progress
from stateformat.backends.spark import epoch, sessions
from tests.spark.spark_failures import Place, every_segment_an_object, judge


def cluster() -> Any:
    """A Spark of two executors."""
    from pyspark.sql import SparkSession

    builder = sessions.configure(SparkSession.builder.master("local-cluster[2,1,1024]")).appName("executors")
    settings = {
        **sessions.LOCAL,
        "spark.executor.memory": "768m",
        "spark.locality.wait": "0",
        "spark.shuffle.io.maxRetries": "1",
        "spark.shuffle.io.retryWait": "100ms",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def lose_an_executor(spark: Any, place: Place, hit: str) -> dict[str, Any]:
    """Run the job, and lose an executor in its second epoch."""
    told, tries = _Told(), []

    def progress(now: Progress) -> None:
        assert isinstance(now, EpochProgress)
        tries.append(now.tries)
        if now.checkpoint_id == 1:
            place.orders.give(hit, "kill-executor")

    logger = logging.getLogger(epoch.__name__)
    logger.addHandler(told)
    try:
        outcome = place.runtime(spark, progress=progress).run(place.flow())
    finally:
        logger.removeHandler(told)
    try:
        judged, wrong = judge(place)._asdict(), None
    except AssertionError as error:
        judged, wrong = None, str(error)[:300]
    return {
        "hit": hit,
        "happened": not place.orders.left,
        "tries": tries,
        "told": told.lines,
        "restarts": outcome.restarts,
        "judged": judged,
        "wrong": wrong,
    }


def main(directory: Path, compare: str, *hits: str) -> None:
    """See the module."""
    if compare == "false":
        vars(epoch.frames)["compare"] = lambda reports, consumed: None
    spark = cluster()
    with every_segment_an_object():
        for number, hit in enumerate(hits):
            place = Place(directory / str(number), 2400, parallelism=4)
            lost = lose_an_executor(spark, place, hit)
            print(json.dumps(lost), flush=True)
            if compare == "false" and lost["wrong"]:
                break
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
