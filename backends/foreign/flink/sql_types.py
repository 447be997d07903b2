"""SQL types: from Java object streams to Arrow types, and how wide each is in binary arrays.

A snapshot holds a type as a Java object. It is read as data: classes are names, objects are fields,
no class is loaded. Source of the rules: Java Object Serialization Specification, section 6
(protocol version 2).

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

import struct
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa

from stateformat.errors import ErrorKind, UnsupportedFormat

from ..cursor import Cursor
from ..limits import Nodes

MAGIC: Final = 0xACED
_DEPTH_MAX: Final = 96
_NULL, _REFERENCE, _CLASS_DESC, _OBJECT, _STRING, _ARRAY, _CLASS, _BLOCK, _END = range(0x70, 0x79)
_RESET, _LONG_BLOCK, _EXCEPTION, _LONG_STRING, _PROXY, _ENUM = range(0x79, 0x7F)
_FIRST_HANDLE: Final = 0x7E0000
_WRITES, _SERIALIZABLE, _EXTERNAL, _BLOCKS = 1, 2, 4, 8
_FORMS: Final = {"B": "b", "C": "H", "D": "d", "F": "f", "I": "i", "J": "q", "S": "h", "Z": "?"}

Value: TypeAlias = Any
"""None, a number, a bool, text, bytes (block data), :class:`JavaObject`, or a list (an array)."""


@dataclass(slots=True)
class _Class:
    name: str
    flags: int = 0
    fields: list[tuple[str, str]] = field(default_factory=list)
    parent: _Class | None = None


@dataclass(slots=True)
class JavaObject:
    """An object, an enum constant or a class, by the name of its class."""

    class_name: str
    fields: dict[str, Value] = field(default_factory=dict)
    """Fields of the class and its parents; for an enum constant: ``name``."""
    written: list[Value] = field(default_factory=list)
    """What the class has written in addition to its fields."""


def read_object(at: Cursor) -> Value:
    """Read a stream of one object.

    Raises ``DamagedCheckpoint``, and ``UnsupportedFormat`` for parts of the protocol that no type
    description uses.
    """
    if at.u16() != MAGIC or at.u16() != 5:
        at.position = max(at.position - 4, 0)
        at.damaged("a Java object stream should begin with AC ED 00 05")
    return _Stream(at).content(0)


class _Stream:
    """One stream. A handle is the number of something that was read before."""

    def __init__(self, at: Cursor) -> None:
        self.at = at
        self.handles: list[Any] = []

    def content(self, depth: int) -> Value:
        at = self.at
        at.deeper("Java objects", depth, _DEPTH_MAX)
        code = at.u8()
        if code == _NULL:
            return None
        if code == _REFERENCE:
            return self.reference()
        if code == _OBJECT:
            return self.object(depth)
        if code in (_STRING, _LONG_STRING):
            return self.string(code)
        if code == _ARRAY:
            return self.array(depth)
        if code == _ENUM:
            found = JavaObject(self.class_desc(depth).name)
            self.handles.append(found)
            found.fields["name"] = self.content(depth + 1)
            return found
        if code == _CLASS:
            found = JavaObject("java.lang.Class", {"name": self.class_desc(depth).name})
            self.handles.append(found)
            return found
        if code == _CLASS_DESC:
            at.position -= 1
            return JavaObject("java.io.ObjectStreamClass", {"name": self.class_desc(depth).name})
        if code in (_BLOCK, _LONG_BLOCK):
            return bytes(at.take(at.u8() if code == _BLOCK else at.i32()))
        raise self.unknown(code)

    def unknown(self, code: int) -> UnsupportedFormat:
        return UnsupportedFormat(
            f"{self.at.path}: a Java object stream has the code {code:#x} before byte {self.at.position}, which no "
            "description of a type has: the file is damaged, or the type is not one of Flink's own",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            path=self.at.path,
        )

    def reference(self) -> Any:
        number = self.at.i32() - _FIRST_HANDLE
        if not 0 <= number < len(self.handles):
            self.at.damaged(f"a Java object stream refers to object {number} of {len(self.handles)}")
        return self.handles[number]

    def string(self, code: int) -> str:
        at = self.at
        if code == _STRING:
            found = at.utf()
        else:
            size = at.i64()
            found = at.text(at.fitting(size, 1, "bytes"))
        self.handles.append(found)
        return found

    def class_desc(self, depth: int) -> _Class:
        """Read the description of a class; there must be one."""
        found = self.class_or_none(depth)
        if found is None:
            self.at.damaged("an object has no class")
        return found

    def class_or_none(self, depth: int) -> _Class | None:
        at = self.at
        at.deeper("classes", depth, _DEPTH_MAX)
        code = at.u8()
        if code == _NULL:
            return None
        if code == _REFERENCE:
            found = self.reference()
            if not isinstance(found, _Class):
                at.damaged("an object's class is no class")
            return found
        if code != _CLASS_DESC:
            raise self.unknown(code)
        made = _Class(at.utf())
        at.take(8)
        self.handles.append(made)
        made.flags = at.u8()
        for _ in range(at.fitting(at.u16(), 3, "fields")):
            kind, name = chr(at.u8()), at.utf()
            if kind in "[L":
                self.content(depth + 1)
            elif kind not in _FORMS:
                at.damaged(f"field {name!r} has type {kind!r}")
            made.fields.append((name, kind))
        self.until_end(depth)
        made.parent = self.class_or_none(depth + 1)
        return made

    def until_end(self, depth: int) -> list[Value]:
        """Read what a class has written, up to its end mark."""
        found: list[Value] = []
        while self.at.u8() != _END:
            self.at.position -= 1
            found.append(self.content(depth + 1))
        return found

    def object(self, depth: int) -> JavaObject:
        made = self.class_desc(depth)
        found = JavaObject(made.name)
        self.handles.append(found)
        line: list[_Class] = []
        parent: _Class | None = made
        while parent is not None:
            line.append(parent)
            self.at.deeper("parents of a class", len(line), _DEPTH_MAX)
            parent = parent.parent
        for each in reversed(line):
            if each.flags & _EXTERNAL:
                if not each.flags & _BLOCKS:
                    raise self.unknown(each.flags)
                found.written += self.until_end(depth)
            elif each.flags & _SERIALIZABLE:
                for name, kind in each.fields:
                    found.fields[name] = self.value(kind, depth)
                if each.flags & _WRITES:
                    found.written += self.until_end(depth)
        return found

    def value(self, kind: str, depth: int) -> Value:
        if kind in "[L":
            return self.content(depth + 1)
        form = ">" + _FORMS[kind]
        return struct.unpack(form, self.at.take(struct.calcsize(form)))[0]

    def array(self, depth: int) -> list[Value]:
        kind = self.class_desc(depth).name[1:2]
        if kind not in _FORMS and kind not in ("[", "L"):
            self.at.damaged(f"an array of {kind!r}")
        found: list[Value] = []
        self.handles.append(found)
        least = 1 if kind in "[L" else struct.calcsize(">" + _FORMS[kind])
        count = self.at.count(least, "items of an array")
        found.extend(self.value(kind, depth) for _ in range(count))
        return found


def items(value: Value, depth: int = 0) -> list[Value] | None:
    """Return the items of a list of Java's collections; None if its class is not known."""
    # A damaged stream may have lists that contain themselves.
    if depth > 4:
        return None
    if isinstance(value, list):
        return value
    if not isinstance(value, JavaObject):
        return None
    name = value.class_name
    if name in ("java.util.ArrayList", "java.util.LinkedList", "java.util.CollSer"):
        # Block data (a capacity or a count) precedes the objects.
        return [item for item in value.written if not isinstance(item, bytes)]
    if name == "java.util.Arrays$ArrayList":
        return items(value.fields.get("a"), depth + 1)
    if name == "java.util.Collections$SingletonList":
        return [value.fields.get("element")]
    if name == "java.util.Collections$EmptyList":
        return []
    if name.startswith("java.util.Collections$Unmodifiable"):
        return items(value.fields.get("list"), depth + 1)
    return None


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
