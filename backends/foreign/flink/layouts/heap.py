"""Key groups of the hash-map backend's own checkpoints: nothing is framed.

A key group has its number (i32), and then every state of the header: its number (i16), how many
entries (i32), and the entries one after another: namespace, key, value, or a timer. Only the
serializers know where an entry ends, so all key groups are walked at once, one entry of each per
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...byte_strings import ByteStrings, Octets, Positions
from ..serializers import Lanes, Serializer, element_lanes, scattered
from .canonical import timer_key, timer_namespace
from .forms import Form, Layout, Parts, Rows, batch_of, tags, taken_raw


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
