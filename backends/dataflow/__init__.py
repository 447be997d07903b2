"""What authors import: dataflows, operators, sources, sinks, and the states that they declare.

Read ``api``, what authors write, then ``flow``, which connects it, and ``operators``, the
ready-made ones. The rest is the runtime core, which makes every decision of running a dataflow,
without storage, Spark or clock: ``graph`` and ``compile``, ``events``, ``coordinator`` with
``task_tracker``, ``task`` with ``task_inputs`` and ``task_states`` (these are pure), and ``chain``
with ``chained_operator`` and ``source_reader``, which calls the operators. ``testing`` is a harness
for testing operators.
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
    StartingPoint,
    Timers,
    TwoPhaseCommitSink,
    UnionList,
    ValueState,
)
from .flow import Dataflow, Loop, StepOptions, Stream
from .operators.aggregate import Aggregate
from .operators.deduplicate import Deduplicate
from .operators.join import BroadcastJoin
from .operators.per_key.kept import KeyTimers
from .operators.per_key.operator import ApplyPerKey
from .operators.row_steps import Filter, Map, Select
from .operators.window import TumblingWindow

__all__ = [
    "Aggregate",
    "ApplyPerKey",
    "BroadcastJoin",
    "BroadcastState",
    "Chunk",
    "Dataflow",
    "Deduplicate",
    "Descriptor",
    "EventTime",
    "Filter",
    "KeyTimers",
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
    "StartingPoint",
    "StepOptions",
    "Stream",
    "Timers",
    "TumblingWindow",
    "TwoPhaseCommitSink",
    "UnionList",
    "ValueState",
]


def __dir__() -> list[str]:
    return __all__
