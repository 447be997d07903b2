"""Whatever happens, in whatever order: what a coordinator never commands, and that a job comes to
its end.

Two tries. In the first events are arbitrary, so that most are late, doubled or impossible, and a
checker that knows nothing of the coordinator's insides watches what is commanded. In the second
they come from tasks that behave, simple ones without channels, in any order, and the job has to end
without any checkpoint ever being due.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from stateformat.backends.dataflow import events as ev
from stateformat.backends.dataflow.coordinator import Coordinator
from stateformat.model import StopMode
from tests.tiny_jobs import TinyJob, tiny_job

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

    def see(self, event: ev.CoordinatorEvent, commands: list[ev.CoordinatorCommand]) -> None:
        assert not (self.over and commands)
        if isinstance(event, ev.TaskEnded):
            self.ended.add(event.task)
        if isinstance(event, ev.StopRequested):
            self.asked.append(event.request)
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


class Tasks:
    """Tasks that behave: logic ends in the order of the graph, heads do as they are told, released
    ones end when they like.
    """

    def __init__(self, job: TinyJob, rng: random.Random, *, busy_rounds: int) -> None:
        self.job, self.rng = job, rng
        self.heads = {vertex.id for vertex in job.vertices if vertex.feedback}
        self.logic_ended: set[ev.TaskId] = set()
        self.inputs_ended: set[ev.TaskId] = set()
        self.max_watermark_sent: set[ev.TaskId] = set()
        self.told_to_end: set[ev.TaskId] = set()
        self.finishing: set[ev.TaskId] = set()
        self.released: set[ev.TaskId] = set()
        self.ended: set[ev.TaskId] = set()
        self.snapshots: list[ev.TaskId] = []
        self.begin: ev.Begin | None = None
        self.busy_rounds = busy_rounds
        self.told_everything_ends = False

    def obey(self, commands: list[ev.CoordinatorCommand]) -> list[ev.CoordinatorEvent]:
        """Carry out; the answers of whoever publishes and commits."""
        answers: list[ev.CoordinatorEvent] = []
        for command in commands:
            match command:
                case ev.Begin():
                    self.begin, self.finishing = command, set()
                    self.snapshots = self.rng.sample(list(command.plan.wait), len(command.plan.wait))
                    self.busy_rounds -= 1
                case ev.Publish(number, _):
                    answers.append(ev.Published(number))
                case ev.Commit(number):
                    answers.append(ev.Committed(number))
                case ev.Notify(_, told):
                    assert self.begin is not None
                    if self.begin.barrier.purpose is not ev.BarrierKind.ROUND:
                        self.released |= self.finishing & set(told)
                    if self.begin.barrier.purpose is ev.BarrierKind.STOP_NO_DRAIN:
                        self.released |= set(told)
                    for task, step in told.items():
                        if step is ev.LoopStep.MAX_WATERMARK:
                            self.max_watermark_sent.add(task)
                        elif step is ev.LoopStep.END:
                            self.told_to_end.add(task)
                case ev.Abort():
                    self.snapshots = []
                case _:
                    assert isinstance(command, ev.JobEnded | ev.EndSources | ev.Warn | ev.StopFailed), command
        return answers

    def possible(self) -> list[ev.CoordinatorEvent]:
        """What could happen next."""
        events: list[ev.CoordinatorEvent] = []
        if self.snapshots:
            events.append(self.acknowledgement(self.snapshots[0]))
        by_uid = {vertex.id: vertex for vertex in self.job.vertices}
        for task in set(self.job.tasks) - self.ended:
            vertex = by_uid[task.vertex]
            before = {one for one in self.job.tasks if one.vertex in {edge.source for edge in vertex.inputs}}
            over = before <= self.logic_ended
            if task.vertex in self.heads and over and task not in self.inputs_ended:
                events.append(ev.InputsEnded(task))
            elif over and task not in self.logic_ended and (task.vertex not in self.heads or task in self.told_to_end):
                events.append(ev.LogicEnded(task))
            elif task in self.released:
                events.append(ev.TaskEnded(task))
        return events

    def acknowledgement(self, task: ev.TaskId) -> ev.Acknowledged:
        assert self.begin is not None
        number, finishing = self.begin.barrier.number, task in self.logic_ended
        return ev.Acknowledged(
            task,
            ev.Acknowledge(
                number, finishing, self.busy_rounds <= 0, task in self.inputs_ended, task in self.max_watermark_sent
            ),
        )

    def happen(self, event: ev.CoordinatorEvent) -> None:
        match event:
            case ev.Acknowledged(task, acknowledgement):
                self.snapshots.pop(0)
                if acknowledgement.finishing:
                    self.finishing.add(task)
            case ev.LogicEnded(task):
                self.logic_ended.add(task)
            case ev.InputsEnded(task):
                self.inputs_ended.add(task)
            case ev.TaskEnded(task):
                self.ended.add(task)


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("mode", [None, *StopMode])
def test_a_job_whose_tasks_behave_comes_to_its_end_without_any_checkpoint_being_due(
    name: str, mode: StopMode | None
) -> None:
    job = JOBS[name]
    for seed in range(25):
        rng = random.Random(seed)
        coordinator, checker, tasks = Coordinator(job), Checker(job), Tasks(job, rng, busy_rounds=rng.randrange(6))
        coordinator.start()
        asked_at = rng.randrange(30) if mode else -1
        waiting: list[ev.CoordinatorEvent] = []
        for step in range(2000):
            if step == asked_at and mode is not None:
                event: ev.CoordinatorEvent = ev.StopRequested(mode, "r")
            elif waiting and rng.random() < 0.5:
                event = waiting.pop(0)
            elif possible := tasks.possible():
                event = rng.choice(sorted(possible, key=str))
                tasks.happen(event)
            elif waiting:
                event = waiting.pop(0)
            else:
                break
            commands = coordinator.handle(event)
            checker.see(event, commands)
            waiting += tasks.obey(commands)
        assert checker.over, (name, mode, seed)
        assert checker.ended == set(job.tasks)
        assert checker.answered == checker.asked or asked_at > step
