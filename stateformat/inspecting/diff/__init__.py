"""What differs between two checkpoints, of one store or of two: :func:`diff_checkpoints`.

Read ``checkpoints`` (the entry point), ``graphs`` (what counts as content, and what is placement),
``states`` (one state on both sides), ``columns`` (which columns are the same), ``counting`` (rows
by change and key group), ``pattern`` (whether changes are in few key groups), ``sequences`` (the
order of entries), ``difference`` (what is found, and as JSON).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._lazy import lazy

if TYPE_CHECKING:
    from .checkpoints import diff_checkpoints as diff_checkpoints, prove_checkpoints as prove_checkpoints
    from .difference import (
        CheckpointDiff as CheckpointDiff,
        column_changes as column_changes,
        proof_document as proof_document,
    )
    from .states import Renames as Renames, StateDiff as StateDiff
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".checkpoints": "diff_checkpoints prove_checkpoints",
            ".difference": "CheckpointDiff column_changes proof_document",
            ".states": "Renames StateDiff",
        },
    )
