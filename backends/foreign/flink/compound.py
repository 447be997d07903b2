"""Serializers made of others: tuples, rows, TTL, timers; lists, sets, arrays, maps; POJOs.

Parts of a record follow one another. Of collections, the counts of all lanes are read first.
Elements of a fixed width are at known places. Others are skipped in lock-step, the n-th of every
lane together, to find where each begins; then all are read together. POJOs have fields by name,
nulls, and values of subclasses.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, UnsupportedFormat

from ..byte_strings import ByteStrings, Positions, ramp
from .lanes import Lanes, Opaque, Present, Serializer, scattered, struct
from .scalars import CHARACTER, to_utf8


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


_NULL, _EXACT, _NAMED, _TAGGED = 1, 2, 4, 8
CLASS: Final = "class"
"""The field with the name of the class. No field in Java can have this name."""


class Pojo(Serializer):
    """A byte of flags, then for each field of the snapshot whether it is null, and its value.

    The struct has the fields in the order of the snapshot. If the snapshot knows subclasses, it has
    ``class`` before them (the Java class of each value), and the further fields of the subclasses
    after them; a field of the same name and another type gets ``_2``.
    """

    def __init__(
        self,
        class_name: str,
        names: Sequence[str],
        children: Sequence[Serializer],
        registered: Sequence[tuple[str, Serializer | None]] = (),
        others: Mapping[str, Serializer | None] | None = None,
    ) -> None:
        self.class_name = class_name
        self.names = tuple(names)
        self.children = tuple(children)
        self.registered = tuple(registered)
        self.others = dict(others or {})
        self.subclasses = dict((*self.registered, *self.others.items()))
        self.least_length = 1
        self.opaque = opaque_within(children)
        # A null or a value of a subclass ends earlier; the frame shows that too.
        self.takes_rest = bool(children) and children[-1].takes_rest
        self.columns = _columns(self)
        if self.columns is None:
            self.arrow_type = struct_type(names, children)
        else:
            self.arrow_type = pa.struct([(CLASS, pa.string()), *self.columns[1].items()])

    def read(self, lanes: Lanes) -> pa.Array:
        flags = self._flags(lanes)
        exact = (flags & _EXACT) != 0
        present = (flags & _NULL) == 0
        if self.columns is None and (exact | ~present).all():
            return struct(self._fields(lanes, exact), self.arrow_type, present)
        return self._with_subclasses(lanes, flags, exact)

    def skip(self, lanes: Lanes) -> None:
        flags = self._flags(lanes)
        for chosen, _, serializer in self._subclass_lanes(lanes, flags):
            skip_some(serializer, lanes, chosen)
        exact = np.flatnonzero((flags & _EXACT) != 0)
        some = lanes.take(exact)
        for child in self.children:
            skip_some(child, some, ~some.flags("whether a field is null"))
        lanes.put(exact, some)

    def _flags(self, lanes: Lanes) -> npt.NDArray[np.uint8]:
        flags: npt.NDArray[np.uint8] = lanes.fixed("u1")
        wrong = ~np.isin(flags, (_NULL, _EXACT, _NAMED, _TAGGED))
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            lanes.position[lane] -= 1
            lanes.damaged(lane, f"the flags of a {self.class_name} are {int(flags[lane])}; known are 1, 2, 4 and 8")
        return flags

    def _fields(self, lanes: Lanes, exact: Present) -> list[pa.Array]:
        """Read the fields at the lanes of the class itself; null at the others."""
        if not self.children:
            return [pa.array(np.ones(len(lanes), np.bool_))]
        whole = bool(exact.all())
        chosen = np.flatnonzero(exact)
        some = lanes if whole else lanes.take(chosen)
        arrays = [read_some(child, some, ~some.flags("whether a field is null")) for child in self.children]
        if whole:
            return arrays
        lanes.put(chosen, some)
        places = pa.array(np.maximum(np.cumsum(exact) - 1, 0), mask=~exact)
        return [found.take(places) for found in arrays]

    def _with_subclasses(self, lanes: Lanes, flags: npt.NDArray[np.uint8], exact: Present) -> pa.Array:
        """Read values of this class and of its subclasses into the fields of all of them."""
        read = list(self._subclass_lanes(lanes, flags))
        if self.columns is None:
            lanes.damaged(0, f"no subclass of {self.class_name} is known")
        owners, kinds = self.columns
        names = np.full(len(lanes), self.class_name, object)
        found: dict[str, pa.Array] = {}
        if self.names:
            own = self._fields(lanes, exact)
            found = dict(zip((owners[self.class_name][name] for name in self.names), own, strict=True))
        for chosen, name, serializer in read:
            names[chosen] = name
            values = read_some(serializer, lanes, chosen)
            for i in range(values.type.num_fields):
                field = values.type.field(i).name
                if field == CLASS:
                    inner = values.field(i).to_numpy(zero_copy_only=False)
                    names[chosen] = inner[chosen]
                    continue
                column = owners[name][field]
                part = values.field(i)
                found[column] = part if column not in found else _either(chosen, part, found[column])
        present = (flags & _NULL) == 0
        names[~present] = None
        arrays = [pa.array(names, pa.string())]
        arrays += [found.get(column, pa.nulls(len(lanes), kind)) for column, kind in kinds.items()]
        return struct(arrays, self.arrow_type, present)

    def _subclass_lanes(self, lanes: Lanes, flags: npt.NDArray[np.uint8]) -> list[tuple[Present, str, Serializer]]:
        """Take names and tags of subclasses; return which lanes are of which."""
        read: list[tuple[Present, str, Serializer]] = []
        named = np.flatnonzero((flags & _NAMED) != 0)
        if len(named):
            some = lanes.take(named)
            names = some.strings(some.fixed(">u2").astype(np.int64))
            lanes.put(named, some)
            read += self._by_name(names, named, lanes)
        tagged = np.flatnonzero((flags & _TAGGED) != 0)
        if len(tagged):
            some = lanes.take(tagged)
            tags = some.fixed("u1")
            for tag in np.unique(tags).tolist():
                known = self.registered[tag] if tag < len(self.registered) else (f"with tag {tag}", None)
                read.append((_mask(len(lanes), tagged[tags == tag]), *self._known(known, lanes)))
            lanes.put(tagged, some)
        return read

    def _by_name(
        self, names: ByteStrings, lanes_of: npt.NDArray[np.int64], lanes: Lanes
    ) -> list[tuple[Present, str, Serializer]]:
        coded = names.to_arrow().dictionary_encode()
        codes = coded.indices.to_numpy()
        return [
            (_mask(len(lanes), lanes_of[codes == code]), *self._known((name, self.others.get(name)), lanes))
            for code, name in enumerate(item.decode("utf-8", "replace") for item in coded.dictionary.to_pylist())
        ]

    def _known(self, known: tuple[str, Serializer | None], lanes: Lanes) -> tuple[str, Serializer]:
        name, serializer = known
        if serializer is None or serializer.opaque or not pa.types.is_struct(serializer.arrow_type):
            raise UnsupportedFormat(
                f"{lanes.path or 'state'}: a value of {self.class_name} is of the subclass {name}, whose fields the "
                "checkpoint does not describe; register it in the job (`pipeline.serialization-config`, before Flink 2 "
                "`registerPojoType`) and take a savepoint",
                kind=ErrorKind.UNSUPPORTED_TYPE,
                path=lanes.path,
                java_class=name,
            )
        return name, serializer


def _mask(count: int, chosen: npt.NDArray[np.int64]) -> Present:
    found = np.zeros(count, np.bool_)
    found[chosen] = True
    return found


def _either(chosen: Present, part: pa.Array, others: pa.Array) -> pa.Array:
    """Return ``part`` at the chosen places and ``others`` elsewhere, of any type."""
    places = np.arange(len(chosen)) + np.where(chosen, 0, len(chosen))
    return pa.concat_arrays([part, others]).take(pa.array(places))


def _columns(pojo: Pojo) -> tuple[dict[str, dict[str, str]], dict[str, pa.DataType]] | None:
    """Return by class and field the column that holds it, and the types of all columns.

    None if the snapshot knows no subclass.
    """
    if not pojo.subclasses:
        return None
    kinds: dict[str, pa.DataType] = {}
    again: dict[str, dict[pa.DataType, str]] = {}
    owners: dict[str, dict[str, str]] = {}
    own = [(name, child.arrow_type) for name, child in zip(pojo.names, pojo.children, strict=True)]
    owners[pojo.class_name] = {name: _column(kinds, again, name, kind) for name, kind in own}
    for class_name, serializer in pojo.subclasses.items():
        if serializer is None or not pa.types.is_struct(serializer.arrow_type):
            continue
        fields = [serializer.arrow_type.field(i) for i in range(serializer.arrow_type.num_fields)]
        owners[class_name] = {
            item.name: _column(kinds, again, item.name, item.type) for item in fields if item.name != CLASS
        }
    return owners, kinds


def _column(
    kinds: dict[str, pa.DataType], again: dict[str, dict[pa.DataType, str]], name: str, kind: pa.DataType
) -> str:
    """Return the column of a field; ``again`` has by name which column each type has got."""
    mine = again.setdefault(name, {})
    if kind not in mine:
        number = len(mine) + 1
        found = name if number == 1 else f"{name}_{number}"
        while kinds.setdefault(found, kind) != kind:
            number += 1
            found = f"{name}_{number}"
        mine[kind] = found
    return mine[kind]
