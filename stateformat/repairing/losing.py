"""Which segments of a checkpoint are lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from .. import paths as layout
from ..errors import CheckpointError, DamagedCheckpoint, NotFound
from ..findings import UNDECIDED
from ..model import Mode, Record
from ..publication import Diagnosis
from ..reading import load_manifest
from ..storage import Storage

_DISPENSABLE: Final = frozenset({Mode.COMMITTABLES, Mode.PROGRESS, Mode.IN_FLIGHT})
"""What a source can do without; without its other state it would lose or repeat input."""


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
    segments: tuple[LostSegment, ...]
    states: tuple[tuple[str, str], ...]
    """The operators and states that lost rows with them."""

    @property
    def positions(self) -> tuple[tuple[str, str], ...]:
        """Those that hold positions of a source, without which input is lost or read again."""
        return tuple(
            (uid, name)
            for uid, name in self.states
            if not self.record.graph.inputs(uid) and self.record.state(uid, name).mode not in _DISPENSABLE
        )


def losses_of(storage: Storage, diagnosis: Diagnosis, source: int | None = None) -> Losses | None:
    """Return the lost segments of ``source``, by default the newest checkpoint, after a diagnosis.

    None if it is intact, if anything but segments is damaged, if it may be a stray, or if it is
    unknown what is damaged. Raises ``NotFound`` for a ``source`` that was not diagnosed.
    """
    if source in (None, diagnosis.newest):
        record = diagnosis.found.chain[0] if diagnosis.fault is None and diagnosis.found.chain else None
        problems = diagnosis.problems
    else:
        way = diagnosis.chosen
        if way is None or way.record.checkpoint_id != source:
            raise NotFound(f"checkpoint {source} of {storage.url} was not diagnosed", checkpoint_id=source)
        record = way.record if way.certain and diagnosis.undecided is None else None
        problems = way.problems or ()
    errors = [problem for problem in problems if problem.severity == "error"]
    if record is None or not errors:
        return None
    if any(each.kind in UNDECIDED or not each.path.startswith(layout.SEGMENTS) for each in errors):
        return None
    manifest = load_manifest(storage, record)
    paths = sorted({each.path for each in errors})
    handles = manifest.handles.filter(pc.is_in(manifest.handles["path"], value_set=pa.array(paths, pa.string())))
    there = {item.path for item in storage.list(layout.SEGMENTS)}
    # Inline segments are in the manifest, so they exist, however damaged.
    there |= {path for path in paths if manifest.inline(path) is not None}
    rows = handles.select(["path", "size_bytes", "digest", "operator", "state"]).to_pylist()
    named = {row["path"]: (row["path"], row["size_bytes"], row["digest"], row["path"] in there) for row in rows}
    segments = tuple(LostSegment(*named[path]) for path in sorted(named))
    states = sorted({(row["operator"], row["state"]) for row in rows})
    return Losses(record, segments, tuple(states)) if segments else None


def why_not(storage: Storage, diagnosis: Diagnosis) -> CheckpointError:
    """Return the error for a damaged newest checkpoint whose lost segments are unknown."""
    newest = diagnosis.newest
    if diagnosis.undecided is not None:
        return diagnosis.fault or DamagedCheckpoint(
            f"checkpoint {newest} of {storage.url} may be whole, so nothing was changed: {diagnosis.undecided}"
        )
    if diagnosis.fault is not None:
        return DamagedCheckpoint(
            f"the record of checkpoint {newest} of {storage.url} cannot be read, so what it has lost is unknown; "
            "name an older checkpoint (STORE@ID), or go back (`ckpt repair`)",
            kind=diagnosis.fault.kind,
        )
    other = next(each for each in diagnosis.problems if not each.path.startswith(layout.SEGMENTS))
    return DamagedCheckpoint(
        f"checkpoint {newest} of {storage.url} has lost more than segments, so what is left of it is unknown: "
        f"{other.message}. Go back to a whole one (`ckpt repair`)",
        kind=other.kind,
        path=other.path,
    )
