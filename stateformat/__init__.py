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
    from stateformat.checkpoint import Checkpoint, ReadTask
    from stateformat.declare import (
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
    from stateformat.errors import (
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
    from stateformat.hashing import register_key_hash
    from stateformat.model import (
        CheckpointKind,
        Edge,
        JobGraph,
        Kind,
        Mode,
        Operator,
        Partitioner,
        State,
        Status,
        Stop,
        StopMode,
        SubtaskSet,
    )
    from stateformat.requests import StopAnswer, StopOutcome, StopRequest
    from stateformat.segment import WriteOptions
    from stateformat.snapshot import Snapshot, SnapshotWriter, WriteContext
    from stateformat.stats import Stats
    from stateformat.store import CheckpointStore, CommitPermit, PendingCheckpoint, open
    from stateformat.validation import Problem, Report, validate

# Where each name lives. A name is imported when it is first used, so that a program pays only for what it uses: `ckpt
# inspect` is a cold process every time.
_HOMES = {
    "stateformat.checkpoint": ("Checkpoint", "ReadTask"),
    "stateformat.declare": (
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
    "stateformat.hashing": ("register_key_hash",),
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
    "stateformat.requests": ("StopAnswer", "StopOutcome", "StopRequest"),
    "stateformat.segment": ("WriteOptions",),
    "stateformat.snapshot": ("Snapshot", "SnapshotWriter", "WriteContext"),
    "stateformat.stats": ("Stats",),
    "stateformat.store": ("CheckpointStore", "CommitPermit", "PendingCheckpoint", "open"),
    "stateformat.validation": ("Problem", "Report", "validate"),
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
