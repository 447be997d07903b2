"""Avro records, read by their schema, as Flink's Avro serializer writes them.

This is not Avro's binary encoding: Flink 1.x and 2.x write numbers, indexes of unions and enums,
and lengths at their full width, big-endian. Only counts of arrays and maps have 7 bits per byte,
and a 0 ends the array or map.

============================  ==================================================================
Avro                          Arrow
============================  ==================================================================
boolean, int, long, float     bool, int32, int64, float
double, bytes, string         double, binary, utf8
fixed, enum                   binary, utf8
record                        struct
array, map                    list, map<utf8, …>
union of null and one         that one, nullable
other unions                  struct with a field for each branch, named by its type; exactly
                              one is not null; the struct is null if the union's value is null
decimal, date                 decimal128, date32
timestamp-millis, -micros     timestamp_us_utc, with ``local-`` timestamp_us
============================  ==================================================================

Recursive schemas have no Arrow type: their values stay opaque.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ..byte_strings import Positions
from ..cursor import DEPTH_MAX
from ..framing import json_value
from ..limits import Nodes
from . import scalars
from .binary_rows import long_decimals, text_or_octets
from .compound import Enumeration, Sequential, element_lanes, list_offsets, read_some, skip_some
from .lanes import Lanes, Opaque, Present, Serializer, struct
from .scalars import lengths, microseconds
from .sql_types import TEXT, Logical, decimal

_PLAIN: Final[Mapping[str, Serializer]] = {
    "boolean": scalars.BOOLEAN,
    "int": scalars.INTEGER,
    "long": scalars.LONG,
    "float": scalars.FLOAT,
    "double": scalars.DOUBLE,
}


class Unsuitable(Exception):
    """A schema that has no Arrow type; the message says why."""


def avro_serializer(schema: str, class_name: str, nodes: Nodes) -> Serializer:
    """Return the serializer of a schema in JSON; opaque bytes if it has no Arrow type, or more
    ``nodes`` than there may be.
    """
    try:
        return _Schemas(nodes).serializer(json_value(schema), "", 0)
    except (ValueError, Unsuitable):
        return Opaque(class_name)


class _Octets(Serializer):
    """i32 length, then bytes or UTF-8; if the size is fixed, only the bytes."""

    def __init__(self, kind: Logical, size: int | None = None) -> None:
        self.kind = kind
        self.size = size
        self.arrow_type = kind.arrow
        self.fixed_length = size
        self.least_length = 4 if size is None else size

    def read(self, lanes: Lanes) -> pa.Array:
        sizes = self._sizes(lanes)
        found = lanes.strings(sizes)
        if self.kind.kind == "decimal":
            return long_decimals(self.kind, found, lanes)
        return text_or_octets(self.kind, found, lanes.path)

    def skip(self, lanes: Lanes) -> None:
        lanes.skip(self._sizes(lanes))

    def _sizes(self, lanes: Lanes) -> Positions:
        if self.size is not None:
            return np.full(len(lanes), self.size)
        return lanes.fixed(">i4").astype(np.int64)


class _Times(Serializer):
    """A number that is a date or a time."""

    def __init__(self, arrow_type: pa.DataType, *, millis: bool = False) -> None:
        self.arrow_type = arrow_type
        self.millis = millis
        self.fixed_length = self.least_length = 4 if pa.types.is_date32(arrow_type) else 8

    def read(self, lanes: Lanes) -> pa.Array:
        begin = lanes.position.copy()
        found = lanes.fixed(f">i{self.fixed_length}")
        if self.millis:
            return microseconds(found, np.ones(len(found), np.bool_), self.arrow_type, lanes.at(begin, lanes.end))
        return pa.array(found).cast(self.arrow_type)


class _Blocks(Serializer):
    """An array or, with ``key``, a map: a count unless it is 0, the items, a 0."""

    least_length = 1

    def __init__(self, item: Serializer, key: Serializer | None = None) -> None:
        self.item = item
        self.key = key
        if key is None:
            self.arrow_type = pa.list_(pa.field("element", item.arrow_type))
        else:
            self.arrow_type = pa.map_(pa.field("key", key.arrow_type, nullable=False), item.arrow_type)

    def read(self, lanes: Lanes) -> pa.Array:
        counts, items = self._items(lanes)
        offsets = list_offsets(counts)
        if self.key is None:
            return pa.ListArray.from_arrays(offsets, self.item.read(items), type=self.arrow_type)
        keys = self.key.read(items)
        return pa.MapArray.from_arrays(offsets, keys, self.item.read(items), type=self.arrow_type)

    def skip(self, lanes: Lanes) -> None:
        self._items(lanes)

    def _items(self, lanes: Lanes) -> tuple[Positions, Lanes]:
        counts, _ = lengths(lanes, False)
        least = self.item.least_length + (4 if self.key else 0)
        wrong = counts * least > lanes.left
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            lanes.damaged(lane, f"{int(counts[lane])} items should follow in {int(lanes.left[lane])} bytes")
        width = self.item.fixed_length if self.key is None else None
        items = element_lanes(lanes, counts, self._skip, width)
        some = np.flatnonzero(counts)
        closing = lanes.take(some)
        end = closing.fixed("u1")
        lanes.put(some, closing)
        if end.any():
            lanes.damaged(int(some[np.flatnonzero(end)[0]]), "it should end here, and a block follows")
        return counts, items

    def _skip(self, lanes: Lanes) -> None:
        if self.key is not None:
            self.key.skip(lanes)
        self.item.skip(lanes)


class _Union(Serializer):
    """i32 number of the branch, then its value; no bytes for null."""

    least_length = 4

    def __init__(self, branches: Sequence[tuple[str, Serializer | None]]) -> None:
        self.branches = tuple(branches)
        self.known = [(name, branch) for name, branch in branches if branch is not None]
        self.single = len(self.known) == 1
        self.arrow_type = (
            self.known[0][1].arrow_type
            if self.single
            else pa.struct([pa.field(name, branch.arrow_type) for name, branch in self.known])
        )

    def read(self, lanes: Lanes) -> pa.Array:
        arrays, present = [], np.zeros(len(lanes), np.bool_)
        for branch, chosen in self._branches(lanes):
            if branch is not None:
                arrays.append(read_some(branch, lanes, chosen))
                present |= chosen
        return arrays[0] if self.single else struct(arrays, self.arrow_type, present)

    def skip(self, lanes: Lanes) -> None:
        for branch, chosen in self._branches(lanes):
            if branch is not None:
                skip_some(branch, lanes, chosen)

    def _branches(self, lanes: Lanes) -> list[tuple[Serializer | None, Present]]:
        index = lanes.fixed(">i4")
        wrong = (index < 0) | (index >= len(self.branches))
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            lanes.position[lane] -= 4
            lanes.damaged(lane, f"it is branch {int(index[lane])} of a union of {len(self.branches)}")
        return [(branch, index == place) for place, (_, branch) in enumerate(self.branches)]


class _Schemas:
    """Makes serializers from a schema; a named type is known once it has been defined."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.named: dict[str, tuple[Serializer, int, int] | None] = {}
        """With how many nodes each has, and how deep it is nested."""
        self.deepest = 0

    def serializer(self, schema: Any, space: str, depth: int) -> Serializer:
        """Return the serializer of a schema; ``space`` is the namespace around it."""
        self.take(1, depth)
        if isinstance(schema, str):
            return self.by_name(schema, space, depth)
        if isinstance(schema, list):
            return self.union(schema, space, depth)
        if not isinstance(schema, dict):
            raise Unsuitable(f"{schema!r} is no schema")
        kind = schema.get("type")
        if not isinstance(kind, str):
            return self.serializer(kind, space, depth + 1)
        logical = self.logical(schema, kind)
        if kind in ("record", "error", "enum", "fixed"):
            return self.make(schema, kind, logical, space, depth)
        if logical is not None:
            return logical
        if kind == "array":
            return _Blocks(self.item(schema.get("items"), space, depth))
        if kind == "map":
            return _Blocks(self.item(schema.get("values"), space, depth), _Octets(TEXT))
        return self.by_name(kind, space, depth)

    def take(self, nodes: int, depth: int) -> None:
        """Count nodes, of which the deepest is at ``depth``."""
        self.deepest = max(self.deepest, depth)
        if depth > DEPTH_MAX or not self.nodes.take(nodes):
            raise Unsuitable(f"nested deeper than {DEPTH_MAX}, or of more than {self.nodes.limit} fields")

    def item(self, schema: Any, space: str, depth: int) -> Serializer:
        found = self.serializer(schema, space, depth + 1)
        if not found.least_length:
            raise Unsuitable("items without bytes")
        return found

    def by_name(self, name: str, space: str, depth: int) -> Serializer:
        if name in _PLAIN:
            return _PLAIN[name]
        if name in ("string", "bytes"):
            return _Octets(TEXT if name == "string" else Logical("octets", pa.binary()))
        for known in (name, f"{space}.{name}"):
            found = self.named.get(known)
            if found is not None:
                self.take(found[1], depth + found[2])
                return found[0]
        raise Unsuitable(f"{name} is no type, or holds itself")

    def logical(self, schema: Mapping[str, Any], kind: str) -> Serializer | None:
        """Return the serializer of a logical type that is known."""
        name = schema.get("logicalType")
        if name == "decimal" and kind in ("bytes", "fixed"):
            precision, scale, size = schema.get("precision"), schema.get("scale", 0), schema.get("size")
            if isinstance(precision, int) and isinstance(scale, int):
                found = decimal(precision, scale)
                fits = kind == "bytes" or (isinstance(size, int) and 1 <= size <= 16)
                return _Octets(found, size if kind == "fixed" else None) if found and fits else None
        if name == "date" and kind == "int":
            return _Times(pa.date32())
        if kind == "long" and isinstance(name, str) and name.removeprefix("local-").startswith("timestamp-"):
            zone = None if name.startswith("local-") else "UTC"
            if name.endswith(("-millis", "-micros")):
                return _Times(pa.timestamp("us", tz=zone), millis=name.endswith("-millis"))
        return None

    def make(
        self, schema: Mapping[str, Any], kind: str, logical: Serializer | None, space: str, depth: int
    ) -> Serializer:
        """Return the serializer of a type with a name, and remember it."""
        name = str(schema.get("name"))
        space = str(schema.get("namespace", name.rpartition(".")[0] or space))
        full = name if "." in name or not space else f"{space}.{name}"
        self.named[full] = None
        before, above, self.deepest = self.nodes.taken, self.deepest, depth
        found = logical or self.made(schema, kind, full, space, depth)
        self.named[full] = found, self.nodes.taken - before, self.deepest - depth
        self.deepest = max(self.deepest, above)
        return found

    def made(self, schema: Mapping[str, Any], kind: str, full: str, space: str, depth: int) -> Serializer:
        if kind == "enum":
            symbols = schema.get("symbols")
            if not isinstance(symbols, list):
                raise Unsuitable(f"enum {full} without symbols")
            return Enumeration(full, [str(name) for name in symbols])
        if kind == "fixed":
            size = schema.get("size")
            if not isinstance(size, int) or size < 0:
                raise Unsuitable(f"fixed of {size!r} bytes")
            return _Octets(Logical("octets", pa.binary()), size)
        fields = schema.get("fields")
        if not isinstance(fields, list):
            raise Unsuitable(f"record {full} without fields")
        children = [self.field(item, space, depth) for item in fields]
        names = [str(item["name"]) for item in fields]
        if len(set(names)) != len(names):
            raise Unsuitable(f"record {full} with fields of one name")
        return Sequential(names, children)

    def field(self, item: Any, space: str, depth: int) -> Serializer:
        if not isinstance(item, dict) or "name" not in item:
            raise Unsuitable("a field without a name")
        if item.get("type") == "null":
            raise Unsuitable("a field of type null")
        return self.serializer(item.get("type"), space, depth + 1)

    def union(self, schema: list[Any], space: str, depth: int) -> Serializer:
        branches: list[tuple[str, Serializer | None]] = []
        for branch in schema:
            if not isinstance(branch, str | dict):
                raise Unsuitable(f"{branch!r} in a union")
            name = branch if isinstance(branch, str) else str(branch.get("name", branch.get("type")))
            found = None if name == "null" else self.serializer(branch, space, depth + 1)
            branches.append((name.rpartition(".")[2], found))
        names = [name for name, found in branches if found is not None]
        if not names or len(set(names)) != len(names):
            raise Unsuitable(f"a union of {names}")
        return _Union(branches)
