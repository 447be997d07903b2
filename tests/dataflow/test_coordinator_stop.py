"""Stop with a savepoint: when it begins, what it waits for, and what becomes of it at every failure."""

from __future__ import annotations

import pytest

from stateformat.backends.dataflow import events as ev
from stateformat.model import StopMode
from tests.dataflow.coordinating import Run, begun, kinds, notified, task, tasks
from tests.tiny_jobs import TinyJob, tiny_job

DRAIN, NO_DRAIN = StopMode.DRAIN, StopMode.NO_DRAIN
ALL = ["a0", "a1", "b0"]


def small() -> TinyJob:
    """Two source tasks before one."""
    return tiny_job({"a": 2, "b": 1}, "a hash b")


# The order ---------------------------------------------------------------------------------------------------------------


def test_a_drain_ends_the_sources_then_saves_when_every_logic_has_ended() -> None:
    run = Run(small())
    assert run.ask(DRAIN) == [ev.EndSources(tasks("a0", "a1"))]
    assert run.due() == []
    assert run.logic_ends("a0", "a1") == []
    begin = begun(run.logic_ends("b0"))
    assert begin.barrier == ev.Barrier(1, ev.BarrierKind.STOP_DRAIN)
    assert begin.stop == ev.StopOf(DRAIN, "r1")
    assert run.acknowledge_all(begin, finishing=ALL) == [ev.Publish(1, tasks(*ALL))]
    assert run(ev.Published(1)) == [ev.Commit(1)]
    assert run(ev.Committed(1)) == [notified(1, *ALL)]
    assert run.due() == []
    assert run.end("a0", "b0") == []
    assert run.end("a1") == [ev.JobEnded(ev.StopOf(DRAIN, "r1"))]


def test_without_drain_the_savepoint_begins_at_once_and_tasks_end_after_it() -> None:
    run = Run(small())
    (begin,) = run.ask(NO_DRAIN)
    assert isinstance(begin, ev.Begin)
    assert begin.barrier == ev.Barrier(1, ev.BarrierKind.STOP_NO_DRAIN)
    assert begin.stop == ev.StopOf(NO_DRAIN, "r1")
    assert begin.plan.trigger == tasks("a0", "a1")
    assert run.complete(begin) == [notified(1, *ALL)]
    assert run.logic_ends(*ALL) == []  # nothing is triggered any more
    assert run.due() == []
    assert run.end(*ALL) == [ev.JobEnded(ev.StopOf(NO_DRAIN, "r1"))]


@pytest.mark.parametrize("mode", StopMode)
def test_savepoints_are_aligned(mode: StopMode) -> None:
    run = Run(tiny_job({"a": 1}, unaligned=True))
    commands = run.ask(mode) + run.logic_ends("a0")
    assert not begun(commands).barrier.unaligned


@pytest.mark.parametrize("mode", StopMode)
@pytest.mark.parametrize("ending", ["complete", "aborted"])
def test_a_stop_waits_for_the_end_of_the_checkpoint_in_flight(mode: StopMode, ending: str) -> None:
    run = Run(small())
    begin = begun(run.due())
    assert run.ask(mode) == []
    commands = run.complete(begin) if ending == "complete" else run.decline(1, "b0")
    assert kinds(commands) == [
        "Notify" if ending == "complete" else "Abort",
        "EndSources" if mode is DRAIN else "Begin",
    ]


def test_only_source_tasks_that_still_read_are_told_to_end() -> None:
    run = Run(small())
    run.logic_ends("a0")
    assert run.ask(DRAIN) == [ev.EndSources(tasks("a1"))]
    assert begun(run.logic_ends("a1", "b0")).barrier.purpose is ev.BarrierKind.STOP_DRAIN


def test_a_drain_of_a_job_whose_sources_have_ended_has_none_to_tell() -> None:
    run = Run(small())
    run.logic_ends("a0", "a1")
    assert run.ask(DRAIN) == []
    assert begun(run.logic_ends("b0")).barrier.purpose is ev.BarrierKind.STOP_DRAIN
    restored = Run(small(), finished=["a"])
    assert restored.ask(DRAIN) == []
    assert begun(restored.logic_ends("b0")).barrier.purpose is ev.BarrierKind.STOP_DRAIN


@pytest.mark.parametrize("mode", StopMode)
def test_tasks_that_wait_for_their_final_checkpoint_take_part_in_the_savepoint(mode: StopMode) -> None:
    run = Run(small())
    run.logic_ends("a0")
    commands = run.ask(mode)
    if mode is DRAIN:
        commands = run.logic_ends("a1", "b0")
    begin = begun(commands)
    assert begin.plan.wait == tasks(*ALL)
    finishing = ALL if mode is DRAIN else ["a0"]
    assert run.acknowledge_all(begin, finishing) == [ev.Publish(1, tasks(*finishing))]


def test_a_drain_waits_for_tasks_that_are_about_to_end() -> None:
    run = Run(small())
    run.logic_ends("a0")
    run.complete(begun(run.due()), finishing=["a0"])
    assert run.ask(DRAIN) == [ev.EndSources(tasks("a1"))]
    assert run.logic_ends("a1", "b0") == []
    begin = begun(run.end("a0"))
    assert begin.plan.wait == tasks("a1", "b0")


def test_without_drain_a_task_that_ends_before_it_acknowledged_brings_another_try_at_once() -> None:
    run = Run(small())
    run.logic_ends("a0")
    run.complete(begun(run.due()), finishing=["a0"])
    assert begun(run.ask(NO_DRAIN)).barrier.number == 2
    run.acknowledge(2, "b0")
    abort, begin = run.end("a0")
    assert abort == ev.Abort(2, tasks("a1", "b0"), "a[0] ended before it had acknowledged", counted=False)
    assert isinstance(begin, ev.Begin)
    assert begin.barrier == ev.Barrier(3, ev.BarrierKind.STOP_NO_DRAIN)
    assert begin.plan.wait == tasks("a1", "b0")
    run.complete(begin)
    assert run.end("a1", "b0") == [ev.JobEnded(ev.StopOf(NO_DRAIN, "r1"))]


@pytest.mark.parametrize("mode", StopMode)
def test_a_second_stop_is_refused_and_the_same_one_is_not_counted_twice(mode: StopMode) -> None:
    run = Run(small())
    run.due()
    for _ in range(2):
        run.ask(mode)
        assert run.ask(mode, "r1") == []
        assert run.ask(DRAIN, "r2") == [
            ev.StopFailed("r2", "the job stops already, as request 'r1' asks", goes_on=True)
        ]
    run.complete(begun(run.decline(1, "b0") + run.logic_ends(*ALL)), finishing=ALL)
    assert kinds(run.ask(NO_DRAIN, "r3")) == ["StopFailed"]
    assert run.end(*ALL) == [ev.JobEnded(ev.StopOf(mode, "r1"))]


@pytest.mark.parametrize("mode", StopMode)
def test_a_job_that_ends_by_itself_before_the_savepoint_could_begin_says_so(mode: StopMode) -> None:
    run = Run(small())
    run.complete(begun(run.logic_ends(*ALL)), finishing=ALL)
    assert run.ask(mode) == []
    assert run.end(*ALL) == [
        ev.StopFailed("r1", "the job had ended by itself before", goes_on=False),
        ev.JobEnded(None),
    ]


@pytest.mark.parametrize("mode", StopMode)
def test_asked_during_the_final_checkpoint_it_has_nothing_left_to_stop(mode: StopMode) -> None:
    run = Run(small())
    begin = begun(run.logic_ends(*ALL))
    assert run.ask(mode) == []
    assert kinds(run.complete(begin, finishing=ALL)) == ["Notify"]
    assert kinds(run.end(*ALL)) == ["StopFailed", "JobEnded"]


@pytest.mark.parametrize("mode", StopMode)
def test_asked_during_a_final_checkpoint_that_fails_the_savepoint_takes_its_place(mode: StopMode) -> None:
    run = Run(small())
    run.logic_ends(*ALL)
    run.ask(mode)
    begin = begun(run.decline(1, "b0"))
    assert begin.stop == ev.StopOf(mode, "r1")
    run.complete(begin, finishing=ALL)
    assert run.end(*ALL) == [ev.JobEnded(ev.StopOf(mode, "r1"))]


# Failures at every step --------------------------------------------------------------------------------------------------

WITHDRAWN_AND_RESTART = ["StopFailed", "Restart"]
DRAIN_STEPS = ["asked", "draining", "collecting", "publishing", "committing", "ending"]
NO_DRAIN_STEPS = ["asked", "collecting", "publishing", "committing", "ending"]


def stopped_at(step: str, mode: StopMode) -> tuple[Run, int]:
    """A run whose stop has come so far, and the number of the barrier in flight."""
    run = Run(small(), tolerable_failures=100)
    if step == "asked":
        run.due()
        run.ask(mode)
        return run, 1
    commands = run.ask(mode)
    if step == "draining":
        run.logic_ends("a0")
        return run, 1
    if mode is DRAIN:
        commands = run.logic_ends(*ALL)
    begin = begun(commands)
    if step != "collecting":
        run.acknowledge_all(begin, ALL if mode is DRAIN else [])
    if step in ("committing", "ending"):
        run(ev.Published(1))
    if step == "ending":
        run(ev.Committed(1))
        run.end("a0")
    return run, 1


def answered(commands: list[object]) -> list[tuple[object, ...]]:
    """Of a stop's failure: whether the job goes on; of a restart: whether it counts."""
    return [
        ("StopFailed", command.goes_on) if isinstance(command, ev.StopFailed) else ("Restart", command.counted)
        for command in commands
        if isinstance(command, ev.StopFailed | ev.Restart)
    ]


@pytest.mark.parametrize(
    ("mode", "step", "expected"),
    [
        # Before any logic was told to end, a failed task is a failure as any other.
        (DRAIN, "asked", [("StopFailed", False), ("Restart", True)]),
        (NO_DRAIN, "asked", [("StopFailed", False), ("Restart", True)]),
        (NO_DRAIN, "collecting", [("StopFailed", False), ("Restart", True)]),
        # Afterwards the run is given up, uncounted: finish throws, for one.
        (DRAIN, "draining", [("StopFailed", False), ("Restart", False)]),
        (DRAIN, "collecting", [("StopFailed", False), ("Restart", False)]),
        # Nobody knows whether the savepoint exists: the restart will.
        (DRAIN, "publishing", [("Restart", False)]),
        (NO_DRAIN, "publishing", [("Restart", True)]),
        # It exists, and the stop stands: the completion notice throws, for one.
        (DRAIN, "committing", [("Restart", False)]),
        (NO_DRAIN, "committing", [("Restart", False)]),
        (DRAIN, "ending", [("Restart", False)]),
        (NO_DRAIN, "ending", [("Restart", False)]),
    ],
)
def test_a_task_that_fails_at_each_step_of_a_stop(mode: StopMode, step: str, expected: list[tuple[str, bool]]) -> None:
    run, _ = stopped_at(step, mode)
    commands = run(ev.TaskFailed(task("b0"), "x"))
    assert answered(list(commands)) == expected
    assert len(commands) == len(expected)
    assert run.due() == []


FAILURES: dict[str, tuple[str, ev.CoordinatorEvent]] = {
    "decline": ("collecting", ev.Declined(ev.TaskId("b", 0), 1, "no")),
    "snapshot": ("collecting", ev.SnapshotFailed(ev.TaskId("b", 0), 1, "disk full")),
    "coordinator's snapshot": ("collecting", ev.SnapshotFailed(None, 1, "disk full")),
    "time": ("collecting", ev.TimedOut(1)),
    "refused": ("publishing", ev.PublishRefused(1, "content", counted=True)),
    "refused, uncounted": ("publishing", ev.PublishRefused(1, "union", counted=False)),
    "publishing": ("publishing", ev.PublishFailed(1, "503", unknown=False)),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_savepoint_of_a_drain_that_fails_discards_the_run_uncounted(name: str) -> None:
    step, event = FAILURES[name]
    run, _ = stopped_at(step, DRAIN)
    commands = run(event)
    assert answered(list(commands)) == [("StopFailed", False), ("Restart", False)]
    assert kinds(commands) == WITHDRAWN_AND_RESTART
    assert run.due() == []


@pytest.mark.parametrize("name", FAILURES)
def test_without_drain_a_savepoint_that_fails_leaves_the_job_as_if_nothing_had_been_asked(name: str) -> None:
    step, event = FAILURES[name]
    run, _ = stopped_at(step, NO_DRAIN)
    abort, failed = run(event)
    assert isinstance(abort, ev.Abort)
    assert abort.tasks == tasks(*ALL)
    assert not abort.counted
    assert isinstance(failed, ev.StopFailed)
    assert failed.request == "r1"
    assert failed.goes_on
    # Periodic checkpoints again, and another stop may be asked for.
    assert begun(run.due()).barrier == ev.Barrier(2)
    run.decline(2, "b0")
    assert begun(run.ask(NO_DRAIN, "r2")).stop == ev.StopOf(NO_DRAIN, "r2")


def test_failed_savepoints_without_drain_do_not_use_up_what_is_tolerated() -> None:
    run = Run(small(), tolerable_failures=0)
    begun(run.ask(NO_DRAIN))
    assert kinds(run(ev.TimedOut(1))) == ["Abort", "StopFailed"]
    run.due()
    assert kinds(run(ev.TimedOut(2))) == ["Restart"]


@pytest.mark.parametrize(("mode", "counted"), [(DRAIN, False), (NO_DRAIN, True)])
def test_a_savepoint_of_which_nobody_knows_is_neither_said_to_have_failed_nor_to_be(
    mode: StopMode, counted: bool
) -> None:
    run, _ = stopped_at("publishing", mode)
    assert run(ev.PublishFailed(1, "no answer", unknown=True)) == [ev.Restart("no answer", counted)]


@pytest.mark.parametrize("mode", StopMode)
def test_once_published_the_stop_stands_when_a_commit_fails(mode: StopMode) -> None:
    run, _ = stopped_at("committing", mode)
    assert run(ev.CommitFailed(1, "no space")) == [ev.Restart("no space", counted=False)]


@pytest.mark.parametrize("mode", StopMode)
def test_what_is_asked_while_a_checkpoint_fails_the_run_has_failed_too(mode: StopMode) -> None:
    run = Run(small())
    run.due()
    run.ask(mode)
    assert run(ev.TimedOut(1)) == [
        ev.StopFailed("r1", "barrier 1 took longer than allowed", goes_on=False),
        ev.Restart("barrier 1 took longer than allowed", counted=True),
    ]


@pytest.mark.parametrize("mode", StopMode)
def test_an_ordinary_checkpoint_of_which_nobody_knows_holds_no_stop(mode: StopMode) -> None:
    run = Run(small())
    run.acknowledge_all(begun(run.due()))
    run.ask(mode)
    assert answered(list(run(ev.PublishFailed(1, "no answer", unknown=True)))) == [
        ("StopFailed", False),
        ("Restart", True),
    ]


def test_a_task_that_ends_too_early_in_a_drain_discards_the_run() -> None:
    run, _ = stopped_at("collecting", DRAIN)
    assert kinds(run.end("a0")) == WITHDRAWN_AND_RESTART


@pytest.mark.parametrize("mode", StopMode)
@pytest.mark.parametrize("step", ["collecting", "publishing", "committing", "ending"])
def test_events_that_are_late_or_of_others_mean_nothing_while_a_job_stops(mode: StopMode, step: str) -> None:
    run, number = stopped_at(step, mode)
    other = [
        ev.Declined(task("b0"), number + 1, "no"),
        ev.SnapshotFailed(None, number + 1, "no"),
        ev.TimedOut(number + 1),
        ev.Published(number + 1),
        ev.Committed(number + 1),
        ev.CommitFailed(number + 1, "no"),
        ev.PublishFailed(number + 1, "no", unknown=True),
    ]
    late = {"collecting": [ev.Committed(number)], "publishing": [ev.TimedOut(number)]}.get(step, [ev.Published(number)])
    assert run(*other, *late) == []
    assert run.due() == []
    assert run.ask(mode, "r1") == []


# Union state and loops ---------------------------------------------------------------------------------------------------


def test_union_state_in_a_partially_ended_operator_refuses_a_savepoint_without_drain() -> None:
    run = Run(tiny_job({"a": 2, "b": 1}, "a hash b", union=("a",)))
    run.logic_ends("a0")
    (failed,) = run.ask(NO_DRAIN)
    assert isinstance(failed, ev.StopFailed)
    assert failed.goes_on
    assert "'a'" in failed.reason
    run.logic_ends("a1")
    assert begun(run.due()).barrier.purpose is ev.BarrierKind.CHECKPOINT


def test_union_state_that_ends_in_part_during_a_savepoint_without_drain_refuses_it() -> None:
    run = Run(tiny_job({"a": 2, "b": 1}, "a hash b", union=("a",)))
    begin = begun(run.ask(NO_DRAIN))
    commands = run.acknowledge_all(begin, finishing=["a0"])
    assert kinds(commands) == ["Abort", "StopFailed"]
    assert answered(list(commands)) == [("StopFailed", True)]


def test_a_drain_is_no_partial_end_of_union_state() -> None:
    run = Run(tiny_job({"a": 2, "b": 1}, "a hash b", union=("a",)))
    run.logic_ends("a0")
    assert run.ask(DRAIN) == [ev.EndSources(tasks("a1"))]
    begin = begun(run.logic_ends("a1", "b0"))
    assert kinds(run.acknowledge_all(begin, finishing=ALL)) == ["Publish"]
