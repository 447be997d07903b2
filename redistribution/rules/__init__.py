"""What a topology may not do to a checkpoint: the refusals, with the rule for each.

Read ``refusals`` (the values), ``compatibility`` (numbers, keys, states, records in flight),
``graph`` (finished operators, chains), then ``checkpoint`` (a checkpoint that contradicts itself).
"""

from __future__ import annotations

from .checkpoint import Found, HandleRules, check_owners, checkpoint_refusals
from .compatibility import (
    Match,
    check_drop,
    in_flight_refusals,
    key_refusals,
    parallelism_refusals,
    resolve,
    state_refusals,
)
from .graph import disturbed, predecessor_refusals, topology_refusals, unchain
from .refusals import PlanWarning, Refusal, RefusalCode, WarningCode

__all__ = [
    "Found",
    "HandleRules",
    "Match",
    "PlanWarning",
    "Refusal",
    "RefusalCode",
    "WarningCode",
    "check_drop",
    "check_owners",
    "checkpoint_refusals",
    "disturbed",
    "in_flight_refusals",
    "key_refusals",
    "parallelism_refusals",
    "predecessor_refusals",
    "resolve",
    "state_refusals",
    "topology_refusals",
    "unchain",
]
