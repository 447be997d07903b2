"""What authors of operators, sources and sinks write.

Read ``states``, ``operator``, ``source``, ``durations``.
"""

from __future__ import annotations

from .durations import Duration, microseconds
from .operator import (
    Operator,
    OperatorContext,
    OperatorCoordinator,
    Output,
    Prepared,
    Sender,
    TwoPhaseCommitSink,
    checked_message,
)
from .source import Chunk, EventTime, NoSplit, ReaderContext, Source, Split, SplitEnumerator, StartingPoint
from .states import BroadcastState, Descriptor, ListState, MapState, SplitList, Timers, UnionList, ValueState

__all__ = [
    "BroadcastState",
    "Chunk",
    "Descriptor",
    "Duration",
    "EventTime",
    "ListState",
    "MapState",
    "NoSplit",
    "Operator",
    "OperatorContext",
    "OperatorCoordinator",
    "Output",
    "Prepared",
    "ReaderContext",
    "Sender",
    "Source",
    "Split",
    "SplitEnumerator",
    "SplitList",
    "StartingPoint",
    "Timers",
    "TwoPhaseCommitSink",
    "UnionList",
    "ValueState",
    "checked_message",
    "microseconds",
]


def __dir__() -> list[str]:
    return __all__
