"""The queries of docs/moving-from-structured-streaming.md, on Spark and here, give the same."""

from __future__ import annotations

import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import stateformat as sf
from stateformat.backends.connectors import CollectSink, ParquetSource
from stateformat.backends.dataflow import Dataflow, EventTime
from stateformat.backends.local import LocalRuntime
from stateformat.backends.spark import SparkRuntime
from tests.worlds.recipes import DOCS

pytestmark = pytest.mark.spark

PAGE = DOCS / "moving-from-structured-streaming.md"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
QUICK = {
    "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.leafNodeDefaultParallelism": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
FILES = 4
LATE_BY_US = 30 * 60 * 1_000_000
BEGIN = datetime(2026, 1, 5, tzinfo=UTC)
CLOSING = BEGIN + timedelta(days=10)
"""A last row of each stream, by whose time all that came before is final on both sides."""
TIME = pa.timestamp("us", "UTC")
LAST_OF = {"ann": 40, "bob": 80, "cem": 120}
DDL = {
    "visits": "user string, page string, n long, at timestamp",
    "orders": "order_id long, user string, amount long, at timestamp",
    "payments": "payment long, for_order long, at timestamp",
    "users": "user string, country string",
}
SCHEMAS = {
    "visits": pa.schema([("user", pa.string()), ("page", pa.string()), ("n", pa.int64()), ("at", TIME)]),
    "orders": pa.schema([("order_id", pa.int64()), ("user", pa.string()), ("amount", pa.int64()), ("at", TIME)]),
    "payments": pa.schema([("payment", pa.int64()), ("for_order", pa.int64()), ("at", TIME)]),
    "users": pa.schema([("user", pa.string()), ("country", pa.string())]),
}
QUICKEST = ("Duplicates", "A stream and a table", "Sessions")
"""What Structured Streaming answers soonest; all others are truth tests."""
ON_SPARK = ("Timers", "Two streams", "Left outer join", "State that expires")
"""That both executors give the same is what the conformance tests say; of these also here."""
Rows = list[tuple[Any, ...]]


def minutes(count: int) -> datetime:
    return BEGIN + timedelta(minutes=count)


def visits() -> list[Rows]:
    """Each user comes every quarter of an hour but for breaks of half an hour, then no more."""
    found: Rows = []
    for number in range(120):
        user = list(LAST_OF)[number % 3]
        if number < LAST_OF[user] and (number // 6) % 4 != 3:
            page = ("home", "shop", "cart", "help")[(number * 5 + number // 7) % 4]
            found.append((user, page, number, minutes(30 + number * 5 - number * 7 % 3 * 5)))
    late = [(user, "late", 1000, minutes(7)) for user in ("ann", "cem")]
    return [*thirds(found)[:2], [*thirds(found)[2], *late], [("~end", "~end", 0, CLOSING)]]


def orders() -> list[Rows]:
    found: Rows = [(number, "ann", 10 * number, minutes(30 + number * 10)) for number in range(36)]
    return [*thirds(found), [(-1, "~end", 0, CLOSING)]]


def payments() -> list[Rows]:
    found: Rows = []
    for number in range(36):
        at = 30 + number * 10 + number % 7 * 15
        if number % 5:
            found.append((100 + number, number, minutes(at)))
        if number % 4 == 1:
            found.append((100 + number, number, minutes(at + 1)))
    return [*thirds(sorted(found, key=lambda row: row[2])), [(-1, -2, CLOSING)]]


def thirds(rows: Rows) -> list[Rows]:
    size = -(-len(rows) // 3)
    return [rows[begin : begin + size] for begin in range(0, 3 * size, size)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each stream, with the files of its epochs."""
    root = tmp_path_factory.mktemp("moving")
    users: list[Rows] = [[("ann", "NO"), ("bob", "IT")]]
    for name, files in {"visits": visits(), "orders": orders(), "payments": payments(), "users": users}.items():
        (root / name).mkdir()
        for number, rows in enumerate(files):
            columns = [pa.array(list(column)) for column in zip(*rows, strict=True)]
            path = root / name / f"{number}.parquet"
            pq.write_table(pa.table(columns, SCHEMAS[name].names).cast(SCHEMAS[name]), path)
            os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    return root


def sections() -> Iterator[tuple[str, str]]:
    """The headings of the page whose code is a pair of queries, and that code.

    What stands below a smaller heading goes on from the code of its section.
    """
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        whole, *smaller = [
            (part.split("\n", 1)[0], "\n".join(re.findall(r"```python\n(.*?)```", part, re.DOTALL)))
            for part in re.split(r"^### ", section, flags=re.MULTILINE)
        ]
        if whole[1]:
            yield whole
        for heading, code in smaller:
            yield heading, f"{whole[1]}\n{code}"


def beginning() -> str:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def in_structured_streaming(spark: Any, before: Callable[..., Any], mode: str, inputs: Path, scratch: Path) -> Rows:
    """What the query emits; of mode complete, what it has at its end."""
    session = spark.newSession()
    for name, value in QUICK.items():
        session.conf.set(name, value)
    streams = {
        name: session.read.parquet(str(inputs / name))
        if name == "users"
        else session.readStream.schema(DDL[name]).option("maxFilesPerTrigger", 1).parquet(str(inputs / name))
        for name in inspect.signature(before).parameters
    }
    found: list[Rows] = []
    writer = before(**streams).writeStream.outputMode(mode).option("checkpointLocation", str(scratch / "checkpoint"))
    query = writer.foreachBatch(lambda frame, _: found.append(tuples(frame.toArrow()))).trigger(availableNow=True)
    running = query.start()
    while not running.awaitTermination(1):
        # A query with processing time goes on with batches of nothing, also with this trigger.
        if len(running.recentProgress) > FILES + 2:
            running.stop()
    assert len(running.recentProgress) >= FILES
    return found[-1] if mode == "complete" else [row for rows in found for row in rows]


def in_a_dataflow(executor: str, spark: Any, after: Callable[..., Any], inputs: Path, scratch: Path) -> Rows:
    """What the flow commits."""
    flow, out = Dataflow("moved", parallelism=2), CollectSink()
    streams = {
        name: flow.source(
            ParquetSource(inputs / name),
            uid=name,
            parallelism=1,
            event_time=None if name == "users" else EventTime("at", LATE_BY_US),
        )
        for name in inspect.signature(after).parameters
    }
    after(**streams).apply(out, uid="out")
    store = sf.open(str(scratch / "store"))
    (LocalRuntime(store) if executor == "local" else SparkRuntime(spark, store)).run(flow)
    return tuples(out.table())


def tuples(table: pa.Table) -> Rows:
    return [tuple(row.values()) for row in table.to_pylist()]


def final(rows: Rows) -> Counter[tuple[Any, ...]]:
    """The rows without those of the closing row, which only a bounded input emits."""

    def closes(value: Any) -> bool:
        return value in ("~end", -1) or (isinstance(value, datetime) and value >= CLOSING - timedelta(hours=3))

    return Counter(row for row in rows if not any(map(closes, row)))


@pytest.mark.parametrize(
    ("heading", "executors"),
    [
        pytest.param(
            heading,
            ("local", "cluster") if heading in ON_SPARK else ("local",),
            marks=[] if heading in QUICKEST else [pytest.mark.truth],
        )
        for heading, _ in sections()
    ],
)
def test_a_query_that_was_moved_gives_what_it_gave(
    heading: str, executors: tuple[str, ...], spark: Any, inputs: Path, tmp_path: Path
) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    code = dict(sections())[heading]
    exec(compile(f"{beginning()}\n{code}", f"{PAGE.name}: {heading}", "exec"), names)
    theirs = final(in_structured_streaming(spark, names["before"], names["MODE"], inputs, tmp_path))
    assert len(theirs) >= 2
    for executor in executors:
        assert final(in_a_dataflow(executor, spark, names["after"], inputs, tmp_path / executor)) == theirs


def test_the_page_has_a_query_for_each_stateful_operator() -> None:
    assert len(list(sections())) == 15
