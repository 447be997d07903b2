"""Ready-made sources and sinks of dataflows.

``sources`` reads files, memory and generated rows; ``sinks`` writes files or collects rows;
``sql`` writes tables. S3 and PostgreSQL libraries are imported only when used. Operators that
neither read nor write are in ``stateformat.backends.dataflow.operators``.
"""

from __future__ import annotations

from .sinks.collect import CollectSink
from .sinks.file_sink import FileSink
from .sources.basic import ListEnumerator, MemorySource, RateSource
from .sources.files import CsvSource, DirectoryEnumerator, FileSource, ParquetSource
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
