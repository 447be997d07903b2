"""``ckpt`` on S3: the same commands on a store that is a URL, with the server and credentials given as users give them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import botocore.session
import pytest
from moto.server import ThreadedMotoServer

from tests import stores
from tests.ckpt_runs import document, failure, page

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A mock server with the bucket ``ckpt-bucket``."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    session = botocore.session.Session()
    client = session.create_client(
        "s3", endpoint_url=url, aws_access_key_id="AKID", aws_secret_access_key="secret", region_name="us-east-1"
    )
    client.create_bucket(Bucket="ckpt-bucket")
    yield url
    server.stop()


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def test_a_store_goes_to_s3_and_back(endpoint: str, tmp_path: Path) -> None:
    stores.flights_store(str(tmp_path / "flights"))
    remote = f"s3://ckpt-bucket/{uuid.uuid4().hex}@2/copy"
    there = ("--endpoint-url", endpoint)
    copied = document("copy", tmp_path / "flights", remote, *there)
    assert (copied["store"], copied["checkpoint_id"], copied["kind"]) == (remote, 2, "savepoint")
    assert document("validate", f"{remote}@2", "--level", "full", *there)["ok"]
    assert document("rescale", remote, "--parallelism", 3, *there)["checkpoint_id"] == 3
    assert "rescale" in page("history", remote, *there)
    page("copy", f"{remote}@3", tmp_path / "back", *there)
    whole = document("inspect", tmp_path / "back")
    assert (whole["checkpoint_id"], whole["kind"], whole["totals"]["rows"]) == (3, "savepoint", 412)


def test_a_bucket_or_server_that_is_not_there_is_told(endpoint: str) -> None:
    assert failure("history", "s3://no-such-bucket/x", "--endpoint-url", endpoint, status=3)["kind"] in (
        "store_not_found",
        "storage_failed",
    )
    assert failure("history", "s3://ckpt-bucket/nothing", "--endpoint-url", endpoint, status=3)["kind"] in (
        "store_not_found",
        "store_empty",
    )
