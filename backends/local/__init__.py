"""The in-process executor: the whole protocol with real channels, one thread, an order drawn from a seed.

The default for small jobs, and the simulator's subject::

    outcome = LocalRuntime(stateformat.open("/path/to/store")).run(flow)
"""

from __future__ import annotations

from ..runtime import (
    Clock,
    JobFailed,
    JobOutcome,
    Options,
    Progress,
    ProgressLine,
    RunDiscarded,
    SystemClock,
    VirtualClock,
)
from .run import LocalRun
from .runtime import LocalRuntime

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
