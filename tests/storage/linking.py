"""What copies by an S3 server must do, on the mock server and on a real one."""

from __future__ import annotations

import os
import uuid
from typing import Any

import pytest

import stateformat as sf
from stateformat.backends.storage.s3 import files as s3_files
from stateformat.backends.storage.s3.client import S3Client
from stateformat.backends.storage.testing.objects import SEGMENT, put
from stateformat.publication import CopyProgress
from stateformat.segments import WriteOptions
from stateformat.storage import Link, LinksObjects, open_storage
from stateformat.store import CheckpointStore
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
    checkpoint, told, asked = store.open(2), list[CopyProgress](), list[str]()
    objects = checkpoint.record.totals.segments
    checkpoint.manifest.full()
    call, read = S3Client.call, S3Client.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Client, "call", lambda self, name, **more: asked.append(name) or call(self, name, **more))
        patch.setattr(S3Client, "read", lambda self, *given: asked.append("read") or read(self, *given))
        store.pin(2, "p", progress=told.append)
    assert told[-1].bytes_by_server == told[-1].bytes_total == checkpoint.record.totals.bytes
    counts = {name: asked.count(name) for name in sorted(set(asked))}
    # The objects and the manifest by the server. Read are the record and the manifest.
    assert counts.pop("copy_object") == objects + 1
    assert counts.pop("read") <= 4
    assert set(counts) <= {"list_objects_v2", "get_object", "head_object"}, counts
    assert sum(counts.values()) <= 16, counts
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
    monkeypatch.setattr(s3_files, "COPIED_AT_ONCE_BYTES", 5 * 2**20)
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    source, target = (open_storage(f"{url}/{name}", **server.options()) for name in ("a", "b"))
    assert isinstance(target, LinksObjects)
    body = os.urandom(12 * 2**20 + 7)
    put(source, SEGMENT, body)
    assert target.link_from(source, SEGMENT, len(body)) is Link.COPIED
    assert target.read(SEGMENT).to_pybytes() == body
    begin, broken = S3Client.begin, open_storage(f"{url}/c", **server.options())

    def fail(self: S3Client, method: str, **given: Any) -> Any:
        if given.get("PartNumber") == 2:
            given["CopySourceIfMatch"] = '"0123456789abcdef0123456789abcdef"'
            given["CopySourceRange"] = "bytes=99999999-999999999"
        return begin(self, method, **given)

    monkeypatch.setattr(S3Client, "begin", fail)
    assert isinstance(broken, LinksObjects)
    assert broken.link_from(source, SEGMENT, len(body)) is None
    assert broken.list("") == []
    uploads = server.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    assert [upload for upload in uploads if url.rpartition("/")[2] in upload["Key"]] == []
