"""Serializers of Flink SQL's own values, each preceded by its length unless that is fixed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...byte_strings import ByteStrings
from .binary_rows import (
    Places,
    compact_decimals,
    long_decimals,
    read_lists,
    read_maps,
    read_rows,
    text_or_octets,
    timestamps,
)
from .lanes import Lanes
from .logical import Logical, raw_within
from .records import ROW_KINDS, refuse_kinds, struct
from .serializer import Serializer


class Framed(Serializer):
    """i32 size, then that many bytes: the frame of rows, arrays, maps, text and raw values.

    Used directly for values that cannot be decoded: ``names`` says why.
    """

    least_length = 4
    arrow_type: pa.DataType = pa.binary()

    def __init__(self, *names: str) -> None:
        self.opaque = names

    def read(self, lanes: Lanes) -> pa.Array:
        return self.take(lanes).to_arrow()

    def skip(self, lanes: Lanes) -> None:
        self.take(lanes)

    def take(self, lanes: Lanes) -> ByteStrings:
        return lanes.strings(lanes.fixed(">i4").astype(np.int64))


class RowData(Framed):
    """A row: struct of ``f0``, ``f1`` … and ``row_kind``. Keys are without ``row_kind``.

    Names of columns are not in a savepoint.
    """

    java_hash = "BinaryRowData"

    def __init__(self, kind: Logical, *, as_key: bool = False) -> None:
        self.kind = kind
        self.key = as_key
        self.opaque = raw_within(kind)
        fields = [kind.arrow.field(i) for i in range(kind.arrow.num_fields)]
        self.arrow_type = kind.arrow if as_key else pa.struct([*fields, pa.field("row_kind", pa.string())])

    def as_key(self) -> Serializer:
        return RowData(self.kind, as_key=True)

    def read(self, lanes: Lanes) -> pa.Array:
        found = self.take(lanes)
        rows, kinds = read_rows(self.kind, Places.of(lanes, found))
        wrong = kinds > 3
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            lanes.damaged(lane, f"the row before it is of kind {int(kinds[lane])}; known are 0 to 3")
        if self.key:
            refuse_kinds(kinds.astype(np.int64), lanes.at(found.start, found.start))
            return rows
        fields = [rows.field(i) for i in range(rows.type.num_fields)]
        return struct([*fields, pa.array(ROW_KINDS).take(pa.array(kinds.astype(np.int64)))], self.arrow_type)


class TextData(Framed):
    """Text as UTF-8."""

    def __init__(self, kind: Logical) -> None:
        self.kind = kind
        self.arrow_type = kind.arrow

    def read(self, lanes: Lanes) -> pa.Array:
        return text_or_octets(self.kind, self.take(lanes), lanes.path)


class ManyData(Framed):
    """An array or a map."""

    def __init__(self, kind: Logical) -> None:
        self.kind = kind
        self.arrow_type = kind.arrow
        self.opaque = raw_within(kind)

    def read(self, lanes: Lanes) -> pa.Array:
        found = self.take(lanes)
        places = Places.of(lanes, found)
        return read_lists(self.kind, places) if self.kind.kind == "list" else read_maps(self.kind, places)


class DecimalData(Framed):
    """A decimal: i64 up to 18 digits, else bytes after their length."""

    def __init__(self, kind: Logical) -> None:
        self.kind = kind
        self.arrow_type = kind.arrow
        if kind.precision <= 18:
            self.fixed_length = self.least_length = 8

    def read(self, lanes: Lanes) -> pa.Array:
        if self.fixed_length is None:
            return long_decimals(self.kind, self.take(lanes), lanes)
        begin = lanes.position.copy()
        return compact_decimals(self.kind, lanes.fixed(">i8"), lanes.at(begin, lanes.end))

    def skip(self, lanes: Lanes) -> None:
        if self.fixed_length is None:
            self.take(lanes)
        else:
            lanes.skip(self.fixed_length)


class TimestampData(Serializer):
    """A timestamp: i64 ms, and from precision 4 on i32 nanoseconds within the ms."""

    def __init__(self, kind: Logical) -> None:
        self.kind = kind
        self.arrow_type = kind.arrow
        self.fixed_length = self.least_length = 8 if kind.precision <= 3 else 12

    def read(self, lanes: Lanes) -> pa.Array:
        begin = lanes.position.copy()
        millis = lanes.fixed(">i8")
        nanos: npt.NDArray[np.int64] = np.zeros(len(lanes), np.int64)
        if self.kind.precision > 3:
            nanos = lanes.fixed(">i4").astype(np.int64)
        return timestamps(self.kind, millis, nanos, lanes.at(begin, lanes.end))


def row_data(kinds: Sequence[Logical | None], names: Sequence[str], row: Logical | None) -> Serializer:
    """Return the serializer of rows; framed bytes if a column has a type that is not decoded."""
    missing = [name for kind, name in zip(kinds, names, strict=True) if kind is None]
    return Framed(*dict.fromkeys(missing)) if missing or row is None else RowData(row)
