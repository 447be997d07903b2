"""Tests that every storage must pass, for authors of storages. Needs pytest."""

from __future__ import annotations

from .conformance import StorageConformance
from .objects import ObjectConformance

__all__ = ["ObjectConformance", "StorageConformance"]
