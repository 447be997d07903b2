"""Reads and checks the footer of a Parquet file before Arrow may see it (SPEC.md section 7.4)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pyarrow as pa

# ---- Thrift --------------------------------------------------------------------------------------
#
# Thrift's compact protocol, as far as Parquet's metadata needs it, without building objects.
#
# Functions take bytes and a position, and return a value and the position after it. They raise
# ``IndexError`` for bytes that end too soon, :class:`FooterFault` for any other fault.


# Types of fields in Thrift's compact protocol.
_BYTE, _INTEGERS, I32, I64, _DOUBLE, BINARY, LISTS, _MAP, STRUCT = 3, (4, 5, 6), 5, 6, 7, 8, (9, 10), 11, 12
_BOOLEANS: Final = (1, 2)
_LIST: Final = 9
_DEPTH_MAX: Final = 16


class FooterFault(ValueError):
    """Why a footer or page header is refused: the rest of a sentence."""


NUMBER: Final = rb"[\x80-\xff]{0,8}[\x00-\x7f]"
SMALL: Final = rb"[\x00-\x7f]"


@functools.cache
def short_string() -> bytes:
    """Return a pattern of strings below 128 bytes, as Thrift stores them. Patterns cannot count."""
    return b"(?:" + b"|".join(b"\\x%02x.{%d}" % (length, length) for length in range(128)) + b")"


class LazyPattern:
    """A pattern for the usual form of a structure, compiled after ``after`` calls without a match.

    Compiling takes as long as walking some hundred structures.
    """

    def __init__(self, source: Callable[[], bytes], after: int = 128) -> None:
        self._source = source
        self._left = after
        self._pattern: re.Pattern[bytes] | None = None

    def match(self, data: Any, at: int, end: int) -> re.Match[bytes] | None:
        """Return the match of ``data`` from ``at``, ending before ``end``; None until compiled."""
        if self._pattern is None:
            # Two threads may lose a count or compile twice; neither changes what is read.
            if self._left > 0:
                self._left -= 1
                return None
            self._pattern = re.compile(self._source(), re.DOTALL)
        return self._pattern.match(data, at, end)


def number(coded: bytes) -> int:
    """Return a number from its bytes; −1 for one below 0."""
    value = 0
    for byte in reversed(coded):
        value = value << 7 | byte & 127
    return -1 if value & 1 else value >> 1


def next_field(data: bytes, at: int, before: int) -> tuple[int, int]:
    """Return the id of the field whose header is at ``at``, and the position after the header."""
    delta = data[at] >> 4
    return (before + delta, at + 1) if delta else long_field(data, at + 1)


def long_field(data: bytes, at: int) -> tuple[int, int]:
    """Return the id of a field whose header does not contain it."""
    coded, at = varint(data, at)
    if coded > 0xFFFF:
        raise FooterFault("a field has a number that is none")
    return (coded >> 1) ^ -(coded & 1), at


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of at most 64 bits, still in zigzag."""
    value = data[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    shift = 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if shift > 63:
            raise FooterFault("a number takes too many bytes")
    if value >> 64:
        raise FooterFault("a number is too large")
    return value, at


def integer(data: bytes, at: int, kind: int, due: int) -> tuple[int, int]:
    """Return an integer of exactly the type ``due``."""
    if kind != due:
        raise FooterFault("a number is stored as another type")
    coded, at = varint(data, at)
    if due == I32 and coded >> 32:
        raise FooterFault("a number is too large")
    return (coded >> 1) ^ -(coded & 1), at


def list_header(data: bytes, at: int, kind: int, element: int, most: int, what: str) -> tuple[int, int]:
    """Return the number of elements of a list, and where they begin."""
    if kind != _LIST:
        raise FooterFault(f"{what} are no list")
    head = data[at]
    count, at = varint(data, at + 1) if head >> 4 == 15 else (head >> 4, at + 1)
    if count and head & 15 != element:
        raise FooterFault(f"{what} are of another type")
    if count > most or count > len(data) - at:
        raise FooterFault(f"it has {count:,} {what}; at most {most:,} are read, and each takes a byte")
    return count, at


def skip(data: bytes, at: int, kind: int, depth: int, *, element: bool = False) -> int:
    """Return the position after a value of this type."""
    if kind in _INTEGERS:
        while data[at] > 127:
            at += 1
        return at + 1
    if kind == BINARY:
        length, at = varint(data, at)
        return at + length
    if kind == STRUCT:
        if depth > _DEPTH_MAX:
            raise FooterFault("its structures are nested too deep")
        while head := data[at]:
            at += 1
            if head < 16:
                _, at = varint(data, at)
            at = skip(data, at, head & 15, depth + 1)
        return at + 1
    if kind in _BOOLEANS:
        return at + int(element)  # As a field, its value is its type.
    if kind == _BYTE:
        return at + 1
    if kind == _DOUBLE:
        return at + 8
    if depth > _DEPTH_MAX or kind not in (*LISTS, _MAP):
        raise FooterFault(f"its structures are nested too deep, or of no type of Thrift's: {kind}")
    head = data[at]
    if kind == _MAP:
        count, at = varint(data, at)
        kinds = data[at] if count else 0
        inner: tuple[int, ...] = (kinds >> 4, kinds & 15)
        at += bool(count)
    else:
        count, at = varint(data, at + 1) if head >> 4 == 15 else (head >> 4, at + 1)
        inner = (head & 15,)
    if count > len(data) - at:
        raise FooterFault("a list has more elements than bytes are left")
    for _ in range(count):
        for each in inner:
            at = skip(data, at, each, depth + 1, element=True)
    return at


# ---- footer --------------------------------------------------------------------------------------
#
# The footer of a Parquet file, parsed before Arrow sees it (SPEC.md 3.7, 5.5, 5.6 and 7.4).
#
# Arrow believes a footer: it recurses as deep as the schema says, makes large objects from two
# bytes of a list, acts on ``ARROW:schema``, and crashes on a missing column chunk. So the Thrift
# structures are walked here first, and anything that two readers might read differently is refused.


ROW_GROUPS_MAX: Final = 65_536
COLUMNS_MAX: Final = 65_536
ENTRIES_MAX: Final = 10_000
"""Entries of a file's key-value metadata."""
FOOTER_BYTES_MAX: Final = 64 << 20
SCHEMA_DEPTH_MAX: Final = 32

_NAME: Final = b"ARROW:schema"
_TAIL_BYTES: Final = 8
_REPEATED: Final = 2
_ELEMENTS_MAX: Final = 64
# The numbers of ColumnMetaData that are kept: field -> type. They are the codec, the number of
# values, both sizes, and where pages begin.
_CODEC, _VALUES, _UNCOMPRESSED, _COMPRESSED, _DATA_AT, _DICTIONARY_AT = 4, 5, 6, 7, 9, 11
_SIZES: Final = (_VALUES, _UNCOMPRESSED, _COMPRESSED, _DATA_AT, _DICTIONARY_AT)
_NUMBERS: Final = {_CODEC: I32, **dict.fromkeys(_SIZES, I64)}


class Leaf(NamedTuple):
    """A leaf of the schema. ``type`` is Parquet's number; ``flat`` means one value per row."""

    path: str
    type: int
    length: int
    flat: bool


class ColumnChunk(NamedTuple):
    """A column chunk as the footer describes it; ``encodings`` as zigzag bytes."""

    codec: int
    encodings: bytes
    values: int
    start: int
    size_bytes: int


class RowGroup(NamedTuple):
    """A row group as the footer describes it."""

    rows: int
    uncompressed_bytes: int
    chunks: list[ColumnChunk]


class Footer(NamedTuple):
    """The parts of a footer; ``arrow_schema`` tells whether its metadata has that key."""

    leaves: list[Leaf]
    row_groups: list[RowGroup]
    rows: int
    arrow_schema: bool


def read_footer(data: pa.Buffer) -> Footer:
    """Return the footer of a file, or of its last bytes. Raises only :class:`FooterFault`."""
    tail = data.slice(max(0, data.size - _TAIL_BYTES)).to_pybytes()
    length = int.from_bytes(tail[:4], "little")
    if len(tail) < _TAIL_BYTES or tail[4:] != b"PAR1" or not 0 < length <= data.size - _TAIL_BYTES:
        raise FooterFault(f"{data.size:,} bytes do not end in a Parquet footer")
    if length > FOOTER_BYTES_MAX:
        raise FooterFault(f"its footer has {length:,} bytes; at most {FOOTER_BYTES_MAX:,} are read")
    footer = data.slice(data.size - _TAIL_BYTES - length, length).to_pybytes()
    try:
        return _file(footer)
    except IndexError:
        raise FooterFault("its footer is cut short") from None


def carries_arrow_schema(data: pa.Buffer) -> bool:
    """Return whether the metadata has ``ARROW:schema``, or a broken footer has that name."""
    length = int.from_bytes(data.slice(max(0, data.size - _TAIL_BYTES), 4).to_pybytes(), "little")
    footer = data.slice(max(0, data.size - _TAIL_BYTES - length)).to_pybytes()[: -_TAIL_BYTES or None]
    if _NAME not in footer:
        return False
    try:
        return read_footer(data).arrow_schema
    except FooterFault:
        return True


def without_arrow_schema(data: pa.Buffer) -> pa.Buffer:
    """Return the file with that key renamed so Arrow ignores it, or ``data`` if it has none."""
    if not carries_arrow_schema(data):
        return data
    whole = data.to_pybytes()
    start = max(0, len(whole) - _TAIL_BYTES - int.from_bytes(whole[-_TAIL_BYTES:-4], "little"))
    return pa.py_buffer(whole[:start] + whole[start:].replace(_NAME, _NAME.lower()))


# ---- the structures of a footer ------------------------------------------------------------------


def _file(data: bytes) -> Footer:
    """Read FileMetaData: version, schema, rows, row groups, key-value metadata."""
    at = field = rows = 0
    leaves: list[Leaf] | None = None
    groups: list[RowGroup] | None = None
    keys: list[bytes] = []
    seen: set[int] = set()
    while head := data[at]:
        field, at = next_field(data, at, field)
        kind = head & 15
        if field in seen:
            raise FooterFault(f"field {field} of its footer stands twice")
        seen.add(field)
        if field == 2:
            leaves, at = _known_schema(data, at, kind)
        elif field == 3:
            rows, at = integer(data, at, kind, I64)
        elif field == 4:
            if leaves is None:
                raise FooterFault("row groups stand before the schema in its footer")
            groups, at = _row_groups(
                data, *list_header(data, at, kind, STRUCT, ROW_GROUPS_MAX, "row groups"), len(leaves)
            )
        elif field == 5:
            keys, at = _entries(data, *list_header(data, at, kind, STRUCT, ENTRIES_MAX, "entries of metadata"))
        else:
            at = skip(data, at, kind, 1)
    if at + 1 != len(data):
        raise FooterFault("its footer ends before its end")
    if leaves is None or groups is None:
        raise FooterFault("its footer has no schema or no list of row groups")
    return Footer(leaves, groups, rows, _NAME in keys)


# The schema read last, and its bytes: segments of a state are read one after another and have the
# same schema.
_last_schema: tuple[bytes, list[Leaf]] | None = None


def _known_schema(data: bytes, at: int, kind: int) -> tuple[list[Leaf], int]:
    """Return the leaves of the schema at ``at``; walk it only if it differs from the last one."""
    global _last_schema
    last = _last_schema
    if last is not None and kind == LISTS[0] and data.startswith(last[0], at):
        return last[1], at + len(last[0])
    leaves, end = _schema(data, *list_header(data, at, kind, STRUCT, COLUMNS_MAX, "schema elements"))
    if end <= len(data):
        _last_schema = data[at:end], leaves
    return leaves, end


def _schema(data: bytes, count: int, at: int) -> tuple[list[Leaf], int]:
    """Return the leaves of the schema, a list in which children follow their group."""
    leaves: list[Leaf] = []
    # For each open group: its name, and how many children are still to come.
    names: list[bytes] = []
    open_groups: list[int] = []
    for index in range(count):
        numbers, name, at = _schema_element(data, at)
        if index and not open_groups:
            raise FooterFault("its schema has elements that belong to no group")
        children = numbers.get(5, 0)
        if open_groups:
            open_groups[-1] -= 1
        if children > 0:
            names.append(name)
            open_groups.append(children)
            if len(open_groups) > SCHEMA_DEPTH_MAX:
                raise FooterFault(f"its schema is nested deeper than {SCHEMA_DEPTH_MAX} levels")
            if children > count:
                raise FooterFault(f"a group of its schema has {children:,} children, and there are {count:,} elements")
            continue
        if children < 0 or 1 not in numbers:
            raise FooterFault("its schema has an element that is neither a column nor a group of columns")
        path = b".".join([*names[1:], name]).decode("utf-8", "replace")
        flat = len(names) == 1 and numbers.get(3) != _REPEATED
        leaves.append(Leaf(path, numbers[1], numbers.get(2, 0), flat))
        while open_groups and not open_groups[-1]:
            open_groups.pop()
            names.pop()
    if open_groups:
        raise FooterFault("its schema ends within a group")
    return leaves, at


def _schema_element(data: bytes, at: int) -> tuple[dict[int, int], bytes, int]:
    """Return type, length and number of children of a SchemaElement, by field, and its name."""
    numbers: dict[int, int] = {}
    field, name = 0, b""
    while head := data[at]:
        field, at = next_field(data, at, field)
        kind = head & 15
        if field in (1, 2, 3, 5):
            if field in numbers:
                raise FooterFault("an element of its schema says something twice")
            numbers[field], at = integer(data, at, kind, I32)
        elif field == 4 and kind == BINARY:
            length, at = varint(data, at)
            name, at = data[at : at + length], at + length
        else:
            at = skip(data, at, kind, 2)
    return numbers, name, at + 1


def _row_groups(data: bytes, count: int, at: int, leaves: int) -> tuple[list[RowGroup], int]:
    groups = []
    for _ in range(count):
        field = 0
        chunks: list[ColumnChunk] | None = None
        numbers: dict[int, int] = {}
        while head := data[at]:
            field, at = next_field(data, at, field)
            kind = head & 15
            if field == 1:
                if chunks is not None:
                    raise FooterFault("a row group lists its columns twice")
                columns, at = list_header(data, at, kind, STRUCT, COLUMNS_MAX, "columns of a row group")
                if columns != leaves:
                    raise FooterFault(f"a row group has {columns:,} columns, its schema {leaves:,}")
                chunks = []
                for _ in range(columns):
                    chunk, at = _chunk(data, at)
                    chunks.append(chunk)
            elif field in (2, 3):
                if field in numbers:
                    raise FooterFault("a row group says its size twice")
                numbers[field], at = integer(data, at, kind, I64)
                if numbers[field] < 0:
                    raise FooterFault("a row group has less than no rows or bytes")
            else:
                at = skip(data, at, kind, 2)
        at += 1
        if chunks is None or len(numbers) != 2:
            raise FooterFault("a row group lacks its columns, its rows or its size")
        groups.append(RowGroup(numbers[3], numbers[2], chunks))
    return groups, at


def _usual_chunk() -> bytes:
    """Return a pattern of a ColumnChunk as Arrow writes it; it can match in only one way.

    Column chunks are most of a footer.
    """
    number, small, string = NUMBER, SMALL, short_string()
    several = b"|".join(b"\\x%d6(?:%b){%d}" % (n, number, n) for n in range(2, 9))
    numbers = b"(?:\\x06|\\x16%b|%b)" % (number, several)
    page_kind = b"\\x15%b\\x15%b\\x15%b\\x00" % (small, small, number)
    return b"".join(
        (
            b"\\x26" + number + b"\\x1c\\x15" + small,
            b"\\x19(?:\\x15(?P<one>%b)|\\x25(?P<two>%b{2})|\\x35(?P<three>%b{3}))" % (small, small, small),
            b"\\x19\\x18" + string,
            rb"\x15(?P<codec>[\x00\x02\x0a\x0c\x0e])",
            b"\\x16(?P<values>%b)\\x16%b\\x16(?P<size>%b)" % (number, number, number),
            b"\\x26(?P<start>%b)(?:\\x26(?P<dictionary>%b))?+" % (number, number),
            b"(?:[\\x1c\\x3c](?:[\\x18\\x28]"
            + string
            + b"|[\\x16\\x26\\x36]"
            + number
            + rb"|[\x11\x12\x21\x22])*+\x00)?+",
            b"(?:[\\x19\\x29\\x49](?:\\x1c%b|\\x2c(?:%b){2}|\\x3c(?:%b){3}))?+" % (page_kind, page_kind, page_kind),
            b"(?:\\x3c(?:\\x16" + number + b")?+(?:[\\x19\\x29\\x39]" + numbers + b")*+\\x00)?+",
            rb"\x00\x00",
        )
    )


_USUAL_CHUNK: Final = LazyPattern(_usual_chunk)


def _chunk(data: bytes, at: int) -> tuple[ColumnChunk, int]:
    usual = _USUAL_CHUNK.match(data, at, len(data))
    if usual is not None:
        one, two, three, codec, values, size_bytes, start, dictionary = usual.groups()
        begin = _begin(number(start), number(dictionary) if dictionary else 0)
        chunk = ColumnChunk(codec[0] >> 1, one or two or three, number(values), begin, number(size_bytes))
        if min(chunk.values, chunk.start, chunk.size_bytes) >= 0:
            return chunk, usual.end()
    field = 0
    found: ColumnChunk | None = None
    while head := data[at]:
        field, at = next_field(data, at, field)
        kind = head & 15
        if field == 3 and kind == STRUCT and found is None:
            found, at = _column(data, at)
        elif field in (3, 8, 9):
            raise FooterFault("a column chunk is described twice, or encrypted")
        else:
            at = skip(data, at, kind, 2)
    if found is None:
        raise FooterFault("a column chunk is not described")
    return found, at + 1


def _begin(data_at: int, dictionary_at: int) -> int:
    """Return where a chunk begins: at its dictionary, if it has one."""
    return dictionary_at if 0 < dictionary_at < data_at else data_at


def _column(data: bytes, at: int) -> tuple[ColumnChunk, int]:
    field = 0
    numbers: dict[int, int] = {}
    encodings = b""
    while head := data[at]:
        at += 1
        if head > 15:
            field += head >> 4
        else:
            field, at = long_field(data, at)
        kind = head & 15
        due = _NUMBERS.get(field)
        if due is not None:
            if kind != due or field in numbers:
                raise FooterFault("a column chunk says something twice, or as another type")
            value = data[at]
            at += 1
            if value > 127:
                value, at = varint(data, at - 1)
            numbers[field] = (value >> 1) ^ -(value & 1)
        elif field == 2:
            count, at = list_header(data, at, kind, I32, _ELEMENTS_MAX, "encodings")
            encodings += data[at : at + count] + b"\xff" * (count > len(data) - at)
            at += count
        elif field == 3:
            count, at = list_header(data, at, kind, BINARY, _ELEMENTS_MAX, "parts of a column's path")
            for _ in range(count):
                length, at = varint(data, at)
                at += length
        else:
            at = skip(data, at, kind, 3)
    if not {_CODEC, _VALUES, _COMPRESSED, _DATA_AT} <= numbers.keys():
        raise FooterFault("a column chunk does not say where it lies")
    size_bytes, values = numbers[_COMPRESSED], numbers[_VALUES]
    start = _begin(numbers[_DATA_AT], numbers.get(_DICTIONARY_AT, 0))
    if min(start, size_bytes, values) < 0:
        raise FooterFault("a column chunk has less than no bytes or values")
    # An encoding above 63 takes two bytes: then the list ends elsewhere, and both readers refuse
    # the footer.
    if encodings and max(encodings) > 127:
        raise FooterFault("a column chunk has an encoding that nobody knows")
    return ColumnChunk(numbers[_CODEC], encodings, values, start, size_bytes), at + 1


def _entries(data: bytes, count: int, at: int) -> tuple[list[bytes], int]:
    keys = []
    for _ in range(count):
        field = 0
        while head := data[at]:
            field, at = next_field(data, at, field)
            kind = head & 15
            if field == 1 and kind == BINARY:
                length, at = varint(data, at)
                keys.append(data[at : at + length])
                at += length
            else:
                at = skip(data, at, kind, 2)
        at += 1
    return keys, at
