"""When checkpoints begin, what makes them void, when they are complete, and how a job ends by itself."""

from __future__ import annotations

import pytest

from stateformat.backends.dataflow import events as ev
from stateformat.model import StopMode
from tests.dataflow.coordinating import Run, begun, kinds, notified, task, tasks
from tests.tiny_jobs import TinyJob, tiny_job


def two() -> TinyJob:
    """One source before two tasks."""
    return tiny_job({"a": 1, "b": 2}, "a hash b")


# From trigger to notice --------------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_from_trigger_to_notice() -> None:
    run = Run(two())
    assert run.started == []
    (begin,) = run.due()
    assert isinstance(begin, ev.Begin)
    assert begin.barrier == ev.Barrier(1, ev.BarrierKind.CHECKPOINT, unaligned=False)
    assert begin.plan.trigger == tasks("a0")
    assert begin.plan.wait == tasks("a0", "b0", "b1")
    assert begin.stop is None
    assert run.acknowledge(1, "b1", "a0") == []
    assert run.acknowledge(1, "b0") == [ev.Publish(1, frozenset())]
    assert run(ev.Published(1)) == [ev.Commit(1)]
    assert run(ev.Committed(1)) == [notified(1, "a0", "b0", "b1")]
    assert begun(run.due()).barrier.number == 2


def test_nothing_begins_while_one_is_in_flight() -> None:
    run = Run(two())
    run.due()
    assert run.due() == []
    run.acknowledge(1, "a0", "b0", "b1")
    assert run.due() == []
    run(ev.Published(1))
    assert run.due() == []
    run(ev.Committed(1))
    assert kinds(run.due()) == ["Begin"]


def test_barriers_overtake_only_in_unaligned_jobs() -> None:
    assert begun(Run(tiny_job({"a": 1}, unaligned=True)).due()).barrier.unaligned
    assert not begun(Run(tiny_job({"a": 1})).due()).barrier.unaligned


def test_a_barrier_of_a_job_that_begins_aligned_turns_once_for_the_triggered_tasks_that_have_not_acknowledged() -> None:
    run = Run(tiny_job({"a": 2, "b": 1}, "a hash b", unaligned=True), begins_aligned=True)
    begin = begun(run.due())
    assert not begin.barrier.unaligned
    run.acknowledge(1, "a0")
    assert run(ev.Overdue(2)) == []
    turned = begin.barrier._replace(unaligned=True)
    assert run(ev.Overdue(1)) == [ev.Overtake(turned, tasks("a1"))]
    assert run(ev.Overdue(1)) == []
    assert kinds(run.acknowledge(1, "a1", "b0")) == ["Publish"]
    assert run(ev.Overdue(1)) == []


@pytest.mark.parametrize("how", ["aligned", "stop"])
def test_other_barriers_never_turn(how: str) -> None:
    run = Run(tiny_job({"a": 1}, unaligned=how != "aligned"), begins_aligned=True)
    commands = run.ask(StopMode.NO_DRAIN) if how == "stop" else run.due()
    assert run(ev.Overdue(begun(commands).barrier.number)) == []


def test_a_barrier_that_has_turned_ends_no_loop() -> None:
    run = Run(tiny_job({"a": 1, "h": 1}, "a hash h", "h feedback h", unaligned=True), begins_aligned=True)
    run.logic_ends("a0")
    begin = begun(run.due())
    run(ev.Overdue(1))
    commands = run.complete(begin, ["a0"], quiet=True, inputs_ended=True)
    assert [command.tasks for command in commands if isinstance(command, ev.Notify)] == [
        {ev.TaskId("a", 0): None, ev.TaskId("h", 0): None}
    ]


def test_acknowledgements_that_are_late_doubled_or_of_nobody_mean_nothing() -> None:
    run = Run(two())
    assert run.acknowledge(1, "a0") == []  # before there is a checkpoint
    run.due()
    assert run.acknowledge(1, "a0", "a0", "b0", "b0") == []
    assert run.acknowledge(0, "b1") == []
    assert run.acknowledge(2, "b1") == []
    assert run.acknowledge(1, "b2", "z0") == []
    assert run.acknowledge(1, "b1") == [ev.Publish(1, frozenset())]
    assert run.acknowledge(1, "b1") == []
    run(ev.Published(1), ev.Committed(1))
    run.due()
    assert run.acknowledge(1, "a0", "b0", "b1") == []
    assert run.acknowledge(2, "a0", "b0", "b1") == [ev.Publish(2, frozenset())]


def test_tasks_that_acknowledged_as_finishing_are_told_to_whom_publishes() -> None:
    run = Run(two())
    begin = begun(run.due())
    assert run.acknowledge_all(begin, finishing=["a0", "b1"]) == [ev.Publish(1, tasks("a0", "b1"))]


def test_a_checkpoint_after_tasks_have_finished_triggers_those_behind_them() -> None:
    run = Run(two())
    run.logic_ends("a0")
    assert run.complete(begun(run.due()), finishing=["a0"]) == [notified(1, "a0", "b0", "b1")]
    assert run.end("a0") == []
    begin = begun(run.due())
    assert begin.plan.trigger == tasks("b0", "b1")
    assert begin.plan.wait == tasks("b0", "b1")
    assert begin.plan.finished == tasks("a0")
    assert begin.plan.fully_finished == {"a"}
    assert run.complete(begin) == [notified(2, "b0", "b1")]


# What makes it void ------------------------------------------------------------------------------------------------------


def test_a_task_that_ends_before_it_acknowledged_makes_the_checkpoint_void_at_once() -> None:
    run = Run(two())
    run.logic_ends("a0")
    run.complete(begun(run.due()), finishing=["a0"])
    run.due()
    run.acknowledge(2, "b0", "b1")
    (abort,) = run.end("a0")
    assert abort == ev.Abort(2, tasks("b0", "b1"), "a[0] ended before it had acknowledged", counted=False)
    assert begun(run.due()).plan.trigger == tasks("b0", "b1")


def test_a_task_that_ends_after_it_acknowledged_does_no_harm() -> None:
    run = Run(two())
    run.logic_ends("a0")
    run.complete(begun(run.due()), finishing=["a0"])
    run.due()
    run.acknowledge(2, "b0", finishing=["a0"])
    assert run.end("a0") == []
    assert run.acknowledge(2, "b1") == [ev.Publish(2, tasks("a0"))]
    run(ev.Published(2))
    assert run(ev.Committed(2)) == [notified(2, "b0", "b1")]


def test_a_decline_makes_it_void_uncounted() -> None:
    run = Run(two())
    run.due()
    (abort,) = run.decline(1, "b1")
    assert abort == ev.Abort(1, tasks("a0", "b0", "b1"), "b[1] cannot take part: it opens its states", counted=False)
    assert run.decline(1, "b0") == []
    assert begun(run.due()).barrier.number == 2


def test_a_decline_of_one_that_acknowledged_means_nothing() -> None:
    run = Run(two())
    run.due()
    run.acknowledge(1, "b1")
    assert run.decline(1, "b1") == []
    assert run.acknowledge(1, "a0", "b0") == [ev.Publish(1, frozenset())]


def test_the_third_refusal_in_a_row_warns_with_its_operator_and_then_each_time_they_have_doubled() -> None:
    run = Run(two())
    warned: list[tuple[int, str]] = []
    for number in range(1, 25):
        run.due()
        warned += [(number, command.sentence) for command in run.decline(number, "b1") if isinstance(command, ev.Warn)]
    assert [number for number, _ in warned] == [3, 6, 12, 24]
    assert warned[0][1] == (
        "3 checkpoints in a row could not be taken, the last because b[1] cannot take part: it opens its states"
    )


def test_a_published_checkpoint_ends_the_row() -> None:
    run = Run(two())
    for number in (1, 2):
        run.due()
        assert kinds(run.decline(number, "b1")) == ["Abort"]
    run.complete(begun(run.due()))
    for number in (4, 5):
        run.due()
        assert kinds(run.decline(number, "b1")) == ["Abort"]
    run.due()
    assert kinds(run.decline(6, "b1")) == ["Abort", "Warn"]
    run.complete(begun(run.due()))
    for number in (8, 9):
        run.due()
        assert kinds(run.decline(number, "b1")) == ["Abort"]
    run.due()
    assert kinds(run.decline(10, "b1")) == ["Abort", "Warn"]


# Failures ----------------------------------------------------------------------------------------------------------------

COUNTED = {
    "a task's snapshot": (
        False,
        ev.SnapshotFailed(ev.TaskId("b", 0), 1, "disk full"),
        "the snapshot of b[0] failed: disk full",
    ),
    "a coordinator's snapshot": (False, ev.SnapshotFailed(None, 1, "no"), "the snapshot of a coordinator failed: no"),
    "time": (False, ev.TimedOut(1), "barrier 1 took longer than allowed"),
    "publishing": (True, ev.PublishFailed(1, "503", unknown=False), "503"),
    "content": (True, ev.PublishRefused(1, "a handle is missing", counted=True), "a handle is missing"),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_failure_that_is_not_tolerated_restarts_the_run(name: str) -> None:
    acknowledged, event, reason = COUNTED[name]
    run = Run(two())
    run.due()
    run.acknowledge(1, *["a0", "b0", "b1"] if acknowledged else ["a0"])
    assert run(event) == [ev.Restart(reason, counted=True)]


@pytest.mark.parametrize("name", COUNTED)
def test_a_failure_that_is_tolerated_makes_the_checkpoint_void(name: str) -> None:
    acknowledged, event, reason = COUNTED[name]
    run = Run(two(), tolerable_failures=1)
    run.due()
    run.acknowledge(1, *["a0", "b0", "b1"] if acknowledged else ["a0"])
    assert run(event) == [ev.Abort(1, tasks("a0", "b0", "b1"), reason, counted=True)]
    run.due()
    assert run(ev.TimedOut(2)) == [ev.Restart("barrier 2 took longer than allowed", counted=True)]


def test_failures_in_a_row_are_counted_until_one_is_published() -> None:
    run = Run(two(), tolerable_failures=2)
    for number in (1, 2):
        run.due()
        assert kinds(run(ev.TimedOut(number))) == ["Abort"]
    run.complete(begun(run.due()))
    for number in (4, 5):
        run.due()
        assert kinds(run(ev.TimedOut(number))) == ["Abort"]
    run.due()
    assert kinds(run(ev.TimedOut(6))) == ["Restart"]


def test_refusals_are_no_failures() -> None:
    run = Run(two())
    begin = begun(run.due())
    run.acknowledge_all(begin)
    assert run(ev.PublishRefused(1, "union", counted=False)) == [
        ev.Abort(1, tasks("a0", "b0", "b1"), "union", counted=False)
    ]
    run.due()
    assert kinds(run.decline(2, "a0")) == ["Abort"]
    run.due()
    assert kinds(run(ev.TimedOut(3))) == ["Restart"]  # the first that counts


def test_a_snapshot_that_fails_after_its_acknowledgement_means_nothing() -> None:
    run = Run(two())
    run.due()
    run.acknowledge(1, "b0")
    assert run(ev.SnapshotFailed(task("b0"), 1, "late")) == []
    assert run(ev.SnapshotFailed(task("z0"), 1, "nobody")) == []


@pytest.mark.parametrize("steps", range(4))
def test_a_task_that_fails_restarts_the_run_in_every_phase(steps: int) -> None:
    run = Run(two(), tolerable_failures=100)
    until = [
        lambda: run.due(),
        lambda: run.acknowledge(1, "a0", "b0", "b1"),
        lambda: run(ev.Published(1)),
    ]
    for step in until[:steps]:
        step()
    assert run(ev.TaskFailed(task("b1"), "division by zero")) == [ev.Restart("b[1]: division by zero", counted=True)]
    assert run.due() == []
    assert run(ev.Committed(1)) == []


def test_a_failure_outside_of_tasks_is_told_as_it_is() -> None:
    assert Run(two())(ev.TaskFailed(None, "worker lost")) == [ev.Restart("worker lost", counted=True)]


def test_a_publication_of_which_nobody_knows_restarts_the_run_whatever_is_tolerated() -> None:
    run = Run(two(), tolerable_failures=100)
    run.acknowledge_all(begun(run.due()))
    assert run(ev.PublishFailed(1, "no answer", unknown=True)) == [ev.Restart("no answer", counted=True)]


def test_a_commit_that_fails_restarts_the_run_whatever_is_tolerated() -> None:
    run = Run(two(), tolerable_failures=100)
    run.acknowledge_all(begun(run.due()))
    run(ev.Published(1))
    assert run(ev.CommitFailed(1, "no space")) == [ev.Restart("no space", counted=True)]


ALL_EVENTS: dict[str, ev.CoordinatorEvent] = {
    "Acknowledged": ev.Acknowledged(ev.TaskId("a", 0), ev.Acknowledge(1, False)),
    "Declined": ev.Declined(ev.TaskId("a", 0), 1, "no"),
    "SnapshotFailed": ev.SnapshotFailed(ev.TaskId("b", 0), 1, "no"),
    "SnapshotFailed of a coordinator": ev.SnapshotFailed(None, 1, "no"),
    "TimedOut": ev.TimedOut(1),
    "Published": ev.Published(1),
    "PublishRefused": ev.PublishRefused(1, "no", counted=True),
    "PublishFailed": ev.PublishFailed(1, "no", unknown=False),
    "PublishFailed, unknown": ev.PublishFailed(1, "no", unknown=True),
    "Committed": ev.Committed(1),
    "CommitFailed": ev.CommitFailed(1, "no"),
}
UNTIL_PUBLISHING = {"Acknowledged", "Declined", "SnapshotFailed", "SnapshotFailed of a coordinator", "TimedOut"}
ANSWERS = {"Published", "PublishRefused", "PublishFailed", "PublishFailed, unknown"}
LEGAL = {
    "idle": set[str](),
    "collecting": UNTIL_PUBLISHING,
    "publishing": ANSWERS,
    "committing": {"Committed", "CommitFailed"},
    "done": set[str](),
    "aborted": set[str](),
}


def brought_to(phase: str) -> Run:
    """A run whose checkpoint 1 is in this phase. b1 has acknowledged while it collects."""
    run = Run(two(), tolerable_failures=1)
    if phase != "idle":
        run.due()
        run.acknowledge(1, "b1")
    if phase == "aborted":
        run.decline(1, "b0")
    elif phase not in ("idle", "collecting"):
        run.acknowledge(1, "a0", "b0")
        if phase != "publishing":
            run(ev.Published(1))
        if phase == "done":
            run(ev.Committed(1))
    return run


@pytest.mark.parametrize("phase", LEGAL)
@pytest.mark.parametrize("name", ALL_EVENTS)
def test_an_event_means_something_in_one_phase_only(phase: str, name: str) -> None:
    untouched, run = brought_to(phase), brought_to(phase)
    commands = run(ALL_EVENTS[name])
    if name in LEGAL[phase] and name != "Acknowledged":
        assert commands
        return
    assert commands == []
    if name == "Acknowledged" and phase == "collecting":
        return
    # Nothing has changed: what comes next does what it would have done.
    for following in (*ALL_EVENTS.values(), ev.CheckpointDue(), ev.Published(2)):
        assert run(following) == untouched(following)


@pytest.mark.parametrize("name", ALL_EVENTS)
def test_an_event_of_another_number_means_nothing(name: str) -> None:
    for phase in ("collecting", "publishing", "committing"):
        run = brought_to(phase)
        event = ALL_EVENTS[name]
        for number in (0, 2):
            other = (
                ev.Acknowledged(event.task, ev.Acknowledge(number, False))
                if isinstance(event, ev.Acknowledged)
                else event._replace(number=number)
            )
            assert run(other) == []


@pytest.mark.parametrize("over", ["restarted", "ended"])
def test_after_its_end_a_run_commands_nothing(over: str) -> None:
    run = brought_to("idle")
    last = run(ev.TaskFailed(None, "x")) if over == "restarted" else run.end("a0", "b0", "b1")
    assert kinds(last) == ["Restart" if over == "restarted" else "JobEnded"]
    others = [
        ev.CheckpointDue(),
        ev.StopRequested(StopMode.DRAIN, "r"),
        ev.LogicEnded(task("a0")),
        ev.InputsEnded(task("a0")),
        ev.TaskEnded(task("b0")),
        ev.TaskFailed(None, "y"),
    ]
    for event in (*ALL_EVENTS.values(), *others):
        assert run(event) == []


def test_tasks_that_the_job_does_not_have_mean_nothing() -> None:
    run = Run(two())
    for name in ("z0", "b2"):
        assert run.logic_ends(name) == []
        assert run.inputs_end(name) == []
        assert run.end(name) == []
    assert run.logic_ends("a0", "b0") == []
    assert run(ev.LogicEnded(ev.TaskId("b", -1))) == []
    assert kinds(run.logic_ends("b1")) == ["Begin"]


# The end of a job --------------------------------------------------------------------------------------------------------


def test_the_final_checkpoint_is_triggered_at_once_when_every_logic_has_ended() -> None:
    run = Run(two())
    assert run.logic_ends("b1", "a0") == []
    begin = begun(run.logic_ends("b0"))
    assert begin.barrier == ev.Barrier(1)
    everyone = ["a0", "b0", "b1"]
    assert run.acknowledge_all(begin, finishing=everyone) == [ev.Publish(1, tasks(*everyone))]
    run(ev.Published(1))
    assert run(ev.Committed(1)) == [notified(1, *everyone)]
    assert run.end("b0", "a0") == []
    assert run.end("b1") == [ev.JobEnded(None)]


def test_no_checkpoint_is_triggered_any_more_when_all_tasks_are_about_to_end() -> None:
    run = Run(two())
    run.complete(begun(run.logic_ends("a0", "b0", "b1")), finishing=["a0", "b0", "b1"])
    assert run.due() == []
    run.end("a0")
    assert run.due() == []


def test_a_task_that_is_gone_waits_for_nothing_whatever_was_known_of_it() -> None:
    run = Run(two())
    run.end("a0")
    run.complete(begun(run.logic_ends("b0", "b1")), finishing=["b0", "b1"])
    assert run.due() == []


def test_logic_that_ends_during_a_checkpoint_waits_for_the_next_one_which_comes_at_once() -> None:
    run = Run(two())
    begin = begun(run.due())
    assert run.logic_ends("a0", "b0", "b1") == []
    commands = run.complete(begin)
    assert kinds(commands) == ["Notify", "Begin"]
    assert begun(commands).barrier.number == 2


def test_logic_that_ended_during_a_checkpoint_and_was_in_it_needs_no_other_one() -> None:
    run = Run(two())
    begin = begun(run.due())
    run.logic_ends("a0", "b0", "b1")
    assert kinds(run.complete(begin, finishing=["a0", "b0", "b1"])) == ["Notify"]


def test_the_final_checkpoint_waits_for_tasks_that_are_about_to_end() -> None:
    # Otherwise one would end in the middle of it and make it void.
    run = Run(two())
    run.logic_ends("a0")
    run.complete(begun(run.due()), finishing=["a0"])
    assert run.logic_ends("b0", "b1") == []
    begin = begun(run.end("a0"))
    assert begin.plan.trigger == tasks("b0", "b1")
    run.complete(begin, finishing=["b0", "b1"])
    assert run.end("b0", "b1") == [ev.JobEnded(None)]


def test_a_final_checkpoint_that_failed_is_tried_again_when_one_is_due() -> None:
    run = Run(two(), tolerable_failures=5)
    begun(run.logic_ends("a0", "b0", "b1"))
    assert kinds(run(ev.TimedOut(1))) == ["Abort"]
    assert begun(run.due()).barrier.number == 2


def test_a_task_that_ended_too_early_for_the_final_checkpoint_brings_the_next_at_once() -> None:
    run = Run(two())
    begun(run.logic_ends("a0", "b0", "b1"))
    commands = run.end("a0")
    assert kinds(commands) == ["Abort", "Begin"]
    assert begun(commands).plan.finished == tasks("a0")


def test_finishing_in_an_aborted_checkpoint_does_not_let_a_task_go() -> None:
    run = Run(two(), tolerable_failures=1)
    begin = begun(run.logic_ends("a0", "b0", "b1"))
    run.acknowledge_all(begin, finishing=["a0", "b0", "b1"])
    run(ev.PublishFailed(1, "503", unknown=False))
    assert kinds(run.due()) == ["Begin"]


def test_a_job_in_which_nothing_runs_ends_at_once() -> None:
    run = Run(two(), finished=["a", "b"])
    assert run.started == [ev.JobEnded(None)]
    assert run.due() == []


def test_a_job_of_which_a_part_is_finished_runs_the_rest() -> None:
    run = Run(two(), finished=["a"])
    assert run.started == []
    begin = begun(run.due())
    assert begin.plan.trigger == tasks("b0", "b1")
    assert begin.plan.fully_finished == {"a"}
    run.complete(begin)
    assert kinds(run.logic_ends("b0", "b1")) == ["Begin"]


# Union state -------------------------------------------------------------------------------------------------------------


def union_job(*extra: str) -> TinyJob:
    """Two sources with union state in an inner operator of their chain."""
    return tiny_job({"a+u": 2, "b": 1}, "u hash b", *extra, union=("u",))


def test_union_state_that_may_starve_checkpoints_is_warned_of_at_start() -> None:
    (warning,) = Run(union_job()).started
    assert isinstance(warning, ev.Warn)
    assert "'u'" in warning.sentence
    assert Run(tiny_job({"a": 2}, union=())).started == []
    assert Run(tiny_job({"a": 1}, union=("a",))).started == []
    assert Run(tiny_job({"a": 2, "b": 2}, "a hash b", union=("b",))).started == []
    assert kinds(Run(tiny_job({"a": 2, "b": 2}, "a forward b", union=("b",))).started) == ["Warn"]
    assert Run(tiny_job({"a": 2, "b": 2}, "a forward b", union=("a",)), finished=["a"]).started == []


def test_union_state_in_a_partially_ended_operator_is_refused_before_the_trigger_and_warned_of() -> None:
    run = Run(union_job())
    run.logic_ends("a0")
    assert run.due() == []
    assert run.due() == []
    (warning,) = run.due()
    assert warning == ev.Warn(
        "3 checkpoints in a row could not be taken, the last because some subtasks of operator 'u', which keeps union state, "
        "have ended and others have not: what the ended ones held would be missing"
    )
    run.logic_ends("a1")
    assert begun(run.due()).barrier.number == 1


def test_union_state_of_which_all_have_ended_is_no_obstacle() -> None:
    run = Run(union_job())
    begin = begun(run.logic_ends("a0", "a1", "b0"))
    assert kinds(run.acknowledge_all(begin, finishing=["a0", "a1", "b0"])) == ["Publish"]


def test_union_state_that_ends_in_part_during_a_checkpoint_is_refused_after_the_acknowledgements() -> None:
    run = Run(union_job())
    begin = begun(run.due())
    (abort,) = run.acknowledge_all(begin, finishing=["a0"])
    assert isinstance(abort, ev.Abort)
    assert not abort.counted
    assert "'u'" in abort.reason
    assert run.due() == []  # it is known now
    assert kinds(run.due()) == ["Warn"]


def test_union_state_of_which_one_task_had_finished_and_another_acknowledges_as_finishing() -> None:
    run = Run(tiny_job({"a": 3}, union=("a",)))
    begin = begun(run.due())
    run.end("a0")  # void
    assert run.acknowledge_all(begin) == []
    assert run.due() == []
    begin = begun(run.logic_ends("a1", "a2"))
    assert begin.plan.wait == tasks("a1", "a2")
    assert run.acknowledge_all(begin, finishing=["a1", "a2"]) == [ev.Publish(2, tasks("a1", "a2"))]


def test_a_chain_without_union_state_may_finish_in_part() -> None:
    run = Run(tiny_job({"a": 2, "b": 2}, "a hash b", union=("b",)))
    run.logic_ends("a0")
    assert kinds(run.acknowledge_all(begun(run.due()), finishing=["a0"])) == ["Publish"]
