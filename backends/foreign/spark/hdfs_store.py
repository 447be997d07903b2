"""Spark's default state store: ``V.snapshot`` and ``V.delta`` files of (key, value) rows.

The state at version V is the greatest snapshot up to V and the deltas after it; the last write of a
key (compared by its bytes) wins. A value of size −1 is a deletion.

A file is a *chain* of sized byte strings: ``i32 size, key, i32 size, value`` … ``i32 -1``. Where an
entry begins is known only from the previous one. So a buffer is cut into lanes, each beginning at a
place that looks like the beginning of an entry; all lanes advance entry by entry at once; and a
lane is accepted only if the previous lane ended where it began. If it did not, entries are followed
one by one until they meet those of the lane.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import CheckpointError, ErrorKind
from stateformat.storage import ObjectInfo, Storage

from ..byte_strings import ByteStrings, Octets, Positions, at_every_byte, ramp
from ..framing import crc32c, damaged, spark_decode
from ..limits import Decoded
from ..source import Level
from .stores import Entries, Listing, Store, read_whole
from .unsafe_row import decode_rows, row_size
from .unsafe_writing import prefixed

_LANE_BYTES: Final = 1 << 13
_MAX_LANES: Final = 4096
_FEW_LANES: Final = 16
"""Up to so many lanes are advanced one by one, which is cheaper than all at once."""
_EMPTY_MAX: Final = 1 << 16
"""Zeros would pass for so many entries. A query without keys writes one entry a batch."""
_TRIES: Final = 6
"""How many steps must succeed from a place before it is taken for the beginning of an entry."""

_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Chain:
    """The entries of several files, in their order; deleted ones have a value of length −1."""

    keys: ByteStrings
    values: ByteStrings


class _Hops:
    """The steps of all lanes over one buffer, which contains several chains one after another."""

    def __init__(self, data: Octets, ends: Positions, may_delete: _Flags, gap: int) -> None:
        self.sizes: npt.NDArray[np.int32] = at_every_byte(data, ">i4")
        self.ends = ends
        """Where each chain ends, which is after its end mark."""
        self.may_delete = may_delete
        self.frame = 8 + gap
        """Bytes of an entry in addition to its key and value."""

    def step(self, at: Positions, chain: npt.NDArray[np.int64]) -> tuple[Positions, Positions, _Flags]:
        """Return each lane's key size, value size, and whether both are possible.

        A key size of −1 with nothing possible is an end mark, if it is at the end of the chain.
        """
        room = self.ends[chain] - at - 4
        key = self.sizes[at].astype(np.int64)
        # An entry is followed by at least a size: of the value, and the end mark.
        possible = (key >= 0) & (key <= room - self.frame)
        value = self.sizes[np.where(possible, at + 4 + key, 0)].astype(np.int64)
        least = np.where(self.may_delete[chain], -1, 0)
        possible &= (value >= least) & (value <= room - self.frame - key)
        return key, value, possible


def parse_chains(
    data: Octets,
    ends: Positions,
    may_delete: _Flags,
    paths: list[str],
    least: tuple[int, int] = (0, 0),
    gap: int = 0,
) -> Chain:
    """Parse chains that end at ``ends`` of ``data``, each beginning where the one before it ends.

    ``may_delete`` says of each chain whether entries may be deletions; ``paths`` names them in
    errors. ``least`` are the minimum sizes of keys and values, used only for better guesses.
    ``gap`` is how many other bytes follow each value.
    """
    if len(data) < 4 or np.any(np.diff(ends, prepend=0) < 4):
        short = int(np.argmin(np.diff(ends, prepend=0)))
        raise damaged(paths[short], "it holds no end mark")
    hops = _Hops(data, ends, may_delete, gap)
    begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    found = [_even(hops, begin, end) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    uneven = np.array([at for at, entries in enumerate(found) if entries is None], np.int64)
    if len(uneven):
        by_lanes = _by_lanes(hops, begins, uneven, least, paths)
        bounds = np.searchsorted(by_lanes, begins[uneven]).tolist()
        for at, first, stop in zip(uneven.tolist(), bounds, [*bounds[1:], len(by_lanes)], strict=True):
            found[at] = by_lanes[first:stop]
    entries = np.concatenate([one for one in found if one is not None])
    keys = hops.sizes[entries].astype(np.int64)
    values = hops.sizes[entries + 4 + keys].astype(np.int64)
    return Chain(ByteStrings(data, entries + 4, keys), ByteStrings(data, entries + 8 + keys, values))


def _even(hops: _Hops, begin: int, end: int) -> Positions | None:
    """Return where entries begin if all entries of a chain have one size, like rows of numbers."""
    room = end - begin - 4
    key = hops.sizes.item(begin)
    if not 0 <= key <= room - hops.frame or hops.sizes.item(end - 4) != -1:
        return None
    value = hops.sizes.item(begin + 4 + key)
    if not 0 <= value <= room - hops.frame - key:
        return None
    stride = hops.frame + key + value
    # A few first: most chains with entries of different sizes show it soon.
    for stop in (min(end - 4, begin + 64 * stride), end - 4):
        for at, size in ((begin, key), (begin + 4 + key, value)):
            if room % stride or not (hops.sizes[at:stop:stride] == size).all():
                return None
    return np.arange(begin, end - 4, stride, dtype=np.int64)


def _by_lanes(
    hops: _Hops, begins: Positions, chosen: npt.NDArray[np.int64], least: tuple[int, int], paths: list[str]
) -> Positions:
    """Return where the entries of some chains begin."""
    starts, chain = _guess(hops, begins, chosen, least)
    stops = np.minimum(np.append(starts[1:], hops.ends[-1]), hops.ends[chain])
    marked = np.zeros(int(hops.ends[-1]) + 1, np.bool_)
    landed = _run(hops, starts, chain, stops, marked, paths)
    _mend(hops, starts, chain, landed, stops, marked, paths)
    entries = np.flatnonzero(marked)
    keys = hops.sizes[entries].astype(np.int64)
    values = hops.sizes[entries + 4 + keys].astype(np.int64)
    after = entries + hops.frame + keys + np.maximum(values, 0)
    _check_tiling(entries, after, begins[chosen], hops.ends[chosen], [paths[at] for at in chosen])
    return entries


def _check_tiling(entries: Positions, after: Positions, begins: Positions, ends: Positions, paths: list[str]) -> None:
    """Raise if entries and end marks together leave gaps in the buffer, or overlap."""
    firsts = np.searchsorted(entries, begins)
    wanted = np.append(after, 0)[:-1]
    following = np.append(entries[1:], ends[-1] - 4)
    # The last entry of a chain is followed by its end mark, if there is an entry at all.
    counts = np.diff(np.append(firsts, len(entries)))
    lasts = (np.append(firsts[1:], len(entries)) - 1)[counts > 0]
    following[lasts] = ends[counts > 0] - 4
    wrong = np.flatnonzero(wanted != following)
    begun = np.append(entries, -1)[firsts[counts > 0]] == begins[counts > 0]
    empty = (counts == 0) & (ends - begins != 4)
    if len(wrong) or not begun.all() or empty.any():
        where = int(entries[wrong[0]]) if len(wrong) else 0
        raise damaged(paths[int(np.searchsorted(ends, where, "right"))], "its entries leave gaps", offset=where)


def _guess(
    hops: _Hops, begins: Positions, firsts: npt.NDArray[np.int64], least: tuple[int, int]
) -> tuple[Positions, npt.NDArray[np.int64]]:
    """Return where lanes begin, and their chains: at the beginning of each chain, and at likely
    places.
    """
    sizes = hops.ends[firsts] - begins[firsts]
    lane = max(_LANE_BYTES, int(sizes.sum()) // _MAX_LANES)
    counts = sizes // lane
    total = int(counts.sum())
    if total <= len(firsts):
        return begins[firsts], firsts
    chain = np.repeat(firsts, counts)
    index = ramp(counts)
    aim = begins[chain] + index * lane
    inner = index > 0
    chain, aim = chain[inner], aim[inner]
    found = np.full(len(aim), -1, np.int64)
    # Candidates are tried a word apart from the chain's beginning on: rows are multiples of 8
    # bytes, and so are entries, except those with a version byte or a checksum.
    width = min(lane, 2 * _entry_size(hops, begins[firsts], firsts))
    for align in (8, 1):
        left = np.flatnonzero(found < 0)
        per_round = max(1, (1 << 20) * align // width)
        for first in range(0, len(left), per_round):
            some = left[first : first + per_round]
            found[some] = _first_likely(hops, aim[some], chain[some], align, width, least)
    kept = found >= 0
    starts = np.concatenate([begins[firsts], found[kept]])
    chains = np.concatenate([firsts, chain[kept]])
    order = np.argsort(starts, kind="stable")
    starts, chains = starts[order], chains[order]
    distinct = np.append(True, np.diff(starts) > 0)
    return starts[distinct], chains[distinct]


def _entry_size(hops: _Hops, begins: Positions, chain: npt.NDArray[np.int64]) -> int:
    """Return the size of the largest of the first entries of the chains, within bounds."""
    at, most = begins, 64
    for _ in range(32):
        key, value, possible = hops.step(at, chain)
        if not possible.any():
            break
        sizes = (hops.frame + key + np.maximum(value, 0))[possible]
        most = max(most, int(sizes.max()))
        at, chain = at[possible] + sizes, chain[possible]
    return min(most, 1 << 14)


def _first_likely(
    hops: _Hops, aim: Positions, chain: npt.NDArray[np.int64], align: int, width: int, least: tuple[int, int]
) -> Positions:
    """Return for each aim the first place from which several steps succeed; −1 if there is none.

    All candidates of all aims advance at once; few survive the first step.
    """
    base = hops.ends[chain - 1] * (chain > 0)
    first = aim + (-(aim - base) % align)
    offsets = np.arange(0, width, align)
    candidates = (first[:, None] + offsets).reshape(-1)
    lanes = np.repeat(np.arange(len(aim)), len(offsets))
    chains = chain[lanes]
    inside = candidates < hops.ends[chains] - 4
    candidates, lanes, chains = candidates[inside], lanes[inside], chains[inside]
    at = candidates
    for _ in range(_TRIES):
        key, value, possible = hops.step(at, chains)
        # If both keys and values could be empty, zeros would pass for entries.
        possible &= (key + value > 0) & (key >= least[0]) & ((value >= least[1]) | (value == -1))
        candidates, lanes, chains = candidates[possible], lanes[possible], chains[possible]
        at = (at + hops.frame + key + np.maximum(value, 0))[possible]
    found = np.full(len(aim), -1, np.int64)
    found[lanes[::-1]] = candidates[::-1]
    return found


def _run(
    hops: _Hops,
    starts: Positions,
    chain: npt.NDArray[np.int64],
    stops: Positions,
    marked: _Flags,
    paths: list[str],
) -> Positions:
    """Advance all lanes to their stops and mark entries; return where each lane ended."""
    landed = starts.copy()
    running = np.arange(len(starts))
    at, own, stop = starts.copy(), chain, stops
    while len(running) > _FEW_LANES:
        key, value, possible = hops.step(at, own)
        marked[at[possible]] = True
        landed[running] = np.where(possible, at + hops.frame + key + np.maximum(value, 0), at)
        on = possible & (landed[running] < stop)
        running, own, stop = running[on], own[on], stop[on]
        at = landed[running]
    for lane in running.tolist():
        landed[lane] = _follow(hops, int(landed[lane]), int(chain[lane]), int(stops[lane]), marked, paths)
    return landed


def _follow(hops: _Hops, at: int, own: int, stop: int, marked: _Flags, paths: list[str]) -> int:
    """Advance one lane to its stop, as :func:`_run` does many; return where it ended."""
    size_at, end = hops.sizes.item, int(hops.ends[own])
    least, empty = -1 if hops.may_delete[own] else 0, 0
    while at < stop:
        key, room = size_at(at), end - at - 4 - hops.frame
        value = size_at(at + 4 + key) if 0 <= key <= room else least - 1
        if not least <= value <= room - key:
            return at
        empty += not key
        if empty > _EMPTY_MAX:
            raise damaged(paths[own], f"more than {_EMPTY_MAX:,} entries one after another have no key")
        marked[at] = True
        at += hops.frame + key + max(0, value)
    return at


def _mend(
    hops: _Hops,
    starts: Positions,
    chain: npt.NDArray[np.int64],
    landed: Positions,
    stops: Positions,
    marked: _Flags,
    paths: list[str],
) -> None:
    """Make sure that exactly those entries are marked that a walk from each chain's beginning
    meets.
    """
    ends = hops.ends
    last = np.append(chain[1:] != chain[:-1], True)
    at_end = (landed == ends[chain] - 4) & (hops.sizes[np.minimum(landed, len(hops.sizes) - 1)] == -1)
    good = np.where(last, at_end, landed == stops)
    if good.all():
        return
    # Rare: a false beginning, or a broken file. From the first lane that missed, walk entry by
    # entry until the walk meets one that a later lane has marked as well.
    lane, count = 0, len(starts)
    bad = np.flatnonzero(~good)
    while lane < count:
        next_bad = int(np.searchsorted(bad, lane))
        if next_bad == len(bad):
            return
        lane = int(bad[next_bad])
        lane = _walk(hops, int(landed[lane]), lane, starts, chain, marked, paths)


def _walk(
    hops: _Hops,
    at: int,
    lane: int,
    starts: Positions,
    chain: npt.NDArray[np.int64],
    marked: _Flags,
    paths: list[str],
) -> int:
    """Walk from where a lane ended until the walk meets a later lane; return that lane.

    Removes marks that the walk passes over. Raises if an entry is impossible.
    """
    own = int(chain[lane])
    end, least = int(hops.ends[own]), -1 if hops.may_delete[own] else 0
    size_at = hops.sizes.item
    cleared = int(starts[lane + 1]) if lane + 1 < len(starts) else end
    while True:
        if at > cleared:
            marked[cleared:at] = False
            cleared = at
        if cleared <= at < end and marked[at]:
            return int(np.searchsorted(starts, at, "right")) - 1
        key = size_at(at)
        if at == end - 4 and key == -1:
            marked[at:end] = False
            return int(np.searchsorted(starts, end, "left"))
        room = end - at - 4 - hops.frame
        value = size_at(at + 4 + key) if 0 <= key <= room else least - 1
        if not least <= value <= room - key:
            begin = int(hops.ends[own - 1]) if own else 0
            raise damaged(
                paths[own],
                f"at byte {at - begin} of what it holds no entry can stand: its key's size is {key}"
                + (f", its value's {value}" if 0 <= key <= room else f", and {max(0, room)} bytes are left"),
                offset=at,
            )
        marked[at] = True
        cleared = max(cleared, at + 1)
        at += hops.frame + key + max(0, value)


FILE: Final = re.compile(r"([1-9]\d{0,17})\.(delta|snapshot)")
"""Names of the store's files; version 0 is the empty state and has none."""


_HASHED_WORDS: Final = 16
_PRIMES: Final = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


def versions(files: Sequence[str]) -> dict[int, set[str]]:
    """Return the kinds of files by version."""
    found: dict[int, set[str]] = {}
    for name in files:
        if match := FILE.fullmatch(name):
            found.setdefault(int(match[1]), set()).add(match[2])
    return found


def chain_names(files: Sequence[str], version: int, folder: str) -> list[str]:
    """Return the names of the files that make up a version, the oldest first.

    Raises ``DamagedCheckpoint`` (``OBJECT_MISSING``) that names the first missing delta.
    """
    found = versions(files)
    snapshot = max((v for v, kinds in found.items() if v <= version and "snapshot" in kinds), default=0)
    for wanted in range(version, snapshot, -1):
        if "delta" not in found.get(wanted, ()):
            raise damaged(
                f"{folder}/{wanted}.delta",
                "it is missing, and no later snapshot makes it needless",
                kind=ErrorKind.OBJECT_MISSING,
            )
    names = [f"{snapshot}.snapshot"] if snapshot else []
    return names + [f"{wanted}.delta" for wanted in range(snapshot + 1, version + 1)]


def files(store: Store, partition: int, listing: Listing) -> list[ObjectInfo]:
    """Return the files that make up a partition at the version, the oldest first."""
    folder = store.folder(partition)
    found = listing.files(folder)
    return [ObjectInfo(f"{folder}/{name}", found[name]) for name in chain_names(list(found), store.version, folder)]


def entries(folder: Storage, store: Store, partition: int, files: Sequence[ObjectInfo]) -> Entries:  # noqa: ARG001
    """Read a partition whole: its live entries, each key once."""
    if not files:
        return Entries(ByteStrings.joined(()), ByteStrings.joined(()))
    paths = [item.path for item in files]
    decoded = Decoded(sum(item.size_bytes for item in files))
    contents = [spark_decode(store.codec, read_whole(folder, item), item.path, decoded) for item in files]
    data = contents[0] if len(contents) == 1 else np.concatenate(contents)
    ends = np.cumsum([len(content) for content in contents]).astype(np.int64)
    deletes = np.array([path.endswith(".delta") for path in paths])
    least = (row_size(len(store.schema.key)), row_size(len(store.schema.value)))
    chain = parse_chains(data, ends, deletes, paths, least)
    if store.has_row_checksums:
        chain = _checked(chain, ends, paths)
    if len(files) == 1 and not deletes[0]:
        return Entries(chain.keys, chain.values)
    return _last_writes(chain)


def count(store: Store, entries: Entries) -> int:  # noqa: ARG001
    """Return how many rows the entries decode to: one each."""
    return len(entries.keys)


def key_columns(store: Store, keys: ByteStrings, path: str) -> list[pa.Array]:
    """Decode keys."""
    return decode_rows(keys, store.schema.key, path)


def columns(store: Store, entries: Entries, path: str) -> list[pa.Array]:
    """Decode entries: the key's columns, then the value's."""
    return [
        *key_columns(store, entries.keys, path),
        *decode_rows(entries.values, store.schema.value, path),
    ]


def problems(
    folder: Storage, store: Store, partition: int, files: Sequence[ObjectInfo], listing: Listing, level: Level
) -> Iterable[CheckpointError]:
    """Return nothing: anything wrong with these files is found when they are read."""
    del folder, store, partition, files, listing, level
    return ()


def _row_checksums(keys: ByteStrings, values: ByteStrings) -> npt.NDArray[np.uint32]:
    """Return the CRC-32C of each key and value together."""
    # Each value behind its key.
    by_turns = np.arange(2 * len(keys)).reshape(2, -1).T.reshape(-1)
    rows = ByteStrings.joined((keys, values)).take(by_turns).packed()
    return crc32c(rows, keys.length + values.length)


def with_sums(keys: ByteStrings, values: ByteStrings) -> ByteStrings:
    """Return values behind the checksums that :func:`entries` removes."""
    sums = _row_checksums(keys, values).astype("<u4")
    return prefixed(
        pa.Array.from_buffers(pa.binary(4), len(sums), [None, pa.py_buffer(sums)]).cast(pa.binary()), values
    )


def _checked(chain: Chain, ends: Positions, paths: list[str]) -> Chain:
    """Compare the checksums of entries and remove them (Spark 4.2: ``rowChecksum``).

    A value has four bytes before it, the checksum of key and value; for a deletion the key has
    them.
    """
    keys, values = chain.keys, chain.values
    deleted = values.length < 0
    holder = np.where(deleted, keys.start, values.start)
    short = np.where(deleted, keys.length, values.length) < 4
    if not short.any():
        stored = ByteStrings(keys.data, holder, np.full(len(holder), 4, np.int64)).fixed(0, "<u4")
        keys = ByteStrings(keys.data, keys.start + 4 * deleted, keys.length - 4 * deleted)
        values = ByteStrings(values.data, values.start + 4 * ~deleted, values.length - 4 * ~deleted)
        plain = ByteStrings(values.data, values.start, np.maximum(values.length, 0))
        short = stored != _row_checksums(keys, plain)
    if short.any():
        at = int(holder[np.argmax(short)])
        raise damaged(
            paths[int(np.searchsorted(ends, at, "right"))],
            f"the row {int(np.argmax(short))} of what it and the files before it hold has a checksum of another row",
            offset=at,
        )
    return Chain(keys, values)


def _last_writes(chain: Chain) -> Entries:
    """Keep the last write of each key, unless it deletes."""
    alive = chain.values.length >= 0
    # Few keys are written twice, and a key whose hash no other has was not.
    again = np.flatnonzero(_shared_hash(chain.keys))
    codes = key_codes(chain.keys.take(again))
    last = np.zeros(int(codes.max()) + 1 if len(again) else 0, np.int64)
    # For repeated indexes numpy keeps the last value.
    last[codes] = np.arange(len(again))
    alive[again] &= last[codes] == np.arange(len(again))
    kept = np.flatnonzero(alive)
    removed = chain.keys.take(np.flatnonzero(chain.values.length < 0))
    return Entries(chain.keys.take(kept), chain.values.take(kept), removed)


def key_codes(keys: ByteStrings) -> npt.NDArray[np.int64]:
    """Return one number per key, equal exactly if the bytes are equal."""
    if not len(keys):
        return np.zeros(0, np.int64)
    binary = keys.to_arrow()
    return np.asarray(binary.dictionary_encode().indices, np.int64)


def _shared_hash(keys: ByteStrings) -> npt.NDArray[np.bool_]:
    """Return the keys whose hash another key has: all that are written twice, and few more."""
    found = np.zeros(len(keys), np.bool_)
    if len(keys) < 2:
        return found
    mixed = keys.length.astype(np.uint64) * _PRIMES[0]
    words = keys.length >> 3
    view: npt.NDArray[np.uint64] = at_every_byte(keys.data, "<u8")
    # The first words, and the last: the bytes between are left to the exact comparison.
    for word in range(min(int(words.max()), _HASHED_WORDS)):
        places = keys.start + 8 * word
        short = words <= word
        some = short.any()
        found_word = np.where(short, np.uint64(0), view[np.where(short, 0, places)]) if some else view[places]
        if not some and word + 1 < int(words.max()) and not found_word.any():
            # The null bits of most keys.
            continue
        mixed ^= found_word
        mixed *= _PRIMES[1]
        mixed ^= mixed >> np.uint64(29)
    if int(words.max()) > _HASHED_WORDS or np.any(keys.length & 7):
        long = keys.length >= 8
        places = np.where(long, keys.start + keys.length - 8, 0)
        mixed = (mixed ^ np.where(long, view[places] if len(view) else np.uint64(0), np.uint64(0))) * _PRIMES[2]
        mixed ^= mixed >> np.uint64(31)
    order = np.argsort(mixed)
    same = mixed[order[1:]] == mixed[order[:-1]]
    found[order[1:][same]] = True
    found[order[:-1][same]] = True
    return found
