"""The end of a task whose operator has a coordinator: the answers come before the last end of an input."""

from __future__ import annotations

from typing import Any

import pytest

from stateformat.backends.dataflow import events
from stateformat.backends.dataflow.events import (
    MAX_WATERMARK,
    Acknowledge,
    AdvanceWatermark,
    Answered,
    AskCoordinator,
    Completed,
    ConfirmProcessed,
    Emit,
    EndInput,
    Finish,
    LoopStep,
    NotifyComplete,
    ReportLogicEnded,
    Snapshot,
)
from stateformat.backends.dataflow.task import Task, TaskState
from stateformat.backends.dataflow.task.task import ANSWER_ROUNDS_MAX
from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from tests.task_cases import DRAIN, END, STOP, barrier, channels, edge, only, started, stop, tell

A, B = channels("a", 2)
(C,) = channels("c", 1)
(LOOP,) = channels("loop", 1)
TIME = AdvanceWatermark(MAX_WATERMARK, ending=True)
ENDING: list[Any] = [Finish(), Emit(DRAIN), ReportLogicEnded()]


def asking(*before: Any) -> Task:
    """A task that has asked."""
    task = started(edge("a", 2), asks=True)
    tell(task, *before, (A, DRAIN), (B, DRAIN))
    assert task.state is TaskState.ASKING
    return task


def test_the_last_input_ends_when_the_coordinator_has_answered_and_earlier_ones_before() -> None:
    task = started(edge("a", 2), edge("c", input=1), asks=True)
    assert tell(task, (C, DRAIN)) == [EndInput(1), ConfirmProcessed(C)]
    assert tell(task, (A, DRAIN)) == [ConfirmProcessed(A)]
    assert tell(task, (B, DRAIN)) == [TIME, AskCoordinator(), ConfirmProcessed(B)]
    assert tell(task, Answered()) == [EndInput(0), *ENDING]
    assert task.state is TaskState.WAITING


def test_what_is_sent_while_it_asks_is_answered_too() -> None:
    task = asking()
    task.message_sent()
    assert tell(task, Answered()) == [AskCoordinator()]
    assert tell(task, Answered()) == [EndInput(0), *ENDING]


def test_what_was_sent_before_it_asked_needs_one_question() -> None:
    task = started(edge("a", 2), asks=True)
    task.message_sent()
    tell(task, (A, DRAIN), (B, DRAIN))
    assert tell(task, Answered()) == [EndInput(0), *ENDING]


def test_a_restore_behind_the_end_asks_again() -> None:
    task = Task(events.TaskId("task", 0), [edge("a", 0, watermark=MAX_WATERMARK)], (), asks=True)
    assert task.start() == [TIME, AskCoordinator()]
    assert tell(task, Answered()) == [EndInput(0), *ENDING]


def test_a_snapshot_between_question_and_answer_is_that_of_a_task_that_runs() -> None:
    task = asking()
    (taken,) = only(tell(task, (A, barrier(1)), (B, barrier(1))), Snapshot)
    assert (taken.finishing, taken.ended, taken.watermarks) == (False, {"a": False}, {"a": MAX_WATERMARK})
    assert tell(task, Completed(1)) == [NotifyComplete(1)]
    assert task.state is TaskState.ASKING
    assert tell(task, (A, END), (B, END), Answered()) == [EndInput(0), *ENDING]
    assert tell(task, events.Triggered(barrier(2))).last() == [Acknowledge(2, finishing=True)]


def test_a_checkpoint_that_is_aborted_leaves_it_asking() -> None:
    task = asking()
    tell(task, (A, barrier(1)))
    assert task.is_blocked(A)
    assert tell(task, events.Aborted(1)) == []
    assert (task.state, task.is_blocked(A)) == (TaskState.ASKING, False)


def test_a_stop_without_drain_holds_it_and_an_aborted_one_lets_it_ask_on() -> None:
    task = asking()
    tell(task, (A, stop(1)), (B, stop(1)))
    assert task.state is TaskState.STOPPED_AT_BARRIER
    with pytest.raises(
        InvalidInput, match="coordinator has answered cannot happen to a task that is stopped at barrier"
    ):
        task.handle(Answered())
    tell(task, events.Aborted(1))
    assert task.state is TaskState.ASKING
    tell(task, (A, stop(2)), (B, stop(2)))
    assert tell(task, Completed(2)) == [NotifyComplete(2), Emit(STOP)]


def test_an_input_that_ends_while_a_stop_holds_the_task_makes_it_ask_when_the_stop_is_aborted() -> None:
    task = started(edge("a", 2), asks=True)
    tell(task, (A, stop(1)), (B, stop(1)), (A, DRAIN), (B, DRAIN))
    assert task.state is TaskState.STOPPED_AT_BARRIER
    assert tell(task, events.Aborted(1)).last(2) == [TIME, AskCoordinator()]


def test_the_head_of_a_loop_asks_when_it_is_told_to_end_and_takes_what_is_fed_back_meanwhile() -> None:
    task = started(edge("a", 2), edge("loop", input=1, feedback=True), asks=True)
    tell(task, (A, DRAIN), (B, DRAIN), events.Triggered(barrier(1)), (A, END), (B, END), (LOOP, barrier(1)))
    tell(task, Completed(1, LoopStep.MAX_WATERMARK), events.Triggered(barrier(2)), (LOOP, barrier(2)))
    assert tell(task, Completed(2, LoopStep.END)) == [NotifyComplete(2), AskCoordinator()]
    tell(task, (LOOP, "r"), events.Triggered(barrier(3)), (LOOP, barrier(3)), Completed(3))
    assert task.state is TaskState.ASKING
    assert tell(task, Answered()) == [EndInput(1), *ENDING]


def test_answers_without_end_are_refused_with_the_name_of_the_operator() -> None:
    task = asking()
    for _ in range(ANSWER_ROUNDS_MAX - 1):
        task.message_sent()
        assert tell(task, Answered()) == [AskCoordinator()]
    task.message_sent()
    with pytest.raises(InvalidState, match=f"operator 'task' .* for {ANSWER_ROUNDS_MAX} rounds") as told:
        task.handle(Answered())
    assert told.value.kind is ErrorKind.LIMIT_EXCEEDED


@pytest.mark.parametrize("asks", [False, True])
def test_only_a_task_that_has_asked_is_answered(asks: bool) -> None:
    task = started(edge("a", 2), asks=asks)
    with pytest.raises(InvalidInput, match="coordinator has answered cannot happen to a task that is running"):
        task.handle(Answered())
