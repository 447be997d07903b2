"""What authors of jobs get wrong is refused with a sentence, where it is written or where it
happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends import dataflow as df
from stateformat.backends.connectors import MemorySource
from stateformat.backends.dataflow.events import MIN_WATERMARK
from stateformat.backends.dataflow.operators.aggregate import Aggregate
from stateformat.backends.dataflow.operators.row_steps import Map, Select
from stateformat.backends.dataflow.operators.window import TumblingWindow
from stateformat.backends.local import JobFailed
from stateformat.errors import InvalidInput
from tests.worlds.local import KEY, ROWS, Bench, Line, Log, Tap, Told, rows, until


class Odd(Told):
    """An operator whose hooks return what they are given."""

    def __init__(self, **gives: Any) -> None:
        super().__init__(Log())
        self.gives = gives

    def output_schema(self, *inputs: pa.Schema) -> Any:
        return self.gives.get("output_schema", inputs[0])

    def states(self, *inputs: pa.Schema) -> Any:
        return self.gives.get("states", ())

    def coordinator(self) -> Any:
        return self.gives.get("coordinator")


class NoColumns(df.TwoPhaseCommitSink, Told):
    """A sink that does not say what it commits."""

    def prepare_commit(self, prepared: object) -> None:
        return None

    def commit(self, permit: object, committables: object) -> None:
        return None


class OddTap(Tap):
    """A source whose properties and hooks are what they are given."""

    def __init__(self, **gives: Any) -> None:
        super().__init__([rows(1)])
        self.gives = gives
        self.splits_per_reader = gives.get("splits_per_reader")

    @property
    def schema(self) -> Any:
        return self.gives.get("schema", super().schema)

    def enumerator(self) -> Any:
        if "enumerator" in self.gives:
            return self.gives["enumerator"]
        enumerator: df.SplitEnumerator = super().enumerator()
        if "split" in self.gives:
            enumerator.next_split = lambda *_: self.gives["split"]  # type: ignore[method-assign]
        return enumerator

    def read(self, split: df.Split, context: Any) -> Any:
        return iter([self.gives["chunk"]]) if "chunk" in self.gives else super().read(split, context)


def applied(operator: Any, source: Any = None, **step: Any) -> Callable[[], object]:
    def put_together() -> object:
        flow = df.Dataflow("job")
        stream = flow.source(source or Tap([rows(1)]), uid="in").key_by("key")
        stream.apply(operator, **{"uid": "op", **step})
        return Bench().begin(flow)

    return put_together


def same_edges() -> object:
    flow = df.Dataflow("job")
    for source, target in (("a", "b->c"), ("a->b", "c")):
        flow.source(Tap([rows(1)]), uid=source).apply(Odd(), uid=target, chain=False)
    return Bench().begin(flow)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (applied(Odd(output_schema=None)), r"output_schema\(\) of operator 'op' is None\. It must be a pa.Schema"),
        (applied(Odd(states=None)), r"states\(\) of operator 'op' returned None\. Return a list"),
        (applied(Odd(states=["v"])), r"states\(\) of operator 'op' returned \['v'\]\. Return a list"),
        (applied(Odd(states=df.ValueState("v", KEY, {}))), r"of operator 'op' returned ValueState\("),
        (
            applied(Odd(states=[df.ValueState("v", KEY, {"n": pa.uint8()})])),
            "state 'v' of operator 'op' cannot be declared: column 'n' has type uint8",
        ),
        (
            applied(Odd(states=[df.ValueState("v", KEY, "n")])),
            "state 'v' of operator 'op' cannot be declared: 'n' are no columns",
        ),
        (
            applied(Odd(states=[df.MapState("m", KEY, KEY, {"n": pa.int64()})])),
            "state 'm' of operator 'op' cannot be declared: map state 'm' .* has the map_key {.*give one Arrow type",
        ),
        (applied(Odd(coordinator=5)), r"coordinator\(\) of 'op' returned int, which has no columns"),
        (applied(NoColumns(Log())), "sink 'op' has no committable_columns"),
        (applied(Odd(), OddTap(enumerator=None)), r"enumerator\(\) of 'in' returned NoneType, which has no columns"),
        (
            applied(Odd(), OddTap(schema={"key": pa.int64()})),
            "the schema of source 'in' is {.*}. It must be a pa.Schema",
        ),
        (applied(Odd(), uid=5), "the uid of a step is 5. It must be a string"),
        (applied(Odd(), uid="\ud800"), "the uid of a step is .* which is not valid text"),
        (applied(Odd(), name=5), "the name of step 'op' is 5. It must be a string"),
        (lambda: df.Dataflow(5), "the job id is 5. It must be a string"),
        (lambda: df.Dataflow("job", name=None), "the name of job 'job' is None"),
        (
            lambda: df.Dataflow("job").source(Tap(), uid="in").apply(Odd(), "in", uid="op"),
            "an input of 'op' is 'in'. Give a stream",
        ),
        (
            lambda: df.Dataflow("job").source(Tap(), uid="in", event_time=5),
            "event time of source 'in' is 5",
        ),
        (lambda: df.EventTime("at", -1), "'at' is out of order by -1. Give a whole number"),
        (lambda: df.EventTime("at", 1.5), r"out of order by 1\.5"),
        (lambda: MemorySource({"a": [1]}), "dict holds no record batches .*Give an Arrow table"),
        (lambda: MemorySource(None), "NoneType holds no record batches"),
        (lambda: Aggregate("key", {"n": "count"}), "aggregates are {'n': 'count'}. Give a mapping like"),
        (lambda: Aggregate("key", [("n", "count")]), "Give a mapping like"),
        (lambda: TumblingWindow("key", 1e6, "at", {"n": ("*", "count")}), r"a window of 1000000\.0 µs"),
        (lambda: Select(3), "3 is no column"),
        (lambda: Map(lambda batch: batch, "schema"), "'schema' are no columns"),
        (applied(Odd(), Tap), r"source 'in' is .*Tap.*\. Give an instance of a Source"),
        (applied(Told), r"operator 'op' is .*Told.*\. Give an instance of an Operator"),
        (same_edges, r"from 'a' to 'b->c' and from 'a->b' to 'c' would both be named 'a->b->c\.0'"),
        *(
            (applied(Odd(), OddTap(splits_per_reader=room)), "source 'in' has splits_per_reader")
            for room in (0, -1, True, 1.5, "2")
        ),
    ],
)
def test_what_is_wrong_in_a_job_is_refused_with_a_sentence(build: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        build()


@pytest.mark.parametrize(("kind", "hook"), [(df.Operator, "process"), (df.TwoPhaseCommitSink, "commit")])
def test_an_operator_without_a_hook_that_it_must_have_is_refused(kind: Any, hook: str) -> None:
    with pytest.raises(TypeError, match=f"abstract method.*'?{hook}"):
        type("Without", (kind,), {"prepare_commit": None} if hook == "commit" else {})()


class Iter:
    """Raises when it is iterated."""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        raise ValueError("nothing here")


class Nulls(Told):
    """Declares a column without nulls, and emits some."""

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return pa.schema([field.with_nullable(field.name != "value") for field in ROWS])

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        return batch.set_column(1, "value", pa.nulls(len(batch), pa.int64()))


class Answers(df.OperatorCoordinator):
    """Answers with a text."""

    columns = pa.schema([("n", pa.int64())])

    def open(self, send: df.Sender) -> None:
        self.send = send

    def receive(self, subtask: int, message: bytes) -> None:
        self.send(subtask, "text")  # type: ignore[arg-type]

    def snapshot(self) -> pa.Table:
        return self.columns.empty_table()


class Says(Told):
    """Sends its coordinator a message."""

    def __init__(self, log: Log, message: Any) -> None:
        super().__init__(log)
        self.message = message

    def coordinator(self) -> df.OperatorCoordinator:
        return Answers()

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        self.context.send_to_coordinator(self.message)
        return None


@pytest.mark.parametrize(
    ("op", "source", "sentence"),
    [
        (
            lambda log: Map(lambda batch: None if len(batch) else batch),
            None,
            "'op'.* map returned NoneType; it returns a",
        ),
        (Nulls, None, "'op' emitted 1 nulls in column 'value', which it declares without"),
        (partial(Says, message="text"), None, "operator 'op' sent str; a message is bytes"),
        (partial(Says, message=None), None, "operator 'op' sent NoneType"),
        (partial(Says, message=b"bytes"), None, "the coordinator of operator 'op' sent str"),
        (partial(Told, finish=lambda _: Iter()), None, "finish of 'op', subtask 0, failed: ValueError: nothing here"),
        (Told, OddTap(split="x"), "source 'in' failed: next_split returned str; it returns a Split or NoSplit"),
        (Told, OddTap(chunk=rows(1)), "read of source 'in' gave RecordBatch; it gives a Chunk"),
    ],
)
def test_what_hooks_get_wrong_names_the_operator(
    op: Callable[[Log], df.Operator], source: Tap | None, sentence: str
) -> None:
    line = Line(op=op, max_restarts=0)
    line.tap = source or line.tap
    with pytest.raises(JobFailed, match=sentence):
        line.run()


def test_the_earliest_time_there_is_may_be_out_of_order() -> None:
    bench, flow = Bench(), df.Dataflow("job")
    tap = Tap([rows(1, at=MIN_WATERMARK), rows(2, at=5)], endless=True)
    flow.source(tap, uid="in", event_time=df.EventTime("at", 10)).apply(Told(bench.log), uid="op")
    run = bench.begin(flow)
    until(run, lambda: run.rows_read == 1)
    bench.checkpoint(run)
    assert [row["watermark"] for row in bench.state("in", "splits")] in ([MIN_WATERMARK], [-5])
