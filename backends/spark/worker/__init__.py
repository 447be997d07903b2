"""What runs in the Python workers of Spark: ``level``, ``task_run``, ``loop_end``, ``task_cache``."""

from __future__ import annotations

from .level import Level

__all__ = ["Level"]
