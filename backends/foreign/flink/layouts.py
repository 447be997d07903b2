"""Keyed state of Flink as rows of stateformat: which columns, and how to build them from entries.

A namespace is a part of the row key that Flink does not hash: windows become (part of) the map key.
Parts that cannot be separated stay as bytes: an opaque key of a map is followed by its map key.

*Canonical* savepoints and RocksDB frame keys and values. A key is the number of its key group, the
key, the namespace and, for maps, the user's key. If neither key nor namespace has a fixed length,
each is followed by its length. Values of maps begin with a byte that says whether they are null;
elements of lists are joined by commas.

The *hash-map backend's* own checkpoints frame nothing. A key group has its number (i32), and then
every state of the header: its number (i16), how many entries (i32), and the entries one after
another: namespace, key, value, or a timer. Only the serializers know where an entry ends, so all
key groups are walked at once, one entry of each per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.documents import hexadecimal
from stateformat.errors import InvalidInput
from stateformat.keys import check_key_types
from stateformat.model import State
from stateformat.schema import segment_schema
from stateformat.states import Columns, list_state, map_state, timers, value_state
from stateformat.ttl import NO_TIME_US, TTL_COLUMN

from ..byte_strings import ByteStrings, Octets, Positions, ramp, saturated_microseconds
from ..source import Note
from .compound import element_lanes
from .lanes import Lanes, Serializer, scattered
from .walk import Entries

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
        columns["_timestamp"] = pa.array(saturated_microseconds(rows.milliseconds))
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
            columns["_index"] = pa.array(ramp(rows.counts))
    if rows.rest is not None:
        columns["_map_key"] = rows.rest
    elif rows.map_key is not None or rows.namespace is not None:
        columns["_map_key"] = _map_key(rows.namespace, rows.map_key)
    if values is not None:
        if is_ttl(values.type) and TTL in form.schema.names:
            fields = dict(zip([field.name for field in values.type], values.flatten(), strict=True))
            # If there is no value, there is no time.
            micros = saturated_microseconds(pc.fill_null(fields[TTL], _NO_TIME_MS).to_numpy(zero_copy_only=False))
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


def tags(name: str, namespace: pa.Array | None, raw: ByteStrings | None, count: int) -> pa.Array:
    """Return ``_tag`` of timers: ``event/SERVICE`` or ``processing/SERVICE``, and the namespace."""
    label = name.removeprefix(TIMER_STATES).replace("_", "/", 1)
    if raw is not None:
        text = hexadecimal(raw.to_arrow())
    elif namespace is None:
        return pa.repeat(pa.scalar(label), count)
    elif is_window(namespace.type):
        start, end = (column.cast(pa.string()) for column in namespace.flatten())
        text = pc.binary_join_element_wise(start, end, "-")
    else:
        text = namespace.cast(pa.string())
    return pc.binary_join_element_wise(pa.scalar(label), text, "/", null_handling="replace", null_replacement="null")


def taken_raw(serializer: Serializer, lanes: Lanes) -> ByteStrings:
    """Move lanes past a value, and return its bytes."""
    begin = lanes.position.copy()
    serializer.skip(lanes)
    return ByteStrings(lanes.data, begin, lanes.position - begin)


_COMMA: Final = 0x2C


def prefix_size(max_parallelism: int) -> int:
    """Return how many bytes a key group's number takes in a key."""
    return 1 if max_parallelism <= 128 else 2


def rows_of(form: Form, entries: Entries, prefix: int, path: str) -> pa.RecordBatch:
    """Return entries of one state as rows. Raises ``DamagedCheckpoint``, ``UnsupportedFormat``."""
    lanes = Lanes.of(entries.keys.without_prefix(prefix), path)
    if form.parts.layout is Layout.TIMERS:
        Lanes.of(entries.values, path).finish()
        return batch_of(form, _timers(form, entries, lanes))
    rows = Rows(entries.groups, _key(form, lanes))
    if form.raw_rest:
        if form.parts.namespace is None:
            _namespace(form, lanes)
        rows.rest = lanes.rest().to_arrow()
    elif not form.whole_key:
        rows.namespace = _namespace(form, lanes)
        if form.parts.map_key is not None:
            rows.map_key = form.parts.map_key.read(lanes)
    lanes.finish()
    _values(form, rows, entries.values, path)
    return batch_of(form, rows)


def _key(form: Form, lanes: Lanes) -> pa.Array:
    """Take the key, and its length if that follows it."""
    parts = form.parts
    begin = lanes.position.copy()
    if form.whole_key:
        return lanes.rest().to_arrow()
    if parts.key.takes_rest:
        # The size of what follows is known: a byte for no namespace, or that of the namespace.
        behind = parts.namespace.fixed_length if parts.namespace is not None else 1
        found = lanes.strings(lanes.left - (behind or 0)).to_arrow()
    elif form.raw_key:
        found = taken_raw(parts.key, lanes).to_arrow()
    else:
        found = parts.key.read(lanes)
    if is_ambiguous(parts):
        _length(lanes, begin)
    return found


def _namespace(form: Form, lanes: Lanes) -> pa.Array | None:
    parts = form.parts
    if parts.namespace is None:
        # VoidNamespace: a byte without meaning.
        lanes.skip(1)
        return None
    begin = lanes.position.copy()
    found = parts.namespace.read(lanes)
    if is_ambiguous(parts):
        _length(lanes, begin)
    return found


def _length(lanes: Lanes, begin: Positions) -> None:
    """Take the length of the bytes from ``begin``: its bytes, low first, until the rest is zero."""
    left = lanes.position - begin
    active = np.arange(len(left))
    while len(active):
        some = lanes.take(active)
        said = some.fixed("u1")
        wrong = np.flatnonzero(said != left[active] & 0xFF)
        if len(wrong):
            some.damaged(int(wrong[0]), "the length behind it is another")
        lanes.put(active, some)
        left[active] >>= 8
        active = active[left[active] > 0]


def _timers(form: Form, entries: Entries, lanes: Lanes) -> Rows:
    parts = form.parts
    moments = (lanes.fixed(">u8") ^ np.uint64(1 << 63)).view(np.int64)
    if form.whole_key:
        key, namespace, raw = lanes.rest().to_arrow(), None, None
    else:
        key = timer_key(form, lanes)
        namespace, raw = timer_namespace(form, lanes)
    lanes.finish()
    tag = tags(parts.name, namespace, raw, len(entries))
    return Rows(entries.groups, key, milliseconds=moments, tag=tag)


def timer_key(form: Form, lanes: Lanes) -> pa.Array:
    """Take a key that is not followed by its length: of timers, and in a heap."""
    parts = form.parts
    if parts.key.takes_rest:
        behind = parts.namespace.fixed_length if parts.namespace is not None else 1
        return lanes.strings(lanes.left - (behind or 0)).to_arrow()
    return taken_raw(parts.key, lanes).to_arrow() if form.raw_key else parts.key.read(lanes)


def timer_namespace(form: Form, lanes: Lanes) -> tuple[pa.Array | None, ByteStrings | None]:
    """Take the namespace of timers: as values that have a text, or as bytes."""
    space = form.parts.namespace
    if space is None:
        lanes.skip(1)
        return None, None
    if space.takes_rest or not has_text(space.arrow_type):
        return None, taken_raw(space, lanes)
    return space.read(lanes), None


def _values(form: Form, rows: Rows, values: ByteStrings, path: str) -> None:
    parts = form.parts
    if form.whole_list or form.raw_value:
        rows.values = values.to_arrow()
    elif parts.value is None:
        Lanes.of(values, path).finish()
    elif parts.layout is Layout.MAP:
        lanes = Lanes.of(values, path)
        present = ~lanes.flags("whether a map's value is null")
        some = lanes.take(present)
        found = parts.value.read(some)
        # The heap writes a null's own bytes after its mark; they are not used.
        some.finish()
        rows.values = scattered(found, present)
    elif parts.layout is Layout.LIST:
        rows.counts, rows.values = elements_of(parts.value, values, path)
    else:
        rows.values = parts.value.read_all(values, path)


def elements_of(element: Serializer, lists: ByteStrings, path: str) -> tuple[Positions, pa.Array]:
    """Split lists of elements joined by commas: how many each has, and all elements.

    Elements may contain commas themselves, so their serializer finds their ends.
    """
    ends = lists.start + lists.length
    if element.fixed_length is not None:
        size = element.fixed_length + 1
        counts = (lists.length + 1) // size
        position = np.repeat(lists.start, counts) + ramp(counts) * size
        _check_joined(Lanes.of(lists, path), counts, position, size)
    else:
        counts, steps = _walked(element, Lanes.of(lists, path))
        place = np.cumsum(counts) - counts
        position = np.empty(int(counts.sum()), np.int64)
        for owner, begin in steps:
            position[place[owner]] = begin
            place[owner] += 1
    found = Lanes(np.ascontiguousarray(lists.data), position, np.repeat(ends, counts), path)
    return counts, element.read(found)


def count_elements(form: Form, entries: Entries, path: str) -> Positions:
    """Count the rows of each entry: the elements of a list, unless the list is one value."""
    element = form.parts.value
    if form.parts.layout is not Layout.LIST or element is None or not form.spreads:
        return np.ones(len(entries), np.int64)
    if element.fixed_length is not None:
        return (entries.values.length + 1) // (element.fixed_length + 1)
    return _walked(element, Lanes.of(entries.values, path))[0]


def _check_joined(lanes: Lanes, counts: Positions, begin: Positions, size: int) -> None:
    odd = np.flatnonzero((lanes.left > 0) & (lanes.left + 1 != counts * size))
    if len(odd):
        lanes.damaged(int(odd[0]), f"a list of {int(lanes.left[odd[0]])} bytes has elements of {size - 1}")
    first = np.zeros(len(begin), np.bool_)
    first[(np.cumsum(counts) - counts)[counts > 0]] = True
    wrong = np.flatnonzero(lanes.data[begin[~first] - 1] != _COMMA)
    if len(wrong):
        owner = np.repeat(np.arange(len(counts)), counts)[~first][wrong[0]]
        lanes.damaged(int(owner), "elements are not joined by commas")


def _walked(element: Serializer, lanes: Lanes) -> tuple[Positions, list[tuple[Positions, Positions]]]:
    """Walk all lists at once, one element of each per step."""
    counts = np.zeros(len(lanes), np.int64)
    steps = []
    active = np.flatnonzero(lanes.left > 0)
    some = lanes.take(active)
    while len(active):
        steps.append((active, some.position.copy()))
        counts[active] += 1
        element.skip(some)
        more = np.flatnonzero(some.left > 0)
        active, some = active[more], some.take(more)
        if len(active):
            joined = some.fixed("u1")
            wrong = np.flatnonzero(joined != _COMMA)
            if len(wrong):
                some.damaged(int(wrong[0]), f"byte {int(joined[wrong[0]])} stands where a comma joins two elements")
    return counts, steps


@dataclass(frozen=True, slots=True)
class Stored:
    """How entries of one state are stored in a key group."""

    parts: Parts
    value: Serializer | None
    """Of the whole value: of a map or list with its count. None for timers."""

    @property
    def serializers(self) -> list[Serializer | None]:
        """Those of an entry, in order; None is the byte of no namespace."""
        if self.value is None:
            return [self.parts.key, self.parts.namespace]
        return [self.parts.namespace, self.parts.key, self.value]

    @property
    def head(self) -> int:
        """How many bytes precede them: the time of a timer."""
        return 8 if self.value is None else 0

    @property
    def size(self) -> int | None:
        """The bytes of an entry; None if they differ."""
        sizes = [1 if item is None else item.fixed_length for item in self.serializers]
        return None if None in sizes else self.head + sum(size for size in sizes if size is not None)

    @property
    def least(self) -> int:
        return self.head + sum(1 if item is None else item.least_length for item in self.serializers)

    def skip(self, lanes: Lanes) -> None:
        """Move lanes past an entry."""
        lanes.skip(self.head)
        for item in self.serializers:
            if item is None:
                lanes.skip(1)
            else:
                item.skip(lanes)


@dataclass(frozen=True, slots=True)
class HeapEntries:
    """Where entries of one state begin, by key group, and which ends they must not pass."""

    groups: npt.NDArray[np.int32]
    lanes: Lanes

    def __len__(self) -> int:
        return len(self.groups)


def frame_heap(
    data: Octets,
    start: Positions,
    end: Positions,
    groups: npt.NDArray[np.int32],
    states: Mapping[int, Stored],
    *,
    where: str,
    wanted: int | None = None,
    open_end: bool = False,
) -> dict[int, HeapEntries]:
    """Find the entries of states, by number, in key groups at ``start[i]`` … ``end[i]``.

    With ``wanted``, data after that state is not read. With ``open_end`` the last key group may end
    early. Raises ``DamagedCheckpoint``.
    """
    lanes = Lanes(data, start.copy(), end.copy(), where)
    _check_groups(lanes, groups)
    pieces = _Pieces(groups, states)
    active, some = np.arange(len(start)), lanes
    for _ in states:
        met = pieces.take(some, active, wanted)
        if wanted is not None:
            left = np.flatnonzero(~met)
            active, some = active[left], some.take(left)
    if wanted is None:
        over = lanes.position != lanes.end
        over[-1:] &= not open_end
        if over.any():
            lane = int(np.flatnonzero(over)[0])
            lanes.damaged(lane, f"key group {groups[lane]} should end here, and {lanes.left[lane]} bytes follow")
    return {number: pieces.of(number, lanes) for number in states}


def frame_compressed(
    data: Octets,
    start: Positions,
    end: Positions,
    owner: Positions,
    groups: npt.NDArray[np.int32],
    states: Mapping[int, Stored],
    *,
    where: str,
    wanted: int | None = None,
) -> dict[int, HeapEntries]:
    """Find the entries of states that have a separate range for each key group.

    ``owner`` says which of ``groups`` the range at ``start[i]`` … ``end[i]`` belongs to. States
    that are not wanted, or not among ``states``, are skipped.
    """
    lanes = Lanes(data, start.copy(), end.copy(), where)
    pieces = _Pieces(groups, states)
    numbers = lanes.fixed(">i2").astype(np.int64)
    known = [number for number in states if wanted in (None, number)]
    chosen = np.flatnonzero(np.isin(numbers, known))
    lanes.position -= 2
    some = lanes.take(chosen)
    pieces.take(some, owner[chosen], wanted)
    some.finish()
    return {number: pieces.of(number, lanes) for number in states}


def _check_groups(lanes: Lanes, groups: npt.NDArray[np.int32]) -> None:
    said = lanes.fixed(">i4")
    wrong = np.flatnonzero(said != groups)
    if len(wrong):
        first = int(wrong[0])
        lanes.position[first] -= 4
        lanes.damaged(first, f"key group {groups[first]} should begin here, and it says {said[first]}")


class _Pieces:
    """Entries of states as they are found, one state of a key group at a time."""

    def __init__(self, groups: npt.NDArray[np.int32], states: Mapping[int, Stored]) -> None:
        self.groups, self.states = groups, states
        self.met = np.zeros((len(groups), max(states, default=0) + 1), np.bool_)
        self.found: dict[int, list[tuple[Positions, Lanes]]] = {number: [] for number in states}

    def take(self, lanes: Lanes, owner: Positions, wanted: int | None) -> npt.NDArray[np.bool_]:
        """Take one state from every lane; return which were the wanted one."""
        numbers = lanes.fixed(">i2").astype(np.int64)
        for number in np.unique(numbers).tolist():
            chosen = np.flatnonzero(numbers == number)
            some, group = lanes.take(chosen), owner[chosen]
            if number not in self.states or self.met[group, number].any() or len(np.unique(group)) != len(group):
                some.damaged(0, f"state {number} begins here, which the header does not have, or it stands twice")
            self.met[group, number] = True
            entry = self.states[number]
            counts = some.counts(entry.least)
            if number == wanted or wanted is None or entry.size is None:
                entries = element_lanes(some, counts, entry.skip, entry.size)
                self.found[number].append((np.repeat(group, counts), entries))
            else:
                some.skip(counts * entry.size)
            lanes.put(chosen, some)
        met: npt.NDArray[np.bool_] = numbers == wanted
        return met

    def of(self, number: int, lanes: Lanes) -> HeapEntries:
        """Return the entries of a state in order of key groups."""
        pieces = self.found[number]
        if len(pieces) == 1 and not (np.diff(pieces[0][0]) < 0).any():
            return HeapEntries(self.groups[pieces[0][0]], pieces[0][1])
        none = np.zeros(0, np.int64)
        owner = np.concatenate([none, *(owner for owner, _ in pieces)])
        begin = np.concatenate([none, *(some.position for _, some in pieces)])
        end = np.concatenate([none, *(some.end for _, some in pieces)])
        order = np.argsort(owner, kind="stable")
        return HeapEntries(self.groups[owner[order]], lanes.at(begin[order], end[order]))


def rows_of_heap(form: Form, entry: Stored, entries: HeapEntries) -> pa.RecordBatch:
    """Return entries of one state as rows."""
    lanes, parts = entries.lanes, form.parts
    if entry.value is None:
        moments = (lanes.fixed(">u8") ^ np.uint64(1 << 63)).view(np.int64)
        key = timer_key(form, lanes)
        namespace, raw = timer_namespace(form, lanes)
        tag = tags(parts.name, namespace, raw, len(entries))
        return batch_of(form, Rows(entries.groups, key, milliseconds=moments, tag=tag))
    rows = Rows(entries.groups, pa.nulls(0))
    space: ByteStrings | None = None
    if parts.namespace is None:
        lanes.skip(1)
    elif form.raw_rest:
        space = taken_raw(parts.namespace, lanes)
        rows.rest = space.to_arrow()
    else:
        rows.namespace = parts.namespace.read(lanes)
    rows.key = timer_key(form, lanes)
    if form.raw_value and parts.layout is not Layout.MAP:
        rows.values = taken_raw(entry.value, lanes).to_arrow()
    elif parts.layout is Layout.MAP:
        _entries(form, lanes, rows)
    else:
        rows.values = entry.value.read(lanes)
        if parts.layout is Layout.LIST:
            rows.counts, rows.values = _counts(rows.values), rows.values.flatten()
    return batch_of(form, rows)


def _entries(form: Form, lanes: Lanes, rows: Rows) -> None:
    """Take the entries of maps; ``rows.rest`` is the namespace's bytes, if map keys stay bytes."""
    key, value = form.parts.map_key, form.parts.value
    if key is None or value is None:
        raise AssertionError("a map without serializers")

    def skip(some: Lanes) -> None:
        key.skip(some)
        present = np.flatnonzero(~some.flags("whether a map's value is null"))
        chosen = some.take(present)
        value.skip(chosen)
        some.put(present, chosen)

    counts = lanes.counts(key.least_length + 1)
    entries = element_lanes(lanes, counts, skip, None)
    if form.raw_rest:
        raw = taken_raw(key, entries).to_arrow()
        before = rows.rest.take(np.repeat(np.arange(len(counts)), counts)) if rows.rest is not None else None
        rows.rest = raw if before is None else pc.binary_join_element_wise(before, raw, pa.scalar(b"", pa.binary()))
    else:
        rows.map_key = key.read(entries)
    present = ~entries.flags("whether a map's value is null")
    some = entries.take(present)
    found = taken_raw(value, some).to_arrow() if form.raw_value else value.read(some)
    rows.counts, rows.values = counts, scattered(found, present)


def _counts(lists: pa.Array) -> Positions:
    counts: Positions = np.diff(lists.offsets.to_numpy(zero_copy_only=False)).astype(np.int64)
    return counts
