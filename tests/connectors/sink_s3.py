"""Places of a file sink as other readers see them; a process that dies between two requests."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateformat.backends.connectors import FileSink
from stateformat.backends.storage import s3
from stateformat.backends.storage.s3 import S3Uploads
from tests.connectors.sink_steps import Crash
from tests.servers.server import BUCKET, S3Server


class Inside:
    """A local directory, as readers see it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def sink(self, **options: Any) -> FileSink:
        return FileSink(self.root, **options)

    def files(self, ending: str) -> list[Path]:
        return sorted(path for path in self.root.rglob("*") if path.name.endswith(ending))

    def paths(self) -> list[str]:
        """The files that readers see."""
        return sorted(path.name for path in self.root.glob("[!._]*"))

    def pending(self) -> list[str]:
        """The final names of what is prepared."""
        return [f"part-{path.name.replace('.prepared', '')}" for path in self.files(".prepared")]

    def tables(self) -> list[pa.Table]:
        return [pq.read_table(self.root / path) for path in self.paths()]

    def seen(self, column: str = "n") -> list[int]:
        """The numbers in all files, sorted, by two readers, which must agree."""
        table = pq.read_table(self.root) if self.root.exists() else pa.table({})
        found: list[int] = sorted(table[column].to_pylist()) if table.num_columns else []
        try:
            rows = duckdb.sql(f"SELECT {column} FROM '{self.root}/**/*.parquet' ORDER BY ALL").fetchall()
        except duckdb.IOException:
            rows = []
        assert [n for (n,) in rows] == found
        return found


class Outside:
    """A prefix of a bucket, by a client that knows nothing of sinks."""

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

    def pending(self) -> list[str]:
        """The final names of what is prepared."""
        return sorted(path for path, _ in self.uploads())

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

    def look(self, published: Sequence[pa.Table]) -> None:
        """Check that exactly the files of these committables are seen."""
        assert self.paths() == sorted(path for table in published for path in table["path"].to_pylist())


class Mortal:
    """Counts the library's requests; its process dies at one, and sends none afterwards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.crash_at = -1
        self.moments = 0
        self.counted = 0
        self._dead = False
        self._lock = Lock()
        call = S3Uploads._call

        def mortal_call(place: S3Uploads, method: str, **arguments: Any) -> Any:
            self._moment()
            answer = call(place, method, **arguments)
            self._moment()
            return answer

        monkeypatch.setattr(S3Uploads, "_call", mortal_call)
        # One after the other, so that each moment is the same in every run.
        monkeypatch.setattr(s3, "PARTS_AT_ONCE", 1)

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


@contextlib.contextmanager
def before_the_first(monkeypatch: pytest.MonkeyPatch, method: str, act: Callable[[], object]) -> Iterator[None]:
    """Something happens between the library's decision to send such a request and the request."""
    call, done = S3Uploads._call, []

    def acting(place: S3Uploads, name: str, **arguments: Any) -> Any:
        if name == method and not done:
            done.append(name)
            act()
        return call(place, name, **arguments)

    with monkeypatch.context() as patched:
        patched.setattr(S3Uploads, "_call", acting)
        yield
    assert done == [method]
