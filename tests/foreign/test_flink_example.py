"""The example that goes on from a Flink savepoint: the totals are Flink's, and what was added."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import stateformat

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import flink_savepoint_moves

    yield flink_savepoint_moves
    del sys.modules["flink_savepoint_moves"]


@pytest.mark.parametrize("parallelism", [1, 2, 5])
@pytest.mark.parametrize("name", ["core-hashmap-canonical", "core-rocksdb-canonical"])
def test_a_flink_savepoint_goes_on_as_a_job_of_ours(
    moves: ModuleType, tmp_path: Path, name: str, parallelism: int
) -> None:
    folder = moves.FIXTURE.parent / name
    assert moves.move(folder / "savepoint", folder / "expected.jsonl", tmp_path / "store", parallelism)
    assert len(moves.wanted(folder / "expected.jsonl")) > 10


def test_it_goes_on_with_the_key_groups_of_flink_too(
    moves: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, command = moves.LocalRuntime, moves.ckpt
    monkeypatch.setattr(moves, "ckpt", lambda arguments: command([*arguments, "--key-hash", "keep"]))
    # What a savepoint needs to be written again is of no use to a dataflow.
    monkeypatch.setattr(moves, "LocalRuntime", lambda store: runtime(store, drop=["flink-savepoint"]))
    assert moves.move(moves.FIXTURE / "savepoint", moves.FIXTURE / "expected.jsonl", tmp_path / "store", 5)
    kept = stateformat.open(tmp_path / "store").open().graph.operator("totals")
    assert (kept.key_hash, kept.parallelism) == ("flink-java-hashcode-murmur", 5)
