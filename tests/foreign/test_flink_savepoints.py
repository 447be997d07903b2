"""Every fixture of Flink's, against what Flink said of it after it had restored it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flink_said import equal, lines, rows_of, told

from stateformat.backends.foreign.flink import FlinkSource
from stateformat.errors import UnsupportedFormat
from stateformat.model import Mode, State
from stateformat.storage import folder_of, open_storage

FIXTURES = Path(__file__).parent / "fixtures"
SAVED = sorted(path.parent for path in FIXTURES.glob("flink-*/*/expected.jsonl"))
NAMES = [f"{path.parent.name.removeprefix('flink-')}/{path.name}" for path in SAVED]


def opened(path: Path) -> FlinkSource:
    """Open the savepoint, or the checkpoint of the job, below ``savepoint/``."""
    inner = path / "savepoint"
    if not (inner / "_metadata").exists():
        inner = next(inner.glob("*/chk-*/_metadata")).parent.parent
    folder = folder_of(open_storage(str(inner)))
    assert folder is not None
    return FlinkSource(folder)


def expected_of(path: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in lines(path / "expected.jsonl"):
        found.setdefault((row["operator"], row["state"]), []).append(row)
    return found


def differences(source: FlinkSource, state: State, expected: list[dict[str, Any]]) -> list[str]:
    """Say where the rows of a state are not what Flink said."""
    try:
        rows = told(state, list(rows_of(source, state)), expected)
    except UnsupportedFormat as error:
        undescribed = state.name == "base-pojo" and "whose fields the checkpoint does not describe" in str(error)
        return [] if undescribed else [str(error)]
    if state.mode is Mode.UNION:
        # After its restore every subtask has all of it.
        owners = {row["subtask"] for row in expected}
        values = sorted(str(row["value"]) for row in rows)
        theirs = [sorted(str(row["value"]) for row in expected if row["subtask"] == owner) for owner in owners]
        return [] if all(item == values for item in theirs) else ["entries differ"]
    if len(rows) != len(expected):
        return [f"{len(rows)} rows instead of {len(expected)}"]
    opaque = any(note.subject == f"{state.operator}/{state.name}" for note in source.notes if note.kind == "opaque")
    left: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        left.setdefault((row["subtask"], row.get("key_group")), []).append(row)
    found = []
    for theirs in expected:
        candidates = left.get((theirs["subtask"], theirs.get("key_group")), [])
        place = next((i for i, ours in enumerate(candidates) if same(ours, theirs, opaque)), None)
        if place is None:
            found.append(f"{theirs} is not among {candidates[:2]}")
        else:
            candidates.pop(place)
    return found


def same(ours: dict[str, Any], theirs: dict[str, Any], opaque: bool) -> bool:
    names = theirs.keys() - {"operator", "state", "kind"}
    if theirs.get("namespace") == "GlobalWindow":
        names -= {"namespace"}
    if opaque and isinstance(ours["value"], bytes) and "$opaque" not in theirs["value"]:
        # A POJO with a field that only Kryo reads.
        names -= {"value"}
    if opaque and isinstance(ours.get("map_key"), bytes):
        # A row with an array within, which cannot be a key of ours.
        names -= {"map_key"}
    return names <= ours.keys() and all(equal(ours[name], theirs[name]) for name in names)


@pytest.mark.parametrize("path", SAVED, ids=NAMES)
def test_every_state_has_the_entries_that_flink_restored(path: Path):
    source, expected = opened(path), expected_of(path)
    declared = {(state.operator, state.name): state for state in source.record.states}
    refused = {note.subject for note in source.notes if note.kind == "refused"}
    for (operator, name), rows in expected.items():
        state = declared.get((operator, name))
        if state is None:
            assert f"{operator}/{name}" in refused
        else:
            assert differences(source, state, rows) == [], f"{operator}/{name}"
    for key, state in declared.items():
        if key not in expected and state.mode is not Mode.COORDINATOR:
            assert list(rows_of(source, state)) == []


@pytest.mark.parametrize("path", SAVED, ids=NAMES)
def test_operators_are_as_flink_reads_them(path: Path):
    source = opened(path)
    _, *operators = lines(path / "expected_metadata.jsonl")
    graph = source.record.graph
    for said in operators:
        found = graph.operator(said["uid"] or said["operator"])
        assert (found.parallelism, found.max_parallelism) == (said["parallelism"], said["max_parallelism"])
        assert found.name == (said["name"] or "")
        if said["fully_finished"]:
            assert len(found.finished) == found.parallelism
        else:
            assert list(found.finished) == said["finished"]
        coordinator = [part for part in source.parts if (part.operator, part.subtask) == (found.uid, None)]
        values = [batch["value"][0].as_py().hex() for part in coordinator for batch in source.read(part)]
        assert values == ([said["coordinator"]] if said["coordinator"] is not None else [])


@pytest.mark.parametrize("path", SAVED, ids=NAMES)
def test_nothing_is_wrong_with_it(path: Path):
    found = [item for item in opened(path).check("full", lambda done, total: None) if item.severity == "error"]
    assert [item for item in found if "whose fields the checkpoint does not describe" not in item.message] == []
