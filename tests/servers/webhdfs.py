"""A stand-in for WebHDFS over a local directory, as much as fsspec uses to read; it refuses every
change. As a name node does, it redirects reads to a data node, which it is itself.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_API = "/webhdfs/v1"


class _Handler(BaseHTTPRequestHandler):
    root: Path
    requests: list[str]

    def do_GET(self) -> None:
        parsed = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(parsed.query).items()}
        operation = asked["op"].upper()
        self.requests.append(operation)
        path = self.root / unquote(parsed.path).removeprefix(_API).lstrip("/")
        if not path.exists():
            error = {"exception": "FileNotFoundException", "message": f"File {path.name} does not exist."}
            self._answer(404, {"RemoteException": error})
        elif operation == "OPEN" and "node" not in asked:
            self.send_response(307)
            self.send_header("Location", f"http://{self.headers['Host']}{self.path}&node=1")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif operation == "OPEN":
            start = int(asked.get("offset", 0))
            self._send(200, path.read_bytes()[start : start + int(asked["length"])])
        elif operation == "GETFILESTATUS":
            self._answer(200, {"FileStatus": _status(path, "")})
        elif operation == "LISTSTATUS":
            inside = sorted(path.iterdir()) if path.is_dir() else [path]
            self._answer(200, {"FileStatuses": {"FileStatus": [_status(one, one.name) for one in inside]}})

    def do_PUT(self) -> None:
        self.requests.append("PUT")
        error = {"exception": "AccessControlException", "message": "Permission denied"}
        self._answer(403, {"RemoteException": error})

    do_POST = do_DELETE = do_PUT  # noqa: N815 - as http.server calls them

    def _answer(self, status: int, document: Any) -> None:
        self._send(status, json.dumps(document).encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""


def _status(path: Path, name: str) -> dict[str, Any]:
    is_file = path.is_file()
    kind, length = ("FILE", path.stat().st_size) if is_file else ("DIRECTORY", 0)
    return {"pathSuffix": name, "type": kind, "length": length, "modificationTime": 0}


@contextlib.contextmanager
def running_webhdfs(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a directory; yields ``HOST:PORT`` and the operations that were asked for."""
    requests: list[str] = []
    handler = type("_Bound", (_Handler,), {"root": root, "requests": requests})
    with serving(handler) as address:
        yield address, requests


@contextlib.contextmanager
def serving(handler: Any) -> Iterator[str]:
    """Serve HTTP on a free port; yields ``HOST:PORT``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
