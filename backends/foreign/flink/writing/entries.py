"""Encode rows of one keyed state as entries of a canonical stream: prefixed keys, and values.

The inverse of ``layouts.canonical``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.ttl import NO_TIME_US

from ...byte_strings import Positions, from_arrow
from ..layouts import TIMER_STATES, TTL, Form, Layout, has_text, is_ambiguous, is_window
from ..serializers import Serializer
from .binaries import comma_joined, flags, joined, of_lengths, of_numbers, present, repeated, scattered
from .template import without
from .values import encode, encode_some

_I64 = np.iinfo(np.int64)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Entries of one state, in any order."""

    groups: npt.NDArray[np.int32]
    keys: pa.Array
    values: pa.Array

    def __len__(self) -> int:
        return len(self.groups)


def encode_rows(form: Form, rows: pa.Table, prefix: int) -> Encoded:
    """Encode rows of a state. Raises ``InvalidInput`` for what Flink cannot hold."""
    columns = {name: _whole(rows[name]) for name in rows.column_names}
    groups = columns["_key_group"].to_numpy()
    if form.parts.layout is Layout.TIMERS:
        head = _prefix(groups, prefix)
        return Encoded(groups, joined(head, *_timers(form, columns)), repeated(b"", len(groups)))
    keys = joined(_prefix(groups, prefix), *_key(form, columns))
    if form.parts.layout is Layout.LIST and not form.whole_list and form.parts.namespace is None:
        return _lists(form, groups, keys, columns)
    return Encoded(groups, keys, _values(form, columns))


def _whole(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)


def _prefix(groups: npt.NDArray[np.int32], prefix: int) -> pa.Array:
    return of_numbers(groups, "u1" if prefix == 1 else ">u2")


def _key(form: Form, columns: dict[str, pa.Array]) -> list[pa.Array]:
    """Return the parts that follow the key group's number: key, namespace, map key."""
    parts, key = form.parts, columns["key"]
    if form.whole_key:
        return [key]
    found = key if form.raw_key else encode(parts.key, key)
    pieces = [found]
    if is_ambiguous(parts):
        pieces.append(_length_of(found))
    if form.raw_rest and parts.namespace is not None:
        return [*pieces, columns["_map_key"]]
    if parts.namespace is None:
        pieces.append(repeated(b"\0", len(key)))
        if form.raw_rest:
            return [*pieces, columns["_map_key"]]
        return [*pieces, encode(parts.map_key, columns["_map_key"])] if parts.map_key is not None else pieces
    space = _namespace(form, columns["_map_key"])
    encoded = encode(parts.namespace, space)
    pieces.append(encoded)
    if is_ambiguous(parts):
        pieces.append(_length_of(encoded))
    if parts.map_key is not None:
        pieces.append(encode(parts.map_key, columns["_map_key"].flatten()[-1]))
    return pieces


def _namespace(form: Form, map_key: pa.Array) -> pa.Array:
    parts = form.parts
    if parts.map_key is None or parts.namespace is None:
        return map_key
    if not is_window(parts.namespace.arrow_type):
        return map_key.flatten()[0]
    return pa.StructArray.from_arrays(map_key.flatten()[:2], fields=list(parts.namespace.arrow_type))


def _length_of(found: pa.Array) -> pa.Array:
    """Return the length of each, low byte first, without its high zero bytes; at least one byte."""
    lengths = from_arrow(found).length
    width = 1 + (lengths >= 1 << 8) + (lengths >= 1 << 16) + (lengths >= 1 << 24)
    octets = lengths.astype("<u4").view(np.uint8).reshape(-1, 4)
    return of_lengths(octets[np.arange(4) < width[:, None]], width)


def _values(form: Form, columns: dict[str, pa.Array]) -> pa.Array:
    parts, value = form.parts, columns["value"]
    if form.whole_list or form.raw_value:
        return value
    if parts.value is None:
        return repeated(b"", len(value))
    if parts.layout is Layout.LIST:
        counts = pc.list_value_length(value).to_numpy(zero_copy_only=False).astype(np.int64)
        return comma_joined(encode(parts.value, value.flatten()), counts)
    value = _with_ttl(parts.value, columns)
    if parts.layout is Layout.MAP:
        chosen = present(value.field(TTL) if TTL in columns else value)
        return joined(flags(~chosen), encode_some(parts.value, value, chosen))
    return encode(parts.value, value)


def _with_ttl(serializer: Serializer, columns: dict[str, pa.Array]) -> pa.Array:
    if TTL not in columns:
        return columns["value"]
    kind = serializer.arrow_type
    times = columns[TTL]
    if pa.types.is_timestamp(times.type):
        # Flink has milliseconds. Imports of earlier releases have them already.
        micros = times.cast(pa.int64()).to_numpy(zero_copy_only=False)
        times = pa.array(micros // 1000, pa.int64(), mask=micros == NO_TIME_US)
    columns = {**columns, TTL: times}
    return pa.StructArray.from_arrays([columns[field.name] for field in kind], fields=list(kind))


def _lists(form: Form, groups: npt.NDArray[np.int32], keys: pa.Array, columns: dict[str, pa.Array]) -> Encoded:
    """Join the elements of each key, which have a row each, in the order of their index."""
    codes = keys.dictionary_encode().indices.to_numpy()
    order = np.lexsort((columns["_index"].to_numpy(), codes, groups))
    rows = pa.array(order)
    columns = {name: column.take(rows) for name, column in columns.items()}
    groups, codes = groups[order], codes[order]
    first = np.flatnonzero(np.append(True, codes[1:] != codes[:-1])) if len(codes) else np.zeros(0, np.int64)
    counts = np.diff(np.append(first, len(codes)))
    assert form.parts.value is not None
    elements = encode(form.parts.value, _with_ttl(form.parts.value, columns))
    return Encoded(groups[first], keys.take(rows).take(pa.array(first)), comma_joined(elements, counts))


def _timers(form: Form, columns: dict[str, pa.Array]) -> list[pa.Array]:
    parts = form.parts
    micros = columns["_timestamp"].to_numpy()
    moments = np.where(micros == _I64.max, _I64.max, np.where(micros == _I64.min, _I64.min, micros // 1000))
    pieces = [of_numbers(moments.view(np.uint64) ^ np.uint64(1 << 63), ">u8")]
    if form.whole_key:
        return [*pieces, columns["key"]]
    pieces.append(columns["key"] if form.raw_key else encode(parts.key, columns["key"]))
    label = parts.name.removeprefix(TIMER_STATES).replace("_", "/", 1)
    tag = columns["_tag"]
    fits = pc.equal(tag, label) if parts.namespace is None else pc.starts_with(tag, f"{label}/")
    if not pc.all(fits).as_py() and len(tag):
        odd = tag.filter(pc.invert(fits))[0].as_py()
        wanted = label if parts.namespace is None else f"{label}/<namespace>"
        raise InvalidInput(
            f"a timer of state {parts.name!r} has the tag {odd!r}, and Flink's have {wanted!r}; mend the tag, or "
            f"{without(f'UID/{parts.name}')}",
            kind=ErrorKind.UNSUPPORTED_TYPE,
        )
    if parts.namespace is None:
        return [*pieces, repeated(b"\0", len(tag))]
    return [*pieces, _tagged(parts.namespace, pc.utf8_slice_codeunits(tag, len(label) + 1))]


def _tagged(namespace: Serializer, text: pa.Array) -> pa.Array:
    """Return the bytes of namespaces from their text in the tags of timers."""
    if namespace.takes_rest or not has_text(namespace.arrow_type):
        return _unhexed(text)
    if is_window(namespace.arrow_type):
        ends = pc.extract_regex(text, r"^(?P<start>-?[0-9]+)-(?P<end>-?[0-9]+)$")
        if ends.null_count:
            odd = text.filter(ends.is_null())[0].as_py()
            raise InvalidInput(f"a timer's tag ends with {odd!r}, which is no window START-END; mend it")
        windows = [column.cast(pa.int64()) for column in ends.flatten()]
        return encode(namespace, pa.StructArray.from_arrays(windows, fields=list(namespace.arrow_type)))
    return encode(namespace, text.cast(namespace.arrow_type))


def _unhexed(text: pa.Array) -> pa.Array:
    """Decode hexadecimal digits."""
    strings = from_arrow(text.cast(pa.binary()))
    first = int(strings.start[0]) if len(strings) else 0
    digits = strings.data[first : first + int(strings.length.sum())]
    values = np.full(256, 255, np.uint8)
    values[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
    nibbles = values[digits]
    if (strings.length % 2).any() or (nibbles == 255).any():
        raise InvalidInput("a timer's tag should end with hexadecimal digits, two for each byte; mend it")
    octets = (nibbles[0::2] << 4 | nibbles[1::2]).astype(np.uint8)
    return of_lengths(octets, strings.length // 2)


def lay_out(states: list[Encoded]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32], Positions]:
    """Lay out entries by key group; return the bytes, the key groups, and where each begins.

    ``states`` are in the order of their numbers. Key groups without entries are left out.
    """
    number = np.repeat(np.arange(len(states)), [len(state) for state in states])
    groups = np.concatenate([state.groups for state in states])
    if not len(groups):
        return np.zeros(0, np.uint8), groups, np.zeros(0, np.int64)
    order = np.lexsort((number, groups))
    rows = pa.array(order)
    keys = pa.concat_arrays([state.keys for state in states]).take(rows)
    values = pa.concat_arrays([state.values for state in states]).take(rows)
    number, groups = number[order], groups[order]
    new_group = np.append(True, groups[1:] != groups[:-1])
    ends_state = np.append(new_group[1:] | (number[1:] != number[:-1]), True)
    following = np.where(np.append(new_group[1:], True), -1, np.append(number[1:], -1))
    head = scattered(of_numbers(number[new_group], ">i2"), new_group)
    tail = scattered(of_numbers(following[ends_state], ">i2"), ends_state)
    key_length, value_length = (of_numbers(from_arrow(one).length, ">i4") for one in (keys, values))
    whole = joined(head, key_length, _marked(keys, ends_state), value_length, values, tail)
    strings = from_arrow(whole)
    begin = strings.start[new_group] - strings.start[0]
    size = int(strings.length.sum())
    return strings.data[int(strings.start[0]) :][:size], groups[new_group], begin


def _marked(keys: pa.Array, chosen: npt.NDArray[np.bool_]) -> pa.Array:
    """Set the top bit of the first byte of the chosen keys."""
    strings = from_arrow(keys)
    first = int(strings.start[0])
    data = strings.data[first : first + int(strings.length.sum())].copy()
    data[strings.start[chosen] - first] |= 0x80
    return of_lengths(data, strings.length)
