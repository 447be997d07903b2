"""The in-process executor: the whole protocol with real channels, one thread, an order drawn from a seed.

The default for small jobs, and the simulator's subject::

    outcome = LocalRuntime(stateformat.open("/path/to/store")).run(flow)
"""

from __future__ import annotations

from backends.local.run import LocalRun
from backends.local.runtime import LocalRuntime
from backends.running.clock import Clock, SystemClock, VirtualClock
from backends.running.options import Options
from backends.running.outcome import JobFailed, JobOutcome, RunDiscarded
from backends.running.progress import Progress, ProgressLine

__all__ = [
    "Clock",
    "JobFailed",
    "JobOutcome",
    "LocalRun",
    "LocalRuntime",
    "Options",
    "Progress",
    "ProgressLine",
    "RunDiscarded",
    "SystemClock",
    "VirtualClock",
]
