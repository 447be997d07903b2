"""How far the next epoch reads is asked while one runs: answers, errors, restarts and the end.

What operators see as wall-clock time: it never goes back, whoever sets the clock. Which failures a
job tries again: unlucky ones, and none that another try cannot help. A program that waits for
SIGTERM: no option and no fault may make it deaf to the signal.
"""

from __future__ import annotations

import datetime
import errno
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import stateformat as sf
from stateformat import open as open_store
from stateformat.backends import dataflow as df
from stateformat.backends.dataflow import NoSplit
from stateformat.backends.dataflow.chained_operator import OperatorError, is_for_good, may_pass
from stateformat.backends.local import JobFailed, LocalRuntime, VirtualClock, stop_soon_on_sigterm
from stateformat.backends.runtime import VIRTUAL_ORIGIN_US, ProcessingTime, SystemClock
from stateformat.backends.runtime.reports import RestartPolicy, RunDiscarded
from stateformat.backends.spark.files import DirectoryFrames
from stateformat.backends.spark.offsets import OffsetTable, Position
from stateformat.backends.spark.source import Range, RangeEnumerator
from stateformat.errors import ErrorKind, OutcomeUnknown, StorageError
from tests.worlds.local import ROWS, Line, rows
from tests.worlds.spark import Ranges, RangeSource, Stand
from tests.worlds.stages import Out, to_end, until


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


class Wall(VirtualClock):
    """A clock of which the wall is set by hand."""

    def __init__(self, wall_us: int) -> None:
        super().__init__()
        self.shown_us = wall_us

    def wall_us(self) -> int:
        return self.shown_us


@pytest.mark.parametrize(
    ("seen_us", "shown_us", "expected"),
    [
        pytest.param(0, [10, 20, 30], [10, 20, 30], id="as the wall"),
        pytest.param(0, [10, 5, 11], [10, 10, 11], id="the wall is set back"),
        pytest.param(15, [10, 14, 16], [15, 15, 16], id="a checkpoint has seen later times"),
    ],
)
def test_it_never_goes_back(seen_us: int, shown_us: list[int], expected: list[int]) -> None:
    clock = Wall(shown_us[0])
    time = ProcessingTime(clock, seen_us)
    found = []
    for shown in shown_us:
        clock.shown_us = shown
        found.append(time.advance())
    assert found == expected


def test_a_step_has_one_moment() -> None:
    clock = VirtualClock()
    time = ProcessingTime(clock)
    began = time.advance()
    clock.tick()
    assert time.now_us == began
    assert time.advance() == began + 1000


def test_a_virtual_clock_begins_at_the_same_moment_in_every_run() -> None:
    first, second = VirtualClock(), VirtualClock()
    first.wait_until(500)
    assert (first.wall_us(), second.wall_us()) == (VIRTUAL_ORIGIN_US + 500, VIRTUAL_ORIGIN_US)


def test_the_executors_clock_says_when_the_wall_will_show_a_time() -> None:
    clock = VirtualClock()
    clock.wait_until(700)
    time = ProcessingTime(clock)
    assert time.clock_at(VIRTUAL_ORIGIN_US + 1000) == 1000
    assert time.clock_at(VIRTUAL_ORIGIN_US) == 700


def test_the_systems_wall_shows_time_since_1970() -> None:
    assert SystemClock().wall_us() > 1_700_000_000_000_000


def refused(kind: ErrorKind = ErrorKind.STORAGE_REFUSED) -> StorageError:
    return StorageError("cannot create the record: not permitted", kind=kind)


def full() -> StorageError:
    error = refused()
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error


def of(hook: str, raised: Exception) -> OperatorError:
    error = OperatorError.of(raised, operator="out", subtask=None, hook=hook)
    error.__cause__ = raised
    return error


@pytest.mark.parametrize(
    ("error", "at_once", "may_help"),
    [
        (ImportError("no module named 'mine'"), True, False),
        (refused(), True, True),
        (refused(ErrorKind.STORAGE_UNSUITABLE), True, True),
        (of("commit", refused()), True, True),
        (full(), False, True),
        (StorageError("no connection"), False, True),
        (OutcomeUnknown("it may exist"), False, True),
        (of("commit", TimeoutError("no answer")), False, True),
        (of("commit", RuntimeError("the other system is busy")), False, True),
        (of("commit", PermissionError("no right")), False, False),
        (of("commit", TypeError("'int' is not iterable")), False, False),
        (of("commit", KeyError("b")), False, False),
        (of("process", ValueError("no such luck")), False, False),
        (of("process", MemoryError()), False, True),
    ],
    ids=str,
)
def test_hopeless_is_told_from_unlucky(error: Exception, at_once: bool, may_help: bool) -> None:
    assert (is_for_good(error), at_once or may_pass(error)) == (at_once, at_once or may_help)
    policy = RestartPolicy("job", max_restarts=9)
    tries = 1
    while policy.on_failure(error, 0) is None:
        tries += 1
    # What is not said to be unlucky is tried twice: the same once more with nothing in between.
    assert tries == (1 if at_once else 10 if may_help else 2)


def test_a_store_that_refuses_the_record_fails_the_job_at_once() -> None:
    line = Line([rows(1), rows(2)])
    line.bench.storage.inner.create = lambda *_: (_ for _ in ()).throw(refused())  # type: ignore[method-assign]
    with pytest.raises(JobFailed, match=r"retrying cannot help: .*cannot create the record: not permitted"):
        line.run(max_restarts=9)


def test_a_discarded_run_is_judged_by_what_was_raised() -> None:
    discarded = RunDiscarded("cannot create the record", counted=True)
    discarded.__cause__ = refused()
    assert RestartPolicy("job", max_restarts=9).on_failure(discarded, 0) is not None


PROGRAM = """
import os, signal, threading
from stateformat.backends.local import stop_soon_on_sigterm


class Failing:
    newest = 7

    def forward_sigterm(self, heard):
        return lambda: None

    def stop_soon(self, *, grace):
        raise RuntimeError("no stop today")


with stop_soon_on_sigterm(Failing()):
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    "grace", [-1, "25", None, True, float("nan"), float("inf"), 10**400, datetime.timedelta(seconds=-1)]
)
def test_a_grace_that_is_no_time_is_refused_before_any_signal_comes(grace: Any) -> None:
    runtime, before = LocalRuntime(sf.open("memory://sigterm")), signal.getsignal(signal.SIGTERM)
    for use in (runtime.stop_soon, lambda grace: stop_soon_on_sigterm(runtime, grace=grace)):
        with pytest.raises(ValueError, match=r"^grace is .*; it is a number of seconds, at least 0, or a timedelta"):
            use(grace=grace)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not runtime._soon.is_asked


@pytest.mark.parametrize("grace", [0, 0.5, 3, datetime.timedelta(minutes=1)])
def test_a_time_is_taken_and_the_handler_is_put_back(grace: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_soon_on_sigterm(LocalRuntime(sf.open("memory://sigterm")), grace=grace):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_watch_that_fails_ends_the_process_with_a_sentence() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 128 + signal.SIGTERM
    [sentence] = ended.stderr.splitlines()
    assert sentence.startswith("the SIGTERM watcher failed")
    assert "no stop today" in sentence
    assert sentence.endswith("the newest checkpoint is 7, and the next start goes on from it")
