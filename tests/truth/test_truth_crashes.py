"""Every crash of everything that changes a local store, by the kernel's own record of it; and processes that are killed.

What is tried, and what must hold, is told in ``crash_scenarios``; what a crash may leave, in ``crash_disk``.
"""

from __future__ import annotations

import functools
import multiprocessing
import random
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from stateformat import paths as layout
from stateformat.backends.storage.local import LocalStorage
from stateformat.errors import CheckpointError
from stateformat.history import record_ids
from stateformat.store import CheckpointStore
from tests.crashes.crash_calls import traced
from tests.crashes.crash_disk import Call
from tests.crashes.crash_recording import Recording, second_run
from tests.crashes.crash_scenarios import SCENARIOS, STORE, needed, publish, restart, temporary_files, whole
from tests.tally import Tally

pytestmark = [pytest.mark.truth, pytest.mark.timeout(900)]

SEED = 7_203
KEPT = 3


def shapes(calls: list[Call]) -> list[tuple[str, str, int]]:
    """What was done, without the random parts of names. Timestamps and ids have the same length in every run."""
    return [(call.verb, call.path.rpartition("/")[0], len(call.data)) for call in calls if call.verb != "mark"]


@functools.cache
def cannot_trace(workspace: Path) -> str:
    """Why strace cannot be used here; empty if it can."""
    try:
        workspace.mkdir()
        traced(workspace, "this")
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def strace(tmp_path_factory: pytest.TempPathFactory, tally: Tally) -> None:
    why = cannot_trace(tmp_path_factory.getbasetemp() / "strace")
    if why:
        tally.skip("crash after each system call", why)
        pytest.skip(why)


def recorded(base: Path, name: str) -> list[Call]:
    return traced(base, "tests.crashes.crash_scenarios", name, str(base))


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.usefixtures("strace")
def test_a_crash_after_any_system_call_leaves_only_whole_checkpoints_and_all_that_were_told(
    tmp_path: Path, name: str, tally: Tally
) -> None:
    recording = Recording(tmp_path, name, record=recorded)
    found = recording.replay()
    tally.add(
        f"crash after each system call: {name}",
        tried=found.states,
        wrong=len(found.problems),
        note=f"{len(recording.calls)} calls, {recording.judge.judged} different states",
    )
    assert found.problems == []


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.usefixtures("strace")
def test_the_two_recorders_agree(tmp_path: Path, name: str) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "outside").mkdir()
    inside = shapes(Recording(tmp_path / "inside", name).calls)
    outside = shapes(Recording(tmp_path / "outside", name, record=recorded).calls)
    # The time in a record may have a digit more or less after its zeros are left out.
    assert [call[:2] for call in inside] == [call[:2] for call in outside]
    assert sum(call[2] for call in inside) == pytest.approx(sum(call[2] for call in outside), abs=64)


@pytest.mark.parametrize("name", ["first publish", "second publish", "expire", "copy", "rollback"])
def test_each_sync_that_has_something_to_do_is_needed(tmp_path: Path, name: str, tally: Tally) -> None:
    """The others are of directories that another process may have made, or filled, a moment before it died."""
    recording = Recording(tmp_path, name)
    useless = recording.replay(closely=False).useless
    assert all(not Path(recording.calls[number].path).suffix for number in useless), (
        "the sync of a file has always work"
    )
    needed_ones = [number for number in recording.syncs() if number not in useless]
    missed = [
        recording.calls[number].path
        for number in needed_ones
        if recording.missed_without(number, closely=name == "expire")
    ]
    tally.add(
        f"a sync left out: {name}", tried=len(needed_ones), noticed=len(needed_ones) - len(missed), wrong=len(missed)
    )
    assert missed == []
    assert needed_ones


@pytest.mark.parametrize("name", ["first publish", "second publish", "copy", "rollback", "expire"])
def test_a_second_run_after_a_first_that_died_anywhere_relies_on_nothing_that_may_vanish(
    tmp_path: Path, name: str, tally: Tally
) -> None:
    recording = Recording(tmp_path, name)
    states, problems = 0, []
    for moment in range(len(recording.calls) + 1):
        if moment and recording.calls[moment - 1].verb in ("write", "mark", "sync"):
            # What is seen then was seen one call before, or is of no object.
            continue
        found = second_run(recording, tmp_path, moment)
        states += found.states
        problems += found.problems
    tally.add(f"death, restart, power failure: {name}", tried=states, wrong=len(problems))
    assert problems == []


# --- processes that are killed -------------------------------------------------------------------------------------------


def work(root: str, told: Connection, seed: int) -> None:
    """Run in a child until it is killed: publish, expire, collect; tell each checkpoint once its permit is there."""
    draw = random.Random(seed)
    storage = LocalStorage(root)
    store = CheckpointStore(storage, sleep=lambda seconds: None)
    while True:
        try:
            permit = restart(storage)
            while True:
                permit = publish(storage, permit)
                told.send((permit.ref.checkpoint_id, permit.ref.attempt_id))
                if draw.random() < 0.3:
                    store.expire(KEPT)
                elif draw.random() < 0.2:
                    store.collect_garbage(delete=True)
        except CheckpointError as error:
            # Overtaken by the rival, at whatever step.
            told.send(("error", f"{type(error).__name__}: {error}"))


def run_and_kill(root: Path, rivals: int, draw: random.Random) -> tuple[list[tuple[Any, str]], int]:
    """Start so many children, kill them at a random time after the first checkpoint of one, and hand back what they told."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.truth.test_truth_crashes"])
    children, ends = [], []
    for _ in range(rivals):
        end, told = context.Pipe(duplex=False)
        child = context.Process(target=work, args=(str(root), told, draw.randrange(2**32)))
        child.start()
        told.close()
        children.append(child)
        ends.append(end)
    found: list[tuple[Any, str]] = []
    while not found or found[-1][0] == "error":
        assert ends[0].poll(120), f"the first child publishes nothing: {found}"
        found.append(ends[0].recv())
    until = time.monotonic() + draw.expovariate(1 / 0.04)
    while (left := until - time.monotonic()) > 0:
        if ends[0].poll(left):
            found.append(ends[0].recv())
    for child in children:
        child.kill()
    for child, end in zip(children, ends, strict=True):
        child.join()
        found += _rest(end)
    return found, len(children)


def _rest(end: Connection) -> list[tuple[Any, str]]:
    found = []
    try:
        while True:
            found.append(end.recv())
    except EOFError:
        end.close()
        return found


@pytest.mark.parametrize(("rivals", "rounds"), [(1, 60), (2, 25)], ids=["one", "two rivals"])
def test_a_killed_publisher_leaves_whole_checkpoints_and_the_next_goes_on(
    tmp_path: Path, rivals: int, rounds: int, tally: Tally
) -> None:
    root = tmp_path / STORE
    storage = LocalStorage(root, durable=False)
    store = CheckpointStore(storage)
    draw = random.Random(SEED + rivals)
    kills, told, left_behind = 0, {}, Counter[str]()
    for _ in range(rounds):
        found, killed = run_and_kill(root, rivals, draw)
        kills += killed
        errors = [text for number, text in found if number == "error"]
        assert rivals > 1 or not errors, errors
        told.update({number: attempt for number, attempt in found if number != "error"})
        newest = store.history(1)[0].checkpoint_id
        assert whole(storage) == ""
        chain = {record.checkpoint_id: record.attempt_id for record in store.history()}
        # Told and not there any more: only what retention may have removed.
        assert max(told) <= newest
        assert {number: chain.get(number) for number in told if number > newest - KEPT} == {
            number: attempt for number, attempt in told.items() if number > newest - KEPT
        }
        ended = sum(owner is None or owner <= newest for _, owner in temporary_files(storage))
        garbage = store.collect_garbage(delete=True)
        assert len(garbage.leftovers) == ended
        left_behind.update({"temporary files": ended, "objects": len(garbage.objects)})
        assert whole(storage) == ""
        objects = {item.path for item in storage.list("") if (layout.owner_id(item.path) or 0) <= newest}
        assert objects == needed(storage)
    after = record_ids(storage)[-1]
    tally.add(
        f"SIGKILL at a random moment, {'one publisher' if rivals == 1 else 'two rivals'}",
        tried=kills,
        wrong=0,
        note=f"{after} checkpoints; left behind: {dict(left_behind)}",
    )
    assert after >= rounds
    assert len(told) >= rounds
    assert left_behind["objects"] + left_behind["temporary files"] > 0
