"""Savepoints of Flink as they are read, and what is refused in them."""

from __future__ import annotations

import pickle
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from flink_said import equal, lines, rows_of, told
from hypothesis import given, settings, strategies as st

import stateformat
from stateformat.backends.foreign.flink import (
    FLINK_KEY_HASH,
    USER_KEY_HASH,
    FlinkSource,
    check_source,
    recognises,
    sources,
)
from stateformat.backends.foreign.flink.key_hash import is_hashable, java_hash_codes, murmur
from stateformat.backends.foreign.flink.metadata import (
    Channel,
    File,
    Inline,
    KeyGroups,
    Metadata,
    Operator,
    OperatorPartitions,
    OperatorStates,
    Relative,
    Stream,
    Subtask,
    decode_metadata,
    encode_metadata,
)
from stateformat.backends.foreign.flink.source import checkpoint_ids
from stateformat.documents import checkpoint_document
from stateformat.errors import CheckpointError, DamagedCheckpoint, ErrorKind, InvalidInput, NotFound, UnsupportedFormat
from stateformat.findings import Finding
from stateformat.keys import hash_keys, key_groups
from stateformat.model import Kind, Mode, State
from stateformat.schema import segment_schema
from stateformat.storage import Storage, open_storage
from tests.ckpt.ckpt_runs import document, failure

FIXTURES = Path(__file__).parent / "fixtures" / "flink-2.3.0"
CANONICAL, HEAP, ROCKS = "core-hashmap-canonical", "brief-hashmap-native", "brief-rocksdb-native"
MAPS = {CANONICAL: ("by-long", "words"), HEAP: ("brief", "texts"), ROCKS: ("brief", "texts")}
"""A state of each, with some rows in every subtask or in one."""
EVERY = pytest.mark.parametrize("name", [CANONICAL, HEAP, ROCKS])


def folder_at(path: Path) -> Storage:
    folder = open_storage(str(path)).folder()
    assert folder is not None
    return folder


def opened(path: Path) -> FlinkSource:
    return FlinkSource(folder_at(path))


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(FIXTURES / name / "savepoint", tmp_path / "place" / name))

    return copy


def table_of(source: FlinkSource, operator: str, state: str, *groups: int) -> pa.Table:
    parts = [part for part in source.parts if (part.operator, part.state) == (operator, state)]
    schema = segment_schema(source.record.state(operator, state))
    return pa.Table.from_batches([batch for part in parts for batch in source.read(part, *groups)], schema)


def problems_of(path: Path, level: str = "full") -> list[Finding]:
    return list(check_source(opened(path), level, lambda done, total: None))  # type: ignore[arg-type]


@EVERY
def test_ranges_of_key_groups_are_cut_out_of_the_whole(name):
    source = opened(FIXTURES / name / "savepoint")
    for state in source.record.states:
        if state.mode is not Mode.KEYED:
            continue
        whole = table_of(source, state.operator, state.name)
        groups = whole["_key_group"].to_numpy()
        for part in source.parts:
            if (part.operator, part.state) == (state.operator, state.name):
                rows = source.group_rows(part)
                assert isinstance(rows, np.ndarray)
                assert part.first_group is not None
                span = np.arange(part.first_group, part.first_group + len(rows))
                assert rows.tolist() == [int((groups == group).sum()) for group in span]
        for first, last in ((0, 127), (20, 75), (64, 64), (90, 127)):
            chosen = whole.filter(pa.array((groups >= first) & (groups <= last)))
            found = [
                batch
                for part in source.parts
                if (part.operator, part.state) == (state.operator, state.name)
                for batch in source.read(part, first, last)
            ]
            assert pa.Table.from_batches(found, whole.schema).equals(chosen)


@EVERY
def test_a_source_that_was_pickled_reads_the_same(name):
    source = opened(FIXTURES / name / "savepoint")
    again = pickle.loads(pickle.dumps(source))
    assert again.record == source.record
    assert again.parts == source.parts
    assert table_of(again, *MAPS[name]).equals(table_of(source, *MAPS[name]))


@EVERY
def test_nothing_is_wrong_with_what_flink_wrote(name):
    assert problems_of(FIXTURES / name / "savepoint") == []


@EVERY
def test_a_file_that_is_missing_cut_or_left_over_is_found(name, copied):
    path = copied(name)
    victim = max((item for item in path.iterdir() if item.name != "_metadata"), key=lambda item: item.stat().st_size)
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-1])
    assert [(item.kind, item.path) for item in problems_of(path, "quick")] == [
        (ErrorKind.OBJECT_SIZE_DIFFERS, victim.name)
    ]
    victim.unlink()
    found = problems_of(path)
    assert (ErrorKind.OBJECT_MISSING, victim.name) in [(item.kind, item.path) for item in found]
    assert {item.path for item in found} <= {victim.name, ""}
    victim.write_bytes(whole)
    (path / "0d0b").write_bytes(b"left")
    assert [(item.severity, item.path) for item in problems_of(path)] == [("warning", "0d0b")]


def replaced(path: Path, change: Callable[[int, Stream], Stream]) -> Metadata:
    """Return the metadata of a savepoint with other streams of keyed state, by subtask."""

    def subtask(found: Subtask) -> Subtask:
        handle = found.managed_keyed
        if not isinstance(handle, KeyGroups) or handle.stream is None:
            return found
        moved = KeyGroups(handle.code, handle.first_group, handle.offsets, change(found.index, handle.stream))
        return Subtask(found.index, False, found.managed_operator, None, moved)

    def operator(found: Operator) -> Operator:
        fields = (found.id, found.name, found.uid, found.parallelism, found.max_parallelism, found.coordinator)
        return Operator(*fields, found.fully_finished, tuple(map(subtask, found.subtasks)))

    old = decode_metadata((path / "_metadata").read_bytes())
    return Metadata(old.version, old.checkpoint_id, (), tuple(map(operator, old.operators)), old.properties)


def rewrite(path: Path, change: Callable[[int, Stream], Stream]) -> None:
    (path / "_metadata").write_bytes(encode_metadata(replaced(path, change)))


@pytest.mark.parametrize("name", [CANONICAL, HEAP])
def test_files_that_changed_places_are_an_error(name, copied):
    path = copied(name)
    streams: dict[int, Relative] = {}
    for operator in decode_metadata((path / "_metadata").read_bytes()).operators:
        for subtask in operator.subtasks:
            handle = subtask.managed_keyed
            if operator.uid == MAPS[name][0] and isinstance(handle, KeyGroups) and isinstance(handle.stream, Relative):
                streams[subtask.index] = handle.stream
    first, second = (path / streams[index].path for index in (0, 1))
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    found = problems_of(path)
    assert found
    assert {item.severity for item in found} == {"error"}
    assert {first.name, second.name} == {item.path for item in found}


def test_a_key_in_another_key_group_than_its_hash_says_is_an_error(copied):
    path = copied(CANONICAL)
    source = opened(path)
    part = next(part for part in source.parts if (part.operator, part.state, part.subtask) == ("by-long", "count", 0))
    assert part.path is not None
    file = path / part.path
    table = pa.Table.from_batches(source.read(part))
    group, key = table["_key_group"][0].as_py(), table["key"][0].as_py()
    # The key's last byte, at its first entry: still in the key group by its number, not by hash.
    plain = file.read_bytes()
    entry = bytes([group]) + key.to_bytes(8, "big", signed=True)
    marked = bytes([group | 0x80]) + key.to_bytes(8, "big", signed=True)
    at = max(plain.find(entry), plain.find(marked))
    file.write_bytes(plain[: at + 8] + bytes([plain[at + 8] ^ 1]) + plain[at + 9 :])
    found = [item for item in problems_of(path) if "hashes say" in item.message]
    assert [(item.operator, item.subtask, item.severity) for item in found] == [("by-long", 0, "error")]
    assert f"in {group} instead of" in found[0].message


def absolute(root: str) -> Callable[[int, Stream], Stream]:
    def change(_: int, stream: Stream) -> Stream:
        assert isinstance(stream, Relative)
        return File(f"{root}/{stream.path}", stream.size)

    return change


def test_absolute_paths_are_read_within_the_folder(copied):
    path = copied(CANONICAL)
    expected = table_of(opened(path), "by-long", "words")
    rewrite(path, absolute(f"file:{path}"))
    source = opened(path)
    assert table_of(source, "by-long", "words").equals(expected)
    assert source.notes == ()


def test_a_checkpoint_that_was_moved_is_found_by_the_last_parts_of_its_paths(copied):
    path = copied(CANONICAL)
    expected = table_of(opened(path), "by-long", "words")
    rewrite(path, absolute("hdfs://old/flink/job"))
    source = opened(path)
    assert table_of(source, "by-long", "words").equals(expected)
    assert [(note.kind, note.subject) for note in source.notes] == [("elsewhere", ".")]
    assert "hdfs://old/flink/job" in source.notes[0].message


def test_files_outside_of_the_folder_are_read_only_where_that_is_allowed(copied, tmp_path):
    path = copied(CANONICAL)
    expected = table_of(opened(path), "by-long", "words")
    other = tmp_path / "other"
    other.mkdir()

    def moved(index: int, stream: Stream) -> Stream:
        assert isinstance(stream, Relative)
        (path / stream.path).rename(other / stream.path)
        return absolute(f"file:{other}")(index, stream)

    rewrite(path, moved)
    with pytest.raises(InvalidInput, match="--allow-outside"):
        _ = opened(path).record
    assert {item.kind for item in problems_of(path, "quick")} >= {ErrorKind.INVALID_PATH}
    allowed = FlinkSource(folder_at(path), None, lambda url: folder_at(Path(url)))
    assert table_of(allowed, "by-long", "words").equals(expected)


def test_the_folder_of_one_checkpoint_lacks_what_its_job_shares(tmp_path):
    job = next((FIXTURES / "brief-rocksdb-checkpoint" / "savepoint").glob("*/shared")).parent
    whole = opened(job)
    # Its paths are those of the place where it was made.
    assert {(note.kind, note.subject) for note in whole.notes} == {("elsewhere", "shared")}
    assert table_of(whole, "brief", "texts").num_rows
    chk = Path(shutil.copytree(job / whole.home, tmp_path / "chk-12"))
    with pytest.raises(InvalidInput, match="Give the folder that has both"):
        _ = opened(chk).record
    (found,) = problems_of(chk)
    assert (found.kind, found.severity) == (ErrorKind.INVALID_PATH, "error")
    assert "files of file:/" in found.message
    assert "--allow-outside" in found.advice
    shared = folder_at(job / "shared")
    allowed = FlinkSource(folder_at(chk), None, lambda url: shared)
    assert table_of(allowed, "brief", "texts").equals(table_of(whole, "brief", "texts"))


@pytest.mark.parametrize("name", ["../secret", "a/../../b", "/etc/passwd", "x/./y"])
def test_a_path_that_leaves_the_folder_is_damage(name, copied):
    path = copied(CANONICAL)

    def change(_: int, stream: Stream) -> Stream:
        return Relative(name, stream.size)

    rewrite(path, change)
    with pytest.raises(DamagedCheckpoint) as caught:
        _ = opened(path).record
    assert caught.value.kind is ErrorKind.INVALID_PATH


def test_checkpoints_of_a_job_are_opened_newest_first(copied, tmp_path):
    job = tmp_path / "job"
    for number, name in ((2, CANONICAL), (10, HEAP)):
        shutil.copytree(copied(name), job / f"chk-{number}")
    (job / "chk-3").mkdir()
    folder = folder_at(job)
    assert recognises(folder)
    assert [getattr(source, "home", "") for source in sources(folder).sources] == ["chk-10/", "chk-2/"]
    assert FlinkSource(folder).home == "chk-10/"
    older = FlinkSource(folder, 2)
    expected = table_of(opened(FIXTURES / CANONICAL / "savepoint"), "by-long", "count")
    assert table_of(older, "by-long", "count").equals(expected)
    assert list(check_source(older, "full", lambda done, total: None)) == []
    with pytest.raises(NotFound, match="10, 2"):
        FlinkSource(folder, 3)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b"\x49\x60\x67", "4 bytes should follow and 3 are left"),
        (b"text, not Flink's", "it is another file"),
    ],
)
@pytest.mark.parametrize("place", ["", "chk-7/"])
def test_metadata_that_is_no_metadata_of_flinks_is_said_so_and_not_called_absent(place, content, said, tmp_path):
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "_metadata").write_bytes(content)
    for address in (tmp_path, tmp_path / place / "_metadata"):
        assert said in failure("inspect", address, status=1)["message"]
        (problem,) = document("validate", address, status=1)["problems"]
        assert said in problem["message"]


def test_the_metadata_of_a_parquet_data_set_is_none_of_flinks(tmp_path):
    (tmp_path / "_metadata").write_bytes(b"PAR1" * 8)
    assert not recognises(folder_at(tmp_path))
    with pytest.raises(NotFound):
        opened(tmp_path)


def test_a_damaged_newest_checkpoint_is_not_passed_over_in_silence(copied, tmp_path):
    (tmp_path / "job" / "chk-10").mkdir(parents=True)
    shutil.copytree(copied(CANONICAL), tmp_path / "job" / "chk-2")
    (tmp_path / "job" / "chk-10" / "_metadata").write_bytes(b"")
    folder = folder_at(tmp_path / "job")
    assert checkpoint_ids(folder) == [10, 2]
    found = sources(folder)
    assert [source.home for source in found.sources] == ["chk-2/"]
    assert "it is empty" in str(found.damaged[10])


def test_the_path_of_the_file_metadata_stands_for_its_folder(copied):
    path = copied(CANONICAL)
    whole = document("inspect", path)
    assert document("inspect", path / "_metadata") == whole
    assert document("inspect", f"file://{path}/_metadata") == whole
    assert document("inspect", f" {path}/_metadata/ ") == whole, "as Flink takes it"
    spaced = path.with_name("a savepoint")
    path.rename(spaced)
    assert document("inspect", f"{spaced.as_uri()}/_metadata")["checkpoint_id"] == whole["checkpoint_id"]
    spaced.rename(path)
    assert stateformat.open(path / "_metadata").open().id == stateformat.open(path).open().id


def test_a_file_of_another_size_than_the_metadata_says_is_never_called_left_over(copied):
    path = copied(CANONICAL)
    rewrite(path, absolute("hdfs://old/flink/job"))
    victim = max((item for item in path.iterdir() if item.name != "_metadata"), key=lambda item: item.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])
    assert [(item.kind, item.path) for item in problems_of(path, "quick")] == [
        (ErrorKind.OBJECT_SIZE_DIFFERS, victim.name)
    ]


@EVERY
def test_flipped_bits_and_cuts_end_in_named_errors_or_do_no_harm(name, copied):
    path = copied(name)
    draw = np.random.default_rng(5)
    files = [item for item in sorted(path.iterdir()) if item.stat().st_size < 30_000]
    for turn in range(40):
        file = files[int(draw.integers(len(files)))]
        whole = file.read_bytes()
        place = int(draw.integers(len(whole)))
        flipped = whole[:place] + bytes([whole[place] ^ 1 << int(draw.integers(8))]) + whole[place + 1 :]
        file.write_bytes(whole[:place] if turn % 4 == 0 else flipped)
        # The metadata ends with properties that only Java reads: their end is the file's.
        harmed = turn % 4 == 0 and file.name != "_metadata"
        try:
            source = opened(path)
            for part in source.parts:
                for batch in source.read(part):
                    batch.validate(full=True)
        except CheckpointError:
            harmed = True
        # One whose magic is broken is no checkpoint at all.
        if recognises(folder_at(path)):
            assert problems_of(path) or not harmed
        file.write_bytes(whole)


# ---- every fixture of Flink's, against what Flink said of it after it had restored it

FIXTURES_OF_FLINK = Path(__file__).parent / "fixtures"
SAVED = sorted(path.parent for path in FIXTURES_OF_FLINK.glob("flink-*/*/expected.jsonl"))
NAMES = [f"{path.parent.name.removeprefix('flink-')}/{path.name}" for path in SAVED]


def opened_fixture(path: Path) -> FlinkSource:
    """Open the savepoint, or the checkpoint of the job, below ``savepoint/``."""
    inner = path / "savepoint"
    if not (inner / "_metadata").exists():
        inner = next(inner.glob("*/chk-*/_metadata")).parent.parent
    folder = open_storage(str(inner)).folder()
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
    if theirs["state"] == "everything":
        # Values of many classes of Kryo's: test_flink_kryo.py has them by hand.
        names -= {"value"}
    if opaque and isinstance(ours["value"], bytes) and "$opaque" not in theirs["value"]:
        # A POJO with a field that only Kryo reads.
        names -= {"value"}
    if opaque and isinstance(ours.get("map_key"), bytes):
        # A row with an array within, which cannot be a key of ours.
        names -= {"map_key"}
    return names <= ours.keys() and all(equal(ours[name], theirs[name]) for name in names)


@pytest.mark.parametrize("path", SAVED, ids=NAMES)
def test_every_state_has_the_entries_that_flink_restored(path: Path):
    source, expected = opened_fixture(path), expected_of(path)
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
    source = opened_fixture(path)
    whole, *operators = lines(path / "expected_metadata.jsonl")
    graph = source.record.graph
    assert source.record.checkpoint_id == whole["checkpoint_id"]
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
    found = [
        item
        for item in check_source(opened_fixture(path), "full", lambda done, total: None)
        if item.severity == "error"
    ]
    told = ("whose fields the checkpoint does not describe", "fixtures.Generic$Tag")
    assert [item for item in found if not any(text in item.message for text in told)] == []


# ---- what of Flink's checkpoints is refused or lost, and the sentences that say it

CHANGELOGS = sorted(FIXTURES_OF_FLINK.glob("flink-*/*-changelog"))
CORE = FIXTURES_OF_FLINK / "flink-2.3.0" / "core-hashmap-canonical" / "savepoint"


def opened_bytes(path: Path) -> FlinkSource:
    folder = open_storage(str(path)).folder()
    assert folder is not None
    return FlinkSource(folder)


@pytest.mark.parametrize("path", CHANGELOGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_changelog_is_refused_with_the_advice_to_take_a_savepoint(path: Path):
    source = opened_bytes(next((path / "savepoint").glob("*/chk-*/_metadata")).parent)
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
    source = opened_bytes(place)
    (note,) = [note for note in source.notes if note.kind == "refused"]
    assert note.subject == "by-long/in-flight-records"
    assert "17 bytes on 1 channels" in note.message
    assert len([state for state in source.record.states if state.operator == "by-long"]) == 8
    refused_unless_dropped(place, note.subject, tmp_path)


def test_raw_keyed_state_that_is_not_of_flink_is_left_out_by_its_name_only(tmp_path):
    # Key groups of which two have the same offset are nothing that timers could be.
    own = KeyGroups(3, 0, np.array([0, 7, 7, *[-1] * 61], np.int64), Inline("x", b"own bytes"))
    place = changed(CORE, tmp_path, raw_keyed=own)
    (note,) = [note for note in opened_bytes(place).notes if note.kind == "refused"]
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
    source = opened_bytes(changed(CORE, tmp_path, managed_keyed=None))
    parts = [part for part in source.parts if (part.operator, part.subtask) == ("by-long", 0)]
    assert {part.rows for part in parts} == {0}
    assert {(part.first_group, part.last_group) for part in parts} == {(0, 63)}
    assert not [batch for part in parts for batch in source.read(part)]


def test_a_handle_of_other_key_groups_than_the_subtask_owns_is_damage(tmp_path):
    operators = decode_metadata((CORE / "_metadata").read_bytes()).operators
    other = next(operator.subtasks[1].managed_keyed for operator in operators if operator.uid == "by-long")
    source = opened_bytes(changed(CORE, tmp_path, managed_keyed=other))
    with pytest.raises(DamagedCheckpoint, match="owns key groups 0 to 63, and its handle has 64 to 127") as caught:
        _ = source.record
    assert caught.value.kind is ErrorKind.DAMAGED_RECORD
    found = list(check_source(source, "quick", lambda done, total: None))
    assert [item.kind for item in found if item.severity == "error"] == [ErrorKind.DAMAGED_RECORD]


# ---- key groups of Flink's, against Java's definition of hash codes and what Flink has stored


def signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def code_of(value: object) -> int:
    """Java's ``hashCode``, one value at a time."""
    if value is None:
        return 0
    if isinstance(value, bool):
        return 1231 if value else 1237
    if isinstance(value, str):
        code = 0
        for unit in np.frombuffer(value.encode("utf-16-le"), "<u2").tolist():
            code = (31 * code + unit) & 0xFFFFFFFF
        return signed(code)
    if isinstance(value, dict):
        code = 0
        for item in value.values():
            code = (31 * code + code_of(item)) & 0xFFFFFFFF
        return signed(code)
    (bits,) = (
        struct.unpack(">Q", struct.pack(">d", value)) if isinstance(value, float) else (int(value) & (1 << 64) - 1,)
    )  # type: ignore[call-overload]
    return signed(bits ^ bits >> 32)


def murmur_of(code: int) -> int:
    mask = 0xFFFFFFFF
    k = code * 0xCC9E2D51 & mask
    k = ((k << 15 | k >> 17) & mask) * 0x1B873593 & mask
    h = (k << 13 | k >> 19) & mask
    h = (h * 5 + 0xE6546B64) & mask ^ 4
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    h = signed(h ^ h >> 16)
    return 0 if h == -(1 << 31) else abs(h)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LONGS = st.integers(-(1 << 63), (1 << 63) - 1)


@settings(max_examples=80, deadline=None)
@given(values=st.lists(st.one_of(st.none(), TEXTS), max_size=30), skipped=st.integers(0, 3))
def test_texts_are_polynomials_of_their_utf_16_units(values, skipped):
    found = java_hash_codes(pa.array(values, pa.string()).slice(skipped))
    assert found.tolist() == [code_of(value) for value in values[skipped:]]


@settings(max_examples=40, deadline=None)
@given(values=st.lists(LONGS, max_size=30))
def test_longs_fold_their_halves(values):
    assert java_hash_codes(pa.array(values, pa.int64())).tolist() == [code_of(value) for value in values]


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(allow_nan=False), max_size=30))
def test_doubles_fold_their_bits(values):
    assert java_hash_codes(pa.array(values, pa.float64())).tolist() == [code_of(value) for value in values]


def test_every_nan_is_the_same_and_negative_zero_is_another_to_java():
    nans = np.array([0x7FF8 << 48, 0xFFF8 << 48, (0x7FF8 << 48) + 5], np.uint64).view(np.float64)
    assert set(java_hash_codes(pa.array(nans)).tolist()) == {signed(0x7FF80000)}
    zeros = java_hash_codes(pa.array([0.0, -0.0]))
    assert zeros.tolist() == [0, signed(0x80000000)]
    # Our hashes never tell them apart.
    assert len(set(hash_keys([pa.array([0.0, -0.0])], FLINK_KEY_HASH).tolist())) == 1


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([True, False, None], pa.bool_()),
        ([{"f0": 1, "f1": "a"}, {"f0": None, "f1": ""}], pa.struct([("f0", pa.int64()), ("f1", pa.string())])),
        ([{"f0": {"f0": "x"}, "f1": 2}], pa.struct([("f0", pa.struct([("f0", pa.string())])), ("f1", pa.int32())])),
    ],
)
def test_booleans_and_tuples(values, dtype):
    assert java_hash_codes(pa.array(values, dtype)).tolist() == [code_of(value) for value in values]


@pytest.mark.parametrize("dtype", [pa.int8(), pa.int16(), pa.int32()])
def test_small_numbers_are_their_own_codes(dtype):
    assert java_hash_codes(pa.array([-5, 0, 100], dtype)).tolist() == [-5, 0, 100]


@settings(max_examples=50, deadline=None)
@given(codes=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=30))
def test_the_murmur_is_never_negative(codes):
    assert murmur(np.array(codes, np.int32)).tolist() == [murmur_of(code) for code in codes]


def test_a_long_text_in_many_blocks(monkeypatch):
    values = ["x" * 1000 + str(number) for number in range(50)]
    whole = java_hash_codes(pa.array(values))
    monkeypatch.setattr("stateformat.backends.foreign.flink.key_hash._BLOCK", 777)
    assert java_hash_codes(pa.array(values)).tolist() == whole.tolist() == [code_of(value) for value in values]


def test_key_groups_are_those_that_flink_computed():
    # Of the fixture core-hashmap-canonical: keys with the key groups that Flink gave them.
    longs, texts = pa.array([-9, -7, 12000000084, 1000000007]), pa.array(["nul \0 inside", "key-10", "key-7"])
    assert key_groups(hash_keys([longs], FLINK_KEY_HASH), 128).tolist() == [15, 18, 23, 96]
    assert key_groups(hash_keys([texts], FLINK_KEY_HASH), 128).tolist() == [40, 97, 74]


def test_what_only_java_knows_is_refused_by_name():
    assert not is_hashable(pa.binary())
    assert not is_hashable(pa.struct([("at", pa.date32())]))
    with pytest.raises(InvalidInput, match="rehash") as caught:
        hash_keys([pa.array([b"x"])], FLINK_KEY_HASH)
    assert caught.value.kind is ErrorKind.UNSUPPORTED_KEY_TYPE
    with pytest.raises(InvalidInput, match="unknown key hash 'flink-user-hashcode'"):
        hash_keys([pa.array([1])], USER_KEY_HASH)


# ---- the example that goes on from a Flink savepoint: the totals are Flink's, and what was added

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


def test_timers_that_the_metadata_does_not_count_are_not_told_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stateformat.backends.foreign.checkpoint.COUNTED_BYTES", 0)
    opened = stateformat.open(str(FIXTURES / "brief-rocksdb-native" / "savepoint")).open()
    assert any(state.kind is Kind.TIMERS for state in opened.states)
    assert checkpoint_document(opened)["holds"]["timers"] is None
    assert "rows not counted" in repr(opened.record)
