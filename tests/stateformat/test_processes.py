"""Snapshots written by other processes: in any order, killed and retried, or twice; one checkpoint
comes of it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.segments import WriteOptions
from stateformat.states import value_state

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
