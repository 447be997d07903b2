"""The runtime that all executors share: the driver of a run, the worker of a task, restarts, stops.

``backends.dataflow`` decides the protocol; an executor carries events between driver and workers.
Read ``runtime`` (a run, and the runs of a job), ``starting`` and ``restore`` (what it starts from)
first. Then ``driver`` with ``commits`` and ``requests``, and ``worker`` with ``channels``.
``options`` and ``clock`` are what users give, ``reports`` what they get.
"""

from __future__ import annotations

from . import starting
from .channels import CAPACITY, EdgeLog, LoopFill, Queue, is_wide
from .clock import VIRTUAL_ORIGIN_US, Clock, ProcessingTime, SystemClock, VirtualClock
from .commits import check_places, clean, commit, pending_committables, sinks_of
from .driver import Driver, MessageToCoordinator, SplitRequested
from .ending import GRACE_SECONDS, SigtermWatch, SoonStop, stop_soon_on_sigterm
from .options import Keep, Options, RuntimeOptions, Schedule, check_whole
from .reports import (
    EpochProgress,
    GraceExceeded,
    JobFailed,
    JobOutcome,
    JobPaused,
    Progress,
    ProgressLine,
    ProgressLog,
    RunDiscarded,
    cost_in,
)
from .rescales import parallelism_words
from .restore import (
    OperatorState,
    Restored,
    TaskChannels,
    at_parallelism,
    by_layer,
    channels_of,
    layers_of,
    merge_snapshot,
    plan_of,
    receiver_of,
    restore,
    restored_states,
    sender_of,
    tasks_of,
)
from .runtime import Run, Runtime
from .worker import AllProcessed, Mail, MessageToSubtask, SplitAssigned, Worker

__all__ = [
    "AllProcessed",
    "CAPACITY",
    "VIRTUAL_ORIGIN_US",
    "Clock",
    "Driver",
    "EdgeLog",
    "EpochProgress",
    "GRACE_SECONDS",
    "GraceExceeded",
    "JobFailed",
    "JobOutcome",
    "JobPaused",
    "Keep",
    "LoopFill",
    "Mail",
    "MessageToCoordinator",
    "MessageToSubtask",
    "OperatorState",
    "Options",
    "ProcessingTime",
    "Progress",
    "ProgressLine",
    "ProgressLog",
    "Queue",
    "Restored",
    "Run",
    "RunDiscarded",
    "Runtime",
    "RuntimeOptions",
    "Schedule",
    "SigtermWatch",
    "SoonStop",
    "SplitAssigned",
    "SplitRequested",
    "SystemClock",
    "TaskChannels",
    "VirtualClock",
    "Worker",
    "at_parallelism",
    "by_layer",
    "channels_of",
    "check_places",
    "check_whole",
    "clean",
    "commit",
    "cost_in",
    "is_wide",
    "layers_of",
    "merge_snapshot",
    "pending_committables",
    "parallelism_words",
    "plan_of",
    "receiver_of",
    "restore",
    "restored_states",
    "sender_of",
    "sinks_of",
    "starting",
    "stop_soon_on_sigterm",
    "tasks_of",
]
