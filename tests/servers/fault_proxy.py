"""An HTTP proxy in front of an object store that counts requests, and spoils some of them.

Theory of operation. Clients take the proxy for the server. A request is read whole, numbered, and
shown to the plan of the test, which names a fault for it or none. Headers pass unchanged, ``Host``
among them, so that signatures stay right. A fault is done to one request and its answer; a request
that the client sends again has a number of its own.

Requests whose client has given up may still be under way. :meth:`FaultProxy.settle` waits for them,
so that a test which then asks the server sees all that will ever come of them.
"""

from __future__ import annotations

import http.client
import select
import socket
import threading
import time
from collections.abc import Callable
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from tests.servers.azurite import AzuriteServer
from tests.servers.gcs import GcsServer
from tests.servers.server import S3Server

SLOW_SECONDS = 0.2
"""How late a slow answer comes. Clients of these tests wait longer than that."""
_HOLD_SECONDS_MAX = 20.0


class Fault(Enum):
    """What may happen to a request. *Applied* says whether the server has got it."""

    LOST_ANSWER = "lost answer (applied)"
    CUT_BEFORE = "connection cut (not applied)"
    ERROR_500_AFTER = "500 (applied)"
    ERROR_500_BEFORE = "500 (not applied)"
    SLOW_DOWN = "503 (not applied)"
    CONFLICT = "409 (not applied)"
    SLOW = "slow answer (applied)"
    STALLED = "no answer until the client gives up (applied)"
    LATE = "applied after the client has given up"
    CUT_BODY = "answer cut in the middle (applied)"
    CONDITION_IGNORED = "If-None-Match is ignored (applied)"


SINGLE = tuple(fault for fault in Fault if fault is not Fault.CONDITION_IGNORED)
"""The faults that a network or a good server may show."""

_ERRORS = {
    Fault.ERROR_500_AFTER: (500, "InternalError"),
    Fault.ERROR_500_BEFORE: (500, "InternalError"),
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.CONFLICT: (409, "ConditionalRequestConflict"),
}
_APPLIED = frozenset({Fault.LOST_ANSWER, Fault.ERROR_500_AFTER, Fault.STALLED})


class Request(NamedTuple):
    """A request: its number from 0, its method, the key (without the bucket), and the query."""

    number: int
    method: str
    key: str
    query: str
    conditional: bool

    @property
    def kind(self) -> str:
        """What is asked for, in words that stay the same from run to run."""
        operation = "&".join(sorted(part.partition("=")[0] for part in self.query.split("&") if part))
        folder = next((part for part in self.key.split("/") if part in _FOLDERS), self.key.rpartition("/")[2])
        return (
            f"{self.method} {folder}{'?' if operation else ''}{operation}{' if none match' if self.conditional else ''}"
        )


_FOLDERS = ("checkpoints", "manifests", "segments", "requests")

Plan = Callable[[Request], "Fault | None"]


class FaultProxy:
    """A proxy for a server, from ``__enter__`` to ``__exit__``; clients use :attr:`endpoint`."""

    def __init__(self, server: S3Server | GcsServer | AzuriteServer) -> None:
        self._server = server
        parsed = urlsplit(server.endpoint)
        assert parsed.hostname is not None
        self._server_address = (parsed.hostname, parsed.port or 80)
        self._changed = threading.Condition()
        self._under_way = self.most_under_way = 0
        self._plan: Plan = _nothing
        self.requests: list[Request] = []
        self.spoilt: list[tuple[Request, Fault]] = []
        self._listener = _Listener(self)
        self.endpoint = f"http://127.0.0.1:{self._listener.server_address[1]}"
        self._thread = threading.Thread(
            target=self._listener.serve_forever, kwargs={"poll_interval": 0.02}, name="fault-proxy", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()

    def reset(self, plan: Plan | None = None) -> None:
        """Wait for what is under way, count from 0 again, and spoil by this plan."""
        self.settle()
        with self._changed:
            self.requests, self.spoilt, self.most_under_way = [], [], 0
            self._plan = plan or _nothing

    def spoil(self, number: int, fault: Fault) -> None:
        """Start over, and spoil the request of this number alone."""
        self.reset(lambda request: fault if request.number == number else None)

    def settle(self) -> None:
        """Return when no request is under way."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._under_way, timeout=2 * _HOLD_SECONDS_MAX)

    # What handlers call

    def begin(self, method: str, target: str, *, conditional: bool) -> Fault | None:
        parsed = urlsplit(target)
        key = unquote(parsed.path).lstrip("/").partition("/")[2]
        with self._changed:
            self._under_way += 1
            self.most_under_way = max(self.most_under_way, self._under_way)
            request = Request(len(self.requests), method, key, parsed.query, conditional)
            self.requests.append(request)
            fault = self._plan(request)
            if fault is not None:
                self.spoilt.append((request, fault))
            return fault

    def end(self) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def forward(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        connection = http.client.HTTPConnection(*self._server_address, timeout=60)
        try:
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            return Answer(response.status, response.reason, response.getheaders(), response.read())
        finally:
            connection.close()

    def overwrite(self, target: str, body: bytes) -> Answer:
        """Put an object whatever stands there.

        The condition is signed: without it, the request would be refused.
        """
        assert not isinstance(self._server, AzuriteServer)
        bucket, _, key = unquote(urlsplit(target).path).lstrip("/").partition("/")
        tag = self._server.overwrite(bucket, key, body)
        return Answer(200, "OK", [("ETag", tag)], b"")


class Answer(NamedTuple):
    """What the server answered."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes


def _nothing(_: Request) -> None:
    return None


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up in these tests; nobody wants to read of it."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self) -> None:
        body = self._body()
        conditional = "If-None-Match" in self.headers or "x-goog-if-generation-match" in self.headers
        fault = self.server.proxy.begin(self.command, self.path, conditional=conditional)
        try:
            self._answer(fault, body)
        finally:
            self.server.proxy.end()

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer  # noqa: N815

    def _answer(self, fault: Fault | None, body: bytes) -> None:
        if fault is Fault.LATE:
            self._hold()
            self._forward(body)
        elif fault in _APPLIED or fault is Fault.CUT_BEFORE or fault in _ERRORS:
            if fault in _APPLIED:
                self._forward(body)
            if fault is Fault.STALLED:
                self._hold()
            if fault in _ERRORS:
                self._send(_error(*_ERRORS[fault]))
                return
        else:
            answer = self._forward(body)
            if fault is Fault.CONDITION_IGNORED and answer.status == 412:
                answer = self.server.proxy.overwrite(self.path, body)
            if fault is Fault.SLOW:
                time.sleep(SLOW_SECONDS)
            if fault is not Fault.CUT_BODY:
                self._send(answer)
                return
            self._send_half(answer)
        self._hang_up()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(chunks)

    def _forward(self, body: bytes) -> Answer:
        dropped = ("connection", "expect", "transfer-encoding", "content-length")
        headers = [(name, value) for name, value in self.headers.items() if name.lower() not in dropped]
        if body or self.command in ("PUT", "POST"):
            headers.append(("Content-Length", str(len(body))))
        return self.server.proxy.forward(self.command, self.path, headers, body)

    def _send(self, answer: Answer) -> None:
        self._send_head(answer)
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _send_head(self, answer: Answer) -> None:
        self.send_response_only(answer.status, answer.reason)
        dropped = ("connection", "transfer-encoding", "keep-alive")
        if self.command != "HEAD" and answer.status != 204:
            dropped += ("content-length",)
            self.send_header("Content-Length", str(len(answer.body)))
        for name, value in answer.headers:
            if name.lower() not in dropped:
                self.send_header(name, value)
        self.end_headers()

    def _send_half(self, answer: Answer) -> None:
        if self.command != "HEAD" and answer.body:
            self._send_head(answer)
            self.wfile.write(answer.body[: len(answer.body) // 2])
        else:
            self.wfile.write(f"HTTP/1.1 {answer.status} {answer.reason}\r\nServer: cu".encode())

    def _hold(self) -> None:
        """Wait until the client has hung up."""
        readable, _, _ = select.select([self.connection], [], [], _HOLD_SECONDS_MAX)
        assert readable, "the client never gave up"

    def _hang_up(self) -> None:
        self.close_connection = True
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


def _error(status: int, code: str) -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>spoilt</Message></Error>".encode()
    return Answer(status, code, [("Content-Type", "application/xml")], body)
