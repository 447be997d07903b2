"""The in-process executor: real channels, one thread, and an order of events that a seed decides.

It runs small jobs, and the tests' simulator::

    outcome = LocalRuntime(stateformat.open("/path/to/store")).run(flow)
"""

from __future__ import annotations

from ..runtime import (
    Clock,
    GraceExceeded,
    JobFailed,
    JobOutcome,
    Options,
    Progress,
    ProgressLine,
    RunDiscarded,
    SystemClock,
    VirtualClock,
    stop_soon_on_sigterm,
)
from .run import LocalRun, LocalRuntime

__all__ = [
    "Clock",
    "GraceExceeded",
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
    "stop_soon_on_sigterm",
]


def __dir__() -> list[str]:
    return __all__
