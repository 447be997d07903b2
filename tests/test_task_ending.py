"""Time, ends and leaving: watermarks, end of inputs, finish, the final checkpoint, restore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from stateformat.backends.dataflow.events import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    Aborted,
    Acknowledge,
    AdvanceWatermark,
    BarrierKind,
    Completed,
    ConfirmProcessed,
    DataProcessed,
    Emit,
    EndInput,
    EndOfData,
    EndSource,
    Finish,
    NotifyAborted,
    NotifyComplete,
    ReportLogicEnded,
    Snapshot,
    SourceAdvanced,
    SourceEnded,
    TaskCommand,
    TaskId,
    Triggered,
    Watermark,
)
from stateformat.backends.dataflow.task import InputEdge, Task, TaskState
from stateformat.backends.dataflow.task.inputs import Inputs
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
    end_of_logic,
    only,
    processed,
    started,
    stop,
    tell,
    turn,
)

A, B = channels("a", 2)
(F,) = channels("f", 1)


def advance(timestamp: int) -> list[TaskCommand]:
    return [AdvanceWatermark(timestamp), Emit(Watermark(timestamp))]


# Time --------------------------------------------------------------------------------------------------------------------


def test_time_is_the_least_of_all_channels_and_never_falls_back() -> None:
    task = started(edge("a", 2), edge("f", 1, input=1))
    assert tell(task, (A, Watermark(5)), (B, Watermark(7))) == []
    assert tell(task, (F, Watermark(6))) == advance(5)
    assert tell(task, (A, Watermark(3)), (A, Watermark(6))) == advance(6)
    assert tell(task, (A, Watermark(9)), (B, Watermark(9))) == [], "the other input is at 6"
    assert task.watermark == 6


def test_a_watermark_that_falls_back_on_its_channel_has_no_effect() -> None:
    task = started(edge("a", 2))
    assert tell(task, (A, Watermark(9)), (A, Watermark(5)), (B, Watermark(7))) == advance(7)


def test_a_channel_that_stopped_stays_where_it_was_and_ends_no_input() -> None:
    inputs = Inputs([edge("a", 2)])
    inputs.advance(A, 4)
    inputs.end_data(A, STOP)
    inputs.end_data(B, DRAIN)
    inputs.release_time()
    assert inputs.watermark == 4
    assert inputs.drained_inputs == []
    assert inputs.all_data_ended


@pytest.mark.parametrize("purpose", [BarrierKind.CHECKPOINT, BarrierKind.ROUND])
def test_a_channel_that_has_drained_is_at_the_end_of_time_from_the_next_barrier_on(purpose: BarrierKind) -> None:
    task = started(edge("a", 2))
    tell(task, (A, Watermark(5)))
    assert tell(task, (B, DRAIN), (A, "r")) == [ConfirmProcessed(B), processed(A, "r")]
    commands = tell(task, (A, barrier(1, purpose)), (B, barrier(1, purpose)))
    assert only(commands, AdvanceWatermark, Emit) == [*advance(5), Emit(barrier(1, purpose))]
    assert tell(task, (A, Watermark(6))) == advance(6)


def test_a_stop_without_drain_lets_no_time_go_on_that_an_end_has_released() -> None:
    task = started(edge("a", 2))
    commands = tell(task, (A, Watermark(5)), (B, DRAIN), (A, stop(1)), (B, stop(1)))
    assert only(commands, AdvanceWatermark) == []
    assert only(tell(task, Aborted(1), (A, barrier(2)), (B, barrier(2))), AdvanceWatermark) == [AdvanceWatermark(5)]


def test_a_task_of_epochs_that_hears_several_channels_lets_time_go_on_at_barriers_only() -> None:
    task = Task(TaskId("task", 0), [edge("a", 2)], (OUT,), by_epoch=True)
    task.start()
    assert tell(task, (A, Watermark(5)), (B, Watermark(7)), (A, Watermark(6))) == []
    assert only(tell(task, (B, barrier(1)), (A, barrier(1))), AdvanceWatermark) == [AdvanceWatermark(6)]
    alone = Task(TaskId("task", 0), [edge("f", 1)], (OUT,), by_epoch=True)
    alone.start()
    assert tell(alone, (F, Watermark(5))) == advance(5)


def test_the_end_of_time_is_sent_once_however_it_came() -> None:
    task = started(edge("a", 1))
    assert tell(task, (A, MAX)) == advance(MAX_WATERMARK)
    assert tell(task, (A, "flushed in finish")) == [processed(A, "flushed in finish")]
    assert tell(task, (A, DRAIN)) == end_of_logic(0, confirm=A, time=False)


def test_a_source_advances_and_never_falls_back() -> None:
    task = started()
    assert tell(task, SourceAdvanced(4), SourceAdvanced(4), SourceAdvanced(2), SourceAdvanced(5)) == [
        *advance(4),
        *advance(5),
    ]


# Ends --------------------------------------------------------------------------------------------------------------------


def test_l1_drained_channels_end_the_logic_with_the_last_of_them() -> None:
    task = started(edge("a", 2))
    assert tell(task, (A, DRAIN)) == [ConfirmProcessed(A)]
    assert task.state is TaskState.RUNNING
    assert tell(task, (B, "r"), (B, DRAIN)) == [processed(B, "r"), *end_of_logic(0, confirm=B)]
    assert task.state is TaskState.WAITING


def test_two_inputs_end_at_different_times_each_once_and_before_the_time_that_it_held_up() -> None:
    task = started(edge("a", 2), edge("f", 1, input=1))
    tell(task, (F, Watermark(8)), (A, DRAIN), (F, "r"))
    assert tell(task, (B, DRAIN)) == [EndInput(0), ConfirmProcessed(B)]
    commands = tell(task, *((channel, barrier(1)) for channel in (A, B, F)))
    assert only(commands, AdvanceWatermark) == [AdvanceWatermark(8)]
    assert tell(task, (F, "s"), (F, Watermark(9))) == [processed(F, "s"), *advance(9)]
    assert tell(task, (F, DRAIN)) == end_of_logic(1, confirm=F)


def test_an_input_of_two_edges_ends_with_the_later_one() -> None:
    task = started(edge("a", 1), edge("f", 1), edge("g", 1, input=1))
    assert only(tell(task, (A, DRAIN)), EndInput) == []
    assert only(tell(task, (F, DRAIN)), EndInput) == [EndInput(0)]


def test_l5_the_end_of_a_channel_ends_no_input() -> None:
    task = started(edge("a", 2))
    assert tell(task, (A, DRAIN), (A, END)) == [ConfirmProcessed(A)]
    assert tell(task, (B, DRAIN), (B, END)) == end_of_logic(0, confirm=B)


@pytest.mark.parametrize("ends", [SourceEnded(), EndSource()])
def test_a_source_ends_by_itself_or_when_the_job_is_drained(ends: Any) -> None:
    task = started()
    assert tell(task, ends) == end_of_logic()
    assert not task.may_read
    assert tell(task, EndSource()) == [], "it had ended"


def test_a_source_may_be_read_while_it_runs() -> None:
    assert started().may_read
    assert not started(edge("a", 1)).may_read


# The final checkpoint ----------------------------------------------------------------------------------------------------


def waiting(**more: Any) -> Task:
    task = started(edge("a", 1), **more)
    tell(task, (A, DRAIN))
    return task


def leaves(task: Task, last: Any, *, with_: Sequence[TaskCommand] = ()) -> None:
    """The task leaves with this event and not before."""
    assert task.state is TaskState.WAITING
    assert tell(task, last) == [*with_, *GONE]
    assert task.state is TaskState.ENDED


def test_a_waiting_task_takes_part_in_checkpoints_as_finishing() -> None:
    task = waiting()
    assert tell(task, (A, barrier(1))) == [
        Snapshot(barrier(1), True, {"a": MAX_WATERMARK}, {"a": True}),
        Emit(barrier(1)),
        Acknowledge(1, True),
    ]


FACTS = {"completed": Completed(1), "processed": DataProcessed(OUT), "left": (A, END)}


@pytest.mark.parametrize("last", FACTS)
def test_it_leaves_when_its_checkpoint_is_complete_its_data_processed_and_its_producers_gone(last: str) -> None:
    task = waiting()
    tell(task, (A, barrier(1)), *(fact for name, fact in FACTS.items() if name != last))
    leaves(task, FACTS[last], with_=[NotifyComplete(1)] if last == "completed" else [])


def test_every_consumer_has_to_process_its_data() -> None:
    task = waiting(outputs=channels("out", 2))
    tell(task, (A, barrier(1)), (A, END), Completed(1), DataProcessed(channels("out", 2)[1]))
    leaves(task, DataProcessed(channels("out", 2)[0]))


def test_a_consumer_that_has_ended_may_be_told_of_before_the_logic_ends() -> None:
    task = started(edge("a", 1))
    assert tell(task, DataProcessed(OUT), DataProcessed(OUT)) == []
    tell(task, (A, DRAIN), (A, barrier(1)), (A, END))
    leaves(task, Completed(1), with_=[NotifyComplete(1)])


def test_without_consumers_a_completion_is_enough() -> None:
    task = started(outputs=())
    tell(task, SourceEnded(), Triggered(barrier(1)))
    leaves(task, Completed(1), with_=[NotifyComplete(1)])


def test_a_checkpoint_that_was_taken_before_the_logic_ended_lets_nobody_leave() -> None:
    task = started()
    tell(task, Triggered(barrier(1)), SourceEnded(), DataProcessed(OUT))
    assert tell(task, Completed(1)) == [NotifyComplete(1)]
    tell(task, Triggered(barrier(2)))
    leaves(task, Completed(2), with_=[NotifyComplete(2)])


def test_f2_f3_when_the_final_checkpoint_is_aborted_a_later_one_does() -> None:
    task = started()
    tell(task, SourceEnded(), DataProcessed(OUT), Triggered(barrier(1)))
    assert tell(task, Aborted(1)) == [NotifyAborted(1)]
    tell(task, Triggered(barrier(2)))
    leaves(task, Completed(2), with_=[NotifyComplete(2)])


def test_a_round_lets_nobody_leave_for_nothing_was_written() -> None:
    task = started()
    tell(task, SourceEnded(), DataProcessed(OUT), Triggered(turn(1)))
    assert tell(task, Completed(1)) == []
    assert task.state is TaskState.WAITING


def test_z8_after_the_savepoint_of_a_stop_only_that_one_counts() -> None:
    task = started(outputs=(OUT,))
    tell(task, SourceEnded(), Triggered(barrier(6)), Completed(6))
    tell(task, Triggered(barrier(7, BarrierKind.STOP_DRAIN)), DataProcessed(OUT))
    assert task.state is TaskState.WAITING, "the completion of 6 does not end it"
    leaves(task, Completed(7), with_=[NotifyComplete(7)])


def test_z8_a_late_completion_of_an_older_checkpoint_is_not_that_of_the_savepoint() -> None:
    task = started()
    tell(task, SourceEnded(), DataProcessed(OUT), Triggered(barrier(6)), Triggered(stop(7)))
    assert tell(task, Completed(6)) == [NotifyComplete(6)]
    leaves(task, Completed(7), with_=[NotifyComplete(7)])


@pytest.mark.parametrize("completed_before", [True, False])
def test_when_that_savepoint_is_aborted_what_counted_before_counts_again(completed_before: bool) -> None:
    task = started()
    tell(task, SourceEnded(), Triggered(barrier(6)), Completed(6) if completed_before else Aborted(6))
    tell(task, Triggered(stop(7)), DataProcessed(OUT))
    if completed_before:
        leaves(task, Aborted(7), with_=[NotifyAborted(7)])
    else:
        assert tell(task, Aborted(7)) == [NotifyAborted(7)]
        tell(task, Triggered(barrier(8)))
        leaves(task, Completed(8), with_=[NotifyComplete(8)])


def test_a_checkpoint_behind_a_savepoint_shows_that_the_stop_came_to_nothing() -> None:
    task = started()
    tell(task, SourceEnded(), DataProcessed(OUT), Triggered(stop(6)), Triggered(barrier(7)))
    leaves(task, Completed(7), with_=[NotifyComplete(7)])


def test_nothing_pending_is_cancelled_because_a_task_ends() -> None:
    task = started(edge("a", 2))
    tell(task, (A, DRAIN), (B, DRAIN), (A, barrier(1)), (B, barrier(1)), DataProcessed(OUT))
    tell(task, (A, barrier(2)))
    assert tell(task, Completed(1)) == [NotifyComplete(1)], "a checkpoint has begun here, and is acknowledged first"
    commands = tell(task, (B, barrier(2)), (A, END))
    assert only(commands, Acknowledge) == [Acknowledge(2, True)]
    leaves(task, (B, END))


def test_z12_a_pending_checkpoint_that_the_last_end_completes_is_acknowledged_before_leaving() -> None:
    task = waiting()
    tell(task, (A, barrier(1)), Completed(1), DataProcessed(OUT), Triggered(barrier(2)))
    commands = tell(task, (A, END))
    assert [type(command) for command in commands[:3]] == [Snapshot, Emit, Acknowledge]
    assert commands.last(3) == GONE


def test_a_pending_checkpoint_that_is_aborted_keeps_nobody() -> None:
    task = started(edge("a", 1, overtakable=True))
    tell(task, (A, DRAIN), (A, barrier(1)), Completed(1), DataProcessed(OUT), Triggered(barrier(2)))
    assert task.state is TaskState.WAITING
    assert tell(task, Aborted(2)) == []
    leaves(task, (A, END))


def test_a_chain_of_tasks_needs_one_checkpoint_however_long_it_is() -> None:
    edges = [channels(f"e{number}", 1)[0] for number in range(5)]
    tasks = [started(*([edge(f"e{number - 1}", 1)] if number else []), outputs=(edges[number],)) for number in range(5)]
    inbox: dict[Any, list[Any]] = {channel: [] for channel in edges}
    acknowledged: list[int] = []

    def carry(number: int, commands: list[TaskCommand]) -> None:
        for command in commands:
            if isinstance(command, Emit):
                inbox[edges[number]].append(command.element)
            elif isinstance(command, ConfirmProcessed):
                carry(number - 1, tell(tasks[number - 1], DataProcessed(command.channel)))
            elif isinstance(command, Acknowledge):
                acknowledged.append(number)

    def flow() -> None:
        for number in range(1, 5):
            while inbox[edges[number - 1]]:
                carry(number, tell(tasks[number], (edges[number - 1], inbox[edges[number - 1]].pop(0))))

    carry(0, tell(tasks[0], SourceEnded()))
    flow()
    assert {task.state for task in tasks} == {TaskState.WAITING}
    tell(tasks[4], DataProcessed(edges[4]))
    carry(0, tell(tasks[0], Triggered(barrier(1))))
    flow()
    assert acknowledged == [0, 1, 2, 3, 4]
    for number in reversed(range(5)):
        carry(number, tell(tasks[number], Completed(1)))
    flow()
    assert {task.state for task in tasks} == {TaskState.ENDED}


# Restore -----------------------------------------------------------------------------------------------------------------


def start(*edges: InputEdge) -> tuple[Task, Told]:
    task = Task(TaskId("task", 0), edges, (OUT,))
    return task, Told(task.start())


def test_the_restored_watermark_is_told_at_the_start_and_is_a_floor() -> None:
    task, commands = start(edge("a", 1, watermark=5), edge("f", 1, input=1, watermark=7))
    assert commands == advance(5)
    assert tell(task, (A, Watermark(4)), (F, Watermark(6))) == []
    assert tell(task, (A, Watermark(6))) == advance(6)
    assert tell(task, (A, Watermark(9))) == advance(7), "the other edge had come to 7"


def test_without_a_restored_watermark_nothing_is_told() -> None:
    assert start(edge("a", 1))[1] == []
    assert start()[1] == []


def test_a_finished_predecessor_whose_end_was_not_heard_ends_its_input_at_the_start() -> None:
    task, commands = start(edge("a", 0, watermark=3), edge("f", 1, input=1, watermark=4))
    assert commands == [EndInput(0), *advance(4)]
    assert task.restored_watermark == 3, "in-flight records are as late as they were"
    assert tell(task, (F, DRAIN)) == end_of_logic(1, confirm=F)


def test_an_ended_input_is_not_ended_again() -> None:
    task, commands = start(edge("a", 0, watermark=MAX_WATERMARK, ended=True), edge("f", 1, input=1, watermark=4))
    assert commands == advance(4)
    assert only(tell(task, (F, DRAIN)), EndInput) == [EndInput(1)]


@pytest.mark.parametrize(("ended", "inputs"), [(True, ()), (False, (0,))])
def test_when_everything_has_ended_the_logic_ends_at_the_start(ended: bool, inputs: tuple[int, ...]) -> None:
    task, commands = start(edge("a", 0, watermark=3, ended=ended))
    assert commands == end_of_logic(*inputs)
    assert task.state is TaskState.WAITING
    tell(task, Triggered(barrier(1)), DataProcessed(OUT))
    leaves(task, Completed(1), with_=[NotifyComplete(1)])


def test_the_restored_end_of_an_input_stands_in_the_next_snapshot() -> None:
    task, _ = start(edge("a", 0, watermark=3, ended=True), edge("f", 1, input=1, watermark=4))
    (snapshot,) = only(tell(task, (F, barrier(1))), Snapshot)
    assert isinstance(snapshot, Snapshot)
    assert (snapshot.ended, snapshot.watermarks) == ({"a": True, "f": False}, {"a": MAX_WATERMARK, "f": 4})


def test_no_record_is_taken_after_finish() -> None:
    task = waiting()
    with pytest.raises(ValueError, match="records cannot happen to a task that is waiting"):
        tell(task, (A, "r"))
    assert MIN_WATERMARK < task.watermark == MAX_WATERMARK
    assert only(tell(task, (A, barrier(1))), Finish, ReportLogicEnded, EndOfData) == []
