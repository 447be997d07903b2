"""The columns of a store: Spark's schema files, its types, and the Arrow types for them.

A schema file is of version 1, 2 (one key and one value row) or 3 (one of each per column family).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from stateformat.errors import DamagedCheckpoint, ErrorKind, UnsupportedFormat
from stateformat.schema import MAX_NESTING

from ..framing import damaged, json_value, modified_utf8
from ..limits import NODES, Nodes, too_large

_PLAIN: Final[Mapping[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    # Kept as stored: months; microseconds; nanoseconds; Spark's own bytes.
    "year_month": pa.int32(),
    "day_time": pa.int64(),
    "time": pa.int64(),
    "variant": pa.binary(),
    "interval": pa.struct([("months", pa.int32()), ("days", pa.int32()), ("microseconds", pa.int64())]),
    "void": pa.null(),
}
_DECIMAL: Final = re.compile(r"decimal\((\d{1,2}),\s*(\d{1,2})\)")
_YEAR_MONTH: Final = re.compile(r"interval (year|month)( to month)?")
_DAY_TIME: Final = re.compile(r"interval (day|hour|minute|second)( to (hour|minute|second))?")
_TEXT: Final = re.compile(r"(char|varchar)\(\d+\)")
_TIME: Final = re.compile(r"time\(\d\)")
_COLLATED: Final = re.compile(r"string collate (.+)")
_MAX_DEPTH: Final = 2 * MAX_NESTING


@dataclass(frozen=True)
class SparkType:
    """A type of Spark, and how its values are stored in a row."""

    kind: str
    """A name of the plain types, ``decimal``, ``struct``, ``array`` or ``map``."""
    arrow: pa.DataType
    """The Arrow type of its values: timestamps are UTC µs; ``null`` for ``void``."""
    children: tuple[SparkField, ...] = ()
    """For a struct its fields; for an array ``element``; for a map ``key`` and ``value``."""
    collation: str = ""
    """For strings that do not compare by bytes."""


@dataclass(frozen=True)
class SparkField:
    """A column of a row. Names may repeat and be empty."""

    name: str
    type: SparkType
    nullable: bool = True
    """Whether the query may have nulls there."""


@dataclass(frozen=True)
class StoreSchema:
    """The rows of a store, or of one of its column families."""

    key: tuple[SparkField, ...]
    value: tuple[SparkField, ...]
    family: str = "default"
    key_encoder: Mapping[str, Any] = field(default_factory=dict)
    """Version 3: Spark's ``keyStateEncoderType`` and its numbers."""
    user_key: tuple[SparkField, ...] = ()
    """Version 3: the columns of a map state's own key."""

    @property
    def known(self) -> bool:
        """Whether a file says which columns there are; otherwise a row is one value, as bytes."""
        return [item.type.kind for item in self.key] != ["row"]


UNKNOWN_SCHEMA: Final = StoreSchema(
    (SparkField("key", SparkType("row", pa.binary())),), (SparkField("value", SparkType("row", pa.binary())),)
)
"""Of a store whose columns no file names."""
SCHEMA_ADVICE: Final = "start the query once on Spark 3.1 or later: its first batch writes the file"


def parse_schema_file(data: Any, path: str) -> list[StoreSchema]:
    """Return what a schema file declares: one store, or its column families.

    Raises ``DamagedCheckpoint``, and ``UnsupportedFormat`` for another version.
    """
    reader = _Utf(memoryview(data).cast("B"), path)
    version, types = reader.text(), _Types(path)
    if version == "v1":
        found = [StoreSchema(types.row(reader.text()), types.row(reader.text()))]
    elif version == "v2":
        found = [StoreSchema(types.row(reader.chunks()), types.row(reader.chunks()))]
    elif version == "v3":
        # A family takes at least the lengths of its five texts.
        found = [_family(reader, types) for _ in range(reader.count(22))]
    else:
        raise UnsupportedFormat(
            f"{path}: the schema file is of version {version[:20]!r}; v1, v2 and v3 are known. Use a newer stateformat",
            path=path,
        )
    reader.end()
    return found


def _family(reader: _Utf, types: _Types) -> StoreSchema:
    name = reader.text()
    # Each schema is preceded by its version number, which encodings with schemas need.
    reader.take(2)
    key = types.row(reader.chunks())
    reader.take(2)
    value = types.row(reader.chunks())
    encoder = parse_json(reader.chunks(), reader.path)
    user = reader.chunks()
    return StoreSchema(key, value, name, encoder, types.row(user) if user.strip(" {}") else ())


class _Utf:
    """Reads what Java's ``DataOutputStream`` wrote."""

    def __init__(self, view: memoryview, path: str) -> None:
        self.view, self.path, self.at = view, path, 0

    def take(self, size: int) -> memoryview:
        if size > len(self.view) - self.at:
            raise self.torn(f"{size} bytes are declared at byte {self.at}, {len(self.view) - self.at} are left")
        self.at += size
        return self.view[self.at - size : self.at]

    def text(self) -> str:
        (size,) = struct.unpack(">H", self.take(2))
        return modified_utf8(self.take(size), self.path)

    def count(self, least: int) -> int:
        (count,) = struct.unpack(">i", self.take(4))
        if not 0 <= count * least <= len(self.view) - self.at:
            raise self.torn(f"a count of {count} at byte {self.at - 4} does not fit what is left")
        return int(count)

    def chunks(self) -> str:
        return "".join(self.text() for _ in range(self.count(2)))

    def end(self) -> None:
        if self.at != len(self.view):
            raise self.torn(f"{len(self.view) - self.at} bytes follow its end")

    def torn(self, what: str) -> DamagedCheckpoint:
        return damaged(self.path, what, kind=ErrorKind.DAMAGED_MANIFEST)


def parse_json(text: str, path: str) -> dict[str, Any]:
    """Return the JSON object in a text of Spark's logs. Raises ``DamagedCheckpoint`` if it is not
    one.
    """
    try:
        found = json_value(text)
    except ValueError as error:
        raise damaged(path, f"it holds no JSON where it should ({error})", kind=ErrorKind.DAMAGED_MANIFEST) from error
    if not isinstance(found, dict):
        raise damaged(path, f"it holds {text[:40]!r} where a JSON object should be", kind=ErrorKind.DAMAGED_MANIFEST)
    return found


def parse_struct(text: str, path: str) -> tuple[SparkField, ...]:
    """Return the fields of a ``StructType`` in Spark's JSON."""
    return _Types(path).row(text)


class _Types:
    """The types that one file declares, no more of them than ``limits.NODES``."""

    def __init__(self, path: str) -> None:
        self.path, self.nodes = path, Nodes(NODES)

    def row(self, text: str) -> tuple[SparkField, ...]:
        found = parse_json(text, self.path)
        if found.get("type") != "struct":
            raise _no_type(found, self.path)
        return self.fields(found, 0)

    def fields(self, found: Mapping[str, Any], depth: int) -> tuple[SparkField, ...]:
        items = found.get("fields")
        if not isinstance(items, list):
            raise _no_type(found, self.path)
        fields = []
        for item in items:
            if not isinstance(item, dict) or not isinstance(item.get("name"), str):
                raise _no_type(item, self.path)
            kind = self.type(item.get("type"), depth, _collation(item))
            fields.append(SparkField(item["name"], kind, item.get("nullable") is not False))
        return tuple(fields)

    def type(self, found: Any, depth: int, collation: str = "") -> SparkType:
        if not self.nodes.take():
            raise too_large(self.path, "its types", self.nodes.taken, NODES, "columns and fields")
        if depth > _MAX_DEPTH:
            raise UnsupportedFormat(
                f"{self.path}: a column is nested deeper than {_MAX_DEPTH}; such state cannot be read",
                kind=ErrorKind.UNSUPPORTED_TYPE,
                path=self.path,
            )
        if isinstance(found, str):
            return _plain(found, self.path, collation)
        kind = found.get("type") if isinstance(found, dict) else None
        if kind == "udt":
            return self.type(found.get("sqlType"), depth + 1)
        if kind == "struct":
            fields = self.fields(found, depth + 1)
            return SparkType("struct", pa.struct(arrow_fields(fields)), fields, collation)
        if kind == "array":
            element = SparkField("element", self.type(found.get("elementType"), depth + 1))
            return SparkType("array", pa.list_(pa.field("element", element.type.arrow)), (element,), collation)
        if kind == "map":
            key = SparkField("key", self.type(found.get("keyType"), depth + 1))
            value = SparkField("value", self.type(found.get("valueType"), depth + 1))
            if not has_values(key.type):
                raise UnsupportedFormat(
                    f"{self.path}: the keys of a map have no values (type {key.type.kind}); such state cannot be read",
                    kind=ErrorKind.UNSUPPORTED_TYPE,
                    path=self.path,
                )
            arrow = pa.map_(pa.field("key", key.type.arrow, nullable=False), pa.field("value", value.type.arrow))
            return SparkType("map", arrow, (key, value), collation)
        raise _no_type(found, self.path)


def _collation(item: Mapping[str, Any]) -> str:
    # Spark 4 writes the collations of a column, by the path within it, into its metadata.
    metadata = item.get("metadata")
    found = metadata.get("__COLLATIONS") if isinstance(metadata, dict) else None
    return ", ".join(map(str, found.values())) if isinstance(found, dict) else ""


def _plain(name: str, path: str, collation: str) -> SparkType:
    if name in _PLAIN:
        return SparkType(name, _PLAIN[name], collation=collation)
    if match := _DECIMAL.fullmatch(name):
        precision, scale = int(match[1]), int(match[2])
        if 1 <= precision <= 38 and scale <= precision:
            return SparkType("decimal", pa.decimal128(precision, scale))
    if match := _COLLATED.fullmatch(name):
        return SparkType("string", pa.string(), collation=match[1])
    for pattern, kind in ((_YEAR_MONTH, "year_month"), (_DAY_TIME, "day_time"), (_TEXT, "string"), (_TIME, "time")):
        if pattern.fullmatch(name):
            return SparkType(kind, _PLAIN[kind])
    raise UnsupportedFormat(
        f"{path}: a column is of type {name[:60]!r}, which is not known; such state cannot be read",
        kind=ErrorKind.UNSUPPORTED_TYPE,
        path=path,
    )


def _no_type(found: Any, path: str) -> DamagedCheckpoint:
    return damaged(path, f"it holds {str(found)[:60]!r} where a type should be", kind=ErrorKind.DAMAGED_MANIFEST)


def arrow_fields(fields: Sequence[SparkField]) -> list[pa.Field]:
    """Return Arrow fields of a row: ``void`` left out, names distinct (``a``, ``a_2``)."""
    kept = [item for item in fields if has_values(item.type)]
    return [pa.field(name, item.type.arrow) for name, item in zip(distinct(kept), kept, strict=True)]


def has_values(kind: SparkType) -> bool:
    """Return whether a column can have values: not if it is ``void`` or a struct without fields."""
    return kind.kind != "void" and not (kind.kind == "struct" and not any(has_values(c.type) for c in kind.children))


def distinct(fields: Sequence[SparkField], taken: Sequence[str] = ()) -> list[str]:
    """Return a name for each field: its own, or with ``_2``, ``_3`` … if that is taken."""
    used, names = set(taken), []
    numbers: dict[str, int] = {}
    for item in fields:
        name, number = item.name, numbers.get(item.name, 1)
        while name in used:
            number += 1
            name = f"{item.name}_{number}"
        numbers[item.name] = number
        used.add(name)
        names.append(name)
    return names
