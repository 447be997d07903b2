"""What a function returns or yields for each key, as batches of the declared columns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from types import GeneratorType
from typing import Any, Final

import pyarrow as pa

from stateformat.tables import CONVERSION_ERRORS, from_python

from ...casting import columns_kept, columns_text
from .conversion import first_misfit

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
