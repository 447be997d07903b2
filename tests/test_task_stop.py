"""A stop without drain: what is held, what is told, and what happens when it comes to nothing.

L2 to L6 are the orders in which the inputs of a task end (D drained, S stopped, I left) that Flink's own rules list.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from stateformat.backends.dataflow.events import (
    Aborted,
    Acknowledge,
    AdvanceWatermark,
    Completed,
    ConfirmProcessed,
    DataProcessed,
    Emit,
    EndInput,
    Finish,
    HoldSource,
    NotifyAborted,
    NotifyComplete,
    ReportLogicEnded,
    Snapshot,
    SourceEnded,
    Triggered,
    Watermark,
)
from stateformat.backends.dataflow.task import Task, TaskState
from stateformat.errors import InvalidInput
from tests.task_cases import (
    DRAIN,
    END,
    GONE,
    OUT,
    STOP,
    barrier,
    channels,
    edge,
    end_of_logic,
    only,
    processed,
    started,
    stop,
    tell,
)

A, B = channels("a", 2)


def held(**more: Any) -> Task:
    task = started(edge("a", 2), **more)
    tell(task, (A, stop(7)), (B, stop(7)))
    assert task.state is TaskState.STOPPED_AT_BARRIER
    return task


# Sources -----------------------------------------------------------------------------------------------------------------


def test_a_source_is_held_at_its_barrier() -> None:
    task = started()
    assert tell(task, Triggered(stop(7))) == [
        HoldSource(hold=True),
        Snapshot(stop(7), False, {}, {}),
        Emit(stop(7)),
        Acknowledge(7, False),
    ]
    assert not task.may_read


def test_a_source_says_that_it_stopped_when_the_savepoint_is_complete_and_not_before() -> None:
    task = started()
    tell(task, Triggered(stop(7)))
    assert tell(task, Completed(7)) == [NotifyComplete(7), Emit(STOP)]
    assert task.state is TaskState.STOPPING
    assert tell(task, DataProcessed(OUT)) == GONE


def test_a_source_without_consumers_leaves_at_once() -> None:
    task = started(outputs=())
    tell(task, Triggered(stop(7)))
    assert tell(task, Completed(7)) == [NotifyComplete(7), Emit(STOP), *GONE]


def test_a_late_completion_of_an_older_checkpoint_stops_nobody() -> None:
    task = started()
    tell(task, Triggered(barrier(6)), Triggered(stop(7)))
    assert tell(task, Completed(6)) == [NotifyComplete(6)]
    assert task.state is TaskState.STOPPED_AT_BARRIER


def test_an_aborted_stop_lets_the_source_go_on_as_if_nothing_had_been_asked() -> None:
    task = started()
    tell(task, Triggered(stop(7)))
    assert tell(task, Aborted(6)) == []
    assert not task.may_read
    assert tell(task, Aborted(7)) == [NotifyAborted(7), HoldSource(hold=False)]
    assert task.may_read
    assert tell(task, SourceEnded()) == end_of_logic()


def test_a_held_source_neither_ends_nor_advances() -> None:
    task = started()
    tell(task, Triggered(stop(7)))
    with pytest.raises(InvalidInput, match="stopped at barrier"):
        tell(task, SourceEnded())


def test_z9_a_source_that_had_ended_waits_for_that_very_savepoint() -> None:
    task = started()
    tell(task, SourceEnded(), Triggered(barrier(6)), Aborted(6), DataProcessed(OUT))
    assert tell(task, Triggered(stop(7))) == [Snapshot(stop(7), True, {}, {}), Emit(stop(7)), Acknowledge(7, True)]
    assert tell(task, Completed(7)) == [NotifyComplete(7), *GONE]


# Others ------------------------------------------------------------------------------------------------------------------


def test_nothing_is_emitted_behind_the_barrier_but_the_end_itself() -> None:
    task = held()
    commands = tell(task, (A, STOP), Completed(7), (A, END), (B, STOP), DataProcessed(OUT), (B, END))
    assert commands == [
        ConfirmProcessed(A),
        NotifyComplete(7),
        Emit(STOP),
        ConfirmProcessed(B),
        *GONE,
    ]
    assert only(commands, AdvanceWatermark, EndInput, Finish, ReportLogicEnded) == []


def test_l4_the_stop_is_told_on_in_whatever_order_it_comes() -> None:
    """Completion and both stops in every order: the last of them tells it, exactly once."""
    for order in itertools.permutations([Completed(7), (A, STOP), (B, STOP)]):
        task = held()
        *before, last = order
        assert only(tell(task, *before), Emit) == []
        assert task.state is TaskState.STOPPED_AT_BARRIER
        assert only(tell(task, last), Emit) == [Emit(STOP)]
        assert task.state is TaskState.STOPPING


def test_l3_an_input_that_drained_before_and_one_that_stops_last() -> None:
    task = started(edge("a", 2), edge("f", 1, input=1))
    (other,) = channels("f", 1)
    assert only(tell(task, (A, DRAIN), (B, DRAIN)), EndInput) == [EndInput(0)]
    tell(task, (A, stop(7)), (B, stop(7)), (other, Watermark(3)), (other, stop(7)))
    assert task.state is TaskState.STOPPED_AT_BARRIER
    commands = tell(task, Completed(7), (other, STOP))
    assert commands == [NotifyComplete(7), Emit(STOP), ConfirmProcessed(other)]
    assert tell(task, (A, END), (B, END), DataProcessed(OUT), (other, END)) == GONE


def test_l2_an_input_that_stops_first_and_one_that_drains_last_end_without_finish() -> None:
    task = held()
    commands = tell(task, (A, STOP), Completed(7), (B, DRAIN))
    assert only(commands, Emit, EndInput, Finish) == [Emit(STOP)]


def test_l6_inputs_that_leave_one_by_one() -> None:
    task = held(outputs=())
    commands = tell(task, Completed(7), (A, STOP), (A, END), (B, STOP), (B, END))
    assert only(commands, Emit) == [Emit(STOP), GONE[1]]
    assert task.state is TaskState.ENDED


def test_a_stop_that_completes_last_of_all() -> None:
    task = held(outputs=())
    assert tell(task, (A, STOP), (A, END), (B, STOP), (B, END)) == [ConfirmProcessed(A), ConfirmProcessed(B)]
    assert tell(task, Completed(7)) == [NotifyComplete(7), Emit(STOP), *GONE]


def test_the_end_of_a_channel_can_be_what_holds_a_task() -> None:
    task = started(edge("a", 2))
    tell(task, (A, DRAIN), (B, stop(7)))
    assert only(tell(task, (A, END)), Acknowledge) == [Acknowledge(7, False)]
    assert task.state is TaskState.STOPPED_AT_BARRIER
    assert only(tell(task, Completed(7), (B, STOP)), Emit) == [Emit(STOP)]


def test_l7_a_task_that_had_ended_waits_for_that_very_savepoint_and_says_nothing_twice() -> None:
    task = started(edge("a", 2))
    tell(task, (A, DRAIN), (B, DRAIN), (A, stop(7)))
    assert only(tell(task, (B, stop(7))), Acknowledge) == [Acknowledge(7, True)]
    tell(task, (A, END), (B, END), DataProcessed(OUT))
    assert tell(task, Completed(7)) == [NotifyComplete(7), *GONE]


def test_after_an_aborted_stop_everything_goes_on() -> None:
    task = held()
    assert tell(task, Aborted(7)) == [NotifyAborted(7)]
    assert task.state is TaskState.RUNNING
    assert tell(task, (A, "r"), (A, DRAIN), (B, DRAIN)) == [
        processed(A, "r"),
        ConfirmProcessed(A),
        *end_of_logic(0, confirm=B),
    ]


def test_an_abort_before_the_alignment_was_complete_holds_nobody() -> None:
    task = started(edge("a", 2))
    tell(task, (A, stop(7)))
    assert tell(task, Aborted(7), (B, stop(7)), (A, "r")) == [processed(A, "r")]
    assert task.state is TaskState.RUNNING


def test_what_ended_while_it_was_held_ends_when_the_stop_is_aborted() -> None:
    task = held()
    assert tell(task, (A, DRAIN), (B, DRAIN)) == [ConfirmProcessed(A), ConfirmProcessed(B)]
    assert tell(task, Aborted(7)) == [NotifyAborted(7), *end_of_logic(0)]


def test_a_second_stop_after_an_aborted_one_is_its_own() -> None:
    task = held()
    tell(task, Aborted(7), (A, stop(8)), (B, stop(8)))
    assert task.state is TaskState.STOPPED_AT_BARRIER
    assert tell(task, Completed(7)) == []
    assert only(tell(task, Completed(8), (A, STOP), (B, STOP)), Emit) == [Emit(STOP)]


def test_a_task_that_stopped_waits_for_its_consumers_and_its_producers() -> None:
    task = held()
    tell(task, Completed(7), (A, STOP), (B, STOP), (A, END))
    assert tell(task, DataProcessed(OUT)) == []
    assert task.state is TaskState.STOPPING
    assert tell(task, Completed(7)) == []
    assert tell(task, (B, END)) == GONE
