"""The coordinator: its runs as scripts, and that an event means something in one phase only.

Arbitrary events in any order, most of them late, doubled or impossible: what is never commanded.
The coordinator and the cores of real tasks together, over channels, in any order: every job ends,
and no record is lost.

The checker knows nothing of the coordinator's insides.

Records are numbers: a task that gets n > 0 sends n - 1 on over every edge, so that loops turn for a
while. Some tasks have a coordinator and send it the records, and its answers are what they send on.
No state, no user code: what is tried is that the two halves agree on who waits for whom.
"""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from stateformat.backends.dataflow import events as ev
from stateformat.backends.dataflow.compile import loops_of
from stateformat.backends.dataflow.coordinator import Coordinator
from stateformat.backends.dataflow.task import Task
from stateformat.backends.dataflow.task_inputs import InputEdge
from stateformat.backends.dataflow.task_states import TaskState
from stateformat.graph import Edge, Partitioner
from stateformat.model import StopMode
from tests.dataflow.coordinator_scripts import make_coordinator, play, tell
from tests.dataflow.task_scripts import Script, scripts
from tests.worlds.dataflow import TinyJob, TinyVertex, tiny_job

RUNS = scripts(Path(__file__).with_name("runs_of_coordinators.txt"))
TWO = "a:1 b:2; a hash b | tolerable_failures=1"


def test_names_of_scripts_are_unique() -> None:
    assert len({script.name for script in RUNS}) == len(RUNS) > 150


@pytest.mark.parametrize("script", RUNS, ids=lambda script: script.name)
def test_a_run(script: Script) -> None:
    assert play(script) == script.lines


def test_refusals_in_a_row_warn_at_the_third_and_each_time_they_have_doubled() -> None:
    coordinator = make_coordinator(TWO)
    told = {number: tell(coordinator, f"due declined{number}:b1:it_opens_its_states") for number in range(1, 25)}
    warned = [number for number in told if " warn:" in told[number]]
    assert warned == [3, 6, 12, 24]
    assert told[3].endswith(
        " warn:3_checkpoints_in_a_row_could_not_be_taken,_the_last_because_b[1]_cannot_take_part:_it_opens_its_states"
    )


COLLECTING = ["ack1:a0", "declined1:a0:no", "snapshot-failed1:b0:no", "snapshot-failed1::no", "timed-out1"]
PUBLISHING = [
    *("published1", "refused1-counted:no", "publish-failed1:no", "publish-failed1-unknown:no"),
]
COMMITTING = ["committed1", "commit-failed1:no"]
ALL = [*COLLECTING, *PUBLISHING, *COMMITTING]
PHASES = {
    "idle": ("", []),
    "collecting": ("due ack1:b1", COLLECTING),
    "publishing": ("due ack1:b1,a0,b0", PUBLISHING),
    "committing": ("due ack1:b1,a0,b0 published1", COMMITTING),
    "done": ("due ack1:b1,a0,b0 published1 committed1", []),
    "aborted": ("due ack1:b1 declined1:b0:no", []),
}


def brought_to(phase: str) -> Coordinator:
    coordinator = make_coordinator(TWO)
    tell(coordinator, PHASES[phase][0])
    return coordinator


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("event", ALL)
def test_an_event_means_something_in_one_phase_only(phase: str, event: str) -> None:
    untouched, coordinator = brought_to(phase), brought_to(phase)
    commands = tell(coordinator, event)
    if event in PHASES[phase][1]:
        assert commands or event == "ack1:a0"
        return
    assert commands == ""
    # Nothing has changed: what comes next does what it would have done.
    for following in (*ALL, "due", "published2"):
        assert tell(coordinator, following) == tell(untouched, following)


@pytest.mark.parametrize("event", ALL)
@pytest.mark.parametrize("number", ["0", "2"])
def test_an_event_of_another_number_means_nothing(event: str, number: str) -> None:
    for phase in ("collecting", "publishing", "committing"):
        assert tell(brought_to(phase), event.replace("1", number, 1)) == ""


@pytest.mark.parametrize(("last", "kind"), [("failed::x", "restart"), ("ended:a0,b0,b1", "job-ended")])
def test_after_its_end_a_run_commands_nothing(last: str, kind: str) -> None:
    coordinator = make_coordinator(TWO)
    assert tell(coordinator, last).startswith(kind)
    for event in (
        *ALL,
        "due",
        "drain:r",
        "logic-ended:a0",
        "inputs-ended:a0",
        "ended:b0",
        "failed::y",
        "message-sent:a",
    ):
        assert tell(coordinator, event) == ""


def test_tasks_that_the_job_does_not_have_mean_nothing() -> None:
    coordinator = make_coordinator(TWO)
    for name in ("z0", "b2", "b-1"):
        assert tell(coordinator, f"logic-ended:{name} inputs-ended:{name} ended:{name}") == ""
    assert tell(coordinator, "logic-ended:a0,b0") == ""
    assert tell(coordinator, "logic-ended:b1") == "begin|1[trigger a0]"


JOBS = {
    "row": tiny_job({"a": 2, "b": 2}, "a hash b"),
    "pointwise, union": tiny_job({"a": 2, "b": 2, "c": 1}, "a forward b", "b hash c", union=("b",)),
    "loop": tiny_job({"a": 1, "h": 2, "t": 1}, "a hash h", "h hash t", "t feedback h", unaligned=True),
    "loops, union": tiny_job(
        {"a": 1, "b": 1, "h": 1, "g": 1, "u": 2},
        "a hash h",
        "h hash g",
        "g feedback g",
        "g feedback h",
        "b rescale u",
        "g rescale u",
        union=("u",),
    ),
}


class Checker:
    """What must hold of events and commands, from outside."""

    def __init__(self, job: TinyJob) -> None:
        self.job = job
        self.in_flight: ev.Begin | None = None
        self.acknowledged: dict[ev.TaskId, bool] = {}
        self.stage = "idle"
        self.number = 0
        self.ended: set[ev.TaskId] = set()
        self.over = False
        self.asked: list[str] = []
        self.answered: list[str] = []
        self.waiting: list[str] = []
        """Savepoints without a checkpoint, and then those of the one in flight."""
        self.saving: list[str] = []

    def see(self, event: ev.CoordinatorEvent, commands: list[ev.CoordinatorCommand]) -> None:
        assert not (self.over and commands)
        if isinstance(event, ev.TaskEnded):
            self.ended.add(event.task)
        if isinstance(event, ev.StopRequested):
            self.asked.append(event.request)
        if isinstance(event, ev.SavepointRequested):
            self.waiting += [one for one in event.requests if one not in self.waiting + self.saving]
        if isinstance(event, ev.Acknowledged) and self.in_flight is not None:
            number = self.in_flight.barrier.number
            waits = self.stage == "collecting" and event.task in self.in_flight.plan.wait
            if waits and event.acknowledgement.number == number:
                self.acknowledged.setdefault(event.task, event.acknowledgement.finishing)
        for command in commands:
            assert not self.over
            self.command(event, command)
        if self.stage == "collecting" and self.in_flight is not None:
            assert len(self.acknowledged) < len(self.in_flight.plan.wait) or self.over

    def command(self, event: ev.CoordinatorEvent, command: ev.CoordinatorCommand) -> None:
        match command:
            case ev.Begin():
                self.begin(command)
            case ev.Publish(number, finishing):
                self.is_in_flight(number, "collecting", "publishing")
                assert self.in_flight is not None
                assert self.in_flight.barrier.purpose is not ev.BarrierKind.ROUND
                assert set(self.acknowledged) == set(self.in_flight.plan.wait)
                assert finishing == {task for task, done in self.acknowledged.items() if done}
            case ev.Commit(number):
                assert event == ev.Published(number)
                self.is_in_flight(number, "publishing", "committing")
            case ev.Notify(number, told):
                assert self.in_flight is not None
                if self.in_flight.barrier.purpose is ev.BarrierKind.ROUND:
                    assert set(self.acknowledged) == set(self.in_flight.plan.wait)
                    assert None not in told.values()
                    self.is_in_flight(number, "collecting", "idle")
                else:
                    assert event == ev.Committed(number)
                    self.is_in_flight(number, "committing", "idle")
                    assert set(told) == set(self.in_flight.plan.wait) - self.ended
                assert not set(told) & self.ended
            case ev.Abort(number, told, _, _):
                assert self.stage in ("collecting", "publishing")
                self.is_in_flight(number, self.stage, "idle")
                assert self.in_flight is not None
                assert told == set(self.in_flight.plan.wait) - self.ended
            case ev.EndSources(told):
                assert told
                assert not told & self.ended
            case ev.StopFailed(request, reason, _):
                assert request in self.asked
                assert reason
                self.answered.append(request)
            case ev.SavepointReady(requests):
                assert event == ev.Committed(self.number)
                assert list(requests) == self.saving
                assert requests
                self.saving = []
            case ev.SavepointFailed(request, reason, refused, _):
                assert reason
                assert refused or request in self.saving
                (self.waiting if request in self.waiting else self.saving).remove(request)
            case ev.JobEnded(stop):
                assert self.ended == set(self.job.tasks)
                self.answered += [stop.request] if stop else []
                self.over = True
            case ev.Restart(reason, _):
                assert reason
                self.over = True
            case ev.Warn(sentence):
                assert sentence

    def begin(self, command: ev.Begin) -> None:
        assert self.stage == "idle"
        assert command.barrier.number > self.number
        assert set(command.plan.wait) == set(self.job.tasks) - self.ended
        assert set(command.plan.trigger) <= set(command.plan.wait)
        assert command.plan.trigger
        assert (command.stop is not None) == (
            command.barrier.purpose in (ev.BarrierKind.STOP_DRAIN, ev.BarrierKind.STOP_NO_DRAIN)
        )
        self.number, self.in_flight, self.stage, self.acknowledged = command.barrier.number, command, "collecting", {}
        if command.barrier.purpose is not ev.BarrierKind.ROUND:
            # What a task made void by its end is tried again, first.
            self.saving, self.waiting = self.saving + self.waiting, []

    def is_in_flight(self, number: int, stage: str, then: str) -> None:
        assert self.in_flight is not None
        assert (self.in_flight.barrier.number, self.stage) == (number, stage)
        self.stage = then


def random_event(rng: random.Random, job: TinyJob, checker: Checker) -> ev.CoordinatorEvent:
    """Half of the time what helps the checkpoint in flight on, else anything."""
    number = max(0, checker.number + rng.choice([0, 0, 0, 0, 0, -1, 1]))
    task = rng.choice(job.tasks)
    bits = [rng.random() < 0.5 for _ in range(4)]
    if rng.random() < 0.5:
        helpful: dict[str, ev.CoordinatorEvent] = {
            "idle": ev.CheckpointDue(),
            "collecting": ev.Acknowledged(task, ev.Acknowledge(checker.number, *bits)),
            "publishing": ev.Published(checker.number),
            "committing": ev.Committed(checker.number),
        }
        return helpful[checker.stage]
    events: list[ev.CoordinatorEvent] = [
        ev.CheckpointDue(),
        ev.StopRequested(rng.choice(list(StopMode)), rng.choice("xyz")),
        ev.SavepointRequested(tuple(rng.sample("uvw", rng.randint(1, 2)))),
        ev.Acknowledged(task, ev.Acknowledge(number, *bits)),
        ev.Declined(task, number, "no"),
        ev.LogicEnded(task),
        ev.LogicEnded(task),
        ev.InputsEnded(task),
        ev.TaskEnded(task),
        ev.SnapshotFailed(rng.choice([task, None]), number, "no"),
        ev.TimedOut(number),
        ev.Published(number),
        ev.PublishRefused(number, "no", counted=bits[0]),
        ev.PublishFailed(number, "no", unknown=bits[0] and bits[1]),
        ev.Committed(number),
    ]
    rare: list[ev.CoordinatorEvent] = [ev.TaskFailed(task, "no"), ev.CommitFailed(number, "no")]
    return rng.choice(rare if rng.random() < 0.01 else events)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(JOBS)), st.integers(0, 2**32), st.integers(0, 5))
def test_in_any_order_of_any_events_nothing_is_commanded_that_must_not_be(name: str, seed: int, tolerable: int) -> None:
    job, rng = JOBS[name], random.Random(seed)
    coordinator, checker = Coordinator(job, tolerable_failures=tolerable), Checker(job)
    coordinator.start()
    for _ in range(120):
        event = random_event(rng, job, checker)
        checker.see(event, coordinator.handle(event))
    assert len(set(checker.answered)) <= len(set(checker.asked))


SHAPES: dict[str, tuple[dict[str, int], tuple[str, ...], tuple[str, ...]]] = {
    "a row": ({"a": 2, "b": 3, "c": 1}, ("a hash b", "b rebalance c"), ()),
    "pointwise with union state": ({"a": 2, "b": 2, "c": 2}, ("a forward b", "b forward c"), ("b",)),
    "two inputs": ({"a": 1, "s": 2, "b": 2, "z": 1}, ("a broadcast b", "s hash b", "b hash z"), ()),
    "a loop": ({"a": 2, "h": 2, "t": 2, "z": 1}, ("a hash h", "h hash t", "t feedback h", "t hash z"), ()),
    "a loop of one": ({"a": 1, "h": 2}, ("a hash h", "h feedback h"), ()),
    "an input behind the head": (
        {"a": 1, "s": 1, "h": 1, "t": 2},
        ("a hash h", "s hash t", "h hash t", "t feedback h"),
        (),
    ),
    "loops in a loop": (
        {"a": 1, "h": 2, "g": 1, "z": 1},
        ("a hash h", "h hash g", "g feedback g", "g feedback h", "g hash z"),
        (),
    ),
    "loops in a row": ({"a": 1, "h": 1, "g": 2}, ("a hash h", "h feedback h", "h hash g", "g feedback g"), ()),
    "union state behind a loop": (
        {"b": 1, "h": 1, "u": 2},
        ("b hash h", "h feedback h", "h rescale u"),
        ("u",),
    ),
    "union state behind loops in a loop": (
        {"a": 1, "b": 1, "h": 1, "g": 1, "u": 2},
        ("a hash h", "h hash g", "g feedback g", "g feedback h", "b rescale u", "g rescale u"),
        ("u",),
    ),
}

SEEDS = int(os.environ.get("COORDINATOR_SEEDS", "4"))


class World:
    """Tasks, channels, mail, and the coordinator. One event of a random order at a time."""

    def __init__(self, job: TinyJob, rng: random.Random) -> None:
        self.job, self.rng = job, rng
        inner = [vertex.id for vertex in job.vertices if vertex.inputs]
        self.asking = {vertex for vertex in inner if rng.random() < 0.4}
        self.vertices = {vertex.id: vertex for vertex in job.vertices}
        self.coordinator = Coordinator(job)
        self.checker = Checker(job)
        self.edges = {edge.id: edge for vertex in job.vertices for edge in (*vertex.inputs, *vertex.feedback)}
        self.channels: dict[ev.Channel, deque[ev.Element]] = {
            ev.Channel(edge.id, sender, receiver): deque()
            for edge in self.edges.values()
            for sender, receiver in self.pairs(edge)
        }
        inside = {vertex: loop for loop in loops_of(job.vertices) for vertex in loop}
        self.tasks = {
            task: Task(
                task,
                list(self.inputs(task, inside)),
                [c for c in self.channels if self.sender(c) == task],
                asks=task.vertex in self.asking,
            )
            for task in job.tasks
        }
        self.mail: dict[ev.TaskId, deque[ev.TaskEvent | int]] = {task: deque() for task in job.tasks}
        self.to_coordinator: deque[ev.CoordinatorEvent | tuple[ev.TaskId, int | None]] = deque()
        self.left_to_read = {task: rng.randrange(4) for task in job.tasks if not self.vertices[task.vertex].inputs}
        self.unconfirmed = set(self.channels)
        self.told: list[ev.CoordinatorCommand] = []
        self.held: list[tuple[ev.TaskId, Any]] = []
        """What coordinators sent to tasks that a stop without drain holds."""
        self.sent: Counter[str] = Counter()
        self.processed: Counter[str] = Counter()
        self.obey(self.coordinator.start())
        for task in job.tasks:
            self.carry_out(task, self.tasks[task].start())

    def pairs(self, edge: Edge) -> Iterator[tuple[int, int]]:
        senders, receivers = self.vertices[edge.source].parallelism, self.vertices[edge.target].parallelism
        for sender in range(senders):
            for receiver in range(receivers):
                if edge.partitioner.all_to_all or receiver * senders // receivers == sender:
                    yield sender, receiver

    def inputs(self, task: ev.TaskId, loops: dict[str, frozenset[str]]) -> Iterator[InputEdge]:
        vertex: TinyVertex = self.vertices[task.vertex]
        for number, edge in enumerate((*vertex.inputs, *vertex.feedback)):
            channels = tuple(c for c in self.channels if c.edge == edge.id and c.receiver == task.subtask)
            may = self.job.unaligned and not edge.feedback
            overtakable = may and edge.partitioner in (Partitioner.HASH, Partitioner.REBALANCE)
            inside = bool(vertex.feedback) and not edge.feedback and edge.source in loops[vertex.id]
            yield InputEdge(edge.id, number, channels, edge.feedback, overtakable, inside)

    def sender(self, channel: ev.Channel) -> ev.TaskId:
        return ev.TaskId(self.edges[channel.edge].source, channel.sender)

    def receiver(self, channel: ev.Channel) -> ev.TaskId:
        return ev.TaskId(self.edges[channel.edge].target, channel.receiver)

    def is_gone(self, task: ev.TaskId) -> bool:
        return self.tasks[task].state.value == "ended"

    # One step -------------------------------------------------------------------------------------

    def choices(self) -> list[tuple[str, Any]]:
        """What can happen now."""
        found: list[tuple[str, Any]] = [("mail", task) for task, mail in self.mail.items() if mail]
        found += [
            ("channel", channel)
            for channel, queue in self.channels.items()
            if queue
            and not self.mail[self.receiver(channel)]
            and not self.tasks[self.receiver(channel)].is_blocked(channel)
        ]
        found += [("source", task) for task in self.left_to_read if self.tasks[task].may_read and not self.mail[task]]
        return [*found, *([("coordinator", None)] if self.to_coordinator else [])]

    def step(self) -> bool:
        """One event; False when nothing can happen any more."""
        choices = self.choices()
        if not choices:
            return False
        what, which = self.rng.choice(choices)
        if what == "mail":
            mail = self.mail[which].popleft()
            if isinstance(mail, int):
                self.answer(which, mail)
            elif isinstance(mail, ev.Answered) and self.tasks[which].state is TaskState.STOPPED_AT_BARRIER:
                self.held.append((which, mail))
            else:
                self.deliver(which, mail)
            if isinstance(mail, ev.Aborted):
                for task, late in self.held:
                    self.mail[task].append(late)
                self.held.clear()
        elif what == "channel":
            element = self.channels[which].popleft()
            if not self.is_gone(self.receiver(which)):
                self.deliver(self.receiver(which), ev.Received(which, element))
        elif what == "source":
            if which.vertex != "s" or self.rng.random() < 0.02:  # s is the slow one.
                self.read(which)
        else:
            self.coordinate(self.to_coordinator.popleft())
        return True

    def coordinate(self, item: ev.CoordinatorEvent | tuple[ev.TaskId, int | None]) -> None:
        if type(item) is not tuple:
            self.handle(item)  # type: ignore[arg-type]
            return
        task, value = item
        if value is None:
            self.mail[task].append(ev.Answered())
        else:
            self.handle(ev.MessageSent(task.vertex))
            self.mail[task].append(value)

    def answer(self, task: ev.TaskId, value: int) -> None:
        """A task receives what its coordinator has answered."""
        if self.tasks[task].state is TaskState.STOPPED_AT_BARRIER:
            self.held.append((task, value))
        else:
            assert self.tasks[task].state in (TaskState.RUNNING, TaskState.DRAINING, TaskState.ASKING), (
                "an answer comes too late"
            )
            self.send(task, value)

    def read(self, task: ev.TaskId) -> None:
        if self.left_to_read[task] == 0:
            self.deliver(task, ev.SourceEnded())
            return
        self.left_to_read[task] -= 1
        self.send(task, self.rng.randrange(6))

    def deliver(self, task: ev.TaskId, event: ev.TaskEvent) -> None:
        if not self.is_gone(task):
            self.carry_out(task, self.tasks[task].handle(event))

    def send(self, task: ev.TaskId, value: Any) -> None:
        """A record over every edge, to one receiver, or to all where it is broadcast."""
        for edge in self.edges.values():
            own = [c for c in self.channels if c.edge == edge.id and self.sender(c) == task]
            for channel in own if edge.partitioner is Partitioner.BROADCAST else own and [self.rng.choice(own)]:
                self.sent[edge.id] += 1
                self.channels[channel].append(ev.Records(value))

    # What tasks and coordinator want --------------------------------------------------------------

    def carry_out(self, task: ev.TaskId, commands: list[ev.TaskCommand]) -> None:
        for command in commands:
            match command:
                case ev.Process(channel, value):
                    self.processed[channel.edge] += 1
                    if value > 0 and task.vertex in self.asking:  # type: ignore[operator]
                        self.tasks[task].message_sent()
                        self.to_coordinator.append((task, value - 1))
                    elif value > 0:  # type: ignore[operator]
                        self.send(task, value - 1)
                case ev.AskCoordinator():
                    self.to_coordinator.append((task, None))
                case ev.AdvanceWatermark(timestamp):
                    if timestamp == ev.MAX_WATERMARK:  # A timer fires.
                        self.send(task, 1)
                case ev.Emit(element):
                    self.emit(task, element)
                case ev.ConfirmProcessed(channel):
                    self.confirm(channel)
                case ev.Acknowledge():
                    self.to_coordinator.append(ev.Acknowledged(task, command))
                case ev.Decline(number, reason):
                    self.to_coordinator.append(ev.Declined(task, number, reason))
                case ev.ReportLogicEnded():
                    self.to_coordinator.append(ev.LogicEnded(task))
                case ev.ReportInputsEnded():
                    self.to_coordinator.append(ev.InputsEnded(task))
                case ev.Ended():
                    self.to_coordinator.append(ev.TaskEnded(task))
                    for channel in [c for c in self.unconfirmed if self.receiver(c) == task]:
                        self.confirm(channel)

    def emit(self, task: ev.TaskId, element: ev.Element) -> None:
        for channel, queue in self.channels.items():
            if self.sender(channel) == task and not self.is_gone(self.receiver(channel)):
                queue.append(element)
                edge = self.edges[channel.edge]
                may = not edge.feedback and edge.partitioner in (Partitioner.HASH, Partitioner.REBALANCE)
                if isinstance(element, ev.Barrier) and element.unaligned and may:
                    self.mail[self.receiver(channel)].append(ev.Announced(channel, element))

    def confirm(self, channel: ev.Channel) -> None:
        if channel in self.unconfirmed:
            self.unconfirmed.discard(channel)
            self.mail[self.sender(channel)].append(ev.DataProcessed(channel))

    def handle(self, event: ev.CoordinatorEvent) -> None:
        commands = self.coordinator.handle(event)
        self.checker.see(event, commands)
        self.obey(commands)

    def obey(self, commands: list[ev.CoordinatorCommand]) -> None:
        for command in commands:
            self.told.append(command)
            match command:
                case ev.Begin(barrier, plan, _):
                    for task in plan.trigger:
                        self.mail[task].append(ev.Triggered(barrier))
                case ev.Publish(number, _):
                    self.to_coordinator.append(ev.Published(number))
                case ev.Commit(number):
                    self.to_coordinator.append(ev.Committed(number))
                case ev.Notify(number, tasks):
                    for task, loop in tasks.items():
                        self.mail[task].append(ev.Completed(number, loop))
                case ev.Abort(number, tasks, _, _):
                    for task in tasks:
                        self.mail[task].append(ev.Aborted(number))
                case ev.EndSources(tasks):
                    for task in tasks:
                        self.mail[task].append(ev.EndSource())
                case ev.Restart(reason, _):
                    pytest.fail(reason)


@pytest.mark.parametrize("unaligned", [False, True], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("mode", [None, *StopMode])
@pytest.mark.parametrize("shape", SHAPES)
def test_coordinator_and_tasks_bring_every_job_to_its_end(shape: str, mode: StopMode | None, unaligned: bool) -> None:
    parallelism, edges, union = SHAPES[shape]
    for seed in range(SEEDS):
        rng = random.Random(seed)
        world = World(tiny_job(parallelism, *edges, union=union, unaligned=unaligned), rng)
        asked_at, due = rng.randrange(150), 0.05 * (seed % 2)
        for number in range(20_000):
            if number == asked_at and mode is not None:
                world.handle(ev.StopRequested(mode, "r"))
            if rng.random() < due:
                world.handle(ev.CheckpointDue())
            if not world.step():
                break
        last = world.told[-1]
        assert isinstance(last, ev.JobEnded), (
            seed,
            {str(t): world.tasks[t].state.value for t in world.tasks},
            last,
        )
        assert all(world.is_gone(task) for task in world.tasks)
        assert world.checker.over
        assert world.checker.answered == world.checker.asked or asked_at > number
        if last.stop is None or last.stop.mode is StopMode.DRAIN:
            assert world.sent == world.processed, seed
