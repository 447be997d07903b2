"""Stores that the tests of ``ckpt`` share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from stateformat.segments import WriteOptions
from stateformat.store import open as open_store
from tests.ckpt.ckpt_runs import fingerprint
from tests.worlds import stores


@pytest.fixture(scope="session")
def flights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two checkpoints with something of everything. Tests leave this store as it is."""
    folder = tmp_path_factory.mktemp("ckpt") / "flights"
    stores.flights_store(str(folder))
    before = fingerprint(folder)
    yield folder
    assert fingerprint(folder) == before


@pytest.fixture
def own_flights(flights: Path, tmp_path: Path) -> Path:
    """A copy of ``flights`` to write to."""
    return Path(shutil.copytree(flights, tmp_path / "flights"))


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    """One checkpoint of two words' counts at two subtasks."""
    stores.counts_store(str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture(scope="session")
def _five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("five") / "store"
    store, job = stores.counts_store(str(root)), stores.counts_job()
    for _ in range(5):
        job.publish(store, store.start(job.job_id), options=WriteOptions(inline_bytes_max=0))
    store.expire(5)
    return root


@pytest.fixture
def five(_five: Path, tmp_path: Path) -> Path:
    """Checkpoints 2 to 6, to be damaged; no segment is inline."""
    return Path(shutil.copytree(_five, tmp_path / "store"))


@pytest.fixture(scope="session")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "store"
    stores.counts_job(keys=50).publish(open_store(str(folder)), None, options=WriteOptions(inline_bytes_max=0))
    return folder


@pytest.fixture
def whole(_whole: Path, tmp_path: Path) -> Path:
    """One checkpoint, to be damaged; no segment is inline."""
    return Path(shutil.copytree(_whole, tmp_path / "store"))
