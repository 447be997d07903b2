"""Writing a checkpoint and making it exist.

Read ``begin_checks``, ``pending``, ``protocol``. Then ``graph`` and ``presence``, which ``pending``
calls, ``copied_objects``, and ``copying`` and ``repairing``, which begin checkpoints of their own.
"""

from __future__ import annotations

from .begin_checks import check_arguments as check_arguments, check_beginning as check_beginning
from .copied_objects import (
    CopyProgress as CopyProgress,
    Progress as Progress,
    check_segments as check_segments,
    copy_objects as copy_objects,
)
from .copying import begin_from as begin_from, copy as copy, rollback as rollback
from .pending import Draft as Draft, PendingCheckpoint as PendingCheckpoint
from .protocol import CommitPermit as CommitPermit, permit as permit
from .repairing import (
    Diagnosis as Diagnosis,
    WayOut as WayOut,
    diagnose as diagnose,
    repair as repair,
)
