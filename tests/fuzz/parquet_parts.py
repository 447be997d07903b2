"""A Parquet file in parts (page headers, page bodies, footer) that can be changed and put together
again.

Checksums of pages are taken anew when it is written: what was changed shall be decoded, not refused
by its checksum.
"""

from __future__ import annotations

import zlib
from typing import Any

from tests.fuzz import thrift_tree as thrift

_DATA_AT, _DICTIONARY_AT, _COMPRESSED = 9, 11, 7


def _with_checksum(header: thrift.Struct, body: bytes) -> thrift.Struct:
    """The header with the checksum of this body, behind the page's size, if it says one."""
    at = next((number for number, item in enumerate(header) if item[0] == 3), None)
    if at is None:
        return header
    checksum = int.from_bytes(zlib.crc32(body).to_bytes(4, "little"), "little", signed=True)
    return [*header[: at + 1], [4, thrift.I32, thrift.zigzag(checksum)], *header[at + 1 :]]


class Parts:
    """``pages[i]`` are the pages of the i-th column chunk, in the order of the footer: ``[header,
    body]``.
    """

    def __init__(self, data: bytes) -> None:
        _, self.footer = thrift.split_footer(data)
        self.pages: list[list[list[Any]]] = []
        for column in self._columns():
            start = thrift.unzigzag(self._start(column))
            end = start + thrift.unzigzag(thrift.get(column, _COMPRESSED))
            pages = []
            while start < end and self._values(column):
                header, length = thrift.parse(data[start:])
                stored = thrift.unzigzag(thrift.get(header, 3))
                body = data[start + length : start + length + stored]
                pages.append([[field for field in header if field[0] != 4], body])
                start += length + stored
            self.pages.append(pages)

    def _columns(self) -> list[thrift.Struct]:
        groups = thrift.get(self.footer, 4)[1]
        return [thrift.get(chunk, 3) for group in groups for chunk in thrift.get(group, 1)[1]]

    @staticmethod
    def _values(column: thrift.Struct) -> int:
        return int(thrift.get(column, 5))

    @staticmethod
    def _start(column: thrift.Struct) -> int:
        fields = {field: value for field, _, value in column}
        return int(min(fields[_DATA_AT], fields.get(_DICTIONARY_AT, fields[_DATA_AT]) or fields[_DATA_AT]))

    def body(self) -> bytes:
        """All pages; the footer says afterwards where they lie."""
        out = bytearray(b"PAR1")
        for column, pages in zip(self._columns(), self.pages, strict=True):
            if not pages:
                continue
            start = len(out)
            for number, (header, stored) in enumerate(pages):
                kind = next((value for field, _, value in header if field == 1), 0)
                place = _DICTIONARY_AT if number == 0 and kind == thrift.zigzag(2) else _DATA_AT
                if number == 0 or (number == 1 and thrift.get(pages[0][0], 1) == thrift.zigzag(2)):
                    for item in column:
                        if item[0] == place:
                            item[2] = thrift.zigzag(len(out))
                out += thrift.unparse(_with_checksum(header, stored)) + stored
            thrift.put(column, thrift.zigzag(len(out) - start), _COMPRESSED)
        return bytes(out)

    def data(self) -> bytes:
        body = self.body()
        return thrift.join_footer(body, self.footer)
