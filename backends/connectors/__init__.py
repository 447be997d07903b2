"""Sources and sinks. Operators without input or output are in ``stateformat.backends.dataflow.operators``."""

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
