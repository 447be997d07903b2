"""Publishing a checkpoint at another parallelism, using only metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stateformat.graph import JobGraph
from stateformat.manifest import cut_handles
from stateformat.model import CheckpointKind
from stateformat.publication import CommitPermit, PendingCheckpoint
from stateformat.reading import Checkpoint
from stateformat.redistribution import Rescaled, rescale
from stateformat.rescaling import lasting_stop
from stateformat.store import CheckpointStore

from .planning import RewritePlan


def publish_rescaled(
    checkpoint: Checkpoint,
    topology: JobGraph,
    *,
    store: CheckpointStore,
    target: CheckpointStore | None = None,
    progress: Callable[[Any], None] | None = None,
) -> CommitPermit:
    """Publish the checkpoint at a topology: as the newest of ``store``, or in an empty ``target``.

    Opens no segment; into a target it copies the segments, and ``progress`` is called with
    ``CopyProgress``. Raises ``RestoreRefused`` with every reason why the topology does not fit,
    ``PublishConflict`` if the checkpoint is no longer the newest of its store, and what publishing
    raises.
    """
    plan = checkpoint.plan_restore(topology)
    plan.check()
    rescaled = rescale(checkpoint, plan)
    del plan  # For a million handles, plan and slices are some hundred megabytes each.
    pending = begin_again(
        target or store,
        checkpoint,
        rescaled,
        kind=CheckpointKind.RESCALE,
        parent=store.permit_of(checkpoint) if target is None else checkpoint,
    )
    if target is not None:
        target.adopt_objects(checkpoint, progress)
    pending.add_handles(cut_handles(checkpoint.manifest.full(), rescaled.slices))
    del rescaled
    return pending.publish()


def begin_again(
    store: CheckpointStore, checkpoint: Checkpoint, plan: Rescaled | RewritePlan, **more: Any
) -> PendingCheckpoint:
    """Begin a checkpoint that has the content of another, with the plan's graph and states."""
    record = checkpoint.record
    return store.begin(
        job_id=record.job_id,
        job_name=record.job_name,
        graph=plan.graph,
        states=plan.states,
        source=record.ref,
        rescaled_from=plan.rescaled_from,
        stop=lasting_stop(record),
        properties=record.lasting_properties,
        **more,
    )
