"""Check what a counter remembers for a limited time, by what it has said about each record.

A counter says of each record of a key: at what watermark it came, how many had come since the rows
of the key had last expired, and which record it has looked at again and again. So the whole history
of each key's rows is known, except while the clock is unknown: before the first watermark, at the
end of time, and when a lower watermark follows at another parallelism. Then either answer is
accepted, and the history goes on from it.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, NamedTuple

from stateformat.backends.dataflow.events import MAX_WATERMARK, MIN_WATERMARK

LIVES_US = 12
"""How long the rows live."""
LOOKED_EVERY = 4
"""Every this-many-th record of a key is the one that is looked at."""

Span = tuple[float, float]
_INF = float("inf")
_EPOCH = datetime.datetime(1970, 1, 1)  # noqa: DTZ001 - the type has no time zone


class Said(NamedTuple):
    """For one record: the watermark, how many came lately, and what was looked at (0: nothing)."""

    watermark: int
    lately: int
    looked: int

    @classmethod
    def of(cls, text: str) -> Said:
        """From the text of a mark."""
        return cls(*map(int, text.split(",")))


class _Row:
    """A row: its value, and between which times it was last accessed."""

    def __init__(self) -> None:
        self.value, self.span = 0, (-_INF, -_INF)

    def may_be(self, now: Span, latest: float) -> tuple[bool, bool]:
        """Whether it may be there, and whether it may be gone."""
        if not self.value:
            return False, True
        if now[1] == -_INF:
            return True, False
        low, high = self.span
        # A row accessed before any time was known counts as accessed at the first known time.
        high = max(high, now[0]) if low == -_INF else high
        return high + LIVES_US > now[0], low + LIVES_US <= max(now[1], latest)

    def accessed(self, now: Span) -> None:
        self.span = max(self.span[0], now[0]), max(self.span[1], now[1])

    def begun(self, now: Span) -> None:
        self.span = now


class KeyHistory:
    """The rows of one key, record by record."""

    def __init__(self) -> None:
        self.lately, self._looked = _Row(), _Row()
        self._latest = -_INF

    def take(self, n: int, said: Said) -> str | None:
        """The n-th record; returns what is wrong with what was said of it."""
        now = self._now(said.watermark)
        there, gone = self.lately.may_be(now, self._latest)
        allowed = [*([self.lately.value + 1] if there else []), *([1] if gone else [])]
        if said.lately not in allowed:
            return f"record {n} at {said.watermark}: {said.lately} lately, and not {allowed}"
        went_on = said.lately == self.lately.value + 1
        self.lately.value = said.lately
        (self.lately.accessed if went_on else self.lately.begun)(now)

        there, gone = self._looked.may_be(now, self._latest)
        allowed = [*([self._looked.value] if there else []), *([0] if gone else [])]
        if said.looked not in allowed:
            return f"record {n} at {said.watermark}: it looked at {said.looked}, and not at {allowed}"
        if said.looked:
            self._looked.accessed(now)
        if n % LOOKED_EVERY == 1:
            self._looked.value = n
            self._looked.begun(now)
        elif not said.looked:
            self._looked.value = 0
        self._latest = max(self._latest, now[0])
        return None

    def _now(self, watermark: int) -> Span:
        if watermark == MIN_WATERMARK:
            return -_INF, -_INF
        return (self._latest, _INF) if watermark == MAX_WATERMARK else (watermark, watermark)

    def check_stored(self, row: Mapping[str, Any] | None, watermark: int) -> str | None:
        """What is wrong with the row of a checkpoint, None: there is none; the latest watermark."""
        there, gone = self.lately.may_be(self._now(watermark), max(self._latest, watermark))
        if row is None:
            return None if gone else f"a row that has not expired is gone: {self.lately.value}"
        time = (row["ttl_last_access"] - _EPOCH) // datetime.timedelta(microseconds=1)
        low, high = self.lately.span
        told = low > -_INF and high < _INF
        if there and not gone and (row["n"] != self.lately.value or (told and not low <= time <= high)):
            return f"it is {row['n']} at {time}, and not {self.lately.value} at {self.lately.span}"
        return None
