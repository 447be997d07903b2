"""A sink of one's own: prepared in each snapshot, committed when the checkpoint is published, each
row once.
"""

import pyarrow as pa
import pyarrow.compute as pc

import stateformat
from stateformat import CommitPermit
from stateformat.backends.connectors import RateSource
from stateformat.backends.dataflow import Dataflow, OperatorContext, Prepared, TwoPhaseCommitSink
from stateformat.backends.local import LocalRuntime

LEDGER: dict[tuple[int, int], int] = {}
"""In place of a database: what was committed, by checkpoint and subtask."""


class Ledger(TwoPhaseCommitSink):
    """Commits a sum for each checkpoint and subtask."""

    committable_columns = pa.schema({"subtask": pa.int64(), "n": pa.int64()})

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self.sum = 0

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        self.sum += pc.sum(batch["n"]).as_py()

    def prepare_commit(self, prepared: Prepared) -> pa.Table:
        n, self.sum = self.sum, 0
        return pa.table({"subtask": [self.context.subtask], "n": [n]})

    def commit(self, permit: CommitPermit, committables: pa.Table) -> None:
        for row in committables.to_pylist():  # the same rows come again after a failure, so this must be repeatable
            LEDGER[row["_checkpoint_id"], row["subtask"]] = row["n"]

    def clean(self, uid: str, newest_id: int, carried: pa.Table | None) -> None:
        """Nothing was prepared outside of the checkpoint."""


flow = Dataflow("ledger", parallelism=2)
flow.source(RateSource(total=1000, shards=4), uid="rows").apply(Ledger(), uid="ledger")
runtime = LocalRuntime(stateformat.open("memory://sink"), checkpoint_rows=300, checkpoint_interval_us=None)
runtime.run(flow)
print(sum(LEDGER.values()), len({checkpoint for checkpoint, _ in LEDGER}) > 1)

# It prints:
# 124500 True
