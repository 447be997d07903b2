"""Who gets what: pure redistribution rules. Handles in, plan out; opens no file."""

from __future__ import annotations

if __name__ != "stateformat.redistribution":
    raise ImportError(
        "import stateformat.redistribution: redistribution is a part of the package stateformat since 0.2.0"
    )

from .operator_plan import Action, OperatorPlan
from .plan import RestorePlan
from .rescale import Rescaled, rescale
from .restore_plan import plan_restore
from .rules import PlanWarning, Refusal, RefusalCode, WarningCode

__all__ = [
    "Action",
    "OperatorPlan",
    "PlanWarning",
    "Refusal",
    "RefusalCode",
    "Rescaled",
    "RestorePlan",
    "WarningCode",
    "plan_restore",
    "rescale",
]
