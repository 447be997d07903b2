"""Reading a checkpoint: ``checkpoint`` is what users hold, ``scan`` reads slices, ``merge`` and ``overlay`` merge layers."""

from __future__ import annotations

from .checkpoint import Checkpoint, ReadTask, load_manifest, load_record, missing_object, whole_slices
from .merge import rekey

__all__ = ["Checkpoint", "ReadTask", "load_manifest", "load_record", "missing_object", "rekey", "whole_slices"]
