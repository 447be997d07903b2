"""Who gets which rows: by key as keyed state is cut, in turn, near, everywhere.

Rows that are combined before they are sent: the same results as of rows that are not.
"""

from __future__ import annotations

import datetime
import decimal
import math
import random
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends.connectors import MemorySource
from stateformat.backends.dataflow import Dataflow, Operator, Stream, ValueState
from stateformat.backends.dataflow.chained_operator import OperatorError, combiners_of
from stateformat.backends.dataflow.compile import PIECE_ROWS_MIN, Job, Router, compile_job
from stateformat.backends.dataflow.graph import graph_of
from stateformat.backends.dataflow.operators import aggregate
from stateformat.backends.dataflow.operators.aggregate import Aggregate
from stateformat.backends.dataflow.testing import OperatorHarness
from stateformat.errors import InvalidState
from tests.worlds.dataflow import ROWS, Chunks, Pass, Stateful, job_of, rows

Connect = Callable[[Stream], Stream]


def between(
    senders: int,
    receivers: int,
    connect: Connect,
    *,
    schema: pa.Schema = ROWS,
    max_parallelism: int | None = None,
    keys: pa.Schema | None = None,
) -> Job:
    flow = Dataflow("job", parallelism=senders)
    target = Pass() if keys is None else Stateful(ValueState("count", keys, {"n": pa.int64()}))
    connect(flow.source(Chunks(schema), uid="s")).apply(
        target, uid="t", parallelism=receivers, max_parallelism=max_parallelism, chain=False
    )
    return job_of(flow)


def router(job: Job, sender: int = 0) -> Router:
    return Router(job, job.graph.edges[0], sender)


def told(routed: list[tuple[int, pa.RecordBatch]]) -> list[tuple[int, list[int]]]:
    return [(receiver, batch.column("value").to_pylist()) for receiver, batch in routed]


KEYS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.bool_(), [True, False]),
    (pa.int8(), [*range(-128, 128)]),
    (pa.int16(), [*range(-300, 300)]),
    (pa.int32(), [*range(-300, 300)]),
    (pa.int64(), [*range(-(2**40), 2**40, 2**32 + 12345)]),
    (pa.float32(), [0.0, -0.0, float("nan"), 1.5, -1.5, float("inf")]),
    (pa.float64(), [0.0, -0.0, float("nan"), 1.5, -1.5, *map(float, range(100))]),
    (pa.string(), ["", "a", "ab", "abc", "abcd", "żółw", *map(str, range(200))]),
    (pa.large_string(), ["", "a", *map(str, range(200))]),
    (pa.binary(), [b"", b"\0", *(b"%d" % number for number in range(100))]),
    (pa.large_binary(), [b"", b"\0", b"x"]),
    (pa.date32(), [datetime.date(2000, 1, day) for day in range(1, 29)]),
    (pa.timestamp("us"), [datetime.datetime(2000, 1, day) for day in range(1, 29)]),  # noqa: DTZ001 - it has no zone
    (pa.timestamp("us", "UTC"), [datetime.datetime(2000, 1, day, tzinfo=datetime.UTC) for day in range(1, 29)]),
    (pa.decimal128(10, 2), [decimal.Decimal(number) / 4 for number in range(100)]),
    (pa.decimal128(38, 0), [decimal.Decimal(10**30 + number) for number in range(100)]),
    (
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
        [{"a": n, "b": str(n)} for n in range(100)] + [{"a": None, "b": None}],
    ),
]


@pytest.mark.parametrize(("dtype", "values"), KEYS, ids=[str(dtype) for dtype, _ in KEYS])
@pytest.mark.parametrize("receivers", [3, 7])
def test_a_row_goes_where_the_state_of_its_key_is_cut_to(dtype: pa.DataType, values: list[Any], receivers: int) -> None:
    values = [*values, None, *values]
    batch = pa.record_batch({"value": pa.array(range(len(values))), "key": pa.array(values, dtype)})
    job = between(
        2,
        receivers,
        lambda s: s.key_by("key"),
        schema=batch.schema,
        max_parallelism=11,
        keys=pa.schema([("key", dtype)]),
    )
    store = sf.open("memory://routing")
    context = store.begin(job_id="job", graph=job.graph, states=job.states, parent=None).context
    owners = context.owners("t", "count", batch).tolist()
    expected = [(r, [row for row, owner in enumerate(owners) if owner == r]) for r in sorted(set(owners))]
    assert told(router(job).route(batch)) == expected
    assert len(expected) > 1 or dtype == pa.bool_()


def test_several_key_columns_are_hashed_in_their_order() -> None:
    schema = pa.schema([("value", pa.int64()), ("a", pa.string()), ("b", pa.int64())])
    batch = pa.record_batch(
        [pa.array(range(200)), pa.array([f"{n % 7}" for n in range(200)]), pa.array(range(200))], schema=schema
    )
    found = {}
    for keys in (("a", "b"), ("b", "a")):
        job = between(
            1, 4, lambda s, keys=keys: s.key_by(*keys), schema=schema, keys=pa.schema([schema.field(k) for k in keys])
        )
        context = sf.open("memory://routing").begin(job_id="j", graph=job.graph, states=job.states, parent=None).context
        owners = context.owners("t", "count", batch).tolist()
        found[keys] = told(router(job).route(batch))
        assert found[keys] == [(r, [row for row in range(200) if owners[row] == r]) for r in range(4)]
    assert found["a", "b"] != found["b", "a"]


def test_rows_of_every_sort_of_column_are_sent_whole() -> None:
    columns = {
        "key": pa.array(range(50)),
        "value": pa.array([None if n % 5 == 0 else n for n in range(50)]),
        "text": pa.array(["" if n % 3 else None if n % 2 else "x" * n for n in range(50)]),
        "list": pa.array([[{"x": n}] * (n % 4) for n in range(50)]),
        "map": pa.array([[(str(n), n)] for n in range(50)], pa.map_(pa.string(), pa.int64())),
        "flag": pa.array([n % 2 == 0 for n in range(50)]),
    }
    batch = pa.record_batch(columns).slice(7, 40)
    job = between(1, 5, lambda s: s.key_by("key"), schema=batch.schema)
    back = pa.Table.from_batches([part for _, part in router(job).route(batch)]).sort_by("key")
    back.validate(full=True)
    assert back.to_pylist() == batch.to_pylist()


def test_a_batch_of_one_key_and_a_batch_to_one_receiver_are_not_copied() -> None:
    batch = rows([5, 5, 5])
    [(_, part)] = router(between(2, 4, lambda s: s.key_by("key"))).route(batch)
    assert part is batch
    [(receiver, part)] = router(between(2, 1, lambda s: s.key_by("key"))).route(rows([1, 2]))
    assert receiver == 0


def test_with_one_receiver_keys_are_not_looked_at() -> None:
    batch = pa.record_batch({"no such key": [1]})
    assert router(between(3, 1, lambda s: s.key_by("key"))).route(batch) == [(0, batch)]


@pytest.mark.parametrize("connect", [lambda s: s.key_by("key"), Stream.rebalance, Stream.broadcast, Stream.rescale])
def test_an_empty_batch_goes_nowhere(connect: Connect) -> None:
    assert router(between(2, 4, connect)).route(rows([])) == []


def test_forward_stays_and_broadcast_goes_everywhere() -> None:
    batch = rows([1])
    assert router(between(3, 3, Stream.forward), 2).route(batch) == [(2, batch)]
    assert router(between(2, 3, Stream.broadcast), 1).route(batch) == [(0, batch), (1, batch), (2, batch)]


def test_rebalance_takes_turns_from_the_senders_own_index_on() -> None:
    job = between(4, 3, Stream.rebalance)
    for sender, turns in ((0, [0, 1, 2, 0]), (2, [2, 0, 1, 2]), (3, [0, 1, 2, 0])):
        one = router(job, sender)
        assert [receiver for _ in range(4) for receiver, _ in one.route(rows([1]))] == turns


def test_rescale_takes_turns_among_the_near() -> None:
    job = between(2, 5, Stream.rescale)
    assert [*job.receivers("s->t.0", 1)] == [3, 4]
    one = router(job, 1)
    assert [receiver for _ in range(3) for receiver, _ in one.route(rows([1]))] == [4, 3, 4]
    near = router(between(5, 2, Stream.rescale), 4)
    assert [receiver for _ in range(3) for receiver, _ in near.route(rows([1]))] == [1, 1, 1]


def test_a_large_batch_is_dealt_in_pieces_and_the_next_one_goes_on_behind() -> None:
    one = router(between(4, 4, Stream.rebalance), 1)
    large = rows([*range(3 * PIECE_ROWS_MIN + 5)])
    routed = one.route(large)
    assert [receiver for receiver, _ in routed] == [1, 2, 3]
    assert [value for _, values in told(routed) for value in values] == [*range(3 * PIECE_ROWS_MIN + 5)]
    assert max(Counter(r for r, batch in routed for _ in range(batch.num_rows)).values()) == PIECE_ROWS_MIN + 2
    assert [receiver for receiver, _ in one.route(rows([1]))] == [0]
    assert len(one.route(rows([*range(PIECE_ROWS_MIN)]))) == 1
    assert [receiver for receiver, _ in one.route(rows([*range(9 * PIECE_ROWS_MIN)]))] == [2, 3, 0, 1]


def test_more_receivers_than_a_byte_can_count() -> None:
    batch = rows([*range(5000)])
    job = between(1, 300, lambda s: s.key_by("key"), keys=pa.schema([("key", pa.int64())]))
    context = sf.open("memory://routing").begin(job_id="j", graph=job.graph, states=job.states, parent=None).context
    owners = context.owners("t", "count", batch).tolist()
    assert max(owners) > 255
    found = {value: receiver for receiver, values in told(router(job).route(batch)) for value in values}
    assert [found[value] for value in range(5000)] == owners


KINDS = ("sum", "count", "min", "max", "mean")
COMBINED_KEYS: dict[str, list[Any]] = {
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
    columns: dict[str, list[Any]] = {
        name: [draw.choice(some) for _ in range(rows)] for name, some in COMBINED_KEYS.items()
    }
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


TWO_ROWS = pa.table({"k": [1, 2]})


def test_what_combine_raises_and_columns_that_it_has_not_declared_name_the_operator() -> None:
    with pytest.raises(OperatorError, match=r"combine.*'operator'.*KeyError"):
        OperatorHarness(Odd(TWO_ROWS.schema), TWO_ROWS.schema, key_by="k").push(TWO_ROWS, combined=True)
    other = pa.record_batch({"k": pa.array([1], pa.int8())})
    told = "'operator' combined rows into columns k int8; it declares k int64"
    with pytest.raises(InvalidState, match=told):
        OperatorHarness(Odd(TWO_ROWS.schema, other), TWO_ROWS.schema, key_by="k").push(TWO_ROWS, combined=True)


def test_an_operator_that_combines_and_cannot_process_what_comes_of_it_says_which_hook_is_missing() -> None:
    harness = OperatorHarness(Odd(TWO_ROWS.schema, TWO_ROWS.to_batches()[0]), TWO_ROWS.schema, key_by="k")
    with pytest.raises(OperatorError, match="process_combined"):
        harness.push(TWO_ROWS, combined=True)


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
    flow.source(MemorySource(TWO_ROWS), uid="rows").key_by("k").apply(kind("k", {"n": ("*", "count")}), uid="counted")
    made = compile_job(flow, graph_of(flow), unaligned=False)
    assert bool(combiners_of(made, made.graph.edges)) is is_combined


def job(*, keyed: bool, fed_back: bool = False, unaligned: bool = False) -> Job:
    """A job whose operator ``odd`` can combine rows."""
    flow = Dataflow("job", parallelism=2)
    rows = flow.source(MemorySource(TWO_ROWS), uid="rows")
    stream = rows.key_by("k") if keyed else rows.rebalance()
    if not fed_back:
        flow.apply(Odd(TWO_ROWS.schema), stream, uid="odd")
    else:
        loop = flow.loop(TWO_ROWS.schema)
        loop.close(flow.apply(Odd(TWO_ROWS.schema), stream, loop.key_by("k"), uid="odd"))
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
