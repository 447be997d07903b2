"""The one checkpoint (or round of the loops) that is in flight: its phases, its acknowledgements, and what they add up to.

====================  ==============================  ===========================================================
phase                 goes on at                      given up at
====================  ==============================  ===========================================================
COLLECTING            the last acknowledgement        Declined, SnapshotFailed, TimedOut, a task that ends before
                      (a round is complete then)      it acknowledged
PUBLISHING            Published                       PublishRefused, PublishFailed
COMMITTING            Committed                       never: it exists; CommitFailed restarts the run
====================  ==============================  ===========================================================

Whatever else arrives, or arrives under another number, means nothing. TaskFailed restarts the run in every phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum, auto

from backends.dataflow.checkpoint_plan import CheckpointPlan
from backends.dataflow.events import Acknowledge, Barrier, LoopStep, Purpose, StopOf, TaskId
from backends.dataflow.roster import Loop


class Phase(Enum):
    """How far the checkpoint in flight has come."""

    COLLECTING = auto()
    PUBLISHING = auto()
    COMMITTING = auto()


class BarrierInFlight:
    """A barrier that has begun.

    ``turned``: heads of loops for whose sake it was begun at once. ``closed``: the loops into which nothing came from outside any
    more when it began. ``spoken``: vertices in which a coordinator has sent to its operator since then. ``may_overtake``: it may turn unaligned later.
    """

    def __init__(
        self,
        barrier: Barrier,
        plan: CheckpointPlan,
        *,
        stop: StopOf | None = None,
        turned: tuple[str, ...] = (),
        closed: Iterable[Loop] = (),
        may_overtake: bool = False,
    ) -> None:
        self.barrier = barrier
        self.plan = plan
        self.stop = stop
        self.turned = turned
        self.closed = tuple(closed)
        self.spoken: set[str] = set()
        self._may_overtake = may_overtake
        self.phase = Phase.COLLECTING
        self.finishing: set[TaskId] = set()
        self._missing = {vertex: mask.copy() for vertex, mask in plan.wait.masks.items()}
        self._missing_count = len(plan.wait)
        self._of_heads: dict[str, dict[TaskId, Acknowledge]] = {head: {} for loop in self.closed for head in loop.heads}

    @property
    def number(self) -> int:
        """The number of its barrier."""
        return self.barrier.number

    @property
    def purpose(self) -> Purpose:
        """What it is for."""
        return self.barrier.purpose

    def acknowledge(self, task: TaskId, acknowledgement: Acknowledge) -> bool:
        """Take an acknowledgement; False if it is nobody's or a second one."""
        if not self.waits_for(task):
            return False
        self._missing[task.vertex][task.subtask] = False
        self._missing_count -= 1
        if acknowledgement.finishing:
            self.finishing.add(task)
        elif task.vertex in self._of_heads:
            self._of_heads[task.vertex][task] = acknowledgement
        return True

    def overtake(self) -> frozenset[TaskId] | None:
        """Turn unaligned. Returns the triggered tasks that have not acknowledged; None where it may not, or has."""
        if not self._may_overtake or self.barrier.unaligned:
            return None
        self.barrier = self.barrier._replace(unaligned=True)
        return frozenset(task for task in self.plan.trigger if self.waits_for(task))

    def waits_for(self, task: TaskId) -> bool:
        """Whether this task has a part in it and has not acknowledged."""
        return task in self.plan.wait and bool(self._missing[task.vertex][task.subtask])

    @property
    def is_whole(self) -> bool:
        """Whether every task has acknowledged."""
        return self._missing_count == 0

    def partial_union(self, union: Mapping[str, tuple[str, ...]], parallelism: Mapping[str, int]) -> str | None:
        """An operator with union state that would be partially finished, by what was acknowledged."""
        finishing = Counter(task.vertex for task in self.finishing if task.vertex in union)
        for vertex, uids in union.items():
            done = finishing[vertex] + int(self.plan.finished.masks[vertex].sum())
            if 0 < done < parallelism[vertex]:
                return uids[0]
        return None

    def loop_steps(self) -> dict[TaskId, LoopStep]:
        """What heads are to do, now that it is complete.

        A loop is quiet when no head of it logged or forwarded anything, and nothing had come into it from outside since before
        the barrier began: an input that enters behind the head would feed it again. A barrier that overtook records proves
        nothing either, for they lie in channels inside of the loop. Nor does one after whose begin a coordinator sent into the
        loop: what it sent lies behind the barrier, and may become records. Heads whose logic has ended are not asked.
        """
        steps: dict[TaskId, LoopStep] = {}
        if self.barrier.unaligned or self.purpose in (Purpose.STOP_DRAIN, Purpose.STOP_NO_DRAIN):
            return steps
        for loop in self.closed:
            if self.spoken & loop.vertices:
                continue
            said = {head: self._of_heads[head] for head in loop.heads}
            if not all(one.quiet for of_head in said.values() for one in of_head.values()):
                continue
            ready = [of_head for of_head in said.values() if all(one.inputs_ended for one in of_head.values())]
            # No head ends while another has still to send the end of time round: it might come back as records.
            sent = all(one.max_watermark_sent for of_head in ready for one in of_head.values())
            for of_head in ready:
                steps |= dict.fromkeys(of_head, LoopStep.END if sent else LoopStep.MAX_WATERMARK)
        return steps
