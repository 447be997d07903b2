"""Going on with an imported state: totals and positions as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateformat.backends.connectors import CollectSink, MemorySource, ParquetSource, RateSource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.importing import ImportSpec, import_checkpoint
from stateformat.backends.local import LocalRuntime
from stateformat.store import CheckpointStore
from tests.foreign.foreign_fakes import WORDS, flink_like, spark_like
from tests.foreign.import_runs import DROPPED, NAMES, file_log, foreign, more, wanted
from tests.rewrite.rewrite_jobs import new_store


def totals(
    source: Any, parallelism: int, *, operator: str = "totals", uid: str = "words"
) -> tuple[Dataflow, CollectSink]:
    """A dataflow that counts words and adds numbers up, and where its totals go in the end."""
    flow, out = Dataflow("words", parallelism=parallelism), CollectSink()
    rows = flow.source(source, uid=uid)
    kept = {"rows": ("*", "count"), "sum": ("x", "sum")}
    rows.key_by("word").aggregate(kept, emit="end", uid=operator).apply(out, uid="out")
    return flow, out


@pytest.mark.parametrize("parallelism", [3, 2, 5])
@pytest.mark.parametrize("key_hash", ["rehash", "keep"])
def test_a_dataflow_goes_on_from_an_imported_savepoint_at_any_parallelism(
    tmp_path: Path, key_hash: Any, parallelism: int
) -> None:
    store = new_store(tmp_path / "store")
    spec = ImportSpec(key_hash=key_hash, names=NAMES, job_id="words")
    import_checkpoint(foreign(flink_like(), tmp_path), store, spec)
    flow, out = totals(MemorySource(more()), parallelism)
    LocalRuntime(store, drop=[*DROPPED, "source", "sink"]).run(flow)
    found = out.table().sort_by("word").to_pylist()
    assert found == wanted({word: i for i, word in enumerate(WORDS)}, {word: i / 2 for i, word in enumerate(WORDS)})


def spark_totals(path: Path, **spec: Any) -> CheckpointStore:
    """The fake query's aggregation by window and word, imported under the names of ``totals``."""
    store = new_store(path / "store")
    names = {
        "operator-0": "totals",
        "operator-0/default": "totals",
        "operator-0/default.count": "rows",
        "operator-0/default.sum": "sum",
    }
    import_checkpoint(foreign(spark_like(), path), store, ImportSpec(names=names, job_id="words", **spec))
    return store


def test_files_that_the_query_has_read_are_not_read_again(tmp_path: Path) -> None:
    inbox = tmp_path / "in"
    inbox.mkdir()
    window = pa.struct([pa.field("start", pa.timestamp("us", "UTC")), pa.field("end", pa.timestamp("us", "UTC"))])

    def write(name: str, words: list[str]) -> None:
        windows = [
            {"start": 3_600_000_000 * (WORDS.index(word) % 3), "end": 3_600_000_000 * (WORDS.index(word) % 3 + 1)}
            for word in words
        ]
        pq.write_table(
            pa.table({"window": pa.array(windows, window), "word": words, "x": [0.25] * len(words)}), inbox / name
        )

    for number in range(3):
        write(f"{number}.parquet", WORDS)
    file_log(tmp_path, {str(n): [(inbox / f"{n}.parquet").as_uri()] for n in range(3)})
    store = spark_totals(tmp_path, sources={"words": "files"})
    write("3.parquet", WORDS[:10])
    (inbox / "_END").touch()
    flow, out = Dataflow("words", parallelism=2), CollectSink()
    rows = flow.source(ParquetSource(inbox, grows=True, until="_END"), uid="words")
    kept = {"rows": ("*", "count"), "sum": ("x", "sum")}
    rows.key_by("window", "word").aggregate(kept, emit="end", uid="totals").apply(out, uid="out")
    LocalRuntime(store, drop=["operator-1"]).run(flow)
    found = {row["word"]: (row["rows"], row["sum"]) for row in out.table().to_pylist()}
    assert found == {word: (i + (i < 10), i / 4 + 0.25 * (i < 10)) for i, word in enumerate(WORDS)}


def test_a_source_that_makes_rows_up_goes_on_at_its_row(tmp_path: Path) -> None:
    store = spark_totals(tmp_path, sources={"ticks": "rate@7"})
    flow, out = Dataflow("words", parallelism=1), CollectSink()
    ticks = flow.source(RateSource(rows_per_read=10), uid="ticks")
    ticks.apply(out, uid="out")
    runtime = LocalRuntime(store, drop=["operator-1", "totals"], checkpoint_rows=10)
    run = runtime.begin(flow)
    while not out.table().num_rows:
        run.step()
    assert out.table()["n"].to_pylist()[:3] == [7, 8, 9]
