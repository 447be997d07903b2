"""What is known of a checkpoint, as JSON documents (docs/json.md): facts, no text.

``checkpoint`` describes records, what their handles hold, and what validation found. ``columns``
has lists that stay columns, ``rows`` converts Arrow rows to JSON. ``stateformat.pages`` makes pages
from these documents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .checkpoint import (
        Document as Document,
        Holdings as Holdings,
        checkpoint_document as checkpoint_document,
        fault_document as fault_document,
        history_document as history_document,
        holds_document as holds_document,
        operator_size as operator_size,
        origin_document as origin_document,
        problem_document as problem_document,
        published_document as published_document,
        record_document as record_document,
        reference as reference,
        report_document as report_document,
        store_report_document as store_report_document,
    )
    from .columns import JsonColumn as JsonColumn, JsonRows as JsonRows
    from .rows import (
        flat as flat,
        hexadecimal as hexadecimal,
        json_lines as json_lines,
        json_texts as json_texts,
        lines_of as lines_of,
        objects as objects,
    )
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".checkpoint": "Document Holdings checkpoint_document fault_document history_document holds_document "
            "operator_size origin_document problem_document published_document record_document reference "
            "report_document store_report_document",
            ".columns": "JsonColumn JsonRows",
            ".rows": "flat hexadecimal json_lines json_texts lines_of objects",
        },
    )
