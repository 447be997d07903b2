"""Reading a published checkpoint.

Read ``checkpoint`` (what users and runs hold), ``scan`` (from slices to rows), ``merge`` (layers
and schemas), then ``overlay`` (a key group that is too large to merge at once).
"""

from __future__ import annotations

from .checkpoint import Checkpoint, ReadTask, load_manifest, load_record, missing_object, whole_slices
from .merge import rekey

__all__ = ["Checkpoint", "ReadTask", "load_manifest", "load_record", "missing_object", "rekey", "whole_slices"]
