"""Who gets what: pure redistribution rules. Handles in, plan out; opens no file."""

from __future__ import annotations

from redistribution.operator_plan import Action, OperatorPlan
from redistribution.plan import RestorePlan
from redistribution.refusals import PlanWarning, Refusal, RefusalCode, WarningCode
from redistribution.rescale import Rescaled, rescale
from redistribution.restore_plan import plan_restore

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
