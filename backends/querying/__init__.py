"""SQL over state, with DuckDB (``pip install 'stateformat[sql]'``), which can only read.

Read ``connection`` (DuckDB, locked), ``statement`` (which queries and conditions are accepted),
``relations`` (their tables), ``answer`` (how DuckDB reads those, and what comes of it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stateformat._lazy import lazy

if TYPE_CHECKING:
    from .answer import Answer as Answer, query as query
    from .connection import quoted as quoted
    from .relations import Relations as Relations
    from .statement import Purge as Purge, where_rows as where_rows
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".answer": "Answer query",
            ".connection": "quoted",
            ".relations": "Relations",
            ".statement": "Purge where_rows",
        },
    )
