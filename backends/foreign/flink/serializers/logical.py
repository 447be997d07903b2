"""SQL types: from Java object streams to Arrow types, and how wide each is in binary arrays.

==============================  ================================================================
SQL                             Arrow
==============================  ================================================================
CHAR, VARCHAR                   utf8
BINARY, VARBINARY               binary
BOOLEAN … BIGINT, FLOAT         bool, int8 … int64, float
DOUBLE, DECIMAL(p, s)           double, decimal128(p, s)
DATE, TIME                      date32, int32 (ms of the day)
TIMESTAMP(p), p up to 6         timestamp_us, with LOCAL TIME ZONE timestamp_us_utc
TIMESTAMP(7) to (9)             struct<timestamp, nanos: int32>, 0 … 999 ns beyond the µs
INTERVAL                        int32 months, int64 ms
ROW, structured types           struct
ARRAY, MAP, MULTISET            list, map, map to int32
NULL                            bool, always null
RAW                             binary, as the class's own serializer wrote it
==============================  ================================================================

Others (symbols, time zones in values …) have no Arrow type: a row that has one stays opaque.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from ...limits import Nodes
from .java_objects import JavaObject, Value, items

_PACKAGE: Final = "org.apache.flink.table.types.logical."
_NESTING_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class Logical:
    """One SQL type."""

    kind: str
    """``number``, ``bool``, ``text``, ``octets``, ``decimal``, ``time``, ``row``, ``list``,
    ``map``, ``raw`` or ``null``.
    """
    arrow: pa.DataType
    dtype: str = ""
    """For numbers: their little-endian numpy type."""
    precision: int = 0
    scale: int = 0
    children: tuple[Logical, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """How many bytes an element takes in an array; fields of rows always take 8."""
        return {"bool": 1, "number": int(self.dtype[-1:] or 8)}.get(self.kind, 8)


_SIMPLE: Final = {
    "CharType": Logical("text", pa.string()),
    "VarCharType": Logical("text", pa.string()),
    "BinaryType": Logical("octets", pa.binary()),
    "VarBinaryType": Logical("octets", pa.binary()),
    "BooleanType": Logical("bool", pa.bool_()),
    "TinyIntType": Logical("number", pa.int8(), "<i1"),
    "SmallIntType": Logical("number", pa.int16(), "<i2"),
    "IntType": Logical("number", pa.int32(), "<i4"),
    "BigIntType": Logical("number", pa.int64(), "<i8"),
    "FloatType": Logical("number", pa.float32(), "<f4"),
    "DoubleType": Logical("number", pa.float64(), "<f8"),
    "DateType": Logical("number", pa.date32(), "<i4"),
    "TimeType": Logical("number", pa.int32(), "<i4"),
    "YearMonthIntervalType": Logical("number", pa.int32(), "<i4"),
    "DayTimeIntervalType": Logical("number", pa.int64(), "<i8"),
    "NullType": Logical("null", pa.bool_()),
}

TEXT: Final = _SIMPLE["VarCharType"]


def decimal(precision: int, scale: int) -> Logical | None:
    """Return DECIMAL(p, s); None if there is no such type."""
    if not (1 <= precision <= 38 and 0 <= scale <= precision):
        return None
    return Logical("decimal", pa.decimal128(precision, scale), precision=precision, scale=scale)


def timestamp(precision: int, zone: str | None = None) -> Logical | None:
    """Return TIMESTAMP(p); None if there is no such type."""
    if not 0 <= precision <= 9:
        return None
    arrow = pa.timestamp("us", tz=zone)
    if precision > 6:
        arrow = pa.struct([("timestamp", arrow), ("nanos", pa.int32())])
    return Logical("time", arrow, precision=precision)


def row(names: list[str], children: list[Logical]) -> Logical:
    """Return ROW; the format has no empty struct, so an empty row has ``present``."""
    fields = [pa.field(name, child.arrow) for name, child in zip(names, children, strict=True)]
    arrow = pa.struct(fields or [("present", pa.bool_())])
    return Logical("row", arrow, children=tuple(children), names=tuple(names))


def logical_type(value: Value, nodes: Nodes) -> Logical | None:
    """Return the SQL type that a Java object describes; None for types that stay opaque, also for
    those with more ``nodes`` than there may be.
    """
    return _Types(nodes).of(value, 0)


class _Types:
    """Makes types from objects. An object that is there twice is one type, and counted twice."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.known: dict[int, tuple[Logical | None, int]] = {}

    def of(self, value: Value, depth: int) -> Logical | None:
        if depth > _NESTING_MAX or not isinstance(value, JavaObject) or not value.class_name.startswith(_PACKAGE):
            return None
        if id(value) in self.known:
            found, size = self.known[id(value)]
            return found if self.nodes.take(size) else None
        before = self.nodes.taken
        found = self.made(value, depth) if self.nodes.take() else None
        self.known[id(value)] = found, self.nodes.taken - before
        return found

    def made(self, value: JavaObject, depth: int) -> Logical | None:
        name, fields = value.class_name.removeprefix(_PACKAGE), value.fields
        if name in _SIMPLE:
            return _SIMPLE[name]
        numbers = {key: found for key, found in fields.items() if isinstance(found, int)}
        if name == "DecimalType":
            return decimal(numbers.get("precision", 0), numbers.get("scale", -1))
        if name in ("TimestampType", "LocalZonedTimestampType"):
            return timestamp(numbers.get("precision", -1), "UTC" if name.startswith("Local") else None)
        if name == "DistinctType":
            return self.of(fields.get("sourceType"), depth + 1)
        if name == "ArrayType":
            return list_of(self.of(fields.get("elementType"), depth + 1))
        if name == "MapType":
            key, item = (self.of(fields.get(part), depth + 1) for part in ("keyType", "valueType"))
            return map_of(key, item)
        if name == "MultisetType":
            return map_of(self.of(fields.get("elementType"), depth + 1), _SIMPLE["IntType"])
        if name in ("RawType", "TypeInformationRawType"):
            return Logical("raw", pa.binary(), names=(raw_class(fields),))
        if name in ("RowType", "StructuredType"):
            return self.row(items(fields.get("fields" if name == "RowType" else "attributes")), depth)
        return None

    def row(self, found: list[Value] | None, depth: int) -> Logical | None:
        if found is None or not all(isinstance(item, JavaObject) for item in found):
            return None
        names = [item.fields.get("name") for item in found]
        if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            return None
        children = [self.of(item.fields.get("type"), depth + 1) for item in found]
        known = [child for child in children if child is not None]
        return row(names, known) if len(known) == len(children) else None


def list_of(element: Logical | None) -> Logical | None:
    """Return ARRAY; None if the element is None."""
    return element and Logical("list", pa.list_(pa.field("element", element.arrow)), children=(element,))


def map_of(key: Logical | None, item: Logical | None) -> Logical | None:
    """Return MAP; None if the key or the item is None."""
    if key is None or item is None:
        return None
    arrow = pa.map_(pa.field("key", key.arrow, nullable=False), item.arrow)
    return Logical("map", arrow, children=(key, item))


def raw_class(fields: dict[str, Value]) -> str:
    """Return the class of values of a RAW type, for messages."""
    found = fields.get("clazz") or fields.get("typeInfo")
    if isinstance(found, JavaObject):
        name = found.fields.get("name")
        return name if isinstance(name, str) else found.class_name
    return "a raw value of SQL"


def raw_within(kind: Logical) -> tuple[str, ...]:
    """Return the classes of the RAW values within a type."""
    if kind.kind == "raw":
        return kind.names
    return tuple(dict.fromkeys(name for child in kind.children for name in raw_within(child)))


def described(value: Value) -> str:
    """Return the name of the class that a stream holds, for messages."""
    return value.class_name if isinstance(value, JavaObject) else type(value).__name__
