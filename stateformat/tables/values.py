"""Python values as columns of a declared type. None becomes another value on its way.

Arrow checks most of that, but silently drops fractions, unknown fields of structs and what a coarse
time does not hold, makes a float32 of 1e300 infinite, and takes a text for a list of characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from functools import cache
from itertools import chain, compress
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ..errors import InvalidInput

CONVERSION_ERRORS: Final = (pa.ArrowException, OverflowError, TypeError, ValueError)
"""What :func:`from_python` raises for values of another type."""

_WHOLE: Final = frozenset({int, bool, type(None), *(np.dtype(code).type for code in np.typecodes["AllInteger"])})
_TEXTS: Final = (str, bytes, bytearray, memoryview)
_UNIT_NS: Final[Mapping[str, int]] = {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}


def from_python(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return an array of Python values, which ``to_pylist`` gives back.

    Raises one of :data:`CONVERSION_ERRORS` for a value that ``kind`` does not hold, at any depth: a
    fraction among integers, a number that is too large, a field that a struct does not have.
    """
    types = set(map(type, values))
    if types == {int} and kind == pa.int64():
        return pa.array(np.array(values, np.int64))
    if types == {float} and kind == pa.float64():
        return pa.array(np.array(values, np.float64))
    try:
        array = pa.array(values, kind)
    except CONVERSION_ERRORS:
        if np.datetime64 not in types or not (pa.types.is_timestamp(kind) or pa.types.is_date32(kind)):
            raise
        unit = kind.unit if pa.types.is_timestamp(kind) else "D"
        values = [number_of(one, unit) if isinstance(one, np.datetime64) else one for one in values]
        array = pa.array(values, kind)
    _check(values, array, types)
    return array


def table_from_python(rows: Iterable[Mapping[str, Any]], schema: pa.Schema, what: str) -> pa.Table:
    """Return a table of rows; columns that one does not have are null.

    Raises ``InvalidInput`` about ``what`` for an unknown column and for what :func:`from_python`
    refuses.
    """
    rows = list(rows)
    unknown = sorted(set[str]().union(*rows).difference(schema.names))
    if unknown:
        raise InvalidInput(f"{what}: {unknown} are no columns; those are {schema.names}")
    arrays = []
    for item in schema:
        try:
            arrays.append(from_python([row.get(item.name) for row in rows], item.type))
        except CONVERSION_ERRORS as error:
            raise InvalidInput(f"{what}: column {item.name!r} is {item.type}, and a value is not: {error}") from error
    return pa.Table.from_arrays(arrays, schema=schema)


def number_of(moment: np.datetime64, unit: str) -> int | None:
    """A moment as a number of ``unit`` since 1970, None for NaT. ``ValueError`` if it has none."""
    if np.isnat(moment):
        return None
    try:
        counted = moment.astype(f"datetime64[{unit}]")
        is_same = counted.astype(moment.dtype) == moment
    except OverflowError:  # NumPy 2.5; before, the number wraps around.
        is_same = False
    if not is_same:
        raise ValueError(f"{moment} is no whole number of {unit}, or too far away")
    return int(counted.astype(np.int64))


def _check(values: Sequence[Any], array: pa.Array, types: set[type]) -> None:
    """Raise ``pa.ArrowInvalid`` for a value that ``array`` does not hold; Arrow made it of them."""
    kind, is_ = array.type, pa.types
    if not _may_differ(kind):
        return
    if is_.is_dictionary(kind):
        _check(values, array.dictionary_decode(), types)
    elif is_.is_nested(kind):
        if array.null_count:
            values = list(compress(values, array.is_valid().to_numpy(zero_copy_only=False)))
            array = array.drop_null()
        for inner, part in _parts(values, array, types - {type(None)}):
            _check(inner, part, set(map(type, inner)))
    elif is_.is_floating(kind):
        # Arrow itself refuses an int of Python's that a float32 would round.
        exact = {float, int, type(None)} if kind == pa.float32() else {float, type(None)}
        if not types <= exact or np.isinf(array.to_numpy(zero_copy_only=False)).any():
            _compare(values, array)
    else:
        # Arrow takes numpy's moments of the same unit only.
        types = types - _WHOLE - {np.datetime64, np.timedelta64}
        if types == {datetime} and is_.is_timestamp(kind):
            _check_fine(values, kind)
        elif types and not (is_.is_date(kind) and types == {date}):
            _compare(values, array)


@cache
def _may_differ(kind: pa.DataType) -> bool:
    """Return whether Arrow may store another value than it is given, without an error."""
    is_ = pa.types
    wide = kind == pa.float64()
    return not wide and any(
        test(kind) for test in (is_.is_integer, is_.is_floating, is_.is_temporal, is_.is_nested, is_.is_dictionary)
    )


def _parts(values: Sequence[Any], array: pa.Array, types: set[type]) -> Iterator[tuple[Sequence[Any], pa.Array]]:
    """Yield the values within nested ones, and their array. There are no nulls."""
    kind, is_ = array.type, pa.types
    if any(issubclass(one, pa.Scalar) for one in types):
        values = [value.as_py() if isinstance(value, pa.Scalar) else value for value in values]
    if is_.is_struct(kind):
        names = [item.name for item in kind]
        if not types <= {dict}:
            values = [dict(zip(names, row, strict=True)) if _is_positional(row) else dict(row) for row in values]
        unknown = set[Any]().union(*values).difference(names)
        if unknown:
            raise pa.ArrowInvalid(f"{min(unknown, key=repr)!r} is no field of {kind}")
        for place, item in enumerate(kind):
            if _may_differ(item.type):
                yield [row.get(item.name) for row in values], array.field(place)
    elif is_.is_map(kind):
        if not (_may_differ(kind.key_type) or _may_differ(kind.item_type)):
            return
        if types <= {dict}:
            pairs = [*chain.from_iterable(map(dict.items, values))]
        else:
            pairs = [one for row in values for one in (row.items() if isinstance(row, Mapping) else map(_entry, row))]
        yield [key for key, _ in pairs], array.keys
        yield [item for _, item in pairs], array.items
    else:
        for text in values if any(issubclass(one, _TEXTS) for one in types) else ():
            if isinstance(text, _TEXTS):
                raise _no_value(text, kind)
        if _may_differ(kind.value_type):
            yield list(chain.from_iterable(values)), array.flatten()


def _is_positional(row: Any) -> bool:
    return isinstance(row, tuple) and not isinstance(row, Mapping)


def _entry(one: Any) -> tuple[Any, Any]:
    return (one["key"], one["value"]) if isinstance(one, Mapping) else one


def _check_fine(values: Sequence[Any], kind: pa.DataType) -> None:
    """Raise ``pa.ArrowInvalid`` for a datetime that is no whole number of the type's unit."""
    unit_us = _UNIT_NS[kind.unit] // 1000
    if unit_us > 1:
        for value in values:
            if value is not None and isinstance(value, datetime) and value.microsecond % unit_us:
                raise _no_value(value, kind)


def _compare(values: Sequence[Any], array: pa.Array) -> None:
    kind = array.type
    # Python's values are made much faster together, and numbers need no more.
    found = array if pa.types.is_temporal(kind) else array.to_pylist()
    for value, stored in zip(values, found, strict=True):
        if not (value is None or isinstance(value, pa.Scalar) or _is_kept(value, stored, kind)):
            raise _no_value(value, kind)


def _is_kept(value: Any, stored: Any, kind: pa.DataType) -> bool:
    is_ = pa.types
    if is_.is_floating(kind):
        return bool(np.isinf(value)) if np.isinf(stored) else not isinstance(value, int | np.integer) or value == stored
    if is_.is_integer(kind):
        return bool(value == stored)
    if isinstance(value, datetime) and is_.is_date(kind):
        return bool(value == datetime.combine(value.date(), time(), value.tzinfo))
    if isinstance(value, datetime):
        below_second = value.microsecond * 1000 + getattr(value, "nanosecond", 0)
        return below_second % _UNIT_NS[kind.unit] == 0
    if isinstance(value, date | time | timedelta):
        return bool(value == stored.as_py())
    return isinstance(value, np.datetime64 | np.timedelta64) or bool(value == stored.value)


def _no_value(value: object, kind: pa.DataType) -> pa.ArrowInvalid:
    shown = repr(value)
    return pa.ArrowInvalid(f"{shown if len(shown) <= 80 else shown[:79] + '…'} is no {kind}")
