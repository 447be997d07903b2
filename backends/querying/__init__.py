"""SQL over state, with DuckDB (``pip install 'stateformat[sql]'``), which can only read.

Read ``connection`` (DuckDB, locked), ``statement`` (which queries are accepted), ``relations``
(their tables), ``scanning`` (how DuckDB reads those), ``answer``. ``where`` is a condition over the
rows of any stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stateformat._lazy import lazy

if TYPE_CHECKING:
    from .answer import Answer as Answer, query as query
    from .where import where_rows as where_rows
else:
    __getattr__, __dir__, __all__ = lazy(__name__, {".answer": "Answer query", ".where": "where_rows"})
