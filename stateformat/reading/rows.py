"""The rows of one state, as users look at them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from ..graph import shortened
from ..model import State
from ..schema import row_schema
from ..tables import ArrowStream, with_schema
from .cutting import groups_of
from .key_values import Keys, key_table
from .task import ReadTask
from .wanted import Wanted, checked_parts, chosen_columns


@dataclass(frozen=True)
class StateRows(ArrowStream):
    """The rows of a state: layers merged, columns of the current schema, verified. Picklable.

    Columns: ``schema.row_schema`` of the state, or those that :meth:`select` names. Broadcast state
    is read once, from one subtask. Order: as for ``ReadTask.batches``. Rows that had expired at the
    checkpoint are left out, unless :meth:`with_expired` includes them.

    Reading raises as ``ReadTask.batches`` does.
    """

    task: ReadTask
    columns: tuple[str, ...]
    keys: pa.Table | None = None
    """Only rows with one of these keys; the state's key columns, in its types. None: all rows."""

    def __repr__(self) -> str:
        columns = shortened(", ".join(self.columns), 60)
        keys = "" if self.keys is None else f", at {self.keys.num_rows} keys"
        return f"StateRows({self.state!r} of checkpoint {self.task.record.checkpoint_id}, {columns}{keys})"

    @classmethod
    def of(cls, task: ReadTask) -> StateRows:
        """Return all rows and columns of a task."""
        return cls(task, tuple(row_schema(task.state).names))

    @property
    def state(self) -> State:
        """The state that is read."""
        return self.task.state

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch, without metadata. Reads nothing."""
        schema = row_schema(self.state)
        return pa.schema([schema.field(name) for name in self.columns])

    @property
    def stored_bytes(self) -> int:
        """About how many bytes of segments are read, as stored."""
        return self.task.stored_bytes

    def batches(self, *, batch_rows: int = 131_072) -> Iterator[pa.RecordBatch]:
        """Stream the rows in batches of up to ``batch_rows`` rows and 16 MiB."""
        schema, names = self.schema, list(self.columns)
        for batch in self.task.batches(batch_rows=batch_rows, wanted=Wanted(self.columns, self.keys)):
            # A batch without columns still says how many rows it has.
            yield with_schema(batch, schema) if names else batch

    def select(self, columns: Sequence[str]) -> StateRows:
        """Return the same rows with these columns only, in this order; the others are not read.

        Raises ``InvalidInput`` for a column that the state does not have, or that is named twice.
        """
        known = row_schema(self.state).names
        where = f"state {self.state.name!r} of {self.state.operator!r}"
        return replace(self, columns=chosen_columns(where, known, columns) if columns else ())

    def at_keys(self, keys: Keys) -> StateRows:
        """Return only the rows with one of these keys; each has a value for every key column.

        A key is a mapping; several are a list, or a table of any library that exports Arrow.

        In each layer, only the row groups of their key groups are read, unless the key groups
        cannot be computed: those of another system with a hash of its own. Null is a key, and
        equal to null. Raises ``InvalidInput`` for a state that has no keys, and for keys of other
        columns or types.
        """
        table = key_table(self.state, keys)
        if self.keys is not None:
            table = Wanted(keys=self.keys).rows(table)
        groups = groups_of(table, self.task.record.graph.operators[0])
        return replace(self, keys=table, task=self.task if groups is None else self.task.at_groups(groups))

    def with_expired(self) -> StateRows:
        """Return the same rows, with those that had expired at the checkpoint."""
        return replace(self, task=self.task.with_expired())

    def split(self, parts: int) -> list[StateRows]:
        """Return the same rows in up to ``parts`` parts of about the same stored size.

        Read in order, the parts give the rows in order; rows of a key group stay together. There
        are fewer parts if the state has fewer key groups or rows, and only one for progress and
        broadcast state. Raises ``InvalidInput`` for less than one part.
        """
        return [replace(self, task=task) for task in self.task.split(checked_parts(parts))]
