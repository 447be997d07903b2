"""SQL over state, by DuckDB (``pip install 'stateformat[sql]'``), which can read and nothing else.

Read ``connection`` (what is locked), then ``where`` (a condition over the rows of any stream).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stateformat._lazy import lazy

if TYPE_CHECKING:
    from .where import where_rows as where_rows
else:
    __getattr__, __dir__, __all__ = lazy(__name__, {".where": "where_rows"})
