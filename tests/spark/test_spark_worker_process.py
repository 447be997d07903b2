"""What a Python worker of Spark does once, before our first task in it, and before each task."""

from __future__ import annotations

import gc
import io
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from stateformat.backends.spark import worker_process


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that a daemon would call for each task, which answers what it reads."""
    module: Any = ModuleType("the_worker")
    module.main = lambda infile, outfile: outfile.write(infile.read(3))
    monkeypatch.setitem(sys.modules, "the_worker", module)
    monkeypatch.setattr(sys, "argv", ["daemon.py", "the_worker"])
    worker_process.settle.cache_clear()
    yield module
    worker_process.settle.cache_clear()
    gc.unfreeze()


def settled(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module behind :func:`~worker_process.settle`, in a worker that is used again."""
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    worker_process.settle()
    return worker


def answered(worker: Any, ours: socket.socket, theirs: socket.socket) -> bytes:
    with ours.makefile("rb") as infile, ours.makefile("wb") as outfile:
        theirs.sendall(b"one")
        worker.main(infile, outfile)
    return theirs.recv(3)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is nothing to ask for")
def test_a_worker_on_tcp_acknowledges_what_comes_at_once(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = socket.TCP_QUICKACK, socket.TCP_NODELAY
    found: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as theirs:
        ours, _ = server.accept()
        with ours:
            # As on a socket that has been used for a while.
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
            before = worker.main

            def main(infile: Any, outfile: Any) -> None:
                found.extend(ours.getsockopt(socket.IPPROTO_TCP, name) for name in asks)
                before(infile, outfile)

            worker.main = main
            assert answered(settled(worker, monkeypatch), ours, theirs) == b"one"
    assert all(found)
    assert len(found) == 2


def test_a_worker_on_a_unix_socket_serves_as_before(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert answered(settled(worker, monkeypatch), ours, theirs) == b"one"


def test_a_worker_on_pipes_serves_as_before(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (task, asks), (result, answers) = os.pipe(), os.pipe()
    with os.fdopen(asks, "wb") as asked:
        asked.write(b"one")
    with os.fdopen(task, "rb") as infile, os.fdopen(answers, "wb") as outfile:
        settled(worker, monkeypatch).main(infile, outfile)
    with os.fdopen(result, "rb") as said:
        assert said.read() == b"one"


class InCycle:
    """What only a collection of garbage frees."""

    def __init__(self) -> None:
        self.itself = self


def served(worker: Any, what: Callable[[], None]) -> None:
    """A task, and the collection that the daemon makes after it."""
    with io.BytesIO() as infile, io.BytesIO() as outfile:
        worker.task = what
        worker.main(infile, outfile)
    gc.collect()


@pytest.fixture
def tasks(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker that calls ``task``."""
    worker.main = lambda infile, outfile: worker.task()
    return settled(worker, monkeypatch)


def test_what_a_task_has_made_and_dropped_is_collected_after_it(tasks: Any) -> None:
    made: list[weakref.ref[InCycle]] = []
    for _ in range(3):
        served(tasks, lambda: made.append(weakref.ref(InCycle())))
        assert made[-1]() is None


def test_what_an_earlier_task_has_made_is_collected_when_everything_is_looked_at(tasks: Any) -> None:
    kept: list[InCycle] = []
    served(tasks, lambda: kept.append(InCycle()))
    seen = weakref.ref(kept[0])
    served(tasks, kept.clear)
    assert seen() is not None
    for _ in range(worker_process.LOOK_EVERY - 3):
        served(tasks, lambda: None)
    assert seen() is not None
    served(tasks, lambda: None)
    assert seen() is None


def test_a_process_that_is_no_worker_stays_as_it_is(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    before = worker.main
    worker_process.settle()
    assert worker.main is before
