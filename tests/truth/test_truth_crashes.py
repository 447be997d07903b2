"""Publishers that are killed at random, and sinks that stop after each system call."""

from __future__ import annotations

import multiprocessing
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stateformat import paths as layout
from stateformat.backends.storage.local import LocalStorage
from stateformat.errors import CheckpointError
from stateformat.history import record_ids
from stateformat.storage import Storage, open_storage
from stateformat.store import CheckpointStore
from tests.crashes.crash_calls import traced
from tests.crashes.crash_disk import Call
from tests.crashes.crash_scenarios import STORE, needed, publish, restart, temporary_files, whole
from tests.crashes.crash_sinks import SinkRecording
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import BUCKET
from tests.tally import Tally

pytestmark = [pytest.mark.truth, pytest.mark.timeout(900)]
SEED = 7_203
KEPT = 3


# --- processes that are killed
# -------------------------------------------------------------------------------------------


def work(url: str, options: dict[str, Any], told: Connection, seed: int) -> None:
    """Run in a child until it is killed: publish, expire, collect; report each checkpoint once its
    permit is held.
    """
    draw = random.Random(seed)
    storage = open_storage(url, **options)
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
            # The rival may overtake it at any step.
            told.send(("error", f"{type(error).__name__}: {error}"))


def run_and_kill(
    url: str, options: dict[str, Any], rivals: int, draw: random.Random
) -> tuple[list[tuple[Any, str]], int]:
    """Start ``rivals`` children, kill them at a random time after the first child's first
    checkpoint, and return what they reported.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.truth.test_truth_crashes"])
    children, ends = [], []
    for _ in range(rivals):
        end, told = context.Pipe(duplex=False)
        child = context.Process(target=work, args=(url, options, told, draw.randrange(2**32)))
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


class Site(NamedTuple):
    """Where publishers are killed; ``settle`` returns when no request of theirs is under way."""

    url: str
    options: dict[str, Any]
    storage: Storage
    settle: Callable[[], None] = lambda: None


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A folder, or a place on the server that the parameter names."""
    if request.param == "local":
        yield Site(str(tmp_path / STORE), {}, LocalStorage(tmp_path / STORE, durable=False))
        return
    server, url = request.getfixturevalue(request.param), f"{SCHEMES[request.param]}://{BUCKET}/{uuid.uuid4().hex}"
    with FaultProxy(server) as proxy:
        yield Site(url, server.options(proxy.endpoint), open_storage(url, **server.options()), proxy.settle)


SCHEMES = {"rgw": "s3", "gcs": "gs", "azurite": "az"}
ROUNDS = {"local": (60, 25), **dict.fromkeys(SCHEMES, (12, 8))}
KILLS = [
    pytest.param(name, rivals, ROUNDS[name][rivals - 1], id=f"{name}, {'one' if rivals == 1 else 'two rivals'}")
    for name in ROUNDS
    for rivals in (1, 2)
]


@pytest.mark.parametrize(("site", "rivals", "rounds"), KILLS, indirect=["site"])
def test_a_killed_publisher_leaves_whole_checkpoints_and_the_next_goes_on(
    site: Site, rivals: int, rounds: int, tally: Tally, request: pytest.FixtureRequest
) -> None:
    storage = site.storage
    store = CheckpointStore(storage)
    draw = random.Random(SEED + rivals)
    kills, told, left_behind = 0, {}, Counter[str]()
    for _ in range(rounds):
        found, killed = run_and_kill(site.url, site.options, rivals, draw)
        site.settle()
        kills += killed
        errors = [text for number, text in found if number == "error"]
        assert rivals > 1 or not errors, errors
        told.update({number: attempt for number, attempt in found if number != "error"})
        newest = store.history(1)[0].checkpoint_id
        # A rival that stalled may publish at an id that has expired. If it is killed before it
        # looks again, it leaves a stray (SPEC 8.2) and never reports it.
        strays = {stray.checkpoint_id: stray.attempt_id for stray in store.strays()}
        assert rivals > 1 or not strays
        assert not strays.items() & told.items()
        assert whole(storage, strays) == ""
        chain = {record.checkpoint_id: record.attempt_id for record in store.history()}
        # Only what retention may have removed is reported and missing.
        assert max(told) <= newest
        assert {number: chain.get(number) for number in told if number > newest - KEPT} == {
            number: attempt for number, attempt in told.items() if number > newest - KEPT
        }
        ended = sum(owner is None or owner <= newest for _, owner in temporary_files(storage))
        # While a rival stalls, the objects that its stray names are collected as garbage (SPEC 9).
        # Only retention, which removes strays too, makes such a store tidy.
        garbage = store.expire(KEPT) if strays else store.collect_garbage(delete=True)
        assert garbage.stopped is None
        assert len(garbage.leftovers) == ended
        left_behind.update({"temporary files": ended, "objects": len(garbage.objects), "strays": len(strays)})
        assert (whole(storage), store.strays()) == ("", [])
        objects = {item.path for item in storage.list("") if (layout.owner_id(item.path) or 0) <= newest}
        assert objects == needed(storage)
    after = record_ids(storage)[-1]
    tally.add(
        f"SIGKILL at a random moment, {request.node.callspec.id}",
        tried=kills,
        wrong=0,
        note=f"{after} checkpoints; left behind: {dict(left_behind)}",
    )
    assert after >= rounds
    assert len(told) >= rounds
    assert left_behind["objects"] + left_behind["temporary files"] > 0


# ---- sinks


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
