"""States as programs declare them, and how a declaration may change.

Read ``declare`` (and what users call states), then ``evolution``. ``delta_policy`` decides whether
a state is written whole or as a delta.
"""

from __future__ import annotations

from ..ttl import Ttl
from .declare import (
    Columns,
    Named,
    as_schema,
    broadcast_state,
    column_name,
    committables_state,
    coordinator_state,
    even_split_state,
    in_flight_state,
    labels_of,
    list_state,
    map_state,
    named,
    progress_state,
    split_drop,
    timers,
    union_state,
    value_state,
)
from .delta_policy import UNKNOWN_MAX, Layer, layers_kept, should_fold, warn_of_layers
from .evolution import (
    Changes,
    check_columns_known,
    evolution_faults,
    evolve_state,
    new_state,
    rewritten,
    type_text,
    widening_faults,
)

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
