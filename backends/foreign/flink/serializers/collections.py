"""Serializers of many values: lists, sets, arrays, maps.

The counts of all lanes are read first. Elements of a fixed width are at known places. Others are
skipped in lock-step, the n-th of every lane together, to find where each begins. Then all are read
together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, UnsupportedFormat

from ...byte_strings import Positions
from .lanes import Lanes, ramp
from .records import opaque_within, read_some, skip_some
from .serializer import Serializer
from .text import CHARACTER, to_utf8


def list_offsets(counts: Positions) -> pa.Array:
    """Return the offsets of lists that have these counts of elements."""
    ends = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    if ends[-1] >= 1 << 31:
        raise UnsupportedFormat(
            f"{int(ends[-1])} elements of lists are read at once, and Arrow holds 2147483647; read fewer key groups",
            kind=ErrorKind.LIMIT_EXCEEDED,
        )
    return pa.array(ends.astype(np.int32))


def element_lanes(lanes: Lanes, counts: Positions, skip: Callable[[Lanes], None], width: int | None) -> Lanes:
    """Return a lane for each of ``counts`` elements, and move ``lanes`` past them.

    ``width``: bytes of an element, if all have the same size; otherwise ``skip`` moves past one.
    """
    ends = np.repeat(lanes.end, counts)
    if width is not None:
        begin = np.repeat(lanes.position, counts) + ramp(counts) * width
        lanes.skip(counts * width)
        return lanes.at(begin, ends)
    begin = np.zeros(len(ends), np.int64)
    first = np.cumsum(counts) - counts
    # Longest first, so those that continue are a prefix.
    order = np.argsort(-counts, kind="stable")
    falling = -counts[order]
    going = lanes.take(order)
    places = first[order]
    for step in range(int(counts.max()) if len(counts) else 0):
        left = int(np.searchsorted(falling, -step, "left"))
        if left < len(going):
            lanes.position[order[left : len(going)]] = going.position[left:]
            going = lanes.at(going.position[:left], going.end[:left])
        begin[places[:left] + step] = going.position
        skip(going)
    lanes.position[order[: len(going)]] = going.position
    return lanes.at(begin, ends)


class _Many(Serializer):
    """A type with many values: if the end of one cannot be found, it is opaque as a whole.

    Its children stay known: layouts that frame elements or entries can still use them.
    """

    def __init__(self, children: Sequence[Serializer], arrow_type: pa.DataType) -> None:
        self.arrow_type = arrow_type
        self.least_length = 4
        self.opaque = opaque_within(children)
        if any(child.takes_rest for child in children):
            self.takes_rest = True
            self.arrow_type = pa.binary()
            self.least_length = 0

    def read(self, lanes: Lanes) -> pa.Array:
        return lanes.rest().to_arrow() if self.takes_rest else self._decoded(lanes)

    def skip(self, lanes: Lanes) -> None:
        if self.takes_rest:
            lanes.rest()
        else:
            self._skipped(lanes)

    @abstractmethod
    def _decoded(self, lanes: Lanes) -> pa.Array:
        """Read where every child can be decoded."""

    def _skipped(self, lanes: Lanes) -> None:
        self._decoded(lanes)


class ListOf(_Many):
    """A count, then the elements; if ``flagged``, a byte before each says whether it is there."""

    def __init__(self, element: Serializer, *, flagged: bool = False) -> None:
        self.element = element
        self.flagged = flagged
        super().__init__((element,), pa.list_(pa.field("element", element.arrow_type)))

    def _decoded(self, lanes: Lanes) -> pa.Array:
        counts, elements = self._elements(lanes)
        values = self._read(elements) if self.flagged else self.element.read(elements)
        return pa.ListArray.from_arrays(list_offsets(counts), values, type=self.arrow_type)

    def _skipped(self, lanes: Lanes) -> None:
        self._elements(lanes)

    def _elements(self, lanes: Lanes) -> tuple[Positions, Lanes]:
        width = None if self.flagged else self.element.fixed_length
        counts = lanes.counts(1 if self.flagged else self.element.least_length)
        return counts, element_lanes(lanes, counts, self._skip if self.flagged else self.element.skip, width)

    def _read(self, lanes: Lanes) -> pa.Array:
        return read_some(self.element, lanes, lanes.flags("whether there is an element"))

    def _skip(self, lanes: Lanes) -> None:
        skip_some(self.element, lanes, lanes.flags("whether there is an element"))


class MaskedList(_Many):
    """A count, a mask of nulls from the top bit down, then the others (SQL's linked list)."""

    def __init__(self, element: Serializer) -> None:
        self.element = element
        super().__init__((element,), pa.list_(pa.field("element", element.arrow_type)))

    def _decoded(self, lanes: Lanes) -> pa.Array:
        counts = lanes.fixed(">i4").astype(np.int64)
        sizes = np.where(counts < 0, -1, (counts + 7) // 8)
        begin = lanes.position.copy()
        lanes.skip(sizes)
        place = ramp(counts)
        octets = lanes.data[np.repeat(begin, counts) + place // 8]
        present = (octets >> (7 - place % 8).astype(np.uint8)) & 1 == 0
        whole = np.bincount(np.repeat(np.arange(len(counts)), counts)[present], minlength=len(counts)).astype(np.int64)
        elements = element_lanes(lanes, whole, self.element.skip, self.element.fixed_length)
        values = self.element.read(elements)
        if not present.all():
            values = values.take(pa.array(np.maximum(np.cumsum(present) - 1, 0), mask=~present))
        return pa.ListArray.from_arrays(list_offsets(counts), values, type=self.arrow_type)


class MapOf(_Many):
    """A count, then keys and values; a byte before a value says whether it is null.

    With ``nullable_keys`` there is such a byte before keys too, and the type is a list of structs,
    because keys of Arrow's maps are never null. Without it, a null key is refused.
    """

    def __init__(self, key: Serializer, value: Serializer, *, nullable_keys: bool = False) -> None:
        self.key = key
        self.value = value
        self.nullable_keys = nullable_keys
        if nullable_keys:
            pair = pa.struct([("key", key.arrow_type), ("value", value.arrow_type)])
            arrow_type = pa.list_(pa.field("element", pair))
        else:
            arrow_type = pa.map_(pa.field("key", key.arrow_type, nullable=False), value.arrow_type)
        super().__init__((key, value), arrow_type)

    def _decoded(self, lanes: Lanes) -> pa.Array:
        counts, entries = self._entries(lanes)
        begin = entries.position.copy()
        if self.nullable_keys:
            keys = read_some(self.key, entries, ~entries.flags("whether a key is null"))
        else:
            keys = self.key.read(entries)
        values = read_some(self.value, entries, ~entries.flags("whether a value is null"))
        offsets = list_offsets(counts)
        if self.nullable_keys:
            pairs = pa.StructArray.from_arrays([keys, values], ["key", "value"])
            return pa.ListArray.from_arrays(offsets, pairs, type=self.arrow_type)
        if keys.null_count:
            lane = int(np.flatnonzero(keys.is_null().to_numpy(zero_copy_only=False))[0])
            raise UnsupportedFormat(
                f"{lanes.path or 'state'}: the map entry at byte {int(begin[lane])} has a null key, which Arrow's maps "
                "do not hold; change the value in the job",
                kind=ErrorKind.UNSUPPORTED_TYPE,
                path=lanes.path,
            )
        return pa.MapArray.from_arrays(offsets, keys, values, type=self.arrow_type)

    def _skipped(self, lanes: Lanes) -> None:
        self._entries(lanes)

    def _entries(self, lanes: Lanes) -> tuple[Positions, Lanes]:
        least = self.key.least_length + 1 if not self.nullable_keys else 2
        counts = lanes.counts(least)
        return counts, element_lanes(lanes, counts, self._skip, None)

    def _skip(self, lanes: Lanes) -> None:
        if self.nullable_keys:
            skip_some(self.key, lanes, ~lanes.flags("whether a key is null"))
        else:
            self.key.skip(lanes)
        skip_some(self.value, lanes, ~lanes.flags("whether a value is null"))


class Octets(Serializer):
    """``byte[]``: a count, then bytes; as ``binary``."""

    arrow_type = pa.binary()
    least_length = 4

    def read(self, lanes: Lanes) -> pa.Array:
        return lanes.strings(lanes.counts(1)).to_arrow()

    def skip(self, lanes: Lanes) -> None:
        lanes.skip(lanes.counts(1))


class Characters(Serializer):
    """``char[]``: a count, then UTF-16 units; as text."""

    arrow_type = pa.string()
    least_length = 4

    def read(self, lanes: Lanes) -> pa.Array:
        counts = lanes.counts(2)
        begin = lanes.position.copy()
        units: npt.NDArray[np.uint16] = element_lanes(lanes, counts, CHARACTER.skip, 2).fixed(">u2")
        return to_utf8(units, counts, lanes.at(begin, lanes.end))

    def skip(self, lanes: Lanes) -> None:
        lanes.skip(2 * lanes.counts(2))
