"""Jobs that start from a savepoint, which stays its user's, and jobs that run in a savepoint which
they were given.

Jobs that keep what is young: ``keep_for_us`` beside ``keep``, by records of clocks that jump.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stateformat as sf
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import JobOutcome, LocalRun, LocalRuntime
from stateformat.backends.rewrite.rewrite import publish_rescaled
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import InvalidInput, JobMismatch, PublishConflict, RestoreRefused, StorageError
from stateformat.history import record_ids
from stateformat.model import KEEP_PROPERTY, CheckpointKind
from stateformat.storage import Storage
from stateformat.store import CheckpointStore
from tests.servers.server import BUCKET, S3Server
from tests.worlds.local import DRAIN, SUSPEND, UNDISTURBED, Bench, Faulty, Job, to_end, until
from tests.worlds.stores import counts_job


def bytes_of(storage: Storage) -> dict[str, bytes]:
    return {item.path: storage.read(item.path).to_pybytes() for item in storage.list("")}


class Stopped:
    """A job that was stopped with a savepoint, and a bench with an empty store for what starts from
    it.
    """

    def __init__(self, mode: Any = SUSPEND, **how: Any) -> None:
        self.job = Job(**how)
        self.first = self.job.bench
        run = self.job.saved_once()
        run.request_stop(mode)
        self.url = to_end(run).savepoint or ""
        self.savepoint = sf.open(self.url)
        self.before = bytes_of(self.savepoint.storage)
        self.bench = Bench("memory://again")
        self.job.tap.let(0)

    def begin(self, **options: Any) -> LocalRun:
        run = self.runtime(**options).begin(self.job.flow())
        assert isinstance(run, LocalRun)
        return run

    def runtime(self, **options: Any) -> LocalRuntime:
        return self.bench.runtime(**{"start_from": self.url, **options})

    def inside(self, **options: Any) -> LocalRuntime:
        """A runtime on the savepoint's own store."""
        return LocalRuntime(self.savepoint, clock=self.bench.clock, **options)

    def untouched(self) -> bool:
        return bytes_of(self.savepoint.storage) == self.before


@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_job_goes_on_from_a_savepoint_in_a_store_of_its_own_and_the_savepoint_stays_as_it_was(
    parallelism: int,
) -> None:
    was = Stopped()
    was.job.parallelism = parallelism
    run = was.begin(keep=1, checkpoint_rows=1, checkpoint_interval_us=None)
    record, saved = was.bench.newest, was.savepoint.open().record
    assert (record.checkpoint_id, record.parent, record.kind) == (3, saved.ref, CheckpointKind.CHECKPOINT)
    assert (record.job_id, record.stop) == (saved.job_id, None)
    to_end(run)
    assert was.job.out.seen == UNDISTURBED
    assert [kept.checkpoint_id for kept in was.bench.store.history()] == [was.bench.newest_id]
    assert was.bench.newest_id > 4
    assert was.untouched()
    assert sf.validate(was.bench.storage.inner, level="full").problems == ()


def test_what_stays_in_the_program_is_read_on_the_first_start_only() -> None:
    was = Stopped()
    run = was.begin()
    was.bench.checkpoint(run)
    MemoryStorage.reset(was.url.removeprefix("memory://"))
    assert was.runtime().run(was.job.flow()).checkpoint_id == was.bench.newest_id
    assert was.job.out.seen == UNDISTURBED


def test_one_checkpoint_of_a_store_is_chosen_by_its_id() -> None:
    was = Stopped()
    was.begin(start_from=f"{was.first.store.url}@1")
    assert was.bench.newest.parent == was.first.store.open(1).record.ref


def test_what_a_savepoint_holds_prepared_is_committed_once_under_the_attempt_that_prepared_it() -> None:
    was = Stopped()
    committed = dict(was.job.out.committed)
    was.begin()
    assert was.job.out.committed == committed
    assert was.first.store.open(2).record.attempt_id in {attempt for _, attempt, _ in committed}
    fresh = Bench("memory://third")
    was.job.out.committed.clear()
    fresh.runtime(start_from=was.url).begin(was.job.flow())
    assert was.job.out.committed.items() <= committed.items()
    assert was.job.out.committed


def test_a_savepoint_of_a_drain_has_finished_and_the_job_ends_at_once_with_a_sentence() -> None:
    was = Stopped(DRAIN)
    was.bench.log.clear()
    outcome = was.runtime().run(was.job.flow())
    assert outcome.sentence.startswith("the job had finished: in checkpoint 3 every operator has ended")
    assert not [call for call in was.first.log.calls if call.split()[1] == "open"][3:]


def test_the_store_of_a_savepoint_is_no_place_to_run_in_unless_it_is_claimed() -> None:
    was = Stopped()
    for _ in range(2):
        with pytest.raises(InvalidInput, match=rf"is a savepoint .*start_from='{was.url}'.*claim=True"):
            was.inside().run(was.job.flow())
    assert was.untouched()


def test_a_savepoint_that_is_claimed_expires_like_any_other_checkpoint() -> None:
    was = Stopped()
    options: dict[str, Any] = {**was.bench.options, "checkpoint_rows": 1, "checkpoint_interval_us": None}
    was.inside(claim=True, keep=2, **options).run(was.job.flow())
    ids = [record.checkpoint_id for record in was.savepoint.history()]
    assert len(ids) == 2
    assert ids[-1] > 2
    assert was.job.out.seen == UNDISTURBED


def test_a_store_that_began_as_a_savepoint_and_has_gone_on_goes_on_and_keeps_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    was = Stopped()
    run = was.inside(claim=True, keep=None, checkpoint_interval_us=1).begin(was.job.flow())
    assert isinstance(run, LocalRun)
    until(run, lambda: run.published == 1)
    outcome = was.inside(checkpoint_rows=1).run(was.job.flow())
    assert was.job.out.seen == UNDISTURBED
    assert [record.checkpoint_id for record in was.savepoint.history()] == [*range(outcome.checkpoint_id or 0, 1, -1)]
    assert "began as a savepoint, checkpoint 2, which is yours" in caplog.text


def test_claim_without_the_savepoints_own_store_is_refused() -> None:
    was = Stopped()
    with pytest.raises(InvalidInput, match=r"memory://again is empty\. Open the savepoint's own store"):
        was.runtime(claim=True).run(was.job.flow())


def test_a_savepoint_of_another_job_is_refused_since_segments_carry_the_job() -> None:
    was = Stopped()
    flow = was.job.flow(job="other")
    with pytest.raises(JobMismatch, match=r"is of job 'job', and the dataflow is job 'other'. Segments carry"):
        was.runtime().run(flow)
    assert bytes_of(was.bench.storage.inner) == {}


def test_a_savepoint_that_does_not_fit_is_refused_before_anything_is_copied_and_drop_gives_state_up() -> None:
    was = Stopped()
    flow = Dataflow("job", parallelism=1)
    flow.source(was.job.tap, uid="in", event_time="at").apply(was.job.out, uid="out", parallelism=1, chain=False)
    with pytest.raises(RestoreRefused, match="op"):
        was.runtime().run(flow)
    assert bytes_of(was.bench.storage.inner) == {}
    was.runtime(drop=["op"]).run(flow)
    assert was.job.out.seen == [*range(8)]


@pytest.mark.parametrize("address", ["memory://nothing-here", "memory://again-elsewhere@7", "/no/such/folder"])
def test_a_savepoint_that_is_not_there_is_misuse_and_not_tried_again(address: str) -> None:
    was = Stopped()
    with pytest.raises(InvalidInput, match=r"start_from=.* names no checkpoint: there is no store"):
        was.runtime(start_from=address).run(was.job.flow())
    assert was.bench.clock.now_us() < 60_000_000


@pytest.mark.parametrize("address", ["", "s3://KEY:hunter2@bucket/x", "gs://b?token=hunter2", "memory://x@0"])
def test_an_address_that_can_be_none_or_holds_a_secret_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        LocalRuntime(sf.open("memory://x"), start_from=address)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(LocalRuntime(sf.open("memory://x"), start_from_options={"secret": "hunter2"}).options)


class Breaking(Faulty):
    """A storage that dies at its n-th request that changes something.

    ``done``: after it was carried out.
    """

    def __init__(self, inner: Storage, at: int, *, done: bool) -> None:
        super().__init__(inner)
        self.left, self.done = at, done

    def _ask(self, verb: str, path: str, carry_out: Callable[[], Any]) -> Any:
        if verb in ("write", "create"):
            self.left -= 1
            if self.left < 0:
                if self.left == -1 and self.done:
                    carry_out()
                raise StorageError("the disk is gone")
        return carry_out()


@pytest.mark.parametrize("done", [False, True])
def test_a_start_that_breaks_off_anywhere_is_made_whole_by_starting_again(done: bool) -> None:
    was = Stopped()
    deaths = 0
    for at in range(100):
        bench = Bench("memory://again")
        dying = CheckpointStore(Breaking(bench.storage.inner, at, done=done), sleep=lambda _: None)
        try:
            LocalRuntime(dying, clock=bench.clock, start_from=was.url).begin(was.job.flow())
        except (StorageError, sf.CheckpointError):
            deaths += 1
        else:
            break
        begun = bench.runtime(start_from=was.url).begin(was.job.flow())
        assert isinstance(begun, LocalRun)
        assert bench.newest_id == 3
        assert bench.state("op", "count") == was.first.state("op", "count")
        bench.store.collect_garbage(delete=True)
        needed = {*was.before} - {path for path in was.before if path.startswith(("checkpoints", "manifests"))}
        assert {*bytes_of(bench.storage.inner)} - needed == {
            bench.newest.manifest.path,
            f"checkpoints/{3:020d}.json",
        }
    assert deaths >= 1
    assert was.untouched()


def test_of_two_runs_that_start_from_one_savepoint_into_one_store_one_wins() -> None:
    was = Stopped()
    bench = was.bench

    class Rival(Faulty):
        def _ask(self, verb: str, path: str, carry_out: Callable[[], Any]) -> Any:
            if verb == self.at[0] and path.startswith(self.at[1]) and not bench.newest_id:
                bench.runtime(start_from=was.url).begin(was.job.flow())
            return carry_out()

        at = ("", "")

    for at in (("write", "segments/"), ("write", "manifests/"), ("create", "checkpoints/"), ("list", "checkpoints/")):
        MemoryStorage.reset("again")
        storage = Rival(bench.storage.inner)
        storage.at = at
        late = LocalRuntime(CheckpointStore(storage, sleep=lambda _: None), clock=bench.clock, start_from=was.url)
        if at[0] == "list" or (at[1] == "segments/" and not any(path.startswith("segments/") for path in was.before)):
            late.begin(was.job.flow())
        else:
            with pytest.raises(PublishConflict):
                late.run(was.job.flow())
        assert bench.newest_id == 3
        assert was.untouched()


@pytest.mark.s3
def test_a_savepoint_may_lie_on_another_storage_than_the_store(moto: S3Server, tmp_path: Path) -> None:
    was = Stopped(parallelism=1)
    urls = [f"s3://{BUCKET}/start/{tmp_path.name}", str(tmp_path / "local"), f"s3://{BUCKET}/back/{tmp_path.name}"]
    source, options = was.url, {}
    for url in urls:
        remote = moto.options() if url.startswith("s3") else {}
        store = sf.open(url, **remote)
        runtime = LocalRuntime(store, start_from=source, start_from_options=options, clock=was.bench.clock)
        begun = runtime.begin(was.job.flow())
        assert not isinstance(begun, JobOutcome)
        begun.close()
        assert store.open().read("op", "count").table().to_pylist() == was.first.state("op", "count")
        source, options = url, remote
    assert sf.open(urls[-1], **moto.options()).open().record.checkpoint_id == 5


def ids(bench: Bench) -> list[int]:
    return [record.checkpoint_id for record in bench.store.history()]


def published(job: Job, number: int, **options: Any) -> None:
    """Let a run publish until there are so many checkpoints, and die before it has expired any."""
    bench, run = job.bench, job.begin(**options)
    while bench.newest_id < number:
        bench.due(run)
        before = bench.newest_id
        until(run, lambda before=before: bench.newest_id > before)  # type: ignore[misc]
        if bench.newest_id < number:
            until(run, lambda: run.in_flight is None)


def test_a_store_that_a_job_begins_keeps_ten_checkpoints_whatever_crashes_leave(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job(shut=True)
    bench = job.bench
    for number in range(9, 15):
        published(job, number)
    assert ids(bench) == [*range(14, 0, -1)]
    job.tap.let(0)
    job.run()
    assert ids(bench) == [*range(bench.newest_id, bench.newest_id - 10, -1)]
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("keep", "left", "warnings"), [({}, None, 1), ({"keep": None}, None, 0), ({"keep": 3}, 3, 0), ({"keep": 11}, 11, 0)]
)
def test_a_store_with_more_that_was_begun_without_a_limit_is_warned_of_once_a_start_until_keep_is_set(
    keep: dict[str, Any], left: int | None, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(shut=True)
    bench = job.bench
    published(job, 12, keep=None)
    assert ids(bench) == [*range(12, 0, -1)]
    job.tap.let(0)
    bench.log.failing.append("op/0 process 0: 3")
    outcome = job.run(**keep)
    assert outcome.restarts == 1
    assert len(ids(bench)) == (left or bench.newest_id)
    told = [record.getMessage() for record in caplog.records if "was begun without a limit" in record.getMessage()]
    assert len(told) == warnings
    assert all("all of its 12 checkpoints are kept" in line for line in told)
    assert all("`ckpt gc memory://bench --keep 10 --delete`" in line for line in told)


def test_a_store_of_few_that_was_begun_without_a_limit_is_kept_like_one_with_the_default() -> None:
    job = Job(shut=True)
    bench = job.bench
    published(job, 10, keep=None)
    job.tap.let(0)
    job.run()
    assert len(ids(bench)) == 10


def test_the_limit_outlives_commands_that_publish() -> None:
    job = Job(shut=True)
    bench = job.bench
    published(job, 11)
    for _ in range(3):
        checkpoint = bench.store.open()
        publish_rescaled(checkpoint, checkpoint.graph.at(1), store=bench.store)
        bench.store.rollback(checkpoint.id)
    assert len(ids(bench)) > 11
    job.tap.let(0)
    job.run()
    assert len(ids(bench)) == 10


def test_names_of_properties_that_the_format_keeps_for_itself_are_refused() -> None:
    store = sf.open("memory://properties")
    with pytest.raises(InvalidInput, match=r"'stateformat\.zz' begins with"):
        counts_job().publish(store, None, properties={"stateformat.zz": "1"})


HOUR_US = 3600 * 10**6


class Wall:
    """The system's clock, as records tell it: so far on with each checkpoint."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_us: int) -> None:
        self.now_us, self.step_us = 1_000 * HOUR_US, step_us
        monkeypatch.setattr(time, "time_ns", lambda: self.now_us * 1000)


def publish(job: Job, wall: Wall, times: int, **options: Any) -> list[int]:
    """Let a run publish so often, one step after the other; which checkpoints are left."""
    bench, run = job.bench, job.begin(checkpoint_interval_us=1, requests_every_us=None, **options)
    for _ in range(times):
        before = bench.newest_id
        bench.due(run)
        until(run, lambda before=before: bench.newest_id > before)  # type: ignore[misc]
        until(run, lambda: run.in_flight is None)
        wall.now_us += wall.step_us
    return [int(number) for number in record_ids(bench.store.storage)]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        # Ten looks in the time: what is left is up to a tenth of it older.
        ({"keep": 1, "keep_for_us": 5 * HOUR_US}, 6),
        ({"keep": None, "keep_for_us": 5 * HOUR_US}, 6),
        ({"keep": 9, "keep_for_us": 5 * HOUR_US}, 9),
        ({"keep_for_us": 5 * HOUR_US}, 10),
        ({"keep": 2, "keep_for_us": 0}, 2),
        ({"keep": 2}, 2),
        ({"keep": None}, 14),
    ],
)
def test_what_is_younger_than_the_time_or_among_the_newest_is_kept(
    options: dict[str, Any], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, wall = Job(shut=True), Wall(monkeypatch, HOUR_US)
    found = publish(job, wall, 14, **options)
    assert found == [*range(found[-1] - left + 1, found[-1] + 1)]


@pytest.mark.parametrize("jump_us", [10**6 * HOUR_US, -500 * HOUR_US])
def test_a_clock_that_jumps_takes_no_more_than_the_number_allows(jump_us: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job, wall = Job(shut=True), Wall(monkeypatch, HOUR_US)
    before = publish(job, wall, 8, keep=4, keep_for_us=100 * HOUR_US)
    assert len(before) == 8
    wall.now_us += jump_us
    after = publish(job, wall, 2, keep=4, keep_for_us=100 * HOUR_US)
    assert after[-1] == before[-1] + 2
    assert len(after) == (4 if jump_us > 0 else 10)


def test_who_says_how_long_leaves_no_default_number_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    job, wall = Job(shut=True), Wall(monkeypatch, 1)
    assert len(publish(job, wall, 12, keep_for_us=HOUR_US)) == 12
    assert KEEP_PROPERTY not in job.bench.store.open().record.properties
    # A later run without it keeps all, and says so.
    assert len(publish(job, wall, 1)) == 13


def test_a_time_to_keep_is_a_whole_number() -> None:
    for wrong in (-1, 1.5, "7d"):
        with pytest.raises(InvalidInput, match="keep_for_us"):
            Bench("memory://bench").runtime(keep_for_us=wrong)


def test_a_job_begins_with_a_pin_by_its_name() -> None:
    job = Job()
    run = job.saved_once()
    store = sf.open(job.bench.store.url)
    pinned = store.pin(None, "before-fix").checkpoint_id
    run.request_stop(SUSPEND)
    to_end(run)
    again = Bench("memory://again")
    job.tap.let(0)
    going = again.runtime(start_from=f"{store.url}@before-fix").begin(job.flow())
    assert isinstance(going, LocalRun)
    to_end(going)
    assert min(record_ids(again.store.storage)) == pinned + 1
    store.unpin("before-fix")
