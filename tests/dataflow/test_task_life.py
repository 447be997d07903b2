"""The table of legal moves: what it refuses, how it tells, and the page that is made from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stateformat.backends.dataflow import events as ev
from stateformat.backends.dataflow.task.states import (
    LEGAL,
    EventKind,
    TaskState,
    TaskStateMachine,
    diagram,
    kind_of,
    page,
    table,
)
from stateformat.errors import ErrorKind, InvalidInput
from tests.dataflow.task_scripts import event, started, tell

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
