"""A sink that collects committed rows in the driver's memory: for tests, notebooks, small results.

Committables hold the rows themselves, so any machine that has the checkpoint can commit it. The
driver's sink remembers under which checkpoint, attempt, subtask and number it committed each, and
takes none twice. Its memory is its output: a process that is lost loses both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidState
from stateformat.publication import CommitPermit
from stateformat.tables import table_from_python

from ...dataflow.api import OperatorContext, Prepared, TwoPhaseCommitSink
from ...dataflow.casting import columns_kept, columns_text
from ..sources.basic import not_null

_PAYLOAD_BYTES_MAX: Final = 32 * 1024 * 1024


class CollectSink(TwoPhaseCommitSink):
    """Collects committed rows, each exactly once in the life of this object.

    Example::

        out = CollectSink()
        delays.apply(out, uid="out")
        runtime.run(flow)
        out.table()

    A job that is started again with the same object adds to it. If one object is used several times
    in a dataflow, it has the rows of all uses, which must have the same columns. Committables (not
    nullable): ``uid`` (utf8, of the use), ``subtask`` (int32), ``number`` (int64, within that
    subtask's snapshot) and ``payload`` (binary, rows as an Arrow IPC stream).
    """

    committable_columns = not_null(uid=pa.string(), subtask=pa.int32(), number=pa.int64(), payload=pa.binary())

    def __init__(self) -> None:
        self._schema = pa.schema([])
        # Only the driver's object fills this, by checkpoint, attempt, uid, subtask and number.
        self._committed: dict[tuple[int, str, str, int, int], pa.Table] = {}
        self._received: list[pa.RecordBatch] = []

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Nothing is emitted. The input's columns are those of :meth:`table`."""
        self._schema = inputs[0].remove_metadata()
        return super().output_schema(*inputs)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._received = []

    def process(self, batch: pa.RecordBatch, input: int) -> None:  # noqa: ARG002 - there is one
        self._received.append(batch)

    def prepare_commit(self, prepared: Prepared) -> pa.Table | None:  # noqa: ARG002 - the rows are all there is
        if not self._received:
            return None
        table = pa.Table.from_batches(self._received)
        self._received = []
        place = {"uid": self.context.uid, "subtask": self.context.subtask}
        rows = [{**place, "number": number, "payload": payload} for number, payload in enumerate(_payloads(table))]
        return table_from_python(rows, self.committable_columns, "the committables")

    def commit(self, permit: CommitPermit, committables: pa.Table) -> None:  # noqa: ARG002 - no other process sees this
        """Take the new rows. Raises ``InvalidState`` for a payload that is not an Arrow stream."""
        taken: dict[tuple[int, str, str, int, int], pa.Table] = {}
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
                    f"the committable of {uid!r} subtask {subtask}, prepared for checkpoint {checkpoint_id} by attempt "
                    f"{attempt_id}, holds {len(payload)} bytes that are no rows: {error}. Something else has "
                    "written this checkpoint; go back to one before it with `ckpt rollback`",
                    kind=ErrorKind.DAMAGED_SEGMENT,
                ) from error
        # What one subtask prepared under several attempts keeps its order in the checkpoint.
        self._committed |= {place: taken[place] for place in sorted(taken, key=lambda place: (place[0], *place[2:4]))}

    def table(self) -> pa.Table:
        """Return all committed rows, in order of commit, then by checkpoint, uid and subtask.

        Rows that an older program prepared get today's types. Raises ``InvalidState`` for values
        that these do not hold, and for other columns.
        """
        made = [self._schema.empty_table()]
        for (checkpoint_id, _, uid, subtask, _), rows in self._committed.items():
            try:
                if sorted(rows.column_names) != sorted(self._schema.names):
                    raise pa.ArrowInvalid("the names differ")
                made.append(columns_kept(rows, self._schema))
            except (pa.ArrowException, ValueError) as error:
                raise InvalidState(
                    f"{uid!r} subtask {subtask} committed rows of checkpoint {checkpoint_id} with columns "
                    f"{columns_text(rows.schema)}, and this sink's input has {columns_text(self._schema)}: {error}. "
                    "Give rows of other columns a CollectSink of their own",
                    kind=ErrorKind.SCHEMA_MISMATCH,
                ) from error
        return pa.concat_tables(made)


def _payloads(table: pa.Table) -> Iterator[bytes]:
    rows_max = max(1, table.num_rows * _PAYLOAD_BYTES_MAX // max(_PAYLOAD_BYTES_MAX, table.nbytes))
    for first in range(0, table.num_rows, rows_max):
        out = pa.BufferOutputStream()
        part = table.slice(first, rows_max).combine_chunks()
        with pa.ipc.new_stream(out, part.schema.remove_metadata()) as writer:
            writer.write_table(part.replace_schema_metadata(None))
        yield out.getvalue().to_pybytes()
