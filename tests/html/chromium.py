"""A real headless Chromium, driven over a pipe: what a page looks like, asks for and says.

Standard library only. Speaks the DevTools protocol: JSON, a NUL behind each message.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = "chromium"
SECONDS_MAX = 60
_START = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(text), fcntl.F_DUPFD, 20) for text in sys.argv[1:3]]
for number, pipe in zip((3, 4), pipes):
    os.dup2(pipe, number)
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""The browser reads from file 3 and writes to file 4."""


def missing() -> str | None:
    """Why there is no browser here; None where there is one."""
    return None if shutil.which(PROGRAM) else "chromium is not installed"


class Browser:
    """A browser with one page. :func:`chromium` makes it."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        """Addresses that the page has asked for, but its own."""
        self.complaints: list[str] = []
        """What console and log have."""
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **given: Any) -> Any:
        """The result of a method. Raises ``RuntimeError`` where the browser refuses it."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": given}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS_MAX
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError("the browser does not answer")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent" and event.get("type") != "Document":
            self.requests.append(event["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(event["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(event["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.complaints.append(event["entry"]["text"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def open(self, page: Path | str) -> None:
        """Load a file, or a page of a server of this machine, and wait until it is there."""
        self._loaded = False
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while not self._loaded:
            self._message()

    def look(self, width: int, *, dark: bool = False, media: str = "") -> None:
        """Choose how wide the window is, light or dark, screen or ``print``."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 700
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def picture(self, *, height: int | None = None) -> bytes:
        """The page as PNG, whole or its upper part."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        return base64.b64decode(data)

    def paper(self) -> bytes:
        """The page as PDF."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser without network but this machine's, in a new profile."""
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    flags = [
        *(
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
        ),
        *(
            "--disable-background-networking",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--user-data-dir={profile}",
        ),
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(to_browser), str(from_browser), PROGRAM, *flags, "about:blank"],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Browser(read, write)
    finally:
        # Without its pipe the browser ends, and its children with it.
        os.close(write)
        os.close(read)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
