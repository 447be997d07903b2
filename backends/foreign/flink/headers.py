"""Headers of streams: which states there are, with their options and serializers.

An unknown class of serializer ends a header: what was read before it is returned, with ``stopped``.
What follows is data for readers that can find it without the header. ``describe`` converts a header
for the layouts, and says what is refused of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from stateformat.errors import DamagedCheckpoint, UnsupportedFormat

from ..cursor import Cursor
from ..source import FLINK_VERSIONS
from .compound import ListOf, MapOf, Sequential, Timer
from .key_hash import FLINK_KEY_HASH, USER_KEY_HASH, is_hashable
from .lanes import Opaque, Serializer
from .layouts import Layout, Parts, Stored
from .scalars import Nothing
from .snapshots import UnknownClass, more_than_adapted, read_top

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


def read_keyed_header(data: bytes | memoryview, path: str) -> KeyedHeader:
    """Read the header at the beginning of ``data``, which may continue after it.

    Raises ``DamagedCheckpoint``, and ``UnsupportedFormat`` for another version.
    """
    at = Cursor(data, path)
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


def read_operator_header(data: bytes | memoryview, path: str) -> OperatorHeader:
    """Read the header at the beginning of ``data``, which may continue after it.

    Raises ``DamagedCheckpoint``, and ``UnsupportedFormat`` for another version.
    """
    at = Cursor(data, path)
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
