"""How far the next epoch reads is asked while one runs: answers, errors, restarts and the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from stateformat import open as open_store
from stateformat.backends import dataflow as df
from stateformat.backends.dataflow import NoSplit
from stateformat.backends.local import JobFailed
from stateformat.backends.spark.sources.files import DirectoryFrames
from stateformat.backends.spark.sources.offset_table import OffsetTable
from stateformat.backends.spark.sources.offsets import Position
from stateformat.backends.spark.sources.source import Range, RangeEnumerator
from tests.conformance import Out, to_end, until
from tests.local_jobs import ROWS, rows
from tests.spark_in_process import Ranges, RangeSource, Stand


class Jobs:
    """Stands for a session: knows the tags of threads, and cancels."""

    def __init__(self) -> None:
        self.tags: dict[str, str] = {}
        self.cancelled: list[str] = []
        self.on_cancel: Callable[[], object] = lambda: None

    @property
    def sparkContext(self) -> Jobs:  # noqa: N802 - Spark's name
        return self

    def addJobTag(self, tag: str) -> None:  # noqa: N802 - Spark's name
        self.tags[threading.current_thread().name] = tag

    def cancelJobsWithTag(self, tag: str) -> None:  # noqa: N802 - Spark's name
        self.cancelled.append(tag)
        self.on_cancel()


class Counting(Ranges):
    """One range for each number below ``there``. Remembers what it was asked, and by whom."""

    looks_ahead = True

    def __init__(self, there: int, *, grows: bool = True) -> None:
        super().__init__([[[rows(number)]] for number in range(100)], grows=grows)
        self.there = there
        self.asked: list[tuple[int, bool]] = []
        """Positions, each with whether a thread asked."""
        self.lets = threading.Event()
        """What a thread waits for."""
        self.lets.set()
        self.fails: set[int] = set()

    def __copy__(self) -> Counting:
        return self

    def latest(self, spark: Any, position: Position) -> Position:
        read = int(position["read"])
        ahead = threading.current_thread().name == "looks ahead"
        self.asked.append((read, ahead))
        if ahead:
            assert self.lets.wait(30)
        if read in self.fails:
            raise ConnectionError(f"nothing is known behind {read}")
        return {"read": min(read + 1, self.there)}

    def ended(self, position: Position) -> bool:
        return self.bounded and position["read"] == self.there


def enumerator_of(offsets: Ranges) -> RangeEnumerator:
    return RangeSource(offsets, schema=ROWS).enumerator()


def epoch(enumerator: RangeEnumerator, spark: Any) -> Range | NoSplit:
    """As a run does it: the next range, and a look ahead while its epoch runs."""
    found = enumerator.next_range(spark)
    if isinstance(found, Range):
        enumerator.look_ahead(spark)
    return found


def test_the_next_epoch_waits_for_no_answer_but_the_first() -> None:
    offsets, spark = Counting(3), Jobs()
    enumerator = enumerator_of(offsets)
    assert [isinstance(epoch(enumerator, spark), Range) for _ in range(4)] == [True, True, True, False]
    # What a thread has not found is looked for again.
    assert offsets.asked == [(0, False), (1, True), (2, True), (3, True), (3, False)]
    assert epoch(enumerator, spark) is NoSplit.LATER
    offsets.there = 5
    assert isinstance(epoch(enumerator, spark), Range)
    assert offsets.asked[5:7] == [(3, False), (3, False)]
    enumerator.close()
    assert spark.tags.keys() == {"looks ahead"}


def test_a_range_is_fixed_before_and_after_the_look_ahead_the_same() -> None:
    offsets, spark = Counting(5), Jobs()
    enumerator = enumerator_of(offsets)
    found = epoch(enumerator, spark)
    assert isinstance(found, Range)
    kept = enumerator.snapshot()
    assert kept.to_pylist()[1:] == [{"name": "read", "number": 1, "text": None}]
    again = enumerator_of(offsets)
    again.restore(kept)
    for each in (enumerator, again):
        behind = epoch(each, spark)
        assert isinstance(behind, Range)
        assert each.snapshot().to_pylist()[1:] == [{"name": "read", "number": 2, "text": None}]
        each.close()


def test_what_is_not_behind_the_range_of_now_is_not_asked() -> None:
    offsets, spark = Counting(2, grows=False), Jobs()
    enumerator = enumerator_of(offsets)
    assert [isinstance(epoch(enumerator, spark), Range) for _ in range(3)] == [True, True, False]
    assert offsets.asked == [(0, False), (1, True)], "behind its end there is nothing to ask for"
    enumerator.look_ahead(spark)
    enumerator.restore(enumerator_of(offsets).whole())
    assert isinstance(epoch(enumerator, spark), Range), "an answer for another position is none"
    enumerator.close()


def test_an_error_in_the_thread_is_told_when_its_answer_is_needed() -> None:
    offsets, spark = Counting(5), Jobs()
    offsets.fails = {1}
    enumerator = enumerator_of(offsets)
    assert isinstance(epoch(enumerator, spark), Range)
    kept = enumerator.snapshot()
    with pytest.raises(ConnectionError, match="nothing is known behind 1"):
        epoch(enumerator, spark)
    assert enumerator.snapshot().equals(kept), "the position has not moved"
    offsets.fails = set()
    assert isinstance(epoch(enumerator, spark), Range)
    enumerator.close()


@pytest.mark.parametrize("under_way", [True, False])
def test_the_thread_ends_with_the_run_and_its_job_is_cancelled(under_way: bool) -> None:
    offsets, spark = Counting(5), Jobs()
    enumerator = enumerator_of(offsets)
    if under_way:
        offsets.lets.clear()
    epoch(enumerator, spark)
    ahead = enumerator._ahead
    assert ahead is not None
    if under_way:
        spark.on_cancel = offsets.lets.set
    else:
        assert ahead.answer(enumerator._position or {}) == {"read": 2}
    enumerator.close()
    enumerator.close()
    ahead._thread.join(30)
    assert not ahead._thread.is_alive()
    assert set(spark.cancelled) == (set(spark.tags.values()) if under_way else set())


def test_a_job_looks_ahead_restarts_and_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets, out = Counting(8, grows=False), Out()
    offsets.fails = {4}
    store = open_store("memory://look-ahead")
    flow = df.Dataflow("ahead", parallelism=2)
    flow.source(RangeSource(offsets, schema=ROWS), uid="in").key_by("key").apply(out, uid="out")
    stand = Stand(monkeypatch)
    with pytest.raises(JobFailed, match="nothing is known behind 4"):
        stand.runtime(store, max_restarts=0, keep=None).run(flow)
    assert out.values == [0, 1, 2, 3]
    offsets.fails = set()
    run = stand.begin(store, flow, keep=None)
    until(run, lambda: len(out.values) == 6)
    run.close()
    to_end(stand.begin(store, flow, keep=None))
    assert out.values == [*range(8)]
    assert sum(ahead for _, ahead in offsets.asked) > 5
    for thread in threading.enumerate():
        if thread.name == "looks ahead":
            thread.join(30)
            assert not thread.is_alive()


def test_tables_look_ahead_and_directories_and_what_workers_have_do_not() -> None:
    assert OffsetTable.looks_ahead
    assert not DirectoryFrames.looks_ahead
    enumerator = RangeEnumerator(None, lambda found: found)
    enumerator.look_ahead(Jobs())  # type: ignore[arg-type]
    enumerator.close()
    assert not {"looks ahead"} & {thread.name for thread in threading.enumerate()}
