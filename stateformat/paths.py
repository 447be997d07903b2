"""The names of objects (SPEC.md section 2.2). No other module formats a path."""

from __future__ import annotations

import re

from .errors import InvalidInput
from .model import AttemptId, CheckpointId, WriteId

RECORDS = "checkpoints/"
MANIFESTS = "manifests/"
SEGMENTS = "segments/"
REQUESTS = "requests/"
SAVEPOINTS = "savepoints/"
"""Where savepoints are by default: below the store, but not part of it."""

_RECORD_NAME = re.compile(r"checkpoints/(\d{20})\.json")
_OWNED_NAME = re.compile(r"(?:checkpoints/(\d{20})\.|manifests/(\d{20})-|segments/(\d{20})/).+")
_MANIFEST_NAME = re.compile(r"manifests/\d{20}-([0-9a-f]{32})\.parquet")
_REQUEST_NAME = re.compile(r"requests/(\d{20})-(stop|savepoint|rescale)-([0-9a-f]{32})\.json")
_ANSWER_NAME = re.compile(r"requests/(\d{20})-answer-([0-9a-f]{32})\.json")
_ASKED_NAME = re.compile(r"requests/(\d{20})-.*")
_SAVEPOINT_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_PIN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,199}")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


def record_path(checkpoint_id: CheckpointId) -> str:
    """Return the path of a record."""
    return f"{RECORDS}{checkpoint_id:020d}.json"


def manifest_path(checkpoint_id: CheckpointId, attempt_id: AttemptId) -> str:
    """Return the path of the manifest of an attempt."""
    return f"{MANIFESTS}{checkpoint_id:020d}-{attempt_id}.parquet"


def segment_path(checkpoint_id: CheckpointId, write_id: WriteId, *, label: str) -> str:
    """Return the path of a segment; ``label`` is for people, and is made safe here."""
    readable = _UNSAFE.sub("_", label).strip("_")[:80] or "state"
    return f"{SEGMENTS}{checkpoint_id:020d}/{readable}-{write_id}.parquet"


def record_id(path: str) -> CheckpointId | None:
    """Return the checkpoint id in the name of a record; None for any other name."""
    match = _RECORD_NAME.fullmatch(path)
    return CheckpointId(int(match[1])) if match and int(match[1]) > 0 else None


def owner_id(path: str) -> CheckpointId | None:
    """Return the id in the path of a record, manifest or segment; None for other names.

    The object need not exist.
    """
    match = _OWNED_NAME.fullmatch(path)
    return CheckpointId(int(match[match.lastindex or 0])) if match else None


def attempt_of(path: str) -> AttemptId | None:
    """Return the attempt id in the name of a manifest; None for any other name."""
    match = _MANIFEST_NAME.fullmatch(path)
    return AttemptId(match[1]) if match else None


def request_path(newest: int, request_id: str, kind: str = "stop") -> str:
    """Return the path of a request, asked while ``newest`` was the newest id (0: none)."""
    return f"{REQUESTS}{newest:020d}-{kind}-{request_id}.json"


def answer_path(newest: int, request_id: str) -> str:
    """Return the path of the answer to that request."""
    return f"{REQUESTS}{newest:020d}-answer-{request_id}.json"


def request_of(path: str) -> tuple[int, str, str] | None:
    """Return the newest id, the kind and the id of a request; None for any other name."""
    match = _REQUEST_NAME.fullmatch(path)
    return (int(match[1]), match[2], match[3]) if match else None


def answer_of(path: str) -> tuple[int, str] | None:
    """Return the newest id and the request id of an answer; None for any other name."""
    match = _ANSWER_NAME.fullmatch(path)
    return (int(match[1]), match[2]) if match else None


def asked_under(path: str) -> int | None:
    """Return the newest id in a name below ``requests/``, even a truncated one, or None."""
    match = _ASKED_NAME.fullmatch(path)
    return int(match[1]) if match else None


def savepoint_url(store_url: str, name: str) -> str:
    """Return a savepoint's default URL. Raises ``InvalidInput`` for an illegal ``name``."""
    if not _SAVEPOINT_NAME.fullmatch(name):
        raise InvalidInput(f"{name!r} is no name of a savepoint; take letters, digits, '.', '_' and '-'", name=name)
    return f"{store_url}{'' if store_url.endswith('/') else '/'}{SAVEPOINTS}{name}"


def check_pin_name(name: str) -> str:
    """Return a name that a pin can have, or raise ``InvalidInput``. Digits alone would be an id."""
    if not _PIN_NAME.fullmatch(name):
        why = " (it would be the id of a checkpoint)" if name.isdecimal() else ""
        raise InvalidInput(
            f"{name!r:.80} is no name for a pin{why}; take a letter first, then at most 199 letters, digits, '.', "
            "'_' and '-'",
            name=name,
        )
    return name
