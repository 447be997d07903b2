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

from stateformat.errors import ErrorKind
from stateformat.findings import Finding

from .columns import ColumnPlan
from .modes import cut_keyed
from .plan import Action, OperatorPlan, PlanDocument, RestorePlan, plan_document
from .restore_plan import Plannable, Rescaled, plan_restore, rescale
from .rules import warning
from .tables import States, assemble, read_handles

# The former names, until 0.3.
Refusal = PlanWarning = Finding
RefusalCode = WarningCode = ErrorKind

__all__ = [
    "Action",
    "ColumnPlan",
    "OperatorPlan",
    "PlanDocument",
    "PlanWarning",
    "Plannable",
    "Refusal",
    "RefusalCode",
    "Rescaled",
    "RestorePlan",
    "States",
    "WarningCode",
    "assemble",
    "cut_keyed",
    "plan_document",
    "plan_restore",
    "read_handles",
    "rescale",
    "warning",
]
