"""Chains of sized strings are parsed by lanes as a plain loop parses them, or both refuse them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from stateformat.backends.foreign.spark import chains
from stateformat.errors import DamagedCheckpoint

Entry = tuple[bytes, bytes | None]


def encode(entries: list[Entry]) -> bytes:
    parts = []
    for key, value in entries:
        sized = struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value
        parts += [struct.pack(">i", len(key)), key, sized]
    return b"".join(parts) + b"\xff\xff\xff\xff"


def plain(data: bytes, deletes: bool) -> list[Entry] | None:
    """What a loop over entries finds; None for a broken chain."""
    found: list[Entry] = []
    at = 0
    while at + 4 <= len(data):
        (key,) = struct.unpack_from(">i", data, at)
        if key == -1:
            return found if at + 4 == len(data) else None
        if key < 0 or at + 8 + key > len(data):
            return None
        (value,) = struct.unpack_from(">i", data, at + 4 + key)
        body = at + 8 + key
        if value < (-1 if deletes else 0) or body + max(value, 0) > len(data):
            return None
        found.append((data[at + 4 : at + 4 + key], None if value < 0 else data[body : body + value]))
        at = body + max(value, 0)
    return None


def parse(parts: list[bytes], deletes: list[bool]) -> list[Entry]:
    data = np.frombuffer(b"".join(parts), np.uint8)
    ends = np.cumsum([len(part) for part in parts]).astype(np.int64)
    found = chains.parse_chains(data, ends, np.array(deletes), [f"{i}.delta" for i in range(len(parts))])
    keys, values = found.keys, found.values
    return [
        (
            data[k : k + n].tobytes(),
            None if m < 0 else data[v : v + m].tobytes(),
        )
        for k, n, v, m in zip(
            keys.start.tolist(), keys.length.tolist(), values.start.tolist(), values.length.tolist(), strict=True
        )
    ]


# Rows that look like entries themselves, so that guesses go wrong.
small = st.integers(0, 40)
looking = st.lists(small, max_size=12).map(lambda numbers: struct.pack(f">{len(numbers)}i", *numbers))
key = st.one_of(looking, st.binary(max_size=30), looking.map(lambda some: some[: len(some) // 8 * 8]))
entry = st.tuples(key, st.one_of(st.none(), key))


@given(st.lists(st.lists(entry, max_size=40), min_size=1, max_size=3), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_lanes_find_what_a_loop_finds(parts: list[list[Entry]], lane: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains, "_LANE_BYTES", (16, 40, 96, 1 << 13)[lane])
        assert parse([encode(part) for part in parts], [True] * len(parts)) == [e for part in parts for e in part]


@given(st.lists(entry, min_size=1, max_size=30), st.data())
@settings(max_examples=150, deadline=None)
def test_broken_chains_are_refused_as_a_loop_refuses_them(part: list[Entry], data: st.DataObject) -> None:
    whole = bytearray(encode(part))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    cut = bytes(whole[: data.draw(st.integers(1, len(whole)))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains, "_LANE_BYTES", 40)
        for broken in (bytes(whole), cut):
            expected = plain(broken, deletes=True)
            if expected is None:
                with pytest.raises(DamagedCheckpoint, match=r"0\.delta"):
                    parse([broken], [True])
            else:
                assert parse([broken], [True]) == expected


@pytest.mark.parametrize("align", [0, 1, 4])
@pytest.mark.parametrize("count", [1, 5_000, 60_000])
def test_large_chains_of_rows_and_of_rows_with_something_before_them(align: int, count: int) -> None:
    numbers = np.arange(count, dtype=np.int64)
    kind = np.dtype([("ks", ">i4"), ("pad", f"V{align}"), ("kn", "<i8"), ("k", "<i8"), ("vs", ">i4"), ("v", "<i8")])
    table = np.zeros(count, kind)
    table["ks"], table["k"], table["vs"], table["v"] = 16 + align, numbers * 7919, 8, numbers % 97
    data = np.frombuffer(table.tobytes() + b"\xff\xff\xff\xff", np.uint8)
    found = chains.parse_chains(data, np.array([len(data)]), np.array([False]), ["1.snapshot"], (16, 8))
    assert np.array_equal(found.keys.start, numbers * kind.itemsize + 4)
    assert set(found.values.length.tolist()) == {8}


def test_a_deletion_has_no_place_in_a_snapshot() -> None:
    with pytest.raises(DamagedCheckpoint, match="no entry can stand"):
        parse([encode([(b"key", None)])], [False])


@pytest.mark.parametrize("data", [b"", b"\xff\xff", b"\x00\x00\x00\x01"])
def test_no_end_mark(data: bytes) -> None:
    with pytest.raises(DamagedCheckpoint):
        parse([data], [True])
