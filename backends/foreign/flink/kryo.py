"""Values of Kryo 2, which Flink 1 uses for every class that it does not know.

A value is its class, then, unless it is a boxed number, a reference, then its content. A class is a
number: 0 null, 1 a name, or a registration's number + 2. Names are numbered too; the first time the
name itself follows. A reference is 0 for null, 1 for a value that follows, or the number of an
earlier value of the same entry + 2. Kryo has no field names and no lengths, so the content of a
class can be read only if its fields are known here: that of the JDK's own classes is.

Values say their types, but no header does. So the first values of a state are looked into, and the
column gets the :class:`Shape` that all of them have; where they differ, it is text in JSON, and the
bytes.

=======================================  ======================================================
Java                                     Arrow
=======================================  ======================================================
boxed numbers, booleans, strings         as they are; ``Character`` is text
collections, sets, arrays                list; ``byte[]`` is binary, ``BitSet`` its set bits
maps                                     map
enums of the JDK, and of the header      the constant's name
``BigInteger``, ``BigDecimal``, ``UUID``,  text
``URI``, zoned times and the like
dates and times                          as those of Flink's own serializers
``Duration``, ``Period``                 struct<seconds, nanos>, struct<years, months, days>
=======================================  ======================================================
"""

from __future__ import annotations

import calendar
import decimal
import json
import re
import struct as structs
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
import pyarrow as pa

from stateformat.errors import DamagedCheckpoint, ErrorKind, UnsupportedFormat

from ..cursor import DEPTH_MAX, NAME_MAX
from ..limits import KRYO_FLOOR, KRYO_RATIO

Node: TypeAlias = "tuple[str, Any] | None"
"""A class and its content; None for null. Collections have nodes, maps pairs of nodes."""


class UnknownKryoClass(UnsupportedFormat):
    """A class whose fields are not known: the value, and all that follows it, cannot be read."""


_WRAPPERS: Final = {
    "java.lang.Integer": 0,
    "java.lang.String": 1,
    "java.lang.Float": 2,
    "java.lang.Boolean": 3,
    "java.lang.Byte": 4,
    "java.lang.Character": 5,
    "java.lang.Short": 6,
    "java.lang.Long": 7,
    "java.lang.Double": 8,
}
"""Kryo's own numbers of classes."""
_CHILL: Final = (
    "java.util.Arrays$ArrayList",
    "java.util.BitSet",
    "java.util.PriorityQueue",
    "java.util.regex.Pattern",
    "java.sql.Date",
    "java.sql.Time",
    "java.sql.Timestamp",
    "java.net.URI",
    "java.net.InetSocketAddress",
    "java.util.UUID",
    "java.util.Locale",
    "java.text.SimpleDateFormat",
)
"""Those that Flink registers as Chill 0.7 did; Scala's precede them."""
_CHILL_FIRST: Final = 73
_OWN_FIRST: Final = _CHILL_FIRST + len(_CHILL)
KNOWN_IDS: Final = {**_WRAPPERS, **{name: _CHILL_FIRST + place for place, name in enumerate(_CHILL)}}


def registered(names: Sequence[str]) -> dict[str, int]:
    """Return the numbers of classes by name; ``names`` are those of a snapshot, in its order."""
    found = dict(KNOWN_IDS)
    number = _OWN_FIRST
    for name in names:
        if name not in found:
            found[name] = number
            number += 1
    return found


_COLLECTIONS: Final = re.compile(
    r"java\.util\.((Array|Linked)List|(Linked)?HashSet|ArrayDeque|Vector|Stack|ArrayList\$SubList"
    r"|Collections\$(Unmodifiable|Synchronized)(Collection|(RandomAccess)?List|Set|(Sorted|Navigable)Set)"
    r"|ImmutableCollections\$(List12|ListN|SubList|Set12|SetN)|(Linked)?HashMap\$(KeySet|Values|LinkedKeySet|LinkedValues)"
    r"|concurrent\.(CopyOnWriteArray(List|Set)|ConcurrentLinked(Queue|Deque)|LinkedBlocking(Queue|Deque)"
    r"|ConcurrentSkipListSet))"
)
_AS_LIST: Final = "java.util.Arrays$ArrayList"
"""The class of the array's elements precedes them."""
_SORTED: Final = ("java.util.TreeSet", "java.util.PriorityQueue")
"""A comparator precedes their elements."""
_MAPS: Final = re.compile(
    r"java\.util\.((Linked|Identity|Weak)?HashMap|TreeMap|Hashtable|EnumMap|concurrent\.Concurrent(Hash|SkipList)Map"
    r"|Collections\$(Unmodifiable|Synchronized)((Sorted|Navigable)?Map)|ImmutableCollections\$Map[1N])"
)
_EMPTY: Final = re.compile(r"java\.util\.Collections\$Empty(List|Set|Map)")
_SINGLE: Final = re.compile(r"java\.util\.Collections\$Singleton(List|Set|Map)")


def is_map(name: str) -> bool:
    """Return whether a class, one of those that are read, has keys."""
    return _MAPS.fullmatch(name) is not None or (name.startswith("java.util.Collections$") and name.endswith("Map"))


_ENUM_SETS: Final = ("java.util.RegularEnumSet", "java.util.JumboEnumSet")
_TIME: Final = "java.time."
_DAYS: Final = ("MONDAY", "TUESDAY", "WEDNESDAY", "THURSDAY", "FRIDAY", "SATURDAY", "SUNDAY")
ENUMS: Final[dict[str, tuple[str, ...]]] = {
    "java.time.DayOfWeek": _DAYS,
    "java.time.Month": tuple(name.upper() for name in calendar.month_name[1:]),
    "java.util.concurrent.TimeUnit": (
        *("NANOSECONDS", "MICROSECONDS", "MILLISECONDS", "SECONDS", "MINUTES", "HOURS", "DAYS"),
    ),
}
_ZONE: Final = "java.time.ZoneId"
_ZONES: Final = ("java.time.ZoneOffset", "java.time.ZoneRegion")
_NANOS_OF_SECOND: Final = (0, 999_999_999)
_LONG: Final = (-(1 << 63), (1 << 63) - 1)
_YEARS: Final = (-5_800_000, 5_800_000)
"""Those that ``date32`` holds, about."""
_RANGES: Final[dict[str, tuple[tuple[int, int], ...]]] = {
    "java.time.Instant": (_NANOS_OF_SECOND, _LONG),
    "java.time.Duration": (_NANOS_OF_SECOND, _LONG),
    "java.time.LocalDate": ((1, 31), (1, 12), _YEARS),
    "java.time.LocalTime": ((0, 23), (0, 59), _NANOS_OF_SECOND, (0, 59)),
    "java.time.ZoneOffset": ((-64_800, 64_800),),
    "java.time.YearMonth": ((1, 12), _YEARS),
    "java.time.MonthDay": ((1, 31), (1, 12)),
}
"""What fields can be."""
_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "java.time.Instant": ("int", "long"),
    "java.time.Duration": ("int", "long"),
    "java.time.LocalDate": ("short", "short", "int"),
    "java.time.LocalTime": ("byte", "byte", "int", "byte"),
    "java.time.LocalDateTime": ("java.time.LocalDate", "java.time.LocalTime"),
    "java.time.Period": ("int", "int", "int"),
    "java.time.ZonedDateTime": ("java.time.LocalDateTime", "java.time.ZoneOffset", _ZONE),
    "java.time.OffsetDateTime": ("java.time.LocalDateTime", "java.time.ZoneOffset"),
    "java.time.OffsetTime": ("java.time.ZoneOffset", "java.time.LocalTime"),
    "java.time.ZoneOffset": ("int",),
    "java.time.ZoneRegion": ("java.lang.String",),
    "java.time.Year": ("int",),
    "java.time.YearMonth": ("int", "int"),
    "java.time.MonthDay": ("int", "int"),
    "java.util.concurrent.atomic.AtomicInteger": ("int",),
    "java.util.concurrent.atomic.AtomicLong": ("long",),
    "java.util.concurrent.atomic.AtomicBoolean": ("int",),
}
"""The JDK's classes that Kryo writes by their fields: the types of those, in the order of their
names. A class is final, so it is not named, except that of a zone.
"""
_PRIMITIVES: Final = {
    "[I": "java.lang.Integer",
    "[J": "java.lang.Long",
    "[S": "java.lang.Short",
    "[D": "java.lang.Double",
    "[F": "java.lang.Float",
    "[Z": "java.lang.Boolean",
}
_FINAL: Final = {*_WRAPPERS, *_PRIMITIVES, *_FIELDS, *ENUMS, "[B", "[C", "java.util.UUID", "java.net.URI"}
"""Arrays of these do not name the classes of their elements."""


@dataclass
class Known:
    """What a header says of the classes in values of one serializer."""

    ids: Mapping[str, int]
    enums: Mapping[str, Sequence[str]]
    custom: frozenset[str] = frozenset()
    """Classes with serializers of the user's own: not readable, whatever they are."""
    names: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = {number: name for name, number in self.ids.items()}

    def constants(self, name: str) -> tuple[str, Sequence[str]] | None:
        """Return the enum of a class, and its constants; one with a body has a class of its own."""
        base = re.sub(r"\$[0-9]+$", "", name)
        found = self.enums.get(base) or ENUMS.get(base)
        return (base, found) if found else None


class Reader:
    """Reads one entry. Raises ``DamagedCheckpoint`` and ``UnknownKryoClass``."""

    def __init__(self, known: Known, data: memoryview, position: int, end: int, path: str) -> None:
        self.known, self.data, self.position, self.end, self.path = known, data, position, end, path
        self.begin = position
        self.classes: list[str] = []
        self.objects: list[tuple[Node, int] | None] = []
        """By number: what was read, and how many bytes it stands for; None until it is whole."""
        self.repeated = 0
        self.limit = max(KRYO_FLOOR, KRYO_RATIO * (end - position))

    def damaged(self, what: str) -> NoReturn:
        raise DamagedCheckpoint(
            f"{self.path or 'state'}: the value at byte {self.position} is damaged: {what}. Take another checkpoint or "
            "savepoint",
            path=self.path,
            offset=self.position,
        )

    def unknown(self, name: str) -> NoReturn:
        raise UnknownKryoClass(
            f"{self.path or 'state'}: the value at byte {self.begin} has a {name}, which Kryo wrote without names, "
            "types and lengths of its fields; decode it with the job's own code",
            kind=ErrorKind.UNSUPPORTED_TYPE,
            path=self.path,
            java_class=name,
        )

    def take(self, size: int) -> bytes:
        if not 0 <= size <= self.end - self.position:
            self.damaged(f"{size} bytes should follow and {self.end - self.position} are left")
        self.position += size
        return bytes(self.data[self.position - size : self.position])

    def unsigned(self, most: int = 5) -> int:
        """Take a number of 7 bits a byte; the ninth byte of a long one has 8."""
        found = 0
        for place in range(8 if most == 9 else most):
            octet = self.take(1)[0]
            found |= (octet & 0x7F) << 7 * place
            if octet < 0x80:
                return found & 0xFFFFFFFF if most == 5 else found
        if most == 5:
            self.damaged("a number has more than 32 bits")
        return found | self.take(1)[0] << 56

    def signed(self, most: int = 5) -> int:
        found = self.unsigned(most)
        return found >> 1 ^ -(found & 1)

    def positive_long(self) -> int:
        found = self.unsigned(9)
        return found - (1 << 64) if found >> 63 else found

    def ranged(self, value: int, ends: tuple[int, int]) -> int:
        """Return ``value`` if it is within ``ends``."""
        if not ends[0] <= value <= ends[1]:
            self.damaged(f"it is {value}, and can be {ends[0]} to {ends[1]}")
        return value

    def number(self, form: str) -> Any:
        return structs.unpack(form, self.take(structs.calcsize(form)))[0]

    def count(self, nullable: bool = False) -> int:
        found = self.unsigned() - nullable
        if not 0 <= found <= self.end - self.position:
            self.damaged(f"{found} items should follow in {self.end - self.position} bytes")
        return found

    def text(self) -> str:
        begin = self.position
        first = self.take(1)[0]
        if first < 0x80:
            while self.take(1)[0] < 0x80:
                pass
            plain = bytes(self.data[begin : self.position])
            return (plain[:-1] + bytes([plain[-1] & 0x7F])).decode("ascii")
        units = first & 0x3F
        if first & 0x40:
            for shift in (6, 13, 20, 27):
                octet = self.take(1)[0]
                units |= (octet & 0x7F) << shift
                if octet < 0x80:
                    break
        units -= 1
        if not 0 <= units <= self.end - self.position:
            self.damaged(f"a string of {units} characters should follow in {self.end - self.position} bytes")
        start = self.position
        for _ in range(units):
            lead = self.take(1)[0]
            if lead >= 0x80:
                self.take(2 if lead >= 0xE0 else 1)
        raw = bytes(self.data[start : self.position])
        try:
            return raw.decode("utf-8", "surrogatepass").encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            self.position = begin
            self.damaged("a string is not text, or has half a surrogate pair")

    def name_of_class(self) -> str | None:
        """Take a class; None for null."""
        number = self.unsigned()
        if number == 0:
            return None
        if number > 1:
            name = self.known.names.get(number - 2)
            if name is None:
                self.unknown(f"class of number {number - 2}, which its serializer does not name")
            return name
        place = self.unsigned()
        if place < len(self.classes):
            return self.classes[place]
        if place > len(self.classes):
            self.damaged(f"class name {place} is used before it is there")
        name = self.text()
        if not name.isprintable() or not 0 < len(name) <= NAME_MAX:
            self.damaged(f"{name[:80]!r} is no name of a class")
        self.classes.append(name)
        return name

    def value(self, depth: int = 0) -> Node:
        """Take a class and a value of it."""
        name = self.name_of_class()
        return None if name is None else self.of(name, depth)

    def of(self, name: str, depth: int, *, nullable: bool = False) -> Node:
        """Take a value of a class: a reference, and unless it was there before, its content."""
        if depth > DEPTH_MAX:
            raise UnsupportedFormat(
                f"{self.path or 'state'}: the value at byte {self.begin} is nested deeper than {DEPTH_MAX} levels; "
                "change it in the job",
                kind=ErrorKind.LIMIT_EXCEEDED,
                path=self.path,
            )
        if name in _WRAPPERS and name != "java.lang.String":
            if nullable and self.unsigned() == 0:
                return None
            return self.content(name, depth)
        number = self.unsigned()
        if number == 0:
            if not nullable:
                self.damaged("it is null after it had a class")
            return None
        if number > 1:
            return self.earlier(number - 2)
        place, begin, before = len(self.objects), self.position, self.repeated
        self.objects.append(None)
        found = self.content(name, depth)
        self.objects[place] = found, self.position - begin + self.repeated - before
        return found

    def earlier(self, place: int) -> Node:
        if place >= len(self.objects):
            self.damaged(f"it is value {place} of the entry once more, which has {len(self.objects)} before it")
        found = self.objects[place]
        if found is None:
            raise UnsupportedFormat(
                f"{self.path or 'state'}: the value at byte {self.begin} holds itself, which no column can; change "
                "it in the job",
                kind=ErrorKind.UNSUPPORTED_TYPE,
                path=self.path,
            )
        # References to references may stand for far more than was stored.
        self.repeated += found[1]
        if self.repeated > self.limit:
            raise UnsupportedFormat(
                f"{self.path or 'state'}: the value at byte {self.begin} has {self.end - self.begin:,} bytes and "
                f"repeats parts of itself to more than {self.limit:,}; change it in the job",
                kind=ErrorKind.LIMIT_EXCEEDED,
                path=self.path,
                limit=self.limit,
            )
        return found[0]

    def content(self, name: str, depth: int) -> Node:
        if name in self.known.custom:
            self.unknown(f"{name}, which has a serializer of its own")
        leaf = _LEAVES.get(name)
        if leaf is not None:
            return name, leaf.take(self)
        if name in _FIELDS:
            found = [self.attribute(kind, depth + 1) for kind in _FIELDS[name]]
            for item, ends in zip(found, _RANGES.get(name, ()), strict=False):
                self.ranged(item, ends)
            return name, found
        if _COLLECTIONS.fullmatch(name) or name in _SORTED:
            if name in _SORTED:
                comparator = self.value(depth + 1)
                if comparator is not None:
                    self.unknown(f"{comparator[0]}, which compares")
            return name, [self.value(depth + 1) for _ in range(self.count())]
        if _MAPS.fullmatch(name):
            if name == "java.util.TreeMap" and self.value(depth + 1) is not None:
                self.unknown("comparator of a TreeMap")
            return name, [(self.value(depth + 1), self.value(depth + 1)) for _ in range(self.count())]
        if _EMPTY.fullmatch(name):
            return name, []
        if _SINGLE.fullmatch(name):
            if name.endswith("Map"):
                return name, [(self.value(depth + 1), self.value(depth + 1))]
            return name, [self.value(depth + 1)]
        if name == _AS_LIST:
            count = self.count()
            self.name_of_class()
            return name, [self.value(depth + 1) for _ in range(count)]
        if name in _ENUM_SETS:
            kind = self.name_of_class()
            return name, [self.constant(kind or "null") for _ in range(self.count())]
        if name in _PRIMITIVES:
            read = _LEAVES[_PRIMITIVES[name]].take
            return name, [(_PRIMITIVES[name], read(self)) for _ in range(self.count(True))]
        if name.startswith("["):
            return name, self.array(name, depth + 1)
        return self.constant(name)

    def constant(self, name: str) -> Node:
        found = self.known.constants(name)
        if found is None:
            self.unknown(name)
        place = self.unsigned() - 1
        if not 0 <= place < len(found[1]):
            self.damaged(f"it is constant {place} of {found[0]}, which has {len(found[1])}")
        return found[0], found[1][place]

    def array(self, name: str, depth: int) -> list[Node]:
        element = name[2:-1] if name.startswith("[L") else name[1:]
        inner = element.lstrip("[")
        whole = inner[1:-1] if inner.startswith("L") and inner != element else inner
        final = element in _FINAL or f"[{inner}" in _PRIMITIVES or whole in _FINAL or inner in ("B", "C")
        count = self.count(True)
        if final:
            return [self.of(element, depth, nullable=True) for _ in range(count)]
        if self.known.constants(element) is not None:
            # Whether it is final depends on its constants.
            self.unknown(name)
        return [self.value(depth) for _ in range(count)]

    def attribute(self, kind: str, depth: int) -> Any:
        if kind in _ATTRIBUTES:
            return _ATTRIBUTES[kind](self)
        # A reference may be to a value of another class.
        found = self.value(depth) if kind == _ZONE else self.of(kind, depth, nullable=True)
        if found is None or (found[0] not in _ZONES if kind == _ZONE else found[0] != kind):
            self.damaged(f"a field that is a {kind} has {found[0] if found else 'null'}")
        return found


_ATTRIBUTES: Final[dict[str, Callable[[Reader], Any]]] = {
    "int": lambda at: at.signed(),
    "long": lambda at: at.signed(9),
    "short": lambda at: at.number(">h"),
    "byte": lambda at: at.number("b"),
}


@dataclass(frozen=True)
class Leaf:
    """A class without parts: its Arrow type, and how its content is taken and written."""

    arrow: pa.DataType
    take: Callable[[Reader], Any]
    write: Callable[[Any], bytes]


def varint(value: int) -> bytes:
    """Return a number that is not negative, 7 bits a byte."""
    found = bytearray()
    while value >= 0x80 and len(found) < 8:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def zigzag(value: int) -> bytes:
    """Return a number with its sign in the lowest bit."""
    return varint(value << 1 if value >= 0 else (~value << 1) | 1)


def written_text(value: str) -> bytes:
    """Return a string as Kryo writes it."""
    units = value.encode("utf-16-le")
    count = len(units) // 2
    if 1 < count < 64 and value.isascii():
        raw = value.encode("ascii")
        return raw[:-1] + bytes([raw[-1] | 0x80])
    number = count + 1
    head = [number & 0x3F | (0xC0 if number >> 6 else 0x80)]
    number >>= 6
    while number:
        head.append(number & 0x7F | (0x80 if number >> 7 else 0))
        number >>= 7
    if value.isascii():
        return bytes(head) + value.encode("ascii")
    halves = "".join(chr(int.from_bytes(units[at : at + 2], "little")) for at in range(0, len(units), 2))
    return bytes(head) + halves.encode("utf-8", "surrogatepass")


def _octets(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
    return varint(len(raw) + 1) + raw


def _big_integer(at: Reader) -> int:
    return int.from_bytes(at.take(at.count(True)), "big", signed=True)


def _decimal(at: Reader) -> str:
    # Through decimal: Python limits its own conversion from large integers to text.
    number, scale = decimal.Decimal(_big_integer(at)), at.signed()
    return str(number.scaleb(-scale, _EXACT) if scale else number)


_EXACT: Final = decimal.Context(prec=decimal.MAX_PREC, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)


def _written_integer(value: str) -> bytes:
    if re.fullmatch(r"[+-]?[0-9]+", value) is None:
        raise ValueError
    return _octets(int(decimal.Decimal(value)))


def _written_decimal(value: str) -> bytes:
    sign, digits, exponent = decimal.Decimal(value).as_tuple()
    number = int(decimal.Decimal((sign, digits, 0)))
    return _octets(number) + zigzag(-int(exponent))


def _uuid(at: Reader) -> str:
    high, low = at.signed(9), at.signed(9)
    text = f"{high & (1 << 64) - 1:016x}{low & (1 << 64) - 1:016x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _written_uuid(value: str) -> bytes:
    raw = bytes.fromhex(value.replace("-", ""))
    return b"".join(zigzag(int.from_bytes(part, "big", signed=True)) for part in (raw[:8], raw[8:]))


def _bits(at: Reader) -> list[int]:
    words = [at.number(">Q") for _ in range(at.count())]
    return [64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1]


def _written_bits(value: list[int]) -> bytes:
    words = [0] * (max(value, default=-1) // 64 + 1)
    for bit in value:
        words[bit // 64] |= 1 << bit % 64
    return varint(len(words)) + b"".join(word.to_bytes(8, "big") for word in words)


def _ms_written(value: int) -> bytes:
    return varint(value // 1000 & (1 << 64) - 1)


def _characters(at: Reader) -> str:
    raw = at.take(2 * at.count(True))
    try:
        return raw.decode("utf-16-be")
    except UnicodeDecodeError:
        at.damaged("characters have half a surrogate pair")


def _character(at: Reader) -> str:
    unit = at.number(">H")
    if unit & 0xF800 == 0xD800:
        at.damaged("a character is half a surrogate pair")
    return chr(unit)


def _fixed(form: str, kind: pa.DataType) -> Leaf:
    return Leaf(kind, lambda at: at.number(form), lambda value: structs.pack(form, value))


_MOMENT: Final = pa.struct([("seconds", pa.int64()), ("nanos", pa.int32())])
_UTC: Final = pa.timestamp("us", tz="UTC")
_TEXT: Final = Leaf(pa.string(), Reader.text, written_text)
_DATE: Final = Leaf(_UTC, lambda at: at.ranged(at.positive_long() * 1000, _LONG), _ms_written)


def _timestamp(at: Reader) -> dict[str, int]:
    ms, nanos = at.positive_long(), at.ranged(at.unsigned(), _NANOS_OF_SECOND)
    return {"seconds": ms // 1000, "nanos": nanos}


_LEAVES: Final[dict[str, Leaf]] = {
    "java.lang.Integer": Leaf(pa.int32(), Reader.signed, zigzag),
    "java.lang.Long": Leaf(pa.int64(), lambda at: at.signed(9), zigzag),
    "java.lang.Short": _fixed(">h", pa.int16()),
    "java.lang.Byte": _fixed("b", pa.int8()),
    "java.lang.Float": _fixed(">f", pa.float32()),
    "java.lang.Double": _fixed(">d", pa.float64()),
    "java.lang.Boolean": Leaf(pa.bool_(), lambda at: at.take(1) == b"\1", lambda value: bytes([value])),
    "java.lang.Character": Leaf(pa.string(), _character, lambda value: value.encode("utf-16-be")),
    "java.lang.String": _TEXT,
    "java.lang.StringBuilder": _TEXT,
    "java.lang.StringBuffer": _TEXT,
    "java.net.URI": _TEXT,
    "java.util.regex.Pattern": _TEXT,
    "java.util.Currency": _TEXT,
    "sun.util.calendar.ZoneInfo": _TEXT,
    "java.util.UUID": Leaf(pa.string(), _uuid, _written_uuid),
    "java.math.BigInteger": Leaf(
        pa.string(),
        lambda at: str(decimal.Decimal(_big_integer(at))),
        _written_integer,
    ),
    "java.math.BigDecimal": Leaf(pa.string(), _decimal, _written_decimal),
    "java.util.Date": _DATE,
    "java.sql.Date": _DATE,
    "java.sql.Time": _DATE,
    "java.sql.Timestamp": Leaf(
        _MOMENT,
        _timestamp,
        lambda value: (
            varint((value["seconds"] * 1000 + value["nanos"] // 1_000_000) & (1 << 64) - 1) + varint(value["nanos"])
        ),
    ),
    "java.util.BitSet": Leaf(pa.list_(pa.field("element", pa.int32())), _bits, _written_bits),
    "[B": Leaf(pa.binary(), lambda at: at.take(at.count(True)), lambda value: varint(len(value) + 1) + value),
    "[C": Leaf(
        pa.string(),
        _characters,
        lambda value: varint(len(value.encode("utf-16-le")) // 2 + 1) + value.encode("utf-16-be"),
    ),
}


def _days(fields: Sequence[int]) -> int:
    day, month, year = fields
    months = np.datetime64((year - 1970) * 12 + month - 1, "M")
    return int(months.astype("datetime64[D]").astype(np.int64)) + day - 1


def _date_fields(days: int) -> list[int]:
    date = np.datetime64(days, "D")
    month = date.astype("datetime64[M]")
    number = int(month.astype(np.int64))
    return [int((date - month.astype("datetime64[D]")).astype(np.int64)) + 1, number % 12 + 1, number // 12 + 1970]


def _nanos(fields: Sequence[int]) -> int:
    hour, minute, nano, second = fields
    return ((hour * 60 + minute) * 60 + second) * 1_000_000_000 + nano


def _time_fields(nanos: int) -> list[int]:
    seconds, nano = divmod(nanos, 1_000_000_000)
    return [seconds // 3600, seconds // 60 % 60, nano, seconds % 60]


def _moment(fields: Sequence[int]) -> dict[str, int]:
    return {"seconds": fields[1], "nanos": fields[0]}


def _local(fields: Sequence[Any]) -> dict[str, int]:
    date, time = fields
    return {"date": _days(date[1]), "nanos": _nanos(time[1])}


def _offset(node: Any) -> str:
    seconds = node[1][0]
    hours, minutes, rest = abs(seconds) // 3600, abs(seconds) // 60 % 60, abs(seconds) % 60
    text = f"{'-' if seconds < 0 else '+'}{hours:02d}:{minutes:02d}" + (f":{rest:02d}" if rest else "")
    return text if seconds else "Z"


def _clock(fields: Sequence[int]) -> str:
    hour, minute, nano, second = fields
    text = f"{hour:02d}:{minute:02d}" + (f":{second:02d}" if second or nano else "")
    digits = f"{nano:09d}"
    while digits.endswith("000"):
        digits = digits[:-3]
    return f"{text}.{digits}" if digits else text


def _year(year: int) -> str:
    # As java.time: four digits, and a sign beyond them.
    return f"{'+' if year > 9999 else '-' if year < 0 else ''}{abs(year):04d}"


def _iso(fields: Sequence[Any]) -> str:
    day, month, year = fields[0][1]
    return f"{_year(year)}-{month:02d}-{day:02d}T{_clock(fields[1][1])}"


def _zoned(fields: Sequence[Any]) -> str:
    text = _iso(fields[0][1]) + _offset(fields[1])
    zone = fields[2]
    return text if zone[0] == "java.time.ZoneOffset" else f"{text}[{zone[1][0][1]}]"


@dataclass(frozen=True)
class Times:
    """A class of the JDK that is written by its fields: its Arrow type, and values from fields and
    back. ``back`` is None for texts, which are not written.
    """

    arrow: pa.DataType
    of: Callable[[Any], Any]
    back: Callable[[Any], list[Any]] | None = None


def _moment_fields(value: dict[str, int]) -> list[int]:
    return [value["nanos"], value["seconds"]]


_TEXTS: Final[dict[str, Callable[[Any], str]]] = {
    "java.time.ZonedDateTime": _zoned,
    "java.time.OffsetDateTime": lambda fields: _iso(fields[0][1]) + _offset(fields[1]),
    "java.time.OffsetTime": lambda fields: _clock(fields[1][1]) + _offset(fields[0]),
    "java.time.ZoneOffset": lambda fields: _offset(("", fields)),
    "java.time.ZoneRegion": lambda fields: str(fields[0][1]),
    "java.time.YearMonth": lambda fields: f"{_year(fields[1])}-{fields[0]:02d}",
    "java.time.MonthDay": lambda fields: f"--{fields[1]:02d}-{fields[0]:02d}",
}
_TIMES: Final[dict[str, Times]] = {
    **{name: Times(pa.string(), make) for name, make in _TEXTS.items()},
    "java.time.Instant": Times(_MOMENT, _moment, _moment_fields),
    "java.time.Duration": Times(_MOMENT, _moment, _moment_fields),
    "java.time.LocalDate": Times(pa.date32(), _days, _date_fields),
    "java.time.LocalTime": Times(pa.int64(), _nanos, _time_fields),
    "java.time.LocalDateTime": Times(
        pa.struct([("date", pa.date32()), ("nanos", pa.int64())]),
        _local,
        lambda value: [
            ("java.time.LocalDate", _date_fields(value["date"])),
            ("java.time.LocalTime", _time_fields(value["nanos"])),
        ],
    ),
    "java.time.Period": Times(
        pa.struct([("years", pa.int32()), ("months", pa.int32()), ("days", pa.int32())]),
        lambda fields: {"years": fields[2], "months": fields[1], "days": fields[0]},
        lambda value: [value["days"], value["months"], value["years"]],
    ),
    "java.time.Year": Times(pa.int32(), lambda fields: fields[0], lambda value: [value]),
    "java.util.concurrent.atomic.AtomicInteger": Times(pa.int32(), lambda fields: fields[0], lambda value: [value]),
    "java.util.concurrent.atomic.AtomicLong": Times(pa.int64(), lambda fields: fields[0], lambda value: [value]),
    "java.util.concurrent.atomic.AtomicBoolean": Times(
        pa.bool_(), lambda fields: fields[0] != 0, lambda value: [int(value)]
    ),
}


def is_plain(name: str) -> bool:
    """Return whether a value of a list or map is a count and its items, and no more."""
    return (_COLLECTIONS.fullmatch(name) or _MAPS.fullmatch(name)) is not None and name != "java.util.TreeMap"


NOTHING, LEAF, LIST, MAP, ENUM, MIXED = "nothing", "leaf", "list", "map", "enum", "mixed"
_DEEPEST: Final = 5
"""How deep lists and maps are nested in a column; what is deeper is text."""
_INTEGERS: Final = ("java.lang.Byte", "java.lang.Short", "java.lang.Integer", "java.lang.Long")
_FLOATS: Final = ("java.lang.Float", "java.lang.Double")


@dataclass(frozen=True)
class Shape:
    """What values of a column are, by those that were seen.

    ``nothing``: only nulls. ``mixed``: of different types; text in JSON, as ``nothing`` is, too.
    """

    kind: str = NOTHING
    classes: tuple[str, ...] = ()
    """All that were seen. Numbers have the one that holds the others."""
    inner: tuple[Shape, ...] = ()
    """Of elements, or of keys and values."""

    @property
    def arrow(self) -> pa.DataType:
        if self.kind == LEAF:
            name = self.classes[0]
            return _LEAVES[name].arrow if name in _LEAVES else _TIMES[name].arrow
        if self.kind == LIST:
            return pa.list_(pa.field("element", self.inner[0].arrow))
        if self.kind == MAP:
            return pa.map_(pa.field("key", self.inner[0].arrow, nullable=False), self.inner[1].arrow)
        return pa.string()

    @property
    def said(self) -> str:
        """What it is, for messages."""
        names = " or ".join(name.rpartition(".")[2] for name in self.classes)
        inner = ", ".join(one.said for one in self.inner)
        return f"{names} of {inner}" if inner else names or "anything"

    def plain(self) -> list[Any]:
        """Return it as lists of JSON, which :func:`shape_in` reads."""
        return [self.kind, list(self.classes), [one.plain() for one in self.inner]]


def goes_back(shape: Shape) -> bool:
    """Return whether values can be written again from the column of a shape."""
    if shape.kind in (NOTHING, MIXED):
        return False
    if any(name.startswith("[") and name not in ("[B", "[C", *_PRIMITIVES) for name in shape.classes):
        return False
    if shape.kind == LEAF:
        name = shape.classes[0]
        return name in _LEAVES or _TIMES[name].back is not None
    # Of lists that were all empty, the first other one would tell.
    return all(inner.kind == NOTHING or goes_back(inner) for inner in shape.inner)


def shape_in(found: Any) -> Shape:
    """Return the shape that :meth:`Shape.plain` wrote."""
    kind, classes, inner = found
    return Shape(str(kind), tuple(map(str, classes)), tuple(shape_in(one) for one in inner))


UNSEEN: Final = Shape()
MIXED_SHAPE: Final = Shape(MIXED)


def shape_of(node: Node, depth: int = 0) -> Shape:
    """Return the shape of one value."""
    if node is None:
        return UNSEEN
    name, value = node
    if name in _LEAVES or name in _TIMES:
        return Shape(LEAF, (name,))
    if isinstance(value, str):
        return Shape(ENUM, (name,))
    if depth >= _DEEPEST:
        return MIXED_SHAPE
    if is_map(name):
        keys, values = UNSEEN, UNSEEN
        for key, item in value:
            if key is None:
                return MIXED_SHAPE
            keys, values = merged(keys, shape_of(key, depth + 1)), merged(values, shape_of(item, depth + 1))
        if keys.kind in (MIXED, LIST, MAP):
            return MIXED_SHAPE
        return Shape(MAP, (name,), (keys, values))
    element = UNSEEN
    for item in value:
        element = merged(element, shape_of(item, depth + 1))
    return Shape(LIST, (name,), (element,))


def merged(one: Shape, other: Shape) -> Shape:
    """Return the shape that values of both have."""
    if one == other or other.kind == NOTHING:
        return one
    if one.kind == NOTHING:
        return other
    if one.kind != other.kind or MIXED in (one.kind, other.kind):
        return MIXED_SHAPE
    if one.kind in (LIST, MAP):
        inner = tuple(merged(mine, its) for mine, its in zip(one.inner, other.inner, strict=True))
        if one.kind == MAP and inner[0].kind == MIXED:
            return MIXED_SHAPE
        return Shape(one.kind, tuple(dict.fromkeys((*one.classes, *other.classes))), inner)
    for wider in (_INTEGERS, _FLOATS):
        if one.classes[0] in wider and other.classes[0] in wider:
            return Shape(LEAF, (wider[max(wider.index(one.classes[0]), wider.index(other.classes[0]))],))
    return one if one.classes == other.classes else MIXED_SHAPE


def fits(node: Node, shape: Shape) -> bool:
    """Return whether a value can stand in a column of a shape."""
    if node is None or shape.kind in (NOTHING, MIXED):
        return True
    name, value = node
    if shape.kind == LEAF:
        return _holds(shape.classes[0], name)
    if shape.kind == ENUM:
        return isinstance(value, str) and name == shape.classes[0]
    if not isinstance(value, list) or name in _LEAVES or name in _TIMES or is_map(name) != (shape.kind == MAP):
        return False
    if shape.kind == LIST:
        return all(fits(item, shape.inner[0]) for item in value)
    keys, values = shape.inner
    return all(key is not None and fits(key, keys) and fits(item, values) for key, item in value)


def _holds(wide: str, name: str) -> bool:
    if wide == name:
        return True
    for wider in (_INTEGERS, _FLOATS):
        if wide in wider and name in wider:
            return wider.index(name) < wider.index(wide)
    return False


def python(node: Node, shape: Shape) -> Any:
    """Return a value as :func:`pyarrow.array` takes it for the shape's type."""
    if node is None:
        return None
    name, value = node
    if shape.kind in (NOTHING, MIXED):
        return json.dumps(_plain(node), ensure_ascii=False)
    if shape.kind == LIST:
        return [python(item, shape.inner[0]) for item in value]
    if shape.kind == MAP:
        return [(python(key, shape.inner[0]), python(item, shape.inner[1])) for key, item in value]
    return _TIMES[name].of(value) if name in _TIMES else value


def text_of(raw: bytes, known: Known) -> str | None:
    """Return a value as JSON; None for null.

    Raises ``DamagedCheckpoint`` and ``UnsupportedFormat``.
    """
    at = Reader(known, memoryview(raw), 0, len(raw), "")
    found: str | None = python(at.value(), MIXED_SHAPE)
    if at.position < len(raw):
        at.damaged(f"{len(raw) - at.position} bytes follow it")
    return found


def _plain(node: Node) -> Any:
    """Return a value for JSON: bytes are hexadecimal, maps whose keys are no text are pairs."""
    if node is None:
        return None
    name, value = node
    if name in _TIMES:
        return _TIME_TEXTS.get(name, _TIMES[name].of)(value)
    if name in _LEAVES and _LEAVES[name] is _DATE:
        return f"{np.datetime64(value, 'us')}Z"
    if name in _LEAVES or isinstance(value, str):
        return value.hex() if isinstance(value, bytes) else value if value == value else "NaN"
    if is_map(name):
        pairs = [(_plain(key), _plain(item)) for key, item in value]
        texts = {key for key, _ in pairs if isinstance(key, str)}
        return dict(pairs) if len(texts) == len(pairs) else [list(pair) for pair in pairs]
    return [_plain(item) for item in value]


_TIME_TEXTS: Final[dict[str, Callable[[Any], Any]]] = {
    "java.time.LocalDate": lambda fields: f"{_year(fields[2])}-{fields[1]:02d}-{fields[0]:02d}",
    "java.time.LocalTime": _clock,
    "java.time.LocalDateTime": _iso,
}


class NotWrittenError(Exception):
    """A value that is read here, and not written; the message says which."""


class WrongValueError(Exception):
    """A value that Flink would not read as it is; the message says why, and what is wanted."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.columns: list[str] = []
        """Where it is: the columns around it, outermost first."""


class Writer:
    """Writes one entry; no value refers to an earlier one.

    Raises ``NotWrittenError`` for a class, ``WrongValueError`` for a value.
    """

    def __init__(self, known: Known) -> None:
        self.known, self.ids = known, known.ids
        self.classes: dict[str, int] = {}

    def value(self, value: Any, shape: Shape) -> bytes:
        if value is None:
            return b"\0"
        if shape.kind in (NOTHING, MIXED):
            raise NotWrittenError("values of Kryo whose types differ are read as JSON, and not written")
        name = _one_class(shape)
        head = self.name_of_class(name)
        if name not in _WRAPPERS or name == "java.lang.String":
            head += b"\1"
        if shape.kind == ENUM:
            return head + self._constant(name, value)
        if name in _ENUM_SETS:
            kind = shape.inner[0].classes[0]
            places = b"".join(self._constant(kind, item) for item in value)
            return head + self.name_of_class(kind) + varint(len(value)) + places
        if shape.kind == LIST:
            return head + self._list(name, value, shape.inner[0])
        if shape.kind == MAP:
            keys, values = shape.inner
            found = Counter(repr(key) for key, _ in value)
            if len(found) < len(value) and name != "java.util.IdentityHashMap":
                twice = next(key for key, count in found.items() if count > 1)
                raise WrongValueError(
                    f"has the key {twice:.80} more than once, and a {name} has it once; remove the others"
                )
            pairs = [(self.value(key, keys), self.value(item, values)) for key, item in value]
            compared = b"\0" if name == "java.util.TreeMap" else b""
            return head + compared + varint(len(pairs)) + b"".join(part for pair in pairs for part in pair)
        return head + self._content(name, value)

    def _constant(self, name: str, value: Any) -> bytes:
        names = self.known.enums.get(name) or ENUMS[name]
        if value not in names:
            raise WrongValueError(f"is {value!r}, which is no constant of {name}; give one of {', '.join(names)}")
        return varint(names.index(value) + 1)

    def _content(self, name: str, value: Any) -> bytes:
        """Return the content of a class without parts, if it is read as the same value."""
        back = _TIMES[name].back if name in _TIMES else _LEAVES[name].write
        if back is None:
            raise NotWrittenError(f"values of Kryo of the class {name} are read as text, and not written")
        try:
            found = back(value)
            raw = found if isinstance(found, bytes) else _written_fields(name, found)
            if name in _ANY or _same(name, value, self._again(name, raw)):
                return raw
        except (TypeError, ValueError, ArithmeticError, LookupError, structs.error, DamagedCheckpoint):
            pass
        shown = (
            f"{np.datetime64(value, 'us')}Z" if value is not None and _LEAVES.get(name) is _DATE else f"{value!r:.100}"
        )
        wanted = _WANTED.get(name, "whole milliseconds" if _LEAVES.get(name) is _DATE else "not null")
        raise WrongValueError(f"is {shown}, and a {name} is {wanted}; correct the value")

    def _again(self, name: str, raw: bytes) -> Any:
        at = Reader(self.known, memoryview(raw), 0, len(raw), "")
        found = at.content(name, 0)
        if at.position < len(raw):
            at.damaged("bytes follow it")
        return python(found, Shape(LEAF, (name,)))

    def name_of_class(self, name: str) -> bytes:
        if name in self.ids:
            return varint(self.ids[name] + 2)
        if name in self.classes:
            return b"\1" + varint(self.classes[name])
        self.classes[name] = len(self.classes)
        return b"\1" + varint(self.classes[name]) + written_text(name)

    def _list(self, name: str, value: Any, shape: Shape) -> bytes:
        if name in _PRIMITIVES:
            return varint(len(value) + 1) + b"".join(self._content(_PRIMITIVES[name], item) for item in value)
        compared = b"\0" if name in _SORTED else b""
        return compared + varint(len(value)) + b"".join(self.value(item, shape) for item in value)


_ANY: Final = frozenset(_WRAPPERS) - {"java.lang.Character"}
"""Classes that have every value of their Arrow type."""
_CLOCK: Final = "from 0 to 86,399,999,999,999 nanoseconds"
_MOMENTS: Final = "`seconds`, and `nanos` from 0 to 999,999,999, neither null"
_WANTED: Final = {
    "java.time.Instant": _MOMENTS,
    "java.time.Duration": _MOMENTS,
    "java.sql.Timestamp": f"{_MOMENTS}, whose milliseconds fit into 64 bits",
    "java.time.LocalDate": "a day of the years -5,800,000 to 5,800,000",
    "java.time.LocalTime": _CLOCK,
    "java.time.LocalDateTime": f"a `date` of the years -5,800,000 to 5,800,000, and `nanos` {_CLOCK}",
    "java.time.Period": "`years`, `months` and `days`, none of them null",
    "java.util.UUID": "hexadecimal digits in groups of 8, 4, 4, 4 and 12",
    "java.math.BigInteger": "decimal digits, with or without a sign",
    "java.math.BigDecimal": "a decimal number whose exponent fits into 32 bits",
    "java.lang.Character": "one UTF-16 unit",
    "java.util.BitSet": "the numbers of its bits, from 0",
}
"""What values can be, for messages."""


def _same(name: str, value: Any, again: Any) -> bool:
    """Return whether a value was read again as what it says."""
    if name.startswith("java.math."):
        return decimal.Decimal(value) == decimal.Decimal(again)
    if name == "java.util.UUID":
        return bool(value.replace("-", "").lower() == again.replace("-", ""))
    return bool((sorted(set(value)) if name == "java.util.BitSet" else value) == again)


def _written_fields(name: str, fields: Sequence[Any]) -> bytes:
    found = b""
    for kind, item in zip(_FIELDS[name], fields, strict=True):
        if kind in ("int", "long"):
            found += zigzag(item)
        elif kind in ("short", "byte"):
            found += structs.pack(">h" if kind == "short" else "b", item)
        else:
            found += b"\1" + _written_fields(kind, item[1])
    return found


def _one_class(shape: Shape) -> str:
    """Return the class to write: the only one that was seen, or a plain one."""
    arrays = [name for name in shape.classes if name.startswith("[") and name not in ("[B", "[C", *_PRIMITIVES)]
    if arrays:
        raise NotWrittenError(f"arrays of Kryo of the class {arrays[0]} are read, and not written")
    if len(shape.classes) == 1 and _writable(shape):
        return shape.classes[0]
    if shape.kind == LIST:
        return "java.util.LinkedHashSet" if all("Set" in name for name in shape.classes) else "java.util.ArrayList"
    return "java.util.LinkedHashMap" if shape.kind == MAP else shape.classes[0]


def _writable(shape: Shape) -> bool:
    """Return whether lists and maps of any size can be written in their class."""
    name = shape.classes[0]
    if name in _ENUM_SETS:
        return shape.inner[0].kind == ENUM
    return name != _AS_LIST and not _EMPTY.fullmatch(name) and not _SINGLE.fullmatch(name)
