"""Who gets what: makes the plan of a restore from handles. Nothing here opens a file.

Read ``restore_plan`` (how a plan is made) and ``tables`` (the arrays that all rules work on), then
one rule for each mode: ``keyed``, ``even_split``, ``union``, ``broadcast``, ``in_flight``,
``progress``. ``rules`` refuses what cannot be restored. ``plan``, ``plan_text``, ``plan_document``,
``operator_plan`` and ``columns`` are for reading a plan; ``rescale`` makes the content of a new
checkpoint from it.
"""

from __future__ import annotations

if __name__ != "stateformat.redistribution":
    raise ImportError(
        "import stateformat.redistribution: redistribution is a part of the package stateformat since 0.2.0"
    )

from stateformat.errors import ErrorKind
from stateformat.findings import Finding

from .columns import ColumnPlan
from .keyed import cut_keyed
from .operator_plan import Action, OperatorPlan
from .plan import RestorePlan
from .plan_document import plan_document
from .plan_text import PlanDocument
from .rescale import Rescaled, rescale
from .restore_plan import Plannable, plan_restore
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
