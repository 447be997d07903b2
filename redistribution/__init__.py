"""Who gets what: pure redistribution rules. Handles in, plan out; opens no file."""

from __future__ import annotations

if __name__ != "stateformat.redistribution":
    raise ImportError(
        "import stateformat.redistribution: redistribution is a part of the package stateformat since 0.2.0"
    )

from .columns import ColumnPlan, column_plans
from .keyed import cut_keyed
from .operator_plan import Action, OperatorPlan
from .plan import RestorePlan
from .rescale import Rescaled, rescale
from .restore_plan import plan_restore
from .rules import PlanWarning, Refusal, RefusalCode, WarningCode
from .tables import States, assemble, read_handles

__all__ = [
    "Action",
    "ColumnPlan",
    "OperatorPlan",
    "PlanWarning",
    "Refusal",
    "RefusalCode",
    "Rescaled",
    "RestorePlan",
    "States",
    "WarningCode",
    "assemble",
    "column_plans",
    "cut_keyed",
    "plan_restore",
    "read_handles",
    "rescale",
]
