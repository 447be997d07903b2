"""The operators of one subtask, run on batches: ``chain``, ``chained_operator``, ``source_reader``.

``open_snapshot``, ``in_flight`` and ``committables`` are what a snapshot is made of; ``errors`` says whose fault a failure is.
"""

from __future__ import annotations

from .chain import OperatorChain
from .chained_operator import ChainedOperator, ReportedProgress, checked_message
from .errors import FailsAgain, Guard, OperatorError, chain_of, is_for_good, may_pass, signature
from .in_flight import in_flight_batches
from .open_snapshot import OpenSnapshot

__all__ = [
    "ChainedOperator",
    "FailsAgain",
    "Guard",
    "OpenSnapshot",
    "OperatorChain",
    "OperatorError",
    "ReportedProgress",
    "chain_of",
    "checked_message",
    "in_flight_batches",
    "is_for_good",
    "may_pass",
    "signature",
]
