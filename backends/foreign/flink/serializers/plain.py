"""Serializers of a fixed number of bytes: numbers, booleans, bytes without meaning."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from .lanes import Lanes
from .serializer import Serializer


class Number(Serializer):
    """A big-endian number of a fixed width."""

    def __init__(self, dtype: str, arrow_type: pa.DataType, java_hash: str) -> None:
        self.dtype = dtype
        self.arrow_type = arrow_type
        self.java_hash = java_hash
        self.fixed_length = self.least_length = np.dtype(dtype).itemsize

    def read(self, lanes: Lanes) -> pa.Array:
        return pa.array(lanes.fixed(self.dtype), self.arrow_type)


class Boolean(Serializer):
    """One byte, 0 or 1."""

    arrow_type = pa.bool_()
    fixed_length = least_length = 1
    java_hash = "Boolean"

    def read(self, lanes: Lanes) -> pa.Array:
        return pa.array(lanes.flags("a boolean"))


class Nothing(Serializer):
    """One byte without meaning: the void namespace, the global window, ``Void``.

    Flink declares a length of 0 for some of them, and writes the byte. Read as ``true``.
    """

    arrow_type = pa.bool_()
    fixed_length = least_length = 1

    def read(self, lanes: Lanes) -> pa.Array:
        lanes.skip(1)
        return pa.array(np.ones(len(lanes), np.bool_))


class TimeWindow(Serializer):
    """Start and end of a window in ms, the end exclusive."""

    arrow_type = pa.struct([("window_start", pa.int64()), ("window_end", pa.int64())])
    fixed_length = least_length = 16

    def read(self, lanes: Lanes) -> pa.Array:
        start, end = lanes.fixed(">i8"), lanes.fixed(">i8")
        return pa.StructArray.from_arrays([pa.array(start), pa.array(end)], fields=list(self.arrow_type))


LONG = Number(">i8", pa.int64(), "Long")
INTEGER = Number(">i4", pa.int32(), "Integer")
SHORT = Number(">i2", pa.int16(), "Short")
BYTE = Number("i1", pa.int8(), "Byte")
FLOAT = Number(">f4", pa.float32(), "Float")
DOUBLE = Number(">f8", pa.float64(), "Double")
BOOLEAN = Boolean()
