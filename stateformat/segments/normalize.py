"""Convert a runtime's rows to rows of a segment: columns, types, values, key groups. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ErrorKind, InvalidState
from ..graph import Operator
from ..keys import DEFAULT_KEY_HASH, MAX_PARALLELISM_LIMIT, key_group_count, normalize_key_column
from ..model import Field, Mode, State
from ..schema import CLEAR, KEY_GROUP, OP, OPERATIONS, UPSERT, children, segment_schema
from ..tables import python_rows
from .sort import Groups, groups_of_keys, one_array


def normalize_rows(
    rows: pa.Table, state: State, *, schema_id: int, delta: bool, where: str, fill: Mapping[str, Any] | None = None
) -> pa.Table:
    """Return the rows with the columns of a segment, in its order (SPEC.md section 5.1).

    Missing nullable columns become null or their value in ``fill``. Types are cast if no value
    changes. Raises ``InvalidState`` (SCHEMA_MISMATCH, NULL_NOT_ALLOWED) about ``where``.
    """
    schema = segment_schema(state, schema_id, delta=delta)
    names = rows.column_names
    wrong = sorted({name for name in names if name not in schema.names or names.count(name) > 1})
    if wrong:
        raise InvalidState(f"{where}: columns {wrong} are unknown or appear twice; the columns are {schema.names}")
    required = {*state.key_columns, "_map_key"} | {name for name in schema.names if name.startswith("_")}
    required |= {item.name for item in state.by_schema_id[schema_id].fields if not item.nullable}
    fill = fill or {}
    fields, columns = [], []
    for field in schema:
        if field.name in names:
            column = _cast(rows[field.name], field.type, f"{where}: column {field.name!r}")
        elif field.name in fill:
            column = pa.chunked_array([pa.repeat(pa.scalar(fill[field.name], field.type), len(rows))])
        elif field.name == KEY_GROUP.name:
            continue
        elif field.name in required:
            what = f". Each row of a delta says what it does: {OPERATIONS}" if field.name == OP.name else ""
            raise InvalidState(f"{where}: column {field.name!r} is missing; the columns given are {names}{what}")
        else:
            column = pa.chunked_array([pa.nulls(len(rows), field.type)])
        if field.name in state.key_columns or field.name == "_map_key":
            column = normalize_key_column(column)
        if not field.nullable and column.null_count:
            raise _null_found(where, field.name, column.null_count)
        fields.append(field)
        columns.append(column)
    table = pa.Table.from_arrays(columns, schema=pa.schema(fields))
    if delta:
        _check_operations(table, state, where)
    _check_own_columns(table, state, where)
    if state.mode is Mode.IN_FLIGHT:
        _check_channels(table, where)
    if state.mode is Mode.COMMITTABLES:
        _check_attempts(table, where)
    _check_values(table, state.by_schema_id[schema_id].fields, where)
    return table


def normalize_keys(rows: pa.Table | pa.RecordBatch, state: State, *, where: str) -> list[pa.ChunkedArray]:
    """Return the key columns as :func:`normalize_rows` makes them: int32 and int64 hash apart."""
    columns = []
    for field in map(segment_schema(state).field, state.key_columns):
        if rows.schema.names.count(field.name) != 1:
            raise InvalidState(f"{where}: key column {field.name!r} is missing or appears twice in {rows.schema.names}")
        column = rows[field.name]
        column = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
        columns.append(normalize_key_column(_cast(column, field.type, f"{where}: column {field.name!r}")))
    return columns


def _null_found(where: str, column: str, count: int) -> InvalidState:
    return InvalidState(
        f"{where}: column {column!r} is declared without nulls and holds {count}; fill them, or declare it nullable",
        kind=ErrorKind.NULL_NOT_ALLOWED,
        column=column,
    )


def _check_operations(table: pa.Table, state: State, where: str) -> None:
    if not len(table):
        return
    bounds = pc.min_max(table[OP.name]).as_py()
    if bounds["min"] < UPSERT or bounds["max"] > CLEAR:
        raise InvalidState(f"{where}: _op is {bounds['min']} to {bounds['max']}; it is {OPERATIONS}")
    if bounds["max"] == CLEAR:
        clears = table.filter(pc.equal(table[OP.name], CLEAR))
        for name in clears.column_names:
            if name not in (KEY_GROUP.name, OP.name, *state.key_columns) and clears[name].null_count < len(clears):
                raise InvalidState(f"{where}: a clear (_op 2) holds a value in {name!r}; it has key columns only")


def _check_own_columns(table: pa.Table, state: State, where: str) -> None:
    for name in state.row_key[len(state.key_columns) :]:
        if name == "_map_key" or not table[name].null_count:
            continue
        rows = table.filter(pc.not_equal(table[OP.name], CLEAR)) if OP.name in table.column_names else table
        if rows[name].null_count:
            raise _null_found(where, name, rows[name].null_count)


def _check_channels(table: pa.Table, where: str) -> None:
    for name in ("_sender", "_receiver"):
        bounds = pc.min_max(table[name]).as_py()
        if len(table) and not 0 <= bounds["min"] <= bounds["max"] < MAX_PARALLELISM_LIMIT:
            raise InvalidState(f"{where}: {name} is {bounds['min']} to {bounds['max']}; it is a subtask, 0 to 32767")


def _check_attempts(table: pa.Table, where: str) -> None:
    wrong = table.filter(pc.invert(pc.match_substring_regex(table["_attempt_id"], "^[0-9a-f]{32}$")))
    if len(wrong):
        raise InvalidState(
            f"{where}: _attempt_id is {wrong['_attempt_id'][0].as_py()[:40]!r} ({len(wrong)} such rows); an attempt id "
            "is 32 lower-case hexadecimal digits, that of the checkpoint under which the output was prepared"
        )
    low = pc.min(table["_checkpoint_id"]).as_py()
    if low is not None and low < 1:
        raise InvalidState(f"{where}: _checkpoint_id is {low}; ids of checkpoints begin with 1")


def _check_values(table: pa.Table, fields: tuple[Field, ...], where: str) -> None:
    strict = [item for item in fields if not _all_nullable(item)]
    if strict and OP.name in table.column_names:
        # Deletes and clears name a key; they have no values to check.
        table = table.filter(pc.equal(table[OP.name], UPSERT))
    for item in strict:
        for chunk in table[item.name].chunks:
            _check_nulls(chunk, item, item.name, where)


def _all_nullable(item: Field) -> bool:
    return item.nullable and all(_all_nullable(child) for child in _value_children(item))


def _value_children(item: Field) -> tuple[Field, ...]:
    # The key of a map is never null in Arrow, whatever the field says.
    nested = children(item)
    return nested[1:] if not isinstance(item.type, str) and item.type[0] == "map" else nested


def _check_nulls(array: pa.Array, item: Field, path: str, where: str) -> None:
    if not item.nullable and array.null_count:
        raise _null_found(where, path, array.null_count)
    nested = [child for child in _value_children(item) if not _all_nullable(child)]
    if not nested or isinstance(item.type, str):
        return
    present = array.drop_null()
    if item.type[0] == "struct":
        names = [child.name for child in children(item)]
        parts = {names[index]: part for index, part in enumerate(present.flatten())}
    elif item.type[0] == "list":
        parts = {nested[0].name: present.flatten()}
    else:
        start, stop = (present.offsets[i].as_py() for i in (0, len(present)))
        parts = {nested[0].name: present.items.slice(start, stop - start)}
    for child in nested:
        _check_nulls(parts[child.name], child, f"{path}.{child.name}", where)


def _cast(column: pa.ChunkedArray, wanted: pa.DataType, what: str) -> pa.ChunkedArray:
    if column.type == wanted:
        return column
    if not keeps_values(column.type, wanted):
        raise InvalidState(f"{what} is {column.type} and should be {wanted}; cast it first, if that is what is meant")
    try:
        return kept(column, wanted)
    except pa.ArrowException as error:
        raise InvalidState(f"{what} is {column.type}, and not every value of it is a {wanted}: {error}") from error


def key_groups_of(table: pa.Table, state: State, operator: Operator, *, trust: bool, where: str) -> Groups:
    """Return the key group of each row, compared with a given one; ``trust``: only its range is."""
    ceiling = key_group_count(operator)
    given = one_array(table[KEY_GROUP.name]).to_numpy() if KEY_GROUP.name in table.column_names else None
    if given is not None and trust:
        if len(given) and not (given.min() >= 0 and given.max() < ceiling):
            raise InvalidState(
                f"{where}: _key_group is {given.min()} to {given.max()}; the operator has key groups 0 to {ceiling - 1}"
            )
        groups: Groups = given
        return groups
    columns = [table[name] for name in state.key_columns]
    groups = groups_of_keys(columns, ceiling, operator.key_hash or DEFAULT_KEY_HASH)
    if given is not None and not np.array_equal(given, groups):
        row = int(np.argmax(given != groups))
        key = python_rows(table.select(list(state.key_columns)).slice(row, 1))[0]
        raise InvalidState(
            f"{where}: row {row} with key {key!r} has _key_group {given[row]} and belongs to {groups[row]} of "
            f"{ceiling}; leave the column out to have it computed"
        )
    return groups


def senders_of(table: pa.Table) -> Groups:
    """Return the groups of rows in flight on any edge but a hash edge: their senders."""
    senders: Groups = one_array(table["_sender"]).to_numpy()
    return senders


# ---- plain ---------------------------------------------------------------------------------------
#
# Values of other types than states have: which are kept, how they are made plain, and bad text.
#
# A *plain* type is one that every operator takes: without views, dictionaries, runs and 64-bit
# offsets, and with times in microseconds.


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
