"""The error tree: classes by what a handler does, kinds by what precisely happened.

::

    CheckpointError
    ├── InvalidInput (ValueError)         the caller asked for something that cannot be; ask differently
    │   └── InvalidState (ValueError)     the state handed over contradicts its declaration; fix the writer
    ├── RestoreRefused                    the checkpoint does not fit the topology; carries every refusal
    ├── PublishConflict                   another run published; this run stops and a restart reads the truth
    ├── OutcomeUnknown                    nobody knows whether the record exists; stop, restart reads the truth
    ├── NotFound (LookupError)            no such store or checkpoint
    │   └── CheckpointExpired             it was there and retention has removed it; take a newer one
    ├── JobMismatch                       the store belongs to another job
    ├── UnsupportedFormat                 written by a newer version or with an unknown required feature; upgrade
    ├── DamagedCheckpoint                 bytes are not what was written; run ``ckpt repair``
    └── StorageError (OSError)            the storage failed, or lacks a guarantee that the format needs

Every message names the object, the two values that disagree, and the next step. ``kind`` is a stable string from
:class:`ErrorKind`, which only ever grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any


class ErrorKind(StrEnum):
    """Precise causes. Append-only: a released code never changes its meaning."""

    INVALID_ARGUMENT = "invalid_argument"
    INVALID_PARALLELISM = "invalid_parallelism"
    INVALID_GRAPH = "invalid_graph"
    INVALID_URL = "invalid_url"
    INVALID_PATH = "invalid_path"
    UNKNOWN_OPERATOR = "unknown_operator"
    UNKNOWN_STATE = "unknown_state"
    UNKNOWN_SCHEME = "unknown_scheme"
    MISSING_DEPENDENCY = "missing_dependency"
    UNSUPPORTED_TYPE = "unsupported_type"
    UNSUPPORTED_KEY_TYPE = "unsupported_key_type"
    UNKNOWN_KEY_HASH = "unknown_key_hash"
    DUPLICATE_ROW_KEY = "duplicate_row_key"
    SCHEMA_MISMATCH = "schema_mismatch"
    SCHEMA_CANNOT_EVOLVE = "schema_cannot_evolve"
    NULL_NOT_ALLOWED = "null_not_allowed"
    STATE_NOT_ALLOWED = "state_not_allowed"
    STATE_MISSING = "state_missing"
    SNAPSHOT_MISSING = "snapshot_missing"
    STATUS_CONTRADICTION = "status_contradiction"
    UNION_PARTIALLY_FINISHED = "union_partially_finished"
    RESTORE_REFUSED = "restore_refused"
    PUBLISH_LOST = "publish_lost"
    OVERTAKEN = "overtaken"
    OUTCOME_UNKNOWN = "outcome_unknown"
    STORE_NOT_FOUND = "store_not_found"
    STORE_EMPTY = "store_empty"
    STORE_NOT_EMPTY = "store_not_empty"
    CHECKPOINT_NOT_FOUND = "checkpoint_not_found"
    CHECKPOINT_EXPIRED = "checkpoint_expired"
    OTHER_JOB = "other_job"
    UNSUPPORTED_VERSION = "unsupported_version"
    UNSUPPORTED_FEATURE = "unsupported_feature"
    DAMAGED_RECORD = "damaged_record"
    DAMAGED_MANIFEST = "damaged_manifest"
    DAMAGED_SEGMENT = "damaged_segment"
    OBJECT_MISSING = "object_missing"
    OBJECT_SIZE_DIFFERS = "object_size_differs"
    OBJECT_DIGEST_DIFFERS = "object_digest_differs"
    LIMIT_EXCEEDED = "limit_exceeded"
    STORAGE_FAILED = "storage_failed"
    STORAGE_UNSUITABLE = "storage_unsuitable"
    HISTORY_UNSTABLE = "history_unstable"
    STORAGE_REFUSED = "storage_refused"
    OPERATOR_FAILED = "operator_failed"
    ILLEGAL_EVENT = "illegal_event"
    RECORD_LOST = "record_lost"


REPAIR_ADVICE = ". `ckpt repair` says what can be done"
"""How messages about stored bytes end that are not what was written: it is the command that names a way out."""


class CheckpointError(Exception):
    """Root of all errors of this project. Raise a subclass.

    ``kind`` says precisely what happened; ``details`` carries the values named in the message, for programs.
    """

    default_kind: ErrorKind = ErrorKind.INVALID_ARGUMENT

    def __init__(self, message: str, *, kind: ErrorKind | None = None, **details: Any) -> None:
        super().__init__(message)
        self.kind = kind or self.default_kind
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders (Spark workers): keep kind and details, which the default would drop.
        return (_rebuild, (type(self), self.args[0], self.kind, self.details))


def _rebuild(cls: type[CheckpointError], message: str, kind: ErrorKind, details: dict[str, Any]) -> CheckpointError:
    error = cls.__new__(cls)
    CheckpointError.__init__(error, message, kind=kind, **details)
    return error


class InvalidInput(CheckpointError, ValueError):
    """The caller's fault: an argument, graph, key type or path that can never be right."""


class InvalidState(InvalidInput):
    """The writer's fault: a table that contradicts its declaration, duplicate row keys, a status that lies."""

    default_kind = ErrorKind.SCHEMA_MISMATCH


class RestoreRefused(CheckpointError):
    """The checkpoint cannot be restored into the topology. ``refusals`` holds every reason, not the first."""

    default_kind = ErrorKind.RESTORE_REFUSED

    def __init__(self, message: str, *, refusals: Sequence[Any] = (), kind: ErrorKind | None = None) -> None:
        super().__init__(message, kind=kind, refusals=tuple(refusals))

    @property
    def refusals(self) -> tuple[Any, ...]:
        """Every refusal, in plan order."""
        return tuple(self.details.get("refusals", ()))


class PublishConflict(CheckpointError):
    """Another run has published or overtaken. Nothing of ours may be committed; stop and restart."""

    default_kind = ErrorKind.PUBLISH_LOST


class OutcomeUnknown(CheckpointError):
    """The storage would not say whether the record was created. Commit nothing; a restart sees the truth."""

    default_kind = ErrorKind.OUTCOME_UNKNOWN


class NotFound(CheckpointError, LookupError):
    """The store or the checkpoint is not there."""

    default_kind = ErrorKind.CHECKPOINT_NOT_FOUND


class CheckpointExpired(NotFound):
    """Retention removed the checkpoint while it was being read, or before. Not damage; open a newer one."""

    default_kind = ErrorKind.CHECKPOINT_EXPIRED


class JobMismatch(CheckpointError):
    """The store belongs to another job; nothing was changed."""

    default_kind = ErrorKind.OTHER_JOB


class UnsupportedFormat(CheckpointError):
    """A version or required feature that this reader does not know. Nothing was guessed."""

    default_kind = ErrorKind.UNSUPPORTED_VERSION


class DamagedCheckpoint(CheckpointError):
    """Stored bytes differ from what was written. ``ckpt repair`` says what can be done."""

    default_kind = ErrorKind.DAMAGED_SEGMENT


class StorageError(CheckpointError, OSError):
    """The storage failed, or does not give a guarantee that SPEC.md section 2 demands."""

    default_kind = ErrorKind.STORAGE_FAILED
