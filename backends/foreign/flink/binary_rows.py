"""Flink SQL's binary rows, arrays and maps, little-endian, to Arrow: many at once, field by field.

A field of a row is a word of 8 bytes; longer values follow the words, and the word says where
(offset in the high half, size in the low). Text of up to 7 bytes is in the word itself. The
serializers at the end put the length of a value before it, unless that is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, UnsupportedFormat

from ..byte_strings import ByteStrings, Positions, ramp
from .compound import ROW_KINDS, list_offsets, refuse_kinds
from .lanes import Lanes, Serializer, gathered, scattered, struct
from .scalars import microseconds, refused
from .sql_types import Logical, raw_within

Present = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows, arrays or maps are: ``begin`` to ``end`` each; ``lanes`` has buffer and path."""

    lanes: Lanes
    begin: Positions
    end: Positions
    total: int
    """Their contents have no more bytes than this: a place that occurs twice here is counted
    once.
    """

    @classmethod
    def of(cls, lanes: Lanes, found: ByteStrings) -> Places:
        return cls(lanes, found.start, found.start + found.length, int(found.length.sum()))

    def take(self, chosen: npt.NDArray[np.int64]) -> Places:
        return Places(self.lanes, self.begin[chosen], self.end[chosen], self.total)

    def require(self, sizes: int | Positions, what: str) -> None:
        """Raise ``DamagedCheckpoint`` unless each has ``sizes`` bytes."""
        short = self.end - self.begin < sizes
        if short.any():
            self.damaged(int(np.flatnonzero(short)[0]), what)

    def damaged(self, place: int, what: str) -> None:
        at = self.lanes.at(self.begin[place : place + 1], self.end[place : place + 1])
        at.damaged(0, f"{what} of {int(self.end[place] - self.begin[place])} bytes is not what it should be")


def read_rows(kind: Logical, places: Places) -> tuple[pa.Array, npt.NDArray[np.uint8]]:
    """Return rows as a struct, and the kind of each (0 to 3 unless damaged)."""
    count = len(kind.children)
    header = (count + 8 + 63) // 64 * 8
    places.require(header + 8 * count, "a row")
    kinds = places.lanes.data[places.begin]
    arrays = []
    for i, child in enumerate(kind.children):
        null = (places.lanes.data[places.begin + (i + 8) // 8] >> np.uint8((i + 8) % 8)) & 1
        arrays.append(_values(child, places, places.begin + header + 8 * i, null == 0))
    if not arrays:
        arrays = [pa.array(np.ones(len(places.begin), np.bool_))]
    return struct(arrays, kind.arrow), kinds


def read_lists(kind: Logical, places: Places) -> pa.Array:
    """Return arrays as lists."""
    counts, values = _elements(kind.children[0], places)
    return pa.ListArray.from_arrays(list_offsets(counts), values, type=kind.arrow)


def read_maps(kind: Logical, places: Places) -> pa.Array:
    """Return maps: i32 size of the keys' array, keys, values."""
    places.require(4, "a map")
    size = gathered(places.lanes.data, places.begin, "<i4").astype(np.int64)
    middle = places.begin + 4 + size
    if ((size < 0) | (middle > places.end)).any():
        places.damaged(int(np.flatnonzero((size < 0) | (middle > places.end))[0]), "a map")
    counts, keys = _elements(kind.children[0], Places(places.lanes, places.begin + 4, middle, places.total))
    others, values = _elements(kind.children[1], Places(places.lanes, middle, places.end, places.total))
    if (counts != others).any():
        places.damaged(int(np.flatnonzero(counts != others)[0]), "a map with as many keys as values")
    if keys.null_count:
        raise UnsupportedFormat(
            f"{places.lanes.path or 'state'}: a map has a null key, which Arrow's maps do not hold; change the query",
            kind=ErrorKind.UNSUPPORTED_TYPE,
            path=places.lanes.path,
        )
    return pa.MapArray.from_arrays(list_offsets(counts), keys, values, type=kind.arrow)


def _elements(kind: Logical, places: Places) -> tuple[Positions, pa.Array]:
    """Return the counts of arrays, and all their elements."""
    places.require(4, "an array")
    counts = gathered(places.lanes.data, places.begin, "<i4").astype(np.int64)
    if (counts < 0).any():
        places.damaged(int(np.flatnonzero(counts < 0)[0]), "an array")
    header = 4 + (counts + 31) // 32 * 4
    places.require(header + counts * kind.width, "an array")
    owner = np.repeat(np.arange(len(counts)), counts)
    place = ramp(counts)
    begin = places.begin[owner]
    null = (places.lanes.data[begin + 4 + place // 8] >> (place % 8).astype(np.uint8)) & 1
    return counts, _values(kind, places.take(owner), begin + header[owner] + place * kind.width, null == 0)


def _values(kind: Logical, places: Places, slots: Positions, present: Present) -> pa.Array:
    """Return the values whose fixed parts are at ``slots``; offsets count from their place."""
    if kind.kind == "null":
        return pa.nulls(len(slots), kind.arrow)
    chosen = np.flatnonzero(present)
    if not len(chosen):
        return pa.nulls(len(slots), kind.arrow)
    if len(chosen) < len(slots):
        return scattered(_there(kind, places.take(chosen), slots[chosen]), present)
    return _there(kind, places, slots)


def _there(kind: Logical, places: Places, slots: Positions) -> pa.Array:
    """As :func:`_values`, where no value is null."""
    data = places.lanes.data
    if kind.kind == "number":
        return pa.array(gathered(data, slots, kind.dtype)).cast(kind.arrow)
    if kind.kind == "bool":
        return pa.array(data[slots] != 0)
    if kind.kind == "decimal":
        return _decimals(kind, places, slots)
    if kind.kind == "time":
        return _times(kind, places, slots)
    if kind.kind in ("text", "octets"):
        return text_or_octets(kind, _inline_or_behind(places, slots), places.lanes.path)
    behind = _behind(places, gathered(data, slots, "<i8"))
    if kind.kind == "row":
        return read_rows(kind, behind)[0]
    if kind.kind == "raw":
        return ByteStrings(data, behind.begin, behind.end - behind.begin).to_arrow()
    return read_lists(kind, behind) if kind.kind == "list" else read_maps(kind, behind)


def text_or_octets(kind: Logical, found: ByteStrings, path: str) -> pa.Array:
    """Return strings; raises ``DamagedCheckpoint`` if text is not UTF-8."""
    if kind.kind == "octets":
        return found.to_arrow()
    try:
        return found.to_text()
    except pa.ArrowInvalid:
        lanes = Lanes.of(found, path)
        lanes.damaged(0, "of it and those after it, one is not UTF-8 text")


def _behind(places: Places, words: npt.NDArray[np.int64], width: int | None = None) -> Places:
    """Return the bytes that words of offset and size refer to; with ``width`` the low half is not a
    size.
    """
    offset = words >> 32
    size = (words & 0xFFFFFFFF) if width is None else np.full(len(words), width)
    begin = places.begin + offset
    wrong = (offset < 0) | (begin + size > places.end)
    if wrong.any():
        places.damaged(int(np.flatnonzero(wrong)[0]), "what points into a row or array")
    # No writer refers to the same bytes twice; a few bytes could otherwise expand to gigabytes.
    if int(size.sum()) > places.total:
        places.damaged(0, "of it and those after it, one points to the same bytes twice; a row or array")
    return Places(places.lanes, begin, begin + size, places.total)


def _inline_or_behind(places: Places, slots: Positions) -> ByteStrings:
    words = gathered(places.lanes.data, slots, "<i8")
    inline = words < 0
    length = (words >> 56) & 0x7F
    if (inline & (length > 7)).any():
        places.damaged(int(np.flatnonzero(inline & (length > 7))[0]), "what has text of more than 7 bytes in a word")
    found = _behind(places, np.where(inline, 0, words))
    start = np.where(inline, slots, found.begin)
    return ByteStrings(places.lanes.data, start, np.where(inline, length, found.end - found.begin))


def _decimals(kind: Logical, places: Places, slots: Positions) -> pa.Array:
    words = gathered(places.lanes.data, slots, "<i8")
    if kind.precision <= 18:
        return compact_decimals(kind, words, places.lanes.at(slots, slots))
    found = _behind(places, words)
    return long_decimals(kind, ByteStrings(places.lanes.data, found.begin, found.end - found.begin), places.lanes)


def compact_decimals(kind: Logical, unscaled: npt.NDArray[np.int64], place: Lanes) -> pa.Array:
    """Return decimals of up to 18 digits from their unscaled values."""
    wide = np.empty((len(unscaled), 2), np.int64)
    wide[:, 0], wide[:, 1] = unscaled, unscaled >> 63
    return _checked(kind, wide, place)


def long_decimals(kind: Logical, found: ByteStrings, place: Lanes) -> pa.Array:
    """Return decimals from big-endian unscaled values of 1 to 16 bytes."""
    at = place.at(found.start, found.start + found.length)
    wrong = (found.length < 1) | (found.length > 16)
    if wrong.any():
        at.damaged(int(np.flatnonzero(wrong)[0]), "a decimal does not have 1 to 16 bytes")
    return _checked(kind, found.wide(16), at)


def _checked(kind: Logical, wide: npt.NDArray[np.generic], place: Lanes) -> pa.Array:
    found = pa.Array.from_buffers(kind.arrow, len(wide), [None, pa.py_buffer(np.ascontiguousarray(wide))])
    try:
        found.validate(full=True)
    except pa.ArrowInvalid:
        place.damaged(0, f"of it and those after it, one has more than {kind.precision} digits")
    return found


def _times(kind: Logical, places: Places, slots: Positions) -> pa.Array:
    words = gathered(places.lanes.data, slots, "<i8")
    if kind.precision <= 3:
        return timestamps(kind, words, np.zeros(len(words), np.int64), places.lanes.at(slots, slots))
    found = _behind(places, words, 8)
    millis = gathered(places.lanes.data, found.begin, "<i8")
    return timestamps(kind, millis, words & 0xFFFFFFFF, places.lanes.at(found.begin, found.end))


def timestamps(kind: Logical, millis: npt.NDArray[np.int64], nanos: npt.NDArray[np.int64], place: Lanes) -> pa.Array:
    """Return timestamps from ms and the nanoseconds within the ms."""
    wrong = (nanos < 0) | (nanos > 999_999)
    if wrong.any():
        place.damaged(int(np.flatnonzero(wrong)[0]), f"it has {int(nanos[wrong][0])} nanoseconds beyond its ms")
    base = microseconds(millis, np.ones(len(millis), np.bool_), pa.timestamp("us"), place)
    whole = base.cast(pa.int64()).to_numpy()
    whole, before = whole + nanos // 1000, whole
    if (whole < before).any():
        lane = int(np.flatnonzero(whole < before)[0])
        refused(
            place, lane, f"{millis[lane]} ms and {nanos[lane]} ns since 1970, which no timestamp in microseconds holds"
        )
    if kind.precision <= 6:
        return pa.array(whole).cast(kind.arrow)
    return struct(
        [pa.array(whole).cast(kind.arrow.field(0).type), pa.array((nanos % 1000).astype(np.int32))], kind.arrow
    )


class Framed(Serializer):
    """i32 size, then that many bytes: the frame of rows, arrays, maps, text and raw values.

    Used directly for values that cannot be decoded: ``names`` says why.
    """

    least_length = 4
    arrow_type: pa.DataType = pa.binary()

    def __init__(self, *names: str) -> None:
        self.opaque = names

    def read(self, lanes: Lanes) -> pa.Array:
        return self.take(lanes).to_arrow()

    def skip(self, lanes: Lanes) -> None:
        self.take(lanes)

    def take(self, lanes: Lanes) -> ByteStrings:
        return lanes.strings(lanes.fixed(">i4").astype(np.int64))


class RowData(Framed):
    """A row: struct of ``f0``, ``f1`` … and ``row_kind``. Keys are without ``row_kind``.

    Names of columns are not in a savepoint.
    """

    java_hash = "BinaryRowData"

    def __init__(self, kind: Logical, *, as_key: bool = False) -> None:
        self.kind = kind
        self.key = as_key
        self.opaque = raw_within(kind)
        fields = [kind.arrow.field(i) for i in range(kind.arrow.num_fields)]
        self.arrow_type = kind.arrow if as_key else pa.struct([*fields, pa.field("row_kind", pa.string())])

    def as_key(self) -> Serializer:
        return RowData(self.kind, as_key=True)

    def read(self, lanes: Lanes) -> pa.Array:
        found = self.take(lanes)
        rows, kinds = read_rows(self.kind, Places.of(lanes, found))
        wrong = kinds > 3
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            lanes.damaged(lane, f"the row before it is of kind {int(kinds[lane])}; known are 0 to 3")
        if self.key:
            refuse_kinds(kinds.astype(np.int64), lanes.at(found.start, found.start))
            return rows
        fields = [rows.field(i) for i in range(rows.type.num_fields)]
        return struct([*fields, pa.array(ROW_KINDS).take(pa.array(kinds.astype(np.int64)))], self.arrow_type)


class TextData(Framed):
    """Text as UTF-8."""

    def __init__(self, kind: Logical) -> None:
        self.kind = kind
        self.arrow_type = kind.arrow

    def read(self, lanes: Lanes) -> pa.Array:
        return text_or_octets(self.kind, self.take(lanes), lanes.path)


class ManyData(Framed):
    """An array or a map."""

    def __init__(self, kind: Logical) -> None:
        self.kind = kind
        self.arrow_type = kind.arrow
        self.opaque = raw_within(kind)

    def read(self, lanes: Lanes) -> pa.Array:
        found = self.take(lanes)
        places = Places.of(lanes, found)
        return read_lists(self.kind, places) if self.kind.kind == "list" else read_maps(self.kind, places)


class DecimalData(Framed):
    """A decimal: i64 up to 18 digits, else bytes after their length."""

    def __init__(self, kind: Logical) -> None:
        self.kind = kind
        self.arrow_type = kind.arrow
        if kind.precision <= 18:
            self.fixed_length = self.least_length = 8

    def read(self, lanes: Lanes) -> pa.Array:
        if self.fixed_length is None:
            return long_decimals(self.kind, self.take(lanes), lanes)
        begin = lanes.position.copy()
        return compact_decimals(self.kind, lanes.fixed(">i8"), lanes.at(begin, lanes.end))

    def skip(self, lanes: Lanes) -> None:
        if self.fixed_length is None:
            self.take(lanes)
        else:
            lanes.skip(self.fixed_length)


class TimestampData(Serializer):
    """A timestamp: i64 ms, and from precision 4 on i32 nanoseconds within the ms."""

    def __init__(self, kind: Logical) -> None:
        self.kind = kind
        self.arrow_type = kind.arrow
        self.fixed_length = self.least_length = 8 if kind.precision <= 3 else 12

    def read(self, lanes: Lanes) -> pa.Array:
        begin = lanes.position.copy()
        millis = lanes.fixed(">i8")
        nanos: npt.NDArray[np.int64] = np.zeros(len(lanes), np.int64)
        if self.kind.precision > 3:
            nanos = lanes.fixed(">i4").astype(np.int64)
        return timestamps(self.kind, millis, nanos, lanes.at(begin, lanes.end))


def row_data(kinds: Sequence[Logical | None], names: Sequence[str], row: Logical | None) -> Serializer:
    """Return the serializer of rows; framed bytes if a column has a type that is not decoded."""
    missing = [name for kind, name in zip(kinds, names, strict=True) if kind is None]
    return Framed(*dict.fromkeys(missing)) if missing or row is None else RowData(row)
