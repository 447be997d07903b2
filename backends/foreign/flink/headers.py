"""Headers of streams: which states there are, with their options and the snapshots of their
serializers, from their bytes to :class:`Serializer`.

Bodies of snapshots have no lengths, so an unknown class ends the parse (:class:`UnknownClass`),
unless a blob frames it. Class names are compared and printed, never loaded. An unknown class ends a
header: what was read before it is returned, with ``stopped``. What follows is data for readers that
can find it without the header. ``describe`` converts a header for the layouts, and says what is
refused of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

import pyarrow as pa

from stateformat.errors import DamagedCheckpoint, ErrorKind, UnsupportedFormat
from stateformat.schema import MAX_NESTING

from ..cursor import Cursor
from ..source import FLINK_VERSIONS
from . import binary_rows, scalars, sql_types
from .avro import avro_serializer
from .compound import (
    Characters,
    Either,
    Enumeration,
    FlippedLong,
    ListOf,
    MapOf,
    MaskedList,
    Nullable,
    Octets,
    Pojo,
    Row,
    Sequential,
    Timer,
    Ttl,
    Tuple,
    opaque_within,
    undecodable,
)
from .key_hash import FLINK_KEY_HASH, USER_KEY_HASH, is_hashable
from .kryo import Known, registered
from .kryo_columns import KryoTypes
from .lanes import Opaque, Serializer
from .layouts import Layout, Parts, Stored
from .scalars import CHARACTER, TEXT, TEXT_VALUE, BigDecimal, BigInteger, Nothing
from .sql_types import described, logical_type, read_object

_OUTER_MAGIC: Final = 911108
_NESTED_MAGIC: Final = 1333245
_MAP_MAGIC: Final = 0x4F2C69A3D70
_PACKAGE: Final = "org.apache.flink."
ADAPTER: Final = 0x7A53C4F0
"""The version of snapshots whose class is from before Flink 1.7 (Beam's still are)."""

Parse: TypeAlias = "Callable[[Cursor, int, int], Serializer]"
"""Takes the cursor after the version, the version, and the depth."""


class UnknownClass(UnsupportedFormat):
    """An unknown class or version of a snapshot: what follows cannot be found."""


def read_top(at: Cursor, depth: int = 0) -> Serializer:
    """Read the form that headers have: i32 2, then the versioned form."""
    version = at.i32()
    if version != 2:
        raise _unknown(at, f"a serializer's snapshot of form {version} (before Flink 1.7)", "")
    found = read_versioned(at, depth)
    if _depth(found.arrow_type) > MAX_NESTING:
        return Opaque(*found.opaque, f"a type nested deeper than {MAX_NESTING}")
    return found


def _depth(kind: pa.DataType) -> int:
    """Return how deep a type is nested; 0 if not at all."""
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    # A map is a list of structs in Arrow, and one level in the format.
    if pa.types.is_map(kind):
        inner = [kind.key_type, kind.item_type]
    return 1 + max(map(_depth, inner)) if inner else 0


def read_versioned(at: Cursor, depth: int) -> Serializer:
    """Read class, version and body. Raises ``UnknownClass`` and ``DamagedCheckpoint``."""
    at.deeper("serializers", depth)
    name = at.name("the class of a serializer")
    version = at.i32()
    if version == ADAPTER:
        # The serializer itself, as Java writes objects, and the version of what its class adds.
        at.i32()
        at.take(at.i32())
        at.i32()
        return Opaque(name)
    parse = _PARSERS.get(name.rpartition(".")[2]) if name.startswith(_PACKAGE) else None
    if parse is None:
        raise _unknown(at, f"serializer snapshot {name}", name)
    return parse(at, version, depth)


def more_than_adapted(at: Cursor, begin: int, end: int) -> UnknownClass | None:
    """Return why bytes behind ``begin`` … ``end`` may not be understood: a snapshot from before
    Flink 1.7 stands there, whose class may have added more. None if there is none.
    """
    place = bytes(at.data[begin:end]).find(ADAPTER.to_bytes(4, "big"))
    if place < 0:
        return None
    # The name of its class precedes the version, and its length the name.
    before = bytes(at.data[max(begin, begin + place - (1 << 16)) : begin + place])
    sizes = (size for size in range(1, len(before) - 1) if before[-size - 2 : -size] == size.to_bytes(2, "big"))
    name = next((before[-size:] for size in sizes if re.fullmatch(rb"[\w.$]+", before[-size:])), None)
    named = name.decode() if name else "of an unknown class"
    return _unknown(at, f"what serializer snapshot {named} adds", named)


def _unknown(at: Cursor, what: str, name: str) -> UnknownClass:
    return UnknownClass(
        f"{at.path}: {what} at byte {at.position} is not known, and what follows it has no length; decode it with "
        "Flink, or take a savepoint of a job without it",
        kind=ErrorKind.UNSUPPORTED_FEATURE,
        path=at.path,
        java_class=name,
        offset=at.position,
    )


def _versions(at: Cursor, version: int, known: Sequence[int], what: str) -> None:
    if version not in known:
        raise _unknown(at, f"version {version} of {what}", what)


def _simple(serializer: Serializer) -> Parse:
    """A snapshot without a body; version 2 has the name of the serializer."""

    def parse(at: Cursor, version: int, _depth: int) -> Serializer:
        _versions(at, version, (2, 3), "a simple serializer")
        if version == 2:
            at.utf()
        return serializer

    return parse


def nested(at: Cursor, depth: int) -> list[Serializer]:
    """Read the snapshots of children."""
    if at.i32() != _NESTED_MAGIC:
        at.damaged(f"the children of a serializer should begin with {_NESTED_MAGIC}")
    _versions(at, at.i32(), (1,), "nested serializers")
    return [read_versioned(at, depth + 1) for _ in range(at.count(6, "serializers"))]


def _composite(
    children: int | None,
    build: Callable[[list[Serializer], object], Serializer],
    outer: Callable[[Cursor, int], object] = lambda _at, _version: None,
) -> Parse:
    """A snapshot with children: a version and body of its own (``outer``), then the children."""

    def parse(at: Cursor, version: int, depth: int) -> Serializer:
        _versions(at, version, (3,), "a composite serializer")
        if at.i32() != _OUTER_MAGIC:
            at.damaged(f"a composite serializer should begin with {_OUTER_MAGIC}")
        own = outer(at, at.i32())
        found = nested(at, depth)
        if children is not None and len(found) != children:
            at.damaged(f"a serializer has {len(found)} children and should have {children}")
        return build(found, own)

    return parse


def _list(found: list[Serializer], _own: object) -> Serializer:
    return ListOf(found[0])


def _array(found: list[Serializer], _own: object) -> Serializer:
    return ListOf(found[0], flagged=True)


def _masked(found: list[Serializer], own: object) -> Serializer:
    if not own:
        return _list(found, own)
    return MaskedList(found[0])


def _map(found: list[Serializer], _own: object) -> Serializer:
    return MapOf(found[0], found[1])


def _null_aware_map(found: list[Serializer], _own: object) -> Serializer:
    return MapOf(found[0], found[1], nullable_keys=True)


def _tuple(found: list[Serializer], own: object) -> Serializer:
    return undecodable(found) or Tuple(str(own), found)


def _row(found: list[Serializer], own: object) -> Serializer:
    return undecodable(found) or Row(found, kinds=bool(own))


def _timer(found: list[Serializer], _own: object) -> Serializer:
    return undecodable(found) or Timer(found[0].as_key(), found[1])


def _ttl(found: list[Serializer], _own: object) -> Serializer:
    return undecodable(found) or Ttl(found[0], found[1])


def _nullable(found: list[Serializer], own: object) -> Serializer:
    return Nullable(found[0], int(str(own)))


def _buffer_entry(found: list[Serializer], _own: object) -> Serializer:
    return Sequential(("joined", "element"), (scalars.BOOLEAN, found[0]))


def _outer_name(at: Cursor, _version: int) -> str:
    return at.name("the class of a value")


def _outer_flag(at: Cursor, _version: int) -> bool:
    return at.flag("an option of a serializer")


def _outer_row(at: Cursor, version: int) -> bool:
    return version == 3 if version <= 3 else _outer_flag(at, version)


def _outer_masked(at: Cursor, version: int) -> bool:
    return version == 2 if version <= 2 else _outer_flag(at, version)


def _outer_padding(at: Cursor, _version: int) -> int:
    padding = at.i32()
    if not 0 <= padding <= 1 << 20:
        at.damaged(f"the padding of nulls is {padding}")
    return padding


def _enumeration(at: Cursor, version: int, _depth: int) -> Serializer:
    _versions(at, version, (3,), "an enum's serializer")
    name = at.name("the class of an enum")
    constants = [at.name("a constant") for _ in range(at.count(2, "constants"))]
    if at.context is not None:
        at.context.enums[name] = constants
    return Enumeration(name, constants)


def _ttl_aware(at: Cursor, version: int, depth: int) -> Serializer:
    _versions(at, version, (1,), "a serializer that is aware of TTL")
    at.flag("whether TTL is on")
    return read_versioned(at, depth + 1)


def _entries(at: Cursor) -> list[tuple[str, memoryview | None]]:
    """Read a map of names to blobs; the serialized keys themselves are skipped."""
    if at.i64() != _MAP_MAGIC:
        at.damaged("a map of serializers does not begin as one")
    found = []
    for _ in range(at.count(4, "entries")):
        name = at.name("a field or class")
        if at.flag("whether there is a key"):
            at.take(at.i32())
        value = at.take(at.i32()) if at.flag("whether there is a value") else None
        found.append((name, value))
    return found


def _framed(at: Cursor, blob: memoryview | None, depth: int) -> Serializer | None:
    """Read a snapshot within a blob: an unknown class there is opaque, and parsing goes on."""
    if blob is None:
        return None
    inner = Cursor(blob, at.path, kind=at.kind, nodes=at.nodes)
    inner.context = at.context
    try:
        found = read_versioned(inner, depth + 1)
    except UnknownClass as error:
        return Opaque(error.details["java_class"])
    inner.finish("a serializer")
    return found


def _pojo(at: Cursor, version: int, depth: int) -> Serializer:
    _versions(at, version, (2,), "a POJO's serializer")
    name = at.name("the class of a POJO")
    fields = [(field, _framed(at, blob, depth)) for field, blob in _entries(at)]
    registered = [(subclass, _framed(at, blob, depth)) for subclass, blob in _entries(at)]
    others = {subclass: _framed(at, blob, depth) for subclass, blob in _entries(at)}
    children = [found or Opaque(f"field {field} of {name}") for field, found in fields]
    names = [field for field, _ in fields]
    if len(set(names)) != len(names):
        at.damaged(f"a field stands twice in {name}")
    if any(found.takes_rest for found in children[:-1]):
        return Opaque(*opaque_within(children))
    return Pojo(name, names, children, registered, others)


def _kryo(at: Cursor, version: int, _depth: int) -> Serializer:
    _versions(at, version, (2,), "Kryo's serializer")
    name = at.name("the class of a value")
    classes = [(found, _has_own_serializer(at, blob)) for found, blob in _entries(at)]
    defaults = [found for _ in range(2) for found, _ in _entries(at)]
    # A serializer of the user's own for an interface may be that of any class that has it.
    if at.context is None or any(found.startswith("java.") for found in defaults):
        return Opaque(name)
    custom = frozenset((*defaults, *(found for found, own in classes if own)))
    known = Known(registered([found for found, _ in classes]), at.context.enums, custom)
    found: Serializer = at.context.serializer(name, known)
    return found


def _has_own_serializer(at: Cursor, blob: memoryview | None) -> bool:
    """Return whether a class is registered with a serializer."""
    if blob is None:
        return True
    inner = Cursor(blob, at.path, kind=at.kind)
    inner.name("a registered class")
    return inner.i32() != 0


def _avro(at: Cursor, version: int, _depth: int) -> Serializer:
    _versions(at, version, (1, 2), "Avro's serializer")
    # Version 1 has only the schema.
    name = at.name("the class of a value") if version == 2 else "an Avro record"
    return avro_serializer(at.utf(), name, at.nodes)


def _custom(at: Cursor, _version: int, _depth: int) -> Serializer:
    return Opaque(at.name("the class of a value"))


def _row_data(at: Cursor, version: int, depth: int) -> Serializer:
    _versions(at, version, (3,), "a SQL row's serializer")
    found = [read_object(at) for _ in range(at.count(5, "columns"))]
    nested(at, depth)
    kinds = [logical_type(kind, at.nodes) for kind in found]
    known = [kind for kind in kinds if kind is not None]
    whole = sql_types.row([f"f{i}" for i in range(len(found))], known) if len(known) == len(found) else None
    return binary_rows.row_data(kinds, [described(kind) for kind in found], whole)


def _binary_row(at: Cursor, version: int, _depth: int) -> Serializer:
    _versions(at, version, (3,), "a binary row's serializer")
    return binary_rows.Framed(f"a SQL row of {at.i32()} columns without their types")


def _array_data(at: Cursor, version: int, _depth: int) -> Serializer:
    _versions(at, version, (3,), "a SQL array's serializer")
    element, _ = read_object(at), read_object(at)
    kind = sql_types.list_of(logical_type(element, at.nodes))
    return binary_rows.ManyData(kind) if kind else binary_rows.Framed(described(element))


def _map_data(at: Cursor, version: int, _depth: int) -> Serializer:
    _versions(at, version, (3,), "a SQL map's serializer")
    key, value, _, _ = [read_object(at) for _ in range(4)]
    kind = sql_types.map_of(logical_type(key, at.nodes), logical_type(value, at.nodes))
    return binary_rows.ManyData(kind) if kind else binary_rows.Framed(described(key), described(value))


def _decimal_data(at: Cursor, version: int, _depth: int) -> Serializer:
    _versions(at, version, (3,), "a SQL decimal's serializer")
    precision, scale = at.i32(), at.i32()
    kind = sql_types.decimal(precision, scale)
    if kind is None:
        at.damaged(f"a decimal has precision {precision} and scale {scale}")
    return binary_rows.DecimalData(kind)


def _timestamp_data(at: Cursor, version: int, _depth: int) -> Serializer:
    _versions(at, version, (1,), "a SQL timestamp's serializer")
    precision = at.i32()
    kind = sql_types.timestamp(precision)
    if kind is None:
        at.damaged(f"a timestamp has precision {precision}")
    return binary_rows.TimestampData(kind)


def _sorted_map(at: Cursor, version: int, depth: int) -> Serializer:
    _versions(at, version, (3,), "a sorted map's serializer")
    read_object(at)
    found = nested(at, depth)
    if len(found) != 2:
        at.damaged(f"a sorted map has {len(found)} serializers")
    return MapOf(found[0], found[1])


def _outer_external(at: Cursor, _version: int) -> object:
    found = read_object(at)
    at.flag("whether the input is internal")
    return found


_NUMBERS: Final = {
    "Long": scalars.LONG,
    "Int": scalars.INTEGER,
    "Short": scalars.SHORT,
    "Byte": scalars.BYTE,
    "Boolean": scalars.BOOLEAN,
    "Float": scalars.FLOAT,
    "Double": scalars.DOUBLE,
    "Char": CHARACTER,
    "String": TEXT,
}
_SIMPLE: Final[dict[str, Serializer]] = {
    **{f"{name}Serializer": found for name, found in _NUMBERS.items()},
    **{f"{name}ValueSerializer": found for name, found in _NUMBERS.items()},
    **{
        f"{name}PrimitiveArraySerializer": ListOf(found)
        for name, found in _NUMBERS.items()
        if name not in ("Byte", "Char", "String")
    },
    "StringValueSerializer": TEXT_VALUE,
    "BytePrimitiveArraySerializer": Octets(),
    "CharPrimitiveArraySerializer": Characters(),
    "StringArraySerializer": ListOf(TEXT),
    "VoidNamespaceSerializer": scalars.Nothing(),
    "VoidSerializer": scalars.Nothing(),
    "NullSerializer": scalars.Nothing(),
    "SortedLongSerializer": FlippedLong(),
    "DateSerializer": scalars.Milliseconds(),
    "SqlDateSerializer": scalars.Milliseconds(),
    "SqlTimeSerializer": scalars.Milliseconds(),
    "SqlTimestampSerializer": scalars.Moment(millis=True),
    "InstantSerializer": scalars.Moment(millis=False),
    "LocalDateSerializer": scalars.LOCAL_DATE,
    "LocalTimeSerializer": scalars.LOCAL_TIME,
    "LocalDateTimeSerializer": scalars.LocalDateTime(),
    "BigIntSerializer": BigInteger(),
    "BigDecSerializer": BigDecimal(),
    "JavaSerializer": Opaque("java.io.Serializable"),
}
_PARSERS: Final[dict[str, Parse]] = {
    **{f"{name}${name}Snapshot": _simple(found) for name, found in _SIMPLE.items()},
    "TimeWindow$Serializer$TimeWindowSerializerSnapshot": _simple(scalars.TimeWindow()),
    "GlobalWindow$Serializer$GlobalWindowSerializerSnapshot": _simple(scalars.Nothing()),
    "CountWindow$Serializer$CountWindowSerializerSnapshot": _simple(scalars.LONG),
    "EnumSerializer$EnumSerializerSnapshot": _enumeration,
    "ListSerializerSnapshot": _composite(1, _list),
    "ArrayListSerializerSnapshot": _composite(1, _list),
    "SetSerializerSnapshot": _composite(1, lambda found, _own: ListOf(Nullable(found[0], 0))),
    "ListViewSerializerSnapshot": _composite(1, lambda found, _own: found[0]),
    "MapViewSerializerSnapshot": _composite(1, lambda found, _own: found[0]),
    "LinkedListSerializer$LinkedListSerializerSnapshot": _composite(1, _masked, _outer_masked),
    "GenericArraySerializerSnapshot": _composite(1, _array, _outer_name),
    "MapSerializerSnapshot": _composite(2, _map),
    "NullAwareMapSerializerSnapshot": _composite(2, _null_aware_map),
    "TupleSerializerSnapshot": _composite(None, _tuple, _outer_name),
    "ScalaCaseClassSerializerSnapshot": _composite(None, _tuple, _outer_name),
    "Tuple2CaseClassSerializerSnapshot": _composite(None, _tuple, _outer_name),
    "Tuple0SerializerSnapshot": _simple(scalars.Nothing()),
    "RowSerializer$RowSerializerSnapshot": _composite(None, _row, _outer_row),
    "NullableSerializer$NullableSerializerSnapshot": _composite(1, _nullable, _outer_padding),
    "TtlStateFactory$TtlSerializerSnapshot": _composite(2, _ttl),
    "TtlAwareSerializerSnapshot": _ttl_aware,
    "TimerSerializerSnapshot": _composite(2, _timer),
    "WindowKeySerializer$WindowKeySerializerSnapshot": _composite(
        1, lambda found, _own: Sequential(("window", "key"), (scalars.LONG, found[0]))
    ),
    "ScalaOptionSerializerSnapshot": _composite(1, lambda found, _own: Nullable(found[0], 0, option=True)),
    "JavaEitherSerializerSnapshot": _composite(2, lambda found, _own: Either(found[0], found[1])),
    "ScalaEitherSerializerSnapshot": _composite(2, lambda found, _own: Either(found[0], found[1])),
    "CoGroupedStreams$UnionSerializerSnapshot": _composite(2, lambda found, _own: Either(found[0], found[1], (1, 2))),
    "IntervalJoinOperator$BufferEntrySerializerSnapshot": _composite(1, _buffer_entry),
    "RowDataSerializer$RowDataSerializerSnapshot": _row_data,
    "BinaryRowDataSerializer$BinaryRowDataSerializerSnapshot": _binary_row,
    "ArrayDataSerializer$ArrayDataSerializerSnapshot": _array_data,
    "MapDataSerializer$MapDataSerializerSnapshot": _map_data,
    "DecimalDataSerializer$DecimalSerializerSnapshot": _decimal_data,
    "TimestampDataSerializer$TimestampDataSerializerSnapshot": _timestamp_data,
    "StringDataSerializer$StringDataSerializerSnapshot": _simple(binary_rows.TextData(sql_types.TEXT)),
    "BitmapSerializer$BitmapSerializerSnapshot": _simple(binary_rows.Framed("org.apache.flink.types.bitmap.Bitmap")),
    "RawValueDataSerializer$RawValueDataSerializerSnapshot": _composite(
        1, lambda _found, _own: binary_rows.Framed("a raw value of SQL")
    ),
    "ExternalSerializer$ExternalSerializerSnapshot": _composite(1, lambda found, _own: found[0], _outer_external),
    "SortedMapSerializerSnapshot": _sorted_map,
    "PojoSerializerSnapshot": _pojo,
    "AvroSerializerSnapshot": _avro,
    "KryoSerializerSnapshot": _kryo,
    "CopyableValueSerializer$CopyableValueSerializerSnapshot": _custom,
    "ValueSerializer$ValueSerializerSnapshot": _custom,
}


KEY_VALUE, OPERATOR_LIST, BROADCAST, TIMERS, KEY_VALUE_V2 = range(5)
"""Kinds of states."""
KEYED_VERSION: Final = 6
OPERATOR_VERSIONS: Final = (5, 6)


@dataclass(frozen=True, slots=True, eq=False)
class StateInfo:
    """One state of a header. Its number in the data is its place in the list."""

    name: str
    kind: int
    options: Mapping[str, str]
    """``KEYED_STATE_TYPE`` or ``OPERATOR_STATE_DISTRIBUTION_MODE``."""
    serializers: Mapping[str, Serializer]
    """By role: ``VALUE_SERIALIZER``, ``NAMESPACE_SERIALIZER``, ``KEY_SERIALIZER``. Where a header
    stopped, some are missing.
    """
    begin: int
    end: int
    """Which bytes of the stream describe the state."""

    @property
    def value(self) -> Serializer | None:
        return self.serializers.get("VALUE_SERIALIZER")

    @property
    def namespace(self) -> Serializer | None:
        return self.serializers.get("NAMESPACE_SERIALIZER")

    @property
    def key(self) -> Serializer | None:
        """For broadcast state."""
        return self.serializers.get("KEY_SERIALIZER")


@dataclass(frozen=True, slots=True, eq=False)
class KeyedHeader:
    """The header of keyed state, and all of RocksDB's meta stream."""

    compressed: bool
    key: Serializer | None
    """None if its class is not known; then there are no states either."""
    declared: int
    """How many states there are; ``states`` has fewer if the header stopped."""
    states: tuple[StateInfo, ...]
    end: int
    """Where it ends, or where it stopped."""
    stopped: UnknownClass | None


@dataclass(frozen=True, slots=True, eq=False)
class OperatorHeader:
    """The header of operator state."""

    version: int
    compressed: bool
    lists: tuple[StateInfo, ...]
    broadcasts: tuple[StateInfo, ...]
    end: int
    stopped: UnknownClass | None
    behind: int = 0
    """How many states stand behind the one where it stopped, among lists or among broadcasts."""
    tail: bytes = b""
    """What was given, from the state on where it stopped."""


def read_keyed_header(data: bytes | memoryview, path: str, types: KryoTypes | None = None) -> KeyedHeader:
    """Read the header at the beginning of ``data``, which may continue after it.

    ``types``: of Kryo's values, which are opaque without. Raises ``DamagedCheckpoint``, and
    ``UnsupportedFormat`` for another version.
    """
    at = _cursor(data, path, types)
    _version(at, (KEYED_VERSION,), "keyed")
    compressed = at.flag("whether key groups are compressed")
    begin = end = at.position
    try:
        key = read_top(at)
        end = at.position
        declared = at.u16()
        states, stopped = _states(at, declared)
    except UnknownClass as error:
        return KeyedHeader(compressed, None, 0, (), at.position, error)
    except DamagedCheckpoint:
        more = more_than_adapted(at, begin, end)
        if more is None:
            raise
        return KeyedHeader(compressed, None, 0, (), end, more)
    return KeyedHeader(compressed, key, declared, states, at.position, stopped)


def _cursor(data: bytes | memoryview, path: str, types: KryoTypes | None) -> Cursor:
    at = Cursor(data, path)
    at.context = types
    if types is not None:
        types.begin("")
    return at


def read_operator_header(data: bytes | memoryview, path: str, types: KryoTypes | None = None) -> OperatorHeader:
    """Read the header at the beginning of ``data``, which may continue after it.

    ``types``: of Kryo's values, which are opaque without. Raises ``DamagedCheckpoint``, and
    ``UnsupportedFormat`` for another version.
    """
    at = _cursor(data, path, types)
    version = _version(at, OPERATOR_VERSIONS, "operator")
    compressed = version >= 6 and at.flag("whether state is compressed")
    declared = at.u16()
    lists, stopped = _states(at, declared)
    broadcasts: tuple[StateInfo, ...] = ()
    behind = declared - len(lists)
    try:
        if stopped is None:
            others = at.u16()
            broadcasts, stopped = _states(at, others)
            behind = others - len(broadcasts)
    except DamagedCheckpoint as error:
        lists, stopped = _understood(at, lists, error)
        behind = declared - len(lists)
    tail = b"" if stopped is None else bytes(at.data[(*lists, *broadcasts)[-1].begin :])
    return OperatorHeader(version, compressed, lists, broadcasts, at.position, stopped, behind, tail)


def _version(at: Cursor, known: tuple[int, ...], what: str) -> int:
    version = at.i32()
    if version not in known:
        raise UnsupportedFormat(
            f"{at.path}: a header of {what} state has version {version}, and known are {', '.join(map(str, known))} "
            f"({FLINK_VERSIONS}): take a savepoint with one of these",
            path=at.path,
            version=version,
        )
    return version


def _states(at: Cursor, count: int) -> tuple[tuple[StateInfo, ...], UnknownClass | None]:
    """Read ``count`` states; the last one returned lacks serializers if one stopped."""
    found: list[StateInfo] = []
    names: set[str] = set()
    at.fitting(count, 14, "states")
    for _ in range(count):
        try:
            state, stopped = _state(at)
            if state.name in names:
                at.damaged(f"state {state.name!r} stands twice in a header")
        except DamagedCheckpoint as error:
            return _understood(at, found, error)
        found.append(state)
        names.add(state.name)
        if stopped is not None:
            break
    return tuple(found), stopped if found else None


def _understood(
    at: Cursor, found: Sequence[StateInfo], error: DamagedCheckpoint
) -> tuple[tuple[StateInfo, ...], UnknownClass]:
    """Return states up to the one of which more may have been written than was read.

    Raises the error if there is none.
    """
    for place, state in enumerate(found):
        stopped = more_than_adapted(at, state.begin, state.end)
        if stopped is not None:
            at.position = state.end
            return tuple(found[: place + 1]), stopped
    raise error


def _state(at: Cursor) -> tuple[StateInfo, UnknownClass | None]:
    begin = at.position
    name, kind = at.utf(), at.i32()
    if at.context is not None:
        at.context.begin(name)
    if not 0 <= kind <= KEY_VALUE_V2:
        at.damaged(f"state {name!r} is of kind {kind}; known are 0 to {KEY_VALUE_V2}")
    options = {at.utf(): at.utf() for _ in range(at.count(4, "options"))}
    serializers: dict[str, Serializer] = {}
    for _ in range(at.count(12, "serializers")):
        role = at.utf()
        try:
            serializers[role] = read_top(at)
        except (UnknownClass, DamagedCheckpoint) as error:
            stopped = error if isinstance(error, UnknownClass) else more_than_adapted(at, begin, at.position)
            if stopped is None:
                raise
            return StateInfo(name, kind, options, serializers, begin, at.position), stopped
    return StateInfo(name, kind, options, serializers, begin, at.position), None


HASHED: Final = ("Long", "Integer", "Short", "Byte", "Boolean", "Float", "Double", "String", "Character")
BINARY_ROW: Final = "BinaryRowData"
ADVICE: Final = "take a canonical savepoint (`flink savepoint --type canonical`), in which every entry has its length"


@dataclass(frozen=True)
class Described:
    """The keyed states of one stream."""

    numbers: Mapping[str, int]
    parts: Mapping[str, Parts]
    stored: Mapping[int, Stored]
    """Without those whose entries have no known end."""
    unnamed: int
    """How many states have unreadable names, since an unknown class ended the header."""
    stopped: str
    """Why the header stopped."""
    compressed: bool
    key_hash: str
    key_java: str | None
    """Whose ``hashCode`` keys have."""

    @cached_property
    def unframed(self) -> tuple[str, ...]:
        """States whose entries have no known end in a heap."""
        return tuple(name for name, number in self.numbers.items() if number not in self.stored)


def describe(header: KeyedHeader) -> Described:
    """Return the content of a header, in the terms of layouts."""
    # Of the state where the header stopped, the class is known, and maybe no more.
    unknown = Opaque(str(header.stopped.details["java_class"] if header.stopped else "") or "unknown")
    key = header.key or unknown
    key = key.as_key()
    numbers, parts, stored = {}, {}, {}
    for number, info in enumerate(header.states):
        found = _parts(info, key, unknown)
        numbers[info.name], parts[info.name] = number, found
        timers = found.layout is Layout.TIMERS
        if not found.unframed and not (info.value is None or info.value.takes_rest):
            stored[number] = Stored(found, None if timers else info.value)
    java = key.java_hash
    known = is_known(key)
    # Without its key's class a header tells nothing, not even how many states there are.
    unnamed = header.declared - len(header.states) if header.key is not None else 1
    return Described(
        numbers,
        parts,
        stored,
        unnamed,
        str(header.stopped) if header.stopped else "",
        header.compressed,
        FLINK_KEY_HASH if known else USER_KEY_HASH,
        java if known or java == BINARY_ROW else None,
    )


def is_known(key: Serializer) -> bool:
    """Return whether Java's hash code of keys of this type is known, by their Arrow type alone."""
    if isinstance(key, Sequential):
        return key.java_hash == "Tuple" and all(is_known(child) for child in key.children)
    return key.java_hash in HASHED and is_hashable(key.arrow_type)


def _parts(info: StateInfo, key: Serializer, unknown: Serializer) -> Parts:
    value = info.value or unknown
    if info.kind == TIMERS:
        if isinstance(value, Timer):
            namespace = _namespace(value.namespace, unknown)
            return Parts(info.name, Layout.TIMERS, value.key.as_key(), namespace, None, None)
        # Key and namespace cannot be distinguished.
        return Parts(info.name, Layout.TIMERS, Opaque(*value.opaque), Opaque(), None, None)
    namespace = _namespace(info.namespace, unknown)
    kind = info.options.get("KEYED_STATE_TYPE", "VALUE")
    if kind == "MAP":
        if isinstance(value, MapOf) and not value.nullable_keys:
            return Parts(info.name, Layout.MAP, key, namespace, value.key.as_key(), value.value)
        return Parts(info.name, Layout.MAP, key, namespace, Opaque(), Opaque(*value.opaque))
    if kind == "LIST":
        element = value.element if isinstance(value, ListOf) else Opaque(*value.opaque)
        return Parts(info.name, Layout.LIST, key, namespace, None, element)
    return Parts(info.name, Layout.VALUE, key, namespace, None, value)


def _namespace(found: Serializer | None, unknown: Serializer) -> Serializer | None:
    if found is None:
        return unknown
    return None if isinstance(found, Nothing) else found.as_key()
