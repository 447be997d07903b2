"""Keyed running aggregates, and the accumulators that are kept in state for them.

An aggregate is stored as *accumulators*: columns of state with one row per group. A mean has a sum
and a count, and one of 64-bit integers the *carry* of its sum: what is above int64, in units of
2**64. Every other aggregate has one column. Each batch is first aggregated on its own, so the
state sees each group once per batch. Then its accumulators are merged into those of the state, row
by row.

Nulls are skipped. For a group without values the count is 0 and everything else is null. Sums of
integers are int64, of floats double, of decimals decimal(38), and one that does not fit fails,
whatever the batches are; Arrow's wrap around. A mean is double, and does not depend on the batches
of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import InvalidInput, InvalidState
from stateformat.graph import brief
from stateformat.keys import normalize_key_column
from stateformat.segments import one_array, row_key_codes

from ..api import Operator, OperatorContext, ValueState
from .row_steps import check_columns

ROWS: Final = "*"
"""Stands for a column in an aggregate that counts rows."""

EMIT_ROWS: Final = 65_536
"""Most rows in a batch that is made from state."""


_HALF: Final = 32
"""Bits of each half of an int64."""
_DIGITS: Final = 38
_WIDE_DIGITS: Final = 57
"""The sum of all rows of a batch, each of 38 digits, has no more."""

_MERGES: Final[Mapping[str, Callable[[pa.Array, pa.Array], pa.Array]]] = {
    "sum": pc.add_checked,
    "wrapping": pc.add,
    "count": pc.add_checked,
    "min": pc.min_element_wise,
    "max": pc.max_element_wise,
}
_KINDS: Final = ("sum", "count", "min", "max", "mean")


@dataclass(frozen=True)
class _Accumulator:
    name: str
    column: str
    kind: str
    """One of ``_MERGES``, or ``carry``, which stands two columns behind the ``wrapping`` sum."""


class Aggregation:
    """Named aggregates of columns: ``{"delay": ("dep_delay", "mean")}``.

    Raises ``InvalidInput`` for an unknown aggregate.
    """

    def __init__(self, aggregates: Mapping[str, tuple[str, str]]) -> None:
        if not aggregates:
            raise InvalidInput("no aggregate is given. Give at least one, like {'rows': ('*', 'count')}.")
        self._named: dict[str, tuple[str, str]] = {}
        for name, (column, kind) in _pairs(aggregates):
            if kind not in _KINDS or (column == ROWS and kind != "count"):
                raise InvalidInput(
                    f"aggregate {name!r} is {kind!r} of {column!r}. There are {', '.join(_KINDS)} of a column, and "
                    "'count' of '*', the rows."
                )
            self._named[name] = (column, kind)
        self._parts: dict[str, list[int]] = {}
        self._accumulators: list[_Accumulator] = []

    @property
    def columns(self) -> list[str]:
        """The columns that are aggregated, each once."""
        return list(dict.fromkeys(column for column, _ in self._named.values() if column != ROWS))

    def accumulators(self, schema: pa.Schema) -> pa.Schema:
        """Return the columns kept per group. Called before all that follows.

        Raises ``InvalidInput`` for a column that is missing or cannot be aggregated.
        """
        check_columns(schema, self.columns, "an aggregate")
        self._parts, self._accumulators = {}, []
        fields: list[pa.Field] = []
        for name, (column, kind) in self._named.items():
            given = pa.int64() if column == ROWS else schema.field(column).type
            parts = _accumulators_of(kind, given)
            self._parts[name] = [len(fields) + number for number in range(len(parts))]
            for prefix, part in parts:
                self._accumulators.append(_Accumulator(prefix + name, column, part))
                fields.append(pa.field(prefix + name, _type_of(part, column, given)))
        return pa.schema(fields)

    def results(self, accumulators: pa.Schema) -> list[pa.Field]:
        """Return the columns that :meth:`finish` gives."""
        return [
            pa.field(name, accumulators.field(parts[0]).type if len(parts) == 1 else pa.float64())
            for name, parts in self._parts.items()
        ]

    def group(
        self, keys: Sequence[pa.Array], batch: pa.RecordBatch, accumulators: pa.Schema
    ) -> tuple[list[pa.Array], pa.RecordBatch]:
        """Return the groups of a batch, each once: their keys, and their accumulators."""
        values = [None if item.column == ROWS else batch.column(item.column) for item in self._accumulators]
        return self._combined([normalize_key_column(key) for key in keys], values, len(batch), accumulators)

    def regroup(self, keys: Sequence[pa.Array], accumulated: pa.RecordBatch) -> tuple[list[pa.Array], pa.RecordBatch]:
        """Merge rows with equal keys. Takes and returns them in the form of :meth:`group`."""
        return self._combined(keys, accumulated.columns, len(accumulated), accumulated.schema, again=True)

    def _combined(
        self,
        keys: Sequence[pa.Array],
        values: Sequence[pa.Array | None],
        rows: int,
        schema: pa.Schema,
        *,
        again: bool = False,
    ) -> tuple[list[pa.Array], pa.RecordBatch]:
        """Return the groups, and their accumulators of values, or ``again`` of accumulators."""
        wanted: list[tuple[pa.Array | None, str]] = []
        made: list[tuple[slice, Callable[..., pa.Array]]] = []
        for number, (item, value) in enumerate(zip(self._accumulators, values, strict=True)):
            kind = "sum" if again and item.kind == "count" else item.kind
            carried = value if again and kind == "carry" else None
            summed, make = _plan(kind, values[number - 2] if carried is not None else value, carried)
            made.append((slice(len(wanted), len(wanted) + len(summed)), make))
            wanted += summed
        found, grouped = _grouped(keys, wanted, rows)
        columns = []
        for item, (own, make), field in zip(self._accumulators, made, schema, strict=True):
            with _fitting(item, field.type):
                column = make(*grouped[own])
                column = pa.array(np.zeros(len(found[0]), np.int64)) if column is None else column
                columns.append(column if column.type == field.type else column.cast(field.type))
        return found, pa.RecordBatch.from_arrays(columns, schema=schema)

    def merge(self, old: pa.RecordBatch, new: pa.RecordBatch) -> pa.RecordBatch:
        """Merge accumulators row by row; all null in ``old`` means nothing so far."""
        columns: list[pa.Array] = []
        for number, (item, before, more) in enumerate(zip(self._accumulators, old.columns, new.columns, strict=True)):
            with _fitting(item, more.type):
                if item.kind == "carry":
                    total = number - 2
                    sums = [old.column(total), new.column(total), columns[total]]
                    columns.append(pa.array(_whole(before) + _whole(more) + _overflows(*map(_whole, sums))))
                else:
                    columns.append(_merged(_MERGES[item.kind], before, more))
        return pa.RecordBatch.from_arrays(columns, schema=new.schema)

    def finish(self, accumulated: Sequence[pa.Array]) -> list[pa.Array]:
        """Return the columns that users see, from columns of accumulators."""
        return [
            accumulated[parts[0]] if len(parts) == 1 else _mean(*(accumulated[part] for part in parts))
            for parts in self._parts.values()
        ]


def _accumulators_of(kind: str, given: pa.DataType) -> list[tuple[str, str]]:
    """Return the prefix and kind of each accumulator of an aggregate of a column."""
    if kind != "mean":
        return [("", kind)]
    if pa.types.is_integer(given) and given.bit_width == 64:
        return [("sum_of_", "wrapping"), ("count_of_", "count"), ("carry_of_", "carry")]
    return [("sum_of_", "sum"), ("count_of_", "count")]


def _type_of(part: str, column: str, given: pa.DataType) -> pa.DataType:
    if part in ("carry", "wrapping", "count"):
        return pa.int64()
    empty = pa.table({"g": pa.array([], pa.int8()), "v": pa.array([], given)})
    try:
        found = empty.group_by("g").aggregate([("v", part)]).schema.field(f"v_{part}").type
        found = pa.int64() if found == pa.uint64() and part == "sum" else found
        _merged(_MERGES[part], pa.array([], found), pa.array([], found))
    except pa.ArrowException as error:
        raise InvalidInput(
            f"there is no {part!r} of column {column!r}, which is {given}: {error}. Cast it before."
        ) from error
    return found


def _merged(merge: Callable[[pa.Array, pa.Array], pa.Array], old: pa.Array, new: pa.Array) -> pa.Array:
    kind = old.type
    if merge is not pc.add_checked:
        return pc.coalesce(merge(old, new), old, new)
    if pa.types.is_decimal(kind):
        # The sum of two decimals(38) may need 39 digits, so Arrow refuses to add the types,
        # whatever the values. Add them in a wider type.
        wide = pa.decimal256(_DIGITS + 1, kind.scale)
        old, new = old.cast(wide), new.cast(wide)
    return pc.coalesce(merge(old, new), old, new).cast(kind)


def _plan(
    kind: str, values: pa.Array | None, carried: pa.Array | None
) -> tuple[list[tuple[pa.Array | None, str]], Callable[..., pa.Array]]:
    """Return what is grouped, with the aggregate of Arrow, and how it becomes an accumulator.

    ``carried``: the carries of ``values``, for a ``carry`` of sums.
    """
    if values is None or kind not in ("sum", "wrapping", "carry"):
        return [(values, kind)], _itself
    if pa.types.is_decimal(values.type):
        if _may_reach(values, 10.0 ** (_DIGITS - values.type.scale)):
            values = values.cast(pa.decimal256(_WIDE_DIGITS, values.type.scale))
        return [(values, "sum")], _itself
    if not pa.types.is_integer(values.type):
        return [(values, "sum")], _itself
    wanted: list[tuple[pa.Array | None, str]] = [(values, "sum")] if kind != "carry" else []
    if kind != "wrapping" and _may_reach(values, 2.0**63):
        # The sums of the upper and the lower halves do not leave it, and tell what left it.
        whole = values.cast(pa.uint64() if values.type == pa.uint64() else pa.int64())
        upper = pc.shift_right(whole, pa.scalar(_HALF, whole.type))
        lower = pc.bit_wise_and(whole, pa.scalar((1 << _HALF) - 1, whole.type))
        wanted = [(values, "sum"), (upper, "sum"), (lower, "sum")]
    if kind != "carry":
        return wanted, _whole_sum
    return [*wanted, *([(carried, "sum")] if carried is not None else [])], partial(_carry, bool(wanted))


def _itself(grouped: pa.Array) -> pa.Array:
    return grouped


def _may_reach(values: pa.Array, limit: float) -> bool:
    """Return whether the sum of some of the values may be so large."""
    if pa.types.is_decimal(values.type):
        ends = [end for end in pc.min_max(values).as_py().values() if end is not None]
    else:
        numbers = pc.fill_null(values, 0).to_numpy(zero_copy_only=False)
        ends = [numbers.min(initial=0), numbers.max(initial=0)]
    return max((abs(float(end)) for end in ends), default=0.0) * len(values) > 0.99 * limit


def _whole_sum(total: pa.Array, *halves: pa.Array) -> pa.Array:
    if halves and _carried(total, *halves).any():
        raise pa.ArrowInvalid("overflow")
    return total.cast(pa.int64(), safe=False)


def _carry(overflows: bool, *grouped: pa.Array) -> pa.Array:
    """Return what left int64 of sums and their halves, and what was carried before."""
    carries = [_whole(one) for one in grouped[3 if overflows else 0 :]]
    if overflows:
        carries.append(_carried(*grouped[:3]))
    return pa.array(sum(carries)) if carries else None


def _carried(total: pa.Array, upper: pa.Array, lower: pa.Array) -> npt.NDArray[np.int64]:
    """Return what of a sum is above int64, in units of 2**64, from the sums of both halves."""
    above = _whole(upper) + (_whole(lower) >> _HALF)
    carry: npt.NDArray[np.int64] = (above - (_whole(total) >> _HALF)) >> _HALF
    return carry


def _overflows(
    old: npt.NDArray[np.int64], new: npt.NDArray[np.int64], total: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return 1 or −1 where the sum of two int64 has wrapped around upward or downward, or 0."""
    wrapped = ((old ^ total) & (new ^ total)) < 0
    return np.where(wrapped, np.where(old < 0, -1, 1), 0)


def _whole(column: pa.Array) -> npt.NDArray[np.int64]:
    """Return int64; 0 for null."""
    numbers: npt.NDArray[np.int64] = _whole_sum(pc.fill_null(column, 0)).to_numpy(zero_copy_only=False)
    return numbers


@contextmanager
def _fitting(item: _Accumulator, kind: pa.DataType) -> Iterator[None]:
    """Name the sum that does not fit its type."""
    try:
        yield
    except pa.ArrowInvalid as error:
        raise InvalidState(
            f"the {item.kind} {item.name!r} of column {item.column!r} does not fit into {kind}. Cast the column to "
            f"double before{', or to decimal128(38, 0)' if kind == pa.int64() else ''}."
        ) from error


def _grouped(
    keys: Sequence[pa.Array], values: Sequence[tuple[pa.Array | None, str]], rows: int
) -> tuple[list[pa.Array], list[pa.Array]]:
    """Return each distinct key once, in the order of first rows, and the aggregate of each value.

    Instead of a value, None counts rows.
    """
    named = {f"k{number}": key for number, key in enumerate(keys)}
    # Arrow cannot group by nested types, so group by a number that stands for the row's key.
    by_code = any(pa.types.is_nested(key.type) for key in keys)
    if by_code:
        named = {"k0": pa.array(row_key_codes(keys)), "row": pa.array(np.arange(rows))}
    group_by = [name for name in named if name != "row"]
    wanted: list[tuple[Any, str]] = [("row", "min")] if by_code else []
    for number, (value, kind) in enumerate(values):
        if value is None:
            wanted.append(([], "count_all"))
        else:
            named[f"v{number}"] = value
            wanted.append((f"v{number}", kind))
    grouped = pa.table(named).group_by(group_by, use_threads=False).aggregate(wanted).combine_chunks()
    columns = [one_array(column) for column in grouped.columns]
    first = len(group_by)
    if by_code:
        return [key.take(columns[first]) for key in keys], columns[first + 1 :]
    return columns[:first], columns[first:]


def distinct(keys: Sequence[pa.Array]) -> int:
    """Return how many different keys there are."""
    found, _ = _grouped([normalize_key_column(key) for key in keys], [], len(keys[0]))
    return len(found[0])


def _pairs(aggregates: object) -> list[tuple[str, tuple[str, str]]]:
    pairs: list[tuple[Any, Any]] = list(aggregates.items()) if isinstance(aggregates, Mapping) else [(aggregates, None)]
    wrong = [pair for pair in pairs if not isinstance(pair[1], tuple | list) or len(pair[1]) != 2]
    if wrong:
        raise InvalidInput(
            f"aggregates are {aggregates!r}. Give a mapping like {{'rows': ('*', 'count'), "
            "'delay': ('dep_delay', 'mean')}."
        )
    return pairs


def _mean(total: pa.Array, count: pa.Array, carry: pa.Array | None = None) -> pa.Array:
    # Null where there is no value, because the sum is null.
    summed = total.cast(pa.float64(), safe=False)
    if carry is not None:
        summed = pc.add(summed, pa.array(_whole(carry) * 2.0**64))
    return pc.divide(summed, count.cast(pa.float64(), safe=False))


def in_batches(table: pa.Table, rows: int = EMIT_ROWS) -> Iterator[pa.RecordBatch]:
    """Yield a table's rows in batches of at most ``rows``; no batch for an empty table."""
    for first in range(0, table.num_rows, rows):
        yield from table.slice(first, rows).combine_chunks().to_batches()


_GATHERED_ROWS_MAX: Final = 262_144
_GATHERED_BYTES_MAX: Final = 64 << 20
_COMBINED_ROWS_MIN: Final = 1024
"""Combining fewer rows is not worth it."""
_SAMPLED_ROWS: Final = 4096
_ROWS_PER_KEY_MIN: Final = 2
"""A batch is combined if its first rows have at least this many per key."""


class Aggregate(Operator):
    """Counts, sums, minima, maxima and means by key, over all rows so far.

    Example::

        delays = flights.key_by("tailnum").apply(
            Aggregate("tailnum", {"delay": ("dep_delay", "mean")}), uid="delays"
        )

    - ``keys``: the columns that its input is keyed by, in that order.
    - ``aggregates``: a new column → (column, ``"sum"``, ``"count"``, ``"min"``, ``"max"`` or
      ``"mean"``); ``("*", "count")`` counts rows. Nulls are skipped: without any value, a count is
      0 and all else null. A sum of integers is int64, of floats double, of
      decimals decimal(38); one that does not fit fails the job. A mean is double.
    - ``emit="updates"``: emits the totals so far after every batch, for each key in it.
      ``emit="end"``: emits the totals of every key once, when the input has ended.

    Emits the key columns, then the new columns. Keeps the state ``totals``. Raises ``InvalidInput``
    for what cannot be aggregated, when the dataflow is built.
    """

    def __init__(
        self, keys: str | Sequence[str], aggregates: Mapping[str, tuple[str, str]], *, emit: str = "updates"
    ) -> None:
        self._keys = key_names(keys)
        self._aggregation = Aggregation(aggregates)
        if emit not in ("updates", "end"):
            raise InvalidInput(f"emit is {emit!r}. Give 'updates' or 'end'.")
        taken = sorted(set(self._keys) & set(aggregates))
        if taken:
            raise InvalidInput(f"{taken} are key columns and new columns. Give the new ones other names.")
        self._updates = emit == "updates"
        self._used = list(dict.fromkeys([*self._keys, *self._aggregation.columns]))
        self._accumulators = pa.schema([])
        self._combined = self._output = pa.schema([])
        self._reset()

    def __repr__(self) -> str:
        return brief(self, *self._keys)

    def states(self, *inputs: pa.Schema) -> list[ValueState]:
        """``totals``: the accumulators of each key."""
        self._learn(inputs[0])
        return [ValueState("totals", [plain(inputs[0].field(name)) for name in self._keys], self._accumulators)]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Return the keys, and the new columns."""
        self._learn(inputs[0])
        return self._output

    def _learn(self, schema: pa.Schema) -> None:
        check_columns(schema, self._keys, "an aggregate")
        self._accumulators = self._aggregation.accumulators(schema)
        keys = [plain(schema.field(name)) for name in self._keys]
        self._combined = pa.schema([*keys, *self._accumulators])
        self._output = pa.schema([*keys, *self._aggregation.results(self._accumulators)])

    def open(self, context: OperatorContext) -> None:
        """Reset the buffer; the totals are in keyed state."""
        super().open(context)
        self._reset()

    def _reset(self) -> None:
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = self._gathered_bytes = 0

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch | None:  # noqa: ARG002 - there is one
        """Merge a batch into the totals; with ``emit="end"``, gather several and merge them."""
        if not batch.num_rows:
            return None
        if self._updates:
            return self._merge(batch)
        self._gathered.append(batch.select(self._used))
        self._gathered_rows += batch.num_rows
        self._gathered_bytes += self._gathered[-1].nbytes
        if self._gathered_rows >= _GATHERED_ROWS_MAX or self._gathered_bytes >= _GATHERED_BYTES_MAX:
            self._merge_gathered()
        return None

    def combined_schema(self, input: int) -> pa.Schema:  # noqa: ARG002 - there is one
        """Return the keys and accumulators, as in the state ``totals``."""
        return self._combined

    def combine(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch | None:  # noqa: ARG002
        """Return the accumulators of a batch; None if it has few rows, or too many keys."""
        if batch.num_rows < _COMBINED_ROWS_MIN:
            return None
        some = batch.slice(0, _SAMPLED_ROWS)
        if distinct([some.column(name) for name in self._keys]) * _ROWS_PER_KEY_MIN > some.num_rows:
            return None
        columns, found = self._grouped(batch)
        return pa.RecordBatch.from_arrays([*columns, *found.columns], schema=self._combined)

    def process_combined(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch | None:  # noqa: ARG002
        """Merge accumulators into the totals."""
        keys, values = batch.columns[: len(self._keys)], batch.columns[len(self._keys) :]
        accumulated = pa.RecordBatch.from_arrays(values, schema=self._accumulators)
        totals = self._merge_groups(*self._aggregation.regroup(keys, accumulated))
        return totals if self._updates else None

    def _merge_gathered(self) -> None:
        if self._gathered:
            self._merge(pa.concat_batches(self._gathered))
        self._reset()

    def _merge(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Merge a batch into the totals; return the totals of its keys."""
        return self._merge_groups(*self._grouped(batch))

    def _grouped(self, batch: pa.RecordBatch) -> tuple[list[pa.Array], pa.RecordBatch]:
        return self._aggregation.group([batch.column(name) for name in self._keys], batch, self._accumulators)

    def _merge_groups(self, columns: list[pa.Array], new: pa.RecordBatch) -> pa.RecordBatch:
        aggregation, totals = self._aggregation, new

        def merged(old: pa.RecordBatch, found: object) -> pa.RecordBatch:  # noqa: ARG001 - null where there is none
            nonlocal totals
            totals = aggregation.merge(old, new)
            return totals

        self.context.value_state("totals").update(pa.RecordBatch.from_arrays(columns, self._keys), merged)
        return pa.RecordBatch.from_arrays([*columns, *aggregation.finish(totals.columns)], schema=self._output)

    def snapshot(self) -> None:
        """Merge what is buffered into the totals."""
        self._merge_gathered()

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Emit all totals, unless they were emitted as updates."""
        if self._updates:
            return
        self._merge_gathered()
        for batch in in_batches(self.context.value_state("totals").rows()):
            values = self._aggregation.finish([batch.column(name) for name in self._accumulators.names])
            keys = [batch.column(name) for name in self._keys]
            yield pa.RecordBatch.from_arrays([*keys, *values], schema=self._output)


def key_names(keys: str | Sequence[str]) -> list[str]:
    """Return the names of key columns. Raises ``InvalidInput`` if there is none."""
    names = [keys] if isinstance(keys, str) else list(keys)
    if not names:
        raise InvalidInput("no key column is given. Name those that the input is keyed by.")
    return names


def plain(field: pa.Field) -> pa.Field:
    """Return a column as an operator emits it: nullable, without metadata."""
    return pa.field(field.name, field.type)
