"""What commands show, as JSON documents (docs/json.md).

``checkpoint`` describes records, what their handles hold, and problems; ``contents`` the rows of a
runtime's own states; ``plan`` a restore.
"""

from __future__ import annotations

from .checkpoint import (
    Holdings,
    history_document,
    holds_document,
    operator_size,
    problem_document,
    published_document,
    record_document,
    reference,
)
from .contents import contents
from .plan import plan_document

__all__ = [
    "Holdings",
    "contents",
    "history_document",
    "holds_document",
    "operator_size",
    "plan_document",
    "problem_document",
    "published_document",
    "record_document",
    "reference",
]
