"""Reasons why a checkpoint cannot be restored into a topology, and warnings about one that can.

Both are data. A plan collects every refusal, so the user sees everything that has to change at
once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class RefusalCode(StrEnum):
    """The rule that is broken. A released code never changes its meaning."""

    # Faults of the checkpoint by itself.
    UNION_PARTIALLY_FINISHED = "union_partially_finished"
    STATUS_CONTRADICTION = "status_contradiction"
    HANDLE_MISSING = "handle_missing"
    # Faults of the topology by itself.
    INVALID_TOPOLOGY = "invalid_topology"
    INVALID_PARALLELISM = "invalid_parallelism"
    PARALLELISM_DIFFERS = "parallelism_differs"
    # Numbers and keys that do not fit.
    PARALLELISM_ABOVE_MAX = "parallelism_above_max"
    MAX_PARALLELISM_CHANGED = "max_parallelism_changed"
    KEY_HASH_CHANGED = "key_hash_changed"
    KEYED_BEHIND_POINTWISE = "keyed_behind_pointwise"
    # States that do not fit.
    OPERATOR_MISSING = "operator_missing"
    STATE_MISSING = "state_missing"
    SCHEMA_CANNOT_EVOLVE = "schema_cannot_evolve"
    COLUMN_MISSING = "column_missing"
    IN_FLIGHT_NOT_ALLOWED = "in_flight_not_allowed"
    IN_FLIGHT_EDGE_MISSING = "in_flight_edge_missing"
    IN_FLIGHT_EDGE_CHANGED = "in_flight_edge_changed"
    IN_FLIGHT_BROADCAST = "in_flight_broadcast"
    # Finished operators that do not fit.
    FULLY_FINISHED_PREDECESSOR = "fully_finished_predecessor"
    PARTIALLY_FINISHED_PREDECESSOR = "partially_finished_predecessor"
    CHAIN_PINNED = "chain_pinned"


class WarningCode(StrEnum):
    """What a plan does that its reader should know. A released code never changes its meaning."""

    UNCHAINED = "unchained"
    FINISHED_SUBTASKS_START = "finished_subtasks_start"
    STATE_DROPPED = "state_dropped"
    COLUMN_DROPPED = "column_dropped"
    STATE_NOT_READ = "state_not_read"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason why a restore is refused."""

    code: RefusalCode
    operator: str
    message: str
    """Names the operator and the values that disagree."""
    advice: str
    details: Mapping[str, Any] = field(default_factory=dict)
    """The values for programs: strings, integers, booleans, and lists of them."""

    def __str__(self) -> str:
        return f"{self.message}; {self.advice} [{self.code}]"


@dataclass(frozen=True, slots=True)
class PlanWarning:
    """Something that the plan does and that the caller may not expect."""

    code: WarningCode
    operator: str
    message: str
