"""The timers that a function sets for its key."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import Final

import numpy as np
import pyarrow as pa

from stateformat.errors import InvalidInput
from stateformat.tables import number_of

from ....state import TimerSet
from ...api import OperatorContext
from .kept import beside

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_US: Final = timedelta(microseconds=1)
_BOUND: Final = 1 << 63

Moment = int | datetime | np.datetime64
"""µs since 1970, or a datetime; one without a zone is UTC, as in Arrow and numpy."""


class _Log:
    """What the functions of a piece have set and deleted, in order: the last call counts."""

    def __init__(self, context: OperatorContext) -> None:
        self.context = context
        self.words: dict[tuple[int, int], bool] = {}
        self.pending: set[tuple[int, int]] = set()
        """Timers that are due and still to be called, by the number of their key."""


class KeyTimers:
    """The timers of one key: the fourth argument of a function.

    A timestamp is µs since 1970 or a datetime; one without a time zone is UTC.
    """

    __slots__ = ("_log", "_number")

    def __init__(self, log: _Log, number: int) -> None:
        self._log, self._number = log, number

    def __repr__(self) -> str:
        return f"KeyTimers(watermark={self.watermark}, processing_time_us={self.processing_time_us})"

    @property
    def watermark(self) -> int:
        """The current event time, µs."""
        return self._log.context.watermark

    @property
    def processing_time_us(self) -> int:
        """The wall-clock time, µs since 1970: the same for all calls in a step or epoch."""
        return self._log.context.processing_time_us

    def set(self, timestamp: Moment) -> None:
        """Set a timer. One in the past is due at once; setting one again changes nothing."""
        word = self._number, whole_us(timestamp)
        if word not in self._log.pending:
            self._log.words[word] = True

    def delete(self, timestamp: Moment) -> None:
        """Delete a timer, if it is set."""
        word = self._number, whole_us(timestamp)
        if word in self._log.pending:
            self._log.pending.remove(word)
        else:
            self._log.words[word] = False


def whole_us(timestamp: Moment) -> int:
    """Return µs since 1970. Raises ``InvalidInput`` for a value that is not a time."""
    if isinstance(timestamp, datetime):
        aware = timestamp if timestamp.tzinfo is not None else timestamp.replace(tzinfo=UTC)
        return (aware - _EPOCH) // _US
    try:
        # None for NaT.
        number = number_of(timestamp, "us") if isinstance(timestamp, np.datetime64) else timestamp
        whole = operator.index(number)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        whole = _BOUND
    if not -_BOUND <= whole < _BOUND:
        raise InvalidInput(f"a timer at {timestamp!r}. Give whole microseconds since 1970 (int), or a datetime.")
    return whole


class TimersOfPiece:
    """The timers of the keys of a piece."""

    def __init__(self, timers: TimerSet, context: OperatorContext) -> None:
        self._timers = timers
        self._log = _Log(context)

    def of(self, numbers: Iterable[int]) -> Iterator[KeyTimers]:
        """Return an object for each call, by the number of its key."""
        return map(KeyTimers, repeat(self._log), numbers)

    def fire(self, numbers: Sequence[int], timestamps: Sequence[int]) -> Iterator[bool]:
        """Yield for each due timer whether to call it: no earlier call has deleted it."""
        pending = self._log.pending = set(zip(numbers, timestamps, strict=True))
        for word in zip(numbers, timestamps, strict=True):
            is_due = word in pending
            pending.discard(word)
            yield is_due

    def store(self, keys: pa.RecordBatch) -> None:
        """Set and delete the timers in the state."""
        words, self._log.words = self._log.words, {}
        for is_set, act in ((False, self._timers.delete), (True, self._timers.set)):
            chosen = [word for word, last in words.items() if last is is_set]
            if chosen:
                numbers, timestamps = (pa.array(column, pa.int64()) for column in zip(*chosen, strict=True))
                act(beside(keys.take(numbers), [timestamps], ["_timestamp"]))
