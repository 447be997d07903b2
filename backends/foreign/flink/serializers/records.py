"""Serializers that put values one after another: tuples, rows, TTL, timers, either, nullable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, UnsupportedFormat

from .lanes import Lanes
from .serializer import Opaque, Serializer, scattered

Present = npt.NDArray[np.bool_]


def read_some(serializer: Serializer, lanes: Lanes, present: Present) -> pa.Array:
    """Read at the lanes that ``present`` marks. The others do not move, and are null."""
    if present.all():
        return serializer.read(lanes)
    chosen = np.flatnonzero(present)
    if not len(chosen):
        return pa.nulls(len(lanes), serializer.arrow_type)
    some = lanes.take(chosen)
    found = serializer.read(some)
    lanes.put(chosen, some)
    return scattered(found, present)


def skip_some(serializer: Serializer, lanes: Lanes, present: Present) -> None:
    """Skip the values at the lanes that ``present`` marks."""
    if present.all():
        serializer.skip(lanes)
        return
    chosen = np.flatnonzero(present)
    if len(chosen):
        some = lanes.take(chosen)
        serializer.skip(some)
        lanes.put(chosen, some)


def opaque_within(children: Sequence[Serializer]) -> tuple[str, ...]:
    """Return the classes within that cannot be decoded, each once."""
    return tuple(dict.fromkeys(name for child in children for name in child.opaque))


def undecodable(children: Sequence[Serializer]) -> Opaque | None:
    """Return a replacement for the whole if something follows a child whose end is unknown."""
    if any(child.takes_rest for child in children[:-1]):
        return Opaque(*opaque_within(children))
    return None


def struct(arrays: Sequence[pa.Array], kind: pa.DataType, present: Present | None = None) -> pa.Array:
    """Return a struct array, null where ``present`` is false; at least one field."""
    mask = None if present is None or present.all() else pa.array(~present)
    return pa.StructArray.from_arrays(list(arrays), fields=[kind.field(i) for i in range(kind.num_fields)], mask=mask)


def struct_type(names: Sequence[str], children: Sequence[Serializer]) -> pa.DataType:
    """Return the struct of the children; the format has no empty struct, so that has
    ``present``.
    """
    if not names:
        return pa.struct([("present", pa.bool_())])
    return pa.struct([pa.field(name, child.arrow_type) for name, child in zip(names, children, strict=True)])


class Sequential(Serializer):
    """Values one after another, none of them null as a whole: tuples, case classes, TTL, timers."""

    def __init__(self, names: Sequence[str], children: Sequence[Serializer], java_hash: str | None = None) -> None:
        self.names = tuple(names)
        self.children = tuple(children)
        self.arrow_type = struct_type(names, children)
        lengths = [child.fixed_length for child in children]
        self.fixed_length = None if None in lengths else sum(length or 0 for length in lengths)
        self.least_length = sum(child.least_length for child in children)
        self.opaque = opaque_within(children)
        self.takes_rest = bool(children) and children[-1].takes_rest
        hashed = all(child.java_hash for child in children)
        self.java_hash = java_hash if hashed else None

    def read(self, lanes: Lanes) -> pa.Array:
        if not self.children:
            return struct([pa.array(np.ones(len(lanes), np.bool_))], self.arrow_type)
        return struct([child.read(lanes) for child in self.children], self.arrow_type)

    def skip(self, lanes: Lanes) -> None:
        if self.fixed_length is not None:
            lanes.skip(self.fixed_length)
            return
        for child in self.children:
            child.skip(lanes)


_TUPLES: Final = "org.apache.flink.api.java.tuple.Tuple"


class Tuple(Sequential):
    """Flink's ``Tuple1`` to ``Tuple25``, and Scala's case classes; fields ``f0``, ``f1``.

    The hash is known for Flink's own classes only: Scala has another, and so may a user's subclass.
    """

    def __init__(self, class_name: str, children: Sequence[Serializer]) -> None:
        self.class_name = class_name
        known = "Tuple" if class_name.startswith(_TUPLES) else None
        super().__init__([f"f{i}" for i in range(len(children))], children, known)


class Ttl(Sequential):
    """A value with the time of its last access in ms; ``ttl_last_access`` and ``value``."""

    def __init__(self, time: Serializer, value: Serializer) -> None:
        self.value = value
        super().__init__(("ttl_last_access", "value"), (time, value))


class FlippedLong(Serializer):
    """A number whose sign bit is inverted, so that bytes sort as numbers do."""

    arrow_type = pa.int64()
    fixed_length = least_length = 8

    def read(self, lanes: Lanes) -> pa.Array:
        return pa.array((lanes.fixed(">u8") ^ np.uint64(1 << 63)).view(np.int64))


class Timer(Sequential):
    """A timer: ``timestamp`` in ms, ``key``, ``namespace``."""

    def __init__(self, key: Serializer, namespace: Serializer) -> None:
        self.key = key
        self.namespace = namespace
        super().__init__(("timestamp", "key", "namespace"), (FlippedLong(), key, namespace))


class Nullable(Serializer):
    """A byte that is 1 for null, then the value; after a null come ``padding`` zeros.

    With ``option`` (Scala's ``Option``) the byte is 0 for null.
    """

    def __init__(self, child: Serializer, padding: int, *, option: bool = False) -> None:
        self.child = child
        self.padding = padding
        self.option = option
        self.arrow_type = child.arrow_type
        self.least_length = 1
        self.opaque = child.opaque
        self.takes_rest = child.takes_rest
        self.java_hash = None if option else child.java_hash
        if padding and child.fixed_length == padding:
            self.fixed_length = 1 + padding

    def read(self, lanes: Lanes) -> pa.Array:
        null = self._nulls(lanes)
        return read_some(self.child, lanes, ~null)

    def skip(self, lanes: Lanes) -> None:
        skip_some(self.child, lanes, ~self._nulls(lanes))

    def _nulls(self, lanes: Lanes) -> Present:
        null = lanes.flags("whether a value is null") ^ self.option
        if self.padding and null.any():
            lanes.skip(np.where(null, self.padding, 0))
        return null


ROW_KINDS = ("+I", "-U", "+U", "-D")


class Row(Serializer):
    """Flink's ``Row``: a mask from the top bit down, then the fields that are not null.

    With row kinds the first two bits are the kind, and the struct has ``row_kind`` after the
    fields, which are ``f0``, ``f1`` …
    """

    def __init__(self, children: Sequence[Serializer], *, kinds: bool, as_key: bool = False) -> None:
        self.children = tuple(children)
        self.kinds = kinds
        self.key = as_key
        fields = [pa.field(f"f{i}", child.arrow_type) for i, child in enumerate(children)]
        if kinds and not as_key:
            fields.append(pa.field("row_kind", pa.string()))
        self.arrow_type = pa.struct(fields or [("present", pa.bool_())])
        self.bits = len(children) + (2 if kinds else 0)
        self.least_length = (self.bits + 7) // 8
        self.opaque = opaque_within(children)
        self.takes_rest = bool(children) and children[-1].takes_rest

    def as_key(self) -> Serializer:
        return Row(self.children, kinds=self.kinds, as_key=True)

    def read(self, lanes: Lanes) -> pa.Array:
        begin = lanes.position
        mask = self._mask(lanes)
        first = self.bits - len(self.children)
        arrays = [read_some(child, lanes, ~mask[:, first + i]) for i, child in enumerate(self.children)]
        if self.kinds:
            kind = mask[:, 0] + 2 * mask[:, 1].astype(np.int64)
            if self.key:
                refuse_kinds(kind, lanes.at(begin, lanes.end))
            else:
                arrays.append(pa.array(ROW_KINDS).take(pa.array(kind)))
        if not arrays:
            arrays = [pa.array(np.ones(len(lanes), np.bool_))]
        return struct(arrays, self.arrow_type)

    def skip(self, lanes: Lanes) -> None:
        mask = self._mask(lanes)
        first = self.bits - len(self.children)
        for i, child in enumerate(self.children):
            skip_some(child, lanes, ~mask[:, first + i])

    def _mask(self, lanes: Lanes) -> Present:
        octets = [lanes.fixed("u1") for _ in range(self.least_length)]
        packed = np.stack(octets, axis=1) if octets else np.zeros((len(lanes), 0), np.uint8)
        return np.unpackbits(packed, axis=1)[:, : self.bits].view(np.bool_)


def refuse_kinds(kinds: npt.NDArray[np.int64], place: Lanes) -> None:
    """Raise ``UnsupportedFormat`` for a key that is a row of another kind than insert."""
    if kinds.any():
        lane = int(np.flatnonzero(kinds)[0])
        raise UnsupportedFormat(
            f"{place.path or 'state'}: the key at byte {int(place.position[lane])} is a row of kind "
            f"{ROW_KINDS[int(kinds[lane]) & 3]}, and keys are of kind +I only; take another savepoint",
            kind=ErrorKind.UNSUPPORTED_TYPE,
            path=place.path,
        )


class Either(Serializer):
    """``left`` or ``right``; ``marks`` are the bytes that say which."""

    def __init__(self, left: Serializer, right: Serializer, marks: tuple[int, int] = (1, 0)) -> None:
        self.children = (left, right)
        self.marks = marks
        self.arrow_type = struct_type(("left", "right"), self.children)
        self.least_length = 1 + min(left.least_length, right.least_length)
        self.opaque = opaque_within(self.children)
        self.takes_rest = left.takes_rest or right.takes_rest

    def read(self, lanes: Lanes) -> pa.Array:
        sides = self._sides(lanes)
        arrays = [read_some(child, lanes, side) for child, side in zip(self.children, sides, strict=True)]
        return struct(arrays, self.arrow_type)

    def skip(self, lanes: Lanes) -> None:
        for child, side in zip(self.children, self._sides(lanes), strict=True):
            skip_some(child, lanes, side)

    def _sides(self, lanes: Lanes) -> tuple[Present, Present]:
        mark = lanes.fixed("u1")
        left, right = (mark == known for known in self.marks)
        if not (left | right).all():
            lane = int(np.flatnonzero(~(left | right))[0])
            lanes.position[lane] -= 1
            lanes.damaged(lane, f"which of two a value is, is {int(mark[lane])}; known are {self.marks}")
        return left, right


class Enumeration(Serializer):
    """An enum: the place of its name in the snapshot."""

    arrow_type = pa.string()
    fixed_length = least_length = 4

    def __init__(self, class_name: str, names: Sequence[str]) -> None:
        self.class_name = class_name
        self.names = tuple(names)

    def read(self, lanes: Lanes) -> pa.Array:
        ordinal = lanes.fixed(">i4")
        wrong = (ordinal < 0) | (ordinal >= len(self.names))
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            lanes.position[lane] -= 4
            lanes.damaged(
                lane, f"it is constant {int(ordinal[lane])} of {self.class_name}, which has {len(self.names)}"
            )
        return pa.array(self.names, pa.string()).take(pa.array(ordinal))
