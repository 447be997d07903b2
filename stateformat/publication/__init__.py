"""Writing a checkpoint and making it exist.

Read ``begin_checks``, ``pending``, ``protocol``. Then ``graph`` and ``presence``, which ``pending``
calls, and ``copy`` and ``repair``, which begin checkpoints of their own.
"""

from __future__ import annotations

from .begin_checks import check_arguments, check_beginning
from .copy import CopyProgress, Progress, begin_from, copy, copy_objects, rollback
from .pending import Draft, PendingCheckpoint
from .protocol import CommitPermit, permit
from .repair import Diagnosis, WayOut, diagnose, repair

__all__ = [
    "CommitPermit",
    "CopyProgress",
    "Diagnosis",
    "Draft",
    "PendingCheckpoint",
    "Progress",
    "WayOut",
    "begin_from",
    "check_arguments",
    "check_beginning",
    "copy",
    "copy_objects",
    "diagnose",
    "permit",
    "repair",
    "rollback",
]
