"""Whether a Parquet footer carries an Arrow schema, found out without letting Arrow open it (SPEC.md section 3.7).

Arrow acts on the metadata ``ARROW:schema`` as it opens a file: it hands what stands there to whichever extension type the
process has registered under that name. So the footer is looked at before. The twelve letters may also be the user's (a column
or an operator of that name); only where they occur at all are the footer's Thrift structures walked, to tell a key of its
key-value metadata from anything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

_NAME: Final = b"ARROW:schema"
_TAIL_BYTES: Final = 8
# Thrift's compact protocol: types of fields, and the fields of FileMetaData and KeyValue that are wanted.
_BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _MAP, _STRUCT = 3, (4, 5, 6), 7, 8, (9, 10), 11, 12
_BOOLEANS: Final = (1, 2)
_KEY_VALUES, _KEY = 5, 1
_DEPTH_MAX: Final = 16


def carries_arrow_schema(data: pa.Buffer) -> bool:
    """Whether the file, or the end of one, that these bytes are has ``ARROW:schema`` in its footer's metadata.

    True also where the letters occur in a footer that cannot be walked: nobody should open that one. Never raises.
    """
    length = int.from_bytes(data.slice(max(0, data.size - _TAIL_BYTES), 4).to_pybytes(), "little")
    footer = data.slice(max(0, data.size - _TAIL_BYTES - length)).to_pybytes()[: -_TAIL_BYTES or None]
    if _NAME not in footer:
        return False
    try:
        return _NAME in _Thrift(footer).metadata_keys()
    except (IndexError, ValueError):
        return True


def without_arrow_schema(data: pa.Buffer) -> pa.Buffer:
    """The file with a footer that Arrow finds no schema of its own in: the very bytes, or a copy with that key renamed."""
    if not carries_arrow_schema(data):
        return data
    whole = data.to_pybytes()
    start = max(0, len(whole) - _TAIL_BYTES - int.from_bytes(whole[-_TAIL_BYTES:-4], "little"))
    return pa.py_buffer(whole[:start] + whole[start:].replace(_NAME, _NAME.lower()))


class _Thrift:
    """The bytes of a structure and how far they have been read. ``IndexError`` and ``ValueError`` for what is none."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def metadata_keys(self) -> list[bytes]:
        """The keys of the key-value metadata of a FileMetaData."""
        found = []
        for field, kind in self._fields():
            if field == _KEY_VALUES and kind in _LISTS:
                count, element = self._list()
                if element != _STRUCT:
                    raise ValueError("key-value metadata that are no structures")
                for _ in range(count):
                    for inner, inner_kind in self._fields():
                        if inner == _KEY and inner_kind == _BINARY:
                            found.append(self._binary())
                        else:
                            self._skip(inner_kind, 2)
            else:
                self._skip(kind, 1)
        return found

    def _fields(self) -> Iterator[tuple[int, int]]:
        """(id, type) of the fields of a structure; whoever asks for the next one has read the last."""
        field = 0
        while header := self._byte():
            delta = header >> 4
            if delta:
                field += delta
            else:
                coded = self._varint()
                field = (coded >> 1) ^ -(coded & 1)
            yield field, header & 15

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
        return value | byte << shift

    def _binary(self) -> bytes:
        length = self._varint()
        start = self._at
        self._move(length)
        return self._data[start : self._at]

    def _move(self, length: int) -> None:
        if length > len(self._data) - self._at:
            raise ValueError("a value that ends behind the footer")
        self._at += length

    def _list(self) -> tuple[int, int]:
        header = self._byte()
        count = header >> 4
        count = self._varint() if count == 15 else count
        if count > len(self._data):
            raise ValueError("a list of more elements than bytes")
        return count, header & 15

    def _skip(self, kind: int, depth: int, *, element: bool = False) -> None:
        if depth > _DEPTH_MAX:
            raise ValueError("nested too deep")
        if kind in _BOOLEANS:
            self._move(int(element))  # As a field its value is its type.
        elif kind == _BYTE:
            self._move(1)
        elif kind in _INTEGERS:
            self._varint()
        elif kind == _DOUBLE:
            self._move(8)
        elif kind == _BINARY:
            self._binary()
        elif kind in _LISTS:
            count, inner = self._list()
            for _ in range(count):
                self._skip(inner, depth + 1, element=True)
        elif kind == _MAP and (count := self._varint()):
            kinds = self._byte()
            for _ in range(min(count, len(self._data))):
                self._skip(kinds >> 4, depth + 1, element=True)
                self._skip(kinds & 15, depth + 1, element=True)
        elif kind == _STRUCT:
            for _, inner in self._fields():
                self._skip(inner, depth + 1)
        elif kind != _MAP:
            raise ValueError(f"no type of Thrift's: {kind}")


__all__ = ["carries_arrow_schema", "without_arrow_schema"]
