"""A stand-in for Google Cloud Storage, as much of its XML API as obstore uses, in memory.

No emulator in the package registries has preconditions, so this server exists: objects have
generations, ``x-goog-if-generation-match`` is checked and applied under one lock, listings are
pages in the order of names, and an upload in parts is no object before it is completed. It says
nothing about the real service; that a deletion of nothing is a 404, and which codes come, is from
its documentation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE_NAMES = 1000
TOKEN = "ya29.for-tests"


class _Object(NamedTuple):
    body: bytes
    generation: int

    @property
    def headers(self) -> dict[str, str]:
        modified = "Thu, 01 Jan 2026 00:00:00 GMT"
        return {"ETag": f'"{self.generation}"', "x-goog-generation": str(self.generation), "Last-Modified": modified}


class _Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class _Bucket:
    def __init__(self) -> None:
        self.objects: dict[str, _Object] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}


class GcsServer:
    """Buckets by name; ``endpoint`` is what clients are given as ``endpoint_url``."""

    def __init__(self, *buckets: str) -> None:
        self.buckets = {name: _Bucket() for name in buckets}
        self._lock = threading.Lock()
        self._generation = 0
        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), type("_Bound", (_Handler,), {"gcs": self}))
        self._listener.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._listener.server_address[1]}"
        self._thread = threading.Thread(
            target=self._listener.serve_forever, kwargs={"poll_interval": 0.02}, name="gcs", daemon=True
        )
        self._thread.start()

    def options(self, endpoint: str = "", **more: Any) -> dict[str, Any]:
        """The options of ``open_storage``; ``endpoint`` of a proxy, ``more`` to add or replace."""
        return {"endpoint_url": endpoint or self.endpoint, "token": TOKEN, **more}

    def stop(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()

    def body(self, bucket: str, name: str) -> bytes | None:
        """What the server has under a name: the oracle of tests."""
        with self._lock:
            found = self.buckets[bucket].objects.get(name)
            return None if found is None else found.body

    def overwrite(self, bucket: str, name: str, body: bytes) -> str:
        """Put an object whatever stands there; its tag."""
        return self.put(bucket, name, body).headers["ETag"]

    def put(self, bucket: str, name: str, body: bytes, generation: str | None = None) -> _Object:
        """Store an object if its generation is this one, 0 for none."""
        with self._lock:
            objects = self.buckets[bucket].objects
            there = objects[name].generation if name in objects else 0
            if generation is not None and there != int(generation):
                raise _Refused(412, "PreconditionFailed")
            self._generation += 1
            objects[name] = _Object(body, self._generation)
            return objects[name]

    def answer(
        self, method: str, bucket: str, name: str, query: dict[str, str], headers: Any, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for a request."""
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            raise _Refused(401, "AuthenticationRequired")
        if bucket not in self.buckets:
            raise _Refused(404, "NoSuchBucket")
        place = self.buckets[bucket]
        if not name:
            return 200, {}, self._listing(place, query)
        if "uploads" in query or "uploadId" in query:
            return self._part(method, bucket, name, query, body)
        if method == "PUT":
            if source := headers.get("x-goog-copy-source"):
                from_bucket, _, from_name = unquote(source).lstrip("/").partition("/")
                body = self._found(self.buckets[from_bucket], from_name).body
            made = self.put(bucket, name, body, headers.get("x-goog-if-generation-match"))
            return 200, made.headers, b""
        found = self._found(place, name)
        if method == "DELETE":
            with self._lock:
                place.objects.pop(name, None)
            return 204, {}, b""
        return _ranged(found, headers.get("Range"))

    def _found(self, place: _Bucket, name: str) -> _Object:
        with self._lock:
            if name not in place.objects:
                raise _Refused(404, "NoSuchKey")
            return place.objects[name]

    def _part(
        self, method: str, bucket: str, name: str, query: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        uploads = self.buckets[bucket].uploads
        if "uploads" in query:
            with self._lock:
                self._generation += 1
                upload_id = f"upload-{self._generation}"
                uploads[upload_id] = (name, {})
            xml = f"<InitiateMultipartUploadResult><UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
            return 200, {}, xml.encode()
        upload_id = query["uploadId"]
        with self._lock:
            if upload_id not in uploads:
                raise _Refused(404, "NoSuchUpload")
            parts = uploads[upload_id][1]
            if method == "PUT":
                number = int(query["partNumber"])
                parts[number] = body
                return 200, {"ETag": f'"part-{number}"'}, b""
            del uploads[upload_id]
        if method == "DELETE":
            return 204, {}, b""
        made = self.put(bucket, name, b"".join(parts[number] for number in sorted(parts)))
        tag = f"<ETag>{escape(made.headers['ETag'])}</ETag>"
        return 200, made.headers, f"<CompleteMultipartUploadResult>{tag}</CompleteMultipartUploadResult>".encode()

    def _listing(self, place: _Bucket, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = max(query.get("continuation-token", ""), query.get("start-after", ""))
        with self._lock:
            found = sorted(item for item in place.objects.items() if item[0].startswith(prefix) and item[0] > after)
        page, rows, folders = found[:PAGE_NAMES], [], dict[str, None]()
        for name, there in page:
            folder, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if cut:
                folders[prefix + folder + cut] = None
                continue
            rows.append(
                f"<Contents><Key>{escape(name)}</Key><Size>{len(there.body)}</Size><ETag>{there.generation}</ETag>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            )
        rows += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders]
        more = len(found) > len(page)
        token = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if more else ""
        return (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(rows)}</ListBucketResult>"
        ).encode()


def _ranged(found: _Object, wanted: str | None) -> tuple[int, dict[str, str], bytes]:
    if wanted is None:
        return 200, found.headers, found.body
    first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
    if first >= len(found.body):
        raise _Refused(416, "InvalidRange")
    piece = found.body[first : last + 1]
    span = f"bytes {first}-{first + len(piece) - 1}/{len(found.body)}"
    return 206, {**found.headers, "Content-Range": span}, piece


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    gcs: GcsServer

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parsed = urlsplit(self.path)
        bucket, _, name = parsed.path.lstrip("/").partition("/")
        query = {key: values[0] for key, values in parse_qs(parsed.query, keep_blank_values=True).items()}
        try:
            status, headers, answer = self.gcs.answer(
                self.command, unquote(bucket), unquote(name), query, self.headers, body
            )
        except _Refused as why:
            status, headers = why.status, {}
            answer = f"<?xml version='1.0'?><Error><Code>{why.code}</Code></Error>".encode()
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        if status != 204:
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD" and status != 204:
            self.wfile.write(answer)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer  # noqa: N815


@contextlib.contextmanager
def running_gcs(bucket: str) -> Iterator[GcsServer]:
    """A server with one empty bucket, for as long as the block lasts."""
    server = GcsServer(bucket)
    try:
        yield server
    finally:
        server.stop()
