"""What is wrong with the newest checkpoint of a store, and a repair (SPEC.md section 8.4).

No run can start while the newest record cannot be read. A repair overwrites nothing: it publishes
newest + 1 with the content of the highest whole checkpoint below, or of one that the caller names.
The record names that checkpoint (``content_of``), and history continues from it. A single
checkpoint below the damage may be a stray, so it is used only if named. If the newest record is
whole but its manifest or segments are not, the repair is an ordinary rollback.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from .. import paths as layout
from ..errors import REPAIR_ADVICE, CheckpointError, DamagedCheckpoint, InvalidInput, NotFound
from ..findings import UNDECIDED, Finding
from ..history import Survey, manifests_under, require_records, survey
from ..model import MAX_CHECKPOINT_ID, RESERVED_PROPERTIES, CheckpointId, CheckpointKind, ParentRef, Record
from ..reading import load_manifest
from ..storage import Storage
from ..validation import Level, SharedSegments, check_checkpoint
from .copying import left_behind, rollback
from .pending import Draft, PendingCheckpoint, Replaced
from .protocol import CommitPermit

logger = logging.getLogger(__name__)

REPAIRED_ID: Final = RESERVED_PROPERTIES + "repaired_id"
"""A property of a repair: the id of the damaged checkpoint."""
REPAIRED_FAULT: Final = RESERVED_PROPERTIES + "repaired_fault"
"""A property of a repair: why that record could not be read."""
_FAULT_LENGTH_MAX: Final = 500


@dataclass(frozen=True)
class WayOut:
    """A checkpoint below the newest that could replace it."""

    record: Record
    certain: bool
    """False: it may be a stray."""
    doubled: tuple[CheckpointId, ...]
    """The checkpoints, ascending, whose output may be doubled."""
    problems: tuple[Finding, ...] | None = None
    """What is wrong with it; None if it was not validated."""

    @property
    def whole(self) -> bool:
        """Whether it was validated without errors."""
        return self.problems is not None and not any(problem.severity == "error" for problem in self.problems)


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a store, and the ways out of it."""

    found: Survey
    fault: CheckpointError | None
    """Why the newest record cannot be read."""
    problems: tuple[Finding, ...]
    """The errors of the newest checkpoint, if its record can be read."""
    ways: tuple[WayOut, ...]
    """Highest checkpoint first."""
    chosen: WayOut | None
    """The one that a repair uses: the one asked for, or the highest that is whole and certain."""
    level: Level = "quick"
    """What was read of checkpoints."""

    @property
    def newest(self) -> CheckpointId:
        """The id of the newest checkpoint."""
        return self.found.listed[-1]

    @property
    def closed(self) -> bool:
        """Whether no run can start from the newest checkpoint."""
        return self.fault is not None or bool(self.problems)

    @property
    def properties(self) -> dict[str, str]:
        """The properties of a repair over the newest."""
        return {REPAIRED_ID: str(self.newest), REPAIRED_FAULT: _short(self.fault)}

    @property
    def undecided(self) -> str | None:
        """Why it is unknown whether the newest is damaged; None if it is known."""
        if self.fault is not None:
            return str(self.fault) if self.fault.kind in UNDECIDED else None
        return next((problem.message for problem in self.problems if problem.kind in UNDECIDED), None)


def diagnose(storage: Storage, source: int | None = None, *, level: Level = "quick") -> Diagnosis:
    """Read a store and find ways to repair it; change nothing.

    Validates the checkpoints below the newest, highest first, until one is whole and certain; with
    ``source`` only that one. Raises ``NotFound`` if there is no store or ``source`` is not one of
    its checkpoints, and ``StorageError``.
    """
    found = survey(storage)
    require_records(storage, found.listed)
    newest = found.listed[-1]
    fault = found.unreadable.get(newest)
    segments = SharedSegments(storage, level)
    problems = () if fault is not None else check_checkpoint(storage, newest, segments=segments)
    ways, chosen = list[WayOut](), None
    for record in found.checkpoints:
        if record.checkpoint_id == newest:
            continue
        way = WayOut(record, record.ref in found.certain, _doubled(found, record.checkpoint_id))
        if record.checkpoint_id == source or (source is None and chosen is None):
            way = replace(way, problems=check_checkpoint(storage, record.checkpoint_id, segments=segments))
            if record.checkpoint_id == source or (way.certain and way.whole):
                chosen = way
        ways.append(way)
    if source is not None and chosen is None:
        raise NotFound(
            f"checkpoint {source} of {storage.url} cannot take the place of {newest}; `ckpt repair "
            f"{storage.url}` lists those that can",
            checkpoint_id=source,
        )
    errors = tuple(problem for problem in problems if problem.severity == "error")
    return Diagnosis(found, fault, errors, tuple(ways), chosen, level)


def _doubled(found: Survey, source: CheckpointId) -> tuple[CheckpointId, ...]:
    """Return the checkpoints after the source; sinks get their input again."""
    after = {found.listed[-1], *found.damaged, *(ref.checkpoint_id for ref in found.lost)}
    after |= {record.checkpoint_id for record in found.checkpoints}
    # The parent of an unreadable record has the id before it.
    after |= {CheckpointId(checkpoint_id - 1) for checkpoint_id in found.damaged}
    return tuple(sorted(checkpoint_id for checkpoint_id in after if checkpoint_id > source))


def repair(
    storage: Storage,
    source: int | None = None,
    *,
    level: Level = "quick",
    diagnosis: Diagnosis | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> CommitPermit:
    """Publish newest + 1 with the content of ``source``, by default the highest whole, certain one.

    ``diagnosis`` is what :func:`diagnose` has just returned for the same ``source``. Raises
    ``InvalidInput`` if nothing is wrong with the newest (unless ``source`` is cut off from it) or
    no id is left, ``DamagedCheckpoint`` if no source is whole, ``CheckpointExpired``, what
    :func:`diagnose` and ``publish`` raise, and what reading the newest raised if it was not damage.
    """
    diagnosis = diagnosis or diagnose(storage, source, level=level)
    chosen, newest = _checked(storage, diagnosis, source), diagnosis.newest
    record = chosen.record
    if record in diagnosis.found.chain:
        return rollback(storage, record.checkpoint_id, newest=newest, sleep=sleep)
    fault = diagnosis.fault
    note = left_behind(chosen.doubled)
    what_it_was = diagnosis.found.chain[0].ref if fault is None else ref_of_unreadable(storage, newest)
    draft = Draft.with_content(
        record,
        kind=CheckpointKind.ROLLBACK,
        source=record.ref,
        properties={**record.lasting_properties, **diagnosis.properties},
        replaced=Replaced(newest, what_it_was),
        notes=(note,),
    )
    pending = PendingCheckpoint(storage, draft, sleep=sleep)
    pending.add_handles(load_manifest(storage, record).full())
    found = pending.publish()
    what = f"checkpoint {pending.checkpoint_id} has the content of {record.checkpoint_id}"
    logger.warning("repaired %s: %s; %s", storage.url, what, note)
    return found


def ref_of_unreadable(storage: Storage, checkpoint_id: CheckpointId) -> ParentRef | None:
    """Return the ref of an unreadable record by the name of its one manifest, else None."""
    attempts = [layout.attempt_of(path) for path in manifests_under(storage, checkpoint_id)]
    return ParentRef(checkpoint_id, attempts[0]) if len(attempts) == 1 and attempts[0] is not None else None


def _checked(storage: Storage, diagnosis: Diagnosis, source: int | None) -> WayOut:
    """Return the checkpoint to use, or raise why there is none."""
    newest, chosen = diagnosis.newest, diagnosis.chosen
    if diagnosis.undecided is not None:
        if diagnosis.fault is not None:
            raise diagnosis.fault
        raise DamagedCheckpoint(
            f"checkpoint {newest} of {storage.url} may be whole, so nothing was published: {diagnosis.undecided}"
        )
    if not diagnosis.closed:
        if chosen is None or source is None:
            raise InvalidInput(f"nothing is wrong with checkpoint {newest}, the newest of {storage.url}")
        if chosen.record in diagnosis.found.chain:
            raise InvalidInput(
                f"nothing is wrong with checkpoint {newest}, the newest of {storage.url}; `ckpt rollback "
                f"{storage.url}@{source}` makes {source} the newest"
            )
    check_next_id(storage, newest)
    if chosen is None and not diagnosis.ways:
        raise DamagedCheckpoint(
            f"no other checkpoint of {storage.url} is left to take the place of {newest}. Start the job from a "
            "savepoint or another copy, with an empty store"
        )
    if chosen is None:
        raise DamagedCheckpoint(
            f"no checkpoint of {storage.url} is whole and certain to take the place of {newest}. `ckpt repair "
            f"{storage.url}` lists what is there"
        )
    if not chosen.whole:
        problem = next(problem for problem in chosen.problems or () if problem.severity == "error")
        raise DamagedCheckpoint(
            f"checkpoint {chosen.record.checkpoint_id} of {storage.url} is not whole: {problem.message}",
            kind=problem.kind,
        )
    return chosen


def check_next_id(storage: Storage, newest: CheckpointId) -> None:
    """Raise ``InvalidInput`` if no checkpoint can be published over the newest."""
    if newest == MAX_CHECKPOINT_ID:
        raise InvalidInput(
            f"checkpoint {newest} of {storage.url} has the greatest id that there is, so nothing can be published "
            "over it. Copy a whole checkpoint to a store of its own (`ckpt copy STORE@ID TARGET`), and run the job "
            "there"
        )


def _short(fault: CheckpointError | None) -> str:
    text = str(fault.args[0]).removesuffix(REPAIR_ADVICE) if fault is not None else ""
    return text if len(text) <= _FAULT_LENGTH_MAX else text[: _FAULT_LENGTH_MAX - 1] + "…"
