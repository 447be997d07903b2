"""Channels, inputs and ready tasks: what one step costs does not grow with their number.

A wide edge: its senders tell all receivers once, and every channel keeps its order.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from typing import Any

import pytest

from stateformat.backends.dataflow import events as ev
from stateformat.backends.dataflow.task import Task
from stateformat.backends.dataflow.task_inputs import InputEdge, Inputs
from stateformat.backends.runtime import CAPACITY, EdgeLog, Queue, Worker
from stateformat.backends.runtime.channels import Outputs, ReadyInputs
from tests.worlds.local import Count, Line, rows, settle, to_end

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
    monkeypatch.setattr("stateformat.backends.runtime.channels.Queue", _Queue)
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


class _Task:
    """A task that blocks the channels it is told to."""

    def __init__(self) -> None:
        self.blocked: set[ev.Channel] = set()
        self.releases = 0
        self.together = self

    def is_blocked(self, channel: ev.Channel) -> bool:
        return channel in self.blocked

    def blocks_any(self, channels: list[ev.Channel]) -> bool:
        return not self.blocked.isdisjoint(channels)

    def release(self) -> None:
        self.releases += bool(self.blocked)
        self.blocked.clear()


class _Edge:
    """Both ends of a wide edge, and what every channel has to bring."""

    def __init__(self, senders: int, receivers: int) -> None:
        self.log = EdgeLog(
            [tuple(ev.Channel("e", one, two) for two in range(receivers)) for one in range(senders)],
            [tuple(ev.Channel("e", one, two) for one in range(senders)) for two in range(receivers)],
        )
        self.owed = {channel: deque[ev.Element]() for end in self.log.receiving for channel in end.channels}
        self.wakes = [0] * receivers
        self.tasks: list[Any] = [_Task() for _ in range(receivers)]
        self.inputs = [self._inputs(receiver) for receiver in range(receivers)]
        self.outputs = [
            Outputs({}, {"e": end}, overtaken={"e"}, announce=lambda *_: None, on_room=lambda: None)
            for end in self.log.sending
        ]

    def _inputs(self, receiver: int) -> ReadyInputs:
        inputs, end = ReadyInputs(self.tasks[receiver]), self.log.receiving[receiver]

        def on_queue(queue: Queue) -> None:
            queue.on_element, queue.on_empty = inputs.add, inputs.remove

        def on_told() -> None:
            self.wakes[receiver] += 1

        end.on_queue, end.on_told = on_queue, on_told
        inputs.told.append(end)
        return inputs

    def tell(self, sender: int, element: ev.Element) -> None:
        self.outputs[sender].put(element)
        for channel in self.log.sending[sender].channels:
            self.owed[channel].append(element)

    def send(self, sender: int, receiver: int, row: Any) -> None:
        self.outputs[sender].queue_to["e"](receiver).put(ev.Records(row))
        self.owed[ev.Channel("e", sender, receiver)].append(ev.Records(row))

    def step(self, receiver: int, choose: random.Random) -> None:
        drawn = self.inputs[receiver].draw(choose)
        channels, elements = (
            ([drawn.channel], [drawn.get()]) if isinstance(drawn, Queue) else drawn.take(self.tasks[receiver])
        )
        assert len({type(element) for element in elements}) <= 1
        for channel, element in zip(channels, elements, strict=True):
            assert channel.receiver == receiver
            assert channel not in self.tasks[receiver].blocked
            assert self.owed[channel].popleft() == element
        if elements and not isinstance(elements[0], ev.Watermark):
            assert all(element == elements[0] for element in elements)

    def to_end(self, choose: random.Random) -> None:
        for receiver, inputs in enumerate(self.inputs):
            self.tasks[receiver].release()
            while inputs.any_open():
                self.step(receiver, choose)


@pytest.mark.parametrize("seed", range(40))
def test_every_channel_brings_what_was_put_into_it_in_order(seed: int) -> None:
    choose = random.Random(seed)
    senders, receivers = choose.randint(1, 5), choose.randint(1, 5)
    edge, told = _Edge(senders, receivers), [0] * senders
    for number in range(600):
        sender, receiver = choose.randrange(senders), choose.randrange(receivers)
        end, task = edge.log.receiving[receiver], edge.tasks[receiver]
        match choose.randrange(9):
            case 0 | 1 if not edge.outputs[sender].full:
                told[sender] += 1
                kinds = (ev.Watermark(number), ev.Barrier(told[sender]), ev.Idle(bool(told[sender] % 2)))
                edge.tell(sender, choose.choice(kinds))
            case 2 if not edge.outputs[sender].full:
                edge.send(sender, receiver, number)
            case 3:
                task.blocked.add(ev.Channel("e", sender, receiver))
            case 4:
                task.release()
            case 5 if choose.random() < 0.2:
                end.to_queues()
            case 6 if choose.random() < 0.2:
                end.queue_from(sender)
            case _ if edge.inputs[receiver].any_open():
                edge.step(receiver, choose)
        kept = edge.log.senders
        assert max(map(kept.count, range(senders))) <= CAPACITY
        assert all(edge.outputs[of].full for of in edge.log.full)
        waiting = [sum(len(edge.owed[channel]) for channel in end.channels) for end in edge.log.receiving]
        queued = [sum(len(queue.elements) for queue in end._queues.values()) for end in edge.log.receiving]
        assert waiting == [end.waiting + lies for end, lies in zip(edge.log.receiving, queued, strict=True)]
    edge.to_end(choose)
    assert not any(edge.owed.values())
    edge.log.trim()
    assert not edge.log.elements
    assert not any(outputs.full for outputs in edge.outputs)


def test_a_sender_waits_for_the_receiver_that_is_behind_and_goes_on_when_it_has_taken_everything() -> None:
    edge, choose = _Edge(2, 3), random.Random(1)
    for number in range(CAPACITY):
        assert not edge.outputs[0].full
        edge.tell(0, ev.Watermark(number))
    assert edge.outputs[0].full
    assert not edge.outputs[1].full
    for receiver in (0, 1):
        edge.step(receiver, choose)
        assert edge.outputs[0].full
    edge.step(2, choose)
    assert not edge.outputs[0].full
    assert not edge.log.elements


def test_a_receiver_is_woken_once_for_what_it_takes_in_one_step() -> None:
    edge, choose = _Edge(50, 3), random.Random(1)
    for sender in range(50):
        edge.tell(sender, ev.Barrier(1))
    assert edge.wakes == [1, 1, 1]
    edge.step(0, choose)
    assert not edge.inputs[0].any_open()
    assert sum(len(end._queues) for end in edge.log.receiving) == 0, "nothing has to wait, so no channel has a queue"
    edge.tell(7, ev.EndOfData())
    assert edge.wakes == [2, 1, 1]


def test_what_is_behind_a_barrier_that_blocks_waits_in_its_channel_and_the_rest_is_taken() -> None:
    edge, choose = _Edge(3, 1), random.Random(1)
    edge.tasks[0].blocked.add(ev.Channel("e", 0, 0))
    edge.tell(0, ev.Watermark(5))
    edge.tell(1, ev.Barrier(1))
    edge.tell(1, ev.Watermark(6))
    edge.tell(2, ev.Barrier(1))
    edge.step(0, choose)
    assert [len(edge.owed[channel]) for channel in edge.log.receiving[0].channels] == [1, 1, 0]
    edge.step(0, choose)
    assert not edge.inputs[0].any_open()
    edge.to_end(choose)
    assert not any(edge.owed.values())


def test_in_a_wide_job_only_channels_with_rows_have_queues() -> None:
    line = Line([rows(*range(100))], op=Count, how="key_by", parallelism=20)
    run = line.begin()
    to_end(run)
    assert sum(line.out.seen) == 100
    counted = [worker for task, worker in run.tasks.items() if task.vertex == "op"]
    assert len(counted) == 20
    assert all({channel.sender for channel in worker.inputs} <= {0} for worker in counted)
