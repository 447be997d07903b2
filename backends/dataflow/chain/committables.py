"""Committables that a two-phase-commit sink has prepared in one subtask and may not be committed.

Every snapshot holds all of them, each row with the checkpoint and attempt it was prepared for. So a
published checkpoint also carries what was prepared for checkpoints that were never published.
"""

from __future__ import annotations

import pyarrow as pa

from stateformat.states import Columns, as_schema

from ..api import Prepared
from ..casting import cast_to_schema


class Committables:
    """The outstanding committables of one subtask of a sink, oldest first."""

    def __init__(self, uid: str, columns: Columns) -> None:
        self._uid = uid
        self._schema = as_schema(columns)
        self._outstanding: list[tuple[int, pa.Table]] = []

    def add(self, number: int, prepared: Prepared, rows: pa.Table | pa.RecordBatch | None) -> None:
        """Keep what ``prepare_commit`` returned in the snapshot of a barrier.

        Raises ``InvalidState`` for columns that are not declared.
        """
        if rows is None:
            return
        table = cast_to_schema(f"prepare_commit of {self._uid!r}", rows, self._schema, declared="committable_columns")
        if table.num_rows:
            ids = pa.repeat(pa.scalar(prepared.checkpoint_id, pa.int64()), table.num_rows)
            attempts = pa.repeat(pa.scalar(prepared.attempt_id, pa.string()), table.num_rows)
            table = table.append_column("_checkpoint_id", ids).append_column("_attempt_id", attempts)
            self._outstanding.append((number, table))

    def rows(self) -> pa.Table | None:
        """Return the declared columns, ``_checkpoint_id`` and ``_attempt_id``; None if empty."""
        tables = [table for _, table in self._outstanding]
        return pa.concat_tables(tables) if tables else None

    def clear(self) -> None:
        """Forget all committables."""
        self._outstanding.clear()

    def complete(self, number: int) -> None:
        """Forget what a barrier's snapshot held: it has been published and committed."""
        self._outstanding = [(when, table) for when, table in self._outstanding if when > number]
