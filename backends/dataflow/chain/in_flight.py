"""Records on their way: logged into a snapshot, and brought back from one.

A snapshot has one in-flight state per edge whose records may become part of it. What is logged of a channel is numbered in its
order (``_seq``), so that it can be brought back in that order, whoever gets it at another parallelism (SPEC.md section 5.1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidState
from stateformat.tables import BATCH_BYTES, cut, take_table

from ..events import Channel

if TYPE_CHECKING:
    from stateformat.reading import ReadTask

BATCH_ROWS: Final = 65_536
_ORDER: Final = ("_sender", "_receiver", "_seq")


class InFlightLog:
    """What is logged of the channels of one edge into one subtask, for one snapshot."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._next: dict[Channel, int] = defaultdict(int)

    def add(self, channel: Channel, batch: pa.RecordBatch) -> None:
        """Put a batch behind what was logged of this channel."""
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
        """All of it: ``_sender``, ``_receiver``, ``_seq``, then the edge's columns; None where nothing was logged."""
        return pa.Table.from_batches(self._batches) if self._batches else None


def in_flight_batches(task: ReadTask, edge_schema: pa.Schema) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The records that a new subtask gets of an edge, with their senders, in the schema of the edge.

    In order of sender, then of ``_seq``: each channel in the order in which it was sent. Columns that the edge did not have when
    they were logged are null; ``InvalidState`` where its columns are of other types now. Raises what reading raises. All of it is
    in memory, as it was when it was logged.
    """
    table = task.table()
    order = [table[name].to_numpy() for name in _ORDER]
    if not _ascends(order):
        table = take_table(table, np.lexsort(order[::-1]))
    senders = table["_sender"].to_numpy()
    records = _conformed(table, edge_schema, str(task.state.edge))
    bounds = [0, *(np.flatnonzero(np.diff(senders)) + 1).tolist(), len(senders)]
    for start, stop in pairwise(bounds):
        for batch in records.slice(start, stop - start).to_batches():
            if batch.num_rows:
                yield from ((int(senders[start]), piece) for piece in cut(batch, BATCH_ROWS, BATCH_BYTES))


def _ascends(columns: list[np.ndarray]) -> bool:
    undecided = np.ones(max(0, len(columns[0]) - 1), np.bool_)
    for column in columns:
        if (undecided & (column[1:] < column[:-1])).any():
            return False
        undecided &= column[1:] == column[:-1]
    return True


def _conformed(table: pa.Table, schema: pa.Schema, edge: str) -> pa.Table:
    columns = [
        table[field.name] if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    try:
        return pa.table(columns, names=schema.names).cast(schema)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidState(
            f"records in flight on edge {edge!r} cannot become what the edge has now: {error}; let them arrive before its columns "
            "change, with an aligned checkpoint",
            kind=ErrorKind.SCHEMA_MISMATCH,
        ) from error


__all__ = ["BATCH_ROWS", "InFlightLog", "in_flight_batches"]
