"""A program that waits for SIGTERM: no option and no fault may make it deaf to the signal."""

from __future__ import annotations

import datetime
import signal
import subprocess
import sys
from typing import Any

import pytest

import stateformat as sf
from stateformat.backends.local import LocalRuntime, stop_soon_on_sigterm

PROGRAM = """
import os, signal, threading
from stateformat.backends.local import stop_soon_on_sigterm


class Failing:
    newest = 7

    def forward_sigterm(self, heard):
        return lambda: None

    def stop_soon(self, *, grace):
        raise RuntimeError("no stop today")


with stop_soon_on_sigterm(Failing()):
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    "grace", [-1, "25", None, True, float("nan"), float("inf"), 10**400, datetime.timedelta(seconds=-1)]
)
def test_a_grace_that_is_no_time_is_refused_before_any_signal_comes(grace: Any) -> None:
    runtime, before = LocalRuntime(sf.open("memory://sigterm")), signal.getsignal(signal.SIGTERM)
    for use in (runtime.stop_soon, lambda grace: stop_soon_on_sigterm(runtime, grace=grace)):
        with pytest.raises(ValueError, match=r"^grace is .*; it is a number of seconds, at least 0, or a timedelta"):
            use(grace=grace)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not runtime._soon.is_asked


@pytest.mark.parametrize("grace", [0, 0.5, 3, datetime.timedelta(minutes=1)])
def test_a_time_is_taken_and_the_handler_is_put_back(grace: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_soon_on_sigterm(LocalRuntime(sf.open("memory://sigterm")), grace=grace):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_watch_that_fails_ends_the_process_with_a_sentence() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 128 + signal.SIGTERM
    [sentence] = ended.stderr.splitlines()
    assert sentence.startswith("the SIGTERM watcher failed")
    assert "no stop today" in sentence
    assert sentence.endswith("the newest checkpoint is 7, and the next start goes on from it")
