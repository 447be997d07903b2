"""What Spark runs: one level of an epoch in one slot.

A slot runs every task of the level whose subtask is the slot's number, and passes on payloads for
other levels. It reads frames one by one, and sends output whenever enough has gathered.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ...dataflow import events as ev
from ...dataflow.chained_operator import FailsAgain
from ..protocol import frames
from ..protocol.frames import EpochBroken
from ..protocol.messages import Epoch, Setup, Spec, TaskReport
from ..protocol.remote_errors import pack_error
from ..worker_process import settle
from .loop_end import LoopEnd
from .task_cache import WORKER_CACHE
from .task_run import TaskRun

if TYPE_CHECKING:
    from pyspark import Broadcast

_SETUPS: Final[dict[str, Setup]] = {}
"""The setups that this process has unpickled, by run."""


def _setup_of(run: str, data: Callable[[], bytes], live: Collection[str]) -> Setup:
    """Return the setup of a run, and release ended runs. ``FailsAgain`` if it cannot be loaded."""
    ended = [other for other in _SETUPS if other not in live and other != run]
    if ended:
        for other in ended:
            del _SETUPS[other]
        WORKER_CACHE.drop_others({run, *live})
    if run not in _SETUPS:
        settle()
        pickled = data()
        try:
            _SETUPS[run] = pickle.loads(pickled)  # noqa: S301 - from our own driver
        except Exception as error:
            raise FailsAgain(
                f"A worker of Spark cannot load the job: {type(error).__name__}: {error}. What the job's steps are "
                "made of must be importable there: install it, or give it to Spark (spark-submit --py-files, "
                "sparkContext.addPyFile)."
            ) from error
    return _SETUPS[run]


@dataclass(frozen=True)
class Level:
    """One level of an epoch: a function that Spark runs on the payloads of each slot."""

    run: str
    setup: Broadcast[bytes]
    epoch: Epoch
    number: int
    specs: Mapping[int, bytes]
    """By slot, the pickled specs of its tasks."""
    heads: Mapping[int, tuple[ev.TaskId, ...]]
    """By slot, the heads of loops, which end the epoch at this level; only at the last level."""

    def __call__(self, slot: int, received: Iterator[bytes]) -> Iterator[bytes]:
        """Turn payloads into slots and payloads. Spark tries again on ``EpochBroken``."""
        return frames.keyed(self._sent(slot, received))

    def _sent(self, slot: int, received: Iterator[bytes]) -> Iterator[frames.Sent]:
        specs: list[Spec] = pickle.loads(self.specs[slot]) if slot in self.specs else []  # noqa: S301 - from our driver
        try:
            setup = _setup_of(self.run, lambda: self.setup.value, self.epoch.live)
        except FailsAgain as error:
            # Reported, not raised: Spark would retry an error as often as it is allowed to.
            for spec in specs:
                events: list[ev.CoordinatorEvent] = [ev.TaskFailed(None, str(error))]
                yield TaskReport(spec.task, events=events, errors=[(str(error), pack_error(error))]).sent_on()
            yield from ((slot, payload) for payload in received if frames.level_of(payload) != self.number)
            return
        epoch = self.epoch
        writing = replace(setup.context, checkpoint_id=epoch.checkpoint_id, attempt_id=epoch.attempt_id)
        tasks = {spec.task: TaskRun(setup, epoch, spec, writing, WORKER_CACHE) for spec in specs}
        for task in tasks.values():
            yield from task.begin()
        heads = {task: LoopEnd(setup, epoch, task, writing) for task in self.heads.get(slot, ())}
        receivers: dict[ev.TaskId, TaskRun | LoopEnd] = {**tasks, **heads}
        for payload in received:
            if frames.level_of(payload) != self.number:
                yield slot, payload
                continue
            header, rest = frames.unpack(payload)
            receiver = receivers.get(header.receiver)
            if receiver is None:
                raise EpochBroken(
                    f"slot {slot} of level {self.number} got a frame for {header.receiver}, which is not there"
                )
            yield from receiver.receive(header, rest)
        for receiver in receivers.values():
            yield from receiver.finish()
