"""An S3 server of a few lines, for what no real server does when a test asks for it. Errors and
single objects are alike enough at Google and Azure.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

KEY, SECRET = "AKIDFORTESTS", "not-a-real-secret/+x"
RANGE_FAULTS = ("ranges ignored", "another range", "short range", "cut body", "short body")
# One attempt, so that the tests of failures do not wait for retries.
IMPATIENT = {"retries": {"total_max_attempts": 1}, "connect_timeout": 2, "read_timeout": 2}


def options_for(endpoint: str, **more: Any) -> dict[str, Any]:
    region = {"region_name": "us-east-1"}
    return {"endpoint_url": endpoint, "key": KEY, "secret": SECRET, "client_kwargs": region, **more}


class Fake:
    """An S3 server of a few lines that honors If-None-Match, keeps a log, and fails as told.

    ``script`` maps a method and the last part of a key to what to do with the first such request:
    an HTTP status, (status, S3 code), "drop" (close without an answer), "drop applied" or "hang".
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.reset()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                fake.answer(self)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def reset(self) -> None:
        """Forget everything but the address, and with it the clients of the tests before."""
        self.released.set()
        self.released = threading.Event()
        self.honors_condition = True
        self.objects: dict[str, bytes] = {}
        self.log: list[tuple[str, str, Mapping[str, str]]] = []
        self.script: dict[tuple[str, str], Any] = {}
        self.everything: Any = None
        self.region = ""
        """If set, requests that are signed for another region are refused."""
        self.fault = ""
        """What is wrong with the answer to a range: one of :data:`RANGE_FAULTS`."""

    def stop(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def sent(self, method: str, name: str) -> int:
        """How many requests of a method came for keys that end so."""
        return sum(1 for logged, path, _ in self.log if logged == method and path.endswith(name))

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path = unquote(request.path.partition("?")[0])
        method = request.command
        if method == "POST" and "?delete" in request.path:
            # One name at a time is enough for these tests.
            name = unquote(body.decode().partition("<Key>")[2].partition("</Key>")[0])
            method, path = "DELETE", f"{path.rstrip('/')}/{name}"
        with self.lock:
            self.log.append((method, path, {name.lower(): value for name, value in request.headers.items()}))
            action = self.script.pop((method, path.rpartition("/")[2]), self.everything)
            if self.region and f"/{self.region}" not in request.headers.get("Authorization", ""):
                action = (400, "AuthorizationHeaderMalformed")
            taken = path in self.objects and request.headers.get("If-None-Match") == "*" and self.honors_condition
            if method == "PUT" and not taken and action in (None, "drop applied"):
                self.objects[path] = body
            if method == "DELETE":
                self.objects.pop(path, None)
        if action == "hang":
            self.released.wait(30)
        if action in ("drop", "drop applied", "hang"):
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)
        elif action is not None:
            status, code = action if isinstance(action, tuple) else (action, "Fault")
            self.reply(request, status, f"<Error><Code>{code}</Code><Message>{KEY} {SECRET}</Message></Error>".encode())
        elif method == "PUT":
            self.reply(
                request, 412 if taken else 200, b"<Error><Code>PreconditionFailed</Code></Error>" if taken else b""
            )
        elif method == "POST":
            # An upload in parts begins, or ends.
            self.reply(request, 200, b"<Result><UploadId>u</UploadId></Result>")
        elif method == "GET" and path in self.objects:
            self.answer_range(request, self.objects[path], self.fault)
        elif method == "DELETE":
            self.reply(request, 200, f"<DeleteResult><Deleted><Key>{path}</Key></Deleted></DeleteResult>".encode())
        else:
            self.reply(request, 404, b"")

    def answer_range(self, request: BaseHTTPRequestHandler, body: bytes, fault: str) -> None:
        if fault == "ranges ignored":
            self.reply(request, 200, body)
            return
        first, last = (int(number) for number in request.headers["Range"].removeprefix("bytes=").split("-"))
        piece = body[first : last + 1]
        if fault == "short range":
            piece = piece[:-1]
        if fault == "another range":
            first += 1
        span = {"Content-Range": f"bytes {first}-{first + len(piece) - 1}/{len(body)}"}
        if fault == "short body":
            piece = piece[:-2]
        self.reply(request, 206, piece, span, cut=fault == "cut body")

    def reply(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        cut: bool = False,
    ) -> None:
        request.send_response(status)
        length = {} if status == 204 else {"Content-Length": str(len(body))}
        date = "Thu, 01 Jan 2026 00:00:00 GMT"
        for name, value in {**(headers or {}), "ETag": '"0"', "Last-Modified": date, **length}.items():
            request.send_header(name, value)
        request.end_headers()
        if cut:
            body, request.close_connection = body[: len(body) // 2], True
        if request.command != "HEAD" and status != 204:
            request.wfile.write(body)
