"""Requests to a running job: finds them in its store, and answers them, also at the job's end.

A savepoint is a copy of a checkpoint, made while the job goes on (SPEC.md section 2.4). A request
waits for the next checkpoint to begin. Once that is committed, it is copied in the background, and
the request is answered when the copy is whole. Meanwhile the run keeps the checkpoint from
expiring. A run that ends abruptly answers none of them: its successor does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import stateformat as sf
from stateformat import requests as rq
from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, RestoreRefused
from stateformat.history import newest_record, record_ids
from stateformat.model import RESCALE_PROPERTY, CheckpointKind, Stop, StopMode
from stateformat.paths import SAVEPOINTS
from stateformat.publication import CommitPermit
from stateformat.rescaling import lasting_stop, rescale_of
from stateformat.storage import check_savepoint_place, lies_in, without_secrets
from stateformat.store import CheckpointStore
from stateformat.words import moment

from ..dataflow import events as ev
from ..dataflow.steps import Steps
from .clock import Clock, Work
from .driver import Driver
from .options import Schedule
from .reports import JobOutcome, JobPaused
from .rescales import SavedStop
from .restore import Restored

GOES_ON = "the job goes on"
STOPS = "the job stops"


@dataclass(frozen=True)
class Places:
    """Where a job makes the savepoints that it is asked for.

    Whoever can write to the store can ask, and the job writes with its own rights.
    """

    store_url: str
    taken: Mapping[str, str]
    """The places that sources read and sinks write, and the uid of one of them."""
    below: tuple[str, ...] | None
    """Where alone they may lie, beside ``savepoints/`` of the store; None: anywhere."""
    options: Mapping[str, Any]
    """Storage options of the savepoints' stores."""

    @classmethod
    def of(cls, store: CheckpointStore, flow: Steps, schedule: Schedule) -> Places:
        """Return the places for a dataflow."""
        taken = {place: uid for uid, step in flow.steps.items() for place in step.logic.places}
        below = cast("tuple[str, ...] | None", schedule.savepoints_below)  # As Schedule leaves it.
        return cls(store.url, taken, below, schedule.savepoint_options)

    def check(self, savepoint: str | None) -> None:
        """Raise ``InvalidInput`` for an address at which this job makes no savepoint."""
        if savepoint is None:
            return
        check_savepoint_place(savepoint, self.store_url)
        default = f"{self.store_url.rstrip('/')}/{SAVEPOINTS}"
        if lies_in(savepoint, default):
            return
        for place, uid in self.taken.items():
            if lies_in(savepoint, place):
                raise InvalidInput(
                    f"{savepoint} lies in {place}, where operator {uid!r} of the job reads or writes. Choose another "
                    "place, or leave the address out",
                    kind=ErrorKind.INVALID_URL,
                )
        if self.below is not None and not any(lies_in(savepoint, place) for place in self.below):
            allowed = ", ".join((*self.below, default))
            raise InvalidInput(
                f"this job makes savepoints only below {allowed}, and {savepoint} lies elsewhere",
                kind=ErrorKind.INVALID_URL,
            )


class _GivenUp(Exception):
    """The run ended before the copy did."""


class Copy:
    """One copy of a checkpoint, for a request."""

    def __init__(
        self, store: CheckpointStore, permit: CommitPermit, request: rq.JobRequest, options: Mapping[str, Any]
    ) -> None:
        self.request = request
        self.checkpoint_id = permit.ref.checkpoint_id
        self.url = request.savepoint_at(store.url, self.checkpoint_id)
        self.error: str | None = None
        self.is_given_up = False
        """Once set, the copy ends before its next object."""
        self._store, self._permit, self._options = store, permit, options

    def make(self) -> None:
        """Copy; :attr:`error` holds what goes wrong."""
        try:
            self._store.copy(self._permit.checkpoint(), sf.open(self.url, **self._options), self._look)
        except _GivenUp:
            self.error = "it was given up"
        except (CheckpointError, OSError) as error:
            self.error = str(error)
        except Exception as error:
            # A savepoint that cannot be made is not a failure of the job.
            logger.exception("the copy of checkpoint %d to %s failed", self.checkpoint_id, self.url)
            self.error = f"{type(error).__name__}: {error}"

    def _look(self, _: object) -> None:
        if self.is_given_up:
            raise _GivenUp

    def answer(self, job: str) -> rq.RequestAnswer:
        """Return what became of it. ``job``: what becomes of the job, as part of a sentence."""
        if self.error is None:
            message = f"checkpoint {self.checkpoint_id} has its savepoint {self.url}; {job}"
            return rq.RequestAnswer(self.request.id, rq.RequestOutcome.SAVED, message, self.checkpoint_id, self.url)
        message = (
            f"the copy of checkpoint {self.checkpoint_id} to {self.url} failed: {self.error}. While the checkpoint is "
            f"kept, `ckpt copy {self._store.url}@{self.checkpoint_id} {self.url}` makes it; {job}"
        )
        return rq.RequestAnswer(self.request.id, rq.RequestOutcome.FAILED, message, self.checkpoint_id)


class Savepoints:
    """The savepoints requested from a run. ``answer`` is called with the answer to each."""

    def __init__(
        self,
        store: CheckpointStore,
        driver: Driver,
        clock: Clock,
        places: Places,
        answer: Callable[[rq.RequestAnswer], None],
    ) -> None:
        self._store, self._driver, self._clock, self._places = store, driver, clock, places
        self._answer = answer
        self._asked: dict[str, rq.JobRequest] = {}
        """Requests that have no checkpoint yet, by id."""
        self._copies: list[tuple[Copy, Work]] = []

    @property
    def next_us(self) -> int | None:
        """When to call :meth:`settle` again; None while nothing is copied."""
        return min((work.looked_at_us for _, work in self._copies), default=None)

    def ask(self, request: rq.JobRequest) -> None:
        """Ask the coordinator for a checkpoint. Raises ``InvalidInput`` for an unfit URL."""
        self._places.check(request.savepoint)
        permit = self._driver.permit
        made = permit and made_before(self._store, request, permit.record.job_id, self._places.options)
        if made:
            self._answer(made)
            return
        self._asked[request.id] = request
        # Requests seen at the same time share one checkpoint.
        inbox = self._driver.inbox
        last = inbox[-1] if inbox else None
        if isinstance(last, ev.SavepointRequested):
            inbox[-1] = ev.SavepointRequested((*last.requests, request.id))
        else:
            inbox.append(ev.SavepointRequested((request.id,)))

    def settle(self) -> None:
        """Begin to copy committed checkpoints, and answer what is done or has failed."""
        while self._driver.failed_savepoints:
            self._answer(self._failure(self._driver.failed_savepoints.pop(0)))
        while self._driver.savepoints:
            permit, request = self._driver.savepoints.pop(0)
            copy = Copy(self._store, permit, self._asked.pop(request), self._places.options)
            self._copies.append((copy, self._clock.beside(copy.make)))
        for each in [each for each in self._copies if each[1].is_done()]:
            self._copies.remove(each)
            if each[0].error is None or not self._is_overtaken():
                newest = self._driver.permit
                stops = newest is not None and lasting_stop(newest.record) is not None
                self._answered(each[0], STOPS if stops else GOES_ON)
        self._driver.copied = {copy.checkpoint_id for copy, _ in self._copies}

    def _is_overtaken(self) -> bool:
        """Return whether another run has gone on from here; then that run answers."""
        permit = self._driver.permit
        try:
            newest = max(record_ids(self._store.storage), default=0)
        except (CheckpointError, OSError):
            return False
        return permit is not None and newest > permit.ref.checkpoint_id

    def _failure(self, failed: ev.SavepointFailed) -> rq.RequestAnswer:
        del self._asked[failed.request]
        goes_on = GOES_ON if failed.goes_on else "the job starts again from its newest checkpoint"
        if failed.refused:
            message = f"no savepoint can be made now, and {goes_on}: {failed.reason}"
            return rq.RequestAnswer(failed.request, rq.RequestOutcome.REFUSED, message)
        message = f"the savepoint has failed, and {goes_on}: {failed.reason}"
        self._driver.warn(message)
        return rq.RequestAnswer(failed.request, rq.RequestOutcome.FAILED, message)

    def _answered(self, copy: Copy, job: str) -> None:
        answer = copy.answer(job)
        if copy.error is not None:
            self._driver.warn(answer.message)
        self._answer(answer)

    def finish(self, permit: CommitPermit | None, job: str) -> None:
        """Finish when the job has ended: complete the copies, and make those not begun."""
        for copy, work in self._copies:
            work.finish()
            self._answered(copy, job)
        self._copies.clear()
        for request in self._asked.values():
            self._answer(save_at_end(self._store, permit, request, job, self._places))
        self._asked.clear()

    def finish_by(self, until_us: int, permit: CommitPermit | None, job: str) -> None:
        """Finish when the job has ended for now: complete what can be by then, and answer all."""
        for request in self._asked.values():
            made = permit is not None and made_before(self._store, request, permit.record.job_id, self._places.options)
            if permit is None or made:
                self._answer(made or save_at_end(self._store, permit, request, job, self._places))
            else:
                copy = Copy(self._store, permit, request, self._places.options)
                self._copies.append((copy, self._clock.beside(copy.make)))
        self._asked.clear()
        while self._clock.now_us() < until_us and not all(work.is_done() for _, work in self._copies):
            self._clock.wait_until(min(until_us, *(work.looked_at_us for _, work in self._copies)))
        for copy, _ in self._copies:
            copy.is_given_up = True
        self.finish(permit, job)

    def close(self) -> None:
        """End with the run, though maybe not with its job: give up the copies in progress."""
        copies, self._copies = self._copies, []
        for copy, _ in copies:
            copy.is_given_up = True
        for copy, work in copies:
            work.finish()
            logger.info("gave up copying checkpoint %d to %s: its run has ended", copy.checkpoint_id, copy.url)


def made_before(
    store: CheckpointStore, request: rq.JobRequest, job_id: str, options: Mapping[str, Any]
) -> rq.RequestAnswer | None:
    """Return the answer for a savepoint that an earlier run made but did not report."""
    if request.savepoint is None:
        return None
    try:
        record = newest_record(sf.open(request.savepoint, **options).storage)
    except (CheckpointError, OSError) as error:
        logger.info("%s could not be looked at, and is taken for empty: %s", request.savepoint, error)
        return None
    if record is None or record.kind is not CheckpointKind.SAVEPOINT or record.job_id != job_id:
        return None
    number = record.checkpoint_id
    if number <= request.newest:
        return None
    logger.info("request %s of %s has its savepoint already, of checkpoint %d", request.id, store.url, number)
    message = f"checkpoint {number} has its savepoint {request.savepoint}, made by an earlier run; {GOES_ON}"
    return rq.RequestAnswer(request.id, rq.RequestOutcome.SAVED, message, number, request.savepoint)


def save_at_end(
    store: CheckpointStore,
    permit: CommitPermit | None,
    request: rq.JobRequest,
    job: str,
    places: Places,
) -> rq.RequestAnswer:
    """Copy the last checkpoint of a job that has ended, for a request; return the answer."""
    if permit is None:
        message = f"{job}, and took no checkpoint of which a savepoint could be made"
        return rq.RequestAnswer(request.id, rq.RequestOutcome.FINISHED, message)
    try:
        places.check(request.savepoint)
    except InvalidInput as error:
        return rq.RequestAnswer(request.id, rq.RequestOutcome.REFUSED, str(error))
    made = made_before(store, request, permit.record.job_id, places.options)
    if made is not None:
        return made
    copy = Copy(store, permit, request, places.options)
    copy.make()
    return copy.answer(job)


logger = logging.getLogger(__name__)

FINISHED = "the job has finished"


class RequestService:
    """Finds requests, hands each to the method of its kind once, and answers them."""

    def __init__(
        self,
        store: CheckpointStore,
        driver: Driver,
        clock: Clock,
        schedule: Schedule,
        restored: Restored,
    ) -> None:
        self._store = store
        self._driver = driver
        self._clock = clock
        self._every_us = schedule.requests_every_us
        self._rescales = restored.rescales
        self._restored_from = restored.permit.ref.checkpoint_id if restored.permit else 0
        self._counts_from = self._rescales.counts_from(self._restored_from)
        self._seen: set[str] = set(filter(None, [self._rescales.request]))
        self._stops: dict[str, rq.RequestKind] = {}
        """The stops requested from the coordinator that have not failed."""
        self._graph = restored.job.graph
        self._places = Places.of(store, restored.job.flow, schedule)
        self._poll_us: int | None = None if self._every_us is None else clock.now_us()
        """When to look for requests in the store again."""
        self._has_polled = False
        self.answers: dict[str, rq.RequestAnswer] = {}
        """The answers to requests, by id."""
        self._savepoints = Savepoints(store, driver, clock, self._places, self._answer)

    @property
    def next_us(self) -> int | None:
        """When to :meth:`poll` and :meth:`settle` again at the latest; None: at no set time."""
        return min((at_us for at_us in (self._poll_us, self._savepoints.next_us) if at_us is not None), default=None)

    def poll(self) -> None:
        """Read the requests in the store, if it is time for that."""
        now_us = self._clock.now_us()
        if self._every_us is None or self._poll_us is None or now_us < self._poll_us:
            return
        self._poll_us = now_us + self._every_us
        # Clocks differ, and who asks a run that is alive has given up by its own; so a deadline
        # counts only for what was there before the run began.
        is_first, self._has_polled = not self._has_polled, True
        waiting = waiting_requests(self._store)
        if is_first:
            waiting = self._from_before(waiting)
        for request in sorted(waiting, key=rq.asking_order):
            if request.id in self.answers:
                answer_request(self._store, self.answers[request.id])  # Writing it failed before.
            if request.id in self._seen or self._waits(request):
                continue
            if not rq.counts_for(request, self._counts_from):
                self._answer_missed(request)
                continue
            try:
                self._hand_over(request)
            except (InvalidInput, RestoreRefused) as error:
                self._turn_down(request, rq.RequestOutcome.REFUSED, str(error))

    def _from_before(self, waiting: Sequence[rq.JobRequest]) -> list[rq.JobRequest]:
        """Say what was asked before this run began; return what it obeys."""
        for request in (kept := unexpired(self._store, waiting, self._clock.wall_us(), self._driver.warn)):
            if request.id not in self._seen and rq.counts_for(request, self._counts_from):
                self._driver.tell(f"obeying {_made_before(request)}")
        return kept

    def _waits(self, request: rq.JobRequest) -> bool:
        """Return whether a request must wait until the stop that has begun has ended or failed.

        A job that stops for good answers all requests then. One that is rescaled goes on, and
        carries them out.
        """
        rescale = rq.RequestKind.RESCALE
        return rescale in self._stops.values() or (bool(self._stops) and request.kind is rescale)

    def _hand_over(self, request: rq.JobRequest) -> None:
        """Begin what is requested. Raises ``InvalidInput`` with the reason for refusing it."""
        match request.kind:
            case rq.RequestKind.STOP:
                assert request.mode is not None, "a stop has a mode"
                self.request_stop(request.id, request.mode, request.savepoint)
            case rq.RequestKind.RESCALE:
                self.request_rescale(request)
            case rq.RequestKind.SAVEPOINT:
                self.request_savepoint(request)

    def _answer_missed(self, request: rq.JobRequest) -> None:
        """Answer a request to an earlier run, which may have died before it could answer."""
        self._seen.add(request.id)
        try:
            is_rescale = request.kind is rq.RequestKind.RESCALE
            known = rq.rescale_outcome(self._store.storage, request) if is_rescale else None
        except (CheckpointError, OSError) as error:
            logger.warning("what became of request %s could not be read: %s", request.id, error)
            known = None
        message = (
            f"the run that was asked when checkpoint {request.newest} was the newest has ended; this one went on from "
            f"checkpoint {self._restored_from}. Ask again"
        )
        answer_request(self._store, known or rq.RequestAnswer(request.id, rq.RequestOutcome.MISSED, message))

    def _turn_down(self, request: rq.JobRequest, outcome: rq.RequestOutcome, message: str) -> None:
        self._seen.add(request.id)
        self._answer(rq.RequestAnswer(request.id, outcome, message))

    def _answer(self, answer: rq.RequestAnswer) -> None:
        self.answers[answer.request] = answer
        answer_request(self._store, answer)

    def request_stop(self, request: str, mode: StopMode, savepoint: str | None) -> None:
        """Begin a stop. ``InvalidInput`` where the job makes no savepoint."""
        self._places.check(savepoint)
        self._stop(request, mode, savepoint, {})

    def request_savepoint(self, request: rq.JobRequest) -> None:
        """Begin a savepoint. Raises ``InvalidInput`` as :meth:`request_stop` does."""
        self._savepoints.ask(request)
        self._seen.add(request.id)

    def request_rescale(self, request: rq.JobRequest) -> None:
        """Begin to stop, so that the job can go on at another parallelism.

        Raises ``InvalidInput`` and ``RestoreRefused`` for what a start at that parallelism would
        refuse.
        """
        self._places.check(request.savepoint)
        try:
            moved = self._rescales.check(request, self._graph, self._driver.permit)
        except (InvalidInput, RestoreRefused):
            raise
        except (CheckpointError, OSError) as error:
            logger.warning("request %s could not be checked, which is tried again: %s", request.id, error)
            return
        if not moved:
            message = f"the job runs at {request.wanted.describe()} already, so it was not stopped"
            self._turn_down(request, rq.RequestOutcome.RESCALED, message)
            return
        properties = {RESCALE_PROPERTY: request.wanted.encode()}
        self._stop(request.id, StopMode.NO_DRAIN, request.savepoint, properties, rq.RequestKind.RESCALE)

    def _stop(
        self,
        request: str,
        mode: StopMode,
        savepoint: str | None,
        properties: Mapping[str, str],
        kind: rq.RequestKind = rq.RequestKind.STOP,
    ) -> None:
        self._seen.add(request)
        self._stops[request] = kind
        place = {} if savepoint is None else {rq.SAVEPOINT_PROPERTY: savepoint}
        self._driver.stop_properties[request] = {**place, **properties}
        self._driver.inbox.append(ev.StopRequested(mode, request))

    def _answer_rescale(self) -> None:
        """Answer the rescale from which this run goes on, once its outcome is known."""
        for answer in self._rescales.answers(self._driver.published):
            if answer.outcome is rq.RequestOutcome.FAILED:
                self._driver.warn(answer.message)
            else:
                self._driver.tell(answer.message)
            self._answer(answer)

    def settle(self) -> None:
        """Answer what has failed or is done, and begin copies. Called after each step."""
        self._answer_rescale()
        while self._driver.failed_stops:
            failed = self._driver.failed_stops.pop(0)
            if self._driver.ended is not None:
                continue  # The job ended by itself, and :func:`end_finished` answers all requests.
            goes_on = "the job goes on" if failed.goes_on else "the job starts again from its newest checkpoint"
            message = f"the {self._stops.pop(failed.request, 'stop')} has failed, and {goes_on}: {failed.reason}"
            self._driver.warn(message)
            self._answer(rq.RequestAnswer(failed.request, rq.RequestOutcome.FAILED, message))
        self._savepoints.settle()

    def interrupted(self, until_us: int) -> None:
        """Answer this run's requests until ``until_us``, as the program has to end."""
        self.settle()
        self._savepoints.finish_by(until_us, self._driver.permit, "the job goes on at its next start")

    def close(self) -> None:
        """End with the run. The job may go on, and then the next run answers the rest."""
        self._savepoints.close()

    def outcome(self, ended: ev.JobEnded) -> JobOutcome:
        """Return how the job has ended, after all its tasks. Makes the savepoint of a stop."""
        self._answer_rescale()
        permit = self._driver.permit
        places = self._places
        if ended.stop is None or permit is None:
            self._savepoints.finish(permit, FINISHED)
            return end_finished(self._store, permit, places)
        if rescale_of(permit.record) is not None:
            self._savepoints.finish(permit, GOES_ON)
            return JobPaused(permit.ref.checkpoint_id, "the job has stopped to go on at another parallelism")
        stop = Stop(ended.stop.mode, ended.stop.request)
        self._savepoints.finish(permit, _stopped(permit, stop))
        return end_stopped(self._store, permit, stop, places)


def waiting_requests(store: CheckpointStore) -> list[rq.JobRequest]:
    """Return the unanswered requests; none if they cannot be read now."""
    try:
        return store.requests()
    except (CheckpointError, OSError) as error:
        logger.warning("requests could not be read, they will be looked for again: %s", error)
        return []


def _made_before(request: rq.JobRequest) -> str:
    return f"a request ({request.kind}) made at {moment(request.created_at_us)}, before this run began"


def unexpired(
    store: CheckpointStore, waiting: Iterable[rq.JobRequest], wall_us: int, warn: Callable[[str], None]
) -> list[rq.JobRequest]:
    """Return the requests of before this run that are still wanted; answer the others.

    Those have expired by ``wall_us``, this machine's clock: ``MISSED``. ``warn`` gets a sentence
    for each.
    """
    kept = []
    for request in waiting:
        if request.expires_at_us is None or wall_us <= request.expires_at_us:
            kept.append(request)
            continue
        message = (
            f"{_made_before(request)}, has expired: whoever asked gave up by {moment(request.expires_at_us)}, and this "
            f"machine's clock says {moment(wall_us)}. It is not obeyed; ask again"
        )
        warn(message)
        answer_request(store, rq.RequestAnswer(request.id, rq.RequestOutcome.MISSED, message))
    return kept


def answer_request(store: CheckpointStore, answer: rq.RequestAnswer) -> None:
    """Write an answer. If that fails, the job does not."""
    try:
        store.answer_request(answer)
    except (CheckpointError, OSError) as error:
        logger.warning("the answer to request %s could not be written: %s", answer.request, error)


def _stopped(permit: CommitPermit, stop: Stop) -> str:
    return f"the job has stopped ({stop.mode.replace('_', ' ')}) at checkpoint {permit.ref.checkpoint_id}"


def end_finished(
    store: CheckpointStore, permit: CommitPermit | None, places: Places, *, before: bool = False
) -> JobOutcome:
    """Answer all requests to a job that has ended by itself, now or ``before`` this run."""
    newest = permit.ref.checkpoint_id if permit else None
    if before:
        sentence = f"the job had finished: in checkpoint {newest} every operator has ended, and nothing was started"
    else:
        at = f"; its last checkpoint is {newest}" if newest else ""
        sentence = f"the job has finished: every input has ended{at}"
    for request in waiting_requests(store):
        answer = rq.RequestAnswer(request.id, rq.RequestOutcome.FINISHED, sentence, newest)
        if request.kind is rq.RequestKind.SAVEPOINT:
            answer = save_at_end(store, permit, request, FINISHED, places)
        answer_request(store, answer)
    return JobOutcome(newest, sentence)


def end_stopped(store: CheckpointStore, permit: CommitPermit, stop: Stop, places: Places) -> JobOutcome:
    """Copy the checkpoint of ``permit``, at which the job has stopped, and answer all requests.

    Repeating it is harmless, and a failed copy does not affect the stop.
    """
    checkpoint_id, saved = permit.ref.checkpoint_id, save_stop(store, permit, places)
    sentence = f"{_stopped(permit, stop)}{saved.words}"
    answer = rq.RequestAnswer(stop.request, rq.RequestOutcome.STOPPED, sentence, checkpoint_id, saved.url)
    answer_request(store, answer)
    for request in waiting_requests(store):
        if request.kind is rq.RequestKind.SAVEPOINT:
            answer_request(store, save_at_end(store, permit, request, _stopped(permit, stop), places))
        elif request.id != stop.request:
            answer_request(store, replace(answer, request=request.id))
    return JobOutcome(checkpoint_id, sentence, stop=stop, savepoint=saved.url)


def save_stop(store: CheckpointStore, permit: CommitPermit, places: Places) -> SavedStop:
    """Copy the checkpoint of a stop, which is valid whether this succeeds or not.

    Repeating it is harmless.
    """
    record = permit.record
    wanted = rq.savepoint_of_stop(store.url, record)
    try:
        # A record may come from another writer, and its text is shown and stored for all to read.
        places.check(wanted)
        store.copy(permit.checkpoint(), sf.open(wanted, **places.options))
    except (CheckpointError, OSError) as error:
        wanted = without_secrets(wanted)
        return SavedStop(
            None,
            f"; its copy to {wanted} failed: {error}. The stop stands: run `ckpt copy "
            f"{store.url}@{record.checkpoint_id} {wanted}`",
        )
    return SavedStop(wanted, f", savepoint {wanted}")
