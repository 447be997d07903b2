"""Rows that expire (SPEC.md section 6.5): when each was last accessed, and what time it is.

Theory of operation. The time of the last access is the last value column of its store, so it is
restored, written into deltas, caught up with and spilled to disk like any other. An expired row
stays in its slot and is hidden: a read compares the times of the rows it has found with the clock.
All rows are scanned only by operations that cost as much anyway: writing a base, and growing the
store. Both drop expired rows without recording a deletion for deltas, because such a row expires in
the layers below too. A write to an expired row drops it first, so the row is a new one, after the
others.

Usually nothing can have expired: a lower bound of all times says so.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import InvalidInput
from stateformat.model import State
from stateformat.ttl import NO_TIME_US, TIME_MAX_US, Ttl, clock_us

from .columns import Slots
from .rows import Rows

Times = npt.NDArray[np.int64]


class Expiry:
    """Which rows of a store have expired.

    ``kill`` makes slots of the store dead; ``tidy`` may then close holes. ``bare``: rows have no
    values but their times, so nothing else records that they have changed.
    """

    def __init__(
        self, ttl: Ttl, rows: Rows, kill: Callable[[Slots], object], tidy: Callable[[], None], *, bare: bool
    ) -> None:
        self.ttl = ttl
        self.now_us = NO_TIME_US
        """The time of the clock; :data:`NO_TIME_US` if event time has not begun."""
        self._rows = rows
        self._kill, self._tidy, self._bare = kill, tidy, bare
        self._least, self._greatest = TIME_MAX_US, NO_TIME_US
        """No row has an earlier time than the first, or a later one than the second."""
        self._waits = False
        """Whether a row may have no time, because the clock had none."""

    def forget(self) -> None:
        """Rows were added from elsewhere, with times that are not known here."""
        self._least, self._greatest, self._waits = NO_TIME_US, TIME_MAX_US, True

    def came(self, times: pa.Array) -> None:
        """Rows were added from elsewhere, with these times."""
        if len(times):
            numbers = times.view(pa.int64()).to_numpy()
            self._bound(int(numbers.min()), int(numbers.max()))
            self._waits |= self._least == NO_TIME_US

    @property
    def _times(self) -> Times:
        times: Times = self._rows.buffers[-1][1].values  # type: ignore[attr-defined]
        return times

    def go_on(self, saved: State) -> None:
        """Continue from the time of a checkpoint, if it is of the same clock."""
        if saved.ttl is not None and saved.ttl.clock == self.ttl.clock and saved.ttl_now_us is not None:
            self.advance(saved.ttl_now_us)

    def advance(self, now_us: int) -> None:
        """Set the clock; it never goes back. Rows without a time get its first one."""
        self.now_us = max(self.now_us, clock_us(now_us))
        if not self._waits or self.now_us == NO_TIME_US:
            return
        self._waits = False
        slots = self._rows.live_slots()
        self._begin(slots[self._times[slots] == NO_TIME_US])

    def _begin(self, slots: Slots) -> None:
        if len(slots):
            self._times[slots] = self.now_us
            self._touched(slots)

    def _touched(self, slots: Slots | slice) -> None:
        if self._rows.changes is not None:
            self._rows.changes.touched(slots)

    @property
    def _none(self) -> bool:
        """Whether no row can have expired."""
        return self._least > self.now_us - self.ttl.duration_us

    def alive(self, slots: Slots) -> Slots:
        """Return those of these slots, which are live, whose rows have not expired."""
        return slots if self._none else slots[~self.ttl.expired(self._times.take(slots), self.now_us)]

    def hide(self, slots: Slots, at: Times | None = None) -> Slots:
        """Return the slots, with −1 for those whose rows have expired by now, or at ``at`` if
        later.
        """
        if at is None and self._none:
            return slots
        times = self._times.take(slots)
        if at is None:
            gone = self.ttl.expired(times, self.now_us)
        else:
            # As seen from the latest: each row is older by as much as its own time is behind that.
            own = np.maximum(at, self.now_us)
            latest = int(own.max(initial=NO_TIME_US))
            gone = self.ttl.expired(times + (latest - own), latest) & (times != NO_TIME_US)
        return np.where(gone, -1, slots) if gone.any() else slots

    def renew(self, slots: Slots) -> Slots:
        """Prepare writing the rows at these slots (−1: none): drop expired ones, and return −1 for
        them.
        """
        if self._none or (self._rows.changes is not None and self._rows.changes.is_taking):
            return slots
        hidden = self.hide(slots)
        if hidden is not slots:
            self._drop(np.unique(slots[hidden != slots]))
        return hidden

    def _drop(self, slots: Slots) -> None:
        changes = self._rows.changes
        if changes is None:
            self._kill(slots)
        else:
            with changes.unseen():
                self._kill(slots)

    def wrote(self, slots: Slots | slice, new: int, at: Times | None = None) -> None:
        """Rows at these slots were written now, or at ``at``; the last ``new`` slots of the store
        are new.

        A row that is written at an earlier time than before keeps the later one.
        """
        times, now_us = self._times, self.now_us
        if new:
            times[self._rows.used - new : self._rows.used] = NO_TIME_US
        if at is not None:
            np.maximum.at(times, slots, at)  # type: ignore[arg-type]
            least = int(at.min(initial=TIME_MAX_US))
            self._bound(least, int(at.max(initial=NO_TIME_US)))
            self._waits |= least == NO_TIME_US
        else:
            times[slots] = now_us if self._greatest <= now_us else np.maximum(times[slots], now_us)
            self._bound(now_us, now_us)
            self._waits |= now_us == NO_TIME_US
        if self._bare:
            self._touched(slots)

    def accessed(self, slots: Slots) -> Times:
        """Return when the rows at these slots were last accessed."""
        return self._times.take(slots)

    def _bound(self, least: int, greatest: int) -> None:
        self._least, self._greatest = min(self._least, least), max(self._greatest, greatest)

    def read(self, slots: Slots) -> None:
        """Rows at these slots (−1: none), alive, were read, which may count as an access and write
        their times.
        """
        if self.ttl.refresh == "write":
            return
        times = self._times
        older = (times.take(slots) < self.now_us) & (slots >= 0)
        if older.any():
            if not older.all():
                slots = slots[older]
            times[slots] = self.now_us
            self._bound(self.now_us, self.now_us)
            self._touched(slots)

    def make_room(self, more: int) -> None:
        """So many rows may be added: drop expired rows rather than grow."""
        if self._rows.used + more > self._rows.capacity:
            self.sweep()

    def sweep(self) -> None:
        """Drop expired rows."""
        if not self._none:
            slots = self._rows.live_slots()
            times = self._times[slots]
            gone = self.ttl.expired(times, self.now_us)
            if gone.any():
                self._drop(slots[gone])
                times = times[~gone]
            self._least = int(times.min(initial=TIME_MAX_US))
            self._greatest = int(times.max(initial=NO_TIME_US))
        self._tidy()

    def count(self) -> int:
        """Return how many rows have not expired."""
        return self._rows.count if self._none else len(self.alive(self._rows.live_slots()))


def times_of(at: pa.Array) -> Times:
    """Return event times (timestamp[us] or int64, µs) as numbers; ``InvalidInput`` for others or
    nulls.
    """
    kind = at.type
    if at.null_count or not (kind == pa.int64() or (pa.types.is_timestamp(kind) and kind.unit == "us")):
        raise InvalidInput(
            f"event times of rows are {kind} with {at.null_count} nulls; give timestamp[us] or int64 (µs) without"
        )
    times: Times = at.view(pa.int64()).to_numpy()
    return np.clip(times, NO_TIME_US + 1, TIME_MAX_US)


def lives_longer(saved: State, declared: State) -> bool:
    """Return whether rows that had expired in a checkpoint would reappear in the next one if they
    were not dropped.
    """
    if saved.ttl is None:
        return False
    before, after = saved.ttl_field, declared.ttl_field
    same = before is not None and after is not None and before.id == after.id
    return not same or declared.ttl is None or declared.ttl.duration_us > saved.ttl.duration_us
