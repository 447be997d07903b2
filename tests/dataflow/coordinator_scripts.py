"""Runs of a coordinator as scripts: what it is told, and exactly what it commands then.

A script is a head ``# name | job | options`` and lines ``events -> commands``::

    # name | a:1 h:2; a hash h; h feedback h; union h | unaligned tolerable_failures=1 finished=a
    due -> begin|1[trigger a0]
    ack1:a0 ack1!:h0,h1

``!`` is finishing; -busy, -inputs-ended and -max-sent are what heads of loops add. Barriers as in
``task_scripts``. Tokens of events and commands are listed in :data:`EVENTS` and :func:`describe`;
spaces in texts are written ``_``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from stateformat.backends.dataflow import events as ev
from stateformat.backends.dataflow.coordinator import Coordinator
from stateformat.model import StopMode
from tests.dataflow.task_scripts import STEPS, Script, describe as describe_part
from tests.worlds.dataflow import tiny_job


def task(name: str) -> ev.TaskId:
    """``a0`` is subtask 0 of a."""
    return ev.TaskId(name[0], int(name[1:]))


def tasks(*names: str) -> frozenset[ev.TaskId]:
    return frozenset(map(task, names))


def acknowledged(number: str, finishing: str, said: str, name: str) -> ev.Acknowledged:
    told = ev.Acknowledge(int(number), bool(finishing), "-busy" not in said, "-inputs" in said, "-max" in said)
    return ev.Acknowledged(task(name), told)


def _plain(text: str) -> str:
    return text.replace("_", " ")


STOPS = {"drain": StopMode.DRAIN, "stop": StopMode.NO_DRAIN}
EVENTS: list[tuple[str, Callable[..., ev.CoordinatorEvent]]] = [
    (r"due", ev.CheckpointDue),
    (r"(drain|stop):(\w+)", lambda mode, request: ev.StopRequested(STOPS[mode], request)),
    (r"savepoint:(\w+)", lambda request: ev.SavepointRequested((request,))),
    (r"ack(\d+)(!?)([a-z-]*):(\w+)", acknowledged),
    (r"declined(\d+):(\w+?):(.*)", lambda number, name, why: ev.Declined(task(name), int(number), _plain(why))),
    (r"logic-ended:([\w-]+)", lambda name: ev.LogicEnded(task(name))),
    (r"inputs-ended:([\w-]+)", lambda name: ev.InputsEnded(task(name))),
    (r"message-sent:(\w+)", ev.MessageSent),
    (r"ended:([\w-]+)", lambda name: ev.TaskEnded(task(name))),
    (r"failed:(\w*?):(.*)", lambda name, why: ev.TaskFailed(task(name) if name else None, _plain(why))),
    (r"snapshot-failed(\d+):(\w*?):(.*)",
     lambda number, name, why: ev.SnapshotFailed(task(name) if name else None, int(number), _plain(why))),
    (r"timed-out(\d+)", lambda number: ev.TimedOut(int(number))),
    (r"overdue(\d+)", lambda number: ev.Overdue(int(number))),
    (r"published(\d+)", lambda number: ev.Published(int(number))),
    (r"refused(\d+)(-counted|):(.*)",
     lambda number, counted, why: ev.PublishRefused(int(number), _plain(why), bool(counted))),
    (r"publish-failed(\d+)(-unknown|):(.*)",
     lambda number, unknown, why: ev.PublishFailed(int(number), _plain(why), bool(unknown))),
    (r"committed(\d+)", lambda number: ev.Committed(int(number))),
    (r"commit-failed(\d+):(.*)", lambda number, why: ev.CommitFailed(int(number), _plain(why))),
]  # fmt: skip
"""Every event, as it stands in a script."""


def events(word: str) -> list[ev.CoordinatorEvent]:
    """One event, or the same of several tasks: ``ended:a0,a1``."""
    head, mark, names = word.rpartition(":")
    several = [f"{head}:{name}" for name in names.split(",")] if mark and re.fullmatch(r"\w+(,\w+)+", names) else [word]
    found = [(make, match) for one in several for pattern, make in EVENTS if (match := re.fullmatch(pattern, one))]
    assert len(found) == len(several), f"no event is written {word!r}"
    return [make(*match.groups()) for make, match in found]


def describe(value: Any) -> str:
    """A command with all that it says."""
    match value:
        case ev.Begin(barrier, plan, stop):
            assert len(plan.wait) + len(plan.finished) == sum(map(len, plan.wait.masks.values()))
            assert plan.wait.isdisjoint(plan.finished)
            said = f"trigger {_names(plan.trigger)}"
            if plan.finished:
                said += f"; finished {_names(plan.finished)}; fully {','.join(sorted(plan.fully_finished))}"
            return f"begin{describe_part(barrier)}[{said}{f'; {_stop(stop)}' if stop else ''}]"
        case ev.Overtake(barrier, names):
            return f"overtake{describe_part(barrier)}:{_names(names)}"
        case ev.Publish(number, finishing):
            return f"publish{number}:{_names(finishing)}"
        case ev.Commit(number):
            return f"commit{number}"
        case ev.Notify(number, told):
            steps = {one: next(key for key, step in STEPS.items() if step is told[one]) for one in told}
            return f"notify{number}:{','.join(sorted(f'{one.vertex}{one.subtask}{steps[one]}' for one in told))}"
        case ev.Abort(number, names, reason, counted):
            return f"abort{number}{'-counted' * counted}:{_names(names)}:{reason.replace(' ', '_')}"
        case ev.EndSources(names):
            return f"end-sources:{_names(names)}"
        case ev.Restart(reason, counted):
            return f"restart{'-counted' * counted}:{reason.replace(' ', '_')}"
        case ev.StopFailed(request, reason, goes_on):
            return f"stop-failed{'-goes-on' * goes_on}:{request}:{reason.replace(' ', '_')}"
        case ev.SavepointReady(requests):
            return f"savepoint-ready:{','.join(requests)}"
        case ev.SavepointFailed(request, reason, refused, goes_on):
            how = "refused" if refused else "failed"
            return f"savepoint-{how}{'-goes-on' * goes_on}:{request}:{reason.replace(' ', '_')}"
        case ev.JobEnded(stop):
            return f"job-ended{f'[{_stop(stop)}]' if stop else ''}"
        case ev.Warn(sentence):
            return f"warn:{sentence.replace(' ', '_')}"
    raise AssertionError(value)


def _names(some: Iterable[ev.TaskId]) -> str:
    return ",".join(sorted(f"{one.vertex}{one.subtask}" for one in some))


def _stop(stop: ev.StopOf) -> str:
    return f"{next(key for key, mode in STOPS.items() if mode is stop.mode)}:{stop.request}"


def make_coordinator(text: str) -> Coordinator:
    """The coordinator of ``job | options``."""
    job, _, options = text.partition(" | ")
    vertices, *edges = job.split("; ")
    union = [name for edge in edges if edge.startswith("union ") for name in edge.split()[1:]]
    words = dict(word.partition("=")[::2] for word in options.split())
    more: dict[str, Any] = {
        name: value.split(",") if name == "finished" else int(value) if value else True for name, value in words.items()
    }
    parallelism = {vertex.split(":")[0]: int(vertex.split(":")[1]) for vertex in vertices.split()}
    lines = [edge for edge in edges if not edge.startswith("union ")]
    made = tiny_job(parallelism, *lines, union=tuple(union), unaligned=more.pop("unaligned", False))
    return Coordinator(made, **more)  # type: ignore[arg-type]


def tell(coordinator: Coordinator, words: str) -> str:
    """What the coordinator commands when it is told these events, one after the other."""
    commands: list[ev.CoordinatorCommand] = []
    for word in words.split():
        if word == "start":
            commands += coordinator.start()
        else:
            commands += [command for event in events(word) for command in coordinator.handle(event)]
    return " ".join(map(describe, commands))


def play(script: Script) -> list[str]:
    """The lines of a script as they are when its events are told to a new coordinator."""
    coordinator, played = make_coordinator(script.subject), []
    if not script.lines[0].startswith("start"):
        assert tell(coordinator, "start") == ""
    for line in script.lines:
        words = line.split(" -> ")[0]
        told = tell(coordinator, words)
        played.append(f"{words} -> {told}" if told else words)
    return played
