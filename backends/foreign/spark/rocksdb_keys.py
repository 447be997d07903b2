"""How Spark stores keys and values in RocksDB, other than as plain rows.

Every row has a byte before it, the version of the encoding. Keys have one of these layouts
(``KeyStateEncoderSpec`` of Spark 4.3):

* *plain*: version, row;
* *prefix*: i32 (little-endian) size, then the first columns as a row with its version, of that
  size, then the other columns likewise, so that keys with equal first columns lie together;
* *range*: the same, but the first row's fields are bytes that sort as the values do;
* *timestamp*: a plain key, and before or behind it eight bytes that sort as the time does.

A key may have several values, each after its i32 size (Spark 4: of merges, one after another).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, UnsupportedFormat

from ..byte_strings import ByteStrings, Octets, Positions, from_arrow
from ..framing import crc32c, damaged
from .schemas import SparkField, SparkType, has_values
from .stores import Store
from .unsafe_row import decode_rows
from .unsafe_writing import encode_rows, prefixed

PLAIN: Final = "NoPrefixKeyStateEncoderSpec"
PREFIX: Final = "PrefixKeyScanStateEncoderSpec"
RANGE: Final = "RangeKeyScanStateEncoderSpec"
TIME_FIRST: Final = "TimestampAsPrefixKeyStateEncoderSpec"
TIME_LAST: Final = "TimestampAsPostfixKeyStateEncoderSpec"
_KNOWN: Final = (PLAIN, PREFIX, RANGE, TIME_FIRST, TIME_LAST)
_FEW: Final = 16
"""Up to this many lists are walked one after another, not one value of each per step."""
_Step: TypeAlias = "tuple[Positions, Positions, Positions, Positions]"
"""For values: the list, the place in it, where it begins, and its size."""
_NULL: Final = 2
_NEGATIVE: Final = 0
_SORTED: Final = {
    "byte": ">u1",
    "short": ">u2",
    "integer": ">u4",
    "long": ">u8",
    "float": ">u4",
    "double": ">u8",
}
_ENCODING: Final = "spark.sql.streaming.stateStore.encodingFormat"
_OPERATOR: Final = "spark.sql.streaming.stateStore.rocksdb.mergeOperatorVersion"


def encoder_of(store: Store) -> str:
    """Return the layout of a store's keys. Raises ``UnsupportedFormat`` for an unknown one."""
    form = store.conf.get(_ENCODING, "unsaferow")
    if form != "unsaferow":
        raise UnsupportedFormat(
            f"state of operator-{store.operator} is encoded as {form!r}; only rows (unsaferow) can be read. Let a new "
            f"query keep its state with {_ENCODING} = unsaferow",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            encoding=form,
        )
    named = str(store.schema.key_encoder.get("keyStateEncoderType") or (PREFIX if store.prefix_columns else PLAIN))
    if named not in _KNOWN:
        raise UnsupportedFormat(
            f"keys of {store.name!r} are laid out by {named}; known are {', '.join(_KNOWN)}. Use a newer stateformat",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            encoder=named,
        )
    return named


def delimiter_of(store: Store) -> bytes:
    """Return what separates several values of a key: nothing since merge operator 2."""
    return b"" if store.conf.get(_OPERATOR, "1") == "2" else b","


def plain_rows(strings: ByteStrings, path: str, what: str) -> ByteStrings:
    """Return rows without the version before each."""
    if not len(strings):
        return strings
    short = strings.length < 1
    if short.any() or (strings.data[strings.start] != 0).any():
        at = int(np.argmax(short | (strings.data[np.where(short, 0, strings.start)] != 0)))
        version = None if short[at] else int(strings.data[strings.start[at]])
        if version is None:
            raise damaged(path, f"a {what} has no bytes")
        raise UnsupportedFormat(
            f"{path}: a {what} is encoded by version {version}; 0 is known. Use a newer stateformat",
            kind=ErrorKind.UNSUPPORTED_VERSION,
            path=path,
            version=version,
        )
    return strings.without_prefix(1)


def key_columns(store: Store, keys: ByteStrings, path: str) -> list[pa.Array]:
    """Decode keys, as ``rocksdb_store.entries`` returns them, to the schema's columns.

    For keys with several values, without the last column, which is the position of each value.
    """
    if store.layout is None:
        return _stored_columns(store, store.schema.key, keys, path)
    columns = _stored_columns(store, store.layout.key, keys, path)
    return [_within(columns[first], others) for first, *others in store.layout.paths]


def _within(column: pa.Array, path: Sequence[int]) -> pa.Array:
    for at in path:
        column = column.flatten()[at]
    return column


def _stored_columns(store: Store, fields: Sequence[SparkField], keys: ByteStrings, path: str) -> list[pa.Array]:
    encoder = encoder_of(store)
    if encoder == PLAIN:
        return decode_rows(keys, fields, path)
    if encoder in (TIME_FIRST, TIME_LAST):
        return _timed(encoder, keys, fields, path)
    if encoder == PREFIX:
        count = int(store.schema.key_encoder.get("numColsPrefixKey", store.prefix_columns))
        first, rest = _halves(keys, path)
        return [*decode_rows(first, fields[:count], path), *decode_rows(rest, fields[count:], path)]
    ordinals = [int(one) for one in store.schema.key_encoder.get("orderingOrdinals", ())]
    if len(set(ordinals)) != len(ordinals) or not all(0 <= one < len(fields) for one in ordinals):
        raise damaged(path, f"its schema orders keys by columns {ordinals} of {len(fields)}")
    first, rest = _halves(keys, path, both=len(ordinals) < len(fields))
    octets = SparkType("binary", pa.binary())
    sortable = decode_rows(first, [SparkField(fields[one].name, octets) for one in ordinals], path)
    others = [index for index in range(len(fields)) if index not in ordinals]
    found = dict(zip(others, decode_rows(rest, [fields[index] for index in others], path), strict=True))
    for one, column in zip(ordinals, sortable, strict=True):
        found[one] = _unsorted(column, fields[one], path)
    return [found[index] for index in range(len(fields))]


def encoded_keys(store: Store, columns: Sequence[pa.Array], count: int) -> ByteStrings:
    """Return keys as the database has them, without the number of a column family.

    ``columns`` are those of the schema's key, flat; without the last if keys have several values.
    """
    fields = store.schema.key[: len(columns)]
    if store.layout is not None:
        fields = store.layout.key
        flat = list(zip(store.layout.paths, columns, strict=True))
        columns = [_nested(field.type, _below(flat, at), count) for at, field in enumerate(fields)]

    def row(chosen: Sequence[int]) -> ByteStrings:
        rows = encode_rows([columns[at] for at in chosen], [fields[at] for at in chosen], count, key=True)
        return prefixed(b"\0", rows)

    encoder, every = encoder_of(store), range(len(fields))
    if encoder == PLAIN:
        return row(every)
    if encoder in (TIME_FIRST, TIME_LAST):
        moments = columns[-1].cast(pa.int64()).to_numpy().view("<u8") ^ np.uint64(1 << 63)
        times = pa.Array.from_buffers(pa.binary(8), count, [None, pa.py_buffer(moments.astype(">u8"))]).cast(
            pa.binary()
        )
        parts = row(every[:-1]).to_arrow(), times
        return from_arrow(pc.binary_join_element_wise(*(parts[::-1] if encoder == TIME_FIRST else parts), b""))
    if encoder == PREFIX:
        shared = int(store.schema.key_encoder.get("numColsPrefixKey", store.prefix_columns))
        first, rest = row(every[:shared]), list(every[shared:])
    else:
        ordinals = [int(one) for one in store.schema.key_encoder.get("orderingOrdinals", ())]
        octets = SparkType("binary", pa.binary())
        sortable = [_sortable(columns[at], fields[at]) for at in ordinals]
        rows = encode_rows(sortable, [SparkField(fields[at].name, octets) for at in ordinals], count, key=True)
        first, rest = prefixed(b"\0", rows), [at for at in every if at not in ordinals]
    found = prefixed(_sizes(first), first)
    return prefixed(found.to_arrow(), row(rest)) if rest or encoder == PREFIX else found


def _below(flat: Sequence[tuple[tuple[int, ...], pa.Array]], at: int) -> list[tuple[tuple[int, ...], pa.Array]]:
    return [(path[1:], column) for path, column in flat if path[0] == at]


def _nested(kind: SparkType, flat: Sequence[tuple[tuple[int, ...], pa.Array]], count: int) -> pa.Array:
    """Return one column of those that lie below it."""
    if flat and not flat[0][0]:
        return flat[0][1]
    made = [_nested(one.type, _below(flat, at), count) for at, one in enumerate(kind.children) if has_values(one.type)]
    return pa.Array.from_buffers(kind.arrow, count, [None], children=made) if made else pa.nulls(count)


def _sortable(column: pa.Array, field: SparkField) -> pa.Array:
    """Return the bytes that :func:`_unsorted` reads."""
    kind = _SORTED[field.type.kind]
    width, count = np.dtype(kind).itemsize, len(column)
    null = column.is_null().to_numpy(zero_copy_only=False)
    plain = column.fill_null(0).to_numpy(zero_copy_only=False)
    bits = np.ascontiguousarray(plain).view(kind.replace(">", "<"))
    negative = np.signbit(plain) if plain.dtype.kind == "f" else plain < 0
    if plain.dtype.kind == "f":
        bits = np.where(negative, ~bits, bits)
    found = np.zeros(count, [("mark", "u1"), ("bits", kind)])
    found["mark"] = np.where(null, _NULL, np.where(negative, _NEGATIVE, 1))
    found["bits"] = bits
    return pa.Array.from_buffers(pa.binary(width + 1), count, [None, pa.py_buffer(found)]).cast(pa.binary())


def _halves(keys: ByteStrings, path: str, *, both: bool = True) -> tuple[ByteStrings, ByteStrings]:
    """Separate the rows of a key with a size before the first."""
    short = keys.length < 5
    if short.any():
        raise damaged(path, f"a key of {int(keys.length[np.argmax(short)])} bytes has no two parts")
    size = keys.fixed(0, "<i4").astype(np.int64)
    wrong = (size < 1) | (size > keys.length - 4 - both)
    if not both:
        wrong |= size != keys.length - 4
    if wrong.any():
        at = int(np.argmax(wrong))
        raise damaged(path, f"a key of {int(keys.length[at])} bytes has a first part of {int(size[at])}")
    first = plain_rows(ByteStrings(keys.data, keys.start + 4, size), path, "key")
    rest = ByteStrings(keys.data, keys.start + 4 + size, keys.length - 4 - size)
    return first, plain_rows(rest, path, "key") if both else rest


def _unsorted(column: pa.Array, field: SparkField, path: str) -> pa.Array:
    """Return the values of bytes that sort as the values do: a mark, then the number,
    big-endian.
    """
    kind = _SORTED.get(field.type.kind)
    if kind is None:
        raise UnsupportedFormat(
            f"{path}: keys are ordered by {field.name!r} of type {field.type.kind}, which is not known here",
            kind=ErrorKind.UNSUPPORTED_TYPE,
            path=path,
        )
    width = np.dtype(kind).itemsize
    if column.null_count:
        raise damaged(path, f"the ordered column {field.name!r} of a key has no bytes")
    octets = from_arrow(column)
    if len(octets) and ((octets.length != width + 1).any() or int(octets.fixed(0, "u1").max()) > _NULL):
        raise damaged(path, f"the ordered column {field.name!r} of a key is no mark and {width} bytes")
    if not len(octets):
        return pa.array([], field.type.arrow)
    mark = octets.fixed(0, "u1")
    bits = octets.fixed(1, kind).astype(kind.replace(">", "<"))
    if field.type.kind in ("float", "double"):
        # Of negative numbers all bits are inverted.
        values: npt.NDArray[Any] = np.where(mark == _NEGATIVE, ~bits, bits).view(f"<f{width}")
    else:
        values = bits.view(f"<i{width}")
    return pa.array(values, field.type.arrow, mask=mark == _NULL)


def _timed(encoder: str, keys: ByteStrings, fields: Sequence[SparkField], path: str) -> list[pa.Array]:
    short = keys.length < 9
    if short.any():
        raise damaged(path, f"a key of {int(keys.length[np.argmax(short)])} bytes has no row and time")
    length = keys.length - 8
    first = encoder == TIME_FIRST
    rows = ByteStrings(keys.data, keys.start + 8 * first, length)
    place = keys.start if first else keys.start + length
    times = ByteStrings(keys.data, place, np.full(len(keys), 8, np.int64))
    moments = (times.fixed(0, ">u8").astype("<u8") ^ np.uint64(1 << 63)).view("<i8")
    found = decode_rows(plain_rows(rows, path, "key"), fields[:-1], path)
    return [*found, pa.array(moments, pa.int64()).cast(fields[-1].type.arrow)]


def split_values(store: Store, keys: ByteStrings, values: ByteStrings, path: str) -> tuple[Positions, ByteStrings]:
    """Separate the values of keys that have several: how many each has, and all rows in order.

    ``keys`` are those included in checksums, if values have such.
    """
    gap = len(delimiter_of(store))
    if store.has_row_checksums:
        counts, framed = _walked(values, 4, gap, path)
        checked = without_sums(keys.take(np.repeat(np.arange(len(keys)), counts)), framed, path)
        inner, rows = _walked(checked, 0, gap, path)
        if (inner != 1).any():
            raise damaged(path, "a value with a checksum of its own is not one row")
    else:
        counts, rows = _walked(values, 0, gap, path)
    return counts, plain_rows(rows.without_prefix(4), path, "value")


def joined_values(store: Store, keys: ByteStrings, rows: ByteStrings, counts: Positions) -> ByteStrings:
    """Return one string for each key, of all its rows: what :func:`split_values` reads.

    ``keys`` are those included in checksums; ``rows`` have their versions, ``counts`` for each key.
    """
    framed = prefixed(_sizes(rows), rows)
    if store.has_row_checksums:
        framed = with_sums(keys.take(np.repeat(np.arange(len(keys)), counts)), framed)
    gap = delimiter_of(store)
    ends = np.cumsum(counts)
    if gap:
        last = np.zeros(len(rows), np.bool_)
        last[ends - 1] = True
        framed = from_arrow(pc.binary_join_element_wise(framed.to_arrow(), pa.array(np.where(last, b"", gap)), b""))
    total = np.cumsum(np.append(0, framed.length))
    return ByteStrings(framed.tight(), total[ends - counts], total[ends] - total[ends - counts])


def with_sums(keys: ByteStrings, values: ByteStrings) -> ByteStrings:
    """Return values behind their checksums and sizes: what :func:`without_sums` reads."""
    sums = _row_checksums(keys, values).astype("<u4")
    four = pa.Array.from_buffers(pa.binary(4), len(sums), [None, pa.py_buffer(sums)]).cast(pa.binary())
    return prefixed(four, prefixed(_sizes(values), values))


def _sizes(strings: ByteStrings) -> pa.Array:
    sizes = pa.py_buffer(strings.length.astype("<i4"))
    return pa.Array.from_buffers(pa.binary(4), len(strings), [None, sizes]).cast(pa.binary())


def _walked(values: ByteStrings, lead: int, gap: int, path: str) -> tuple[Positions, ByteStrings]:
    """Find strings that have ``lead`` bytes and their i32 size before them: with these.

    All keys advance in lock-step, one value of each per step.
    """
    data: Octets = values.data
    at, end = values.start.copy(), values.start + values.length
    counts = np.zeros(len(values), np.int64)
    steps: list[_Step] = []
    active = np.flatnonzero(at < end)
    while len(active):
        if len(active) <= _FEW:
            # The last long lists: a step of numpy costs as much as many plain ones.
            steps += _walked_singly(data, active, at, end, counts, lead, gap, path)
            break
        here = at[active]
        room = end[active] - here - lead - 4
        if (room < 1).any():
            raise damaged(path, "a list of values ends within a size")
        size = ByteStrings(data, here + lead, np.full(len(here), 4, np.int64)).fixed(0, "<i4").astype(np.int64)
        wrong = (size < 1) | (size > room)
        if wrong.any():
            which = int(np.argmax(wrong))
            raise damaged(path, f"a value in a list declares {int(size[which])} bytes, {int(room[which])} are left")
        steps.append((active, counts[active], here, size + lead + 4))
        counts[active] += 1
        at[active] = here + lead + 4 + size
        active = active[at[active] < end[active]]
        if gap and len(active):
            if (data[at[active]] != 0x2C).any():
                raise damaged(path, "values in a list are not joined by commas")
            at[active] += gap
    place = np.cumsum(counts) - counts
    start, length = np.empty(int(counts.sum()), np.int64), np.empty(int(counts.sum()), np.int64)
    for owner, nth, begin, size in steps:
        start[place[owner] + nth], length[place[owner] + nth] = begin, size
    return counts, ByteStrings(data, start, length)


def _walked_singly(
    data: Octets,
    lists: Positions,
    at: Positions,
    end: Positions,
    counts: Positions,
    lead: int,
    gap: int,
    path: str,
) -> list[_Step]:
    """Walk the rest of a few lists, one after another, as :func:`_walked` does."""
    view, unpack = np.ascontiguousarray(data).data, struct.Struct("<i").unpack_from
    found = []
    for owner in lists.tolist():
        here, stop = int(at[owner]), int(end[owner])
        starts: list[int] = []
        sizes: list[int] = []
        while here < stop:
            room = stop - here - lead - 4
            size = unpack(view, here + lead)[0] if room >= 1 else 0
            if not 1 <= size <= room:
                raise damaged(path, f"a value in a list declares {size} bytes, {max(room, 0)} are left")
            starts.append(here)
            sizes.append(size + lead + 4)
            here += lead + 4 + size
            if gap and here < stop:
                if view[here] != 0x2C:
                    raise damaged(path, "values in a list are not joined by commas")
                here += gap
                if here == stop:
                    raise damaged(path, "a list of values ends within a size")
        nth = np.arange(counts[owner], counts[owner] + len(starts))
        found.append((np.full(len(starts), owner), nth, np.array(starts, np.int64), np.array(sizes, np.int64)))
        counts[owner] += len(starts)
    return found


def without_sums(keys: ByteStrings, values: ByteStrings, path: str) -> ByteStrings:
    """Compare the checksums of values and remove them (Spark 4.2: ``rowChecksum``).

    Before a value are the CRC-32C of the key, as it is stored, and the value; and its i32 size.
    """
    if not len(values):
        return values
    wrong = values.length < 8
    if not wrong.any():
        wrong = values.fixed(4, "<i4") != values.length - 8
    if not wrong.any():
        plain = values.without_prefix(8)
        wrong = values.fixed(0, "<u4") != _row_checksums(keys, plain)
    if wrong.any():
        raise damaged(path, f"the value of key {int(np.argmax(wrong))} has a checksum of another")
    return plain


def key_without_sum(keys: ByteStrings, path: str) -> ByteStrings:
    """Compare the checksums before keys that are deleted, and remove them."""
    if not len(keys):
        return keys
    wrong = keys.length < 4
    if not wrong.any():
        plain = keys.without_prefix(4)
        nothing = ByteStrings(keys.data, plain.start, np.zeros(len(keys), np.int64))
        wrong = keys.fixed(0, "<u4") != _row_checksums(plain, nothing)
    if wrong.any():
        raise damaged(path, f"the deleted key {int(np.argmax(wrong))} has a checksum of another")
    return plain


def _row_checksums(keys: ByteStrings, values: ByteStrings) -> npt.NDArray[np.uint32]:
    count = len(keys)
    joined = pc.binary_join_element_wise(keys.to_arrow(), values.to_arrow(), pa.scalar(b"", pa.binary()))
    rows = from_arrow(joined)
    first = int(rows.start[0]) if count else 0
    return crc32c(rows.data[first : first + int(rows.length.sum())], rows.length)
