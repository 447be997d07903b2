"""Keyed state of Flink as rows of stateformat: which columns, and how to build them.

A namespace is a part of the row key that Flink does not hash: windows become (part of) the map key.
Parts that cannot be separated stay as bytes: an opaque key of a map is followed by its map key.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import InvalidInput
from stateformat.keys import check_key_types
from stateformat.model import State
from stateformat.schema import segment_schema
from stateformat.states import Columns, list_state, map_state, timers, value_state
from stateformat.ttl import NO_TIME_US, TTL_COLUMN

from ...byte_strings import ByteStrings, Positions
from ...source import Note
from ..serializers import Lanes, Serializer

TTL: Final = TTL_COLUMN
_NO_TIME_MS: Final = -(2**62)
WINDOW: Final = ("window_start", "window_end")


class Layout(StrEnum):
    """What the entries of a state are."""

    VALUE = "value"
    MAP = "map"
    LIST = "list"
    TIMERS = "timers"


@dataclass(frozen=True, slots=True)
class Parts:
    """What a header says of one keyed state. ``namespace`` is None if it does not give one."""

    name: str
    layout: Layout
    key: Serializer
    namespace: Serializer | None
    map_key: Serializer | None
    value: Serializer | None
    """Of a value, of the value in a map, of an element; None for timers."""

    @property
    def unframed(self) -> list[Serializer]:
        """Those whose values end nowhere."""
        return [item for item in (self.key, self.namespace, self.map_key, self.value) if item and item.takes_rest]

    @property
    def opaque(self) -> tuple[str, ...]:
        """Java classes that are not decoded."""
        every = [item.opaque for item in (self.key, self.namespace, self.map_key, self.value) if item]
        return tuple(dict.fromkeys(name for names in every for name in names))


@dataclass(frozen=True, slots=True)
class Form:
    """How entries of one state become rows."""

    parts: Parts
    state: State
    raw_key: bool = False
    """Whether ``key`` has the bytes as they are stored."""
    whole_key: bool = False
    """Whether ``key`` has all bytes of the stored key: the key cannot be separated from what
    follows.
    """
    raw_rest: bool = False
    """Whether ``_map_key`` has the bytes of namespace and map key."""
    whole_list: bool = False
    """Whether ``value`` has the bytes of all elements."""
    raw_value: bool = False

    @property
    def spreads(self) -> bool:
        """Whether an entry, as it is stored, may be several rows or none."""
        if self.whole_list or self.raw_value or self.parts.namespace is not None:
            return self.parts.layout is Layout.MAP
        return self.parts.layout in (Layout.MAP, Layout.LIST)

    @property
    def schema(self) -> pa.Schema:
        """The columns of the rows."""
        return segment_schema(self.state)


def form_of(operator: str, parts: Parts) -> tuple[Form, list[Note]]:
    """Declare one state of an operator, and return what of it stays opaque."""
    notes: list[Note] = []

    def note(message: str) -> None:
        notes.append(Note("opaque", f"{operator}/{parts.name}", message))

    raw_key = parts.key.takes_rest or not _is_key(parts.key.arrow_type)
    whole_key = parts.key.takes_rest and not _has_fixed_rest(parts)
    rest_type = None if whole_key or parts.layout is Layout.TIMERS else _rest_type(parts)
    raw_rest = rest_type is not None and (
        not _is_key(rest_type) or (parts.namespace is not None and parts.namespace.takes_rest)
    )
    whole_list = parts.layout is Layout.LIST and parts.value is not None and parts.value.takes_rest
    key = pa.binary() if raw_key else parts.key.arrow_type
    form = Form(parts, _PLACEHOLDER, raw_key, whole_key, raw_rest, whole_list)
    values = _value_columns(form)
    raw_value = False
    try:
        state = _declared(operator, form, key, pa.binary() if raw_rest else rest_type, values)
    except InvalidInput:
        # A type that the format does not support, such as one that is nested too deep.
        raw_value, whole_list = True, parts.layout is Layout.LIST
        form = Form(parts, _PLACEHOLDER, raw_key, whole_key, raw_rest, whole_list, raw_value)
        state = _declared(operator, form, key, pa.binary() if raw_rest else rest_type, {"value": pa.binary()})
        note("values have a type that cannot be stored; each is kept as its bytes in `value`")
    if parts.opaque:
        note(f"not decoded, and kept as bytes: {', '.join(parts.opaque)}")
    if whole_key:
        note("the end of a key is not known: `key` has all bytes of the stored key, with what follows it")
    elif raw_key and not parts.key.takes_rest:
        note(f"keys of type {parts.key.arrow_type} cannot be key columns; `key` has their bytes")
    if raw_rest:
        note("`_map_key` has the bytes of the namespace and the map key")
    if whole_list:
        note("elements end nowhere: `value` has the bytes of all elements of a list, joined by commas")
    return Form(parts, state, raw_key, whole_key, raw_rest, whole_list, raw_value), notes


_PLACEHOLDER: Final[Any] = None
TIMER_STATES: Final = "_timer_state/"


def _declared(operator: str, form: Form, key: pa.DataType, rest: pa.DataType | None, values: Columns) -> State:
    keys = {"key": key}
    name, layout = form.parts.name, form.parts.layout
    if layout is Layout.TIMERS:
        is_processing = name.startswith(f"{TIMER_STATES}processing_")
        return timers(operator, name, keys=keys, clock="processing_time" if is_processing else "event_time")
    if rest is not None:
        return map_state(operator, name, keys=keys, map_key=rest, values=values)
    if layout is Layout.LIST and not form.whole_list:
        return list_state(operator, name, keys=keys, values=values)
    return value_state(operator, name, keys=keys, values=values)


def _value_columns(form: Form) -> Columns:
    parts = form.parts
    if parts.value is None:
        return {}
    if form.whole_list:
        return {"value": pa.binary()}
    dtype = parts.value.arrow_type
    if parts.layout is Layout.LIST and parts.namespace is not None and not form.whole_key:
        return {"value": pa.list_(pa.field("element", dtype))}
    if is_ttl(dtype):
        return pa.schema(
            [pa.field("value", dtype.field("value").type), pa.field(TTL, pa.timestamp("us"), nullable=False)]
        )
    return {"value": dtype}


def is_ttl(dtype: pa.DataType) -> bool:
    """Return whether values are stored with the time of their last access."""
    return pa.types.is_struct(dtype) and {field.name for field in dtype} == {TTL, "value"}


def _rest_type(parts: Parts) -> pa.DataType | None:
    """Return the type of ``_map_key``; None if there is none."""
    space = parts.namespace.arrow_type if parts.namespace is not None else None
    if parts.map_key is None:
        return space
    if space is None:
        return parts.map_key.arrow_type
    fields = list(space) if is_window(space) else [pa.field("namespace", space)]
    return pa.struct([*fields, pa.field("key", parts.map_key.arrow_type)])


def is_window(dtype: pa.DataType) -> bool:
    """Whether namespaces of a type are windows of time."""
    return pa.types.is_struct(dtype) and tuple(field.name for field in dtype) == WINDOW


def has_text(dtype: pa.DataType) -> bool:
    """Whether namespaces of a type are shown as text in the tags of timers."""
    return is_window(dtype) or not (pa.types.is_nested(dtype) or pa.types.is_binary(dtype))


def _is_key(dtype: pa.DataType) -> bool:
    try:
        check_key_types([pa.field("key", dtype)])
    except InvalidInput:
        return False
    return True


def _has_fixed_rest(parts: Parts) -> bool:
    """Return whether the size of what follows the key in a stored key is known."""
    return parts.map_key is None and (parts.namespace is None or parts.namespace.fixed_length is not None)


def is_ambiguous(parts: Parts) -> bool:
    """Return whether key and namespace are followed by their lengths, since neither type has one.

    Only its own serializer knows that of an opaque namespace: then the bytes stay together.
    """
    space = parts.namespace
    return space is not None and not (space.takes_rest or space.declares_length or parts.key.declares_length)


@dataclass(slots=True)
class Rows:
    """Columns of rows before they are combined."""

    groups: npt.NDArray[np.int32]
    key: pa.Array
    namespace: pa.Array | None = None
    map_key: pa.Array | None = None
    rest: pa.Array | None = None
    """``_map_key`` as bytes."""
    values: pa.Array | None = None
    counts: Positions | None = None
    """Elements, or entries of a map, of each row so far: rows will be repeated."""
    milliseconds: npt.NDArray[np.int64] | None = None
    tag: pa.Array | None = None


def batch_of(form: Form, rows: Rows) -> pa.RecordBatch:
    """Combine rows in the columns of the state."""
    columns: dict[str, Any] = {"_key_group": pa.array(rows.groups, pa.int32()), "key": rows.key}
    values = rows.values
    if rows.milliseconds is not None:
        columns["_timestamp"] = pa.array(_microseconds(rows.milliseconds))
        columns["_tag"] = rows.tag
    spaced = form.parts.namespace is not None and not form.whole_key
    if rows.counts is not None and form.parts.layout is Layout.LIST and spaced:
        offsets = np.append(0, np.cumsum(rows.counts)).astype(np.int32)
        values = pa.ListArray.from_arrays(offsets, values)
    elif rows.counts is not None:
        repeated = pa.array(np.repeat(np.arange(len(rows.groups)), rows.counts))
        columns = {name: column.take(repeated) for name, column in columns.items()}
        if rows.namespace is not None:
            rows.namespace = rows.namespace.take(repeated)
        if form.parts.layout is Layout.LIST:
            first = np.cumsum(rows.counts) - rows.counts
            place = np.arange(int(rows.counts.sum())) - np.repeat(first, rows.counts)
            columns["_index"] = pa.array(place)
    if rows.rest is not None:
        columns["_map_key"] = rows.rest
    elif rows.map_key is not None or rows.namespace is not None:
        columns["_map_key"] = _map_key(rows.namespace, rows.map_key)
    if values is not None:
        if is_ttl(values.type) and TTL in form.schema.names:
            fields = dict(zip([field.name for field in values.type], values.flatten(), strict=True))
            # If there is no value, there is no time.
            micros = _microseconds(pc.fill_null(fields[TTL], _NO_TIME_MS).to_numpy(zero_copy_only=False))
            columns |= {"value": fields["value"], TTL: pa.array(np.maximum(micros, NO_TIME_US), pa.timestamp("us"))}
        else:
            columns["value"] = values
    schema = form.schema
    return pa.RecordBatch.from_arrays([_as(columns[field.name], field.type) for field in schema], schema=schema)


def _as(array: Any, dtype: pa.DataType) -> pa.Array:
    # Types differ in the ids of nested fields only, which stand in their metadata.
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    return array if array.type.equals(dtype, check_metadata=True) else array.cast(dtype)


def _map_key(namespace: pa.Array | None, map_key: pa.Array | None) -> pa.Array:
    if namespace is None or map_key is None:
        return map_key if namespace is None else namespace
    if is_window(namespace.type):
        arrays = [*namespace.flatten(), map_key]
        return pa.StructArray.from_arrays(arrays, [*WINDOW, "key"])
    return pa.StructArray.from_arrays([namespace, map_key], ["namespace", "key"])


def _microseconds(milliseconds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return ms as µs; values out of range become the least or the greatest."""
    limits = np.iinfo(np.int64)
    most = limits.max // 1000
    found = np.clip(milliseconds, -most, most) * 1000
    found[milliseconds > most] = limits.max
    found[milliseconds < -most] = limits.min
    return found


def tags(name: str, namespace: pa.Array | None, raw: ByteStrings | None, count: int) -> pa.Array:
    """Return ``_tag`` of timers: ``event/SERVICE`` or ``processing/SERVICE``, and the namespace."""
    label = name.removeprefix(TIMER_STATES).replace("_", "/", 1)
    if raw is not None:
        text = _hex(raw)
    elif namespace is None:
        return pa.repeat(pa.scalar(label), count)
    elif is_window(namespace.type):
        start, end = (column.cast(pa.string()) for column in namespace.flatten())
        text = pc.binary_join_element_wise(start, end, "-")
    else:
        text = namespace.cast(pa.string())
    return pc.binary_join_element_wise(pa.scalar(label), text, "/", null_handling="replace", null_replacement="null")


def _hex(strings: ByteStrings) -> pa.Array:
    """Return byte strings as hexadecimal digits."""
    plain = strings.to_arrow()
    offsets = np.frombuffer(plain.buffers()[1], np.int32, len(plain) + 1)
    octets = np.frombuffer(plain.buffers()[2] or b"", np.uint8)[: offsets[-1]]
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    text = np.stack([digits[octets >> 4], digits[octets & 15]], 1).reshape(-1)
    return pa.Array.from_buffers(
        pa.string(), len(plain), [None, pa.py_buffer(offsets * np.int32(2)), pa.py_buffer(text)]
    )


def taken_raw(serializer: Serializer, lanes: Lanes) -> ByteStrings:
    """Move lanes past a value, and return its bytes."""
    begin = lanes.position.copy()
    serializer.skip(lanes)
    return ByteStrings(lanes.data, begin, lanes.position - begin)
