"""``ckpt`` on S3: the same commands on a store that is a URL, with the server and credentials given
as users give them."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.ckpt.ckpt_runs import document, failure, page, words
from tests.servers.server import BUCKET, S3Server
from tests.worlds import stores

pytestmark = pytest.mark.s3


@pytest.fixture
def endpoint(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The mock server's address. Who may write there stands in the environment, as it does for
    users."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret)
    monkeypatch.setenv("AWS_DEFAULT_REGION", moto.region)
    return moto.endpoint


def test_a_store_goes_to_s3_and_back(endpoint: str, tmp_path: Path) -> None:
    stores.flights_store(str(tmp_path / "flights"))
    remote = f"s3://{BUCKET}/{uuid.uuid4().hex}@2/copy"
    there = ("--endpoint-url", endpoint)
    copied = document("copy", tmp_path / "flights", remote, *there)
    assert (copied["store"], copied["checkpoint_id"], copied["kind"]) == (remote, 2, "savepoint")
    assert document("validate", f"{remote}@2", "--level", "full", *there)["ok"]
    assert document("rescale", remote, "--parallelism", 3, *there)["checkpoint_id"] == 3
    assert "rescale" in page("history", remote, *there)
    page("copy", f"{remote}@3", tmp_path / "back", *there)
    whole = document("inspect", tmp_path / "back")
    assert (whole["checkpoint_id"], whole["kind"], whole["totals"]["rows"]) == (3, "savepoint", 412)


def test_a_pin_on_s3_is_copied_by_the_server_read_by_its_name_and_removed(endpoint: str, tmp_path: Path) -> None:
    stores.flights_store(str(tmp_path / "flights"))
    remote, there = f"s3://{BUCKET}/{uuid.uuid4().hex}@x/store", ("--endpoint-url", endpoint)
    page("copy", tmp_path / "flights", remote, *there)
    made = document("pin", f"{remote}@2", "before-fix", *there)
    assert made["store"] == f"{remote}/savepoints/before-fix"
    assert made["moved"]["server_bytes"] == made["moved"]["bytes"]
    assert document("inspect", f"{remote}@before-fix", *there)["checkpoint_id"] == 2
    assert document("validate", f"{remote}@before-fix", "--level", "full", *there)["ok"]
    page("copy", f"{remote}@before-fix", tmp_path / "back", *there)
    assert document("unpin", f"{remote}@before-fix", *there)["removed"]["checkpoint_id"] == 2
    assert document("history", remote, *there)["savepoints"] == []


def test_a_bucket_or_server_that_is_not_there_is_told(endpoint: str) -> None:
    assert failure("history", "s3://no-such-bucket/x", "--endpoint-url", endpoint, status=3)["kind"] in (
        "store_not_found",
        "storage_refused",
    )
    assert failure("history", f"s3://{BUCKET}/nothing", "--endpoint-url", endpoint, status=3)["kind"] in (
        "store_not_found",
        "store_empty",
    )


def test_a_report_comes_from_s3_and_goes_there(endpoint: str, tmp_path: Path) -> None:
    stores.flights_store(str(tmp_path / "flights"))
    remote, there = f"s3://{BUCKET}/{uuid.uuid4().hex}", ("--endpoint-url", endpoint)
    page("copy", tmp_path / "flights", f"{remote}/store", *there)
    target = f"{remote}/pages/report.html"
    written = document("report", f"{remote}/store", "--to", target, *there)
    assert (written["path"], written["checkpoint"]["checkpoint_id"]) == (target, 2)
    told = page("report", f"{remote}/store", "--to", str(tmp_path / "page.html"), *there)
    assert "no problems" in told
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert "exists; give another name, or replace it (--force)" in words(
        "report", f"{remote}/store", "--to", target, *there, status=2
    )
    page("report", f"{remote}/store", "--to", target, "--force", *there)


def test_a_prefix_with_checkpoints_below_it_is_told_with_those(endpoint: str, tmp_path: Path) -> None:
    remote, there = f"s3://{BUCKET}/{uuid.uuid4().hex}", ("--endpoint-url", endpoint)
    stores.counts_store(str(tmp_path / "store"))
    for name in ("one", "two"):
        page("copy", tmp_path / "store", f"{remote}/{name}", *there)
    message = failure("inspect", remote, *there, status=3)["message"]
    assert f"In it are one (a store), two (a store). Give one of them: `ckpt inspect {remote}/one`" in message
    found = document("history", remote, *there)["places"]
    assert [(one["path"], one["address"], one["whole"]) for one in found] == [
        ("one", f"{remote}/one", True),
        ("two", f"{remote}/two", True),
    ]
    told = failure("inspect", f"{remote}/one/manifests", *there, status=3)["message"]
    assert f"it is a place in the store {remote}/one: `ckpt inspect {remote}/one`" in told.replace("It", "it")
