"""Structured Streaming queries of every stateful operator, and how they are run step by step.

One table, :data:`QUERIES`, serves those who make the fixtures (``making/``, which may run in an
environment of an older Spark: this file imports pyspark alone) and the tests that go on from what
was dealt anew. Every input is a folder of JSON lines, a file a batch, the same rows every time.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession, functions as F  # noqa: N812

SCHEMA = "k string, n int, v bigint, at timestamp, price double, note string"
KEYS = (None, "", "a", "key-1", "key-2", "key-3", "key-4", "key-5", "naïve-ß", "longer than eight bytes", "雪", "z")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
CONF = "spark.sql.streaming."
ROCKSDB = {
    CONF + "stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
}
CHANGELOG = {**ROCKSDB, CONF + "stateStore.rocksdb.changelogCheckpointing.enabled": "true"}
IDS = {**CHANGELOG, CONF + "checkpoint.fileChecksum.enabled": "true", CONF + "stateStore.checkpointFormatVersion": "2"}


@dataclass(frozen=True)
class Query:
    """``build`` makes the query of its inputs; ``rows`` are how many come in one batch."""

    build: Callable[[list[DataFrame]], DataFrame]
    mode: str = "update"
    inputs: int = 1
    rows: int = 16
    conf: dict[str, str] = field(default_factory=dict)
    since: tuple[int, int] = (3, 5)
    """The oldest Spark that knows the operator."""


# Inputs


def write_batch(folder: Path, query: Query, number: int) -> None:
    """The files of batch ``number``, one for each input; times of the files tell their order."""
    for at in range(query.inputs):
        rows = list(_rows(random.Random(number * 10 + at), number, query.rows))
        target = folder / f"input-{at}"
        target.mkdir(parents=True, exist_ok=True)
        hidden = target / f".batch-{number}.json"
        hidden.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        os.utime(hidden, (1_700_000_000 + number * 60,) * 2)
        hidden.rename(target / f"batch-{number}.json")


def _rows(rng: random.Random, number: int, count: int) -> Iterator[dict[str, Any]]:
    """Times go on by eight minutes a batch, spread over twelve: some rows come late."""
    start = datetime(2026, 3, 1, 10, tzinfo=UTC) + timedelta(minutes=8 * number)
    for _ in range(count):
        at = start + timedelta(milliseconds=rng.randrange(12 * 60_000))
        yield {
            "k": rng.choice(KEYS),
            "n": rng.choice((None, *range(-3, 6))),
            "v": rng.choice((0, 1, -1, 2**63 - 1, -(2**63), rng.randrange(10**6)))
            if rng.random() < 0.3
            else rng.randrange(10**6),
            "at": at.replace(tzinfo=None).isoformat(timespec="milliseconds"),
            "price": round(rng.uniform(-50, 50), 2),
            "note": rng.choice((None, "", "short", "a note of more than eight bytes")),
        }


def inputs(spark: SparkSession, folder: Path, query: Query) -> list[DataFrame]:
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
    return [stream.json(str(folder / f"input-{at}")) for at in range(query.inputs)]


# The queries


def _late(frame: DataFrame, delay: str = "10 minutes") -> DataFrame:
    return frame.withWatermark("at", delay)


def aggregate(frames: list[DataFrame]) -> DataFrame:
    """Values of every layout: fixed, text, long decimals, struct, array, map, and nulls in them."""
    return (
        frames[0]
        .groupBy("k", "n")
        .agg(
            F.count("*").alias("rows"),
            F.sum(F.col("v") % 1000).alias("total"),
            F.avg("price").alias("mean"),
            F.max("at").alias("newest"),
            F.max(F.to_date("at")).alias("day"),
            F.sum(F.col("price").cast("decimal(8,2)")).alias("short"),
            F.sum(F.col("v").cast("decimal(28,6)")).alias("long"),
            F.max(F.struct(F.col("note").alias("note"), F.col("v").alias("v"))).alias("pair"),
            F.first(F.array(F.col("note"), F.lit(None), F.col("k"))).alias("texts"),
            F.first(F.map_from_arrays(F.array(F.lit("v"), F.lit("half")), F.array(F.col("v"), F.lit(None)))).alias(
                "map"
            ),
            F.last("note").alias("note"),
            F.min(F.encode("k", "UTF-8")).alias("bytes"),
        )
    )


def totals(frames: list[DataFrame]) -> DataFrame:
    return frames[0].groupBy("k").agg(F.count("*").alias("rows"), F.sum("n").alias("total"))


def key_types(frames: list[DataFrame]) -> DataFrame:
    """Keys of every type that Spark hashes. A map cannot be grouped by."""
    n, v = F.col("n"), F.col("v") % 7
    return (
        frames[0]
        .select(
            (n % 2 == 0).alias("flag"),
            n.cast("byte").alias("tiny"),
            n.cast("short").alias("small"),
            n,
            v.alias("v"),
            n.cast("float").alias("single"),
            (F.col("price") / 7).alias("double"),
            F.to_date("at").alias("day"),
            F.date_trunc("hour", "at").alias("hour"),
            F.date_trunc("hour", "at").cast("timestamp_ntz").alias("local"),
            v.cast("decimal(9,2)").alias("money"),
            v.cast("decimal(30,10)").alias("big"),
            F.encode("k", "UTF-8").alias("bytes"),
            F.struct(F.col("k").alias("text"), n.alias("n")).alias("pair"),
            F.array(n, v.cast("int")).alias("numbers"),
            F.col("k").alias("text"),
        )
        .groupBy(
            "flag", "tiny", "small", "n", "v", "single", "double", "day", "hour", "local", "money", "big", "bytes",
            "pair", "numbers", "text",
        )
        .count()
    )  # fmt: skip


def whole(frames: list[DataFrame]) -> DataFrame:
    return frames[0].agg(F.count("*").alias("rows"), F.sum("n").alias("total"), F.max("k").alias("last"))


def unnamed(frames: list[DataFrame]) -> DataFrame:
    """Grouping by what has no name: both key columns are called the same in the state."""
    return frames[0].groupBy(F.col("n") % 3, F.length("k")).agg(F.count("*").alias("rows"))


def window(frames: list[DataFrame]) -> DataFrame:
    return _late(frames[0]).groupBy(F.window("at", "10 minutes", "5 minutes"), "k").agg(
        F.count("*").alias("rows"), F.sum("price").alias("total"), F.max("note").alias("note")
    )  # fmt: skip


def session(frames: list[DataFrame]) -> DataFrame:
    return _late(frames[0]).groupBy(F.session_window("at", "3 minutes"), "k").agg(
        F.count("*").alias("rows"), F.sum("n").alias("total")
    )  # fmt: skip


def _sides(frames: list[DataFrame]) -> tuple[DataFrame, DataFrame, Any]:
    left = frames[0].withWatermark("at", "6 minutes").select("k", "n", "v", "at", "note")
    right = frames[1].withWatermark("at", "9 minutes").select(
        F.col("k").alias("key"), F.col("n").alias("m"), F.col("at").alias("then"), F.col("price").alias("paid")
    )  # fmt: skip
    within = F.expr("k = key AND n = m AND then BETWEEN at - INTERVAL 10 MINUTES AND at + INTERVAL 10 MINUTES")
    return left, right, within


def join_inner(frames: list[DataFrame]) -> DataFrame:
    left, right, within = _sides(frames)
    return left.join(right, within, "inner")


def join_outer(frames: list[DataFrame]) -> DataFrame:
    left, right, within = _sides(frames)
    return left.join(right, within, "left_outer")


def dedupe(frames: list[DataFrame]) -> DataFrame:
    return frames[0].dropDuplicates(["k", "n"])


def dedupe_watermark(frames: list[DataFrame]) -> DataFrame:
    return _late(frames[0], "5 minutes").dropDuplicatesWithinWatermark(["k", "n"])


def two(frames: list[DataFrame]) -> DataFrame:
    once = _late(frames[0]).dropDuplicates(["k", "n", "at"])
    return once.groupBy(F.window("at", "5 minutes"), "n").agg(F.count("*").alias("rows"))


def limit(frames: list[DataFrame]) -> DataFrame:
    return frames[0].select("k", "n").limit(40)


def pandas_state(frames: list[DataFrame]) -> DataFrame:
    """A running count and the last note; a key that was not seen for a while is told and left."""
    import pandas as pd
    from pyspark.sql.streaming.state import GroupStateTimeout

    def step(key: Any, frames: Any, state: Any) -> Any:
        if state.hasTimedOut:
            seen = state.get[0]
            state.remove()
            yield pd.DataFrame({"k": [key[0]], "n": [key[1]], "seen": [-seen]})
            return
        rows = [row for frame in frames for row in frame.sort_values(["at", "v"]).itertuples()]
        seen = len(rows) + (state.get[0] if state.exists else 0)
        state.update((seen, rows[-1].note))
        newest = int(max(row.at for row in rows).timestamp() * 1000)
        state.setTimeoutTimestamp(max(newest, state.getCurrentWatermarkMs()) + 1 + 4 * 60_000)
        yield pd.DataFrame({"k": [key[0]], "n": [key[1]], "seen": [seen]})

    grouped = _late(frames[0], "2 minutes").groupBy("k", "n")
    return grouped.applyInPandasWithState(
        step, "k string, n int, seen bigint", "seen bigint, note string", "update", GroupStateTimeout.EventTimeTimeout
    )


def transform(frames: list[DataFrame], *, ttl: bool = False) -> DataFrame:
    """All that ``transformWithState`` can keep: a value, a list, a map, timers of events."""
    import pandas as pd
    from pyspark.sql.streaming import StatefulProcessor

    class Keeper(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            age = {"ttlDurationMs": 10**9} if ttl else {}
            self.seen = handle.getValueState("seen", "seen bigint, price double", **age)
            self.notes = handle.getListState("notes", "note string, v bigint", **age)
            self.by = handle.getMapState("by", "n int", "rows bigint, last string", **age)

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:  # noqa: N802, N803
            found = [row for frame in rows for row in frame.sort_values(["at", "v"]).itertuples()]
            before = self.seen.get()[0] if self.seen.exists() else 0
            self.seen.update((before + len(found), float(found[-1].price)))
            for row in found:
                self.notes.appendValue((row.note, int(row.v)))
                n = (None if pd.isna(row.n) else int(row.n),)
                rows_before = self.by.getValue(n)[0] if self.by.containsKey(n) else 0
                self.by.updateValue(n, (rows_before + 1, row.note))
            if not ttl:
                self.handle.registerTimer(int(found[-1].at.timestamp() * 1000) + 240_000)
            if before > 4:
                self.notes.clear()
            yield pd.DataFrame({"k": [key[0]], "seen": [before + len(found)]})

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:  # noqa: N802, N803
            yield pd.DataFrame({"k": [key[0]], "seen": [-expiredTimerInfo.getExpiryTimeInMs()]})

        def close(self) -> None:
            pass

    frame = frames[0].withColumn("n", F.coalesce("n", F.lit(-9)))
    if ttl:
        return frame.groupBy("k").transformWithStateInPandas(
            Keeper(), "k string, seen bigint", "update", "ProcessingTime"
        )
    grouped = _late(frame, "2 minutes").groupBy("k")
    return grouped.transformWithStateInPandas(Keeper(), "k string, seen bigint", "update", "EventTime")


def transform_ttl(frames: list[DataFrame]) -> DataFrame:
    return transform(frames, ttl=True)


QUERIES = {
    "aggregate": Query(aggregate, rows=8),
    "totals": Query(totals),
    "key-types": Query(key_types),
    "whole": Query(whole),
    "unnamed": Query(unnamed),
    "window": Query(window, mode="append"),
    "session": Query(session, mode="append"),
    "join-inner": Query(join_inner, mode="append", inputs=2, rows=40),
    "join-outer": Query(join_outer, mode="append", inputs=2, rows=40),
    "dedupe": Query(dedupe, mode="append"),
    "dedupe-watermark": Query(dedupe_watermark, mode="append"),
    "pandas-state": Query(pandas_state),
    "two": Query(two, mode="append", rows=24),
    "limit": Query(limit, mode="append"),
    "transform": Query(transform, conf=ROCKSDB, since=(4, 0), rows=10),
    "transform-ttl": Query(transform_ttl, conf=ROCKSDB, since=(4, 0), rows=10),
}


# Runs


class Run:
    """A query that is running in a session of its own, and what it has put out, by batch."""

    def __init__(
        self,
        spark: SparkSession,
        name: str,
        folder: Path,
        checkpoint: Path,
        conf: dict[str, str],
        fail_at: int | None = None,
        **trigger: Any,
    ) -> None:
        self.query, self.folder = QUERIES[name], folder
        session = spark.newSession()
        for key, value in {**self.query.conf, **conf, "spark.sql.session.timeZone": "UTC"}.items():
            session.conf.set(key, value)
        self.output: dict[int, list[str]] = {}

        def take(frame: DataFrame, batch: int) -> None:
            # The callback's frame is of a session that Spark made for the query: plain rows only.
            self.output[batch] = sorted(
                json.dumps(jsonable(row, frame.schema), ensure_ascii=False) for row in frame.collect()
            )
            if batch == fail_at:
                raise RuntimeError("the query fails here, after its batch and before its commit")

        for at in range(self.query.inputs):
            (folder / f"input-{at}").mkdir(parents=True, exist_ok=True)
        writer = self.query.build(inputs(session, folder, self.query)).writeStream.outputMode(self.query.mode)
        if trigger:
            writer = writer.trigger(**trigger)
        self.stream = writer.option("checkpointLocation", str(checkpoint)).foreachBatch(take).start()

    def feed(self, number: int) -> None:
        """One more batch, with all that follows of it."""
        write_batch(self.folder, self.query, number)
        self.stream.processAllAvailable()


@contextmanager
def running(*args: Any, **options: Any) -> Iterator[Run]:
    run = Run(*args, **options)
    try:
        yield run
    finally:
        run.stream.stop()


def go_on(
    spark: SparkSession, name: str, folder: Path, checkpoint: Path, conf: dict[str, str] | None = None
) -> dict[int, list[str]]:
    """Run on from ``checkpoint`` until the input is used up; the output by batch."""
    with running(spark, name, folder, checkpoint, conf or {}, availableNow=True) as run:
        if not run.stream.awaitTermination(280):
            raise TimeoutError(f"query {name} is still running on {checkpoint}")
        return run.output


def partitions(number: int) -> dict[str, str]:
    return {"spark.sql.shuffle.partitions": str(number)}


# What the engine itself says


def stores(checkpoint: Path) -> list[tuple[int, str]]:
    """The operators and their stores, by the folders of the state."""
    found = []
    for operator in sorted((checkpoint / "state").glob("[0-9]*"), key=lambda path: int(path.name)):
        names = {path.name for path in operator.glob("[0-9]*/*") if path.is_dir() and path.name[0] not in "_S"}
        found += [(int(operator.name), name) for name in sorted(names) or ["default"]]
    if not found:
        raise ValueError(f"no state in {checkpoint}")
    return found


def readings(name: str, checkpoint: Path) -> list[tuple[str, dict[str, str]]]:
    """What must be read to have all the state of a query: names, and options of Spark's reader."""
    found = []
    for operator, store in stores(checkpoint):
        parts = {store: {} if store == "default" else {"storeName": store}}
        if name.startswith("transform"):
            parts = {variable: {"stateVarName": variable} for variable in ("seen", "notes", "by")}
            if name == "transform":
                parts["timers"] = {"readRegisteredTimers": "true"}
        elif name.startswith("join") and store == "default":
            # From format 3 on, the stores of a join are column families of one.
            schema = next((checkpoint / "state" / str(operator) / "_stateSchema" / store).glob("[0-9]*")).read_bytes()
            sides = sorted(set(re.findall("(?:left|right)-[A-Za-z]+", schema.decode(errors="replace"))))
            parts = {side: {"storeName": side} for side in sides}
        found += [(f"{operator}-{part}", {"operatorId": str(operator), **more}) for part, more in parts.items()]
    return found


def state(spark: SparkSession, checkpoint: Path, options: dict[str, str]) -> list[dict[str, Any]]:
    """The rows that Spark's own reader gives, JSON-safe and in a fixed order."""
    session = spark.newSession()
    newest = max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))
    if "stateUniqueIds" in (checkpoint / "commits" / str(newest)).read_text():
        session.conf.set(CONF + "stateStore.checkpointFormatVersion", "2")
    reader = session.read.format("statestore").option("batchId", newest)
    for key, value in options.items():
        reader = reader.option(key, value)
    frame = reader.load(str(checkpoint))
    rows = [jsonable(row, frame.schema) for row in frame.collect()]
    for row in rows:
        row["partition"] = row.pop("partition_id")
    return sorted(rows, key=lambda row: json.dumps(row, ensure_ascii=False, sort_keys=True))


def jsonable(value: Any, kind: Any) -> Any:
    """Structs by name, a repeated one with a suffix; maps as lists of pairs; times in µs."""
    name = kind.typeName()
    if value is None or name == "void":
        return None
    if name == "struct":
        return dict(
            zip(distinct([f.name for f in kind]), map(jsonable, value, (f.dataType for f in kind)), strict=True)
        )
    if name == "array":
        return [jsonable(item, kind.elementType) for item in value]
    if name == "map":
        pairs = [[jsonable(key, kind.keyType), jsonable(item, kind.valueType)] for key, item in value.items()]
        return sorted(pairs, key=json.dumps)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).hex()
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, datetime):
        aware = value.replace(tzinfo=UTC) if name == "timestamp_ntz" else value.astimezone(UTC)
        return (aware - EPOCH) // timedelta(microseconds=1)
    if isinstance(value, date):
        return (value - EPOCH.date()).days
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return str(value)
    return value


def distinct(names: list[str]) -> list[str]:
    """``a a b`` → ``a a_2 b``."""
    found: list[str] = []
    for name in names:
        at = next(at for at in range(1, len(names) + 1) if (name if at == 1 else f"{name}_{at}") not in found)
        found.append(name if at == 1 else f"{name}_{at}")
    return found


def wait_for(check: Callable[[], bool], seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
