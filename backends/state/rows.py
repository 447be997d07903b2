"""Rows of one state in slots, and the index over their keys.

Theory of operation. Rows get slots, numbers from 0 up, as they come. A deleted row leaves a hole.
Once more than half of a store is holes, the live rows move together. So rows are always in the
order in which their keys came, and the same history of calls gives the same order.

A subtask may only have the keys of its key groups (SPEC.md section 5.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidState
from stateformat.graph import Operator
from stateformat.keys import (
    DEFAULT_KEY_HASH,
    key_group_count,
    key_group_range,
    key_hash,
    normalize_key_column,
    subtask_of_key_group,
)
from stateformat.model import Mode, SchemaVersion, State
from stateformat.schema import KEY_GROUP, segment_schema
from stateformat.segments import groups_of_keys, normalize_rows, one_array

from . import columns as parts
from .columns import ColumnBuffer, FixedBuffer, Mask, Raw, Slots, take_apart
from .index import SlotIndex, hash_raws


@dataclass(frozen=True)
class OwnedKeys:
    """The keys that one subtask owns, for one of its keyed states."""

    operator: Operator
    subtask: int
    state: str
    columns: tuple[str, ...]
    """The key columns of the state."""
    key_by: tuple[tuple[str, ...], ...]
    """The key columns of each keyed input of the operator."""

    @cached_property
    def _range(self) -> tuple[int, int]:
        count = key_group_count(self.operator)
        return key_group_range(self.subtask, parallelism=self.operator.parallelism, max_parallelism=count)

    def foreign(self, groups: npt.NDArray[Any]) -> int | None:
        """Return the first position with a key group of another subtask, or None."""
        first, last = self._range
        if self.operator.parallelism == 1 or (groups.min() >= first and groups.max() <= last):
            return None
        return int(np.argmax((groups < first) | (groups > last)))

    def error(self, row_key: Sequence[Any], group: int) -> InvalidState:
        """Return the error for a row key (key columns first) in another subtask's key group."""
        key = tuple(row_key[: len(self.columns)])
        shown = repr(key[0]) if len(key) == 1 else repr(key)
        owner = subtask_of_key_group(
            group, parallelism=self.operator.parallelism, max_parallelism=key_group_count(self.operator)
        )
        keyed = " and ".join(f"key_by({', '.join(map(repr, columns))})" for columns in dict.fromkeys(self.key_by))
        return InvalidState(
            f"operator {self.operator.uid!r} puts key {shown} ({', '.join(self.columns)}) into state {self.state!r} "
            f"in subtask {self.subtask}, but that key belongs to subtask {owner}. Its input comes by "
            f"{keyed or 'no key'}: put the values of those columns from a record, or key the input by what the state "
            "is keyed by.",
            kind=ErrorKind.STATE_NOT_ALLOWED,
            operator=self.operator.uid,
            state=self.state,
            subtask=self.subtask,
        )


GroupOf = Callable[[Sequence[pa.Array]], npt.NDArray[np.int32]]

HOLES_MIN: Final = 1024
_CAPACITY_MIN: Final = 1024
_TABLE_ROWS: Final = 1 << 20


class RowNormalizer:
    """Converts batches to the columns ``names`` of a segment, with the stored types; equal floats
    in keys get equal bits.

    ``only``: refuse any other column.
    """

    def __init__(self, state: State, names: Sequence[str], *, only: bool) -> None:
        schema = segment_schema(state)
        self.fields: list[pa.Field] = [schema.field(name) for name in names]
        self.schema = pa.schema(self.fields)
        self._only = only
        self._where = f"state {state.name!r} of {state.operator!r}"
        self._keys = {*state.key_columns, "_map_key"}
        # The format's own columns of a row key are never null (SPEC.md section 5.1).
        self.strict = {name for name in names if name.startswith("_") and name != "_map_key"}
        """The columns that hold no nulls."""
        self.strict |= {item.name for item in state.current.fields if item.name in names and not item.nullable}
        # The declared columns, as plain columns of a state without keys.
        fields = tuple(item for item in state.current.fields if item.name in names)
        self._plain = replace(
            state, mode=Mode.EVEN_SPLIT, kind=None, key_columns=(), edge=None, schemas=(SchemaVersion(1, fields),)
        )
        self._own = {"_index": pa.int64(), "_timestamp": pa.int64(), "_tag": pa.string()}

    def fit(self, rows: pa.RecordBatch | pa.Table, fill: dict[str, pa.Scalar] | None = None) -> list[pa.Array]:
        """Return one array for each column. Nullable columns that are not keys may be missing.

        ``fill``: the value of other missing columns. Raises ``InvalidState`` for a column that is
        missing, unknown, null or of another type.
        """
        if isinstance(rows, pa.Table):
            rows = rows.combine_chunks()
        elif not isinstance(rows, pa.RecordBatch):
            raise InvalidState(
                f"{self._where}: rows are given as {type(rows).__name__}; they are a record batch with the columns "
                f"{self.schema.names}"
            )
        for name, value in (fill or {}).items():
            if name not in rows.schema.names:
                rows = rows.append_column(name, pa.repeat(value, len(rows)))
        columns = [column for field in self.fields if (column := self._column(rows, field)) is not None]
        if len(columns) != len(self.fields) or (self._only and rows.num_columns != len(columns)):
            columns = self._normalized(rows)
        for field, column in zip(self.fields, columns, strict=True):
            if column.null_count and field.name in self.strict:
                raise InvalidState(
                    f"{self._where}: column {field.name!r} holds no nulls and {column.null_count} are given. "
                    "Fill them, or declare it nullable.",
                    kind=ErrorKind.NULL_NOT_ALLOWED,
                    column=field.name,
                )
        return [
            normalize_key_column(column) if field.name in self._keys else column
            for field, column in zip(self.fields, columns, strict=True)
        ]

    def _column(self, rows: pa.RecordBatch | pa.Table, field: pa.Field) -> pa.Array | None:
        """Return the column if it needs no work: it is there, once, with its type."""
        index = rows.schema.get_field_index(field.name)
        if index < 0 or rows.schema.field(index).type != field.type:
            return None
        return _one_array(rows.column(index))

    def _normalized(self, rows: pa.RecordBatch | pa.Table) -> list[pa.Array]:
        names = self.schema.names
        given = rows.schema.names
        missing = [name for name in names if name not in given and (name in self._keys or name.startswith("_"))]
        wrong = [name for name in given if given.count(name) > 1 or (self._only and name not in names)]
        if missing or wrong:
            faults = [f"{missing} are missing"] if missing else []
            if wrong:
                faults.append(f"{sorted(set(wrong))} are unknown or there twice")
            raise InvalidState(f"{self._where}: its columns are {names}, those given {given}; {' and '.join(faults)}")
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
        own = [name for name in names if name in self._own]
        fields = [name for name in names if name not in self._own]
        plain = normalize_rows(
            table.select([name for name in fields if name in given]),
            self._plain,
            schema_id=1,
            delta=False,
            where=self._where,
        )
        columns = {name: _one_array(plain[name]) for name in fields}
        for name in own:
            given_type = table[name].type
            try:
                column = _one_array(table[name])
                if pa.types.is_timestamp(given_type):
                    # The stored number is in microseconds, whatever the unit was.
                    column = column.cast(pa.timestamp("us", given_type.tz))
                columns[name] = column.cast(self._own[name])
            except pa.ArrowException as error:
                raise InvalidState(
                    f"{self._where}: column {name!r} is {given_type} and should be {self._own[name]}: {error}"
                ) from error
        return [columns[name] for name in names]


def _one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return one_array(column) if isinstance(column, pa.ChunkedArray) else column


def key_grouping(operator: Operator, key_count: int) -> GroupOf:
    """Return a function from columns, the first ``key_count`` being the key, to groups."""
    ceiling = key_group_count(operator)
    name = operator.key_hash or DEFAULT_KEY_HASH
    # Refuses an unregistered name now, and not in the middle of a change.
    key_hash(name)

    def groups_of(columns: Sequence[pa.Array]) -> npt.NDArray[np.int32]:
        return groups_of_keys([pa.chunked_array([column]) for column in columns[:key_count]], ceiling, name)

    return groups_of


class ChangeListener(Protocol):
    """Is notified which rows change; :class:`.Changes` is the only implementation."""

    is_taking: bool

    def added(self, slots: slice) -> None: ...

    def touched(self, slots: Slots | slice) -> None: ...

    def closing(self) -> None: ...

    def cleared(self) -> None: ...

    def unseen(self) -> AbstractContextManager[None]: ...


class Rows:
    """Columns in slots, without keys."""

    def __init__(self, fields: Sequence[pa.Field]) -> None:
        self.kinds = [field.type for field in fields]
        self.buffers: list[list[ColumnBuffer]] = [parts.make_buffers(kind) for kind in self.kinds]
        self.arrays: dict[str, FixedBuffer] = {"live": FixedBuffer(np.bool_)}
        self.changes: ChangeListener | None = None
        self.used = 0
        """Slots assigned so far, holes included."""
        self.capacity = 0
        self.count = 0
        """How many slots are live."""
        self.reserve(_CAPACITY_MIN)

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return an array by slot, to be read and changed in place until the next row is added."""
        return self.arrays[name].values

    def add_array(self, name: str, dtype: Any) -> None:
        """Add an array by slot that moves with the rows; zero until it is set."""
        self.arrays[name] = FixedBuffer(dtype)
        self.arrays[name].reserve(self.capacity, 0)

    @property
    def size_bytes(self) -> int:
        return sum(buffer.size_bytes for buffer in self._all_buffers)

    @property
    def _all_buffers(self) -> list[ColumnBuffer]:
        return [*(buffer for column in self.buffers for buffer in column), *self.arrays.values()]

    def reserve(self, more: int) -> None:
        if self.used + more <= self.capacity:
            return
        self.capacity = max(_CAPACITY_MIN, 2 * self.capacity, self.used + more)
        for buffer in self._all_buffers:
            buffer.reserve(self.capacity, self.used)

    def fill(self, rows: int) -> None:
        """Announce that only rows are added, at most so many, until :meth:`filled`."""
        self.reserve(rows)

    def filled(self) -> bool:
        """All rows were added. Returns False if a row key may occur twice: clear everything."""
        return True

    def add(self, count: int) -> slice:
        self.reserve(count)
        new = slice(self.used, self.used + count)
        self.array("live")[new] = True
        self.used += count
        self.count += count
        if self.changes is not None:
            self.changes.added(new)
        return new

    def put(self, slots: Slots | slice, raws: Sequence[Sequence[Raw]], first: int = 0) -> None:
        for buffers, column in zip(self.buffers[first : first + len(raws)], raws, strict=True):
            for buffer, raw in zip(buffers, column, strict=True):
                buffer.put(slots, raw)
        if self.changes is not None and (raws or self.changes.is_taking):
            self.changes.touched(slots)

    def get(
        self, slots: Slots | slice, first: int = 0, stop: int | None = None, found: Mask | None = None
    ) -> list[pa.Array]:
        """Return columns ``first`` … ``stop`` − 1; null where ``found`` is False, whatever slot."""
        return [
            parts.put_together(kind, iter([buffer.get(slots) for buffer in buffers]), found)
            for kind, buffers in zip(self.kinds[first:stop], self.buffers[first:stop], strict=True)
        ]

    def live_slots(self) -> Slots:
        if self.count == self.used:
            return np.arange(self.used)
        return np.flatnonzero(self.array("live")[: self.used])

    def kill(self, slots: Slots) -> Slots:
        """Delete slots; returns those that were live, each once, ascending."""
        live = self.array("live")
        gone: Slots = slots[live[slots]]
        if len(gone) > 1 and not (gone[1:] > gone[:-1]).all():
            gone = np.unique(gone)
        live[gone] = False
        self.count -= len(gone)
        if self.changes is not None:
            self.changes.touched(gone)
        return gone

    @property
    def wasteful(self) -> bool:
        return self.used - self.count > max(HOLES_MIN, self.count)

    def compact(self) -> Slots:
        """Close the holes; what was in slot ``result[i]`` is then in slot i."""
        if self.changes is not None:
            self.changes.closing()
        kept = self.live_slots()
        for buffer in self._all_buffers:
            buffer.keep(kept)
        self.used = len(kept)
        return kept

    def clear(self) -> None:
        self.buffers = [parts.make_buffers(kind) for kind in self.kinds]
        self.arrays = {name: FixedBuffer(array.values.dtype) for name, array in self.arrays.items()}
        self.used = self.count = self.capacity = 0
        self.reserve(_CAPACITY_MIN)
        if self.changes is not None:
            self.changes.cleared()


class KeyedRows(Rows):
    """Rows found by their first ``key_count`` columns, which are normalized."""

    def __init__(self, fields: Sequence[pa.Field], key_count: int, group_of: GroupOf) -> None:
        super().__init__(fields)
        self.key_count = key_count
        self._group_of = group_of
        self.index = SlotIndex()
        self.filling = False
        self.owned: OwnedKeys | None = None
        """The keys that may be added; None: any."""
        self.renew: Callable[[Slots], Slots] | None = None
        """Called with the slots found (−1: none) before keys are added; may remove some of them."""
        for name, dtype in (("hash", np.uint64), ("group", np.int16), ("stamp", np.int32)):
            self.add_array(name, dtype)

    @property
    def size_bytes(self) -> int:
        return super().size_bytes + self.index.size_bytes

    def _same(self, raws: Sequence[Raw]) -> Callable[[Slots, Slots | slice], Any]:
        buffers = [buffer for column in self.buffers[: self.key_count] for buffer in column]

        def same(slots: Slots, rows: Slots | slice) -> Any:
            equal: Any = True
            for buffer, raw in zip(buffers, raws, strict=True):
                found = buffer.same(slots, parts.pick(raw, rows))
                if found is not True:
                    equal = found if equal is True else equal & found
            return equal

        return same

    def find(self, keys: Sequence[pa.Array]) -> Slots:
        """Return the slot of each row key, −1 if it has none."""
        raws = [raw for column in keys for raw in take_apart(column)]
        return self.index.find(hash_raws(raws, len(keys[0])), self._same(raws))

    def ensure(self, keys: Sequence[pa.Array], groups: npt.NDArray[Any] | None = None) -> tuple[Slots, Slots]:
        """Return the slot of each row key, added if missing, and the first rows of the new keys.

        The new slots are the last ones, in the order of these rows. ``groups``: the key groups of
        the rows, if known. Raises ``InvalidState``, and adds nothing, for a key of another subtask.
        """
        raws = [raw for column in keys for raw in take_apart(column)]
        hashes = hash_raws(raws, len(keys[0]))
        if self.filling:
            rows = np.arange(len(hashes))
            slots = rows + self.used
        else:
            slots, rows = self._entered(raws, hashes)
        if not len(rows):
            return slots, rows
        everything = len(rows) == len(slots)
        if groups is None:
            added = keys if everything else [column.take(pa.array(rows)) for column in keys]
            groups = self._group_of(added)
            if self.owned is not None and not self.filling and (foreign := self.owned.foreign(groups)) is not None:
                self.index.remove(hashes[rows], slots[rows])
                raise self.owned.error([column[foreign].as_py() for column in added], int(groups[foreign]))
        elif not everything:
            groups = groups[rows]
        new = self.add(len(rows))
        buffers = [buffer for column in self.buffers[: self.key_count] for buffer in column]
        for buffer, raw in zip(buffers, raws, strict=True):
            buffer.put(new, raw if everything else parts.pick(raw, rows))
        self.array("hash")[new] = hashes if everything else hashes[rows]
        self.array("group")[new] = groups
        return slots, rows

    def append(
        self, keys: Sequence[pa.Array], values: Sequence[pa.Array], groups: npt.NDArray[Any] | None = None
    ) -> None:
        """Do what :meth:`ensure` and :meth:`put_rows` do, while rows are filled in."""
        raws = [raw for column in (*keys, *values) for raw in take_apart(column)]
        count = len(keys[0])
        new = self.add(count)
        buffers = [buffer for column in self.buffers for buffer in column]
        for buffer, raw in zip(buffers, raws, strict=True):
            buffer.put(new, raw)
        key_raws = sum(len(column) for column in self.buffers[: self.key_count])
        self.array("hash")[new] = hash_raws(raws[:key_raws], count)
        self.array("group")[new] = self._group_of(keys) if groups is None else groups

    def _entered(self, raws: Sequence[Raw], hashes: npt.NDArray[np.uint64]) -> tuple[Slots, Slots]:
        """Do what :meth:`ensure` does, in the index only."""
        slots = self.index.find(hashes, self._same(raws))
        if self.renew is not None:
            slots = self.renew(slots)
        missing = np.flatnonzero(slots < 0)
        if not len(missing):
            return slots, missing
        if self.index.is_full(len(missing)):
            live = self.live_slots()
            self.index.build(self.array("hash"), live, more=len(missing))
        chosen, slots[missing] = self.index.enter(
            hashes[missing], self.used, lambda left, right: parts.same_rows(raws, missing[left], missing[right])
        )
        return slots, missing[chosen]

    def fill(self, rows: int) -> None:
        super().fill(rows)
        self.filling = True

    def filled(self) -> bool:
        self.filling = False
        return self.index.build(self.array("hash"), range(self.used))

    def last_of_each(self, slots: Slots) -> Slots | None:
        """Return the rows whose slot no later row has, ascending; None if no slot occurs twice."""
        stamp, numbers = self.array("stamp"), np.arange(len(slots), dtype=np.int32)
        stamp[slots] = numbers
        kept = stamp[slots]
        if (kept == numbers).all():
            return None
        # Of several numbers for a slot, numpy may keep any; rows later than the kept one are
        # retried.
        while len(later := np.flatnonzero(numbers > kept)):
            stamp[slots[later]] = numbers[later]
            kept = stamp[slots]
        return np.flatnonzero(kept == numbers)

    def put_rows(self, slots: Slots, values: Sequence[pa.Array]) -> None:
        """Set the value columns; of rows with the same slot the last one counts."""
        if self.filling:
            # All of these were just added.
            self.put(
                slice(self.used - len(slots), self.used), [take_apart(column) for column in values], self.key_count
            )
            return
        rows = self.last_of_each(slots)
        raws = [take_apart(column) for column in values]
        if rows is not None:
            slots = slots[rows]
            raws = [[parts.pick(raw, rows) for raw in column] for column in raws]
        self.put(slots, raws, self.key_count)

    def kill(self, slots: Slots) -> Slots:
        gone = super().kill(slots)
        if not self.count:
            self.index.build(np.zeros(0, np.uint64), gone[:0])
        else:
            self.index.remove(self.array("hash")[gone], gone)
        return gone

    def compact(self) -> Slots:
        kept = super().compact()
        self.index.build(self.array("hash"), range(self.used))
        return kept

    def clear(self) -> None:
        super().clear()
        self.index = SlotIndex()


def as_table(
    schema: pa.Schema, columns: Callable[[Slots | slice], list[pa.Array]], slots: Slots, *, view: bool = False
) -> pa.Table:
    """Return a table of ascending slots, a million rows at a time, fewer if strings fill 2 GiB.

    ``view``: fixed-width columns may be views of the store, valid until its next change.
    """
    batches = []
    pieces = [slots[start : start + _TABLE_ROWS] for start in range(0, len(slots), _TABLE_ROWS)][::-1]
    while pieces:
        piece = pieces.pop()
        gapless = view and piece[-1] - piece[0] == len(piece) - 1
        some = slice(int(piece[0]), int(piece[-1]) + 1) if gapless else piece
        try:
            batches.append(pa.RecordBatch.from_arrays(columns(some), schema=schema))
        except (pa.ArrowInvalid, pa.ArrowCapacityError):
            # The 32-bit offsets of utf8, binary and lists limit the rows of one array to fewer.
            if len(piece) == 1:
                raise
            middle = len(piece) // 2
            pieces += [piece[middle:], piece[:middle]]
    return pa.Table.from_batches(batches, schema=schema)


def with_groups(schema: pa.Schema) -> pa.Schema:
    """Return the schema with ``_key_group`` in front, as a segment has it."""
    return pa.schema([KEY_GROUP, *schema])


def record_batch(columns: list[pa.Array], schema: pa.Schema, rows: int) -> pa.RecordBatch:
    """Return a batch of the columns, with so many rows even if there are no columns."""
    if columns:
        return pa.RecordBatch.from_arrays(columns, schema=schema)
    return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), rows, [None]))


def without(rows: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Return the other columns."""
    return rows.select([name for name in rows.schema.names if name not in names])
