"""Checkpoints of Structured Streaming, as this environment's Spark writes them: ``WORK [NAME …]``.

Runs in an environment with a Spark of the version that is wanted; ``make_spark.py`` starts it.
Each fixture is the checkpoint of five batches and what follows of them, in
``WORK/spark-<version>/<name>/``, with snapshots and deltas of every kind in play. With ``--say`` it
writes what Spark's own readers say of such checkpoints instead: ``expected-….jsonl`` beside each.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
os.environ["TZ"] = "UTC"
os.environ["PYSPARK_PYTHON"] = sys.executable

import pyspark
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.foreign.spark_queries import (
    CHANGELOG,
    CONF,
    IDS,
    QUERIES,
    ROCKSDB,
    jsonable,
    readings,
    running,
    state,
    wait_for,
    write_batch,
)

VERSION = tuple(map(int, pyspark.__version__.split(".")[:2]))
FEW = {**ROCKSDB, CONF + "minBatchesToRetain": "2"}
"""A zip for every version takes room: older ones may go."""
ROW_CHECKSUM = {CONF + "stateStore.rowChecksum.enabled": "true"}
AVRO = {**CHANGELOG, CONF + "stateStore.encodingFormat": "avro"}
JOIN = CONF + "join.stateFormatVersion"


@dataclass(frozen=True)
class Fixture:
    query: str
    conf: dict[str, str] = field(default_factory=dict)
    partitions: int = 3
    batches: int = 5
    fails: bool = False
    """Whether the last batch fails: its offsets stand without a commit."""


PLAIN = (
    "aggregate", "key-types", "whole", "unnamed", "window", "session", "join-inner", "join-outer", "dedupe",
    "dedupe-watermark", "pandas-state", "two", "limit", "group-state",
)  # fmt: skip
OLD = (
    "aggregate", "whole", "unnamed", "window", "session", "join-outer", "dedupe", "dedupe-watermark", "pandas-state",
    "group-state",
)  # fmt: skip
FIXTURES: dict[tuple[int, int], dict[str, Fixture]] = {
    (4, 3): {
        **{name: Fixture(name) for name in PLAIN},
        "totals-5-partitions": Fixture("totals", partitions=5),
        "totals-uncommitted": Fixture("totals", fails=True),
        "totals-with-crc": Fixture("totals"),
        "totals-zstd": Fixture("totals", {CONF + "stateStore.compression.codec": "zstd"}),
        "totals-row-checksum": Fixture("totals", ROW_CHECKSUM),
        "totals-rocksdb-row-checksum": Fixture("totals", {**CHANGELOG, **ROW_CHECKSUM}),
        **{
            f"{name}-rocksdb": Fixture(name, FEW)
            for name in ("aggregate", "whole", "session", "dedupe-watermark", "pandas-state", "transform")
        },
        "window-rocksdb": Fixture("window", FEW, batches=3),
        "two-rocksdb": Fixture("two", FEW, batches=2),
        "aggregate-rocksdb-changelog": Fixture("aggregate", CHANGELOG),
        "transform-rocksdb-changelog": Fixture("transform", CHANGELOG, batches=3),
        "transform-ttl-rocksdb-changelog": Fixture("transform-ttl", CHANGELOG, batches=3),
        "aggregate-rocksdb-ids": Fixture("aggregate", IDS),
        "join-inner-rocksdb-ids": Fixture("join-inner", IDS, batches=2),
        "session-rocksdb-ids": Fixture("session", IDS, batches=3),
        "transform-rocksdb-ids": Fixture("transform", IDS, batches=3),
        "transform-rocksdb-avro": Fixture("transform", AVRO, batches=3),
        "join-outer-rocksdb-v3": Fixture("join-outer", {**CHANGELOG, JOIN: "3"}, batches=3),
        "join-outer-rocksdb-v4": Fixture("join-outer", {**FEW, JOIN: "4"}, batches=3),
    },
    (4, 0): {
        "aggregate": Fixture("aggregate"),
        "session": Fixture("session"),
        "transform-rocksdb-changelog": Fixture("transform", CHANGELOG, batches=3),
    },
    (3, 5): {
        **{name: Fixture(name) for name in OLD},
        "aggregate-rocksdb": Fixture("aggregate", FEW),
        "session-rocksdb": Fixture("session", FEW),
        "aggregate-rocksdb-changelog": Fixture("aggregate", CHANGELOG),
    },
}  # fmt: skip


COMMON = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "false",
    "spark.driver.extraJavaOptions": "-Duser.timezone=UTC -Djava.net.preferIPv4Stack=true",
    CONF + "stateStore.minDeltasForSnapshot": "2",
    CONF + "stateStore.maintenanceInterval": "300ms",
}


def session() -> SparkSession:
    builder = SparkSession.builder.master("local[2]")
    for name, value in COMMON.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def make(spark: SparkSession, name: str, fixture: Fixture, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    checkpoint = folder / "checkpoint"
    conf = {**fixture.conf, "spark.sql.shuffle.partitions": str(fixture.partitions)}
    conf[CONF + "stateStore.minDeltasForSnapshot"] = "2"
    if name.startswith("join"):
        conf[CONF + "minBatchesToRetain"] = "2"
    if fixture.query == "transform-ttl":
        make_slowly(spark, fixture, folder, conf)
        return
    if fixture.query == "group-state":
        make_in_java(fixture, folder, conf)
        return
    snapshot_after = fixture.batches // 2 + 1
    fail_at = fixture.batches if fixture.fails else None
    with running(spark, fixture.query, folder / "input", checkpoint, conf, fail_at=fail_at) as run:
        for number in range(fixture.batches):
            run.feed(number)
            if number + 1 == snapshot_after and not wait_for(lambda: _snapshots(checkpoint), 15):
                print(f"{name}: no snapshot of every partition", flush=True)
        if CONF + "minBatchesToRetain" in conf:
            time.sleep(2)  # until the maintenance has removed what is old
        if fixture.fails:
            try:
                run.feed(fixture.batches)
            except PySparkException:
                print(f"{name}: the last batch fails, as it shall", flush=True)
            else:
                raise SystemExit(f"{name}: the last batch should have failed")


def make_slowly(spark: SparkSession, fixture: Fixture, folder: Path, conf: dict[str, str]) -> None:
    """A run for every batch: with times of processing, Spark has always one more batch to do."""
    for number in range(fixture.batches):
        write_batch(folder / "input", QUERIES[fixture.query], number)
        with running(spark, fixture.query, folder / "input", folder / "checkpoint", conf, processingTime="1 hour"):
            if not wait_for(lambda at=number: (folder / "checkpoint" / "commits" / str(at)).exists(), 60):
                raise SystemExit(f"{fixture.query}: batch {number} did not end")
            wait_for(lambda: _snapshots(folder / "checkpoint"), 3)


def make_in_java(fixture: Fixture, folder: Path, conf: dict[str, str]) -> None:
    """Compile and run the program beside this one: Python has no ``flatMapGroupsWithState``."""
    for number in range(fixture.batches):
        write_batch(folder / "input", QUERIES["totals"], number)
    home, classes = Path(pyspark.__file__).parent, folder / "classes"
    program = Path(__file__).with_name("spark") / "GroupStateQuery.java"
    subprocess.run(["javac", "-cp", f"{home}/jars/*", "-d", classes, program], check=True)
    conf = {**COMMON, **conf, "spark.driver.extraClassPath": str(classes)}
    options = [text for name, value in conf.items() for text in ("--conf", f"{name}={value}")]
    command = [home / "bin" / "spark-submit", "--master", "local[2]", *options, "--class", "GroupStateQuery"]
    command += ["spark-internal", folder / "input" / "input-0", folder / "checkpoint"]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "SPARK_HOME": str(home)})


def _snapshots(checkpoint: Path) -> bool:
    """Whether every store that has files has a snapshot."""
    folders = {path.parent for kind in ("delta", "changelog", "zip") for path in checkpoint.glob(f"state/**/*.{kind}")}
    with_one = {path.parent for kind in ("snapshot", "zip") for path in checkpoint.glob(f"state/**/*.{kind}")}
    return folders <= with_one


def say(spark: SparkSession, query: str, folder: Path) -> None:
    """Write the contents of every store, as Spark's reader has them."""
    for old in folder.glob("expected-*"):
        old.unlink()
    checkpoint = folder / "checkpoint"
    newest = max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))
    offsets = (checkpoint / "offsets" / str(newest)).read_text().splitlines()
    if query == "session" and not (checkpoint / "state" / "0" / "_metadata").exists():
        checkpoint = with_metadata(checkpoint, folder / "told")
    for label, options in readings(query, checkpoint):
        _write(folder / f"expected-{label}.jsonl", state(spark, checkpoint, options))
    checkpoint = folder / "checkpoint"
    frame = spark.read.format("state-metadata").load(str(checkpoint))
    found = [jsonable(row, frame.schema) for row in frame.collect()]
    _write(folder / "expected-metadata.jsonl", found)
    head = json.loads(offsets[1])
    made = {"query": query, "newest_commit": newest, "watermark_ms": head["batchWatermarkMs"]}
    (folder / "made.json").write_text(json.dumps(made) + "\n")


def with_metadata(checkpoint: Path, copy: Path) -> Path:
    """A copy that says of its keys, as Spark 4 does and 3.5 does not, how many columns lead."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(checkpoint, copy / "checkpoint")
    info = {"storeName": "default", "numColsPrefixKey": 1, "numPartitions": 3}
    operator = {"operatorId": 0, "operatorName": "sessionWindowStateStoreSaveExec"}
    target = copy / "checkpoint" / "state" / "0" / "_metadata"
    target.mkdir()
    (target / "metadata").write_text("v1\n" + json.dumps({"operatorInfo": operator, "stateStoreInfo": [info]}))
    return copy / "checkpoint"


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows))


def main() -> None:
    arguments = [one for one in sys.argv[1:] if not one.startswith("--")]
    work, names = Path(arguments[0]), arguments[1:]
    spark = session()
    if "--say" in sys.argv:
        for folder in sorted(work.glob("spark-*/*")):
            version = tuple(map(int, folder.parent.name.removeprefix("spark-").split(".")[:2]))
            if not names or folder.name in names:
                print(f"{folder}: said", flush=True)
                say(spark, FIXTURES[version][folder.name].query, folder)
    else:
        for name, fixture in FIXTURES[VERSION].items():
            if not names or name in names:
                folder = work / f"spark-{pyspark.__version__}" / name
                print(folder, flush=True)
                make(spark, name, fixture, folder)
    spark.stop()


if __name__ == "__main__":
    main()
