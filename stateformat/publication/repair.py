"""What is wrong with the newest checkpoint of a store, the ways out of it, and going one of them.

Theory of operation (SPEC.md section 8.4). A newest record that cannot be read closes a store to every run. Nothing is moved,
removed or written over: whoever holds a permit for its id, or is about to publish the next one, must go on colliding with
others. Instead newest + 1 is published over it with the content of a checkpoint beneath: the highest whole one, unless
another is named. The new record names that checkpoint (``content_of``), and history goes on there. Its parent is what the
damaged record was, if the one manifest under its id tells. The rest is a rollback: the manifest first, then a look at the
source's record, then the record.

One that stands alone beneath the damage may be a stray, which never was a checkpoint. It is taken only when it is named.

Where the newest record is whole and its manifest or segments are not, the way out is an ordinary rollback.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from .. import paths as layout
from ..errors import (
    REPAIR_ADVICE,
    CheckpointError,
    DamagedCheckpoint,
    ErrorKind,
    InvalidInput,
    NotFound,
)
from ..history import Survey, manifests_under, require_records, survey
from ..model import (
    MAX_CHECKPOINT_ID,
    RESERVED_PROPERTIES,
    CheckpointId,
    CheckpointKind,
    ParentRef,
    Record,
)
from ..problems import Problem
from ..reading import load_manifest
from ..storage import Storage
from ..validation import Level, check_checkpoint
from .copy import left_behind, rollback
from .draft import Draft, Over
from .pending import PendingCheckpoint
from .protocol import CommitPermit

logger = logging.getLogger(__name__)

REPAIRED_ID: Final = RESERVED_PROPERTIES + "repaired_id"
"""The property of a repair that holds the id over which it was published."""
REPAIRED_FAULT: Final = RESERVED_PROPERTIES + "repaired_fault"
"""The property of a repair that holds why the record under that id could not be read."""
_FAULT_LENGTH_MAX: Final = 500

_NO_DAMAGE: Final = frozenset(
    {
        ErrorKind.STORAGE_FAILED,
        ErrorKind.STORAGE_REFUSED,
        ErrorKind.STORAGE_UNSUITABLE,
        ErrorKind.HISTORY_UNSTABLE,
        ErrorKind.UNSUPPORTED_VERSION,
        ErrorKind.UNSUPPORTED_FEATURE,
    }
)
"""No right, no answer, or a newer version: the bytes may be right."""


@dataclass(frozen=True)
class WayOut:
    """A checkpoint beneath the newest that could take its place.

    ``certain``: it is a checkpoint for certain; otherwise it may be a stray. ``problems``: what is wrong with it by itself;
    None where it was not looked at. ``doubled``: the checkpoints, ascending, whose output may then be there twice.
    """

    record: Record
    certain: bool
    doubled: tuple[CheckpointId, ...]
    problems: tuple[Problem, ...] | None = None

    @property
    def whole(self) -> bool:
        """Whether it was looked at, and nothing is wrong with it."""
        return self.problems is not None and not any(problem.severity == "error" for problem in self.problems)


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a store, and the ways out, highest checkpoint first.

    ``fault``: why the newest record cannot be read. ``problems``: the errors of the newest checkpoint, where its record
    can be. ``chosen``: the way that a repair goes: the one that was asked for, or the highest that is whole and certain.
    """

    found: Survey
    fault: CheckpointError | None
    problems: tuple[Problem, ...]
    ways: tuple[WayOut, ...]
    chosen: WayOut | None

    @property
    def newest(self) -> CheckpointId:
        """The id of the newest checkpoint."""
        return self.found.listed[-1]

    @property
    def closed(self) -> bool:
        """Whether the newest checkpoint cannot be run from."""
        return self.fault is not None or bool(self.problems)

    @property
    def undecided(self) -> str | None:
        """Why it cannot be said whether the newest is damaged; None where it can."""
        if self.fault is not None:
            return str(self.fault) if self.fault.kind in _NO_DAMAGE else None
        return next((problem.message for problem in self.problems if problem.kind in _NO_DAMAGE), None)


def diagnose(storage: Storage, source: int | None = None, *, level: Level = "quick") -> Diagnosis:
    """Read a store and find the ways out; changes nothing.

    The checkpoints beneath the newest are looked at from the highest down until one is whole and certain, or only
    ``source`` is, where that is given; at this level, as ``validate`` does. Raises ``NotFound`` where there is no store, or
    ``source`` is none of its checkpoints, and ``StorageError``.
    """
    found = survey(storage)
    require_records(storage, found.listed)
    newest = found.listed[-1]
    fault = found.unreadable.get(newest)
    problems = () if fault is not None else check_checkpoint(storage, newest, level=level)
    ways, chosen = list[WayOut](), None
    for record in found.checkpoints:
        if record.checkpoint_id == newest:
            continue
        way = WayOut(record, record.ref in found.certain, _doubled(found, record.checkpoint_id))
        if record.checkpoint_id == source or (source is None and chosen is None):
            way = replace(way, problems=check_checkpoint(storage, record.checkpoint_id, level=level))
            if record.checkpoint_id == source or (way.certain and way.whole):
                chosen = way
        ways.append(way)
    if source is not None and chosen is None:
        raise NotFound(
            f"checkpoint {source} of {storage.url} is none that could take the place of {newest}; `ckpt repair "
            f"{storage.url}` lists those that could",
            checkpoint_id=source,
        )
    errors = tuple(problem for problem in problems if problem.severity == "error")
    return Diagnosis(found, fault, errors, tuple(ways), chosen)


def _doubled(found: Survey, source: CheckpointId) -> tuple[CheckpointId, ...]:
    """The checkpoints after the source: sinks see their input again."""
    after = {found.listed[-1], *found.damaged, *(ref.checkpoint_id for ref in found.lost)}
    after |= {record.checkpoint_id for record in found.checkpoints}
    # Ids follow by one: whoever published a record that cannot be read went on from the id before.
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
    """Publish newest + 1 with the content of an older checkpoint, ``source`` or the highest that is whole and certain.

    ``diagnosis``: what :func:`diagnose` has found a moment ago, for the same ``source``.

    Raises ``InvalidInput`` where nothing is wrong with the newest (unless ``source`` is cut off from it) or no id is left,
    ``DamagedCheckpoint`` where no source is whole, ``CheckpointExpired`` where it goes away meanwhile, what
    :func:`diagnose` and ``publish`` raise, and what reading the newest raised where that is no damage.
    """
    diagnosis = diagnosis or diagnose(storage, source, level=level)
    chosen, newest = _checked(storage, diagnosis, source), diagnosis.newest
    record = chosen.record
    if record in diagnosis.found.chain:
        return rollback(storage, record.checkpoint_id, newest=newest, sleep=sleep)
    fault = diagnosis.fault
    note = left_behind(chosen.doubled)
    draft = Draft(
        job_id=record.job_id,
        job_name=record.job_name,
        graph=record.graph,
        states=record.states,
        kind=CheckpointKind.ROLLBACK,
        source=record.ref,
        rescaled_from=record.rescaled_from,
        properties={**record.lasting_properties, REPAIRED_ID: str(newest), REPAIRED_FAULT: _short(fault)},
        over=Over(newest, diagnosis.found.chain[0].ref if fault is None else what_it_was(storage, newest)),
        notes=(note,),
    )
    pending = PendingCheckpoint(storage, draft, sleep=sleep)
    pending.add_handles(load_manifest(storage, record).full())
    found = pending.publish()
    logger.warning(
        "repaired %s: checkpoint %s has the content of %s; %s",
        storage.url,
        pending.checkpoint_id,
        record.checkpoint_id,
        note,
    )
    return found


def what_it_was(storage: Storage, checkpoint_id: CheckpointId) -> ParentRef | None:
    """A checkpoint whose record cannot be read, by the name of its manifest; None where there is none, or several."""
    attempts = [layout.attempt_of(path) for path in manifests_under(storage, checkpoint_id)]
    return ParentRef(checkpoint_id, attempts[0]) if len(attempts) == 1 and attempts[0] is not None else None


def _checked(storage: Storage, diagnosis: Diagnosis, source: int | None) -> WayOut:
    """The way to go, or the reason why there is none, raised."""
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
    if newest == MAX_CHECKPOINT_ID:
        raise InvalidInput(
            f"checkpoint {newest} of {storage.url} has the greatest id that there is, so nothing can be published over it. "
            "Copy a whole checkpoint to a store of its own (`ckpt copy STORE@ID TARGET`), and run the job there"
        )
    if chosen is None and not diagnosis.ways:
        raise DamagedCheckpoint(
            f"no other checkpoint of {storage.url} is left to take the place of {newest}. Start the job from a savepoint or "
            "another copy, with an empty store"
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


def _short(fault: CheckpointError | None) -> str:
    text = str(fault.args[0]).removesuffix(REPAIR_ADVICE) if fault is not None else ""
    return text if len(text) <= _FAULT_LENGTH_MAX else text[: _FAULT_LENGTH_MAX - 1] + "…"


__all__ = ["REPAIRED_FAULT", "REPAIRED_ID", "Diagnosis", "WayOut", "diagnose", "repair", "what_it_was"]
