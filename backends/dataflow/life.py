"""The legal life of a task, as one table.

Theory of operation.

1. A task is in one :class:`State`. Whatever happens to it is one :class:`Fact`.
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


class State(Enum):
    """Where a task is in its life; :data:`MEANING` says what each is."""

    OPENING = "opening"
    RUNNING = "running"
    DRAINING = "draining"
    ASKING = "asking"
    HELD = "held"
    WAITING = "waiting"
    STOPPING = "stopping"
    ENDED = "ended"
    CANCELED = "canceled"

    __hash__ = object.__hash__  # That of ``Enum`` is written in Python, and every event asks for it several times.


MEANING: Final[Mapping[State, str]] = {
    State.OPENING: "its operators are open and in-flight records are being replayed; nothing is delivered to it yet.",
    State.RUNNING: "it reads or processes.",
    State.DRAINING: "the head of a loop: nothing comes from outside of the loop any more, and the loop still turns.",
    State.ASKING: "its inputs have ended and event time with them. It has asked its operator's coordinator for the answers to "
    "everything that was sent; its last `end_input` comes behind them.",
    State.HELD: "it has taken its snapshot for a stop without drain; nothing is read, processed or emitted until the outcome "
    "is known. Completed: it stops. Aborted: it goes on as if nothing had been asked.",
    State.WAITING: "its logic has ended. It leaves when a checkpoint that it took part in since then is complete (after the "
    "savepoint of a stop: that very one), its consumers have processed all of its data and its producers have left.",
    State.STOPPING: "it was stopped without drain, and its consumers were told. It leaves when they have processed all of its "
    "data and its producers have left.",
    State.ENDED: "it is gone.",
    State.CANCELED: "the run was given up.",
}
"""In words, as the page has them."""


class Fact(Enum):
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


_Moves = dict[State, dict[Fact, tuple[State, ...]]]


def _moves_until_the_logic_ends() -> _Moves:
    running, draining, asking, held = State.RUNNING, State.DRAINING, State.ASKING, State.HELD
    waiting = State.WAITING
    return {
        State.OPENING: {
            Fact.START: (running, draining, asking, waiting),
        },
        running: {
            Fact.RECORDS: (running,),
            Fact.FED_BACK: (running,),
            Fact.WATERMARK: (running,),
            Fact.BARRIER: (running, held),
            Fact.FEEDBACK_MARK: (running,),
            Fact.TRIGGER: (running, held),
            Fact.DATA_ENDED: (running, draining, asking, waiting),
            Fact.PARTITION_ENDED: (running, held),
            Fact.COMPLETED: (running,),
            Fact.ABORTED: (running,),
            Fact.SOURCE_ADVANCED: (running,),
            Fact.SOURCE_ENDED: (waiting,),
            Fact.END_SOURCE: (waiting,),
            Fact.PROCESSED: (running,),
        },
        draining: {
            Fact.RECORDS: (draining,),
            Fact.FED_BACK: (draining,),
            Fact.WATERMARK: (draining,),
            Fact.BARRIER: (draining, held),
            Fact.FEEDBACK_MARK: (draining,),
            Fact.TRIGGER: (draining, held),
            Fact.DATA_ENDED: (draining, asking, waiting),
            Fact.PARTITION_ENDED: (draining, held),
            Fact.COMPLETED: (draining, asking, waiting),
            Fact.ABORTED: (draining,),
            Fact.PROCESSED: (draining,),
        },
        asking: {
            Fact.FED_BACK: (asking,),
            Fact.BARRIER: (asking, held),
            Fact.FEEDBACK_MARK: (asking,),
            Fact.TRIGGER: (asking, held),
            Fact.PARTITION_ENDED: (asking, held),
            Fact.COMPLETED: (asking,),
            Fact.ABORTED: (asking,),
            Fact.ANSWERED: (asking, waiting),
            Fact.PROCESSED: (asking,),
        },
    }


def _table() -> dict[State, dict[Fact, frozenset[State]]]:
    running, draining, asking, held = State.RUNNING, State.DRAINING, State.ASKING, State.HELD
    waiting, stopping, ended, canceled = State.WAITING, State.STOPPING, State.ENDED, State.CANCELED
    moves: _Moves = {
        **_moves_until_the_logic_ends(),
        held: {
            Fact.FED_BACK: (held,),
            Fact.BARRIER: (held,),
            Fact.FEEDBACK_MARK: (held,),
            Fact.TRIGGER: (held,),
            Fact.DATA_ENDED: (held, stopping),
            Fact.DATA_STOPPED: (held, stopping),
            Fact.PARTITION_ENDED: (held,),
            Fact.COMPLETED: (held, stopping, ended),
            Fact.ABORTED: (held, running, draining, asking, waiting),
            Fact.PROCESSED: (held,),
        },
        waiting: {
            Fact.BARRIER: (waiting,),
            Fact.FEEDBACK_MARK: (waiting,),
            Fact.TRIGGER: (waiting,),
            Fact.PARTITION_ENDED: (waiting, ended),
            Fact.COMPLETED: (waiting, ended),
            Fact.ABORTED: (waiting, ended),
            Fact.END_SOURCE: (waiting,),
            Fact.PROCESSED: (waiting, ended),
        },
        stopping: {
            Fact.FEEDBACK_MARK: (stopping,),
            Fact.PARTITION_ENDED: (stopping, ended),
            Fact.COMPLETED: (stopping,),
            Fact.PROCESSED: (stopping, ended),
        },
        ended: {Fact.CANCEL: (ended,)},
        canceled: dict.fromkeys(Fact, (canceled,)),
    }
    for state in set(State) - {ended, canceled}:
        moves[state][Fact.CANCEL] = (canceled,)
    return {state: {fact: frozenset(to) for fact, to in facts.items()} for state, facts in moves.items()}


LEGAL: Final[Mapping[State, Mapping[Fact, frozenset[State]]]] = _table()
"""State, fact, and the states it may lead to."""

_OF_EVENT: Final[Mapping[type, Fact]] = {
    events.Announced: Fact.BARRIER,
    events.Triggered: Fact.TRIGGER,
    events.Completed: Fact.COMPLETED,
    events.Aborted: Fact.ABORTED,
    events.Answered: Fact.ANSWERED,
    events.SourceEnded: Fact.SOURCE_ENDED,
    events.SourceAdvanced: Fact.SOURCE_ADVANCED,
    events.EndSource: Fact.END_SOURCE,
    events.DataProcessed: Fact.PROCESSED,
    events.Canceled: Fact.CANCEL,
}
_OF_ELEMENT: Final[Mapping[type, Fact]] = {
    events.Records: Fact.RECORDS,
    events.Watermark: Fact.WATERMARK,
    events.Barrier: Fact.BARRIER,
    events.EndOfPartition: Fact.PARTITION_ENDED,
}


def fact_of(event: events.TaskEvent, *, feedback: bool) -> Fact:
    """Which fact an event is. ``feedback``: its channel belongs to a feedback edge."""
    if not isinstance(event, events.Received):
        return _OF_EVENT[type(event)]
    if feedback:
        return Fact.FED_BACK if isinstance(event.element, events.Records) else Fact.FEEDBACK_MARK
    if isinstance(event.element, events.EndOfData):
        return Fact.DATA_ENDED if event.element.drain else Fact.DATA_STOPPED
    return _OF_ELEMENT[type(event.element)]


_STORY_LENGTH: Final = 20


class Life:
    """The state of one task, changed along :data:`LEGAL` only, and the story of what happened to it last."""

    def __init__(self, task: TaskId) -> None:
        self.task = task
        self.state = State.OPENING
        self._may: frozenset[State] = frozenset()
        self._story: deque[tuple[State, object]] = deque(maxlen=_STORY_LENGTH)

    def check(self, fact: Fact, event: object) -> None:
        """Raise ``InvalidInput`` (the executor's fault) unless the fact may happen in this state. Changes nothing."""
        if fact not in LEGAL[self.state]:
            self.refuse(event, f"{fact.value} cannot happen to a task that is {self.state.value}")

    def admit(self, fact: Fact, event: object) -> None:
        """The fact happens: until the next one, :meth:`move` may go where it leads."""
        self._may = LEGAL[self.state][fact]
        if isinstance(event, events.Received) and isinstance(event.element, events.Records):
            event = event.channel  # A story keeps no batch alive.
        self._story.append((self.state, event))

    def move(self, to: State) -> None:
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
    lines = ["stateDiagram-v2", f"    [*] --> {State.OPENING.value}"]
    for state, facts in LEGAL.items():
        arrows: dict[State, list[str]] = {}
        for fact, targets in facts.items():
            for target in sorted(targets - {state}, key=list(State).index):
                arrows.setdefault(target, []).append(fact.value)
        lines += [
            f"    {state.value} --> {target.value}: {'<br/>'.join(arrows[target])}"
            for target in State
            if target in arrows and state is not State.CANCELED
        ]
    lines += [f"    {state.value} --> [*]" for state in (State.ENDED, State.CANCELED)]
    return "\n".join(lines)


def table() -> str:
    """Every fact (rows) in every state (columns): the states it may lead to, `·` where it stays, empty where it cannot happen."""
    columns = [state for state in State if state is not State.CANCELED]
    lines = [
        "| | " + " | ".join(state.value for state in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for fact in Fact:
        cells = []
        for state in columns:
            targets = LEGAL[state].get(fact, frozenset())
            cells.append(", ".join("·" if to is state else to.value for to in State if to in targets))
        lines.append(f"| {fact.value} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page() -> str:
    """The whole of ``docs/task-life.md``."""
    meanings = "\n".join(f"- **{state.value}**: {MEANING[state]}" for state in State)
    return (
        f"{_INTRODUCTION}\n```mermaid\n{diagram()}\n```\n\n{meanings}\n\n"
        "What may happen in which state (`·`: it stays; empty: it cannot happen; to a canceled task anything may, and means "
        f"nothing):\n\n{table()}\n"
    )


if __name__ == "__main__":
    sys.stdout.write(page())
