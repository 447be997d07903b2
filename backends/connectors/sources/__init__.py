"""Sources of rows in files, in memory, or made up.

``enumerators`` deals splits, for all of them. ``files`` is what ``csv`` and ``parquet`` share.
``memory`` and ``rate`` stand alone.
"""

from __future__ import annotations

from .csv import CsvSource
from .enumerators import ListEnumerator, check_at_least, not_null
from .files import DirectoryEnumerator, FileSource, FileStat, files_behind
from .memory import MemorySource
from .parquet import ParquetSource
from .rate import RateSource, rate_behind

__all__ = [
    "CsvSource",
    "DirectoryEnumerator",
    "FileSource",
    "FileStat",
    "ListEnumerator",
    "MemorySource",
    "ParquetSource",
    "RateSource",
    "check_at_least",
    "files_behind",
    "not_null",
    "rate_behind",
]
