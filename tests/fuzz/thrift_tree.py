"""Thrift's compact protocol as a tree that can be changed and written again: for forging footers
and page headers.

A structure is a list of ``[field, type, value]``; a value is an int (numbers, as stored: zigzag for
integers), ``bytes``, a structure, or ``(element type, [values])`` for a list. Written without the
product's code, so that neither hides the other.

What is parsed may be any bytes: :class:`Unreadable` for what is no structure, in time and memory
linear in its length.
"""

from __future__ import annotations

import io
from typing import Any

STOP, TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(13)
Struct = list[list[Any]]
_DEPTH_MAX = 64


class Unreadable(ValueError):
    """The bytes are no structure."""


def zigzag(value: int) -> int:
    return value << 1 if value >= 0 else (-value << 1) - 1


def unzigzag(coded: int) -> int:
    return (coded >> 1) ^ -(coded & 1)


def parse(data: bytes) -> tuple[Struct, int]:
    """The structure at the front of ``data``, and how many bytes it takes."""
    source = io.BytesIO(data)
    tree = _struct(source, len(data), 0)
    return tree, source.tell()


def _taken(source: io.BytesIO, count: int, end: int) -> bytes:
    if count > end - source.tell():
        raise Unreadable(f"{count} bytes at {source.tell()} of {end}")
    return source.read(count)


def _varint(source: io.BytesIO, end: int) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = _taken(source, 1, end)[0]
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise Unreadable(f"a number of more than 10 bytes before {source.tell()}")


def _struct(source: io.BytesIO, end: int, depth: int) -> Struct:
    if depth > _DEPTH_MAX:
        raise Unreadable(f"structures nested more than {_DEPTH_MAX} deep")
    found: Struct = []
    field = 0
    while head := _taken(source, 1, end)[0]:
        field = field + (head >> 4) if head >> 4 else unzigzag(_varint(source, end))
        found.append([field, head & 15, _value(source, head & 15, end, depth, element=False)])
    return found


def _value(source: io.BytesIO, kind: int, end: int, depth: int, *, element: bool) -> Any:
    if kind in (TRUE, FALSE):
        return _taken(source, 1, end)[0] if element else kind
    if kind == BYTE:
        return _taken(source, 1, end)[0]
    if kind in (I16, I32, I64):
        return _varint(source, end)
    if kind == DOUBLE:
        return _taken(source, 8, end)
    if kind == BINARY:
        return _taken(source, _varint(source, end), end)
    if kind == STRUCT:
        return _struct(source, end, depth + 1)
    if kind not in (LIST, SET) or depth > _DEPTH_MAX:
        raise Unreadable(f"type {kind}, {depth} deep")
    head = _taken(source, 1, end)[0]
    count = _varint(source, end) if head >> 4 == 15 else head >> 4
    if count > end - source.tell():
        raise Unreadable(f"{count} elements at {source.tell()} of {end}")
    return head & 15, [_value(source, head & 15, end, depth + 1, element=True) for _ in range(count)]


def unparse(tree: Struct) -> bytes:
    out = bytearray()
    before = 0
    for field, kind, value in tree:
        if 0 < field - before < 16:
            out.append((field - before) << 4 | kind)
        else:
            out.append(kind)
            out += varint(zigzag(field))
        before = field
        out += _bytes(kind, value, element=False)
    return bytes(out) + b"\0"


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def _bytes(kind: int, value: Any, *, element: bool) -> bytes:
    if kind in (TRUE, FALSE):
        return bytes([value]) if element else b""
    if kind == BYTE:
        return bytes([value & 255])
    if kind in (I16, I32, I64):
        return varint(value)
    if kind == DOUBLE:
        return bytes(value)
    if kind == BINARY:
        return varint(len(value)) + value
    if kind == STRUCT:
        return unparse(value)
    inner, values = value
    head = bytes([len(values) << 4 | inner]) if len(values) < 15 else bytes([240 | inner]) + varint(len(values))
    return head + b"".join(_bytes(inner, item, element=True) for item in values)


def get(tree: Struct, *path: int) -> Any:
    """The value under these field numbers; in a list they are positions."""
    for step in path:
        tree = tree[1][step] if isinstance(tree, tuple) else next(value for field, _, value in tree if field == step)
    return tree


def put(tree: Struct, value: Any, *path: int) -> None:
    """Another value there, where one is."""
    holder = get(tree, *path[:-1])
    if isinstance(holder, tuple):
        holder[1][path[-1]] = value
    else:
        next(item for item in holder if item[0] == path[-1])[2] = value


def split_footer(data: bytes) -> tuple[bytes, Struct]:
    length = int.from_bytes(data[-8:-4], "little")
    if length + 8 > len(data):
        raise Unreadable(f"a footer of {length} bytes in a file of {len(data)}")
    return data[: -8 - length], parse(data[-8 - length : -8])[0]


def join_footer(body: bytes, footer: Struct | bytes) -> bytes:
    stored = footer if isinstance(footer, bytes) else unparse(footer)
    return body + stored + len(stored).to_bytes(4, "little") + b"PAR1"
