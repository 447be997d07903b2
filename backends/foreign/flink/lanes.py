"""Many positions in one buffer, and what every serializer does at them.

All readers of values take :class:`Lanes` and advance them together, one value each. What a
:class:`Serializer` is made of stands in ``snapshots``; the kinds are in ``scalars``, ``compound``,
``binary_rows`` and ``avro``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import DamagedCheckpoint

from ..byte_strings import ByteStrings, Octets, Positions, at_every_byte

Chosen: TypeAlias = "npt.NDArray[np.int64] | npt.NDArray[np.bool_]"


def gathered(data: Octets, position: Positions, dtype: str) -> npt.NDArray[Any]:
    """Return the values of ``dtype`` (``">i8"`` …) that begin at each position, in native order.

    None may extend beyond the end. All are gathered at once, from a view of the buffer in which an
    unaligned value begins at every byte.
    """
    kind = np.dtype(dtype)
    if kind.itemsize == 1:
        return data[position].view(kind)
    return at_every_byte(data, dtype)[position].astype(kind.newbyteorder("="), copy=False)


@dataclass(slots=True)
class Lanes:
    """For each of many values: where reading continues in ``data``, and where the value must have
    ended.

    A reader reads at every lane at once and moves ``position`` forward. Everything it takes must be
    before ``end``, or ``DamagedCheckpoint`` names the place.
    """

    data: Octets
    position: Positions
    """Where reading continues; owned, changed in place."""
    end: Positions
    path: str = ""
    """The file, for messages."""
    _kept: dict[str, Any] = field(default_factory=dict)
    """What was computed once of ``data``."""

    @classmethod
    def of(cls, strings: ByteStrings, path: str = "") -> Lanes:
        """Return a lane for each string."""
        data = np.ascontiguousarray(strings.data)
        return cls(data, strings.start.astype(np.int64), (strings.start + strings.length).astype(np.int64), path)

    def __len__(self) -> int:
        return len(self.position)

    @property
    def left(self) -> Positions:
        """How many bytes each has left."""
        return self.end - self.position

    def take(self, chosen: Chosen) -> Lanes:
        """Return some of them, by index or mask; write their positions back with ``put``."""
        return Lanes(self.data, self.position[chosen], self.end[chosen], self.path, self._kept)

    def put(self, chosen: Chosen, lanes: Lanes) -> None:
        """Write back the positions of lanes that were taken by ``chosen``."""
        self.position[chosen] = lanes.position

    def at(self, position: Positions, end: Positions) -> Lanes:
        """Return other lanes in the same buffer."""
        return Lanes(self.data, position, end, self.path, self._kept)

    def require(self, sizes: int | Positions) -> None:
        """Raise ``DamagedCheckpoint`` unless every lane has ``sizes`` bytes left; none negative."""
        if not len(self.position):
            return
        if isinstance(sizes, int):
            short = self.end - self.position < sizes
        else:
            short = (self.end - self.position < sizes) | (sizes < 0)
        if short.any():
            first = int(np.flatnonzero(short)[0])
            needed = sizes if isinstance(sizes, int) else int(sizes[first])
            self.damaged(first, f"{needed} bytes should follow and {int(self.left[first])} are left")

    def damaged(self, lane: int, what: str) -> NoReturn:
        """Raise ``DamagedCheckpoint`` for the position of a lane."""
        at = int(self.position[lane])
        raise DamagedCheckpoint(
            f"{self.path or 'state'}: the value at byte {at} is damaged: {what}. Take another checkpoint or savepoint",
            path=self.path,
            offset=at,
        )

    def skip(self, sizes: int | Positions) -> None:
        """Move every lane forward by ``sizes`` bytes."""
        self.require(sizes)
        self.position += sizes

    def fixed(self, dtype: str) -> npt.NDArray[Any]:
        """Take one value of ``dtype`` (``">i4"``, ``"u1"`` …) from each; native byte order."""
        size = np.dtype(dtype).itemsize
        self.require(size)
        found = gathered(self.data, self.position, dtype)
        self.position += size
        return found

    def strings(self, sizes: Positions) -> ByteStrings:
        """Take the next ``sizes`` bytes from each; they are not copied."""
        self.require(sizes)
        found = ByteStrings(self.data, self.position.copy(), sizes)
        self.position += sizes
        return found

    def rest(self) -> ByteStrings:
        """Take all that is left in each."""
        return self.strings(self.left)

    def flags(self, what: str) -> npt.NDArray[np.bool_]:
        """Take a byte from each that is 0 or 1; ``what`` names it in the error for another
        value.
        """
        found = self.fixed("u1")
        wrong = found > 1
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            self.position[lane] -= 1
            self.damaged(lane, f"{what} is {int(found[lane])} and may be 0 or 1")
        return found.view(np.bool_)

    def counts(self, least: int) -> Positions:
        """Take a count from each, of items with at least ``least`` bytes each, which must fit.

        Items of no bytes count as one byte, so a count can never exceed the bytes that are left.
        """
        found = self.fixed(">i4").astype(np.int64)
        wrong = (found < 0) | (found * max(least, 1) > self.left)
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            self.damaged(lane, f"{int(found[lane])} items should follow in {int(self.left[lane])} bytes")
        return found

    def continued(self) -> npt.NDArray[Any]:
        """Return for each place how many bytes before it have the top bit set; computed once.

        It takes four bytes per byte of the buffer (eight from 2 GiB on). Readers of numbers with 7
        bits per byte use it to find where numbers end.
        """
        if "tops" not in self._kept:
            self._kept["tops"] = self._counted(self.data >= 0x80)
        return self._kept["tops"]  # type: ignore[no-any-return]

    def tops(self) -> Positions:
        """Return the places of bytes with the top bit set, and the end; computed once."""
        if "places" not in self._kept:
            self._kept["places"] = np.append(np.flatnonzero(self.data >= 0x80), len(self.data))
        return self._kept["places"]  # type: ignore[no-any-return]

    def leads(self) -> tuple[npt.NDArray[Any], Positions, npt.NDArray[Any]]:
        """Return for each place how many characters of UTF-8 begin before it, where each does, and
        how many halves of surrogate pairs are before each place; computed once.
        """
        if "leads" not in self._kept:
            leads = self.data & 0xC0 != 0x80
            halves = np.append((self.data[:-1] == 0xED) & (self.data[1:] >= 0xA0), False)
            places = np.append(np.flatnonzero(leads), len(self.data) - 1)
            self._kept["leads"] = self._counted(leads), places, self._counted(halves[: len(leads)])
        return self._kept["leads"]  # type: ignore[no-any-return]

    @staticmethod
    def _counted(chosen: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        count = np.zeros(len(chosen) + 1, np.int32 if len(chosen) < 1 << 31 else np.int64)
        np.cumsum(chosen, out=count[1:])
        return count

    def finish(self) -> None:
        """Raise ``DamagedCheckpoint`` unless every lane has reached its end."""
        over = self.position != self.end
        if over.any():
            lane = int(np.flatnonzero(over)[0])
            self.damaged(lane, f"it should end here, and {int(self.left[lane])} bytes are left")


Present = npt.NDArray[np.bool_]


class Serializer(ABC):
    """How values of one type are stored in bytes, and which Arrow type they get.

    Values are immutable: one serializer may be used by many threads.
    """

    arrow_type: pa.DataType
    """A type that the format supports. ``read`` returns arrays of it; nulls are Java's nulls."""
    fixed_length: int | None = None
    """How many bytes each value takes; None if that differs."""
    least_length: int = 1
    """No value takes fewer bytes."""
    java_hash: str | None = None
    """The Java class whose ``hashCode`` a key of this type has (``Long``, ``String``, ``Tuple``,
    ``BinaryRowData`` …); None if only the user's code knows it.
    """
    opaque: tuple[str, ...] = ()
    """Java classes within that cannot be decoded; their values are ``binary``."""
    takes_rest: bool = False
    """Whether its end cannot be found: it takes all that is left of a lane, so lanes must be framed
    and nothing may follow it.
    """

    @property
    def declares_length(self) -> bool:
        """Whether Flink declares a length for the type. In composite keys of two types without one,
        each part is followed by its length.
        """
        return self.fixed_length is not None

    @abstractmethod
    def read(self, lanes: Lanes) -> pa.Array:
        """Decode the value at each lane and move the lanes past it.

        Returns one value per lane. Raises ``DamagedCheckpoint`` where bytes are wrong or missing,
        and ``UnsupportedFormat`` for what Arrow cannot hold.
        """

    def skip(self, lanes: Lanes) -> None:
        """Move the lanes past the value without decoding it."""
        if self.fixed_length is None:
            self.read(lanes)
        else:
            lanes.skip(self.fixed_length)

    def as_key(self) -> Serializer:
        """Return the serializer for keys of this type, without what keys never have (row kinds)."""
        return self

    def read_all(self, strings: ByteStrings, path: str = "") -> pa.Array:
        """Decode framed values: every one must fill its string."""
        lanes = Lanes.of(strings, path)
        found = self.read(lanes)
        lanes.finish()
        return found


class Opaque(Serializer):
    """Bytes up to the end of each lane: a class that is not decoded."""

    takes_rest = True
    least_length = 0

    def __init__(self, *names: str) -> None:
        self.arrow_type = pa.binary()
        self.opaque = names

    def read(self, lanes: Lanes) -> pa.Array:
        return lanes.rest().to_arrow()

    def skip(self, lanes: Lanes) -> None:
        lanes.rest()


def scattered(values: pa.Array, chosen: Present) -> pa.Array:
    """Return ``values`` at the places that ``chosen`` marks, and null elsewhere."""
    if chosen.all():
        return values
    places = np.cumsum(chosen) - 1
    return values.take(pa.array(np.maximum(places, 0), mask=~chosen))


def struct(arrays: Sequence[pa.Array], kind: pa.DataType, present: Present | None = None) -> pa.Array:
    """Return a struct array, null where ``present`` is false; at least one field."""
    mask = None if present is None or present.all() else pa.array(~present)
    return pa.StructArray.from_arrays(list(arrays), fields=[kind.field(i) for i in range(kind.num_fields)], mask=mask)
