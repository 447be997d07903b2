"""The one checkpoint, or round of the loops, that is in flight: its phases and its
acknowledgements.

==========  =============================  =======================================================
phase       goes on at                     aborted at
==========  =============================  =======================================================
COLLECTING  the last acknowledgement       Declined, SnapshotFailed, TimedOut, a task that ends
            (a round is complete then)     before it acknowledged
PUBLISHING  Published                      PublishRefused, PublishFailed
COMMITTING  Committed                      never: the checkpoint exists. CommitFailed restarts
==========  =============================  =======================================================

Any other event, or one with another number, is ignored. TaskFailed restarts in every phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum, auto

from .. import events as ev
from ..events import CheckpointPlan
from .task_tracker import TrackedLoop


class Phase(Enum):
    """How far the checkpoint in flight has come."""

    COLLECTING = auto()
    PUBLISHING = auto()
    COMMITTING = auto()


class BarrierInFlight:
    """A barrier that has begun. ``may_overtake``: it may become unaligned later."""

    def __init__(
        self,
        barrier: ev.Barrier,
        plan: CheckpointPlan,
        *,
        stop: ev.StopOf | None = None,
        turned: tuple[str, ...] = (),
        closed: Iterable[TrackedLoop] = (),
        may_overtake: bool = False,
        savepoints: tuple[str, ...] = (),
    ) -> None:
        self.barrier = barrier
        self.plan = plan
        self.stop = stop
        self.savepoints = savepoints
        """Requests for a savepoint that this checkpoint is for."""
        self.turned = turned
        """Heads whose loops it turns, which is why it began at once."""
        self.closed = tuple(closed)
        """Loops that got nothing more from outside when it began."""
        self.messaged: set[str] = set()
        """Vertices whose coordinator has sent to its operator since it began."""
        self.phase = Phase.COLLECTING
        self.finishing: set[ev.TaskId] = set()
        self._may_overtake = may_overtake
        self._missing = {vertex: mask.copy() for vertex, mask in plan.wait.masks.items()}
        self._missing_count = len(plan.wait)
        self._of_heads: dict[str, dict[ev.TaskId, ev.Acknowledge]] = {
            head: {} for loop in self.closed for head in loop.heads
        }

    @property
    def number(self) -> int:
        """The number of its barrier."""
        return self.barrier.number

    @property
    def purpose(self) -> ev.BarrierKind:
        """What it is for."""
        return self.barrier.purpose

    def acknowledge(self, task: ev.TaskId, acknowledgement: ev.Acknowledge) -> bool:
        """Take an acknowledgement; return False for an unknown task or a repeated one."""
        if not self.waits_for(task):
            return False
        self._missing[task.vertex][task.subtask] = False
        self._missing_count -= 1
        if acknowledgement.finishing:
            self.finishing.add(task)
        elif task.vertex in self._of_heads:
            self._of_heads[task.vertex][task] = acknowledgement
        return True

    def overtake(self) -> frozenset[ev.TaskId] | None:
        """Become unaligned; return the triggered tasks still awaited. None if it may not."""
        if not self._may_overtake or self.barrier.unaligned:
            return None
        self.barrier = self.barrier._replace(unaligned=True)
        return frozenset(task for task in self.plan.trigger if self.waits_for(task))

    def waits_for(self, task: ev.TaskId) -> bool:
        """Return whether this task takes part and has not acknowledged."""
        return task in self.plan.wait and bool(self._missing[task.vertex][task.subtask])

    @property
    def is_whole(self) -> bool:
        """Whether every task has acknowledged."""
        return self._missing_count == 0

    def partial_union(self, union: Mapping[str, tuple[str, ...]], parallelism: Mapping[str, int]) -> str | None:
        """Return an operator with union state that would be saved as partially finished."""
        finishing = Counter(task.vertex for task in self.finishing if task.vertex in union)
        for vertex, uids in union.items():
            done = finishing[vertex] + int(self.plan.finished.masks[vertex].sum())
            if 0 < done < parallelism[vertex]:
                return uids[0]
        return None

    def loop_steps(self) -> dict[ev.TaskId, ev.LoopStep]:
        """Return what heads do now that it is complete. Heads whose logic has ended are left out.

        A closed loop is quiet when none of its heads logged or forwarded anything. That proves
        nothing

        - if the barrier overtook records: they are in channels inside the loop;
        - if a coordinator has sent into the loop since: its message may become records.
        """
        steps: dict[ev.TaskId, ev.LoopStep] = {}
        if self.barrier.unaligned or self.purpose in (ev.BarrierKind.STOP_DRAIN, ev.BarrierKind.STOP_NO_DRAIN):
            return steps
        for loop in self.closed:
            of_heads = [self._of_heads[head] for head in loop.heads]
            quiet = all(one.quiet for of_head in of_heads for one in of_head.values())
            if not quiet or self.messaged & loop.vertices:
                continue
            ready = [of_head for of_head in of_heads if all(one.inputs_ended for one in of_head.values())]
            # No head ends while another still has to send the end of time round: that might
            # produce records.
            sent = all(one.max_watermark_sent for of_head in ready for one in of_head.values())
            for of_head in ready:
                steps |= dict.fromkeys(of_head, ev.LoopStep.END if sent else ev.LoopStep.MAX_WATERMARK)
        return steps
