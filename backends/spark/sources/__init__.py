"""DataFrames as sources. Read ``offsets``, then ``source``; then ``files``, ``offset_table``.

``position_log`` stores positions that grow without end, and ``look_ahead`` finds the end of the
next range while an epoch runs. ``arrow`` checks columns and ``row_buffer`` passes rows to readers.
"""

from __future__ import annotations

from .arrow import arrow_schema_of as arrow_schema_of, to_arrow as to_arrow
from .files import DirectoryFrames as DirectoryFrames
from .offset_table import OffsetTable as OffsetTable
from .offsets import Offsets as Offsets, Position as Position
from .row_buffer import RowBuffer as RowBuffer
from .source import Range as Range, RangeEnumerator as RangeEnumerator, SparkSource as SparkSource
