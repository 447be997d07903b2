"""A real PostgreSQL server for tests, from Debian's package.

Theory of operation. The package ``postgresql`` is enough; its own cluster is not used. All files
lie in one temporary directory, the server listens on a socket in it, and on 127.0.0.1 for those who
come with a password. PostgreSQL refuses to run as root, so root runs it as the user ``postgres``
that the package has made. It ends with this process, also if that is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

START_TIMEOUT_SECONDS = 30
STOP_TIMEOUT_SECONDS = 10
USER = "postgres"


class PostgresServer(NamedTuple):
    """A server: ``url`` through its socket, without a password; ``port`` on 127.0.0.1, with one."""

    url: str
    port: int

    def url_with_password(self, user: str, password: str) -> str:
        """The URL of a user who has a password."""
        return f"postgresql://{user}:{quote(password, safe='')}@127.0.0.1:{self.port}/postgres"

    def execute(self, *statements: str) -> list[Any]:
        """Run statements, each for itself; the rows of the last: the oracle of tests."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


def available() -> str:
    """Why the server cannot be started here, in one line; empty if it can."""
    if find_spec("psycopg") is None:
        return "psycopg is not installed (pip install 'stateformat[postgres]')"
    return "" if _programs() and shutil.which("setpriv") else "no initdb on this machine (apt-get install postgresql)"


def _programs() -> Path | None:
    """The folder of the newest server's programs, which Debian keeps out of PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """A server with an empty database, for as long as the block lasts.

    Raises ``RuntimeError`` with the end of its log.
    """
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    children: list[subprocess.Popen[bytes]] = []
    try:
        yield _start(folder, children)
    finally:
        for child in children:
            # At once: nothing of it is wanted again.
            child.send_signal(signal.SIGQUIT)
            child.wait(timeout=STOP_TIMEOUT_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, children: list[subprocess.Popen[bytes]]) -> PostgresServer:
    programs = _programs()
    assert programs is not None
    as_user: list[str] = []
    if os.getuid() == 0:
        shutil.chown(folder, USER)
        as_user = ["--reuid", USER, "--regid", USER, "--clear-groups"]
    data, log = folder / "data", folder / "log"
    made = subprocess.run(
        [
            *(["setpriv", *as_user] if as_user else []),
            *(str(programs / "initdb"), "--pgdata", str(data), "--username", USER, "--no-sync"),
            *("--auth-local=trust", "--auth-host=scram-sha-256", "--encoding=UTF8", "--locale=C"),
        ],
        capture_output=True,
        cwd=folder,
        check=False,
        timeout=START_TIMEOUT_SECONDS,
    )
    if made.returncode:
        raise RuntimeError(f"initdb ended with {made.returncode}: {made.stderr.decode()[-2000:]}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "listen_addresses": "127.0.0.1",
        "port": port,
        "unix_socket_directories": folder,
        "fsync": "off",
        "shared_buffers": "16MB",
        "max_connections": 20,
    }
    with log.open("wb") as output:
        children.append(
            subprocess.Popen(
                [
                    *("setpriv", *as_user, "--pdeathsig", "QUIT", str(programs / "postgres"), "-D", str(data)),
                    *(f"--{name}={value}" for name, value in settings.items()),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=folder,
            )
        )
    server = PostgresServer(f"postgresql://{USER}@/postgres?host={quote(str(folder), safe='')}&port={port}", port)
    _wait_for_answer(server, children[0], log)
    return server


def _wait_for_answer(server: PostgresServer, child: subprocess.Popen[bytes], log: Path) -> None:
    import psycopg

    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        try:
            server.execute("SELECT 1")
        except psycopg.OperationalError:
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"PostgreSQL does not answer (ended with {child.poll()}): {log.read_text()[-2000:]}"
                ) from None
            time.sleep(0.02)
        else:
            return
