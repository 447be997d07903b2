"""What is known of a checkpoint when it begins, before anything of it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from ..graph import JobGraph
from ..model import CheckpointId, CheckpointKind, JobId, ParentRef, RescaledFrom, State, Stop
from ..reading import Checkpoint
from ..segments import WriteOptions


class Over(NamedTuple):
    """A newest checkpoint that is left behind by a repair: its id, and what it was, as far as anything still tells."""

    checkpoint_id: CheckpointId
    ref: ParentRef | None


@dataclass(frozen=True)
class Draft:
    """What is known of a checkpoint when it begins.

    ``parent`` is the checkpoint held, or None for the first of a job; it lies in another store where a checkpoint is
    derived into an empty one. ``source``: whose content this one has (rollback, rescale, rewrite); it must still stand
    when the record is created. ``carried``: handles to carry from instead of the parent's, in the manifest's columns,
    already cut for this graph (after a restore at another parallelism). ``over``: the newest checkpoint over which a
    repair with the content of ``source`` is published; then there is no ``parent`` to hold.
    """

    job_id: JobId
    graph: JobGraph
    states: tuple[State, ...]
    parent: Checkpoint | None = None
    job_name: str = ""
    kind: CheckpointKind = CheckpointKind.CHECKPOINT
    source: ParentRef | None = None
    rescaled_from: RescaledFrom | None = None
    stop: Stop | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    options: WriteOptions = field(default_factory=WriteOptions)
    carried: pa.Table | None = None
    over: Over | None = None
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Draft({self.kind} of job {self.job_id!r} after {self.parent!r})"


__all__ = ["Draft", "Over"]
