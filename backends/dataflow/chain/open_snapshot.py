"""The snapshot of one task while records that barriers overtook still come in."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidState
from stateformat.graph import Edge
from stateformat.snapshot import Snapshot, SnapshotWriter

from ..events import Channel
from ..graph import in_flight_name
from .in_flight import InFlightLog


class OpenSnapshot:
    """States have been written; the in-flight states of the edges into the chain are written when it is closed.

    ``writers`` are those of the chain's operators, the first one's first; ``logged`` the edges that have an in-flight state,
    none where the task is finishing. Dropping it needs no call: what was written is named by nothing.
    """

    def __init__(self, writers: Sequence[SnapshotWriter], logged: Sequence[Edge]) -> None:
        self._writers = writers
        self._logs = {edge.id: InFlightLog() for edge in logged}

    def log(self, channel: Channel, batch: pa.RecordBatch) -> None:
        """Put a batch, in the schema of its edge, behind what was logged of this channel. ``InvalidState`` for other edges."""
        log = self._logs.get(channel.edge)
        if log is None:
            raise InvalidState(
                f"records of edge {channel.edge!r} cannot become part of this snapshot; those of {sorted(self._logs) or 'no edge'} "
                "may",
                kind=ErrorKind.STATE_NOT_ALLOWED,
            )
        log.add(channel, batch)

    def close(self) -> list[Snapshot]:
        """Write what was logged; what to report, one snapshot per operator of the chain. Once."""
        for edge_id, log in self._logs.items():
            rows = log.rows()
            if rows is None:
                self._writers[0].empty(in_flight_name(edge_id))
            else:
                self._writers[0].write(in_flight_name(edge_id), rows)
        return [writer.snapshot() for writer in self._writers]


__all__ = ["OpenSnapshot"]
