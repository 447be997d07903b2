"""What ``ckpt inspect s3://…`` says where it cannot be done: one sentence with the next step, soon, and status 3."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stateformat.errors import StorageError
from stateformat.storage import open_storage
from stateformat.store import CheckpointStore
from tests.ckpt.ckpt_runs import run
from tests.servers.fake_s3 import KEY, SECRET, Fake, options_for

pytestmark = pytest.mark.s3

SOON_SECONDS = 30


@pytest.fixture(scope="module")
def fake() -> Iterator[Fake]:
    server = Fake()
    yield server
    server.stop()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """As on a machine that is none of Amazon's, with credentials."""
    none = str(tmp_path / "none")
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": none,
        "AWS_CONFIG_FILE": none,
    }


def told(endpoint: str, environment: dict[str, str], status: int = 3) -> str:
    """The one line on standard error."""
    begun = time.monotonic()
    found = run("inspect", "s3://bucket/job", "--endpoint-url", endpoint, **environment)
    assert time.monotonic() - begun < SOON_SECONDS
    assert (found.status, found.out) == (status, "")
    assert len(found.err.splitlines()) == 1, found.err
    assert SECRET not in found.err
    return found.err


REFUSED = [
    ((403, "AccessDenied"), "not permitted (AccessDenied). Check that the key has the right s3:ListBucket on 'bucket'"),
    ((403, "InvalidAccessKeyId"), "the credentials were refused (InvalidAccessKeyId). Check key, secret"),
    ((403, "RequestTimeTooSkewed"), "the clocks of this machine and of the server differ too much"),
    ((400, "AuthorizationHeaderMalformed"), "the bucket 'bucket' is in another region"),
    ((301, "Moved"), "the request was redirected"),
    ((404, "NoSuchBucket"), "there is no bucket 'bucket'. Create it, or check the URL and the endpoint"),
    ((404, "NotFound"), "what answers there is no S3 server"),
]


@pytest.mark.parametrize(("answer", "sentence"), REFUSED, ids=[answer[1] for answer, _ in REFUSED])
def test_what_the_server_refuses_is_told(
    fake: Fake, environment: dict[str, str], answer: tuple[int, str], sentence: str
) -> None:
    fake.reset()
    fake.everything = answer
    assert f"ckpt: cannot list checkpoints/ in s3://bucket/job at {fake.endpoint}: {sentence}" in told(
        fake.endpoint, environment
    )


@pytest.mark.parametrize("client", ["obstore", "s3fs"])
@pytest.mark.parametrize(("answer", "sentence"), REFUSED[:4], ids=[answer[1] for answer, _ in REFUSED[:4]])
def test_whatever_client_reads_says_the_same(fake: Fake, client: str, answer: tuple[int, str], sentence: str) -> None:
    fake.reset()
    fake.everything = answer
    storage = open_storage("s3://bucket/job", **options_for(fake.endpoint, client=client))
    record = "checkpoints/00000000000000000001.json"
    for work in (lambda: storage.read(record), CheckpointStore(storage).history):
        with pytest.raises(StorageError) as raised:
            work()
        assert sentence.partition(" that the key")[0] in str(raised.value)


def test_missing_credentials_are_told_before_anything_is_sent(fake: Fake, environment: dict[str, str]) -> None:
    fake.reset()
    without = {**environment, "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    assert "there are no usable credentials" in told(fake.endpoint, without)
    assert "there are no usable credentials (ProfileNotFound)" in told(
        fake.endpoint, {**environment, "AWS_PROFILE": "nobody"}
    )
    assert fake.log == []


def test_a_server_that_cannot_be_reached_is_told_soon(environment: dict[str, str]) -> None:
    with socket.socket() as reserved:
        # Bound and not listening: nobody else gets the port, and a connection is refused.
        reserved.bind(("127.0.0.1", 0))
        line = told(f"http://127.0.0.1:{reserved.getsockname()[1]}", environment)
    assert "no connection (EndpointConnectionError). Check endpoint_url" in line
    assert "no connection (EndpointConnectionError). Check endpoint_url" in told("http://nowhere.invalid", environment)


@pytest.mark.parametrize("endpoint", ["localhost:9000", "http://", "user:hunter2@localhost"])
def test_an_endpoint_that_is_no_url_is_misuse(environment: dict[str, str], endpoint: str) -> None:
    line = told(endpoint, environment, status=2)
    assert "is no URL. Write http:// or https://" in line
    assert "hunter2" not in line


def test_an_endpoint_of_a_configuration_file_that_is_no_url_is_told(environment: Any, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("[default]\nendpoint_url = localhost:9000\n")
    found = run("inspect", "s3://bucket/job", **{**environment, "AWS_CONFIG_FILE": str(config)})
    assert found.status == 3
    assert "Invalid endpoint: localhost:9000. Check the options" in found.err
