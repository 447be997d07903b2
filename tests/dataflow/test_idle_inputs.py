"""Time at the inputs of a task, of which some are idle: against a model that knows no shortcut."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from stateformat.backends.dataflow import events as ev
from stateformat.backends.dataflow.task.inputs import InputEdge
from stateformat.backends.dataflow.task.task import Task


@dataclass
class Sender:
    """What a channel has said."""

    edge: str
    time: int = ev.MIN_WATERMARK
    idle: bool = False
    ended: bool = False


def expected(senders: list[Sender]) -> int:
    """The least of those that hold time up; of idle ones alone the greatest."""
    holding = [sender.time for sender in senders if not (sender.idle or sender.ended)]
    idle = [sender.time for sender in senders if sender.idle and not sender.ended]
    return min(holding) if holding else max(idle, default=ev.MAX_WATERMARK)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("by_epoch", [False, True])
def test_time_is_that_of_a_model_and_never_goes_back(seed: int, by_epoch: bool) -> None:
    choose = random.Random(seed)
    edges = ["one"] * choose.randrange(1, 4) + ["two"] * choose.randrange(3)
    channels = [ev.Channel(edge, number, 0) for number, edge in enumerate(edges)]
    inputs = [
        InputEdge(edge, number, tuple(channel for channel in channels if channel.edge == edge))
        for number, edge in enumerate(dict.fromkeys(edges))
    ]
    task = Task(ev.TaskId("op", 0), inputs, [], by_epoch=by_epoch)
    task.start()
    senders = [Sender(edge) for edge in edges]
    reached, said = ev.MIN_WATERMARK, False
    for number in range(1, 60):
        sender, channel = choose.choice([pair for pair in zip(senders, channels, strict=True) if not pair[0].ended])
        what = choose.choice(["time", "time", "idle", "back", "end"])
        if what == "end" and sum(not one.ended for one in senders) == 1:
            what = "time"  # Something is always open.
        element: ev.Element
        if what == "time":
            sender.time = max(sender.time, choose.randrange(100))
            element = ev.Watermark(sender.time)
        elif what == "end":
            sender.ended, element = True, ev.EndOfData()
        else:
            sender.idle, element = what == "idle", ev.Idle(what == "idle")
        commands = task.handle(ev.Received(channel, element))
        # The barrier lets all count that the epoch has brought.
        for each in channels:
            commands += task.handle(ev.Received(each, ev.Barrier(number)))
        commands += task.handle(ev.Completed(number))
        emitted = [command.element for command in commands if isinstance(command, ev.Emit)]
        times = [one.timestamp for one in emitted if isinstance(one, ev.Watermark)]
        reached = max(reached, expected(senders))
        assert task.watermark == reached
        assert times == sorted(set(times))
        idle = all(one.idle or one.ended for one in senders)
        assert task.is_idle is idle
        assert [one.idle for one in emitted if isinstance(one, ev.Idle)] == ([idle] if idle is not said else [])
        said = idle
        # Whoever goes on from here begins at the same time.
        restored = [edge._replace(watermark=task.progress()[0][edge.id]) for edge in inputs]
        assert Task(ev.TaskId("op", 0), restored, []).restored_watermark == reached
