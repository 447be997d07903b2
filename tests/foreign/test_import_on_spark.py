"""Importing with Spark's engine, and going on from it with ``SparkRuntime``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import stateformat
from stateformat.backends.connectors import FileSink, MemorySource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.importing import ImportSpec, import_checkpoint
from stateformat.backends.rewrite import ThreadEngine
from stateformat.backends.spark import SparkRuntime
from stateformat.backends.spark.rewrite import SparkEngine
from stateformat.validation import validate
from tests.foreign.foreign_fakes import WORDS, flink_like
from tests.foreign.import_runs import DROPPED, NAMES, foreign, more, rows, wanted
from tests.rewrite.rewrite_jobs import new_store

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import spark_query_moves

    yield spark_query_moves
    del sys.modules["spark_query_moves"]


@pytest.mark.truth
@pytest.mark.usefixtures("spark")
def test_a_structured_streaming_query_is_finished_here_with_the_totals_of_all_its_input(
    moves: ModuleType, tmp_path: Path
) -> None:
    assert moves.move(tmp_path)
    assert moves.committed(tmp_path / "out") == moves.wanted()


@pytest.mark.parametrize("key_hash", ["rehash", "keep"])
def test_both_engines_import_the_same_rows(spark: Any, tmp_path: Path, key_hash: Any) -> None:
    found = []
    for name, engine in (("threads", ThreadEngine()), ("spark", SparkEngine(spark))):
        checkpoint = stateformat.open(FIXTURES / "spark-4.3.0" / "aggregate" / "checkpoint").open()
        store = new_store(tmp_path / name)
        import_checkpoint(checkpoint, store, ImportSpec(key_hash=key_hash), engine=engine)
        assert [problem.message for problem in validate(store, level="full").problems] == []
        found.append(rows(store, "operator-0", "default"))
    assert found[0] == found[1]
    assert found[0]


def test_an_imported_savepoint_is_gone_on_with(spark: Any, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    store, out = new_store(tmp_path / "store"), tmp_path / "out"
    import_checkpoint(foreign(flink_like(), tmp_path), store, ImportSpec(names=NAMES, job_id="words"))
    flow = Dataflow("words", parallelism=2)
    words = flow.source(MemorySource(more()), uid="words")
    kept = {"rows": ("*", "count"), "sum": ("x", "sum")}
    words.key_by("word").aggregate(kept, emit="end", uid="totals").apply(FileSink(out), uid="out")
    SparkRuntime(spark, store, drop=[*DROPPED, "source", "sink"]).run(flow)
    found = pq.read_table(out).sort_by("word").to_pylist()
    assert found == wanted({word: i for i, word in enumerate(WORDS)}, {word: i / 2 for i, word in enumerate(WORDS)})
