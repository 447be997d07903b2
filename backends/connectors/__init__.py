"""Ready-made sources and sinks that do input and output; the pure operators are in ``backends.dataflow.operators``."""

from __future__ import annotations

from backends.connectors.collect import CollectSink
from backends.connectors.csv import CsvSource
from backends.connectors.enumerators import ListEnumerator
from backends.connectors.file_sink import FileSink
from backends.connectors.files import DirectoryEnumerator, FileSource
from backends.connectors.memory import MemorySource
from backends.connectors.parquet import ParquetSource
from backends.connectors.rate import RateSource
from backends.connectors.sql_sink import SqlSink

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
