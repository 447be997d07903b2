"""Azurite, the emulator of Azure's blob storage by its maker, from npm.

``npm install azurite`` in the folder of the checkout, or ``npm install --global azurite``. It keeps
everything in memory, listens on 127.0.0.1 only, and ends with this process, also if that is killed.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

START_TIMEOUT_SECONDS = 60
STOP_TIMEOUT_SECONDS = 10
ACCOUNT = "devstoreaccount1"
# Every Azurite has this one; it is no secret.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_MAIN = Path("azurite/dist/src/blob/main.js")
_LISTENS = re.compile(r"listens on http://127\.0\.0\.1:(\d+)")


class AzuriteServer(NamedTuple):
    """Where the emulator is; ``endpoint`` ends in the account."""

    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}"

    def options(self, endpoint: str = "", **more: Any) -> dict[str, Any]:
        """The options of ``open_storage``; ``endpoint`` of a proxy, ``more`` to add or replace."""
        place = f"{endpoint}/{ACCOUNT}" if endpoint else self.endpoint
        return {"endpoint_url": place, "account_name": ACCOUNT, "account_key": KEY, **more}

    def body(self, container: str, name: str) -> bytes | None:
        """What the server has under a name: the oracle of tests."""
        import obstore
        from obstore.store import AzureStore

        config: Any = {"account_name": ACCOUNT, "account_key": KEY, "endpoint": self.endpoint}
        try:
            return bytes(
                obstore.get(AzureStore(container, config=config, client_options={"allow_http": True}), name).buffer()
            )
        except FileNotFoundError:
            return None

    def make_container(self, name: str) -> None:
        date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        signed = f"x-ms-date:{date}\nx-ms-version:2021-12-02\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        digest = hmac.new(base64.b64decode(KEY), ("PUT" + "\n" * 12 + signed).encode(), hashlib.sha256).digest()
        headers = {
            "x-ms-date": date,
            "x-ms-version": "2021-12-02",
            "Content-Length": "0",
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
            answer = connection.getresponse()
            assert answer.status == 201, answer.read()


def _program() -> Path | None:
    folders = [Path(__file__).parents[2] / "node_modules"]
    if shutil.which("npm"):
        found = subprocess.run(["npm", "root", "--global"], capture_output=True, text=True, check=False, timeout=60)
        folders.append(Path(found.stdout.strip()))
    return next((folder / _MAIN for folder in folders if (folder / _MAIN).is_file()), None)


def available() -> str:
    """Why the emulator cannot be started here, in one line; empty if it can."""
    missing = [name for name in ("node", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} on this machine"
    return "" if _program() else "no azurite on this machine (npm install azurite)"


@contextlib.contextmanager
def running_azurite() -> Iterator[AzuriteServer]:
    """An emulator without containers, for as long as the block lasts.

    Raises ``RuntimeError`` with the end of its log.
    """
    program = _program()
    assert program is not None
    folder = Path(tempfile.mkdtemp(prefix="azurite-"))
    log = folder / "log"
    switches = ("--inMemoryPersistence", "--disableTelemetry", "--silent", "--skipApiVersionCheck")
    with log.open("wb") as output:
        child = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "node", str(program), "--blobPort", "0", *switches],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
        )
    try:
        yield AzuriteServer(_port(child, log))
    finally:
        child.kill()
        child.wait(timeout=STOP_TIMEOUT_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)


def _port(child: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        if found := _LISTENS.search(log.read_text(errors="replace")):
            return int(found[1])
        if child.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"Azurite does not answer (ended with {child.poll()}): {log.read_text()[-2000:]}")
        time.sleep(0.02)
