"""Which segments of a checkpoint are lost, and what continuing without them would give up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .. import paths as layout
from ..history import reachable
from ..manifest import Manifest
from ..model import Record
from ..problems import UNDECIDED, Level, Problem
from ..reading import load_manifest
from ..storage import Storage
from ..validation import SharedSegments
from .without import Loss, Scope, without_lost

STATES_MAX: Final = 100
"""How many states the property of a record lists."""
RANGES_MAX: Final = 50
"""How many ranges of subtasks and of key groups it lists for each state."""


class LostSegment(NamedTuple):
    """A segment that a checkpoint names and that is missing or damaged."""

    path: str
    size_bytes: int
    """The size in the manifest."""
    digest: bytes
    is_there: bool
    """Whether an object exists at its path; it is never overwritten."""


@dataclass(frozen=True)
class Losses:
    """The lost segments of one checkpoint with a readable record and manifest."""

    record: Record
    manifest: Manifest
    level: Level
    segments: tuple[LostSegment, ...]

    def without(self, scope: Scope, found: Iterable[str] = ()) -> tuple[pa.Table, list[Loss]]:
        """Return the whole manifest without the lost segments, and what that gives up.

        ``found``: paths of segments that need not be given up.
        """
        paths = {each.path for each in self.segments} - set(found)
        return without_lost(self.record, self.manifest.full(), paths, scope)

    def losses(self, scope: Scope, found: Iterable[str] = ()) -> list[Loss]:
        """Return what would be given up of each state."""
        paths = {each.path for each in self.segments} - set(found)
        return without_lost(self.record, self.manifest.handles, paths, scope)[1]


def lost_segments(storage: Storage, record: Record, problems: Sequence[Problem], level: Level) -> Losses | None:
    """Return the lost segments of a checkpoint with these problems; None if they are unknown.

    They are unknown if anything else is wrong, if something could not be read now, or if nothing is
    wrong at all. Raises what reading the manifest raises.
    """
    errors = [problem for problem in problems if problem.severity == "error"]
    if not errors or any(each.kind in UNDECIDED or not each.path.startswith(layout.SEGMENTS) for each in errors):
        return None
    manifest = load_manifest(storage, record)
    paths = sorted({each.path for each in errors})
    named = reachable(_named(manifest, paths)).sort_by("path").to_pylist()
    there = {item.path for item in storage.list(layout.SEGMENTS)}
    # Inline segments are in the manifest, so they exist, however damaged.
    there |= {path for path in paths if manifest.inline(path) is not None}
    segments = [LostSegment(row["path"], row["size_bytes"], row["digest"], row["path"] in there) for row in named]
    return Losses(record, manifest, level, tuple(segments)) if segments else None


def still_lost(storage: Storage, losses: Losses) -> set[str]:
    """Check again: return the paths of the segments that are still lost.

    Raises ``StorageError`` if one cannot be read now.
    """
    handles = _named(losses.manifest, [each.path for each in losses.segments])
    inline = {path: losses.manifest.inline(path) for path in handles["path"].unique().to_pylist()}
    values = [None if (found := inline[path]) is None else found.to_pybytes() for path in handles["path"].to_pylist()]
    manifest = Manifest(handles.append_column("inline", pa.array(values, pa.binary())))
    segments = SharedSegments(storage, losses.level)
    found = segments.check(losses.record, manifest, np.ones(handles.num_rows, bool), lambda _: None)
    return {problem.path for problem in found.problems if problem.severity == "error"}


def _named(manifest: Manifest, paths: Sequence[str]) -> pa.Table:
    mine = pc.is_in(manifest.handles["path"], value_set=pa.array(paths, pa.string()))
    return manifest.handles.filter(pc.and_(mine, pc.is_valid(manifest.handles["path"])))


def given_up_text(losses: Losses, given: Sequence[Loss], scope: Scope) -> str:
    """Return the value of the property that says what a checkpoint was published without."""
    counted = [loss for loss in given if loss.effect != "copied"]
    values = {
        "checkpoint_id": losses.record.checkpoint_id,
        "attempt_id": losses.record.attempt_id,
        "scope": scope,
        "rows": sum(loss.all_rows for loss in counted),
        "states": [_bounded(loss) for loss in counted[:STATES_MAX]],
        "more_states": max(len(counted) - STATES_MAX, 0),
    }
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"))


def _bounded(loss: Loss) -> dict[str, Any]:
    return {
        "operator": loss.operator,
        "state": loss.state,
        "mode": loss.mode.value,
        "effect": loss.effect,
        "rows": loss.rows,
        "rows_besides": loss.rows_besides,
        "subtasks": [list(pair) for pair in loss.subtasks.ranges[:RANGES_MAX]],
        "key_groups": [list(pair) for pair in loss.key_groups.ranges[:RANGES_MAX]],
        "more_ranges": sum(max(len(each.ranges) - RANGES_MAX, 0) for each in (loss.subtasks, loss.key_groups)),
    }
