"""How the rows of one state in two checkpoints are compared.

Read ``plan`` (in which steps, and what need not be read), ``steps`` (what each step reads),
``rows`` (which rows of two streams differ, and when two values are equal).
"""

from __future__ import annotations

from .plan import keyed_runs, planned, row_runs, segment_codes, side_of
from .rows import CHANGE, differences, row_hashes
from .steps import RowShape, Side, Step

__all__ = [
    "CHANGE",
    "RowShape",
    "Side",
    "Step",
    "differences",
    "keyed_runs",
    "planned",
    "row_hashes",
    "row_runs",
    "segment_codes",
    "side_of",
]
