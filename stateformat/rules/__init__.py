"""The rules of a checkpoint that need no file, for publishing, validation, reading and planning.

Read ``statuses`` (what the graph requires of finished operators), ``graph`` (operators, edges and
states by themselves), then ``content`` (handles compared with graph and states).
"""

from __future__ import annotations

from .content import HandleChecks, check_content
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
    "HandleChecks",
    "Unequal",
    "Unfit",
    "chains",
    "check_content",
    "check_graph",
    "check_states",
    "cycle",
    "inputs_by_target",
    "saved_statuses",
    "unequal_parallelism",
    "unfit_predecessors",
]
