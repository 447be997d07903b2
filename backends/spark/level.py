"""What Spark runs: one level of an epoch in one slot.

A slot of a level runs every task of the level with the slot's number as its subtask, one behind the other. Rows for another level are
passed on as they are. Everything is streamed: frames are read one by one, and what comes of them is sent on when it is much.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from backends.dataflow.events import TaskFailed
from backends.dataflow.failures import FailsAgain
from backends.spark.cache import WORKER_CACHE
from backends.spark.loop_end import LoopEnd
from backends.spark.mail import ROWS, EpochBroken, together, unpack
from backends.spark.remote_errors import pack
from backends.spark.reports import Report, Setup, Spec
from backends.spark.task_run import TaskRun
from stateformat.model import AttemptId, CheckpointId

if TYPE_CHECKING:
    from pyspark import Broadcast

    from backends.dataflow import events as ev

_SETUPS: Final[dict[str, Setup]] = {}
"""Of this process: the setups of the runs that it serves."""


def _setup_of(run: str, data: Callable[[], bytes], live: Collection[str]) -> Setup:
    """The setup of a run; what this worker has of runs that have ended goes. ``FailsAgain`` where it cannot be unpickled here."""
    ended = [other for other in _SETUPS if other not in live and other != run]
    if ended:
        for other in ended:
            del _SETUPS[other]
        WORKER_CACHE.drop_others({run, *live})
    if run not in _SETUPS:
        pickled = data()
        try:
            _SETUPS[run] = pickle.loads(pickled)  # noqa: S301 - from our own driver
        except Exception as error:
            raise FailsAgain(
                f"a worker of Spark cannot have the job: {type(error).__name__}: {error}. What the job's steps are made of must be "
                "importable there: install it, or give it to Spark (spark-submit --py-files, sparkContext.addPyFile)"
            ) from error
    return _SETUPS[run]


@dataclass(frozen=True)
class Level:
    """The function of one ``mapInArrow``. ``specs``: by slot, the pickled specs of its tasks; ``heads``: by slot, the heads of loops
    that end the epoch here. ``live``: the runs for which workers keep what they have. ``checkpoint_id`` and ``attempt_id`` are those of the epoch's checkpoint.
    """

    run: str
    live: frozenset[str]
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
        specs: list[Spec] = pickle.loads(self.specs[slot]) if slot in self.specs else []  # noqa: S301 - from our own driver
        try:
            setup = _setup_of(self.run, lambda: self.setup.value, self.live)
        except FailsAgain as error:
            # Reported, not raised: Spark would try again, as often as it may.
            yield from self._failed(specs, error, batches)
            return
        writing = replace(setup.context, checkpoint_id=self.checkpoint_id, attempt_id=self.attempt_id)
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
            yield from _some(batch.filter(pc.invert(mine)))
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

    def _failed(
        self, specs: Sequence[Spec], error: FailsAgain, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Report that the tasks of a slot have failed, and pass on what is for others: their reports are among it."""
        for spec in specs:
            events: list[ev.CoordinatorEvent] = [TaskFailed(None, str(error))]
            yield Report(spec.task, events=events, errors=[(str(error), pack(error))]).rows()
        for batch in batches:
            if batch.schema.names == ROWS.names:
                yield from _some(batch.filter(pc.not_equal(batch.column("level"), self.number)))


def _some(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows:
        yield batch


__all__ = ["Level"]
