"""Operator state: lists whose entries begin where the metadata says, and broadcast maps.

An entry ends where the next one of the stream begins, so entries that are not decoded are kept
exactly. In compressed streams each state has a framed stream of its own, and every entry begins a
frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput
from stateformat.model import State
from stateformat.schema import segment_schema
from stateformat.states import broadcast_state, even_split_state, union_state

from ..byte_strings import ByteStrings, Positions
from ..framing import snappy_streams_decode
from ..source import Note
from .handles import BROADCAST, UNION, OperatorPartitions, OperatorStates
from .serializers import Lanes, Opaque, Serializer, element_lanes
from .streams import Place

_SNAPPY_HEAD: Final = b"\xff\x06\x00\x00sNaPpY"
_RANGE_BYTES: Final = 32 << 20
NOTHING: Final = Opaque()


@dataclass(frozen=True, slots=True)
class OperatorForm:
    """How the entries of one state become rows. ``key`` is only set for broadcast maps."""

    state: State
    value: Serializer
    key: Serializer | None = None
    raw: bool = False
    """Entries are kept as their bytes."""
    stored: str = ""
    """Its name in Flink."""


def operator_form(
    operator: str, name: str, mode: int, value: Serializer | None, key: Serializer | None, stored: str | None = None
) -> tuple[OperatorForm, list[Note]]:
    """Declare one state as ``name``; ``stored`` is its name in Flink, if that is another.

    Serializers are None if the header does not give them.
    """
    stored = stored or name
    notes: list[Note] = []
    subject = f"{operator}/{name}"
    if name != stored:
        notes.append(Note("renamed", subject, f"it is {stored!r} in Flink, as another state of the operator"))
    value = NOTHING if value is None else value
    opaque = tuple(dict.fromkeys((*(key.opaque if key else ()), *value.opaque)))
    declare = {BROADCAST: broadcast_state, UNION: union_state}.get(mode, even_split_state)
    raw = mode == BROADCAST and (key is None or key.takes_rest or value.takes_rest)
    columns = {"value": pa.binary() if raw else value.arrow_type}
    if key is not None and not raw:
        columns = {"key": key.arrow_type, **columns}
    try:
        state = declare(operator, name, columns=columns)
    except InvalidInput:
        raw, state = True, declare(operator, name, columns={"value": pa.binary()})
        notes.append(Note("opaque", subject, "entries have a type that cannot be stored; `value` has their bytes"))
    if opaque:
        notes.append(Note("opaque", subject, f"not decoded, and kept as bytes: {', '.join(opaque)}"))
    elif value is NOTHING:
        message = "the header does not say how entries are written; `value` has their bytes"
        notes.append(Note("opaque", subject, message))
    if raw and mode == BROADCAST:
        notes.append(Note("opaque", subject, "entries of the map end nowhere: `value` has the bytes of the whole map"))
    return OperatorForm(state, value, None if raw else key, raw, stored), notes


@dataclass(frozen=True)
class OperatorReader:
    """The operator state of one subtask."""

    place: Place
    handle: OperatorStates
    compressed: bool

    def partitions(self, name: str) -> OperatorPartitions | None:
        """Return where the entries of a state begin; None if the subtask has none."""
        return next((found for found in self.handle.states if found.name == name), None)

    def batches(self, form: OperatorForm) -> Iterator[pa.RecordBatch]:
        """Stream the entries of a state in stored order."""
        found = self.partitions(form.stored)
        if found is None or not len(found.offsets):
            return
        ends = self._ends(found.offsets)
        total = np.cumsum(ends - found.offsets)
        at = 0
        while at < len(total):
            before = int(total[at - 1]) if at else 0
            stop = max(at + 1, int(np.searchsorted(total, before + _RANGE_BYTES, "right")))
            entries = self._read(found.offsets[at:stop], ends[at:stop])
            batch = self._batch(form, found.mode, entries)
            if batch.num_rows:
                yield batch
            at = stop

    def rows(self, form: OperatorForm) -> int:
        """Count the entries of a state."""
        found = self.partitions(form.stored)
        if found is None:
            return 0
        if found.mode != BROADCAST or form.raw:
            return len(found.offsets)
        return sum(batch.num_rows for batch in self.batches(form))

    def _ends(self, offsets: Positions) -> Positions:
        """Return where entries end. Raises ``DamagedCheckpoint`` for offsets outside the stream."""
        every = np.sort(np.concatenate([found.offsets for found in self.handle.states]))
        if every[0] < 0 or every[-1] > self.place.size:
            raise DamagedCheckpoint(
                f"entries of operator state begin at bytes {every[0]} to {every[-1]} of {self.place.path}, which has "
                f"{self.place.size} bytes; take another checkpoint or savepoint",
                kind=ErrorKind.DAMAGED_RECORD,
                path=self.place.path,
            )
        # Of equal offsets all but the last entry are empty.
        every = np.append(every, self.place.size)
        ends: Positions = every[np.searchsorted(every, offsets, "right").clip(max=len(every) - 1)]
        return ends

    def _read(self, offsets: Positions, ends: Positions) -> ByteStrings:
        """Read the entries at ``offsets`` … ``ends``."""
        first, last = int(offsets.min()), int(ends.max())
        if last - first <= 2 * int((ends - offsets).sum()) + 4096:
            data = self.place.read(first, last - first)
            start = offsets - first
        else:
            pieces = [self.place.read(at, end - at) for at, end in zip(offsets.tolist(), ends.tolist(), strict=True)]
            data = np.concatenate(pieces)
            start = np.cumsum(ends - offsets) - (ends - offsets)
        size = ends - offsets
        if not self.compressed:
            return ByteStrings(data, start, size)
        # A frame begins with every entry: each is a stream once the stream mark is put before it.
        head = np.frombuffer(_SNAPPY_HEAD, np.uint8)
        places = zip(start.tolist(), size.tolist(), strict=True)
        whole = np.concatenate([part for at, length in places for part in (head, data[at : at + length])])
        ends = np.cumsum(size + len(head))
        begins = ends - size - len(head)
        data, stops = snappy_streams_decode(whole, begins.tolist(), ends.tolist(), self.place.path)
        begin = np.append(0, stops[:-1]).astype(np.int64)
        return ByteStrings(data, begin, stops - begin)

    def _batch(self, form: OperatorForm, mode: int, entries: ByteStrings) -> pa.RecordBatch:
        schema = segment_schema(form.state)
        path = self.place.path
        if form.raw:
            columns = {"value": entries.to_arrow()}
        elif form.key is None or mode != BROADCAST:
            columns = {"value": form.value.read_all(entries, path)}
        else:
            columns = self._pairs(form.key, form.value, Lanes.of(entries, path))
        arrays = [columns[field.name] for field in schema]
        arrays = [
            array if array.type.equals(field.type, check_metadata=True) else array.cast(field.type)
            for array, field in zip(arrays, schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    @staticmethod
    def _pairs(key: Serializer, value: Serializer, lanes: Lanes) -> dict[str, pa.Array]:
        """Read the entries of maps: their count, then keys and values in turn."""

        def skip(some: Lanes) -> None:
            key.skip(some)
            value.skip(some)

        fixed = key.fixed_length is not None and value.fixed_length is not None
        width = (key.fixed_length or 0) + (value.fixed_length or 0) if fixed else None
        counts = lanes.counts(key.least_length + value.least_length)
        entries = element_lanes(lanes, counts, skip, width)
        lanes.finish()
        return {"key": key.read(entries), "value": value.read(entries)}
