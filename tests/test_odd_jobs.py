"""Jobs that are odd but legal run as any other; those that are wrong are refused with a sentence that says what is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.connectors import CollectSink, MemorySource
from stateformat.backends.dataflow import (
    Dataflow,
    Descriptor,
    EventTime,
    ListState,
    MapState,
    Operator,
    OperatorCoordinator,
    Output,
    Sender,
    Source,
    Stream,
    Timers,
    TwoPhaseCommitSink,
    ValueState,
)
from stateformat.backends.dataflow.events import MIN_WATERMARK
from stateformat.backends.dataflow.operators import Aggregate, Map, Select, TumblingWindow
from stateformat.backends.local import JobFailed
from stateformat.errors import InvalidInput, RestoreRefused
from stateformat.model import StopMode
from tests.local_jobs import ROWS, Bench, Out, Tap, Told, rows, settle, to_end, until

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


def test_a_key_may_be_null_though_its_fields_may_not_be() -> None:
    whole = pa.struct(
        [pa.field("a", pa.int64(), nullable=False), pa.field("in", pa.struct([("b", pa.string())]), nullable=False)]
    )
    keys: list[dict[str, Any] | None] = [{"a": 1, "in": {"b": "x"}}, None, {"a": 1, "in": {"b": None}}] * 4
    out = CollectSink()

    def flow(parallelism: int) -> Dataflow:
        made = Dataflow("job", parallelism=parallelism)
        source = made.source(
            MemorySource(pa.table({"k": pa.array(keys, whole)}), batch_rows=1), uid="in", parallelism=1
        )
        source.key_by("k").aggregate({"n": ("*", "count")}, uid="count", emit="end").apply(out, uid="out")
        return made

    bench = Bench(checkpoint_rows=2, checkpoint_interval_us=None)
    run = bench.begin(flow(2))
    until(run, lambda: run.published >= 2)
    bench.run(flow(3))
    assert {str(row["k"]): row["n"] for row in out.table().to_pylist()} == {str(key): 4 for key in keys[:3]}


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


class Puts(Told):
    """Puts one value into one state."""

    def __init__(self, bench: Bench, put: Callable[[Puts], None]) -> None:
        super().__init__(bench.log)
        self.put = put

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        key = {"key": pa.int64()}
        nested = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.int32()))])
        return [
            ValueState("v", key, {"n": pa.int64(), "s": nested}),
            MapState("m", key, pa.int32(), {"n": pa.int64()}),
            Timers("t", key),
        ]

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        self.put(self)
        return batch


@pytest.mark.parametrize(
    "put",
    [
        lambda op: op.context.value_state("v").put_one((1,), n=1.5),
        lambda op: op.context.value_state("v").put_one((1,), n=Decimal("1.5")),
        lambda op: op.context.value_state("v").put_one((1,), n=2**63),
        lambda op: op.context.value_state("v").put_one((1.5,), n=1),
        lambda op: op.context.value_state("v").get_one(1.5),
        lambda op: op.context.value_state("v").put_one((1,), s={"a": 1.5}),
        lambda op: op.context.value_state("v").put_one((1,), s={"a": 1, "b": [1, 2.5]}),
        lambda op: op.context.value_state("v").put_one((1,), s={"c": 1}),
        lambda op: op.context.map_state("m").put_one((1,), 1.5, n=1),
        lambda op: op.context.timers("t").set_one((1,), 1.5),
    ],
)
def test_a_value_of_one_key_is_kept_as_it_is_or_refused(put: Callable[[Puts], None]) -> None:
    bench = Bench(max_restarts=0)
    flow = Dataflow("job")
    flow.source(Tap([rows(1)]), uid="in").key_by("key").apply(Puts(bench, put), uid="op")
    with pytest.raises(
        JobFailed,
        match=r"process of 'op', subtask 0, failed: InvalidInput: .*(is|are) no (value of key column|values of)",
    ):
        bench.run(flow)


@pytest.mark.parametrize(
    ("state", "put"),
    [
        ("v", lambda op: [op.context.value_state("v").put_one(key, n=1) for key in range(20)]),
        ("m", lambda op: [op.context.map_state("m").put_one(key, 1, n=1) for key in range(20)]),
        ("t", lambda op: [op.context.timers("t").set_one(key, 1) for key in range(20)]),
    ],
)
def test_a_key_that_is_not_that_of_a_record_is_told_with_operator_key_and_key_by(
    state: str, put: Callable[[Puts], None]
) -> None:
    bench = Bench(max_restarts=0)
    flow = Dataflow("job", parallelism=2)
    flow.source(Tap([rows(1)]), uid="in").key_by("key").apply(Puts(bench, put), uid="op")
    sentence = rf"process of 'op', .*operator 'op' puts key \d+ \(key\) into state '{state}' .*comes by key_by\('key'\)"
    with pytest.raises(JobFailed, match=sentence):
        bench.run(flow)


def test_a_whole_number_may_come_as_a_float() -> None:
    bench = Bench()
    flow = Dataflow("job")
    puts = Puts(bench, lambda op: op.context.value_state("v").put_one((1.0,), n=2.0, s={"a": 3.0, "b": [4.0, None]}))
    flow.source(Tap([rows(1)], endless=True), uid="in").key_by("key").apply(puts, uid="op")
    run = bench.begin(flow)
    settle(run)
    bench.checkpoint(run)
    [kept] = bench.state("op", "v")
    assert kept["n"] == 2
    assert kept["s"] == {"a": 3, "b": [4, None]}


# What is wrong is said when the job is put together, or where it happens.


def test_edges_of_one_name_are_refused_before_the_job_runs() -> None:
    bench = Bench()
    flow = Dataflow("job")
    for source, target in (("a", "b->c"), ("a->b", "c")):
        flow.source(Tap([rows(1)]), uid=source).apply(Told(bench.log), uid=target, chain=False)
    with pytest.raises(
        InvalidInput, match=r"from 'a' to 'b->c' and from 'a->b' to 'c' would both be named 'a->b->c\.0'"
    ):
        bench.begin(flow)


@pytest.mark.parametrize("room", [0, -1, True, 1.5, "2"])
def test_a_source_whose_readers_may_hold_no_split_is_refused_and_does_not_wait_for_ever(room: Any) -> None:
    tap = Tap([rows(1)])
    tap.splits_per_reader = room
    flow = Dataflow("job")
    flow.source(tap, uid="in")
    with pytest.raises(InvalidInput, match="source 'in' has splits_per_reader"):
        Bench().begin(flow)


class Odd(Told):
    """An operator whose hooks give what it is told to."""

    def __init__(self, **gives: Any) -> None:
        super().__init__(Bench().log)
        self.gives = gives

    def output_schema(self, *inputs: pa.Schema) -> Any:
        return self.gives.get("output_schema", inputs[0])

    def states(self, *inputs: pa.Schema) -> Any:
        return self.gives.get("states", ())

    def coordinator(self) -> Any:
        return self.gives.get("coordinator")


class NoColumns(TwoPhaseCommitSink, Told):
    """A sink that does not say what it commits."""

    def prepare_commit(self, prepared: object) -> None:
        return None

    def commit(self, permit: object, committables: object) -> None:
        return None


class OddTap(Tap):
    """A source without an enumerator."""

    def enumerator(self) -> Any:
        return None


class NoSchema(Tap):
    """A source whose schema is a mapping."""

    @property
    def schema(self) -> Any:
        return {"key": pa.int64()}


def applied(operator: Operator, source: Source | None = None, **step: Any) -> Callable[[], object]:
    def put_together() -> object:
        flow = Dataflow("job")
        stream = flow.source(source or Tap([rows(1)]), uid="in").key_by("key")
        stream.apply(operator, **{"uid": "op", **step})
        return Bench().begin(flow)

    return put_together


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (applied(Odd(output_schema=None)), r"output_schema\(\) of operator 'op' is None\. It must be a pa.Schema"),
        (applied(Odd(states=None)), r"states\(\) of operator 'op' returned None\. Return a list"),
        (applied(Odd(states=["v"])), r"states\(\) of operator 'op' returned \['v'\]\. Return a list"),
        (applied(Odd(states=ValueState("v", {"key": pa.int64()}, {}))), r"of operator 'op' returned ValueState\("),
        (
            applied(Odd(states=[ValueState("v", {"key": pa.int64()}, {"n": pa.uint8()})])),
            "state 'v' of operator 'op' cannot be declared: column 'n' has type uint8",
        ),
        (
            applied(Odd(states=[ValueState("v", {"key": pa.int64()}, "n")])),
            "state 'v' of operator 'op' cannot be declared: 'n' are no columns",
        ),
        (applied(Odd(coordinator=5)), r"coordinator\(\) of 'op' returned int, which has no columns"),
        (applied(NoColumns(Bench().log)), "sink 'op' has no committable_columns"),
        (applied(Odd(), OddTap()), r"enumerator\(\) of 'in' returned NoneType, which has no columns"),
        (applied(Odd(), NoSchema()), "the schema of source 'in' is {.*}. It must be a pa.Schema"),
        (applied(Odd(), uid=5), "the uid of a step is 5. It must be a string"),
        (applied(Odd(), uid="\ud800"), "the uid of a step is .* which is not valid text"),
        (applied(Odd(), name=5), "the name of step 'op' is 5. It must be a string"),
        (lambda: Dataflow(5), "the job id is 5. It must be a string"),  # type: ignore[arg-type]
        (lambda: Dataflow("job", name=None), "the name of job 'job' is None"),  # type: ignore[arg-type]
        (
            lambda: Dataflow("job").source(Tap(), uid="in").apply(Odd(), "in", uid="op"),  # type: ignore[arg-type]
            "an input of 'op' is 'in'. Give a stream",
        ),
        (
            lambda: Dataflow("job").source(Tap(), uid="in", event_time=5),  # type: ignore[arg-type]
            "event time of source 'in' is 5",
        ),
        (lambda: EventTime("at", -1), "'at' is out of order by -1. Give a whole number"),
        (lambda: EventTime("at", 1.5), r"out of order by 1\.5"),  # type: ignore[arg-type]
        (lambda: MemorySource({"a": [1]}), "dict holds no record batches .*; give an Arrow table"),
        (lambda: MemorySource(None), "NoneType holds no record batches"),
        (lambda: Aggregate("key", {"n": "count"}), "aggregates are {'n': 'count'}. Give a mapping like"),  # type: ignore[dict-item]
        (lambda: Aggregate("key", [("n", "count")]), "Give a mapping like"),  # type: ignore[arg-type]
        (lambda: TumblingWindow("key", 1e6, "at", {"n": ("*", "count")}), r"a window of 1000000\.0 µs"),  # type: ignore[arg-type]
        (lambda: Select(3), "3 is no column"),  # type: ignore[arg-type]
        (lambda: Map(lambda batch: batch, "schema"), "'schema' are no columns"),
    ],
)
def test_what_authors_get_wrong_is_told_in_a_sentence(build: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        build()


class Iter:
    """What cannot be gone through."""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        raise ValueError("nothing here")


class Nulls(Told):
    """Declares a column without nulls, and emits some."""

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return pa.schema([field.with_nullable(field.name != "value") for field in ROWS])

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        return batch.set_column(1, "value", pa.nulls(len(batch), pa.int64()))


class Says(Told):
    """Sends a text, and has a coordinator that does if it is told to."""

    def __init__(self, bench: Bench, message: object) -> None:
        super().__init__(bench.log)
        self.message = message

    def coordinator(self) -> OperatorCoordinator:
        return Answers()

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        self.context.send_to_coordinator(self.message)  # type: ignore[arg-type]
        return None


class Answers(OperatorCoordinator):
    """Answers with a text."""

    columns = pa.schema([("n", pa.int64())])

    def open(self, send: Sender) -> None:
        self.send = send

    def receive(self, subtask: int, message: bytes) -> None:
        self.send(subtask, "text")  # type: ignore[arg-type]

    def snapshot(self) -> pa.Table:
        return self.columns.empty_table()


def test_what_hooks_get_wrong_is_told_with_the_operator() -> None:
    bench = Bench(max_restarts=0)
    for operator, sentence in (
        (Puts(bench, lambda op: op.context.value_state("v").put_one((1, 2), n=1)), "has 2 values and the key 1"),
        (Puts(bench, lambda op: op.context.value_state("v").put_one("Oslo", n=1)), "'Oslo' is no value of key column"),
        (
            Puts(bench, lambda op: op.context.value_state("v").put([1], [2])),
            "state 'v' of 'op': rows are given as list",
        ),
        (Puts(bench, lambda op: op.context.value_state("v").get({"key": [1]})), "rows are given as dict"),  # type: ignore[arg-type]
        (
            Map(lambda batch: batch if not len(batch) else None),
            "'op'.* map returned NoneType; it returns a RecordBatch",
        ),
        (Nulls(bench.log), "'op' emitted 2 nulls in column 'value', which it declares without"),
        (Says(bench, "text"), "operator 'op' sent str; a message is bytes"),
        (Says(bench, None), "operator 'op' sent NoneType"),
        (Says(bench, b"bytes"), "the coordinator of operator 'op' sent str"),
    ):
        flow = Dataflow("job")
        flow.source(Tap([rows(1, 2)]), uid="in").key_by("key").apply(operator, uid="op").apply(
            Told(bench.log), uid="last"
        )
        with pytest.raises(JobFailed, match=sentence):
            bench.run(flow)


def test_what_cannot_be_gone_through_names_its_hook() -> None:
    bench = Bench(max_restarts=0)
    flow = Dataflow("job")
    flow.source(Tap([rows(1)]), uid="in").apply(Told(bench.log, finish=lambda _: Iter()), uid="op")
    with pytest.raises(JobFailed, match="finish of 'op', subtask 0, failed: ValueError: nothing here"):
        bench.run(flow)


def test_the_earliest_time_there_is_may_be_out_of_order() -> None:
    bench = Bench()
    flow = Dataflow("job")
    tap = Tap([rows(1, at=MIN_WATERMARK), rows(2, at=5)], endless=True)
    flow.source(tap, uid="in", event_time=EventTime("at", 10)).apply(Told(bench.log), uid="op")
    run = bench.begin(flow)
    until(run, lambda: run.rows_read == 1)
    bench.checkpoint(run)
    assert [row["watermark"] for row in bench.state("in", "splits")] in ([MIN_WATERMARK], [-5])
