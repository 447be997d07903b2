"""A job whose versions go on, one after the other, with different columns, on both executors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.dataflow import Dataflow
from stateformat.backends.dataflow.operators import accumulators
from stateformat.errors import RestoreRefused
from stateformat.model import StopMode
from tests.conformance import Gated, Out, batches, to_end, until
from tests.conformance_jobs import Versioned
from tests.played_stage import EVERYWHERE, PlayedStage

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
    now = accumulators._accumulators_of

    def before(kind: str, given: pa.DataType) -> list[tuple[str, str]]:
        return [("sum_of_", "sum"), ("count_of_", "count")] if kind == "mean" else now(kind, given)

    for read, how in ((2, before), (8, now)):
        monkeypatch.setattr(accumulators, "_accumulators_of", how)
        source.let(0, read)
        run = stage.begin("local" if how is before else executor, flow, resume=True, requests_every_us=None)
        until(run, lambda run=run, read=read: run.rows_read >= (8 if read == 2 else 24))
        run.request_stop(StopMode.NO_DRAIN)
        to_end(run)
        columns = {name for row in stage.state("mean", "totals") for name in row if name != "_key_group"}
        assert columns == {"key", "sum_of_mean", "count_of_mean", *(["carry_of_mean"] if how is now else [])}
    last = dict(sorted(out.seen))
    assert last == {key: sum(large[key::4]) / 8 for key in range(4)}
