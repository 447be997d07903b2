"""What a copy must hold: a query's checkpoint, read as if its rows had been changed already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...source import Part
from ..source import SparkSource
from .editing import Rows, encoded
from .plan import RepartitionPlan, Unit


class EditedSource(SparkSource):
    """A batch whose states have the rows that a plan makes of them, and what follows of those."""

    def __init__(self, source: SparkSource, plan: RepartitionPlan) -> None:
        """Open what ``plan`` reads."""
        super().__init__(source.folder, source.version, listing=source.listing)
        self._units: Mapping[tuple[str, str], tuple[Unit, int]] = {
            (unit.operator.uid, store.name): (unit, at) for unit in plan.units for at, store in enumerate(unit.stores)
        }

    def _rows(self, unit: Unit, at: int, partition: int) -> Rows:
        edit, store = unit.edits[at], unit.stores[at]
        if edit.function is not None:
            files = unit.reader.files(store, partition, self.listing)
            entries = unit.reader.entries(self.folder, store, partition, files)
            return edit.rows(store, unit.reader, entries, partition)
        for other, index in self._units.values():
            leading = other.edits.get(index)
            for there, derived, how in leading.derived if leading else ():
                if (there.number, derived) == (unit.number, at):
                    return how(self._rows(other, index, partition), other.hashed[index])
        raise AssertionError("rows that follow from none")

    def _edited(self, part: Part) -> pa.RecordBatch | None:
        unit, at = self._units[part.operator, part.state]
        if at not in unit.edits or part.subtask is None:
            return None
        store, shape = unit.stores[at], self.shapes[part.operator, part.state]
        rows = self._rows(unit, at, part.subtask)._replace(fields=store.schema.key)
        if shape.opaque and unit.edits[at].function is not None:
            rows = rows._replace(fields=shape.stored.key)
        found = encoded(store, rows, unit.families, rocksdb=unit.provider_before == "rocksdb")
        columns = self.reader.columns(store, found, part.path or "")
        as_bytes = replace(store, schema=shape.stored)
        stored = self.reader.columns(as_bytes, found, part.path or "") if shape.opaque else None
        return shape.batch(columns, part.subtask, stored)

    def group_rows(self, part: Part) -> npt.NDArray[np.int64]:
        """Return the number of rows of the part's one group."""
        made = self._edited(part)
        return super().group_rows(part) if made is None else np.array([made.num_rows], np.int64)

    def read(self, part: Part, first_group: int | None = None, last_group: int | None = None) -> Iterator[Any]:
        """Stream a part's rows; nothing if its one group is outside the groups given."""
        made, group = self._edited(part), part.subtask or 0
        if made is None:
            yield from super().read(part, first_group, last_group)
        elif (group if first_group is None else first_group) <= group <= (group if last_group is None else last_group):
            yield made
