"""Columns of Kryo's values: a serializer whose type is that of the first values that were seen."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import CheckpointError, DamagedCheckpoint, ErrorKind, UnsupportedFormat

from ..byte_strings import ByteStrings, Positions
from . import kryo
from .kryo import Known, Shape
from .kryo_lanes import Everyday
from .lanes import Lanes, Opaque, Serializer, struct as struct_of

_WITH_BYTES: Final = pa.struct([("json", pa.string()), ("kryo", pa.binary())])
"""Of values that cannot be written again from a column: they are kept as they were, too."""
LOOKED_AT, LOOKED_LEAST = 1 << 13, 1 << 6
"""How many entries of a state are looked into for their types: of all streams, and of each."""


class Kryo(Serializer):
    """Values of any class, of the shape that was seen."""

    def __init__(self, class_name: str, known: Known, shape: Shape) -> None:
        self.class_name, self.known, self.shape = class_name, known, shape
        self.goes_back = kryo.goes_back(shape)
        self.arrow_type = shape.arrow if self.goes_back else _WITH_BYTES
        self.everyday = Everyday(known, shape)

    def read(self, lanes: Lanes) -> pa.Array:
        if not self.goes_back:
            return self._with_bytes(lanes)
        found, good = self.everyday.read(lanes)
        left = np.flatnonzero(~good)
        if found is not None and not len(left):
            return found
        slow = pa.array([kryo.python(node, self.shape) for node in self._nodes(lanes, left)], self.arrow_type)
        if found is None:
            return slow
        places = np.cumsum(good) - 1
        places[left] = len(found) + np.arange(len(left))
        return pa.concat_arrays([found, slow]).take(pa.array(places))

    def skip(self, lanes: Lanes) -> None:
        for _ in self._nodes(lanes, np.flatnonzero(~self.everyday.read(lanes, skip=True)[1])):
            pass

    def _with_bytes(self, lanes: Lanes) -> pa.Array:
        begin = lanes.position.copy()
        texts = [kryo.python(node, kryo.MIXED_SHAPE) for node in self._nodes(lanes, np.arange(len(lanes)))]
        raw = ByteStrings(lanes.data, begin, lanes.position - begin).to_arrow()
        present = np.array([text is not None for text in texts], np.bool_)
        return struct_of([pa.array(texts, pa.string()), raw], _WITH_BYTES, present)

    def encode(self, values: pa.Array) -> pa.Array:
        """Return the bytes of each value. Raises ``NotWrittenError`` and ``WrongValueError``."""
        if not self.goes_back:
            for value in values.to_pylist():
                if value is not None:
                    _check_text(value["json"], value["kryo"], self.known)
            return pc.fill_null(pc.struct_field(values, "kryo"), b"\0")
        plain = values.cast(_of_numbers(values.type)).to_pylist()
        return pa.array([kryo.Writer(self.known).value(value, self.shape) for value in plain], pa.binary())

    def _nodes(self, lanes: Lanes, chosen: Positions) -> Iterator[kryo.Node]:
        """Read the values of some lanes one after another."""
        view = memoryview(np.ascontiguousarray(lanes.data).data)
        for lane in chosen.tolist():
            at = kryo.Reader(self.known, view, int(lanes.position[lane]), int(lanes.end[lane]), lanes.path)
            node = at.value()
            if not kryo.fits(node, self.shape):
                at.position = at.begin
                raise UnsupportedFormat(
                    f"{lanes.path or 'state'}: the value at byte {at.begin} is {kryo.shape_of(node).said}, and the "
                    f"first ones of its column are {self.shape.said}; read the state with the job's own code",
                    kind=ErrorKind.UNSUPPORTED_TYPE,
                    path=lanes.path,
                )
            lanes.position[lane] = at.position
            yield node


def _check_text(text: str | None, raw: bytes | None, known: Known) -> None:
    """Raise ``WrongValueError`` if the text is not that of the bytes, which are what goes back."""
    try:
        means = kryo.text_of(raw or b"\0", known)
    except (DamagedCheckpoint, UnsupportedFormat):
        means = "no value"
    if means == text or _parsed(means) == _parsed(text) != "":
        return
    said = "is null" if raw is None else f"stands for {means or 'null'}"
    raise kryo.WrongValueError(
        f"has the `json` {'null' if text is None else text}, and its `kryo`, which is what goes back to Flink, "
        f"{said}; correct both, or put both back"
    )


def _parsed(text: str | None) -> str:
    """Return JSON written in one way; empty for what is none."""
    try:
        return json.dumps(json.loads(text or ""))
    except ValueError:
        return ""


def _of_numbers(kind: pa.DataType) -> pa.DataType:
    """Return a type with numbers instead of dates and times, which Python's own cannot all hold."""
    if pa.types.is_date32(kind):
        return pa.int32()
    if pa.types.is_timestamp(kind):
        return pa.int64()
    if pa.types.is_list(kind):
        return pa.list_(_of_numbers(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_of_numbers(kind.key_type), _of_numbers(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([(item.name, _of_numbers(item.type)) for item in kind])
    return kind


@dataclass
class KryoTypes:
    """What is known of Kryo's values in all streams of an operator, while headers are read.

    Serializers are numbered within their state, since all subtasks describe it in the same order.
    """

    looking: bool = False
    """Whether values are being looked into: serializers then note what they read."""
    shapes: dict[str, Shape] = field(default_factory=dict)
    opaque: dict[str, str] = field(default_factory=dict)
    """The classes that could not be read, by place."""
    refused: set[str] = field(default_factory=set)
    """States with values that cannot be read for another reason: their bytes can."""
    enums: dict[str, Sequence[str]] = field(default_factory=dict)
    """Constants of the enums that headers describe."""
    met: set[str] = field(default_factory=set)
    """The states that have values of Kryo's; empty for keys."""
    _state: str = ""
    _number: int = 0
    _named: bool = False

    def begin(self, state: str) -> None:
        """Say whose serializers follow; empty for the key's."""
        self._state, self._number = state, 0

    def serializer(self, name: str, known: Known) -> Serializer:
        """Return the serializer of the next place."""
        place = f"{self._number} {self._state}"
        self._number += 1
        self.met.add(self._state)
        if self._state in self.refused:
            return Opaque(name)
        if place in self.opaque:
            return Opaque(*dict.fromkeys((name, self.opaque[place])))
        if self.looking:
            return _Looking(name, known, self, place)
        return Kryo(name, known, self.shapes.get(place, kryo.UNSEEN))

    @property
    def unreadable(self) -> int:
        """How many places and states were found to be unreadable so far."""
        return len(self.opaque) + len(self.refused)

    def unreadable_at(self, place: str, name: str) -> None:
        """Note the class that cannot be read at a place."""
        self.opaque[place] = name
        self._named = True

    @contextmanager
    def noting(self, state: str) -> Iterator[None]:
        """Note what is refused of a state that is being looked into; damage is told later."""
        self._named = False
        try:
            yield
        except UnsupportedFormat:
            if not self._named:
                self.refused.add(state)
        except CheckpointError:
            return

    def text(self) -> bytes:
        """Return it as JSON, which :func:`types_in` reads."""
        shapes = {place: shape.plain() for place, shape in self.shapes.items()}
        return json.dumps({"shapes": shapes, "opaque": self.opaque, "refused": sorted(self.refused)}).encode()


def types_in(text: bytes) -> KryoTypes:
    """Return the types that :meth:`KryoTypes.text` wrote."""
    found: Mapping[str, Any] = json.loads(text)
    shapes = {place: kryo.shape_in(shape) for place, shape in found["shapes"].items()}
    return KryoTypes(shapes=shapes, opaque=dict(found["opaque"]), refused=set(found["refused"]))


class _Looking(Kryo):
    """Notes the shapes of what it reads, which is lost."""

    def __init__(self, class_name: str, known: Known, types: KryoTypes, place: str) -> None:
        super().__init__(class_name, known, kryo.UNSEEN)
        self.types, self.place = types, place

    def read(self, lanes: Lanes) -> pa.Array:
        self.skip(lanes)
        # Not null, for keys of maps may not be.
        empty = pa.repeat(pa.scalar(""), len(lanes))
        return struct_of([empty, empty.cast(pa.binary())], _WITH_BYTES)

    def skip(self, lanes: Lanes) -> None:
        shapes = self.types.shapes
        try:
            for node in self._nodes(lanes, np.arange(len(lanes))):
                shapes[self.place] = kryo.merged(shapes.get(self.place, kryo.UNSEEN), kryo.shape_of(node))
        except UnsupportedFormat as error:
            self.types.unreadable_at(self.place, str(error.details.get("java_class", self.class_name)))
            raise
