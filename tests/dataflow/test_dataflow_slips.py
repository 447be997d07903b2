"""What authors of jobs forget or mistype, and what would be noticed too late or never, is refused in words that name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import pyarrow as pa
import pytest

import stateformat
from stateformat.backends.connectors import CollectSink, MemorySource, RateSource
from stateformat.backends.dataflow import Dataflow, EventTime, Operator, Stream, ValueState
from stateformat.backends.dataflow.operators import BroadcastJoin, TumblingWindow
from stateformat.backends.local import LocalRuntime
from stateformat.backends.runtime import JobFailed
from stateformat.backends.spark.runtime import SparkRuntime
from stateformat.backends.spark.sources import SparkSource
from stateformat.errors import InvalidInput, PublishConflict
from stateformat.graph import Status
from tests import stores

FLIGHTS = pa.table({"carrier": ["UA", "AA", "UA"], "n": [1, 2, 3]})
AIRLINES = pa.table({"carrier": ["UA", "AA"], "name": ["United", "American"]})


def joined(connect: Callable[[Stream], Stream], url: str) -> list[dict[str, Any]]:
    flow, out = Dataflow("job", parallelism=2), CollectSink()
    airlines = connect(flow.source(MemorySource(AIRLINES), uid="airlines"))
    flights = flow.source(MemorySource(FLIGHTS, batch_rows=1), uid="flights")
    flights.apply(BroadcastJoin("carrier"), airlines, uid="named").apply(out, uid="out")
    LocalRuntime(stateformat.open(url)).run(flow)
    return sorted(out.table().to_pylist(), key=lambda row: int(row["n"]))


def test_a_table_to_join_with_reaches_every_subtask_or_the_job_does_not_start() -> None:
    assert [row["name"] for row in joined(Stream.broadcast, "memory://joined")] == ["United", "American", "United"]
    ways: list[Callable[[Stream], Stream]] = [lambda s: s, Stream.rebalance, lambda s: s.key_by("carrier")]
    for number, way in enumerate(ways):
        with pytest.raises(
            InvalidInput, match=r"'named' needs all of its input 1 .* 'airlines' sends it by .* broadcast"
        ):
            joined(way, f"memory://not-joined-{number}")


@pytest.mark.parametrize("size_us", [1e6, 0, "1"])
def test_the_size_of_a_window_is_a_whole_number_of_microseconds(size_us: Any) -> None:
    with pytest.raises(InvalidInput, match="whole numbers"):
        TumblingWindow("carrier", size_us, "at", {"n": ("*", "count")})


@pytest.mark.parametrize("out_of_order_us", [1e6, -1, None])
def test_how_far_records_are_out_of_order_is_a_whole_number_of_microseconds(out_of_order_us: Any) -> None:
    with pytest.raises(InvalidInput, match="whole number of microseconds"):
        EventTime("at", out_of_order_us)


class Puts(Operator):
    """Puts columns of its input, whatever they are, as the keys and the values of a state."""

    def __init__(self, keys: list[str], values: list[str]) -> None:
        self._keys, self._values = keys, values

    def states(self, *inputs: pa.Schema) -> list[ValueState]:
        return [ValueState("last", {"carrier": pa.string()}, {"n": pa.int64()})]

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        self.context.value_state("last").put(batch.select(self._keys), batch.select(self._values))


@pytest.mark.parametrize(
    ("keys", "values", "told"),
    [
        (
            ["carrier"],
            ["carrier"],
            r"columns are \['n'\], those given \['carrier'\]; \['carrier'\] are unknown or there twice\.",
        ),
        (["n"], ["n"], r"columns are \['carrier'\], those given \['n'\]; \['carrier'\] are missing"),
    ],
)
def test_columns_that_a_state_does_not_have_are_named_and_no_others(
    keys: list[str], values: list[str], told: str
) -> None:
    flow = Dataflow("job")
    flow.source(MemorySource(FLIGHTS), uid="flights").key_by("carrier").apply(Puts(keys, values), uid="puts")
    with pytest.raises(JobFailed, match=told):
        LocalRuntime(stateformat.open(f"memory://puts-{keys[0]}"), max_restarts=0).run(flow)


def test_what_is_logged_of_a_race_that_was_lost_tells_only_what_is_known(caplog: pytest.LogCaptureFixture) -> None:
    store, job = stateformat.open("memory://lost-race"), stores.counts_job(keys=5)
    job.publish(store, None)
    with pytest.raises(PublishConflict):
        job.publish(store, None)
    told = [record.getMessage() for record in caplog.records if record.name == "stateformat.publication.protocol"]
    assert told == ["checkpoint 1 of memory://lost-race: lost"]


def test_what_a_type_checker_knows_of_a_graph_lets_users_write_uids_as_text() -> None:
    of_operator, of_edge = get_type_hints(stateformat.Operator), get_type_hints(stateformat.Edge)
    assert (of_operator["uid"], of_edge["source"], of_edge["target"]) == (str, str, str)


class Elsewhere(MemorySource):
    """As a source that only Spark reads: it would wait for its rows without end."""

    read_by = "SparkRuntime"


def test_a_source_of_another_executor_is_refused_and_not_waited_for() -> None:
    flow = Dataflow("job")
    flow.source(Elsewhere(FLIGHTS), uid="flights").apply(CollectSink(), uid="out")
    with pytest.raises(InvalidInput, match="'flights' is a Elsewhere, which only SparkRuntime reads"):
        LocalRuntime(stateformat.open("memory://elsewhere")).run(flow)
    assert SparkSource.read_by == SparkRuntime.__name__


def test_what_only_another_executor_reads_may_have_ended_there() -> None:
    store = stateformat.open("memory://ended-there")

    def flow(source: MemorySource) -> Dataflow:
        made = Dataflow("job")
        made.source(source, uid="flights").apply(CollectSink(), uid="out")
        made.source(RateSource(rows_per_second=1000), uid="ticks").apply(CollectSink(), uid="ticked")
        return made

    begun = LocalRuntime(store, checkpoint_rows=10, checkpoint_interval_us=None).begin(flow(MemorySource(FLIGHTS)))
    while (
        begun.progress().checkpoint_id is None
        or store.open().graph.operator("flights").status is not Status.FULLY_FINISHED
    ):
        assert begun.step()
    begun.close()
    again = LocalRuntime(store).begin(flow(Elsewhere(FLIGHTS)))
    assert again.step()
    again.close()
