"""Where Flink's files may lie, what is found wrong with them, and reading by key groups."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import stateformat
from stateformat.backends.foreign.flink import FlinkSource, recognises, sources
from stateformat.backends.foreign.flink.metadata import (
    File,
    KeyGroups,
    Metadata,
    Operator,
    Relative,
    Stream,
    Subtask,
    decode_metadata,
    encode_metadata,
)
from stateformat.backends.foreign.flink.source import checkpoint_ids
from stateformat.errors import CheckpointError, DamagedCheckpoint, ErrorKind, InvalidInput, NotFound
from stateformat.findings import Finding
from stateformat.model import Mode
from stateformat.schema import segment_schema
from stateformat.storage import Storage, folder_of, open_storage
from tests.ckpt.ckpt_runs import document, failure

FIXTURES = Path(__file__).parent / "fixtures" / "flink-2.3.0"
CANONICAL, HEAP, ROCKS = "core-hashmap-canonical", "brief-hashmap-native", "brief-rocksdb-native"
MAPS = {CANONICAL: ("by-long", "words"), HEAP: ("brief", "texts"), ROCKS: ("brief", "texts")}
"""A state of each, with some rows in every subtask or in one."""
EVERY = pytest.mark.parametrize("name", [CANONICAL, HEAP, ROCKS])


def folder_at(path: Path) -> Storage:
    folder = folder_of(open_storage(str(path)))
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
    return list(opened(path).check(level, lambda done, total: None))  # type: ignore[arg-type]


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
    assert list(older.check("full", lambda done, total: None)) == []
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
