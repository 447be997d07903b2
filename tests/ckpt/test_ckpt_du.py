"""``ckpt du``: pages, JSON, other systems, damage, and the requests that it takes."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stateformat.backends.storage.s3.client import S3Client
from tests.ckpt.ckpt_runs import document, failure, fingerprint, page, words
from tests.servers.server import BUCKET, S3Server
from tests.storage.linking import counted_store

FOREIGN = Path(__file__).resolve().parents[1] / "foreign" / "fixtures"


def test_the_page_adds_up_folders_checkpoints_and_states(five: Path) -> None:
    page("pin", f"{five}@3", "keep-me")
    before = fingerprint(five)
    for width in ("60", "80"):
        shown = page("du", five, "--keep", 2, "--price", 0.023, COLUMNS=width)
        assert max(map(len, shown.splitlines())) <= int(width)
        for text in ("--keep 2", "stay under", "savepoints/keep-me/", "counter/counts", "a month", "under two names"):
            assert text in shown
    found = document("du", five, "--keep", 2, "--price", 0.023)
    planned = document("gc", five, "--keep", 2)
    assert (found["keep"]["bytes"], found["keep"]["shared_bytes"]) == (planned["bytes"], planned["shared_bytes"])
    assert planned["shared_bytes"] > 0
    assert planned["savepoints"] == ["keep-me"]
    assert "never touched" in page("gc", five, "--keep", 2)
    assert fingerprint(five) == before
    assert "stay: a pin or a copy shares them" in page("gc", five, "--keep", 2, "--delete")
    assert document("validate", f"{five}@keep-me", "--level", "full")["ok"]


def test_damage_leaves_the_sizes_and_says_what_it_hides(five: Path) -> None:
    (five / "checkpoints/00000000000000000004.json").write_bytes(b"{}")
    found = document("du", five, "--keep", 1, status=1)
    assert [one["checkpoint_id"] for one in found["checkpoints"]] == [6, 5, 3, 2]
    assert [one["checkpoint_id"] for one in found["unreadable"]] == [4]
    assert "Stopped:" in words("du", five, status=1)


@pytest.mark.parametrize("place", ["spark-4.3.0/aggregate/checkpoint", "flink-2.3.0/brief-hashmap-native/savepoint"])
def test_of_another_systems_checkpoints_the_files_are_told(place: str) -> None:
    folder = FOREIGN / place
    folder = folder if any(path.is_file() for path in folder.iterdir()) else next(folder.iterdir())
    found = document("du", folder, "--price", 1)
    files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    assert (found["bytes"], found["objects"]) == (sum(files), len(files))
    assert found["system"]
    assert found["garbage"] is None
    assert found["checkpoints"][0]["bytes"] > 0
    assert "the folder itself" in page("du", folder)


def test_money_has_two_decimals_and_objects_are_those_of_the_folders(five: Path) -> None:
    found = document("du", five, "--keep", 2, "--price", 0.023)
    assert found["price"]["month"] == found["bytes"] / 10**9 * 0.023
    assert "a month <0.01 · --keep 2 saves <0.01 " in words("du", five, "--keep", 2, "--price", 0.023)
    bytes_, freed = found["bytes"], found["keep"]["bytes"] - found["keep"]["shared_bytes"]
    shown = words("du", five, "--keep", 2, "--price", 1e9)
    assert f"a month {bytes_:,.2f} · --keep 2 saves {freed:,.2f} " in shown
    before = sum(path.is_file() for path in five.rglob("*"))
    page("gc", five, "--keep", 2, "--delete")
    gone = before - sum(path.is_file() for path in five.rglob("*"))
    assert f"· {gone} objects" in shown


def test_what_is_no_price_or_no_store_is_refused(five: Path, tmp_path: Path) -> None:
    for price in ("-1", "inf", "nan", "cheap"):
        assert failure("du", five, "--price", price, status=2)
    assert failure("du", tmp_path / "nowhere", status=3)["kind"] == "store_not_found"


@pytest.mark.s3
def test_on_s3_each_folder_is_listed_once_and_each_record_and_manifest_read_once(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/store"
    store = counted_store(url, **moto.options())
    store.pin(2, "p")
    for name, value in (
        ("ACCESS_KEY_ID", moto.key),
        ("SECRET_ACCESS_KEY", moto.secret),
        ("DEFAULT_REGION", moto.region),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    asked: Counter[str] = Counter()
    call, read = S3Client.call, S3Client.read

    def called(self: S3Client, method: str, **given: Any) -> Any:
        asked[f"{method} {given.get('Prefix', '').rpartition('store/')[2]}".strip()] += 1
        return call(self, method, **given)

    def reading(self: S3Client, bucket: str, key: str, ranges: Any) -> Any:
        asked[key.rpartition("store/")[2].partition("/")[0]] += 1
        return read(self, bucket, key, ranges)

    monkeypatch.setattr(S3Client, "call", called)
    monkeypatch.setattr(S3Client, "read", reading)
    document("du", url, "--keep", 1, "--endpoint-url", moto.endpoint)
    records = "list_objects_v2 checkpoints/"
    assert asked.pop(records) == 2  # Once more at the end, to learn whether they have changed.
    assert asked.pop("checkpoints") == asked.pop("manifests") == 3
    listed = ("manifests/", "segments/", "requests/", "savepoints/", "savepoints/p/")
    assert {name: asked.pop(f"list_objects_v2 {name}") for name in listed} == dict.fromkeys(listed, 1)
    assert set(asked) == {"list_multipart_uploads"}
