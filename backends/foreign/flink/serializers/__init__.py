"""Flink's serializers: from their snapshots to descriptions, from bytes of values to Arrow.

Read ``lanes`` (many positions in one buffer), ``serializer`` (what each one provides), then the
kinds: ``plain``, ``text``.
"""

from __future__ import annotations

from .lanes import Lanes, gathered, ramp
from .serializer import Opaque, Serializer, scattered

__all__ = ["Lanes", "Opaque", "Serializer", "gathered", "ramp", "scattered"]
