"""Merge layers, evolve schemas, hash keys again: pure functions on tables.

Theory of operation of :func:`merge_layers`. The layers are concatenated, lowest first. A small hash
table tells which rows of the lowest have keys that other layers touch; the rest stand. The row keys
of the touched rows become numbers (``row_key_codes``), and so do the keys if a layer clears one.
The last row of a row key wins, by one assignment of row numbers to codes, unless a later layer
cleared its key. The rows that stand are returned sorted by key group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ErrorKind, InvalidState
from ..keys import hash_keys, mixed_hashes
from ..model import Field, SchemaVersion, State
from ..schema import CLEAR, KEY_GROUP, OP, UPSERT, arrow_field, arrow_type, children, default_scalar
from ..segments import Clustered, clustered, groups_of_keys, row_key_codes

_Rows = npt.NDArray[np.int64]

# Bounds of the number of buckets in a table of hashes, which is 8 times the number of rows.
_BITS_MIN: Final = 16
_BITS_MAX: Final = 24


def merge_layers(
    layers: Sequence[pa.Table], row_key: Sequence[str], key_columns: Sequence[str], *, includes_base: bool
) -> pa.Table:
    """Return the rows that stand after these layers, lowest first (SPEC.md section 5.4).

    With ``includes_base`` the result is a base: upserts, without ``_op``. Otherwise it is a delta,
    with ``_op``, deletes and clears. Sorted by ``_key_group`` if there is one; within a group lower
    layers come first.
    """
    is_delta = [OP.name in layer.column_names for layer in layers]
    if len(layers) == 1 and is_delta[0] is not includes_base:
        return layers[0]
    columns = [name for name in layers[0].column_names if name != OP.name]
    table = pa.concat_tables(layer.select(columns) for layer in layers)
    operations = np.concatenate(
        [
            layer[OP.name].to_numpy() if delta else np.full(len(layer), UPSERT, np.int8)
            for layer, delta in zip(layers, is_delta, strict=True)
        ]
    )
    layer_of = np.repeat(np.arange(len(layers), dtype=np.int32), [len(layer) for layer in layers])
    contested = _contested(table, len(layers[0]), operations == CLEAR, row_key, key_columns)
    candidates = np.flatnonzero(contested)
    found = _standing(
        table.select(list(dict.fromkeys([*key_columns, *row_key]))).take(pa.array(candidates)),
        operations[candidates],
        layer_of[candidates],
        row_key,
        key_columns,
        keep_clears=not includes_base,
    )
    stands = ~contested
    stands[candidates[found]] = True
    if includes_base:
        stands &= operations == UPSERT
    else:
        table = table.add_column(int(KEY_GROUP.name in columns), OP, [pa.array(operations)])
    return _in_order(table, np.flatnonzero(stands))


def _contested(
    table: pa.Table, lowest: int, is_clear: npt.NDArray[np.bool_], row_key: Sequence[str], key_columns: Sequence[str]
) -> npt.NDArray[np.bool_]:
    """Return rows whose key is also above the lowest layer. The others are in it, and stand."""
    above = len(table) - lowest
    if above > lowest:
        return np.ones(len(table), np.bool_)
    upper = table.slice(lowest)
    found = KeyFilter(upper, row_key).may_have(table)
    if is_clear[lowest:].any():
        found |= KeyFilter(upper.filter(pa.array(is_clear[lowest:])), key_columns).may_have(table)
    return found


class KeyFilter:
    """A small hash table that finds all rows with a key of the ``named`` rows, and a few others."""

    def __init__(self, named: pa.Table, names: Sequence[str]) -> None:
        self._names = names
        self._shift = np.uint32(32 - min(max(_BITS_MIN, (8 * len(named)).bit_length()), _BITS_MAX))
        self._marked = np.zeros(1 << (32 - int(self._shift)), np.bool_)
        self._marked[self._buckets(named)] = True

    def may_have(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        """Return whether each of the rows may have such a key."""
        found: npt.NDArray[np.bool_] = self._marked[self._buckets(rows)]
        return found

    def _buckets(self, rows: pa.Table) -> npt.NDArray[np.uint32]:
        return mixed_hashes(hash_keys([rows[name] for name in self._names])) >> self._shift


def _standing(
    keys: pa.Table,
    operations: npt.NDArray[np.int8],
    layer_of: npt.NDArray[np.int32],
    row_key: Sequence[str],
    key_columns: Sequence[str],
    *,
    keep_clears: bool,
) -> _Rows:
    """Return row numbers of the upserts and deletes that stand.

    ``keep_clears``: also those of the last clear of each key.
    """
    if not len(keys):
        return np.zeros(0, np.int64)
    is_clear = operations == CLEAR
    clears = np.flatnonzero(is_clear)
    others = np.flatnonzero(~is_clear)
    stands = np.zeros(len(keys), np.bool_)
    if len(others):
        rows = keys.select(list(row_key)) if not len(clears) else keys.select(list(row_key)).take(pa.array(others))
        stands[_last_of_each(row_key_codes(rows.columns), others)] = True
    if len(clears):
        key_codes = row_key_codes([keys[name] for name in key_columns])
        cleared_in = np.full(int(key_codes.max()) + 1, -1, np.int32)
        cleared_in[key_codes[clears]] = layer_of[clears]
        # In one layer clears apply first: what the same layer upserts or deletes stands.
        stands &= layer_of >= cleared_in[key_codes]
        if keep_clears:
            stands[_last_of_each(key_codes[clears], clears)] = True
    return np.flatnonzero(stands)


def _last_of_each(codes: npt.NDArray[np.int64], rows: _Rows) -> _Rows:
    last = np.full(int(codes.max()) + 1, -1, np.int64)
    last[codes] = rows
    return last[last >= 0]


def _in_order(table: pa.Table, rows: _Rows) -> pa.Table:
    if KEY_GROUP.name not in table.column_names:
        return table.take(pa.array(rows))
    groups = table[KEY_GROUP.name].to_numpy()[rows]
    field = table.schema.field(KEY_GROUP.name)
    return Clustered(table.drop_columns([KEY_GROUP.name]), groups, rows, key_group=field).slice(0, len(rows))


def rekey(table: pa.Table, state: State, max_parallelism: int, key_hash: str) -> pa.Table:
    """Return rows in segment order with key groups of another max parallelism or key hash."""
    groups = groups_of_keys([table[name] for name in state.key_columns], max_parallelism, key_hash)
    return clustered(table, state, groups)[0].slice(0, len(table))


def evolve_table(table: pa.Table, old: SchemaVersion, new: SchemaVersion) -> pa.Table:
    """Convert rows of schema ``old`` to schema ``new`` (SPEC.md section 5.7); fields match by id.

    A new field holds its default or null; deletes and clears hold null. Raises ``InvalidState``
    (SCHEMA_CANNOT_EVOLVE) for a forbidden change.
    """
    if old.fields == new.fields:
        return table
    names = {item.name for item in old.fields}
    known = {item.id: item for item in old.fields}
    own = [field for field in table.schema if field.name not in names]
    columns = [table[field.name] for field in own]
    for item in new.fields:
        before = known.get(item.id)
        if before is None:
            columns.append(_new_column(table, item))
        elif before == item:
            columns.append(table[item.name])
        else:
            column = table[before.name]
            chunks = [_evolve_array(chunk, before, item) for chunk in column.chunks]
            columns.append(pa.chunked_array(chunks, arrow_type(item.type)))
    return pa.Table.from_arrays(columns, schema=pa.schema([*own, *map(arrow_field, new.fields)]))


def _new_column(table: pa.Table, item: Field) -> Any:
    kind = arrow_type(item.type)
    if item.default is None:
        if not item.nullable:
            raise _cannot_evolve(f"new column {item.name!r} is neither nullable nor has a default")
        return pa.nulls(len(table), kind)
    value = default_scalar(item.default, item.type)
    if OP.name in table.column_names:
        return pc.if_else(pc.equal(table[OP.name], UPSERT), value, pa.scalar(None, kind))
    return pa.repeat(value, len(table))


def _cannot_evolve(why: str) -> InvalidState:
    return InvalidState(f"{why}; SPEC.md section 5.7 says what may change", kind=ErrorKind.SCHEMA_CANNOT_EVOLVE)


def _evolve_array(array: pa.Array, old: Field, new: Field) -> pa.Array:
    if old.type == new.type:
        return array
    if isinstance(old.type, str) and isinstance(new.type, str):
        try:
            return array.cast(arrow_type(new.type), safe=True)
        except pa.ArrowException as error:
            raise _cannot_evolve(f"column {old.name!r} was {old.type} and cannot be {new.type}: {error}") from error
    if isinstance(old.type, str) or isinstance(new.type, str) or old.type[0] != new.type[0]:
        raise _cannot_evolve(f"column {old.name!r} was {arrow_type(old.type)} and cannot be {arrow_type(new.type)}")
    kind, wanted = arrow_type(new.type), children(new)
    if new.type[0] == "struct":
        return _evolve_struct(array, old, new)
    values = [array.values] if new.type[0] == "list" else [array.keys, array.items]
    values = [_evolve_array(v, a, b) for v, a, b in zip(values, children(old), wanted, strict=True)]
    if new.type[0] == "map":
        entries = kind.field(0).type
        values = [pa.Array.from_buffers(entries, len(values[0]), [None], 0, children=values)]
    return pa.Array.from_buffers(kind, len(array), array.buffers()[:2], -1, array.offset, children=values)


def _evolve_struct(array: pa.Array, old: Field, new: Field) -> pa.Array:
    before = {item.id: (array.field(index), item) for index, item in enumerate(children(old))}
    parts = []
    for item in children(new):
        if item.id in before:
            parts.append(_evolve_array(*before[item.id], item))
        elif item.nullable:
            parts.append(pa.nulls(len(array), arrow_type(item.type)))
        else:
            raise _cannot_evolve(f"nested field {new.name}.{item.name} is new and not nullable")
    # The validity of the struct itself; it hides what its fields hold under a null, as before.
    valid = np.packbits(array.is_valid().to_numpy(zero_copy_only=False), bitorder="little")
    return pa.Array.from_buffers(arrow_type(new.type), len(array), [pa.py_buffer(valid)], -1, children=parts)
