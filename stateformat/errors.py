"""The error tree: a class for each way to handle an error, a kind for each precise cause.

::

    CheckpointError
    ├── InvalidInput (ValueError)         the caller asked for the impossible: ask differently
    │   └── InvalidState (ValueError)     state contradicts its declaration: fix the writer
    ├── RestoreRefused                    the checkpoint does not fit the topology
    ├── PublishConflict                   another run published: stop; a restart reads the truth
    ├── OutcomeUnknown                    the record may exist or not: stop, restart
    ├── NotFound (LookupError)            no such store or checkpoint
    │   └── CheckpointExpired             retention has removed it: take a newer one
    ├── JobMismatch                       the store belongs to another job
    ├── UnsupportedFormat                 a newer version or an unknown required feature: upgrade
    ├── DamagedCheckpoint                 bytes are not what was written: run ``ckpt repair``
    └── StorageError (OSError)            the storage failed, or lacks a required guarantee

Every message names the object, the two values that disagree, and the next step.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class ErrorKind(StrEnum):
    """The precise cause of an error or a finding. Append-only: a released code never changes its
    meaning.
    """

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
    TRANSFORM_FAILED = "transform_failed"
    TIME_IS_UP = "time_is_up"
    # Why a checkpoint, or a topology, is refused by a restore.
    HANDLE_MISSING = "handle_missing"
    INVALID_TOPOLOGY = "invalid_topology"
    PARALLELISM_DIFFERS = "parallelism_differs"
    PARALLELISM_ABOVE_MAX = "parallelism_above_max"
    MAX_PARALLELISM_CHANGED = "max_parallelism_changed"
    KEY_HASH_CHANGED = "key_hash_changed"
    KEYED_BEHIND_POINTWISE = "keyed_behind_pointwise"
    OPERATOR_MISSING = "operator_missing"
    COLUMN_MISSING = "column_missing"
    IN_FLIGHT_NOT_ALLOWED = "in_flight_not_allowed"
    IN_FLIGHT_EDGE_MISSING = "in_flight_edge_missing"
    IN_FLIGHT_EDGE_CHANGED = "in_flight_edge_changed"
    IN_FLIGHT_BROADCAST = "in_flight_broadcast"
    FULLY_FINISHED_PREDECESSOR = "fully_finished_predecessor"
    PARTIALLY_FINISHED_PREDECESSOR = "partially_finished_predecessor"
    CHAIN_PINNED = "chain_pinned"
    # What the reader of a plan should know.
    UNCHAINED = "unchained"
    FINISHED_SUBTASKS_START = "finished_subtasks_start"
    STATE_DROPPED = "state_dropped"
    COLUMN_DROPPED = "column_dropped"
    STATE_NOT_READ = "state_not_read"


REPAIR_ADVICE = ". `ckpt repair` says what can be done"
"""How a message about damaged bytes ends."""
MESSAGE_MAX = 8_000
"""Characters of a message. What a file says can be long, and is cut in the middle: the place stands
at the beginning, and the advice at the end.
"""


class CheckpointError(Exception):
    """Base of all errors. ``kind`` is the precise cause, ``details`` the values in the message."""

    default_kind: ErrorKind = ErrorKind.INVALID_ARGUMENT

    def __init__(self, message: str, *, kind: ErrorKind | None = None, **details: Any) -> None:
        if len(message) > MESSAGE_MAX:
            half = MESSAGE_MAX // 2 - 50  # room for the words between, so that a copy is not cut again
            left_out = len(message) - 2 * half
            message = f"{message[:half]} […{left_out:,} characters…] {message[-half:]}"
        super().__init__(message)
        self.kind = kind or self.default_kind
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        # Spark pickles errors; the default would drop kind and details.
        return (_rebuild, (type(self), self.args[0], self.kind, self.details))


def _rebuild(cls: type[CheckpointError], message: str, kind: ErrorKind, details: dict[str, Any]) -> CheckpointError:
    error = cls.__new__(cls)
    CheckpointError.__init__(error, message, kind=kind, **details)
    return error


class InvalidInput(CheckpointError, ValueError):
    """The caller's fault: an argument, graph, key type or path that can never be valid."""


class InvalidState(InvalidInput):
    """The writer's fault: a table that contradicts its declaration, or duplicate row keys."""

    default_kind = ErrorKind.SCHEMA_MISMATCH


class RestoreRefused(CheckpointError):
    """The checkpoint cannot be restored into the topology. ``refusals`` holds every reason."""

    default_kind = ErrorKind.RESTORE_REFUSED

    @property
    def refusals(self) -> tuple[Any, ...]:
        """Every refusal, in plan order."""
        return tuple(self.details.get("refusals", ()))


class PublishConflict(CheckpointError):
    """Another run has published. This run must commit nothing and stop; a restart resumes."""

    default_kind = ErrorKind.PUBLISH_LOST


class OutcomeUnknown(CheckpointError):
    """It is unknown whether the storage created the record. Commit nothing and restart."""

    default_kind = ErrorKind.OUTCOME_UNKNOWN


class NotFound(CheckpointError, LookupError):
    """The store or checkpoint does not exist."""

    default_kind = ErrorKind.CHECKPOINT_NOT_FOUND


class CheckpointExpired(NotFound):
    """Retention has removed the checkpoint. This is not damage; open a newer one."""

    default_kind = ErrorKind.CHECKPOINT_EXPIRED


class JobMismatch(CheckpointError):
    """The store belongs to another job; nothing was changed."""

    default_kind = ErrorKind.OTHER_JOB


class UnsupportedFormat(CheckpointError):
    """The store needs a version or feature that this reader does not know."""

    default_kind = ErrorKind.UNSUPPORTED_VERSION


class DamagedCheckpoint(CheckpointError):
    """Stored bytes differ from what was written. ``ckpt repair`` shows what can be done."""

    default_kind = ErrorKind.DAMAGED_SEGMENT


class StorageError(CheckpointError, OSError):
    """The storage failed, or lacks a guarantee that SPEC.md section 2 requires."""

    default_kind = ErrorKind.STORAGE_FAILED
