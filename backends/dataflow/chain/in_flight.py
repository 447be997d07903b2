"""In-flight records: logged into a snapshot, and restored from one.

A snapshot has one in-flight state per edge whose records may become part of it. The logged records
of a channel are numbered (``_seq``), so they can be restored in that order at any parallelism
(SPEC.md section 5.1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidState
from stateformat.graph import Edge
from stateformat.snapshot import Snapshot, SnapshotWriter
from stateformat.tables import BATCH_BYTES, cut, take_table

from ..events import Channel
from ..graph import in_flight_name

if TYPE_CHECKING:
    from stateformat.reading import ReadTask
BATCH_ROWS: Final = 65_536
_ORDER: Final = ("_sender", "_receiver", "_seq")


class OpenSnapshot:
    """The snapshot of one task: its states are written, but in-flight records may still come.

    ``writers`` are those of the chain's operators, in order; ``logged`` the edges that have an
    in-flight state, none if the task is finishing. It may be dropped without :meth:`close`.
    """

    def __init__(self, writers: Sequence[SnapshotWriter], logged: Sequence[Edge]) -> None:
        self._writers = writers
        self._logs = {edge.id: InFlightLog() for edge in logged}

    def log(self, channel: Channel, batch: pa.RecordBatch) -> None:
        """Log a batch of a channel. Raises ``InvalidState`` for an edge without in-flight state."""
        log = self._logs.get(channel.edge)
        if log is None:
            raise InvalidState(
                f"records of edge {channel.edge!r} cannot become part of this snapshot; those of "
                f"{sorted(self._logs) or 'no edge'} may",
                kind=ErrorKind.STATE_NOT_ALLOWED,
            )
        log.add(channel, batch)

    def close(self) -> list[Snapshot]:
        """Write what was logged; return one snapshot per operator of the chain. Call it once."""
        for edge_id, log in self._logs.items():
            rows = log.rows()
            if rows is None:
                self._writers[0].empty(in_flight_name(edge_id))
            else:
                self._writers[0].write(in_flight_name(edge_id), rows)
        return [writer.snapshot() for writer in self._writers]


class InFlightLog:
    """The records logged from the channels of one edge into one subtask, for one snapshot."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._next: dict[Channel, int] = defaultdict(int)

    def add(self, channel: Channel, batch: pa.RecordBatch) -> None:
        """Append a batch to what was logged of this channel."""
        rows = batch.num_rows
        if not rows:
            return
        first = self._next[channel]
        self._next[channel] = first + rows
        own = [
            pa.repeat(pa.scalar(channel.sender, pa.int32()), rows),
            pa.repeat(pa.scalar(channel.receiver, pa.int32()), rows),
            pa.array(np.arange(first, first + rows)),
        ]
        self._batches.append(pa.RecordBatch.from_arrays([*own, *batch.columns], names=[*_ORDER, *batch.schema.names]))

    def rows(self) -> pa.Table | None:
        """``_sender``, ``_receiver``, ``_seq``, then the edge's columns; None if empty."""
        return pa.Table.from_batches(self._batches) if self._batches else None


def in_flight_batches(task: ReadTask, edge_schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the records of an edge that a new subtask gets, each channel in the order sent.

    Columns that the edge did not have when they were logged are null. Raises ``InvalidState`` if
    its columns have other types now. All of the records are in memory at once.
    """
    table = task.table()
    order = [table[name].to_numpy() for name in _ORDER]
    if not _ascends(order):
        table = take_table(table, np.lexsort(order[::-1]))
    for batch in _cast_to_edge(table, edge_schema, str(task.state.edge)).to_batches():
        if batch.num_rows:
            yield from cut(batch, BATCH_ROWS, BATCH_BYTES)


def _ascends(columns: list[np.ndarray]) -> bool:
    undecided = np.ones(max(0, len(columns[0]) - 1), np.bool_)
    for column in columns:
        if (undecided & (column[1:] < column[:-1])).any():
            return False
        undecided &= column[1:] == column[:-1]
    return True


def _cast_to_edge(table: pa.Table, schema: pa.Schema, edge: str) -> pa.Table:
    columns = [
        table[field.name] if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    try:
        return pa.table(columns, names=schema.names).cast(schema)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidState(
            f"records in flight on edge {edge!r} cannot become what the edge has now: {error}. Take an aligned "
            "checkpoint before its columns change, so that they arrive.",
            kind=ErrorKind.SCHEMA_MISMATCH,
        ) from error
