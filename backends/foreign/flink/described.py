"""Converts headers for the layouts: the states of one stream, and what is refused of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from .header import TIMERS, KeyedHeader, StateInfo
from .key_hash import FLINK_KEY_HASH, USER_KEY_HASH, is_hashable
from .layouts import Layout, Parts, Stored
from .serializers import ListOf, MapOf, Nothing, Opaque, Sequential, Serializer, Timer

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
