"""Barriers, ends and triggers: when a task takes its snapshot, and what it logs.

Numbers of rules are those of Flink's barrier handler (exactly once) where a test says "rule".
"""

from __future__ import annotations

import pytest

from stateformat.backends.dataflow.events import (
    MIN_WATERMARK,
    Aborted,
    Acknowledge,
    Announced,
    Completed,
    Decline,
    Emit,
    LogQueued,
    NotifyAborted,
    NotifyComplete,
    Snapshot,
    StopLog,
    TaskCommand,
    Triggered,
    Watermark,
)
from stateformat.backends.dataflow.task import Task, TaskState
from tests.task_cases import DRAIN, END, MAX, barrier, channels, edge, only, processed, started, tell, turn

A, B, C = channels("a", 3)
F, G = channels("f", 2)


def two() -> Task:
    return started(edge("a", 2))


def taken(number: int, *, time: int = MIN_WATERMARK, unaligned: bool = False) -> Snapshot:
    """The snapshot of a running task with the one edge ``a``."""
    return Snapshot(barrier(number, unaligned=unaligned), False, {"a": time}, {"a": False})


def whole(number: int, *, unaligned: bool = False) -> list[TaskCommand]:
    one = barrier(number, unaligned=unaligned)
    return [Snapshot(one, False, {"a": MIN_WATERMARK}, {"a": False}), Emit(one), Acknowledge(number, False)]


# Aligned -----------------------------------------------------------------------------------------------------------------


def test_the_snapshot_is_taken_when_the_last_channel_has_its_barrier() -> None:
    task = two()
    assert tell(task, (A, "1"), (A, barrier(1))) == [processed(A, "1")]
    assert task.blocked == {A}
    assert (task.is_blocked(A), task.is_blocked(B)) == (True, False)
    assert tell(task, (B, "2"), (B, barrier(1))) == [processed(B, "2"), *whole(1)]
    assert task.blocked == set()
    assert tell(task, (A, "3"), Completed(1)) == [processed(A, "3"), NotifyComplete(1)]


def test_rule_1_a_channel_that_ended_before_is_not_needed() -> None:
    task = two()
    tell(task, (A, DRAIN), (A, END))
    assert only(tell(task, (B, barrier(1))), Acknowledge) == [Acknowledge(1, False)]
    assert only(tell(task, (B, barrier(2))), Acknowledge) == [Acknowledge(2, False)]


def test_rule_2_an_end_counts_as_the_barrier_of_a_pending_checkpoint() -> None:
    task = two()
    tell(task, (A, barrier(1)), (B, DRAIN))
    assert task.blocked == {A}, "an end of data is no end of the channel: its barrier comes behind it"
    assert only(tell(task, (B, END)), Acknowledge) == [Acknowledge(1, False)]
    assert task.blocked == set()


def test_rule_2_a_barrier_and_an_end_of_one_channel_count_once() -> None:
    task = started(edge("a", 3))
    tell(task, Triggered(barrier(1)), (A, DRAIN), (A, END), (B, barrier(1)))
    assert only(tell(task, (C, DRAIN)), Snapshot) == []
    assert len(only(tell(task, (C, END)), Snapshot)) == 1


def test_rule_3_an_end_begins_no_checkpoint() -> None:
    task = two()
    assert only(tell(task, (A, DRAIN), (A, END), (B, DRAIN), (B, END)), Snapshot, Acknowledge) == []


def test_rule_5_a_channel_that_ended_does_not_stay_blocked() -> None:
    task = two()
    tell(task, (A, barrier(1)), (B, DRAIN), (B, END), (A, DRAIN))
    assert task.blocked == set()


def test_rule_8_a_higher_number_subsumes_a_pending_checkpoint() -> None:
    task = two()
    tell(task, (A, barrier(1)))
    (declined,) = tell(task, (B, barrier(2)))
    assert isinstance(declined, Decline)
    assert declined.number == 1
    assert "barrier 2" in declined.reason
    assert task.blocked == {B}, "the channel of the older one is free again"
    assert tell(task, (A, barrier(2))) == whole(2)
    assert tell(task, Aborted(1)) == []


def test_rule_9_a_lower_number_is_consumed_and_does_nothing() -> None:
    task = two()
    tell(task, (A, barrier(5)))
    assert tell(task, (B, barrier(4))) == []
    assert task.blocked == {A}
    assert only(tell(task, (B, barrier(5))), Acknowledge) == [Acknowledge(5, False)]
    assert tell(task, (A, barrier(5)), (A, barrier(3)), Triggered(barrier(4))) == []
    assert task.blocked == set()


def test_rule_10_an_abort_frees_the_channels_and_later_barriers_of_it_mean_nothing() -> None:
    task = two()
    tell(task, (A, barrier(1)))
    assert tell(task, Aborted(1)) == []
    assert task.blocked == set()
    assert tell(task, (B, barrier(1)), (A, "1")) == [processed(A, "1")]
    tell(task, (A, barrier(2)))
    assert tell(task, (B, barrier(2))) == whole(2)


def test_rule_10_an_abort_may_come_before_the_barrier() -> None:
    task = two()
    assert tell(task, Aborted(3), (A, barrier(3)), (B, barrier(3)), (A, barrier(2)), Triggered(barrier(3))) == []
    assert task.blocked == set()
    assert tell(task, (A, barrier(4)), (B, barrier(4))) == whole(4)


def test_an_abort_of_an_older_number_leaves_the_pending_checkpoint_alone() -> None:
    task = two()
    tell(task, (A, barrier(2)))
    assert tell(task, Aborted(1)) == []
    assert task.blocked == {A}
    assert tell(task, (B, barrier(2))) == whole(2)


def test_a_snapshot_whose_checkpoint_is_aborted_is_void_and_told_once() -> None:
    task = two()
    tell(task, (A, barrier(1)), (B, barrier(1)))
    assert tell(task, Aborted(1), Aborted(1)) == [NotifyAborted(1)]


def test_a_completion_is_told_once_and_late_ones_mean_nothing() -> None:
    task = two()
    tell(task, (A, barrier(1)), (B, barrier(1)), (A, barrier(2)), (B, barrier(2)))
    assert tell(task, Completed(2), Completed(1), Completed(2)) == [NotifyComplete(2)]


def test_a_round_is_aligned_and_nothing_is_written_for_it() -> None:
    task = two()
    assert tell(task, (A, turn(1))) == []
    assert task.blocked == {A}
    assert tell(task, (B, turn(1))) == [Emit(turn(1)), Acknowledge(1, False)]
    assert tell(task, Completed(1)) == []
    tell(task, (A, turn(2)), (B, turn(2)))
    assert tell(task, Aborted(2)) == [], "nothing was collected for it"


def test_progress_tells_what_was_consumed_per_edge() -> None:
    task = started(edge("a", 2), edge("f", 1, input=1), edge("old", 0, input=2, watermark=7, ended=True))
    tell(task, (A, Watermark(5)), (B, Watermark(9)), (F, Watermark(3)), (F, DRAIN))
    (snapshot,) = only(tell(task, (A, barrier(1)), (B, barrier(1)), (F, barrier(1))), Snapshot)
    assert isinstance(snapshot, Snapshot)
    assert snapshot.watermarks == {"a": 5, "f": MAX.timestamp, "old": MAX.timestamp}
    assert snapshot.ended == {"a": False, "f": True, "old": True}


# Direct triggers ---------------------------------------------------------------------------------------------------------


def test_a_direct_trigger_waits_aligned_for_the_ends_and_loses_nothing_that_lies_before_them() -> None:
    task = started(edge("a", 1), edge("f", 1, input=1), edge("b", 1, input=2))
    tell(task, (F, DRAIN), (F, END), (channels("b", 1)[0], DRAIN))
    assert tell(task, Triggered(barrier(4))) == []
    assert task.blocked == set()
    assert tell(task, (A, "r")) == [processed(A, "r")]
    commands = tell(task, (channels("b", 1)[0], END), (A, DRAIN))
    assert only(commands, Snapshot) == [], "its data has ended, it has not"
    (snapshot,) = only(tell(task, (A, END)), Snapshot)
    assert isinstance(snapshot, Snapshot)
    assert snapshot.finishing


def test_a_direct_trigger_of_a_task_whose_channels_have_all_ended_takes_the_snapshot_at_once() -> None:
    task = started(edge("a", 1))
    tell(task, (A, DRAIN), (A, END))
    commands = tell(task, Triggered(barrier(1)))
    assert commands == [
        Snapshot(barrier(1), True, {"a": MAX.timestamp}, {"a": True}),
        Emit(barrier(1)),
        Acknowledge(1, True),
    ]


@pytest.mark.parametrize("trigger_first", [True, False])
def test_a_trigger_and_barriers_of_one_number_do_not_count_twice(trigger_first: bool) -> None:
    task = two()
    first, second = (Triggered(barrier(1)), (A, barrier(1)))[:: 1 if trigger_first else -1]
    assert tell(task, first, second) == []
    assert task.blocked == {A}
    assert tell(task, (B, barrier(1))) == whole(1)
    assert tell(task, Triggered(barrier(1))) == []


def test_triggers_of_two_numbers_subsume_like_barriers() -> None:
    task = two()
    assert [type(command) for command in tell(task, Triggered(barrier(1)), Triggered(barrier(2)))] == [Decline]
    assert tell(task, (A, barrier(2)), (B, barrier(2))) == whole(2)


# Unaligned ---------------------------------------------------------------------------------------------------------------


def test_rule_6_the_first_announced_barrier_takes_the_snapshot_and_logs_the_other_channels() -> None:
    task = started(edge("a", 3, overtakable=True))
    over = barrier(1, unaligned=True)
    tell(task, (A, "before"))
    assert tell(task, Announced(B, over)) == [
        taken(1, unaligned=True),
        LogQueued(A, arriving=True),
        LogQueued(B, arriving=False),
        LogQueued(C, arriving=True),
        Emit(over),
    ]
    assert task.blocked == set()
    assert tell(task, (A, "r"), (B, "s")) == [processed(A, "r"), processed(B, "s")]
    assert tell(task, Announced(A, over)) == [StopLog(A)]
    assert tell(task, (A, over), (B, over)) == [], "what was announced has come to its turn"
    assert tell(task, (C, over)) == [StopLog(C), Acknowledge(1, False)]


def test_rule_6_an_end_completes_what_is_in_flight_and_never_begins_it() -> None:
    task = started(edge("a", 2, overtakable=True))
    over = barrier(1, unaligned=True)
    tell(task, Announced(A, over), (B, DRAIN))
    assert tell(task, (B, END)) == [StopLog(B), Acknowledge(1, False)]


def test_a_mixed_gate_waits_for_the_channels_that_may_not_be_overtaken() -> None:
    task = started(edge("a", 1), edge("f", 2, input=1, overtakable=True))
    over = barrier(1, unaligned=True)
    assert tell(task, Announced(F, over), (F, "r"), (G, "s")) == [processed(F, "r"), processed(G, "s")]
    commands = tell(task, (A, over))
    assert only(commands, LogQueued) == [LogQueued(F, arriving=False), LogQueued(G, arriving=True)]
    assert [type(command) for command in commands] == [Snapshot, LogQueued, LogQueued, Emit]
    assert tell(task, Announced(G, over)) == [StopLog(G), Acknowledge(1, False)]


def test_a_barrier_that_comes_to_its_turn_before_a_mixed_gate_is_ready_blocks_its_channel() -> None:
    task = started(edge("a", 1), edge("f", 2, input=1, overtakable=True))
    over = barrier(1, unaligned=True)
    assert tell(task, Announced(F, over), (F, over)) == []
    assert task.blocked == {F}
    tell(task, Announced(G, over))
    commands = tell(task, (A, over))
    assert only(commands, LogQueued) == [LogQueued(G, arriving=False)], "of the blocked one everything was processed"
    assert only(commands, Acknowledge) == [Acknowledge(1, False)]
    assert task.blocked == set()


def test_a_mixed_gate_whose_channels_that_may_not_be_overtaken_have_ended_waits_for_nothing() -> None:
    task = started(edge("a", 1), edge("f", 1, input=1, overtakable=True))
    tell(task, (A, DRAIN), (A, END))
    assert only(tell(task, Announced(F, barrier(1, unaligned=True))), Acknowledge) == [Acknowledge(1, False)]


def test_an_end_of_data_that_was_overtaken_has_not_been_heard() -> None:
    task = started(edge("a", 2, overtakable=True))
    tell(task, (A, MAX), (A, DRAIN))
    (snapshot,) = only(tell(task, Announced(B, barrier(1, unaligned=True))), Snapshot)
    assert isinstance(snapshot, Snapshot)
    assert snapshot.ended == {"a": False}
    assert snapshot.watermarks == {"a": MIN_WATERMARK}
    assert not snapshot.finishing


def test_nothing_is_logged_of_a_channel_whose_data_has_ended() -> None:
    task = started(edge("a", 2, overtakable=True))
    tell(task, (A, DRAIN))
    commands = tell(task, Announced(B, barrier(1, unaligned=True)))
    assert only(commands, LogQueued) == [LogQueued(B, arriving=False)]
    assert only(commands, Acknowledge) == [Acknowledge(1, False)], (
        "its barrier is not waited for: no record lies before it"
    )


def test_a_direct_trigger_logs_unaligned_what_lies_in_the_channels_and_waits_for_nothing() -> None:
    task = started(edge("a", 2, overtakable=True))
    commands = tell(task, Triggered(barrier(1, unaligned=True)))
    assert only(commands, LogQueued) == [LogQueued(A, arriving=False), LogQueued(B, arriving=False)]
    assert only(commands, Acknowledge) == [Acknowledge(1, False)]


def test_a_direct_trigger_of_a_mixed_gate_waits_for_the_ends_of_the_channels_that_may_not_be_overtaken() -> None:
    task = started(edge("a", 1), edge("f", 1, input=1, overtakable=True))
    assert tell(task, Triggered(barrier(1, unaligned=True)), (F, "r")) == [processed(F, "r")]
    tell(task, (A, DRAIN))
    commands = tell(task, (A, END))
    assert only(commands, LogQueued, Acknowledge) == [LogQueued(F, arriving=False), Acknowledge(1, False)]


def test_an_abort_stops_the_logs_of_an_unaligned_checkpoint() -> None:
    task = started(edge("a", 3, overtakable=True))
    over = barrier(1, unaligned=True)
    tell(task, Announced(B, over), Announced(A, over))
    assert tell(task, Aborted(1)) == [StopLog(C), NotifyAborted(1)]
    assert tell(task, Announced(C, over), (C, over)) == []


def test_a_subsumed_unaligned_checkpoint_is_void_and_declined() -> None:
    task = started(edge("a", 2, overtakable=True))
    tell(task, Announced(A, barrier(1, unaligned=True)))
    commands = tell(task, Announced(A, barrier(2, unaligned=True)))
    assert [type(command) for command in commands] == [
        StopLog, NotifyAborted, Decline, Snapshot, LogQueued, LogQueued, Emit,
    ]  # fmt: skip
    assert tell(task, Aborted(1)) == []
    assert tell(task, Announced(B, barrier(2, unaligned=True))) == [StopLog(B), Acknowledge(2, False)]


def test_an_aligned_checkpoint_overtakes_nothing_where_an_unaligned_one_might() -> None:
    task = started(edge("a", 2, overtakable=True))
    assert tell(task, (A, barrier(1))) == []
    assert task.blocked == {A}
    assert tell(task, (B, barrier(1))) == whole(1)


def test_a_waiting_task_logs_nothing() -> None:
    task = started(edge("a", 2, overtakable=True))
    tell(task, (A, DRAIN), (B, DRAIN))
    assert task.state is TaskState.WAITING
    commands = tell(task, Announced(A, barrier(1, unaligned=True)))
    assert [type(command) for command in commands] == [Snapshot, Emit, Acknowledge]


# Aligned at first, and unaligned after a time ------------------------------------------------------------------------------


LATE = barrier(1, unaligned=True)


def test_a_task_that_aligns_logs_the_channels_that_it_waits_for_when_one_of_their_barriers_turns() -> None:
    task = started(edge("a", 3, overtakable=True))
    tell(task, (A, barrier(1)))
    assert task.blocked == {A}
    assert tell(task, Announced(B, LATE)) == [
        taken(1, unaligned=True),
        LogQueued(B, arriving=False),
        LogQueued(C, arriving=True),
        Emit(LATE),
    ]
    assert task.blocked == set()
    assert tell(task, (C, LATE)) == [StopLog(C), Acknowledge(1, False)]
    assert tell(task, (B, LATE)) == []


def test_a_barrier_that_has_turned_on_the_way_turns_the_checkpoint_though_its_channel_may_not_be_overtaken() -> None:
    task = started(edge("a", 1, overtakable=True), edge("f", 1, input=1))
    tell(task, (A, "1"))
    commands = tell(task, (F, LATE))
    assert only(commands, Emit, LogQueued) == [LogQueued(A, arriving=True), Emit(LATE)]


def test_a_mixed_gate_still_waits_for_what_may_not_be_overtaken_when_its_barrier_turns() -> None:
    task = started(edge("a", 2, overtakable=True), edge("f", 1, input=1))
    tell(task, (A, barrier(1)))
    assert tell(task, Announced(B, LATE)) == []
    assert task.blocked == {A}
    commands = tell(task, (F, barrier(1)))
    assert only(commands, Emit, LogQueued, Acknowledge) == [
        LogQueued(B, arriving=False),
        Emit(LATE),
        Acknowledge(1, False),
    ]


def test_a_second_trigger_turns_a_direct_one_and_means_nothing_once_the_snapshot_is_taken() -> None:
    task = started(edge("a", 2, overtakable=True))
    assert only(tell(task, (A, DRAIN), (A, END), Triggered(barrier(1))), Snapshot) == []
    commands = tell(task, Triggered(LATE))
    assert only(commands, Emit, LogQueued, Acknowledge) == [
        LogQueued(B, arriving=False),
        Emit(LATE),
        Acknowledge(1, False),
    ]
    assert tell(task, Triggered(LATE), (B, LATE)) == []


def test_a_checkpoint_that_was_taken_aligned_is_not_taken_again() -> None:
    task = started(edge("a", 1, overtakable=True))
    tell(task, (A, barrier(1)))
    assert tell(task, Announced(A, LATE), Triggered(LATE)) == []
