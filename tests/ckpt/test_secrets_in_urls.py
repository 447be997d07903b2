"""A secret in a URL is refused or cut: it stands in no message, record, request, answer or log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import stateformat as sf
from stateformat.backends.connectors import FileSink
from stateformat.backends.connectors.sql.staging import staging_at
from stateformat.backends.local import LocalRuntime
from stateformat.errors import CheckpointError, InvalidInput, StorageError
from stateformat.model import StopMode
from stateformat.paths import request_path
from stateformat.requests import JobRequest, RequestKind, RequestOutcome, encode_request
from tests.ckpt.ckpt_runs import failure
from tests.local_jobs import Bench, settle
from tests.local_stops import SUSPEND, Job

SECRET = "hunter2"
URLS = [
    f"gs://KEY:{SECRET}@bucket/x",
    f"s3://KEY:{SECRET}@bucket/x",
    f"s3://KEY:a/{SECRET}@bucket",
    f"az://x?sig={SECRET}",
]


DOORS: dict[str, Callable[[str], object]] = {
    "open": sf.open,
    "request": lambda url: Bench().store.request_stop(StopMode.DRAIN, url),
    "run": lambda url: Job().saved_once().request_stop(SUSPEND, url),
    "start_from": lambda url: LocalRuntime(sf.open("memory://x"), start_from=url),
    "sink": FileSink,
}


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("door", DOORS)
def test_a_door_refuses_it_and_does_not_repeat_it(door: str, url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        DOORS[door](url)
    assert SECRET not in f"{caught.value} {caught.value.details}"


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("command", [["inspect"], ["history"], ["rollback"], ["gc"]])
def test_no_command_repeats_it(command: list[str], url: str) -> None:
    assert SECRET not in str(failure(*command, url, status=2))


def test_a_request_with_one_is_refused_by_the_run_and_its_url_goes_no_further(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    bench, run = job.bench, job.saved_once()
    asked = JobRequest(RequestKind.STOP, "a" * 32, 1, URLS[1], mode=SUSPEND)
    bench.storage.create(request_path(1, asked.id), encode_request(asked))
    bench.clock.wait_until(bench.clock.now_us() + 2_000_000)
    settle(run)
    answer = bench.store.request_answer(asked.id)
    assert answer is not None
    assert answer.outcome is RequestOutcome.REFUSED
    assert bench.newest_id == 1, "the job goes on"
    assert SECRET not in answer.message + caplog.text


def test_a_staging_place_is_named_without_it(tmp_path: Path) -> None:
    staging = staging_at(f"ftp://user:{SECRET}@localhost:1/{tmp_path.name}", {}, durable=False)
    assert SECRET not in str(staging)
    with pytest.raises((StorageError, CheckpointError)) as caught:
        staging.read("x")
    assert SECRET not in str(caught.value)
