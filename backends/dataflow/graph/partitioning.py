"""Choose the receiver of each row of a batch on an edge.

A :class:`Router` is the sending end of one edge in one subtask. On a hash edge every row goes to
the subtask that owns its key group (SPEC.md section 5.3). A restore cuts keyed state in the same
way, so a key and its state are always in one place. On rebalance and rescale edges, whole batches
go to the receivers in turn, large ones in pieces. Rows keep their order on every channel. A
router's choices depend only on its input.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.graph import Edge, Partitioner
from stateformat.keys import DEFAULT_KEY_HASH, hash_keys, key_group_count, key_groups, subtask_of_key_group

from .compile import Job

PIECE_ROWS_MIN: Final = 16_384
"""Large batches are cut into pieces of at least so many rows, at most one for each receiver."""


class Router:
    """The sending end of an edge in one subtask. Not thread-safe."""

    def __init__(self, job: Job, edge: Edge, sender: int) -> None:
        self._receivers = job.receivers(edge.id, sender)
        self._turn = sender % len(self._receivers)
        self._key_columns = edge.key_columns
        self._partitioner = edge.partitioner
        target = job.graph.operator(edge.target)
        self._key_groups = key_group_count(target)
        self._key_hash = target.key_hash or DEFAULT_KEY_HASH
        owners = subtask_of_key_group(
            np.arange(self._key_groups), parallelism=target.parallelism, max_parallelism=self._key_groups
        )
        # The narrowest type: the fewer bytes, the faster the sort.
        self._owner_of_group = owners.astype(np.uint8 if target.parallelism <= 256 else np.uint16)

    def route(self, batch: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
        """Return the rows of a batch by receiver, without empty batches, in their order.

        Receivers of a hash edge ascend; on rebalance and rescale edges they come in turn.
        """
        if not batch.num_rows:
            return []
        receivers = self._receivers
        if self._partitioner is Partitioner.BROADCAST:
            return [(receiver, batch) for receiver in receivers]
        if len(receivers) == 1:
            return [(receivers[0], batch)]
        return self._by_key(batch) if self._partitioner is Partitioner.HASH else self._in_turn(batch)

    def owners(self, batch: pa.RecordBatch) -> npt.NDArray[Any]:
        """Return the receiver of each row of a hash edge's batch."""
        hashes = hash_keys([batch.column(name) for name in self._key_columns], self._key_hash)
        found: npt.NDArray[Any] = self._owner_of_group[key_groups(hashes, self._key_groups)]
        return found

    def _by_key(self, batch: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
        owners = self.owners(batch)
        counts = np.bincount(owners, minlength=len(self._receivers))
        present = np.flatnonzero(counts).tolist()
        if len(present) == 1:
            return [(present[0], batch)]
        # numpy sorts 8 and 16 bits by radix, stably.
        sorted_rows = batch.take(pa.array(np.argsort(owners, kind="stable")))
        starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
        return [(receiver, sorted_rows.slice(starts[receiver], int(counts[receiver]))) for receiver in present]

    def _in_turn(self, batch: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
        receivers, turn = self._receivers, self._turn
        pieces = max(1, min(len(receivers), batch.num_rows // PIECE_ROWS_MIN))
        self._turn = (turn + pieces) % len(receivers)
        if pieces == 1:
            return [(receivers[turn], batch)]
        bounds = [batch.num_rows * piece // pieces for piece in range(pieces + 1)]
        return [
            (receivers[(turn + piece) % len(receivers)], batch.slice(bounds[piece], bounds[piece + 1] - bounds[piece]))
            for piece in range(pieces)
        ]
