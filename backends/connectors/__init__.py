"""Ready-made sources and sinks of dataflows.

``sources`` reads files, memory and made-up rows; ``sinks`` writes files and collects; ``sql``
writes tables. S3 and PostgreSQL are imported when they are used. Operators without input or output
are in ``stateformat.backends.dataflow.operators``.
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
