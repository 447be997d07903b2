"""Names of objects, built in one place (SPEC.md section 2.2). Callers never format a path."""

from __future__ import annotations

import re

from stateformat.model import AttemptId, CheckpointId, WriteId

RECORDS = "checkpoints/"
MANIFESTS = "manifests/"
SEGMENTS = "segments/"

_RECORD_NAME = re.compile(r"checkpoints/(\d{20})\.json")
_OWNED_NAME = re.compile(r"(?:checkpoints/(\d{20})\.|manifests/(\d{20})-|segments/(\d{20})/).+")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


def record_path(checkpoint_id: CheckpointId) -> str:
    """Where the record of a checkpoint lies."""
    return f"{RECORDS}{checkpoint_id:020d}.json"


def manifest_path(checkpoint_id: CheckpointId, attempt_id: AttemptId) -> str:
    """Where an attempt's manifest lies."""
    return f"{MANIFESTS}{checkpoint_id:020d}-{attempt_id}.parquet"


def segment_path(checkpoint_id: CheckpointId, write_id: WriteId, *, label: str) -> str:
    """Where a segment lies; ``label`` is for people only and is made safe here."""
    readable = _UNSAFE.sub("_", label).strip("_")[:80] or "state"
    return f"{SEGMENTS}{checkpoint_id:020d}/{readable}-{write_id}.parquet"


def record_id(path: str) -> CheckpointId | None:
    """The checkpoint id in the name of a record; None for a name that is no record's."""
    match = _RECORD_NAME.fullmatch(path)
    return CheckpointId(int(match[1])) if match and int(match[1]) > 0 else None


def owner_id(path: str) -> CheckpointId | None:
    """The id under which a record, manifest or segment lies, or was to lie; None for any other name."""
    match = _OWNED_NAME.fullmatch(path)
    return CheckpointId(int(match[match.lastindex or 0])) if match else None
