"""Rescales of a running job, and messages about another parallelism."""

from __future__ import annotations

from .going_on import (
    Rescales as Rescales,
    SavedStop as SavedStop,
    parallelism_words as parallelism_words,
)
