"""Flink SQL's types as Java object streams and its values as binary rows, written by hand.

A :class:`Sql` has the stream of its logical type, a strategy of values, how a value lies in a row
or array, and what Arrow says of it. Nothing here uses the product.
"""

from __future__ import annotations

import datetime as dt
import decimal
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as some

from .flink_written import EPOCH, TEXTS, Kind, blob, nested, pack, utf, versioned, whole

TYPES = "org.apache.flink.table.types.logical."
RUNTIME = "org.apache.flink.table.runtime.typeutils."


def class_desc(name: str, fields: Sequence[tuple[str, str]], parent: bytes = b"\x70", flags: int = 2) -> bytes:
    """A class: fields are names and Java signatures, primitive ones first."""
    written = b"\x72" + utf(name) + bytes(8) + bytes([flags]) + pack("H", len(fields))
    for field, kind in fields:
        written += kind[:1].encode() + utf(field) + (b"\x74" + utf(kind) if kind[0] in "L[" else b"")
    return written + b"\x78" + parent


ENUM = class_desc("java.lang.Enum", [], flags=0x12)
LOGICAL = class_desc(
    TYPES + "LogicalType", [("isNullable", "Z"), ("typeRoot", f"L{TYPES.replace('.', '/')}LogicalTypeRoot;")]
)


def typed(name: str, fields: Sequence[tuple[str, str, bytes]] = (), root: str = "ROOT") -> bytes:
    """An object of a logical type: what its parent has, then its own fields."""
    made = class_desc(TYPES + name, [(field, kind) for field, kind, _ in fields], LOGICAL)
    enum = b"\x7e" + class_desc(TYPES + "LogicalTypeRoot", [], ENUM, 0x12) + b"\x74" + utf(root)
    return b"\x73" + made + b"\1" + enum + b"".join(value for _, _, value in fields)


def array_list(items: Sequence[bytes]) -> bytes:
    made = class_desc("java.util.ArrayList", [("size", "I")], flags=3)
    size = pack("i", len(items))
    return b"\x73" + made + size + b"\x77\4" + size + b"".join(items) + b"\x78"


def unmodifiable(items: bytes) -> bytes:
    parent = class_desc("java.util.Collections$UnmodifiableCollection", [("c", "Ljava/util/Collection;")])
    made = class_desc("java.util.Collections$UnmodifiableList", [("list", "Ljava/util/List;")], parent)
    # Both fields hold the one list; the second time by a reference, here written again.
    return b"\x73" + made + items + items


def stream(content: bytes) -> bytes:
    return bytes.fromhex("aced0005") + content


@dataclass(frozen=True)
class Sql:
    """One SQL type: ``slot`` writes a value of ``width`` bytes, and may write behind them."""

    name: str
    type: bytes
    values: some.SearchStrategy[Any]
    slot: Callable[[Any, Region], bytes]
    read: Callable[[Any], Any] = lambda value: value
    width: int = 8


class Region:
    """The variable part of a row or array: values are put behind its fixed part."""

    def __init__(self, fixed: int) -> None:
        self.fixed = fixed
        self.data = bytearray()

    def put(self, data: bytes) -> int:
        """Write, and return the offset from the begin of the row or array."""
        at = self.fixed + len(self.data)
        self.data += data + bytes(-len(data) % 8)
        return at

    def word(self, data: bytes) -> bytes:
        return struct.pack("<II", len(data), self.put(data))


def row(kinds: Sequence[Sql], values: Sequence[Any], kind: int = 0) -> bytes:
    head = (len(kinds) + 8 + 63) // 64 * 8
    region = Region(head + 8 * len(kinds))
    fixed = bytearray(head)
    fixed[0] = kind
    for i, (each, value) in enumerate(zip(kinds, values, strict=True)):
        if value is None:
            fixed[(i + 8) // 8] |= 1 << i % 8
            fixed += bytes(8)
        else:
            fixed += each.slot(value, region).ljust(8, b"\0")
    return bytes(fixed + region.data)


def array(kind: Sql, values: Sequence[Any]) -> bytes:
    head = 4 + (len(values) + 31) // 32 * 4
    size = head + kind.width * len(values)
    region = Region(size + -size % 8)
    fixed = bytearray(struct.pack("<i", len(values)).ljust(head, b"\0"))
    for i, value in enumerate(values):
        fixed[4 + i // 8] |= (value is None) << i % 8
        fixed += bytes(kind.width) if value is None else kind.slot(value, region)[: kind.width]
    return bytes(fixed.ljust(region.fixed, b"\0") + region.data)


def mapping(key: Sql, value: Sql, pairs: dict[Any, Any]) -> bytes:
    keys = array(key, list(pairs))
    return struct.pack("<i", len(keys)) + keys + array(value, list(pairs.values()))


def short(data: bytes, region: Region) -> bytes:
    return data.ljust(7, b"\0") + bytes([0x80 | len(data)]) if len(data) <= 7 else region.word(data)


def plain(name: str, form: str, values: some.SearchStrategy[Any], read: Callable[[Any], Any] = lambda v: v) -> Sql:
    return Sql(name, typed(name), values, lambda v, _: struct.pack("<" + form, v), read, struct.calcsize(form))


def unscaled(precision: int) -> some.SearchStrategy[int]:
    return some.integers(-(10**precision) + 1, 10**precision - 1)


def decimals(precision: int, scale: int) -> Sql:
    def slot(value: int, region: Region) -> bytes:
        if precision <= 18:
            return struct.pack("<q", value)
        size = (value + (value < 0)).bit_length() // 8 + 1
        at = region.put(value.to_bytes(size, "big", signed=True).ljust(16, b"\0"))
        return struct.pack("<II", size, at)

    kind = typed("DecimalType", [("precision", "I", pack("i", precision)), ("scale", "I", pack("i", scale))])
    exact = decimal.Context(prec=60)
    return Sql(
        f"decimal({precision},{scale})",
        kind,
        unscaled(precision),
        slot,
        lambda v: decimal.Decimal(v).scaleb(-scale, exact),
    )


def timestamps(precision: int, name: str = "TimestampType") -> Sql:
    """Values are nanoseconds since 1970."""
    step = 10 ** (9 - precision)
    kind = typed(name, [("precision", "I", pack("i", precision))])

    def slot(value: int, region: Region) -> bytes:
        millis, nanos = divmod(value, 10**6)
        if precision <= 3:
            return struct.pack("<q", millis)
        return struct.pack("<II", nanos, region.put(struct.pack("<q", millis)))

    def read(value: int) -> Any:
        at = EPOCH + dt.timedelta(microseconds=value // 1000)
        at = at if name.startswith("Local") else at.replace(tzinfo=None)
        return at if precision <= 6 else {"timestamp": at, "nanos": value % 1000}

    times = some.integers(-(10**18) // step, 10**18 // step).map(lambda v: v * step)
    return Sql(f"{name}({precision})", kind, times, slot, read)


TEXT = Sql("varchar", typed("VarCharType", [("length", "I", pack("i", 99))]), TEXTS, lambda v, r: short(v.encode(), r))
OCTETS = Sql("varbinary", typed("VarBinaryType"), some.binary(max_size=12), short)
INT = plain("IntType", "i", whole(32))
RAW = Sql(
    "raw",
    typed(
        "RawType",
        [
            ("clazz", "Ljava/lang/Class;", b"\x76" + class_desc("com.example.Mine", [])),
            ("serializer", "Ljava/lang/Object;", b"\x70"),
        ],
    ),
    some.binary(max_size=9),
    lambda v, r: r.word(v),
)


def rows(*kinds: Sql, structured: bool = False) -> Sql:
    """A nested row with fields ``a``, ``b`` …"""
    names = "abcdefgh"[: len(kinds)]
    item = TYPES + ("StructuredType$StructuredAttribute" if structured else "RowType$RowField")
    made = class_desc(item, [("name", "Ljava/lang/String;"), ("type", f"L{TYPES}LogicalType;")])
    listed = array_list([b"\x73" + made + b"\x74" + utf(n) + kind.type for n, kind in zip(names, kinds, strict=True)])
    kind = "StructuredType" if structured else "RowType"
    fields = [("attributes" if structured else "fields", "Ljava/util/List;", unmodifiable(listed))]
    return Sql(
        f"{kind} of {[kind.name for kind in kinds]}",
        typed(kind, fields),
        some.tuples(*(some.none() | kind.values for kind in kinds)),
        lambda v, r: r.word(row(kinds, v)),
        lambda v: {n: None if x is None else k.read(x) for n, k, x in zip(names, kinds, v, strict=True)},
    )


def arrays(kind: Sql) -> Sql:
    return Sql(
        f"array of {kind.name}",
        typed("ArrayType", [("elementType", f"L{TYPES}LogicalType;", kind.type)]),
        some.lists(some.none() | kind.values, max_size=5),
        lambda v, r: r.word(array(kind, v)),
        lambda v: [None if x is None else kind.read(x) for x in v],
    )


def maps(key: Sql, value: Sql) -> Sql:
    fields = [("keyType", f"L{TYPES}LogicalType;", key.type), ("valueType", f"L{TYPES}LogicalType;", value.type)]
    return Sql(
        f"map of {key.name} to {value.name}",
        typed("MapType", fields),
        some.dictionaries(key.values, some.none() | value.values, max_size=4),
        lambda v, r: r.word(mapping(key, value, v)),
        lambda v: [(key.read(k), None if x is None else value.read(x)) for k, x in v.items()],
    )


COLUMNS = [
    TEXT,
    OCTETS,
    INT,
    RAW,
    plain("BooleanType", "?", some.booleans()),
    plain("TinyIntType", "b", whole(8)),
    plain("SmallIntType", "h", whole(16)),
    plain("BigIntType", "q", whole(64)),
    plain("FloatType", "f", some.floats(width=32, allow_nan=False)),
    plain("DoubleType", "d", some.floats(allow_nan=False)),
    plain("DateType", "i", some.integers(-700000, 2900000), lambda v: dt.date(1970, 1, 1) + dt.timedelta(days=v)),
    plain("TimeType", "i", some.integers(0, 86399999)),
    plain("YearMonthIntervalType", "i", whole(32)),
    plain("DayTimeIntervalType", "q", whole(64)),
    decimals(10, 2),
    decimals(30, 3),
    decimals(38, 38),
    timestamps(0),
    timestamps(3),
    timestamps(6),
    timestamps(9),
    timestamps(3, "LocalZonedTimestampType"),
    timestamps(9, "LocalZonedTimestampType"),
    arrays(INT),
    arrays(TEXT),
    arrays(plain("BooleanType", "?", some.booleans())),
    arrays(arrays(decimals(30, 3))),
    maps(TEXT, INT),
    maps(INT, timestamps(6)),
    rows(INT, TEXT),
    rows(TEXT, arrays(TEXT), structured=True),
    rows(rows(timestamps(9), decimals(30, 3)), maps(TEXT, rows(INT))),
]


def row_snapshot(kinds: Sequence[Sql], version: int = 3) -> bytes:
    listed = b"".join(stream(kind.type) for kind in kinds)
    return versioned(
        RUNTIME + "RowDataSerializer$RowDataSerializerSnapshot", version, pack("i", len(kinds)) + listed + nested()
    )


def table(*kinds: Sql) -> Kind:
    """The serializer of rows of such columns; the first item of a value is the kind of the row."""

    def read(value: Any) -> Any:
        kind, *items = value
        found = {f"f{i}": None if x is None else kinds[i].read(x) for i, x in enumerate(items)}
        return {**found, "row_kind": ["+I", "-U", "+U", "-D"][kind]}

    return Kind(
        f"SQL row of {[kind.name for kind in kinds]}",
        row_snapshot(kinds),
        some.tuples(some.integers(0, 3), *(some.none() | kind.values for kind in kinds)),
        lambda value: blob(row(kinds, value[1:], value[0])),
        read,
    )
