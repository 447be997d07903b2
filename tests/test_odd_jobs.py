"""Jobs that are odd but legal run as any other; those that are wrong are refused with a sentence that says what is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from backends.connectors import CollectSink, MemorySource
from backends.dataflow.api import Dataflow, Operator, Output, Stream
from backends.dataflow.descriptors import Descriptor, ListState, MapState, ValueState
from backends.local import JobFailed
from stateformat.errors import RestoreRefused
from stateformat.model import StopMode
from tests.local_jobs import Bench, Out, Tap, Told, rows, settle, to_end, until

PAIR = pa.struct([("a", pa.int64()), ("b", pa.string())])


class Pairs(Operator):
    """Counts the rows of each key, a struct of two, and keeps the newest of them as a value; emits both at the end."""

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        return [
            ValueState("newest", {"pair": PAIR}, {"value": PAIR, "n": pa.int64()}),
            MapState("each", {"pair": PAIR}, PAIR, {"list": pa.list_(PAIR), "map": pa.map_(pa.string(), PAIR)}),
        ]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return pa.schema([("pair", PAIR), ("value", PAIR), ("n", pa.int64())])

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        newest, each = self.context.value_state("newest"), self.context.map_state("each")
        for row in batch.to_pylist():
            pair = row["pair"]
            old = newest.get_one(pair)
            newest.put_one((pair,), value=pair, n=old["n"] + 1 if old else 1)
            each.put_one((pair,), pair, list=[pair], map=[("x", pair)])
        return None

    def finish(self) -> Output:
        assert len(self.context.map_state("each")) == len(self.context.value_state("newest"))
        return self.context.value_state("newest").rows().combine_chunks().to_batches()


def test_states_with_structs_of_two_fields_are_restored() -> None:
    pairs: list[dict[str, Any] | None] = [{"a": n % 3, "b": None if n % 2 else "x"} for n in range(12)]
    table = pa.table({"pair": pa.array([*pairs, None], PAIR)})
    out = CollectSink()

    def flow(parallelism: int) -> Dataflow:
        made = Dataflow("job", parallelism=parallelism)
        source = made.source(MemorySource(table, batch_rows=1), uid="in", parallelism=1)
        source.key_by("pair").apply(Pairs(), uid="pairs").apply(out, uid="out")
        return made

    bench = Bench(checkpoint_rows=2, checkpoint_interval_us=None)
    run = bench.begin(flow(2))
    until(run, lambda: run.published >= 2)
    bench.run(flow(3))
    counts = Counter(str(pair) for pair in [*pairs, None])
    assert {str(row["pair"]): row["n"] for row in out.table().to_pylist()} == counts
    assert out.table()["pair"].to_pylist() == out.table()["value"].to_pylist()


class Kept(Told):
    """Passes on what it is given, and keeps the values of each key in a state of the type that is asked for."""

    def __init__(self, bench: Bench, kind: pa.DataType | None, *, as_list: bool = False) -> None:
        super().__init__(bench.log)
        self.kind = kind
        self.as_list = as_list

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        if self.kind is None:
            return []
        return [(ListState if self.as_list else ValueState)("kept", {"key": pa.int64()}, {"v": self.kind})]

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        if self.kind is not None:
            values = pa.RecordBatch.from_arrays([batch["value"].cast(self.kind)], ["v"])
            context, keys = self.context, batch.select(["key"])
            context.list_state("kept").append(keys, values) if self.as_list else context.value_state("kept").put(
                keys, values
            )
        return batch


def keeping(bench: Bench, tap: Tap, out: Out, kind: pa.DataType | None, *, as_list: bool = False) -> Dataflow:
    flow = Dataflow("job")
    kept = flow.source(tap, uid="in").key_by("key").apply(Kept(bench, kind, as_list=as_list), uid="op")
    kept.apply(out, uid="out", chain=False)
    return flow


def half(bench: Bench, tap: Tap, flow: Dataflow) -> None:
    """Run as far as the tap lets it, take a checkpoint, and lose the run."""
    run = bench.begin(flow)
    settle(run)
    bench.checkpoint(run)
    tap.let(0)


def test_a_state_of_a_type_that_the_saved_one_cannot_become_is_refused_by_the_plan() -> None:
    bench, tap = Bench(), Tap([rows(n) for n in range(8)], shut=True)
    tap.let(0, 4)
    half(bench, tap, keeping(bench, tap, Out(bench.log), pa.int64()))
    with pytest.raises(RestoreRefused, match=r"was int64 and would be utf8.*drop='op/kept'.*schema_cannot_evolve"):
        bench.run(keeping(bench, tap, Out(bench.log), pa.string()))


@pytest.mark.parametrize("as_list", [False, True])
def test_a_state_that_is_given_up_may_be_declared_anew_with_another_type(as_list: bool) -> None:
    bench, tap = Bench(), Tap([rows(n) for n in range(8)], shut=True)
    out = Out(bench.log)
    tap.let(0, 4)
    half(bench, tap, keeping(bench, tap, out, pa.int64()))
    tap.let(0, 6)
    run = bench.begin(keeping(bench, tap, out, pa.string(), as_list=as_list), drop=["op/kept"])
    settle(run)
    bench.checkpoint(run)
    assert sorted(row["v"] for row in bench.state("op", "kept")) == ["4", "5"]
    tap.let(0)
    bench.run(keeping(bench, tap, out, pa.string(), as_list=as_list))
    assert out.seen == [*range(8)]


def test_a_finished_operator_may_declare_what_its_state_could_not_become() -> None:
    bench = Bench()
    out = Out(bench.log)
    tap, other = Tap([rows(n) for n in range(4)]), Tap([rows(n) for n in range(4, 8)], shut=True)

    def flow(kind: pa.DataType) -> Dataflow:
        made = keeping(bench, tap, out, kind)
        made.source(other, uid="other").apply(Told(bench.log), uid="told").apply(out, uid="out 2", chain=False)
        return made

    run = bench.begin(flow(pa.int64()))
    settle(run)
    bench.checkpoint(run)
    settle(run)
    bench.checkpoint(run)
    assert bench.newest.graph.operator("op").status == "fully_finished"
    other.let(0)
    bench.run(flow(pa.string()))
    assert out.seen == [*range(8)]


@pytest.mark.parametrize("before", ["rebalance", "key_by"])
def test_the_way_of_records_may_change_where_none_are_in_flight(before: str) -> None:
    bench = Bench(unaligned=True)
    out = Out(bench.log)
    tap = Tap([rows(n) for n in range(8)], endless=True)

    def flow(how: str) -> Dataflow:
        made = Dataflow("job", parallelism=2)
        source = made.source(tap, uid="in", parallelism=1)
        sent: Stream = source.rebalance() if how == "rebalance" else source.key_by("key")
        sent.apply(Told(bench.log), uid="op", chain=False).apply(out, uid="out")
        return made

    run = bench.begin(flow(before))
    settle(run)
    run.request_stop(StopMode.NO_DRAIN)
    to_end(run)
    after = {"rebalance": "key_by", "key_by": "rebalance"}[before]
    run = bench.begin(flow(after), resume=True)
    run.request_stop(StopMode.DRAIN)
    to_end(run)
    assert out.seen == [*range(8)]


def test_the_columns_of_records_may_become_others_where_none_are_in_flight() -> None:
    bench, out = Bench(unaligned=True), CollectSink()
    tap = Tap([rows(n) for n in range(8)], endless=True)

    def flow(kind: pa.DataType) -> Dataflow:
        made = Dataflow("job", parallelism=2)
        cast = made.source(tap, uid="in").map(
            lambda batch: batch.set_column(1, "value", batch["value"].cast(kind)), uid="as"
        )
        cast.key_by("key").apply(Kept(bench, None), uid="op", chain=False).apply(out, uid="out")
        return made

    run = bench.begin(flow(pa.int64()))
    settle(run)
    run.request_stop(StopMode.NO_DRAIN)
    to_end(run)
    run = bench.begin(flow(pa.string()), resume=True)
    bench.checkpoint(run)
    assert bench.newest.by_state["op", "in-flight as->op.0"].current.fields[1].type == "utf8"


def test_what_a_sink_has_not_committed_is_not_lost_when_something_else_takes_its_uid() -> None:
    bench = Bench(max_restarts=0)
    bench.log.failing.append("out commit 1")
    out = Out(bench.log)

    def flow(sink: Operator) -> Dataflow:
        made = Dataflow("job")
        made.source(Tap([rows(1, 2)]), uid="in").apply(sink, uid="out", chain=False)
        return made

    with pytest.raises(JobFailed, match="commit of 'out' failed"):
        bench.run(flow(out))
    with pytest.raises(
        RestoreRefused, match=r"'out' with 1 row, but the operator now is no sink.*drop='out/committables'"
    ):
        bench.run(flow(Told(bench.log)))
    assert out.seen == []
    bench.run(flow(out))
    assert out.seen == [1, 2]
