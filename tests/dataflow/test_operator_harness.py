"""The harness for authors of operators does what a run does: routing, time, ends, checkpoints,
restores, commits, errors.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.backends.dataflow import (
    BroadcastState,
    Descriptor,
    ListState,
    Operator,
    OperatorCoordinator,
    Output,
    Prepared,
    Sender,
    SplitList,
    Timers,
    TwoPhaseCommitSink,
    UnionList,
    ValueState,
    events as ev,
)
from stateformat.backends.dataflow.chained_operator import OperatorError
from stateformat.backends.dataflow.testing import OperatorHarness
from stateformat.backends.storage import memory
from stateformat.errors import InvalidInput, InvalidState, RestoreRefused

CITY = {"city": pa.string()}
ROWS = {"city": pa.string(), "n": pa.int64()}
CITIES = ["Oslo", "Rome", "Bonn", "Kyiv", "Lima", "Cork", "Nice", "Pisa"]


class Totals(Operator):
    """Adds up by city; says the total at time 100."""

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        return [ValueState("total", CITY, {"n": pa.int64()}), Timers("due", CITY), SplitList("seen", {"n": pa.int64()})]

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        total = self.context.value_state("total")
        for row in batch.to_pylist():
            old = total.get_one(row["city"]) or {"n": 0}
            total.put_one(row["city"], n=old["n"] + row["n"])
            self.context.timers("due").set_one(row["city"], 100)
            self.context.entries("seen").append_one(n=row["n"])
        return None

    def on_timer(self, timers: pa.RecordBatch, name: str) -> Iterator[pa.RecordBatch]:
        keys = timers.select(["city"])
        yield pa.record_batch({"city": keys["city"], "n": self.context.value_state("total").get(keys)[0]["n"]})


def totals(**more: Any) -> OperatorHarness:
    return OperatorHarness(Totals(), ROWS, key_by="city", **more)


def some(times: int = 1) -> list[dict[str, Any]]:
    return [{"city": city, "n": number} for number, city in enumerate(CITIES * times)]


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in table.to_pylist())


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (3, 2), (2, 5)])
def test_states_timers_and_entries_go_on_at_another_parallelism(before: int, after: int) -> None:
    harness = totals(parallelism=before).push(some(2)).advance(40)
    whole = rows_of(harness.state("total"))
    snapshot = harness.snapshot()
    assert [row[-2:] for row in rows_of(snapshot.state("total"))]
    again = OperatorHarness.restore(snapshot, parallelism=after)
    assert again.context().restored
    assert {again.context(number).watermark for number in range(after)} == {40}
    assert rows_of(again.state("total")) == whole
    assert sorted(again.state("seen")["n"].to_pylist()) == [*range(16)]
    # Each key lies where its records will go.
    again.push([{"city": city, "n": 1000} for city in CITIES]).advance(100)
    assert rows_of(again.take_output()) == [(city, n + 1000) for city, n in whole]
    assert len(again.output) == 0


def test_a_snapshot_may_be_restored_again_and_is_not_changed_by_what_follows() -> None:
    harness = totals().push(some())
    snapshot = harness.snapshot()
    first = OperatorHarness.restore(snapshot).push(some())
    first.snapshot()
    harness.push(some()).snapshot()
    assert rows_of(OperatorHarness.restore(snapshot, parallelism=2).state("total")) == rows_of(
        snapshot.state("total").select(["city", "n"])
    )


def test_one_subtask_alone_can_be_given_rows_and_looked_at() -> None:
    snapshot = totals(parallelism=2).push(some()).snapshot()
    every = OperatorHarness.restore(snapshot, parallelism=3)
    mine = every.state("total", 1)["city"].to_pylist()
    one = OperatorHarness.restore(snapshot, parallelism=3, subtask=1)
    assert one.state("total")["city"].to_pylist() == mine
    one.push([{"city": mine[0], "n": 1}])
    foreign = every.state("total", 0)["city"][0].as_py()
    with pytest.raises(OperatorError, match=f"key {foreign!r} .* belongs to subtask 0.*key_by"):
        one.push([{"city": foreign, "n": 1}])


class TotalsOfMore(Totals):
    """Another version: the column has another name and type, and there is one more."""

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        values = {"sum": pa.int64(), "rows": pa.int64()}
        total = ValueState("total", CITY, values, renames={"n": "sum"}, defaults={"rows": "7"})
        return [total, *super().states(*inputs)[1:]]


def test_another_version_of_the_operator_takes_the_state_as_in_a_job() -> None:
    snapshot = totals().push(some()).snapshot()
    again = OperatorHarness.restore(snapshot, TotalsOfMore(), parallelism=2)
    assert {(row["sum"], row["rows"]) for row in again.state("total").to_pylist()} == {(n, 7) for n in range(8)}

    class Forgetful(Totals):
        def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
            return super().states(*inputs)[1:]

    with pytest.raises(RestoreRefused, match="total"):
        OperatorHarness.restore(snapshot, Forgetful())
    assert rows_of(OperatorHarness.restore(snapshot, Forgetful(), drop=["operator/total"]).state("due"))


class Join(Operator):
    """Says what it hears, with rules that every subtask knows."""

    broadcast_inputs = (1,)

    def __init__(self) -> None:
        self.log: list[Any] = []

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        return [
            ListState("held", CITY, {"n": pa.int64()}),
            BroadcastState("rules", {"rule": pa.string()}),
            UnionList("all", {"subtask": pa.int64()}),
        ]

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        if input == 1:
            self.context.entries("rules").append(batch)
            return None
        return batch

    def end_input(self, input: int) -> Output:
        self.log.append((input, self.context.watermark))
        return None

    def snapshot(self) -> None:
        self.context.entries("all").replace(pa.table({"subtask": [self.context.subtask]}))


def test_time_is_the_least_of_the_inputs_that_have_not_ended() -> None:
    join = Join()
    harness = OperatorHarness(join, ROWS, {"rule": pa.string()}, key_by={0: ["city"]}, parallelism=2)
    harness.push([{"rule": "a"}], input=1).advance(10, input=0)
    assert harness.context(1).watermark < 0
    assert harness.advance(5, input=1).context(1).watermark == 5
    assert harness.end_input(1).context().watermark == 10
    again = OperatorHarness.restore(harness.snapshot(), parallelism=3)
    assert [again.state("rules", number)["rule"].to_pylist() for number in range(3)] == [["a"]] * 3
    assert again.state("all", 2)["subtask"].to_pylist() == [0, 1]
    with pytest.raises(InvalidInput, match=r"input 1 .* has ended"):
        again.push([{"rule": "b"}], input=1)
    assert again.context().watermark == 10
    again.finish()
    assert join.log == [(1, 5)] * 2 + [(0, ev.MAX_WATERMARK)] * 3


class Counting(OperatorCoordinator):
    """Counts what it hears and answers with the count."""

    columns = pa.schema({"n": pa.int64()})

    def __init__(self) -> None:
        self.n = 0
        self.heard: list[Any] = []

    def open(self, send: Sender) -> None:
        self.send = send

    def restore(self, rows: pa.Table) -> None:
        [self.n] = rows["n"].to_pylist()

    def receive(self, subtask: int, message: bytes) -> None:
        self.n += int(message)
        self.send(subtask, b"%d" % self.n)

    def snapshot(self) -> pa.Table:
        return pa.table({"n": [self.n]})

    def checkpoint_complete(self) -> None:
        self.heard.append("complete")

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.heard.append(checkpoint_id)


class Asking(Operator):
    def coordinator(self) -> OperatorCoordinator:
        return Counting()

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        self.context.send_to_coordinator(b"%d" % batch.num_rows)
        return None

    def receive(self, message: bytes) -> Output:
        return pa.record_batch({"city": [None], "n": [int(message)]}, schema=pa.schema(ROWS))


def test_messages_go_between_subtasks_and_coordinator_and_its_rows_are_restored() -> None:
    harness = OperatorHarness(Asking(), ROWS, parallelism=2)
    harness.push(some()[:3], subtask=1).push(some()[:2], subtask=0)
    assert harness.messages == [(1, b"3"), (0, b"2")]
    assert harness.take_output()["n"].to_pylist() == [3, 5]
    harness.abort_snapshot()
    snapshot = harness.snapshot()
    assert isinstance(harness.coordinator, Counting)
    assert harness.coordinator.heard == [1, "complete"]
    again = OperatorHarness.restore(snapshot, parallelism=1).push(some()[:1])
    assert again.output["n"].to_pylist() == [6]
    assert again.receive(b"9").output["n"].to_pylist() == [6, 9]


class Sink(TwoPhaseCommitSink):
    """Puts off what is odd; writes down the rest, and what it is told."""

    committable_columns = pa.schema({"rows": pa.int64()})

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.committed: list[int] = []

    def open(self, context: Any) -> None:
        super().open(context)
        self.rows = 0

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        self.rows += batch.num_rows

    def prepare_commit(self, prepared: Prepared) -> pa.Table:
        rows, self.rows = self.rows, 0
        return pa.table({"rows": [rows] if rows else pa.array([], pa.int64())})

    def commit(self, permit: Any, committables: pa.Table) -> pa.Table | None:
        odd = pc.equal(pc.bit_wise_and(committables["rows"], 1), 1)
        self.committed += committables.filter(pc.invert(odd))["rows"].to_pylist()
        return committables.filter(odd)

    def checkpoint_complete(self) -> None:
        self.told.append("complete")

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.told.append(checkpoint_id)


def test_a_sink_commits_what_a_published_snapshot_holds_and_what_was_put_off_stays() -> None:
    sink = Sink()
    harness = OperatorHarness(sink, ROWS)
    harness.push(some()[:4]).abort_snapshot()
    assert sink.committed == []
    snapshot = harness.push(some()[:3]).snapshot()
    assert snapshot.committables["rows"].to_pylist() == [4, 3]
    assert sink.committed == [4]
    assert harness.snapshot().committables["rows"].to_pylist() == [3]
    assert sink.told == [1, "complete", "complete"]
    # A restore commits once more what its checkpoint holds.
    OperatorHarness.restore(snapshot)
    assert sink.committed == [4, 4]
    last = harness.push(some()[:2]).finish().snapshot()
    assert sorted(last.committables["rows"].to_pylist()) == [2, 3]
    with pytest.raises(InvalidInput, match="had finished"):
        OperatorHarness.restore(last)


class Wrong(Operator):
    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        if batch.num_rows > 1:
            raise ValueError("two")
        return batch.select(["n"])


def test_errors_are_those_of_a_run() -> None:
    with pytest.raises(OperatorError, match="process of 'op', subtask 0, failed: ValueError: two") as caught:
        OperatorHarness(Wrong(), ROWS, uid="op").push(some())
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(InvalidState, match="'op' emitted columns n int64; it declares"):
        OperatorHarness(Wrong(), ROWS, uid="op").push(some()[:1])
    with pytest.raises(InvalidInput, match="none of its inputs is keyed"):
        OperatorHarness(Totals(), ROWS)
    with pytest.raises(InvalidInput, match="has no input 1"):
        totals().push(some(), input=1)
    with pytest.raises(InvalidInput, match="no state 'tota'"):
        totals().state("tota")
    with pytest.raises(InvalidInput, match="no subtask 3"):
        totals(parallelism=3, subtask=3)
    with pytest.raises(InvalidInput, match="no subtask 1"):
        totals().push(some(), subtask=1)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"cty": "Oslo", "n": 1}], r"\['cty'\] are no columns"),
        (pa.table({"city": ["Oslo"]}), r"in the columns \['n'\]"),
        (pa.record_batch({"city": ["Oslo"], "n": ["x"]}), "do not have the types of the input"),
        ([{"city": 1, "n": 1}], "column 'city' is string, and a value is not"),
        ([{"city": "", "n": 1.5}], r"column 'n' is int64, and a value is not: 1\.5 is no int64"),
    ],
)
def test_rows_that_are_not_those_of_the_input_are_refused(rows: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        totals().push(rows)


def test_columns_may_come_in_another_order_and_in_narrower_types() -> None:
    rows = pa.table({"n": pa.array([5], pa.int8()), "city": ["Oslo"]})
    assert totals().push(rows).state("total").to_pylist() == [{"city": "Oslo", "n": 5}]


def test_what_closing_raises_does_not_hide_what_went_wrong_before() -> None:
    class Stuck(Wrong):
        def close(self) -> None:
            raise OSError("cannot close")

    with pytest.raises(OperatorError, match="two"), OperatorHarness(Stuck(), ROWS) as harness:
        harness.push(some())
    with pytest.raises(OperatorError, match="cannot close"), OperatorHarness(Stuck(), ROWS):
        pass


def test_its_stores_go_with_it() -> None:
    before = {*memory._STORES}
    with totals().push(some()) as harness:
        OperatorHarness.restore(harness.snapshot())
    del harness
    gc.collect()
    assert {*memory._STORES} <= before


class Puts(Operator):
    """Puts columns of its input, whatever they are, as the keys and the values of a state."""

    def __init__(self, keys: list[str], values: list[str]) -> None:
        self._keys, self._values = keys, values

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        return [ValueState("last", CITY, {"n": pa.int64()})]

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        self.context.value_state("last").put(batch.select(self._keys), batch.select(self._values))


@pytest.mark.parametrize(
    ("keys", "values", "told"),
    [
        (["city"], ["city"], r"columns are \['n'\], those given \['city'\]; \['city'\] are unknown or there twice$"),
        (["n"], ["n"], r"columns are \['city'\], those given \['n'\]; \['city'\] are missing"),
    ],
)
def test_columns_that_a_state_does_not_have_are_named(keys: list[str], values: list[str], told: str) -> None:
    with pytest.raises(OperatorError, match=told):
        OperatorHarness(Puts(keys, values), ROWS, key_by="city").push(some())


def test_a_store_may_go_while_another_one_is_used() -> None:
    # Garbage is collected wherever it is: within an operation too, which holds the lock.
    with memory._LOCK:
        memory.MemoryStorage.reset("no such store")


class Stamp(Operator):
    """Says when each row was processed."""

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return pa.schema({**ROWS, "at": pa.int64()})

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        at = pa.array([self.context.processing_time_us] * len(batch), pa.int64())
        return batch.append_column("at", at)


def test_processing_time_is_moved_by_hand_and_never_back() -> None:
    with OperatorHarness(Stamp(), ROWS) as harness:
        begun = harness.context().processing_time_us
        for time_us in (begun + 5, begun + 3, begun + 8):
            harness.advance_processing_time(time_us).push([{"city": "Oslo", "n": 1}])
        assert harness.output["at"].to_pylist() == [begun + 5, begun + 5, begun + 8]
