"""Writing a checkpoint and making it exist.

Read ``pending`` and ``protocol``, then ``copying`` and ``repairing``, which begin checkpoints of
their own.
"""

from __future__ import annotations

from .copying import (
    CopyProgress as CopyProgress,
    Progress as Progress,
    begin_from as begin_from,
    check_segments as check_segments,
    copy as copy,
    copy_objects as copy_objects,
    rollback as rollback,
)
from .pending import (
    Draft as Draft,
    PendingCheckpoint as PendingCheckpoint,
    check_arguments as check_arguments,
    check_beginning as check_beginning,
)
from .protocol import CommitPermit as CommitPermit, permit as permit
from .repairing import (
    Diagnosis as Diagnosis,
    WayOut as WayOut,
    diagnose as diagnose,
    repair as repair,
)
