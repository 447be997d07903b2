"""One side of a comparison: rows of a checkpoint in the columns in which they are compared."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from ...model import Field, Mode, SchemaVersion, State
from ...reading import ReadTask, evolve_table
from ...schema import KEY_GROUP, children

Tables = Generator[pa.Table, None, None]
NOTHING_SEEN = -(2**63)
"""The watermark of an input from which nothing has been seen."""


class RowShape(Protocol):
    """Converts rows of a state to rows of the state that it becomes. Picklable."""

    @property
    def state(self) -> State: ...

    @property
    def apply(self) -> Callable[[pa.RecordBatch], Iterator[pa.RecordBatch]]: ...


@dataclass(frozen=True)
class Side:
    """What is read of one state of one checkpoint. Picklable."""

    task: ReadTask
    schema: SchemaVersion
    """The columns that are compared, with the same names and types on both sides, in the field ids
    of the state (or of what ``shape`` converts it to).
    """
    layout: object = None
    """Sides with equal layouts have equal key groups for equal keys; None: unknown."""
    shape: RowShape | None = None
    """Applied to the rows before they are compared."""
    edge_by_edge: bool = False
    """For progress: an input from which nothing has been seen is left out (SPEC.md section 6.2)."""
    seen: Callable[[int], None] | None = None
    """Called with the row count of each table that :meth:`rows` yields."""

    @property
    def handles(self) -> pa.Table:
        """The handles that are read."""
        return self.task.handles

    @property
    def stored_bytes(self) -> int:
        """About how many stored bytes are read."""
        return self.task.stored_bytes

    @property
    def hides(self) -> bool:
        """Whether expired rows are left out: then equal bytes need not mean equal rows."""
        return self.task.state.ttl_now_us is not None and self.task.state.ttl is not None

    def of(self, task: ReadTask) -> Side:
        """Return the same for another part of the state."""
        return replace(self, task=task)

    def rows(self) -> Tables:
        """Stream the rows, with ``_key_group`` if they are identified by key."""
        if not self.task.slices.num_rows:
            return
        state = self.task.state
        batches = self.task.batches(as_schema=None if self.shape else self.schema)
        for batch in batches:
            for shaped in (batch,) if self.shape is None else self.shape.apply(batch):
                table = pa.Table.from_batches([shaped])
                if self.shape is not None:
                    table = evolve_table(table, self.shape.state.current, self.schema)
                if state.mode is Mode.IN_FLIGHT and KEY_GROUP.name in table.column_names:
                    table = table.drop_columns([KEY_GROUP.name])
                if self.edge_by_edge:
                    seen = pc.or_(table["_ended"], pc.greater(table["_watermark"], NOTHING_SEEN))
                    table = table.filter(seen)
                if self.seen is not None:
                    self.seen(len(table))
                yield table

    def layers(self) -> list[pa.Table]:
        """Return the layers of keyed state, lowest first."""
        found = self.task.layers(as_schema=self.schema)
        return [pa.Table.from_batches(batches) for _, batches in found]

    def readings(self) -> Mapping[int, object]:
        """How rows are converted to those compared, by schema id: if equal, equal bytes mean equal
        rows.
        """
        state = self.task.state
        return {
            schema.id: tuple(
                (item.name, _reading({old.id: old for old in schema.fields}, item)) for item in self.schema.fields
            )
            for schema in state.schemas
        }


def _reading(known: Mapping[int, Field], item: Field) -> object:
    old = known.get(item.id)
    if old is None:
        return item.type if isinstance(item.type, str) else item.type[0], item.default
    if isinstance(old.type, str) or isinstance(item.type, str):
        return old.name, old.type, item.type
    inner = {one.id: one for one in children(old)}
    return old.name, old.type[0], tuple((one.name, _reading(inner, one)) for one in children(item))
