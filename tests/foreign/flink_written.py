"""Flink's serializers written by hand, from the table of layouts: the second oracle of the readers.

A :class:`Kind` has the snapshot, a strategy of values, how a value is written, and what Arrow says.
Nothing here uses the product.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as some

BASE = "org.apache.flink.api.common.typeutils.base."
TUPLE = "org.apache.flink.api.java.tuple.Tuple"
RUNTIME = "org.apache.flink.api.java.typeutils.runtime."


def pack(form: str, *values: Any) -> bytes:
    return struct.pack(">" + form, *values)


def utf(text: str) -> bytes:
    raw = text.encode()
    return pack("H", len(raw)) + raw


def blob(data: bytes) -> bytes:
    return pack("i", len(data)) + data


def versioned(name: str, version: int, body: bytes = b"") -> bytes:
    return utf(name) + pack("i", version) + body


def top(snapshot: bytes) -> bytes:
    return pack("i", 2) + snapshot


def simple(name: str, place: str = BASE) -> bytes:
    return versioned(f"{place}{name}${name.rpartition('.')[2]}Snapshot", 3)


def nested(*children: bytes) -> bytes:
    return pack("iii", 1333245, 1, len(children)) + b"".join(children)


def composite(name: str, children: list[bytes], outer: bytes = b"", version: int = 1) -> bytes:
    return versioned(name, 3, pack("ii", 911108, version) + outer + nested(*children))


def number(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def text(value: str | None) -> bytes:
    if value is None:
        return b"\0"
    pairs = value.encode("utf-16-be")
    return number(len(pairs) // 2 + 1) + b"".join(number(u) for u in struct.unpack(f">{len(pairs) // 2}H", pairs))


def units(value: str) -> int:
    return len(value.encode("utf-16-be")) // 2


@dataclass(frozen=True)
class Kind:
    """One serializer: ``values`` makes pairs of what is written and what is read."""

    name: str
    snapshot: bytes
    values: some.SearchStrategy[Any]
    write: Callable[[Any], bytes]
    read: Callable[[Any], Any] = lambda value: value


def whole(bits: int) -> some.SearchStrategy[int]:
    return some.integers(-(1 << bits - 1), (1 << bits - 1) - 1)


TEXTS = some.text(some.characters(codec="utf-8"), max_size=12)
LONG = Kind("long", simple("LongSerializer"), whole(64), lambda value: pack("q", value))
INT = Kind("int", simple("IntSerializer"), whole(32), lambda value: pack("i", value))
TEXT = Kind("string", simple("StringSerializer"), TEXTS, text)
TEXT_VALUE = Kind(
    "string value",
    simple("StringValueSerializer"),
    TEXTS,
    lambda value: number(units(value)) + text(value)[len(number(units(value) + 1)) :],
)
NULL_TEXT = Kind("string or null", TEXT.snapshot, some.none() | TEXTS, text)
DOUBLE = Kind("double", simple("DoubleSerializer"), some.floats(allow_nan=False), lambda value: pack("d", value))
BOOL = Kind("boolean", simple("BooleanSerializer"), some.booleans(), lambda value: pack("?", value))


def big(value: int | None) -> bytes:
    special = {None: 0, 0: 1, 1: 2, 10: 3}
    if value in special:
        return pack("i", special[value])
    size = (value + (value < 0)).bit_length() // 8 + 1
    return pack("i", size + 4) + value.to_bytes(size, "big", signed=True)


def decimal_written(value: decimal.Decimal) -> bytes:
    sign, digits, exponent = value.as_tuple()
    unscaled = int("".join(map(str, digits))) * (-1 if sign else 1)
    return big(unscaled) + pack("i", -int(exponent))


def decimals() -> some.SearchStrategy[decimal.Decimal]:
    made = some.builds(
        lambda unscaled, scale: decimal.Decimal((int(unscaled < 0), tuple(map(int, str(abs(unscaled)))), -scale)),
        whole(240) | whole(16),
        some.integers(-45, 45) | some.integers(0, 3),
    )
    # Java's numbers have no negative zero.
    return made.map(lambda value: value or value.copy_abs())


def day(value: dt.date | None) -> bytes:
    if value is None:
        return pack("ih", -(1 << 31), -(1 << 15))
    return pack("iBB", value.year, value.month, value.day)


def time_of_day(value: dt.time | None) -> bytes:
    if value is None:
        return pack("bhi", -(1 << 7), -(1 << 15), -(1 << 31))
    return pack("BBBi", value.hour, value.minute, value.second, value.microsecond * 1000)


def nanos_of_day(value: dt.time) -> int:
    return ((value.hour * 60 + value.minute) * 60 + value.second) * 10**9 + value.microsecond * 1000


def instant(value: int | None) -> bytes:
    return pack("qi", -(1 << 63), -(1 << 31)) if value is None else pack("qi", value // 10**9, value % 10**9)


def sql_timestamp(value: int | None) -> bytes:
    return pack("qi", -(1 << 63), 0) if value is None else pack("qi", value // 10**6, value % 10**9)


def seconds_and_nanos(value: int | None) -> dict[str, int] | None:
    return None if value is None else {"seconds": value // 10**9, "nanos": value % 10**9}


NANOS = some.none() | some.integers(-(10**24), 10**24)
DATES = some.dates()
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
PLAIN = [
    LONG,
    INT,
    TEXT,
    NULL_TEXT,
    TEXT_VALUE,
    DOUBLE,
    BOOL,
    Kind("short", simple("ShortSerializer"), whole(16), lambda value: pack("h", value)),
    Kind("byte", simple("ByteSerializer"), whole(8), lambda value: pack("b", value)),
    Kind("float", simple("FloatSerializer"), some.floats(width=32, allow_nan=False), lambda value: pack("f", value)),
    Kind(
        "char",
        simple("CharSerializer"),
        some.characters(max_codepoint=0xD7FF),
        lambda value: pack("H", ord(value)),
    ),
    Kind("long value", simple("LongValueSerializer"), whole(64), lambda value: pack("q", value)),
    Kind(
        "void namespace",
        simple("VoidNamespaceSerializer", "org.apache.flink.runtime.state."),
        some.just(True),
        lambda _: b"\0",
    ),
    Kind(
        "time window",
        versioned(
            "org.apache.flink.streaming.api.windowing.windows.TimeWindow$Serializer$TimeWindowSerializerSnapshot", 3
        ),
        some.tuples(whole(64), whole(64)),
        lambda value: pack("qq", *value),
        lambda value: {"window_start": value[0], "window_end": value[1]},
    ),
    Kind(
        "date",
        simple("DateSerializer"),
        some.none() | some.integers(-(10**13), 10**14),
        lambda value: pack("q", -(1 << 63) if value is None else value),
        lambda value: None if value is None else EPOCH + dt.timedelta(milliseconds=value),
    ),
    Kind("instant", simple("InstantSerializer"), NANOS, instant, seconds_and_nanos),
    Kind("sql timestamp", simple("SqlTimestampSerializer"), NANOS, sql_timestamp, seconds_and_nanos),
    Kind("local date", simple("LocalDateSerializer"), some.none() | DATES, day),
    Kind(
        "local time",
        simple("LocalTimeSerializer"),
        some.none() | some.times(),
        time_of_day,
        lambda value: None if value is None else nanos_of_day(value),
    ),
    Kind(
        "local date time",
        simple("LocalDateTimeSerializer"),
        some.none() | some.datetimes(),
        lambda value: day(value and value.date()) + time_of_day(value and value.time()),
        lambda value: value and {"date": value.date(), "nanos": nanos_of_day(value.time())},
    ),
    Kind(
        "big integer",
        simple("BigIntSerializer"),
        some.none() | whole(300) | whole(90) | whole(5),
        big,
        lambda value: None if value is None else str(value),
    ),
    Kind("big decimal", simple("BigDecSerializer"), decimals(), decimal_written, str),
    Kind(
        "enum",
        versioned(
            BASE + "EnumSerializer$EnumSerializerSnapshot",
            3,
            utf("a.B") + pack("i", 3) + utf("RED") + utf("GREEN") + utf("BLUE"),
        ),
        some.sampled_from(["RED", "GREEN", "BLUE"]),
        lambda value: pack("i", ["RED", "GREEN", "BLUE"].index(value)),
    ),
    Kind(
        "long[]",
        simple("LongPrimitiveArraySerializer", BASE + "array."),
        some.lists(whole(64), max_size=5),
        lambda value: pack("i", len(value)) + pack(f"{len(value)}q", *value),
    ),
    Kind("byte[]", simple("BytePrimitiveArraySerializer", BASE + "array."), some.binary(max_size=9), blob),
    Kind(
        "char[]",
        simple("CharPrimitiveArraySerializer", BASE + "array."),
        TEXTS,
        lambda value: pack("i", len(value.encode("utf-16-be")) // 2) + value.encode("utf-16-be"),
    ),
    Kind(
        "String[]",
        simple("StringArraySerializer", BASE + "array."),
        some.lists(some.none() | TEXTS, max_size=4),
        lambda value: pack("i", len(value)) + b"".join(map(text, value)),
    ),
]


def list_of(child: Kind) -> Kind:
    return Kind(
        f"list of {child.name}",
        composite(BASE + "ListSerializerSnapshot", [child.snapshot]),
        some.lists(child.values, max_size=4),
        lambda value: pack("i", len(value)) + b"".join(map(child.write, value)),
        lambda value: [child.read(item) for item in value],
    )


def set_of(child: Kind) -> Kind:
    """Values are lists: the order of a set is that of its bytes."""
    return Kind(
        f"set of {child.name}",
        composite(BASE + "SetSerializerSnapshot", [child.snapshot]),
        some.lists(some.none() | child.values, max_size=4),
        lambda value: (
            pack("i", len(value)) + b"".join(b"\1" if item is None else b"\0" + child.write(item) for item in value)
        ),
        lambda value: [None if item is None else child.read(item) for item in value],
    )


def array_of(child: Kind) -> Kind:
    return Kind(
        f"array of {child.name}",
        composite(BASE + "GenericArraySerializerSnapshot", [child.snapshot], utf("a.B")),
        some.lists(some.none() | child.values, max_size=4),
        lambda value: (
            pack("i", len(value)) + b"".join(b"\0" if item is None else b"\1" + child.write(item) for item in value)
        ),
        lambda value: [None if item is None else child.read(item) for item in value],
    )


def map_of(child: Kind) -> Kind:
    return Kind(
        f"map to {child.name}",
        composite(BASE + "MapSerializerSnapshot", [TEXT.snapshot, child.snapshot]),
        some.dictionaries(TEXTS, some.none() | child.values, max_size=4),
        lambda value: (
            pack("i", len(value))
            + b"".join(text(k) + (b"\1" if v is None else b"\0" + child.write(v)) for k, v in value.items())
        ),
        lambda value: [(k, None if v is None else child.read(v)) for k, v in value.items()],
    )


def tuple_of(*children: Kind) -> Kind:
    return Kind(
        f"tuple of {[child.name for child in children]}",
        composite(
            RUNTIME + "TupleSerializerSnapshot",
            [child.snapshot for child in children],
            utf(TUPLE + str(len(children))),
            2,
        ),
        some.tuples(*(child.values for child in children)),
        lambda value: b"".join(child.write(item) for child, item in zip(children, value, strict=True)),
        lambda value: {f"f{i}": child.read(item) for i, (child, item) in enumerate(zip(children, value, strict=True))},
    )


def row_of(*children: Kind, version: int = 4) -> Kind:
    kinds = version >= 3
    outer = b"\1" if version == 4 else b""

    def write(value: Any) -> bytes:
        kind, *items = value
        bits = [bool(kind & 1), bool(kind & 2)] if kinds else []
        bits += [item is None for item in items]
        mask = bytearray((len(bits) + 7) // 8)
        for place, bit in enumerate(bits):
            mask[place // 8] |= bit << (7 - place % 8)
        return bytes(mask) + b"".join(
            child.write(item) for child, item in zip(children, items, strict=True) if item is not None
        )

    def read(value: Any) -> Any:
        kind, *items = value
        found = {f"f{i}": None if item is None else children[i].read(item) for i, item in enumerate(items)}
        return {**found, "row_kind": ["+I", "-U", "+U", "-D"][kind]} if kinds else found

    return Kind(
        f"row of {[child.name for child in children]} as version {version}",
        composite(
            RUNTIME + "RowSerializer$RowSerializerSnapshot", [child.snapshot for child in children], outer, version
        ),
        some.tuples(some.integers(0, 3 if kinds else 0), *(some.none() | child.values for child in children)),
        write,
        read,
    )


def nullable(child: Kind, padding: int = 0) -> Kind:
    return Kind(
        f"{child.name} or null, {padding} bytes of padding",
        composite(RUNTIME + "NullableSerializer$NullableSerializerSnapshot", [child.snapshot], pack("i", padding), 2),
        some.none() | child.values,
        lambda value: b"\1" + bytes(padding) if value is None else b"\0" + child.write(value),
        lambda value: None if value is None else child.read(value),
    )


def ttl(child: Kind) -> Kind:
    return Kind(
        f"{child.name} with TTL",
        composite(
            "org.apache.flink.runtime.state.ttl.TtlStateFactory$TtlSerializerSnapshot",
            [LONG.snapshot, child.snapshot],
            b"",
            2,
        ),
        some.tuples(whole(64), child.values),
        lambda value: pack("q", value[0]) + child.write(value[1]),
        lambda value: {"ttl_last_access": value[0], "value": child.read(value[1])},
    )


def ttl_aware(child: Kind) -> Kind:
    name = "org.apache.flink.runtime.state.ttl.TtlAwareSerializerSnapshot"
    return Kind(
        f"aware of TTL: {child.name}", versioned(name, 1, b"\1" + child.snapshot), child.values, child.write, child.read
    )


def timer(key: Kind, namespace: Kind) -> Kind:
    return Kind(
        f"timer of {key.name} in {namespace.name}",
        composite(
            "org.apache.flink.streaming.api.operators.TimerSerializerSnapshot",
            [key.snapshot, namespace.snapshot],
            b"",
            2,
        ),
        some.tuples(whole(64), key.values, namespace.values),
        lambda value: pack("Q", (value[0] + (1 << 63)) % (1 << 64)) + key.write(value[1]) + namespace.write(value[2]),
        lambda value: {"timestamp": value[0], "key": key.read(value[1]), "namespace": namespace.read(value[2])},
    )


def either(left: Kind, right: Kind) -> Kind:
    return Kind(
        f"{left.name} or {right.name}",
        composite(RUNTIME + "JavaEitherSerializerSnapshot", [left.snapshot, right.snapshot]),
        some.tuples(some.just(0), left.values) | some.tuples(some.just(1), right.values),
        lambda value: bytes([1 - value[0]]) + (left, right)[value[0]].write(value[1]),
        lambda value: {
            "left": left.read(value[1]) if value[0] == 0 else None,
            "right": right.read(value[1]) if value[0] else None,
        },
    )


def entries(found: dict[str, bytes | None], keys: bool = True) -> bytes:
    """A map of names to blobs, with a key's own bytes or without."""
    written = pack("qi", 0x4F2C69A3D70, len(found))
    for name, value in found.items():
        written += utf(name) + (b"\1" + blob(b"key") if keys else b"\0")
        written += b"\0" if value is None else b"\1" + blob(value)
    return written


def pojo_snapshot(
    name: str,
    fields: dict[str, bytes | None],
    registered: dict[str, bytes | None] | None = None,
    others: dict[str, bytes | None] | None = None,
) -> bytes:
    body = utf(name) + entries(fields) + entries(registered or {}, False) + entries(others or {}, False)
    return versioned(RUNTIME + "PojoSerializerSnapshot", 2, body)


def pojo_fields(children: dict[str, Kind], value: dict[str, Any]) -> bytes:
    return b"\2" + b"".join(
        b"\1" if value[name] is None else b"\0" + child.write(value[name]) for name, child in children.items()
    )


def pojo(name: str, **children: Kind) -> Kind:
    return Kind(
        f"POJO {name}",
        pojo_snapshot(name, {field: child.snapshot for field, child in children.items()}),
        some.none() | some.fixed_dictionaries({field: some.none() | child.values for field, child in children.items()}),
        lambda value: b"\1" if value is None else pojo_fields(children, value),
        lambda value: (
            None
            if value is None
            else {
                field: None if value[field] is None else child.read(value[field]) for field, child in children.items()
            }
        ),
    )


def opaque(name: str = "a.Custom") -> bytes:
    return versioned(RUNTIME + "kryo.KryoSerializerSnapshot", 2, utf(name) + entries({}) + entries({}) + entries({}))


AVRO_FIELDS: dict[str, tuple[Any, some.SearchStrategy[Any]]] = {
    "flag": ("boolean", some.booleans()),
    "number": ("int", whole(32)),
    "big": ("long", whole(64)),
    "half": ("float", some.floats(width=32, allow_nan=False)),
    "real": ("double", some.floats(allow_nan=False)),
    "text": ("string", TEXTS),
    "octets": ("bytes", some.binary(max_size=5)),
    "hash": ({"type": "fixed", "name": "Hash", "size": 3}, some.binary(min_size=3, max_size=3)),
    "suit": ({"type": "enum", "name": "Suit", "symbols": ["A", "B"]}, some.sampled_from("AB")),
    "again": ("Suit", some.sampled_from("AB")),
    "maybe": (["null", "string"], some.none() | TEXTS),
    "either": (
        ["null", "long", "string"],
        some.none() | some.tuples(some.just("long"), whole(64)) | some.tuples(some.just("string"), TEXTS),
    ),
    "many": ({"type": "array", "items": "long"}, some.lists(whole(64), max_size=4)),
    "names": ({"type": "array", "items": ["null", "string"]}, some.lists(some.none() | TEXTS, max_size=4)),
    "counts": ({"type": "map", "values": "int"}, some.dictionaries(TEXTS, whole(32), max_size=3)),
    "inner": (
        {"type": "record", "name": "Inner", "fields": [{"name": "x", "type": "long"}]},
        some.fixed_dictionaries({"x": whole(64)}),
    ),
    "day": ({"type": "int", "logicalType": "date"}, some.dates()),
    "at": ({"type": "long", "logicalType": "timestamp-millis"}, some.integers(-(10**12), 10**14)),
    "price": (
        {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 2},
        some.integers(-(10**20) + 1, 10**20 - 1),
    ),
}


def avro_written(kind: Any, value: Any) -> bytes:
    """A value as Flink's encoder for Avro writes it."""
    if isinstance(kind, list):
        name = "null" if value is None else kind[1] if len(kind) == 2 else value[0]
        inner = value[1] if isinstance(value, tuple) else value
        return pack("i", kind.index(name)) + (b"" if value is None else avro_written(name, inner))
    found = kind if isinstance(kind, dict) else {"type": kind}
    match found["type"], found.get("logicalType"):
        case "int", "date":
            return pack("i", (value - dt.date(1970, 1, 1)).days)
        case "bytes", "decimal":
            return blob(value.to_bytes((value + (value < 0)).bit_length() // 8 + 1, "big", signed=True))
        case ("boolean" | "int" | "long" | "float" | "double") as name, _:
            return pack({"boolean": "?", "int": "i", "long": "q", "float": "f", "double": "d"}[name], value)
        case "string", _:
            return blob(value.encode())
        case "bytes", _:
            return blob(value)
        case "fixed", _:
            return bytes(value)
        case (("enum" | "Suit"), _):
            return pack("i", "AB".index(value))
        case "array", _:
            items = b"".join(avro_written(found["items"], item) for item in value)
            return (number(len(value)) if value else b"") + items + b"\0"
        case "map", _:
            pairs = b"".join(blob(k.encode()) + avro_written(found["values"], v) for k, v in value.items())
            return (number(len(value)) if value else b"") + pairs + b"\0"
    return b"".join(avro_written(item["type"], value[item["name"]]) for item in found["fields"])


def avro_read(name: str, value: Any) -> Any:
    if name == "either":
        return value and {"long": None, "string": None, value[0]: value[1]}
    if name == "at":
        return EPOCH + dt.timedelta(milliseconds=value)
    if name == "price":
        return decimal.Decimal(value).scaleb(-2, decimal.Context(prec=30))
    return list(value.items()) if name == "counts" else value


def avro_snapshot(schema: Any, version: int = 2) -> bytes:
    name = utf("a.Record") if version == 2 else b""
    return versioned(
        "org.apache.flink.formats.avro.typeutils.AvroSerializerSnapshot", version, name + utf(json.dumps(schema))
    )


AVRO_SCHEMA = {
    "type": "record",
    "name": "a.Record",
    "fields": [{"name": name, "type": kind} for name, (kind, _) in AVRO_FIELDS.items()],
}
AVRO = Kind(
    "Avro record",
    avro_snapshot(AVRO_SCHEMA),
    some.fixed_dictionaries({name: values for name, (_, values) in AVRO_FIELDS.items()}),
    lambda value: avro_written(AVRO_SCHEMA, value),
    lambda value: {name: avro_read(name, item) for name, item in value.items()},
)
SCALA = "org.apache.flink.api.scala.typeutils."


def option(child: Kind) -> Kind:
    return Kind(
        f"option of {child.name}",
        composite(SCALA + "ScalaOptionSerializerSnapshot", [child.snapshot], b"", 2),
        some.none() | child.values,
        lambda value: b"\0" if value is None else b"\1" + child.write(value),
        lambda value: None if value is None else child.read(value),
    )


def case_class(*children: Kind) -> Kind:
    alike = tuple_of(*children)
    snapshots = [child.snapshot for child in children]
    snapshot = composite(SCALA + "ScalaCaseClassSerializerSnapshot", snapshots, utf("scala.Tuple2"), 2)
    return Kind(f"case class like {alike.name}", snapshot, alike.values, alike.write, alike.read)


COMPOSITE = [
    AVRO,
    case_class(LONG, TEXT),
    option(TEXT),
    list_of(LONG),
    list_of(NULL_TEXT),
    list_of(list_of(INT)),
    array_of(TEXT),
    set_of(TEXT),
    set_of(LONG),
    map_of(LONG),
    map_of(list_of(TEXT)),
    tuple_of(LONG, TEXT, BOOL),
    tuple_of(LONG, tuple_of(INT, DOUBLE)),
    row_of(LONG, TEXT),
    row_of(LONG, TEXT, version=3),
    row_of(LONG, TEXT, version=2),
    row_of(*[LONG] * 9),
    nullable(TEXT),
    nullable(LONG, 8),
    nullable(list_of(nullable(TEXT))),
    ttl(TEXT),
    ttl_aware(ttl(LONG)),
    list_of(ttl(TEXT)),
    timer(TEXT, PLAIN[13]),
    timer(LONG, PLAIN[12]),
    either(LONG, TEXT),
    pojo("a.Five", a=LONG, b=TEXT, c=DOUBLE, d=BOOL, e=INT),
    pojo("a.Nested", inner=pojo("a.Inner", x=TEXT, y=list_of(TEXT)), tags=map_of(pojo("a.Tag", n=INT))),
    list_of(pojo("a.Item", title=TEXT)),
]
