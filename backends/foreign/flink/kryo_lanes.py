"""Everyday values of Kryo's, many at once: strings and numbers, and lists and maps of these.

All lanes are walked together, the n-th item of each in one step. A lane with anything else in it is
left alone: :class:`kryo.Reader` reads it by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..byte_strings import ByteStrings, Octets, Positions, at_every_byte
from .compound import list_offsets
from .kryo import LEAF, LIST, MAP, Known, Shape, Writer, is_plain
from .lanes import Lanes, Present

_STRING: Final = "java.lang.String"
_TAGS: Final = {"java.lang.Integer": 2, _STRING: 3, "java.lang.Boolean": 5, "java.lang.Long": 9, "java.lang.Double": 10}
_VARYING: Final = {"java.lang.Integer": 5, "java.lang.Long": 9}
_MOST_ITEMS: Final = 1 << 10
"""A lane with more of them is left alone: each costs a step."""
_FEWEST_LANES: Final = 32
"""Fewer are faster by themselves."""
_NULL, _VALUE, _AGAIN, _ODD = range(4)


class _Step(NamedTuple):
    """One item of each of some lanes."""

    state: npt.NDArray[np.uint8]
    start: Positions
    """Where its content begins, of strings without their length."""
    size: Positions
    more: Any
    """Of strings: of which value it is one more, and whether its last byte has the top bit set."""
    behind: Positions


class _Items:
    """All items of all lanes, in their order."""

    def __init__(self, count: int) -> None:
        self.state = np.zeros(count, np.uint8)
        self.start = np.zeros(count, np.int64)
        self.size = np.zeros(count, np.int64)
        self.again = np.zeros(count, np.int64)
        self.topped = np.zeros(count, np.bool_)

    def put(self, places: Positions, step: _Step) -> None:
        self.state[places], self.start[places], self.size[places] = step.state, step.start, step.size
        if step.more is not None:
            self.again[places], self.topped[places] = step.more

    def take(self, chosen: Any) -> _Items:
        found = _Items(0)
        for name in ("state", "start", "size", "again", "topped"):
            setattr(found, name, getattr(self, name)[chosen])
        return found


class Everyday:
    """Reads values of one shape."""

    def __init__(self, known: Known, shape: Shape) -> None:
        self.shape = shape
        inner = (shape,) if shape.kind == LEAF else shape.inner if shape.kind in (LIST, MAP) else ()
        names = [one.classes[0] if one.kind == LEAF else "" for one in inner]
        self.leaves = tuple(names) if names and all(name in _TAGS for name in names) else ()
        """The classes of items: one, or those of a key and a value."""
        self.heads = [Writer(known).name_of_class(name) + b"\1" for name in shape.classes if is_plain(name)]

    def read(self, lanes: Lanes, *, skip: bool = False) -> tuple[pa.Array | None, Present]:
        """Read the lanes that are everyday ones; return their values, and which they are.

        The others have not moved. With ``skip`` no values are read.
        """
        none = np.zeros(len(lanes), np.bool_)
        if not self.leaves or len(lanes) < _FEWEST_LANES:
            return None, none
        begin, counts, null, odd = self._begin(lanes)
        items, owner, behind = self._walk(lanes, begin, counts * len(self.leaves))
        odd[owner[items.state == _ODD]] = True
        if len(self.leaves) == 2:
            odd[owner[0::2][items.state[0::2] == _NULL]] = True
        if _STRING in self.leaves:
            odd[owner[self._resolve(items, owner, len(lanes))]] = True
        good = ~odd
        found = None
        if not skip:
            if odd.any():
                items, counts = items.take(good[owner]), counts[good]
            found = self._arrays(lanes, items, counts, null[good])
            if found is None:
                return None, none
        lanes.position[good] = behind[good]
        return found, good

    def _begin(self, lanes: Lanes) -> tuple[Positions, Positions, Present, Present]:
        """Return where items begin, how many there are, and which lanes are null, and which odd."""
        count, data = len(lanes), lanes.data
        if self.shape.kind == LEAF:
            return lanes.position.copy(), np.ones(count, np.int64), np.zeros(count, np.bool_), lanes.left < 1
        begin, known = lanes.position.copy(), np.zeros(count, np.bool_)
        left = lanes.left
        for head in self.heads:
            some = np.flatnonzero(~known & (left > len(head)))
            if len(some):
                seen = at_every_byte(data, f"V{len(head)}")[begin[some]].view(np.uint8).reshape(-1, len(head))
                same = some[(seen == np.frombuffer(head, np.uint8)).all(axis=1)]
                begin[same] += len(head)
                known[same] = True
        last = len(data) - 1
        first = data[np.minimum(begin, last)].astype(np.int64)
        second = data[np.minimum(begin + 1, last)].astype(np.int64)
        null = ~known & (left > 0) & (first == 0)
        two = first >= 0x80
        counts = np.where(two, first & 0x7F | second << 7, first)
        begin += np.where(known, 1 + two, 1)
        odd = ~null & (~known | (two & (second >= 0x80)) | (counts > _MOST_ITEMS) | (counts > lanes.end - begin))
        counts[null | odd] = 0
        return begin, counts, null, odd

    def _walk(self, lanes: Lanes, begin: Positions, numbers: Positions) -> tuple[_Items, Positions, Positions]:
        """Walk ``numbers`` of items in each lane; return them, their lanes, and where each ends."""
        items = _Items(int(numbers.sum()))
        owner = np.repeat(np.arange(len(lanes)), numbers)
        # Longest first, so those that continue are a prefix.
        order = np.argsort(-numbers, kind="stable")
        falling, first = -numbers[order], (np.cumsum(numbers) - numbers)[order]
        at, end = begin[order], lanes.end[order]
        steps = [_strings if name == _STRING else _numbers(name) for name in self.leaves]
        for number in range(int(numbers.max(initial=0))):
            left = int(np.searchsorted(falling, -number, "left"))
            step = steps[number % len(steps)](lanes, at[:left], end[:left])
            items.put(first[:left] + number, step)
            at[:left] = step.behind
        behind = begin.copy()
        behind[order] = at
        return items, owner, behind

    def _resolve(self, items: _Items, owner: Positions, count: int) -> Positions:
        """Give strings that are there once more the place of the first; return the odd ones."""
        again = np.flatnonzero(items.state == _AGAIN)
        if not len(again):
            return again
        texts = np.flatnonzero(items.state == _VALUE)
        if len(self.leaves) == 2 and _STRING in self.leaves and set(self.leaves) != {_STRING}:
            texts = texts[texts % 2 == self.leaves.index(_STRING)]
        before = np.searchsorted(owner[texts], np.arange(count), "left")
        # The list or map itself is value 0.
        which = before[owner[again]] + items.again[again] - (0 if self.shape.kind == LEAF else 1)
        safe = np.clip(which, 0, max(len(texts) - 1, 0))
        target = texts[safe] if len(texts) else again
        wrong = (which != safe) | (target >= again) | (owner[target] != owner[again])
        items.state[again] = _VALUE
        for values in (items.start, items.size, items.topped):
            values[again] = values[target]
        found: Positions = again[wrong]
        return found

    def _arrays(self, lanes: Lanes, items: _Items, counts: Positions, null: Present) -> pa.Array | None:
        """Return the values of lanes; None if a string is not UTF-8."""
        per = len(self.leaves)
        arrays = []
        for place, name in enumerate(self.leaves):
            some = items if per == 1 else items.take(slice(place, None, per))
            values = _texts(lanes.data, some) if name == _STRING else _read_numbers(lanes.data, some, name)
            if values is None:
                return None
            present = some.state == _VALUE
            if not present.all():
                values = values.take(pa.array(np.maximum(np.cumsum(present) - 1, 0), mask=~present))
            arrays.append(values)
        if self.shape.kind == LEAF:
            return arrays[0]
        make = pa.ListArray.from_arrays if per == 1 else pa.MapArray.from_arrays
        found = make(list_offsets(counts), *arrays, type=self.shape.arrow)
        return found.take(pa.array(np.arange(len(null)), mask=null)) if null.any() else found


def _strings(lanes: Lanes, at: Positions, end: Positions) -> _Step:
    """Take a string, a null, or one more of a string."""
    data, last = lanes.data, len(lanes.data) - 1
    before, tops = lanes.continued(), lanes.tops()
    tag, reference = data[np.minimum(at, last)], data[np.minimum(at + 1, last)]
    body = at + 2
    first = data[np.minimum(body, last)].astype(np.int64)
    topped = first < 0x80
    # Without a length it ends with the next byte whose top bit is set.
    stop = tops[before[np.minimum(body, last + 1)]] + 1
    if topped.all():
        start, behind, odd = body, stop, stop > end
    else:
        second = data[np.minimum(body + 1, last)].astype(np.int64)
        long = ~topped & (first & 0x40 != 0)
        units = np.where(long, first & 0x3F | second << 6, first & 0x3F) - 1
        start = np.where(topped, body, body + 1 + long)
        behind = np.where(topped, stop, start + units)
        odd = (behind > end) | (~topped & ((units < 0) | (long & (second >= 0x80))))
        inside = np.minimum(np.maximum(behind, 0), last + 1)
        wide = np.flatnonzero(~topped & ~odd & (tag == 3) & (before[inside] != before[np.minimum(start, last + 1)]))
        if len(wide):
            behind[wide], odd[wide] = _wide(lanes, start[wide], units[wide], end[wide])
    value = (tag == 3) & (reference == 1) & ~odd
    again = (tag == 3) & (reference > 1) & (reference < 0x80) & (body <= end)
    null = (tag == 0) & (at < end)
    state = np.full(len(at), _ODD, np.uint8)
    state[null], state[again], state[value] = _NULL, _AGAIN, _VALUE
    after = np.where(value, behind, np.where(again, body, at + null))
    return _Step(state, start, behind - start, (reference.astype(np.int64) - 2, topped), after)


def _wide(lanes: Lanes, start: Positions, units: Positions, end: Positions) -> tuple[Positions, Present]:
    """Return where strings beyond ASCII end, by the width of their last character, and which are
    odd: those with surrogate pairs, too.
    """
    before, leads, halves = lanes.leads()
    place = before[start] + units - 1
    odd = place >= len(leads)
    lead = leads[np.minimum(place, len(leads) - 1)]
    octet = lanes.data[lead]
    behind = lead + 1 + (octet >= 0xC0) + (octet >= 0xE0)
    odd |= behind > end
    return behind, odd | (halves[np.where(odd, start, behind)] != halves[start])


def _numbers(name: str) -> Callable[[Lanes, Positions, Positions], _Step]:
    """Return what takes a number of a class, or a null."""
    wanted, most = _TAGS[name], _VARYING.get(name, 0)
    fixed = {"java.lang.Double": 8}.get(name, 1)

    def take(lanes: Lanes, at: Positions, end: Positions) -> _Step:
        data, last = lanes.data, len(lanes.data) - 1
        tag = data[np.minimum(at, last)]
        size = np.full(len(at), fixed, np.int64)
        odd = np.zeros(len(at), np.bool_)
        if most:
            going = np.ones(len(at), np.bool_)
            size -= 1
            for place in range(most):
                size += going
                going &= data[np.minimum(at + 1 + place, last)] >= 0x80
            odd = going if most == 5 else odd
        behind = at + 1 + size
        value, null = (tag == wanted) & (behind <= end) & ~odd, (tag == 0) & (at < end)
        state = np.where(value, _VALUE, np.where(null, _NULL, _ODD)).astype(np.uint8)
        return _Step(state, at + 1, size, None, np.where(value, behind, at + null))

    return take


def _texts(data: Octets, items: _Items) -> pa.Array | None:
    chosen = items.state == _VALUE
    found = ByteStrings(data, items.start[chosen], items.size[chosen]).to_arrow()
    _, offsets, octets = found.buffers()
    if octets is None or not octets.size:
        return found.cast(pa.string())
    plain = np.frombuffer(octets, np.uint8).copy()
    ends = np.frombuffer(offsets, np.int32, len(found) + 1)[1:]
    plain[ends[items.topped[chosen]] - 1] &= 0x7F
    text = pa.Array.from_buffers(pa.string(), len(found), [None, offsets, pa.py_buffer(plain)])
    if len(plain) and plain.max() >= 0x80:
        try:
            text.validate(full=True)
        except pa.ArrowInvalid:
            return None
    return text


def _read_numbers(data: Octets, items: _Items, name: str) -> pa.Array:
    chosen = items.state == _VALUE
    start, size = items.start[chosen], items.size[chosen]
    if name == "java.lang.Double":
        return pa.array(at_every_byte(data, ">f8")[start].astype(np.float64))
    if name == "java.lang.Boolean":
        return pa.array(data[start] == 1)
    found = np.zeros(len(start), np.uint64)
    for place in range(int(size.max(initial=0))):
        some = np.flatnonzero(size > place)
        octet = data[start[some] + place].astype(np.uint64)
        found[some] |= (octet & np.uint64(0xFF if place == 8 else 0x7F)) << np.uint64(7 * place)
    if name == "java.lang.Integer":
        found &= np.uint64(0xFFFFFFFF)
    signed = (found >> np.uint64(1)).astype(np.int64) ^ -(found & np.uint64(1)).astype(np.int64)
    return pa.array(signed.astype(np.int32) if name == "java.lang.Integer" else signed)
