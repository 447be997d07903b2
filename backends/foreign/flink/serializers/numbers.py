"""``BigInteger`` and ``BigDecimal``: as text, exactly as Java's ``toString`` writes them.

Both have any number of digits, and every ``BigDecimal`` has its own scale. Arrow's decimal types
allow neither, so text is exact where they are not. Arrow writes values of up to 31 bytes together.
"""

from __future__ import annotations

import decimal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...byte_strings import ByteStrings, Positions
from .lanes import Lanes, ramp
from .serializer import Serializer

_EXACT = decimal.Context(prec=decimal.MAX_PREC, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)
_SMALL = np.array([0, 0, 1, 10], np.uint8)
"""The numbers that the codes 1, 2 and 3 stand for (0 is null)."""


class BigInteger(Serializer):
    """i32 of 0 for null, 1 to 3 for 0, 1 and 10, or the number of bytes + 4; then the bytes."""

    arrow_type = pa.string()
    least_length = 4
    java_hash = "BigInteger"

    def read(self, lanes: Lanes) -> pa.Array:
        code, octets = _unscaled(lanes)
        return _written(code, octets, np.zeros(len(lanes), np.int64))

    def skip(self, lanes: Lanes) -> None:
        _unscaled(lanes)


class BigDecimal(Serializer):
    """Like ``BigInteger``, then, unless null, the scale."""

    arrow_type = pa.string()
    least_length = 4

    def read(self, lanes: Lanes) -> pa.Array:
        code, octets = _unscaled(lanes)
        return _written(code, octets, self._scales(lanes, code))

    def skip(self, lanes: Lanes) -> None:
        self._scales(lanes, _unscaled(lanes)[0])

    @staticmethod
    def _scales(lanes: Lanes, code: Positions) -> Positions:
        scale = np.zeros(len(lanes), np.int64)
        some = np.flatnonzero(code)
        present = lanes.take(some)
        scale[some] = present.fixed(">i4")
        lanes.put(some, present)
        return scale


def _unscaled(lanes: Lanes) -> tuple[Positions, ByteStrings]:
    """Take codes and bytes."""
    code = lanes.fixed(">i4").astype(np.int64)
    wrong = (code < 0) | (code == 4)
    if wrong.any():
        lane = int(np.flatnonzero(wrong)[0])
        lanes.position[lane] -= 4
        lanes.damaged(lane, f"the length of a number is {int(code[lane])}")
    return code, lanes.strings(np.maximum(code - 4, 0))


def _written(code: Positions, octets: ByteStrings, scale: Positions) -> pa.Array:
    """Write numbers as text, those of one scale and width together: usually there are few such."""
    data = np.ascontiguousarray(octets.data)
    length = octets.length
    width = np.where(length <= 15, 16, np.where(length <= 31, 32, 0))
    width[(scale < -38) | (scale > 38)] = 0
    present = code > 0
    groups = np.where(present, width * 1024 + scale + 512, -1)
    source = np.zeros(len(code), np.int64)
    pieces: list[pa.Array] = []
    done = 0
    for group in np.unique(groups[present & (width > 0)]).tolist():
        chosen = np.flatnonzero(groups == group)
        wide = group // 1024
        numbers = _extended(data, octets.start[chosen], length[chosen], code[chosen], wide)
        make = pa.decimal128 if wide == 16 else pa.decimal256
        kind = make(38 if wide == 16 else 76, group % 1024 - 512)
        array = pa.Array.from_buffers(kind, len(chosen), [None, pa.py_buffer(numbers)])
        pieces.append(array.cast(pa.string()))
        source[chosen] = done + np.arange(len(chosen))
        done += len(chosen)
    # More than 31 bytes (about 74 digits), or a scale beyond 38. These are rare, so one by one.
    rare = np.flatnonzero(present & (width == 0))
    if len(rare):
        pieces.append(
            pa.array([_one(data, octets, int(code[i]), int(scale[i]), i) for i in rare.tolist()], pa.string())
        )
        source[rare] = done + np.arange(len(rare))
    written = pa.concat_arrays(pieces) if pieces else pa.array([], pa.string())
    return written.take(pa.array(source, mask=~present))


def _extended(
    data: npt.NDArray[np.uint8], start: Positions, length: Positions, code: Positions, wide: int
) -> npt.NDArray[np.uint8]:
    """Return numbers as little-endian two's complement of ``wide`` bytes each."""
    negative = np.zeros(len(start), np.bool_)
    some = length > 0
    negative[some] = data[start[some]] >= 0x80
    numbers = np.repeat(np.where(negative, 0xFF, 0).astype(np.uint8), wide).reshape(-1, wide)
    lane = np.repeat(np.arange(len(start)), length)
    place = ramp(length)
    numbers[lane, length[lane] - 1 - place] = data[start[lane] + place]
    numbers[~some, 0] = _SMALL[code[~some]]
    return numbers


def _one(data: npt.NDArray[np.uint8], octets: ByteStrings, code: int, scale: int, lane: int) -> str:
    start = int(octets.start[lane])
    raw = data[start : start + int(octets.length[lane])].tobytes()
    number = int.from_bytes(raw, "big", signed=True) if raw else int(_SMALL[code])
    # Through decimal: Python limits its own conversion from large integers to text.
    value = decimal.Decimal(number)
    return str(value.scaleb(-scale, _EXACT) if scale else value)
