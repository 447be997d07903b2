"""Errors of the library that name arguments: the refused call, and what its reader calls then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from stateformat import graph
from stateformat.backends.bootstrap import Rows, bootstrap
from stateformat.backends.connectors import CollectSink, CsvSource, MemorySource, RateSource
from stateformat.backends.connectors.sql import SqlSink
from stateformat.backends.dataflow import Dataflow, Descriptor, ListState, Operator, Output, Timers, ValueState
from stateformat.backends.dataflow.operators.per_key.operator import ApplyPerKey
from stateformat.backends.local import LocalRuntime
from stateformat.backends.rewrite import RewriteSpec, Transform, rewrite
from stateformat.backends.spark.data_source.reader import read_options
from stateformat.backends.spark.offsets import OffsetTable
from stateformat.errors import CheckpointError
from stateformat.graph import JobGraph, OperatorId
from stateformat.model import CheckpointId
from stateformat.reading import load_record
from stateformat.states import declare
from stateformat.storage import Storage
from stateformat.store import CheckpointStore, open as open_store
from stateformat.ttl import Ttl
from tests.advice.following import complaints
from tests.ckpt.ckpt_runs import run as ckpt
from tests.foreign.foreign_fakes import FakeSource, fake_record
from tests.foreign.import_runs import imported
from tests.worlds import stores

NUMBERS = {"n": pa.int64()}


class Pair(NamedTuple):
    """A complaint, by a piece of its sentence, the call that is refused, and one that is not."""

    says: str
    refused: Callable[[Path], Any]
    then: Callable[[Path], Any]


def fn(key: Any, rows: Any, state: Any) -> None:
    """A function of a key."""


def with_timers(key: Any, rows: Any, state: Any, timers: Any) -> None:
    """A function of a key that sets timers."""


def per_key(function: Callable[..., None] = fn, state: Any = NUMBERS, **more: Any) -> ApplyPerKey:
    return ApplyPerKey(["k"], function, output=NUMBERS, state=state, **more)


def csv(folder: Path, **options: Any) -> CsvSource:
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / "a.csv").write_text("n\n1\n")
    return CsvSource(folder / "in", **options)


def table(**options: Any) -> OffsetTable:
    return OffsetTable(lambda spark: spark.range(3), "id", **options)


def flow() -> Dataflow:
    flow = Dataflow("numbers", parallelism=2)
    flow.source(RateSource(total=10, shards=2), uid="numbers").apply(CollectSink(), uid="sink")
    return flow


def run(folder: Path, name: str = "store", **options: Any) -> str:
    """The URL of a store in which the job ran."""
    store = open_store(str(folder / name))
    LocalRuntime(store, **options).run(flow())
    return store.url


def saved(folder: Path) -> str:
    """The URL of a savepoint of the job's."""
    store = open_store(run(folder, "first"))
    target = open_store(str(folder / "saved"))
    store.copy(store.open(), target)
    return target.url


def counted(folder: Path) -> CheckpointStore:
    return stores.counts_store(str(folder / "counts"))


OTHER = declare.value_state("counter", "others", keys={"id": pa.int64()}, values=NUMBERS)


def planned(folder: Path, *states: Any, without: str = "", **more: Any) -> None:
    """Plan a restore of the counts with other states, or without an operator."""
    made = folder / "counts"
    checkpoint = (open_store(str(made)) if made.exists() else counted(folder)).open()
    whole = checkpoint.graph
    left = JobGraph(tuple(one for one in whole.operators if one.uid != without), () if without else whole.edges)
    checkpoint.plan_restore(left, states=states, **more).check()


def state(name: str = "counts", **columns: pa.DataType) -> Any:
    return declare.value_state("counter", name, keys={"word": pa.string()}, values=columns or NUMBERS)


class Holding(Operator):
    """Declares states, and puts nothing into them."""

    def __init__(self, *states: Descriptor) -> None:
        self._states = states

    def states(self, *_: pa.Schema) -> Sequence[Descriptor]:
        return self._states

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        return None


def holding(*states: Descriptor) -> Dataflow:
    flow = Dataflow("numbers", parallelism=2)
    flow.source(RateSource(total=10, shards=2), uid="numbers").key_by("n").apply(Holding(*states), uid="holding")
    return flow


def gone_on(folder: Path, before: Descriptor, now: Descriptor, **options: Any) -> None:
    """Begin a job with one state, and go on with another."""
    store = open_store(str(folder / "store"))
    bootstrap(store, holding(before), {"holding/totals": ROWS.slice(1)})
    LocalRuntime(store, **options).run(holding(now))


ROWS = pa.table({"n": [1, 1, 2], "total": [7, 8, 9]})
LISTED = ROWS.append_column("_index", [[1, 2, 1]])
KEY = {"n": pa.int64()}
TOTAL = {"total": pa.int64()}
TOTALS = ValueState("totals", KEY, TOTAL)
EXPIRING = ValueState("totals", KEY, TOTAL, ttl=Ttl(3_600_000_000))
LOG = ListState("log", KEY, TOTAL)


def begun(folder: Path, states: Mapping[str, Any], **options: Any) -> None:
    """Begin a job with these rows."""
    bootstrap(open_store(str(folder / "store")), holding(TOTALS, LOG), states, **options)


def old_times(folder: Path, **how: Any) -> pyarrow.dataset.Dataset:
    """Rows with times as Spark writes them by default."""
    table = ROWS.set_column(1, "total", pa.array([0, 1, 2], pa.timestamp("us")))
    pq.write_table(table.slice(1), folder / "a.parquet", use_deprecated_int96_timestamps=True)
    return pyarrow.dataset.dataset(folder / "a.parquet", **how)


def timed(folder: Path, **how: Any) -> None:
    flow = holding(ValueState("totals", KEY, {"total": pa.timestamp("us")}))
    bootstrap(open_store(str(folder / "store")), flow, {"holding/totals": old_times(folder, **how)})


NANOSECONDS = pa.table({"at": pa.array([1001], pa.timestamp("ns"))})


def carried(folder: Path, **more: Any) -> None:
    """Publish a checkpoint that carries state from a parent at another parallelism."""
    store = stores.counts_store(str(folder / "carried"))
    parent = store.start("counts")
    assert parent is not None
    after = store.open().graph.at(3)
    plan = store.open().plan_restore(after)
    handles = {"carried": store.open().carried(plan)} if more.get("cut") else {}
    pending = store.begin(job_id="counts", graph=after, states=store.open().states, parent=parent, **handles)
    for uid, subtask in ((one.uid, subtask) for one in after.operators for subtask in range(3)):
        with pending.context.subtask(uid, subtask) as writer:
            if uid == "counter":
                writer.carry("counts")
        pending.add(writer)
    pending.publish()


def rehashed(folder: Path, *, rekey: bool) -> None:
    """Change a state without keys."""
    store = stores.flights_store(str(folder / "flights"))
    transforms = {("rates", "limits"): Transform(lambda rows: rows, rekey=rekey)}
    rewrite(store, store.open(), RewriteSpec(transforms=transforms))


def opaque(folder: Path, **how: Any) -> None:
    """Import a state whose keys nobody can read."""
    state = declare.value_state("op", "users", keys={"key": pa.binary()}, values={"value": pa.binary()})
    record = fake_record([graph.Operator(OperatorId("op"), 1, 128, key_hash="flink-user-hashcode")], [state])
    imported(FakeSource(record, {("op", "users"): [{"key": b"k", "value": b"v"}]}, hashed=False), folder, **how)


class Bare:
    """A storage of the protocol's methods alone: it has no place for savepoints."""

    def __init__(self, inner: Storage) -> None:
        self.url = inner.url
        for name in ("exists", "read", "read_range", "open_input", "size", "open_output", "create", "list", "delete"):
            setattr(self, name, getattr(inner, name))


def bare(folder: Path) -> CheckpointStore:
    return CheckpointStore(Bare(counted(folder).storage))  # type: ignore[arg-type]


PAIRS = [
    Pair(
        "Keep the row that counts, or give on_duplicate='last' with order_by",
        lambda folder: begun(folder, {"holding/totals": ROWS}),
        lambda folder: begun(folder, {"holding/totals": ROWS}, on_duplicate="last", order_by="total"),
    ),
    Pair(
        "Give the positions of sources with positions=",
        lambda folder: begun(folder, {"numbers/splits": ROWS}),
        lambda folder: begun(folder, {"holding/totals": ROWS.slice(1)}, positions={"numbers": [2, 2]}),
    ),
    Pair(
        "the place in the list, and order_by=",
        lambda folder: begun(folder, {"holding/log": LISTED}, order_by="total"),
        lambda folder: begun(folder, {"holding/log": LISTED}),
    ),
    Pair(
        "needs order_by, the column that says which row is the last",
        lambda folder: begun(folder, {"holding/totals": ROWS}, on_duplicate="last"),
        lambda folder: begun(folder, {"holding/totals": ROWS}, on_duplicate="last", order_by="total"),
    ),
    Pair(
        "which keeps every row. Leave on_duplicate out",
        lambda folder: begun(folder, {"holding/log": Rows(ROWS, "total", "last")}),
        lambda folder: begun(folder, {"holding/log": Rows(ROWS, "total")}),
    ),
    Pair(
        "as INT96 in nanoseconds",
        timed,
        lambda folder: timed(folder, format=pyarrow.dataset.ParquetFileFormat(coerce_int96_timestamp_unit="us")),
    ),
    Pair(
        "Cast it first; pyarrow.compute.floor_temporal",
        lambda _: MemorySource(NANOSECONDS),
        lambda _: MemorySource(pa.table({"at": pc.floor_temporal(NANOSECONDS["at"], unit="microsecond")})),
    ),
    Pair(
        "begin with carried=Checkpoint.carried(plan)",
        carried,
        lambda folder: carried(folder, cut=True),
    ),
    Pair(
        "declare the ttl again",
        lambda folder: gone_on(folder, EXPIRING, TOTALS),
        lambda folder: gone_on(folder, EXPIRING, EXPIRING),
    ),
    Pair(
        "declare the ttl again",
        lambda folder: gone_on(folder, EXPIRING, TOTALS),
        lambda folder: gone_on(folder, EXPIRING, replace(TOTALS, drops=["ttl_last_access"])),
    ),
    Pair(
        "say what became of",
        lambda folder: gone_on(folder, TOTALS, ValueState("totals", KEY, {"sum": pa.int64()})),
        lambda folder: gone_on(
            folder, TOTALS, ValueState("totals", KEY, {"sum": pa.int64()}, renames={"total": "sum"})
        ),
    ),
    Pair(
        "say what became of",
        lambda folder: gone_on(folder, TOTALS, ValueState("totals", KEY, {"sum": pa.int64()})),
        lambda folder: gone_on(folder, TOTALS, ValueState("totals", KEY, {"sum": pa.int64()}, drops=["total"])),
    ),
    Pair(
        "say what became of",
        lambda folder: gone_on(folder, TOTALS, ValueState("totals", KEY, {"sum": pa.int64()})),
        lambda folder: gone_on(
            folder, TOTALS, ValueState("totals", KEY, {"sum": pa.int64()}), drop=["holding/totals.total"]
        ),
    ),
    Pair(
        "of a SQL sink cannot be read. Write user and password",
        lambda folder: SqlSink("postgresql://u:a/b@c@127.0.0.1:9/db", "t", key="n", staging=str(folder)),
        lambda folder: SqlSink(
            f"postgresql://u:{quote('a/b@c', safe='')}@127.0.0.1:9/db", "t", key="n", staging=str(folder)
        ),
    ),
    Pair(
        "name the operator and the state to be read",
        lambda folder: read_options({"path": counted(folder).url}),
        lambda folder: (
            ckpt("inspect", counted(folder).url).out.index("counts"),
            read_options({"path": str(folder / "counts"), "operator": "counter", "state": "counts"}),
        ),
    ),
    Pair(
        "name the operator and the state to be read",
        lambda folder: read_options({"path": counted(folder).url}),
        lambda folder: read_options({"path": counted(folder).url, "table": "states"}),
    ),
    Pair(
        "has no keys to hash again",
        lambda folder: rehashed(folder, rekey=True),
        lambda folder: rehashed(folder, rekey=False),
    ),
    Pair("so no record's key would find them", opaque, lambda folder: opaque(folder, key_hash="keep")),
    Pair("so no record's key would find them", opaque, lambda folder: opaque(folder, drop=["op/users"])),
    Pair(
        "keeps no savepoints below a store",
        lambda folder: bare(folder).pin(None, "kept"),
        lambda folder: bare(folder).copy(bare(folder / "other").open(), open_store(str(folder / "saved"))),
    ),
    Pair(
        "no checkpoint {} in {}; `ckpt history {}` lists what is there",
        lambda folder: load_record(counted(folder).storage, CheckpointId(7)),
        lambda folder: ckpt("history", counted(folder).url).out.index(" 1  checkpoint"),
    ),
    Pair(
        "is for a directory that grows. Give grows=True too",
        lambda folder: csv(folder, until="b"),
        lambda folder: csv(folder, until="b", grows=True, schema={"n": pa.int64()}),
    ),
    Pair(
        "has no staging place. Give staging=",
        lambda _: SqlSink("postgresql://u:p@127.0.0.1:9/db", "numbers", key="n"),
        lambda folder: SqlSink("postgresql://u:p@127.0.0.1:9/db", "numbers", key="n", staging=str(folder)),
    ),
    Pair(
        "timers= is for timers",
        lambda _: per_key(state=[Timers("t", ("k",))]),
        lambda _: per_key(state=[ValueState("t", ("k",), NUMBERS)]),
    ),
    Pair(
        "timers is {}, but there is no function to call",
        lambda _: per_key(timers="event_time"),
        lambda _: per_key(timers="event_time", on_timer=fn),
    ),
    Pair(
        "takes timers, but there is no function to call",
        lambda _: per_key(with_timers),
        lambda _: per_key(with_timers, on_timer=with_timers),
    ),
    Pair(
        "Give unaligned=True as well",
        lambda folder: LocalRuntime(open_store(str(folder)), unaligned_after_us=1),
        lambda folder: LocalRuntime(open_store(str(folder)), unaligned_after_us=1, unaligned=True),
    ),
    Pair("both say how much an epoch reads", lambda _: table(rows_per_epoch=1, step=1), lambda _: table(step=1)),
    Pair("and grows that it does not. Give one", lambda _: table(until=3, grows=True), lambda _: table(until=3)),
    Pair("Give grows, or no lag", lambda _: table(lag=1), lambda _: table(lag=1, grows=True)),
    Pair(
        "expire takes how many checkpoints to keep",
        lambda folder: counted(folder).expire(),
        lambda folder: counted(folder).expire(keep=10),
    ),
    Pair(
        "which is yours: a run would publish there",
        lambda folder: LocalRuntime(open_store(saved(folder))).run(flow()),
        lambda folder: run(folder, start_from=saved(folder)),
    ),
    Pair(
        "which is yours: a run would publish there",
        lambda folder: LocalRuntime(open_store(saved(folder))).run(flow()),
        lambda folder: LocalRuntime(open_store(saved(folder)), claim=True).run(flow()),
    ),
    Pair(
        "start_from alone copies the savepoint",
        lambda folder: run(folder, start_from=saved(folder), claim=True),
        lambda folder: run(folder, start_from=saved(folder)),
    ),
    Pair(
        "names no checkpoint",
        lambda folder: run(folder, start_from=str(folder / "nothing")),
        lambda folder: run(folder, start_from=saved(folder)),
    ),
    Pair(
        "or give it up with drop={}",
        lambda folder: planned(folder, without="counter"),
        lambda folder: planned(folder, without="counter", drop=["counter"]),
    ),
    Pair(
        "declare it again, or give it up with drop=",
        lambda folder: planned(folder, OTHER),
        lambda folder: planned(folder, OTHER, drop=["counter/counts"]),
    ),
    Pair(
        "if it is this one under another name",
        lambda folder: planned(folder, state("others")),
        lambda folder: (
            ckpt("rewrite", counted(folder).url, "--rename", "counter/counts=others"),
            planned(folder, state("others")),
        ),
    ),
    Pair(
        "give the whole state up with drop",
        lambda folder: planned(folder, state(n=pa.bool_())),
        lambda folder: planned(folder, state(n=pa.bool_()), drop=["counter/counts"]),
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.says[:50])
def test_what_an_error_advises_is_done_and_there_is_no_error(pair: Pair, tmp_path: Path) -> None:
    for name in ("refused", "then"):
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError) as caught:
        pair.refused(tmp_path / "refused")
    text = " ".join(str(caught.value).split())
    assert [one for one, _ in complaints(text) if pair.says in one.text.replace("\N{REPLACEMENT CHARACTER}", "{}")], (
        text
    )
    pair.then(tmp_path / "then")
