"""The channels between tasks of one process, and which of them a task may take from now.

Read ``queue`` (one channel), ``edge_log`` (all channels of a wide edge), then ``ready_inputs`` and
``outputs``.
"""

from __future__ import annotations

from .edge_log import EdgeLog, ReceivingEnd, SendingEnd, is_wide
from .outputs import Outputs
from .queue import CAPACITY, LoopFill, Queue
from .ready_inputs import ReadyInputs

__all__ = [
    "CAPACITY",
    "EdgeLog",
    "LoopFill",
    "Outputs",
    "Queue",
    "ReadyInputs",
    "ReceivingEnd",
    "SendingEnd",
    "is_wide",
]
