"""The coordinator of a run: when checkpoints begin, when they are complete, how the job ends.

Pure: :meth:`Coordinator.handle` takes an event and returns commands. It keeps what is known of
tasks in a :class:`~stateformat.backends.dataflow.task_tracker.TaskTracker`, the one barrier in
flight in a :class:`BarrierInFlight`, a stop in a :class:`StopProgress`. The rules:

1. *One at a time.* Nothing begins while a barrier is in flight; then
   :meth:`Coordinator._next_action` says what begins.
2. *At once.* A checkpoint begins at once when every logic has ended (the final one), when loops
   have to be turned and nothing else moves the job, and for a savepoint. Otherwise it begins when
   it is due.
3. *Plans.* A task that declines, or ends without having acknowledged, makes the checkpoint void at
   once. That is not a failure. The third in a row warns, and then each doubling of their number.
4. *Failures* that can be tolerated (snapshots, time, publishing) are counted until a checkpoint is
   published. The run restarts at one too many, at a failed task or commit, and when it is unknown
   whether a checkpoint was published.
5. *Union state* of a partially ended operator is refused before the trigger and after the
   acknowledgements. Then rounds turn the loops: the operator may be waiting for them.
6. *Completion*: all acknowledged, publish, commit, notify. A round is complete when all have
   acknowledged; only heads that have something to do are notified of it.
7. *A barrier that ends a loop* is aligned, and began when the loop was closed. Otherwise records
   that it overtook, or that still came from outside, would be left in the loop.
8. *Stopping soon* is not a stop: an ordinary checkpoint begins now, and the run ends when that is
   complete, unless all tasks are about to end by themselves. A stop in progress comes first.
9. *A savepoint* belongs to the next checkpoint to begin, maybe a stop's, and fails with it. One
   that is void because a task ended is tried again at once, with the checkpoint.

After ``Restart``, ``JobEnded`` or ``JobInterrupted`` every event is ignored.

The phases of the one checkpoint, or round of the loops, that is in flight:

==========  =============================  =======================================================
phase       goes on at                     aborted at
==========  =============================  =======================================================
COLLECTING  the last acknowledgement       Declined, SnapshotFailed, TimedOut, a task that ends
            (a round is complete then)     before it acknowledged
PUBLISHING  Published                      PublishRefused, PublishFailed
COMMITTING  Committed                      never: the checkpoint exists. CommitFailed restarts
==========  =============================  =======================================================

Any other event, or one with another number, is ignored. TaskFailed restarts in every phase.

The phases of a stop with a savepoint:

========  ===================================  =================================================
phase     until                                if anything fails
========  ===================================  =================================================
ASKED     the checkpoint in flight has ended   the request fails; the failure counts as it would
DRAINING  every logic has ended; rounds turn   ``StopFailed`` and ``Restart``, uncounted
          the loops. Drain only
SAVING    the savepoint is published           drain: as above. No drain: the job goes on as if
                                               nothing had been asked; only a failed task
                                               restarts the run, counted
SAVED     every task has ended                 the stop stands: ``Restart``, uncounted
========  ===================================  =================================================

While the savepoint is being published it is unknown whether it exists. A run that ends abruptly
then does not answer the request: the restart reads the newest record and answers accordingly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from stateformat.model import StopMode

from . import events as ev
from .compile import Job
from .events import BarrierKind, CheckpointPlan, CoordinatorCommand, StopOf
from .task_tracker import TaskTracker, TrackedLoop


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


class StopPhase(Enum):
    """See the table."""

    ASKED = auto()
    DRAINING = auto()
    SAVING = auto()
    SAVED = auto()


@dataclass
class StopProgress:
    """The requested stop."""

    of: StopOf
    phase: StopPhase = StopPhase.ASKED

    @property
    def drains(self) -> bool:
        """Whether everything is flushed first."""
        return self.of.mode is StopMode.DRAIN

    @property
    def purpose(self) -> BarrierKind:
        """What its barrier is for."""
        return BarrierKind.STOP_DRAIN if self.drains else BarrierKind.STOP_NO_DRAIN

    @property
    def no_way_back(self) -> bool:
        """Whether tasks were told to end, so this run cannot go on."""
        return self.phase is StopPhase.SAVED or (self.drains and self.phase is not StopPhase.ASKED)


NumberedEvent: TypeAlias = (
    ev.Acknowledged
    | ev.Declined
    | ev.SnapshotFailed
    | ev.TimedOut
    | ev.Overdue
    | ev.Published
    | ev.Unchanged
    | ev.PublishRefused
    | ev.PublishFailed
    | ev.Committed
    | ev.CommitFailed
)
"""Events of a barrier."""
LOOP_ROUNDS_MAX = 10_000
REFUSALS_UNTIL_WARNING = 3


class Coordinator:
    """Coordinates one run of a job.

    - ``finished``: vertices that a restore found fully finished and that were not started.
    - ``tolerable_failures``: how many checkpoints in a row may fail before the run restarts.
    - ``loop_rounds_max``: how often a loop is turned at once before the run fails.
    - ``begins_aligned``: barriers of an unaligned job overtake only when they are ``Overdue``.
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
        self._tasks = TaskTracker(job, finished)
        self._tolerable_failures = tolerable_failures
        self._loop_rounds_max = loop_rounds_max
        self._begins_aligned = begins_aligned
        self._number = 0
        self._in_flight: BarrierInFlight | None = None
        self._stop: StopProgress | None = None
        self._soon_after: int | None = None
        """The run ends at the first checkpoint after this barrier; None: it goes on."""
        self._savepoints: list[str] = []
        """Requests for a savepoint, for the next checkpoint to begin."""
        self._moved = True
        """Whether a task may have moved since the newest checkpoint of this run; at first, yes."""
        self._failures = 0
        self._refusals = 0
        self._warn_at = REFUSALS_UNTIL_WARNING
        self._rounds: Counter[str] = Counter()
        self._over = False

    def start(self) -> list[CoordinatorCommand]:
        """End a job in which nothing runs; warn about union state that may prevent checkpoints."""
        if self._tasks.all_ended:
            return self._end_job()
        return [
            ev.Warn(
                f"operator {uid!r} keeps union state and its subtasks may end long after one another. No checkpoint "
                "can be taken between the end of the first and the end of the last. Keep the state in a coordinator, "
                "or as an even-split list."
            )
            for uid in self._tasks.endangered_unions()
        ]

    def handle(self, event: ev.CoordinatorEvent) -> list[CoordinatorCommand]:
        """Return the commands for an event. Late, duplicate and unknown events change nothing."""
        if self._over:
            return []
        match event:
            case ev.CheckpointDue():
                return self._next_action(due=True)
            case ev.StopRequested():
                return self._request_stop(event)
            case ev.SavepointRequested(requests):
                return self._request_savepoints(requests)
            case ev.SoonStopRequested(is_current):
                return self._request_soon_stop(is_current=is_current)
            case ev.LogicEnded(task) | ev.InputsEnded(task) | ev.TaskEnded(task) if not self._tasks.knows(task):
                return []
            case ev.LogicEnded(task):
                return self._next_action() if self._tasks.end_logic((task,)) else []
            case ev.InputsEnded(task):
                return self._next_action() if self._tasks.inputs_ended.add(task) else []
            case ev.TaskEnded(task):
                return self._end_task(task) if self._tasks.end(task) else []
            case ev.MessageSent(vertex):
                if self._in_flight is not None:
                    self._in_flight.messaged.add(vertex)
                return []
            case ev.TaskFailed(task, reason):
                return self._restart(f"{task}: {reason}" if task else reason, counted=True)
            case _:
                return self._handle_numbered(event)

    def _handle_numbered(self, event: NumberedEvent) -> list[CoordinatorCommand]:
        """Handle an event of a barrier: each counts in only one phase of the barrier in flight."""
        current = self._in_flight
        number = event.acknowledgement.number if isinstance(event, ev.Acknowledged) else event.number
        if current is None or number != current.number:
            return []
        match current.phase, event:
            case Phase.COLLECTING, ev.Acknowledged():
                return self._acknowledge(current, event)
            case Phase.COLLECTING, ev.Declined(task, _, reason) if current.waits_for(task):
                return self._abort(current, f"{task} cannot take part: {reason}", counted=False)
            case Phase.COLLECTING, ev.SnapshotFailed(task, _, reason) if task is None or current.waits_for(task):
                of = "a coordinator" if task is None else str(task)
                return self._abort(current, f"the snapshot of {of} failed: {reason}", counted=True)
            case Phase.COLLECTING, ev.TimedOut():
                return self._abort(current, f"barrier {number} took longer than allowed", counted=True)
            case Phase.COLLECTING, ev.Overdue():
                tasks = current.overtake()
                return [] if tasks is None else [ev.Overtake(current.barrier, tasks)]
            case Phase.PUBLISHING, ev.Published():
                return self._commit(current)
            case Phase.PUBLISHING, ev.Unchanged():
                return self._forgo(current)
            case Phase.PUBLISHING, ev.PublishRefused(_, reason, counted):
                return self._abort(current, reason, counted=counted)
            case Phase.PUBLISHING, ev.PublishFailed(_, reason, False):
                return self._abort(current, reason, counted=True)
            case Phase.PUBLISHING, ev.PublishFailed(_, reason, True):
                return self._restart(reason, counted=True)
            case Phase.COMMITTING, ev.CommitFailed(_, reason):
                return self._restart(reason, counted=True)
            case Phase.COMMITTING, ev.Committed():
                return self._complete(current)
            case _:
                return []

    @property
    def is_suspended(self) -> bool:
        """Whether a stop without drain has its savepoint: later work will be repeated."""
        return self._stop is not None and self._stop.phase is StopPhase.SAVED and not self._stop.drains

    @property
    def must_go_on(self) -> bool:
        """Whether no checkpoint can be taken until more of the tasks have ended."""
        return self._tasks.partial_union() is not None

    # What begins ----------------------------------------------------------------------------------

    def _next_action(self, *, due: bool = False, at_once: bool = True) -> list[CoordinatorCommand]:
        """Begin what is next, or end the job. ``at_once`` False: only what is due."""
        tasks = self._tasks
        if self._in_flight is not None:
            return []
        if tasks.all_ended:
            return self._end_job()
        if tasks.all_released or (self._stop is not None and self._stop.phase is StopPhase.SAVED):
            return []
        if self._stop is not None:
            return self._continue_stop(self._stop)
        if self._soon_after is not None and not tasks.some_are_leaving and not self.must_go_on:
            return self._begin_checkpoint()
        if due or self._savepoints or (at_once and (tasks.final or tasks.turning_heads)):
            return self._begin_checkpoint()
        return []

    def _begin_checkpoint(self) -> list[CoordinatorCommand]:
        turned, union = self._tasks.turning_heads, self._tasks.partial_union()
        if union is None:
            return self._begin(BarrierKind.CHECKPOINT, turned=turned)
        reason = _partial_union(union)
        failed = _failed(self._savepoints, reason, refused=True)
        self._savepoints = []
        refused = self._count_refusal(reason)
        return [*failed, *refused, *self._begin(BarrierKind.ROUND, turned=turned)] if turned else [*failed, *refused]

    def _continue_stop(self, stop: StopProgress) -> list[CoordinatorCommand]:
        """Return the next step of a stop that has not saved yet."""
        tasks = self._tasks
        if not stop.drains:
            union = tasks.partial_union()
            return self._fail_stop(_partial_union(union)) if union is not None else self._begin_savepoint(stop)
        commands: list[CoordinatorCommand] = []
        if stop.phase is StopPhase.ASKED:
            stop.phase = StopPhase.DRAINING
            if sources := frozenset(tasks.working(tasks.sources)):
                commands.append(ev.EndSources(sources))
        if tasks.final:
            return commands + self._begin_savepoint(stop)
        if turned := tasks.turning_heads:
            return commands + self._begin(BarrierKind.ROUND, turned=turned)
        return commands

    def _begin_savepoint(self, stop: StopProgress) -> list[CoordinatorCommand]:
        stop.phase = StopPhase.SAVING
        return self._begin(stop.purpose, stop=stop.of)

    def _begin(
        self, purpose: BarrierKind, *, stop: ev.StopOf | None = None, turned: tuple[str, ...] = ()
    ) -> list[CoordinatorCommand]:
        self._number += 1
        tasks = self._tasks
        may_overtake = self._job.unaligned and purpose is BarrierKind.CHECKPOINT and not tasks.draining_heads
        barrier = ev.Barrier(self._number, purpose, unaligned=may_overtake and not self._begins_aligned)
        savepoints: tuple[str, ...] = ()
        if purpose is not BarrierKind.ROUND:
            savepoints, self._savepoints = tuple(self._savepoints), []
        self._in_flight = BarrierInFlight(
            barrier,
            tasks.plan(),
            stop=stop,
            turned=turned,
            closed=tasks.closed_loops,
            may_overtake=may_overtake,
            savepoints=savepoints,
        )
        return [ev.Begin(barrier, self._in_flight.plan, stop)]

    # How it comes to its end ----------------------------------------------------------------------

    def _acknowledge(self, current: BarrierInFlight, event: ev.Acknowledged) -> list[CoordinatorCommand]:
        self._moved |= event.moved
        if not current.acknowledge(event.task, event.acknowledgement) or not current.is_whole:
            return []
        if current.purpose is BarrierKind.ROUND:
            return self._complete(current)
        union = current.partial_union(self._tasks.union, self._tasks.parallelism)
        if union is not None:
            self._tasks.end_logic(current.finishing)
            return self._abort(current, _partial_union(union), counted=False, again=True)
        current.phase = Phase.PUBLISHING
        wanted = current.stop or current.savepoints or current.finishing or current.turned
        moved = self._moved or bool(wanted) or self._soon_after is not None
        return [ev.Publish(current.number, frozenset(current.finishing), moved)]

    def _forgo(self, current: BarrierInFlight) -> list[CoordinatorCommand]:
        """Give up a checkpoint of a job in which nothing has moved since the newest one."""
        self._in_flight = None
        tasks = frozenset(task for task in current.plan.wait if task not in self._tasks.ended)
        reason = "nothing has changed since the newest checkpoint"
        return [ev.Abort(current.number, tasks, reason, counted=False), *self._next_action(at_once=False)]

    def _commit(self, current: BarrierInFlight) -> list[CoordinatorCommand]:
        self._failures = self._refusals = 0
        self._moved = False
        self._warn_at = REFUSALS_UNTIL_WARNING
        if current.stop is not None and self._stop is not None:
            self._stop.phase = StopPhase.SAVED
        current.phase = Phase.COMMITTING
        return [ev.Commit(current.number)]

    def _complete(self, current: BarrierInFlight) -> list[CoordinatorCommand]:
        self._in_flight = None
        ending = self._tasks.ending_heads
        steps = {task: step for task, step in current.loop_steps().items() if task.vertex not in ending}
        notified = {task: steps.get(task) for task in current.plan.wait if task not in self._tasks.ended}
        if current.purpose is BarrierKind.ROUND:
            notified = {task: step for task, step in notified.items() if step is not None}
        else:
            self._tasks.release(current.finishing)
        commands: list[CoordinatorCommand] = [ev.Notify(current.number, notified)]
        if current.savepoints:
            commands.append(ev.SavepointReady(current.savepoints))
        ending.update(task.vertex for task in steps if steps[task] is ev.LoopStep.END)
        self._rounds.update(current.turned)
        for head in self._tasks.draining_heads:
            if self._rounds[head] >= self._loop_rounds_max:
                reason = (
                    f"the loop of {head!r} ran {self._loop_rounds_max} rounds after its inputs ended, and "
                    "still has records in it. Make it end, or raise the limit of rounds."
                )
                return commands + self._restart(reason, counted=True)
        if self._soon_after is not None and current.purpose is BarrierKind.CHECKPOINT:
            is_last = current.number > self._soon_after and not self._tasks.all_released
            return commands + (self._interrupt() if is_last else self._next_action())
        return commands + self._next_action()

    def _end_task(self, task: ev.TaskId) -> list[CoordinatorCommand]:
        if self._in_flight is not None and self._in_flight.waits_for(task):
            reason = f"{task} ended before it had acknowledged"
            return self._abort(self._in_flight, reason, counted=False, again=True)
        return self._next_action()

    def _abort(
        self, current: BarrierInFlight, reason: str, *, counted: bool, again: bool = False
    ) -> list[CoordinatorCommand]:
        """Abort the barrier in flight. ``again``: retry at once; it cannot recur for ever."""
        stop, saving = self._stop, current.stop is not None
        if again:
            self._savepoints[:0] = current.savepoints
        failing = () if again else current.savepoints
        if stop is not None and stop.no_way_back and not (again and current.purpose is BarrierKind.ROUND):
            return self._restart(reason, counted=False, nothing_published=True, failing=failing)
        counted = counted and not saving
        self._failures += counted
        self._moved = True  # Tasks do not say again what they have acknowledged for this barrier.
        if self._failures > self._tolerable_failures:
            return self._restart(reason, counted=True, nothing_published=True, failing=failing)
        self._in_flight = None
        tasks = frozenset(task for task in current.plan.wait if task not in self._tasks.ended)
        commands: list[CoordinatorCommand] = [
            ev.Abort(current.number, tasks, reason, counted),
            *_failed(failing, reason, goes_on=True),
        ]
        if saving:
            return commands + (self._next_action() if again else self._fail_stop(reason))
        if not counted:
            commands += self._count_refusal(reason)
        return commands + self._next_action(at_once=again)

    def _count_refusal(self, reason: str) -> list[CoordinatorCommand]:
        """Count a refusal. Return a warning if there have been many."""
        self._refusals += 1
        if self._refusals < self._warn_at:
            return []
        self._warn_at *= 2
        return [ev.Warn(f"{self._refusals} checkpoints in a row could not be taken, the last because {reason}")]

    # How the run comes to its end -----------------------------------------------------------------

    def _request_savepoints(self, requests: Iterable[str]) -> list[CoordinatorCommand]:
        known = {*self._savepoints, *(self._in_flight.savepoints if self._in_flight is not None else ())}
        new = [request for request in requests if request not in known]
        self._savepoints += new
        return self._next_action() if new else []

    def _request_soon_stop(self, *, is_current: bool) -> list[CoordinatorCommand]:
        if self._soon_after is not None:
            return []
        self._soon_after = self._number
        ends = self._in_flight is not None or self._stop is not None or self._tasks.all_released
        return self._interrupt() if is_current and not ends else self._next_action()

    def _interrupt(self) -> list[CoordinatorCommand]:
        """End the run at its newest checkpoint; a stop requested meanwhile fails."""
        self._over = True
        reason = "the program was asked to end, and the job goes on at its next start"
        stop = [] if self._stop is None else [ev.StopFailed(self._stop.of.request, reason, goes_on=False)]
        return [*stop, ev.JobInterrupted()]

    def _request_stop(self, request: ev.StopRequested) -> list[CoordinatorCommand]:
        if self._stop is None:
            self._stop = StopProgress(ev.StopOf(request.mode, request.request))
            return self._next_action()
        earlier = self._stop.of.request
        if request.request == earlier:
            return []
        return [ev.StopFailed(request.request, f"the job stops already, as request {earlier!r} asks", goes_on=True)]

    def _fail_stop(self, reason: str) -> list[CoordinatorCommand]:
        """Fail the stop; the job goes on as if it had not been requested."""
        if self._stop is None:
            return []
        request, self._stop = self._stop.of.request, None
        return [ev.StopFailed(request, reason, goes_on=True), *self._next_action()]

    def _restart(
        self, reason: str, *, counted: bool, nothing_published: bool = False, failing: Iterable[str] = ()
    ) -> list[CoordinatorCommand]:
        """Give up the run, and also the stop, unless its savepoint exists or may exist.

        ``failing``: requests for a savepoint whose checkpoint has failed. The next run handles the
        others.
        """
        self._over = True
        failed = _failed(failing, reason, goes_on=False)
        stop, current = self._stop, self._in_flight
        if stop is None:
            return [*failed, ev.Restart(reason, counted)]
        saving = current is not None and current.stop is not None and current.phase is Phase.PUBLISHING
        may_exist = saving and not nothing_published
        restart = ev.Restart(reason, counted and not stop.no_way_back)
        if stop.phase is StopPhase.SAVED or may_exist:
            return [*failed, restart]
        return [*failed, ev.StopFailed(stop.of.request, reason, goes_on=False), restart]

    def _end_job(self) -> list[CoordinatorCommand]:
        self._over = True
        stop = self._stop
        if stop is None:
            return [ev.JobEnded(None)]
        if stop.phase is StopPhase.SAVED:
            return [ev.JobEnded(stop.of)]
        return [ev.StopFailed(stop.of.request, "the job had ended by itself before", goes_on=False), ev.JobEnded(None)]


def _failed(
    requests: Iterable[str], reason: str, *, refused: bool = False, goes_on: bool = True
) -> list[CoordinatorCommand]:
    return [ev.SavepointFailed(request, reason, refused, goes_on) for request in requests]


def _partial_union(operator: str) -> str:
    return (
        f"some subtasks of operator {operator!r}, which keeps union state, have ended and others have not: what the "
        "ended ones held would be missing"
    )
