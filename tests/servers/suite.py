"""The conformance suite on an S3 server of the tests; a subclass has the fixture ``server``."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from stateformat.backends.storage.testing import StorageConformance
from stateformat.storage import Storage, open_storage
from tests.servers.server import BUCKET, S3Server


class S3Conformance(StorageConformance):
    @pytest.fixture
    def options(self, server: S3Server) -> dict[str, Any]:
        return server.options()

    @pytest.fixture
    def storage(self, options: dict[str, Any]) -> Storage:
        return open_storage(f"s3://{BUCKET}/{uuid.uuid4().hex}/store", **options)

    @pytest.fixture
    def unicode_url(self) -> str:
        return f"s3://{BUCKET}/{uuid.uuid4().hex}/prüfung eins+zwei"


class MockConformance(S3Conformance):
    # The mock looks for the object and stores it in two steps, without a lock.
    atomic_create = False
    race_rounds = 5

    @pytest.fixture
    def server(self, moto: S3Server) -> S3Server:
        return moto
