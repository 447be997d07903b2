"""Entries of canonical key groups are found whatever their sizes; broken ones are named."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from stateformat.backends.foreign.flink import walk
from stateformat.backends.foreign.flink.walk import PADDING, Frames, frame_groups
from stateformat.errors import DamagedCheckpoint

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
