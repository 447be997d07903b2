"""``apply_per_key`` on both executors gives what plain Python gives, despite crashes, stops and
rescales.

A job whose versions go on, one after the other, with different columns, on both executors. Both
executors go on from a store that a job of 0.1 left when it was killed, also after a rescale.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import stateformat
from stateformat.backends.connectors import CollectSink, RateSource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.dataflow.operators import aggregate
from stateformat.backends.local import LocalRuntime
from stateformat.backends.rewrite import publish_rescaled
from stateformat.errors import CheckpointError, RestoreRefused
from stateformat.model import StopMode
from tests.worlds.jobs import CallsOfEpochs, PerKeyJob, Versioned, expected
from tests.worlds.stages import (
    EVERYWHERE,
    ON_BOTH,
    Gated,
    Out,
    PlayedStage,
    batches,
    lose,
    other,
    stopped,
    to_end,
    until,
)


@EVERYWHERE
def test_every_kind_of_state_and_timers_give_the_same(stage: PlayedStage, executor: str) -> None:
    job = PerKeyJob(stage)
    stage.run(executor, job.flow(3), checkpoint_rows=20)
    assert job.out.seen == expected()


@ON_BOTH
def test_a_function_that_raised_goes_on_from_the_checkpoint(stage: PlayedStage, executor: str) -> None:
    job = PerKeyJob(stage)
    job.calls.fails("value 33")
    outcome = stage.run(executor, job.flow(2), checkpoint_rows=10)
    assert outcome.restarts == 1
    assert job.out.seen == expected()


@ON_BOTH
def test_what_raises_again_ends_the_job_with_the_key(stage: PlayedStage, executor: str) -> None:
    job = PerKeyJob(stage)
    for _ in range(3):
        job.calls.fails("value 33")
    with pytest.raises(CheckpointError, match="of key 1 raised Boom: value 33"):
        stage.run(executor, job.flow(2), checkpoint_rows=10, max_restarts=0)


@pytest.mark.parametrize("first", ["local", "spark"])
def test_it_goes_to_the_other_executor_and_back_at_other_parallelisms(stage: PlayedStage, first: str) -> None:
    job = PerKeyJob(stage, shut=True)
    job.source.let(0, 4)
    run = stage.begin(first, job.flow(4))
    stopped(run, StopMode.NO_DRAIN, lambda: run.rows_read == 20)

    job.source.let(0, 8)
    lost = stage.begin(other(first), job.flow(6), resume=True, checkpoint_rows=10)
    lose(lost, published=2)

    job.source.let(0)
    stage.run(first, job.flow(3), checkpoint_rows=10, resume=True)
    assert job.out.seen == expected()


def test_on_spark_a_key_is_called_once_in_an_epoch(stage: PlayedStage) -> None:
    job = CallsOfEpochs(stage)
    stage.run("spark", job.flow())
    assert job.out.values == [*range(40)]
    assert sorted(stage.calls.calls) == [f"fn key {key}" for key in range(4)]


STEP = 8
"""How many rows a version reads."""


class Evolving:
    """The job on a stage; ``start`` reads :data:`STEP` rows more than the checkpoint had."""

    def __init__(self, stage: PlayedStage, executor: str) -> None:
        self._stage = stage
        self._executor = executor
        self._source = Gated(stage.directory / "in", batches(range(20 * STEP), 2), shut=True, endless=True)
        self._out = Out()
        self.let = 0

    def start(self, columns: Mapping[str, pa.DataType], counted: str, *, read: int, **said: Any) -> list[int]:
        """Run a version until ``read`` rows are read, and stop it; return what it emitted."""
        before = Counter(self._out.values)
        options: dict[str, Any] = {"drop": said.pop("drop", ())}
        flow = Dataflow("versions", parallelism=2)
        keyed = flow.source(self._source, uid="in", parallelism=1).key_by("key")
        keyed.apply(Versioned(columns, counted, said), uid="op").apply(self._out, uid="out", parallelism=1, chain=False)
        self._source.let(0, read // 2)
        run = self._stage.begin(self._executor, flow, resume=True, requests_every_us=None, **options)
        expected = read - self.let
        until(run, lambda: run.rows_read >= expected)
        run.request_stop(StopMode.NO_DRAIN)
        to_end(run)
        self.let = read
        return sorted((Counter(self._out.values) - before).elements())

    def rows(self, state: str) -> list[dict[str, Any]]:
        """Return the rows of a state in the newest checkpoint, without keys and format columns."""
        own = ("key", "_map_key", "_index")
        return [
            {name: value for name, value in row.items() if name not in own} for row in self._stage.state("op", state)
        ]


@EVERYWHERE
def test_columns_are_renamed_and_dropped_and_again_after_a_rollback(stage: PlayedStage, executor: str) -> None:
    job, long = Evolving(stage, executor), pa.int64()
    assert job.start({"n": pa.int32(), "old": long}, "n", read=STEP) == [1] * 4 + [2] * 4
    before = stage.newest_id
    for columns in ({"count": long, "old": long}, {"n": pa.int32()}):
        with pytest.raises(RestoreRefused) as refused:
            job.start(columns, next(iter(columns)), read=STEP)
        assert {str(refusal.code) for refusal in refused.value.refusals} == {"column_missing"}
        assert len(refused.value.refusals) == 4
    renames = {"n": "count"}
    counts = job.start({"old": long, "count": long}, "count", read=2 * STEP, renames=renames)
    assert counts == [3] * 4 + [4] * 4
    last: dict[str, Any] = {"columns": {"count": long, "more": long}, "counted": "count"}
    said = {"renames": renames, "drops": ["old"], "defaults": {"more": "9"}}
    for nth in (2, 3):
        counts = job.start(**last, read=(nth + 1) * STEP, **said)
        assert counts == [2 * nth + 1] * 4 + [2 * nth + 2] * 4
    for state in ("map", "list", "split"):
        found = job.rows(state)
        assert sorted(row["count"] for row in found) == sorted([*range(1, 9)] * 4)
        # Written before the column was there, and since.
        assert {(row["count"] > 4, row["more"]) for row in found} == {(False, 9), (True, -1)}
    stage.store.rollback(before)
    job.let = STEP
    assert job.start(**last, read=2 * STEP, **said) == [3] * 4 + [4] * 4
    # A column that is dropped and declared again is new; what is written to it stays.
    again = {**last["columns"], "old": long, "n": long}
    for nth in (2, 3):
        counts = job.start(again, "count", read=(nth + 1) * STEP, **said)
        assert counts == [2 * nth + 1] * 4 + [2 * nth + 2] * 4
    for state in ("map", "list", "split"):
        found = job.rows(state)
        assert {(row["count"] > 4, row["old"], row["n"]) for row in found} == {(False, None, None), (True, -1, -1)}


@EVERYWHERE
def test_a_mean_goes_on_from_a_store_in_which_its_sum_had_no_carry(
    stage: PlayedStage, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 0.1 left it: the sum and the count."""
    large = [2**61 + number for number in range(32)]
    source, out = Gated(stage.directory / "in", batches(large, 4), shut=True, endless=True), Out()
    flow = Dataflow("means", parallelism=2)
    rows = flow.source(source, uid="in", parallelism=1).key_by("key")
    rows.aggregate({"mean": ("value", "mean")}, uid="mean").apply(out, uid="out", parallelism=1, chain=False)
    now = aggregate._accumulators_of

    def before(kind: str, given: pa.DataType) -> list[tuple[str, str]]:
        return [("sum_of_", "sum"), ("count_of_", "count")] if kind == "mean" else now(kind, given)

    for read, how in ((2, before), (8, now)):
        monkeypatch.setattr(aggregate, "_accumulators_of", how)
        source.let(0, read)
        run = stage.begin("local" if how is before else executor, flow, resume=True, requests_every_us=None)
        until(run, lambda run=run, read=read: run.rows_read >= (8 if read == 2 else 24))
        run.request_stop(StopMode.NO_DRAIN)
        to_end(run)
        columns = {name for row in stage.state("mean", "totals") for name in row if name != "_key_group"}
        assert columns == {"key", "sum_of_mean", "count_of_mean", *(["carry_of_mean"] if how is now else [])}
    last = dict(sorted(out.seen))
    assert last == {key: sum(large[key::4]) / 8 for key in range(4)}


LEFT = Path(__file__).resolve().parents[1] / "golden" / "v1-runtime"
WINDOW_US = 100_000
EACH = 500
"""Rows of a shard, 1 ms apart."""


def job(out: CollectSink) -> Dataflow:
    """Return the job that wrote the store."""
    flow = Dataflow("shards", parallelism=3)
    source = RateSource(total=4 * EACH, shards=4, rows_per_read=25, step_us=1_000)
    rows = flow.source(source, uid="rows", event_time="at")
    counted = {"rows": ("*", "count"), "last": ("n", "max")}
    rows.key_by("shard").window(WINDOW_US, "at", counted, uid="windows").apply(out, uid="out")
    return flow


def finish(executor: str, store: stateformat.CheckpointStore, out: CollectSink, request: pytest.FixtureRequest) -> None:
    if executor == "local":
        LocalRuntime(store).run(job(out))
    else:
        from stateformat.backends.spark import SparkRuntime

        SparkRuntime(request.getfixturevalue("spark"), store).run(job(out))


def windows(rows: list[dict[str, Any]]) -> list[tuple[int, str, int, int]]:
    return sorted((row["shard"], str(row["window_start"])[:26], row["rows"], row["last"]) for row in rows)


@pytest.mark.parametrize("rescaled", [False, True], ids=["as it is", "rescaled"])
@pytest.mark.parametrize("executor", ["local", pytest.param("spark", marks=pytest.mark.spark)])
def test_a_job_goes_on_from_a_store_of_0_1(
    executor: str, rescaled: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shutil.copytree(LEFT / "store", tmp_path / "store")
    store, out = stateformat.open(str(tmp_path / "store")), CollectSink()
    assert store.open().record.writer == "stateformat 0.1.0"
    assert stateformat.validate(store, level="full").ok
    if rescaled:
        checkpoint = store.open()
        publish_rescaled(checkpoint, checkpoint.graph.at(5), store=store)
    finish(executor, store, out, request)
    before, after = windows(json.loads((LEFT / "committed.json").read_text())), windows(out.table().to_pylist())
    assert before
    assert len(set(after)) == len(after)
    everything = sorted({*before, *after})
    assert [(shard, rows, last) for shard, _, rows, last in everything] == [
        (shard, 100, 100 * window + 99) for shard in range(4) for window in range(EACH // 100)
    ]
