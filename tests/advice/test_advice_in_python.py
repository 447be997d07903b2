"""Errors of the library that name arguments: the refused call, and what its reader calls then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from stateformat.backends.connectors import CollectSink, CsvSource, RateSource
from stateformat.backends.connectors.sql import SqlSink
from stateformat.backends.dataflow import Dataflow, Timers, ValueState
from stateformat.backends.dataflow.operators.per_key import ApplyPerKey
from stateformat.backends.local import LocalRuntime
from stateformat.backends.spark.sources import OffsetTable
from stateformat.errors import CheckpointError
from stateformat.graph import JobGraph
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from tests import stores
from tests.advice.following import complaints
from tests.ckpt.ckpt_runs import run as ckpt

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
    graph = checkpoint.graph
    left = JobGraph(tuple(one for one in graph.operators if one.uid != without), () if without else graph.edges)
    checkpoint.plan_restore(left, states=states, **more).check()


def state(name: str = "counts", **columns: pa.DataType) -> Any:
    return declare.value_state("counter", name, keys={"word": pa.string()}, values=columns or NUMBERS)


PAIRS = [
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
