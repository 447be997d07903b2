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
from .copying import begin_from as begin_from, copy as copy, left_behind as left_behind, rollback as rollback
from .pending import Draft as Draft, PendingCheckpoint as PendingCheckpoint, Replaced as Replaced
from .protocol import CommitPermit as CommitPermit, permit as permit
from .repairing import (
    Diagnosis as Diagnosis,
    WayOut as WayOut,
    check_next_id as check_next_id,
    diagnose as diagnose,
    ref_of_unreadable as ref_of_unreadable,
    repair as repair,
)
