"""Heads of loops: the log from barrier to barrier, quiet, and how a loop ends."""

from __future__ import annotations

from typing import Any

import pytest

from stateformat.backends.dataflow.events import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    Aborted,
    Acknowledge,
    AdvanceWatermark,
    Announced,
    Completed,
    ConfirmProcessed,
    DataProcessed,
    Emit,
    EndInput,
    Finish,
    LogRecords,
    LoopStep,
    NotifyAborted,
    NotifyComplete,
    ReportInputsEnded,
    ReportLogicEnded,
    Snapshot,
    TaskCommand,
    TaskId,
    Triggered,
    Watermark,
)
from stateformat.backends.dataflow.task import InputEdge, Task, TaskState
from stateformat.errors import InvalidInput
from tests.task_cases import (
    DRAIN,
    END,
    GONE,
    MAX,
    OUT,
    STOP,
    Told,
    barrier,
    channels,
    edge,
    only,
    processed,
    started,
    stop,
    tell,
    turn,
)

(A,) = channels("a", 1)
(B,) = channels("b", 1)
P, Q = channels("loop", 2)
LOOP = edge("loop", 2, input=1, feedback=True)


def head(*more: InputEdge, **options: Any) -> Task:
    return started(edge("a", 1), LOOP, *more, **options)


def drained(**options: Any) -> Task:
    """A head with nothing left but its loop."""
    task = head(**options)
    tell(task, (A, Watermark(5)), (A, MAX), (A, DRAIN), (A, END))
    assert task.state is TaskState.DRAINING
    return task


def logged(channel: Any, batch: str) -> TaskCommand:
    return LogRecords(channel, batch)  # type: ignore[arg-type]


def turned(task: Task, number: int, *between: Any) -> Acknowledge:
    """A whole turn: triggered, and the barrier back on both channels. Its acknowledgement."""
    commands = tell(task, Triggered(turn(number)), (P, turn(number)), *between, (Q, turn(number)))
    (acknowledgement,) = only(commands, Acknowledge)
    assert isinstance(acknowledgement, Acknowledge)
    return acknowledgement


# The log -----------------------------------------------------------------------------------------------------------------


def test_each_channel_is_logged_from_the_snapshot_to_its_own_barrier_and_processed_all_the_while() -> None:
    task = head()
    assert tell(task, (P, "early")) == [processed(P, "early")]
    commands = tell(task, (A, barrier(1)))
    assert commands == [Snapshot(barrier(1), False, {"a": MIN_WATERMARK}, {"a": False}), Emit(barrier(1))]
    assert tell(task, (P, "1"), (Q, "2"), (P, barrier(1)), (P, "3"), (Q, "4")) == [
        logged(P, "1"),
        processed(P, "1"),
        logged(Q, "2"),
        processed(Q, "2"),
        processed(P, "3"),
        logged(Q, "4"),
        processed(Q, "4"),
    ]
    assert tell(task, (Q, barrier(1))) == [Acknowledge(1, False, quiet=False)]
    assert tell(task, (Q, "5")) == [processed(Q, "5")]


def test_feedback_channels_count_for_no_alignment() -> None:
    task = started(edge("a", 1), edge("b", 1, input=2), LOOP)
    assert tell(task, (A, barrier(1)), (P, "r")) == [processed(P, "r")]
    assert task.blocked == {A}
    assert only(tell(task, (B, barrier(1))), Emit) == [Emit(barrier(1))]


def test_a_barrier_that_comes_back_before_the_snapshot_blocks_its_channel_until_then() -> None:
    """Another head of the loop was faster: what follows its barrier belongs behind this head's snapshot."""
    task = head()
    assert tell(task, (P, barrier(1))) == []
    assert task.blocked == {P}
    assert task.is_blocked(P)
    assert not task.is_blocked(Q)
    tell(task, (A, barrier(1)))
    assert task.blocked == set()
    assert tell(task, (P, "r")) == [processed(P, "r")], "its barrier is back: nothing is logged"
    assert tell(task, (Q, barrier(1))) == [Acknowledge(1, False, quiet=True)]


@pytest.mark.parametrize("freed_by", [Aborted(1), (A, barrier(2))])
def test_such_a_channel_is_freed_by_an_abort_and_by_a_later_snapshot(freed_by: Any) -> None:
    task = head()
    tell(task, (P, barrier(1)), freed_by)
    assert task.blocked == set()
    assert task.state is TaskState.RUNNING


def test_barriers_of_aborted_checkpoints_that_come_back_mean_nothing() -> None:
    task = head()
    tell(task, (A, barrier(1)), (P, "1"))
    assert tell(task, Aborted(1)) == [NotifyAborted(1)]
    assert tell(task, (P, "2"), (P, barrier(1)), (Q, barrier(1))) == [processed(P, "2")]
    assert task.blocked == set()
    assert tell(task, Aborted(2), (P, barrier(2))) == []
    assert task.blocked == set()


def test_a_newer_barrier_puts_an_end_to_a_log() -> None:
    task = head()
    tell(task, (A, barrier(1)), (P, barrier(1)))
    commands = tell(task, (A, barrier(2)))
    assert commands.first() == [NotifyAborted(1)]
    assert tell(task, (Q, barrier(1)), (Q, "r"), (Q, barrier(2)), (P, barrier(2))) == [
        logged(Q, "r"),
        processed(Q, "r"),
        Acknowledge(2, False, quiet=False),
    ]


def test_channels_that_ended_are_not_waited_for() -> None:
    task = head()
    assert tell(task, (P, DRAIN), (P, END)) == [ConfirmProcessed(P)]
    tell(task, (A, barrier(1)), (Q, DRAIN))
    assert tell(task, (Q, END)) == [Acknowledge(1, False, quiet=True)]


def test_a_head_takes_an_unaligned_snapshot_but_its_feedback_is_never_overtaken() -> None:
    task = started(edge("a", 1, overtakable=True), LOOP)
    over = barrier(1, unaligned=True)
    tell(task, Announced(A, over))
    commands = tell(task, (P, over), (Q, over))
    assert commands == [Acknowledge(1, False, quiet=False)], "records may have been overtaken inside of the loop"


def test_time_does_not_go_round() -> None:
    task = head()
    assert tell(task, (P, Watermark(3)), (Q, MAX)) == []
    assert tell(task, (A, Watermark(2))) == [AdvanceWatermark(2), Emit(Watermark(2))]


# Quiet -------------------------------------------------------------------------------------------------------------------


def test_a_head_is_quiet_if_nothing_was_fed_back_from_the_barrier_before_to_the_return_of_this_one() -> None:
    task = drained()
    assert turned(task, 1).quiet
    tell(task, (P, "r"))
    assert not turned(task, 2).quiet, "forwarded since the barrier before"
    assert turned(task, 3).quiet
    assert not turned(task, 4, (Q, "r")).quiet, "logged"
    assert not turned(task, 5).quiet, "forwarded since the barrier before, though after the snapshot"
    assert turned(task, 6).quiet


def test_replayed_records_count_as_forwarded() -> None:
    task = drained(replayed=True)
    assert not turned(task, 1).quiet
    assert turned(task, 2).quiet


def test_a_round_logs_nothing_and_yet_knows() -> None:
    task = drained()
    commands = tell(task, Triggered(turn(1)), (P, "r"), (P, turn(1)), (Q, turn(1)))
    assert only(commands, Snapshot, LogRecords) == []
    assert commands.last() == [Acknowledge(1, False, quiet=False, inputs_ended=True)]


def test_what_an_acknowledgement_says_of_the_inputs_is_as_of_the_snapshot() -> None:
    task = head()
    tell(task, (A, barrier(1)), (A, DRAIN), (P, barrier(1)))
    assert tell(task, (Q, barrier(1))) == [Acknowledge(1, False, quiet=True, inputs_ended=False)]


# The end -----------------------------------------------------------------------------------------------------------------


def test_a_head_whose_inputs_have_drained_holds_the_end_of_time_and_its_own_end_back() -> None:
    task = head()
    assert tell(task, (A, Watermark(5)), (A, MAX)) == [AdvanceWatermark(5), Emit(Watermark(5))]
    assert tell(task, (A, DRAIN)) == [ReportInputsEnded(), ConfirmProcessed(A)]
    assert task.state is TaskState.DRAINING
    assert tell(task, (P, "r")) == [processed(P, "r")]


def test_a_quiet_loop_ends_in_two_steps() -> None:
    task = drained()
    assert turned(task, 1) == Acknowledge(1, False, quiet=True, inputs_ended=True, max_watermark_sent=False)
    assert tell(task, Completed(1, LoopStep.MAX_WATERMARK)) == [
        AdvanceWatermark(MAX_WATERMARK),
        Emit(MAX),
        EndInput(0),
    ]
    assert turned(task, 2) == Acknowledge(2, False, quiet=True, inputs_ended=True, max_watermark_sent=True)
    assert tell(task, Completed(2, LoopStep.END)) == [EndInput(1), Finish(), Emit(DRAIN), ReportLogicEnded()]
    assert task.state is TaskState.WAITING


def test_a_step_may_be_told_twice() -> None:
    task = drained()
    turned(task, 1)
    tell(task, Completed(1, LoopStep.MAX_WATERMARK))
    turned(task, 2)
    assert tell(task, Completed(2, LoopStep.MAX_WATERMARK)) == []


def test_steps_are_told_at_a_checkpoint_as_at_a_round() -> None:
    task = drained()
    tell(task, Triggered(barrier(1)), (P, barrier(1)), (Q, barrier(1)))
    commands = tell(task, Completed(1, LoopStep.MAX_WATERMARK))
    assert commands.first() == [NotifyComplete(1)]
    assert EndInput(0) in commands


def test_a_head_whose_logic_has_ended_waits_for_no_feedback() -> None:
    task = drained()
    turned(task, 1)
    tell(task, Completed(1, LoopStep.MAX_WATERMARK))
    turned(task, 2)
    tell(task, Completed(2, LoopStep.END))
    commands = tell(task, Triggered(barrier(3)))
    assert commands.last() == [Acknowledge(3, True, quiet=True, inputs_ended=True, max_watermark_sent=True)]
    assert tell(task, (P, DRAIN), (P, barrier(3)), (P, barrier(4)), (Q, DRAIN)) == [
        ConfirmProcessed(P),
        ConfirmProcessed(Q),
    ]
    assert task.blocked == set()
    tell(task, DataProcessed(OUT))
    assert tell(task, Completed(3)) == [NotifyComplete(3), *GONE]


def test_what_is_fed_back_to_a_loop_that_has_ended_is_refused_and_not_lost() -> None:
    task = drained()
    turned(task, 1)
    tell(task, Completed(1, LoopStep.MAX_WATERMARK))
    turned(task, 2)
    tell(task, Completed(2, LoopStep.END))
    with pytest.raises(InvalidInput, match=r"its loop has ended.*not in finish\(\)"):
        tell(task, (P, "r"))


def test_an_input_that_is_not_the_last_ends_at_once() -> None:
    task = started(edge("a", 1), edge("b", 1, input=2), LOOP)
    tell(task, (B, Watermark(4)))
    assert tell(task, (A, DRAIN)) == [EndInput(0), ConfirmProcessed(A)]
    assert tell(task, (B, DRAIN)) == [ReportInputsEnded(), ConfirmProcessed(B)]


def test_progress_of_a_head_that_holds_the_end_of_time_back_says_so() -> None:
    task = drained()
    (snapshot,) = only(tell(task, Triggered(barrier(1)), (P, barrier(1)), (Q, barrier(1))), Snapshot)
    assert isinstance(snapshot, Snapshot)
    assert (snapshot.watermarks, snapshot.ended) == ({"a": 5}, {"a": False}), "nothing of feedback, and not the end"
    tell(task, Completed(1, LoopStep.MAX_WATERMARK))
    (snapshot,) = only(tell(task, Triggered(barrier(2))), Snapshot)
    assert isinstance(snapshot, Snapshot)
    assert (snapshot.watermarks, snapshot.ended) == ({"a": MAX_WATERMARK}, {"a": True})


def restored(*edges: InputEdge) -> tuple[Task, Told]:
    task = Task(TaskId("head", 0), edges, (OUT,))
    return task, Told(task.start())


def test_a_restored_head_goes_on_where_it_held_back() -> None:
    task, commands = restored(edge("a", 0, watermark=5), LOOP)
    assert commands == [AdvanceWatermark(5), Emit(Watermark(5)), ReportInputsEnded()]
    assert task.state is TaskState.DRAINING
    assert not turned(task, 1).max_watermark_sent
    assert tell(task, Completed(1, LoopStep.MAX_WATERMARK)).last() == [EndInput(0)]


def test_a_restored_head_that_had_sent_the_end_of_time_sends_it_again_and_ends_no_input_twice() -> None:
    task, commands = restored(edge("a", 0, watermark=MAX_WATERMARK, ended=True), LOOP)
    assert commands == [AdvanceWatermark(MAX_WATERMARK), Emit(MAX), ReportInputsEnded()]
    assert turned(task, 1).max_watermark_sent
    assert tell(task, Completed(1, LoopStep.END)).first() == [EndInput(1)]


def test_in_loops_within_loops_an_inner_head_waits_for_the_outer_one() -> None:
    """Input 2 comes from another head of the same loop, which ends only when the whole loop does."""
    task = started(edge("a", 1), edge("b", 1, input=2, inside=True), LOOP)
    assert tell(task, (A, DRAIN)) == [EndInput(0), ReportInputsEnded(), ConfirmProcessed(A)]
    assert tell(task, (B, "r"), (B, Watermark(3))) == [processed(B, "r")]
    commands = tell(task, (B, turn(1)), Triggered(turn(1)), (A, END), (P, turn(1)), (Q, turn(1)))
    assert only(commands, AdvanceWatermark) == [AdvanceWatermark(3)]
    assert tell(task, Completed(1, LoopStep.MAX_WATERMARK)) == []
    assert tell(task, (B, MAX)) == [AdvanceWatermark(MAX_WATERMARK), Emit(MAX)]
    (acknowledgement,) = only(tell(task, (B, turn(2)), (P, turn(2)), (Q, turn(2))), Acknowledge)
    assert acknowledgement == Acknowledge(2, False, quiet=True, inputs_ended=True, max_watermark_sent=True)
    assert tell(task, Completed(2, LoopStep.END)) == []
    assert tell(task, (B, DRAIN)) == [
        EndInput(2), EndInput(1), Finish(), Emit(DRAIN), ReportLogicEnded(), ConfirmProcessed(B),
    ]  # fmt: skip


def test_a_log_is_whole_when_the_logic_ends_for_nothing_can_come_round_any_more() -> None:
    """The end of the outer head's data was overtaken by the barrier that the inner one logs for."""
    task = started(edge("b", 1, input=2, inside=True, overtakable=True), edge("a", 0), LOOP)
    over = barrier(2, unaligned=True)
    tell(task, (B, turn(1)), (P, turn(1)), (Q, turn(1)), Completed(1, LoopStep.MAX_WATERMARK))
    tell(task, Completed(1, LoopStep.END), Announced(B, over))
    commands = tell(task, (B, DRAIN))
    assert only(commands, Finish, Acknowledge) == [
        Finish(),
        Acknowledge(2, False, quiet=False, inputs_ended=True, max_watermark_sent=False),
    ]
    assert task.state is TaskState.WAITING


# Stops -------------------------------------------------------------------------------------------------------------------


def test_a_stop_without_drain_logs_what_is_fed_back_and_holds_it() -> None:
    task = head()
    tell(task, (A, stop(1)))
    assert tell(task, (P, "1"), (P, stop(1)), (Q, "2")) == [logged(P, "1"), logged(Q, "2")]
    assert tell(task, (Q, stop(1))) == [Acknowledge(1, False, quiet=False)]
    assert tell(task, Completed(1), (A, STOP)) == [NotifyComplete(1), Emit(STOP), ConfirmProcessed(A)]
    assert tell(task, (P, STOP), (P, END), (A, END), DataProcessed(OUT)) == [ConfirmProcessed(P), *GONE]


def test_an_aborted_stop_processes_what_was_held_in_order() -> None:
    task = head()
    tell(task, (A, stop(1)), (P, "1"), (Q, "2"), (P, "3"))
    assert tell(task, Aborted(1)) == [
        NotifyAborted(1), processed(P, "1"), processed(Q, "2"), processed(P, "3"),
    ]  # fmt: skip
    assert task.state is TaskState.RUNNING
    assert tell(task, (P, stop(1)), (Q, "4")) == [processed(Q, "4")]
    tell(task, (A, DRAIN))
    assert not turned_with_input(task, 2).quiet
    assert turned_with_input(task, 3).quiet


def turned_with_input(task: Task, number: int) -> Acknowledge:
    commands = tell(task, (A, turn(number)), (P, turn(number)), (Q, turn(number)))
    (acknowledgement,) = only(commands, Acknowledge)
    assert isinstance(acknowledgement, Acknowledge)
    return acknowledgement


def test_a_head_that_was_draining_stops_when_the_savepoint_is_complete_and_else_drains_on() -> None:
    for outcome in (Completed(1), Aborted(1)):
        task = drained()
        tell(task, Triggered(stop(1)), (P, "r"), (P, stop(1)), (Q, stop(1)))
        assert task.state is TaskState.STOPPED_AT_BARRIER
        commands = tell(task, outcome)
        if isinstance(outcome, Completed):
            assert commands == [NotifyComplete(1), Emit(STOP)], "all that it hears from outside had ended before"
            assert task.state is TaskState.STOPPING
        else:
            assert commands == [NotifyAborted(1), processed(P, "r")], "the coordinator knows of its inputs already"
            assert task.state is TaskState.DRAINING
            assert not turned(task, 2).quiet
