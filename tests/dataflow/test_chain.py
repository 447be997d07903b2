"""A chain in a subtask: what its operators are called with and when, what it refuses, what it puts
into snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.dataflow import Dataflow, Operator, Stream, Timers, events as ev
from stateformat.backends.dataflow.chain import OperatorChain
from stateformat.backends.dataflow.chained_operator import OperatorError
from stateformat.backends.dataflow.compile import Job
from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from tests.worlds.dataflow import ROWS, Chunks, Collected, Coordinated, Pass, job_of, opened, rows

KEY = {"key": pa.int64()}


def chained(*operators: Operator, connect: Callable[[Stream], Stream] = Stream.rebalance, parallelism: int = 2) -> Job:
    """A source, then the operators in one chain: op0, op1 …, then a step of its own behind it."""
    flow = Dataflow("job", parallelism=parallelism)
    stream = connect(flow.source(Chunks(), uid="source"))
    for number, operator in enumerate(operators):
        stream = stream.apply(operator, uid=f"op{number}")
    stream.rebalance().apply(Pass(), uid="behind")
    return job_of(flow)


def last_edge(job: Job) -> str:
    return job.vertex("op0").outputs[-1].id


# Records ------------------------------------------------------------------------------------------


def test_a_batch_goes_down_the_tree_and_out_of_it() -> None:
    log: list[Any] = []
    flow = Dataflow("job", parallelism=2)
    head = flow.source(Chunks(), uid="source").rebalance().apply(Pass(log, "head"), uid="head")
    left = head.apply(Pass(log, "left"), uid="left")
    head.apply(Pass(log, "right"), uid="right").broadcast().apply(Pass(), uid="far")
    left.apply(Pass(log, "leaf"), uid="leaf").rebalance().apply(Pass(), uid="farther")
    head.rebalance().apply(Pass(), uid="near")
    job = job_of(flow)
    chain, outside = opened(job, "head")
    log.clear()
    chain.process("source->head.0", rows([7]))
    assert log == [(name, "process", 0, [7]) for name in ("head", "left", "leaf", "right")]
    assert sorted(edge for edge, _ in outside.emitted) == ["head->near.0", "leaf->farther.0", "right->far.0"]


class Counting(Operator):
    """Emits as many batches as it is given rows, and tells when each is asked for."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def process(self, batch: pa.RecordBatch, input: int) -> Iterator[pa.RecordBatch]:
        for row in range(batch.num_rows):
            self.log.append(("asked", row))
            yield batch.slice(row, 1)


def test_each_batch_is_processed_to_the_leaves_before_the_next_is_asked_for() -> None:
    log: list[Any] = []
    chain, outside = opened(chained(Counting(log), Pass(log, "next")), "op0")
    log.clear()
    chain.process("source->op0.0", rows([8, 9]))
    assert log == [("asked", 0), ("next", "process", 0, [8]), ("asked", 1), ("next", "process", 0, [9])]
    assert [batch.column(0).to_pylist() for _, batch in outside.emitted] == [[8], [9]]


def test_the_input_is_the_position_of_the_stream() -> None:
    log: list[Any] = []
    flow = Dataflow("job")
    source = flow.source(Chunks(), uid="source")
    loop = flow.loop(ROWS)
    loop.close(source.apply(Pass(log), source.broadcast(), loop.rebalance(), uid="head"))
    chain, _ = opened(job_of(flow), "head")
    log.clear()
    for edge in ("source->head.0", "source->head.1", "head->head.2"):
        chain.process(edge, rows([1]))
    assert [call[2] for call in log] == [0, 1, 2]


class Emits(Operator):
    """Emits what it is given as an argument, whatever that is."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def process(self, batch: pa.RecordBatch, input: int) -> Any:
        return self.what


def test_empty_batches_go_nowhere() -> None:
    log: list[Any] = []
    chain, outside = opened(chained(Emits([rows([]), rows([1]), rows([])]), Pass(log)), "op0")
    log.clear()
    chain.process("source->op0.0", rows([5]))
    assert log == [("", "process", 0, [1])]
    assert len(outside.emitted) == 1


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            pa.record_batch({"key": [1], "other": [2]}),
            "'op0' emitted columns key int64, other int64; it declares key int64, value int64",
        ),
        (pa.record_batch({"key": [1], "value": ["x"]}), "'op0' emitted columns key int64, value string"),
        (pa.record_batch({"value": [1], "key": [1]}), "'op0' emitted columns value int64, key int64"),
        (pa.table({"key": [1], "value": [2]}), "process of operator 'op0' returned Table; hooks return None"),
        (7, "process of operator 'op0' returned int"),
        ([{"key": 1}], "'op0' emitted dict; it emits record batches"),
    ],
)
def test_what_was_not_declared_is_refused(what: Any, message: str) -> None:
    chain, outside = opened(chained(Emits(what)), "op0")
    with pytest.raises(InvalidState, match=message):
        chain.process("source->op0.0", rows([1]))
    assert not outside.emitted


def test_whether_a_column_may_be_null_is_as_declared() -> None:
    strict = pa.schema(
        [pa.field("key", pa.int64(), nullable=False), pa.field("value", pa.int64(), metadata={"a": "b"})]
    )
    chain, outside = opened(chained(Emits(pa.record_batch(rows([1]).columns, schema=strict))), "op0")
    chain.process("source->op0.0", rows([1]))
    assert outside.emitted[0][1].schema == ROWS


# What user code raises ----------------------------------------------------------------------------


class Fails(Operator):
    """Raises in one hook."""

    def __init__(self, hook: str, *, late: bool = False) -> None:
        self.hook = hook
        self.late = late

    def _maybe(self, hook: str) -> Any:
        if hook != self.hook:
            return None
        if not self.late:
            raise KeyError("told so")
        return self._later()

    def _later(self) -> Iterator[pa.RecordBatch]:
        yield rows([1])
        raise KeyError("told so")

    def open(self, context: Any) -> None:
        super().open(context)
        self._maybe("open")

    def process(self, batch: pa.RecordBatch, input: int) -> Any:
        return self._maybe("process")

    def end_input(self, input: int) -> Any:
        return self._maybe("end_input")

    def finish(self) -> Any:
        return self._maybe("finish")

    def close(self) -> None:
        self._maybe("close")


def calls(chain: OperatorChain) -> dict[str, Callable[[], Any]]:
    return {
        "process": lambda: chain.process("source->op0.0", rows([1])),
        "end_input": chain.finish,
        "finish": chain.finish,
        "close": chain.close,
    }


@pytest.mark.parametrize("hook", ["process", "end_input", "finish", "close"])
@pytest.mark.parametrize("late", [False, True])
def test_what_a_hook_raises_is_told_with_its_operator_and_hook(hook: str, late: bool) -> None:
    if hook == "close" and late:
        return
    chain, _ = opened(chained(Pass(), Fails(hook, late=late)), "op0", 1)
    with pytest.raises(OperatorError, match=f"{hook} of 'op1', subtask 1, failed: KeyError: 'told so'") as caught:
        calls(chain)[hook]()
    assert isinstance(caught.value.__cause__, KeyError)
    assert (caught.value.operator, caught.value.hook, caught.value.kind) == ("op1", hook, ErrorKind.OPERATOR_FAILED)


def test_what_open_raises_is_told() -> None:
    with pytest.raises(OperatorError, match="open of 'op0', subtask 0"):
        opened(chained(Fails("open")), "op0")


def test_everything_is_closed_though_one_fails() -> None:
    log: list[Any] = []
    chain, _ = opened(chained(Pass(log, "a"), Fails("close"), Pass(log, "c")), "op0")
    with pytest.raises(OperatorError, match="close of 'op1'"):
        chain.close()
    assert [name for name, *call in log if call[0] == "close"] == ["a", "c"]


def test_an_interrupt_is_no_failure_of_an_operator() -> None:
    class Interrupted(Operator):
        def process(self, batch: pa.RecordBatch, input: int) -> Any:
            raise KeyboardInterrupt

    chain, _ = opened(chained(Interrupted()), "op0")
    with pytest.raises(KeyboardInterrupt):
        chain.process("source->op0.0", rows([1]))


# Ends ---------------------------------------------------------------------------------------------


def test_a_chain_ends_head_first_and_what_an_end_emits_flows_on_before_the_next_ends() -> None:
    log: list[Any] = []
    first = Pass(log, "a", end_input=lambda: rows([1]), finish=lambda: (rows([number]) for number in (2, 3)))
    second = Pass(log, "b", end_input=lambda: [rows([4])], finish=lambda: rows([5]))
    job = chained(first, second, Pass(log, "c"))
    chain, outside = opened(job, "op0")
    log.clear()
    chain.end_input(0)
    chain.finish()
    assert log == [
        ("a", "end_input", 0),
        *((name, "process", 0, [1]) for name in "bc"),
        ("a", "finish"),
        *((name, "process", 0, [number]) for number in (2, 3) for name in "bc"),
        ("b", "end_input", 0),
        ("c", "process", 0, [4]),
        ("b", "finish"),
        ("c", "process", 0, [5]),
        ("c", "end_input", 0),
        ("c", "finish"),
    ]
    assert outside.values(last_edge(job)) == [1, 2, 3, 4, 5]


def test_behind_a_source_every_operator_is_told_that_its_input_has_ended() -> None:
    log: list[Any] = []
    flow = Dataflow("job")
    flow.source(Chunks(), uid="source").apply(Pass(log, "a"), uid="a").apply(Pass(log, "b"), uid="b")
    chain, _ = opened(job_of(flow), "source")
    log.clear()
    chain.finish()
    assert log == [("a", "end_input", 0), ("a", "finish"), ("b", "end_input", 0), ("b", "finish")]


class Late(Coordinated):
    """Emits whatever message it gets, also after it has finished."""

    def receive(self, message: bytes) -> Any:
        return rows([int(message)] if message else [])


def test_nothing_may_be_emitted_after_finish_but_nothing() -> None:
    job = chained(Late(), Pass())
    chain, outside = opened(job, "op0")
    chain.receive("op0", b"3")
    chain.finish()
    chain.receive("op0", b"")
    with pytest.raises(InvalidState, match="operator 'op0' emitted 1 rows after finish") as caught:
        chain.receive("op0", b"4")
    assert caught.value.kind is ErrorKind.STATUS_CONTRADICTION
    assert outside.values(last_edge(job)) == [3]


# Time ---------------------------------------------------------------------------------------------


class Alarms(Operator):
    """Sets a timer at each value; tells when one fires and emits its time; ``again`` says at what
    time it is set next.
    """

    def __init__(self, log: list[Any], name: str = "", again: Callable[[int], int | None] = lambda _: None) -> None:
        self.log = log
        self.name = name
        self.again = again

    def states(self, *inputs: pa.Schema) -> list[Timers]:
        return [Timers("alarms", KEY)]

    def _set(self, keys: Any, times: Any) -> None:
        self.context.timers("alarms").set(pa.record_batch({"key": keys, "_timestamp": times}))

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        self._set(batch.column("key"), batch.column("value"))

    def on_timer(self, timers: pa.RecordBatch, name: str) -> pa.RecordBatch:
        times = timers.column("_timestamp").to_pylist()
        self.log.append((self.name, name, times, self.context.watermark))
        again = [(key, self.again(time)) for key, time in zip(timers.column("key").to_pylist(), times, strict=True)]
        again = [(key, time) for key, time in again if time is not None]
        if again:
            self._set(pa.array([key for key, _ in again]), pa.array([time for _, time in again]))
        return pa.record_batch({"key": timers.column("key"), "value": timers.column("_timestamp")})

    def end_input(self, input: int) -> None:
        self._set(pa.array([1]), pa.array([10_000]))


def alarming(*operators: Operator) -> tuple[OperatorChain, Collected, str]:
    flow = Dataflow("job")
    stream = flow.source(Chunks(), uid="source").key_by("key")
    for number, operator in enumerate(operators):
        stream = stream.apply(operator, uid=f"op{number}").key_by("key")
    stream.apply(Pass(), uid="behind")
    job = job_of(flow)
    chain, outside = opened(job, "op0")
    return chain, outside, last_edge(job)


def test_timers_fire_up_to_the_watermark_in_their_order() -> None:
    log: list[Any] = []
    chain, outside, edge = alarming(Alarms(log))
    chain.process("source->op0.0", rows([1, 2, 3, 4], [30, 10, 40, 20]))
    chain.advance_watermark(5)
    assert log == []
    chain.advance_watermark(30)
    assert log == [("", "alarms", [10, 20, 30], 30)]
    chain.advance_watermark(20)
    assert len(log) == 1
    chain.process("source->op0.0", rows([5], [25]))
    chain.advance_watermark(20)
    assert log[1:] == [("", "alarms", [25], 30)]
    chain.advance_watermark(ev.MAX_WATERMARK)
    assert log[2:] == [("", "alarms", [40], ev.MAX_WATERMARK)]
    assert outside.values(edge) == [10, 20, 30, 25, 40]


class Watching(Pass):
    """Tells the watermark at each batch."""

    def process(self, batch: pa.RecordBatch, input: int) -> Any:
        self.log.append((self.name, self.context.watermark, batch.column("value").to_pylist()))
        return batch


def test_time_goes_down_the_chain_behind_what_timers_emit() -> None:
    log: list[Any] = []
    flow = Dataflow("job")
    stream = flow.source(Chunks(), uid="source").key_by("key").apply(Alarms([]), uid="op0")
    stream.apply(Watching(log, "next"), uid="next")
    chain, _ = opened(job_of(flow), "op0")
    log.clear()
    chain.process("source->op0.0", rows([1, 2], [10, 20]))
    chain.advance_watermark(10)
    chain.advance_watermark(25)
    assert log == [("next", ev.MIN_WATERMARK, [10]), ("next", 10, [20])]


@pytest.mark.parametrize(
    ("again", "watermarks", "fired"),
    [
        (lambda time: time + 10 if time < 40 else None, (25,), [1, 11, 21]),
        (lambda time: time + 10 if time < 40 else None, (25, ev.MAX_WATERMARK), [1, 11, 21, 31, 41]),
        (lambda time: time + 1, (1100,), [*range(1, 1101)]),
    ],
    ids=["due", "to the end", "rounds that let time go on are not counted"],
)
def test_timers_that_set_timers_that_are_due_fire_on_until_none_is(
    again: Callable[[int], int | None], watermarks: tuple[int, ...], fired: list[int]
) -> None:
    chain, outside, edge = alarming(Alarms([], again=again))
    chain.process("source->op0.0", rows([1]))
    for watermark in watermarks:
        chain.advance_watermark(watermark)
    assert outside.values(edge) == fired


@pytest.mark.parametrize(
    ("again", "watermark", "fired"),
    [(lambda time: time + 1, ev.MAX_WATERMARK, [*range(1001)]), (lambda time: time, 0, [0] * 1001)],
    ids=["to the end of time", "in the past"],
)
def test_a_timer_that_is_set_for_ever_ends_with_its_operators_name(
    again: Callable[[int], int], watermark: int, fired: list[int]
) -> None:
    chain, outside, edge = alarming(Alarms([], again=again))
    chain.process("source->op0.0", rows([0]))
    words = rf"timers of operator 'op0' .* 1000 rounds, at watermark {watermark}\."
    with pytest.raises(InvalidState, match=words) as caught:
        chain.advance_watermark(watermark)
    assert caught.value.kind is ErrorKind.LIMIT_EXCEEDED
    assert outside.values(edge)[: len(fired)] == fired


def test_behind_the_end_of_time_a_timer_fires_when_it_is_set() -> None:
    log: list[Any] = []
    chain, outside, edge = alarming(Alarms(log))
    chain.advance_watermark(ev.MAX_WATERMARK)
    chain.process("source->op0.0", rows([1, 2], [20, 10]))
    assert outside.values(edge) == [10, 20]
    chain.end_input(0)
    assert outside.values(edge) == [10, 20, 10_000]
    chain.finish()
    assert len(log) == 2


# Contexts and coordinators ------------------------------------------------------------------------


def test_every_subtask_works_on_a_copy_and_knows_which_it_is() -> None:
    prototype = Pass()
    job = chained(prototype, parallelism=3)
    found = [opened(job, "op0", subtask)[0].operators["op0"].logic for subtask in range(3)]
    assert not hasattr(prototype, "context")
    assert len({id(logic) for logic in found}) == 3
    contexts = [logic.context for logic in found]
    assert [(c.uid, c.subtask, c.parallelism, c.max_parallelism) for c in contexts] == [
        ("op0", n, 3, 128) for n in range(3)
    ]
    assert [(c.restored, c.watermark) for c in contexts] == [(False, ev.MIN_WATERMARK)] * 3


def test_messages_go_to_coordinators_and_come_from_them() -> None:
    log: list[Any] = []
    chain, outside = opened(chained(Pass(), Coordinated(log)), "op1")
    chain.process("op0->op1.0", rows([1, 2]))
    assert outside.sent == [("op1", b"2 rows")]
    chain.receive("op1", b"go on")
    assert ("", "receive", b"go on") in log
    with pytest.raises(InvalidInput, match="no operator 'source' that takes messages; it runs op1"):
        chain.receive("source", b"")


def test_what_a_vertex_does_not_begin_with_is_refused() -> None:
    job = chained(Pass())
    with pytest.raises(InvalidInput, match="'op0' begins with an operator"):
        opened(job, "op0")[0].read()
    with pytest.raises(InvalidInput, match="'source' begins with a source"):
        opened(job, "source")[0].end_input(0)
