"""Storages under races, and the suite of every storage on a real S3 server.

Sixteen runners at a time create one name, or publish on one parent, round after round. Each round
has exactly one winner, whose bytes stay; the others get a conflict. The mock S3 server checks and
stores in two steps, so it is tested only with one request after the other (in the suite). Real
concurrency is tested on the real server.
"""

from __future__ import annotations

import multiprocessing
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import PublishConflict
from stateformat.graph import JobGraph
from stateformat.history import find_record
from stateformat.model import CheckpointId
from stateformat.publication import CommitPermit
from stateformat.storage import CreateOutcome, Storage, open_storage
from stateformat.store import CheckpointStore
from stateformat.validation import validate
from tests.servers.server import BUCKET, S3Server
from tests.servers.suite import S3Conformance
from tests.storage.linking import a_large_object_is_copied_in_parts, pinned_by_the_server
from tests.tally import Tally
from tests.worlds.stores import operator

PUBLISHERS = 16
TIMEOUT_SECONDS = 300


@pytest.mark.truth
@pytest.mark.s3
class TestS3StorageOnARealServer(S3Conformance):
    @pytest.fixture
    def server(self, rgw: S3Server) -> S3Server:
        return rgw


@pytest.mark.truth
@pytest.mark.s3
def test_a_real_server_copies_pins_by_itself(rgw: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned_by_the_server(rgw)
    a_large_object_is_copied_in_parts(rgw, monkeypatch)


# Races

Reopen = Callable[[], Storage]
"""Opens the storage of the race anew, as each run does for itself."""


@pytest.fixture
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
    """What the parameter names: memory, local, or a server."""
    if request.param == "memory":
        name = f"race-{uuid.uuid4().hex}"
        yield lambda: MemoryStorage(name)
        MemoryStorage.reset(name)
    elif request.param == "local":
        yield lambda: open_storage(str(tmp_path / "store"))
    else:
        server = request.getfixturevalue(request.param)
        url = f"{SCHEMES[request.param]}://{BUCKET}/{uuid.uuid4().hex}"
        yield lambda: open_storage(url, **server.options())


SCHEMES = {"rgw": "s3", "gcs": "gs", "azurite": "az"}
SMALL = [pytest.param(name, 5, id=f"{name}-5") for name in ("memory", "local", "gcs")]
FULL = [pytest.param(name, 100, id=f"{name}-100", marks=pytest.mark.truth) for name in ("memory", "local", *SCHEMES)]
on_all = pytest.mark.parametrize(("reopen", "rounds"), [*SMALL, *FULL], indirect=["reopen"])


def create_each(storage: Storage, barrier: Any, runner: int, rounds: int) -> list[str]:
    """Return the outcome that a runner gets for each round's name, which all create at once."""
    told = []
    for number in range(rounds):
        barrier.wait(TIMEOUT_SECONDS)
        told.append(storage.create(name_of(number), body_of(runner)).value)
    return told


def name_of(number: int) -> str:
    return f"checkpoints/{number + 1:020}.json"


def body_of(runner: int) -> bytes:
    return b"%d\n" % runner * 200


def publish_each(
    storage: Storage, barrier: Any, runner: int, rounds: int, held: dict[int, CommitPermit] | None = None
) -> list[str]:
    """Return the attempts for which a runner got a permit, by round; a dash for a conflict.

    All start from the same newest checkpoint and then publish at once. ``held``: the newest permit
    of each round, if runners can share it; otherwise each reads it.
    """
    store, graph = CheckpointStore(storage), JobGraph((operator("lines", 1),))
    told = []
    for number in range(rounds):
        barrier.wait(TIMEOUT_SECONDS)
        parent = store.start("race") if held is None else held.get(number)
        pending = store.begin(job_id="race", graph=graph, states=(), parent=parent, job_name=f"of {runner}")
        barrier.wait(TIMEOUT_SECONDS)
        try:
            permit = pending.publish()
        except PublishConflict:
            told.append("-")
        else:
            told.append(permit.ref.attempt_id)
            if held is not None:
                held[number + 1] = permit
    return told


def in_threads(race: Callable[..., list[str]], reopen: Reopen, rounds: int, *shared: Any) -> list[list[str]]:
    """Return what each runner got, in threads of this process."""
    barrier = Barrier(PUBLISHERS)
    with ThreadPoolExecutor(PUBLISHERS) as pool:
        running = [pool.submit(race, reopen(), barrier, runner, rounds, *shared) for runner in range(PUBLISHERS)]
        return [each.result() for each in running]


def in_a_process(
    race: Callable[..., list[str]], url: str, barrier: Any, runner: int, rounds: int, results: Any
) -> None:
    results.put((runner, race(open_storage(url), barrier, runner, rounds)))


def in_processes(race: Callable[..., list[str]], url: str, rounds: int) -> list[list[str]]:
    """As :func:`in_threads`, with a process for each runner."""
    forking = multiprocessing.get_context("fork")
    barrier, results = forking.Barrier(PUBLISHERS), forking.Queue()
    processes = [
        forking.Process(target=in_a_process, args=(race, url, barrier, runner, rounds, results))
        for runner in range(PUBLISHERS)
    ]
    try:
        for process in processes:
            process.start()
        told = dict(results.get(timeout=TIMEOUT_SECONDS) for _ in processes)
        for process in processes:
            process.join(TIMEOUT_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [told[runner] for runner in range(PUBLISHERS)]


def wrong_creates(storage: Storage, told: list[list[str]], rounds: int) -> list[int]:
    """Return the rounds without exactly one winner whose body is stored."""
    wrong = []
    for number in range(rounds):
        outcomes = [each[number] for each in told]
        winners = [runner for runner, outcome in enumerate(outcomes) if outcome == CreateOutcome.CREATED.value]
        body = storage.read(name_of(number)).to_pybytes()
        conflicts = outcomes.count(CreateOutcome.CONFLICT.value)
        if len(winners) != 1 or conflicts != PUBLISHERS - 1 or body != body_of(winners[0]):
            wrong.append(number)
    return wrong


def wrong_publications(storage: Storage, told: list[list[str]], rounds: int) -> list[int]:
    """Return the rounds without exactly one permit, for the checkpoint that exists."""
    wrong = []
    for number in range(rounds):
        permits = [each[number] for each in told if each[number] != "-"]
        record = find_record(storage, CheckpointId(number + 1))
        if record is None or permits != [record.attempt_id]:
            wrong.append(number)
    return wrong


PUBLISH = "runs publish on one parent"
RACES = {"threads create one name": (create_each, wrong_creates), PUBLISH: (publish_each, wrong_publications)}
each_race = pytest.mark.parametrize("race", RACES)


def check(race: str, storage: Storage, told: list[list[str]], rounds: int, tally: Tally, where: str) -> None:
    wrong = RACES[race][1](storage, told, rounds)
    tally.add(f"race: {PUBLISHERS} {where}", tried=rounds, wrong=len(wrong))
    assert wrong == []
    if race == PUBLISH:
        check_history(storage, rounds)


@each_race
@on_all
def test_exactly_one_of_many_threads_wins(
    reopen: Reopen, rounds: int, race: str, request: pytest.FixtureRequest, tally: Tally
) -> None:
    # Runs in one process share their permits.
    held: list[Any] = [{}] if race == PUBLISH else []
    told = in_threads(RACES[race][0], reopen, rounds, *held)
    where = request.node.callspec.id.split("-")[0]
    check(race, reopen(), told, rounds, tally, f"{race}, {where}")


@each_race
@pytest.mark.parametrize("rounds", [5, pytest.param(100, marks=pytest.mark.truth)])
def test_exactly_one_of_many_processes_wins(tmp_path: Path, rounds: int, race: str, tally: Tally) -> None:
    url = str(tmp_path / "store")
    told = in_processes(RACES[race][0], url, rounds)
    check(race, open_storage(url), told, rounds, tally, f"processes {race.partition(' ')[2]}, local")


def check_history(storage: Storage, rounds: int) -> None:
    """Check that there is one chain of all rounds, no stray, and that the newest is whole."""
    store = CheckpointStore(storage)
    assert [record.checkpoint_id for record in store.history()] == list(range(rounds, 0, -1))
    assert store.strays() == []
    report = validate(store, level="full")
    assert report.ok, report.problems
