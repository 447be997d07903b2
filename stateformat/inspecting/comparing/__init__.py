"""How the rows of one state in two checkpoints are compared.

Read ``sides`` (what is read, in which columns), ``matching`` (what two checkpoints share by
metadata), ``planning`` (in which steps, and what need not be read), ``steps`` (what each step
reads), ``differing`` (which rows of two streams differ), ``values`` (when two values are equal).
"""

from __future__ import annotations

from .differing import CHANGE, CHANGES, ByKey, differences
from .matching import Runs, keyed_runs, row_runs, segment_codes
from .planning import planned, side_of
from .sides import RowShape, Side
from .steps import Step
from .values import equal_values, row_hashes, value_buckets, value_codes

__all__ = [
    "CHANGE",
    "CHANGES",
    "ByKey",
    "RowShape",
    "Runs",
    "Side",
    "Step",
    "differences",
    "equal_values",
    "keyed_runs",
    "planned",
    "row_hashes",
    "row_runs",
    "segment_codes",
    "side_of",
    "value_buckets",
    "value_codes",
]
