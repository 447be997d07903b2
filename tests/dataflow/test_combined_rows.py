"""Rows that are combined before they are sent: the same results as of rows that are not."""

from __future__ import annotations

import math
import random
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.connectors import MemorySource
from stateformat.backends.dataflow import Dataflow, Operator
from stateformat.backends.dataflow.chain.combiner import combiners_of
from stateformat.backends.dataflow.chain.errors import OperatorError
from stateformat.backends.dataflow.graph import Job, compile_job, graph_of
from stateformat.backends.dataflow.operators import aggregate
from stateformat.backends.dataflow.operators.aggregate import Aggregate
from stateformat.backends.dataflow.testing import OperatorHarness
from stateformat.errors import InvalidState

KINDS = ("sum", "count", "min", "max", "mean")
KEYS: dict[str, list[Any]] = {
    "text": [None, "", "ä", "日本", "z"],
    "real": [0.0, -0.0, math.nan, None, 1.5],
    "pair": [{"a": 1}, {"a": None}, None, {"a": 2}],
}
SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("real", pa.float64()),
        ("pair", pa.struct([("a", pa.int8())])),
        ("n", pa.int32()),
        ("u", pa.uint64()),
        ("money", pa.decimal128(7, 2)),
        ("half", pa.float32()),
    ]
)
AGGREGATES = {
    "rows": ("*", "count"),
    **{f"{kind}_of_{name}": (name, kind) for name in ("n", "money", "half") for kind in KINDS},
    "mean_of_u": ("u", "mean"),
}


def some_rows(rows: int, seed: int) -> pa.Table:
    """Rows with few keys and many nulls. Reals are small multiples of 1/4: their sums are exact."""
    draw = random.Random(seed)
    columns: dict[str, list[Any]] = {name: [draw.choice(some) for _ in range(rows)] for name, some in KEYS.items()}
    columns["n"] = [draw.choice([None, draw.randrange(-(2**31), 2**31)]) for _ in range(rows)]
    columns["u"] = [draw.choice([None, draw.randrange(2**64)]) for _ in range(rows)]
    columns["money"] = [draw.choice([None, Decimal(draw.randrange(-(10**7), 10**7)) / 100]) for _ in range(rows)]
    columns["half"] = [draw.choice([None, draw.randrange(-99, 99) / 4]) for _ in range(rows)]
    return pa.table(columns, schema=SCHEMA)


@pytest.fixture
def combines_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aggregates combine batches of any size, with any number of keys."""
    monkeypatch.setattr(aggregate, "_COMBINED_ROWS_MIN", 0)
    monkeypatch.setattr(aggregate, "_ROWS_PER_KEY_MIN", 0)


@pytest.mark.usefixtures("combines_all")
@pytest.mark.parametrize("emit", ["updates", "end"])
@pytest.mark.parametrize("keys", [["text"], ["real"], ["pair"], ["text", "pair", "real"]])
def test_an_aggregate_makes_the_same_of_rows_combined_or_not_and_of_both_in_turn(keys: list[str], emit: str) -> None:
    plain, mixed = (
        OperatorHarness(Aggregate(keys, AGGREGATES, emit=emit), SCHEMA, key_by=keys, parallelism=3) for _ in range(2)
    )
    for seed in range(6):
        rows = some_rows(seed**4, seed)
        plain.push(rows)
        mixed.push(rows, combined=seed % 3 != 2)
        assert by_text(mixed.take_output()) == by_text(plain.take_output())
        if seed == 3:
            mixed = OperatorHarness.restore(mixed.snapshot(), parallelism=2)
    assert by_text(mixed.finish().take_output()) == by_text(plain.finish().take_output())
    assert by_text(mixed.state("totals")) == by_text(plain.state("totals"))


def by_text(table: pa.Table) -> list[str]:
    """Rows, in an order; minus zero is zero."""
    return sorted(repr(row).replace("-0.0", "0.0") for row in table.to_pylist())


@pytest.mark.parametrize(
    ("rows", "keys", "combined"),
    [(1023, 1, None), (1024, 1, 1), (1024, 512, 512), (1024, 513, None), (50_000, 2048, 2048), (50_000, 2049, None)],
)
def test_a_batch_is_combined_where_it_has_rows_enough_and_each_key_of_its_first_rows_has_two(
    rows: int, keys: int, combined: int | None
) -> None:
    logic = Aggregate("k", {"n": ("*", "count")})
    batch = pa.record_batch({"k": pa.array([row % keys for row in range(rows)])})
    logic.states(batch.schema)
    found = logic.combine(batch, 0)
    assert (None if found is None else found.num_rows) == combined
    assert found is None or sum(found["n"].to_pylist()) == rows


class Odd(Operator):
    """Combines rows into what it is given."""

    def __init__(self, schema: pa.Schema | None, combined: pa.RecordBatch | None = None) -> None:
        self.schema, self.combined = schema, combined

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        pass

    def combined_schema(self, input: int) -> pa.Schema | None:
        return self.schema

    def combine(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch | None:
        if self.combined is None:
            raise KeyError("no rows")
        return self.combined


ROWS = pa.table({"k": [1, 2]})


def test_what_combine_raises_and_columns_that_it_has_not_declared_name_the_operator() -> None:
    with pytest.raises(OperatorError, match=r"combine.*'operator'.*KeyError"):
        OperatorHarness(Odd(ROWS.schema), ROWS.schema, key_by="k").push(ROWS, combined=True)
    other = pa.record_batch({"k": pa.array([1], pa.int8())})
    told = "'operator' combined rows into columns k int8; it declares k int64"
    with pytest.raises(InvalidState, match=told):
        OperatorHarness(Odd(ROWS.schema, other), ROWS.schema, key_by="k").push(ROWS, combined=True)


def test_an_operator_that_combines_and_cannot_process_what_comes_of_it_says_which_hook_is_missing() -> None:
    harness = OperatorHarness(Odd(ROWS.schema, ROWS.to_batches()[0]), ROWS.schema, key_by="k")
    with pytest.raises(OperatorError, match="process_combined"):
        harness.push(ROWS, combined=True)


class Counted(Aggregate):
    """Counts what comes to it, and leaves the rest to ``Aggregate``."""

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch | None:
        self.seen = getattr(self, "seen", 0) + batch.num_rows
        return super().process(batch, input)


class CountedToo(Counted):
    """Counts combined rows, too."""

    def process_combined(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch | None:
        return super().process_combined(batch, input)


@pytest.mark.parametrize(("kind", "is_combined"), [(Aggregate, True), (Counted, False), (CountedToo, True)])
def test_rows_are_not_combined_for_a_subclass_whose_own_process_would_miss_them(
    kind: type[Aggregate], is_combined: bool
) -> None:
    flow = Dataflow("job")
    flow.source(MemorySource(ROWS), uid="rows").key_by("k").apply(kind("k", {"n": ("*", "count")}), uid="counted")
    made = compile_job(flow, graph_of(flow), unaligned=False)
    assert bool(combiners_of(made, made.graph.edges)) is is_combined


def job(*, keyed: bool, fed_back: bool = False, unaligned: bool = False) -> Job:
    """A job whose operator ``odd`` can combine rows."""
    flow = Dataflow("job", parallelism=2)
    rows = flow.source(MemorySource(ROWS), uid="rows")
    stream = rows.key_by("k") if keyed else rows.rebalance()
    if not fed_back:
        flow.apply(Odd(ROWS.schema), stream, uid="odd")
    else:
        loop = flow.loop(ROWS.schema)
        loop.close(flow.apply(Odd(ROWS.schema), stream, loop.key_by("k"), uid="odd"))
    return compile_job(flow, graph_of(flow), unaligned=unaligned)


@pytest.mark.parametrize(
    ("of", "combining"),
    [
        ({"keyed": True}, {"rows"}),
        ({"keyed": False}, set()),
        ({"keyed": True, "unaligned": True}, set()),
        ({"keyed": True, "fed_back": True}, {"rows"}),
    ],
)
def test_rows_are_combined_on_keyed_edges_of_which_no_checkpoint_holds_any(
    of: dict[str, bool], combining: set[str]
) -> None:
    made = job(**of)
    assert {made.graph.by_edge[edge].source for edge in combiners_of(made, made.graph.edges)} == combining
