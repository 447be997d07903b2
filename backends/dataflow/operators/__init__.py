"""Ready-made operators without input and output of their own; sources and sinks are in ``backends.connectors``."""

from __future__ import annotations

from backends.dataflow.operators.aggregate import Aggregate
from backends.dataflow.operators.deduplicate import Deduplicate
from backends.dataflow.operators.join import BroadcastJoin
from backends.dataflow.operators.stateless import Filter, Map, Select
from backends.dataflow.operators.window import TumblingWindow

__all__ = ["Aggregate", "BroadcastJoin", "Deduplicate", "Filter", "Map", "Select", "TumblingWindow"]
