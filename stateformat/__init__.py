"""stateformat: an open checkpoint format on Arrow and Parquet, and its library.

Everything that the author of a runtime needs::

    store = stateformat.open("/path/to/store")            # or s3://bucket/prefix, memory://name
    permit = store.start("my-job")                        # where to resume; None for a first run
    pending = store.begin(job_id="my-job", graph=graph, states=states, parent=permit)
    with pending.context.subtask("counts", 0) as writer:  # in any process
        writer.write("total", table)
    pending.add(writer)                                   # on the driver
    permit = pending.publish()                            # only a permit allows sinks to commit

    plan = store.open().plan_restore(graph.at(parallelism=6))
    tasks = store.open().restore(plan, "counts", 0)       # Arrow batches of the new subtask 0

``SPEC.md`` beside this file defines the format, ``docs/library.md`` is the guide, and ``errors``
lists the errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._lazy import lazy

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .errors import (
        CheckpointError as CheckpointError,
        CheckpointExpired as CheckpointExpired,
        DamagedCheckpoint as DamagedCheckpoint,
        ErrorKind as ErrorKind,
        InvalidInput as InvalidInput,
        InvalidState as InvalidState,
        JobMismatch as JobMismatch,
        NotFound as NotFound,
        OutcomeUnknown as OutcomeUnknown,
        PublishConflict as PublishConflict,
        RestoreRefused as RestoreRefused,
        StorageError as StorageError,
        UnsupportedFormat as UnsupportedFormat,
    )
    from .findings import Finding as Finding, Report as Report
    from .graph import (
        Edge as Edge,
        JobGraph as JobGraph,
        Operator as Operator,
        Partitioner as Partitioner,
        Status as Status,
        SubtaskSet as SubtaskSet,
    )
    from .model import (
        CheckpointKind as CheckpointKind,
        Kind as Kind,
        Mode as Mode,
        State as State,
        Stop as Stop,
        StopMode as StopMode,
    )
    from .publication import CommitPermit as CommitPermit, PendingCheckpoint as PendingCheckpoint
    from .reading import Checkpoint as Checkpoint, ReadTask as ReadTask, StateRows as StateRows
    from .redistribution import plan_restore as plan_restore
    from .snapshot import Snapshot as Snapshot, SnapshotWriter as SnapshotWriter, WriteContext as WriteContext
    from .store import CheckpointStore as CheckpointStore, open as open
    from .ttl import Ttl as Ttl
    from .validation import validate as validate
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".errors": (
                "CheckpointError CheckpointExpired DamagedCheckpoint ErrorKind InvalidInput InvalidState "
                "JobMismatch NotFound OutcomeUnknown PublishConflict RestoreRefused StorageError "
                "UnsupportedFormat"
            ),
            ".findings": "Finding Report",
            ".graph": "Edge JobGraph Operator Partitioner Status SubtaskSet",
            ".model": "CheckpointKind Kind Mode State Stop StopMode",
            ".publication": "CommitPermit PendingCheckpoint",
            ".reading": "Checkpoint ReadTask StateRows",
            ".redistribution": "plan_restore",
            ".snapshot": "Snapshot SnapshotWriter WriteContext",
            ".store": "CheckpointStore open",
            ".ttl": "Ttl",
            ".validation": "validate",
        },
        leaves_in="0.3",
        moved={
            ".": "Problem=Finding",
            ".inspecting": "CheckpointDiff StateChanges StateRange diff_checkpoints",
            ".keys": "register_key_hash",
            ".requests": "JobRequest RequestAnswer RequestOutcome RescaleRequest SavepointRequest StopRequest",
            ".schema": "CLEAR DELETE UPSERT",
            ".segments": "WriteOptions",
            ".states": (
                "broadcast_state committables_state coordinator_state even_split_state in_flight_state "
                "list_state map_state progress_state timers union_state value_state"
            ),
            ".storage": "Stats",
        },
    )
