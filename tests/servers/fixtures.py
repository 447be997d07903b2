"""The object stores as fixtures, one of each for a whole run; all have the bucket ``BUCKET``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers import azurite as emulator, rgw as ceph
from tests.servers.azurite import AzuriteServer
from tests.servers.fake_s3 import Fake
from tests.servers.gcs import GcsServer, running_gcs
from tests.servers.moto_server import running_moto
from tests.servers.server import BUCKET, S3Server
from tests.tally import Tally


@pytest.fixture(scope="session", autouse=True)
def models_of_services_are_read_once() -> Iterator[None]:
    """Every session of botocore reads megabytes of JSON anew, which is most of what a client costs.
    In a run of tests each file is read once.
    """
    from botocore.loaders import JSONFileLoader

    read = JSONFileLoader.load_file
    found: dict[str, Any] = {}

    def once(loader: JSONFileLoader, file_path: str) -> Any:
        # One that is not there may come to be there.
        if found.get(file_path) is None:
            found[file_path] = read(loader, file_path)
        return found[file_path]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", once)
        yield


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    """The mock server."""
    with running_moto() as server:
        server.client.create_bucket(Bucket=BUCKET)
        yield server


@pytest.fixture(scope="session")
def rgw(tally: Tally) -> Iterator[S3Server]:
    """A real server, Ceph RGW; without one the tests are skipped and the table says so."""
    why = ceph.available()
    if why:
        tally.skip("real S3 server (Ceph RGW)", why)
        pytest.skip(f"no real S3 server: {why}")
    with ceph.running_rgw() as server:
        server.client.create_bucket(Bucket=BUCKET)
        # The first object takes seconds, since the server makes its pools for it.
        server.client.put_object(Bucket=BUCKET, Key="first", Body=b"x")
        server.client.delete_object(Bucket=BUCKET, Key="first")
        yield server


@pytest.fixture(scope="session")
def gcs() -> Iterator[GcsServer]:
    """The stand-in for Google's."""
    with running_gcs(BUCKET) as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tally: Tally) -> Iterator[AzuriteServer]:
    """Azure's emulator; without it the tests are skipped and the table says so."""
    why = emulator.available()
    if why:
        tally.skip("Azure's emulator (Azurite)", why)
        pytest.skip(f"no emulator of Azure: {why}")
    with emulator.running_azurite() as server:
        server.make_container(BUCKET)
        yield server


@pytest.fixture(scope="session")
def fake_server() -> Iterator[Fake]:
    """One that fails as told."""
    server = Fake()
    yield server
    server.stop()


@pytest.fixture
def fake(fake_server: Fake) -> Fake:
    """The same, as new."""
    fake_server.reset()
    return fake_server
