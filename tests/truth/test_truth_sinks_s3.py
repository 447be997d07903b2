"""The file sink on a real S3 server: rivals, faults at every request, and jobs that are killed.

The server itself is asked for the truth, past the proxy and the library. An undisturbed run counts
the requests. Then each of them is spoilt once, in each way, which must have no effect. Then all
requests from each one on are spoilt, so that the run fails and starts again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends.connectors import RateSource
from stateformat.backends.connectors.sinks import s3_directory
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import LocalRuntime
from stateformat.backends.runtime import JobOutcome, RunDiscarded
from stateformat.backends.storage import object_clients
from stateformat.backends.storage.s3 import S3Uploads
from stateformat.errors import CheckpointError, StorageError
from tests.connectors.sink_s3 import Mortal, Outside
from tests.connectors.sink_steps import PERMIT, Crash, prepared_of, rows_until, run_to_the_end
from tests.servers.fault_proxy import Fault, FaultProxy, Request
from tests.servers.server import BUCKET, SMALL_PART_BYTES, S3Server
from tests.tally import Tally

pytestmark = [pytest.mark.truth, pytest.mark.s3]

DRIVERS, ROUNDS = 4, 20
FAULTS = (Fault.LOST_ANSWER, Fault.ERROR_500_AFTER, Fault.CONFLICT, Fault.CUT_BODY)
LASTING = (Fault.LOST_ANSWER, Fault.CUT_BEFORE)
HASTY = {"connect_timeout": 2, "read_timeout": 5, "retries": {"total_max_attempts": 2}}
CALM = {"connect_timeout": 2, "read_timeout": 30}


@pytest.fixture(scope="module")
def proxy(rgw: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(rgw) as made:
        yield made


@pytest.fixture
def outside(rgw: S3Server, monkeypatch: pytest.MonkeyPatch) -> Outside:
    monkeypatch.setattr(object_clients, "_PAUSE_SECONDS", 0.005)
    return Outside(rgw)


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


def test_one_spoilt_request_is_nothing(outside: Outside, proxy: FaultProxy, tally: Tally) -> None:
    requests = _requests(outside, proxy)
    assert {"POST ?uploads", "PUT ?partNumber&uploadId", "POST ?uploadId", "HEAD"} <= {_kind(one) for one in requests}
    for fault in FAULTS:
        for number in range(len(requests)):
            proxy.spoil(number, fault)
            try:
                with tally.trying("file sink: one request spoilt, rgw"):
                    assert run(outside.server, proxy, CALM, proxy.reset) == 0
            except (AssertionError, StorageError) as error:
                raise AssertionError(f"{fault.value} at request {number}, {_kind(requests[number])}") from error


def test_a_run_that_fails_from_any_request_on_is_begun_again_and_repeats_nothing(
    outside: Outside, proxy: FaultProxy, tally: Tally
) -> None:
    requests = _requests(outside, proxy)
    for fault in LASTING:
        for first in range(len(requests)):
            proxy.reset(_from(first, fault))
            try:
                with tally.trying("file sink: all requests spoilt from one on, rgw"):
                    assert run(outside.server, proxy, HASTY, proxy.reset) == 1
            except (AssertionError, StorageError) as error:
                raise AssertionError(f"{fault.value} from request {first}, {_kind(requests[first])}") from error


def _requests(outside: Outside, proxy: FaultProxy) -> list[Request]:
    """Return the requests of an undisturbed run."""
    found: list[Request] = []
    proxy.reset()
    assert run(outside.server, proxy, CALM, lambda: found.extend(proxy.requests)) == 0
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


def test_a_bucket_of_the_server_lists_only_what_is_committed(outside: Outside) -> None:
    sink = outside.sink()
    rows = prepared_of(sink, 1)
    listed = outside.server.client.list_object_versions(Bucket=BUCKET, Prefix=outside.prefix)
    assert "Versions" not in listed
    assert outside.paths() == []
    sink.commit(PERMIT, rows)
    assert outside.paths() == rows["path"].to_pylist()
