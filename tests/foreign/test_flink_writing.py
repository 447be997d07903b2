"""Canonical savepoints that we write: read again they are what was written, entry for entry the
bytes that Flink wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from flink_streams import State, canonical, savepoint
from flink_written import LONG, TEXT, Kind as Written, pack, top, utf, versioned
from test_flink_key_hash import code_of, murmur_of

import stateformat
from stateformat.backends.foreign.checkpoint import ForeignCheckpoint
from stateformat.backends.foreign.flink.contents import KeyedPart
from stateformat.backends.foreign.flink.keyed import CanonicalReader
from stateformat.backends.foreign.flink.metadata import (
    Inline,
    Metadata,
    Operator,
    OperatorPartitions,
    OperatorStates,
    Subtask,
    encode_metadata,
)
from stateformat.backends.foreign.flink.source import FlinkSource
from stateformat.backends.foreign.flink.writing.savepoint import write_savepoint
from stateformat.backends.foreign.formats import flink
from stateformat.backends.importing import ImportSpec, import_checkpoint
from stateformat.errors import InvalidInput
from stateformat.model import Kind
from stateformat.storage import Storage, folder_of, open_storage

FIXTURES = Path(__file__).parent / "fixtures"
JOBS = ("core", "brief", "keys", "namespaces", "shared", "sink", "sql", "ttl", "wide", "windows", "finished")
SAVED = [
    path.parent
    for path in sorted(FIXTURES.glob("flink-*/*/savepoint"))
    if path.parent.name.partition("-")[0] in JOBS and "changelog" not in path.parent.name
]
NAMES = [f"{path.parent.name.removeprefix('flink-')}/{path.name}" for path in SAVED]


def folder(path: Path) -> Storage:
    found = folder_of(open_storage(str(path)))
    assert found is not None
    return found


def opened(path: Path) -> ForeignCheckpoint:
    """Open the savepoint in a folder, or the newest checkpoint below it."""
    if not (path / "_metadata").exists():
        path = next(path.glob("*/chk-*/_metadata")).parent.parent
    found = flink(folder(path), None)
    assert found is not None
    return found.open()


def rows(checkpoint: ForeignCheckpoint, operator: str, state: str) -> list[str]:
    """Return the rows of a state with their subtasks, in an order of their own."""
    found = []
    for subtask in sorted({part.subtask for part in checkpoint.source.parts}, key=str):
        task = checkpoint.read(operator, state, subtask)
        found += [repr((subtask, row)) for row in task.table().to_pylist()]
    return sorted(found)


@pytest.mark.parametrize("path", SAVED, ids=NAMES)
def test_what_is_written_reads_as_what_it_was_written_from(path: Path, tmp_path: Path) -> None:
    before = opened(path / "savepoint")
    written = write_savepoint(before, folder(tmp_path))
    after = opened(tmp_path)
    assert written.left_out == ()
    assert written.rows > 0
    assert after.graph == before.graph
    # What is written has all its files beside it.
    assert after.notes == tuple(note for note in before.notes if note.kind != "elsewhere")
    assert [(state.operator, state.name, state.mode, state.kind) for state in after.states] == [
        (state.operator, state.name, state.mode, state.kind) for state in before.states
    ]
    for state in before.states:
        assert rows(after, state.operator, state.name) == rows(before, state.operator, state.name)


def entries(source: FlinkSource) -> Iterator[tuple[str, str, int | None, dict[bytes, bytes]]]:
    """The entries of keyed states as their bytes, by operator, state and subtask."""
    for part, content in source.contents.parts.values():
        if not isinstance(content, KeyedPart) or not isinstance(content.reader, CanonicalReader):
            continue
        number = content.reader.numbers.get(part.state)
        found: dict[bytes, bytes] = {}
        for some in content.reader.extents.between(content.first, content.last).ranges():
            stored = content.reader.frames(some).of(-1 if number is None else number)
            keys, values = (strings.to_arrow().to_pylist() for strings in (stored.keys, stored.values))
            # The top bit says that a state ends here.
            found |= {bytes([key[0] & 0x7F]) + key[1:]: value for key, value in zip(keys, values, strict=True)}
        if found:
            yield part.operator, part.state, part.subtask, found


CANONICAL = [
    path for path in SAVED if "canonical" in path.name and path.name.partition("-")[0] not in ("shared", "sink")
]


@pytest.mark.parametrize("path", CANONICAL, ids=[f"{path.parent.name}/{path.name}" for path in CANONICAL])
def test_entries_have_the_bytes_that_flink_wrote(path: Path, tmp_path: Path) -> None:
    source = opened(path / "savepoint")
    write_savepoint(source, folder(tmp_path))
    kinds = {(state.operator, state.name): state.kind for state in source.states}
    wanted, found = ([*entries(one.source)] for one in (source, opened(tmp_path)))
    assert wanted
    assert [one[:3] for one in found] == [one[:3] for one in wanted]
    for (operator, state, _, mine), (*_, theirs) in zip(found, wanted, strict=True):
        if kinds[operator, state] is Kind.MAP:
            # Heaps, and RocksDB up to Flink 1.13, write a null's own bytes behind its mark.
            theirs = {key: b"\1" if value[:1] == b"\1" else value for key, value in theirs.items()}
        assert mine == theirs


UNKNOWN = versioned("example.OwnSerializer$Snapshot", 1, b"of any length")


def lists(version: int, names: list[str], snapshots: list[bytes], broadcasts: list[str]) -> bytes:
    """The header of operator state: of a class that is not known, nothing tells where it ends."""

    def state(name: str, kind: int, roles: dict[str, bytes]) -> bytes:
        described = b"".join(utf(role) + top(snapshot) for role, snapshot in roles.items())
        return utf(name) + pack("iii", kind, 0, len(roles)) + described

    head = pack("ib", 6, 0) if version == 6 else pack("i", 5)
    found = [state(name, 1, {"VALUE_SERIALIZER": snapshot}) for name, snapshot in zip(names, snapshots, strict=True)]
    shared = {"KEY_SERIALIZER": TEXT.snapshot, "VALUE_SERIALIZER": UNKNOWN}
    others = [state(name, 2, shared) for name in broadcasts]
    return head + pack("H", len(found)) + b"".join(found) + pack("H", len(others)) + b"".join(others)


@pytest.mark.parametrize("drop", [(), ("plain",), ("own",), ("own", "behind", "shared")])
@pytest.mark.parametrize("unknown", [0, 1, 2, None])
@pytest.mark.parametrize("version", [5, 6])
def test_operator_state_of_unknown_classes_goes_back_as_its_bytes(version, unknown, drop, tmp_path: Path) -> None:
    names = ["plain", "own", "behind"]
    snapshots = [UNKNOWN if place == unknown else TEXT.snapshot for place in range(3)]
    header = lists(version, names, snapshots, ["shared"])
    content = [TEXT.write("a"), TEXT.write("bc"), TEXT.write("d"), TEXT.write("e"), b"\0\0\0\0"]
    begin = np.cumsum([len(header), *map(len, content)])
    partitions = [
        OperatorPartitions(name, 0, begin[[at, at + 1]] if at == 0 else begin[[at + 1]])
        for at, name in enumerate(names)
    ]
    partitions.append(OperatorPartitions("shared", 2, begin[[4]]))
    stream = Inline("x", header + b"".join(content))
    subtasks = tuple(Subtask(index, managed_operator=OperatorStates(tuple(partitions), stream)) for index in range(2))
    operator = Operator(b"\7" * 16, "operator", "op", 2, 128, None, False, subtasks)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "_metadata").write_bytes(encode_metadata(Metadata(6, 1, (), (operator,), b"")))

    store = stateformat.open(str(tmp_path / "store"))
    spec = ImportSpec(key_hash="keep", drop=[f"op/{name}" for name in drop])
    import_checkpoint(opened(tmp_path / "s"), store, spec)
    written = write_savepoint(store.open(), folder(tmp_path / "back"))
    assert sorted(written.left_out) == sorted(f"op/{name}" for name in drop)
    after = opened(tmp_path / "back").source
    for subtask in after.metadata.operators[0].subtasks:
        handle = subtask.managed_operator
        assert {one.name for one in handle.states} == {*names, "shared"} - {*drop}
        data = after.places.of(handle.stream).read(0, handle.stream.size).tobytes()
        if not drop:
            assert data == stream.data
            assert [one.offsets.tolist() for one in handle.states] == [one.offsets.tolist() for one in partitions]
        for one in handle.states:
            kept = content[[*names, "shared"].index(one.name) + (one.name != "plain")]
            assert data[int(one.offsets[-1]) :].startswith(TEXT.write("bc") if one.name == "plain" else kept)


def test_keyed_state_of_an_unknown_class_goes_back_as_its_bytes(tmp_path: Path) -> None:
    own = Written("own", UNKNOWN, None, lambda value: value)
    entries = [(murmur_of(code_of(key)) % 128, key, None, f"bytes {key}".encode()) for key in range(20)]
    states = [
        State("plain", "value", TEXT, entries=[(group, key, None, str(key)) for group, key, _, _ in entries]),
        State("own", "value", own, entries=entries),
    ]
    stream = canonical(LONG, states, 128, fixed_key=True, compressed=False)
    savepoint(tmp_path / "s", stream, 7, 128)
    store = stateformat.open(str(tmp_path / "store"))
    import_checkpoint(opened(tmp_path / "s"), store, ImportSpec(key_hash="keep"))
    write_savepoint(store.open(), folder(tmp_path / "back"))
    (name,) = [path for path in (tmp_path / "back").iterdir() if path.name.startswith("keyed")]
    header = stream[1][min(range(128), key=lambda group: stream[1][group] or 1 << 30)]
    assert name.read_bytes()[:header] == stream[0][:header]
    assert rows(opened(tmp_path / "back"), "op", "own") == rows(opened(tmp_path / "s"), "op", "own")


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(InvalidInput, match="holds mine; a savepoint goes to an empty folder"):
        write_savepoint(opened(SAVED[0] / "savepoint"), folder(tmp_path))


def test_state_that_cannot_be_read_is_not_left_out_in_silence(tmp_path: Path) -> None:
    source = opened(FIXTURES / "flink-2.3.0" / "brief-hashmap-checkpoint-changelog" / "savepoint")
    with pytest.raises(
        InvalidInput,
        match=r"would lose it: its keyed state lies in a changelog.*`ckpt import SAVEPOINT --key-hash keep --drop",
    ):
        write_savepoint(source, folder(tmp_path))
    assert [*tmp_path.iterdir()] == []


def test_a_checkpoint_of_ours_without_a_template_is_refused(tmp_path: Path) -> None:
    import stateformat
    from stateformat.graph import JobGraph, Operator
    from stateformat.states import value_state

    store = stateformat.open("memory://no-template")
    state = value_state("count", "total", keys={"key": pa.int64()}, values={"value": pa.int64()})
    pending = store.begin(job_id="job", graph=JobGraph((Operator("count", 1, 128),)), states=[state], parent=None)
    with pending.context.subtask("count", 0) as writer:
        writer.write("total", pa.table({"key": [1], "value": [2]}))
    pending.add(writer)
    pending.publish()
    with pytest.raises(InvalidInput, match="has no template of a savepoint"):
        write_savepoint(store.open(), folder(tmp_path))


def test_lists_kept_as_the_bytes_of_a_heap_are_refused() -> None:
    from stateformat.backends.foreign.flink.compound import ListOf
    from stateformat.backends.foreign.flink.lanes import Serializer
    from stateformat.backends.foreign.flink.layouts import Layout, Parts, form_of
    from stateformat.backends.foreign.flink.scalars import Text
    from stateformat.backends.foreign.flink.writing.savepoint import check_bytes

    nested: Serializer = Text()
    for _ in range(80):
        nested = ListOf(nested)
    form, _ = form_of("op", Parts("deep", Layout.LIST, Text(), None, None, nested))
    assert form.raw_value
    with pytest.raises(InvalidInput, match="state 'deep' of operator 'op' was kept as bytes of the hash-map backend"):
        check_bytes("op", form)
    plain, _ = form_of("op", Parts("plain", Layout.LIST, Text(), None, None, Text()))
    check_bytes("op", plain)
