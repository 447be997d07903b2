"""Every new tool on a real S3 server: one job's store, compared with itself on local disk.

The job runs, and is stopped, on local disk; its objects are copied to the server unchanged. Then
every command runs on both. Ids, digests, rows and bytes in their answers must be equal, because the
stores are. In the end the job goes on in both, and gets requests for a savepoint and a rescale.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.reading.checkpoint import Checkpoint
from tests.ckpt.ckpt_runs import CKPT, document
from tests.servers.server import BUCKET, S3Server
from tests.tally import Tally

pytestmark = [pytest.mark.truth, pytest.mark.s3]

JOB = """
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
    (tmp_path / "numbers_job.py").write_text(JOB)
    return f"{tmp_path / 'numbers_job.py'}:numbers"


@pytest.fixture
def places(rgw: S3Server, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    """Return the same store twice: on local disk, and on the server (with credentials set)."""
    for name, value in (("ACCESS_KEY_ID", rgw.key), ("SECRET_ACCESS_KEY", rgw.secret), ("DEFAULT_REGION", rgw.region)):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", rgw.endpoint)
    folder, prefix = tmp_path / "store", f"{uuid.uuid4().hex}/store"
    with running(job, str(folder)):
        until(lambda: folder.exists() and len(sf.open(folder).history()) >= 4)
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
