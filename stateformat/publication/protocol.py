"""The publication protocol: a record that is ready leads to a permit to commit, or an error.

Theory of operation (SPEC.md section 8.2). A checkpoint exists from the moment its record is created
as the newest, and another run may go on from it at once. So creating the record proves nothing; a
listing *after* it does. The greatest id never goes down, because whoever deletes a record has seen
a greater one. So a create either succeeds as newest + 1, and is in the history for good, or at an
id whose record had expired, and is a stray. A listing that shows no greater id tells which.

1. Create, if absent. Created → 4. In the way, or no answer → 2. Refused: no request came before
   this one, so nothing is published, and the caller gets the error.
2. Read back. Ours → 4, as if the answer had come. Another attempt's → lost. Nothing → 3.
3. List. A greater id than ours → lost: ours may have existed and expired. Our id → 2: a create
   without an answer may land this late. Otherwise create again, same name, same bytes, as in 1;
   but after a refusal → 2, for an earlier request may still land.
4. List, twice. Nothing greater, both times → the permit. Something greater → 5.
5. Read record id + 1. It names us as parent → another run has gone on from our checkpoint: the
   record stays, and we stop. It names another → ours is a stray: remove it, and stop. It is absent,
   unreadable, or a repair → nothing proves that ours is a stray: the record stays, and we stop.

The steps are data (:data:`MOVES`). :func:`create_record` sends one storage request for each. If a
step gets no answer, it is repeated after growing pauses, a bounded number of times.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from .. import paths as layout
from ..errors import (
    DamagedCheckpoint,
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
from ..reading import StoreCheckpoint
from ..storage import REFUSALS, CreateOutcome, Storage, stats_of

logger = logging.getLogger(__name__)

RETRIES: Final = 8
"""How many steps one publication may repeat before its outcome counts as unknown."""
PAUSE_S: Final = 0.05
"""The first pause; each further one is twice as long, up to :data:`PAUSE_MAX_S`."""
PAUSE_MAX_S: Final = 5.0


class Step(Enum):
    """The next step of a publication (one request each), or its end."""

    CREATE = "create"
    """The first try: no request was sent before."""
    CREATE_AGAIN = "create_again"
    """A further try: the outcome of those before is unknown."""
    READ_BACK = "read_back"
    LOOK = "look"
    LIST = "list"
    LIST_AGAIN = "list_again"
    READ_CHILD = "read_child"
    WITHDRAW = "withdraw"

    PERMITTED = "permitted"
    """Ours was the newest when we listed."""
    LOST = "lost"
    """Another's record has our id, or ours may have existed and expired."""
    CONTINUED = "continued"
    """Ours is in the history, and another run has gone on from it."""
    WITHDRAWN = "withdrawn"
    """Ours was a stray and has been removed."""
    OVERTAKEN = "overtaken"
    """There is a greater id; whether ours is in the history is unknown. Its record stays."""
    REFUSED = "refused"
    """The storage did not create ours and never will."""
    UNKNOWN = "unknown"
    """Whether ours was published, or will stay, is unknown. A restart reads the truth."""


class Observation(Enum):
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


MOVES: dict[tuple[Step, Observation], Step] = {
    (Step.CREATE, Observation.CREATED): Step.LIST,
    (Step.CREATE, Observation.IN_THE_WAY): Step.READ_BACK,
    (Step.CREATE, Observation.NO_ANSWER): Step.READ_BACK,
    (Step.CREATE, Observation.REFUSED): Step.REFUSED,
    (Step.CREATE, Observation.UNSYNCED): Step.UNKNOWN,
    (Step.CREATE_AGAIN, Observation.CREATED): Step.LIST,
    (Step.CREATE_AGAIN, Observation.IN_THE_WAY): Step.READ_BACK,
    (Step.CREATE_AGAIN, Observation.NO_ANSWER): Step.READ_BACK,
    (Step.CREATE_AGAIN, Observation.REFUSED): Step.READ_BACK,
    (Step.CREATE_AGAIN, Observation.UNSYNCED): Step.UNKNOWN,
    (Step.READ_BACK, Observation.OURS): Step.LIST,
    (Step.READ_BACK, Observation.ANOTHERS): Step.LOST,
    (Step.READ_BACK, Observation.NOTHING): Step.LOOK,
    (Step.READ_BACK, Observation.NO_ANSWER): Step.READ_BACK,
    (Step.LOOK, Observation.GREATER): Step.LOST,
    (Step.LOOK, Observation.SAME): Step.READ_BACK,
    (Step.LOOK, Observation.LESS): Step.CREATE_AGAIN,
    (Step.LOOK, Observation.NO_ANSWER): Step.LOOK,
    (Step.LIST, Observation.NONE_GREATER): Step.LIST_AGAIN,
    (Step.LIST, Observation.GREATER): Step.READ_CHILD,
    (Step.LIST, Observation.NO_ANSWER): Step.LIST,
    (Step.LIST_AGAIN, Observation.NONE_GREATER): Step.PERMITTED,
    (Step.LIST_AGAIN, Observation.GREATER): Step.READ_CHILD,
    (Step.LIST_AGAIN, Observation.NO_ANSWER): Step.LIST,
    (Step.READ_CHILD, Observation.OUR_CHILD): Step.CONTINUED,
    (Step.READ_CHILD, Observation.NO_CHILD): Step.WITHDRAW,
    (Step.READ_CHILD, Observation.NO_PROOF): Step.OVERTAKEN,
    (Step.READ_CHILD, Observation.NO_ANSWER): Step.READ_CHILD,
    (Step.WITHDRAW, Observation.REMOVED): Step.WITHDRAWN,
    (Step.WITHDRAW, Observation.NO_ANSWER): Step.WITHDRAW,
}
"""Every legal move. Creating again, back to READ_BACK and a step to itself are retries."""

_CREATES: Final = frozenset({Step.CREATE, Step.CREATE_AGAIN})

ENDS: Final = frozenset(
    {Step.PERMITTED, Step.LOST, Step.CONTINUED, Step.WITHDRAWN, Step.OVERTAKEN, Step.REFUSED, Step.UNKNOWN}
)

GIVEN_UP: Final[Mapping[Step, Step]] = {Step.READ_CHILD: Step.OVERTAKEN, Step.WITHDRAW: Step.OVERTAKEN}
"""Where a step repeated too often ends; other steps end in UNKNOWN. At these two, another run has
certainly overtaken us, and a record that stays is at worst a stray."""


@dataclass(frozen=True)
class Ending:
    """How a publication ended."""

    step: Step
    newest: CheckpointId | None = None
    """The newest id listed at the end; None if it ended without a listing."""


def see_failed(step: Step, error: StorageError) -> Observation:
    """Return what an error shows. Only a create can be refused for good.

    ``details["visible"]``: the record exists but may not survive a power failure. No permit may
    rest on it until a restart has read what survived.
    """
    if step in _CREATES:
        if error.details.get("visible"):
            return Observation.UNSYNCED
        if error.kind in REFUSALS:
            return Observation.REFUSED
    return Observation.NO_ANSWER


def see_child(found: Record | None, ours: ParentRef) -> Observation:
    """Return what the record under our id + 1 shows. It names a parent by id *and* attempt."""
    if found is None or found.content_of is not None:
        return Observation.NO_PROOF
    return Observation.OUR_CHILD if found.parent == ours else Observation.NO_CHILD


@dataclass
class _Requests:
    """Sends the request of each step. Decides nothing."""

    storage: Storage
    ours: ParentRef
    data: bytes
    newest: CheckpointId | None = None
    last_error: StorageError | None = None

    @property
    def subject(self) -> str:
        return f"checkpoint {self.ours.checkpoint_id} of {self.storage.url}"

    def send(self, step: Step) -> Observation:
        requests: Mapping[Step, Callable[[], Observation]] = {
            Step.CREATE: self._create,
            Step.CREATE_AGAIN: self._create,
            Step.READ_BACK: self._read_back,
            Step.LOOK: self._list_ours,
            Step.LIST: self._list_greater,
            Step.LIST_AGAIN: self._list_greater,
            Step.READ_CHILD: self._read_child,
            Step.WITHDRAW: self._withdraw,
        }
        try:
            return requests[step]()
        except StorageError as error:
            self.last_error = error
            logger.warning("%s: %s failed: %s", self.subject, step.value, error)
            return see_failed(step, error)

    def _create(self) -> Observation:
        outcome = self.storage.create(layout.record_path(self.ours.checkpoint_id), self.data)
        if outcome is CreateOutcome.CREATED:
            return Observation.CREATED
        return Observation.IN_THE_WAY if outcome is CreateOutcome.CONFLICT else Observation.NO_ANSWER

    def _read_back(self) -> Observation:
        try:
            found = find_record(self.storage, self.ours.checkpoint_id)
        except UNREADABLE:
            # It may be ours, but no permit may rest on a record that no one can read.
            return Observation.ANOTHERS
        if found is None:
            return Observation.NOTHING
        return Observation.OURS if found.ref == self.ours else Observation.ANOTHERS

    def _ids_from(self, least: int) -> list[CheckpointId]:
        found = ids_from(self.storage, CheckpointId(least))
        self.newest = found[-1] if found else None
        return found

    def _list_ours(self) -> Observation:
        found = self._ids_from(self.ours.checkpoint_id)
        if not found:
            return Observation.LESS
        return Observation.SAME if found[-1] == self.ours.checkpoint_id else Observation.GREATER

    def _list_greater(self) -> Observation:
        return Observation.GREATER if self._ids_from(self.ours.checkpoint_id + 1) else Observation.NONE_GREATER

    def _read_child(self) -> Observation:
        try:
            return see_child(find_record(self.storage, CheckpointId(self.ours.checkpoint_id + 1)), self.ours)
        except UNREADABLE:
            # It may name us as parent.
            return Observation.NO_PROOF

    def _withdraw(self) -> Observation:
        self.storage.delete([layout.record_path(self.ours.checkpoint_id)])
        return Observation.REMOVED


def create_record(
    storage: Storage, ours: ParentRef, data: bytes, *, sleep: Callable[[float], None] = time.sleep
) -> Ending:
    """Publish a record whose manifest is durable, and return how it ended.

    ``data`` are the record's bytes. Raises ``StorageError`` if the storage refuses the record (a
    kind of ``storage.REFUSALS``), and ``OutcomeUnknown`` if it does not answer :data:`RETRIES`
    repetitions.
    """
    requests = _Requests(storage, ours, data)
    step, repeats = Step.CREATE, 0
    while step not in ENDS:
        saw = requests.send(step)
        after = MOVES[step, saw]
        unanswered = saw is Observation.NO_ANSWER and step not in _CREATES
        repeated = after is Step.CREATE_AGAIN or saw is Observation.SAME or unanswered
        if repeated and repeats == RETRIES:
            after = GIVEN_UP.get(step, Step.UNKNOWN)
        elif repeated:
            repeats += 1
            pause = min(PAUSE_S * 2 ** (repeats - 1), PAUSE_MAX_S)
            stats_of(storage).event(retries=1, waits=1, wait_seconds=pause)
            logger.warning("%s: retry %d of %d (%s) in %.2f s", requests.subject, repeats, RETRIES, after.value, pause)
            sleep(pause)
        step = after
    if step is Step.REFUSED or step is Step.UNKNOWN:
        raise _error(requests, step) from requests.last_error
    if step is not Step.PERMITTED:
        newest = "" if requests.newest is None else f"; the newest is {requests.newest}"
        logger.warning("%s: %s%s", requests.subject, step.value, newest)
    return Ending(step, requests.newest)


def _error(requests: _Requests, step: Step) -> StorageError | OutcomeUnknown:
    (checkpoint_id, attempt_id), error = requests.ours, requests.last_error
    if step is Step.REFUSED and error is not None:
        return StorageError(f"checkpoint {checkpoint_id} was not published: {error}", kind=error.kind, **error.details)
    return OutcomeUnknown(
        f"{requests.storage.url} does not say whether checkpoint {checkpoint_id} (attempt {attempt_id}) was "
        f"published{f': {error}' if error else ''}. Commit nothing; start again, and the run goes on from the newest "
        "that is there",
        checkpoint_id=checkpoint_id,
        attempt_id=attempt_id,
    )


def conflict(storage: Storage, record: Record, ending: Ending) -> PublishConflict | JobMismatch:
    """Return the error for an ending without a permit. Reads the newest record, for the message."""
    rival = _newest_for_message(storage)
    who = f"checkpoint {rival.checkpoint_id} of attempt {rival.attempt_id}" if rival else "another run's checkpoint"
    if rival and rival.job_id != record.job_id:
        return JobMismatch(
            f"{storage.url} belongs to job {rival.job_id!r}; job {record.job_id!r} cannot publish checkpoint "
            f"{record.checkpoint_id} there. Give the job a store of its own",
            job_id=rival.job_id,
        )
    what = {
        Step.LOST: "was lost to another run",
        Step.CONTINUED: "was published, and another run has gone on from it and taken over its commits",
        Step.WITHDRAWN: "was overtaken and has been withdrawn",
        Step.OVERTAKEN: "was overtaken",
    }[ending.step]
    return PublishConflict(
        f"checkpoint {record.checkpoint_id} (attempt {record.attempt_id}) of {storage.url} {what}; the newest is "
        f"{who}. Commit nothing and stop; a restart goes on from the newest",
        kind=ErrorKind.PUBLISH_LOST if ending.step is Step.LOST else ErrorKind.OVERTAKEN,
        checkpoint_id=record.checkpoint_id,
        attempt_id=record.attempt_id,
        published=ending.step is Step.CONTINUED,
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
    """Proof that a checkpoint was the newest: permission to commit it and to begin the next.

    Publishing and ``CheckpointStore.start`` return one; a sink's commit requires one.
    """

    opened: StoreCheckpoint = field(repr=False, compare=False)
    record: Record
    notes: tuple[str, ...] = ()
    """Sentences for the user: which checkpoints a rollback or repair left behind."""
    proof: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.proof is not _PROOF:
            raise InvalidInput("only publish() and start() make a CommitPermit")

    @property
    def ref(self) -> ParentRef:
        """The id and attempt by which a child names the checkpoint."""
        return self.record.ref

    def checkpoint(self) -> StoreCheckpoint:
        """Return the checkpoint: the same object each time, so its manifest is read only once."""
        return self.opened


def permit(
    storage: Storage, record: Record, *, manifest: Manifest | None = None, notes: tuple[str, ...] = ()
) -> CommitPermit:
    """Return a permit. Call it only when the checkpoint has just been proved the newest."""
    return CommitPermit(StoreCheckpoint(storage, record, manifest=manifest, bound_to_run=True), record, notes, _PROOF)


# ---- presence ------------------------------------------------------------------------------------
#
# Check by one listing that the segments a checkpoint names are in the store.


def check_present(storage: Storage, handles: pa.Table, paths: pa.Array, source: int) -> None:
    """Raise ``DamagedCheckpoint`` if an object of ``paths`` is missing or has another size."""
    # Group before filtering: a million handles may name a hundred segments.
    named = (
        handles.select(["path", "size_bytes"]).group_by("path", use_threads=False).aggregate([("size_bytes", "max")])
    )
    named = named.filter(pc.is_in(named["path"], value_set=paths))
    there: Mapping[str, int] = {item.path: item.size_bytes for item in storage.list(layout.SEGMENTS)}
    missing, wrong = [], []
    for path, size_bytes in zip(named["path"].to_pylist(), named["size_bytes_max"].to_pylist(), strict=True):
        if path not in there:
            missing.append(path)
        elif there[path] != size_bytes:
            wrong.append(f"{path} has {there[path]:,} bytes, not {size_bytes:,}")
    if missing or wrong:
        more = f", and {len(missing) - 1:,} more of its segments" if len(missing) > 1 else ""
        fault = f"{missing[0]} is not in the store{more}" if missing else wrong[0]
        raise DamagedCheckpoint(
            f"checkpoint {source} of {storage.url} is damaged: {fault}. Nothing was published. `ckpt validate` lists "
            "all that is wrong, `ckpt history` the other checkpoints",
            kind=ErrorKind.OBJECT_MISSING if missing else ErrorKind.OBJECT_SIZE_DIFFERS,
            path=missing[0] if missing else wrong[0].split(" ", 1)[0],
            checkpoint_id=source,
        )
