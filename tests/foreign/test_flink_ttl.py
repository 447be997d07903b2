"""Flink's TTL: the times become ours, with a ttl where the import names one, and go back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends.foreign.flink.writing.savepoint import write_savepoint
from stateformat.backends.importing import ImportSpec, import_checkpoint, prove_import
from stateformat.backends.rewrite import ThreadEngine
from stateformat.states import Changes, evolve_state
from stateformat.ttl import TTL_COLUMN, Ttl
from tests.ckpt.ckpt_runs import document, run
from tests.foreign.test_flink_writing import folder, opened

FIXTURES = Path(__file__).parent / "fixtures"
SAVED = FIXTURES / "flink-2.3.0" / "ttl-hashmap-canonical"
YEARS = 365 * 86_400_000_000


def kept(path: Path) -> dict[str, list[int]]:
    """The last accesses of each state with a TTL, in milliseconds, as Flink's own program read
    them.
    """
    found: dict[str, list[int]] = {}
    for line in (path / "expected.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "ttl_last_access" in entry:
            found.setdefault(f"{entry['operator']}/{entry['state']}", []).append(entry["ttl_last_access"])
    return {state: sorted(times) for state, times in found.items()}


def times_of(checkpoint: sf.Checkpoint, name: str) -> list[int]:
    """The last accesses of every row, in microseconds."""
    uid, _, state = name.partition("/")
    found = checkpoint.with_expired().state(uid, state).table()[TTL_COLUMN]
    return sorted(found.cast(pa.int64()).to_pylist())


@pytest.mark.parametrize("version", ["flink-1.13.6", "flink-1.20.5", "flink-2.3.0"])
def test_the_times_of_every_kind_of_state_are_a_column_of_ours(version: str) -> None:
    path = FIXTURES / version / SAVED.name
    checkpoint = opened(path / "savepoint")
    known = kept(path)
    assert known
    for name, milliseconds in known.items():
        uid, _, state = name.partition("/")
        declared = checkpoint.record.state(uid, state)
        last = declared.current.fields[-1]
        assert (last.name, last.type, last.nullable) == (TTL_COLUMN, "timestamp_us", False)
        assert declared.ttl is None
        assert times_of(checkpoint, name) == [1000 * one for one in milliseconds]


def imported(tmp_path: Path, ttl: Mapping[str, Ttl]) -> sf.Checkpoint:
    checkpoint = opened(SAVED / "savepoint")
    spec = ImportSpec(key_hash="keep", ttl=ttl)
    done = import_checkpoint(checkpoint, sf.open(str(tmp_path / "store")), spec, engine=ThreadEngine())
    result = done.rewritten.permit.checkpoint()
    assert prove_import(checkpoint, result, spec).same
    return result


@pytest.mark.parametrize(("duration", "hidden"), [(YEARS * 100, False), (1000, True)])
def test_an_import_says_how_long_rows_live_and_they_go_back_all(tmp_path: Path, duration: int, hidden: bool) -> None:
    known = kept(SAVED)
    ttl = Ttl(duration, "processing_time")
    result = imported(tmp_path, dict.fromkeys(known, ttl))
    for name, milliseconds in known.items():
        uid, _, state = name.partition("/")
        assert result.record.state(uid, state).ttl == ttl
        assert times_of(result, name) == [1000 * one for one in milliseconds]
        assert (result.state(uid, state).table().num_rows == 0) is hidden
    (tmp_path / "back").mkdir()
    write_savepoint(result, folder(tmp_path / "back"))
    back = opened(tmp_path / "back")
    for name, milliseconds in known.items():
        assert times_of(back, name) == [1000 * one for one in milliseconds]


def test_a_program_goes_on_with_the_times_though_the_import_named_no_ttl(tmp_path: Path) -> None:
    result = imported(tmp_path, {})
    for name in kept(SAVED):
        uid, _, state = name.partition("/")
        saved = result.record.state(uid, state)
        assert saved.ttl is None
        declared = replace(saved, ttl=Ttl(YEARS, "processing_time"))
        found = evolve_state(saved, declared, Changes(), ttl_start_us=5).state
        assert (found.ttl, found.schemas) == (declared.ttl, saved.schemas)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("numbers/SourceReaderState", "does not say when its rows were accessed"),
        ("ttl/nothing", "no state 'ttl/nothing' whose rows could expire"),
    ],
)
def test_a_ttl_of_a_state_without_times_is_refused(tmp_path: Path, name: str, message: str) -> None:
    checkpoint = opened(SAVED / "savepoint")
    with pytest.raises(sf.InvalidInput, match=message):
        import_checkpoint(checkpoint, sf.open(str(tmp_path)), ImportSpec(ttl={name: Ttl(1)}), engine=ThreadEngine())


def test_the_command_takes_lengths_of_time(tmp_path: Path) -> None:
    name = next(iter(kept(SAVED)))
    arguments: list[Any] = [
        "import",
        SAVED / "savepoint",
        "--to",
        tmp_path / "store",
        "--ttl",
        f"{name}=90s",
        "--prove",
    ]
    found = run(*arguments)
    assert found.status == 0, found
    uid, _, state = name.partition("/")
    (entry,) = document("inspect", tmp_path / "store", "--operator", uid, "--state", state)["states"]
    assert (entry["ttl"]["duration_us"], entry["ttl"]["clock"]) == (90_000_000, "processing_time")
    assert entry["contents"]["expired"] == entry["contents"]["rows"] > 0
    assert run(*arguments[:4], "--ttl", f"{name}=soon").status == 2
