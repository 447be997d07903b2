"""The coordinator and the cores of real tasks together, over channels, in any order: every job
ends, and no record is lost.

Records are numbers: a task that gets n > 0 sends n - 1 on over every edge, so that loops turn for a
while. Some tasks have a coordinator and send it the records, and its answers are what they send on.
No state, no user code: what is tried is that the two halves agree on who waits for whom.
"""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import pytest

from stateformat.backends.dataflow import events as ev
from stateformat.backends.dataflow.coordinator.coordinator import Coordinator
from stateformat.backends.dataflow.graph import loops_of
from stateformat.backends.dataflow.task.inputs import InputEdge
from stateformat.backends.dataflow.task.states import TaskState
from stateformat.backends.dataflow.task.task import Task
from stateformat.graph import Edge, Partitioner
from stateformat.model import StopMode
from tests.dataflow.test_coordinator_random import Checker
from tests.tiny_jobs import TinyJob, TinyVertex, tiny_job

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
