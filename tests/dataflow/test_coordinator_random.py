"""Arbitrary events in any order, most of them late, doubled or impossible: what is never commanded.

The checker knows nothing of the coordinator's insides.
"""

from __future__ import annotations

import random

from hypothesis import given, settings, strategies as st

from stateformat.backends.dataflow import events as ev
from stateformat.backends.dataflow.coordinator.coordinator import Coordinator
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
