"""Entries of canonical savepoints and of RocksDB: framed keys and values, to rows.

A key is the number of its key group, the key, the namespace and, for maps, the user's key. If
neither key nor namespace has a fixed length, each is followed by its length. Values of maps begin
with a byte that says whether they are null; elements of lists are joined by commas.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from ...byte_strings import ByteStrings, Positions
from ..serializers import Lanes, Serializer, ramp, scattered
from .forms import Form, Layout, Rows, batch_of, has_text, is_ambiguous, tags, taken_raw
from .walk import Entries

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
