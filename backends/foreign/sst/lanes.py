"""Entries of many blocks at once: every restart point is a lane, and all lanes advance in
lock-step.

Layout: RocksDB, ``table/block_based/block_builder``. An entry is the number of bytes that its key
shares with the previous key, the number of bytes that follow, the length of the value (not in
delta-encoded index blocks), the key's own bytes and the value. At restart points the whole key is
stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..byte_strings import ByteStrings, Octets, Positions
from ..framing import damaged
from ..limits import DECODED_FLOOR, check
from .blocks import PAD, Blocks, unsupported

_HASHED: Final = 1 << 31
_FEATURES: Final = 0x70000000
_NUMBER_MAX: Final = 1 << 60
_SHARED_MAX: Final = 64
"""Keys, which share their beginnings in a block, take no more than so many times the block."""
_STEPS_MAX: Final = 1 << 16
"""No restart point has so many entries; RocksDB's usual number is 16."""


class Entries(NamedTuple):
    """Entries in the order of their blocks."""

    key: ByteStrings
    value: ByteStrings
    block: Positions
    """The number of the block that each entry is in."""


class Measure(Protocol):
    """Finds the ends of values that have no length in front of them."""

    def __call__(self, lanes: Positions, shared: Positions, at: Positions) -> Positions:
        """Take lanes, what their keys share, where their values begin; return where they end."""


def gather(data: Octets, at: Positions, width: int) -> Octets:
    """Return ``width`` bytes from each position, as an array of (positions, width)."""
    windows = np.ndarray((max(len(data) - width + 1, 0),), f"V{width}", data, strides=(1,))
    found: Octets = windows[at].view(np.uint8).reshape(len(at), width)
    return found


def varints(data: Octets, at: Positions) -> tuple[Positions, Positions]:
    """Read a varint at each position: values, and where the next bytes begin."""
    first = data[at]
    value = first.astype(np.int64)
    after = at + 1
    more = np.flatnonzero(first >= 0x80)
    if len(more):
        value[more] &= 0x7F
        shift = 7
        while len(more) and shift < 63:
            byte = data[after[more]].astype(np.int64)
            value[more] |= (byte & 0x7F) << shift
            after[more] += 1
            more = more[byte >= 0x80]
            shift += 7
        # Longer than any length: no sum of two may overflow.
        value[more] = _NUMBER_MAX
        np.minimum(value, _NUMBER_MAX, out=value)
    return value, after


def read_entries(
    blocks: Blocks, path: Callable[[int], str], measure: Callable[[int], Measure] | None = None
) -> Entries:
    """Decode all entries of blocks. ``path`` names the file of a block, for errors.

    ``measure`` takes the number of lanes; without it, values are stored with their lengths in
    front.
    """
    start, end, lane_block = _lanes(blocks, path)

    def broken(lane: int, what: str) -> Exception:
        block = int(lane_block[lane])
        return damaged(path(block), f"{what} in a block of {int(blocks.end[block] - blocks.start[block])} bytes")

    steps, counts = _walk(blocks.data, start, end, broken, None if measure is None else measure(len(start)))
    first = np.cumsum(counts) - counts
    total = int(counts.sum())
    shared, own, key_at, value_at, value_size = (np.empty(total, np.int64) for _ in range(5))
    for number, step in enumerate(steps):
        place = first[step.lane] + number
        shared[place], own[place], key_at[place] = step.shared, step.own, step.key_at
        value_at[place], value_size[place] = step.value_at, step.value_size
    length = shared + own
    if total:
        check(path(0), "its keys", int(length.sum()), max(DECODED_FLOOR, _SHARED_MAX * len(blocks.data)))
    # No key shares more than the length of the previous key; the first of a lane shares nothing.
    before = np.zeros(total, np.int64)
    before[1:] = length[:-1]
    before[first[counts > 0]] = 0
    wrong = np.flatnonzero(shared > before)
    if len(wrong):
        lane = int(np.searchsorted(first, wrong[0], "right")) - 1
        raise broken(lane, f"a key shares {int(shared[wrong[0]])} bytes with one of {int(before[wrong[0]])}")
    keys = _keys(blocks.data, first, counts, shared, key_at, length)
    return Entries(keys, ByteStrings(blocks.data, value_at, value_size), np.repeat(lane_block, counts))


def _lanes(blocks: Blocks, path: Callable[[int], str]) -> tuple[Positions, Positions, Positions]:
    """Find the restart points: where lanes begin and end, and the block of each."""
    data, start, end = blocks
    short = np.flatnonzero(end - start < 8)
    if len(short):
        raise damaged(path(int(short[0])), f"a block of {int((end - start)[short[0]])} bytes has no restart points")
    packed = gather(data, end - 4, 4).view("<u4").reshape(-1).astype(np.int64)
    odd = np.flatnonzero(packed & _FEATURES)
    if len(odd):
        raise unsupported(path(int(odd[0])), f"blocks have the features {int(packed[odd[0]]) >> 28 & 7:#x}")
    foot, count = end - 4, packed & ~_HASHED
    hashed = np.flatnonzero(packed & _HASHED)
    if len(hashed):
        # A hash index of one byte a bucket, and the number of buckets, follow the restart points.
        foot[hashed] -= 2 + gather(data, foot[hashed] - 2, 2).view("<u2").reshape(-1)
    base = foot - 4 * count
    wrong = np.flatnonzero((count < 1) | (base < start))
    if len(wrong):
        raise damaged(
            path(int(wrong[0])), f"a block declares {int(count[wrong[0]])} restart points, more than it holds"
        )
    block = np.repeat(np.arange(len(start)), count)
    nth = np.arange(len(block)) - np.repeat(np.cumsum(count) - count, count)
    at = start[block] + gather(data, base[block] + 4 * nth, 4).view("<u4").reshape(-1)
    until = np.empty_like(at)
    until[:-1] = at[1:]
    lasts = np.cumsum(count) - 1
    until[lasts] = base
    wrong = np.flatnonzero((until < at) | (nth == 0) & (at != start[block]))
    if len(wrong):
        raise damaged(path(int(block[wrong[0]])), "restart points of a block are out of order")
    return at, until, block


class _Step(NamedTuple):
    """The n-th entries of all lanes that have that many."""

    lane: Positions
    shared: Positions
    own: Positions
    key_at: Positions
    value_at: Positions
    value_size: Positions


def _walk(
    data: Octets,
    start: Positions,
    end: Positions,
    broken: Callable[[int, str], Exception],
    measure: Measure | None,
) -> tuple[list[_Step], Positions]:
    """Take one step after another; returns them, and how many each lane has taken."""
    steps: list[_Step] = []
    counts = np.zeros(len(start), np.int64)
    lane = np.flatnonzero(start < end)
    at, until = start[lane], end[lane]
    while len(lane):
        shared, at = varints(data, at)
        own, at = varints(data, at)
        value_size, key_at = varints(data, at) if measure is None else (np.zeros_like(own), at)
        # Lengths are checked one by one before they are added: a sum may exceed 64 bits.
        wrong = np.flatnonzero((shared > len(data)) | (own > until - key_at) | (value_size > until - key_at - own))
        if len(wrong):
            raise broken(int(lane[wrong[0]]), "an entry passes its end")
        value_at = key_at + own
        after = value_at + value_size if measure is None else measure(lane, shared, value_at)
        if measure is not None:
            value_size = after - value_at
            wrong = np.flatnonzero(after > until)
        if len(wrong):
            raise broken(int(lane[wrong[0]]), "an entry passes its end")
        if len(steps) == _STEPS_MAX:
            raise broken(int(lane[0]), f"a restart point has more than {_STEPS_MAX} entries")
        steps.append(_Step(lane, shared, own, key_at, value_at, value_size))
        counts[lane] += 1
        more = after < until
        if more.all():
            at = after
        else:
            lane, at, until = lane[more], after[more], until[more]
    return steps, counts


def _keys(
    data: Octets, first: Positions, counts: Positions, shared: Positions, key_at: Positions, length: Positions
) -> ByteStrings:
    """Rebuild all keys, by classes of lanes with keys of similar width; zeros follow each key."""
    total = len(length)
    lanes = np.flatnonzero(counts)
    if not total:
        return ByteStrings(np.zeros(PAD, np.uint8), length, length)
    widest = np.maximum.reduceat(length, first[lanes])
    # One class if that wastes little, otherwise classes by powers of two.
    top = int(widest.max())
    if top <= 64 or top * total <= 2 * int(length.sum()):
        classes = np.zeros(len(lanes), np.int64)
    else:
        classes = np.ceil(np.log2(np.maximum(widest, 64))).astype(np.int64)
    if top > PAD:
        data = np.concatenate([data, np.zeros(top, np.uint8)])
    buffers, start, taken = [], np.empty(total, np.int64), 0
    for some in np.unique(classes):
        members = lanes[classes == some]
        width = max(int(widest[classes == some].max()), 8)
        rows, matrix = _class_keys(data, first[members], counts[members], shared, key_at, width)
        if (length[rows] != width).any():
            matrix[np.arange(width) >= length[rows][:, None]] = 0
        start[rows] = taken + width * np.arange(len(rows))
        buffers.append(matrix.reshape(-1))
        taken += matrix.size
    return ByteStrings(np.concatenate([*buffers, np.zeros(PAD, np.uint8)]), start, length)


def _class_keys(
    data: Octets, first: Positions, counts: Positions, shared: Positions, key_at: Positions, width: int
) -> tuple[Positions, npt.NDArray[np.uint8]]:
    """Rebuild the keys of some lanes: the entries' numbers, and their keys in rows of ``width``."""
    place = np.cumsum(counts) - counts
    rows = np.repeat(first - place, counts) + np.arange(int(counts.sum()))
    # Lanes with more entries first: those that continue are always the first ones.
    order = np.argsort(-counts, kind="stable")
    first, counts, place = first[order], counts[order], place[order]
    matrix = np.empty((len(rows), width), np.uint8)
    out = matrix.view(f"V{width}").reshape(-1)
    key: Octets = np.zeros((len(first), width), np.uint8)
    columns = np.arange(width, dtype=np.int32)
    active = len(first)
    for step in range(int(counts[0])):
        active = int(np.searchsorted(-counts[:active], -step, "left"))
        entry = first[:active] + step
        kept = shared[entry]
        window = gather(data, key_at[entry] - kept, width)
        if step == 0:
            key = window.copy()
        else:
            key = key[:active]
            np.copyto(key, window, where=columns >= kept.astype(np.int32)[:, None])
        out[place[:active] + step] = key.view(f"V{width}").reshape(-1)
    return rows, matrix
