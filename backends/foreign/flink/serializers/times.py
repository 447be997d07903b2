"""Dates and times. What the Arrow type cannot hold is refused or kept apart, never rounded.

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

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, UnsupportedFormat

from .lanes import Lanes
from .records import Present, struct
from .serializer import Serializer

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
