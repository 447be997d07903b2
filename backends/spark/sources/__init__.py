"""DataFrames as sources: ``source``, ``offsets``, ``offset_table``, ``files``."""

from __future__ import annotations

from .arrow import to_arrow
from .row_buffer import RowBuffer
from .source import Range, RangeEnumerator, SparkSource

__all__ = ["Range", "RangeEnumerator", "RowBuffer", "SparkSource", "to_arrow"]
