"""Ready-made sources and sinks of dataflows.

``sources`` reads files, memory and generated rows; ``sinks`` writes files or collects rows;
``sql`` writes tables. S3 and PostgreSQL libraries are imported only when used. Operators that
neither read nor write are in ``stateformat.backends.dataflow.operators``.
"""

from __future__ import annotations

from .sinks import CollectSink, FileSink
from .sources import CsvSource, DirectoryEnumerator, FileSource, ListEnumerator, MemorySource, ParquetSource, RateSource
from .sql import SqlSink

__all__ = [
    "CollectSink",
    "CsvSource",
    "DirectoryEnumerator",
    "FileSink",
    "FileSource",
    "ListEnumerator",
    "MemorySource",
    "ParquetSource",
    "RateSource",
    "SqlSink",
]


def __dir__() -> list[str]:
    return __all__
