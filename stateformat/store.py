"""The store of one job's checkpoints: the door of the library.

A run is ``start`` → commit what is prepared there → (``begin`` → snapshots → ``publish`` → commit)
… Each step returns the permit that the next one takes: it names the checkpoint that the run holds.
``start`` reads the history; ``begin`` never does. All other methods are for programs that look at a
store from outside.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from . import history, paths as layout, pins, publication, requests
from .errors import CheckpointError, ErrorKind, InvalidInput, JobMismatch, NotFound, PublishConflict
from .formats import (
    ForeignCheckpoints,
    Outside,
    foreign_checkpoints,
    open_folder,
    refuse_foreign,
    split_format,
)
from .graph import JobGraph
from .history import Garbage, Survey
from .model import (
    CheckpointId,
    CheckpointKind,
    JobId,
    ParentRef,
    Record,
    RescaledFrom,
    State,
    Stop,
    StopMode,
)
from .pins import Savepoint
from .publication import CommitPermit, PendingCheckpoint
from .reading import Checkpoint, StoreCheckpoint
from .requests import JobRequest, RequestAnswer, RequestKind
from .segments import WriteOptions
from .storage import Stats, Storage, as_url, instrumented, open_storage, stats_of
from .validation import Level

if TYPE_CHECKING:
    from .inspecting import StateChanges, StateRange

_DERIVED = frozenset({CheckpointKind.RESCALE, CheckpointKind.REWRITE, CheckpointKind.ROLLBACK})


def _ids(given: Sequence[int]) -> list[CheckpointId]:
    """Return ids that a user gave. Raises ``InvalidInput`` for what is no whole number."""
    try:
        return [CheckpointId(index(checkpoint_id)) for checkpoint_id in given]
    except TypeError as error:
        raise InvalidInput(f"ids of checkpoints are given as {given!r}; give whole numbers: [5, 6]") from error


def open(  # noqa: A001 - stateformat.open(url) is the whole door
    url: str | os.PathLike[str], *, allow_outside: bool = False, **options: Any
) -> CheckpointStore:
    """Return the store at a URL or path. Touches nothing: the first checkpoint creates the store.

    If a Flink savepoint or the checkpoint of a Structured Streaming query is there, its checkpoints
    are opened for reading; ``flink:PATH`` and ``spark:PATH`` look for nothing else.
    ``allow_outside``: also read files in other folders that its metadata names.

    ``STORE@NAME`` is the savepoint ``STORE/savepoints/NAME`` (:meth:`CheckpointStore.pin`), unless
    a store itself has that name; such an address is looked up immediately.

    ``options`` go to the storage. Raises ``InvalidInput`` for a scheme without a storage.
    """
    form, place = split_format(as_url(url))
    outside = partial(open_folder, options=options) if allow_outside else None
    storage = open_storage(place, **options) if form is not None else pins.open_address(place, **options)
    return CheckpointStore(storage, format=form, outside=outside)


class CheckpointStore:
    """The checkpoints of one job. Thread-safe. ``sleep`` is called between attempts to publish.

    ``format`` and ``outside`` are for the checkpoints of other systems (:func:`open`): the only
    format to look for, and a function that opens the folders that their metadata names.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        sleep: Callable[[float], None] = time.sleep,
        format: str | None = None,
        outside: Outside | None = None,
    ) -> None:
        self.storage: Storage = instrumented(storage)
        self.format = format
        self.outside = outside
        self._sleep = sleep
        self._warned: set[str] = set()
        self._uses = history.RememberedUses()

    def __repr__(self) -> str:
        return f"CheckpointStore({self.url!r})"

    def _repr_html_(self) -> str:
        """The newest checkpoints as a table, for notebooks."""
        from .inspecting import shown

        return shown(self)

    @property
    def url(self) -> str:
        """The address of the storage."""
        return self.storage.url

    @property
    def stats(self) -> Stats:
        """Counters of what the store has done in this process; they only go up."""
        return stats_of(self.storage)

    def history(self, limit: int | None = None) -> list[Record]:
        """Return the records of the newest checkpoint and its ancestors; at most ``limit``.

        Newest first. Raises ``NotFound``, and ``DamagedCheckpoint`` or ``UnsupportedFormat`` if a
        record among them is unreadable or lost; see :meth:`survey`.
        """
        if limit is not None and limit < 1:
            raise InvalidInput(f"a history of {limit} checkpoints is empty; ask for at least 1")
        found = self.survey(limit)
        fault = found.fault(self.storage)
        if fault is not None and (limit is None or len(found.chain) < limit):
            raise fault
        return list(found.chain)

    def survey(self, limit: int | None = None) -> Survey:
        """Survey all records, or those down to ``limit`` checkpoints. Raises ``NotFound``."""
        found = Survey() if self.format is not None else history.survey(self.storage, limit=limit)
        if not found.listed and (foreign := self._foreign()) is not None:
            records, damaged = foreign.history()
            unreadable = {CheckpointId(number): damaged[number] for number in sorted(damaged, reverse=True)}
            listed = tuple(sorted([*unreadable, *(record.checkpoint_id for record in records)]))
            return Survey(listed, tuple(records[:limit]), unreadable=unreadable, damaged=tuple(unreadable))
        history.require_records(self.storage, found.listed)
        return found

    def strays(self) -> list[ParentRef]:
        """Return records that are not checkpoints, by id; a damaged one has attempt ``""``."""
        return list(history.survey(self.storage).strays)

    def open(self, checkpoint_id: int | None = None) -> Checkpoint:
        """Return a checkpoint to look at, by default the newest. To run from it, use :meth:`start`.

        Damage to later checkpoints does not matter. Raises ``NotFound`` for a store or id that does
        not exist and for a stray, ``CheckpointExpired``, ``DamagedCheckpoint``.
        """
        wanted = None if checkpoint_id is None else _ids([checkpoint_id])[0]
        foreign = self._foreign() if self.format is not None else None
        if foreign is None:
            try:
                return StoreCheckpoint(self.storage, history.record_of(self.storage, wanted))
            except NotFound as error:
                foreign = self._foreign() if error.kind in history.NO_RECORDS else None
                if foreign is None:
                    raise
        return foreign.open(wanted)

    def checkpoints(self, ids: Sequence[int] | None = None) -> list[Checkpoint]:
        """Return checkpoints to look at, newest first: those with these ids, or all.

        Raises as :meth:`history` does for all, and as :meth:`open` for an id.
        """
        if ids is None:
            return [self.checkpoint_of(record) for record in self.history()]
        chosen = sorted(set(_ids(ids)), reverse=True)
        records = {} if len(chosen) < 2 else {record.checkpoint_id: record for record in self._down_to(chosen[-1])}
        return [self.checkpoint_of(records[each]) if each in records else self.open(each) for each in chosen]

    def checkpoint_of(self, record: Record) -> Checkpoint:
        """Return the checkpoint of a record of :meth:`history`, without reading that again."""
        # Of another system's checkpoints the record has no manifest; its format opens them.
        return StoreCheckpoint(self.storage, record) if record.manifest.path else self.open(record.checkpoint_id)

    def changes(
        self, operator: str, state: str, start: int, end: int, *, every: bool = False, with_expired: bool = False
    ) -> StateChanges:
        """Return what changed in a state from checkpoint ``start`` to ``end``, for any Arrow tool.

        ``operator`` is a uid, or the name of one operator. ``every``: the changes of each
        checkpoint in between, in order. Rows that expired in between count as deleted;
        ``with_expired``: they stay, as stored. If one side has no such state, all rows of the
        other are inserted or deleted.

        Raises ``InvalidInput`` if no checkpoint has the state, for a ``start`` after ``end``, and
        for two states that only share a name; and as :meth:`open` does.
        """
        from .inspecting import StateChanges

        start, end = _ids([start, end])
        if start > end:
            raise InvalidInput(f"changes from checkpoint {start} to {end}, which is older; give the older one first")
        chosen = self._way(start, end) if every else self.checkpoints([start, end])
        return StateChanges.between(chosen[::-1], operator, state, with_expired=with_expired)

    def states_over(
        self,
        operator: str,
        state: str,
        checkpoint_ids: Sequence[int] | None = None,
        *,
        with_expired: bool = False,
    ) -> StateRange:
        """Return the rows of a state in these checkpoints, by default in all, for any Arrow tool.

        ``operator`` is a uid, or the name of one operator. ``with_expired``: also rows that had
        expired at their checkpoint. Raises ``InvalidInput`` if no checkpoint has the state, and for
        states that only share a name; and as :meth:`checkpoints` does.
        """
        from .inspecting import StateRange

        return StateRange.of(self.checkpoints(checkpoint_ids), operator, state, with_expired=with_expired)

    def _way(self, start: int, end: int) -> list[Checkpoint]:
        """Return the checkpoints of the history from ``end`` down to ``start``."""
        way = [record for record in self._down_to(start) if record.checkpoint_id <= end]
        if way and way[0].checkpoint_id == end:
            return [StoreCheckpoint(self.storage, record) for record in way]
        ends = self.checkpoints([start, end])
        # Another system's checkpoints, or damage above the end that does not matter.
        found = self.survey()
        faults = [found.unreadable[number] for number in found.damaged if start < number < end]
        faults += [history.record_lost(self.storage, ref) for ref in found.lost if start < ref.checkpoint_id < end]
        if faults:
            raise faults[0]
        between = [record.checkpoint_id for record in found.checkpoints if start < record.checkpoint_id < end]
        return [ends[0], *(self.open(checkpoint_id) for checkpoint_id in between), *ends[1:]]

    def _down_to(self, checkpoint_id: int) -> Sequence[Record]:
        """Return the history down to an id by one reading; empty where it is not there or whole."""
        if self.format is not None:
            return ()
        try:
            return history.chain_down_to(self.storage, CheckpointId(checkpoint_id))
        except CheckpointError:
            return ()

    def start(self, job_id: str) -> CommitPermit | None:
        """Return the permit of the newest checkpoint for a run to restore; None for a first run.

        Raises ``JobMismatch`` for another job's store, and ``DamagedCheckpoint`` if the newest is
        damaged. A run that gets ``CheckpointExpired`` later starts over.
        """
        record = history.newest_record(self.storage)
        if record is None or self.format is not None:
            refuse_foreign(self.storage, self.format)
            return None
        self._check_job(job_id, record)
        # Its publisher may have died before the record was durable, and commits cannot be undone.
        self.storage.make_durable([layout.record_path(record.checkpoint_id)])
        return publication.permit(self.storage, record)

    def start_from(
        self,
        checkpoint: Checkpoint,
        properties: Mapping[str, str] | None = None,
        progress: publication.Progress | None = None,
    ) -> CommitPermit:
        """Begin this empty store with the content of another store's checkpoint or savepoint.

        The permit is for the first checkpoint of this store: id + 1, with the other as its parent.
        The job id stays the same: segments hold it. Raises ``InvalidInput`` (``STORE_NOT_EMPTY``),
        and as :meth:`copy` and :meth:`PendingCheckpoint.publish` do.
        """
        return publication.begin_from(
            checkpoint, self.storage, properties=properties, progress=progress, sleep=self._sleep
        )

    def permit_of(self, checkpoint: Checkpoint) -> CommitPermit:
        """Return the permit for an open checkpoint. ``PublishConflict`` if it is not the newest."""
        newest = self.start(checkpoint.record.job_id)
        if newest is None or newest.ref != checkpoint.record.ref:
            now = newest.ref.checkpoint_id if newest else "gone"
            raise PublishConflict(
                f"checkpoint {checkpoint.id} is not the newest of {self.url}, which is {now}; nothing was published. "
                "Start from the newest, roll back first (`ckpt rollback`), or write to a store of its own (`--to "
                "URL`)",
                kind=ErrorKind.OVERTAKEN,
                checkpoint_id=checkpoint.id,
            )
        checkpoint.of_store("which cannot be carried on").lend_manifest(newest.checkpoint())
        return newest

    def begin(
        self,
        *,
        job_id: str,
        graph: JobGraph,
        states: Iterable[State],
        parent: CommitPermit | Checkpoint | None,
        job_name: str = "",
        kind: CheckpointKind = CheckpointKind.CHECKPOINT,
        source: ParentRef | None = None,
        rescaled_from: RescaledFrom | None = None,
        stop: Stop | None = None,
        properties: Mapping[str, str] | None = None,
        options: WriteOptions | None = None,
        carried: pa.Table | None = None,
    ) -> PendingCheckpoint:
        """Begin the checkpoint after ``parent``, the permit that the run holds.

        The id is the parent's + 1. Nothing is listed or read: a run that built on a checkpoint
        whose state it never had would lose output (publish-protocol F1).

        - ``graph`` may hold subtasks that finished earlier.
        - ``parent`` is None only for the first checkpoint of a job. A permit or :class:`Checkpoint`
          of another store requires that this one is empty, and :meth:`adopt_objects` first.
        - ``source`` is the checkpoint whose content a rescale, rewrite or rollback has, by default
          the parent.
        - ``carried``: the handles of state to carry if the parallelism has changed since the
          parent, cut for ``graph`` by :meth:`Checkpoint.carried`.

        Raises ``JobMismatch``, and ``InvalidInput`` for a parent of this store that is not a
        permit, and for a graph, states or properties that could never be published.
        """
        is_new, named = kind is CheckpointKind.CHECKPOINT, {} if properties is None else properties
        declared = publication.check_arguments(graph, states, job_id, job_name, named, is_new=is_new)
        held = parent.checkpoint() if isinstance(parent, CommitPermit) else parent
        if held is not None and not isinstance(held, Checkpoint):
            raise InvalidInput(
                f"the parent is {parent!r}; give the permit of start() or publish(), or None for the first"
            )
        if held is not None:
            held = held.of_store("which cannot be rewritten or carried on")
            self._check_job(job_id, held.record)
            if not isinstance(parent, CommitPermit) and held.storage.url == self.url:
                raise InvalidInput(
                    f"{held!r} was opened for reading; build on the permit of start() or publish() in its own store"
                )
        if source is None and held is not None and kind in _DERIVED:
            source = held.record.ref
        draft = publication.Draft(
            job_id=JobId(job_id),
            job_name=job_name,
            graph=graph,
            states=declared,
            parent=held,
            kind=kind,
            source=source,
            rescaled_from=rescaled_from,
            stop=stop,
            properties=named,
            options=options or WriteOptions(),
            carried=carried,
        )
        pending = PendingCheckpoint(self.storage, draft, sleep=self._sleep)
        before = held.graph if held is not None else None
        publication.check_beginning(pending.graph, declared, before, is_new=is_new)
        return pending

    def expire(
        self,
        keep: int | None = None,
        *,
        older_than_us: int | None = None,
        now_us: int | None = None,
        delete: bool = True,
    ) -> Garbage:
        """Delete all but the newest ``keep`` ids, then unreferenced objects (``history.expire``).

        ``older_than_us``: only those older than that, lowest ids first; the newest always stays.
        """
        return history.expire(
            self.storage, keep, older_than_us=older_than_us, now_us=now_us, delete=delete, read=self._uses
        )

    def collect_garbage(self, *, delete: bool) -> Garbage:
        """Find unreferenced objects; ``delete`` removes them (``history.collect_garbage``)."""
        return history.collect_garbage(self.storage, delete=delete)

    def copy(
        self, checkpoint: Checkpoint, target: CheckpointStore, progress: publication.Progress | None = None
    ) -> Record:
        """Copy a checkpoint into a store of its own, as a savepoint (``publication.copy``)."""
        if not isinstance(target, CheckpointStore):
            raise InvalidInput(f"the target of a copy is {target!r}; open it first, with stateformat.open(url)")
        return publication.copy(checkpoint, target.storage, progress=progress, sleep=self._sleep)

    def pin(self, checkpoint_id: int | None, name: str, progress: publication.Progress | None = None) -> Record:
        """Keep a checkpoint, or the newest, under a name: a savepoint in ``savepoints/NAME/``.

        It never expires; its address is ``STORE@NAME``. Pinning it again changes nothing. Raises
        ``InvalidInput`` for a name that is illegal or taken, and as :meth:`open` and :meth:`copy`.
        """
        return pins.pin(self.open(checkpoint_id), name, progress=progress, sleep=self._sleep).record

    def pins(self) -> list[Savepoint]:
        """Return the savepoints below the store, by name: pins and those of jobs."""
        return pins.pins(self.storage)

    def unpin(self, name: str) -> None:
        """Remove a savepoint below the store, and nothing else (``pins.unpin``)."""
        pins.unpin(self.storage, name)

    def adopt_objects(self, checkpoint: Checkpoint, progress: publication.Progress | None = None) -> None:
        """Copy the segments of another store's checkpoint here, to begin from it."""
        publication.copy_objects(checkpoint, self.storage, progress=progress)

    def rollback(self, checkpoint_id: int) -> CommitPermit:
        """Make an older checkpoint the newest again (``publication.rollback``)."""
        return publication.rollback(self.storage, CheckpointId(checkpoint_id), sleep=self._sleep)

    def diagnose(self, source: int | None = None, *, level: Level = "quick") -> publication.Diagnosis:
        """Return what is wrong with the newest checkpoint (``publication.diagnose``)."""
        return publication.diagnose(self.storage, source, level=level)

    def repair(
        self, source: int | None = None, *, level: Level = "quick", diagnosis: publication.Diagnosis | None = None
    ) -> CommitPermit:
        """Publish an intact checkpoint's content over a damaged newest (``publication.repair``)."""
        return publication.repair(self.storage, source, level=level, diagnosis=diagnosis, sleep=self._sleep)

    def request_stop(
        self, mode: StopMode, savepoint: str | os.PathLike[str] | None = None, *, timeout_us: int | None = None
    ) -> JobRequest:
        """Ask the running job to stop with a savepoint, at this URL or by default below the store.

        The caller polls :meth:`request_answer`, and calls :meth:`withdraw_request` at the end, at
        the latest after ``timeout_us``: a run that begins later does not obey what was left behind.
        Without it a request that nobody withdraws stops the next run. Raises ``NotFound`` if there
        is no store, ``InvalidInput`` for the URL, ``StorageError``.
        """
        return self._ask(RequestKind.STOP, savepoint, timeout_us, mode=mode)

    def request_savepoint(
        self, savepoint: str | os.PathLike[str] | None = None, *, timeout_us: int | None = None
    ) -> JobRequest:
        """Ask the running job for a savepoint; it goes on. Otherwise as :meth:`request_stop`."""
        return self._ask(RequestKind.SAVEPOINT, savepoint, timeout_us)

    def request_rescale(
        self,
        parallelism: int | None = None,
        operators: Mapping[str, int] | None = None,
        savepoint: str | os.PathLike[str] | None = None,
        *,
        timeout_us: int | None = None,
    ) -> JobRequest:
        """Ask the running job to stop with a savepoint and resume at another parallelism.

        ``operators``, by uid, overrides ``parallelism``. Otherwise as :meth:`request_stop`.
        """
        wanted = {"parallelism": parallelism, "operators": dict(operators or {})}
        return self._ask(RequestKind.RESCALE, savepoint, timeout_us, **wanted)

    def _ask(
        self, kind: RequestKind, savepoint: str | os.PathLike[str] | None, timeout_us: int | None, **members: Any
    ) -> JobRequest:
        place = _as_url(savepoint)
        return requests.ask(self.storage, kind, place, timeout_us=timeout_us, sleep=self._sleep, **members)

    def requests(self) -> list[JobRequest]:
        """Return the unanswered requests of every kind, the lowest ``newest`` first; for runs."""
        return requests.waiting_requests(self.storage, warned=self._warned)

    def answer_request(self, answer: RequestAnswer) -> bool:
        """Answer a request, after its last step; return False if it was withdrawn or answered."""
        return requests.answer_request(self.storage, answer, sleep=self._sleep)

    def request_answer(self, request_id: str) -> RequestAnswer | None:
        """Return the answer to a request; None if there is none yet."""
        return requests.request_answer(self.storage, request_id, warned=self._warned)

    def withdraw_request(self, request_id: str) -> None:
        """Remove a request and its answer. A run that has started on it may still carry it out."""
        requests.withdraw_request(self.storage, request_id)

    def _foreign(self) -> ForeignCheckpoints | None:
        return foreign_checkpoints(self.storage, self.format, self.outside)

    def _check_job(self, job_id: str, record: Record) -> None:
        if record.job_id != job_id:
            raise JobMismatch(
                f"{self.url} belongs to job {record.job_id!r} (checkpoint {record.checkpoint_id}), not to {job_id!r}; "
                "give the job a store of its own, or its right id",
                job_id=record.job_id,
            )


def _as_url(place: str | os.PathLike[str] | None) -> str | None:
    return None if place is None else as_url(place)
