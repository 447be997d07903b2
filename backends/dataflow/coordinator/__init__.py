"""The checkpoint coordinator: ``coordinator``, with its ``barrier``, its ``task_tracker`` and its ``stop``."""

from __future__ import annotations

from .coordinator import LOOP_ROUNDS_MAX, Coordinator

__all__ = ["LOOP_ROUNDS_MAX", "Coordinator"]
