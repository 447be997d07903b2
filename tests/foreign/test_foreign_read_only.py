"""Whatever reads a checkpoint of another system leaves it as it was, byte for byte, and asks for
nothing but to read."""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ckpt.ckpt_runs import run
from tests.servers.fault_proxy import Fault, FaultProxy
from tests.servers.server import BUCKET, S3Server

FIXTURES = Path(__file__).parent / "fixtures"
KINDS = {
    "Spark": ("spark-4.3.0/aggregate/checkpoint", "operator-0", "default"),
    "Flink": ("flink-2.3.0/core-rocksdb-canonical/savepoint", "by-string", "mean"),
}


def bytes_of(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def commands(address: object, operator: str, state: str, tmp_path: Path) -> list[tuple[object, ...]]:
    """Every command that reads, as a user would call it, and those that refuse."""
    return [
        ("inspect", address),
        ("inspect", address, "--operator", operator, "--rows", "3"),
        ("history", address),
        ("validate", address),
        ("validate", address, "--level", "full"),
        ("top", address, "--by", "bytes"),
        ("explain-restore", address, "--parallelism", "2"),
        ("export", address, "--operator", operator, "--state", state, "--to", tmp_path / "rows.parquet"),
        ("import", address, "--to", tmp_path / "store"),
    ]


REFUSED: tuple[Callable[[object, Path], tuple[object, ...]], ...] = (
    lambda address, _: ("gc", address, "--delete"),
    lambda address, _: ("stop", address),
    lambda address, _: ("repair", address, "--yes"),
    lambda address, _: ("rollback", f"{address}@1"),
    lambda address, _: ("rewrite", address),
    lambda address, tmp_path: ("copy", address, tmp_path / "copy"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_no_command_changes_a_byte(kind: str, tmp_path: Path) -> None:
    path, operator, state = KINDS[kind]
    shutil.copytree(FIXTURES / path, tmp_path / "theirs")
    before = bytes_of(tmp_path / "theirs")
    for command in commands(tmp_path / "theirs", operator, state, tmp_path):
        found = run(*command)
        assert found.status == 0, (command, found.out, found.err)
    for refused in REFUSED:
        assert run(*refused(tmp_path / "theirs", tmp_path)).status in (2, 3)
    assert bytes_of(tmp_path / "theirs") == before
    assert not (tmp_path / "copy").exists()


@pytest.mark.s3
@pytest.mark.parametrize("kind", KINDS)
def test_on_s3_nothing_is_sent_but_reads(
    kind: str, tmp_path: Path, moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, operator, state = KINDS[kind]
    prefix = f"theirs/{uuid.uuid4().hex}"
    for file in (FIXTURES / path).rglob("*"):
        if file.is_file():
            key = f"{prefix}/{file.relative_to(FIXTURES / path)}"
            moto.client.put_object(Bucket=BUCKET, Key=key, Body=file.read_bytes())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret)
    monkeypatch.setenv("AWS_DEFAULT_REGION", moto.region)
    with FaultProxy(moto) as proxy:
        # Whoever may only read is refused anything else.
        proxy.reset(lambda request: None if request.method in ("GET", "HEAD") else Fault.CONFLICT)
        for command in commands(f"s3://{BUCKET}/{prefix}", operator, state, tmp_path):
            found = run(*command, "--endpoint-url", proxy.endpoint)
            assert found.status == 0, (command, found.out, found.err)
        for refused in REFUSED:
            arguments = refused(f"s3://{BUCKET}/{prefix}", tmp_path)
            assert run(*arguments, "--endpoint-url", proxy.endpoint).status in (2, 3)
        assert {request.method for request in proxy.requests} <= {"GET", "HEAD"}


@pytest.mark.parametrize(
    ("path", "newest", "damaged"),
    [
        ("spark-4.3.0/window/checkpoint", 10, "state/0/1/10.delta"),
        ("flink-2.3.0/brief-rocksdb-checkpoint/savepoint/*", 12, "chk-12/_metadata"),
    ],
)
def test_history_shows_a_newest_checkpoint_that_cannot_be_opened(
    path: str, newest: int, damaged: str, tmp_path: Path
) -> None:
    (found,) = FIXTURES.glob(path)
    shutil.copytree(found, tmp_path / "theirs")
    file = tmp_path / "theirs" / damaged
    if file.name == "_metadata":
        older = tmp_path / "theirs/chk-2"
        shutil.copytree(file.parent, older)
        file.write_bytes(file.read_bytes()[:100])
    else:
        file.unlink()
    result = run("history", tmp_path / "theirs")
    assert result.status == 1, result.out
    assert f"{newest}  damaged" in result.out
