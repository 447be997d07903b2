"""Jobs that are odd but legal run as any other; those that are wrong are refused with a sentence that says what is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from backends.connectors import CollectSink, MemorySource
from backends.dataflow.api import Dataflow, Operator, Output
from backends.dataflow.descriptors import Descriptor, MapState, ValueState
from tests.local_jobs import Bench, until

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
