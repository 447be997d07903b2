"""Tasks: their lives as scripts, and what a script cannot say.

The table of legal moves: what it refuses, how it tells, and the page that is made from it. A task
in worlds that do anything that is legal, in any order: see ``task_world.py`` for what is asserted.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from stateformat.backends.dataflow import events as ev
from stateformat.backends.dataflow.task import ANSWER_ROUNDS_MAX, Task
from stateformat.backends.dataflow.task_inputs import Inputs
from stateformat.backends.dataflow.task_states import (
    LEGAL,
    EventKind,
    TaskState,
    TaskStateMachine,
    diagram,
    kind_of,
    page,
    table,
)
from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from tests.dataflow.task_scripts import Script, channel, edges_of, event, make_task, play, scripts, started, tell
from tests.dataflow.task_world import World

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


PAGE = Path(__file__).resolve().parents[2] / "docs" / "task-life.md"


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_every_move_between_two_states_is_an_arrow_of_the_diagram_and_no_other_is() -> None:
    drawn = {
        (before, after, kind)
        for before, after, kinds in re.findall(r"(?m)^ {4}(\w+) --> (\w+): (.*)$", diagram())
        for kind in kinds.split("<br/>")
    }
    legal = {
        (state.name.lower(), to.name.lower(), kind.value)
        for state, kinds in LEGAL.items()
        for kind, targets in kinds.items()
        for to in targets - {state}
    }
    assert drawn == legal
    assert len(drawn) > 20


def test_every_kind_is_a_row_of_the_table_and_every_state_but_canceled_a_column() -> None:
    head, _, *rows = table().split("\n")
    columns = [cell.strip() for cell in head.split("|")[2:-1]]
    assert columns == [state.value for state in TaskState if state is not TaskState.CANCELED]
    assert [row.split("|")[1].strip() for row in rows] == [kind.value for kind in EventKind]
    for row in rows:
        kind = EventKind(row.split("|")[1].strip())
        for name, cell in zip(columns, row.split("|")[2:-1], strict=True):
            assert bool(cell.strip()) is (kind in LEGAL[TaskState(name)])


def test_nothing_leads_out_of_the_end_and_everything_leads_to_cancellation() -> None:
    assert LEGAL[TaskState.ENDED] == {EventKind.CANCEL: {TaskState.ENDED}}
    assert LEGAL[TaskState.CANCELED] == {kind: {TaskState.CANCELED} for kind in EventKind}
    for state in set(TaskState) - {TaskState.ENDED}:
        assert LEGAL[state][EventKind.CANCEL] == {TaskState.CANCELED}


def test_every_event_and_every_element_has_a_kind() -> None:
    one: dict[str, Any] = {"channel": None, "barrier": None, "number": 1, "timestamp": 1, "idle": True}
    for kind in ev.TaskEvent.__args__:
        if kind is not ev.Received:
            made = kind(*(one[name] for name in kind._fields if name in one))
            assert isinstance(kind_of(made, feedback=False), EventKind)
    elements = [event(f"a0{element}") for element in (":r", "@1", "|1", "#drain", "#stop", "#end")]
    assert len({kind_of(element, feedback=False) for element in elements}) == 6
    fed_back = [kind_of(element, feedback=True) for element in elements]
    assert fed_back == [EventKind.FED_BACK, *[EventKind.FEEDBACK_MARK] * 5]


def test_an_illegal_event_tells_what_happened_to_the_task() -> None:
    task = started("a:2")
    tell(task, "a0:secret a0|1")
    with pytest.raises(InvalidInput, match=r"task task\[0\] was told SourceEnded") as caught:
        tell(task, "source-ended")
    assert caught.value.kind is ErrorKind.ILLEGAL_EVENT
    assert "opening: start; running: Records on a 0->0; running: Barrier(number=1" in str(caught.value)
    assert "secret" not in str(caught.value), "an error shows no records"
    assert (caught.value.details["task"], caught.value.details["state"]) == ("task[0]", "running")


def test_the_history_is_short_however_long_the_life() -> None:
    task = started("")
    tell(task, " ".join(f"@{time}" for time in range(1, 100)))
    with pytest.raises(InvalidInput) as caught:
        tell(task, "a0#drain")
    assert str(caught.value).count("SourceAdvanced") == 20
    assert "timestamp=99" in str(caught.value)
    assert "timestamp=79)" not in str(caught.value)


@pytest.mark.parametrize(
    ("before", "illegal", "why"),
    [
        ("", "out0:r", "no such channel"),
        ("a0#drain", "a0:r", "the data of the channel has ended"),
        ("a0#drain", "a0@3", "the data of the channel has ended"),
        ("a0#drain", "a0#drain", "the data of the channel has ended"),
        ("", "a0#end", "left without an end of its data"),
        ("a0#drain a0#end", "a0#end", "its sender has left"),
        ("a0#drain a0#end", "a0|4", "its sender has left"),
        ("a0|1", "a0:r", "the channel is blocked"),
        ("", "a0#stop", "end of data, stopped cannot happen to a task that is running"),
        ("", "@1", "source advanced cannot happen"),
        ("", "end-source", "end the source cannot happen"),
        ("", "start", "start cannot happen to a task that is running"),
        ("", "completed1", "has not acknowledged it"),
        ("a0|1", "completed1", "has not acknowledged it"),
        ("a0|1 a1|1 loop0|1", "completed1+end", "only the head of a loop"),
        ("", "a0^|1~", "only where it may overtake"),
        ("", "loop0^|1~", "only where it may overtake"),
        ("", "a0|1s~", "savepoints and rounds are aligned"),
        ("", "a0|1d", "when the logic of every task has ended"),
        ("a0|1s a1|1s", "a0:r", "records cannot happen to a task that is stopped at barrier"),
        ("a0|1s a1|1s", "a0|2", "barrier 1 has stopped it"),
        ("a0|1s a1|1s", "|2", "barrier 1 has stopped it"),
        ("a0|1s a1|1s loop0|1s", "loop0:r", "behind the barrier of a stop without drain"),
        ("a0#drain a1#drain |1 a0#end a1#end loop0|1", "completed1+end", "the end of time has not gone round"),
        (
            "a0#drain a1#drain |1 a0#end a1#end loop0|1 completed1+max |2 loop0|2 completed2+end",
            "loop0:r",
            r"its loop has ended.*but not in finish\(\), not in end_input\(\)",
        ),
    ],
)
def test_an_illegal_event_is_refused_and_changes_nothing(before: str, illegal: str, why: str) -> None:
    task, twin = started("a:2 loop:1/1*"), started("a:2 loop:1/1*")
    assert tell(task, before) == tell(twin, before)
    with pytest.raises(InvalidInput, match=why) as first:
        tell(task, illegal)
    with pytest.raises(InvalidInput) as second:
        tell(task, illegal)
    assert str(first.value) == str(second.value), "the history too is what it was"
    rest = "aborted9 |10" if "+end" in before else "aborted9 loop0:r loop0|1 |10 loop0|10"
    assert (tell(task, rest), task.state) == (tell(twin, rest), twin.state)


def test_nothing_is_delivered_to_a_task_that_has_ended() -> None:
    task = started("")
    tell(task, "source-ended |1 out0.processed completed1")
    with pytest.raises(InvalidInput, match="ended"):
        tell(task, "completed2")
    assert tell(task, "canceled") == ""
    assert task.state is TaskState.ENDED


@pytest.mark.parametrize("before", ["", "source-ended", "|1s"])
def test_nothing_is_emitted_or_acknowledged_after_a_cancellation(before: str) -> None:
    task = started("")
    tell(task, before)
    assert tell(task, "canceled |5 source-ended completed1 aborted1 out0.processed @max") == ""
    assert task.state is TaskState.CANCELED
    assert not task.may_read


def test_a_move_that_is_not_in_the_table_is_a_mistake_of_the_task_itself() -> None:
    machine = TaskStateMachine(ev.TaskId("task", 0))
    machine.admit(EventKind.START, "start")
    with pytest.raises(AssertionError, match="may not become ended"):
        machine.move(TaskState.ENDED)


SHAPES = {
    "one channel": "a:1",
    "two inputs": "a:2 f:1/1",
    "hashed": "h:3~",
    "mixed": "a:1 h:2/1~",
    "head of a loop": "a:1 loop:2/1*",
    "head with two inputs": "h:2~ a:1/2 loop:1/1*",
}


def live(shape: str, steps: int, *, unaligned: bool, seed: int) -> World:
    choose = random.Random(seed)
    world = World(SHAPES[shape], unaligned=unaligned, first=seed)
    for _ in range(steps):
        possible = world.steps()
        if not possible:
            break
        choose.choice(possible)()
    return world


@settings(max_examples=400, deadline=None)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    steps=st.integers(0, 160),
    unaligned=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_whatever_happens_in_whatever_order(shape: str, steps: int, unaligned: bool, seed: int) -> None:
    world = live(shape, steps, unaligned=unaligned, seed=seed)
    world.run_out()
    assert world.task.state is TaskState.ENDED
