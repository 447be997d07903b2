"""DataFrames as sources: ``source``, ``offsets``, ``offset_table``, ``files``."""

from __future__ import annotations

from .arrow import to_arrow
from .files import DirectoryFrames
from .offset_table import OffsetTable
from .offsets import Offsets, Position
from .row_buffer import RowBuffer
from .source import Range, RangeEnumerator, SparkSource

__all__ = [
    "DirectoryFrames",
    "OffsetTable",
    "Offsets",
    "Position",
    "Range",
    "RangeEnumerator",
    "RowBuffer",
    "SparkSource",
    "to_arrow",
]
