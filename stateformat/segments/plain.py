"""Values of other types than states have: which are kept, how they are made plain, and bad text.

A *plain* type is one that every operator takes: without views, dictionaries, runs and 64-bit
offsets, and with times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ErrorKind, InvalidState


def plain_type(kind: Any) -> pa.DataType:
    """Return the plain type of another; itself if it has none. A column of nulls is text."""
    is_ = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if is_.is_dictionary(kind) or is_.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if is_.is_large_string(kind) or is_.is_string_view(kind) or is_.is_null(kind):
        return pa.string()
    if is_.is_large_binary(kind) or is_.is_binary_view(kind):
        return pa.binary()
    if is_.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if is_.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)), kind.list_size)
    if is_.is_list(kind) or is_.is_large_list(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)))
    if is_.is_map(kind):
        fields = (item.with_type(plain_type(item.type)) for item in (kind.key_field, kind.item_field))
        return pa.map_(*fields, keys_sorted=kind.keys_sorted)
    if is_.is_struct(kind):
        return pa.struct([item.with_type(plain_type(item.type)) for item in kind])
    return kind


def keeps_values(given: Any, wanted: Any) -> bool:
    """Return whether :func:`kept` keeps all values or fails. No other cast is made."""
    is_ = pa.types
    if given == wanted or is_.is_null(given):
        return True
    if any(is_kind(given) and is_kind(wanted) for is_kind in (is_.is_integer, is_.is_decimal, is_.is_date)):
        return True
    if is_.is_dictionary(given) or is_.is_run_end_encoded(given):
        return keeps_values(given.value_type, wanted)
    if is_.is_list(wanted):
        of_list = is_.is_list(given) or is_.is_large_list(given) or is_.is_fixed_size_list(given)
        return of_list and keeps_values(given.value_type, wanted.value_type)
    if is_.is_map(wanted):
        keys = is_.is_map(given) and keeps_values(given.key_type, wanted.key_type)
        return keys and keeps_values(given.item_type, wanted.item_type)
    if is_.is_struct(wanted):
        return (
            is_.is_struct(given)
            and [item.name for item in given] == [item.name for item in wanted]
            and all(keeps_values(a.type, b.type) for a, b in zip(given, wanted, strict=True))
        )
    if is_.is_floating(wanted):
        return bool(is_.is_floating(given) and given.bit_width < wanted.bit_width)
    if is_.is_timestamp(wanted):
        return is_.is_timestamp(given) and (given.tz is None) is (wanted.tz is None)
    if is_.is_string(wanted):
        return bool(is_.is_large_string(given) or is_.is_string_view(given))
    is_bytes = is_.is_large_binary(given) or is_.is_binary_view(given) or is_.is_fixed_size_binary(given)
    return bool(is_.is_binary(wanted) and is_bytes)


def kept(column: Any, wanted: pa.DataType) -> Any:
    """Cast an array or a chunked array. Raises ``ArrowException`` rather than change a value."""
    kind = column.type
    if kind == wanted:
        return column
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([kept(chunk, wanted) for chunk in column.chunks], wanted)
    if isinstance(column, pa.ExtensionArray):
        return kept(column.storage, wanted)
    # Arrow casts neither runs nor dictionaries of views, which polars uses.
    if pa.types.is_run_end_encoded(kind):
        return kept(pc.run_end_decode(column), wanted)
    if pa.types.is_dictionary(kind):
        return kept(column.dictionary, wanted).take(column.indices)
    return column.cast(wanted, safe=True)


def cast_kept(column: Any, wanted: pa.DataType) -> Any:
    """Cast to a type that may not hold every value, as Arrow does it, except that floats alone are
    rounded. Raises ``ArrowException`` for any other value that changes.

    Arrow makes a float of 1e300 infinite, drops the fields of a struct that are not wanted, and
    rounds times to dates and floats to decimals.
    """
    if keeps_values(column.type, wanted):
        return kept(column, wanted)
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([cast_kept(chunk, wanted) for chunk in column.chunks], wanted)
    made = column.cast(wanted)
    _check_cast(column, made)
    return made


def _check_cast(given: Any, made: Any) -> None:
    """Raise ``pa.ArrowInvalid`` where a cast value is not the given one."""
    is_ = pa.types
    if isinstance(given, pa.ExtensionArray):
        _check_cast(given.storage, made)
    elif is_.is_struct(made.type) and is_.is_struct(given.type):
        names = {item.name for item in made.type}
        if lost := [item.name for item in given.type if item.name not in names]:
            raise pa.ArrowInvalid(f"{lost[0]!r} is no field of {made.type}")
        for item in given.type:
            _check_cast(pc.struct_field(given, item.name), pc.struct_field(made, item.name))
    elif is_.is_map(made.type) and is_.is_map(given.type):
        # The keys and items of null maps and beyond slices are of no map.
        _check_cast(*(pc.list_flatten(each.cast(_as_list(each.type))) for each in (given, made)))
    elif is_.is_nested(made.type) and is_.is_nested(given.type):
        _check_cast(pc.list_flatten(given), pc.list_flatten(made))
    elif is_.is_floating(made.type):
        was = pc.is_inf(given) if is_.is_floating(given.type) else pa.scalar(False)
        _refuse_first(given, made.type, pc.and_not(pc.is_inf(made), was))
    else:
        _refuse_first(given, made.type, pc.not_equal(made.cast(given.type, safe=False), given))


def _as_list(kind: Any) -> pa.DataType:
    return pa.list_(pa.struct([kind.key_field, kind.item_field]))


def _refuse_first(given: Any, kind: pa.DataType, differs: Any) -> None:
    if pc.any(differs).as_py():
        first = given.filter(differs)[0]
        try:
            shown = repr(first.as_py())
        except (OverflowError, ValueError):  # A time beyond Python's calendar.
            shown = f"{first.value} ({first.type})"
        raise pa.ArrowInvalid(f"{shown} is no {kind}")


def check_text(rows: pa.Table | pa.RecordBatch, what: str, *, checked: pa.RecordBatch | None = None) -> None:
    """Raise ``InvalidState`` for text of ``what`` that is not UTF-8, naming its column.

    Arrow trusts whoever makes an array, and readers of Parquet do not look. Columns that share
    their memory with one of ``checked`` are passed over.
    """
    done = [] if checked is None else [_memory(column) for column in checked.columns if _has_text(column.type)]
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if not _has_text(field.type):
            continue
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            if done and _memory(chunk) in done:
                continue
            try:
                for texts in _texts(chunk):
                    if not _is_ascii(texts):
                        texts.validate(full=True)
            except (pa.ArrowException, ValueError) as error:
                raise InvalidState(
                    f"column {field.name!r} of {what} holds text that is not UTF-8: {error}. Decode it as what it is, "
                    "or declare the column binary",
                    kind=ErrorKind.INVALID_ARGUMENT,
                    column=field.name,
                ) from error


def _memory(array: pa.Array) -> tuple[Any, ...]:
    places = [None if buffer is None else buffer.address for buffer in array.buffers()]
    return array.type, array.offset, len(array), places


def _has_text(kind: Any) -> bool:
    if pa.types.is_nested(kind):
        return any(_has_text(kind.field(index).type) for index in range(kind.num_fields))
    return _is_text(kind)


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _texts(array: pa.Array) -> Iterator[pa.Array]:
    """Yield the texts within an array, and none of what a slice of it leaves out."""
    kind, is_ = array.type, pa.types
    if not _has_text(kind) or not len(array):
        return
    if is_.is_struct(kind):
        for place in range(kind.num_fields):
            yield from _texts(array.field(place))
    elif is_.is_list(kind) or is_.is_large_list(kind) or is_.is_map(kind):
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        yield from _texts(array.values.slice(first, last - first))
    elif is_.is_fixed_size_list(kind):
        yield from _texts(array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size))
    else:  # Text, or of a kind that nothing divides.
        yield array


def _is_ascii(array: pa.Array) -> bool:
    """Return whether all is ASCII, at a tenth of what a look at each value costs."""
    if not _is_text(array.type):
        return False
    _, offsets, data = array.buffers()
    if not len(array) or data is None:
        return True
    ends = np.frombuffer(offsets, np.int64 if pa.types.is_large_string(array.type) else np.int32)
    first, last = ends[array.offset], ends[array.offset + len(array)]
    return bool(last <= first or np.frombuffer(data, np.uint8)[first:last].max() < 128)
