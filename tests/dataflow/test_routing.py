"""Who gets which rows: by key as keyed state is cut, in turn, near, everywhere."""

from __future__ import annotations

import datetime
import decimal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends.dataflow import Dataflow, Stream, ValueState
from stateformat.backends.dataflow.graph import Job, Router
from stateformat.backends.dataflow.graph.partitioning import PIECE_ROWS_MIN
from tests.dataflow_fakes import ROWS, Chunks, Pass, Stateful, job_of, rows

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
