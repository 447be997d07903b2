"""How keyed state is laid out in a stream: from bytes to entries, and from entries to rows.

Read ``walk`` (entries of canonical key groups), ``forms`` (which columns a state has), then
``canonical`` and ``heap``, the two layouts.
"""

from __future__ import annotations

from .canonical import count_elements, prefix_size, rows_of, timer_key, timer_namespace
from .forms import (
    TIMER_STATES,
    TTL,
    Form,
    Layout,
    Parts,
    Rows,
    batch_of,
    form_of,
    has_text,
    is_ambiguous,
    is_window,
    tags,
)
from .heap import HeapEntries, Stored, frame_compressed, frame_heap, rows_of_heap
from .walk import PADDING, Entries, Frames, frame_groups

__all__ = [
    "Entries",
    "Form",
    "Frames",
    "HeapEntries",
    "Layout",
    "PADDING",
    "Parts",
    "Rows",
    "Stored",
    "TIMER_STATES",
    "TTL",
    "batch_of",
    "count_elements",
    "form_of",
    "frame_compressed",
    "frame_groups",
    "frame_heap",
    "has_text",
    "is_ambiguous",
    "is_window",
    "prefix_size",
    "rows_of",
    "rows_of_heap",
    "tags",
    "timer_key",
    "timer_namespace",
]
