"""What a page shows, as JSON."""

from __future__ import annotations

from .checkpoint import (
    Holdings,
    history_document,
    holds_document,
    operator_size,
    published_document,
    record_document,
    reference,
    totals_document,
)
from .contents import contents

__all__ = [
    "Holdings",
    "contents",
    "history_document",
    "holds_document",
    "operator_size",
    "published_document",
    "record_document",
    "reference",
    "totals_document",
]
