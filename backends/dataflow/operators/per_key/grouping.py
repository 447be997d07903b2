"""The rows of each key of a batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import repeat
from operator import getitem
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.segments import row_key_codes

from .conversion import OutsideYears, as_numpy, as_python
from .emitted import KeyFault

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
