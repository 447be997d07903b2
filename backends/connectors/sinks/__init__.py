"""Sinks into files and into the driver's memory.

``file_sink`` is the sink of Parquet files. What it asks of a place is in ``directory``; the places
are ``local_directory`` and ``s3_directory``. ``part_names`` and ``uploads`` are what a committable
names. ``collect`` stands alone.
"""

from __future__ import annotations

from .collect import CollectSink
from .directory import forgotten_paths, prepared_names
from .file_sink import FileSink
from .local_directory import LocalFiles
from .part_names import PartName, file_name_of, foreign_name

__all__ = [
    "CollectSink",
    "FileSink",
    "LocalFiles",
    "PartName",
    "file_name_of",
    "foreign_name",
    "forgotten_paths",
    "prepared_names",
]
