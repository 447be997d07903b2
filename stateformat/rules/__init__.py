"""Rules of a checkpoint that need no file: its graph (``statuses``, ``graph``) and its content (``content``)."""

from __future__ import annotations

from .content import check_content, check_handles
from .graph import check_graph, check_states
from .statuses import (
    Unequal,
    Unfit,
    chains,
    cycle,
    inputs_by_target,
    saved_statuses,
    unequal_parallelism,
    unfit_predecessors,
)

__all__ = [
    "Unequal",
    "Unfit",
    "chains",
    "check_content",
    "check_graph",
    "check_handles",
    "check_states",
    "cycle",
    "inputs_by_target",
    "saved_statuses",
    "unequal_parallelism",
    "unfit_predecessors",
]
