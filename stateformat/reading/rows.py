"""The rows of one state, as users look at them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ErrorKind, InvalidInput
from ..model import State, known_names
from ..schema import KEY_GROUP
from ..segments import row_key_codes
from ..tables import ArrowStream
from .key_values import key_table
from .task import ReadTask


@dataclass(frozen=True)
class StateRows(ArrowStream):
    """The rows of a state: layers merged, columns of the current schema, verified. Picklable.

    Columns: ``schema.segment_schema`` of the state without ``_key_group`` and ``_op``, or those
    that :meth:`select` names. Of broadcast state one copy. Order: as ``ReadTask.batches`` says.

    Reading raises as ``ReadTask.batches`` does.
    """

    task: ReadTask
    columns: tuple[str, ...]
    keys: pa.Table | None = None
    """Only rows with one of these keys; the key columns of the state, in its types."""

    def __repr__(self) -> str:
        return f"StateRows({self.state!r} of checkpoint {self.task.record.checkpoint_id}, {', '.join(self.columns)})"

    @classmethod
    def of(cls, task: ReadTask) -> StateRows:
        """Return all rows and columns of a task."""
        return cls(task, tuple(name for name in task.schema.names if name != KEY_GROUP.name))

    @property
    def state(self) -> State:
        """The state that is read."""
        return self.task.state

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch, without metadata. Reads nothing."""
        return pa.schema([self.task.schema.field(name).remove_metadata() for name in self.columns])

    def batches(self, *, batch_rows: int = 131_072) -> Iterator[pa.RecordBatch]:
        """Stream the rows in batches of up to ``batch_rows`` rows and 16 MiB."""
        schema = self.schema
        for batch in self.task.batches(batch_rows=batch_rows):
            if self.keys is not None:
                batch = batch.filter(self._has_key(batch))
            if batch.num_rows:
                yield pa.RecordBatch.from_arrays([batch[name] for name in schema.names], schema=schema)

    def _has_key(self, batch: pa.RecordBatch) -> pa.Array:
        """Tell which rows have one of the keys. Null equals null, NaN equals NaN."""
        assert self.keys is not None
        rows = pa.Table.from_batches([batch]).select(self.keys.column_names)
        codes = row_key_codes(pa.concat_tables([rows.replace_schema_metadata(), self.keys]).columns)
        return pa.array(np.isin(codes[: len(rows)], codes[len(rows) :]))

    def select(self, columns: Sequence[str]) -> StateRows:
        """Return the same rows with these columns only, in this order; the others are not read.

        Raises ``InvalidInput`` for a column that the state does not have, or that is named twice.
        """
        known = [name for name in self.task.schema.names if name != KEY_GROUP.name]
        for name in columns:
            if name not in known:
                raise InvalidInput(
                    f"state {self.state.name!r} of {self.state.operator!r} has no column {name!r}; "
                    f"{known_names(known, name)}",
                    kind=ErrorKind.SCHEMA_MISMATCH,
                    column=name,
                )
        if len(set(columns)) < len(columns):
            raise InvalidInput(f"columns {', '.join(columns)} name one twice; name each once")
        return replace(self, columns=tuple(columns))

    def at_keys(self, keys: Mapping[str, Any] | Sequence[Mapping[str, Any]] | pa.Table) -> StateRows:
        """Return only the rows with one of these keys; each has a value for every key column.

        In each layer, the row groups of their key groups are read, and no others. Raises
        ``InvalidInput`` for a state that is not keyed, and for keys of other columns or types.
        """
        return replace(self, keys=key_table(self.state, keys))

    def split(self, parts: int) -> list[StateRows]:
        """Return the same rows in up to ``parts`` parts of about the same stored size.

        Parts in their order give the rows in theirs. Rows of a key group stay together.
        """
        owners = pc.unique(self.task.slices["subtask"]).to_pylist() if parts > 1 else []
        if len(owners) < 2:
            return [self]
        chosen = []
        for owner in owners:
            column = self.task.slices["subtask"]
            mine = pc.is_null(column) if owner is None else pc.fill_null(pc.equal(column, owner), False)
            chosen.append(replace(self, task=replace(self.task, slices=self.task.slices.filter(mine))))
        return chosen
