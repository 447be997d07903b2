"""The states of a task and the moves between them, as one table.

1. A task is in one :class:`TaskState`. Whatever happens to it is of one :class:`EventKind`.
2. :data:`LEGAL` says which kinds may happen in a state, and to which states each may lead. Anything
   else is a mistake of the caller: it is refused with the history of the task, and nothing changes.
3. ``task.py`` decides *which* of these states follows. Every move is checked against the table.

A task runs until its inputs have ended. Then its coordinator answers, its logic ends, and it waits
for a checkpoint with what its sinks have still to commit, and for its consumers to process
everything. Then it ends. A stop without drain stops it at the barrier, and lets it end or run on.

``docs/task-life.md`` is generated from this file (``make docs``).
"""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Final, NoReturn

from stateformat.errors import ErrorKind, InvalidInput

from . import events as ev


class TaskState(Enum):
    """Where a task is in its life; :data:`MEANING` says what each is."""

    OPENING = "opening"
    RUNNING = "running"
    DRAINING = "draining"
    ASKING = "asking"
    STOPPED_AT_BARRIER = "stopped at barrier"
    WAITING = "waiting"
    STOPPING = "stopping"
    ENDED = "ended"
    CANCELED = "canceled"

    __hash__ = object.__hash__  # That of ``Enum`` is written in Python, and every event needs it several times.


MEANING: Final[Mapping[TaskState, str]] = {
    TaskState.OPENING: "its operators are open and in-flight records are being replayed. Nothing is delivered yet.",
    TaskState.RUNNING: "it reads or processes.",
    TaskState.DRAINING: "a loop head: nothing comes from outside of the loop any more, and the loop still turns.",
    TaskState.ASKING: "its inputs and event time have ended. It has asked its operator's coordinator to answer "
    "everything that was sent; its last `end_input` comes behind the answers.",
    TaskState.STOPPED_AT_BARRIER: "it has taken its snapshot for a stop without drain. Nothing is read, processed or "
    "emitted until the outcome is known. Completed: it stops. Aborted: it goes on as if nothing had been asked.",
    TaskState.WAITING: "its logic has ended. It leaves when a checkpoint that it took part in since then is complete "
    "(after the savepoint of a stop: that very one), its consumers have processed all of its data, and its producers "
    "have left.",
    TaskState.STOPPING: "it was stopped without drain, and its consumers know. It leaves when they have processed all "
    "of its data and its producers have left.",
    TaskState.ENDED: "it has left.",
    TaskState.CANCELED: "the run was given up.",
}
"""What each state means, as ``docs/task-life.md`` says it."""


class EventKind(Enum):
    """What can happen to a task. An element of a channel is of one of several kinds."""

    START = "start"
    RECORDS = "records"
    FED_BACK = "fed-back records"
    WATERMARK = "watermark"
    BARRIER = "barrier"
    FEEDBACK_MARK = "mark on a feedback channel"
    """A barrier, watermark or end, which is no input there."""
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


_S, _K = TaskState, EventKind
_MARKS = (_K.BARRIER, _K.FEEDBACK_MARK, _K.TRIGGER)
_OUTCOMES = (_K.COMPLETED, _K.ABORTED)
_ENDS = (_K.DATA_ENDED, _K.DATA_STOPPED, _K.PARTITION_ENDED)
_DATA = (_K.RECORDS, _K.FED_BACK, _K.WATERMARK, _K.DATA_ENDED)
_STAYS: Final[Mapping[TaskState, tuple[EventKind, ...]]] = {
    _S.OPENING: (),
    _S.RUNNING: (*_DATA, *_MARKS, _K.PARTITION_ENDED, *_OUTCOMES, _K.SOURCE_ADVANCED, _K.PROCESSED),
    _S.DRAINING: (*_DATA, *_MARKS, _K.PARTITION_ENDED, *_OUTCOMES, _K.PROCESSED),
    _S.ASKING: (_K.FED_BACK, *_MARKS, _K.PARTITION_ENDED, *_OUTCOMES, _K.ANSWERED, _K.PROCESSED),
    _S.STOPPED_AT_BARRIER: (_K.FED_BACK, *_MARKS, *_ENDS, *_OUTCOMES, _K.PROCESSED),
    _S.WAITING: (*_MARKS, _K.PARTITION_ENDED, *_OUTCOMES, _K.END_SOURCE, _K.PROCESSED),
    _S.STOPPING: (_K.FEEDBACK_MARK, _K.PARTITION_ENDED, _K.COMPLETED, _K.PROCESSED),
    _S.ENDED: (_K.CANCEL,),
    _S.CANCELED: tuple(_K),
}
"""What may happen in a state and leave the task in it."""
_STOPS = dict.fromkeys((_K.BARRIER, _K.TRIGGER, _K.PARTITION_ENDED), (_S.STOPPED_AT_BARRIER,))
_MOVES: Final[Mapping[TaskState, Mapping[EventKind, tuple[TaskState, ...]]]] = {
    _S.OPENING: {_K.START: (_S.RUNNING, _S.DRAINING, _S.ASKING, _S.WAITING)},
    _S.RUNNING: {
        **_STOPS,
        _K.DATA_ENDED: (_S.DRAINING, _S.ASKING, _S.WAITING),
        _K.SOURCE_ENDED: (_S.WAITING,),
        _K.END_SOURCE: (_S.WAITING,),
    },
    _S.DRAINING: {
        **_STOPS,
        _K.DATA_ENDED: (_S.ASKING, _S.WAITING),
        _K.COMPLETED: (_S.ASKING, _S.WAITING),
    },
    _S.ASKING: {**_STOPS, _K.ANSWERED: (_S.WAITING,)},
    _S.STOPPED_AT_BARRIER: {
        _K.DATA_ENDED: (_S.STOPPING,),
        _K.DATA_STOPPED: (_S.STOPPING,),
        _K.COMPLETED: (_S.STOPPING, _S.ENDED),
        _K.ABORTED: (_S.RUNNING, _S.DRAINING, _S.ASKING, _S.WAITING),
    },
    _S.WAITING: dict.fromkeys((_K.PARTITION_ENDED, *_OUTCOMES, _K.PROCESSED), (_S.ENDED,)),
    _S.STOPPING: dict.fromkeys((_K.PARTITION_ENDED, _K.PROCESSED), (_S.ENDED,)),
}
"""What may lead to other states. In addition, a task can be canceled until it has ended."""


def _table() -> dict[TaskState, dict[EventKind, frozenset[TaskState]]]:
    table: dict[TaskState, dict[EventKind, frozenset[TaskState]]] = {}
    for state in TaskState:
        moves = dict(_MOVES.get(state, {}))
        if state is not TaskState.ENDED:
            moves[EventKind.CANCEL] = (TaskState.CANCELED,)
        stays = dict.fromkeys(_STAYS[state], (state,))
        table[state] = {
            kind: frozenset((*stays.get(kind, ()), *moves.get(kind, ())))
            for kind in EventKind
            if kind in stays or kind in moves
        }
    return table


LEGAL: Final[Mapping[TaskState, Mapping[EventKind, frozenset[TaskState]]]] = _table()
"""For each state, the kinds of events that may happen and the states each may lead to."""

_OF_EVENT: Final[Mapping[type, EventKind]] = {
    ev.Announced: EventKind.BARRIER,
    ev.Triggered: EventKind.TRIGGER,
    ev.Completed: EventKind.COMPLETED,
    ev.Aborted: EventKind.ABORTED,
    ev.Answered: EventKind.ANSWERED,
    ev.SourceEnded: EventKind.SOURCE_ENDED,
    ev.SourceAdvanced: EventKind.SOURCE_ADVANCED,
    ev.SourceIdle: EventKind.SOURCE_ADVANCED,
    ev.EndSource: EventKind.END_SOURCE,
    ev.DataProcessed: EventKind.PROCESSED,
    ev.Canceled: EventKind.CANCEL,
}
_OF_ELEMENT: Final[Mapping[type, EventKind]] = {
    ev.Records: EventKind.RECORDS,
    ev.Watermark: EventKind.WATERMARK,
    ev.Idle: EventKind.WATERMARK,
    ev.Barrier: EventKind.BARRIER,
    ev.EndOfPartition: EventKind.PARTITION_ENDED,
}


def kind_of(event: ev.TaskEvent, *, feedback: bool) -> EventKind:
    """Return the kind of an event. ``feedback``: its channel belongs to a feedback edge."""
    if not isinstance(event, ev.Received):
        return _OF_EVENT[type(event)]
    if feedback:
        return EventKind.FED_BACK if isinstance(event.element, ev.Records) else EventKind.FEEDBACK_MARK
    if isinstance(event.element, ev.EndOfData):
        return EventKind.DATA_ENDED if event.element.drain else EventKind.DATA_STOPPED
    return _OF_ELEMENT[type(event.element)]


_HISTORY_LENGTH: Final = 20


class TaskStateMachine:
    """The state of one task, changed along :data:`LEGAL` only, and what happened to it last."""

    def __init__(self, task: ev.TaskId) -> None:
        self.task = task
        self.state = TaskState.OPENING
        self._may: frozenset[TaskState] = frozenset()
        self._history: deque[tuple[TaskState, object]] = deque(maxlen=_HISTORY_LENGTH)

    def check(self, kind: EventKind, event: object) -> None:
        """Raise ``InvalidInput``, the executor's fault, for what cannot happen in this state."""
        if kind not in LEGAL[self.state]:
            self.refuse(event, f"{kind.value} cannot happen to a task that is {self.state.value}")

    def admit(self, kind: EventKind, event: object) -> None:
        """Record a legal event: until the next one, :meth:`move` may go to the states it allows."""
        self._may = LEGAL[self.state][kind]
        if isinstance(event, ev.Received) and isinstance(event.element, ev.Records):
            event = event.channel  # The history keeps no batch alive.
        self._history.append((self.state, event))

    def move(self, to: TaskState) -> None:
        """Go to a state. One that the table does not allow is a mistake in the task itself."""
        assert to in self._may, f"{self.task} may not become {to.value}; {self.history}"
        self.state = to

    def refuse(self, event: object, why: str) -> NoReturn:
        """Raise ``InvalidInput`` for an illegal event, with the history of the task."""
        raise InvalidInput(
            f"task {self.task} was told {describe(event)}: {why}. This is a mistake of the executor or the coordinator."
            f" What happened to the task before: {self.history}",
            kind=ErrorKind.ILLEGAL_EVENT,
            task=str(self.task),
            state=self.state.value,
        )

    @property
    def history(self) -> str:
        """The last events, oldest first, each preceded by the state in which it came."""
        return "; ".join(f"{state.value}: {describe(event)}" for state, event in self._history) or "nothing"


def describe(event: object) -> str:
    """Return a short description of an event; a channel alone means records on it."""
    if isinstance(event, ev.Received):
        if isinstance(event.element, ev.Records):
            return describe(event.channel)
        return f"{event.element} on {_place(event.channel)}"
    return f"Records on {_place(event)}" if isinstance(event, ev.Channel) else str(event)


def _place(channel: ev.Channel) -> str:
    return f"{channel.edge} {channel.sender}->{channel.receiver}"


# The page -----------------------------------------------------------------------------------------

_INTRODUCTION: Final = """\
# The life of a task

Generated from the table in `backends/dataflow/task_states.py` by `make docs`; a test keeps it so.
A task is one subtask of one chain of operators. What the picture and the table do not show is
refused, with an error that tells what happened to the task before.
"""


def diagram() -> str:
    """Return the moves as a Mermaid state diagram; kinds with the same move share an arrow."""
    name = {state: state.name.lower() for state in TaskState}
    lines = ["stateDiagram-v2", f"    [*] --> {name[TaskState.OPENING]}"]
    for state, kinds in LEGAL.items():
        arrows: dict[TaskState, list[str]] = {}
        for kind, targets in kinds.items():
            for target in targets - {state}:
                arrows.setdefault(target, []).append(kind.value)
        lines += [
            f"    {name[state]} --> {name[target]}: {'<br/>'.join(arrows[target])}"
            for target in TaskState
            if target in arrows and state is not TaskState.CANCELED
        ]
    lines += [f"    {name[state]} --> [*]" for state in (TaskState.ENDED, TaskState.CANCELED)]
    return "\n".join(lines)


def table() -> str:
    """Return a table of events (rows) by state (columns), and where each leads (``·``: nowhere)."""
    columns = [state for state in TaskState if state is not TaskState.CANCELED]
    lines = [
        "| | " + " | ".join(state.value for state in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for kind in EventKind:
        cells = []
        for state in columns:
            targets = LEGAL[state].get(kind, frozenset())
            cells.append(", ".join("·" if to is state else to.value for to in TaskState if to in targets))
        lines.append(f"| {kind.value} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page() -> str:
    """Return the whole of ``docs/task-life.md``."""
    meanings = "\n".join(
        textwrap.fill(f"- **{state.value}**: {MEANING[state]}", 100, subsequent_indent="  ") for state in TaskState
    )
    return (
        f"{_INTRODUCTION}\n```mermaid\n{diagram()}\n```\n\n{meanings}\n\n"
        "What may happen in which state (`·`: it stays; empty: it cannot happen). To a canceled task\n"
        f"anything may happen, and means nothing.\n\n{table()}\n"
    )
