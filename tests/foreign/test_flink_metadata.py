"""Flink's ``_metadata``: what stands in it, and what becomes of every cut and flipped bit."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from stateformat.backends.foreign.flink.headers import read_keyed_header
from stateformat.backends.foreign.flink.metadata import (
    CANONICAL,
    Changelog,
    EmptySegment,
    File,
    Incremental,
    Inline,
    KeyGroups,
    Relative,
    Segment,
    decode_metadata,
    encode_metadata,
)
from stateformat.backends.foreign.source import FLINK_VERSIONS, SPARK_VERSIONS
from stateformat.errors import CheckpointError, DamagedCheckpoint, ErrorKind, UnsupportedFormat

# Written from the table of the layout, not from the decoder: plain concatenation.
b1, b2, b4, b8 = (lambda value, size=size: value.to_bytes(size, "big", signed=value < 0) for size in (1, 2, 4, 8))


def utf(text: str) -> bytes:
    return b2(len(text)) + text.encode("ascii")


def blob(data: bytes) -> bytes:
    return b4(len(data)) + data


NULL = b"\0"
INLINE = b1(1) + utf("inline-1") + blob(b"bytes")
FILE = b1(2) + b8(1000) + utf("s3://bucket/job/chk-7/a")
RELATIVE = b1(6) + utf("b-file") + b8(2000)
SEGMENT = b1(15) + b8(10) + b8(20) + b4(1) + utf("file:/tmp/merged") + utf("logical")
EMPTY = b1(16)


def key_groups(code: int, stream: bytes, offsets: list[int], first: int = 0) -> bytes:
    ending = utf("handle") if code == 12 else b""
    return b1(code) + b4(first) + b4(len(offsets)) + b"".join(map(b8, offsets)) + stream + ending


def incremental(code: int) -> bytes:
    files = b4(2) + utf("000012.sst") + FILE + utf("000013.sst") + RELATIVE
    size, ending = (b8(77), utf("handle")) if code == 11 else (b"", b"")
    return (
        b1(code)
        + b8(7)
        + utf("backend")
        + b4(0)
        + b4(4)
        + size
        + INLINE
        + files
        + b4(1)
        + utf("CURRENT")
        + EMPTY
        + ending
    )


def changelog(code: int) -> bytes:
    in_bytes = b1(9) + b4(0) + b4(4) + b8(1) + b8(2) + b4(1) + b4(-1) + blob(b"change") + utf("id")
    old = b1(10) + b4(0) + b4(4) + b4(1) + b8(3) + FILE + b8(4) + b8(5) + utf("id")
    new = b1(13) + old[1:] + utf("filesystem")
    materialized = b4(1) + key_groups(12, RELATIVE, [5, 6, 7, 8])
    ending = b8(9) + (b8(8) if code == 14 else b"") + utf("id")
    return b1(code) + b4(0) + b4(4) + b8(6) + materialized + b4(3) + in_bytes + old + new + ending


def operator_state(code: int) -> bytes:
    states = b4(2) + utf("offsets") + b1(1) + b4(2) + b8(40) + b8(50) + utf("rules") + b1(2) + b4(0)
    folders = utf("file:/owned") + utf("file:/shared") + b1(0) if code == 17 else b""
    return b4(1) + b1(code) + states + folders + (SEGMENT if code == 17 else RELATIVE)


def channels(version: int) -> bytes:
    one = b4(1) + b4(2) + b4(3) + b4(2) + b8(10) + b8(20) + b8(30) + INLINE
    if version < 3:
        return b""
    if version < 6:
        return b4(1) + one + b4(0)
    return b4(2) + b1(1) + one + b1(3) + b4(1) + b8(9) + FILE + blob(b"offsets") + b4(1) + b1(2) + one


def subtask(version: int, index: int, *, operator: bytes = b4(0), keyed: bytes = NULL) -> bytes:
    old = b8(-1) + b4(0) if version == 2 else b""
    return b4(index) + old + operator + b4(0) + keyed + NULL + channels(version)


def operator(version: int, number: int, subtasks: list[bytes], *, finished: bool = False) -> bytes:
    names = utf("Map") + utf(f"uid-{number}" if number else "") if version >= 5 else b""
    middle = b4(1) if version == 2 else NULL if finished else INLINE
    listed = b4(-1) if finished else b4(len(subtasks)) + b"".join(subtasks)
    return names + bytes([number] * 16) + b4(4) + b4(128) + middle + listed


def metadata(version: int) -> bytes:
    keyed = [key_groups(3, RELATIVE, [1, 2]), incremental(5)]
    operators = [
        operator(version, 1, [subtask(version, i, keyed=found) for i, found in enumerate(keyed)]),
        operator(version, 2, [subtask(version, 3, operator=operator_state(4))]),
    ]
    if version >= 3:
        newer = [key_groups(CANONICAL, RELATIVE, [0, 90]), key_groups(12, FILE, [1]), incremental(11), changelog(14)]
        operators.append(operator(version, 3, [subtask(version, i, keyed=found) for i, found in enumerate(newer)]))
        merged = [subtask(version, 0, operator=operator_state(17)), subtask(version, 1, keyed=changelog(8)), b4(-4)]
        operators.append(operator(version, 0, merged))
        operators.append(operator(version, 5, [], finished=True))
    master = b4(3) + utf("hook") + blob(b"state")
    masters = b4(1) + bytes.fromhex("c96b1696") + blob(master)
    properties = b"\xac\xed\0\5properties" if version >= 4 else b""
    return (
        bytes.fromhex("4960672d")
        + b4(version)
        + b8(42)
        + masters
        + b4(len(operators))
        + b"".join(operators)
        + properties
    )


VERSIONS = pytest.mark.parametrize("version", [2, 3, 4, 5, 6])


@VERSIONS
def test_what_was_decoded_is_encoded_to_the_same_bytes(version: int) -> None:
    assert encode_metadata(decode_metadata(metadata(version))) == metadata(version)


@VERSIONS
def test_operators_and_subtasks_are_found(version: int) -> None:
    found = decode_metadata(metadata(version))
    assert (found.version, found.checkpoint_id) == (version, 42)
    assert [(state.name, state.version, state.data) for state in found.master_states] == [("hook", 3, b"state")]
    assert found.properties == (b"\xac\xed\0\5properties" if version >= 4 else b"")
    first = found.operators[0]
    assert first.id == b"\1" * 16
    assert (first.parallelism, first.max_parallelism) == (4, 128)
    assert (first.name, first.uid) == (("Map", "uid-1") if version >= 5 else (None, None))
    assert [subtask.index for subtask in first.subtasks] == [0, 1]
    assert first.coordinator == (Inline("inline-1", b"bytes") if version >= 3 else None)


def test_every_handle_of_keyed_state_is_found() -> None:
    old, new = decode_metadata(metadata(6)).operators[0].subtasks, decode_metadata(metadata(6)).operators[2].subtasks
    heap, rocks = old[0].managed_keyed, old[1].managed_keyed
    assert isinstance(heap, KeyGroups)
    assert (heap.code, heap.offsets.tolist()) == (3, [1, 2])
    assert isinstance(rocks, Incremental)
    assert rocks.meta == Inline("inline-1", b"bytes")
    assert rocks.shared == (
        ("000012.sst", File("s3://bucket/job/chk-7/a", 1000)),
        ("000013.sst", Relative("b-file", 2000)),
    )
    assert rocks.private == (("CURRENT", EmptySegment()),)
    assert rocks.size == 3005
    canonical, heap, newer, changes = (subtask.managed_keyed for subtask in new)
    assert isinstance(canonical, KeyGroups)
    assert canonical.code == CANONICAL
    assert canonical.stream == Relative("b-file", 2000)
    assert isinstance(heap, KeyGroups)
    assert heap.handle_id == "handle"
    assert isinstance(newer, Incremental)
    assert (newer.checkpointed_size, newer.handle_id) == (77, "handle")
    assert isinstance(changes, Changelog)
    assert len(changes.materialized) == 1
    assert len(changes.changes) == 3


def test_operator_state_and_statuses_are_found() -> None:
    found = decode_metadata(metadata(6))
    states = found.operators[1].subtasks[0].managed_operator
    assert states is not None
    assert [(state.name, state.mode, state.offsets.tolist()) for state in states.states] == [
        ("offsets", 1, [40, 50]),
        ("rules", 2, []),
    ]
    merged = found.operators[3].subtasks
    assert merged[0].managed_operator is not None
    assert merged[0].managed_operator.stream == Segment("file:/tmp/merged", 10, 20, 1, "logical")
    assert [(subtask.index, subtask.finished) for subtask in merged] == [(0, False), (1, False), (3, True)]
    assert found.operators[4].fully_finished
    assert not found.operators[4].subtasks


def test_channel_state_is_found() -> None:
    inputs = decode_metadata(metadata(6)).operators[0].subtasks[0].inputs
    assert [(channel.code, channel.channel, channel.merged) for channel in inputs] == [
        (1, (2, 3), None),
        (3, None, b"offsets"),
    ]


@VERSIONS
def test_truncations_are_named(version: int) -> None:
    whole = metadata(version)
    properties = len(b"\xac\xed\0\5properties") if version >= 4 else 0
    for size in range(0, len(whole) - properties, 1 if version in (2, 6) else 7):
        with pytest.raises(DamagedCheckpoint) as caught:
            decode_metadata(whole[:size], "sp/_metadata")
        assert caught.value.details["path"] == "sp/_metadata"
        assert caught.value.kind is ErrorKind.DAMAGED_RECORD


@VERSIONS
def test_a_flipped_bit_in_every_byte_is_named_or_read_as_what_it_says(version: int) -> None:
    whole = metadata(version)
    named = 0
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << (at * 5 & 7)
        try:
            found = decode_metadata(bytes(flipped))
        except CheckpointError:
            named += 1
        else:
            assert encode_metadata(found) == flipped
    assert named > len(whole) // 4


def sized(count: int) -> Callable[[bytes], bytes]:
    """Put ``count`` where the number of operators stands in an empty file."""
    return lambda empty: empty[:-4] + struct.pack(">i", count)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (sized(2**31 - 1), "2147483647 operators should follow in 0 bytes"),
        (sized(-1), "-1 operators should follow"),
        (lambda empty: b"", "it is empty: Flink did not complete this checkpoint"),
        (lambda empty: empty + b"x", "should end here, and 1 bytes are left"),
        (lambda empty: empty[:8] + b8(-5) + empty[16:], "the checkpoint's id is -5"),
    ],
)
def test_what_cannot_be_is_named(change: Callable[[bytes], bytes], said: str) -> None:
    empty = bytes.fromhex("4960672d") + b4(3) + b8(1) + b4(0) + b4(0)
    assert decode_metadata(empty).operators == ()
    with pytest.raises(DamagedCheckpoint, match=said):
        decode_metadata(change(empty))


def test_another_file_is_not_called_damaged() -> None:
    with pytest.raises(UnsupportedFormat, match="begins with 50 4b 03 04, and Flink's metadata with 49 60 67 2d"):
        decode_metadata(b"PK\3\4" + metadata(6)[4:])


@pytest.mark.parametrize("version", [0, 1, 7, -1])
def test_other_versions_are_refused(version: int) -> None:
    with pytest.raises(UnsupportedFormat, match=f"metadata of version {version} is not known"):
        decode_metadata(bytes.fromhex("4960672d") + b4(version) + metadata(6)[8:])


def test_handles_in_handles_have_a_limit() -> None:
    stream = RELATIVE
    for _ in range(5000):
        stream = b1(3) + b4(0) + b4(0) + stream
    data = bytes.fromhex("4960672d") + b4(3) + b8(1) + b4(0) + b4(1)
    data += operator(3, 1, [subtask(3, 0, keyed=key_groups(3, stream, [1]))])
    with pytest.raises(UnsupportedFormat, match="33 levels, and at most 32"):
        decode_metadata(data)


def test_messages_and_docs_name_the_same_versions() -> None:
    docs = Path(__file__).parents[2] / "docs" / "foreign.md"
    assert f"\n| | {FLINK_VERSIONS} | {SPARK_VERSIONS} |\n" in docs.read_text(encoding="utf-8")
    with pytest.raises(UnsupportedFormat, match=rf"\({FLINK_VERSIONS}\)"):
        decode_metadata(struct.pack(">iiq", 0x4960672D, 99, 1))
    with pytest.raises(UnsupportedFormat, match=rf"\({FLINK_VERSIONS}\)"):
        read_keyed_header(struct.pack(">i", 99), "stream")
