"""The mock S3 server, in a thread of this process.

It looks for an object and stores it in two steps: no races on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.servers.server import SMALL_PART_BYTES, S3Server


@contextlib.contextmanager
def running_moto() -> Iterator[S3Server]:
    """A mock server without buckets, for as long as the block lasts."""
    from moto.s3 import models
    from moto.server import ThreadedMotoServer

    models.S3_UPLOAD_PART_MIN_SIZE = SMALL_PART_BYTES
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Server(f"http://{host}:{port}", "AKIDFORTESTS", "not-a-real-secret/+x", "us-east-1")
    finally:
        server.stop()
