"""A sink that collects what was committed, in the memory of the driver: for tests, notebooks, and small results.

Theory of operation. What a subtask received in an epoch becomes committables that hold the rows themselves, so whoever holds
the checkpoint can commit it, on whatever machine. The driver's sink remembers under which checkpoint, attempt, subtask and
number it committed each and takes none twice. Its memory is its output: a process that is lost loses both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidState
from stateformat.publication import CommitPermit

from ...dataflow.api import OperatorContext, Prepared, TwoPhaseCommitSink

_PAYLOAD_BYTES_MAX: Final = 32 * 1024 * 1024

_Place = tuple[int, str, str, int, int]


class CollectSink(TwoPhaseCommitSink):
    """Collects committed rows, each exactly once in the life of this object.

    Example::

        out = CollectSink()
        delays.apply(out, uid="out")
        runtime.run(flow)
        out.table()

    A job that is started again with the same object goes on filling it; one that stands in several places of a dataflow has
    the rows of all, which must have the same columns. Committables: ``uid`` (utf8, the place), ``subtask`` (int32),
    ``number`` (int64, within that subtask's snapshot) and ``payload`` (binary, rows as an Arrow IPC stream).
    """

    committable_columns = pa.schema(
        [
            pa.field("uid", pa.string(), nullable=False),
            pa.field("subtask", pa.int32(), nullable=False),
            pa.field("number", pa.int64(), nullable=False),
            pa.field("payload", pa.binary(), nullable=False),
        ]
    )

    def __init__(self) -> None:
        self._schema = pa.schema([])
        # Only the driver's object fills this; the copies of the subtasks never look at it.
        self._committed: dict[_Place, pa.Table] = {}
        self._received: list[pa.RecordBatch] = []

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Nothing is emitted. What comes in is what :meth:`table` has."""
        self._schema = inputs[0].remove_metadata()
        return super().output_schema(*inputs)

    def open(self, context: OperatorContext) -> None:
        """Begin with nothing: what was received before the last checkpoint lies in it, what came after comes again."""
        super().open(context)
        self._received = []

    def process(self, batch: pa.RecordBatch, input: int) -> None:  # noqa: ARG002 - there is one
        """Keep a batch until the next snapshot."""
        self._received.append(batch)

    def prepare_commit(self, prepared: Prepared) -> pa.Table | None:  # noqa: ARG002 - the rows are all there is
        """The rows of this epoch."""
        if not self._received:
            return None
        table = pa.Table.from_batches(self._received)
        self._received = []
        payloads = list(_payloads(table)) if table.num_rows else []
        return pa.table(
            [
                pa.array([self.context.uid] * len(payloads), pa.string()),
                pa.array([self.context.subtask] * len(payloads), pa.int32()),
                pa.array(range(len(payloads)), pa.int64()),
                pa.array(payloads, pa.binary()),
            ],
            schema=self.committable_columns,
        )

    def commit(self, permit: CommitPermit, committables: pa.Table) -> None:  # noqa: ARG002 - nobody else sees this memory
        """Take what was not taken yet. ``InvalidState`` for a payload that is no Arrow stream: the checkpoint is damaged."""
        taken: dict[_Place, pa.Table] = {}
        names = ("_checkpoint_id", "_attempt_id", *self.committable_columns.names)
        for *place, payload in zip(*(committables[name].to_pylist() for name in names), strict=True):
            checkpoint_id, attempt_id, uid, subtask, number = place
            key = (checkpoint_id, attempt_id, uid, subtask, number)
            if key in self._committed:
                continue
            try:
                taken[key] = pa.ipc.open_stream(payload).read_all()
            except (pa.ArrowException, OSError) as error:
                raise InvalidState(
                    f"the committable of {uid!r} subtask {subtask}, prepared for checkpoint {checkpoint_id} by attempt {attempt_id}, "
                    f"holds {len(payload)} bytes that are no rows: {error}; run ckpt validate on the store",
                    kind=ErrorKind.DAMAGED_SEGMENT,
                ) from error
        # What one subtask prepared under several attempts keeps the order in which the checkpoint holds it.
        self._committed |= {place: taken[place] for place in sorted(taken, key=lambda place: (place[0], *place[2:4]))}

    def table(self) -> pa.Table:
        """All committed rows: as they were committed, and of one commit by checkpoint, place and subtask."""
        return pa.concat_tables(self._committed.values()) if self._committed else self._schema.empty_table()


def _payloads(table: pa.Table) -> Iterator[bytes]:
    """The rows as Arrow streams of bounded size."""
    rows_max = max(1, table.num_rows * _PAYLOAD_BYTES_MAX // max(_PAYLOAD_BYTES_MAX, table.nbytes))
    for first in range(0, table.num_rows, rows_max):
        out = pa.BufferOutputStream()
        part = table.slice(first, rows_max).combine_chunks()
        with pa.ipc.new_stream(out, part.schema.remove_metadata()) as writer:
            writer.write_table(part.replace_schema_metadata(None))
        yield out.getvalue().to_pybytes()


__all__ = ["CollectSink"]
