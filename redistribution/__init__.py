"""Who gets what: makes the plan of a restore from handles. Nothing here opens a file.

Read ``restore_plan`` (how a plan is made, and the content of a new checkpoint from it), ``tables``
(the arrays that all rules work on), then ``modes``, which has a rule for each mode. ``rules``
refuses what cannot be restored. ``plan`` and ``columns`` are for reading a plan.
"""

from __future__ import annotations

if __name__ != "stateformat.redistribution":
    raise ImportError(
        "import stateformat.redistribution: redistribution is a part of the package stateformat since 0.2.0"
    )

from stateformat._lazy import former
from stateformat.errors import ErrorKind
from stateformat.findings import Finding

from .columns import ColumnPlan
from .modes import cut_keyed
from .plan import Action, OperatorPlan, PlanDocument, RestorePlan, plan_document
from .restore_plan import Plannable, Rescaled, plan_restore, rescale
from .rules import warning
from .tables import States, assemble, read_handles

__getattr__ = former(
    __name__,
    {
        **dict.fromkeys(("Refusal", "PlanWarning"), (Finding, "it is stateformat.Finding now, with other arguments")),
        **dict.fromkeys(("RefusalCode", "WarningCode"), (ErrorKind, "it is stateformat.ErrorKind now")),
    },
    leaves_in="0.3",
)

__all__ = [
    "Action",
    "ColumnPlan",
    "OperatorPlan",
    "PlanDocument",
    "Plannable",
    "Rescaled",
    "RestorePlan",
    "States",
    "assemble",
    "cut_keyed",
    "plan_document",
    "plan_restore",
    "read_handles",
    "rescale",
    "warning",
]
