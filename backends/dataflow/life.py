"""The legal life of a task, as one table.

Theory of operation.

1. A task is in one :class:`TaskState`. Whatever happens to it is one :class:`EventKind`.
2. :data:`LEGAL` tells, for a state, which facts may happen and to which states each may lead. What is not in the table is a
   mistake of whoever delivered it: it is refused with the story of the task, and nothing has changed.
3. *Which* of the states a fact leads to is decided in ``task.py``; it cannot go anywhere else, for every move is looked up.
4. This file does not know what a task does; ``docs/task-life.md`` is generated from it (``python -m backends.dataflow.life``).

The short form: a task runs until all that it hears has ended; then its coordinator answers, its logic ends and it waits, for a checkpoint that contains
what its sinks have still to commit and for its consumers to have processed everything; then it is gone. A stop without drain
holds it where it is and lets it go, or lets it run on.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Final, NoReturn

from backends.dataflow import events
from backends.dataflow.events import TaskId
from stateformat.errors import ErrorKind, InvalidInput


class TaskState(Enum):
    """Where a task is in its life; :data:`MEANING` says what each is."""

    OPENING = "opening"
    RUNNING = "running"
    DRAINING = "draining"
    ASKING = "asking"
    STOPPED_AT_BARRIER = "held"
    WAITING = "waiting"
    STOPPING = "stopping"
    ENDED = "ended"
    CANCELED = "canceled"

    __hash__ = object.__hash__  # That of ``Enum`` is written in Python, and every event asks for it several times.


MEANING: Final[Mapping[TaskState, str]] = {
    TaskState.OPENING: "its operators are open and in-flight records are being replayed; nothing is delivered to it yet.",
    TaskState.RUNNING: "it reads or processes.",
    TaskState.DRAINING: "the head of a loop: nothing comes from outside of the loop any more, and the loop still turns.",
    TaskState.ASKING: "its inputs have ended and event time with them. It has asked its operator's coordinator for the answers to "
    "everything that was sent; its last `end_input` comes behind them.",
    TaskState.STOPPED_AT_BARRIER: "it has taken its snapshot for a stop without drain; nothing is read, processed or emitted until the outcome "
    "is known. Completed: it stops. Aborted: it goes on as if nothing had been asked.",
    TaskState.WAITING: "its logic has ended. It leaves when a checkpoint that it took part in since then is complete (after the "
    "savepoint of a stop: that very one), its consumers have processed all of its data and its producers have left.",
    TaskState.STOPPING: "it was stopped without drain, and its consumers were told. It leaves when they have processed all of its "
    "data and its producers have left.",
    TaskState.ENDED: "it is gone.",
    TaskState.CANCELED: "the run was given up.",
}
"""In words, as the page has them."""


class EventKind(Enum):
    """What can happen to a task. An event is one fact; an element of a channel is one of several."""

    START = "start"
    RECORDS = "records"
    FED_BACK = "fed-back records"
    WATERMARK = "watermark"
    BARRIER = "barrier"
    FEEDBACK_MARK = "mark on a feedback channel"
    """Barrier, watermark or end: what travels there without being an input."""
    TRIGGER = "trigger"
    DATA_ENDED = "end of data, drained"
    DATA_STOPPED = "end of data, stopped"
    PARTITION_ENDED = "end of partition"
    COMPLETED = "checkpoint complete"
    ABORTED = "checkpoint aborted"
    ANSWERED = "coordinator has answered"
    SOURCE_ADVANCED = "source advanced"
    SOURCE_ENDED = "source ended"
    END_SOURCE = "end the source"
    PROCESSED = "data processed"
    CANCEL = "cancel"

    __hash__ = object.__hash__


_Moves = dict[TaskState, dict[EventKind, tuple[TaskState, ...]]]


def _moves_until_the_logic_ends() -> _Moves:
    running, draining, asking, held = (
        TaskState.RUNNING,
        TaskState.DRAINING,
        TaskState.ASKING,
        TaskState.STOPPED_AT_BARRIER,
    )
    waiting = TaskState.WAITING
    return {
        TaskState.OPENING: {
            EventKind.START: (running, draining, asking, waiting),
        },
        running: {
            EventKind.RECORDS: (running,),
            EventKind.FED_BACK: (running,),
            EventKind.WATERMARK: (running,),
            EventKind.BARRIER: (running, held),
            EventKind.FEEDBACK_MARK: (running,),
            EventKind.TRIGGER: (running, held),
            EventKind.DATA_ENDED: (running, draining, asking, waiting),
            EventKind.PARTITION_ENDED: (running, held),
            EventKind.COMPLETED: (running,),
            EventKind.ABORTED: (running,),
            EventKind.SOURCE_ADVANCED: (running,),
            EventKind.SOURCE_ENDED: (waiting,),
            EventKind.END_SOURCE: (waiting,),
            EventKind.PROCESSED: (running,),
        },
        draining: {
            EventKind.RECORDS: (draining,),
            EventKind.FED_BACK: (draining,),
            EventKind.WATERMARK: (draining,),
            EventKind.BARRIER: (draining, held),
            EventKind.FEEDBACK_MARK: (draining,),
            EventKind.TRIGGER: (draining, held),
            EventKind.DATA_ENDED: (draining, asking, waiting),
            EventKind.PARTITION_ENDED: (draining, held),
            EventKind.COMPLETED: (draining, asking, waiting),
            EventKind.ABORTED: (draining,),
            EventKind.PROCESSED: (draining,),
        },
        asking: {
            EventKind.FED_BACK: (asking,),
            EventKind.BARRIER: (asking, held),
            EventKind.FEEDBACK_MARK: (asking,),
            EventKind.TRIGGER: (asking, held),
            EventKind.PARTITION_ENDED: (asking, held),
            EventKind.COMPLETED: (asking,),
            EventKind.ABORTED: (asking,),
            EventKind.ANSWERED: (asking, waiting),
            EventKind.PROCESSED: (asking,),
        },
    }


def _table() -> dict[TaskState, dict[EventKind, frozenset[TaskState]]]:
    running, draining, asking, held = (
        TaskState.RUNNING,
        TaskState.DRAINING,
        TaskState.ASKING,
        TaskState.STOPPED_AT_BARRIER,
    )
    waiting, stopping, ended, canceled = TaskState.WAITING, TaskState.STOPPING, TaskState.ENDED, TaskState.CANCELED
    moves: _Moves = {
        **_moves_until_the_logic_ends(),
        held: {
            EventKind.FED_BACK: (held,),
            EventKind.BARRIER: (held,),
            EventKind.FEEDBACK_MARK: (held,),
            EventKind.TRIGGER: (held,),
            EventKind.DATA_ENDED: (held, stopping),
            EventKind.DATA_STOPPED: (held, stopping),
            EventKind.PARTITION_ENDED: (held,),
            EventKind.COMPLETED: (held, stopping, ended),
            EventKind.ABORTED: (held, running, draining, asking, waiting),
            EventKind.PROCESSED: (held,),
        },
        waiting: {
            EventKind.BARRIER: (waiting,),
            EventKind.FEEDBACK_MARK: (waiting,),
            EventKind.TRIGGER: (waiting,),
            EventKind.PARTITION_ENDED: (waiting, ended),
            EventKind.COMPLETED: (waiting, ended),
            EventKind.ABORTED: (waiting, ended),
            EventKind.END_SOURCE: (waiting,),
            EventKind.PROCESSED: (waiting, ended),
        },
        stopping: {
            EventKind.FEEDBACK_MARK: (stopping,),
            EventKind.PARTITION_ENDED: (stopping, ended),
            EventKind.COMPLETED: (stopping,),
            EventKind.PROCESSED: (stopping, ended),
        },
        ended: {EventKind.CANCEL: (ended,)},
        canceled: dict.fromkeys(EventKind, (canceled,)),
    }
    for state in set(TaskState) - {ended, canceled}:
        moves[state][EventKind.CANCEL] = (canceled,)
    return {state: {fact: frozenset(to) for fact, to in facts.items()} for state, facts in moves.items()}


LEGAL: Final[Mapping[TaskState, Mapping[EventKind, frozenset[TaskState]]]] = _table()
"""TaskState, fact, and the states it may lead to."""

_OF_EVENT: Final[Mapping[type, EventKind]] = {
    events.Announced: EventKind.BARRIER,
    events.Triggered: EventKind.TRIGGER,
    events.Completed: EventKind.COMPLETED,
    events.Aborted: EventKind.ABORTED,
    events.Answered: EventKind.ANSWERED,
    events.SourceEnded: EventKind.SOURCE_ENDED,
    events.SourceAdvanced: EventKind.SOURCE_ADVANCED,
    events.EndSource: EventKind.END_SOURCE,
    events.DataProcessed: EventKind.PROCESSED,
    events.Canceled: EventKind.CANCEL,
}
_OF_ELEMENT: Final[Mapping[type, EventKind]] = {
    events.Records: EventKind.RECORDS,
    events.Watermark: EventKind.WATERMARK,
    events.Barrier: EventKind.BARRIER,
    events.EndOfPartition: EventKind.PARTITION_ENDED,
}


def kind_of(event: events.TaskEvent, *, feedback: bool) -> EventKind:
    """Which fact an event is. ``feedback``: its channel belongs to a feedback edge."""
    if not isinstance(event, events.Received):
        return _OF_EVENT[type(event)]
    if feedback:
        return EventKind.FED_BACK if isinstance(event.element, events.Records) else EventKind.FEEDBACK_MARK
    if isinstance(event.element, events.EndOfData):
        return EventKind.DATA_ENDED if event.element.drain else EventKind.DATA_STOPPED
    return _OF_ELEMENT[type(event.element)]


_STORY_LENGTH: Final = 20


class TaskStateMachine:
    """The state of one task, changed along :data:`LEGAL` only, and the story of what happened to it last."""

    def __init__(self, task: TaskId) -> None:
        self.task = task
        self.state = TaskState.OPENING
        self._may: frozenset[TaskState] = frozenset()
        self._story: deque[tuple[TaskState, object]] = deque(maxlen=_STORY_LENGTH)

    def check(self, fact: EventKind, event: object) -> None:
        """Raise ``InvalidInput`` (the executor's fault) unless the fact may happen in this state. Changes nothing."""
        if fact not in LEGAL[self.state]:
            self.refuse(event, f"{fact.value} cannot happen to a task that is {self.state.value}")

    def admit(self, fact: EventKind, event: object) -> None:
        """The fact happens: until the next one, :meth:`move` may go where it leads."""
        self._may = LEGAL[self.state][fact]
        if isinstance(event, events.Received) and isinstance(event.element, events.Records):
            event = event.channel  # A story keeps no batch alive.
        self._story.append((self.state, event))

    def move(self, to: TaskState) -> None:
        """Go on to a state. An assertion fails where the table does not allow it: that is a mistake in the task itself."""
        assert to in self._may, f"{self.task} may not become {to.value}; {self.story}"
        self.state = to

    def refuse(self, event: object, why: str) -> NoReturn:
        """Raise ``InvalidInput`` for an event that cannot be, with the story. Nothing has changed."""
        raise InvalidInput(
            f"task {self.task} was told {told(event)}: {why}. This is a mistake of the executor or the coordinator. "
            f"What happened to the task before: {self.story}",
            kind=ErrorKind.ILLEGAL_EVENT,
            task=str(self.task),
            state=self.state.value,
        )

    @property
    def story(self) -> str:
        """The last events, oldest first, each behind the state in which it came."""
        return "; ".join(f"{state.value}: {told(event)}" for state, event in self._story) or "nothing"


def told(event: object) -> str:
    """An event in short; a channel alone stands for records on it."""
    if isinstance(event, events.Received):
        if isinstance(event.element, events.Records):
            return told(event.channel)
        return f"{event.element} on {_place(event.channel)}"
    return f"Records on {_place(event)}" if isinstance(event, events.Channel) else str(event)


def _place(channel: events.Channel) -> str:
    return f"{channel.edge} {channel.sender}->{channel.receiver}"


# The page ----------------------------------------------------------------------------------------------------------------

_INTRODUCTION: Final = """\
# The life of a task

Generated from the table in `backends/dataflow/life.py` by `make docs`; a test keeps it so. A task is one subtask of one chain of
operators. Whatever the picture and the table do not show is refused: the error tells what happened to the task before.
"""


def diagram() -> str:
    """The moves between different states as a Mermaid state diagram, facts with the same move on one arrow."""
    lines = ["stateDiagram-v2", f"    [*] --> {TaskState.OPENING.value}"]
    for state, facts in LEGAL.items():
        arrows: dict[TaskState, list[str]] = {}
        for fact, targets in facts.items():
            for target in sorted(targets - {state}, key=list(TaskState).index):
                arrows.setdefault(target, []).append(fact.value)
        lines += [
            f"    {state.value} --> {target.value}: {'<br/>'.join(arrows[target])}"
            for target in TaskState
            if target in arrows and state is not TaskState.CANCELED
        ]
    lines += [f"    {state.value} --> [*]" for state in (TaskState.ENDED, TaskState.CANCELED)]
    return "\n".join(lines)


def table() -> str:
    """Every fact (rows) in every state (columns): the states it may lead to, `·` where it stays, empty where it cannot happen."""
    columns = [state for state in TaskState if state is not TaskState.CANCELED]
    lines = [
        "| | " + " | ".join(state.value for state in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for fact in EventKind:
        cells = []
        for state in columns:
            targets = LEGAL[state].get(fact, frozenset())
            cells.append(", ".join("·" if to is state else to.value for to in TaskState if to in targets))
        lines.append(f"| {fact.value} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page() -> str:
    """The whole of ``docs/task-life.md``."""
    meanings = "\n".join(f"- **{state.value}**: {MEANING[state]}" for state in TaskState)
    return (
        f"{_INTRODUCTION}\n```mermaid\n{diagram()}\n```\n\n{meanings}\n\n"
        "What may happen in which state (`·`: it stays; empty: it cannot happen; to a canceled task anything may, and means "
        f"nothing):\n\n{table()}\n"
    )


if __name__ == "__main__":
    sys.stdout.write(page())
