"""Validation of stored checkpoints: every broken rule of SPEC.md as a problem.

Read ``validator`` (record, manifest, history), ``segments`` (one file), then ``rows`` (its rows).
``sharing`` reads each segment once, ``everything`` is about all checkpoints of a store. The rules
that need no file are in ``stateformat.rules``.
"""

from __future__ import annotations

from ..findings import Level
from .everything import newest_whole, validate_all
from .sharing import SharedSegments
from .validator import check_checkpoint, validate

__all__ = [
    "Level",
    "SharedSegments",
    "check_checkpoint",
    "newest_whole",
    "validate",
    "validate_all",
]
