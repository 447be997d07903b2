"""POJOs: fields by name, nulls, and values of subclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, UnsupportedFormat

from ...byte_strings import ByteStrings
from .lanes import Lanes
from .records import Present, opaque_within, read_some, skip_some, struct, struct_type
from .serializer import Serializer

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
