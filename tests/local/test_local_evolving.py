"""A job is started again with other columns in its states: of every kind, what is kept, added,
given up and refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.backends import dataflow as df
from stateformat.backends.local import LocalRun
from stateformat.backends.runtime import Options
from stateformat.backends.runtime.restore import plan_of
from stateformat.errors import InvalidInput, RestoreRefused
from stateformat.redistribution import RestorePlan
from tests.local_jobs import KEY, Bench, Line, Out, Tap, rows, settle

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
