"""What Spark runs: one level of an epoch in one slot.

A slot of a level runs every task of the level with the slot's number as its subtask, one behind the other. Rows for another level are
passed on as they are. Everything is streamed: frames are read one by one, and what comes of them is sent on when it is much.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from backends.spark.cache import WORKER_CACHE
from backends.spark.loop_end import LoopEnd
from backends.spark.mail import ROWS, EpochBroken, together, unpack
from backends.spark.reports import Setup, Spec
from backends.spark.task_run import TaskRun
from stateformat.model import AttemptId, CheckpointId

if TYPE_CHECKING:
    from pyspark import Broadcast

    from backends.dataflow import events as ev

_SETUPS: Final[dict[str, Setup]] = {}
"""Of this process: the setups of the runs that it serves."""
RUNS_KEPT: Final = 2
"""Of so many runs a worker keeps what it has: two jobs may share a session."""


def _setup_of(run: str, broadcast: Broadcast[bytes]) -> Setup:
    if run not in _SETUPS:
        while len(_SETUPS) >= RUNS_KEPT:
            del _SETUPS[next(iter(_SETUPS))]
        WORKER_CACHE.drop_others({run, *_SETUPS})
        _SETUPS[run] = pickle.loads(broadcast.value)  # noqa: S301 - from our own driver
    return _SETUPS[run]


@dataclass(frozen=True)
class Level:
    """The function of one ``mapInArrow``. ``specs``: by slot, the pickled specs of its tasks; ``heads``: by slot, the heads of loops
    that end the epoch here. ``checkpoint_id`` and ``attempt_id`` are those of the epoch's checkpoint.
    """

    run: str
    setup: Broadcast[bytes]
    number: int
    specs: Mapping[int, bytes]
    heads: Mapping[int, tuple[ev.TaskId, ...]]
    checkpoint_id: CheckpointId
    attempt_id: AttemptId

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows in, rows out (``mail.ROWS``). Raises :class:`EpochBroken`, upon which Spark tries again."""
        return together(self._rows(batches))

    def _rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        slot = context.partitionId()
        setup = _setup_of(self.run, self.setup)
        writing = replace(setup.context, checkpoint_id=self.checkpoint_id, attempt_id=self.attempt_id)
        specs: list[Spec] = pickle.loads(self.specs[slot]) if slot in self.specs else []  # noqa: S301 - from our own driver
        runs: dict[ev.TaskId, TaskRun | LoopEnd] = {
            spec.task: TaskRun(setup, spec, writing, WORKER_CACHE) for spec in specs
        }
        for run in list(runs.values()):
            assert isinstance(run, TaskRun)
            yield from run.begin()
        runs.update({task: LoopEnd(setup, task, writing) for task in self.heads.get(slot, ())})
        for batch in batches:
            if batch.schema.names != ROWS.names or not batch.num_rows:
                continue
            mine = pc.equal(batch.column("level"), self.number)
            others = batch.filter(pc.invert(mine))
            if others.num_rows:
                yield others
            for payload in batch.column("payload").filter(mine):
                header, rest = unpack(payload.as_buffer())
                receiver = runs.get(header.receiver)
                if receiver is None:
                    raise EpochBroken(
                        f"slot {slot} of level {self.number} got a frame for {header.receiver}, which is not there"
                    )
                yield from receiver.receive(header, rest)
        for each in runs.values():
            yield from each.finish()


__all__ = ["Level"]
