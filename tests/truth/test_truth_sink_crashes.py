"""Every crash of a job with a file sink and a SQL sink, by its recorded system calls: a restart
completes files and table.

``crash_sinks`` has the job and what must hold; ``crash_disk`` has what a crash may leave.
"""

from __future__ import annotations

import pytest

from tests.crashes.crash_calls import traced
from tests.crashes.crash_disk import Call
from tests.crashes.crash_sinks import SinkRecording
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


@pytest.mark.parametrize(
    "path",
    [
        r"out/\.pending/files/[^/]*\.open",
        r"out/\.pending/files",
        r"out/\.pending",
        "out",
        r"staging/table/[^/]*\.part",
        "staging/table",
        "staging",
        r"data\.db",
        r"data\.db-journal",
        "",
    ],
)
def test_a_sync_that_is_left_out_is_noticed(recording: SinkRecording, tally: Tally, path: str) -> None:
    calls = recording.without(path)
    assert calls != recording.calls
    noticed = bool(recording.problems(calls, stop=True))
    tally.add("a sync of a sink left out", tried=1, noticed=noticed, wrong=not noticed)
    assert noticed


def test_a_journal_that_comes_back_is_noticed(recording: SinkRecording, tally: Tally) -> None:
    """As with ``synchronous=FULL``, the directory is not synced between the removal of the journal
    and that of the rows.
    """
    calls, gone = [], False
    for call in recording.calls:
        syncs = (call.verb, call.path) == ("sync", "")
        gone = (call.verb, call.path) == ("unlink", "data.db-journal") or (gone and syncs)
        calls.append(Call("mark", "") if gone and syncs else call)
    assert calls != recording.calls
    problems = recording.problems(calls, stop=True)
    tally.add("a journal of SQLite that comes back", tried=1, noticed=len(problems), wrong=not problems)
    assert "no mark that it was committed" in problems[0]


def test_a_second_run_after_a_first_that_died_relies_on_nothing_that_may_vanish(
    recording: SinkRecording, tally: Tally
) -> None:
    before, problems = recording.judge.states, []
    for moment in recording.moments():
        problems += recording.second_run(moment)
    tally.add("death of a sink, restart, power failure", tried=recording.judge.states - before, wrong=len(problems))
    assert problems == []
