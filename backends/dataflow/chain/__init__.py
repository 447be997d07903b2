"""The operators of one chain in one subtask.

Read ``chain``, ``chained_operator``, and ``source_reader``. ``committables`` and ``in_flight`` are
parts of a snapshot; ``gathered_batches`` joins small batches; ``errors`` records what user code
raised and where.
"""

from __future__ import annotations

from .chain import OperatorChain
from .chained_operator import ChainedOperator, ReportedProgress
from .combiner import Combiner, combiners_of
from .errors import FailsAgain, Guard, OperatorError, chain_of, is_for_good, may_pass, signature
from .in_flight import OpenSnapshot, in_flight_batches
from .source_reader import Holder

__all__ = [
    "ChainedOperator",
    "Combiner",
    "FailsAgain",
    "Guard",
    "Holder",
    "OpenSnapshot",
    "OperatorChain",
    "OperatorError",
    "ReportedProgress",
    "chain_of",
    "combiners_of",
    "in_flight_batches",
    "is_for_good",
    "may_pass",
    "signature",
]
