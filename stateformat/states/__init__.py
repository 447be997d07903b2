"""States as programs declare them, and how a declaration may change.

Read ``declare`` first, then ``evolution`` (one state), ``continuation`` (a user's change to a
state), ``delta_policy`` (whole or delta) and ``naming`` (what users call them).
"""

from __future__ import annotations

from ..ttl import Ttl
from .continuation import Changes, check_columns_known, evolve_state, new_state
from .declare import (
    Columns,
    as_schema,
    broadcast_state,
    committables_state,
    coordinator_state,
    even_split_state,
    in_flight_state,
    list_state,
    map_state,
    progress_state,
    timers,
    union_state,
    value_state,
)
from .delta_policy import UNKNOWN_MAX, Layer, layers_kept, should_fold, warn_of_layers
from .evolution import evolution_faults, rewritten, type_text, widening_faults
from .naming import Named, column_name, labels_of, named, split_drop

__all__ = [
    "UNKNOWN_MAX",
    "Changes",
    "Columns",
    "Layer",
    "Named",
    "Ttl",
    "as_schema",
    "new_state",
    "broadcast_state",
    "check_columns_known",
    "column_name",
    "committables_state",
    "evolve_state",
    "coordinator_state",
    "even_split_state",
    "evolution_faults",
    "in_flight_state",
    "labels_of",
    "layers_kept",
    "list_state",
    "map_state",
    "named",
    "progress_state",
    "rewritten",
    "should_fold",
    "split_drop",
    "timers",
    "type_text",
    "union_state",
    "value_state",
    "warn_of_layers",
    "widening_faults",
]
