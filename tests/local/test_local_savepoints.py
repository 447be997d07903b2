"""A savepoint of a job that goes on: of which checkpoint it is, and what everything that may go
wrong makes of it.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import stateformat as sf
from stateformat.backends import dataflow as df
from stateformat.backends.connectors import FileSink, ParquetSource
from stateformat.backends.local import JobOutcome, LocalRun, LocalRuntime, SystemClock
from stateformat.backends.runtime import VirtualClock
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.model import CheckpointKind
from stateformat.requests import JobRequest, RequestAnswer, RequestKind, RequestOutcome, encode_request
from stateformat.store import CheckpointStore
from tests.worlds import stores
from tests.worlds.local import INTERVAL_US, SUSPEND, UNDISTURBED, Job, rows, settle, to_end, until

ELSEWHERE = "memory://elsewhere/kept"
LONG_US = 100 * INTERVAL_US
"""A copy that takes so long spans many checkpoints."""


@pytest.fixture(autouse=True)
def _empty() -> None:
    MemoryStorage.reset("elsewhere/kept")


def answered(job: Job, run: LocalRun, request: str) -> RequestAnswer:
    """Step a run until a request in the store has its answer."""
    until(run, lambda: job.bench.store.request_answer(request) is not None)
    found = job.bench.store.request_answer(request)
    assert found is not None
    return found


def answer_of(job: Job, request: str) -> RequestAnswer:
    found = job.bench.store.request_answer(request)
    assert found is not None
    return found


def counts(url: str) -> dict[int, int]:
    """The counts by key in a savepoint."""
    table = sf.open(url).open().read("op", "count").table()
    return dict(zip(table["key"].to_pylist(), table["n"].to_pylist(), strict=True))


def sound(url: str) -> bool:
    """Whether nothing is wrong with a savepoint."""
    return not sf.validate(sf.open(url).storage, level="full").problems


def test_a_savepoint_is_the_next_checkpoint_and_the_job_goes_on_to_the_same_end() -> None:
    job = Job()
    bench, run = job.bench, job.saved_once()
    assert bench.newest_id == 1
    asked = bench.store.request_savepoint()
    answer = answered(job, run, asked.id)
    url = f"memory://bench/savepoints/2-{asked.id[:8]}"
    assert (answer.outcome, answer.checkpoint_id, answer.savepoint) == (RequestOutcome.SAVED, 2, url)
    assert answer.message == f"checkpoint 2 has its savepoint {url}; the job goes on"
    kept = sf.open(url).open()
    assert (kept.record.kind, kept.record.ref, kept.record.stop) == (CheckpointKind.SAVEPOINT, bench.newest.ref, None)
    assert counts(url) == {0: 1, 1: 1, 2: 1}
    assert job.out.seen == [0, 1, 2], "what the checkpoint holds is committed"
    job.tap.let(0)
    assert to_end(run).stop is None
    assert job.out.seen == UNDISTURBED


def test_a_run_is_asked_directly_and_knows_the_answer() -> None:
    job = Job()
    run = job.saved_once()
    request = run.request_savepoint(ELSEWHERE)
    assert run.request_answer(request) is None
    until(run, lambda: run.request_answer(request))
    answer = run.request_answer(request)
    assert answer is not None
    assert (answer.outcome, answer.savepoint) == (RequestOutcome.SAVED, ELSEWHERE)
    with pytest.raises(sf.InvalidInput, match="lies in segments/"):
        run.request_savepoint("memory://bench/segments/x")


def test_a_checkpoint_in_flight_is_not_what_was_asked_for() -> None:
    job = Job()
    bench, run = job.bench, job.saved_once()
    bench.due(run)
    request = run.request_savepoint()
    until(run, lambda: run.request_answer(request))
    answer = run.request_answer(request)
    assert answer is not None
    assert answer.checkpoint_id == 3


def test_several_requests_are_of_one_checkpoint_and_each_has_its_own_savepoint() -> None:
    job = Job()
    run = job.saved_once()
    store = job.bench.store
    asked = [store.request_savepoint(), store.request_savepoint(ELSEWHERE), store.request_savepoint()]
    answers = [answered(job, run, each.id) for each in asked]
    assert {answer.checkpoint_id for answer in answers} == {2}
    assert [answer.savepoint for answer in answers] == [each.savepoint_at(store.url, 2) for each in asked]
    assert [counts(str(answer.savepoint)) for answer in answers] == 3 * [{0: 1, 1: 1, 2: 1}]


def test_requests_for_savepoints_count_for_every_run_also_for_one_that_restored_from_a_later_checkpoint() -> None:
    job = Job(requests_every_us=None)
    bench, run = job.bench, job.saved_once()
    bench.checkpoint(run)
    asked = bench.store.request_savepoint()
    bench.checkpoint(run)
    run = job.begin(requests_every_us=1_000)
    answer = answered(job, run, asked.id)
    assert (answer.outcome, answer.checkpoint_id) == (RequestOutcome.SAVED, 4)


# ---- while it is copied --------------------------------------------------------------------------


def test_a_checkpoint_does_not_expire_while_it_is_copied_and_the_job_goes_on_meanwhile() -> None:
    job = Job(keep=1)
    bench = job.bench
    bench.clock = VirtualClock(us_per_work=LONG_US)
    run = job.saved_once()
    asked = bench.store.request_savepoint()
    until(run, lambda: bench.newest_id == 2 and run.in_flight is None)
    for _ in range(3):
        bench.checkpoint(run)
    assert bench.store.request_answer(asked.id) is None
    assert [record.checkpoint_id for record in bench.store.history()] == [5, 4, 3, 2]
    bench.clock.wait_until(LONG_US + INTERVAL_US)
    answer = answered(job, run, asked.id)
    assert (answer.outcome, answer.checkpoint_id) == (RequestOutcome.SAVED, 2)
    bench.checkpoint(run)
    assert len(list(bench.store.history())) == 1
    assert counts(str(answer.savepoint)) == {0: 1, 1: 1, 2: 1}


def test_a_checkpoint_that_another_program_expires_meanwhile_makes_the_copy_fail_with_a_sentence() -> None:
    job = Job()
    bench = job.bench
    bench.clock = VirtualClock(us_per_work=LONG_US)
    run = job.saved_once()
    asked = bench.store.request_savepoint(ELSEWHERE)
    until(run, lambda: bench.newest_id == 2 and run.in_flight is None)
    bench.checkpoint(run)
    CheckpointStore(bench.storage.inner).expire(1)
    bench.clock.wait_until(LONG_US + INTERVAL_US)
    answer = answered(job, run, asked.id)
    assert (answer.outcome, answer.checkpoint_id, answer.savepoint) == (RequestOutcome.FAILED, 2, None)
    assert answer.message.startswith(f"the copy of checkpoint 2 to {ELSEWHERE} failed: ")
    assert answer.message.endswith("; the job goes on")
    assert not sf.open(ELSEWHERE).storage.list("checkpoints/")
    job.tap.let(0)
    to_end(run)
    assert job.out.seen == UNDISTURBED


def test_a_run_that_was_overtaken_while_it_copied_leaves_the_answer_to_its_successor() -> None:
    job = Job()
    bench = job.bench
    bench.clock = VirtualClock(us_per_work=LONG_US)
    old = job.saved_once()
    asked = bench.store.request_savepoint()
    until(old, lambda: bench.newest_id == 2 and old.in_flight is None)
    run = job.begin()
    until(run, lambda: bench.newest_id == 3 and run.in_flight is None)
    CheckpointStore(bench.storage.inner).expire(1)
    bench.clock.wait_until(3 * LONG_US)
    old._requests.settle()
    assert old.request_answer(asked.id) is None
    answer = answered(job, run, asked.id)
    assert (answer.outcome, answer.checkpoint_id) == (RequestOutcome.SAVED, 3)


def test_a_large_copy_runs_beside_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(checkpoint_interval_us=None)
    bench = job.bench
    bench.clock = SystemClock()
    run = job.begin()
    gate, copy = threading.Event(), bench.store.copy

    def slow(*args: object) -> object:
        assert gate.wait(60)
        return copy(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.store, "copy", slow)
    request = run.request_savepoint()
    until(run, lambda: run._requests._savepoints._copies)
    job.tap.let(0, 4)
    until(run, lambda: run.rows_read == 4)
    again = run.request_savepoint()
    until(run, lambda: len(run._requests._savepoints._copies) == 2)
    assert run.request_answer(request) is None
    gate.set()
    until(run, lambda: run.request_answer(request) and run.request_answer(again), steps=1_000_000)
    found = [run.request_answer(each) for each in (request, again)]
    assert [(each.outcome, each.checkpoint_id) for each in found if each] == [("saved", 1), ("saved", 2)]


def test_a_run_that_is_closed_gives_up_its_copies_and_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job([rows(n) for n in range(8)], checkpoint_interval_us=None)
    bench = job.bench
    bench.clock = SystemClock()
    run = job.begin()
    begun, gate, copy = threading.Event(), threading.Event(), bench.store.copy

    def slow(*args: object) -> object:
        begun.set()
        assert gate.wait(60)
        return copy(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.store, "copy", slow)
    request = run.request_savepoint(ELSEWHERE)
    until(run, begun.is_set, steps=1_000_000)
    savepoints = run._requests._savepoints
    savepoints._copies[0][0].is_given_up = True
    gate.set()
    run.close()
    assert savepoints._copies == []
    assert run.request_answer(request) is None
    assert not sf.open(ELSEWHERE).storage.exists()


# ---- failures ------------------------------------------------------------------------------------


def refuse_manifest(job: Job) -> None:
    for verb, prefix in (("write", "manifests/"), ("write", "segments/"), ("create", "manifests/")):
        job.bench.storage.order(verb, prefix, "refuse")


@pytest.mark.parametrize("what", ["op/0 snapshot", "out/0 prepare", "manifest"])
def test_a_savepoint_whose_checkpoint_fails_is_failed_with_the_reason_and_counts_as_any_failed_checkpoint(
    what: str,
) -> None:
    for tolerable in (1, 0):
        job = Job(tolerable_failures=tolerable)
        bench, run = job.bench, job.saved_once()
        if what == "manifest":
            refuse_manifest(job)
        else:
            job.log.failing.append(what)
        asked = bench.store.request_savepoint()
        if tolerable:
            answer = answered(job, run, asked.id)
            assert answer.message.startswith("the savepoint has failed, and the job goes on: ")
        else:
            with pytest.raises(sf.CheckpointError) as raised:
                settle(run, 3000)
            assert raised.value.details["counted"]
            answer = answer_of(job, asked.id)
            assert answer.message.startswith("the savepoint has failed, and the job starts again from its newest")
        assert (answer.outcome, answer.savepoint) == (RequestOutcome.FAILED, None)
        bench.storage.orders.clear()
        job.tap.let(0)
        assert (to_end(run) if tolerable else job.run()).stop is None
        assert job.out.seen == UNDISTURBED


def test_a_copy_that_fails_is_failed_with_what_to_do_and_the_job_goes_on() -> None:
    job = Job()
    run = job.saved_once()
    # A store that holds something is no place for a savepoint.
    stores.counts_store(ELSEWHERE)
    asked = job.bench.store.request_savepoint(ELSEWHERE)
    answer = answered(job, run, asked.id)
    assert (answer.outcome, answer.checkpoint_id) == (RequestOutcome.FAILED, 2)
    assert "`ckpt copy memory://bench@2 memory://elsewhere/kept` makes it; the job goes on" in answer.message
    assert any("the copy of checkpoint 2" in sentence for sentence in run.progress().warnings)
    job.tap.let(0)
    to_end(run)
    assert job.out.seen == UNDISTURBED


def _forged(store: CheckpointStore, run: LocalRun, savepoint: str, number: int) -> RequestAnswer:
    """The answer to a request that somebody wrote into the store by hand."""
    request = JobRequest(RequestKind.SAVEPOINT, f"{number:032x}", 0, savepoint)
    store.storage.create(request.path, encode_request(request))
    until(run, lambda: store.request_answer(request.id) is not None)
    found = store.request_answer(request.id)
    assert found is not None
    return found


def _writing(base: Path, **options: Any) -> tuple[CheckpointStore, LocalRun]:
    """A run that reads one folder and writes another."""
    (base / "in").mkdir()
    pq.write_table(pa.table({"n": [1, 2]}), base / "in" / "a.parquet")
    flow, store = df.Dataflow("writes"), sf.open(str(base / "store"))
    flow.source(ParquetSource(base / "in", grows=True), uid="reads").apply(FileSink(base / "out"), uid="writes")
    often = {"checkpoint_interval_us": 100_000, "requests_every_us": 10_000}
    run = LocalRuntime(store, clock=VirtualClock(), **often, **options).begin(flow)
    assert isinstance(run, LocalRun)
    until(run, lambda: run.published > 0)
    return store, run


def test_no_savepoint_is_made_where_the_job_reads_and_writes_or_where_nobody_else_would_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store, run = _writing(tmp_path)
    refused = {
        f"{tmp_path}/out": "where operator 'writes' of the job reads or writes",
        f"file://{tmp_path}/out/deep/down": "where operator 'writes'",
        f"{tmp_path}/in/x": "where operator 'reads'",
        f"{tmp_path}/in/../out": "where operator 'writes'",
        "up/here": "is relative",
        "memory://x": "in the memory of one process",
        store.url: "lies in the store",
        f"{store.url}/mine": "lies in the store",
    }
    before = sorted(tmp_path.rglob("*.json"))
    for number, (place, told) in enumerate(refused.items()):
        answer = _forged(store, run, place, number)
        assert (answer.outcome, answer.savepoint) == (RequestOutcome.REFUSED, None), place
        assert told in answer.message
    assert not [path for path in sorted(tmp_path.rglob("*.json")) if path not in before and "store" not in path.parts]
    with pytest.raises(sf.InvalidInput, match="where operator 'writes'"):
        run.request_stop(SUSPEND, tmp_path / "out" / "x")
    for number, place in enumerate((f"{tmp_path}/beside", f"{store.url}/savepoints/mine"), 20):
        assert _forged(store, run, place, number).savepoint == place
    run.close()


def test_a_job_may_say_where_alone_savepoints_can_be_asked_for(tmp_path: Path) -> None:
    store, run = _writing(tmp_path, savepoints_below=[tmp_path / "kept", "s3://bucket/kept"])
    answer = _forged(store, run, f"{tmp_path}/beside", 1)
    assert answer.outcome is RequestOutcome.REFUSED
    assert answer.message == (
        f"this job makes savepoints only below {tmp_path}/kept, s3://bucket/kept, {store.url}/savepoints/, and "
        f"{tmp_path}/beside lies elsewhere"
    )
    for number, place in enumerate((f"{tmp_path}/kept/1", f"{store.url}/savepoints/mine"), 2):
        assert _forged(store, run, place, number).outcome is RequestOutcome.SAVED
    run.close()
    for wrong in (7, "s3://user:secret@bucket/x", [None]):
        with pytest.raises(sf.InvalidInput):
            LocalRuntime(store, savepoints_below=wrong)  # type: ignore[arg-type]
    assert LocalRuntime(store, savepoints_below="kept").options.schedule.savepoints_below == (
        str(Path("kept").absolute()),
    )


def test_an_answer_that_could_not_be_written_is_written_later() -> None:
    job = Job()
    bench, run = job.bench, job.saved_once()
    asked = bench.store.request_savepoint()
    for _ in range(5):
        bench.storage.order("create", "requests/", "refuse")
    until(run, lambda: run.request_answer(asked.id))
    assert bench.store.request_answer(asked.id) is None
    assert answered(job, run, asked.id).outcome is RequestOutcome.SAVED


# ---- a driver that dies --------------------------------------------------------------------------


def test_a_run_that_dies_between_copy_and_answer_is_answered_for_by_the_next_without_another_savepoint() -> None:
    job = Job()
    bench, run = job.bench, job.saved_once()
    asked = bench.store.request_savepoint(ELSEWHERE)
    until(run, lambda: bench.newest_id == 2 and run.in_flight is None)
    bench.store.copy(bench.store.open(), sf.open(ELSEWHERE))
    run = job.begin()
    answer = answered(job, run, asked.id)
    assert (answer.outcome, answer.checkpoint_id, answer.savepoint) == (RequestOutcome.SAVED, 2, ELSEWHERE)
    assert bench.newest_id == 2, "no checkpoint was taken for it"


# ---- a job that ends -----------------------------------------------------------------------------


def test_a_job_that_had_ended_before_is_saved_when_it_is_run_again() -> None:
    job = Job()
    job.tap.let(0)
    job.run()
    asked = job.bench.store.request_savepoint()
    assert isinstance(job.bench.runtime().begin(job.flow()), JobOutcome)
    assert answer_of(job, asked.id).outcome is RequestOutcome.SAVED


@pytest.mark.parametrize("us_per_work", [0, LONG_US])
def test_a_copy_under_way_is_finished_before_the_job_ends(us_per_work: int) -> None:
    job = Job()
    bench = job.bench
    bench.clock = VirtualClock(us_per_work=us_per_work)
    run = job.saved_once()
    asked = bench.store.request_savepoint()
    until(run, lambda: bench.newest_id == 2)
    job.tap.let(0)
    to_end(run)
    answer = answer_of(job, asked.id)
    assert (answer.outcome, answer.checkpoint_id) == (RequestOutcome.SAVED, 2)
    assert counts(str(answer.savepoint)) == {0: 1, 1: 1, 2: 1}


def test_a_stop_that_comes_while_a_savepoint_is_copied_waits_for_the_copy() -> None:
    job = Job()
    bench = job.bench
    bench.clock = VirtualClock(us_per_work=LONG_US)
    run = job.saved_once()
    saved = bench.store.request_savepoint()
    until(run, lambda: bench.newest_id == 2 and run.in_flight is None)
    run.request_stop(SUSPEND)
    outcome = to_end(run)
    assert outcome.checkpoint_id == 3
    assert (answer_of(job, saved.id).outcome, answer_of(job, saved.id).checkpoint_id) == (RequestOutcome.SAVED, 2)


def test_a_stopped_job_that_is_looked_at_again_serves_who_asked_meanwhile() -> None:
    job = Job()
    bench, run = job.bench, job.saved_once()
    run.request_stop(SUSPEND)
    to_end(run)
    asked = bench.store.request_savepoint()
    assert isinstance(bench.runtime().begin(job.flow()), JobOutcome)
    answer = answer_of(job, asked.id)
    assert (answer.outcome, answer.checkpoint_id) == (RequestOutcome.SAVED, 2)
    assert answer.message.endswith("; the job has stopped (no drain) at checkpoint 2")


class Died(BaseException):
    """The process is killed."""


@pytest.mark.parametrize("place", [None, pytest.param(ELSEWHERE, marks=pytest.mark.truth)])
def test_a_driver_that_dies_before_any_object_that_it_writes_loses_neither_savepoint_nor_output(
    place: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run for each object that it writes or copies after the request: killed before that."""
    left = 0

    def dying(name: str) -> None:
        right = getattr(MemoryStorage, name)

        def call(self: MemoryStorage, *args: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                raise Died
            return right(self, *args)

        monkeypatch.setattr(MemoryStorage, name, call)

    for name in ("create", "open_output", "link_from"):
        dying(name)
    survived = at = 0
    while not survived:
        at += 1
        MemoryStorage.reset("elsewhere/kept")
        job = Job()
        run = job.saved_once()
        asked = job.bench.store.request_savepoint(place)
        left = at
        try:
            answered(job, run, asked.id)
            survived = at
        except Died:
            pass
        left = 0
        answer = job.bench.store.request_answer(asked.id) or answered(job, job.begin(), asked.id)
        assert answer.outcome is RequestOutcome.SAVED, f"killed at {at}"
        assert sound(str(answer.savepoint))
        assert counts(str(answer.savepoint)).items() >= {0: 1, 1: 1}.items()
        job.tap.let(0)
        job.run()
        assert job.out.seen == UNDISTURBED, f"killed at {at}"
    assert survived > 4
