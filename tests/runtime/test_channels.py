"""Channels, inputs and ready tasks: what one step costs does not grow with their number."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from stateformat.backends.dataflow import events as ev
from stateformat.backends.dataflow.task.inputs import InputEdge, Inputs
from stateformat.backends.dataflow.task.task import Task
from stateformat.backends.runtime import Queue, Worker
from stateformat.backends.runtime.channels import ReadyInputs
from tests.local_jobs import Count, Line, rows, settle, to_end

LOOKS: Counter[str] = Counter()


class _Queue(Queue):
    """A queue that counts how often somebody looks into it."""

    __slots__ = ("_elements",)

    @property  # type: ignore[override]
    def elements(self) -> Any:
        LOOKS["looks"] += 1
        return self._elements

    @elements.setter
    def elements(self, value: Any) -> None:
        self._elements = value


class _Channel(ev.Channel):
    """A channel that counts how often it is looked up."""

    __slots__ = ()

    def __hash__(self) -> int:
        LOOKS["looks"] += 1
        return super().__hash__()


def looks_per_channel(parallelism: int) -> float:
    """A step takes what all channels of a task have, so it is the channels that count."""
    line = Line([rows(*range(1000))], op=Count, how="key_by", parallelism=parallelism, checkpoint_interval_us=100_000)
    run = line.begin()
    LOOKS.clear()
    while run.step():
        pass
    return LOOKS["looks"] / parallelism**2


def test_what_is_looked_at_grows_no_faster_than_the_number_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stateformat.backends.runtime.Queue", _Queue)
    monkeypatch.setattr("stateformat.backends.runtime.channels.edge_log.Queue", _Queue)
    monkeypatch.setattr(ev, "Channel", _Channel)
    narrow, wide = looks_per_channel(16), looks_per_channel(40)
    # 2.5 times as many channels would be 2.5 times as many looks at each, if each looked at all.
    assert wide < 1.6 * narrow


@pytest.mark.parametrize("seed", range(6))
def test_the_watermark_is_the_least_of_the_channels_however_they_rise(seed: int) -> None:
    choose = random.Random(seed)
    channels = [ev.Channel("e", number, 0) for number in range(choose.randint(1, 6))]
    edge = InputEdge("e", 0, tuple(channels), watermark=choose.choice([ev.MIN_WATERMARK, 5]))
    inputs = Inputs([edge])
    heard = dict.fromkeys(channels, ev.MIN_WATERMARK)
    ended: set[ev.Channel] = set()
    for _ in range(400):
        channel = choose.choice(channels)
        if channel in ended:
            continue
        if choose.random() < 0.01:
            drain = choose.random() < 0.7
            inputs.end_data(channel, ev.EndOfData(drain=drain))
            inputs.release_time()
            ended.add(channel)
            heard[channel] = ev.MAX_WATERMARK if drain else heard[channel]
        else:
            timestamp = choose.randint(0, 300)
            inputs.advance(channel, timestamp)
            heard[channel] = max(heard[channel], timestamp)
        assert inputs.watermark_of(edge) == max(edge.watermark, min(heard.values()))
        assert inputs.all_data_ended == (len(ended) == len(channels))


def test_a_source_without_event_time_does_not_let_the_times_of_the_others_pile_up() -> None:
    channels = (ev.Channel("e", 0, 0), ev.Channel("e", 1, 0))
    inputs = Inputs([InputEdge("e", 0, channels)])
    for timestamp in range(10_000):
        inputs.advance(channels[1], timestamp)
    assert len(inputs._least["e"]._heap) < 200


def test_channels_are_drawn_evenly_and_a_blocked_one_waits_for_the_snapshot() -> None:
    channels = tuple(ev.Channel("e", number, 0) for number in range(4))
    task = Task(ev.TaskId("t", 0), [InputEdge("e", 0, channels)], [])
    task.start()
    queues = [Queue(channel, capacity=None) for channel in channels]
    waiting = ReadyInputs(task)
    for queue in queues:
        queue.on_element, queue.on_empty = waiting.add, waiting.remove
        queue.put(ev.Watermark(1))
        queue.put(ev.Watermark(2))
    choose = random.Random(1)
    drawn = Counter(waiting.draw(choose).channel.sender for _ in range(4000))
    assert min(drawn.values()) > 850

    task.handle(ev.Received(channels[0], ev.Barrier(1)))
    assert {waiting.draw(choose).channel.sender for _ in range(200)} == {1, 2, 3}
    assert queues[0].get() == ev.Watermark(1), "what lies in a blocked channel can be taken: a log may want it"
    for channel in channels[1:]:
        assert waiting.any_open()
        task.handle(ev.Received(channel, ev.Barrier(1)))
    assert {waiting.draw(choose).channel.sender for _ in range(200)} == {0, 1, 2, 3}, "all are free again"
    for queue in queues:
        while queue.elements:
            queue.get()
    assert not waiting.any_open()


def test_a_step_asks_few_tasks_whether_they_are_ready_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = itertools.count()
    ready = Worker.ready
    monkeypatch.setattr(Worker, "ready", lambda self, now: (next(asked), ready(self, now))[1])
    line = Line(*[[rows(n)] for n in range(40)], op=Count, how="key_by", parallelism=40)
    run = line.begin()
    steps = 0
    while run.step():
        steps += 1
    assert sum(line.out.seen) == 40
    assert len(run.tasks) == 120
    assert next(asked) < 5 * steps


def test_readers_that_wait_for_the_clock_are_asked_again_when_their_time_has_come() -> None:
    line = Line([rows(1)], [rows(2)], [rows(3)], parallelism=3, shut=True)
    run = line.begin()
    settle(run, 500)
    assert run.rows_read == 0
    for split in range(3):
        line.tap.let(split)
    to_end(run)
    assert line.out.seen == [1, 2, 3]
