"""A job of the program for spark-submit is rescaled while it runs, in the same Spark session."""

from __future__ import annotations

import io
import json
import sys
import threading
from pathlib import Path
from typing import Any

import duckdb
import pytest

import stateformat as sf
from stateformat.tools.ckpt.asking import Attempt
from stateformat.tools.jobs.run import main

pytestmark = pytest.mark.spark

TOTAL = 3_000
JOB = """
from stateformat.backends.connectors import FileSink, RateSource
from stateformat.backends.dataflow import Dataflow


def numbers():
    flow = Dataflow("numbers", parallelism=2)
    numbers = flow.source(RateSource(total={total}, shards=4, rows_per_read=25), uid="numbers", event_time="at")
    numbers.apply(FileSink({directory!r}, durable=False), uid="all")
    shards = numbers.key_by("shard").aggregate({{"rows": ("*", "count")}}, emit="end", uid="shards")
    shards.apply(FileSink({directory!r} + "-shards", durable=False), uid="counted")
    return flow
"""


class Printed(io.StringIO):
    """Standard output of the program: after two lines the job is asked to go on at three."""

    def __init__(self, store: str) -> None:
        super().__init__()
        self._store = store
        self.answers: list[dict[str, Any]] = []
        self.asking: threading.Thread | None = None

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.asking is None and self.getvalue().count("\n") >= 2:
            self.asking = threading.Thread(target=self._ask)
            self.asking.start()
        return count

    def _ask(self) -> None:
        attempt = Attempt(
            sf.open(self._store),
            "rescale",
            {"parallelism": 3, "operators": {"counted": 1}},
            None,
            open_store=sf.open,
        )
        self.answers.append(attempt.document(attempt.run(120)))

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]


def test_a_job_goes_on_at_another_parallelism_in_its_session_and_commits_every_row_once(
    tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, store = str(tmp_path / "out"), str(tmp_path / "store")
    job = tmp_path / f"job_{tmp_path.name}.py"
    job.write_text(JOB.format(directory=output, total=TOTAL))
    printed = Printed(store)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", printed)
        arguments = [f"{job}:numbers", store, "--rows-per-epoch", "200", "--keep", "all", "--progress", "json"]
        assert main(arguments) == 0
    sys.modules.pop(job.stem, None)

    assert printed.asking is not None
    printed.asking.join(timeout=120)
    (answer,) = printed.answers
    assert answer["outcome"] == "rescaled", answer
    *epochs, end = printed.objects
    assert [news for epoch in epochs for news in epoch["news"]] == [answer["message"]]
    assert [epoch["parallelism"] for epoch in epochs] == sorted(epoch["parallelism"] for epoch in epochs)
    assert {epoch["parallelism"] for epoch in epochs} == {2, 3}
    assert (end["restarts"], end["stop"]) == (0, None)

    records = {record.checkpoint_id: record for record in sf.open(store).history()}
    first = records[answer["checkpoint_id"]]
    assert {operator.uid: operator.parallelism for operator in first.graph.operators} == {
        "numbers": 3,
        "all": 3,
        "shards": 3,
        "counted": 1,
    }
    assert sf.open(answer["savepoint"]).open().id == first.checkpoint_id - 1
    assert {record.properties["stateformat.spark_application"] for record in records.values()} == {
        spark.sparkContext.applicationId
    }
    [found] = duckdb.sql(f"SELECT count(*), count(DISTINCT (shard, n)) FROM '{output}/*.parquet'").fetchall()
    assert found == (TOTAL, TOTAL)
    [counted] = duckdb.sql(f"SELECT count(*), sum(\"rows\") FROM '{output}-shards/*.parquet'").fetchall()
    assert counted == (4, TOTAL)
