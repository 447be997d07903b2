"""Every invariant of SPEC.md as a check that returns problems: ``validator``, then ``segments`` and ``rows``."""

from __future__ import annotations

from .segments import Level
from .validator import check_checkpoint, validate

__all__ = ["Level", "check_checkpoint", "validate"]
