"""Serializers of single values: numbers, text, dates and times.

*Fixed* ones (numbers, booleans) are slices of the buffer. *Text* is UTF-16 units with 7 bits per
byte, decoded to UTF-8. ``BigInteger`` and ``BigDecimal`` have any number of digits, and every
``BigDecimal`` has its own scale. Arrow's decimal types allow neither, so they are text, exactly as
Java's ``toString`` writes it. *Dates and times* that the Arrow type cannot hold are refused or kept
apart, never rounded:

=================================  ============================================================
Java                               Arrow
=================================  ============================================================
``java.util.Date``, ``java.sql``   ``timestamp_us_utc``: they are milliseconds since 1970. Of
``Date`` and ``Time``              ``java.sql.Date`` that is midnight of the zone it was made in
``java.sql.Timestamp``,            struct<seconds: int64, nanos: int32>: 0 … 999999999 ns after
``Instant``                        ``seconds`` since 1970
``LocalDate``                      ``date32``
``LocalTime``                      int64, nanoseconds of the day
``LocalDateTime``                  struct<date: date32, nanos: int64>
=================================  ============================================================
"""

from __future__ import annotations

import decimal
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, UnsupportedFormat

from ..byte_strings import ByteStrings, Octets, Positions, cut
from .lanes import Lanes, Present, Serializer, struct


class Number(Serializer):
    """A big-endian number of a fixed width."""

    def __init__(self, dtype: str, arrow_type: pa.DataType, java_hash: str) -> None:
        self.dtype = dtype
        self.arrow_type = arrow_type
        self.java_hash = java_hash
        self.fixed_length = self.least_length = np.dtype(dtype).itemsize

    def read(self, lanes: Lanes) -> pa.Array:
        return pa.array(lanes.fixed(self.dtype), self.arrow_type)


class Boolean(Serializer):
    """One byte, 0 or 1."""

    arrow_type = pa.bool_()
    fixed_length = least_length = 1
    java_hash = "Boolean"

    def read(self, lanes: Lanes) -> pa.Array:
        return pa.array(lanes.flags("a boolean"))


class Nothing(Serializer):
    """One byte without meaning: the void namespace, the global window, ``Void``.

    Flink declares a length of 0 for some of them, and writes the byte. Read as ``true``.
    """

    arrow_type = pa.bool_()
    fixed_length = least_length = 1

    def read(self, lanes: Lanes) -> pa.Array:
        lanes.skip(1)
        return pa.array(np.ones(len(lanes), np.bool_))


class TimeWindow(Serializer):
    """Start and end of a window in ms, the end exclusive."""

    arrow_type = pa.struct([("window_start", pa.int64()), ("window_end", pa.int64())])
    fixed_length = least_length = 16

    def read(self, lanes: Lanes) -> pa.Array:
        start, end = lanes.fixed(">i8"), lanes.fixed(">i8")
        return pa.StructArray.from_arrays([pa.array(start), pa.array(end)], fields=list(self.arrow_type))


LONG = Number(">i8", pa.int64(), "Long")
INTEGER = Number(">i4", pa.int32(), "Integer")
SHORT = Number(">i2", pa.int16(), "Short")
BYTE = Number("i1", pa.int8(), "Byte")
FLOAT = Number(">f4", pa.float32(), "Float")
DOUBLE = Number(">f8", pa.float64(), "Double")
BOOLEAN = Boolean()


_EXACT = decimal.Context(prec=decimal.MAX_PREC, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)
_SMALL = np.array([0, 0, 1, 10], np.uint8)
"""The numbers that the codes 1, 2 and 3 stand for (0 is null)."""


class BigInteger(Serializer):
    """i32 of 0 for null, 1 to 3 for 0, 1 and 10, or the number of bytes + 4; then the bytes."""

    arrow_type = pa.string()
    least_length = 4
    java_hash = "BigInteger"

    def read(self, lanes: Lanes) -> pa.Array:
        code, octets = _unscaled(lanes)
        return _written(code, octets, np.zeros(len(lanes), np.int64))

    def skip(self, lanes: Lanes) -> None:
        _unscaled(lanes)


class BigDecimal(Serializer):
    """Like ``BigInteger``, then, unless null, the scale."""

    arrow_type = pa.string()
    least_length = 4

    def read(self, lanes: Lanes) -> pa.Array:
        code, octets = _unscaled(lanes)
        return _written(code, octets, self._scales(lanes, code))

    def skip(self, lanes: Lanes) -> None:
        self._scales(lanes, _unscaled(lanes)[0])

    @staticmethod
    def _scales(lanes: Lanes, code: Positions) -> Positions:
        scale = np.zeros(len(lanes), np.int64)
        some = np.flatnonzero(code)
        present = lanes.take(some)
        scale[some] = present.fixed(">i4")
        lanes.put(some, present)
        return scale


def _unscaled(lanes: Lanes) -> tuple[Positions, ByteStrings]:
    """Take codes and bytes."""
    code = lanes.fixed(">i4").astype(np.int64)
    wrong = (code < 0) | (code == 4)
    if wrong.any():
        lane = int(np.flatnonzero(wrong)[0])
        lanes.position[lane] -= 4
        lanes.damaged(lane, f"the length of a number is {int(code[lane])}")
    return code, lanes.strings(np.maximum(code - 4, 0))


def _written(code: Positions, octets: ByteStrings, scale: Positions) -> pa.Array:
    """Write numbers as text, those of one scale and width together: usually there are few such."""
    length = octets.length
    width = np.where(length <= 15, 16, np.where(length <= 31, 32, 0))
    width[(scale < -38) | (scale > 38)] = 0
    present = code > 0
    groups = np.where(present, width * 1024 + scale + 512, -1)
    source = np.zeros(len(code), np.int64)
    pieces: list[pa.Array] = []
    done = 0
    for group in np.unique(groups[present & (width > 0)]).tolist():
        chosen = np.flatnonzero(groups == group)
        wide = group // 1024
        numbers = octets.take(chosen).wide(wide)
        small = length[chosen] == 0
        numbers[small, 0] = _SMALL[code[chosen][small]]
        make = pa.decimal128 if wide == 16 else pa.decimal256
        kind = make(38 if wide == 16 else 76, group % 1024 - 512)
        array = pa.Array.from_buffers(kind, len(chosen), [None, pa.py_buffer(numbers)])
        pieces.append(array.cast(pa.string()))
        source[chosen] = done + np.arange(len(chosen))
        done += len(chosen)
    # More than 31 bytes (about 74 digits), or a scale beyond 38. These are rare, so one by one.
    rare = np.flatnonzero(present & (width == 0))
    if len(rare):
        pieces.append(
            pa.array([_one(octets.bytes(i), int(code[i]), int(scale[i])) for i in rare.tolist()], pa.string())
        )
        source[rare] = done + np.arange(len(rare))
    written = pa.concat_arrays(pieces) if pieces else pa.array([], pa.string())
    return written.take(pa.array(source, mask=~present))


def _one(raw: bytes, code: int, scale: int) -> str:
    number = int.from_bytes(raw, "big", signed=True) if raw else int(_SMALL[code])
    # Through decimal: Python limits its own conversion from large integers to text.
    value = decimal.Decimal(number)
    return str(value.scaleb(-scale, _EXACT) if scale else value)


_BLOCK: Final = 1 << 22
"""Units of strings beyond ASCII that are decoded at once: each costs about 40 bytes."""


class Text(Serializer):
    """``String``: its length in UTF-16 units + 1, 0 for null; then the units. ``StringValue`` has
    the length itself, and no null.

    Arrow's text is UTF-8, which has no form for half a surrogate pair: a string with one is refused
    (``UnsupportedFormat``), so that no value is changed.
    """

    arrow_type = pa.string()
    java_hash = "String"

    def __init__(self, *, nullable: bool = True) -> None:
        self.nullable = nullable

    def read(self, lanes: Lanes) -> pa.Array:
        units, present = lengths(lanes, self.nullable)
        lanes.require(units)
        begin = lanes.position.copy()
        # First read as if all were ASCII: one byte per unit.
        raw = ByteStrings(lanes.data, begin, units).to_arrow()
        offsets = np.frombuffer(raw.buffers()[1], np.int32, len(raw) + 1)
        octets = np.frombuffer(raw.buffers()[2] or b"", np.uint8)[: offsets[-1]]
        lanes.position += units
        valid = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
        text = pa.Array.from_buffers(pa.string(), len(raw), [valid, *raw.buffers()[1:]])
        if not len(octets) or octets.max() < 0x80:
            return text
        # A string that is not ASCII has the top bit set in at least one of its first ``units``
        # bytes.
        high = np.zeros(len(octets) + 1, np.int32)
        np.cumsum(octets >= 0x80, out=high[1:])
        wide = np.flatnonzero(np.diff(high[offsets]))
        lanes.position[wide] = begin[wide]
        sub = lanes.take(wide)
        decoded = _decoded(sub, units[wide])
        lanes.put(wide, sub)
        if len(wide) == len(raw):
            return decoded
        source = np.arange(len(raw))
        source[wide] = len(raw) + np.arange(len(wide))
        return pa.concat_arrays([text, decoded]).take(pa.array(source))

    def skip(self, lanes: Lanes) -> None:
        units, _ = lengths(lanes, self.nullable)
        lanes.require(units)
        _skip_numbers(lanes, units)


class Character(Serializer):
    """``Character``: one UTF-16 unit, read as text of one character."""

    arrow_type = pa.string()
    fixed_length = least_length = 2
    java_hash = "Character"

    def read(self, lanes: Lanes) -> pa.Array:
        begin = lanes.position.copy()
        units = lanes.fixed(">u2")
        return to_utf8(units, np.ones(len(units), np.int64), lanes.at(begin, lanes.end))


def lengths(lanes: Lanes, nullable: bool) -> tuple[Positions, npt.NDArray[np.bool_]]:
    """Take the lengths in units; return them, and which are not null."""
    found = lanes.fixed("u1").astype(np.int64)
    going = np.flatnonzero(found >= 0x80)
    found[going] &= 0x7F
    for shift in (7, 14, 21, 28):
        if not len(going):
            break
        sub = lanes.take(going)
        octet = sub.fixed("u1").astype(np.int64)
        lanes.put(going, sub)
        found[going] |= (octet & 0x7F) << shift
        going = going[octet >= 0x80]
    if len(going) or (len(found) and found.max() >= 1 << 31):
        lane = int(going[0]) if len(going) else int(found.argmax())
        lanes.damaged(lane, "the length of a string has more than 31 bits")
    if not nullable:
        return found, np.ones(len(found), np.bool_)
    return np.maximum(found - 1, 0), found > 0


def _skip_numbers(lanes: Lanes, units: Positions) -> None:
    """Move each lane past that many numbers with 7 bits per byte."""
    before = lanes.continued()
    begin = lanes.position
    # Start with one byte per number. Add one for each of these bytes that is not the last of its
    # number (its top bit is set), until the length no longer changes.
    behind = begin + units
    while True:
        over = behind > lanes.end
        if over.any():
            lanes.damaged(int(np.flatnonzero(over)[0]), "a string reaches over the end")
        further = begin + units + (before[behind] - before[begin])
        if (further == behind).all():
            break
        behind = further
    lanes.position[:] = behind


def _decoded(lanes: Lanes, units: Positions) -> pa.Array:
    """Decode strings that are not ASCII, in blocks."""
    pieces = []
    for first, last in cut(units, _BLOCK):
        chosen = np.arange(first, last)
        sub = lanes.take(chosen)
        begin = sub.position.copy()
        _skip_numbers(sub, units[first:last])
        lanes.put(chosen, sub)
        pieces.append(to_utf8(_units(lanes.data, begin, sub), units[first:last], lanes.at(begin, sub.end)))
    return pa.concat_arrays(pieces) if pieces else pa.array([], pa.string())


def _units(data: Octets, begin: Positions, behind: Lanes) -> npt.NDArray[np.uint16]:
    """Return the numbers in the bytes from ``begin`` to the lanes' positions, in one array."""
    sizes = behind.position - begin
    octets = ByteStrings(data, begin, sizes).packed()
    last = np.flatnonzero(octets < 0x80)
    width = np.diff(last, prepend=-1)
    value = octets[last].astype(np.uint32)
    for place in (1, 2):
        longer = np.flatnonzero(width > place)
        value[longer] = value[longer] << 7 | octets[last[longer] - place] & 0x7F
    wrong = (width > 3) | (value > 0xFFFF)
    if wrong.any():
        at = int(last[np.flatnonzero(wrong)[0]])
        lane = int(np.searchsorted(np.cumsum(sizes), at, "right"))
        behind.damaged(lane, "a character before it has more than 16 bits")
    return value.astype(np.uint16)


def to_utf8(units: npt.NDArray[np.uint16], counts: Positions, place: Lanes) -> pa.Array:
    """Return strings of ``counts`` UTF-16 units each; ``place`` has where each begins.

    Raises ``UnsupportedFormat`` for half a surrogate pair.
    """
    ends = np.cumsum(counts)
    # Halves of a pair in two different strings do not make a pair.
    last = units[ends[counts > 0] - 1]
    split = np.flatnonzero((last & 0xFC00) == 0xD800)
    at = int(ends[counts > 0][split[0]] - 1) if len(split) else -1
    try:
        octets = units.astype("<u2").tobytes().decode("utf-16-le").encode()
    except UnicodeDecodeError as error:
        at = error.start // 2 if at < 0 else min(at, error.start // 2)
    if at >= 0:
        lane = int(np.searchsorted(ends, at, "right"))
        raise UnsupportedFormat(
            f"{place.path or 'state'}: the string at byte {int(place.position[lane])} has half a surrogate pair "
            f"(U+{int(units[at]):04X}), which UTF-8 text cannot hold; change the value in the job",
            kind=ErrorKind.UNSUPPORTED_TYPE,
            path=place.path,
        )
    # Each half of a surrogate pair counts for two of the pair's four bytes in UTF-8.
    width = 1 + (units >= 0x80) + ((units >= 0x800) & ((units & 0xF800) != 0xD800))
    behind = np.zeros(len(units) + 1, np.int64)
    np.cumsum(width, out=behind[1:])
    offsets = np.zeros(len(counts) + 1, np.int32)
    offsets[1:] = behind[ends]
    return pa.Array.from_buffers(pa.string(), len(counts), [None, pa.py_buffer(offsets), pa.py_buffer(octets)])


TEXT = Text()
TEXT_VALUE = Text(nullable=False)
CHARACTER = Character()


_I64_MIN: Final = np.iinfo(np.int64).min
_MS_MAX: Final = np.iinfo(np.int64).max // 1000
_DATE_YEARS: Final = 5_800_000
"""Years that ``date32`` holds, about."""


class Milliseconds(Serializer):
    """i64 ms since 1970; the minimum of i64 is null."""

    arrow_type = pa.timestamp("us", tz="UTC")
    fixed_length = least_length = 8

    def read(self, lanes: Lanes) -> pa.Array:
        begin = lanes.position.copy()
        found = lanes.fixed(">i8")
        present = found != _I64_MIN
        return microseconds(found, present, self.arrow_type, lanes.at(begin, lanes.end))


def microseconds(found: npt.NDArray[np.int64], present: Present, kind: pa.DataType, place: Lanes) -> pa.Array:
    """Return ms as timestamps in µs; ``UnsupportedFormat`` beyond the year ±292 277."""
    wrong = present & ((found > _MS_MAX) | (found < -_MS_MAX))
    if wrong.any():
        lane = int(np.flatnonzero(wrong)[0])
        refused(place, lane, f"{int(found[lane])} ms since 1970, which no timestamp in microseconds holds")
    values = pa.array(np.where(present, found, 0) * 1000, mask=None if present.all() else ~present)
    return values.cast(kind)


def refused(place: Lanes, lane: int, what: str) -> None:
    """Raise ``UnsupportedFormat`` for a value that Arrow's type cannot hold."""
    raise UnsupportedFormat(
        f"{place.path or 'state'}: the value at byte {int(place.position[lane])} is {what}; change it in the job",
        kind=ErrorKind.UNSUPPORTED_TYPE,
        path=place.path,
    )


class Moment(Serializer):
    """``Instant`` (i64 s, i32 ns) or, with ``millis``, ``java.sql.Timestamp`` (i64 ms, i32 ns)."""

    arrow_type = pa.struct([("seconds", pa.int64()), ("nanos", pa.int32())])
    fixed_length = least_length = 12

    def __init__(self, *, millis: bool) -> None:
        self.millis = millis

    def read(self, lanes: Lanes) -> pa.Array:
        found, nanos = lanes.fixed(">i8"), lanes.fixed(">i4")
        present = found != _I64_MIN
        seconds = found // 1000 if self.millis else found
        wrong = present & ((nanos < 0) | (nanos > 999_999_999))
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            lanes.damaged(lane, f"the time before it has {int(nanos[lane])} nanoseconds")
        return struct([pa.array(seconds), pa.array(nanos)], self.arrow_type, present)


class LocalDate(Serializer):
    """i32 year, u8 month, u8 day; the minimum of i32 as the year is null."""

    arrow_type = pa.date32()
    fixed_length = least_length = 6

    def read(self, lanes: Lanes) -> pa.Array:
        begin = lanes.position.copy()
        year = lanes.fixed(">i4").astype(np.int64)
        month, day = lanes.fixed("u1").astype(np.int64), lanes.fixed("u1").astype(np.int64)
        present = year != np.iinfo(np.int32).min
        wrong = present & ((month < 1) | (month > 12) | (day < 1) | (day > 31))
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            lanes.damaged(lane, f"the date before it is {int(year[lane])}-{int(month[lane])}-{int(day[lane])}")
        far = present & (np.abs(year) > _DATE_YEARS)
        if far.any():
            lane = int(np.flatnonzero(far)[0])
            refused(lanes.at(begin, lanes.end), lane, f"a date in the year {int(year[lane])}, which date32 cannot hold")
        days = _days(np.where(present, year, 1970), np.where(present, month, 1), np.where(present, day, 1))
        return pa.array(days.astype(np.int32), mask=None if present.all() else ~present).cast(pa.date32())


def _days(
    year: npt.NDArray[np.int64], month: npt.NDArray[np.int64], day: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return days since 1970 in the proleptic Gregorian calendar, counting years from March."""
    year = year - (month <= 2)
    era, of_era = year // 400, year % 400
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    days: npt.NDArray[np.int64] = era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468
    return days


class LocalTime(Serializer):
    """u8 hour, u8 minute, u8 second, i32 ns; hour 128 is null."""

    arrow_type = pa.int64()
    fixed_length = least_length = 7

    def read(self, lanes: Lanes) -> pa.Array:
        hour, minute, second = (lanes.fixed("u1").astype(np.int64) for _ in range(3))
        nanos = lanes.fixed(">i4").astype(np.int64)
        present = hour != 128
        high = (hour > 23) | (minute > 59) | (second > 59) | (nanos < 0) | (nanos > 999_999_999)
        if (present & high).any():
            lane = int(np.flatnonzero(present & high)[0])
            said = f"{int(hour[lane])}:{int(minute[lane])}:{int(second[lane])} and {int(nanos[lane])} ns"
            lanes.damaged(lane, f"the time of day before it is {said}")
        total = ((hour * 60 + minute) * 60 + second) * 1_000_000_000 + nanos
        return pa.array(total, mask=None if present.all() else ~present)


class LocalDateTime(Serializer):
    """A date and a time, both null or neither."""

    arrow_type = pa.struct([("date", pa.date32()), ("nanos", pa.int64())])
    fixed_length = least_length = 13

    def read(self, lanes: Lanes) -> pa.Array:
        date, nanos = LOCAL_DATE.read(lanes), LOCAL_TIME.read(lanes)
        valid = date.is_valid().to_numpy(zero_copy_only=False)
        odd = valid != nanos.is_valid().to_numpy(zero_copy_only=False)
        if odd.any():
            lanes.damaged(int(np.flatnonzero(odd)[0]), "of the date and time before it one is null")
        return struct([date, nanos], self.arrow_type, valid)


LOCAL_DATE = LocalDate()
LOCAL_TIME = LocalTime()
