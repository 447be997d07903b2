"""stateformat: an open checkpoint format on Arrow and Parquet for stateful dataflows, and its library.

The whole door for authors of runtimes::

    store = stateformat.open("/path/to/store")            # or s3://bucket/prefix, memory://name
    permit = store.start("my-job")                        # what to go on from; None for a first run
    pending = store.begin(job_id="my-job", graph=graph, states=states, parent=permit)
    with pending.context.subtask("counts", 0) as writer:  # in any process
        writer.write("total", table)
    pending.add(writer)                                   # on the driver
    permit = pending.publish()                            # only a permit allows sinks to commit

    plan = store.open().plan_restore(graph.at(parallelism=6))
    tasks = store.open().restore(plan, "counts", 0)       # what the new subtask 0 reads, as Arrow batches

``SPEC.md`` beside this file is the format; ``docs/library.md`` is the guide. Errors are listed in ``errors``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        CheckpointError,
        CheckpointExpired,
        DamagedCheckpoint,
        ErrorKind,
        InvalidInput,
        InvalidState,
        JobMismatch,
        NotFound,
        OutcomeUnknown,
        PublishConflict,
        RestoreRefused,
        StorageError,
        UnsupportedFormat,
    )
    from .graph import Edge, JobGraph, Operator, Partitioner, Status, SubtaskSet
    from .keys import register_key_hash
    from .model import CheckpointKind, Kind, Mode, State, Stop, StopMode
    from .problems import Problem, Report
    from .publication import CommitPermit, PendingCheckpoint
    from .reading import Checkpoint, ReadTask
    from .segments import WriteOptions
    from .snapshot import Snapshot, SnapshotWriter, WriteContext
    from .states import (
        broadcast_state,
        committables_state,
        coordinator_state,
        even_split_state,
        in_flight_state,
        list_state,
        map_state,
        progress_state,
        timers,
        union_state,
        value_state,
    )
    from .stop_requests import StopAnswer, StopOutcome, StopRequest
    from .storage import Stats
    from .store import CheckpointStore, open
    from .validation import validate

# Where each name lives. A name is imported when it is first used, so that a program pays only for what it uses: `ckpt
# inspect` is a cold process every time.
_HOMES = {
    "stateformat.reading.checkpoint": ("Checkpoint", "ReadTask"),
    "stateformat.states.declare": (
        "broadcast_state",
        "committables_state",
        "coordinator_state",
        "even_split_state",
        "in_flight_state",
        "list_state",
        "map_state",
        "progress_state",
        "timers",
        "union_state",
        "value_state",
    ),
    "stateformat.errors": (
        "CheckpointError",
        "CheckpointExpired",
        "DamagedCheckpoint",
        "ErrorKind",
        "InvalidInput",
        "InvalidState",
        "JobMismatch",
        "NotFound",
        "OutcomeUnknown",
        "PublishConflict",
        "RestoreRefused",
        "StorageError",
        "UnsupportedFormat",
    ),
    "stateformat.keys.hashing": ("register_key_hash",),
    "stateformat.model": (
        "CheckpointKind",
        "Edge",
        "JobGraph",
        "Kind",
        "Mode",
        "Operator",
        "Partitioner",
        "State",
        "Status",
        "Stop",
        "StopMode",
        "SubtaskSet",
    ),
    "stateformat.stop_requests": ("StopAnswer", "StopOutcome", "StopRequest"),
    "stateformat.segments.write": ("WriteOptions",),
    "stateformat.snapshot": ("Snapshot", "SnapshotWriter", "WriteContext"),
    "stateformat.storage.stats": ("Stats",),
    "stateformat.store": ("CheckpointStore", "CommitPermit", "PendingCheckpoint", "open"),
    "stateformat.validation.validator": ("Problem", "Report", "validate"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointExpired",
    "CheckpointKind",
    "CheckpointStore",
    "CommitPermit",
    "DamagedCheckpoint",
    "Edge",
    "ErrorKind",
    "InvalidInput",
    "InvalidState",
    "JobGraph",
    "JobMismatch",
    "Kind",
    "Mode",
    "NotFound",
    "Operator",
    "OutcomeUnknown",
    "Partitioner",
    "PendingCheckpoint",
    "Problem",
    "PublishConflict",
    "ReadTask",
    "Report",
    "RestoreRefused",
    "Snapshot",
    "SnapshotWriter",
    "State",
    "Stats",
    "Status",
    "Stop",
    "StopAnswer",
    "StopMode",
    "StopOutcome",
    "StopRequest",
    "StorageError",
    "SubtaskSet",
    "UnsupportedFormat",
    "WriteContext",
    "WriteOptions",
    "broadcast_state",
    "committables_state",
    "coordinator_state",
    "even_split_state",
    "in_flight_state",
    "list_state",
    "map_state",
    "open",
    "progress_state",
    "register_key_hash",
    "timers",
    "union_state",
    "validate",
    "value_state",
]


def __getattr__(name: str) -> Any:
    """Import a public name from where it lives, once."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
