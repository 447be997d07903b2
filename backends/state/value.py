"""Keyed value state: one row per key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from backends.state.changes import Changes
from backends.state.parts import FixedBuffer, Mask, Slots, ValidityBuffer, take_apart
from backends.state.store import KeyedRows, RowNormalizer, Rows, as_table, key_grouping, record_batch, without
from stateformat.errors import InvalidInput
from stateformat.model import Operator, State

_UFUNCS: Final[Mapping[str, Any]] = {"sum": np.add, "count": np.add, "min": np.minimum, "max": np.maximum}
# NaN is passed over by minimum and maximum, as Arrow's kernels do, so it also is what they begin with.
_FLOAT_UFUNCS: Final[Mapping[str, Any]] = {**_UFUNCS, "min": np.fmin, "max": np.fmax}


class KeyedValue:
    """One row of values per key (SPEC.md section 3.6, kind ``value``).

    Keys come as a record batch with the key columns, by name; other columns of it are passed over. Values come as one with
    the other columns of the state; nullable ones may be missing and are null. Types are those declared, or such that a
    safe cast gives the same values. Null is a key like any other, −0.0 is 0.0 and NaN is one key (section 5.3).

    Raises ``InvalidState``, the caller's fault, for columns that contradict the declaration; the state is unchanged then.
    """

    def __init__(self, operator: Operator, state: State) -> None:
        names = [item.name for item in state.current.fields]
        self._key_names = list(state.key_columns)
        self._value_names = [name for name in names if name not in self._key_names]
        self._keys = RowNormalizer(state, self._key_names, only=False)
        self._values = RowNormalizer(state, self._value_names, only=True)
        self._schema = RowNormalizer(state, names, only=False).schema
        fields = [*self._keys.fields, *self._values.fields]
        # From the order of storage, keys first, to that of the declaration.
        self._order = [[field.name for field in fields].index(name) for name in names]
        self._store = KeyedRows(fields, len(self._key_names), key_grouping(operator, len(self._key_names)))
        self.changes = keyed_changes(state, self._store, self._columns)

    def __len__(self) -> int:
        return self._store.count

    def get(self, keys: pa.RecordBatch) -> tuple[pa.RecordBatch, Mask]:
        """The values of each row of ``keys``, in their order, all null where the key has none; and whether it has.

        Value columns in the order of the declaration, nullable all.
        """
        return self._at(self._store.find(self._keys.fit(keys)))

    def _at(self, slots: Slots) -> tuple[pa.RecordBatch, Mask]:
        found = slots >= 0
        columns = self._store.get(slots, self._store.key_count, found=None if found.all() else found)
        return record_batch(columns, self._values.schema, len(slots)), found

    def put(self, keys: pa.RecordBatch, values: pa.RecordBatch) -> None:
        """Set the values of keys, row by row; of rows with the same key the last one counts."""
        fitted_keys, fitted = self._fit(keys, values)
        slots, _ = self._store.ensure(fitted_keys)
        self._store.put_rows(slots, fitted)

    def update(
        self, keys: pa.RecordBatch, combine: Callable[[pa.RecordBatch, Mask], pa.RecordBatch | Mapping[str, Any]]
    ) -> None:
        """Read, change and write with one search: ``combine`` gets what :meth:`get` gives and returns the new values.

        It is called once, must not touch the state itself, and has the old values of a key on every row of it; of several
        the last one counts. If it raises, nothing has changed.
        """
        fitted = self._keys.fit(keys)
        slots = self._store.find(fitted)
        values = combine(*self._at(slots))
        if isinstance(values, Mapping):
            values = pa.RecordBatch.from_pydict(dict(values))
        fitted, new = self._fit(keys, values)
        if (slots < 0).any():
            slots, _ = self._store.ensure(fitted)
        self._store.put_rows(slots, new)

    def add(self, keys: pa.RecordBatch, values: pa.RecordBatch, how: Mapping[str, str]) -> None:
        """Accumulate into the values of keys, in place: one search, and one pass for each column of ``how``.

        ``how`` names for value columns of the state ``sum``, ``min``, ``max`` (numbers, and dates and timestamps for the
        last two) or ``count`` (int64). ``values`` has those columns, and may have null, which is passed over: a sum of
        nothing is null, a count 0. A count counts what is not null in its column, or rows where it is missing. To merge
        counts of batches that were aggregated before, sum them. Keys may stand several times. Columns that ``how`` does not
        name stay as they are, null for a new key. Sums of integers wrap around as Arrow's do. Columns that are declared without
        nulls must be in ``how``, and given without nulls unless they count.

        Raises ``InvalidInput`` for a column or type that cannot be accumulated, before anything changes.
        """
        fitted_keys = self._keys.fit(keys)
        inputs = {name: self._input(values, name, kind) for name, kind in how.items()}
        for name, (_, column) in inputs.items():
            if column is not None and len(column) != len(keys):
                raise _unequal(len(keys), f"column {name!r}", len(column))
        self._refuse_nulls(how, inputs)
        slots, rows = self._store.ensure(fitted_keys)
        new = slice(self._store.used - len(rows), self._store.used)
        self.changes.touched(slots)
        for position, name in enumerate(self._value_names, self._store.key_count):
            if name in inputs:
                self._accumulate(position, how[name], inputs[name][1], slots, new)
            elif len(rows):
                nulls = take_apart(pa.nulls(len(rows), self._store.kinds[position]))
                for part, raw in zip(self._store.parts[position], nulls, strict=True):
                    part.put(new, raw)

    def _refuse_nulls(self, how: Mapping[str, str], inputs: Mapping[str, tuple[str, pa.Array | None]]) -> None:
        for name in self._value_names:
            if name not in self._values.strict or how.get(name) == "count":
                continue
            column = inputs[name][1] if name in inputs else None
            if column is None or column.null_count:
                nulls = "is not accumulated" if column is None else f"is given {column.null_count} nulls"
                raise InvalidInput(
                    f"column {name!r} holds no nulls and {nulls}, so a new key might have one; accumulate it from values "
                    "without nulls, or declare it nullable"
                )

    def _input(self, values: pa.RecordBatch, name: str, kind: str) -> tuple[str, pa.Array | None]:
        """What is accumulated into a column, with its type; None where rows are counted."""
        if name not in self._value_names or kind not in _UFUNCS:
            raise InvalidInput(
                f"{kind!r} of column {name!r}: the value columns are {self._value_names}, and what can be accumulated is "
                f"{', '.join(_UFUNCS)}"
            )
        target = self._values.schema.field(name).type
        is_ = pa.types
        numeric = is_.is_integer(target) or is_.is_floating(target)
        ordered = numeric or is_.is_date(target) or is_.is_timestamp(target)
        if not (numeric if kind == "sum" else target == pa.int64() if kind == "count" else ordered):
            raise InvalidInput(f"column {name!r} is {target}, of which there is no {kind} in place; use update()")
        index = values.schema.get_field_index(name)
        if kind == "count":
            return kind, None if index < 0 else values.column(index)
        if index < 0:
            raise InvalidInput(f"{kind} of column {name!r}, which is not among the values given: {values.schema.names}")
        column = values.column(index)
        if column.type != target:
            try:
                column = column.cast(target)
            except pa.ArrowException as error:
                raise InvalidInput(f"column {name!r} is {column.type} and should be {target}: {error}") from error
        return kind, column

    def _accumulate(self, position: int, kind: str, column: pa.Array | None, slots: Slots, new: slice) -> None:
        valid, part = self._store.parts[position]
        assert isinstance(valid, ValidityBuffer)
        assert isinstance(part, FixedBuffer)
        is_valid: Mask | None = None
        if kind == "count":
            # Of every key of the batch something is known, if only that it is 0; and 0 is what stands under a null.
            valid.put(slots, None)
        if column is not None and column.null_count:
            is_valid = column.is_valid().to_numpy(zero_copy_only=False)
            slots = slots[is_valid]
        target = part.values
        target[new] = _identity(target.dtype, kind)
        ufuncs = _FLOAT_UFUNCS if target.dtype.kind == "f" else _UFUNCS
        if kind == "count" or column is None:
            ufuncs[kind].at(target, slots, 1)
            return
        if is_valid is not None and new.start < new.stop:
            valid.put(new, np.zeros(new.stop - new.start, np.bool_))
        if valid.values is not None:
            # What was null begins anew: under a null stands zero, and that is not what a minimum begins with.
            fresh = slots[~valid.values[slots]]
            target[fresh] = _identity(target.dtype, kind)
            valid.values[slots] = True
        raw = take_apart(column)[1]
        ufuncs[kind].at(target, slots, raw if is_valid is None else raw[is_valid])
        if valid.values is not None:
            self._zero_nulls(valid.values, target, new)

    @staticmethod
    def _zero_nulls(valid: Mask, target: Any, new: slice) -> None:
        part = target[new]
        part[~valid[new]] = 0

    def delete(self, keys: pa.RecordBatch) -> None:
        """Forget keys; those without values are passed over."""
        self.remove(keys)

    def remove(self, rows: pa.RecordBatch) -> Mask:
        """Forget the rows with these row keys; whether each was there."""
        slots = self._store.find(self._keys.fit(rows))
        self._store.kill(slots[slots >= 0])
        if self._store.wasteful:
            self._store.compact()
        return slots >= 0

    def clear_keys(self, keys: pa.RecordBatch) -> None:
        """Forget all rows of these keys."""
        self.remove(keys)

    def clear(self) -> None:
        """Forget everything."""
        self._store.clear()

    def rows(self) -> pa.Table:
        """Every key with its values: the columns of the declaration, in the order in which the keys came."""
        return as_table(self._schema, self._columns, self._store.live_slots())

    def _columns(self, slots: Slots | slice) -> list[pa.Array]:
        columns = self._store.get(slots)
        return [columns[position] for position in self._order]

    # Calls for one key. ``key`` is the value of the key column, or a tuple of values where the key has several columns.

    def get_one(self, *key: Any) -> dict[str, Any] | None:
        """The values of one key, by column; None where the key has none.

        ``get_one(7)`` for one key column; ``get_one(("Oslo", 7))``, or ``get_one("Oslo", 7)``, for two.
        """
        values, found = self.get(one_row(self._keys, spread(key)))
        row: dict[str, Any] | None = values.to_pylist()[0] if found[0] else None
        return row

    def put_one(self, key: Any, **values: Any) -> None:
        """Set the values of one key: ``put_one(7, n=1)`` for one key column, ``put_one(("Oslo", 7), n=1)`` for two."""
        self.put(one_row(self._keys, key), one_values(self._values, values))

    def delete_one(self, *key: Any) -> None:
        """Forget one key. It is given as :meth:`get_one` takes it."""
        self.delete(one_row(self._keys, spread(key)))

    def _fit(self, keys: pa.RecordBatch, values: pa.RecordBatch) -> tuple[list[pa.Array], list[pa.Array]]:
        fitted = self._keys.fit(keys), self._values.fit(values)
        if len(keys) != len(values):
            raise _unequal(len(keys), "the values", len(values))
        return fitted

    def restore(self, rows: pa.RecordBatch, groups: Any = None) -> None:
        """Take rows of a checkpoint, each key once; ``groups`` are their key groups, if they are known to be right."""
        slots, _ = self._store.ensure(self._keys.fit(rows), groups)
        self._store.put_rows(slots, self._values.fit(without(rows, self._key_names)))

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
        """The stores were filled from elsewhere."""


def keyed_changes(state: State, store: KeyedRows, columns: Callable[[Slots | slice], list[pa.Array]]) -> Changes:
    """The stamps of a store that has the row keys itself; ``columns``: those of a segment without ``_key_group``."""
    return Changes(
        state,
        store,
        lambda slots: store.get(slots, 0, store.key_count),
        lambda some: store.array("group")[some],
        columns,
    )


def spread(key: tuple[Any, ...]) -> Any:
    """One key of ``*key``: the only argument, or all of them as the values of the key columns."""
    return key[0] if len(key) == 1 else key


def one_row(fitter: RowNormalizer, key: Any, *rest: Any) -> pa.RecordBatch:
    """A batch of one row: the key columns, then a column for each of ``rest``.

    ``key`` is the value of the key column, or a tuple (any sequence but text and bytes) with the values of all of them.
    Raises ``InvalidInput``, the caller's fault, for too many values or too few, and for a value of another type.
    """
    names = fitter.schema.names[: len(fitter.fields) - len(rest)]
    several = isinstance(key, Sequence | np.ndarray) and not isinstance(key, str | bytes | bytearray | memoryview)
    if not several and len(names) > 1:
        raise InvalidInput(
            f"{key!r} is no key of {names}; the key has {len(names)} columns: give a tuple of their values"
        )
    values = tuple(key) if several else (key,)
    if len(values) != len(names):
        raise InvalidInput(f"{key!r} has {len(values)} values and the key {len(names)}: {names}")
    columns = []
    for value, field in zip((*values, *rest), fitter.fields, strict=True):
        try:
            columns.append(_one(value, field.type))
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise InvalidInput(f"{value!r} is no value of key column {field.name!r} ({field.type}): {error}") from error
    return pa.RecordBatch.from_arrays(columns, schema=fitter.schema)


def one_values(fitter: RowNormalizer, values: Mapping[str, Any]) -> pa.RecordBatch:
    """A batch of one row of these values; ``InvalidInput`` for a name that is none or a value of another type."""
    unknown = sorted(set(values) - set(fitter.schema.names))
    if unknown:
        raise InvalidInput(f"{unknown} are no value columns; those are {fitter.schema.names}")
    try:
        columns = [_one(values.get(field.name), field.type) for field in fitter.fields]
    except (pa.ArrowException, OverflowError) as error:
        raise InvalidInput(f"{values!r} are no values of {fitter.schema.names}: {error}") from error
    return record_batch(columns, fitter.schema, 1)


def _one(value: Any, kind: pa.DataType) -> pa.Array:
    """An array of one value. Arrow cuts off what an integer cannot hold of a fraction, and leaves out unknown fields; here these fail."""
    array = pa.array([value], kind)
    if not _is_same(value, array[0].as_py(), kind):
        raise pa.ArrowInvalid(f"{value!r} is no {kind}, which would hold {array[0].as_py()!r}")
    return array


def _is_same(value: Any, kept: Any, kind: pa.DataType) -> bool:
    if value is None:
        return kept is None
    if pa.types.is_integer(kind):
        return bool(value == kept)
    if pa.types.is_struct(kind) and isinstance(value, Mapping):
        inner = {field.name: field.type for field in kind}
        return set(value) <= set(inner) and all(_is_same(value[name], kept[name], inner[name]) for name in value)
    if pa.types.is_list(kind) and isinstance(value, Sequence):
        return all(_is_same(one, of, kind.value_type) for one, of in zip(value, kept, strict=True))
    return True


def _unequal(keys: int, what: str, found: int) -> InvalidInput:
    return InvalidInput(f"{keys} rows of keys and {found} of {what}; there must be as many")


def _identity(dtype: Any, kind: str) -> Any:
    if kind in ("sum", "count"):
        return dtype.type(0)
    if dtype.kind == "f":
        return dtype.type("nan")
    limits = np.iinfo(dtype)
    return limits.max if kind == "min" else limits.min
