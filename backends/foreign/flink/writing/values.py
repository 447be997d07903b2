"""Encode values of every serializer: the inverse of what reads them.

Nulls are written if the serializer has a form for null, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput, UnsupportedFormat

from ...byte_strings import Positions
from ..binary_rows import DecimalData, Framed, ManyData, RowData, TextData, TimestampData
from ..compound import (
    CLASS,
    ROW_KINDS,
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
)
from ..kryo import NotWrittenError, WrongValueError
from ..kryo_columns import Kryo
from ..lanes import Opaque, Serializer
from ..scalars import (
    BigDecimal,
    BigInteger,
    Boolean,
    Character,
    LocalDate,
    LocalDateTime,
    LocalTime,
    Milliseconds,
    Moment,
    Nothing,
    Number,
    Text,
    TimeWindow,
)
from .binaries import (
    Mask,
    children,
    encode_big_decimal,
    encode_big_integer,
    encode_character,
    encode_decimal_data,
    encode_framed,
    encode_many_data,
    encode_row_data,
    encode_text,
    encode_text_data,
    encode_timestamp_data,
    flags,
    grouped,
    joined,
    numbers,
    of_numbers,
    of_rows,
    present,
    repeated,
    scattered,
    units_of,
)
from .template import without

_I32_MIN, _I64_MIN = np.iinfo(np.int32).min, np.iinfo(np.int64).min


def encode(serializer: Serializer, values: pa.Array) -> pa.Array:
    """Return the bytes of each value, as a ``binary`` array.

    Raises ``InvalidInput`` and ``WrongValueError`` for a value that Flink's serializer cannot
    write, and ``UnsupportedFormat`` for a serializer that is only read here.
    """
    # Exactly this class: values of a subclass may be stored differently.
    make = _ENCODERS.get(type(serializer))
    if make is not None:
        return make(serializer, values)
    raise UnsupportedFormat(
        f"values of {type(serializer).__name__} are read from Flink, and not written; {without('UID/STATE')}",
        kind=ErrorKind.UNSUPPORTED_FEATURE,
    )


def encode_field(name: str, serializer: Serializer, values: pa.Array, chosen: Mask | None = None) -> pa.Array:
    """Encode the values of a column, or those that ``chosen`` marks.

    A ``WrongValueError`` gets its name.
    """
    try:
        return encode(serializer, values) if chosen is None else encode_some(serializer, values, chosen)
    except WrongValueError as error:
        error.columns.insert(0, name)
        raise


def encode_some(serializer: Serializer, values: pa.Array, chosen: Mask) -> pa.Array:
    """Encode the values that ``chosen`` marks; no bytes for the others."""
    if chosen.all():
        return encode(serializer, values)
    return scattered(encode(serializer, values.filter(pa.array(chosen))), chosen)


def _refuse_nulls(values: pa.Array, what: str) -> None:
    if values.null_count:
        raise InvalidInput(
            f"{values.null_count} of {len(values)} values are null, and Flink's serializer of {what} has no form for "
            "null; give them a value, or delete the rows",
            kind=ErrorKind.UNSUPPORTED_TYPE,
        )


def _number(serializer: Number, values: pa.Array) -> pa.Array:
    _refuse_nulls(values, "numbers")
    return of_numbers(numbers(values), serializer.dtype)


def _boolean(_serializer: Serializer, values: pa.Array) -> pa.Array:
    _refuse_nulls(values, "booleans")
    return flags(numbers(values, False).astype(np.bool_))


def _nothing(_serializer: Serializer, values: pa.Array) -> pa.Array:
    return repeated(b"\0", len(values))


def _flipped(_serializer: Serializer, values: pa.Array) -> pa.Array:
    return of_numbers(numbers(values).view(np.uint64) ^ np.uint64(1 << 63), ">u8")


def _window(_serializer: Serializer, values: pa.Array) -> pa.Array:
    _refuse_nulls(values, "windows")
    return joined(*(of_numbers(numbers(item), ">i8") for item in children(values)))


def _text(serializer: Text, values: pa.Array) -> pa.Array:
    if not serializer.nullable:
        _refuse_nulls(values, "StringValue")
    return encode_text(values, 1 if serializer.nullable else 0)


def _character(_serializer: Serializer, values: pa.Array) -> pa.Array:
    _refuse_nulls(values, "characters")
    odd = pc.sum(pc.not_equal(pc.utf8_length(values), 1)).as_py()
    if odd or len(units_of(values)[0]) != len(values):
        raise InvalidInput("a character of Java's is one UTF-16 unit, and a value has more or none; shorten it")
    return encode_character(values)


def _opaque(_serializer: Serializer, values: pa.Array) -> pa.Array:
    _refuse_nulls(values, "opaque values")
    return values.cast(pa.binary())


def _kryo(serializer: Kryo, values: pa.Array) -> pa.Array:
    try:
        return serializer.encode(values)
    except NotWrittenError as error:
        raise UnsupportedFormat(f"{error}; {without('UID/STATE')}", kind=ErrorKind.UNSUPPORTED_FEATURE) from error


def _sequential(serializer: Sequential, values: pa.Array) -> pa.Array:
    _refuse_nulls(values, "tuples")
    if not serializer.children:
        return repeated(b"", len(values))
    # Those of a value with a time to live are columns of the state.
    names = ["" if isinstance(serializer, Ttl) else field.name for field in values.type]
    return joined(*map(encode_field, names, serializer.children, children(values)))


def _nullable(serializer: Nullable, values: pa.Array) -> pa.Array:
    chosen = present(values)
    marks = flags(chosen if serializer.option else ~chosen)
    found = encode_some(serializer.child, values, chosen)
    if serializer.padding and not chosen.all():
        padding = scattered(repeated(bytes(serializer.padding), int((~chosen).sum())), ~chosen)
        return joined(marks, found, padding)
    return joined(marks, found)


def _row(serializer: Row, values: pa.Array) -> pa.Array:
    _refuse_nulls(values, "rows")
    columns = children(values)
    chosen = [present(column) for column in columns[: len(serializer.children)]]
    masks = [~one for one in chosen]
    if serializer.kinds:
        kind = np.zeros(len(values), np.int64)
        if not serializer.key:
            places = pc.index_in(columns[-1], pa.array(ROW_KINDS))
            _refuse_nulls(places, f"rows, whose kinds are {', '.join(ROW_KINDS)}")
            kind = numbers(places)
        masks = [(kind & 1) != 0, (kind & 2) != 0, *masks]
    mask = np.packbits(np.stack(masks, axis=1), axis=1) if masks else np.zeros((len(values), 0), np.uint8)
    names = [field.name for field in values.type]
    return joined(of_rows(mask), *map(encode_field, names, serializer.children, columns, chosen))


def _either(serializer: Either, values: pa.Array) -> pa.Array:
    sides = [present(column) for column in children(values)]
    if not (sides[0] ^ sides[1]).all():
        raise InvalidInput("of `left` and `right` each value has exactly one; give it one, and make the other null")
    marks = np.where(sides[0], *serializer.marks).astype(np.uint8)
    both = zip(serializer.children, children(values), sides, strict=True)
    return joined(of_rows(marks.reshape(-1, 1)), *(encode_some(child, column, side) for child, column, side in both))


def _enumeration(serializer: Enumeration, values: pa.Array) -> pa.Array:
    places = pc.index_in(values, pa.array(serializer.names, pa.string()))
    if places.null_count:
        odd = values.filter(places.is_null())[0].as_py()
        raise InvalidInput(
            f"{odd!r} is no constant of {serializer.class_name}, which has {', '.join(serializer.names)}; give one of "
            "these",
            kind=ErrorKind.UNSUPPORTED_TYPE,
        )
    return of_numbers(numbers(places), ">i4")


def _counts(values: pa.Array) -> Positions:
    found: Positions = numbers(pc.list_value_length(values)).astype(np.int64)
    return found


def _list(serializer: ListOf, values: pa.Array) -> pa.Array:
    _refuse_nulls(values, "lists")
    counts, elements = _counts(values), values.flatten()
    if serializer.flagged:
        chosen = present(elements)
        each = joined(flags(chosen), encode_some(serializer.element, elements, chosen))
    else:
        each = encode(serializer.element, elements)
    return joined(of_numbers(counts, ">i4"), grouped(each, counts))


def _masked(serializer: MaskedList, values: pa.Array) -> pa.Array:
    _refuse_nulls(values, "lists")
    counts, elements = _counts(values), values.flatten()
    chosen = present(elements)
    widest = int(counts.max()) if len(counts) else 0
    place = np.arange(len(elements)) - np.repeat(np.cumsum(counts) - counts, counts)
    bits = np.zeros((len(counts), widest), np.bool_)
    bits[np.repeat(np.arange(len(counts)), counts), place] = ~chosen
    octets = np.packbits(bits, axis=1)
    kept = np.arange(octets.shape[1]) < ((counts + 7) // 8)[:, None]
    masks = grouped(of_rows(octets[kept].reshape(-1, 1)), (counts + 7) // 8)
    each = encode_some(serializer.element, elements, chosen)
    return joined(of_numbers(counts, ">i4"), masks, grouped(each, counts))


def _map(serializer: MapOf, values: pa.Array) -> pa.Array:
    _refuse_nulls(values, "maps")
    if pa.types.is_map(values.type):
        pair = pa.struct([values.type.key_field, values.type.item_field])
        values = values.cast(pa.list_(pair))
    counts = _counts(values)
    keys, items = children(values.flatten())
    chosen = present(items)
    found = [flags(~chosen), encode_some(serializer.value, items, chosen)]
    if serializer.nullable_keys:
        known = present(keys)
        found = [flags(~known), encode_some(serializer.key, keys, known), *found]
    else:
        found = [encode(serializer.key, keys), *found]
    return joined(of_numbers(counts, ">i4"), grouped(joined(*found), counts))


def _octets(_serializer: Serializer, values: pa.Array) -> pa.Array:
    _refuse_nulls(values, "arrays")
    return joined(of_numbers(numbers(pc.binary_length(values)), ">i4"), values.cast(pa.binary()))


def _characters(_serializer: Serializer, values: pa.Array) -> pa.Array:
    _refuse_nulls(values, "arrays")
    units, counts = units_of(values)
    each = of_rows(units.astype(">u2").view(np.uint8).reshape(-1, 2))
    return joined(of_numbers(counts, ">i4"), grouped(each, counts))


def _milliseconds(_serializer: Serializer, values: pa.Array) -> pa.Array:
    micros = numbers(values.cast(pa.int64()))
    if (micros % 1000).any():
        raise InvalidInput(
            "a time has microseconds, and Flink's serializer of dates has milliseconds; round them first",
            kind=ErrorKind.UNSUPPORTED_TYPE,
        )
    return of_numbers(np.where(present(values), micros // 1000, _I64_MIN), ">i8")


def _moment(serializer: Moment, values: pa.Array) -> pa.Array:
    seconds, nanos = (numbers(item).astype(np.int64) for item in children(values))
    chosen = present(values)
    whole = seconds * 1000 + nanos // 1_000_000 if serializer.millis else seconds
    # Flink takes an Instant for null only if both numbers are the least ones.
    nanos = np.where(chosen, nanos, 0 if serializer.millis else _I32_MIN)
    return joined(of_numbers(np.where(chosen, whole, _I64_MIN), ">i8"), of_numbers(nanos, ">i4"))


def _local_date(_serializer: Serializer, values: pa.Array) -> pa.Array:
    chosen = present(values)
    days = numbers(values.cast(pa.int32())).astype("datetime64[D]")
    months = days.astype("datetime64[M]")
    years = days.astype("datetime64[Y]").astype(np.int64) + 1970
    month = months.astype(np.int64) % 12 + 1
    day = (days - months).astype(np.int64) + 1
    parts = ((years, _I32_MIN, ">i4"), (month, 128, "u1"), (day, 0, "u1"))
    return joined(*(of_numbers(np.where(chosen, part, null), kind) for part, null, kind in parts))


def _local_time(_serializer: Serializer, values: pa.Array) -> pa.Array:
    chosen, nanos = present(values), numbers(values)
    if ((nanos < 0) | (nanos >= 86_400_000_000_000)).any():
        raise InvalidInput("a time of day is below 0 or beyond 24 hours, in nanoseconds; mend it first")
    seconds, rest = nanos // 1_000_000_000, nanos % 1_000_000_000
    hour, minute, second = seconds // 3600, seconds // 60 % 60, seconds % 60
    parts = ((hour, 128, "u1"), (minute, 128, "u1"), (second, 0, "u1"), (rest, _I32_MIN, ">i4"))
    return joined(*(of_numbers(np.where(chosen, part, null), kind) for part, null, kind in parts))


def _local_date_time(serializer: LocalDateTime, values: pa.Array) -> pa.Array:
    date, nanos = children(values)
    return joined(_local_date(serializer, date), _local_time(serializer, nanos))


def _pojo(serializer: Pojo, values: pa.Array) -> pa.Array:
    chosen = present(values)
    if serializer.columns is None:
        found = encode_own(serializer, serializer.names, values, chosen)
        return joined(of_rows(np.where(chosen, 2, 1).astype(np.uint8).reshape(-1, 1)), found)
    owners, _ = serializer.columns
    classes = values.field(CLASS)
    flag = np.where(chosen, 0, 1).astype(np.uint8)
    parts = []
    own = chosen & numbers(pc.equal(classes, serializer.class_name), False).astype(np.bool_)
    flag[own] = 2
    parts.append(
        encode_own(serializer, [owners[serializer.class_name][name] for name in serializer.names], values, own)
    )
    tags = {name: tag for tag, (name, _) in enumerate(serializer.registered)}
    for name, inner in serializer.subclasses.items():
        known = [name, *(inner.subclasses if isinstance(inner, Pojo) else ())]
        mine = chosen & (flag == 0) & numbers(pc.is_in(classes, pa.array(known)), False).astype(np.bool_)
        if not mine.any() or inner is None:
            continue
        flag[mine] = 8 if name in tags else 4
        head = bytes([tags[name]]) if name in tags else len(name.encode()).to_bytes(2, "big") + name.encode()
        body = joined(repeated(head, int(mine.sum())), encode(inner, _as_subclass(inner, owners[name], values, mine)))
        parts.append(scattered(body, mine))
    if (flag == 0).any():
        odd = classes[int(np.flatnonzero(flag == 0)[0])].as_py()
        _unknown_class(serializer, odd)
    return joined(of_rows(flag.reshape(-1, 1)), *parts)


def encode_own(serializer: Pojo, columns: Sequence[str], values: pa.Array, chosen: Mask) -> pa.Array:
    """Encode the fields of the class itself for the chosen values; no bytes for the others."""
    if not serializer.children:
        return scattered(repeated(b"", int(chosen.sum())), chosen)
    fields = dict(zip([field.name for field in values.type], children(values), strict=True))
    found = []
    for child, column in zip(serializer.children, columns, strict=True):
        some = fields[column] if chosen.all() else fields[column].filter(pa.array(chosen))
        known = present(some)
        found.append(joined(flags(~known), encode_field(column, child, some, known)))
    return scattered(joined(*found), chosen)


def _as_subclass(inner: Serializer, owners: dict[str, str], values: pa.Array, mine: Mask) -> pa.Array:
    """Return the chosen values as structs of the subclass."""
    fields = dict(zip([field.name for field in values.type], children(values), strict=True))
    some = pa.array(mine)
    arrays = [fields[owners.get(field.name, field.name)].filter(some) for field in inner.arrow_type]
    return pa.StructArray.from_arrays(arrays, fields=list(inner.arrow_type))


def _unknown_class(serializer: Pojo, name: str | None) -> NoReturn:
    known = ", ".join([serializer.class_name, *serializer.subclasses])
    raise InvalidInput(
        f"a value is of class {name!r}, which the state's serializer does not know; known are {known}",
        kind=ErrorKind.UNSUPPORTED_TYPE,
    )


_ENCODERS: dict[type[Serializer], Callable[[Any, pa.Array], pa.Array]] = {
    Number: _number,
    Boolean: _boolean,
    Nothing: _nothing,
    FlippedLong: _flipped,
    TimeWindow: _window,
    Text: _text,
    Character: _character,
    Opaque: _opaque,
    Sequential: _sequential,
    Timer: _sequential,
    Ttl: _sequential,
    Tuple: _sequential,
    Nullable: _nullable,
    Row: _row,
    Either: _either,
    Enumeration: _enumeration,
    ListOf: _list,
    MaskedList: _masked,
    MapOf: _map,
    Octets: _octets,
    Characters: _characters,
    Milliseconds: _milliseconds,
    Moment: _moment,
    LocalDate: _local_date,
    LocalTime: _local_time,
    LocalDateTime: _local_date_time,
    BigInteger: lambda _serializer, values: encode_big_integer(values),
    BigDecimal: lambda _serializer, values: encode_big_decimal(values),
    Pojo: _pojo,
    Kryo: _kryo,
    RowData: encode_row_data,
    Framed: encode_framed,
    TextData: encode_text_data,
    ManyData: encode_many_data,
    DecimalData: encode_decimal_data,
    TimestampData: encode_timestamp_data,
}
