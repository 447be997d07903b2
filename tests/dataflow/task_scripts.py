"""Lives of tasks as scripts: what happens to a task, and exactly what it does then.

A script is a head ``# name | task`` and lines ``events -> commands``. The task is started first,
unless the first event is ``start``::

    # name | a:2 h:1/1~ loop:2/2*
    a0:r a1|1
    a0|1 -> snapshot|1(a@-) >|1 ack1 [WAITING] {a1}

The head has the edges, as name:channels/input, ~ overtakable, * feedback, + inside of the loop; a
restored one has @watermark, and ! where its input had ended. Then ``out:2`` for two consumers, and
options. The first line is a record on a0 and barrier 1 on a1, from which nothing follows. Behind
the commands stand the state and the blocked channels, if they changed.

Tokens of events and commands are listed in :data:`EVENTS` and :func:`describe`. Barriers: ``|1``,
unaligned ``|1~``, of a stop without drain ``|1s``, with drain ``|1d``, of a round ``|1t``; in a
channel ``a0|1``, announced ``a0^|1~``, a direct trigger ``|1``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from stateformat.backends.dataflow import events as ev
from stateformat.backends.dataflow.task import Task
from stateformat.backends.dataflow.task_inputs import InputEdge
from stateformat.errors import InvalidInput, InvalidState

KINDS = {
    "": ev.BarrierKind.CHECKPOINT,
    "s": ev.BarrierKind.STOP_NO_DRAIN,
    "d": ev.BarrierKind.STOP_DRAIN,
    "t": ev.BarrierKind.ROUND,
}
ENDS = {"#drain": ev.EndOfData(drain=True), "#stop": ev.EndOfData(drain=False), "#end": ev.EndOfPartition()}
STEPS = {"": None, "+max": ev.LoopStep.MAX_WATERMARK, "+end": ev.LoopStep.END}
TIMES = {"-": ev.MIN_WATERMARK, "max": ev.MAX_WATERMARK}


def channel(text: str) -> ev.Channel:
    """``a0``: of edge a, from its sender 0; of ``out``, to its receiver 0."""
    edge, number = text[:-1], int(text[-1])
    return ev.Channel(edge, 0, number) if edge == "out" and number else ev.Channel(edge, number, 0)


def time(text: str) -> int:
    return TIMES[text] if text in TIMES else int(text)


def barrier(number: str, kind: str, over: str) -> ev.Barrier:
    return ev.Barrier(int(number), KINDS[kind], unaligned=bool(over))


BARRIER = r"\|(\d+)([sdt]?)(~?)"
EVENTS: list[tuple[str, Callable[..., Any]]] = [
    (r"(\w+\d):(\S+)", lambda at, record: ev.Received(channel(at), ev.Records(record))),
    (r"(\w+\d)@(\S+)", lambda at, to: ev.Received(channel(at), ev.Watermark(time(to)))),
    (r"(\w+\d)(#\w+)", lambda at, end: ev.Received(channel(at), ENDS[end])),
    (r"(\w+\d)" + BARRIER, lambda at, *one: ev.Received(channel(at), barrier(*one))),
    (r"(\w+\d)\^" + BARRIER, lambda at, *one: ev.Announced(channel(at), barrier(*one))),
    (BARRIER, lambda *one: ev.Triggered(barrier(*one))),
    (r"completed(\d+)(\+max|\+end|)", lambda number, step: ev.Completed(int(number), STEPS[step])),
    (r"aborted(\d+)", lambda number: ev.Aborted(int(number))),
    (r"(\w+\d)\.processed", lambda at: ev.DataProcessed(channel(at))),
    (r"@(\S+)", lambda to: ev.SourceAdvanced(time(to))),
    (r"source-ended", ev.SourceEnded),
    (r"end-source", ev.EndSource),
    (r"answered", ev.Answered),
    (r"canceled", ev.Canceled),
]
"""Every event, as it stands in a script."""


def event(text: str) -> Any:
    for pattern, make in EVENTS:
        if found := re.fullmatch(pattern, text):
            return make(*found.groups())
    raise AssertionError(f"no event is written {text!r}")


def describe(value: Any) -> str:
    """A command (or a part of one) with all that it says."""
    match value:
        case ev.Channel():
            return f"{value.edge}{value.receiver or value.sender}"
        case ev.Barrier(number, kind, unaligned):
            return f"|{number}{next(key for key, one in KINDS.items() if one is kind)}{'~' * unaligned}"
        case ev.Watermark(to) | ev.AdvanceWatermark(to, False):
            return f"@{_time(to)}"
        case ev.AdvanceWatermark(to, True):
            return f"@{_time(to)}-ending"
        case ev.EndOfData() | ev.EndOfPartition():
            return next(key for key, one in ENDS.items() if type(one) is type(value) and one == value)
        case ev.Emit(element):
            return f">{describe(element)}"
        case ev.Process(at, batch):
            return f"{describe(at)}:{batch}"
        case ev.EndInput(number):
            return f"end-input{number}"
        case ev.Snapshot(one, finishing, watermarks, ended):
            edges = [f"{edge}@{_time(to)}{'!' * ended[edge]}" for edge, to in watermarks.items()]
            return f"{'finishing-' * finishing}snapshot{describe(one)}({','.join(edges)})"
        case ev.LogQueued(at, arriving):
            return f"log-queued{'-and-arriving' * arriving}:{describe(at)}"
        case ev.StopLog(at):
            return f"stop-log:{describe(at)}"
        case ev.LogRecords(at, batch):
            return f"log:{describe(at)}:{batch}"
        case ev.Acknowledge(number, finishing, quiet, inputs, time_sent):
            said = f"{'-busy' * (not quiet)}{'-inputs-ended' * inputs}{'-max-sent' * time_sent}"
            return f"{'finishing-' * finishing}ack{number}{said}"
        case ev.Decline(number, reason):
            return f"decline{number}:{reason.replace(' ', '_')}"
        case ev.ConfirmProcessed(at):
            return f"confirm:{describe(at)}"
        case ev.HoldSource(hold):
            return "hold-source" if hold else "release-source"
        case ev.NotifyComplete(number):
            return f"complete{number}"
        case ev.NotifyAborted(number):
            return f"void{number}"
    return re.sub(r"(?<!^)([A-Z])", r"-\1", type(value).__name__).lower()


def _time(to: int) -> str:
    return next((key for key, one in TIMES.items() if one == to), str(to))


_EDGE = r"(?!out:)\b(\w+):(\d)(?:/(\d))?([~*+]*)(?:@(\w+))?(!?)"


class Script(NamedTuple):
    name: str
    subject: str
    lines: list[str]


def scripts(path: Path) -> list[Script]:
    """Those of a file. Lines that begin with ``##`` are for readers."""
    found = []
    for part in re.split(r"(?m)^# ", path.read_text(encoding="utf-8"))[1:]:
        head, *lines = part.strip().split("\n")
        name, _, subject = head.partition("|")
        found.append(
            Script(name.strip(), subject.strip(), [line for line in lines if line and not line.startswith("##")])
        )
    return found


def edges_of(text: str) -> list[InputEdge]:
    """The edges of a task as they stand behind ``|`` in the head of a script."""
    edges = []
    for name, count, number, flags, watermark, ended in re.findall(_EDGE, text):
        channels = tuple(ev.Channel(name, sender, 0) for sender in range(int(count)))
        more = {"feedback": "*" in flags, "overtakable": "~" in flags, "inside": "+" in flags, "ended": bool(ended)}
        edges.append(InputEdge(name, int(number or 0), channels, watermark=time(watermark or "-"), **more))
    return edges


def make_task(text: str) -> Task:
    """A task as it stands behind ``|`` in the head of a script."""
    outputs = re.search(r"out:(\d)", text)
    receivers = [channel(f"out{number}") for number in range(int(outputs[1]) if outputs else 1)]
    options = {word.replace("-", "_"): True for word in text.split() if ":" not in word}
    return Task(ev.TaskId("task", 0), edges_of(text), receivers, **options)


def started(text: str) -> Task:
    task = make_task(text)
    task.start()
    return task


def tell(task: Task, words: str) -> str:
    """What the task does when these things happen to it, one after the other."""
    commands: list[ev.TaskCommand] = []
    for word in words.split():
        if word == "start":
            commands += task.start()
        elif word == "sent":
            task.message_sent()
        else:
            commands += task.handle(event(word))
    return " ".join(map(describe, commands))


def play(script: Script) -> list[str]:
    """The lines of a script as they are when its events are told to a new task."""
    task, blocked, played = make_task(script.subject), "", []
    if not (script.lines[0] + " ").startswith("start "):
        assert tell(task, "start") == ""
    state = task.state.name if task.state.name == "RUNNING" else ""
    for line in script.lines:
        events = re.split(r" -> | \[| \{", line)[0]
        try:
            told = tell(task, events)
        except (InvalidInput, InvalidState) as error:
            told = "refused: " + re.sub(
                r"^task .* was told .*: (.*?)\. .*$", r"\1", str(error).split(" This is")[0] + " "
            )
        text = f"{events} -> {told}" if told else events
        if task.state.name != state:
            state = task.state.name
            text += f" [{state}]"
        now = " ".join(sorted(map(describe, task.blocked)))
        if now != blocked:
            blocked = now
            text += f" {{{blocked}}}"
        played.append(text)
    return played
