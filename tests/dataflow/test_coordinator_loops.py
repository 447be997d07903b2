"""Loops: when they are turned at once, when a head is told to go on to its end, and when that fails."""

from __future__ import annotations

import pytest

from stateformat.backends.dataflow import events as ev
from stateformat.model import StopMode
from tests.dataflow.coordinating import Run, begun, kinds, notified, tasks
from tests.tiny_jobs import TinyJob, tiny_job

MAX, END = ev.LoopStep.MAX_WATERMARK, ev.LoopStep.END
SAID = {"quiet": True, "inputs_ended": True}
EVERYONE = ["a0", "h0", "h1", "t0"]


def looped(**options: bool) -> TinyJob:
    """A source, a head of two tasks, a tail."""
    return tiny_job({"a": 1, "h": 2, "t": 1}, "a hash h", "h hash t", "t feedback h", **options)


def drained(**options: int) -> tuple[Run, ev.Begin]:
    """A run whose source has gone and whose heads have nothing left but their loop: the checkpoint that turns it."""
    run = Run(looped(), **options)
    run.logic_ends("a0")
    run.complete(begun(run.due()), finishing=["a0"])
    run.inputs_end("h0")
    run.inputs_end("h1")
    return run, begun(run.end("a0"))


def steps(commands: list[object]) -> dict[ev.TaskId, ev.LoopStep]:
    """What heads were told."""
    return {
        task: step
        for command in commands
        if isinstance(command, ev.Notify)
        for task, step in command.tasks.items()
        if step is not None
    }


def test_a_loop_ends_in_two_quiet_checkpoints_that_follow_at_once() -> None:
    run, begin = drained()
    assert begin.barrier == ev.Barrier(2)
    notify, begin = run.complete(begin, **SAID)
    assert notify == notified(2, "t0", h0=MAX, h1=MAX)
    notify, begin = run.complete(begin, quiet=False, inputs_ended=True, max_watermark_sent=True)
    assert notify == notified(3, "h0", "h1", "t0")
    (notify,) = run.complete(begin, max_watermark_sent=True, **SAID)
    assert notify == notified(4, "t0", h0=END, h1=END)
    rest = ["h0", "h1", "t0"]
    run.complete(begun(run.logic_ends(*rest)), finishing=rest)
    assert run.end(*rest) == [ev.JobEnded(None)]


def test_a_loop_is_not_turned_at_once_while_a_source_still_reads() -> None:
    job = tiny_job({"a": 1, "s": 1, "h": 1}, "a hash h", "h feedback h")
    run = Run(job)
    run.logic_ends("a0")
    assert run.inputs_end("h0") == []
    assert steps(run.complete(begun(run.due()), ["a0"], **SAID)) == {ev.TaskId("h", 0): MAX}  # but it may end
    assert kinds(run.logic_ends("s0")) == []  # a0 is about to end
    assert kinds(run.end("a0")) == ["Begin"]


def test_a_loop_is_not_turned_at_once_before_all_inputs_of_a_head_have_ended() -> None:
    run = Run(looped())
    run.logic_ends("a0")
    assert run.inputs_end("h1") == []
    assert run.inputs_end("h1") == []
    assert kinds(run.inputs_end("h0")) == ["Begin"]


def test_turning_waits_for_tasks_that_are_about_to_end() -> None:
    run = Run(looped())
    run.logic_ends("a0")
    begin = begun(run.inputs_end("h0", "h1"))
    assert kinds(run.complete(begin, finishing=["a0"], quiet=False, inputs_ended=True)) == ["Notify"]
    assert begun(run.end("a0")).plan.wait == tasks("h0", "h1", "t0")


@pytest.mark.parametrize(
    ("of_h0", "of_h1", "told"),
    [
        ((True, True, False), (True, True, False), MAX),
        ((True, True, True), (True, True, True), END),
        ((True, True, True), (True, True, False), MAX),
        ((False, True, False), (True, True, False), None),
        ((True, True, True), (False, True, True), None),
        ((True, False, False), (True, True, False), None),
    ],
)
def test_heads_are_told_by_what_all_their_tasks_acknowledged(
    of_h0: tuple[bool, bool, bool], of_h1: tuple[bool, bool, bool], told: ev.LoopStep | None
) -> None:
    run = Run(looped())
    run.logic_ends("a0")
    number = begun(run.due()).barrier.number
    for subtask, said in enumerate((of_h0, of_h1)):
        run(ev.Acknowledged(ev.TaskId("h", subtask), ev.Acknowledge(number, False, *said)))
    # What others say of loops is nothing.
    run(ev.Acknowledged(ev.TaskId("a", 0), ev.Acknowledge(number, False, quiet=False)))
    assert run.acknowledge(number, "t0", quiet=False) != []
    run(ev.Published(number))
    assert steps(run(ev.Committed(number))) == ({ev.TaskId("h", 0): told, ev.TaskId("h", 1): told} if told else {})


def both(outer: tuple[bool, bool, bool], inner: tuple[bool, bool, bool]) -> dict[ev.TaskId, ev.LoopStep]:
    """What the heads of two loops, one in the other, are told."""
    run = Run(tiny_job({"a": 1, "h": 1, "g": 1}, "a hash h", "h hash g", "g feedback g", "g feedback h"))
    return told_by(run, h=outer, g=inner)


def told_by(run: Run, **said: tuple[bool, bool, bool]) -> dict[ev.TaskId, ev.LoopStep]:
    """What heads are told by one more checkpoint, once the sources have ended."""
    run.logic_ends("a0")
    begin = begun(run.due())
    number = begin.barrier.number
    for task in begin.plan.wait:
        run(ev.Acknowledged(task, ev.Acknowledge(number, False, *said.get(task.vertex, (True, False, False)))))
    run(ev.Published(number))
    return steps(run(ev.Committed(number)))


def test_a_head_is_told_only_when_every_head_of_its_loop_is_quiet() -> None:
    assert both((True, True, False), (False, False, False)) == {}
    assert both((True, True, False), (True, False, False)) == {ev.TaskId("h", 0): MAX}
    assert both((True, True, True), (True, False, False)) == {ev.TaskId("h", 0): END}
    assert both((True, True, True), (True, True, False)) == {ev.TaskId("h", 0): MAX, ev.TaskId("g", 0): MAX}


def test_loops_that_stand_in_a_row_do_not_wait_for_one_another() -> None:
    job = tiny_job({"a": 1, "h": 1, "g": 1}, "a hash h", "h feedback h", "h hash g", "g feedback g")
    assert told_by(Run(job), h=(True, True, False), g=(False, False, False)) == {ev.TaskId("h", 0): MAX}


def test_heads_that_have_ended_are_not_asked_and_not_told() -> None:
    run = Run(tiny_job({"a": 1, "h": 1, "g": 1}, "a hash h", "h hash g", "g feedback g", "g feedback h"))
    run.logic_ends("a0")
    begin = begun(run.due())
    run(ev.Acknowledged(ev.TaskId("h", 0), ev.Acknowledge(1, True, quiet=False)))
    run(ev.Acknowledged(ev.TaskId("g", 0), ev.Acknowledge(1, False, True, True, False)))
    run.acknowledge(1, "a0")
    run(ev.Published(1))
    assert begin.plan.wait == tasks("a0", "g0", "h0")
    assert steps(run(ev.Committed(1))) == {ev.TaskId("g", 0): MAX}


def test_a_barrier_that_may_overtake_ends_no_loop_and_none_does_once_heads_drain() -> None:
    run = Run(looped(unaligned=True))
    run.logic_ends("a0")
    begin = begun(run.due())
    assert begin.barrier.unaligned
    run.inputs_end("h0", "h1")
    assert steps(run.complete(begin, **SAID)) == {}  # records may lie inside of the loop
    run.decline(2, "h0")
    begin = begun(run.due())
    assert not begin.barrier.unaligned
    assert steps(run.complete(begin, **SAID)) != {}


def test_the_loop_is_turned_again_and_again_and_fails_with_the_name_of_its_head() -> None:
    run, begin = drained(loop_rounds_max=5)
    for _ in range(4):
        begin = begun(run.complete(begin, quiet=False, inputs_ended=True))
    notify, restart = run.complete(begin, quiet=False, inputs_ended=True)
    assert isinstance(notify, ev.Notify)
    assert restart == ev.Restart(
        "the loop of 'h' was turned 5 times since its inputs had ended, and records still go round it. Let it come to an end, "
        "or raise the limit of rounds.",
        counted=True,
    )


def test_the_last_round_allowed_may_be_the_end() -> None:
    run, begin = drained(loop_rounds_max=2)
    begin = begun(run.complete(begin, **SAID))
    assert steps(run.complete(begin, max_watermark_sent=True, **SAID)) == {
        ev.TaskId("h", 0): END,
        ev.TaskId("h", 1): END,
    }


def test_a_head_that_is_told_to_end_is_told_once_and_turned_no_more_while_its_coordinator_answers() -> None:
    run, begin = drained(loop_rounds_max=1)
    assert steps(run.complete(begin, max_watermark_sent=True, **SAID)) == {
        ev.TaskId("h", 0): END,
        ev.TaskId("h", 1): END,
    }
    for _ in range(3):
        commands = run.complete(begun(run.due()), max_watermark_sent=True, **SAID)
        assert commands == [notified(commands[0].number, "h0", "h1", "t0")]  # type: ignore[union-attr]
    assert kinds(run.logic_ends("h0", "h1", "t0")) == ["Begin"]


def test_a_barrier_after_which_a_coordinator_sent_into_the_loop_does_not_end_it() -> None:
    run, begin = drained()
    begin = begun(run.complete(begin, max_watermark_sent=False, **SAID))
    run(ev.MessageSent("t"))
    commands = run.complete(begin, max_watermark_sent=True, **SAID)
    assert steps(commands) == {}
    run(ev.MessageSent("a"))
    begin = begun(commands)
    run(ev.MessageSent("a"))
    assert steps(run.complete(begin, max_watermark_sent=True, **SAID)) == {
        ev.TaskId("h", 0): END,
        ev.TaskId("h", 1): END,
    }


def test_checkpoints_while_a_source_still_reads_are_no_rounds() -> None:
    job = tiny_job({"s": 1, "h": 1}, "h feedback h")
    run = Run(job, loop_rounds_max=2)
    run.inputs_end("h0")
    for _ in range(10):
        assert kinds(run.complete(begun(run.due()), quiet=False, inputs_ended=True)) == ["Notify"]


def test_turning_goes_on_after_a_failure_that_is_tolerated_when_one_is_due() -> None:
    run, begin = drained(tolerable_failures=1)
    assert kinds(run(ev.TimedOut(begin.barrier.number))) == ["Abort"]
    assert begun(run.due()).barrier == ev.Barrier(3)


# Drained with rounds -----------------------------------------------------------------------------------------------------


def test_a_drain_turns_loops_by_rounds_that_nobody_publishes_until_every_logic_has_ended() -> None:
    run = Run(looped(unaligned=True))
    assert run.ask(StopMode.DRAIN) == [ev.EndSources(tasks("a0"))]
    run.logic_ends("a0")
    begin = begun(run.inputs_end("h0", "h1"))
    assert begin.barrier == ev.Barrier(1, ev.BarrierKind.ROUND, unaligned=False)
    assert begin.stop is None
    notify, begin = run.acknowledge_all(begin, ["a0"], quiet=False, inputs_ended=True)
    assert notify == notified(1)
    notify, begin = run.acknowledge_all(begin, ["a0"], **SAID)
    assert notify == notified(2, h0=MAX, h1=MAX)  # and nobody else: a round is no final checkpoint
    (notify,) = run.acknowledge_all(begin, ["a0"], max_watermark_sent=True, **SAID)
    assert notify == notified(3, h0=END, h1=END)
    # The heads end at the notice, and then comes the savepoint.
    begin = begun(run.logic_ends("h0", "h1", "t0"))
    assert begin.barrier == ev.Barrier(4, ev.BarrierKind.STOP_DRAIN)
    assert begin.plan.wait == tasks(*EVERYONE)
    run.complete(begin, EVERYONE)
    assert run.end(*EVERYONE) == [ev.JobEnded(ev.StopOf(StopMode.DRAIN, "r1"))]


def test_a_task_that_ends_in_a_round_makes_it_void_and_the_next_begins_at_once() -> None:
    run = Run(tiny_job({"a": 1, "b": 1, "h": 1}, "a hash h", "h feedback h"))
    run.logic_ends("b0")
    run.ask(StopMode.DRAIN)
    run.logic_ends("a0")
    assert begun(run.inputs_end("h0")).barrier.purpose is ev.BarrierKind.ROUND
    commands = run.end("b0")
    assert kinds(commands) == ["Abort", "Begin"]
    assert begun(commands).barrier == ev.Barrier(2, ev.BarrierKind.ROUND)


def test_a_round_of_a_drain_that_fails_discards_the_run() -> None:
    run = Run(looped())
    run.ask(StopMode.DRAIN)
    run.logic_ends("a0")
    begin = begun(run.inputs_end("h0", "h1"))
    assert kinds(run(ev.TimedOut(begin.barrier.number))) == ["StopFailed", "Restart"]


def test_an_endless_loop_fails_a_drain_uncounted() -> None:
    run = Run(looped(), loop_rounds_max=1)
    run.ask(StopMode.DRAIN)
    run.logic_ends("a0")
    begin = begun(run.inputs_end("h0", "h1"))
    notify, failed, restart = run.acknowledge_all(begin, ["a0"], quiet=False, inputs_ended=True)
    assert kinds([notify, failed, restart]) == ["Notify", "StopFailed", "Restart"]
    assert restart == ev.Restart(failed.reason, counted=False)


def test_nothing_is_told_while_something_comes_into_the_loop_behind_its_head() -> None:
    # What s emits goes to t and from there to h, which must not have ended.
    job = tiny_job({"a": 1, "s": 1, "h": 1, "t": 1}, "a hash h", "s hash t", "h hash t", "t feedback h")
    run = Run(job)
    run.logic_ends("a0")
    run.inputs_end("h0")
    begin = begun(run.due())
    run.logic_ends("s0")
    assert steps(run.complete(begin, ["a0"], **SAID)) == {}
    begin = begun(run.end("a0"))
    assert steps(run.complete(begin, ["s0"], **SAID)) == {ev.TaskId("h", 0): MAX}


def test_a_checkpoint_that_began_before_the_loop_was_closed_ends_nothing() -> None:
    run = Run(looped())
    begin = begun(run.due())
    run.logic_ends("a0")
    run.inputs_end("h0", "h1")
    commands = run.complete(begin, **SAID)
    assert steps(commands) == {}
    assert steps(run.complete(begun(commands), **SAID)) == {ev.TaskId("h", 0): MAX, ev.TaskId("h", 1): MAX}


def test_a_savepoint_without_drain_tells_heads_nothing() -> None:
    run = Run(looped())
    run.logic_ends("a0")
    begin = begun(run.ask(StopMode.NO_DRAIN))
    assert steps(run.complete(begin, **SAID)) == {}


# Union state within reach of a loop -------------------------------------------------------------------------------------


def test_while_union_state_forbids_checkpoints_loops_are_turned_by_rounds() -> None:
    # u0 has ended; u1 will when the loop has. Without rounds both would wait for ever.
    job = tiny_job({"b": 1, "h": 1, "u": 2}, "b rescale u", "h rescale u", "h feedback h", union=("u",))
    run = Run(job)
    run.logic_ends("b0", "u0")
    begin = begun(run.inputs_end("h0"))
    assert begin.barrier.purpose is ev.BarrierKind.ROUND
    notify, begin = run.acknowledge_all(begin, ["b0", "u0"], **SAID)
    assert notify == notified(1, h0=MAX)
    (notify,) = run.acknowledge_all(begin, ["b0", "u0"], max_watermark_sent=True, **SAID)
    assert notify == notified(2, h0=END)
    assert kinds(run.due()) == ["Warn"]  # the third checkpoint that could not be
    begin = begun(run.logic_ends("h0", "u1"))
    assert begin.barrier.purpose is ev.BarrierKind.CHECKPOINT


def test_union_state_that_ends_in_part_during_a_turn_leads_to_a_round_at_once() -> None:
    job = tiny_job({"h": 1, "u": 2}, "h rescale u", "h feedback h", union=("u",))
    run = Run(job)
    begin = begun(run.inputs_end("h0"))
    assert begin.barrier.purpose is ev.BarrierKind.CHECKPOINT
    commands = run.acknowledge_all(begin, ["u0"], **SAID)
    assert kinds(commands) == ["Abort", "Begin"]
    assert begun(commands).barrier.purpose is ev.BarrierKind.ROUND
