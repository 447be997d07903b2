"""What of Flink's checkpoints is refused or lost, and the sentences that say it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import stateformat
from stateformat.backends.foreign.flink import FlinkSource
from stateformat.backends.foreign.flink.metadata import (
    Channel,
    Inline,
    KeyGroups,
    Metadata,
    Operator,
    OperatorPartitions,
    OperatorStates,
    Subtask,
    decode_metadata,
    encode_metadata,
)
from stateformat.errors import DamagedCheckpoint, ErrorKind
from stateformat.model import Mode
from stateformat.storage import folder_of, open_storage
from tests.ckpt.ckpt_runs import document, failure

FIXTURES = Path(__file__).parent / "fixtures"
CHANGELOGS = sorted(FIXTURES.glob("flink-*/*-changelog"))
CORE = FIXTURES / "flink-2.3.0" / "core-hashmap-canonical" / "savepoint"


def opened(path: Path) -> FlinkSource:
    folder = folder_of(open_storage(str(path)))
    assert folder is not None
    return FlinkSource(folder)


@pytest.mark.parametrize("path", CHANGELOGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_changelog_is_refused_with_the_advice_to_take_a_savepoint(path: Path):
    source = opened(next((path / "savepoint").glob("*/chk-*/_metadata")).parent)
    refused = [note for note in source.notes if note.kind == "refused"]
    assert refused
    assert all("take a savepoint" in note.message for note in refused)
    # The operators whose keyed state it is have none here.
    named = {note.subject for note in refused}
    assert not [state for state in source.record.states if state.operator in named and state.mode is Mode.KEYED]


def changed(path: Path, tmp_path: Path, **fields: object) -> Path:
    """Copy a savepoint with one subtask of the operator ``by-long`` changed."""
    target = Path(shutil.copytree(path, tmp_path / "place"))
    old = decode_metadata((path / "_metadata").read_bytes())
    operators = []
    for saved in old.operators:
        subtasks = list(saved.subtasks)
        if saved.uid == "by-long":
            first = subtasks[0]
            kept = {"managed_operator": first.managed_operator, "managed_keyed": first.managed_keyed}
            subtasks[0] = Subtask(first.index, **{**kept, **fields})  # type: ignore[arg-type]
        same = (saved.id, saved.name, saved.uid, saved.parallelism, saved.max_parallelism, saved.coordinator)
        operators.append(Operator(*same, saved.fully_finished, tuple(subtasks)))
    new = Metadata(old.version, old.checkpoint_id, (), tuple(operators), old.properties)
    (target / "_metadata").write_bytes(encode_metadata(new))
    return target


def test_records_in_flight_are_left_out_by_their_name_only(tmp_path):
    channel = Channel(1, 0, 17, Inline("x", bytes(17)), (0, 0), np.array([0], np.int64))
    place = changed(CORE, tmp_path, inputs=(channel,))
    source = opened(place)
    (note,) = [note for note in source.notes if note.kind == "refused"]
    assert note.subject == "by-long/in-flight-records"
    assert "17 bytes on 1 channels" in note.message
    assert len([state for state in source.record.states if state.operator == "by-long"]) == 8
    refused_unless_dropped(place, note.subject, tmp_path)


def test_raw_keyed_state_that_is_not_of_flink_is_left_out_by_its_name_only(tmp_path):
    # Key groups of which two have the same offset are nothing that timers could be.
    own = KeyGroups(3, 0, np.array([0, 7, 7, *[-1] * 61], np.int64), Inline("x", b"own bytes"))
    place = changed(CORE, tmp_path, raw_keyed=own)
    (note,) = [note for note in opened(place).notes if note.kind == "refused"]
    assert note.subject == "by-long/raw-keyed-state"
    assert note.message.startswith("9 bytes of raw keyed state of subtask 0, in _metadata")
    refused_unless_dropped(place, note.subject, tmp_path)


def refused_unless_dropped(place: Path, name: str, tmp_path: Path) -> None:
    """Every reader that makes something of a folder says what it cannot read; `--drop` goes on."""
    problems = document("validate", place, "--level", "full", status=1)["problems"]
    (told,) = [problem for problem in problems if problem["kind"] == "unsupported_feature"]
    assert name in told["message"]
    assert f"--drop {name}" in told["advice"]
    assert "damaged" not in told["message"] + told["kind"]
    assert name in str(document("inspect", place)["notes"])
    (warned,) = document("explain-restore", place)["plan"]["warnings"]
    assert (warned["code"], warned["operator"]) == ("state_not_read", "by-long")
    assert name in warned["message"]
    stopped = failure("import", place, "--to", tmp_path / "store", status=2)
    assert f"--drop {name}" in stopped["message"]
    proof = document("import", place, "--drop", name, "--to", tmp_path / "store", "--prove")["proof"]
    assert proof["same"]
    assert proof["left_out"] == [name]


def test_raw_operator_state_stays_as_bytes_and_in_its_entries(tmp_path):
    stream = Inline("x", b"first, second, third")
    raw = OperatorStates((OperatorPartitions("own", 0, np.array([0, 7, 15], np.int64)),), stream)
    place = changed(CORE, tmp_path, raw_operator=raw)
    proof = document("import", place, "--to", tmp_path / "store", "--prove")["proof"]
    assert proof["same"]
    assert not proof["left_out"]
    found = stateformat.open(str(tmp_path / "store")).open().read("by-long", "raw-operator-state/own").table()
    assert found["value"].to_pylist() == [b"first, ", b"second, ", b"third"]


def test_a_subtask_that_reported_nothing_has_no_rows(tmp_path):
    source = opened(changed(CORE, tmp_path, managed_keyed=None))
    parts = [part for part in source.parts if (part.operator, part.subtask) == ("by-long", 0)]
    assert {part.rows for part in parts} == {0}
    assert {(part.first_group, part.last_group) for part in parts} == {(0, 63)}
    assert not [batch for part in parts for batch in source.read(part)]


def test_a_handle_of_other_key_groups_than_the_subtask_owns_is_damage(tmp_path):
    operators = decode_metadata((CORE / "_metadata").read_bytes()).operators
    other = next(operator.subtasks[1].managed_keyed for operator in operators if operator.uid == "by-long")
    source = opened(changed(CORE, tmp_path, managed_keyed=other))
    with pytest.raises(DamagedCheckpoint, match="owns key groups 0 to 63, and its handle has 64 to 127") as caught:
        _ = source.record
    assert caught.value.kind is ErrorKind.DAMAGED_RECORD
    found = list(source.check("quick", lambda done, total: None))
    assert [item.kind for item in found if item.severity == "error"] == [ErrorKind.DAMAGED_RECORD]
