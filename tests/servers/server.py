"""What tests know of an S3 server: its address, who may write, and a client of its own."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

BUCKET = "checkpoints-bucket"
"""The bucket that the fixtures ``moto`` and ``rgw`` have made."""


SMALL_PART_BYTES = 1 << 16
"""The tests' servers take parts from this size on, real ones from 5 MiB."""


class S3Server(NamedTuple):
    """Where an S3 server of the tests is, and who may write there."""

    endpoint: str
    key: str
    secret: str
    region: str

    def options(self, endpoint: str = "", **more: Any) -> dict[str, Any]:
        """The options of ``open_storage``; ``endpoint`` of a proxy, ``more`` to add or replace."""
        region = {"region_name": self.region}
        basic = {"endpoint_url": endpoint or self.endpoint, "key": self.key, "secret": self.secret}
        return {**basic, "client_kwargs": region, **more}

    def body(self, bucket: str, key: str) -> bytes | None:
        """What the server has under a key: the oracle of tests."""
        listed = self.client.list_objects_v2(Bucket=bucket, Prefix=key)
        if not listed.get("Contents"):
            return None
        found: bytes = self.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return found

    def overwrite(self, bucket: str, key: str, body: bytes) -> str:
        """Put an object whatever stands there; its tag."""
        return str(self.client.put_object(Bucket=bucket, Key=key, Body=body)["ETag"])

    @property
    def client(self) -> Any:
        """An S3 client that talks to the server itself: the oracle of tests."""
        return _client(self)


@functools.cache
def _client(server: S3Server) -> Any:
    import botocore.session

    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        region_name=server.region,
    )
