"""A dataflow shows its graph: as values, as JSON, as text."""

from __future__ import annotations

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends import dataflow as df
from stateformat.backends.connectors import CollectSink, RateSource
from stateformat.backends.local import LocalRun, LocalRuntime, VirtualClock
from stateformat.errors import InvalidInput
from stateformat.record import members_of


class Pass(df.Operator):
    """Passes on what comes."""

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return inputs[0]

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        return batch


def ticks() -> df.Dataflow:
    flow = df.Dataflow("ticks", name="Ticks a shard", parallelism=2)
    rows = flow.source(RateSource(total=100, shards=4), uid="rows", name="All rows")
    counted = rows.key_by("shard").aggregate({"rows": ("*", "count")}, uid="counted")
    counted.apply(CollectSink(), uid="out", max_parallelism=16)
    return flow


TEXT = """\
Dataflow ticks (Ticks a shard): 3 operators, 6 states

All rows (rows): 2 subtasks, max 128, coordinator
  splits (even split): split_id utf8 not null, payload binary not null, position int64 not null,
      watermark int64
  enumerator (coordinator): number int64 not null, id utf8 not null, payload binary not null

counted: 2 subtasks, max 128
  <- rows hash by shard
  totals (keyed value by shard): shard int32, rows int64
  progress

out: 2 subtasks, max 16
  <- counted forward
  progress
  committables: uid utf8 not null, subtask int32 not null, number int64 not null, payload binary not
      null"""


def test_the_graph_is_that_of_the_first_checkpoint_of_a_run() -> None:
    store = sf.open("memory://described")
    LocalRuntime(store, clock=VirtualClock()).run(ticks())
    record = store.history()[-1]
    graph = ticks().graph()
    assert [operator.uid for operator in graph.operators] == [operator.uid for operator in record.graph.operators]
    assert graph.edges == record.graph.edges
    document, members = ticks().document(), members_of(record)
    assert (document["job_id"], document["job_name"]) == ("ticks", "Ticks a shard")
    assert document["states"] == members["states"]
    assert document["edges"] == members["edges"]
    status = {"status", "finished", "finishing"}
    for own, there in zip(document["operators"], members["operators"], strict=True):
        assert {name: own[name] for name in {*own} - status} == {name: there[name] for name in {*there} - status}
        assert (own["status"], own["finished"], own["finishing"]) == ("running", (), ())


def test_options_are_those_of_a_start() -> None:
    graph = ticks().graph(parallelism=3, per_operator={"out": 4})
    assert {operator.uid: operator.parallelism for operator in graph.operators} == {
        "rows": 3,
        "counted": 3,
        "out": 4,
    }
    states = {state["name"] for state in ticks().document(unaligned=True)["states"]}
    assert "in-flight rows->counted.0" in states


def test_the_text_names_operators_edges_and_columns() -> None:
    assert ticks().describe() == TEXT


def test_a_feedback_edge_says_so_and_stands_with_its_state() -> None:
    flow = df.Dataflow("turns", parallelism=1)
    rows = flow.source(RateSource(total=4), uid="rows")
    loop = flow.loop(rows.schema)
    head = flow.apply(Pass(), rows, loop.key_by("shard"), uid="head")
    loop.close(head.filter(lambda batch: pa.array([False] * len(batch), pa.bool_()), uid="again"))
    lines = flow.describe().splitlines()
    assert "  <- again hash by shard (feedback)" in lines
    assert any(line.startswith("  in-flight again->head.1 (in flight by shard): shard int32") for line in lines)


TIMELESS = (
    "operator 'w' waits for event time, but source 'a' never ends and has no event_time: its timers (ends) fire only "
    "when the job is drained, and its state grows until then. Give the source event_time, or use processing time"
)


def waits(total: int | None, event_time: str | None = None, **more: int | None) -> df.Dataflow:
    """A window behind a source ``a``, and behind others that ``more`` names, with their rows."""
    flow = df.Dataflow("waits", parallelism=1)
    stream = flow.source(RateSource(total=total), uid="a", event_time=event_time)
    others = [flow.source(RateSource(total=rows), uid=uid) for uid, rows in more.items()]
    joined = stream.apply(Pass(), *others, uid="between")
    joined.key_by("shard").window(1_000_000, "at", {"n": ("*", "count")}, uid="w")
    return flow


def test_what_waits_for_event_time_that_never_comes_is_named_with_its_source() -> None:
    (said,) = waits(None).document()["warnings"]
    assert said == TIMELESS
    assert " ".join(waits(None).describe().split()).endswith(f"Warning: {TIMELESS}")
    two = waits(None, table=None).document()["warnings"]
    assert "sources 'a', 'table' never end and have no event_time" in two[0]


def test_rows_that_live_for_a_time_of_events_wait_too() -> None:
    flow = df.Dataflow("expiring", parallelism=1)
    stream = flow.source(RateSource(), uid="a").key_by("shard")
    stream.deduplicate(within=1_000_000, time="at", uid="by event time")
    stream.deduplicate(within=1_000_000, uid="by processing time")
    (said,) = flow.document()["warnings"]
    assert said.startswith("operator 'by event time' waits for event time")
    assert "its rows (seen) expire only when" in said


@pytest.mark.parametrize("flow", [waits(9), waits(None, "at"), waits(None, "at", table=9), ticks()])
def test_an_input_that_ends_or_has_event_time_is_no_reason_to_warn(flow: df.Dataflow) -> None:
    assert flow.document()["warnings"] == []
    assert "Warning" not in flow.describe()


def test_one_source_without_event_time_holds_up_the_others() -> None:
    (said,) = waits(None, "at", table=None).document()["warnings"]
    assert "source 'table' never ends and has no event_time" in said


def test_a_job_says_it_once_however_often_its_run_starts_again() -> None:
    runtime = LocalRuntime(sf.open("memory://timeless"), clock=VirtualClock())
    run = runtime.begin(waits(None))
    assert isinstance(run, LocalRun)
    assert run.progress().warnings == (TIMELESS,)
    again = runtime._begin_run(waits(None))
    assert isinstance(again, LocalRun)
    assert again.progress().warnings == ()


def test_what_is_wrong_with_a_dataflow_is_said_when_it_is_looked_at() -> None:
    flow = df.Dataflow("nothing")
    for look in (flow.graph, flow.document, flow.describe):
        with pytest.raises(InvalidInput, match="has no steps"):
            look()


def test_strangers_names_break_no_line() -> None:
    flow = df.Dataflow("odd\njob")
    flow.source(RateSource(total=1), uid="a\x1b[1mb").apply(CollectSink(), uid="out")
    assert "Dataflow odd\\njob: " in flow.describe()
    assert "\x1b" not in flow.describe()


def test_a_dataflow_is_short_where_python_shows_it() -> None:
    assert repr(ticks()) == "Dataflow('ticks', 3 steps, parallelism 2)"
    assert len(repr(df.Dataflow("x" * 1000))) < 120
