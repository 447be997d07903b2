"""Rows of a store, given to a function and written anew, with all that Spark derives from them.

A function gets a state's rows as the reader shows them. What it returns is encoded as Spark would
have, and whatever Spark keeps to find these rows by is made from them: how many rows a key of a
join or of a list has, where timers and expiry are indexed by time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.schema import segment_schema
from stateformat.tables import python_rows

from ...byte_strings import Positions, cut, ramp
from .. import hdfs_store
from ..hdfs_store import key_codes
from ..rocksdb_keys import PLAIN, encoded_keys, encoder_of, joined_values, with_sums
from ..schemas import SparkField, has_values
from ..states import INDEX, StateShape
from ..stores import Entries, Store, StoreReader
from ..unsafe_writing import encode_rows, prefixed

_PIECE_ROWS: Final = 1 << 16
_PIECE_BYTES: Final = 1 << 24


class RowFunction(Protocol):
    """What is done with the rows of a state: ``backends.rewrite.Transformation`` is one."""

    @property
    def rekeys(self) -> bool:
        """Whether rows may get other keys."""

    def apply(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield the rows that replace these, in the schema of the state."""


class Rows(NamedTuple):
    """Rows of a store by Spark's schema: flat key columns, then those of the value."""

    fields: tuple[SparkField, ...]
    """Of the key."""
    keys: list[pa.Array]
    values: list[pa.Array]
    number: int

    def take(self, chosen: Positions) -> Rows:
        """Return some of them."""
        at = pa.array(chosen)
        return Rows(
            self.fields, [one.take(at) for one in self.keys], [one.take(at) for one in self.values], len(chosen)
        )

    def groups(self, columns: int) -> npt.NDArray[np.int64]:
        """Return a number for each row, the same where the first key columns are equal."""
        return key_codes(encode_rows(self.keys[:columns], self.fields[:columns], self.number, key=True))


Derive = Callable[[Rows, int], Rows]
"""Takes the rows of a store and how many key columns are hashed; returns what follows of them."""


@dataclass(frozen=True)
class Edit:
    """What becomes of a store's rows."""

    shape: StateShape | None = None
    function: RowFunction | None = None
    """None if the rows follow from those of another store."""
    renumbered: bool = False
    """Whether the last key column counts the rows of a key, from 0: of a join."""
    derived: tuple[tuple[Any, int, Derive], ...] = ()
    """What follows of the rows: the plan's unit, the store's position in it, and how."""

    def rows(self, store: Store, reader: StoreReader, entries: Entries, partition: int) -> Rows:
        """Return the rows that the function makes of entries.

        Raises ``InvalidInput`` for rows that Spark cannot have.
        """
        assert self.shape is not None
        assert self.function is not None
        made: list[pa.RecordBatch] = []
        nulls = np.zeros(len(store.schema.key) + len(store.schema.value), np.int64)
        for columns, batch in _batches(self.shape, store, reader, entries, partition):
            nulls += [column.null_count for column in columns]
            made += self.function.apply(batch)
        state = self.shape.state
        schema = pa.schema(list(segment_schema(state))[1:])
        table = pa.Table.from_batches([one.select(schema.names).cast(schema) for one in made], schema)
        columns = [one.combine_chunks() for one in table.columns]
        plain = [one.chunk(0) if isinstance(one, pa.ChunkedArray) else one for one in columns]
        where = f"state {state.name!r} of {state.operator}"
        keys, values = self.shape.stored_columns(plain, table.num_rows, where)
        fields = (*store.schema.key, *store.schema.value)
        for item, column, before in zip(fields, (*keys, *values), nulls.tolist(), strict=True):
            if not _may_be_null(item, store) and column.null_count > before and has_values(item.type):
                raise InvalidInput(
                    f"{where}: column {item.name!r} would have {column.null_count} nulls, and the query has it without "
                    "nulls: give it values",
                    kind=ErrorKind.NULL_NOT_ALLOWED,
                )
        rows = Rows(self.shape.stored.key, keys, values, table.num_rows)
        self._check_distinct(rows, table, where)
        return _renumbered(rows) if self.renumbered else rows

    def _check_distinct(self, rows: Rows, table: pa.Table, where: str) -> None:
        assert self.shape is not None
        codes = rows.groups(len(rows.keys))
        values, counts = np.unique(codes, return_counts=True)
        if len(values) == rows.number:
            return
        again = int(np.flatnonzero(codes == values[np.argmax(counts)])[1])
        first = [name for name in table.schema.names if name.startswith("_") or name in self.shape.state.key_columns]
        (key,) = python_rows(table.select(first).slice(again, 1))
        raise equal_keys(where, str(key))


def _may_be_null(item: SparkField, store: Store) -> bool:
    """Return whether a column may have nulls: no time of expiry has, and no place in a list."""
    value = store.schema.value
    expires = [one.name for one in value] == ["value", "ttlExpirationMs"] and value[0].type.kind == "struct"
    return item.nullable and item is not INDEX and not (expires and item is value[-1])


def equal_keys(where: str, key: str) -> InvalidInput:
    """Return the error for two rows of one key."""
    return InvalidInput(
        f"{where} would have two rows with the key {key}, and Spark keeps one: return one of them, or give them "
        "different keys",
        kind=ErrorKind.TRANSFORM_FAILED,
    )


def _batches(
    shape: StateShape, store: Store, reader: StoreReader, entries: Entries, partition: int
) -> Iterator[tuple[list[pa.Array], pa.RecordBatch]]:
    """Yield columns as the store's reader returns them, and as users see them."""
    path = store.folder(partition)
    as_bytes = replace(store, schema=shape.stored)
    sizes = entries.keys.length + np.maximum(entries.values.length, 0)
    for first, last in cut(np.maximum(sizes, _PIECE_BYTES // _PIECE_ROWS), _PIECE_BYTES):
        some = entries.slice(first, last)
        stored = reader.columns(as_bytes, some, path) if shape.opaque else None
        columns = reader.columns(store, some, path)
        yield columns, shape.batch(columns, partition, stored)


def _renumbered(rows: Rows) -> Rows:
    """Return rows of which those of one key are numbered from 0, in their order."""
    groups, index = rows.groups(len(rows.keys) - 1), rows.keys[-1].to_numpy()
    found = rows.take(np.lexsort((index, groups)))
    counts = np.unique(groups, return_counts=True)[1]
    return found._replace(keys=[*found.keys[:-1], pa.array(ramp(counts), rows.keys[-1].type)])


def _firsts(rows: Rows, hashed: int) -> tuple[Positions, npt.NDArray[np.int64], Positions]:
    """Return the first row of each key, the key of each row, and how many rows each has."""
    _, first, group, counts = np.unique(rows.groups(hashed), return_index=True, return_inverse=True, return_counts=True)
    return first, group, counts


def counted(rows: Rows, hashed: int) -> Rows:
    """How many rows each key has."""
    first, _, counts = _firsts(rows, hashed)
    return Rows(rows.fields, rows.take(first).keys[:hashed], [pa.array(counts)], len(first))


def by_time(rows: Rows, hashed: int) -> Rows:  # noqa: ARG001 - as all of these
    """The same keys, which end with a time; of a join's rows at one time, one for each."""
    return rows._replace(values=[pa.nulls(rows.number)])


def expiring(rows: Rows, hashed: int) -> Rows:
    """The key of each row behind the time when it expires."""
    keys = [*rows.keys[:hashed], rows.values[-1], *rows.keys[hashed:]]
    return Rows(rows.fields, keys, [pa.nulls(rows.number)], rows.number)


def _soonest(rows: Rows, hashed: int) -> tuple[Positions, pa.Array]:
    first, group, _ = _firsts(rows, hashed)
    least = np.full(len(first), np.iinfo(np.int64).max)
    np.minimum.at(least, group, rows.values[-1].to_numpy())
    return first, pa.array(least)


def soonest(rows: Rows, hashed: int) -> Rows:
    """When the first row of each key expires."""
    first, least = _soonest(rows, hashed)
    return Rows(rows.fields, rows.take(first).keys[:hashed], [least], len(first))


def expiring_soonest(rows: Rows, hashed: int) -> Rows:
    """Each key behind the time when its first row expires."""
    first, least = _soonest(rows, hashed)
    return Rows(rows.fields, [*rows.take(first).keys[:hashed], least], [pa.nulls(len(first))], len(first))


def followers(name: str, *, listed: bool) -> Mapping[str, Derive]:
    """Return the stores and column families whose rows follow from those of ``name``, and how."""
    side, _, kind = name.partition("-")
    if kind == "keyWithIndexToValue":
        return {f"{side}-keyToNumValues": counted}
    if kind == "keyWithTsToValues":
        return {f"{side}-tsWithKey": by_time}
    if name.endswith("_keyToTimestamp"):
        return {name.replace("_keyToTimestamp", "_timestampToKey"): by_time}
    if listed:
        expiry = {f"$min_{name}": soonest, f"$ttl_{name}": expiring_soonest}
        return {f"$rowCounter_{name}": counted, f"$count_{name}": counted, **expiry}
    return {f"$ttl_{name}": expiring}


def leader(name: str) -> str | None:
    """Return the state whose rows say what a state has that users see; None if it has its own."""
    side, _, kind = name.partition("-")
    return f"{side}-keyWithIndexToValue" if kind == "keyToNumValues" else None


def encoded(store: Store, rows: Rows, families: Mapping[str, int], *, rocksdb: bool) -> Entries:
    """Return rows as a store's reader returns them: with what it removed before each.

    ``families``: the numbers of the database's column families.
    """
    if not rocksdb:
        keys = encode_rows(rows.keys, rows.fields, rows.number, key=True)
        values = encode_rows(rows.values, store.schema.value, rows.number, key=False)
        if store.has_row_checksums:
            values = hdfs_store.with_sums(keys, values).without_prefix(4)
        return Entries(keys, values)
    number = families.get(store.family or "default")
    lead = b"" if number is None else number.to_bytes(2, "little")
    counts = np.ones(rows.number, np.int64)
    if store.multiple:
        groups = rows.groups(len(rows.keys) - 1)
        rows = rows.take(np.lexsort((rows.keys[-1].to_numpy(), groups)))
        counts = np.unique(groups, return_counts=True)[1]
    first = rows.take(np.cumsum(counts) - counts)._replace(values=[])
    flat = replace(store, schema=replace(store.schema, key=rows.fields))
    keys = prefixed(lead, encoded_keys(flat, first.keys[:-1] if store.multiple else first.keys, first.number))
    values = prefixed(b"\0", encode_rows(rows.values, store.schema.value, rows.number, key=False))
    if store.multiple:
        values = joined_values(store, keys, values, counts)
    elif store.has_row_checksums:
        values = with_sums(keys, values).without_prefix(9)
    else:
        values = values.without_prefix(1)
    return Entries(keys.without_prefix(len(lead) + (encoder_of(store) == PLAIN)), values)
