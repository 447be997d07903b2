"""Sources: ``enumerators`` assigns splits; ``memory``, ``rate``, ``files``, ``csv`` and ``parquet`` read them."""

from __future__ import annotations

from .csv import CsvSource
from .enumerators import ListEnumerator, check_at_least
from .files import DirectoryEnumerator, FileSource
from .memory import MemorySource
from .parquet import ParquetSource
from .rate import RateSource

__all__ = [
    "CsvSource",
    "DirectoryEnumerator",
    "FileSource",
    "ListEnumerator",
    "MemorySource",
    "ParquetSource",
    "RateSource",
    "check_at_least",
]
