"""A sink into a table of SQLite or PostgreSQL.

Read ``sink`` first, then ``staging`` (where rows wait), ``databases`` (the transaction, and SQLite)
and ``postgres``.
"""

from __future__ import annotations

from .sink import SqlSink

__all__ = ["SqlSink"]
