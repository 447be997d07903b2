"""A table file of RocksDB: its properties, its index, and its entries.

Read ``blocks`` first. A key within a table is the user's key and eight more bytes,
little-endian: the sequence number in 56 bits and the type of the entry in the low eight.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..byte_strings import ByteStrings, Octets, Positions
from ..framing import damaged
from .blocks import (
    TRAILER,
    Blocks,
    Entries,
    Handles,
    Measure,
    ReadRange,
    TableFile,
    gather,
    handle_at,
    load,
    open_file,
    read_entries,
    single,
    unsupported,
    varint_at,
    varints,
)

DELETE, PUT, MERGE, SINGLE_DELETE, RANGE_DELETE = 0, 1, 2, 7, 15
_REFUSED_TYPES: Final = {
    0x11: "values in blob files",
    0x14: "user-defined timestamps",
    0x16: "wide columns",
    0x18: "values with a time of their own (TimedPut)",
}
_BYTEWISE: Final = "leveldb.BytewiseComparator"
_HANDLE_KEY_FIRST: Final = 3
"""The index type that stores each block's first key beside its handle."""
_TWO_LEVEL: Final = 2
_GLOBAL_SEQUENCE: Final = b"rocksdb.external_sst_file.global_seqno"
_SPLIT_MIN: Final = 1 << 20
"""No compaction ends a table with less data than this to begin another one."""
_SMALL_MAX: Final = 1 << 20
"""No properties block has so many entries."""


@dataclass(frozen=True)
class Properties:
    """The properties that a table stores."""

    column_family: str | None
    comparator: str | None
    merge_operator: str | None
    entries: int
    """All records, including range deletions."""
    deletions: int
    """Deletions of keys and of ranges."""
    merges: int
    range_deletions: int
    external: bool
    """Written outside a database and ingested: its own sequence numbers mean nothing."""
    global_sequence: int
    """The one sequence number of all entries of an external table; 0 if the file does not have
    it.
    """
    index_type: int
    index_has_user_keys: bool
    index_is_delta_encoded: bool
    raw_bytes: int
    """The size of all keys and values, before compression."""


class Run(NamedTuple):
    """Entries of one table or of several, not yet merged."""

    key: ByteStrings
    """The users' keys."""
    stamp: npt.NDArray[np.uint64]
    """Sequence number << 8 | type."""
    value: ByteStrings
    counts: tuple[int, ...] = ()
    """How many entries come from each table, if they are ordered table by table."""


class Tombstone(NamedTuple):
    """Deletes all older entries of the keys from ``start`` to ``end`` (exclusive)."""

    start: bytes
    end: bytes
    sequence: int
    span: tuple[bytes, bytes] | None = None
    """First and last key of a table that may be one of several outputs of a compaction. Beyond them
    the deletion may not apply, which only the manifest says.
    """


class Separators(Sequence[bytes]):
    """Keys that separate blocks: none of block *i* is greater than the *i*-th."""

    def __init__(self, keys: ByteStrings) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> bytes:  # type: ignore[override]
        return self.keys.bytes(index)


@dataclass(frozen=True)
class Table:
    """One table file, opened: footer, properties and index have been read, data blocks have not.

    Picklable if ``file.read`` is.
    """

    file: TableFile
    properties: Properties
    blocks: Handles
    """The handles of the data blocks, in key order."""
    separators: Separators
    tombstones: tuple[Tombstone, ...]

    @property
    def path(self) -> str:
        """Where the file is, for people."""
        return self.file.path

    @cached_property
    def stored_bytes(self) -> int:
        """The stored size of all data blocks."""
        return int(self.blocks.size.sum())

    def separator_prefixes(self, size: int) -> Positions:
        """Return the first bytes of each block's separator as a number, padded with zeros."""
        keys = self.separators.keys
        found = np.zeros(len(keys), np.int64)
        for at in range(size):
            has = keys.length > at
            found[has] |= keys.data[keys.start[has] + at].astype(np.int64) << 8 * (size - 1 - at)
        return found

    def between(self, low: bytes | None, high: bytes | None) -> tuple[int, int]:
        """Return which data blocks may have keys from ``low`` to ``high`` (exclusive)."""
        first = 0 if low is None else bisect_left(self.separators, low)
        last = len(self.separators) if high is None else bisect_left(self.separators, high) + 1
        return first, min(last, len(self.separators))


def open_table(read: ReadRange, size: int, path: str) -> Table:
    """Open a table file of ``size`` bytes.

    Raises ``DamagedCheckpoint`` and ``UnsupportedFormat``.
    """
    file = open_file(read, size, path)
    meta = dict(small_block(file.load(single(file.metaindex)).bytes(0), path))
    if b"rocksdb.properties" not in meta:
        raise damaged(path, "its metaindex has no properties")
    found = dict(_properties_block(file, handle_at(meta[b"rocksdb.properties"], 0, path)[0]))
    properties = _properties(found, path)
    if b"rocksdb.compression_dict" in meta:
        raise unsupported(path, "its blocks are compressed with a dictionary")
    if file.version >= 6:
        if b"rocksdb.index" not in meta:
            raise damaged(path, "its metaindex has no index")
        place, _ = handle_at(meta[b"rocksdb.index"], 0, path)
    elif file.index is None:
        raise damaged(path, "its footer has no index")
    else:
        place = file.index
    blocks, separators = _index(file, properties, place)
    # Everything else in the file comes after its data.
    limit = min(place[0], file.metaindex[0])
    if len(blocks.offset) and int(blocks.offset[-1] + blocks.size[-1]) > limit:
        raise damaged(path, f"a data block reaches beyond byte {limit}, where the index or the metaindex begins")
    place = handle_at(meta[b"rocksdb.range_del"], 0, path)[0] if b"rocksdb.range_del" in meta else (0, 0)
    tombstones = _tombstones(file, properties, single(place)) if place[1] else ()
    if len(tombstones) != properties.range_deletions:
        raise damaged(
            path, f"it has {len(tombstones)} range deletions, its properties say {properties.range_deletions}"
        )
    table = Table(file, properties, blocks, separators, tombstones)
    if not tombstones or table.stored_bytes < _SPLIT_MIN or not len(separators):
        return table
    count = len(separators)
    first, last = (Separators(read_run([(table, at, at + 1)]).key) for at in (0, count - 1))
    span = (first[0], last[-1])
    return replace(table, tombstones=tuple(stone._replace(span=span) for stone in tombstones))


def read_run(wanted: Sequence[tuple[Table, int, int]], *, whole: bool = False) -> Run:
    """Read data blocks ``first`` … ``last - 1`` of each table into one run, in that order.

    ``whole`` says that these are all blocks of each table, so entries are counted and compared with
    the tables' own counts.
    """
    blocks = load([(table.file, table.blocks.part(first, last)) for table, first, last in wanted])
    owner = np.repeat(np.arange(len(wanted)), [last - first for _, first, last in wanted])

    def path(block: int) -> str:
        return wanted[int(owner[block])][0].path if len(owner) else ""

    entries = read_entries(blocks, path)
    run = _split(entries, path)
    table_of = owner[entries.block]
    _refuse_types(run, table_of, wanted)
    stamp = run.stamp
    for number, (table, _, _) in enumerate(wanted):
        if table.properties.global_sequence:
            mine = table_of == number
            kinds = stamp[mine] & np.uint64(0xFF)
            stamp[mine] = kinds | np.uint64(table.properties.global_sequence << 8)
    if whole:
        for number, (table, _, _) in enumerate(wanted):
            counter = Counter(table)
            counter.add(stamp if len(wanted) == 1 else stamp[table_of == number])
            counter.compare()
    counts = np.bincount(table_of, minlength=len(wanted)).tolist()
    return run._replace(counts=tuple(counts))


class Counter:
    """Counts a table's entries by type, to compare them with the table's own counts."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.kinds = np.zeros(256, np.int64)

    def add(self, stamp: npt.NDArray[np.uint64]) -> None:
        """Count entries by their stamps."""
        self.kinds += np.bincount((stamp & np.uint64(0xFF)).astype(np.uint8), minlength=256)

    def compare(self) -> None:
        """Raise ``DamagedCheckpoint`` if a number differs."""
        says, ranges = self.table.properties, len(self.table.tombstones)
        for name, have, want in (
            ("entries", int(self.kinds.sum()) + ranges, says.entries),
            ("deletions", int(self.kinds[DELETE] + self.kinds[SINGLE_DELETE]) + ranges, says.deletions),
            ("merge operands", int(self.kinds[MERGE]), says.merges),
        ):
            if have != want:
                raise damaged(self.table.path, f"it has {have} {name}, its properties say {want}")


def _split(entries: Entries, path: Callable[[int], str]) -> Run:
    """Separate the users' keys from the bytes that the table adds."""
    key = entries.key
    if len(key) and int(key.length.min()) < 8:
        wrong = int(np.argmin(key.length))
        block = int(entries.block[wrong])
        raise damaged(path(block), f"a key has {int(key.length[wrong])} bytes; 8 is the least")
    length = key.length - 8
    stamp = gather(key.data, key.start + length, 8).view("<u8").reshape(-1).astype(np.uint64)
    return Run(ByteStrings(key.data, key.start, length), stamp, entries.value)


def _refuse_types(run: Run, table_of: Positions, wanted: Sequence[tuple[Table, int, int]]) -> None:
    kinds = (run.stamp & np.uint64(0xFF)).astype(np.uint8)
    known = (kinds <= MERGE) | (kinds == SINGLE_DELETE)
    if known.all():
        return
    wrong = int(np.argmin(known))
    kind, path = int(kinds[wrong]), wanted[int(table_of[wrong])][0].path
    if kind in _REFUSED_TYPES:
        raise unsupported(path, f"it holds {_REFUSED_TYPES[kind]}", type=kind)
    raise damaged(path, f"an entry is of the unknown type {kind:#x}")


def small_block(octets: bytes, path: str) -> list[tuple[bytes, bytes]]:
    """Read a block of a few entries, such as metaindex and properties."""
    return [(key, octets[at : at + size]) for key, at, size in _places(octets, path)]


def _places(octets: bytes, path: str) -> list[tuple[bytes, int, int]]:
    """Find the entries of a small block: keys, and where the values are."""
    found: list[tuple[bytes, int, int]] = []
    if len(octets) < 8:
        raise damaged(path, f"a block of {len(octets)} bytes has no restart points")
    restarts = int.from_bytes(octets[-4:], "little")
    end, at, key = len(octets) - 4 - 4 * restarts, 0, b""
    if restarts < 1 or end < 0:
        raise damaged(path, f"a block of {len(octets)} bytes declares {restarts} restart points")
    while at < end:
        shared, at = varint_at(octets, at, path)
        own, at = varint_at(octets, at, path)
        size, at = varint_at(octets, at, path)
        if shared > len(key) or at + own + size > end or len(found) > _SMALL_MAX:
            raise damaged(path, "an entry of the properties or the metaindex passes its end")
        key = key[:shared] + octets[at : at + own]
        found.append((key, at + own, size))
        at += own + size
    return found


def _properties_block(file: TableFile, place: tuple[int, int]) -> list[tuple[bytes, bytes]]:
    """Read the properties.

    The global sequence number of an ingested table is overwritten afterwards; the checksum is of
    the block as it was, with zero there.
    """
    offset, size = place
    octets = bytes(file.read(offset, size + TRAILER)) if offset + size + TRAILER <= file.size else b""
    if len(octets) != size + TRAILER or octets[size] or file.fits(place, octets):
        return small_block(file.load(single(place)).bytes(0), file.path)
    places = [at for key, at, length in _places(octets[:size], file.path) if key == _GLOBAL_SEQUENCE and length == 8]
    if not places or not file.fits(place, octets[: places[0]] + bytes(8) + octets[places[0] + 8 :]):
        file.load(single(place))  # Raises the error that says what is wrong.
    return small_block(octets[:size], file.path)


def _properties(found: dict[bytes, bytes], path: str) -> Properties:
    def number(name: str, default: int = 0) -> int:
        value = found.get(f"rocksdb.{name}".encode())
        return default if value is None else varint_at(value, 0, path)[0]

    def text(name: str) -> str | None:
        value = found.get(f"rocksdb.{name}".encode())
        return None if value is None else value.decode("utf-8", "replace")

    def fixed(name: str, form: str) -> int:
        value = found.get(f"rocksdb.{name}".encode())
        if value is None:
            return 0
        if len(value) != struct.calcsize(form):
            raise damaged(path, f"its property rocksdb.{name} has {len(value)} bytes")
        return int(struct.unpack(form, value)[0])

    external = fixed("external_sst_file.version", "<I")
    if external > 2:
        raise unsupported(path, f"it was taken in from outside by version {external}")
    sequence = fixed("external_sst_file.global_seqno", "<Q")
    if sequence >> 56:
        raise damaged(path, f"its sequence number is {sequence}; such a number has 56 bits")
    comparator = text("comparator")
    if comparator not in (None, "", _BYTEWISE):
        raise unsupported(path, f"its keys are ordered by {comparator}", comparator=comparator)
    if number("udi.is.primary.index"):
        raise unsupported(path, "its index is of the user's own kind")
    return Properties(
        column_family=text("column.family.name"),
        comparator=comparator,
        merge_operator=text("merge.operator"),
        entries=number("num.entries"),
        deletions=number("deleted.keys"),
        merges=number("merge.operands"),
        range_deletions=number("num.range-deletions"),
        external=external > 0,
        global_sequence=sequence,
        index_type=fixed("block.based.table.index.type", "<I"),
        index_has_user_keys=bool(number("index.key.is.user.key")),
        index_is_delta_encoded=bool(number("index.value.is.delta.encoded")),
        raw_bytes=number("raw.key.size") + number("raw.value.size"),
    )


def _index(file: TableFile, properties: Properties, place: tuple[int, int]) -> tuple[Handles, Separators]:
    """Read the index: the data blocks' handles, and the keys that separate them."""
    if properties.index_type > _HANDLE_KEY_FIRST:
        raise unsupported(file.path, f"its index is of type {properties.index_type}")
    handles, keys = _index_blocks(file, properties, single(place))
    if properties.index_type == _TWO_LEVEL and len(keys):
        handles, keys = _index_blocks(file, properties, handles)
    offset, size = handles
    if len(offset) and ((offset < 0).any() or (offset[1:] < offset[:-1] + size[:-1]).any()):
        raise damaged(file.path, "its index has blocks that overlap or are out of order")
    return handles, Separators(keys)


def _index_blocks(file: TableFile, properties: Properties, places: Handles) -> tuple[Handles, ByteStrings]:
    blocks = file.load(places)
    with_first = properties.index_type == _HANDLE_KEY_FIRST
    seen: list[_Handles] = []

    def measure(lanes: int) -> Measure:
        seen.append(_Handles(blocks.data, lanes, with_first))
        return seen[0]

    if properties.index_is_delta_encoded:
        entries = read_entries(blocks, lambda _: file.path, measure)
        handles = seen[0].in_order()
    else:
        entries = read_entries(blocks, lambda _: file.path)
        offset, at = varints(blocks.data, entries.value.start)
        size, _ = varints(blocks.data, at)
        handles = Handles(offset, size)
    keys = entries.key
    if not properties.index_has_user_keys:
        if len(keys) and int(keys.length.min()) < 8:
            raise damaged(file.path, f"a key of its index has {int(keys.length.min())} bytes; 8 is the least")
        keys = ByteStrings(keys.data, keys.start, keys.length - 8)
    return handles, keys


class _Handles:
    """Reads the values of a delta-encoded index block, which have no length in front of them.

    An entry whose key shares nothing has a whole handle; any other has the difference between its
    block's size and that of the previous block, which it follows without a gap.
    """

    def __init__(self, data: Octets, lanes: int, with_first: bool) -> None:
        self.data, self.with_first = data, with_first
        self.offset, self.size = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
        self.steps: list[tuple[Positions, Positions, Positions]] = []

    def __call__(self, lanes: Positions, shared: Positions, at: Positions) -> Positions:
        first, after = varints(self.data, at)
        whole = shared == 0
        size, beyond = varints(self.data, after)
        moved = (first >> 1) ^ -(first & 1)
        self.offset[lanes] = np.where(whole, first, self.offset[lanes] + self.size[lanes] + 5)
        self.size[lanes] = np.where(whole, size, self.size[lanes] + moved)
        self.steps.append((lanes, self.offset[lanes], self.size[lanes]))
        end = np.where(whole, beyond, after)
        if self.with_first:
            length, end = varints(self.data, end)
            end = end + np.minimum(length, len(self.data))
        return end

    def in_order(self) -> Handles:
        """Return the handles by lane and step."""
        lane = np.concatenate([np.zeros(0, np.int64), *(step[0] for step in self.steps)])
        order = np.argsort(lane, kind="stable")
        empty = np.zeros(0, np.int64)
        offset = np.concatenate([empty, *(step[1] for step in self.steps)])[order]
        return Handles(offset, np.concatenate([empty, *(step[2] for step in self.steps)])[order])


def _tombstones(file: TableFile, properties: Properties, place: Handles) -> tuple[Tombstone, ...]:
    """Read the range deletions."""
    blocks: Blocks = file.load(place)
    entries = read_entries(blocks, lambda _: file.path)
    run = _split(entries, lambda _: file.path)
    kinds = run.stamp & np.uint64(0xFF)
    if (kinds != RANGE_DELETE).any():
        raise damaged(file.path, "an entry among its range deletions is none")
    sequences = (run.stamp >> np.uint64(8)).tolist()
    own = properties.global_sequence
    starts, ends = Separators(run.key), Separators(run.value)
    return tuple(Tombstone(starts[index], ends[index], own or sequences[index]) for index in range(len(sequences)))
