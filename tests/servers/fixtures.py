"""The S3 servers as fixtures, one of each for a whole run; both have the bucket ``BUCKET``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import rgw as ceph
from tests.servers.moto_server import running_moto
from tests.servers.server import BUCKET, S3Server
from tests.tally import Tally


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
