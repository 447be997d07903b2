"""How keyed state is laid out in a stream: from bytes to entries, and from entries to rows.

Read ``walk`` (entries of canonical key groups), ``forms`` (which columns a state has), then
``canonical`` and ``heap``, the two layouts.
"""

from __future__ import annotations

from .canonical import count_elements, prefix_size, rows_of
from .forms import TIMER_STATES, TTL, Form, Layout, Parts, form_of, has_text, is_ambiguous, is_window
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
    "Stored",
    "TIMER_STATES",
    "TTL",
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
]
