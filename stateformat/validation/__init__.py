"""Validation of stored checkpoints: every broken rule of SPEC.md as a finding.

Read ``validator`` (record, manifest, history, then all checkpoints of a store) and ``segments``
(one file and its rows). ``sharing`` reads each segment once. The rules that need no file are in
``stateformat.rules``.
"""

from __future__ import annotations

from ..findings import Level
from .sharing import SharedSegments
from .validator import check_checkpoint, newest_whole, validate, validate_all

__all__ = [
    "Level",
    "SharedSegments",
    "check_checkpoint",
    "newest_whole",
    "validate",
    "validate_all",
]
