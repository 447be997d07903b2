"""The rows of each key, as Python values and back, in bulk.

A batch is cut into the rows of each key, as tuples, numpy or Arrow. What a function returns or
yields for each key becomes batches of the declared columns.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import groupby, islice, repeat
from operator import getitem
from types import GeneratorType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.segments import row_key_codes
from stateformat.tables import CONVERSION_ERRORS, from_python

from ...casting import columns_kept, columns_text

# The first and last moment of Python's datetime, in µs since 1970.
_FIRST_US: Final = -62_135_596_800_000_000
_LAST_US: Final = 253_402_300_799_999_999
_DAY_US: Final = 86_400_000_000


class OutsideYears(Exception):
    """A column has a time that Python's datetime does not: at ``place``."""

    def __init__(self, column: pa.Array) -> None:
        self.place = next(place for place in range(len(column)) if not _has_python(column[place]))
        kind = column.type
        shown = f", {column[self.place].cast(pa.int64())} as {kind}" if pa.types.is_timestamp(kind) else ""
        super().__init__(f"a time outside of the years 1 to 9999{shown}")


def _has_python(value: pa.Scalar) -> bool:
    try:
        value.as_py()
    except (OverflowError, ValueError):
        return False
    return True


def as_python(column: pa.Array) -> list[Any]:
    """Return what ``to_pylist`` gives, by numpy where that is faster."""
    kind, is_ = column.type, pa.types
    texts = is_.is_string(kind) or is_.is_large_string(kind) or is_.is_binary(kind) or is_.is_large_binary(kind)
    plain = is_.is_integer(kind) or is_.is_floating(kind) or is_.is_boolean(kind)
    if kind == pa.timestamp("us") and not column.null_count:
        times = column.view(pa.int64()).to_numpy()
        plain = bool(len(times)) and bool(times.min() >= _FIRST_US) and bool(times.max() <= _LAST_US)
    if texts or (plain and not column.null_count):
        values: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return values
    try:
        listed: list[Any] = column.to_pylist()
    except (OverflowError, ValueError) as error:
        raise OutsideYears(column) from error
    return listed


def as_numpy(column: pa.Array) -> npt.NDArray[Any]:
    """Return a numpy array: NaN and NaT for null, Python objects where numpy has no type.

    Integers and booleans among which there are nulls are objects, too, so none changes its value.
    """
    kind, is_ = column.type, pa.types
    exact = (is_.is_integer(kind) or is_.is_boolean(kind)) and not column.null_count
    timed = is_.is_timestamp(kind) or is_.is_date(kind)
    if exact or is_.is_floating(kind) or timed:
        array: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return array
    return np.fromiter(as_python(column), object, len(column))


def first_outside_years(column: pa.Array) -> int:
    """The place of the first time that Python's datetime does not have, −1 if there is none."""
    kind = column.type
    if kind == pa.date32():
        days = column.view(pa.int32())
        outside = pc.or_(pc.less(days, _FIRST_US // _DAY_US), pc.greater(days, _LAST_US // _DAY_US))
    elif pa.types.is_timestamp(kind) and kind.unit == "us":
        times = column.view(pa.int64())
        outside = pc.or_(pc.less(times, _FIRST_US), pc.greater(times, _LAST_US))
    else:
        return -1
    place: int = outside.index(True).as_py()
    return place


def first_misfit(values: Sequence[Any], kind: pa.DataType) -> tuple[int, Exception]:
    """Return the first value that cannot be converted, and why; one of them cannot."""
    for number, value in enumerate(values):
        try:
            from_python([value], kind)
        except CONVERSION_ERRORS as error:
            return number, error
    raise AssertionError(f"each of {len(values)} values is {kind}, but not all together")


def holds_floats(kind: pa.DataType) -> bool:
    """Return whether values may be equal for Python and yet differ: 0.0 and −0.0."""
    within = (kind.field(place).type for place in range(kind.num_fields))
    return pa.types.is_floating(kind) or any(map(holds_floats, within))


def differ(old: pa.Array, new: pa.Array) -> npt.NDArray[np.bool_]:
    """For each row whether two arrays of one type differ; floats by their bits."""
    kind = old.type
    if pa.types.is_nested(kind):
        before, after = old.to_pylist(), new.to_pylist()
        if holds_floats(kind):
            before, after = list(map(repr, before)), list(map(repr, after))
        return np.fromiter(map(operator.ne, before, after), np.bool_, len(old))
    if pa.types.is_floating(kind):
        words = {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[kind.bit_width]
        old, new = old.view(words), new.view(words)
    found = pc.not_equal(old, new)
    if found.null_count:
        found = pc.coalesce(found, pc.xor(old.is_null(), new.is_null()))
    mask: npt.NDArray[np.bool_] = found.to_numpy(zero_copy_only=False)
    return mask


BATCH_ROWS: Final = 65_536
"""How many rows are gathered before they are emitted. A table goes at once, as it may be large."""

_ARROW: Final = frozenset({pa.RecordBatch, pa.Table})


class KeyFault(Exception):
    """Something is wrong with what the function made of one key: its number in the piece, why."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class Emitted:
    """Calls a function for each key of a piece, and gathers what it gives."""

    def __init__(self, schema: pa.Schema, what: str) -> None:
        self._schema = schema
        self._what = what
        self._forget()

    def _forget(self) -> None:
        self._items: list[Any] = []
        self._marks: list[int] = []
        """How many items there were behind each key."""
        self.done = 0
        """Keys whose marks are gone."""

    @property
    def current(self) -> int:
        """The number of the key that is not done."""
        return self.done + len(self._marks)

    def run(self, results: Iterable[Any]) -> Iterator[pa.RecordBatch]:
        """Batches of what ``results`` gives, an item for each key. Raises :class:`KeyFault`."""
        self._forget()
        items, marks = self._items, self._marks
        for result in results:
            if result is not None:
                kind = type(result)
                if kind is tuple or kind is dict:
                    items.append(result)
                elif kind is list and _ARROW.isdisjoint(map(type, result)):
                    items.extend(result)
                else:
                    given = result if kind is GeneratorType else self._rows_of(result)
                    # Most often there is but one.
                    for item in given:
                        items.append(item)
                        if type(item) not in _ARROW:
                            break
                        yield from self._flush()
                    for kind, alike in groupby(given, type):
                        yield from self._take(alike, 1 if kind in _ARROW else BATCH_ROWS)
            marks.append(len(items))
            if len(items) >= BATCH_ROWS:
                yield from self._flush()
        yield from self._flush()

    def _take(self, given: Iterator[Any], most: int) -> Iterator[pa.RecordBatch]:
        """Gather what is given; batches of it whenever there is so much."""
        self._items.extend(islice(given, most))
        while len(self._items) >= most:
            yield from self._flush()
            self._items.extend(islice(given, most))

    def _rows_of(self, result: Any) -> Iterator[Any]:
        if type(result) in _ARROW or isinstance(result, tuple | Mapping):
            return iter((result,))
        if isinstance(result, Iterable) and not isinstance(result, str | bytes | bytearray):
            return iter(result)
        raise KeyFault(
            self.current,
            f"returned {type(result).__name__}. Return or yield tuples, dicts or an Arrow table of the output, "
            f"{columns_text(self._schema)}.",
        )

    def _flush(self) -> Iterator[pa.RecordBatch]:
        items = self._items
        if items:
            if set(map(type, items)) == {tuple}:
                yield self._batch(items, 0)
            else:
                yield from self._mixed()
        self.done += len(self._marks)
        items.clear()
        self._marks.clear()

    def _mixed(self) -> Iterator[pa.RecordBatch]:
        rows: list[tuple[Any, ...]] = []
        for place, item in enumerate(self._items):
            if isinstance(item, tuple):
                rows.append(item)
            elif isinstance(item, Mapping):
                rows.append(self._of_mapping(item, place))
            elif type(item) in _ARROW:
                if rows:
                    yield self._batch(rows, place - len(rows))
                    rows = []
                yield from self._of_table(item, place)
            else:
                raise self._fault(
                    place,
                    f"gave {type(item).__name__} as a row. Give tuples, dicts or Arrow tables of the output, "
                    f"{columns_text(self._schema)}.",
                )
        if rows:
            yield self._batch(rows, len(self._items) - len(rows))

    def _fault(self, place: int, text: str) -> KeyFault:
        return KeyFault(self.done + bisect_right(self._marks, place), text)

    def _of_mapping(self, item: Mapping[str, Any], place: int) -> tuple[Any, ...]:
        names = self._schema.names
        if len(item) != len(names) or any(name not in item for name in names):
            given = ", ".join(map(str, item)) or "nothing"
            raise self._fault(place, f"gave a dict of {given}. The columns of its output are {', '.join(names)}.")
        return tuple([item[name] for name in names])

    def _of_table(self, item: pa.Table | pa.RecordBatch, place: int) -> Iterator[pa.RecordBatch]:
        table = pa.Table.from_batches([item]) if isinstance(item, pa.RecordBatch) else item
        names = self._schema.names
        if sorted(table.column_names) != sorted(names):
            raise self._fault(
                place, f"gave a table of {columns_text(table.schema)}. Its output is {columns_text(self._schema)}."
            )
        try:
            table = columns_kept(table, pa.schema([item.with_nullable(True) for item in self._schema]))
        except (pa.ArrowException, ValueError) as error:
            raise self._fault(place, f"gave a table of other types than its output: {error}") from error
        for batch in table.to_batches():
            yield self._checked(batch.columns, place, 0)

    def _batch(self, rows: Sequence[tuple[Any, ...]], first: int) -> pa.RecordBatch:
        """Return a batch of tuples; the first of them is item ``first``."""
        width = len(self._schema)
        if set(map(len, rows)) != {width}:
            place = next(number for number, row in enumerate(rows) if len(row) != width)
            raise self._fault(
                first + place,
                f"gave a row of {len(rows[place])} values, {short(rows[place])}. Its output has {width} columns, "
                f"{columns_text(self._schema)}; several rows are a list of tuples.",
            )
        columns = []
        for item, values in zip(self._schema, zip(*rows, strict=True), strict=True):
            try:
                columns.append(from_python(values, item.type))
            except CONVERSION_ERRORS:
                place, error = first_misfit(values, item.type)
                raise self._fault(
                    first + place,
                    f"gave {short(values[place])} in column {item.name!r} of its output, which is {item.type}: "
                    f"{clipped(str(error), 160)}. Convert it, or declare another type.",
                ) from error
        return self._checked(columns, first, 1)

    def _checked(self, columns: Sequence[pa.Array], first: int, step: int) -> pa.RecordBatch:
        for item, column in zip(self._schema, columns, strict=True):
            if column.null_count and not item.nullable:
                place = column.is_null().index(True).as_py()
                raise self._fault(
                    first + place * step,
                    f"gave None in column {item.name!r} of its output, which is declared without nulls. "
                    "Fill it, or declare it nullable.",
                )
        return pa.RecordBatch.from_arrays(list(columns), schema=self._schema)


def short(value: object) -> str:
    """Return a value for an error, on one line of bounded length."""
    return clipped(repr(value))


def clipped(text: str, most: int = 80) -> str:
    """Return a text of bounded length."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


_HALF: Final = 1 << 16


class KeyWithoutValue(Exception):
    """A key has a value that cannot be passed to a function."""


class RowsAs(Enum):
    """How a function gets the rows of a key."""

    TUPLES = "tuples"
    NUMPY = "numpy"
    BATCH = "batch"
    TABLE = "table"


class Grouped:
    """A batch by key: keys in the order of their first row, rows of a key as they came."""

    def __init__(self, batch: pa.RecordBatch, keys: Sequence[str]) -> None:
        codes = row_key_codes([batch.column(name) for name in keys])
        counts = np.bincount(codes)
        ends = np.cumsum(counts)
        begins = ends - counts
        order = None if (codes[1:] >= codes[:-1]).all() else _stable_order(codes)
        self._rows = batch if order is None else batch.take(pa.array(order))
        self._begins, self._ends = begins.tolist(), ends.tolist()
        self.keys = pa.RecordBatch.from_arrays(
            [self._rows.column(name).take(pa.array(begins)) for name in keys], list(keys)
        )
        """The key columns, a row for each key."""

    def __len__(self) -> int:
        return len(self._begins)

    def rows(self, how: RowsAs, row: type[Any] | None = None) -> Iterator[Any]:
        """Return the rows of each key; tuples are of the class ``row``, with its fields only."""
        if how is RowsAs.BATCH or how is RowsAs.TABLE:
            whole = self._rows if how is RowsAs.BATCH else pa.Table.from_batches([self._rows])
            return (whole.slice(begin, end - begin) for begin, end in zip(self._begins, self._ends, strict=True))
        rows: Any
        if how is RowsAs.NUMPY:
            rows = self._records()
        else:
            names = self._rows.schema.names if row is None else row._fields
            plain = zip(*(self._converted(as_python, name) for name in names), strict=True)
            rows = list(plain if row is None else map(tuple.__new__, repeat(row), plain))
        return map(getitem, repeat(rows), map(slice, self._begins, self._ends))

    def _converted(self, convert: Callable[[pa.Array], Any], name: str) -> Any:
        try:
            return convert(self._rows.column(name))
        except OutsideYears as error:
            raise KeyFault(
                bisect_right(self._ends, error.place),
                f"has a row with {error}, in column {name!r}. Annotate its rows as pa.RecordBatch or np.ndarray.",
            ) from error

    def _records(self) -> npt.NDArray[Any]:
        """Return the rows as one structured array."""
        columns = {name: self._converted(as_numpy, name) for name in self._rows.schema.names}
        records = np.empty(len(self._rows), np.dtype([(name, column.dtype) for name, column in columns.items()]))
        for name, column in columns.items():
            records[name] = column
        return records


def _stable_order(codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Row numbers in order of code. numpy sorts 16 bits by counting, in two passes."""
    order: npt.NDArray[np.int64] = np.argsort((codes % _HALF).astype(np.uint16), kind="stable")
    if codes.max() < _HALF:
        return order
    high = (codes >> 16).astype(np.uint16 if codes.max() < _HALF * _HALF else np.int64)
    return order[np.argsort(high[order], kind="stable")]


def key_values(keys: pa.RecordBatch) -> list[Any]:
    """Return each key as functions get it: the value of one key column, or a tuple of several."""
    columns = []
    for name, column in zip(keys.schema.names, keys.columns, strict=True):
        try:
            columns.append(as_python(column))
        except OutsideYears as error:
            raise KeyWithoutValue(
                f"a key has {error}, in column {name!r}. Cast the column to int64 before key_by."
            ) from error
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
