"""Timers of a subtask, in event time or in processing time.

Theory of operation. Timers are rows by key, ``_timestamp`` and ``_tag``. Most calls of
:meth:`TimerSet.due` find nothing: one comparison with a lower bound of all timestamps shows that.
Otherwise only the *near* timers are examined, those up to a *horizon*. The horizon is set so that a
sixteenth of all timers is near. When time passes it, all timers are examined once and a new horizon
is set. So each timer is examined a few times in its life, however many there are.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

from stateformat.graph import Operator
from stateformat.model import State
from stateformat.segments import row_key_codes

from .columns import Mask, Slots
from .keyed_value import KeyedState, beside, one_row, one_values
from .rows import without

TIMESTAMP_MAX: Final = 2**63 - 1
_NEAR_MIN: Final = 4096
_NEAR_SHARE: Final = 16
_NO_TAG: Final = pa.scalar("", pa.string())


class TimerSet(KeyedState):
    """Timers (SPEC.md section 3.6, kind ``timers``).

    Batches have key columns, ``_timestamp`` (int64, µs), ``_tag`` (utf8; empty if missing) and
    values.
    """

    def __init__(self, operator: Operator, state: State) -> None:
        super().__init__(state)
        self._store = self._keyed_rows(operator)
        self._store.add_array("timestamp", np.int64)
        self._track(state, self._store)
        self._least = TIMESTAMP_MAX
        """No timer is earlier; there may be none at this time."""
        self._forget_near()

    def _forget_near(self) -> None:
        self._near: list[Slots] = []
        self._horizon = -TIMESTAMP_MAX - 1
        """Every timer up to it is near."""
        self._added = 0
        """How many timers became near since the horizon was set."""

    def set(self, rows: pa.RecordBatch) -> None:
        """Set timers; one that is set already gets the new values, one in the past is due at
        once.
        """
        self.restore(rows)

    def restore(self, rows: pa.RecordBatch, groups: Any = None) -> None:
        fitted = self._row_keys.fit(rows, {"_tag": _NO_TAG})
        values = self._values.fit(without(rows, self._row_keys.schema.names))
        slots, new = self._store.ensure(fitted, groups)
        self._store.put_rows(slots, values)
        if not len(new):
            return
        timestamps = fitted[-2].to_numpy()[new]
        first = self._store.used - len(new)
        self._store.array("timestamp")[first : self._store.used] = timestamps
        near = first + np.flatnonzero(timestamps <= self._horizon)
        if len(near):
            self._near.append(near)
            self._added += len(near)
        self._least = min(self._least, int(timestamps.min()))

    def delete(self, rows: pa.RecordBatch) -> None:
        """Delete timers by their row keys; those that are not set are ignored."""
        self.remove(rows)

    def remove(self, rows: pa.RecordBatch) -> Mask:
        slots = self._store.find(self._row_keys.fit(rows, {"_tag": _NO_TAG}))
        self._store.kill(slots[slots >= 0])
        self._tidy()
        return slots >= 0

    def clear_keys(self, keys: pa.RecordBatch) -> None:
        """Delete all timers of these keys. Scans every timer: there is no index by key."""
        slots = self._store.live_slots()
        fitted = self._keys.fit(keys)
        codes = row_key_codes(
            [pa.chunked_array([a, b]) for a, b in zip(fitted, self._store.get(slots, 0, len(fitted)), strict=True)]
        )
        cleared, present = codes[: len(keys)], codes[len(keys) :]
        self._store.kill(slots[np.isin(present, cleared)])
        self._tidy()

    def _tidy(self) -> None:
        if self._store.wasteful:
            self._store.compact()
            self._forget_near()

    def due(self, watermark: int) -> pa.RecordBatch | None:
        """Remove and return every timer with ``_timestamp`` ≤ ``watermark`` (µs, or processing
        time), None if there is none.

        Ordered by ``_timestamp``, key group, then a hash of key and tag, whatever the order in
        which they were set.
        """
        if watermark < self._least or not self._store.count:
            return None
        timestamps = self._store.array("timestamp")
        slots = self._nearest(watermark)
        fired = slots[timestamps[slots] <= watermark]
        batch = None
        if len(fired):
            hashes, groups = self._store.array("hash")[fired], self._store.array("group")[fired]
            order = np.lexsort([fired, hashes, groups, timestamps[fired]])
            batch = pa.RecordBatch.from_arrays(self._columns(fired[order]), schema=self._schema)
            self._store.kill(fired)
        if watermark > self._horizon:
            self._refill()
        else:
            self._near = [slots[timestamps[slots] > watermark]]
        self._least = self._exact_least()
        self._tidy()
        return batch

    @property
    def not_before(self) -> int:
        """A time (µs) before which none is due; ``TIMESTAMP_MAX`` if there is no timer.

        This is a stored bound and costs nothing. It may stem from timers that were deleted.
        """
        return self._least if self._store.count else TIMESTAMP_MAX

    def next_timestamp(self) -> int | None:
        """Return the least ``_timestamp`` (µs), None if there is no timer."""
        if not self._store.count:
            return None
        self._least = self._exact_least()
        return self._least

    def _exact_least(self) -> int:
        timestamps = self._store.array("timestamp")
        slots = self._nearest(self._horizon)
        if not len(slots) and self._store.count:
            slots = self._refill()
        return int(timestamps[slots].min(initial=TIMESTAMP_MAX))

    def _nearest(self, watermark: int) -> Slots:
        """Return live timers, among them all up to ``watermark``."""
        if watermark > self._horizon or self._added > max(_NEAR_MIN, self._store.count // 8):
            near = self._refill()
            if watermark <= self._horizon:
                return near
            return self._store.live_slots()
        near = np.concatenate(self._near) if self._near else np.zeros(0, np.int64)
        alive: Slots = near[self._store.array("live")[near]]
        self._near = [alive]
        return alive

    def _refill(self) -> Slots:
        """Set the horizon so that a share of the timers is near, or all if there are few."""
        slots = self._store.live_slots()
        self._horizon = TIMESTAMP_MAX
        if len(slots) > 2 * _NEAR_MIN:
            timestamps = self._store.array("timestamp")[slots]
            rank = max(_NEAR_MIN, len(slots) // _NEAR_SHARE)
            self._horizon = int(np.partition(timestamps, rank)[rank])
            slots = slots[timestamps <= self._horizon]
        self._near, self._added = [slots], 0
        return slots

    def clear(self) -> None:
        """Delete all timers."""
        self._store.clear()
        self._least = TIMESTAMP_MAX
        self._forget_near()

    def set_one(self, key: Any, timestamp: int, tag: str = "", **values: Any) -> None:
        """Set one timer, at ``timestamp`` (µs). A key of several columns is a tuple."""
        self.set(beside(one_row(self._row_keys, key, timestamp, tag), one_values(self._values, values)))

    def delete_one(self, key: Any, timestamp: int, tag: str = "") -> None:
        """Delete one timer; ``key`` and ``timestamp`` as for :meth:`set_one`."""
        self.delete(one_row(self._row_keys, key, timestamp, tag))

    def loaded(self) -> None:
        self._forget_near()
        self._least = int(self._store.array("timestamp")[self._store.live_slots()].min(initial=TIMESTAMP_MAX))
