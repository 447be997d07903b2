"""Jobs of Flink's SQL, and a walk through a savepoint."""

from __future__ import annotations

import datetime as dt
import decimal
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from foreign.flink_sql_written import (
    COLUMNS,
    INT,
    RUNTIME,
    TEXT,
    Sql,
    array,
    arrays,
    decimals,
    mapping,
    maps,
    row,
    row_snapshot,
    stream,
    table,
    timestamps,
    typed,
)
from foreign.flink_written import Kind, blob, composite, list_of, pack, simple, top, utf, versioned, whole
from hypothesis import HealthCheck, given, settings, strategies as some, strategies as st

from stateformat.backends.foreign.byte_strings import ByteStrings, from_arrow
from stateformat.backends.foreign.cursor import Cursor
from stateformat.backends.foreign.flink import walk
from stateformat.backends.foreign.flink.headers import UnknownClass, read_top
from stateformat.backends.foreign.flink.lanes import Lanes, Serializer
from stateformat.backends.foreign.flink.walk import PADDING, Frames, frame_groups
from stateformat.errors import DamagedCheckpoint, UnsupportedFormat
from stateformat.schema import make_fields


def serializer(snapshot: bytes) -> Serializer:
    at = Cursor(top(snapshot), "header")
    found = read_top(at)
    at.finish("the snapshot")
    return found


def strings(values: list[bytes]) -> ByteStrings:
    return from_arrow(pa.array(values, pa.binary()))


@pytest.mark.parametrize("kind", [table(kind) for kind in COLUMNS], ids=lambda kind: kind.name)
@settings(max_examples=20, deadline=None)
@given(data=some.data())
def test_columns_are_read_as_they_were_written(kind: Kind, data: Any) -> None:
    values = data.draw(some.lists(kind.values, max_size=6))
    found = serializer(kind.snapshot)
    read = found.read_all(strings([kind.write(value) for value in values]))
    read.validate(full=True)
    assert read.type == found.arrow_type
    assert read.to_pylist() == [kind.read(value) for value in values]
    make_fields(pa.schema([("value", found.arrow_type)]), defaults={})


@settings(max_examples=20, deadline=None)
@given(data=some.data())
def test_rows_of_all_columns_are_read(data: Any) -> None:
    kind = table(*COLUMNS, *[INT] * 40)
    values = data.draw(some.lists(kind.values, min_size=1, max_size=3))
    found = serializer(kind.snapshot)
    assert found.read_all(strings([kind.write(value) for value in values])).to_pylist() == list(map(kind.read, values))
    lanes = Lanes.of(strings([kind.write(value) for value in values]))
    found.skip(lanes)
    lanes.finish()


@pytest.mark.parametrize("kind", [table(kind) for kind in COLUMNS[:4] + COLUMNS[14:]], ids=lambda kind: kind.name)
@settings(max_examples=40, deadline=None)
@given(data=some.data())
def test_a_flipped_bit_of_a_row_gives_values_or_an_error(kind: Kind, data: Any) -> None:
    written = bytearray(kind.write(data.draw(kind.values)))
    at = data.draw(some.integers(0, len(written) * 8 - 1))
    written[at >> 3] ^= 1 << (at & 7)
    try:
        serializer(kind.snapshot).read_all(strings([bytes(written)])).validate(full=True)
    except (DamagedCheckpoint, UnsupportedFormat):
        return


@settings(max_examples=40, deadline=None)
@given(data=some.data())
def test_a_truncated_row_is_an_error(data: Any) -> None:
    kind = table(TEXT, INT, arrays(INT))
    written = kind.write(data.draw(kind.values))
    cut = written[: data.draw(some.integers(0, len(written) - 1))]
    with pytest.raises(DamagedCheckpoint):
        serializer(kind.snapshot).read_all(strings([cut]))


@pytest.mark.parametrize("kind", [table(kind) for kind in COLUMNS[-3:]], ids=["nested", "structured", "deep"])
def test_cut_and_flipped_snapshots_of_rows_are_named_or_read(kind: Kind) -> None:
    whole_ = top(kind.snapshot)
    for size in range(0, len(whole_), 1 + len(whole_) // 300):
        with pytest.raises(DamagedCheckpoint):
            read_top(Cursor(whole_[:size], "header"))
    for at in range(0, len(whole_), 1 + len(whole_) // 300):
        flipped = bytearray(whole_)
        flipped[at] ^= 1 << (at * 5 & 7)
        try:
            found = read_top(Cursor(bytes(flipped), "header"))
        except (DamagedCheckpoint, UnsupportedFormat):
            continue
        assert isinstance(found, Serializer)


def test_a_row_with_a_column_that_is_not_known_is_framed_bytes() -> None:
    unknown = Sql("symbol", typed("SymbolType"), some.nothing(), lambda *_: b"")
    found = serializer(row_snapshot([INT, unknown]))
    assert not found.takes_rest
    assert found.opaque == ("org.apache.flink.table.types.logical.SymbolType",)
    assert found.read_all(strings([blob(b"row"), blob(b"")])).to_pylist() == [b"row", b""]


def test_raw_columns_are_bytes_and_are_named() -> None:
    assert serializer(table(COLUMNS[3]).snapshot).opaque == ("com.example.Mine",)


def test_keys_of_sql_have_no_row_kind() -> None:
    kind = table(INT)
    found = serializer(kind.snapshot)
    assert found.java_hash == "BinaryRowData"
    assert found.as_key().read_all(strings([kind.write((0, 5))])).to_pylist() == [{"f0": 5}]
    with pytest.raises(UnsupportedFormat, match="a row of kind -U"):
        found.as_key().read_all(strings([kind.write((1, 5))]))


def test_a_row_of_an_unknown_kind_is_damaged() -> None:
    with pytest.raises(DamagedCheckpoint, match="of kind 9"):
        serializer(table(INT).snapshot).read_all(strings([blob(row([INT], [1], 9))]))


def test_values_that_share_their_bytes_take_no_memory() -> None:
    count, size = 20_000, 1 << 20
    head = 4 + count // 8
    words = struct.pack("<II", size, head + 8 * count) * count
    found = struct.pack("<i", count) + bytes(count // 8) + words + b"x" * size
    written = bytes(8) + struct.pack("<II", len(found), 16) + found
    with pytest.raises(DamagedCheckpoint, match="points to the same bytes twice"):
        serializer(table(arrays(TEXT)).snapshot).read_all(strings([blob(written)]))


def test_other_versions_of_rows_end_a_header() -> None:
    with pytest.raises(UnknownClass, match="version 4"):
        serializer(row_snapshot([INT], 4))


def test_rows_without_their_types_are_framed_bytes() -> None:
    found = serializer(versioned(RUNTIME + "BinaryRowDataSerializer$BinaryRowDataSerializerSnapshot", 3, pack("i", 2)))
    assert found.opaque == ("a SQL row of 2 columns without their types",)
    assert found.read_all(strings([blob(b"x")])).to_pylist() == [b"x"]


def decimal_data(precision: int) -> Kind:
    kind = decimals(precision, 2)
    write = (
        (lambda v: pack("q", v))
        if precision <= 18
        else (lambda v: blob(v.to_bytes((v + (v < 0)).bit_length() // 8 + 1, "big", signed=True)))
    )
    name = RUNTIME + "DecimalDataSerializer$DecimalSerializerSnapshot"
    return Kind(kind.name, versioned(name, 3, pack("ii", precision, 2)), kind.values, write, kind.read)


def timestamp_data(precision: int) -> Kind:
    kind = timestamps(precision)
    write = lambda v: pack("q", v // 10**6) + (pack("i", v % 10**6) if precision > 3 else b"")  # noqa: E731
    name = RUNTIME + "TimestampDataSerializer$TimestampDataSerializerSnapshot"
    return Kind(kind.name, versioned(name, 1, pack("i", precision)), kind.values, write, kind.read)


def masked(value: list[int | None]) -> bytes:
    mask = bytearray((len(value) + 7) // 8)
    for place, item in enumerate(value):
        mask[place // 8] |= (item is None) << (7 - place % 8)
    return pack("i", len(value)) + bytes(mask) + b"".join(pack("q", item) for item in value if item is not None)


LONG = Kind("long", simple("LongSerializer"), whole(64), lambda v: pack("q", v))
MANY = arrays(TEXT)
PAIRS = maps(TEXT, INT)
OTHERS = [
    decimal_data(10),
    decimal_data(30),
    timestamp_data(3),
    timestamp_data(6),
    timestamp_data(9),
    Kind("text", simple("StringDataSerializer", RUNTIME), TEXT.values, lambda v: blob(v.encode())),
    Kind(
        "array",
        versioned(RUNTIME + "ArrayDataSerializer$ArrayDataSerializerSnapshot", 3, stream(TEXT.type) + stream(b"\x70")),
        MANY.values,
        lambda v: blob(array(TEXT, v)),
        MANY.read,
    ),
    Kind(
        "map",
        versioned(
            RUNTIME + "MapDataSerializer$MapDataSerializerSnapshot",
            3,
            stream(TEXT.type) + stream(INT.type) + stream(b"\x70") * 2,
        ),
        PAIRS.values,
        lambda v: blob(mapping(TEXT, INT, v)),
        PAIRS.read,
    ),
    Kind(
        "linked list",
        composite(RUNTIME + "LinkedListSerializer$LinkedListSerializerSnapshot", [LONG.snapshot], b"\1", 3),
        some.lists(some.none() | whole(64), max_size=20),
        masked,
    ),
    Kind(
        "linked list without nulls",
        composite(RUNTIME + "LinkedListSerializer$LinkedListSerializerSnapshot", [LONG.snapshot], b"\0", 3),
        some.lists(whole(64), max_size=5),
        list_of(LONG).write,
    ),
    Kind(
        "window and key",
        composite(RUNTIME + "WindowKeySerializer$WindowKeySerializerSnapshot", [table(INT).snapshot]),
        some.tuples(whole(64), whole(32)),
        lambda v: pack("q", v[0]) + table(INT).write((0, v[1])),
        lambda v: {"window": v[0], "key": {"f0": v[1], "row_kind": "+I"}},
    ),
    Kind(
        "map with null keys",
        composite("org.apache.flink.table.dataview.NullAwareMapSerializerSnapshot", [LONG.snapshot, LONG.snapshot]),
        some.lists(some.tuples(some.none() | whole(64), some.none() | whole(64)), max_size=4),
        lambda v: (
            pack("i", len(v)) + b"".join(b"\1" if x is None else b"\0" + pack("q", x) for pair in v for x in pair)
        ),
        lambda v: [{"key": k, "value": x} for k, x in v],
    ),
    Kind(
        "raw value",
        composite(RUNTIME + "RawValueDataSerializer$RawValueDataSerializerSnapshot", [LONG.snapshot], b"", 0),
        some.binary(max_size=5),
        blob,
    ),
]


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.name)
@settings(max_examples=30, deadline=None)
@given(data=some.data())
def test_other_values_of_sql_are_read(kind: Kind, data: Any) -> None:
    values = data.draw(some.lists(kind.values, min_size=1, max_size=6))
    found = serializer(kind.snapshot)
    written = [kind.write(value) for value in values]
    read = found.read_all(strings(written))
    read.validate(full=True)
    assert read.to_pylist() == [kind.read(value) for value in values]
    lanes = Lanes.of(strings(written))
    found.skip(lanes)
    lanes.finish()


def test_a_timestamp_that_microseconds_cannot_hold_is_refused() -> None:
    with pytest.raises(UnsupportedFormat, match="9223372036854775807 ms since 1970"):
        serializer(timestamp_data(3).snapshot).read_all(strings([pack("q", (1 << 63) - 1)]))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x71" + pack("i", 0x7E0005), "refers to object 5 of 0"),
        (b"\x73\x70", "an object has no class"),
        (b"\x7b", "has the code 0x7b"),
        (b"\x75" + b"\x72" + utf("[X") + bytes(8) + b"\2\0\0\x78\x70" + bytes(4), "an array of 'X'"),
    ],
)
def test_java_streams_that_cannot_be_are_named(content: bytes, said: str) -> None:
    with pytest.raises((DamagedCheckpoint, UnsupportedFormat), match=said):
        serializer(row_snapshot([Sql("x", content, some.nothing(), lambda *_: b"")]))


def test_decimals_and_times_say_what_they_are() -> None:
    found = serializer(table(decimals(30, 3), timestamps(9)).snapshot)
    written = blob(row([decimals(30, 3), timestamps(9)], [-1500, 1_000_000_001]))
    assert found.read_all(strings([written])).to_pylist() == [
        {
            "f0": decimal.Decimal("-1.500"),
            "f1": {"timestamp": dt.datetime(1970, 1, 1, 0, 0, 1), "nanos": 1},  # noqa: DTZ001
            "row_kind": "+I",
        }
    ]


# ---- entries of canonical key groups are found whatever their sizes; broken ones are named

Group = Sequence[tuple[int, Sequence[tuple[bytes, bytes]]]]
"""States with their entries: keys without the key group's number, and values."""

SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def encoded(groups: dict[int, Group], prefix: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Encode key groups entry by entry, as Flink writes them: buffer, starts, ends, numbers."""
    out, starts, ends = bytearray(), [], []
    for group, states in groups.items():
        starts.append(len(out))
        for number, entries in states:
            out += struct.pack(">h", number)
            for place, (key, value) in enumerate(entries):
                whole = bytearray(group.to_bytes(prefix, "big") + key)
                if place == len(entries) - 1:
                    whole[0] |= 0x80
                out += struct.pack(">i", len(whole)) + whole + struct.pack(">i", len(value)) + value
        out += struct.pack(">h", -1)
        ends.append(len(out))
    data = np.frombuffer(bytes(out) + bytes(PADDING), np.uint8)
    return data, np.array(starts, np.int64), np.array(ends, np.int64), np.array(list(groups), np.int32)


def decoded(frames: Frames, state: int, prefix: int = 1) -> list[tuple[int, bytes, bytes]]:
    entries = frames.of(state)
    data = frames.data.tobytes()

    def slices(strings):
        return [data[a : a + n] for a, n in zip(strings.start.tolist(), strings.length.tolist(), strict=True)]

    keys = [key[prefix:] for key in slices(entries.keys)]
    return list(zip(entries.groups.tolist(), keys, slices(entries.values), strict=True))


def expected(groups: dict[int, Group], state: int) -> list[tuple[int, bytes, bytes]]:
    return [
        (group, key, value)
        for group, states in groups.items()
        for number, entries in states
        if number == state
        for key, value in entries
    ]


def drawn(seed: int) -> dict[int, Group]:
    """A few key groups with states in any order; entries of one size, or of many, many zeros."""
    draw = np.random.default_rng(seed)

    def octets(size: int) -> bytes:
        return draw.choice(np.array([0, 0, 1, 3, 255], np.uint8), size).tobytes()

    def entries() -> list[tuple[bytes, bytes]]:
        count, key, value = int(draw.integers(1, 60)), int(draw.integers(0, 9)), int(draw.integers(0, 12))
        if draw.random() < 0.5:
            return [(octets(key), octets(value)) for _ in range(count)]
        return [(octets(int(draw.integers(0, 9))), octets(int(draw.integers(0, 40)))) for _ in range(count)]

    numbers = sorted(draw.choice(128, int(draw.integers(1, 6)), replace=False).tolist())
    return {
        group: [(int(state), entries()) for state in draw.permutation(4)[: draw.integers(1, 5)]] for group in numbers
    }


SEEDS = st.integers(0, 1 << 30)


@pytest.fixture(params=[(20, 300, 64), (4096, 300, 64), (4096, 8192, 64), (4096, 300, 0)])
def shape(request, monkeypatch):
    """Runs for short key groups too; guesses in short pieces; no guess ever mended."""
    runs, piece, rounds = request.param
    monkeypatch.setattr(walk, "_RUN_BYTES", runs)
    monkeypatch.setattr(walk, "_PIECE", piece)
    monkeypatch.setattr(walk, "_ROUNDS", rounds)


@SETTINGS
@given(seed=SEEDS)
def test_every_entry_is_found_under_its_state_and_key_group(shape, seed):
    groups = drawn(seed)
    frames = frame_groups(*encoded(groups), 1, where="stream")
    for state in range(4):
        assert decoded(frames, state) == expected(groups, state)
    span = np.arange(128, dtype=np.int32)
    rows = [len([1 for found in expected(groups, 2) if found[0] == group]) for group in range(128)]
    assert frames.rows(2, span).tolist() == rows


@SETTINGS
@given(seed=SEEDS, where=st.integers(0, 1 << 30), bit=st.integers(0, 7))
def test_a_flipped_bit_is_named_or_leaves_entries_within_their_key_groups(shape, seed, where, bit):
    data, starts, ends, numbers = encoded(drawn(seed))
    broken = data.copy()
    broken[where % (len(data) - PADDING)] ^= 1 << bit
    try:
        frames = frame_groups(broken, starts, ends, numbers, 1, where="stream")
    except DamagedCheckpoint:
        return
    for state in {*frames.state.tolist()}:
        entries = frames.of(state)
        place = np.searchsorted(numbers, entries.groups)
        assert (entries.keys.start - 4 >= starts[place]).all()
        assert (entries.values.start + entries.values.length <= ends[place] - 2).all()


@SETTINGS
@given(seed=SEEDS, cut=st.integers(1, 40))
def test_a_key_group_that_is_cut_short_is_damage(shape, seed, cut):
    data, starts, ends, numbers = encoded(drawn(seed))
    ends[-1] = max(starts[-1], ends[-1] - cut)
    with pytest.raises(DamagedCheckpoint, match="key group"):
        frame_groups(data, starts, ends, numbers, 1, where="stream")


def big(group: int, seed: int = 7) -> Group:
    """Entries of many sizes in which a lane has to guess, and values that look like entries."""
    draw = np.random.default_rng(seed)
    decoy = b"".join(struct.pack(">i", 4) + bytes([group]) + b"key" + struct.pack(">i", 3) + b"abc" for _ in range(300))
    plain = [(draw.bytes(int(draw.integers(0, 20))), draw.bytes(int(draw.integers(0, 200)))) for _ in range(3000)]
    return [(1, plain), (0, [(b"decoy", decoy)] * 40), (2, plain[::-1])]


@pytest.mark.parametrize("rounds", [0, 1, 64])
def test_large_key_groups_are_read_the_same_however_often_a_guess_is_wrong(rounds, monkeypatch):
    monkeypatch.setattr(walk, "_ROUNDS", rounds)
    groups = {3: big(3), 4: [(0, [(b"x", b"")])], 90: big(90, 8)}
    frames = frame_groups(*encoded(groups), 1, where="stream")
    for state in range(3):
        assert decoded(frames, state) == expected(groups, state)


def test_key_groups_with_numbers_of_two_bytes():
    groups = {group: big(group & 0xFF, group) for group in (5, 300, 32767)}
    frames = frame_groups(*encoded(groups, 2), 2, where="stream")
    for state in range(3):
        assert decoded(frames, state, 2) == expected(groups, state)


def test_a_key_of_another_key_group_is_damage():
    data, starts, ends, numbers = encoded({3: [(0, [(b"a", b"1")])], 4: [(0, [(b"b", b"2")])]})
    with pytest.raises(DamagedCheckpoint, match="key group 5 in stream has a key of another key group"):
        frame_groups(data, starts, ends, numbers + 1 + (numbers == 3), 1, where="stream")


def test_one_that_ends_before_the_next_begins_is_damage_but_not_at_an_open_end():
    data, starts, ends, numbers = encoded({3: [(0, [(b"a", b"1")])], 4: [(0, [(b"b", b"2")])]})
    with pytest.raises(DamagedCheckpoint, match="ends 15 bytes before the next one begins"):
        frame_groups(data, starts[:1], ends[1:], numbers[:1], 1, where="stream")
    frames = frame_groups(data, starts[:1], ends[1:], numbers[:1], 1, where="stream", open_end=True)
    assert decoded(frames, 0) == [(3, b"a", b"1")]
