"""Faults between a run and its S3 server: what the run is told is what the server has.

A proxy spoils requests. The server itself is asked for the truth, past the proxy. An undisturbed
publication, or restore, counts the requests; then each of them is spoilt in each way. One spoilt
request has no effect. If every request is spoilt, the error has a sentence, and it is true.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from stateformat import paths as layout
from stateformat.backends.storage import object_clients, objects
from stateformat.errors import ErrorKind, OutcomeUnknown, PublishConflict, StorageError
from stateformat.graph import JobGraph, Partitioner
from stateformat.model import CheckpointId
from stateformat.states import declare
from stateformat.storage import Storage, open_storage
from stateformat.store import CheckpointStore
from stateformat.validation import validate
from tests.servers.fault_proxy import SINGLE, Fault, FaultProxy, Plan
from tests.servers.server import BUCKET, S3Server
from tests.tally import Tally
from tests.worlds.stores import Job, edge, operator, owned

pytestmark = pytest.mark.s3

CLIENT = {"connect_timeout": 2, "read_timeout": 0.6}
"""Longer than a slow answer, so that it is not a fault, and short enough to wait for."""
CALM = {"read_timeout": 30}
"""For counting the requests of undisturbed work, on a machine that may be busy."""
HASTY = {"retries": {"total_max_attempts": 2}}
"""For faults that last."""
BLOB_BYTES = 1024


class Site(NamedTuple):
    """A server, and the proxy in front of it; ``prefix``: of the store that is read."""

    name: str
    server: S3Server
    proxy: FaultProxy
    prefix: str

    def storage(self, prefix: str, **config: Any) -> Storage:
        """A store as the run sees it, through the proxy."""
        options = self.server.options(self.proxy.endpoint, config_kwargs={**CLIENT, **config})
        return open_storage(f"s3://{BUCKET}/{prefix}", **options)

    def directly(self, prefix: str) -> Storage:
        """The same store without the proxy."""
        return open_storage(f"s3://{BUCKET}/{prefix}", **self.server.options())

    def published(self) -> str:
        """The prefix of a store with one checkpoint."""
        storage = self.directly(self.prefix)
        if not storage.exists():
            told = publish(storage, READ_ROWS)
            assert told.error is None
        return self.prefix

    def attempt_of(self, prefix: str, checkpoint_id: int) -> str | None:
        """Whose record the server has under an id, past the library."""
        key = f"{prefix}/{layout.record_path(CheckpointId(checkpoint_id))}"
        listed = self.server.client.list_objects_v2(Bucket=BUCKET, Prefix=key)
        if not listed.get("Contents"):
            return None
        body = self.server.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return str(json.loads(body)["attempt_id"])


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
        server: S3Server = request.getfixturevalue(request.param)
        proxy = FaultProxy(server).__enter__()
        sites[request.param] = Site(request.param, server, proxy, f"read-{uuid.uuid4().hex}")
    monkeypatch.setattr(objects, "PART_BYTES", 1 << 18)
    monkeypatch.setattr(objects, "_READ_BYTES", 1 << 16)
    monkeypatch.setattr(object_clients, "_PAUSE_SECONDS", 0.01)
    yield sites[request.param]
    sites[request.param].proxy.reset()


on_both = pytest.mark.parametrize("site", ["moto", "rgw"], indirect=True)

RECORD_PUT, PROBE_PUT = "PUT checkpoints if none match", "PUT .probe if none match"
READ_KINDS = {"GET ?list-type&prefix", "HEAD checkpoints", "HEAD segments"} | {
    f"GET {folder}" for folder in ("checkpoints", "manifests", "segments")
}
READ_FAULTS = [("rgw", fault) for fault in SINGLE if fault not in (Fault.ERROR_500_AFTER, Fault.LATE)] + [
    ("moto", fault) for fault in (Fault.CUT_BEFORE, Fault.CONFLICT, Fault.STALLED, Fault.CUT_BODY)
]
"""To a reader, the other two are like one of these.

The mock server is slow, and the faults are the proxy's.
"""
LASTING = (Fault.LOST_ANSWER, Fault.CUT_BEFORE, Fault.ERROR_500_AFTER, Fault.CONFLICT)
READ_LASTING = [("rgw", Fault.CUT_BEFORE), ("rgw", Fault.SLOW_DOWN), ("rgw", Fault.CUT_BODY), ("moto", Fault.CUT_BODY)]


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
    site: Site, tally: Tally, name: str, plan: Callable[[int], Plan], chosen: Callable[[str], bool] = lambda kind: True
) -> None:
    def judge(prefix: str, told: Told, _: int, __: list[str]) -> object:
        return lies(site, prefix, told) or (told.error and f"no permit: {told.error!r}")

    kinds = sweep(site, tally, name, publish, plan, judge, chosen=chosen)
    assert kinds.count("PUT segments?partNumber&uploadId") == 3
    assert [kind for kind in kinds if "if none match" in kind] == [PROBE_PUT, PROBE_PUT, RECORD_PUT]


# One fault


@pytest.mark.truth
@pytest.mark.parametrize("fault", SINGLE, ids=_name)
@on_both
def test_one_fault_anywhere_in_a_publication_is_overcome(site: Site, fault: Fault, tally: Tally) -> None:
    check_overcome(site, tally, f"S3 publication, one fault: {fault.value}", from_number(fault, 1))


@pytest.mark.parametrize("fault", SINGLE, ids=_name)
@pytest.mark.parametrize("site", ["moto"], indirect=True)
def test_one_fault_at_the_record_is_overcome(site: Site, fault: Fault, tally: Tally) -> None:
    name = f"S3 publication, one fault: {fault.value}"
    check_overcome(site, tally, name, from_number(fault, 1), lambda kind: kind == RECORD_PUT)


@pytest.mark.truth
@pytest.mark.parametrize(("site", "fault"), READ_FAULTS, indirect=["site"], ids=_name)
def test_one_fault_anywhere_in_a_restore_is_overcome(site: Site, fault: Fault, tally: Tally) -> None:
    def judge(_: str, found: Any, __: int, ___: list[str]) -> object:
        return found and repr(found)

    plan = from_number(fault, 1)
    kinds = sweep(site, tally, "S3 restore, one fault", restore, plan, judge, prefix=site.published())
    assert set(kinds) == READ_KINDS


# Faults that last


@pytest.mark.truth
@pytest.mark.parametrize("fault", LASTING, ids=_name)
@on_both
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

    sweep(site, tally, "S3 publication, no answer from one request on", publish, from_number(fault), judge, **HASTY)


@pytest.mark.truth
@pytest.mark.parametrize("fault", LASTING, ids=_name)
@on_both
def test_three_faults_in_a_row_anywhere_in_a_publication_are_overcome(site: Site, fault: Fault, tally: Tally) -> None:
    check_overcome(site, tally, "S3 publication, three faults in a row", from_number(fault, 3))


@pytest.mark.truth
@pytest.mark.parametrize(("site", "fault"), READ_LASTING, indirect=["site"], ids=_name)
def test_a_restore_without_answers_ends_in_a_storage_error(site: Site, fault: Fault, tally: Tally) -> None:
    def judge(prefix: str, found: Any, _: int, __: list[str]) -> object:
        return not (isinstance(found, StorageError) and prefix in str(found)) and repr(found)

    name, plan = "S3 restore, no answer from one request on", from_number(fault)
    sweep(site, tally, name, restore, plan, judge, prefix=site.published(), **HASTY)


# Servers that cannot be had


@pytest.mark.parametrize("site", ["moto", pytest.param("rgw", marks=pytest.mark.truth)], indirect=True)
def test_a_server_that_ignores_the_condition_is_refused_at_first_use(site: Site, tally: Tally) -> None:
    prefix = uuid.uuid4().hex
    site.proxy.reset(lambda request: Fault.CONDITION_IGNORED if request.conditional else None)
    told = publish(site.storage(prefix))
    refused = isinstance(told.error, StorageError) and told.error.kind is ErrorKind.STORAGE_UNSUITABLE
    there = site.attempt_of(prefix, 1)
    tally.add("S3 server that ignores If-None-Match", tried=1, noticed=int(refused), wrong=int(not refused))
    assert refused
    assert "ignores If-None-Match" in str(told.error)
    assert there is None
    assert [seen.kind for seen, _ in site.proxy.spoilt] == [PROBE_PUT] * 2
