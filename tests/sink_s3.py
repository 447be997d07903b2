"""A file sink in a bucket, seen past the library by a client of its own; and a process that dies between two requests."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from threading import Lock
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateformat.backends.connectors import FileSink
from stateformat.backends.storage.s3.client import S3Client
from tests.servers.server import BUCKET, S3Server
from tests.sink_steps import PERMIT, batch_of, prepared, subtask_of


class Outside:
    """What anybody sees of a prefix who knows nothing of sinks."""

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.prefix = f"sink-{uuid.uuid4().hex}/aus gabe"
        self.url = f"s3://{BUCKET}/{self.prefix}"

    def sink(self, endpoint: str = "", **options: Any) -> FileSink:
        """A sink there; ``endpoint`` where a proxy stands in front."""
        return FileSink(self.url, **{**self.server.options(endpoint), **options})

    def paths(self) -> list[str]:
        """All objects, whatever their names."""
        listed = self.server.client.list_objects_v2(Bucket=BUCKET, Prefix=self.prefix)
        return [item["Key"].removeprefix(f"{self.prefix}/") for item in listed.get("Contents", ())]

    def uploads(self) -> list[tuple[str, str]]:
        """All uploads that have not ended: path and id."""
        listed = self.server.client.list_multipart_uploads(Bucket=BUCKET, Prefix=self.prefix)
        found = [(item["Key"], item["UploadId"]) for item in listed.get("Uploads", ())]
        assert not listed.get("IsTruncated")
        return [(key.removeprefix(f"{self.prefix}/"), id_) for key, id_ in found if key.startswith(self.prefix)]

    def body(self, path: str) -> bytes:
        body: bytes = self.server.client.get_object(Bucket=BUCKET, Key=f"{self.prefix}/{path}")["Body"].read()
        return body

    def put(self, path: str, body: bytes, **more: Any) -> None:
        self.server.client.put_object(Bucket=BUCKET, Key=f"{self.prefix}/{path}", Body=body, **more)

    def abort(self, path: str, upload_id: str) -> None:
        key = f"{self.prefix}/{path}"
        self.server.client.abort_multipart_upload(Bucket=BUCKET, Key=key, UploadId=upload_id)

    def tables(self) -> list[pa.Table]:
        """The contents of all objects. One that is no Parquet file raises."""
        return [pq.read_table(pa.BufferReader(self.body(path))) for path in self.paths()]

    def seen(self, column: str = "n") -> list[int]:
        """The numbers in all objects, sorted."""
        return sorted(n for table in self.tables() for n in table[column].to_pylist())


class Crash(Exception):
    """The process is gone."""


class Mortal:
    """Counts the requests of the library, and lets its process die at one: what it asks for afterwards is never sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.crash_at = -1
        self.moments = 0
        self.counted = 0
        self._dead = False
        self._lock = Lock()
        call, begin = S3Client.call, S3Client.begin

        def mortal_call(client: S3Client, method: str, **arguments: Any) -> Any:
            self._moment()
            answer = call(client, method, **arguments)
            self._moment()
            return answer

        def mortal_begin(client: S3Client, method: str, **arguments: Any) -> Any:
            self._moment()
            future = begin(client, method, **arguments)
            wait([future])
            self._moment()
            return future

        monkeypatch.setattr(S3Client, "call", mortal_call)
        monkeypatch.setattr(S3Client, "begin", mortal_begin)

    def live(self, crash_at: int) -> None:
        self.crash_at, self.moments, self._dead = crash_at, 0, False

    def revive(self) -> None:
        self._dead = False

    def live_for_ever(self) -> None:
        """Die no more; ``counted`` is how many moments there were until now."""
        self.counted, self.crash_at = self.moments, -1
        self._dead = False

    def _moment(self) -> None:
        with self._lock:
            self.moments += 1
            self._dead = self._dead or self.moments == self.crash_at
            if self._dead:
                raise Crash


def run_to_the_end(
    outside: Outside,
    sink: FileSink,
    failures: type[Exception],
    failed: Callable[[], object] = lambda: None,
    ended: Callable[[], object] = lambda: None,
) -> int:
    """One job of two checkpoints that is begun again whenever it fails; how often it did. Checks what is seen throughout.

    ``failed`` is called when it has failed, ``ended`` when both checkpoints are committed and only checks follow.
    """
    published: list[pa.Table] = []
    count = 0
    while len(published) < 2:
        try:
            if published:
                sink.commit(PERMIT, published[-1])
            sink.clean("out", len(published), None)
            opened = subtask_of(sink)
            while len(published) < 2:
                checkpoint_id = len(published) + 1
                committed = _paths(published)
                assert outside.paths() == committed
                opened.process(batch_of(*rows_of(checkpoint_id)), 0)
                table = prepared(opened, checkpoint_id, f"{count:032x}")
                assert outside.paths() == committed
                assert table is not None
                published.append(table)
                sink.commit(PERMIT, table)
        except failures:
            count += 1
            failed()
    ended()
    sink.commit(PERMIT, published[-1])
    sink.clean("out", 2, published[-1])
    assert outside.uploads() == []
    assert outside.paths() == _paths(published)
    assert outside.seen() == [*rows_of(1), *rows_of(2)]
    return count


def _paths(tables: list[pa.Table]) -> list[str]:
    return sorted(path for table in tables for path in table["path"].to_pylist())


def rows_of(checkpoint_id: int) -> range:
    return range(10 * checkpoint_id, 10 * checkpoint_id + 4)


@contextlib.contextmanager
def before_the_first(monkeypatch: pytest.MonkeyPatch, method: str, act: Callable[[], object]) -> Iterator[None]:
    """Something happens between the library's decision to send a request of this method and the request."""
    call, done = S3Client.call, []

    def acting(client: S3Client, name: str, **arguments: Any) -> Any:
        if name == method and not done:
            done.append(name)
            act()
        return call(client, name, **arguments)

    with monkeypatch.context() as patched:
        patched.setattr(S3Client, "call", acting)
        yield
    assert done == [method]
