"""The manifest (SPEC.md section 4): the table of all state handles of a checkpoint.

Read ``table`` (in memory), ``codec`` (as bytes), ``outline`` (the part that plans need), ``rules``
(for each row), ``segment_rules`` (for rows that name one segment) and ``slicing`` (rows cut for new
subtasks). ``columns`` has helpers for tables of handles; the planner, the readers and the validator
use them too.
"""

from __future__ import annotations

from .codec import decode_manifest, encode_manifest, manifest_ref, read_manifest, verify_manifest
from .columns import (
    BATCH_ROWS,
    Ints,
    Mask,
    before,
    integers,
    lists,
    one_chunk,
    runs,
    spread,
    state_runs,
    take_rows,
    texts,
)
from .outline import decode_outline
from .rules import handle_faults, unusable
from .segment_rules import (
    HandleRows,
    codes_of,
    first_uses,
    group_faults,
    handle_rows,
    row_group_faults,
    sharing_faults,
)
from .slicing import carried_by_plan, carried_handles, cut_handles, place_on_top, with_spilled
from .table import INLINE_BYTES_MAX, Manifest, handle_order, handles_table, sort_handles, spill_inline, totals

__all__ = [
    "BATCH_ROWS",
    "HandleRows",
    "INLINE_BYTES_MAX",
    "Ints",
    "Manifest",
    "Mask",
    "before",
    "carried_by_plan",
    "carried_handles",
    "codes_of",
    "cut_handles",
    "decode_manifest",
    "decode_outline",
    "encode_manifest",
    "first_uses",
    "group_faults",
    "handle_faults",
    "handle_order",
    "handle_rows",
    "handles_table",
    "integers",
    "lists",
    "manifest_ref",
    "one_chunk",
    "place_on_top",
    "read_manifest",
    "row_group_faults",
    "runs",
    "sharing_faults",
    "sort_handles",
    "spill_inline",
    "spread",
    "state_runs",
    "take_rows",
    "texts",
    "totals",
    "unusable",
    "verify_manifest",
    "with_spilled",
]
