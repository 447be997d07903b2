"""Schemas of Iceberg tables: field ids that stay with a column, and which types may become
which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput

from .columns import Column, Columns, nested

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.types import IcebergType, NestedField

Ids = dict[str, int]
"""Iceberg's field ids, by the columns' permanent names."""


def new_schema(columns: Columns) -> Schema:
    """Return the schema of a table that is created; its ids are those that Iceberg will assign."""
    from pyiceberg.schema import Schema, assign_fresh_schema_ids

    builder = _Builder({}, None)
    return assign_fresh_schema_ids(Schema(*builder.fields(columns.all)))


def evolved_schema(columns: Columns, old: Schema, ids: Mapping[str, int], last_id: int, *, rows_stay: bool) -> Schema:
    """Return the schema that a table has after an export.

    A column keeps its id when its name or position changes or its type is widened. A new column, or
    one whose type the old one cannot become, gets a new id; removed columns are left out. If
    ``rows_stay``, raises ``InvalidInput`` for such a type: the existing rows would lose their
    values.
    """
    from pyiceberg.schema import Schema

    builder = _Builder(ids, old, last_id, rows_stay=rows_stay)
    return Schema(*builder.fields(columns.all), schema_id=old.schema_id)


def ids_of(columns: Columns, schema: Schema) -> Ids:
    """Return the id of each column of a schema that was made from ``columns``."""
    return {column.key: item.field_id for column, item in _pairs(columns.all, schema.fields)}


def arrow_schema(columns: Columns, schema: Schema) -> pa.Schema:
    """Return the columns of data files: with the ids of a schema that was made from ``columns``."""
    ids = {id(column): item.field_id for column, item in _pairs(columns.all, schema.fields)}

    def typed(column: Column) -> pa.DataType:
        if not column.children:
            return column.type
        parts = column.children
        return nested(
            column.type, [typed(part) for part in parts], [part.name for part in parts], [ids[id(p)] for p in parts]
        )

    return pa.schema([pa.field(c.name, typed(c), metadata={"PARQUET:field_id": str(ids[id(c)])}) for c in columns.all])


def _pairs(columns: Sequence[Column], fields: Sequence[NestedField]) -> Iterator[tuple[Column, NestedField]]:
    for column, item in zip(columns, fields, strict=True):
        yield column, item
        yield from _pairs(column.children, _parts(item.field_type))


def _parts(kind: Any) -> Sequence[NestedField]:
    from pyiceberg.types import ListType, MapType, StructType

    if isinstance(kind, StructType):
        return tuple(kind.fields)
    if isinstance(kind, ListType):
        return (kind.element_field,)
    if isinstance(kind, MapType):
        return (kind.key_field, kind.value_field)
    return ()


class _Builder:
    """Makes fields, with the ids that columns had before."""

    def __init__(
        self, ids: Mapping[str, int], old: Schema | None, last_id: int = 0, *, rows_stay: bool = False
    ) -> None:
        self._ids, self._old, self._last, self._rows_stay = ids, old, last_id, rows_stay

    def fields(self, columns: Sequence[Column]) -> list[NestedField]:
        """Return the fields of one level."""
        from pyiceberg.types import NestedField

        return [
            NestedField(field_id=self._id(column), name=column.name, field_type=self._type(column), required=False)
            for column in columns
        ]

    def _id(self, column: Column) -> int:
        known = self._ids.get(column.key)
        if known is not None and self._old is not None and self._may_stay(column, known):
            return known
        if known is not None and self._rows_stay and self._old is not None:
            before = self._old.find_column_name(known)
            if before is not None:
                raise InvalidInput(
                    f"column {before!r} is {self._old.find_type(known)} in the Iceberg table, and {column.type} in the "
                    "state now, which the rows of older checkpoints cannot become: export to another folder",
                    kind=ErrorKind.SCHEMA_CANNOT_EVOLVE,
                    column=before,
                )
        self._last += 1
        return self._last

    def _may_stay(self, column: Column, known: int) -> bool:
        from pyiceberg.types import DecimalType, DoubleType, FloatType, IntegerType, LongType

        assert self._old is not None
        try:
            before: IcebergType = self._old.find_type(known)
        except ValueError:
            return False
        if column.children:
            return _sort_of(column.type) == type(before).__name__
        after = _primitive(column.type)
        if before == after or (isinstance(before, IntegerType) and isinstance(after, LongType)):
            return True
        if isinstance(before, FloatType) and isinstance(after, DoubleType):
            return True
        return (
            isinstance(before, DecimalType)
            and isinstance(after, DecimalType)
            and before.scale == after.scale
            and before.precision <= after.precision
        )

    def _type(self, column: Column) -> IcebergType:
        from pyiceberg.types import ListType, MapType, StructType

        if not column.children:
            return _primitive(column.type)
        parts = self.fields(column.children)
        if pa.types.is_struct(column.type):
            return StructType(*parts)
        if pa.types.is_map(column.type):
            key, value = parts
            return MapType(
                key_id=key.field_id,
                key_type=key.field_type,
                value_id=value.field_id,
                value_type=value.field_type,
                value_required=False,
            )
        return ListType(element_id=parts[0].field_id, element=parts[0].field_type, element_required=False)


def _sort_of(kind: Any) -> str:
    if pa.types.is_struct(kind):
        return "StructType"
    return "MapType" if pa.types.is_map(kind) else "ListType"


def _primitive(kind: Any) -> IcebergType:
    from pyiceberg import types

    if pa.types.is_decimal(kind):
        return types.DecimalType(kind.precision, kind.scale)
    return {
        pa.bool_(): types.BooleanType(),
        pa.int32(): types.IntegerType(),
        pa.int64(): types.LongType(),
        pa.float32(): types.FloatType(),
        pa.float64(): types.DoubleType(),
        pa.string(): types.StringType(),
        pa.binary(): types.BinaryType(),
        pa.date32(): types.DateType(),
        pa.timestamp("us"): types.TimestampType(),
        pa.timestamp("us", "UTC"): types.TimestamptzType(),
    }[kind]
