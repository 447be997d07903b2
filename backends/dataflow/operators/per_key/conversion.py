"""Columns as Python values and back, in bulk."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.tables import CONVERSION_ERRORS, from_python

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
