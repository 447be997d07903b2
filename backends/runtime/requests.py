"""Requests to a running job: those in its store, their answers, and what its end means to them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import stateformat as sf
from stateformat import requests as rq
from stateformat.errors import CheckpointError, InvalidInput
from stateformat.model import Stop, StopMode
from stateformat.publication import CommitPermit
from stateformat.storage import check_no_secrets, without_secrets
from stateformat.store import CheckpointStore

from ..dataflow import events as ev
from .clock import Clock
from .driver import Driver
from .options import Schedule
from .reports import JobOutcome
from .savepoints import Savepoints, check_place, save_at_end

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
        restored_from: CommitPermit | None,
    ) -> None:
        self._store = store
        self._driver = driver
        self._clock = clock
        self._every_us = schedule.requests_every_us
        self._restored_from = restored_from.ref.checkpoint_id if restored_from else 0
        self._seen: set[str] = set()
        self._savepoint_options = schedule.savepoint_options
        self._poll_us: int | None = None if self._every_us is None else clock.now_us()
        """When the store is read for requests again."""
        self.answers: dict[str, rq.RequestAnswer] = {}
        """What became of requests, by id."""
        self._savepoints = Savepoints(store, driver, clock, self._savepoint_options, self._answer)

    @property
    def next_us(self) -> int | None:
        """When to :meth:`poll` and :meth:`settle` again, whatever happens; None: never."""
        return min((at_us for at_us in (self._poll_us, self._savepoints.next_us) if at_us is not None), default=None)

    def poll(self) -> None:
        """Read the requests in the store, if it is time to."""
        now_us = self._clock.now_us()
        if self._every_us is None or self._poll_us is None or now_us < self._poll_us:
            return
        self._poll_us = now_us + self._every_us
        for request in sorted(waiting_requests(self._store), key=rq.asking_order):
            if request.id in self.answers:
                answer_request(self._store, self.answers[request.id])  # It could not be written before.
            if request.id in self._seen:
                continue
            if not rq.counts_for(request, self._restored_from):
                message = (
                    f"the run that was asked when checkpoint {request.newest} was the newest has ended; this one "
                    f"went on from checkpoint {self._restored_from}. Ask again"
                )
                self._turn_down(request, rq.RequestOutcome.MISSED, message)
                continue
            try:
                self._hand_over(request)
            except InvalidInput as error:
                self._turn_down(request, rq.RequestOutcome.REFUSED, str(error))

    def _hand_over(self, request: rq.JobRequest) -> None:
        """Begin what is asked. Raises ``InvalidInput`` for what is refused, with the sentence."""
        match request:
            case rq.StopRequest():
                self.request_stop(request.id, request.mode, request.savepoint)
            case rq.RescaleRequest():
                self.request_rescale(request)
            case rq.SavepointRequest():
                self.request_savepoint(request)

    def _turn_down(self, request: rq.JobRequest, outcome: rq.RequestOutcome, message: str) -> None:
        self._seen.add(request.id)
        self._answer(rq.RequestAnswer(request.id, outcome, message))

    def _answer(self, answer: rq.RequestAnswer) -> None:
        self.answers[answer.request] = answer
        answer_request(self._store, answer)

    def request_stop(self, request: str, mode: StopMode, savepoint: str | None) -> None:
        """Raises ``InvalidInput`` for a savepoint's URL with secrets or inside the store."""
        check_place(self._store, savepoint)
        self._seen.add(request)
        if savepoint is not None:
            self._driver.stop_properties[request] = {rq.SAVEPOINT_PROPERTY: savepoint}
        self._driver.inbox.append(ev.StopRequested(mode, request))

    def request_savepoint(self, request: rq.SavepointRequest) -> None:
        """Raises ``InvalidInput`` as :meth:`request_stop` does."""
        self._savepoints.ask(request)
        self._seen.add(request.id)

    def request_rescale(self, request: rq.RescaleRequest) -> None:
        """Begin to stop, to go on at another parallelism. Raises ``InvalidInput`` if refused."""
        raise InvalidInput(
            f"this run cannot change its parallelism (request {request.id}); stop the job with `ckpt stop`, and start "
            "it again at the new one"
        )

    def settle(self) -> None:
        """After a step: answer what has failed or is done, and begin copies."""
        while self._driver.failed_stops:
            failed = self._driver.failed_stops.pop(0)
            if self._driver.ended is not None:
                continue  # The job ended by itself, and :func:`end_finished` answers all requests.
            goes_on = "the job goes on" if failed.goes_on else "the job starts again from its newest checkpoint"
            message = f"the stop has failed, and {goes_on}: {failed.reason}"
            self._driver.warn(message)
            self._answer(rq.RequestAnswer(failed.request, rq.RequestOutcome.FAILED, message))
        self._savepoints.settle()

    def close(self) -> None:
        """The run has ended, and perhaps not its job: its successor answers what is left."""
        self._savepoints.close()

    def outcome(self, ended: ev.JobEnded) -> JobOutcome:
        """How the job has ended, after every task; makes the savepoint of a stop."""
        permit = self._driver.permit
        options = self._savepoint_options
        if ended.stop is None or permit is None:
            self._savepoints.finish(permit, FINISHED)
            return end_finished(self._store, permit, options)
        stop = Stop(ended.stop.mode, ended.stop.request)
        self._savepoints.finish(permit, _stopped(permit, stop))
        return end_stopped(self._store, permit, stop, options)


def waiting_requests(store: CheckpointStore) -> list[rq.JobRequest]:
    """The requests without an answer; none if they cannot be read now."""
    try:
        return store.requests()
    except (CheckpointError, OSError) as error:
        logger.warning("requests could not be read, they will be looked for again: %s", error)
        return []


def answer_request(store: CheckpointStore, answer: rq.RequestAnswer) -> None:
    """Write an answer; failing to write it is no failure of the job."""
    try:
        store.answer_request(answer)
    except (CheckpointError, OSError) as error:
        logger.warning("the answer to request %s could not be written: %s", answer.request, error)


def _stopped(permit: CommitPermit, stop: Stop) -> str:
    return f"the job has stopped ({stop.mode.replace('_', ' ')}) at checkpoint {permit.ref.checkpoint_id}"


def end_finished(
    store: CheckpointStore, permit: CommitPermit | None, savepoint_options: Mapping[str, Any], *, before: bool = False
) -> JobOutcome:
    """The job has ended by itself, now or ``before`` this run; answers every request."""
    newest = permit.ref.checkpoint_id if permit else None
    if before:
        sentence = f"the job had finished: in checkpoint {newest} every operator has ended, and nothing was started"
    else:
        at = f"; its last checkpoint is {newest}" if newest else ""
        sentence = f"the job has finished: every input has ended{at}"
    for request in waiting_requests(store):
        answer = rq.RequestAnswer(request.id, rq.RequestOutcome.FINISHED, sentence, newest)
        if isinstance(request, rq.SavepointRequest):
            answer = save_at_end(store, permit, request, FINISHED, savepoint_options)
        answer_request(store, answer)
    return JobOutcome(newest, sentence)


def end_stopped(
    store: CheckpointStore, permit: CommitPermit, stop: Stop, savepoint_options: Mapping[str, Any]
) -> JobOutcome:
    """The job has stopped at the checkpoint of ``permit``: copy it, and answer all requests.

    Repeating it is harmless, and a copy that fails changes nothing of the stop.
    ``savepoint_options``: storage options of the copy.
    """
    record = permit.record
    wanted = rq.savepoint_of_stop(store.url, record)
    savepoint: str | None = wanted
    sentence = _stopped(permit, stop)
    try:
        # A record may be another writer's: what it says is shown, and left behind, for everybody to
        # read.
        check_no_secrets(wanted, "the savepoint's URL")
        store.copy(permit.checkpoint(), sf.open(wanted, **savepoint_options))
        sentence += f", savepoint {wanted}"
    except (CheckpointError, OSError) as error:
        savepoint, wanted = None, without_secrets(wanted)
        sentence += (
            f"; its copy to {wanted} failed: {error}. The stop stands: run `ckpt copy "
            f"{store.url}@{record.checkpoint_id} {wanted}`"
        )
    answer = rq.RequestAnswer(stop.request, rq.RequestOutcome.STOPPED, sentence, record.checkpoint_id, savepoint)
    answer_request(store, answer)
    for request in waiting_requests(store):
        if isinstance(request, rq.SavepointRequest):
            answer_request(store, save_at_end(store, permit, request, _stopped(permit, stop), savepoint_options))
        elif request.id != stop.request:
            answer_request(store, replace(answer, request=request.id))
    return JobOutcome(record.checkpoint_id, sentence, stop=stop, savepoint=savepoint)
