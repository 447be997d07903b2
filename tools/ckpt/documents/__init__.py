"""What commands show, as JSON documents (docs/json.md).

``checkpoint`` describes records and what their handles hold, ``contents`` the rows of a runtime's
own states, ``plan`` a restore, ``problems`` what a validation found.
"""

from __future__ import annotations

from .checkpoint import (
    Holdings,
    history_document,
    holds_document,
    operator_size,
    published_document,
    record_document,
    reference,
)
from .contents import contents
from .plan import plan_document
from .problems import problem_document

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
