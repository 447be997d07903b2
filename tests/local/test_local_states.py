"""States of jobs: of every kind and type, at another parallelism, declared anew, and what may not
be put into them.

A job is started again with other columns in its states: of every kind, what is kept, added, given
up and refused. A run that goes on without a state whose segments were lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.backends import dataflow as df
from stateformat.backends.connectors import CollectSink, MemorySource
from stateformat.backends.local import JobFailed, LocalRun
from stateformat.backends.runtime import Options, driver
from stateformat.backends.runtime.restore import plan_of
from stateformat.errors import InvalidInput, RestoreRefused
from stateformat.model import StopMode
from stateformat.redistribution import RestorePlan
from stateformat.repairing import losses_of
from tests.worlds.local import KEY, Bench, Count, Line, Log, Out, Tap, Told, rows, settle, to_end, until

PAIR = pa.struct([("a", pa.int64()), ("b", pa.string())])


def saved(bench: Bench) -> dict[str, Any]:
    """What the newest checkpoint has of each state of ``op``, whichever subtask holds it."""
    state = {name: bench.state("op", name) for name in ("sum", "map", "timers", "list", "split", "union")}
    indexed = sorted(state["list"], key=lambda row: (row["key"], row["_index"]))
    return {
        "sum": {row["key"]: row["value"] for row in state["sum"]},
        "map": {(row["key"], row["_map_key"], row["value"]) for row in state["map"]},
        "timers": sorted((row["key"], row["_timestamp"]) for row in state["timers"]),
        "list": [(row["key"], row["value"]) for row in indexed],
        **{name: sorted(row["value"] for row in state[name]) for name in ("split", "union")},
    }


def expected(values: Iterable[int]) -> dict[str, Any]:
    """The same after these values, worked out without states."""
    values = list(values)
    return {
        "sum": {key: sum(value for value in values if value % 4 == key) for key in {value % 4 for value in values}},
        "map": {(value % 4, value, value * value) for value in values},
        "timers": sorted((value % 4, value + 1000) for value in values),
        "list": sorted((value % 4, value) for value in values),
        "split": values,
        "union": values,
    }


def interrupted(table: pa.Table, steps: Callable[[df.Stream], df.Stream]) -> CollectSink:
    """The output of a job on a table that was lost after two checkpoints and goes on at another
    parallelism.
    """
    bench, out = Bench(checkpoint_rows=2, checkpoint_interval_us=None), CollectSink()

    def flow(parallelism: int) -> df.Dataflow:
        made = df.Dataflow("job", parallelism=parallelism)
        steps(made.source(MemorySource(table, batch_rows=1), uid="in", parallelism=1)).apply(out, uid="out")
        return made

    run = bench.begin(flow(2))
    until(run, lambda: run.published >= 2)
    bench.run(flow(3))
    return out


class Pairs(df.Operator):
    """Counts the rows of each key, a struct of two, and keeps the newest of them as a value; emits
    both at the end.
    """

    def states(self, *inputs: pa.Schema) -> list[df.Descriptor]:
        return [
            df.ValueState("newest", {"pair": PAIR}, {"value": PAIR, "n": pa.int64()}),
            df.MapState("each", {"pair": PAIR}, PAIR, {"list": pa.list_(PAIR), "map": pa.map_(pa.string(), PAIR)}),
        ]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return pa.schema([("pair", PAIR), ("value", PAIR), ("n", pa.int64())])

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        newest, each = self.context.value_state("newest"), self.context.map_state("each")
        for row in batch.to_pylist():
            pair = row["pair"]
            old = newest.get_one(pair)
            newest.put_one((pair,), value=pair, n=old["n"] + 1 if old else 1)
            each.put_one((pair,), pair, list=[pair], map=[("x", pair)])
        return None

    def finish(self) -> df.Output:
        assert len(self.context.map_state("each")) == len(self.context.value_state("newest"))
        return self.context.value_state("newest").rows().combine_chunks().to_batches()


def test_states_with_structs_of_two_fields_are_restored() -> None:
    pairs: list[dict[str, Any] | None] = [{"a": n % 3, "b": None if n % 2 else "x"} for n in range(12)]
    table = pa.table({"pair": pa.array([*pairs, None], PAIR)})
    out = interrupted(table, lambda source: source.key_by("pair").apply(Pairs(), uid="pairs"))
    counts = Counter(str(pair) for pair in [*pairs, None])
    assert {str(row["pair"]): row["n"] for row in out.table().to_pylist()} == counts
    assert out.table()["pair"].to_pylist() == out.table()["value"].to_pylist()


def test_a_key_may_be_null_though_its_fields_may_not_be() -> None:
    inner = pa.field("in", pa.struct([("b", pa.string())]), nullable=False)
    kind = pa.struct([pa.field("a", pa.int64(), nullable=False), inner])
    keys: list[dict[str, Any] | None] = [{"a": 1, "in": {"b": "x"}}, None, {"a": 1, "in": {"b": None}}] * 4
    table = pa.table({"k": pa.array(keys, kind)})
    out = interrupted(
        table, lambda source: source.key_by("k").aggregate({"n": ("*", "count")}, uid="count", emit="end")
    )
    assert {str(row["k"]): row["n"] for row in out.table().to_pylist()} == {str(key): 4 for key in keys[:3]}


class Keeps(Told):
    """Passes on what it is given, and keeps the values of each key in a state of this type."""

    def __init__(self, log: Log, kind: pa.DataType, *, as_list: bool = False) -> None:
        super().__init__(log)
        self.kind = kind
        self.as_list = as_list

    def states(self, *inputs: pa.Schema) -> list[df.Descriptor]:
        return [(df.ListState if self.as_list else df.ValueState)("kept", KEY, {"v": self.kind})]

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        values = pa.RecordBatch.from_arrays([batch["value"].cast(self.kind)], ["v"])
        if self.as_list:
            self.context.list_state("kept").append(batch.select(["key"]), values)
        else:
            self.context.value_state("kept").put(batch.select(["key"]), values)
        return batch


def half() -> Line:
    """A line that keeps integers, lost behind the checkpoint of half of its rows."""
    line = Line([rows(n) for n in range(8)], op=partial(Keeps, kind=pa.int64()), how="key_by", shut=True)
    line.tap.let(0, 4)
    run = line.begin()
    settle(run)
    line.bench.checkpoint(run)
    line.tap.let(0)
    return line


def test_a_state_of_a_type_that_the_saved_one_cannot_become_is_refused_by_the_plan() -> None:
    line = half()
    line.op = Keeps(line.log, pa.string())
    with pytest.raises(RestoreRefused, match=r"was int64 and would be utf8.*drop='op/kept'.*schema_cannot_evolve"):
        line.run()


@pytest.mark.parametrize("as_list", [False, True])
def test_a_state_that_is_dropped_may_be_declared_anew_with_another_type(as_list: bool) -> None:
    line = half()
    line.tap.let(0, 6)
    line.op = Keeps(line.log, pa.string(), as_list=as_list)
    run = line.begin(drop=["op/kept"])
    settle(run)
    line.bench.checkpoint(run)
    assert sorted(row["v"] for row in line.bench.state("op", "kept")) == ["4", "5"]
    line.tap.let(0)
    line.run()
    assert line.out.seen == [*range(8)]


def test_a_finished_operator_may_declare_what_its_state_could_not_become() -> None:
    line = Line([rows(n) for n in range(4)], how="key_by")
    other = Tap([rows(n) for n in range(4, 8)], shut=True)

    def flow(kind: pa.DataType) -> df.Dataflow:
        line.op = Keeps(line.log, kind)
        made = line.flow()
        made.source(other, uid="other").apply(Told(line.log), uid="told").apply(line.out, uid="out 2", chain=False)
        return made

    run = line.bench.begin(flow(pa.int64()))
    for _ in range(2):
        settle(run)
        line.bench.checkpoint(run)
    assert line.bench.newest.graph.operator("op").status == "fully_finished"
    other.let(0)
    line.bench.run(flow(pa.string()))
    assert line.out.seen == [*range(8)]


@pytest.mark.parametrize(("before", "after"), [("rebalance", "key_by"), ("key_by", "rebalance")])
def test_the_way_of_records_may_change_where_none_are_in_flight(before: str, after: str) -> None:
    line = Line([rows(n) for n in range(8)], how=before, parallelism=2, endless=True, unaligned=True)
    run = line.begin()
    settle(run)
    run.request_stop(StopMode.NO_DRAIN)
    to_end(run)
    line.how = after
    run = line.begin(resume=True)
    run.request_stop(StopMode.DRAIN)
    to_end(run)
    assert line.out.seen == [*range(8)]


def test_the_columns_of_records_may_become_others_where_none_are_in_flight() -> None:
    bench, out = Bench(unaligned=True), CollectSink()
    tap = Tap([rows(n) for n in range(8)], endless=True)

    def flow(kind: pa.DataType) -> df.Dataflow:
        made = df.Dataflow("job", parallelism=2)
        cast = made.source(tap, uid="in").map(
            lambda batch: batch.set_column(1, "value", batch["value"].cast(kind)), uid="as"
        )
        cast.key_by("key").apply(Told(bench.log), uid="op", chain=False).apply(out, uid="out")
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

    def flow(sink: df.Operator) -> df.Dataflow:
        made = df.Dataflow("job")
        made.source(Tap([rows(1, 2)]), uid="in").apply(sink, uid="out", chain=False)
        return made

    with pytest.raises(JobFailed, match="commit of 'out' failed"):
        bench.run(flow(out))
    sentence = r"'out' with 1 row, but the operator now is not a sink .*drop='out/committables'"
    with pytest.raises(RestoreRefused, match=sentence):
        bench.run(flow(Told(bench.log)))
    assert out.seen == []
    bench.run(flow(out))
    assert out.seen == [1, 2]


class Puts(Told):
    """Puts something into its states, or gets something from them."""

    def __init__(self, log: Log, put: Callable[[Any, Any, Any], object]) -> None:
        super().__init__(log)
        self.put = put

    def states(self, *inputs: pa.Schema) -> list[df.Descriptor]:
        nested = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.int32()))])
        value = df.ValueState("v", KEY, {"n": pa.int64(), "s": nested})
        return [value, df.MapState("m", KEY, pa.int32(), {"n": pa.int64()}), df.Timers("t", KEY)]

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        self.put(self.context.value_state("v"), self.context.map_state("m"), self.context.timers("t"))
        return batch


def puts(put: Callable[[Any, Any, Any], object], **options: Any) -> Line:
    return Line(op=partial(Puts, put=put), how="key_by", **options)


@pytest.mark.parametrize(
    ("put", "sentence"),
    [
        (lambda v, m, t: v.put_one((1,), n=1.5), r"InvalidInput: .*(is|are) no values of"),
        (lambda v, m, t: v.put([1], [2]), "state 'v' of 'op': rows are given as list"),
        (lambda v, m, t: v.get({"key": [1]}), "rows are given as dict"),
    ],
)
def test_a_value_of_one_key_is_kept_as_it_is_or_refused(put: Callable[[Any, Any, Any], object], sentence: str) -> None:
    with pytest.raises(JobFailed, match=rf"process of 'op', subtask 0, failed: .*{sentence}"):
        puts(put, max_restarts=0).run()


@pytest.mark.parametrize(
    ("state", "put"),
    [
        ("v", lambda v, m, t: [v.put_one(key, n=1) for key in range(20)]),
        ("m", lambda v, m, t: [m.put_one(key, 1, n=1) for key in range(20)]),
        ("t", lambda v, m, t: [t.set_one(key, 1) for key in range(20)]),
    ],
)
def test_a_key_that_is_not_that_of_a_record_is_refused_with_operator_key_and_key_by(
    state: str, put: Callable[[Any, Any, Any], object]
) -> None:
    sentence = rf"process of 'op', .*operator 'op' puts key \d+ \(key\) into state '{state}' .*comes by key_by\('key'\)"
    with pytest.raises(JobFailed, match=sentence):
        puts(put, parallelism=2, max_restarts=0).run()


LONG, INT, TEXT = pa.int64(), pa.int32(), pa.string()
KINDS = {
    "value": lambda columns, **said: df.ValueState("s", KEY, columns, **said),
    "map": lambda columns, **said: df.MapState("s", KEY, TEXT, columns, **said),
    "list": lambda columns, **said: df.ListState("s", KEY, columns, **said),
    "timers": lambda columns, **said: df.Timers("s", KEY, columns, **said),
    "split": lambda columns, **said: df.SplitList("s", columns, **said),
    "union": lambda columns, **said: df.UnionList("s", columns, **said),
    "broadcast": lambda columns, **said: df.BroadcastState("s", columns, **said),
}
KEYED = ("value", "map", "list", "timers")
Columns = Mapping[str, pa.DataType] | pa.Schema


@dataclass
class Version(df.Operator):
    """A version of a program: one state of a kind. Each row that comes puts one into it, with its
    value in every column.

    ``seen``: the rows of the state as it was opened the last time, without the columns of the
    format and the keys.
    """

    kind: str
    columns: Columns
    said: Mapping[str, Any] = field(default_factory=dict)
    seen: list[dict[str, Any]] = field(default_factory=list)

    def states(self, *inputs: pa.Schema) -> Sequence[df.Descriptor]:
        return [KINDS[self.kind](self.columns, **self.said)]

    def open(self, context: df.OperatorContext) -> None:
        super().open(context)
        own = {"key", "_map_key", "_index", "_timestamp", "_tag"}
        self.seen[:] = [
            {name: value for name, value in row.items() if name not in own} for row in self.state.rows().to_pylist()
        ]

    @property
    def state(self) -> Any:
        get = {"value": "value_state", "map": "map_state", "list": "list_state", "timers": "timers"}
        return getattr(self.context, get.get(self.kind, "entries"))("s")

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        columns = self.columns if isinstance(self.columns, pa.Schema) else pa.schema(list(self.columns.items()))
        values = pa.RecordBatch.from_arrays([_cast(batch["value"], item.type) for item in columns], schema=columns)
        keys, state = batch.select(["key"]), self.state
        if self.kind == "value":
            state.put(keys, values)
        elif self.kind == "list":
            state.append(keys, values)
        elif self.kind in KEYED:
            more = {
                "map": {"_map_key": batch["value"].cast(TEXT)},
                "timers": {"_timestamp": pc.add(batch["at"], 1 << 50)},
            }
            named = dict(zip(values.schema.names, values.columns, strict=True))
            state_rows = pa.RecordBatch.from_pydict({"key": batch["key"], **more[self.kind], **named})
            (state.put if self.kind == "map" else state.set)(state_rows)
        else:
            state.append(values)
        return batch


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array:
    return (values.cast(pa.decimal128(21, kind.scale)) if pa.types.is_decimal(kind) else values).cast(kind)


class Job(Line):
    """A job that is started again and again; every start reads one more row, and ends behind a
    checkpoint.
    """

    def __init__(self, kind: str = "value") -> None:
        super().__init__([rows(n, key=n) for n in range(20)], how="key_by", shut=True, endless=True)
        self.kind = kind
        self.read = 0

    def version(self, columns: Columns, said: Mapping[str, Any] | None = None) -> Version:
        self.op = version = Version(self.kind, columns, said or {})
        return version

    def start(self, columns: Columns, said: Mapping[str, Any] | None = None, **options: Any) -> list[dict[str, Any]]:
        """What a version of the program finds; ``said``: what it says of its columns."""
        version = self.version(columns, said)
        run = self.begin(**options)
        found = sorted(version.seen, key=str)
        self.read += 1
        self.tap.let(0, self.read)
        settle(run)
        self.bench.checkpoint(run)
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_becomes_of_each_column_of_each_kind_of_state(kind: str) -> None:
    job = Job(kind)
    assert job.start({"v": INT, "w": LONG, "d": pa.decimal128(5, 1), "f": pa.float32()}) == []
    # Kept in another order, widened, renamed, added with a default and with null, and one given up.
    program: dict[str, Any] = {
        "columns": {"n": TEXT, "f": pa.float64(), "x": LONG, "a": LONG, "d": pa.decimal128(9, 1)},
        "said": {"renames": {"v": "x"}, "defaults": {"a": "7"}, "drops": ["w"]},
    }
    (row,) = job.start(**program)
    assert row == {"n": None, "f": 0.0, "x": 0, "a": 7, "d": Decimal("0.0")}
    # What has been done has no effect any more.
    both = job.start(**program)
    assert sorted(row["x"] for row in both) == [0, 1]
    assert sorted((row["a"], row["n"] or "") for row in both) == [(1, "1"), (7, "")]
    # The old names are those of new columns now.
    columns, said = {**program["columns"], "v": LONG, "w": LONG}, program["said"]
    assert [(row["v"], row["w"]) for row in job.start(columns, said=said)] == [(None, None)] * 3
    again = job.start(columns, said=said)
    assert sorted((row["x"], row["v"], row["w"]) for row in again if row["v"]) == [(3, 3, 3)]
    # Back to the first checkpoint, where all of it is still to be done.
    job.bench.store.rollback(1)
    (row,) = job.start(columns, said=said)
    assert row == {"n": None, "f": 0.0, "x": 0, "a": 7, "d": Decimal("0.0"), "v": None, "w": None}
    assert sorted(row["x"] for row in job.start(columns, said=said)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_that_goes_is_refused_unless_it_is_named(kind: str) -> None:
    job = Job(kind)
    job.start({"v": LONG, "w": LONG})
    job.start({"v": LONG, "w": LONG})
    with pytest.raises(RestoreRefused, match=r"has the column 'v'.*renames=\{'v': 'NEW'\}.*drop='op/s.v'") as refused:
        job.start({"x": LONG, "w": LONG})
    assert [refusal.code for refusal in refused.value.refusals] == ["column_missing"]
    assert job.start({"x": LONG, "w": LONG}, said={"renames": {"v": "x"}})[1] == {"x": 1, "w": 1}
    job.bench.store.rollback(2)
    # By the run's option, which may stay too; and the column may be declared again.
    for _ in range(2):
        assert job.start({"w": LONG}, drop=["op/s.v"])[1] == {"w": 1}
    assert job.start({"w": LONG, "v": TEXT}, drop=["op/s.v"])[1] == {"w": 1, "v": None}
    assert {"w": 5, "v": "5"} in job.start({"w": LONG, "v": TEXT}, drop=["op/s.v"])


@pytest.mark.parametrize(
    ("columns", "said", "told"),
    [
        ({"v": LONG}, {"drops": ["zz"]}, "'s' of operator 'op' never had a column 'zz'"),
        ({"v": LONG, "x": LONG}, {"renames": {"zz": "x"}}, "never had a column 'zz'"),
        ({"v": LONG}, {"drops": "v"}, "drops is 'v'. It must be a list of names"),
        ({"v": LONG}, {"drops": ["key"]}, "'key', which is a key"),
        ({"v": LONG}, {"renames": ["v"]}, "It must be a mapping"),
    ],
)
def test_changes_that_cannot_be_are_refused(columns: Columns, said: dict[str, Any], told: str) -> None:
    job = Job()
    job.start({"v": LONG})
    with pytest.raises(InvalidInput, match=told):
        job.start(columns, said=said)


def test_the_option_of_a_run_names_columns_that_the_state_has_had() -> None:
    job = Job()
    job.start({"v": LONG})
    with pytest.raises(InvalidInput, match="never had a column 'zz'"):
        job.start({"v": LONG}, drop=["op/s.zz"])


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"v": TEXT}, "'v' was int64 and would be utf8"),
        ({"v": INT}, "'v' was int64 and would be int32"),
        (pa.schema([pa.field("v", LONG), pa.field("n", LONG, nullable=False)]), "neither nullable nor has a default"),
    ],
)
def test_what_no_column_can_become_is_refused_without_advice_that_cannot_help(columns: Columns, told: str) -> None:
    job = Job()
    job.start({"v": LONG})
    with pytest.raises(RestoreRefused, match=told) as refused:
        job.start(columns)
    (refusal,) = refused.value.refusals
    assert refusal.code == "schema_cannot_evolve"
    assert "rewrite" not in str(refusal)
    assert ("give the values of 'v' up with drop='op/s.v' and begin with a new column, or" in str(refusal)) == (
        "'v'" in told
    )
    # The type of a column changes by giving its values up; from then on it is another column.
    for expected in ([{"v": None}], [{"v": "1"}, {"v": None}]):
        assert job.start({"v": TEXT}, said={"drops": ["v"]}) == expected


def test_a_program_that_names_changes_may_begin_a_job() -> None:
    job = Job()
    said = {"renames": {"v": "x"}, "drops": ["w"]}
    assert job.start({"x": LONG}, said=said) == []
    assert job.start({"x": LONG, "v": LONG, "w": LONG}, said=said) == [{"x": 0, "v": None, "w": None}]
    assert job.start({"x": LONG, "v": LONG, "w": LONG}, said=said)[1] == {"x": 1, "v": 1, "w": 1}


def test_a_restart_after_a_failure_goes_on_with_what_the_start_gave_up() -> None:
    job = Job()
    job.start({"v": LONG, "w": LONG})
    version = job.version({"v": TEXT, "w": LONG})
    job.log.failing.append("out/0 process 0: 3")
    job.tap.let(0)
    job.tap.bounded = True
    assert job.run(drop=["op/s.v"], checkpoint_interval_us=None, checkpoint_rows=1).restarts == 1
    assert {"v": "2", "w": 2} in version.seen


def test_the_plan_says_column_by_column_what_becomes_of_a_state() -> None:
    job = Job()
    job.start({"v": INT, "w": LONG, "k": LONG, "t": LONG})
    job.version({"k": LONG, "x": LONG, "n": TEXT, "t": TEXT}, {"renames": {"v": "x"}, "drops": ["w"]})
    with pytest.raises(RestoreRefused):
        job.begin()
    plan = plan_of(job.flow(), job.bench.store.open(), Options(), check=False)
    assert [str(column) for column in plan.columns if column.state == "s"] == [
        "key int64 kept",
        "k int64 kept",
        "v int32 renamed to x int64",
        "n string added, null in older rows",
        "t int64 refused: would be t string",
        "w int64 dropped",
    ]
    assert plan.drop == ("op/s.w",)
    assert "column 'w' of keyed state 's'" in plan.warnings[0].message
    assert RestorePlan.from_json(plan.to_json()) == plan
    assert "- op/s: v int32 renamed to x int64" in plan.describe()


class Counting(df.OperatorCoordinator):
    """Has a row of the columns that it is given, and writes down what it was restored with."""

    def __init__(self, columns: Columns, seen: list[Any]) -> None:
        self.columns = columns
        self._seen = seen

    def snapshot(self) -> pa.Table:
        row = {name: {"a": 1, "b": 2, "c": 3}[name] for name in self.columns}
        return pa.Table.from_pylist([row], pa.schema(list(self.columns.items())))

    def receive(self, subtask: int, message: bytes) -> None:
        raise AssertionError("no subtask sends")

    def restore(self, rows: pa.Table) -> None:
        self._seen += rows.to_pylist()


def test_columns_of_a_coordinator_go_the_same_way() -> None:
    line, seen = Line(shut=True, endless=True), []

    def start(columns: Columns, **options: Any) -> None:
        line.op.coordinator = lambda: Counting(columns, seen)  # type: ignore[method-assign]
        line.bench.checkpoint(line.begin(**options))

    start({"a": INT, "b": INT})
    with pytest.raises(RestoreRefused, match=r"'b'.*declare it again, or give it up with drop='op/coordinator.b'"):
        start({"a": LONG})
    start({"c": LONG, "a": LONG}, drop=["op/coordinator.b"])
    assert seen == [{"c": None, "a": 1}]


class Wide(Out):
    """A sink whose committables have one more column."""

    committable_columns = Out.committable_columns.append(pa.field("more", TEXT))

    def prepare_commit(self, prepared: Any) -> pa.Table | None:
        found = super().prepare_commit(prepared)
        return found if found is None else found.append_column("more", pa.array(["x"]))


def test_committables_are_never_lost_to_a_change_of_columns() -> None:
    line = Line([rows(n) for n in range(6)], shut=True, endless=True)

    def start(sink: Out, later: Sequence[int], **options: Any) -> LocalRun:
        line.out = sink
        sink.later = [*later]
        return line.begin(**options)

    def saved(run: LocalRun, chunks: int) -> None:
        line.tap.let(0, chunks)
        settle(run)
        line.bench.checkpoint(run)

    saved(start(Out(line.log), [1] * 9), 2)
    wide = Wide(line.log)
    run = start(wide, [1])
    saved(run, 3)
    assert wide.seen == [0, 1, 2]
    wide.later = [9] * 3
    saved(run, 4)
    with pytest.raises(RestoreRefused, match=r"'out' has the column 'more'.*drop='out/committables.more'"):
        start(Out(line.log), [])
    start(last := Out(line.log), [], drop=["out/committables.more"])
    assert last.seen == [3]


def test_a_changed_uid_is_refused_with_how_its_state_can_follow() -> None:
    bench, tap = Bench(), Tap([rows(1)], endless=True)

    def flow(uid: str) -> df.Dataflow:
        made = df.Dataflow("job")
        made.source(tap, uid="in").key_by("key").apply(Version("value", {"v": LONG}), uid=uid)
        return made

    run = bench.begin(flow("old"))
    settle(run)
    bench.checkpoint(run)
    with pytest.raises(RestoreRefused, match=r"ckpt rewrite --rename old=NEW.*drop='old'"):
        bench.begin(flow("new"))


@pytest.mark.parametrize("parallelism", [2, 3])
def test_a_lost_state_that_is_dropped_begins_anew_and_the_job_goes_on(
    parallelism: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # State is written as objects, however small.
    monkeypatch.setattr(driver, "_OPTIONS", replace(driver._OPTIONS, inline_bytes_max=0))
    every = [rows(key, key=key) for key in range(20)]
    first, second = (pa.Table.from_batches(every * count).combine_chunks().to_batches()[0] for count in (3, 1))
    line = Line([first, second], op=Count, how="key_by", parallelism=2, shut=True)
    run = line.begin()
    line.tap.let(0, 1)
    while sum(call.startswith("op/") and " process " in call for call in line.log.calls) < 2:
        run.step()
    line.bench.checkpoint(run)
    store = line.bench.store
    lost = [path for path in store.open().handles["path"].to_pylist() if path and "/op-count-0" in path]
    line.bench.storage.inner.delete(lost)
    found = losses_of(store.storage, store.diagnose())
    assert found is not None
    ((operator, state),) = found.states
    line.tap.let(0)
    assert line.run(parallelism, drop=[f"{operator}/{state}"]).sentence
    assert line.out.seen == [1] * 20
