"""Values as Kryo 2 writes them in Flink 1, written here by hand: the tests' own side."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

ARRAY_LIST, HASH_MAP = "java.util.ArrayList", "java.util.HashMap"


def seven(value: int) -> bytes:
    """A number that is not negative; the ninth byte has eight bits."""
    found = b""
    while value > 0x7F and len(found) < 8:
        found += bytes([value % 128 + 128])
        value //= 128
    return found + bytes([value])


def signed(value: int) -> bytes:
    return seven(value * 2 if value >= 0 else -value * 2 - 1)


def text(value: str) -> bytes:
    """A string: plain ASCII ends with its top bit set; any other has its length before it."""
    if value.isascii() and 2 <= len(value) <= 63:
        return value[:-1].encode() + bytes([ord(value[-1]) + 128])
    units = struct.unpack(f"<{len(value.encode('utf-16-le')) // 2}H", value.encode("utf-16-le"))
    length = len(units) + 1
    assert length < 1 << 13
    head = bytes([length + 128]) if length < 64 else bytes([length % 64 + 192, length // 64])
    return head + b"".join(chr(unit).encode("utf-8", "surrogatepass") for unit in units)


def named(name: str, place: int = 0) -> bytes:
    """A class that has no number, the first time it is there."""
    return b"\1" + seven(place) + text(name)


def leaf(value: Any, longs: bool = False) -> bytes:
    """A value of Integer or Long, Double, Boolean, String; null."""
    if value is None:
        return b"\0"
    if isinstance(value, bool):
        return bytes([5, value])
    if isinstance(value, int):
        return (b"\x09" if longs else b"\2") + signed(value)
    if isinstance(value, float):
        return b"\x0a" + struct.pack(">d", value)
    return b"\3\1" + text(value)


def listed(values: Sequence[Any], name: str = ARRAY_LIST, longs: bool = False) -> bytes:
    """A collection of such values."""
    return named(name) + b"\1" + seven(len(values)) + b"".join(leaf(value, longs) for value in values)


def mapped(pairs: Sequence[tuple[Any, Any]], name: str = HASH_MAP, longs: bool = False) -> bytes:
    """A map of such values, whose keys are no longs."""
    items = b"".join(leaf(key) + leaf(value, longs) for key, value in pairs)
    return named(name) + b"\1" + seven(len(pairs)) + items


def bits(places: Sequence[int]) -> bytes:
    """A ``BitSet`` with these bits."""
    words = max(places, default=-1) // 64 + 1
    whole = sum(1 << place for place in places)
    return b"\x4c\1" + seven(words) + b"".join(struct.pack(">Q", whole >> 64 * at & 2**64 - 1) for at in range(words))


def is_written(raw: bytes, value: Any) -> bool:
    """Whether bytes of Flink's are a list, a map or bits that were read."""
    found = [leaf(value)] if not isinstance(value, list | dict) else []
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list):
        found = [listed(value, name) for name in (ARRAY_LIST, "java.util.LinkedHashSet")] if _plain(value) else []
        # The class that the serializer was made for has a number.
        found += [b"\x57\1" + one[len(named(ARRAY_LIST)) + 1 :] for one in found[:1]]
        if all(isinstance(item, int) for item in value):
            found.append(bits(value))
        if all(isinstance(item, list | tuple) and len(item) == 2 for item in value):
            pairs = [(key, held) for key, held in value]
            found += [mapped(pairs), mapped(pairs, longs=True)]
    return raw in found


def _plain(values: list[Any]) -> bool:
    return not any(isinstance(item, list | tuple | dict) for item in values)
