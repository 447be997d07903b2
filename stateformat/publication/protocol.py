"""The publication protocol: from a record that is ready to a permit to commit, or a reason why there is none.

Theory of operation (SPEC.md section 8.2). A checkpoint exists from the moment its record is created as the newest, and
others may go on from it before its own publisher has drawn breath. So creating the record proves nothing; what proves
something is a listing *after* it. The greatest id never goes down, because every deletion of a record follows the sight
of a greater one. A create therefore succeeds either as newest + 1, and is in the history for good, or at an id whose
record had already expired, and is a stray; a listing that shows nothing greater tells the two apart.

1. Create, if absent. Created → 4. In the way, or no answer at all → 2. Refused: this request has done nothing and none
   went before it, so nothing is published, and that is told at once.
2. Read back. Ours → 4, exactly as if the answer had come. Another attempt's → lost. Nothing → 3.
3. Nothing there: list. A greater id than ours → lost: ours may have stood there and have expired. Our id → 2: a create
   whose answer was lost may land as late as this. Otherwise create again, under the same name with the same bytes, as in
   1 but for one thing: a refusal of this request says nothing of the one before it, which may still land, so → 2.
4. List, twice. Nothing greater, both times → the permit. Something greater → 5.
5. Read record id + 1. It names us as parent → our checkpoint is in the history and another run has gone on from it: the
   record stays, and we stop. It is there and names another → ours is a stray: remove it, and stop. It is not there,
   cannot be read, or is a repair, which has the content of an older checkpoint whomever it names → nothing proves that
   ours is a stray, and others may rest on it: the record stays, and we stop as one that was overtaken.

The steps are data (:data:`MOVES`); :func:`create_record` carries them out, one storage request each, and decides nothing.
Steps that the storage does not answer are tried again with growing pauses, a bounded number of times; then nobody knows,
the run stops, and a restart reads the truth.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from .. import paths as layout
from ..errors import (
    ErrorKind,
    InvalidInput,
    JobMismatch,
    OutcomeUnknown,
    PublishConflict,
    StorageError,
)
from ..history import UNREADABLE, find_record, ids_from, newest_record
from ..manifest import Manifest
from ..model import CheckpointId, ParentRef, Record
from ..reading import Checkpoint
from ..storage import REFUSALS, CreateOutcome, Storage, stats_of

logger = logging.getLogger(__name__)

RETRIES: Final = 8
"""How many steps may be repeated in one publication before its outcome is unknown."""
PAUSE_S: Final = 0.05
"""The first pause; each one after it is twice as long, up to :data:`PAUSE_MAX_S`."""
PAUSE_MAX_S: Final = 5.0


class At(Enum):
    """Where a publication stands: a step to be done (each is one request), or an end."""

    CREATE = "create"
    """The first try. No request of ours was ever sent."""
    CREATE_AGAIN = "create_again"
    """A further try, under the same name with the same bytes. What became of those before is not known."""
    READ_BACK = "read_back"
    LOOK = "look"
    LIST = "list"
    LIST_AGAIN = "list_again"
    READ_CHILD = "read_child"
    WITHDRAW = "withdraw"

    PERMITTED = "permitted"
    """Ours is the newest, and was when we looked."""
    LOST = "lost"
    """Another's record stands under our id, or ours may have come and gone."""
    CONTINUED = "continued"
    """Ours is in the history (or nothing proves the contrary), and another run has gone on from it."""
    WITHDRAWN = "withdrawn"
    """Ours was a stray and has been removed."""
    OVERTAKEN = "overtaken"
    """There is a greater id, and nothing tells whether ours is in the history. Its record stays."""
    REFUSED = "refused"
    """The storage would not create it. Ours was never there and never will be."""
    UNKNOWN = "unknown"
    """Nobody knows whether ours was published, or whether it will stay. A restart reads the truth."""


class Saw(Enum):
    """What the storage showed at a step."""

    CREATED = "created"
    IN_THE_WAY = "in_the_way"
    NO_ANSWER = "no_answer"
    REFUSED = "refused"
    UNSYNCED = "unsynced"
    OURS = "ours"
    ANOTHERS = "anothers"
    NOTHING = "nothing"
    SAME = "same"
    LESS = "less"
    GREATER = "greater"
    NONE_GREATER = "none_greater"
    OUR_CHILD = "our_child"
    NO_CHILD = "no_child"
    NO_PROOF = "no_proof"
    REMOVED = "removed"


MOVES: dict[tuple[At, Saw], At] = {
    (At.CREATE, Saw.CREATED): At.LIST,
    (At.CREATE, Saw.IN_THE_WAY): At.READ_BACK,
    (At.CREATE, Saw.NO_ANSWER): At.READ_BACK,
    (At.CREATE, Saw.REFUSED): At.REFUSED,
    (At.CREATE, Saw.UNSYNCED): At.UNKNOWN,
    (At.CREATE_AGAIN, Saw.CREATED): At.LIST,
    (At.CREATE_AGAIN, Saw.IN_THE_WAY): At.READ_BACK,
    (At.CREATE_AGAIN, Saw.NO_ANSWER): At.READ_BACK,
    (At.CREATE_AGAIN, Saw.REFUSED): At.READ_BACK,
    (At.CREATE_AGAIN, Saw.UNSYNCED): At.UNKNOWN,
    (At.READ_BACK, Saw.OURS): At.LIST,
    (At.READ_BACK, Saw.ANOTHERS): At.LOST,
    (At.READ_BACK, Saw.NOTHING): At.LOOK,
    (At.READ_BACK, Saw.NO_ANSWER): At.READ_BACK,
    (At.LOOK, Saw.GREATER): At.LOST,
    (At.LOOK, Saw.SAME): At.READ_BACK,
    (At.LOOK, Saw.LESS): At.CREATE_AGAIN,
    (At.LOOK, Saw.NO_ANSWER): At.LOOK,
    (At.LIST, Saw.NONE_GREATER): At.LIST_AGAIN,
    (At.LIST, Saw.GREATER): At.READ_CHILD,
    (At.LIST, Saw.NO_ANSWER): At.LIST,
    (At.LIST_AGAIN, Saw.NONE_GREATER): At.PERMITTED,
    (At.LIST_AGAIN, Saw.GREATER): At.READ_CHILD,
    (At.LIST_AGAIN, Saw.NO_ANSWER): At.LIST,
    (At.READ_CHILD, Saw.OUR_CHILD): At.CONTINUED,
    (At.READ_CHILD, Saw.NO_CHILD): At.WITHDRAW,
    (At.READ_CHILD, Saw.NO_PROOF): At.OVERTAKEN,
    (At.READ_CHILD, Saw.NO_ANSWER): At.READ_CHILD,
    (At.WITHDRAW, Saw.REMOVED): At.WITHDRAWN,
    (At.WITHDRAW, Saw.NO_ANSWER): At.WITHDRAW,
}
"""Every legal move. A repetition (creating again, back to READ_BACK, a step to itself) counts against :data:`RETRIES`."""

_CREATES: Final = frozenset({At.CREATE, At.CREATE_AGAIN})

ENDS: Final = frozenset({At.PERMITTED, At.LOST, At.CONTINUED, At.WITHDRAWN, At.OVERTAKEN, At.REFUSED, At.UNKNOWN})

GIVEN_UP: Final[Mapping[At, At]] = {At.READ_CHILD: At.OVERTAKEN, At.WITHDRAW: At.OVERTAKEN}
"""Where a step ends that was repeated too often; any other in UNKNOWN. Whoever reads the child or withdraws has been
overtaken, which is all that the caller needs; what stays behind is at worst a stray."""


@dataclass(frozen=True)
class Ending:
    """How a publication ended, and the newest id that it saw at the end (None where no listing was made)."""

    at: At
    newest: CheckpointId | None = None


def see_created(outcome: CreateOutcome) -> Saw:
    """What an attempt to create shows."""
    if outcome is CreateOutcome.CREATED:
        return Saw.CREATED
    return Saw.IN_THE_WAY if outcome is CreateOutcome.CONFLICT else Saw.NO_ANSWER


def see_failed(at: At, error: StorageError) -> Saw:
    """What an error shows. Of steps that can be repeated without end only a create can be refused for good.

    ``details["visible"]`` says that the record stands and may not survive a power failure. A permit would rest on it, so
    nobody may act on it before a restart has read what did survive.
    """
    if at in _CREATES:
        if error.details.get("visible"):
            return Saw.UNSYNCED
        if error.kind in REFUSALS:
            return Saw.REFUSED
    return Saw.NO_ANSWER


def see_back(found: Record | None, ours: ParentRef) -> Saw:
    """What the record under our id shows."""
    if found is None:
        return Saw.NOTHING
    return Saw.OURS if found.ref == ours else Saw.ANOTHERS


def see_child(found: Record | None, ours: ParentRef) -> Saw:
    """What the record under our id + 1 shows. A parent is named by id *and* attempt."""
    if found is None or found.content_of is not None:
        return Saw.NO_PROOF
    return Saw.OUR_CHILD if found.parent == ours else Saw.NO_CHILD


@dataclass
class _Steps:
    """The request of each step, and what it showed. Holds no decision."""

    storage: Storage
    ours: ParentRef
    data: bytes
    newest: CheckpointId | None = None
    last_error: StorageError | None = None

    @property
    def subject(self) -> str:
        """How a line of the log begins."""
        return f"checkpoint {self.ours.checkpoint_id} of {self.storage.url}"

    def take(self, at: At) -> Saw:
        steps: Mapping[At, Callable[[], Saw]] = {
            At.CREATE: self._create,
            At.CREATE_AGAIN: self._create,
            At.READ_BACK: self._read_back,
            At.LOOK: self._look,
            At.LIST: self._list_greater,
            At.LIST_AGAIN: self._list_greater,
            At.READ_CHILD: self._read_child,
            At.WITHDRAW: self._withdraw,
        }
        try:
            return steps[at]()
        except StorageError as error:
            saw = see_failed(at, error)
            self.last_error = error
            logger.warning("%s: %s failed: %s", self.subject, at.value, error)
            return saw

    def _create(self) -> Saw:
        return see_created(self.storage.create(layout.record_path(self.ours.checkpoint_id), self.data))

    def _read_back(self) -> Saw:
        try:
            return see_back(find_record(self.storage, self.ours.checkpoint_id), self.ours)
        except UNREADABLE:
            # Perhaps it was ours. Whoever takes a damaged record for its own gets a permit for what nobody can read.
            return Saw.ANOTHERS

    def _ids_from(self, least: int) -> list[CheckpointId]:
        found = ids_from(self.storage, CheckpointId(least))
        self.newest = found[-1] if found else None
        return found

    def _look(self) -> Saw:
        found = self._ids_from(self.ours.checkpoint_id)
        if not found:
            return Saw.LESS
        return Saw.SAME if found[-1] == self.ours.checkpoint_id else Saw.GREATER

    def _list_greater(self) -> Saw:
        return Saw.GREATER if self._ids_from(self.ours.checkpoint_id + 1) else Saw.NONE_GREATER

    def _read_child(self) -> Saw:
        try:
            return see_child(find_record(self.storage, CheckpointId(self.ours.checkpoint_id + 1)), self.ours)
        except UNREADABLE:
            # It may name us. A record is removed only when it is certain that nobody does.
            return Saw.NO_PROOF

    def _withdraw(self) -> Saw:
        self.storage.delete([layout.record_path(self.ours.checkpoint_id)])
        return Saw.REMOVED


def create_record(
    storage: Storage, ours: ParentRef, data: bytes, *, sleep: Callable[[float], None] = time.sleep
) -> Ending:
    """Carry the protocol out for a record whose manifest is durable, and say how it ended.

    ``data`` are the record's bytes; they are the same in every try. Raises ``StorageError`` where the storage refuses the
    record (a kind of ``storage.REFUSALS``), of which nothing was created then; and ``OutcomeUnknown`` when it stays silent
    for :data:`RETRIES` repetitions. Called by ``PendingCheckpoint.publish`` and by ``copying.copy``, once each per record.
    """
    steps = _Steps(storage, ours, data)
    at, repeats = At.CREATE, 0
    while at not in ENDS:
        saw = steps.take(at)
        after = MOVES[at, saw]
        repeated = after is At.CREATE_AGAIN or saw is Saw.SAME or (saw is Saw.NO_ANSWER and at not in _CREATES)
        if repeated and repeats == RETRIES:
            after = GIVEN_UP.get(at, At.UNKNOWN)
        elif repeated:
            repeats += 1
            pause = min(PAUSE_S * 2 ** (repeats - 1), PAUSE_MAX_S)
            stats_of(storage).event(retries=1, waits=1, wait_seconds=pause)
            logger.warning("%s: retry %d of %d (%s) in %.2f s", steps.subject, repeats, RETRIES, after.value, pause)
            sleep(pause)
        at = after
    if at is At.REFUSED or at is At.UNKNOWN:
        raise _error(steps, at) from steps.last_error
    if at is not At.PERMITTED:
        newest = "" if steps.newest is None else f"; the newest is {steps.newest}"
        logger.warning("%s: %s%s", steps.subject, at.value, newest)
    return Ending(at, steps.newest)


def _error(steps: _Steps, at: At) -> StorageError | OutcomeUnknown:
    """The error for the two ends that the storage itself has brought about."""
    (checkpoint_id, attempt_id), error = steps.ours, steps.last_error
    if at is At.REFUSED and error is not None:
        return StorageError(f"checkpoint {checkpoint_id} was not published: {error}", kind=error.kind, **error.details)
    return OutcomeUnknown(
        f"{steps.storage.url} does not say whether checkpoint {checkpoint_id} (attempt {attempt_id}) was published"
        f"{f': {error}' if error else ''}. Commit nothing; start again, and the run goes on from the newest that is there",
        checkpoint_id=checkpoint_id,
        attempt_id=attempt_id,
    )


def conflict(storage: Storage, record: Record, ending: Ending) -> PublishConflict | JobMismatch:
    """The error for an ending without a permit. It looks who stands there now, for the message only."""
    rival = _newest_for_message(storage)
    who = f"checkpoint {rival.checkpoint_id} of attempt {rival.attempt_id}" if rival else "another run's checkpoint"
    if rival and rival.job_id != record.job_id:
        return JobMismatch(
            f"{storage.url} belongs to job {rival.job_id!r}; job {record.job_id!r} cannot publish checkpoint "
            f"{record.checkpoint_id} there. Give the job a store of its own",
            job_id=rival.job_id,
        )
    what = {
        At.LOST: "was lost to another run",
        At.CONTINUED: "was published, and another run has gone on from it and taken over its commits",
        At.WITHDRAWN: "was overtaken and has been withdrawn",
        At.OVERTAKEN: "was overtaken",
    }[ending.at]
    return PublishConflict(
        f"checkpoint {record.checkpoint_id} (attempt {record.attempt_id}) of {storage.url} {what}; the newest is {who}. "
        "Commit nothing and stop; a restart goes on from the newest",
        kind=ErrorKind.PUBLISH_LOST if ending.at is At.LOST else ErrorKind.OVERTAKEN,
        checkpoint_id=record.checkpoint_id,
        attempt_id=record.attempt_id,
        published=ending.at is At.CONTINUED,
        newest=rival.checkpoint_id if rival else ending.newest,
        newest_attempt_id=rival.attempt_id if rival else None,
    )


def _newest_for_message(storage: Storage) -> Record | None:
    try:
        return newest_record(storage)
    except (StorageError, *UNREADABLE):
        logger.debug("cannot tell who overtook us in %s", storage.url, exc_info=True)
        return None


_PROOF: Final = object()


@dataclass(frozen=True)
class CommitPermit:
    """Proof that a checkpoint was the newest when its holder looked: the right to commit it, and to begin the next.

    Only ``PendingCheckpoint.publish``, ``CheckpointStore.start`` and ``CheckpointStore.rollback`` make one; a sink's
    commit demands one. ``notes`` are sentences for the user about what this checkpoint means (which checkpoints a
    rollback has left behind).
    """

    held: Checkpoint = field(repr=False, compare=False)
    record: Record
    notes: tuple[str, ...] = ()
    proof: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.proof is not _PROOF:
            raise InvalidInput("a CommitPermit is given by publish() and start(), and made by nobody else")

    @property
    def ref(self) -> ParentRef:
        """The checkpoint, as a child names it."""
        return self.record.ref

    def checkpoint(self) -> Checkpoint:
        """The checkpoint, open. The same object every time, so its manifest is read at most once."""
        return self.held


def permit(
    storage: Storage, record: Record, *, manifest: Manifest | None = None, notes: tuple[str, ...] = ()
) -> CommitPermit:
    """A permit. Called at the two places that have just proved the right to it, and nowhere else."""
    return CommitPermit(Checkpoint(storage, record, manifest=manifest, held=True), record, notes, _PROOF)


__all__ = [
    "ENDS",
    "MOVES",
    "At",
    "CommitPermit",
    "Ending",
    "Saw",
    "conflict",
    "create_record",
    "permit",
]
