"""Checks of a Parquet file before Arrow may read it: its footer, its pages, its memory.

Read ``footer`` first, then ``page_checks``.
"""

from __future__ import annotations

from .footer import Footer, FooterFault, read_footer, without_arrow_schema
from .page_checks import (
    DECODED_BYTES_MAX,
    HOLE_BYTES_MAX,
    SEGMENT_BYTES_MAX,
    ByteRange,
    LimitFault,
    PartialFile,
    byte_ranges,
    check_columns,
    check_pages,
    check_row_group,
    check_size,
    decoded_bytes,
    have_string_dictionary,
    stored_bytes,
    string_bytes,
)

__all__ = [
    "DECODED_BYTES_MAX",
    "HOLE_BYTES_MAX",
    "SEGMENT_BYTES_MAX",
    "ByteRange",
    "Footer",
    "FooterFault",
    "LimitFault",
    "PartialFile",
    "byte_ranges",
    "check_columns",
    "check_pages",
    "check_row_group",
    "check_size",
    "decoded_bytes",
    "have_string_dictionary",
    "read_footer",
    "stored_bytes",
    "string_bytes",
    "without_arrow_schema",
]
