"""Publishing a checkpoint at another parallelism, by metadata alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stateformat.graph import JobGraph
from stateformat.manifest import cut_handles
from stateformat.model import CheckpointKind
from stateformat.publication import CommitPermit
from stateformat.reading import Checkpoint
from stateformat.redistribution import rescale
from stateformat.store import CheckpointStore


def publish_rescaled(
    checkpoint: Checkpoint,
    topology: JobGraph,
    *,
    store: CheckpointStore,
    target: CheckpointStore | None = None,
    progress: Callable[[Any], None] | None = None,
) -> CommitPermit:
    """Publish the checkpoint at a topology: as the newest of its store, or in an empty ``target``.

    Opens no segment; into a target it copies the segments. Raises ``RestoreRefused`` with every
    reason why the topology does not fit, ``PublishConflict`` if the checkpoint is no longer the
    newest of its store, and what publishing raises.

    Args:
        checkpoint: the checkpoint.
        topology: the new job graph.
        store: the checkpoint's store.
        target: another store to publish in.
        progress: takes ``copying.CopyProgress`` while segments are copied.
    """
    plan = checkpoint.plan_restore(topology)
    plan.check()
    dealt = rescale(checkpoint, plan)
    del plan  # For a million handles, plan and slices are some hundred megabytes each.
    record = checkpoint.record
    destination = store if target is None else target
    pending = destination.begin(
        job_id=record.job_id,
        job_name=record.job_name,
        graph=dealt.graph,
        states=dealt.states,
        parent=store.permit_of(checkpoint) if target is None else checkpoint,
        kind=CheckpointKind.RESCALE,
        source=record.ref,
        rescaled_from=dealt.rescaled_from,
        stop=record.stop,
        properties=record.lasting_properties,
    )
    if target is not None:
        target.adopt_objects(checkpoint, progress)
    pending.add_handles(cut_handles(checkpoint.manifest.full(), dealt.slices))
    del dealt
    return pending.publish()
