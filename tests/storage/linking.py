"""What copies by an S3 server must do, on the mock server and on a real one."""

from __future__ import annotations

import os
import uuid
from collections import Counter
from typing import Any

import pytest

import stateformat as sf
from stateformat.backends.storage import s3
from stateformat.backends.storage.s3 import S3Uploads
from stateformat.backends.storage.testing.objects import SEGMENT, put
from stateformat.publication import CopyProgress
from stateformat.segments import WriteOptions
from stateformat.storage import Link, open_storage
from stateformat.store import CheckpointStore
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import BUCKET, S3Server
from tests.worlds import stores


def counted_store(url: str, **options: Any) -> CheckpointStore:
    """Three checkpoints without inline segments."""
    store, job = sf.open(url, **options), stores.counts_job(keys=2000)
    for _ in range(3):
        job.publish(store, store.start(job.job_id), options=WriteOptions(inline_bytes_max=0))
    return store


def pinned_by_the_server(server: S3Server) -> None:
    """A pin sends one request for each object, and reads none; what it makes is whole."""
    store = counted_store(f"s3://{BUCKET}/{uuid.uuid4().hex}/store", **server.options())
    told = list[CopyProgress]()
    with FaultProxy(server) as proxy:
        through = sf.open(store.url, **server.options(proxy.endpoint))
        checkpoint = through.open(2)
        objects = checkpoint.record.totals.segments
        checkpoint.manifest.full()
        proxy.reset()
        through.pin(2, "p", progress=told.append)
        asked = Counter(request.method for request in proxy.requests if not request.conditional)
    assert told[-1].bytes_by_server == told[-1].bytes_total == checkpoint.record.totals.bytes
    # The objects and the manifest by the server, beside them the manifest that is read and the
    # record.
    assert asked.pop("PUT") == objects + 1
    assert set(asked) <= {"GET", "HEAD"}
    assert asked.total() <= 20, asked
    pinned = sf.open(f"{store.url}@p", **server.options())
    assert sf.validate(pinned.storage, level="full").ok
    assert [one.name for one in store.pins()] == ["p"]
    store.expire(1)
    assert sf.validate(pinned.storage, level="full").ok
    store.unpin("p")
    assert store.pins() == []
    keys = server.client.list_objects_v2(
        Bucket=BUCKET, Prefix=f"{store.url.removeprefix(f's3://{BUCKET}/')}/savepoints"
    )
    assert keys["KeyCount"] == 0


def a_large_object_is_copied_in_parts(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a copy make the object; none is open afterwards, also where one fails."""
    monkeypatch.setattr(s3, "COPIED_AT_ONCE_BYTES", 5 * 2**20)
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    source, target = (open_storage(f"{url}/{name}", **server.options()) for name in ("a", "b"))
    body = os.urandom(12 * 2**20 + 7)
    put(source, SEGMENT, body)
    assert target.link_from(source, SEGMENT, len(body)) is Link.COPIED
    assert target.read(SEGMENT).to_pybytes() == body
    call, broken = S3Uploads._call, open_storage(f"{url}/c", **server.options())

    def fail(self: S3Uploads, method: str, **given: Any) -> Any:
        if given.get("PartNumber") == 2:
            given["CopySourceIfMatch"] = '"0123456789abcdef0123456789abcdef"'
            given["CopySourceRange"] = "bytes=99999999-999999999"
        return call(self, method, **given)

    monkeypatch.setattr(S3Uploads, "_call", fail)
    assert broken.link_from(source, SEGMENT, len(body)) is None
    assert broken.list("") == []
    uploads = server.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    assert [upload for upload in uploads if url.rpartition("/")[2] in upload["Key"]] == []
