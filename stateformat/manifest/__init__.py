"""The manifest (SPEC.md section 6): the table of all state handles of a checkpoint.

Read ``table``, then ``rules``, ``handle_rows``, ``handle_sharing`` and ``slicing``.
"""

from __future__ import annotations

from .handle_rows import HandleRows, group_faults, handle_rows, row_group_faults
from .handle_sharing import codes_of, first_uses, sharing_faults
from .rules import BATCH_ROWS, handle_faults, integers, runs, state_runs, take_rows, texts, unusable
from .slicing import carried_by_plan, carried_handles, cut_handles, place_on_top, with_spilled
from .table import (
    INLINE_BYTES_MAX,
    Manifest,
    decode_manifest,
    encode_manifest,
    handles_table,
    manifest_ref,
    read_handles,
    read_unpublished,
    sort_handles,
    spill_inline,
    totals,
    verify_manifest,
)

__all__ = [
    "BATCH_ROWS",
    "INLINE_BYTES_MAX",
    "HandleRows",
    "Manifest",
    "carried_by_plan",
    "carried_handles",
    "codes_of",
    "cut_handles",
    "decode_manifest",
    "encode_manifest",
    "first_uses",
    "group_faults",
    "handle_faults",
    "handle_rows",
    "handles_table",
    "integers",
    "manifest_ref",
    "place_on_top",
    "read_handles",
    "read_unpublished",
    "row_group_faults",
    "runs",
    "sharing_faults",
    "sort_handles",
    "spill_inline",
    "state_runs",
    "take_rows",
    "texts",
    "totals",
    "unusable",
    "verify_manifest",
    "with_spilled",
]
