"""The table of legal moves: what it refuses, how it tells, and the page that is made from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stateformat.backends.dataflow import events
from stateformat.backends.dataflow.events import MAX_WATERMARK, Completed, LoopStep, TaskId
from stateformat.backends.dataflow.task import Task, TaskState
from stateformat.backends.dataflow.task.states import LEGAL, EventKind, TaskStateMachine, diagram, kind_of, page, table
from stateformat.errors import ErrorKind, InvalidInput
from tests.task_cases import DRAIN, END, OUT, STOP, barrier, channels, edge, on, started, stop, tell

DOCS = Path(__file__).resolve().parent.parent / "docs"
A, B = channels("a", 2)
(LOOP,) = channels("loop", 1)


def test_the_page_is_what_the_table_says() -> None:
    assert (DOCS / "task-life.md").read_text(encoding="utf-8") == page(), "run `make docs`"


def test_every_move_between_two_states_is_an_arrow_of_the_diagram_and_no_other_is() -> None:
    drawn = {
        (before, after, fact)
        for before, after, facts in re.findall(r"(?m)^ {4}(\w+) --> (\w+): (.*)$", diagram())
        for fact in facts.split("<br/>")
    }
    legal = {
        (state.name.lower(), to.name.lower(), fact.value)
        for state, facts in LEGAL.items()
        for fact, targets in facts.items()
        for to in targets
        if to is not state
    }
    assert drawn == legal
    assert len(drawn) > 20


def test_every_fact_is_a_row_of_the_table_and_every_state_but_canceled_a_column() -> None:
    head, _, *rows = table().split("\n")
    columns = [cell.strip() for cell in head.split("|")[2:-1]]
    assert columns == [state.value for state in TaskState if state is not TaskState.CANCELED]
    assert [row.split("|")[1].strip() for row in rows] == [fact.value for fact in EventKind]
    for row in rows:
        fact = EventKind(row.split("|")[1].strip())
        for name, cell in zip(columns, row.split("|")[2:-1], strict=True):
            assert bool(cell.strip()) is (fact in LEGAL[TaskState(name)])


def test_nothing_leads_out_of_the_end_and_everything_leads_to_cancellation() -> None:
    assert LEGAL[TaskState.ENDED] == {EventKind.CANCEL: {TaskState.ENDED}}
    assert set(LEGAL[TaskState.CANCELED].values()) == {frozenset({TaskState.CANCELED})}
    assert set(LEGAL[TaskState.CANCELED]) == set(EventKind)
    for state in set(TaskState) - {TaskState.ENDED}:
        assert LEGAL[state][EventKind.CANCEL] == {TaskState.CANCELED}


def test_every_event_and_every_element_is_a_fact() -> None:
    one: dict[Any, Any] = {"channel": A, "barrier": barrier(1), "number": 1, "timestamp": 1}
    for kind in events.TaskEvent.__args__:
        if kind is not events.Received:
            event = kind(*(one[name] for name in kind._fields if name in one))
            assert isinstance(kind_of(event, feedback=False), EventKind)
    ordinary = {
        kind_of(on(A, element), feedback=False) for element in ("r", events.Watermark(1), barrier(1), DRAIN, STOP, END)
    }
    assert len(ordinary) == 6
    assert kind_of(on(A, "r"), feedback=True) is EventKind.FED_BACK
    assert {kind_of(on(A, mark), feedback=True) for mark in (events.Watermark(1), barrier(1), DRAIN, STOP, END)} == {
        EventKind.FEEDBACK_MARK
    }


def test_an_illegal_event_tells_the_story_of_the_task() -> None:
    task = started(edge("a", 2))
    tell(task, (A, "secret"), (A, barrier(1)))
    with pytest.raises(InvalidInput, match=r"task task\[0\] was told SourceEnded") as told:
        task.handle(events.SourceEnded())
    assert told.value.kind is ErrorKind.ILLEGAL_EVENT
    assert "opening: start; running: Records on a 0->0; running: Barrier(number=1" in str(told.value)
    assert "secret" not in str(told.value), "records are nobody's business"
    assert (told.value.details["task"], told.value.details["state"]) == ("task[0]", "running")


def test_the_story_is_short_however_long_the_life() -> None:
    task = started()
    for time in range(1, 100):
        tell(task, events.SourceAdvanced(time))
    with pytest.raises(InvalidInput) as told:
        task.handle(events.Received(A, DRAIN))
    assert str(told.value).count("SourceAdvanced") == 20
    assert "timestamp=99" in str(told.value)
    assert "timestamp=79)" not in str(told.value)


ILLEGAL: list[tuple[list[Any], Any, str]] = [
    ([], on(OUT, "r"), "no such channel"),
    ([(A, DRAIN)], on(A, "r"), "the data of the channel has ended"),
    ([(A, DRAIN)], on(A, events.Watermark(3)), "the data of the channel has ended"),
    ([(A, DRAIN)], on(A, DRAIN), "the data of the channel has ended"),
    ([], on(A, END), "left without an end of its data"),
    ([(A, DRAIN), (A, END)], on(A, END), "its sender has left"),
    ([(A, DRAIN), (A, END)], on(A, barrier(4)), "its sender has left"),
    ([(A, barrier(1))], on(A, "r"), "the channel is blocked"),
    ([], on(A, STOP), "end of data, stopped cannot happen to a task that is running"),
    ([], events.SourceAdvanced(1), "source advanced cannot happen"),
    ([], events.EndSource(), "end the source cannot happen"),
    ([], Completed(1), "has not acknowledged it"),
    ([(A, barrier(1))], Completed(1), "has not acknowledged it"),
    ([(A, barrier(1)), (B, barrier(1)), (LOOP, barrier(1))], Completed(1, LoopStep.END), "only the head of a loop"),
    ([], events.Announced(A, barrier(1, unaligned=True)), "only where it may overtake"),
    ([], events.Announced(LOOP, barrier(1, unaligned=True)), "only where it may overtake"),
    ([], on(A, stop(1)._replace(unaligned=True)), "savepoints and rounds are aligned"),
    ([], on(A, barrier(1, events.BarrierKind.STOP_DRAIN)), "when the logic of every task has ended"),
    ([(A, stop(1)), (B, stop(1))], on(A, "r"), "records cannot happen to a task that is stopped at barrier"),
    ([(A, stop(1)), (B, stop(1))], on(A, barrier(2)), "barrier 1 has stopped it"),
    ([(A, stop(1)), (B, stop(1))], events.Triggered(barrier(2)), "barrier 1 has stopped it"),
    ([(A, stop(1)), (B, stop(1)), (LOOP, stop(1))], on(LOOP, "r"), "behind the barrier of a stop without drain"),
    ([(A, DRAIN), (B, DRAIN), events.Triggered(barrier(1)), (A, END), (B, END), (LOOP, barrier(1))],
     Completed(1, LoopStep.END), "the end of time has not gone round"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "event", "why"), ILLEGAL)
def test_an_illegal_event_is_refused_and_changes_nothing(before: list[Any], event: Any, why: str) -> None:
    edges = (edge("a", 2), edge("loop", 1, input=1, feedback=True))
    task, twin = started(*edges), started(*edges)
    tell(task, *before)
    tell(twin, *before)
    with pytest.raises(InvalidInput, match=why) as first:
        task.handle(event)
    with pytest.raises(InvalidInput) as second:
        task.handle(event)
    assert str(first.value) == str(second.value), "the story too is what it was"
    rest = [events.Aborted(9), (LOOP, "r"), (LOOP, barrier(1)), events.Triggered(barrier(10)), (LOOP, barrier(10))]
    assert (tell(task, *rest), task.state) == (tell(twin, *rest), twin.state)


def test_nothing_is_delivered_before_the_start_nor_started_twice() -> None:
    task = Task(TaskId("task", 0), [edge("a", 1)], ())
    with pytest.raises(InvalidInput, match="opening"):
        task.handle(on(A, "r"))
    assert task.start() == []
    with pytest.raises(InvalidInput, match="start cannot happen to a task that is running"):
        task.start()


def test_nothing_is_delivered_to_a_task_that_is_gone() -> None:
    task = started()
    tell(task, events.SourceEnded(), events.Triggered(barrier(1)), events.DataProcessed(OUT), Completed(1))
    with pytest.raises(InvalidInput, match="ended"):
        task.handle(Completed(2))
    assert tell(task, events.Canceled()) == []
    assert task.state is TaskState.ENDED


@pytest.mark.parametrize("before", [[], [events.SourceEnded()], [events.Triggered(stop(1))]])
def test_nothing_is_emitted_or_acknowledged_after_a_cancellation(before: list[Any]) -> None:
    task = started()
    tell(task, *before)
    late = [events.Canceled(), events.Triggered(barrier(5)), events.SourceEnded(), Completed(1), events.Aborted(1)]
    assert tell(task, *late, events.DataProcessed(OUT), events.SourceAdvanced(MAX_WATERMARK)) == []
    assert task.state is TaskState.CANCELED
    assert not task.may_read


def test_a_move_that_is_not_in_the_table_is_a_mistake_of_the_task_itself() -> None:
    life = TaskStateMachine(TaskId("task", 0))
    life.admit(EventKind.START, "start")
    with pytest.raises(AssertionError, match="may not become ended"):
        life.move(TaskState.ENDED)
