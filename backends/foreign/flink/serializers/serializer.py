"""What every serializer provides, and the one for bytes that cannot be decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...byte_strings import ByteStrings
from .lanes import Lanes


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


def scattered(values: pa.Array, chosen: npt.NDArray[np.bool_]) -> pa.Array:
    """Return ``values`` at the places that ``chosen`` marks, and null elsewhere."""
    if chosen.all():
        return values
    places = np.cumsum(chosen) - 1
    return values.take(pa.array(np.maximum(places, 0), mask=~chosen))
