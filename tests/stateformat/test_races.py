"""Everything that changes a history, at once and in real threads: whatever comes of it is one valid
history.

Snapshots written by other processes: in any order, killed and retried, or twice; one checkpoint
comes of it.

The orders that matter are enumerated in ``test_publish_protocol``, request by request. Here nobody
holds the threads: each pair of actors starts at a barrier on a real storage, many times over.
Nothing is asked of who wins. What is asked: one chain, every checkpoint of it whole, no two permits
for one id, nobody told of damage, and every interval in the sink's output exactly once (unless a
rollback was among them, which leaves behind what it leaves behind).
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Lock
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import CheckpointExpired, NotFound, PublishConflict, StorageError
from stateformat.publication import CommitPermit
from stateformat.segments import WriteOptions
from stateformat.states import value_state
from stateformat.storage import Storage, open_storage
from stateformat.store import CheckpointStore
from tests.servers.server import BUCKET
from tests.tally import Tally
from tests.worlds.stepping import JOB, Run, Sink, World, whole
from tests.worlds.stores import rescale_newest

LOST = (PublishConflict, CheckpointExpired, NotFound)
"""What an actor may be told that came too late. Nothing else may be told in a healthy store."""


class SharedSink(Sink):
    """The sink as several processes share it: one commit at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()

    def commit(self, permit: CommitPermit, committables: list[dict[str, Any]]) -> None:
        with self._lock:
            super().commit(permit, committables)


class Arena(World):
    """A world on any storage, with four checkpoints in it and nobody who is stepped."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.store = CheckpointStore(storage)
        self.sink = SharedSink()
        self.drivers = []
        self.pin_numbers = itertools.count()
        first = self.run().publish()
        self.old = first.permit
        first.publish().publish(full=True).publish()


def publish(arena: Arena) -> list[CommitPermit | None]:
    run = Run(arena.storage, arena.sink).restart()
    return [run.publish().permit, run.publish(full=True).permit]


def zombie(arena: Arena) -> list[CommitPermit | None]:
    run = Run(arena.storage, arena.sink, arena.old)
    run.interval = 1
    return [run.publish().permit]


def rescale(arena: Arena) -> list[CommitPermit | None]:
    newest = arena.store.start(JOB)
    assert newest is not None
    return [rescale_newest(arena.store, 3 - newest.record.graph.operators[0].parallelism)]


def rollback(arena: Arena) -> list[CommitPermit | None]:
    return [arena.store.rollback(3)]


def expire(arena: Arena) -> list[CommitPermit | None]:
    arena.store.expire(keep=1)
    return []


def gc(arena: Arena) -> list[CommitPermit | None]:
    arena.store.collect_garbage(delete=True)
    return []


def pin(arena: Arena) -> list[CommitPermit | None]:
    arena.store.pin(None, f"p{next(arena.pin_numbers)}")
    return []


ACTORS: list[Callable[[Arena], list[CommitPermit | None]]] = [publish, gc, expire, rescale, rollback, zombie, pin]
PAIRS = list(itertools.combinations_with_replacement(ACTORS, 2))


def meet(storage: Storage, *actors: Callable[[Arena], list[CommitPermit | None]]) -> None:
    """Let actors act at once, and check what they leave behind."""
    arena = Arena(storage)
    barrier = Barrier(len(actors))

    def act(actor: Callable[[Arena], list[CommitPermit | None]]) -> list[CommitPermit | None]:
        barrier.wait(timeout=60)
        try:
            return actor(arena)
        except LOST:
            return []
        except StorageError as error:
            # gc has taken the temporary file of one that had been overtaken already.
            if not error.details.get("removed"):
                raise
            return []

    with ThreadPoolExecutor(len(actors)) as pool:
        permits = [permit.ref for found in pool.map(act, actors) for permit in found if permit is not None]
    ids = [ref.checkpoint_id for ref in permits]
    assert len(ids) == len(set(ids)), f"two permits for one id: {permits}"
    assert zombie not in actors or arena.ids()[-1] >= 4, "a zombie has become the newest"
    arena.check(rolled_back=rollback in actors)
    # What was left behind is found, and taking it away harms nobody.
    arena.store.expire(keep=1)
    arena.check(rolled_back=rollback in actors)
    check_pins(arena)


def check_pins(arena: Arena) -> None:
    """What was pinned is whole, though the store it was taken from has gone on without it."""
    for one in arena.store.pins():
        whole(CheckpointStore(arena.storage.savepoint(one.name)).open())
    for name in arena.storage.savepoints():
        arena.store.unpin(name)
    assert list(arena.storage.savepoints()) == []


@pytest.fixture
def often_switched() -> Iterator[None]:
    """Threads give way to one another hundreds of times as often as they do by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def names(pair: tuple[Callable[..., Any], Callable[..., Any]]) -> str:
    return " and ".join(actor.__name__ for actor in pair)


def kind(where: str) -> str:
    return f"publish, gc, expire, rescale, rollback, zombie, pin at once: {where}"


@pytest.mark.parametrize("rounds", [1, pytest.param(30, marks=pytest.mark.truth)])
@pytest.mark.usefixtures("often_switched")
@pytest.mark.parametrize("pair", PAIRS, ids=names)
def test_a_pair_of_actors_at_once_leaves_one_valid_history_in_memory(pair: Any, rounds: int, tally: Tally) -> None:
    name = "race-" + "-".join(actor.__name__ for actor in pair)
    for _ in range(rounds):
        with tally.trying(kind("memory, all pairs")):
            meet(MemoryStorage(name), *pair)
        MemoryStorage.reset(name)


@pytest.mark.parametrize("rounds", [1, pytest.param(12, marks=pytest.mark.truth)])
@pytest.mark.parametrize("pair", PAIRS, ids=names)
def test_a_pair_of_actors_at_once_leaves_one_valid_history_on_disk(
    pair: Any, rounds: int, tmp_path: Path, tally: Tally
) -> None:
    for number in range(rounds):
        with tally.trying(kind("local, all pairs")):
            meet(open_storage(str(tmp_path / str(number))), *pair)


@pytest.mark.truth
@pytest.mark.s3
@pytest.mark.parametrize(("scheme", "server"), [("s3", "rgw"), ("gs", "gcs"), ("az", "azurite")])
@pytest.mark.parametrize("pair", PAIRS, ids=names)
def test_a_pair_of_actors_at_once_leaves_one_valid_history_on_an_object_store(
    pair: Any, scheme: str, server: str, request: pytest.FixtureRequest, tally: Tally
) -> None:
    options = request.getfixturevalue(server).options()
    with tally.trying(kind(f"{server}, all pairs")):
        meet(open_storage(f"{scheme}://{BUCKET}/races/{names(pair).replace(' ', '-')}", **options), *pair)


@pytest.mark.parametrize("rounds", [1, pytest.param(15, marks=pytest.mark.truth)])
@pytest.mark.usefixtures("often_switched")
def test_all_of_them_at_once_leave_one_valid_history(rounds: int, tmp_path: Path, tally: Tally) -> None:
    for number in range(rounds):
        with tally.trying(kind("local, fourteen actors")):
            meet(open_storage(str(tmp_path / str(number))), *ACTORS, *ACTORS)


OWNERS = 4
GRAPH = sf.JobGraph((sf.Operator("counts", parallelism=OWNERS, max_parallelism=64),))
STATE = value_state("counts", "n", keys={"key": pa.int64()}, values={"n": pa.int64()})
ROWS = pa.table({"key": pa.array(range(4000), pa.int64()), "n": pa.array(range(4000), pa.int64())})
BIG_SEGMENTS = WriteOptions(inline_bytes_max=0)


def write(context: sf.WriteContext, subtask: int) -> bytes:
    mine = ROWS.filter(pa.array(context.owners("counts", "n", ROWS) == subtask))
    with context.subtask("counts", subtask) as writer:
        writer.write("n", mine)
    return writer.snapshot().to_bytes()


def work(context: sf.WriteContext, subtask: int, times: int, die: bool, results: multiprocessing.Queue[bytes]) -> None:
    for _ in range(times):
        data = write(context, subtask)
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        results.put(data)
    results.close()
    results.join_thread()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_four_processes_one_killed_and_retried_one_writing_twice_make_one_checkpoint(
    tmp_path: Path, method: str
) -> None:
    spawner = multiprocessing.get_context(method)
    results = spawner.Queue()
    store = sf.open(str(tmp_path / "store"))
    pending = store.begin(job_id="job", graph=GRAPH, states=[STATE], parent=None, options=BIG_SEGMENTS)

    def start(subtask: int, *, times: int = 1, die: bool = False) -> multiprocessing.process.BaseProcess:
        process = spawner.Process(target=work, args=(pending.context, subtask, times, die, results))
        process.start()
        return process

    killed = start(2, die=True)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    workers = [start(3), start(0), start(1, times=2), start(2)]
    snapshots = [results.get(timeout=60) for _ in range(5)]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    accepted = [pending.add(sf.Snapshot.from_bytes(data)) for data in snapshots]
    assert sorted(accepted) == [False, True, True, True, True]
    pending.publish()

    checkpoint = store.open()
    assert sorted(checkpoint.read("counts", "n").table()["key"].to_pylist()) == list(range(4000))
    assert sf.validate(store.storage, level="full").ok
    orphans = store.collect_garbage(delete=False)
    assert len(orphans.segments) == 2, "what the killed process wrote, and one of the two of the eager one"
    store.collect_garbage(delete=True)
    assert sf.validate(store.storage, level="full").ok
    assert not store.collect_garbage(delete=False).segments


def test_a_subtask_that_never_reports_is_refused_by_name(tmp_path: Path) -> None:
    store = sf.open(str(tmp_path / "store"))
    pending = store.begin(job_id="job", graph=GRAPH, states=[STATE], parent=None)
    for subtask in (0, 1, 3):
        pending.add(sf.Snapshot.from_bytes(write(pending.context, subtask)))
    with pytest.raises(sf.InvalidState, match=r"counts.*running subtasks 2;"):
        pending.publish()
    with pytest.raises(sf.NotFound):
        store.open()
