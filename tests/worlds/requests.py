"""Runs that are asked for something, as fakes, and a clock that is stepped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from stateformat.model import Stop
from stateformat.publication import CommitPermit
from stateformat.requests import JobRequest, RequestAnswer, RequestKind, RequestOutcome, counts_for
from stateformat.store import CheckpointStore, open as open_store
from tests.worlds import stores

JOB = stores.counts_job()
EVERYTHING = {operator.uid: range(operator.parallelism) for operator in JOB.graph.operators}
OTHER = "f" * 32
"""The id of another request."""


class FakeRun:
    """A run of the counts job that reads requests when a test says so."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self.permit = store.start("counts")
        self.restored_from = self.permit.ref.checkpoint_id if self.permit else 0

    def publish(self, **more: Any) -> CommitPermit:
        self.permit = JOB.publish(self.store, self.permit, **more)
        return self.permit

    def asked(self) -> JobRequest | None:
        """The first request to stop that counts; those for earlier runs are answered as missed."""
        for request in self.store.requests():
            assert request.kind is RequestKind.STOP
            if counts_for(request, self.restored_from):
                return request
            self.store.answer_request(
                RequestAnswer(request.id, RequestOutcome.MISSED, "the job runs again from a newer one")
            )
        return None

    def answer(self, outcome: RequestOutcome, message: str = "", *place: Any) -> None:
        request = self.asked()
        assert request is not None
        self.store.answer_request(RequestAnswer(request.id, outcome, message, *place))

    def stop(self, *, copy: bool = True, answer: bool = True, **more: Any) -> None:
        """Stop by the first request that counts, if any; ``copy`` and ``answer`` are left out by a
        crash."""
        request = self.asked()
        if request is None:
            return
        assert request.mode is not None
        record = self.publish(stop=Stop(request.mode, request.id), **more).record
        url = request.savepoint_at(self.store.url, record.checkpoint_id)
        if copy:
            self.store.copy(self.store.open(), open_store(url))
        if answer:
            message = "" if copy else "the savepoint could not be written: no room."
            self.answer(RequestOutcome.STOPPED, message, record.checkpoint_id, url if copy else None)

    def save(self, *, copy: bool = True, **more: Any) -> None:
        """Publish a checkpoint for the first request for a savepoint; copy it, and answer."""
        (request,) = self.store.requests()
        assert request.kind is RequestKind.SAVEPOINT
        number = self.publish(**more).record.checkpoint_id
        url = request.savepoint_at(self.store.url, number)
        if not copy:
            self.store.answer_request(
                RequestAnswer(request.id, RequestOutcome.FAILED, "the copy failed: no room", number)
            )
            return
        self.store.copy(self.store.open(), open_store(url))
        message = f"checkpoint {number} has its savepoint {url}; the job goes on"
        self.store.answer_request(RequestAnswer(request.id, RequestOutcome.SAVED, message, number, url))


def elsewhere(store: CheckpointStore) -> str:
    """A place for a savepoint beside a store, in memory if that is."""
    return f"{store.url}-{uuid4().hex}"


def interrupted(command: str, store: Path, number: signal.Signals = signal.SIGINT) -> str:
    """What a command writes to standard error when a signal ends it after it has asked."""
    folder = store / "requests"
    # Tests that run in the background may ignore interrupts, which children inherit.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "from stateformat.tools.ckpt.main import main; sys.exit(main())"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, command, str(store), "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while child.poll() is None and not list(folder.glob(f"[0-9]*-{command}-*")):
            threading.Event().wait(0.02)
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 128 + number
    assert json.loads(out)["error"]["kind"] == "interrupted"
    assert list(folder.iterdir()) == []
    return err


class Steps:
    """A clock that advances only in waits; ``at3=event`` makes something happen in the third."""

    def __init__(self, **script: Callable[[], object]) -> None:
        self.now = 100.0
        self.pauses: list[float] = []
        self.script = {int(name.removeprefix("at")): event for name, event in script.items()}

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.pauses.append(seconds)
        event = self.script.get(len(self.pauses))
        if event is not None:
            event()
