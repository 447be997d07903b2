"""The coordinator: its runs as scripts, and that an event means something in one phase only."""

from __future__ import annotations

from pathlib import Path

import pytest

from stateformat.backends.dataflow.coordinator.coordinator import Coordinator
from tests.dataflow.coordinator_scripts import make_coordinator, play, tell
from tests.dataflow.task_scripts import Script, scripts

RUNS = scripts(Path(__file__).with_name("runs_of_coordinators.txt"))
TWO = "a:1 b:2; a hash b | tolerable_failures=1"


def test_names_of_scripts_are_unique() -> None:
    assert len({script.name for script in RUNS}) == len(RUNS) > 150


@pytest.mark.parametrize("script", RUNS, ids=lambda script: script.name)
def test_a_run(script: Script) -> None:
    assert play(script) == script.lines


def test_refusals_in_a_row_warn_at_the_third_and_each_time_they_have_doubled() -> None:
    coordinator = make_coordinator(TWO)
    told = {number: tell(coordinator, f"due declined{number}:b1:it_opens_its_states") for number in range(1, 25)}
    warned = [number for number in told if " warn:" in told[number]]
    assert warned == [3, 6, 12, 24]
    assert told[3].endswith(
        " warn:3_checkpoints_in_a_row_could_not_be_taken,_the_last_because_b[1]_cannot_take_part:_it_opens_its_states"
    )


COLLECTING = ["ack1:a0", "declined1:a0:no", "snapshot-failed1:b0:no", "snapshot-failed1::no", "timed-out1"]
PUBLISHING = [
    *("published1", "refused1-counted:no", "publish-failed1:no", "publish-failed1-unknown:no"),
]
COMMITTING = ["committed1", "commit-failed1:no"]
ALL = [*COLLECTING, *PUBLISHING, *COMMITTING]
PHASES = {
    "idle": ("", []),
    "collecting": ("due ack1:b1", COLLECTING),
    "publishing": ("due ack1:b1,a0,b0", PUBLISHING),
    "committing": ("due ack1:b1,a0,b0 published1", COMMITTING),
    "done": ("due ack1:b1,a0,b0 published1 committed1", []),
    "aborted": ("due ack1:b1 declined1:b0:no", []),
}


def brought_to(phase: str) -> Coordinator:
    coordinator = make_coordinator(TWO)
    tell(coordinator, PHASES[phase][0])
    return coordinator


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("event", ALL)
def test_an_event_means_something_in_one_phase_only(phase: str, event: str) -> None:
    untouched, coordinator = brought_to(phase), brought_to(phase)
    commands = tell(coordinator, event)
    if event in PHASES[phase][1]:
        assert commands or event == "ack1:a0"
        return
    assert commands == ""
    # Nothing has changed: what comes next does what it would have done.
    for following in (*ALL, "due", "published2"):
        assert tell(coordinator, following) == tell(untouched, following)


@pytest.mark.parametrize("event", ALL)
@pytest.mark.parametrize("number", ["0", "2"])
def test_an_event_of_another_number_means_nothing(event: str, number: str) -> None:
    for phase in ("collecting", "publishing", "committing"):
        assert tell(brought_to(phase), event.replace("1", number, 1)) == ""


@pytest.mark.parametrize(("last", "kind"), [("failed::x", "restart"), ("ended:a0,b0,b1", "job-ended")])
def test_after_its_end_a_run_commands_nothing(last: str, kind: str) -> None:
    coordinator = make_coordinator(TWO)
    assert tell(coordinator, last).startswith(kind)
    for event in (
        *ALL,
        "due",
        "drain:r",
        "logic-ended:a0",
        "inputs-ended:a0",
        "ended:b0",
        "failed::y",
        "message-sent:a",
    ):
        assert tell(coordinator, event) == ""


def test_tasks_that_the_job_does_not_have_mean_nothing() -> None:
    coordinator = make_coordinator(TWO)
    for name in ("z0", "b2", "b-1"):
        assert tell(coordinator, f"logic-ended:{name} inputs-ended:{name} ended:{name}") == ""
    assert tell(coordinator, "logic-ended:a0,b0") == ""
    assert tell(coordinator, "logic-ended:b1") == "begin|1[trigger a0]"
