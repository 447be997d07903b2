"""Readers of sources: splits in turn, positions, how far event time has come, and when there is
nothing.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

import stateformat
from stateformat.backends.connectors import CollectSink, MemorySource, RateSource
from stateformat.backends.dataflow import Chunk, Dataflow, EventTime, NoSplit, ReaderContext, Split
from stateformat.backends.dataflow.chain import OperatorChain
from stateformat.backends.dataflow.chained_operator import OperatorError
from stateformat.backends.dataflow.source_reader import ReadResult
from stateformat.backends.local import LocalRuntime
from stateformat.backends.spark.runtime import SparkRuntime
from stateformat.backends.spark.source import SparkSource
from stateformat.errors import InvalidInput, InvalidState
from stateformat.graph import Status
from stateformat.segments import check_text
from tests.worlds.dataflow import Chunks, Collected, Pass, job_of, opened, rows


def reader(source: Chunks, event_time: EventTime | str | None = None) -> tuple[OperatorChain, Collected]:
    flow = Dataflow("job", parallelism=2)
    flow.source(source, uid="source", event_time=event_time).rebalance().apply(Pass(), uid="far")
    return opened(job_of(flow), "source", 1)


def read_on(chain: OperatorChain, times: int) -> list[ReadResult]:
    return [chain.read() for _ in range(times)]


def one_row_each(*values: int) -> list[pa.RecordBatch]:
    return [rows([value]) for value in values]


def test_a_reader_asks_for_splits_until_there_will_be_none_and_ends_when_its_own_have() -> None:
    chain, outside = reader(Chunks(a=[rows([1, 2]), rows([3])], b=[]))
    assert chain.read() == ReadResult(0, wants_split=True, idle=True, ended=False, watermark=None, holds_none=True)
    chain.assign(NoSplit.LATER)
    assert chain.read() == ReadResult(0, wants_split=True, idle=True, ended=False, watermark=None, holds_none=True)
    chain.assign(Split("a", b""))
    assert read_on(chain, 3) == [
        ReadResult(2, wants_split=False, idle=False, ended=False, watermark=None),
        ReadResult(1, wants_split=False, idle=False, ended=False, watermark=None),
        ReadResult(0, wants_split=True, idle=True, ended=False, watermark=None, holds_none=True),
    ]
    chain.assign(Split("b", b""))
    chain.assign(NoSplit.NEVER)
    assert read_on(chain, 2) == [ReadResult(0, wants_split=False, idle=False, ended=True, watermark=None)] * 2
    assert outside.values("source->far.0") == [1, 2, 3]


def test_text_that_is_not_utf_8_is_refused_where_it_enters_by_split_and_column() -> None:
    schema = pa.schema({"v": pa.string(), "all": pa.list_(pa.string())})

    def batch(text: bytes, inside: bytes) -> pa.RecordBatch:
        texts = pa.array([b"plain", text, None]).view(pa.string())
        within = pa.ListArray.from_arrays([0, 1, 1, 1], pa.array([inside]).view(pa.string()))
        return pa.record_batch([texts, within], schema=schema)

    good = batch("日本".encode(), "é".encode())
    for column, bad in {"v": batch(b"\xff", b""), "all": batch(b"", b"a\xc3")}.items():
        flow = Dataflow("job")
        flow.source(Chunks(schema, a=[good, bad]), uid="source").apply(Pass(), uid="far")
        chain, _ = opened(job_of(flow), "source", 0)
        chain.assign(Split("a", b""))
        assert chain.read().rows == 3
        with pytest.raises(InvalidState, match=rf"column '{column}' of split 'a' of source 'source' holds text that"):
            chain.read()


def test_of_a_slice_of_nested_text_the_slice_alone_is_looked_at() -> None:
    texts = pa.array([b"\xff", b"\xff", b"a", "é".encode(), b"\xff", b"\xff"]).view(pa.string())
    pairs = pa.ListArray.from_arrays([0, 2, 4, 6], texts)
    each = {
        "list": pairs,
        "large": pa.LargeListArray.from_arrays([0, 2, 4, 6], texts),
        "fixed": pa.FixedSizeListArray.from_arrays(texts, 2),
        "map": pa.MapArray.from_arrays([0, 2, 4, 6], texts, texts),
        "struct": pa.StructArray.from_arrays([pairs], ["in"]),
        "deep": pa.ListArray.from_arrays([0, 1, 2, 3], pa.FixedSizeListArray.from_arrays(texts, 2)),
    }
    check_text(pa.record_batch(each).slice(1, 1), "a slice")
    for name, column in each.items():
        for first in (0, 2):
            with pytest.raises(InvalidState, match=f"column '{name}' of a slice holds text that is not UTF-8"):
                check_text(pa.record_batch({name: column}).slice(first, 1), "a slice")


@pytest.mark.parametrize(
    "kind", [pa.string_view(), pa.list_(pa.binary_view()), pa.run_end_encoded(pa.int32(), pa.int64())]
)
def test_a_source_of_a_type_that_cannot_be_dealt_out_is_refused_when_the_job_is_built(kind: pa.DataType) -> None:
    with pytest.raises(InvalidInput, match=r"column 'v' of the schema of source 's' is .* Cast it to "):
        Dataflow("job").source(Chunks(pa.schema({"v": kind})), uid="s")
    twice = pa.schema([("v", pa.int8()), ("v", pa.int8())])
    with pytest.raises(InvalidInput, match="the schema of source 's' has 2 columns named 'v'"):
        Dataflow("job").source(Chunks(twice), uid="s")


def test_a_reader_whose_splits_go_on_has_not_ended_when_there_will_be_no_other() -> None:
    chain, _ = reader(Chunks(a=one_row_each(1)))
    chain.assign(Split("a", b""))
    chain.assign(NoSplit.NEVER)
    assert [(reading.rows, reading.ended) for reading in read_on(chain, 2)] == [(1, False), (0, True)]


def test_splits_are_read_in_turn_from_their_positions() -> None:
    source = Chunks(splits_per_reader=None, a=one_row_each(1, 2, 3), b=one_row_each(11, 12), c=one_row_each(21, 22, 23))
    chain, outside = reader(source)
    for split in (Split("a", b""), Split("b", b"", 1), Split("c", b"", 2)):
        chain.assign(split)
    assert all(reading.wants_split for reading in read_on(chain, 10))
    assert outside.values("source->far.0") == [1, 12, 23, 2, 3]


def test_a_reader_of_any_number_of_splits_knows_no_time_before_it_was_assigned_all_there_are() -> None:
    chain, _ = reader(Chunks(splits_per_reader=None, a=one_row_each(7, 8), b=one_row_each(2)), EventTime("value"))
    chain.assign(Split("a", b""))
    assert chain.read().watermark is None, "the next split may begin in the past"
    chain.assign(Split("b", b""))
    chain.assign(NoSplit.LATER)
    assert [reading.watermark for reading in read_on(chain, 2)] == [None, 2]


@pytest.mark.parametrize(
    ("room", "wanted"), [(1, [True, False, False]), (2, [True, True, False]), (None, [True, True, True])]
)
def test_a_reader_wants_as_many_splits_as_its_source_says(room: int | None, wanted: list[bool]) -> None:
    splits: dict[str, Sequence[pa.RecordBatch | None]] = {name: one_row_each(*range(9)) for name in "ab"}
    chain, _ = reader(Chunks(splits_per_reader=room, **splits))
    found = [chain.read().wants_split]
    for name in "ab":
        chain.assign(Split(name, b""))
        found.append(chain.read().wants_split)
    assert found == wanted


def test_a_reader_is_idle_when_none_of_its_splits_has_anything() -> None:
    nothing = None
    chain, _ = reader(
        Chunks(splits_per_reader=2, a=[nothing, nothing, rows([1]), nothing], b=[nothing, rows([]), nothing, nothing])
    )
    chain.assign(Split("a", b""))
    chain.assign(Split("b", b""))
    assert [reading.idle for reading in read_on(chain, 8)] == [False, True, True, True, False, False, True, True]


def test_the_watermark_is_that_of_the_split_that_is_furthest_behind_and_never_goes_back() -> None:
    source = Chunks(splits_per_reader=2, a=one_row_each(10, 30, 20, 40), b=one_row_each(5, 7), c=one_row_each(1, 99))
    chain, _ = reader(source, EventTime("value", out_of_order_us=2))
    chain.assign(Split("a", b""))
    chain.assign(Split("b", b""))
    found = [reading.watermark for reading in read_on(chain, 6)]
    # a: 8, unknown b; b: 3; a: 28; b: 5; a: still 28; b has ended.
    assert found == [None, 3, 3, 5, 5, 28]
    chain.assign(Split("c", b""))
    # a: 38, unknown c; c: -1; a has ended; c: 97; c has ended.
    assert [reading.watermark for reading in read_on(chain, 5)] == [28, 28, 28, 97, 97]


def test_event_time_is_a_timestamp_or_microseconds_and_nulls_say_nothing() -> None:
    at = datetime.datetime(1970, 1, 1, 0, 0, 1, 5, tzinfo=datetime.UTC)
    for zone in (None, "UTC", "Europe/Rome"):
        schema = pa.schema([("at", pa.timestamp("us", zone))])
        batches = [
            pa.record_batch([pa.array(some, schema.field(0).type)], schema=schema) for some in ([None], [at, None])
        ]
        chain, _ = reader(Chunks(schema, a=batches), "at")
        chain.assign(Split("a", b""))
        assert [reading.watermark for reading in read_on(chain, 2)] == [None, 1_000_005]


def test_a_split_is_given_once() -> None:
    chain, _ = reader(Chunks(a=[]))
    chain.assign(Split("a", b""))
    with pytest.raises(InvalidState, match="enumerator of source 'source' gave split 'a' to a reader that holds one"):
        chain.assign(Split("a", b"", 3))


def test_what_a_source_raises_is_told_and_what_it_reads_is_checked() -> None:
    chain, _ = reader(Chunks())
    chain.assign(Split("unknown", b""))
    with pytest.raises(OperatorError, match="read of 'source', subtask 1, failed: KeyError"):
        chain.read()
    chain, _ = reader(Chunks(a=[pa.record_batch({"other": [1]})]))
    chain.assign(Split("a", b""))
    with pytest.raises(InvalidState, match="'source' emitted columns other int64; it declares key int64"):
        chain.read()


def test_the_last_moment_of_int64_is_a_time_and_not_the_end_of_time() -> None:
    for late_us in (0, 5):
        chain, _ = reader(Chunks(a=[rows([1]), rows([2**63 - 1])], b=[rows([-(2**63)])]), EventTime("value", late_us))
        chain.assign(Split("b", b""))
        assert [one.watermark for one in read_on(chain, 1)] == [-(2**63)]
        chain.assign(Split("a", b""))
        assert read_on(chain, 4)[-1].watermark == min(2**63 - 2, 2**63 - 1 - late_us)


class Halves(MemorySource):
    """Tells positions between two rows."""

    def read(self, split: Split, context: ReaderContext) -> Iterator[Chunk]:
        for chunk in super().read(split, context):
            yield chunk._replace(position=chunk.position - 0.5)


def test_a_position_that_is_no_whole_number_is_refused_and_not_cut() -> None:
    flow = Dataflow("job")
    flow.source(Halves(pa.table({"n": [1, 2]}), batch_rows=1), uid="source").apply(CollectSink(), uid="sink")
    runtime = LocalRuntime(stateformat.open("memory://a-position-between-rows"), checkpoint_rows=1)
    with pytest.raises(
        stateformat.CheckpointError, match=r"column 'position' is int64, and a value is not: 0\.5 is no"
    ):
        runtime.run(flow)


def test_what_is_being_read_is_closed() -> None:
    source = Chunks(splits_per_reader=2, a=one_row_each(1, 2), b=one_row_each(1))
    chain, _ = reader(source)
    chain.assign(Split("a", b""))
    chain.assign(Split("b", b""))
    chain.read()
    assert source.closed == []
    chain.close()
    assert source.closed == ["a"]


class Clocked(Chunks):
    """Reads what it is told by its context."""

    def read(self, split: Split, context: ReaderContext) -> Iterator[Chunk]:
        while True:
            yield Chunk(rows([context.subtask, context.now_us]), 0)


def test_reading_may_ask_for_its_subtask_and_the_executors_clock() -> None:
    chain, outside = reader(Clocked())
    chain.assign(Split("a", b""))
    seen: list[Any] = []
    for now in (5, 8):
        outside.clock_us = now
        chain.read()
        seen = outside.values("source->far.0")
    assert seen == [1, 5, 1, 8]


def test_splits_that_are_given_ahead_wait_their_turn_unread_and_are_kept() -> None:
    source = Chunks(a=one_row_each(1, 2), b=one_row_each(11, 12), c=one_row_each(21))
    chain, outside = reader(source, event_time="value")
    for name in "abc":
        chain.assign(Split(name, b""))
    chain.assign(NoSplit.NEVER)
    readings = read_on(chain, 3)
    # The time of what is being read counts, not that of what waits; and nobody asks for more.
    assert [reading.watermark for reading in readings[:2]] == [1, 2]
    assert not any(reading.wants_split or reading.idle for reading in readings)
    kept = chain._source.rows()
    assert list(zip(*(kept[name].to_pylist() for name in ("split_id", "position", "watermark")), strict=True)) == [
        ("b", 0, None),
        ("c", 0, None),
    ]
    again, rest = reader(source, event_time="value")
    again._source.restore(kept)
    again.assign(NoSplit.NEVER)
    assert read_on(again, 5)[-1].ended
    assert outside.values("source->far.0") + rest.values("source->far.0") == [1, 2, 11, 12, 21]


def test_splits_that_others_have_begun_are_read_beside_one_another_and_hold_time_up() -> None:
    source = Chunks(a=one_row_each(1, 2, 3), b=one_row_each(11, 12, 13))
    chain, outside = reader(source, event_time="value")
    for name in "ab":
        other, _ = reader(source, event_time="value")
        other.assign(Split(name, b""))
        other.read()
        chain._source.restore(other._source.rows())
    assert [reading.watermark for reading in read_on(chain, 3)] == [2, 2, 3]
    assert outside.values("source->far.0") == [2, 12, 3]


ROW = pa.table({"n": [1]})


class Elsewhere(MemorySource):
    """As a source that only Spark reads: it would wait for its rows without end."""

    read_by = "SparkRuntime"


def test_a_source_of_another_executor_is_refused_and_not_waited_for() -> None:
    flow = Dataflow("job")
    flow.source(Elsewhere(ROW), uid="flights").apply(CollectSink(), uid="out")
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

    begun = LocalRuntime(store, checkpoint_rows=10, checkpoint_interval_us=None).begin(flow(MemorySource(ROW)))
    while (
        begun.progress().checkpoint_id is None
        or store.open().graph.operator("flights").status is not Status.FULLY_FINISHED
    ):
        assert begun.step()
    begun.close()
    again = LocalRuntime(store).begin(flow(Elsewhere(ROW)))
    assert again.step()
    again.close()
