"""What keyed states have in common, and keyed value state: one row of values per key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import InvalidInput
from stateformat.graph import Operator, brief
from stateformat.model import State
from stateformat.schema import segment_schema
from stateformat.tables import CONVERSION_ERRORS, from_python
from stateformat.ttl import TTL_COLUMN

from .columns import FixedBuffer, Mask, Slots, ValidityBuffer, take_apart
from .expiry import Expiry, Times, times_of
from .rows import KeyedRows, RowNormalizer, Rows, as_table, key_grouping, record_batch, without
from .versions import Changes

_UFUNCS: Final[Mapping[str, Any]] = {"sum": np.add, "count": np.add, "min": np.minimum, "max": np.maximum}
# Arrow's minimum and maximum ignore NaN, so ours begin with it.
_FLOAT_UFUNCS: Final[Mapping[str, Any]] = {**_UFUNCS, "min": np.fmin, "max": np.fmax}


class KeyedState(ABC):
    """The base of keyed value, map, list and timers: rows by row key.

    Keys are a record batch with the key columns, by name; other columns are ignored. Values have
    the other columns of the state; nullable ones may be missing and are null. Types are those
    declared, or such that a safe cast keeps the values. Null is a key like any other, −0.0 is 0.0
    and NaN is one key (SPEC.md section 5.3). Other columns raise ``InvalidState``, and the state is
    unchanged.
    """

    changes: Changes
    """Which rows have changed; made by :meth:`_track`."""

    def __init__(self, state: State) -> None:
        schema = segment_schema(state)
        row_key = list(state.row_key)
        self._schema = pa.schema(list(schema)[1:])
        """The columns of a segment without ``_key_group``."""
        self._keys = RowNormalizer(state, state.key_columns, only=False)
        self._row_keys = RowNormalizer(state, row_key, only=False)
        values = [name for name in self._schema.names if name not in row_key]
        self._stored = RowNormalizer(state, values, only=True)
        """The columns after the row key, as they are stored and restored."""
        self._ttl = state.ttl
        self.expiry: Expiry | None = None
        """Which rows have expired; None if rows do not expire. Made by :meth:`_expire`."""
        self._values = self._stored
        self._shown = self._schema
        if state.ttl is not None:
            self._values = RowNormalizer(state, [name for name in values if name != TTL_COLUMN], only=True)
            self._shown = pa.schema([field for field in self._schema if field.name != TTL_COLUMN])

    def __repr__(self) -> str:
        return brief(self, f"{len(self):,} rows")

    def _keyed_rows(self, operator: Operator) -> KeyedRows:
        fields = [*self._row_keys.fields, *self._stored.fields]
        stored = [field.name for field in fields]
        self._positions = [stored.index(name) for name in self._schema.names]
        return KeyedRows(fields, len(self._row_keys.fields), key_grouping(operator, len(self._keys.fields)))

    def _track(self, state: State, rows: Rows) -> None:
        self.changes = Changes(state, rows, self._row_keys_at, self._groups_at, self._columns)

    def _expire(self, rows: Rows, kill: Callable[[Slots], object], tidy: Callable[[], None]) -> None:
        """Make rows expire, if those of this state do."""
        if self._ttl is not None:
            self.expiry = Expiry(self._ttl, rows, kill, tidy, bare=not self._values.fields)
            self.changes.expiry = self.expiry

    def __len__(self) -> int:
        return self.changes.rows.count if self.expiry is None else self.expiry.count()

    @property
    def stores(self) -> list[Rows]:
        return [self.changes.rows]

    def rows(self) -> pa.Table:
        """Return all rows in the order in which they came, without ``_key_group``.

        Leaves out expired rows; reading rows this way is not an access.
        """
        return as_table(self._shown, self._shown_columns, self._alive(self.changes.rows.live_slots()))

    def _alive(self, slots: Slots) -> Slots:
        """Return those of these slots, which are live, whose rows have not expired."""
        return slots if self.expiry is None else self.expiry.alive(slots)

    @abstractmethod
    def restore(self, rows: pa.RecordBatch, groups: Any = None) -> None:
        """Add rows of a checkpoint; ``groups``: their key groups, if known to be right."""

    def replace(self, rows: pa.RecordBatch, groups: Any = None) -> None:
        """Set rows of a checkpoint, each row key once; some may exist already."""
        self.restore(rows, groups)

    @abstractmethod
    def remove(self, rows: pa.RecordBatch) -> Mask:
        """Delete the rows with these row keys; returns whether each existed."""

    @abstractmethod
    def clear_keys(self, keys: pa.RecordBatch) -> None:
        pass

    def loaded(self) -> None:
        """All contents have been replaced."""
        if self.expiry is not None:
            self.expiry.forget()

    def _columns(self, slots: Slots | slice) -> list[pa.Array]:
        columns = self.changes.rows.get(slots)
        return [columns[position] for position in self._positions]

    def _shown_columns(self, slots: Slots | slice) -> list[pa.Array]:
        columns = self._columns(slots)
        if self.expiry is None:
            return columns
        return [column for column, field in zip(columns, self._schema, strict=True) if field.name != TTL_COLUMN]

    def _row_keys_at(self, slots: Slots) -> list[pa.Array]:
        return self.changes.rows.get(slots, 0, len(self._row_keys.fields))

    def _groups_at(self, slots: Slots | slice) -> Any:
        return self.changes.rows.array("group")[slots]

    def _came(self, stored: Sequence[pa.Array]) -> None:
        """Rows of a checkpoint were added, with these columns after the row key."""
        if self.expiry is not None:
            self.expiry.came(stored[-1])

    def _seen(self, slots: Slots, at: Times | None = None) -> Slots:
        """Return the slots, with −1 for those whose rows have expired; this reads the others."""
        if self.expiry is not None:
            slots = self.expiry.hide(slots, at)
            self.expiry.read(slots)
        return slots

    def _values_at(self, slots: Slots) -> tuple[pa.RecordBatch, Mask]:
        """Return the value columns at the slots, null where a slot is −1; and where it is not
        −1.
        """
        found = slots >= 0
        first = len(self._row_keys.fields)
        stop = first + len(self._values.fields)
        columns = self.changes.rows.get(slots, first, stop, found=None if found.all() else found)
        return record_batch(columns, self._values.schema, len(slots)), found


class KeyedValue(KeyedState):
    """One row of values per key (SPEC.md section 3.6, kind ``value``)."""

    def __init__(self, operator: Operator, state: State) -> None:
        super().__init__(state)
        self._store = self._keyed_rows(operator)
        self._track(state, self._store)
        self._expire(self._store, self._store.kill, self._tidy)
        if self.expiry is not None:
            self._store.renew = self.expiry.renew

    def get(self, keys: pa.RecordBatch, *, at: pa.Array | None = None) -> tuple[pa.RecordBatch, Mask]:
        """Return the values of each row of ``keys``, in order, and whether the key has any; null
        where not.

        ``at``, for values that expire in event time: the event time of each row (timestamp[us] or
        int64 µs), if it is later than the watermark.
        """
        times = self._times(keys, at)
        return self._values_at(self._seen(self._store.find(self._keys.fit(keys)), times))

    def put(self, keys: pa.RecordBatch, values: pa.RecordBatch, *, at: pa.Array | None = None) -> None:
        """Set the values of keys, row by row; of rows with the same key the last one counts.

        ``at``, for values that expire in event time: the event time of each row, which counts as
        the time of access instead of the watermark; of several the greatest.
        """
        fitted_keys, fitted = self._fit(keys, values)
        times = self._times(keys, at)
        self._make_room(len(keys))
        slots, new = self._store.ensure(fitted_keys)
        self._store.put_rows(slots, fitted)
        if self.expiry is not None:
            self.expiry.wrote(slots, len(new), times)

    def _make_room(self, rows: int) -> None:
        if self.expiry is not None:
            self.expiry.make_room(rows)

    def _times(self, keys: pa.RecordBatch, at: pa.Array | None) -> Times | None:
        if at is None:
            return None
        if self._ttl is None or self._ttl.clock != "event_time":
            raise InvalidInput("event times of rows are given to a state whose rows do not expire in event time")
        check_lengths(len(keys), "event times", len(at))
        return times_of(at)

    def update(
        self, keys: pa.RecordBatch, combine: Callable[[pa.RecordBatch, Mask], pa.RecordBatch | Mapping[str, Any]]
    ) -> None:
        """Read, change and write with one search.

        ``combine`` gets what :meth:`get` returns and returns the new values; it must not touch the
        state. Every row of a key gets the key's old values; of several rows the last one counts. If
        ``combine`` raises, nothing has changed.
        """
        fitted = self._keys.fit(keys)
        self._make_room(len(keys))
        slots = self._store.find(fitted)
        if self.expiry is not None:
            slots = self.expiry.hide(slots)
        values = combine(*self._values_at(slots))
        if isinstance(values, Mapping):
            values = pa.RecordBatch.from_pydict(dict(values))
        fitted, new = self._fit(keys, values)
        added = 0
        if (slots < 0).any():
            slots, rows = self._store.ensure(fitted)
            added = len(rows)
        self._store.put_rows(slots, new)
        if self.expiry is not None:
            self.expiry.wrote(slots, added)

    def add(self, keys: pa.RecordBatch, values: pa.RecordBatch, how: Mapping[str, str]) -> None:
        """Accumulate into the values of keys in place; a key may occur several times.

        ``how`` maps value columns to ``sum`` (numbers), ``min``, ``max`` (numbers, dates,
        timestamps) or ``count`` (int64). ``values`` has those columns. Nulls do not count: a sum of
        nothing is null, a count 0. If its column is not in ``values``, a count counts rows.

        Other columns stay as they are, null for a new key. Non-nullable columns must be in ``how``,
        and given without nulls unless they count. Raises ``InvalidInput`` before anything changes,
        also for a sum of integers that does not fit into its column.
        """
        fitted_keys = self._keys.fit(keys)
        inputs = {name: self._input(values, name, kind) for name, kind in how.items()}
        for name, column in inputs.items():
            if column is not None:
                check_lengths(len(keys), f"column {name!r}", len(column))
        self._refuse_nulls(how, inputs)
        self._make_room(len(keys))
        slots, rows = self._store.ensure(fitted_keys)
        new = slice(self._store.used - len(rows), self._store.used)
        for position, field in enumerate(self._values.schema, self._store.key_count):
            if how.get(field.name) == "sum" and self._overflows(position, inputs[field.name], slots, new):
                self._store.kill(np.arange(new.start, new.stop))
                wider = "it as int64" if field.type.bit_width < 64 else "a column of double or decimal128, for update()"
                raise InvalidInput(
                    f"a sum in column {field.name!r} does not fit into {field.type}, so nothing is added. Declare "
                    f"{wider}."
                )
        self.changes.touched(slots)
        for position, name in enumerate(self._values.schema.names, self._store.key_count):
            if name in inputs:
                self._accumulate(position, how[name], inputs[name], slots, new)
            elif len(rows):
                nulls = take_apart(pa.nulls(len(rows), self._store.kinds[position]))
                for buffer, raw in zip(self._store.buffers[position], nulls, strict=True):
                    buffer.put(new, raw)
        if self.expiry is not None:
            self.expiry.wrote(slots, len(rows))

    def _refuse_nulls(self, how: Mapping[str, str], inputs: Mapping[str, pa.Array | None]) -> None:
        for name in self._values.strict:
            if how.get(name) == "count":
                continue
            column = inputs.get(name)
            if column is None or column.null_count:
                nulls = "is not accumulated" if column is None else f"is given {column.null_count} nulls"
                raise InvalidInput(
                    f"column {name!r} holds no nulls and {nulls}, so a new key might have one. Accumulate it from "
                    "values without nulls, or declare it nullable."
                )

    def _input(self, values: pa.RecordBatch, name: str, kind: str) -> pa.Array | None:
        """Return what is accumulated into a column, with its type; None: rows are counted."""
        names = self._values.schema.names
        if name not in names or kind not in _UFUNCS:
            raise InvalidInput(
                f"{kind!r} of column {name!r}: the value columns are {names}, and what can be accumulated is "
                f"{', '.join(_UFUNCS)}"
            )
        target = self._values.schema.field(name).type
        is_ = pa.types
        numeric = is_.is_integer(target) or is_.is_floating(target)
        ordered = numeric or is_.is_date(target) or is_.is_timestamp(target)
        if not (numeric if kind == "sum" else target == pa.int64() if kind == "count" else ordered):
            raise InvalidInput(f"column {name!r} is {target}, which has no {kind} in place; use update()")
        index = values.schema.get_field_index(name)
        if index < 0 and kind != "count":
            raise InvalidInput(f"{kind} of column {name!r}, which is not among the values given: {values.schema.names}")
        if index < 0:
            return None
        column = values.column(index)
        if kind == "count" or column.type == target:
            return column
        try:
            return column.cast(target)
        except pa.ArrowException as error:
            raise InvalidInput(f"column {name!r} is {column.type} and should be {target}: {error}") from error

    def _overflows(self, position: int, column: pa.Array | None, slots: Slots, new: slice) -> bool:
        """Return whether a sum of integers would leave its column."""
        buffer = self._store.buffers[position][1]
        assert isinstance(buffer, FixedBuffer)
        if buffer.values.dtype.kind != "i" or column is None or not len(column):
            return False
        limit = 1 << 8 * buffer.values.dtype.itemsize - 1
        # Null is stored as zero; what is at new slots means nothing yet.
        held = np.where(slots < new.start, buffer.values[slots], 0).astype(np.int64)
        added = pc.fill_null(column, 0).to_numpy(zero_copy_only=False).astype(np.int64)
        if _farthest(held) + _farthest(added) * len(added) < limit:
            return False
        # Exact, in halves: the upper ones overflow first.
        _, first, place = np.unique(slots, return_index=True, return_inverse=True)
        upper, lower = held[first] >> 32, held[first] & 0xFFFFFFFF
        np.add.at(upper, place, added >> 32)
        np.add.at(lower, place, added & 0xFFFFFFFF)
        upper += lower >> 32
        sums = (upper << 32) + (lower & 0xFFFFFFFF)
        outside = (upper < -(1 << 31)) | (upper >= 1 << 31) | (sums < -limit) | (sums > limit - 1)
        return bool(outside.any())

    def _accumulate(self, position: int, kind: str, column: pa.Array | None, slots: Slots, new: slice) -> None:
        valid, buffer = self._store.buffers[position]
        assert isinstance(valid, ValidityBuffer)
        assert isinstance(buffer, FixedBuffer)
        is_valid: Mask | None = None
        if kind == "count":
            # Every key of the batch has a count, even if it is 0; and 0 is what a null is stored
            # as.
            valid.put(slots, None)
        if column is not None and column.null_count:
            is_valid = column.is_valid().to_numpy(zero_copy_only=False)
            slots = slots[is_valid]
        target = buffer.values
        target[new] = _identity(target.dtype, kind)
        ufuncs = _FLOAT_UFUNCS if target.dtype.kind == "f" else _UFUNCS
        if kind == "count" or column is None:
            ufuncs[kind].at(target, slots, 1)
            return
        if is_valid is not None and new.start < new.stop:
            valid.put(new, np.zeros(new.stop - new.start, np.bool_))
        if valid.values is not None:
            # Columns that were null start anew: a null is stored as zero, but a minimum starts
            # elsewhere.
            fresh = slots[~valid.values[slots]]
            target[fresh] = _identity(target.dtype, kind)
            valid.values[slots] = True
        raw = take_apart(column)[1]
        ufuncs[kind].at(target, slots, raw if is_valid is None else raw[is_valid])
        if valid.values is not None:
            added = target[new]
            added[~valid.values[new]] = 0

    def delete(self, keys: pa.RecordBatch) -> None:
        """Delete keys; those without values are ignored."""
        self.remove(keys)

    def remove(self, rows: pa.RecordBatch) -> Mask:
        slots = self._store.find(self._keys.fit(rows))
        self._store.kill(slots[slots >= 0])
        self._tidy()
        return slots >= 0

    def _tidy(self) -> None:
        if self._store.wasteful:
            self._store.compact()

    def clear_keys(self, keys: pa.RecordBatch) -> None:
        self.remove(keys)

    def clear(self) -> None:
        """Delete all keys."""
        self._store.clear()

    # Calls for one key. ``key`` is the value of the key column, or a tuple of the values of several
    # columns.

    def get_one(self, *key: Any) -> dict[str, Any] | None:
        """Return the values of one key, by column, or None: ``get_one(7)``, or ``get_one(("Oslo",
        7))`` for two key columns.
        """
        values, found = self.get(one_row(self._keys, spread(key)))
        row: dict[str, Any] | None = values.to_pylist()[0] if found[0] else None
        return row

    def put_one(self, key: Any, **values: Any) -> None:
        """Set the values of one key: ``put_one(7, n=1)``, or ``put_one(("Oslo", 7), n=1)``."""
        self.put(one_row(self._keys, key), one_values(self._values, values))

    def delete_one(self, *key: Any) -> None:
        """Delete one key, given as :meth:`get_one` takes it."""
        self.delete(one_row(self._keys, spread(key)))

    def _fit(self, keys: pa.RecordBatch, values: pa.RecordBatch) -> tuple[list[pa.Array], list[pa.Array]]:
        fitted = self._keys.fit(keys), self._values.fit(values)
        check_lengths(len(keys), "the values", len(values))
        return fitted

    def restore(self, rows: pa.RecordBatch, groups: Any = None) -> None:
        keys = self._keys.fit(rows)
        values = self._stored.fit(without(rows, self._keys.schema.names))
        if self._store.filling:
            self._store.append(keys, values, groups)
        else:
            slots, _ = self._store.ensure(keys, groups)
            self._store.put_rows(slots, values)
        self._came(values)


def spread(key: tuple[Any, ...]) -> Any:
    """Return one key of ``*key``: the only argument, or all of them as the values of the key
    columns.
    """
    return key[0] if len(key) == 1 else key


def one_row(normalizer: RowNormalizer, key: Any, *rest: Any) -> pa.RecordBatch:
    """Return a batch of one row: the key columns, then a column for each of ``rest``.

    ``key`` is the value of the key column, or a sequence (not text, not bytes) with the values of
    all. Raises ``InvalidInput`` for too many values or too few, and for a value of another type.
    """
    names = normalizer.schema.names[: len(normalizer.fields) - len(rest)]
    several = isinstance(key, Sequence | np.ndarray) and not isinstance(key, str | bytes | bytearray | memoryview)
    if not several and len(names) > 1:
        raise InvalidInput(
            f"{key!r} is no key of {names}; the key has {len(names)} columns: give a tuple of their values"
        )
    values = tuple(key) if several else (key,)
    if len(values) != len(names):
        raise InvalidInput(f"{key!r} has {len(values)} values and the key {len(names)}: {names}")
    columns = []
    for value, field in zip((*values, *rest), normalizer.fields, strict=True):
        try:
            columns.append(from_python([value], field.type))
        except CONVERSION_ERRORS as error:
            raise InvalidInput(f"{value!r} is no value of key column {field.name!r} ({field.type}): {error}") from error
    return pa.RecordBatch.from_arrays(columns, schema=normalizer.schema)


def one_values(normalizer: RowNormalizer, values: Mapping[str, Any]) -> pa.RecordBatch:
    """Return a batch of one row of these values; ``InvalidInput`` for an unknown name or another
    type.
    """
    unknown = sorted(set(values) - set(normalizer.schema.names))
    if unknown:
        raise InvalidInput(f"{unknown} are no value columns; those are {normalizer.schema.names}")
    try:
        columns = [from_python([values.get(field.name)], field.type) for field in normalizer.fields]
    except CONVERSION_ERRORS as error:
        raise InvalidInput(f"{values!r} are no values of {normalizer.schema.names}: {error}") from error
    return record_batch(columns, normalizer.schema, 1)


def beside(left: pa.RecordBatch, right: pa.RecordBatch) -> pa.RecordBatch:
    """Return the columns of two batches in one."""
    return pa.RecordBatch.from_arrays([*left.columns, *right.columns], [*left.schema.names, *right.schema.names])


def check_lengths(keys: int, what: str, found: int) -> None:
    """Raise ``InvalidInput`` unless there are as many rows as keys."""
    if keys != found:
        raise InvalidInput(f"{keys} rows of keys and {found} of {what}; there must be as many")


def _farthest(numbers: Any) -> int:
    return max(-int(numbers.min()), int(numbers.max()))


def _identity(dtype: Any, kind: str) -> Any:
    if kind in ("sum", "count"):
        return dtype.type(0)
    if dtype.kind == "f":
        return dtype.type("nan")
    limits = np.iinfo(dtype)
    return limits.max if kind == "min" else limits.min
