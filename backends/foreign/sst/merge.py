"""Entries of all tables of a column family, merged as RocksDB's reads do.

The newest entry of a key counts; a delete ends it; merge operands are joined, the oldest first,
onto the value under them by one byte (StringAppendOperator). Nothing loops over entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind

from ..byte_strings import ByteStrings, Octets, Positions, cut, from_arrow
from ..framing import damaged
from .blocks import PAD, gather, unsupported
from .table import DELETE, MERGE, PUT, SINGLE_DELETE, Run, Table, Tombstone, read_run

_NARROW: Final = 512
_JOINED_MAX: Final = 1 << 30


def merged(
    tables: Sequence[Table], low: bytes | None = None, high: bytes | None = None, *, delimiter: bytes = b","
) -> tuple[ByteStrings, ByteStrings]:
    """Read keys from ``low`` to ``high`` (exclusive) of one column family: keys and values.

    In the order of the keys' bytes; each key once. Blocks outside the range are not read.
    """
    run, tombstones = read_tables(tables, low, high)
    return newest(run, tombstones, _names(tables), external=_external(tables), delimiter=delimiter)


def read_tables(
    tables: Sequence[Table], low: bytes | None = None, high: bytes | None = None
) -> tuple[Run, list[Tombstone]]:
    """Read all entries of a range of keys, not merged, and the range deletions.

    If the range is open at both ends, entries are counted and compared with the tables' own counts.
    """
    wanted = [(table, *table.between(low, high)) for table in tables]
    wanted = [(table, first, last) for table, first, last in wanted if first < last]
    _check_operators(tables)
    whole = low is None and high is None
    run = read_run(wanted, whole=whole)
    tombstones = [stone for table in tables for stone in table.tombstones]
    return run if whole else _clipped(run, low, high), tombstones


def _check_operators(tables: Sequence[Table]) -> None:
    for table in tables:
        says = table.properties
        if says.merges and says.merge_operator is not None and "StringAppend" not in says.merge_operator:
            raise unsupported(table.path, f"its values are merged by {says.merge_operator}")


def _names(tables: Sequence[Table]) -> str:
    if not tables:
        return ""
    return tables[0].path if len(tables) == 1 else f"{tables[0].path} and {len(tables) - 1} more"


def _external(tables: Sequence[Table]) -> bool:
    """Return whether it is unknown when a table was written relative to others."""
    return len(tables) > 1 and any(
        table.properties.external and not table.properties.global_sequence for table in tables
    )


def newest(
    run: Run,
    tombstones: Iterable[Tombstone],
    path: str,
    *,
    external: bool = False,
    delimiter: bytes = b",",
) -> tuple[ByteStrings, ByteStrings]:
    """Return the keys that are not deleted, and their values, from a run in any order."""
    key, stamp, value = run.key, run.stamp, run.value
    ordered = Ordered(key, stamp)
    if ordered.order is not None:
        key, stamp, value = key.take(ordered.order), stamp[ordered.order], value.take(ordered.order)
    begins = ordered.begins
    alive = stamp >> np.uint64(8) >= _covered(key, stamp, tombstones, path)
    if not alive.all():
        key, stamp, value = key.take(alive), stamp[alive], value.take(alive)
        begins = _begins(key)
    kind = (stamp & np.uint64(0xFF)).astype(np.uint8)
    if begins.all() and (kind == PUT).all():
        return key, value
    _check_ties(begins, stamp, path, external)
    group = np.cumsum(begins) - 1
    # An entry counts while no put or delete of its key is newer.
    closing = kind != MERGE
    closed = np.cumsum(closing) - closing
    first = np.flatnonzero(begins)
    open_ = closed == closed[first][group] if len(first) else begins
    kept = np.flatnonzero(open_ & (kind != DELETE) & (kind != SINGLE_DELETE))
    owner = group[kept]
    firsts = np.flatnonzero(np.diff(owner, prepend=-1))
    counts = np.diff(firsts, append=len(kept))
    keys = key.take(kept[firsts])
    if (counts == 1).all():
        return keys, value.take(kept)
    return keys, _joined(value.take(kept), firsts, counts, path, delimiter)


def _covered(
    key: ByteStrings, stamp: npt.NDArray[np.uint64], tombstones: Iterable[Tombstone], path: str
) -> npt.NDArray[np.uint64]:
    """Return the newest range deletion over each key, as its sequence number; 0 if there is
    none.
    """
    stones = list(tombstones)
    spans = [(_search(key, stone.start), _search(key, stone.end), stone.sequence) for stone in stones]
    _check_spans(key, stamp, [(*span[:2], stone) for span, stone in zip(spans, stones, strict=True)], path)
    spans = sorted(span for span in spans if span[0] < span[1])
    found = np.zeros(len(key), np.uint64)
    cuts = sorted({at for first, last, _ in spans for at in (first, last)})
    over: list[tuple[int, int]] = []
    nth = 0
    for begin, end in pairwise(cuts):
        while nth < len(spans) and spans[nth][0] <= begin:
            heappush(over, (-spans[nth][2], spans[nth][1]))
            nth += 1
        while over and over[0][1] <= begin:
            heappop(over)
        if over:
            found[begin:end] = -over[0][0]
    return found


def _check_spans(
    key: ByteStrings, stamp: npt.NDArray[np.uint64], found: Sequence[tuple[int, int, Tombstone]], path: str
) -> None:
    """Refuse range deletions that might wrongly apply to keys outside their table.

    A compaction writes a range deletion whole into each of its outputs, and it applies only within
    that output. In other tables, a newer key may have had its sequence number set to 0 since.
    """
    found = [(first, last, stone) for first, last, stone in found if first < last and stone.span is not None]
    if not found:
        return
    zeros = np.concatenate([[0], np.cumsum(stamp >> np.uint64(8) == 0)])
    for first, last, stone in found:
        low, high = stone.span or (b"", b"")
        begin = min(max(first, _search(key, low)), last)
        end = max(min(last, _search(key, high + b"\0")), begin)
        if zeros[begin] > zeros[first] or zeros[last] > zeros[end]:
            raise unsupported(
                path, "a range of keys is deleted in one file, and whether in others too stands in the manifest only"
            )


def _clipped(run: Run, low: bytes | None, high: bytes | None) -> Run:
    """Return a run without the entries that are outside a range of keys.

    Each table's entries are in order, and only its first and last blocks can have such entries.
    """
    kept, first = [], 0
    for size in run.counts:
        last = first + size
        begin = first if low is None else _search(run.key, low, first, last)
        end = last if high is None else _search(run.key, high, begin, last)
        kept.append((begin, end))
        first = last
    if all(a == b for (_, a), (b, _) in pairwise(kept)) and kept:
        begin, end = kept[0][0], kept[-1][1]
        return Run(run.key.slice(begin, end), run.stamp[begin:end], run.value.slice(begin, end), ())
    chosen = np.concatenate([np.zeros(0, np.int64), *(np.arange(begin, end) for begin, end in kept)])
    return Run(run.key.take(chosen), run.stamp[chosen], run.value.take(chosen), ())


def _search(key: ByteStrings, wanted: bytes, low: int = 0, high: int | None = None) -> int:
    """Return the first position from ``low`` to ``high``, where keys are in order, not below a
    key.
    """
    high = len(key) if high is None else high
    while low < high:
        middle = (low + high) // 2
        if key.bytes(middle) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


class Ordered:
    """The order of entries: by key, the newest of each first."""

    order: Positions | None
    """None if entries are in this order already."""
    begins: npt.NDArray[np.bool_]
    """In that order: whether the key differs from the one before."""

    def __init__(self, key: ByteStrings, stamp: npt.NDArray[np.uint64]) -> None:
        self.key = key
        self.order = None
        rows = _rows(key)
        if rows is None:
            self._by_arrow(stamp)
            return
        text = rows.view(f"S{rows.shape[1]}").reshape(-1)
        if (text[:-1] < text[1:]).all():
            self.begins = np.ones(len(key), np.bool_)
            return
        # Newest first: the complement of the stamp, the high byte first.
        newest_first = (~stamp).astype(">u8").view(np.uint8).reshape(-1, 8)
        whole = np.concatenate([rows, newest_first], axis=1)
        # Sorted runs, one per table, are merged by a stable sort.
        self.order = np.argsort(whole.view(f"S{whole.shape[1]}").reshape(-1), kind="stable")
        text = text[self.order]
        self.begins = np.ones(len(key), np.bool_)
        self.begins[1:] = text[1:] != text[:-1]

    def _by_arrow(self, stamp: npt.NDArray[np.uint64]) -> None:
        table = pa.table({"key": self.key.to_arrow(), "stamp": stamp})
        order = pc.sort_indices(table, [("key", "ascending"), ("stamp", "descending")])
        self.order = order.to_numpy().astype(np.int64)
        self.begins = _begins(self.key.take(self.order))


def _rows(key: ByteStrings) -> Octets | None:
    """Return keys as rows of one width that compare as the keys do; None if that takes too much
    memory.
    """
    count = len(key)
    if not count:
        return np.zeros((0, 1), np.uint8)
    width, total = int(key.length.max()), int(key.length.sum())
    if width > _NARROW or width * count > 4 * total + (1 << 24):
        return None
    data = key.data
    if int(key.start.max()) + max(width, 1) > len(data):
        data = np.concatenate([data, np.zeros(PAD, np.uint8)])
    rows = gather(data, key.start, max(width, 1))
    if int(key.length.min()) == width and width:
        return rows
    rows[np.arange(rows.shape[1]) >= key.length[:, None]] = 0
    # Zeros at a key's end count: of two keys that are otherwise equal, the shorter is less.
    return np.concatenate([rows, key.length.astype(">u2").view(np.uint8).reshape(-1, 2)], axis=1)


def _begins(key: ByteStrings) -> npt.NDArray[np.bool_]:
    """Return which keys, in order, differ from the one before."""
    found = np.ones(len(key), np.bool_)
    if len(key) > 1:
        array = key.to_arrow()
        found[1:] = pc.not_equal(array[1:], array[:-1]).to_numpy(zero_copy_only=False)
    return found


def _check_ties(begins: npt.NDArray[np.bool_], stamp: npt.NDArray[np.uint64], path: str, external: bool) -> None:
    """Check that several entries of a key have different sequence numbers."""
    again = np.flatnonzero(~begins)
    if not len(again):
        return
    if external:
        raise unsupported(
            path,
            "a file was taken in from outside and has keys of other files, but its sequence number stands in the "
            "manifest only",
        )
    tied = stamp[again] >> np.uint64(8) == stamp[again - 1] >> np.uint64(8)
    if tied.any():
        sequence = int(stamp[again[int(np.argmax(tied))]]) >> 8
        raise damaged(path, f"two entries of one key have the sequence number {sequence}; a file is there twice")


def _joined(value: ByteStrings, firsts: Positions, counts: Positions, path: str, delimiter: bytes) -> ByteStrings:
    """Join the values of each group, the last one first."""
    lasts = firsts + counts - 1
    oldest_first = np.repeat(lasts + firsts, counts) - np.arange(len(value))
    value = value.take(oldest_first)
    sizes = np.add.reduceat(value.length + 1, firsts)
    if int(sizes.max()) > _JOINED_MAX:
        raise damaged(path, f"one list has {int(sizes.max()):,} bytes", kind=ErrorKind.LIMIT_EXCEEDED)
    pieces: list[ByteStrings] = []
    for first, last in cut(sizes, _JOINED_MAX):
        begin = int(firsts[first])
        end = int(firsts[last]) if last < len(firsts) else len(value)
        offsets = np.append(firsts[first:last], end) - begin
        lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), value.slice(begin, end).to_arrow())
        pieces.append(from_arrow(pc.binary_join(lists, delimiter)))
    return pieces[0] if len(pieces) == 1 else ByteStrings.joined(pieces)
