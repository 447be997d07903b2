"""Tasks to tell events to, in few words. Batches are strings: a task looks into none."""

from __future__ import annotations

from typing import Any

from stateformat.backends.dataflow.events import (
    MAX_WATERMARK,
    AdvanceWatermark,
    Barrier,
    BarrierKind,
    Channel,
    Close,
    ConfirmProcessed,
    Emit,
    Ended,
    EndInput,
    EndOfData,
    EndOfPartition,
    Finish,
    Process,
    Received,
    Records,
    ReportLogicEnded,
    TaskCommand,
    TaskId,
    Watermark,
)
from stateformat.backends.dataflow.task import InputEdge, Task

OUT = Channel("out", 0, 0)
GONE: list[TaskCommand] = [Close(), Emit(EndOfPartition()), Ended()]
DRAIN = EndOfData(drain=True)
STOP = EndOfData(drain=False)
END = EndOfPartition()
MAX = Watermark(MAX_WATERMARK)


class Told(list[Any]):
    """Commands, compared with their kinds: two named tuples of different kinds are equal if their fields are."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and [_kinds(one) for one in self] == [_kinds(one) for one in other]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, command: object) -> bool:
        return _kinds(command) in [_kinds(one) for one in self]

    def first(self) -> Told:
        """The first alone."""
        return Told(self[:1])

    def last(self, count: int = 1) -> Told:
        """The last alone, or the last few."""
        return Told(self[-count:])

    __hash__ = None  # type: ignore[assignment]


def _kinds(value: Any) -> Any:
    return (type(value), *map(_kinds, value)) if isinstance(value, tuple) else value


def same(one: object, other: object) -> bool:
    """Whether two commands are equal and of one kind."""
    return bool(_kinds(one) == _kinds(other))


def channels(edge: str, count: int) -> tuple[Channel, ...]:
    return tuple(Channel(edge, sender, 0) for sender in range(count))


def edge(name: str, count: int = 1, *, input: int = 0, **more: Any) -> InputEdge:
    """An edge with ``count`` channels: (name, sender, 0)."""
    return InputEdge(name, input, channels(name, count), **more)


def started(
    *edges: InputEdge, outputs: tuple[Channel, ...] = (OUT,), replayed: bool = False, asks: bool = False
) -> Task:
    task = Task(TaskId("task", 0), edges, outputs, replayed=replayed, asks=asks)
    task.start()
    return task


def on(channel: Channel, element: Any) -> Received:
    return Received(channel, Records(element) if isinstance(element, str) else element)


def tell(task: Task, *events: Any) -> Told:
    """All commands of some events. A tuple (channel, element) that is no event is an element received."""
    commands = Told()
    for event in events:
        event = on(*event) if type(event) is tuple else event
        plain = isinstance(event, Received) and isinstance(event.element, Records) and task.processes(event.channel)
        told = task.handle(event)
        assert not plain or told == [Process(event.channel, event.element.batch)]
        commands += told
    return commands


def barrier(number: int, purpose: BarrierKind = BarrierKind.CHECKPOINT, *, unaligned: bool = False) -> Barrier:
    return Barrier(number, purpose, unaligned)


def stop(number: int) -> Barrier:
    return Barrier(number, BarrierKind.STOP_NO_DRAIN)


def turn(number: int) -> Barrier:
    return Barrier(number, BarrierKind.ROUND)


def processed(channel: Channel, batch: str) -> TaskCommand:
    return Process(channel, batch)  # type: ignore[arg-type]


def end_of_logic(*inputs: int, confirm: Channel | None = None, time: bool = True) -> list[TaskCommand]:
    """What a task does when the last of its inputs has ended drained."""
    return [
        *([AdvanceWatermark(MAX_WATERMARK, ending=True)] if time else []),
        *(EndInput(number) for number in inputs),
        Finish(),
        Emit(DRAIN),
        ReportLogicEnded(),
        *([ConfirmProcessed(confirm)] if confirm else []),
    ]


def only(commands: list[TaskCommand], *kinds: type) -> Told:
    """The commands of some kinds."""
    return Told(command for command in commands if isinstance(command, kinds))
