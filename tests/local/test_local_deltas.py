"""Checkpoints of the in-process executor hold what has changed: deltas, whatever becomes of the
checkpoints between.
"""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import stateformat as sf
from stateformat.backends.dataflow import Dataflow, Descriptor, Output, ValueState
from stateformat.backends.dataflow.graph import SPLITS
from stateformat.backends.local import LocalRun
from stateformat.model import StopMode
from tests.local_jobs import KEY, Bench, Tap, Told, rows, to_end, until, until_read

KEYS, CHANGED, ROUNDS = 4000, 40, 14


class Keeps(Told):
    """Keeps the last value of each key; a value that 7 divides removes its key."""

    def states(self, *inputs: pa.Schema) -> list[Descriptor]:
        return [ValueState("last", KEY, {"value": pa.int64()})]

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        last = self.context.value_state("last")
        gone = pc.equal(pc.multiply(pc.divide(batch["value"], 7), 7), batch["value"])
        last.delete(batch.filter(gone).select(["key"]))
        put = batch.filter(pc.invert(gone))
        last.put(put.select(["key"]), put.select(["value"]))
        return None


class Job:
    """A job whose source reads one batch more for each round.

    ``expected``: the state of all rows that were let so far.
    """

    def __init__(self, seed: int, url: str = "memory://bench", **options: Any) -> None:
        self.choose = random.Random(seed)
        base = pa.record_batch({"key": range(KEYS), "value": [7 * key + 1 for key in range(KEYS)], "at": [0] * KEYS})
        self.batches = [base.cast(rows(0).schema), *(self._changes() for _ in range(ROUNDS))]
        self.bench = Bench(url, tolerable_failures=100, **options)
        self.tap = Tap(self.batches, shut=True)
        self.let = 0
        self.expected: dict[int, int] = {}
        self.run = self.begin(2)

    def _changes(self) -> pa.RecordBatch:
        keys = self.choose.sample(range(KEYS + 10), CHANGED)
        batches = [rows(self.choose.randrange(1000), key=key) for key in keys]
        return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]

    def begin(self, parallelism: int) -> LocalRun:
        """Begin a run from the newest checkpoint."""
        flow = Dataflow("job", parallelism=parallelism)
        source = flow.source(self.tap, uid="in", parallelism=1)
        source.key_by("key").apply(Keeps(self.bench.log), uid="op")
        self.run = self.bench.begin(flow)
        self.read()
        return self.run

    def read(self) -> None:
        """Let everything be processed that was let before this run began."""
        position = self.bench.state("in", SPLITS)[0]["position"] if self.bench.newest_id else 0
        until_read(self.run, sum(batch.num_rows for batch in self.batches[position : self.let]))
        self._process()

    def _process(self) -> None:
        until(self.run, lambda: not any(worker.queued for worker in self.run.tasks.values()))

    def saved(self) -> Any:
        """A checkpoint of one round more."""
        self.round()
        return self.bench.checkpoint(self.run)

    def round(self) -> None:
        """One batch more."""
        batch = self.batches[self.let]
        for key, value in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True):
            self.expected.pop(key, None)
            if value % 7:
                self.expected[key] = value
        self.let += 1
        self.tap.let(0, self.let)
        until_read(self.run, self.run.rows_read + self.batches[self.let - 1].num_rows)
        self._process()

    def fail(self) -> None:
        """Let a checkpoint begin and be given up, in one of three ways."""
        self.bench.due(self.run)
        how = self.choose.randrange(3)
        if how == 0:
            self.bench.log.failing.append(f"op/{self.choose.randrange(len(self.run.tasks) - 1)} snapshot")
        else:
            self.bench.storage.order("write", "manifests/", "refuse" if how == 1 else "lose")
        newest = self.bench.newest_id
        until(self.run, lambda: self.run.in_flight is None)
        until(self.run, lambda: not any(worker.mailbox for worker in self.run.tasks.values()))
        self.bench.log.failing.clear()
        self.bench.storage.orders.clear()
        assert self.bench.newest_id == newest

    def check(self) -> None:
        """The newest checkpoint has what is expected."""
        state = self.bench.state("op", "last")
        assert {row["key"]: row["value"] for row in state} == self.expected
        assert len(state) == len(self.expected)

    def layers(self) -> int:
        """The number of layers of the newest checkpoint."""
        layers = self.bench.store.open().handles["layer"]
        return 1 + int(pc.max(layers).as_py())


@pytest.mark.parametrize("unaligned", [False, True], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("seed", [*range(1), *(pytest.param(seed, marks=pytest.mark.truth) for seed in range(1, 8))])
def test_a_checkpoint_holds_what_has_changed_whatever_became_of_those_before(seed: int, unaligned: bool) -> None:
    job = Job(seed, unaligned=unaligned)
    job.saved()
    deepest = 0
    for _ in range(ROUNDS):
        job.round()
        match job.choose.randrange(5):
            case 0:
                job.fail()
            case 1:
                job.bench.checkpoint(job.run)
                job.run.close()
                job.begin(job.choose.choice([1, 2, 3]))
            case _:
                job.bench.checkpoint(job.run)
                job.check()
                deepest = max(deepest, job.layers())
    job.bench.checkpoint(job.run)
    job.check()
    assert deepest > 1


def test_a_delta_costs_what_has_changed_and_not_what_there_is() -> None:
    job = Job(1)
    whole, delta = job.saved().totals, job.saved()
    newest = job.bench.store.open().handles
    written = newest.filter(pc.equal(newest["layer"], 1))
    assert pc.sum(written["rows"]).as_py() == CHANGED
    assert pc.sum(written["size_bytes"]).as_py() < whole.bytes / 4
    assert delta.totals.segments > whole.segments


def test_what_a_checkpoint_that_was_given_up_had_written_is_in_the_next_delta() -> None:
    job = Job(2)
    job.saved()
    job.round()
    job.fail()
    job.saved()
    job.check()
    handles = job.bench.store.open().handles
    assert CHANGED < pc.sum(handles.filter(pc.equal(handles["layer"], 1))["rows"]).as_py() <= 2 * CHANGED


def test_a_crash_that_loses_a_run_goes_on_from_layers_at_another_parallelism() -> None:
    job = Job(3)
    job.saved()
    job.saved()
    job.round()  # Lost with the run, and read again.
    job.begin(3)
    job.bench.checkpoint(job.run)
    job.check()
    assert job.layers() == 3, "a delta on the layers as the restore has cut them"


def test_the_savepoint_of_a_stop_holds_all_layers_itself(tmp_path: Any) -> None:
    job = Job(4)
    job.saved()
    job.round()
    url = str(tmp_path / "savepoint")
    job.run.request_stop(StopMode.NO_DRAIN, url)
    to_end(job.run)
    assert job.layers() == 2
    for path in [item.path for item in job.bench.storage.inner.list("segments/")]:
        job.bench.storage.inner.delete([path])
    found = sf.open(url).open().read("op", "last").table()
    assert dict(zip(found["key"].to_pylist(), found["value"].to_pylist(), strict=True)) == job.expected


@pytest.mark.parametrize(("every", "batch"), [(100, 26), (20, 50)])
def test_barriers_go_when_they_are_due_by_rows(every: int, batch: int) -> None:
    bench = Bench(checkpoint_rows=every)
    count = 2000
    chunks = [rows(*range(first, min(first + batch, count))) for first in range(0, count, batch)]
    readers = [chunks[number::4] for number in range(4)]
    flow = Dataflow("job", parallelism=4)
    flow.source(Tap(*readers), uid="in").key_by("key").apply(Keeps(bench.log), uid="op")
    bench.run(flow)
    # Each reader may be one batch further when the barrier goes.
    assert count // (every + batch) <= bench.newest_id <= count // every + 2 + count // batch
