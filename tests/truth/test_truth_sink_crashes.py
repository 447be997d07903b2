"""Every crash of a job with a file sink and a SQL sink, by the kernel's record of it: a restart completes files and table.

What is run, and what must hold, is told in ``crash_sinks``; what a crash may leave, in ``crash_disk``.
"""

from __future__ import annotations

import pytest

from tests.crash_calls import traced
from tests.crash_sinks import SinkRecording
from tests.tally import Tally

pytestmark = [pytest.mark.truth, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory, tally: Tally) -> SinkRecording:
    workspace = tmp_path_factory.mktemp("sinks")
    try:
        (workspace / "this").mkdir()
        traced(workspace / "this", "this")
    except RuntimeError as error:
        tally.skip("crash of sinks after each system call", str(error))
        pytest.skip(str(error))
    return SinkRecording(workspace)


def test_after_a_crash_at_any_call_a_restart_has_every_row_once_in_files_and_table(
    recording: SinkRecording, tally: Tally
) -> None:
    problems = recording.problems()
    tally.add(
        "crash of sinks after each system call",
        tried=recording.judge.states,
        wrong=len(problems),
        note=f"{len(recording.calls)} calls, {recording.judge.judged} different states",
    )
    assert problems == []


def test_each_sync_of_the_sinks_is_needed(recording: SinkRecording, tally: Tally) -> None:
    syncs = recording.syncs()
    missed = [
        str(recording.calls[number])
        for number in syncs
        if not recording.problems(recording.without(number), begin=number, stop=True)
    ]
    tally.add("a sync of a sink left out", tried=len(syncs), noticed=len(syncs) - len(missed), wrong=len(missed))
    assert missed == []


def test_a_second_run_after_a_first_that_died_relies_on_nothing_that_may_vanish(
    recording: SinkRecording, tally: Tally
) -> None:
    before, problems = recording.judge.states, []
    for moment in recording.moments():
        problems += recording.second_run(moment, every=4)
    tally.add("death of a sink, restart, power failure", tried=recording.judge.states - before, wrong=len(problems))
    assert problems == []
