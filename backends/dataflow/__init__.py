"""What authors write and import: dataflows, operators, sources, sinks, and the states that they declare.

The rooms below are the runtime core: every decision of running a dataflow. No storage, no Spark, no clock.
"""

from __future__ import annotations

from .api import (
    BroadcastState,
    Chunk,
    Descriptor,
    EventTime,
    ListState,
    MapState,
    NoSplit,
    Operator,
    OperatorContext,
    OperatorCoordinator,
    Output,
    Prepared,
    ReaderContext,
    Sender,
    Source,
    Split,
    SplitEnumerator,
    SplitList,
    Timers,
    TwoPhaseCommitSink,
    UnionList,
    ValueState,
)
from .flow import Dataflow, Loop, StepOptions, Stream
from .operators import Aggregate, BroadcastJoin, Deduplicate, Filter, Map, Select, TumblingWindow

__all__ = [
    "Aggregate",
    "BroadcastJoin",
    "BroadcastState",
    "Chunk",
    "Dataflow",
    "Deduplicate",
    "Descriptor",
    "EventTime",
    "Filter",
    "ListState",
    "Loop",
    "Map",
    "MapState",
    "NoSplit",
    "Operator",
    "OperatorContext",
    "OperatorCoordinator",
    "Output",
    "Prepared",
    "ReaderContext",
    "Select",
    "Sender",
    "Source",
    "Split",
    "SplitEnumerator",
    "SplitList",
    "StepOptions",
    "Stream",
    "Timers",
    "TumblingWindow",
    "TwoPhaseCommitSink",
    "UnionList",
    "ValueState",
]
