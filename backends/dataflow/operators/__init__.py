"""Ready-made operators. Sources and sinks are in ``stateformat.backends.connectors``.

Read ``row_steps`` first; ``aggregate`` and ``window`` share ``accumulators``. ``per_key`` is a
separate package: it calls plain Python for each key.
"""

from __future__ import annotations

from .aggregate import Aggregate
from .deduplicate import Deduplicate
from .join import BroadcastJoin
from .row_steps import Filter, Map, Predicate, Select, empty_batch
from .window import TumblingWindow

__all__ = [
    "Aggregate",
    "BroadcastJoin",
    "Deduplicate",
    "Filter",
    "Map",
    "Predicate",
    "Select",
    "TumblingWindow",
    "empty_batch",
]
