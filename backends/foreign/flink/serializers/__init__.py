"""Flink's serializers: from their snapshots to descriptions, from bytes of values to Arrow.

Read ``lanes`` (many positions in one buffer), ``serializer`` (what each one provides), then the
kinds: ``plain``, ``text``, ``records``, ``collections``, ``pojo``, ``times``, ``numbers``; last
``snapshots``, which makes serializers from bytes.
"""

from __future__ import annotations

from .collections import ListOf, MapOf, element_lanes
from .lanes import Lanes, gathered, ramp
from .plain import Nothing
from .records import Sequential, Timer, Ttl
from .serializer import Opaque, Serializer, scattered
from .snapshots import UnknownClass, read_top, read_versioned

__all__ = [
    "Lanes",
    "ListOf",
    "MapOf",
    "Nothing",
    "Opaque",
    "Sequential",
    "Serializer",
    "Timer",
    "Ttl",
    "UnknownClass",
    "element_lanes",
    "gathered",
    "ramp",
    "read_top",
    "read_versioned",
    "scattered",
]
