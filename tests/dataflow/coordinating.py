"""A coordinator with short words for its events, for tests that feed it and compare what it commands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stateformat.backends.dataflow import events as ev
from stateformat.backends.dataflow.coordinator import Coordinator
from stateformat.model import StopMode
from tests.tiny_jobs import TinyJob

Commands = list[ev.CoordinatorCommand]


def tasks(*names: str) -> frozenset[ev.TaskId]:
    """``"a0"`` is subtask 0 of a."""
    return frozenset(ev.TaskId(name[0], int(name[1:])) for name in names)


def task(name: str) -> ev.TaskId:
    """One of them."""
    return ev.TaskId(name[0], int(name[1:]))


def notified(number: int, *names: str, **steps: ev.LoopStep) -> ev.Notify:
    """A notification of these tasks, some with a step of their loop."""
    told: dict[ev.TaskId, ev.LoopStep | None] = dict.fromkeys(tasks(*names))
    return ev.Notify(number, told | {task(name): step for name, step in steps.items()})


def kinds(commands: Iterable[object]) -> list[str]:
    """What sort of commands these are."""
    return [type(command).__name__ for command in commands]


def begun(commands: Commands) -> ev.Begin:
    """The one ``Begin`` in these commands."""
    (found,) = [command for command in commands if isinstance(command, ev.Begin)]
    return found


class Run:
    """A coordinator that has started."""

    def __init__(self, job: TinyJob, **options: Any) -> None:
        self.job = job
        self.coordinator = Coordinator(job, **options)
        self.started = self.coordinator.start()

    def __call__(self, *events: ev.CoordinatorEvent) -> Commands:
        """Handle these events, one after the other; all that they lead to."""
        return [command for event in events for command in self.coordinator.handle(event)]

    def due(self) -> Commands:
        """The interval has passed."""
        return self(ev.CheckpointDue())

    def acknowledge(self, number: int, *names: str, finishing: Iterable[str] = (), **said: bool) -> Commands:
        """These tasks acknowledge, those of ``finishing`` so; ``said`` is what heads of loops add."""
        plain = [ev.Acknowledged(task(name), ev.Acknowledge(number, name in finishing, **said)) for name in names]
        rest = [ev.Acknowledged(task(name), ev.Acknowledge(number, True)) for name in finishing if name not in names]
        return self(*plain, *rest)

    def acknowledge_all(self, begin: ev.Begin, finishing: Iterable[str] = (), **said: bool) -> Commands:
        """All that are waited for acknowledge."""
        done = tasks(*finishing)
        return self(
            *(
                ev.Acknowledged(one, ev.Acknowledge(begin.barrier.number, one in done, **said))
                for one in begin.plan.wait
            )
        )

    def complete(self, begin: ev.Begin, finishing: Iterable[str] = (), **said: bool) -> Commands:
        """All that are waited for acknowledge, and it is published and committed: what the last of that leads to."""
        number = begin.barrier.number
        commands = self.acknowledge_all(begin, finishing, **said)
        if begin.barrier.purpose is ev.BarrierKind.ROUND:
            return commands
        assert kinds(commands) == ["Publish"]
        assert kinds(self(ev.Published(number))) == ["Commit"]
        return self(ev.Committed(number))

    def logic_ends(self, *names: str) -> Commands:
        """These tasks have emitted all."""
        return self(*(ev.LogicEnded(task(name)) for name in names))

    def inputs_end(self, *names: str) -> Commands:
        """These heads have nothing left but their loop."""
        return self(*(ev.InputsEnded(task(name)) for name in names))

    def end(self, *names: str) -> Commands:
        """These tasks are gone."""
        return self(*(ev.TaskEnded(task(name)) for name in names))

    def decline(self, number: int, name: str) -> Commands:
        """This task cannot take part."""
        return self(ev.Declined(task(name), number, "it opens its states"))

    def ask(self, mode: StopMode, request: str = "r1") -> Commands:
        """A user asks for a stop."""
        return self(ev.StopRequested(mode, request))
