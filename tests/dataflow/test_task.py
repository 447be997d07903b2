"""Tasks: their lives as scripts, and what a script cannot say."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from stateformat.backends.dataflow import events as ev
from stateformat.backends.dataflow.task.inputs import Inputs
from stateformat.backends.dataflow.task.states import TaskState
from stateformat.backends.dataflow.task.task import ANSWER_ROUNDS_MAX, Task
from stateformat.errors import ErrorKind, InvalidState
from tests.dataflow.task_scripts import Script, channel, edges_of, event, make_task, play, scripts, started, tell

LIVES = scripts(Path(__file__).with_name("lives_of_tasks.txt"))


def test_names_of_scripts_are_unique() -> None:
    assert len({script.name for script in LIVES}) == len(LIVES) > 140


@pytest.mark.parametrize("script", LIVES, ids=lambda script: script.name)
def test_a_life(script: Script) -> None:
    assert play(script) == script.lines


@pytest.mark.parametrize(
    ("text", "events", "watermark", "restored", "may_read"),
    [
        ("", "@3", 3, ev.MIN_WATERMARK, True),
        ("", "|1s", ev.MIN_WATERMARK, ev.MIN_WATERMARK, False),
        ("", "|1s aborted1", ev.MIN_WATERMARK, ev.MIN_WATERMARK, True),
        ("", "source-ended", ev.MAX_WATERMARK, ev.MIN_WATERMARK, False),
        ("a:1", "a0@6", 6, ev.MIN_WATERMARK, False),
        ("a:0@3 f:1/1@4", "", 4, 3, False),
    ],
)
def test_what_an_executor_asks(text: str, events: str, watermark: int, restored: int, may_read: bool) -> None:
    task = started(text)
    tell(task, events)
    assert (task.watermark, task.restored_watermark, task.may_read) == (watermark, restored, may_read)


def test_a_channel_is_blocked_by_its_barrier_or_by_one_that_comes_round_early() -> None:
    task = started("a:2 loop:2/1*")
    tell(task, "a0|1 loop0|1")
    assert task.blocked == {channel("a0"), channel("loop0")}
    assert {name for name in ("a0", "a1", "loop0", "loop1") if task.is_blocked(channel(name))} == {"a0", "loop0"}
    releases = task.releases
    tell(task, "a1|1")
    assert task.blocked == set()
    assert task.releases > releases


def test_a_channel_that_stopped_stays_where_it_was_and_ends_no_input() -> None:
    inputs = Inputs(edges_of("a:2"))
    inputs.advance(channel("a0"), 4)
    inputs.end_data(channel("a0"), ev.EndOfData(drain=False))
    inputs.end_data(channel("a1"), ev.EndOfData(drain=True))
    inputs.release_time()
    assert (inputs.watermark, inputs.drained_inputs, inputs.all_data_ended) == (4, [], True)


def test_answers_without_end_are_refused_with_the_name_of_the_operator() -> None:
    task = started("a:1 asks")
    tell(task, "a0#drain")
    for _ in range(ANSWER_ROUNDS_MAX - 1):
        assert tell(task, "sent answered") == "ask-coordinator"
    with pytest.raises(InvalidState, match=f"operator 'task' .* for {ANSWER_ROUNDS_MAX} rounds") as caught:
        tell(task, "sent answered")
    assert caught.value.kind is ErrorKind.LIMIT_EXCEEDED


def test_a_chain_of_tasks_needs_one_checkpoint_however_long_it_is() -> None:
    tasks = [make_task(f"e{number}:1" if number else "") for number in range(5)]
    inbox: dict[int, list[Any]] = {number: [] for number in range(6)}
    acknowledged: list[int] = []

    def carry(number: int, commands: list[ev.TaskCommand]) -> None:
        for command in commands:
            match command:
                case ev.Emit(element):
                    inbox[number + 1].append(ev.Received(ev.Channel(f"e{number + 1}", 0, 0), element))
                case ev.ConfirmProcessed():
                    carry(number - 1, tasks[number - 1].handle(event("out0.processed")))
                case ev.Acknowledge():
                    acknowledged.append(number)

    def flow() -> None:
        for number in range(1, 5):
            while inbox[number]:
                carry(number, tasks[number].handle(inbox[number].pop(0)))

    for task in tasks:
        task.start()
    carry(0, tasks[0].handle(ev.SourceEnded()))
    flow()
    assert {task.state for task in tasks} == {TaskState.WAITING}
    tell(tasks[4], "out0.processed")
    carry(0, tasks[0].handle(event("|1")))
    flow()
    assert acknowledged == [0, 1, 2, 3, 4]
    for number in reversed(range(5)):
        carry(number, tasks[number].handle(ev.Completed(1)))
    flow()
    assert {task.state for task in tasks} == {TaskState.ENDED}


def test_nothing_is_delivered_before_the_start() -> None:
    task = Task(ev.TaskId("task", 0), edges_of("a:1"), ())
    with pytest.raises(ValueError, match="opening"):
        tell(task, "a0:r")
    assert tell(task, "start") == ""


def outcome(commands: list[ev.TaskCommand]) -> tuple[list[ev.TaskCommand], set[ev.Channel]]:
    """What is done in which order, of watermarks the last one, and the channels confirmed."""
    confirmed: set[ev.Channel] = set()
    others: list[ev.TaskCommand] = []
    for command in reversed(commands):
        match command:
            case ev.ConfirmProcessed(at):
                confirmed.add(at)
            case ev.ConfirmAllProcessed(several):
                confirmed.update(several)
            case ev.AdvanceWatermark() if any(isinstance(one, ev.AdvanceWatermark) for one in others):
                pass
            case ev.Emit(ev.Watermark()) if any(isinstance(one, ev.Emit) for one in others):
                pass
            case _:
                others.append(command)
    return others, confirmed


def alike(task: Task, waiting: dict[ev.Channel, list[ev.Element]], drawn: ev.Channel) -> list[ev.Channel]:
    """The channel drawn, and those of its edge whose next elements can be taken together with its
    own.
    """
    element = waiting[drawn][0]
    others = [
        at
        for at, elements in waiting.items()
        if elements
        and at != drawn
        and at.edge == drawn.edge
        and not task.is_blocked(at)
        and type(elements[0]) is type(element)
        and (isinstance(element, ev.Watermark) or elements[0] == element)
    ]
    return [drawn, *others]


@pytest.mark.parametrize("unaligned", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_what_is_alike_may_come_together_or_in_turn(seed: int, unaligned: bool) -> None:
    chance = random.Random(seed)
    tasks = started("a:5 b:3"), started("a:5 b:3")
    waiting: dict[ev.Channel, list[ev.Element]] = {}
    for name in [f"a{number}" for number in range(5)] + [f"b{number}" for number in range(3)]:
        times = sorted(chance.sample(range(20), 4))
        first, second = (ev.Barrier(number, unaligned=unaligned and chance.random() < 0.3) for number in (1, 2))
        life = [ev.Watermark(times[0]), ev.Watermark(times[1]), first, ev.Watermark(times[2]), second]
        end = [ev.EndOfData(), ev.EndOfPartition()]
        # Some senders end between two barriers, and some before all.
        cut = chance.choice((0, 3, 5, 5, 5))
        waiting[channel(name)] = [*life[:cut], end[0], *(one for one in life[cut:] if isinstance(one, ev.Barrier))]
        waiting[channel(name)] += end[1:]
    while any(waiting.values()):
        open_ones = [at for at, elements in waiting.items() if elements and not tasks[0].is_blocked(at)]
        together = alike(tasks[0], waiting, chance.choice(open_ones))
        elements = [waiting[at].pop(0) for at in together]
        if tasks[0].state is TaskState.ENDED:
            break
        singly = [
            command
            for at, element in zip(together, elements, strict=True)
            for command in tasks[0].handle(ev.Received(at, element))
        ]
        assert outcome(tasks[1].together.receive(together, elements)) == outcome(singly)
        mine, other = tasks
        assert (mine.state, mine.blocked, mine.watermark) == (other.state, other.blocked, other.watermark)
        assert mine.progress() == other.progress()
    assert tasks[0].state is TaskState.WAITING
    outputs = [channel("out0")]
    assert outcome(tasks[0].handle(ev.DataProcessed(outputs[0]))) == outcome(tasks[1].together.processed(outputs))
