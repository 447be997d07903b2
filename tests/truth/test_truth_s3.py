"""Real S3 servers whose requests are disturbed: publications, restores, sinks and every tool."""

from __future__ import annotations

import json
import random
import re
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

import stateformat as sf
from stateformat import paths as layout
from stateformat.backends.connectors import RateSource
from stateformat.backends.connectors.sinks import s3_directory
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import LocalRuntime
from stateformat.backends.runtime import JobOutcome, RunDiscarded
from stateformat.backends.storage import object_clients, objects
from stateformat.backends.storage.s3 import S3Uploads
from stateformat.errors import CheckpointError, ErrorKind, OutcomeUnknown, PublishConflict, StorageError
from stateformat.graph import JobGraph, Partitioner
from stateformat.model import CheckpointId
from stateformat.reading.checkpoint import Checkpoint
from stateformat.states import declare
from stateformat.storage import Storage, open_storage
from stateformat.store import CheckpointStore
from stateformat.validation import validate
from tests.ckpt.ckpt_runs import CKPT, document
from tests.connectors.sink_s3 import Mortal, Outside
from tests.connectors.sink_steps import PERMIT, Crash, prepared_of, rows_until, run_to_the_end
from tests.servers.azurite import AzuriteServer
from tests.servers.fault_proxy import SINGLE, Fault, FaultProxy, Plan, Request
from tests.servers.gcs import GcsServer
from tests.servers.server import BUCKET, SMALL_PART_BYTES, S3Server
from tests.tally import Tally
from tests.worlds.stores import Job, edge, operator, owned

pytestmark = pytest.mark.s3
CLIENT = {"connect_timeout": 2, "read_timeout": 0.6}
"""Longer than a slow answer, so that it is not a fault, and short enough to wait for."""
CALM = {"read_timeout": 30}
"""For counting the requests of undisturbed work, on a machine that may be busy."""
HASTY = {"tries": 2}
"""For faults that last."""
BLOB_BYTES = 1024


class Site(NamedTuple):
    """A server, and the proxy in front of it; ``prefix``: of the store that is read."""

    name: str
    server: S3Server | GcsServer | AzuriteServer
    proxy: FaultProxy
    prefix: str

    def storage(self, prefix: str, **config: Any) -> Storage:
        """A store as the run sees it, through the proxy."""
        options = self.server.options(self.proxy.endpoint, **{**CLIENT, **config})
        return open_storage(f"{SCHEMES[self.name]}://{BUCKET}/{prefix}", **options)

    def directly(self, prefix: str) -> Storage:
        """The same store without the proxy."""
        return open_storage(f"{SCHEMES[self.name]}://{BUCKET}/{prefix}", **self.server.options())

    def published(self) -> str:
        """The prefix of a store with one checkpoint."""
        storage = self.directly(self.prefix)
        if not storage.exists():
            told = publish(storage, READ_ROWS)
            assert told.error is None
        return self.prefix

    def attempt_of(self, prefix: str, checkpoint_id: int) -> str | None:
        """Whose record the server has under an id, past the library."""
        body = self.server.body(BUCKET, f"{prefix}/{layout.record_path(CheckpointId(checkpoint_id))}")
        return None if body is None else str(json.loads(body)["attempt_id"])

    @property
    def store(self) -> str:
        """What the table calls it."""
        return {"gs": "Google's stand-in", "az": "Azure's emulator"}.get(SCHEMES[self.name], "S3")


@pytest.fixture(scope="module")
def sites() -> Iterator[dict[str, Site]]:
    """The sites that tests have asked for."""
    made: dict[str, Site] = {}
    yield made
    for site in made.values():
        site.proxy.__exit__()


@pytest.fixture
def site(request: pytest.FixtureRequest, sites: dict[str, Site], monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The server that the parameter names. Parts and pieces are small, and pauses short."""
    if request.param not in sites:
        server = request.getfixturevalue(request.param)
        proxy = FaultProxy(server).__enter__()
        sites[request.param] = Site(request.param, server, proxy, f"read-{uuid.uuid4().hex}")
    monkeypatch.setattr(objects, "PART_BYTES", 1 << 18)
    monkeypatch.setattr(objects, "_READ_BYTES", 1 << 16)
    monkeypatch.setattr(object_clients, "_PAUSE_SECONDS", 0.01)
    yield sites[request.param]
    sites[request.param].proxy.reset()


SCHEMES = {"moto": "s3", "rgw": "s3", "gcs": "gs", "azurite": "az"}
on_all = pytest.mark.parametrize("site", SCHEMES, indirect=True)

RECORD_PUT, PROBE_PUT = "PUT checkpoints if none match", "PUT .probe if none match"
READ_KINDS = {
    "HEAD checkpoints",
    "HEAD segments",
    *(f"GET {name}" for name in ("checkpoints", "manifests", "segments")),
}
GIVEN_UP = {Fault.CONFLICT: ("partNumber", "blockid", "uploadId", "comp"), Fault.CUT_BODY: ("partNumber", "blockid")}
"""The requests of an upload in parts after which obstore gives it up. On S3 we send them
ourselves.
"""
READ_FAULTS = [("rgw", fault) for fault in SINGLE if fault not in (Fault.ERROR_500_AFTER, Fault.LATE)] + [
    (name, fault)
    for name in ("moto", "gcs", "azurite")
    for fault in (Fault.CUT_BEFORE, Fault.CONFLICT, Fault.STALLED, Fault.CUT_BODY)
]
"""To a reader, the other two are like one of these.

The mock server is slow, and the faults are the proxy's.
"""
LASTING = (Fault.LOST_ANSWER, Fault.CUT_BEFORE, Fault.ERROR_500_AFTER, Fault.CONFLICT)
READ_LASTING = [("rgw", Fault.CUT_BEFORE), ("rgw", Fault.SLOW_DOWN), ("rgw", Fault.CUT_BODY), ("moto", Fault.CUT_BODY)]
READ_LASTING += [("gcs", Fault.CUT_BODY), ("azurite", Fault.CUT_BEFORE)]


def _name(value: Fault | str) -> str:
    return value if isinstance(value, str) else value.name.lower()


# The job: an object of several parts, one of one, and what stands in the manifest


def _blobs() -> pa.Table:
    count = 1200
    data = np.random.default_rng(7).bytes(count * BLOB_BYTES)
    raw = [data[at : at + BLOB_BYTES] for at in range(0, len(data), BLOB_BYTES)]
    return pa.table({"word": [f"w{number}" for number in range(count)], "raw": pa.array(raw, pa.binary())})


COUNTER = operator("counter", 2)
BLOBS = _blobs()
JOB = Job(
    "faults",
    JobGraph((operator("lines", 2), COUNTER), (edge("lines", "counter", Partitioner.HASH, "word"),)),
    (
        declare.value_state("counter", "blobs", keys={"word": pa.string()}, values={"raw": pa.binary()}),
        declare.even_split_state("counter", "seen", columns={"path": pa.string(), "position": pa.int64()}),
    ),
)
READ_ROWS = 160
"""Rows of subtask 0 in the store that is read; they take a few requests."""


def blobs_of(subtask: int, rows: int) -> pa.Table:
    """Return the first ``rows`` rows of subtask 0 (all take three parts), or a few of subtask 1."""
    return owned(BLOBS, ["word"], COUNTER, subtask).slice(0, 9 if subtask else rows)


def seen_by(subtask: int) -> pa.Table:
    """Return rows so few that they are stored in the manifest."""
    return pa.table({"path": [f"in-{subtask}.csv"], "position": [subtask]})


WRITTEN = pa.concat_tables(blobs_of(subtask, READ_ROWS) for subtask in (0, 1)).sort_by("word")


class Told(NamedTuple):
    """What a publication said: its attempt, and the error if there is no permit."""

    attempt: str
    error: BaseException | None


def publish(storage: Storage, rows: int = 1 << 30) -> Told:
    """One attempt at the first checkpoint, with short pauses."""
    store = CheckpointStore(storage, sleep=lambda seconds: time.sleep(min(seconds, 0.02)))
    pending = store.begin(job_id=JOB.job_id, graph=JOB.graph, states=JOB.states, parent=None)
    try:
        for subtask in (0, 1):
            for uid in ("lines", "counter"):
                with pending.context.subtask(uid, subtask) as writer:
                    if uid == "counter":
                        writer.write("blobs", blobs_of(subtask, rows))
                        writer.write("seen", seen_by(subtask))
                pending.add(writer)
        permit = pending.publish()
    except Exception as error:
        return Told(pending.attempt_id, error)
    assert permit.ref == pending.ref
    return Told(pending.attempt_id, None)


def lies(site: Site, prefix: str, told: Told) -> str:
    """Return what is untrue in what a publication said, or "". Nobody else publishes here."""
    there = site.attempt_of(prefix, 1)
    if isinstance(told.error, PublishConflict):
        return "a conflict, and nobody else was there"
    if told.error is not None and not isinstance(told.error, (OutcomeUnknown, StorageError)):
        return f"no error of the storage but {told.error!r}"
    if there not in (None, told.attempt):
        return f"the record is {there}'s"
    if told.error is None and there is None:
        return "a permit, and no record"
    if isinstance(told.error, StorageError) and there is not None:
        return f"nothing was published, and the record is there ({told.error})"
    if there is not None:
        report = validate(site.directly(prefix), level="full")
        if not report.ok:
            return f"published, and torn: {report.problems}"
    return ""


def restore(storage: Storage) -> BaseException | str | None:
    """Restore the job at two parallelisms; return what is wrong, None if nothing is."""
    try:
        permit = CheckpointStore(storage).start(JOB.job_id)
        assert permit is not None
        for parallelism in (2, 3):
            checkpoint = permit.checkpoint()
            plan = checkpoint.plan_restore(checkpoint.graph.at(parallelism))
            tasks = [checkpoint.restore(plan, "counter", subtask) for subtask in range(parallelism)]
            blobs = pa.concat_tables(task["blobs"].table() for task in tasks).select(["word", "raw"])
            seen = pa.concat_tables(task["seen"].table() for task in tasks if "seen" in task)
            if not blobs.sort_by("word").equals(WRITTEN) or sorted(seen["position"].to_pylist()) != [0, 1]:
                return f"wrong rows at parallelism {parallelism}"
    except Exception as error:
        return error
    return None


Work = Callable[..., Any]
"""The work on a storage that is disturbed."""


def sweep(
    site: Site,
    tally: Tally,
    name: str,
    work: Work,
    plan: Callable[[int], Plan],
    judge: Callable[[str, Any, int, list[str]], object],
    *,
    prefix: str = "",
    chosen: Callable[[str], bool] = lambda kind: True,
    **config: Any,
) -> list[str]:
    """Count the requests of undisturbed work, then spoil it at each of them; return their kinds.

    ``judge`` gets the prefix of the store, what the work returned, the number of the request and
    all kinds, and returns what is wrong. ``prefix``: of a store to read; otherwise each try gets a
    new one.
    """
    site.proxy.reset()
    work(site.storage(prefix or f"counted-{uuid.uuid4().hex}", **CALM))
    site.proxy.settle()
    kinds = [seen.kind for seen in site.proxy.requests]
    tried = [number for number, kind in enumerate(kinds) if chosen(kind)]
    assert tried
    wrong = []
    for number in tried:
        where = prefix or uuid.uuid4().hex
        site.proxy.reset(plan(number))
        begun = time.monotonic()
        found = work(site.storage(where, **config))
        seconds = time.monotonic() - begun
        if not config:
            site.proxy.settle()
        found = judge(where, found, number, kinds) or (seconds > 60 and f"after {seconds:.0f} s")
        if found:
            wrong.append(f"at {number}, {kinds[number]}: {found}")
    tally.add(name, tried=len(tried), noticed=len(tried) - len(wrong) if config else 0, wrong=len(wrong))
    assert not wrong, "\n".join(wrong)
    return kinds


def from_number(fault: Fault, count: int = 1 << 30) -> Callable[[int], Plan]:
    """Return a plan that spoils ``count`` requests from one on."""
    return lambda first: lambda request: fault if first <= request.number < first + count else None


def check_overcome(
    site: Site, tally: Tally, name: str, fault: Fault, count: int = 1, chosen: Callable[[str], bool] = lambda kind: True
) -> None:
    """Check that ``count`` faults in a row, at each chosen request, cost no permit."""
    plan = from_number(fault, count)
    given_up = set(() if SCHEMES[site.name] == "s3" else GIVEN_UP.get(fault, ()))

    def is_tried(kind: str) -> bool:
        return chosen(kind) and not (_is_of_parts(kind) and given_up & _asked(kind))

    def judge(prefix: str, told: Told, _: int, __: list[str]) -> object:
        return lies(site, prefix, told) or (told.error and f"no permit: {told.error!r}")

    kinds = sweep(site, tally, f"{site.store} publication, {name}", publish, plan, judge, chosen=is_tried)
    assert [kind.startswith("PUT") for kind in kinds if _is_of_parts(kind)].count(True) >= 3
    assert [kind for kind in kinds if "if none match" in kind] == [PROBE_PUT, PROBE_PUT, RECORD_PUT]


def _asked(kind: str) -> set[str]:
    return {*kind.partition("?")[2].split("&")}


def _is_of_parts(kind: str) -> bool:
    return kind.startswith("P") and bool(_asked(kind) & {"uploads", "uploadId", "blockid", "comp"})


# One fault


@pytest.mark.truth
@pytest.mark.parametrize("fault", SINGLE, ids=_name)
@on_all
def test_one_fault_anywhere_in_a_publication_is_overcome(site: Site, fault: Fault, tally: Tally) -> None:
    check_overcome(site, tally, f"one fault: {fault.value}", fault)


@pytest.mark.parametrize("fault", SINGLE, ids=_name)
@pytest.mark.parametrize("site", ["moto", "gcs"], indirect=True)
def test_one_fault_at_the_record_is_overcome(site: Site, fault: Fault, tally: Tally) -> None:
    check_overcome(site, tally, f"one fault: {fault.value}", fault, chosen=lambda kind: kind == RECORD_PUT)


@pytest.mark.truth
@pytest.mark.parametrize(("site", "fault"), READ_FAULTS, indirect=["site"], ids=_name)
def test_one_fault_anywhere_in_a_restore_is_overcome(site: Site, fault: Fault, tally: Tally) -> None:
    def judge(_: str, found: Any, __: int, ___: list[str]) -> object:
        return found and repr(found)

    plan = from_number(fault, 1)
    kinds = sweep(site, tally, f"{site.store} restore, one fault", restore, plan, judge, prefix=site.published())
    assert {kind for kind in kinds if "?" not in kind} == READ_KINDS


# Faults that last


@pytest.mark.truth
@pytest.mark.parametrize("fault", LASTING, ids=_name)
@on_all
def test_a_publication_without_answers_ends_in_an_error_that_is_true(site: Site, fault: Fault, tally: Tally) -> None:
    def judge(prefix: str, told: Told, number: int, kinds: list[str]) -> object:
        site.proxy.reset()
        held = CheckpointStore(site.storage(prefix)).start(JOB.job_id)
        if (held.ref.attempt_id if held else None) != site.attempt_of(prefix, 1):
            return f"a restart sees {held}"
        if told.error is None:
            return lies(site, prefix, told) or "a permit without an answer"
        if prefix not in str(told.error):
            return f"no sentence: {told.error!r}"
        if isinstance(told.error, StorageError) and RECORD_PUT in kinds[:number]:
            return f"{told.error!r} after the record was sent"
        return lies(site, prefix, told)

    name = f"{site.store} publication, no answer from one request on"
    sweep(site, tally, name, publish, from_number(fault), judge, **HASTY)


@pytest.mark.truth
@pytest.mark.parametrize("fault", LASTING, ids=_name)
@on_all
def test_three_faults_in_a_row_anywhere_in_a_publication_are_overcome(site: Site, fault: Fault, tally: Tally) -> None:
    check_overcome(site, tally, "three faults in a row", fault, 3)


@pytest.mark.truth
@pytest.mark.parametrize(("site", "fault"), READ_LASTING, indirect=["site"], ids=_name)
def test_a_restore_without_answers_ends_in_a_storage_error(site: Site, fault: Fault, tally: Tally) -> None:
    def judge(prefix: str, found: Any, _: int, __: list[str]) -> object:
        return not (isinstance(found, StorageError) and prefix in str(found)) and repr(found)

    name, plan = f"{site.store} restore, no answer from one request on", from_number(fault)
    sweep(site, tally, name, restore, plan, judge, prefix=site.published(), **HASTY)


# Servers that cannot be had


@pytest.mark.parametrize("site", ["moto", "gcs", pytest.param("rgw", marks=pytest.mark.truth)], indirect=True)
def test_a_server_that_ignores_the_condition_is_refused_at_first_use(site: Site, tally: Tally) -> None:
    prefix = uuid.uuid4().hex
    site.proxy.reset(lambda request: Fault.CONDITION_IGNORED if request.conditional else None)
    told = publish(site.storage(prefix))
    refused = isinstance(told.error, StorageError) and told.error.kind is ErrorKind.STORAGE_UNSUITABLE
    there = site.attempt_of(prefix, 1)
    tally.add(f"{site.store} that ignores the condition", tried=1, noticed=int(refused), wrong=int(not refused))
    assert refused
    assert "ignores If-None-Match" in str(told.error)
    assert there is None
    assert [seen.kind for seen, _ in site.proxy.spoilt] == [PROBE_PUT] * 2


# ---- the file sink on a real S3 server: rivals, faults at every request, and jobs that are killed

DRIVERS, ROUNDS = 4, 20
FAULTS = (Fault.LOST_ANSWER, Fault.ERROR_500_AFTER, Fault.CONFLICT, Fault.CUT_BODY)
SINKS_LASTING = (Fault.LOST_ANSWER, Fault.CUT_BEFORE)
SINKS_HASTY = {"connect_timeout": 2, "read_timeout": 5, "retries": {"total_max_attempts": 2}}
SINKS_CALM = {"connect_timeout": 2, "read_timeout": 30}


@pytest.fixture(scope="module")
def proxy(rgw: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(rgw) as made:
        yield made


@pytest.fixture
def outside(rgw: S3Server, monkeypatch: pytest.MonkeyPatch) -> Outside:
    monkeypatch.setattr(object_clients, "_PAUSE_SECONDS", 0.005)
    return Outside(rgw)


@pytest.mark.truth
def test_drivers_that_commit_at_once_all_succeed_and_every_row_is_there_once(
    outside: Outside, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    monkeypatch.setattr(s3_directory, "PART_BYTES", SMALL_PART_BYTES)
    draw = random.Random(11)
    drivers = [outside.sink(rows_per_file=200, compression="none") for _ in range(DRIVERS)]
    barrier = Barrier(DRIVERS)

    def commit(driver: Any, rows: pa.Table) -> None:
        barrier.wait(60)
        driver.commit(PERMIT, rows)

    expected = []
    with tally.trying(f"file sink: {DRIVERS} drivers commit the same files at once, rgw", tried=2 * ROUNDS):
        with ThreadPoolExecutor(DRIVERS) as pool:
            for number in range(ROUNDS):
                # So large that a file has several parts.
                raw = [draw.randbytes(900) for _ in range(400)]
                batch = pa.record_batch({"n": range(400 * number, 400 * number + 400), "raw": raw})
                rows = prepared_of(drivers[number % DRIVERS], batch, checkpoint_id=number + 1)
                expected += rows["path"].to_pylist()
                for done in [pool.submit(commit, driver, rows) for driver in drivers]:
                    done.result(60)
        assert outside.paths() == sorted(expected)
        assert len(expected) == 2 * ROUNDS
        assert outside.seen() == list(range(400 * ROUNDS))
        assert outside.uploads() == []


@pytest.mark.truth
def test_one_spoilt_request_is_nothing(outside: Outside, proxy: FaultProxy, tally: Tally) -> None:
    requests = _requests(outside, proxy)
    assert {"POST ?uploads", "PUT ?partNumber&uploadId", "POST ?uploadId", "HEAD"} <= {_kind(one) for one in requests}
    for fault in FAULTS:
        for number in range(len(requests)):
            proxy.spoil(number, fault)
            try:
                with tally.trying("file sink: one request spoilt, rgw"):
                    assert run(outside.server, proxy, SINKS_CALM, proxy.reset) == 0
            except (AssertionError, StorageError) as error:
                raise AssertionError(f"{fault.value} at request {number}, {_kind(requests[number])}") from error


@pytest.mark.truth
def test_a_run_that_fails_from_any_request_on_is_begun_again_and_repeats_nothing(
    outside: Outside, proxy: FaultProxy, tally: Tally
) -> None:
    requests = _requests(outside, proxy)
    for fault in SINKS_LASTING:
        for first in range(len(requests)):
            proxy.reset(_from(first, fault))
            try:
                with tally.trying("file sink: all requests spoilt from one on, rgw"):
                    assert run(outside.server, proxy, SINKS_HASTY, proxy.reset) == 1
            except (AssertionError, StorageError) as error:
                raise AssertionError(f"{fault.value} from request {first}, {_kind(requests[first])}") from error


def _requests(outside: Outside, proxy: FaultProxy) -> list[Request]:
    """Return the requests of an undisturbed run."""
    found: list[Request] = []
    proxy.reset()
    assert run(outside.server, proxy, SINKS_CALM, lambda: found.extend(proxy.requests)) == 0
    return found


def run(server: S3Server, proxy: FaultProxy, config: dict[str, Any], ended: Callable[[], object]) -> int:
    """Run a job of two checkpoints through the proxy; return how often it started again."""
    counts = (4, 4)
    fresh = Outside(server)
    sink = fresh.sink(proxy.endpoint, config_kwargs=config)
    count = run_to_the_end(sink, fresh.look, StorageError, counts=counts, failed=proxy.reset, ended=ended)
    assert fresh.uploads() == []
    assert fresh.seen() == rows_until(2, counts)
    return count


def _kind(request: Request) -> str:
    """Return the verb and the names in the query."""
    operation = "&".join(sorted(part.partition("=")[0] for part in request.query.split("&") if part))
    return f"{request.method} ?{operation}" if operation else request.method


def _from(first: int, fault: Fault) -> Callable[[Request], Fault | None]:
    return lambda request: fault if request.number >= first else None


@pytest.mark.truth
def test_a_part_that_is_changed_on_its_way_is_refused(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = outside.sink()
    call = S3Uploads._call

    def spoilt(self: Any, method: str, **arguments: Any) -> Any:
        changed = {"Body": arguments["Body"][:-1] + b"?"} if method == "upload_part" else {}
        return call(self, method, **{**arguments, **changed})

    with monkeypatch.context() as patched:
        patched.setattr(S3Uploads, "_call", spoilt)
        with pytest.raises(StorageError, match=r"cannot write part-.*BadDigest"):
            prepared_of(sink, 1, 2)
    assert outside.uploads() == []
    sink.commit(PERMIT, prepared_of(sink, 1, 2))
    assert outside.seen() == [1, 2]


@pytest.mark.truth
@pytest.mark.parametrize("seed", [0, 1])
def test_a_job_that_is_killed_and_rescaled_writes_every_row_once(
    outside: Outside, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    draw, total, shards = random.Random(seed), 900, 3
    mortal = Mortal(monkeypatch)
    expected = sorted(n for _ in range(shards) for n in range(total // shards))
    shown: list[int] = []
    crashes = 0
    for life in range(80):
        flow = Dataflow("numbers")
        numbers = flow.source(RateSource(rows_per_read=20, total=total, shards=shards), uid="in", event_time="at")
        numbers.apply(outside.sink(rows_per_file=25), uid="out")
        store = sf.open(str(tmp_path / "store"), durable=False)
        options = {"checkpoint_interval_us": None, "checkpoint_rows": 90, "parallelism": draw.randrange(1, 5)}
        # The process dies between two steps, or at a request.
        mortal.live(draw.randrange(5, 120))
        try:
            run = LocalRuntime(store, seed=life, **options).begin(flow)
            if isinstance(run, JobOutcome):
                break
            for _ in range(draw.randrange(10, 90)):
                if not run.step():
                    break
        except (Crash, CheckpointError, RunDiscarded) as error:
            if "Crash" not in repr(error):
                raise
            crashes += 1
        before, shown = shown, outside.seen()
        assert not Counter(before) - Counter(shown)
        assert not Counter(shown) - Counter(expected)
    assert life > 2
    assert crashes
    assert shown == expected
    assert outside.sink().clean("out", 10**6) == []


@pytest.mark.truth
def test_a_bucket_of_the_server_lists_only_what_is_committed(outside: Outside) -> None:
    sink = outside.sink()
    rows = prepared_of(sink, 1)
    listed = outside.server.client.list_object_versions(Bucket=BUCKET, Prefix=outside.prefix)
    assert "Versions" not in listed
    assert outside.paths() == []
    sink.commit(PERMIT, rows)
    assert outside.paths() == rows["path"].to_pylist()


# ---- every new tool on a real S3 server: one job's store, compared with itself on local disk

JOB_OF_TOOLS = """
import pyarrow as pa

from stateformat.backends.connectors import CollectSink, RateSource
from stateformat.backends.dataflow import Dataflow

KEYS = 6000


def numbers():
    flow = Dataflow("numbers", parallelism=2)
    rows = flow.source(RateSource(rows_per_second=12_000, shards=2), uid="numbers", event_time="at")
    keys = rows.map(lambda batch: keyed(batch), {"key": pa.int64()}, uid="keys")
    counts = keys.key_by("key").aggregate({"rows": ("*", "count")}, emit="end", uid="counts")
    counts.apply(CollectSink(), uid="out")
    return flow


def keyed(batch):
    # So far apart that they do not pack: each subtask's segment is an object.
    return pa.record_batch({"key": pa.array(batch["n"].to_numpy() % KEYS * 0x9E3779B97F4A7C1)})
"""
KEY = 5 * 0x9E3779B97F4A7C1
WAIT_SECONDS = 120
COUNTS = ("--operator", "counts", "--state", "totals")
"""The state of the job that is looked into."""


class Place(NamedTuple):
    """Where the store is: its URL, the options of ``ckpt``, how to remove an object from it, and
    the sizes of its objects by path, as the storage itself reports them.
    """

    url: str
    options: tuple[str, ...]
    lose: Callable[[str], object]
    sizes: Callable[[], dict[str, int]]

    def asked(self, command: str, *rest: object, at: str = "", status: int = 0) -> Any:
        """Return the document of a command, without what differs between the two places."""
        found = document(command, f"{self.url}{at}", *rest, *self.options, status=status)
        text = json.dumps(found).replace(self.url, "STORE")
        return json.loads(re.sub(r'("moved": )\{[^{}]*\}', r"\1null", text))

    def open(self) -> Checkpoint:
        """The newest checkpoint."""
        return sf.open(self.url).open()


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "numbers_job.py").write_text(JOB_OF_TOOLS)
    return f"{tmp_path / 'numbers_job.py'}:numbers"


@pytest.fixture
def places(rgw: S3Server, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    """Return the same store twice: on local disk, and on the server (with credentials set)."""
    for name, value in (("ACCESS_KEY_ID", rgw.key), ("SECRET_ACCESS_KEY", rgw.secret), ("DEFAULT_REGION", rgw.region)):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", rgw.endpoint)
    folder, prefix = tmp_path / "store", f"{uuid.uuid4().hex}/store"
    with running(job, str(folder)):
        until(lambda: len([*folder.glob("checkpoints/*.json")]) >= 4)
        assert document("stop", folder)["outcome"] == "stopped"

    def local_sizes() -> dict[str, int]:
        return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}

    def remote_sizes() -> dict[str, int]:
        pages = rgw.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/")
        objects = [each for found in pages for each in found.get("Contents", ())]
        sizes = {each["Key"].removeprefix(f"{prefix}/"): each["Size"] for each in objects}
        # The probe of a storage is not an object of the store (SPEC.md section 2).
        return {path: size for path, size in sizes.items() if not path.endswith(".probe")}

    for path in local_sizes():
        rgw.client.put_object(Bucket=BUCKET, Key=f"{prefix}/{path}", Body=(folder / path).read_bytes())
    return [
        Place(folder.as_uri(), (), lambda path: (folder / path).unlink(), local_sizes),
        Place(
            f"s3://{BUCKET}/{prefix}",
            ("--endpoint-url", rgw.endpoint),
            lambda path: rgw.client.delete_object(Bucket=BUCKET, Key=f"{prefix}/{path}"),
            remote_sizes,
        ),
    ]


@contextmanager
def running(job: str, url: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``ckpt run`` in a separate process; it must end well after the block."""
    command = [str(CKPT), "run", job, url, "--seconds-per-epoch", "0.4", "--keep", "all", "--progress", "none"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
        out, err = process.communicate(timeout=WAIT_SECONDS)
        assert process.returncode == 0, out + err
    finally:
        process.kill()
        process.wait()


def until(fine: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not fine():
        assert time.monotonic() < end
        time.sleep(0.05)


def looked_at(place: Place) -> dict[str, Any]:
    """Return what the read-only commands say about a store with pins ``early`` and ``newest``."""
    return {
        "history": place.asked("history"),
        "diff of a pin": place.asked("diff", "@2", at="@early"),
        "diff": place.asked("diff", f"{place.url}@newest", "--rows", 3, at="@early", status=1),
        "get": place.asked("get", *COUNTS, "--key", KEY, "--all"),
        "top": place.asked("top", *COUNTS),
        "inspect": place.asked("inspect", at="@newest"),
        "validate": place.asked("validate", "--all", "--level", "full"),
    }


def repaired(place: Place, lost: str) -> dict[str, Any]:
    """Lose a segment, and repair it from a pin."""
    place.lose(lost)
    told = {
        "damage": place.asked("validate", status=1),
        "ways out": place.asked("repair", status=1),
        "repair": place.asked("repair", "--restore-from", f"{place.url}@newest", "--yes"),
        "whole": place.asked("validate", "--newest-whole", "--level", "full"),
    }
    assert lost in place.sizes()
    return told


def reported(place: Place, file: Path) -> dict[str, Any]:
    """Return the facts of a report, without when and where it was made, and shared bytes."""
    told = place.asked("report", "--to", file, "--level", "full")
    assert (told["size_bytes"], file.read_text().count("</html>")) == (file.stat().st_size, 1)
    return {name: told[name] for name in told if name not in ("made_at", "made_at_us", "sizes", "size_bytes")}


def same(one: dict[str, Any], other: dict[str, Any], tally: Tally) -> None:
    """Check that the answers are equal; each counts as one try."""
    wrong = {name: list(differing(one[name], other[name])) for name in one if one[name] != other[name]}
    tally.add("tools: same answers on rgw as on local disk", tried=len(one), wrong=len(wrong))
    assert not wrong, json.dumps(wrong, indent=1)


def differing(one: Any, other: Any, at: str = "") -> Iterator[str]:
    """Yield the places where two documents differ, and their values there."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for name in one:
            yield from differing(one[name], other[name], f"{at}.{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from differing(*pair, f"{at}[{index}]")
    elif one != other:
        yield f"{at}: {one!r} and {other!r}"


def costs(local: Any, remote: Any) -> None:
    """Check that what pins share by links on local disk is copied, and paid for, on the server."""
    assert local["shared_bytes"] > 0 == remote["shared_bytes"]
    assert local["bytes"] + local["shared_bytes"] == remote["bytes"]
    assert remote["price"]["month"] == pytest.approx(remote["bytes"] / 1e9 * 0.02)
    for part in ("folders", "checkpoints", "states"):
        whole = [[each["bytes"] for each in found[part]] for found in (local, remote)]
        assert whole[0] == whole[1]


def counted_and_read(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return how many rows the job has counted, and how many its sources have read."""
    counts, splits = checkpoint.state("counts", "totals"), checkpoint.state("numbers", "splits")
    return total(counts.batches(), "rows"), total(splits.batches(), "position")


def total(batches: Iterable[pa.RecordBatch], column: str) -> int:
    return sum(sum(batch[column].to_pylist()) for batch in batches)


def goes_on(place: Place, job: str, tally: Tally) -> None:
    """Go on with the job: a savepoint, a rescale, a stop. Every row is counted exactly once."""
    with tally.trying("tools: a job on rgw and on local disk is asked", tried=3):
        with running(job, place.url, "--resume"):
            saved = place.asked("savepoint")
            assert saved["outcome"] == "saved"
            rescaled = place.asked("rescale", "--running", "--operator-parallelism", "counts=3")
            assert rescaled["outcome"] == "rescaled"
            assert place.asked("stop")["outcome"] == "stopped"
        newest = place.open()
        assert {op.uid: op.parallelism for op in newest.graph.operators}["counts"] == 3
        counted, read = counted_and_read(newest)
        assert counted == read > 0
        made = {each["name"] for each in place.asked("history")["savepoints"]}
        assert len(made) == 2 + 1 + 3


def cleaned(place: Place) -> None:
    """Remove the pins and collect: only what is old goes, and ``du`` agrees with the storage."""
    for name in ("early", "newest"):
        place.asked("unpin", name)

    def freed() -> int:
        place.asked("gc", "--older-than", "1s", "--delete")
        return len(place.asked("history")["checkpoints"])

    until(lambda: freed() == 1)
    sizes, told = place.sizes(), place.asked("du")
    assert (told["objects"], told["bytes"] + told["shared_bytes"]) == (len(sizes), sum(sizes.values()))
    assert place.asked("validate", "--all", "--level", "full")["ok"]


@pytest.mark.truth
def test_every_tool_says_the_same_of_a_store_on_a_real_server(
    places: list[Place], job: str, tmp_path: Path, tally: Tally
) -> None:
    local, remote = places
    for place in places:
        assert place.asked("pin", "early", at="@2")["made"]
        assert place.asked("pin", "newest")["checkpoint_id"] >= 4
    same(looked_at(local), looked_at(remote), tally)
    costs(*(place.asked("du", "--keep", 1, "--price", 0.02) for place in places))
    lost = set(local.open().handles["path"].to_pylist()) & local.sizes().keys()
    same(repaired(local, max(lost)), repaired(remote, max(lost)), tally)
    reports = [reported(place, tmp_path / "report.html") for place in places]
    same({"report": reports[0]}, {"report": reports[1]}, tally)
    for place in places:
        goes_on(place, job, tally)
        cleaned(place)
