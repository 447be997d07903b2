"""The coordinator of a run: when checkpoints begin, when they are complete, how the job ends.

Theory of operation. Pure: :meth:`Coordinator.handle` takes an event and returns commands, which the executor carries out in
order. What is known of tasks stands in :class:`~backends.dataflow.roster.TaskTracker`, the one barrier in flight in
:class:`~backends.dataflow.pending_barrier.BarrierInFlight`, a stop in :class:`~backends.dataflow.stopping.StopProgress`; the last two
open with the tables of their phases. Here are the rules:

1. *One at a time.* Nothing begins while a barrier is in flight. When none is, :meth:`Coordinator._go_on` says what begins.
2. *At once* a checkpoint begins when the logic of every task has ended (the final one), and while loops have to be turned with
   nothing else moving the job. Otherwise when it is due.
3. *A plan* per checkpoint. A task that ends without having acknowledged, or declines, makes it void at once. That is no failure,
   but it shows: the third in a row warns, and then each time that their number has doubled.
4. *Failures* that can be tolerated (snapshots, time, publishing) are counted until a checkpoint is published. One too many, or a
   failed task or commit, or a publication of which nobody knows: the run restarts.
5. *Union state* of an operator that has ended in part is refused before the trigger and after the acknowledgements. Loops are
   turned by rounds then, which write nothing: the operator may be waiting for them.
6. *Completion*: all acknowledged → publish → commit → notify. A round is complete when all have acknowledged, and only heads that
   have to do something are told: for a task that waits for its last checkpoint a round is none.
7. *A barrier that ends a loop* is aligned, and began when nothing came into the loop from outside any more, at whichever vertex.
   One that overtakes would leave records inside of the loop unseen; an input behind the head would feed a head that has ended;
   a message of a coordinator that came behind the barrier may become a record.

After ``Restart`` or ``JobEnded`` every event is ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

from backends.dataflow.compile import Job
from backends.dataflow.events import (
    Abort,
    Acknowledged,
    Barrier,
    Begin,
    CheckpointDue,
    Commit,
    CommitFailed,
    Committed,
    CoordinatorCommand,
    CoordinatorEvent,
    Declined,
    EndSources,
    InputsEnded,
    JobEnded,
    LogicEnded,
    LoopStep,
    MessageSent,
    Notify,
    Overdue,
    Overtake,
    Publish,
    Published,
    PublishFailed,
    PublishRefused,
    Purpose,
    Restart,
    SnapshotFailed,
    StopFailed,
    StopOf,
    StopRequested,
    TaskEnded,
    TaskFailed,
    TaskId,
    TimedOut,
    Warn,
)
from backends.dataflow.pending_barrier import BarrierInFlight, Phase
from backends.dataflow.roster import TaskTracker
from backends.dataflow.stopping import StopPhase, StopProgress

NumberedEvent: TypeAlias = (
    Acknowledged
    | Declined
    | SnapshotFailed
    | TimedOut
    | Overdue
    | Published
    | PublishRefused
    | PublishFailed
    | Committed
    | CommitFailed
)
"""Events of a barrier."""
LOOP_ROUNDS_MAX = 10_000
REFUSALS_UNTIL_WARNING = 3


class Coordinator:
    """One run of a job. ``finished``: vertices that a restore found fully finished and that were not started.

    ``tolerable_failures``: how many checkpoints in a row may fail before the run restarts. ``loop_rounds_max``: how often loops
    are turned at once before the run fails with the name of a head. ``begins_aligned``: barriers of an unaligned job overtake only
    when they are :class:`Overdue`.
    """

    def __init__(
        self,
        job: Job,
        *,
        finished: Iterable[str] = (),
        tolerable_failures: int = 0,
        loop_rounds_max: int = LOOP_ROUNDS_MAX,
        begins_aligned: bool = False,
    ) -> None:
        self._job = job
        self._roster = TaskTracker(job, finished)
        self._tolerable_failures = tolerable_failures
        self._loop_rounds_max = loop_rounds_max
        self._begins_aligned = begins_aligned
        self._number = 0
        self._pending: BarrierInFlight | None = None
        self._stop: StopProgress | None = None
        self._failures = 0
        self._refusals = 0
        self._warn_at = REFUSALS_UNTIL_WARNING
        self._rounds: Counter[str] = Counter()
        self._over = False

    def start(self) -> list[CoordinatorCommand]:
        """Before any event: ends a job in which nothing runs, and warns of union state that may keep checkpoints from being."""
        if self._roster.all_ended:
            return self._end_job()
        return [
            Warn(
                f"operator {uid!r} keeps union state and its subtasks may end long after one another; from the end of the first "
                "to the end of the last no checkpoint can be taken. Keep it in a coordinator or as an even-split list instead"
            )
            for uid in self._roster.endangered_unions()
        ]

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorCommand]:
        """What follows from an event. Events that come too late, twice or of nobody change nothing."""
        if self._over:
            return []
        match event:
            case CheckpointDue():
                return self._go_on(due=True)
            case StopRequested():
                return self._ask_to_stop(event)
            case LogicEnded(task) | InputsEnded(task) | TaskEnded(task) if not self._roster.knows(task):
                return []
            case LogicEnded(task):
                return self._go_on() if self._roster.end_logic((task,)) else []
            case InputsEnded(task):
                return self._go_on() if self._roster.inputs_ended.add(task) else []
            case TaskEnded(task):
                return self._end_task(task) if self._roster.end(task) else []
            case MessageSent(vertex):
                if self._pending is not None:
                    self._pending.spoken.add(vertex)
                return []
            case TaskFailed(task, reason):
                return self._restart(f"{task}: {reason}" if task else reason, counted=True)
            case _:
                return self._handle_of_pending(event)

    def _handle_of_pending(self, event: NumberedEvent) -> list[CoordinatorCommand]:
        """Events of a barrier: each means something in one phase of the one that is in flight."""
        pending = self._pending
        number = event.acknowledgement.number if isinstance(event, Acknowledged) else event.number
        if pending is None or number != pending.number:
            return []
        match pending.phase, event:
            case Phase.COLLECTING, Acknowledged():
                return self._acknowledge(pending, event)
            case Phase.COLLECTING, Declined(task, _, reason) if pending.waits_for(task):
                return self._give_up(pending, f"{task} cannot take part: {reason}", counted=False)
            case Phase.COLLECTING, SnapshotFailed(task, _, reason) if task is None or pending.waits_for(task):
                of = "a coordinator" if task is None else str(task)
                return self._give_up(pending, f"the snapshot of {of} failed: {reason}", counted=True)
            case Phase.COLLECTING, TimedOut():
                return self._give_up(pending, f"barrier {number} took longer than allowed", counted=True)
            case Phase.COLLECTING, Overdue():
                tasks = pending.overtake()
                return [] if tasks is None else [Overtake(pending.barrier, tasks)]
            case Phase.PUBLISHING, Published():
                return self._commit(pending)
            case Phase.PUBLISHING, PublishRefused(_, reason, counted):
                return self._give_up(pending, reason, counted=counted)
            case Phase.PUBLISHING, PublishFailed(_, reason, False):
                return self._give_up(pending, reason, counted=True)
            case (Phase.PUBLISHING, PublishFailed(_, reason, True)) | (Phase.COMMITTING, CommitFailed(_, reason)):
                return self._restart(reason, counted=True)
            case Phase.COMMITTING, Committed():
                return self._complete(pending)
            case _:
                return []

    @property
    def is_suspended(self) -> bool:
        """Whether a stop without drain has its savepoint: whatever comes after that is done again by the run that goes on."""
        return self._stop is not None and self._stop.phase is StopPhase.SAVED and not self._stop.drains

    # What begins --------------------------------------------------------------------------------------------------------

    def _go_on(self, *, due: bool = False, at_once: bool = True) -> list[CoordinatorCommand]:
        """What begins, or that the job has ended. ``at_once`` False: not what would have begun without being due."""
        roster = self._roster
        if self._pending is not None:
            return []
        if roster.all_ended:
            return self._end_job()
        if roster.all_released or (self._stop is not None and self._stop.phase is StopPhase.SAVED):
            return []
        if self._stop is not None:
            return self._go_on_stopping(self._stop)
        if due or (at_once and (roster.final or roster.turning_heads)):
            return self._begin_checkpoint()
        return []

    def _begin_checkpoint(self) -> list[CoordinatorCommand]:
        turned, union = self._roster.turning_heads, self._roster.partial_union()
        if union is None:
            return self._begin(Purpose.CHECKPOINT, turned=turned)
        refused = self._refuse(_partial_union(union))
        return [*refused, *self._begin(Purpose.ROUND, turned=turned)] if turned else refused

    def _go_on_stopping(self, stop: StopProgress) -> list[CoordinatorCommand]:
        """The next step of a stop that has not saved yet."""
        roster = self._roster
        if not stop.drains:
            union = roster.partial_union()
            return self._fail_to_stop(_partial_union(union)) if union is not None else self._begin_savepoint(stop)
        commands: list[CoordinatorCommand] = []
        if stop.phase is StopPhase.ASKED:
            stop.phase = StopPhase.DRAINING
            commands += [EndSources(tasks)] if (tasks := frozenset(roster.working(roster.sources))) else []
        if roster.final:
            return commands + self._begin_savepoint(stop)
        if turned := roster.turning_heads:
            return commands + self._begin(Purpose.ROUND, turned=turned)
        return commands

    def _begin_savepoint(self, stop: StopProgress) -> list[CoordinatorCommand]:
        stop.phase = StopPhase.SAVING
        return self._begin(stop.purpose, stop=stop.of)

    def _begin(
        self, purpose: Purpose, *, stop: StopOf | None = None, turned: tuple[str, ...] = ()
    ) -> list[CoordinatorCommand]:
        self._number += 1
        roster = self._roster
        may_overtake = self._job.unaligned and purpose is Purpose.CHECKPOINT and not roster.draining_heads
        barrier = Barrier(self._number, purpose, unaligned=may_overtake and not self._begins_aligned)
        self._pending = BarrierInFlight(
            barrier, roster.plan(), stop=stop, turned=turned, closed=roster.closed_loops, may_overtake=may_overtake
        )
        return [Begin(barrier, self._pending.plan, stop)]

    # How it comes to its end --------------------------------------------------------------------------------------------

    def _acknowledge(self, pending: BarrierInFlight, event: Acknowledged) -> list[CoordinatorCommand]:
        if not pending.acknowledge(event.task, event.acknowledgement) or not pending.is_whole:
            return []
        if pending.purpose is Purpose.ROUND:
            return self._complete(pending)
        union = pending.partial_union(self._roster.union, self._roster.parallelism)
        if union is not None:
            self._roster.end_logic(pending.finishing)
            return self._give_up(pending, _partial_union(union), counted=False, again=True)
        pending.phase = Phase.PUBLISHING
        return [Publish(pending.number, frozenset(pending.finishing))]

    def _commit(self, pending: BarrierInFlight) -> list[CoordinatorCommand]:
        self._failures = self._refusals = 0
        self._warn_at = REFUSALS_UNTIL_WARNING
        if pending.stop is not None and self._stop is not None:
            self._stop.phase = StopPhase.SAVED
        pending.phase = Phase.COMMITTING
        return [Commit(pending.number)]

    def _complete(self, pending: BarrierInFlight) -> list[CoordinatorCommand]:
        self._pending = None
        ending = self._roster.ending_heads
        steps = {task: step for task, step in pending.loop_steps().items() if task.vertex not in ending}
        told = {task: steps.get(task) for task in pending.plan.wait if task not in self._roster.ended}
        if pending.purpose is Purpose.ROUND:
            told = {task: step for task, step in told.items() if step is not None}
        else:
            self._roster.release(pending.finishing)
        commands: list[CoordinatorCommand] = [Notify(pending.number, told)]
        ending.update(task.vertex for task in steps if steps[task] is LoopStep.END)
        endless = self._count_rounds(pending)
        if endless is not None:
            reason = (
                f"the loop of {endless!r} was turned {self._loop_rounds_max} times since its inputs had ended, and records "
                "still go round it; let it come to an end, or raise the limit of rounds"
            )
            return commands + self._restart(reason, counted=True)
        return commands + self._go_on()

    def _count_rounds(self, pending: BarrierInFlight) -> str | None:
        """Count a turn of the loops. Returns a head that still drains after all the turns it may have."""
        self._rounds.update(pending.turned)
        draining = self._roster.draining_heads
        return next((head for head in draining if self._rounds[head] >= self._loop_rounds_max), None)

    def _end_task(self, task: TaskId) -> list[CoordinatorCommand]:
        if self._pending is not None and self._pending.waits_for(task):
            return self._give_up(self._pending, f"{task} ended before it had acknowledged", counted=False, again=True)
        return self._go_on()

    def _give_up(
        self, pending: BarrierInFlight, reason: str, *, counted: bool, again: bool = False
    ) -> list[CoordinatorCommand]:
        """The barrier in flight will not be complete. ``again``: this cannot happen for ever, so the next try need not wait."""
        stop, saving = self._stop, pending.stop is not None
        if stop is not None and stop.no_way_back and not (again and pending.purpose is Purpose.ROUND):
            return self._restart(reason, counted=False, nothing_published=True)
        counted = counted and not saving
        self._failures += counted
        if self._failures > self._tolerable_failures:
            return self._restart(reason, counted=True, nothing_published=True)
        self._pending = None
        told = frozenset(task for task in pending.plan.wait if task not in self._roster.ended)
        commands: list[CoordinatorCommand] = [Abort(pending.number, told, reason, counted)]
        if saving:
            return commands + (self._go_on() if again else self._fail_to_stop(reason))
        if not counted:
            commands += self._refuse(reason)
        return commands + self._go_on(at_once=again)

    def _refuse(self, reason: str) -> list[CoordinatorCommand]:
        """Count a refusal, and say so when there have been many."""
        self._refusals += 1
        if self._refusals < self._warn_at:
            return []
        self._warn_at *= 2
        return [Warn(f"{self._refusals} checkpoints in a row could not be taken, the last because {reason}")]

    # How the run comes to its end ---------------------------------------------------------------------------------------

    def _ask_to_stop(self, asked: StopRequested) -> list[CoordinatorCommand]:
        if self._stop is None:
            self._stop = StopProgress(StopOf(asked.mode, asked.request))
            return self._go_on()
        under_way = self._stop.of.request
        if asked.request == under_way:
            return []
        return [StopFailed(asked.request, f"the job stops already, as request {under_way!r} asks", goes_on=True)]

    def _fail_to_stop(self, reason: str) -> list[CoordinatorCommand]:
        """The job goes on as if nothing had been asked."""
        if self._stop is None:
            return []
        request, self._stop = self._stop.of.request, None
        return [StopFailed(request, reason, goes_on=True), *self._go_on()]

    def _restart(self, reason: str, *, counted: bool, nothing_published: bool = False) -> list[CoordinatorCommand]:
        """The run is given up, and with it a stop that was asked for, unless its savepoint exists or may exist."""
        self._over = True
        stop, pending = self._stop, self._pending
        if stop is None:
            return [Restart(reason, counted)]
        saving = pending is not None and pending.stop is not None and pending.phase is Phase.PUBLISHING
        may_exist = saving and not nothing_published
        restart = Restart(reason, counted and not stop.no_way_back)
        if stop.phase is StopPhase.SAVED or may_exist:
            return [restart]
        return [StopFailed(stop.of.request, reason, goes_on=False), restart]

    def _end_job(self) -> list[CoordinatorCommand]:
        self._over = True
        stop = self._stop
        if stop is None:
            return [JobEnded(None)]
        if stop.phase is StopPhase.SAVED:
            return [JobEnded(stop.of)]
        return [StopFailed(stop.of.request, "the job had ended by itself before", goes_on=False), JobEnded(None)]


def _partial_union(operator: str) -> str:
    return (
        f"some subtasks of operator {operator!r}, which keeps union state, have ended and others have not: what the ended ones "
        "held would be missing"
    )
