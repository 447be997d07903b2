"""Event-time timers of a subtask.

Theory of operation. Timers are rows by key, ``_timestamp`` and ``_tag``. Most calls of :meth:`TimerSet.due` find nothing due, and
one comparison with a lower bound of all timestamps says so. Where something is, only the *near* timers are looked at: all
those up to a *horizon*, which is set so that they are a sixteenth of all. When the watermark passes it, everything is looked
at once and a new one is set, so a timer is looked at a few times in its life however many there are.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

from backends.state.parts import Mask, Slots
from backends.state.store import KeyedRows, RowNormalizer, Rows, as_table, key_grouping, without
from backends.state.value import keyed_changes, one_row, one_values
from stateformat.model import Operator, State
from stateformat.row_keys import row_key_codes
from stateformat.schema import segment_schema

TIMESTAMP_MAX: Final = 2**63 - 1
_NEAR_MIN: Final = 4096
_NEAR_SHARE: Final = 16
_NO_TAG: Final = pa.scalar("", pa.string())


class TimerSet:
    """Timers by key, ``_timestamp`` (int64, µs of event time) and ``_tag`` (utf8); SPEC.md section 3.6, kind ``timers``.

    Batches have columns by name: key columns, ``_timestamp``, ``_tag`` (may be missing: empty), values. What is said of keys,
    types and errors at :class:`~backends.state.value.KeyedValue` holds here.
    """

    def __init__(self, operator: Operator, state: State) -> None:
        declared = segment_schema(state).names[1:]
        row_key = list(state.row_key)
        self._keys = RowNormalizer(state, state.key_columns, only=False)
        self._row_keys = RowNormalizer(state, row_key, only=False)
        self._values = RowNormalizer(state, [name for name in declared if name not in row_key], only=True)
        self._schema = RowNormalizer(state, declared, only=False).schema
        fields = [*self._row_keys.fields, *self._values.fields]
        stored = [field.name for field in fields]
        self._positions = [stored.index(name) for name in declared]
        self._store = KeyedRows(fields, len(row_key), key_grouping(operator, len(state.key_columns)))
        self._store.add_array("timestamp", np.int64)
        self.changes = keyed_changes(state, self._store, self._columns)
        self._least = TIMESTAMP_MAX
        """No timer is earlier; there may be none at it."""
        self._forget_near()

    def __len__(self) -> int:
        return self._store.count

    def _forget_near(self) -> None:
        self._near: list[Slots] = []
        self._horizon = -TIMESTAMP_MAX - 1
        """Every timer below it or at it is near; there may be none when it is the least number there is."""
        self._added = 0
        """Timers that became near since the horizon was set."""

    def set(self, rows: pa.RecordBatch) -> None:
        """Set timers; one that is set already gets the new values. They may be in the past: the next ``due`` gives them."""
        self._set(rows, None)

    def _set(self, rows: pa.RecordBatch, groups: Any) -> None:
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
        """Forget timers by their row keys; those that are not set are passed over."""
        self.remove(rows)

    def remove(self, rows: pa.RecordBatch) -> Mask:
        """Forget the rows with these row keys; whether each was there."""
        slots = self._store.find(self._row_keys.fit(rows, {"_tag": _NO_TAG}))
        self._store.kill(slots[slots >= 0])
        self._tidy()
        return slots >= 0

    def clear_keys(self, keys: pa.RecordBatch) -> None:
        """Forget all timers of these keys. Looks at every timer: there is no index by key."""
        slots = self._store.live_slots()
        fitted = self._keys.fit(keys)
        codes = row_key_codes(
            [pa.chunked_array([a, b]) for a, b in zip(fitted, self._store.get(slots, 0, len(fitted)), strict=True)]
        )
        cleared, held = codes[: len(keys)], codes[len(keys) :]
        self._store.kill(slots[np.isin(held, cleared)])
        self._tidy()

    def _tidy(self) -> None:
        if self._store.wasteful:
            self._store.compact()
            self._forget_near()

    def due(self, watermark: int) -> pa.RecordBatch | None:
        """Remove and return every timer with ``_timestamp`` ≤ ``watermark`` (µs); None where there is none.

        Columns as :meth:`rows` has them. Ordered by ``_timestamp``, then key group, then a hash of key and tag: the same
        order whatever order they were set in, before and after a restore.
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

    def next_timestamp(self) -> int | None:
        """The least ``_timestamp`` (µs), None if there is no timer."""
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
        """The near timers that live, which all those up to ``watermark`` are among."""
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
        """Set a horizon that a share of the timers is near to, or all where they are few."""
        slots = self._store.live_slots()
        self._horizon = TIMESTAMP_MAX
        if len(slots) > 2 * _NEAR_MIN:
            timestamps = self._store.array("timestamp")[slots]
            rank = max(_NEAR_MIN, len(slots) // _NEAR_SHARE)
            self._horizon = int(np.partition(timestamps, rank)[rank])
            slots = slots[timestamps <= self._horizon]
        self._near, self._added = [slots], 0
        return slots

    def rows(self) -> pa.Table:
        """Every timer: ``_timestamp``, ``_tag``, the columns of the declaration, in the order in which they were first set."""
        return as_table(self._schema, self._columns, self._store.live_slots())

    def _columns(self, slots: Slots | slice) -> list[pa.Array]:
        columns = self._store.get(slots)
        return [columns[position] for position in self._positions]

    def clear(self) -> None:
        """Forget every timer."""
        self._store.clear()
        self._least = TIMESTAMP_MAX
        self._forget_near()

    def set_one(self, key: Any, timestamp: int, tag: str = "", **values: Any) -> None:
        """Set one timer, at ``timestamp`` (µs).

        ``key`` is the value of the key column, or a tuple of values where the key has several columns.
        """
        row, columns = one_row(self._row_keys, key, timestamp, tag), one_values(self._values, values)
        self.set(
            pa.RecordBatch.from_arrays([*row.columns, *columns.columns], [*row.schema.names, *columns.schema.names])
        )

    def delete_one(self, key: Any, timestamp: int, tag: str = "") -> None:
        """Forget one timer; ``key`` and ``timestamp`` as for :meth:`set_one`."""
        self.delete(one_row(self._row_keys, key, timestamp, tag))

    def restore(self, rows: pa.RecordBatch, groups: Any = None) -> None:
        """Take rows of a checkpoint, each row key once; ``groups`` are their key groups, if known to be right."""
        self._set(rows, groups)

    def replace(self, rows: pa.RecordBatch, groups: Any = None) -> None:
        """Set rows of a checkpoint, each row key once, of which some may be there."""
        self.restore(rows, groups)

    def segment_rows(self) -> pa.Table | None:
        """The rows as a segment has them, with ``_key_group``, None if there are none. Good until the next change."""
        return self.changes.whole()

    @property
    def stores(self) -> list[Rows]:
        """Where the rows are."""
        return [self._store]

    def loaded(self) -> None:
        """The store was filled from elsewhere."""
        self._forget_near()
        self._least = int(self._store.array("timestamp")[self._store.live_slots()].min(initial=TIMESTAMP_MAX))
