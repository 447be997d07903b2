"""A sink into a table of a database: ``sink``, ``staging``, ``databases``, ``postgres``, ``types``, ``url``."""

from __future__ import annotations

from .sink import SqlSink

__all__ = ["SqlSink"]
