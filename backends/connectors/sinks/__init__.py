"""Sinks into files and memory: ``file_sink``, ``part_names``, ``directories``, ``collect``."""

from __future__ import annotations

from .collect import CollectSink
from .directories import Directory, is_forgotten, prepared_names
from .file_sink import FileSink
from .foreign_names import foreign_name
from .part_names import PartName, file_name_of

__all__ = [
    "CollectSink",
    "Directory",
    "FileSink",
    "PartName",
    "file_name_of",
    "foreign_name",
    "is_forgotten",
    "prepared_names",
]
