"""Validation of a stored checkpoint: every broken rule of SPEC.md as a problem.

Read ``validator`` (record, manifest, history), ``segments`` (one file), then ``rows`` (its rows).
The rules that need no file are in ``stateformat.rules``.
"""

from __future__ import annotations

from .segments import Level
from .validator import check_checkpoint, validate

__all__ = ["Level", "check_checkpoint", "validate"]
