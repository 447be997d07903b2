"""Convert a runtime's rows to rows of a segment: columns, types, values, key groups. Pure."""

from __future__ import annotations

from collections.abc import Mapping
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
from .plain import keeps_values, kept
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
