"""Savepoints of a running job: its checkpoints are copied while it goes on (SPEC.md section 2.4).

A request waits for the next checkpoint to begin. Once that is committed, it is copied in the
background, and the request is answered when the copy is whole. Meanwhile the run keeps the
checkpoint from expiring. A run that ends abruptly answers none of them: its successor does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import stateformat as sf
from stateformat import requests as rq
from stateformat.errors import CheckpointError, ErrorKind, InvalidInput
from stateformat.history import newest_record, record_ids
from stateformat.model import CheckpointKind
from stateformat.paths import SAVEPOINTS
from stateformat.publication import CommitPermit
from stateformat.rescaling import lasting_stop
from stateformat.storage import check_savepoint_place, lies_in
from stateformat.store import CheckpointStore

from ..dataflow import events as ev
from ..dataflow.steps import Steps
from .clock import Clock, Work
from .driver import Driver
from .options import Schedule

logger = logging.getLogger(__name__)

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
