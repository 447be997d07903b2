"""Requests to a running job: those in its store, their answers, and the savepoint of a stop."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import stateformat as sf
from stateformat import requests as rq
from stateformat.errors import CheckpointError, InvalidInput
from stateformat.model import Stop, StopMode
from stateformat.publication import CommitPermit
from stateformat.storage import check_no_secrets, check_outside, without_secrets
from stateformat.store import CheckpointStore

from ..dataflow import events as ev
from .clock import Clock
from .driver import Driver
from .options import Schedule
from .outcome import JobOutcome

logger = logging.getLogger(__name__)


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
        self.next_us: int | None = None if self._every_us is None else clock.now_us()
        """When the store is read for requests again."""

    def poll(self) -> None:
        """Read the requests in the store, if it is time to."""
        now_us = self._clock.now_us()
        if self._every_us is None or self.next_us is None or now_us < self.next_us:
            return
        self.next_us = now_us + self._every_us
        for request in sorted(waiting_requests(self._store), key=rq.asking_order):
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
            case _:
                raise InvalidInput(f"this runtime does not carry out requests of kind {request.kind}")

    def _turn_down(self, request: rq.JobRequest, outcome: rq.RequestOutcome, message: str) -> None:
        self._seen.add(request.id)
        answer_request(self._store, rq.RequestAnswer(request.id, outcome, message))

    def request_stop(self, request: str, mode: StopMode, savepoint: str | None) -> None:
        """Raises ``InvalidInput`` for a savepoint's URL with secrets or inside the store."""
        self._check_place(savepoint)
        self._seen.add(request)
        if savepoint is not None:
            self._driver.stop_properties[request] = {rq.SAVEPOINT_PROPERTY: savepoint}
        self._driver.inbox.append(ev.StopRequested(mode, request))

    def request_rescale(self, request: rq.RescaleRequest) -> None:
        """Begin to stop, to go on at another parallelism. Raises ``InvalidInput`` if refused."""
        raise InvalidInput(
            f"this run cannot change its parallelism (request {request.id}); stop the job with `ckpt stop`, and start "
            "it again at the new one"
        )

    def _check_place(self, savepoint: str | None) -> None:
        """Raises ``InvalidInput`` for a savepoint's URL with secrets or inside the store."""
        if savepoint is not None:
            check_no_secrets(savepoint, "the savepoint's URL")
            check_outside(savepoint, self._store.url)

    def answer_failures(self) -> None:
        while self._driver.failed_stops:
            failed = self._driver.failed_stops.pop(0)
            if self._driver.ended is not None:
                continue  # The job ended by itself, and :func:`end_finished` answers all requests.
            goes_on = "the job goes on" if failed.goes_on else "the job starts again from its newest checkpoint"
            message = f"the stop has failed, and {goes_on}: {failed.reason}"
            self._driver.warn(message)
            answer_request(self._store, rq.RequestAnswer(failed.request, rq.RequestOutcome.FAILED, message))

    def outcome(self, ended: ev.JobEnded) -> JobOutcome:
        """How the job has ended, after every task; makes the savepoint of a stop."""
        permit = self._driver.permit
        if ended.stop is None or permit is None:
            return end_finished(self._store, permit)
        return end_stopped(self._store, permit, Stop(ended.stop.mode, ended.stop.request), self._savepoint_options)


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


def end_finished(store: CheckpointStore, permit: CommitPermit | None, *, before: bool = False) -> JobOutcome:
    """The job has ended by itself, now or ``before`` this run; answers every request."""
    newest = permit.ref.checkpoint_id if permit else None
    if before:
        sentence = f"the job had finished: in checkpoint {newest} every operator has ended, and nothing was started"
    else:
        at = f"; its last checkpoint is {newest}" if newest else ""
        sentence = f"the job has finished: every input has ended{at}"
    for request in waiting_requests(store):
        answer_request(store, rq.RequestAnswer(request.id, rq.RequestOutcome.FINISHED, sentence, newest))
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
    sentence = f"the job has stopped ({stop.mode.replace('_', ' ')}) at checkpoint {record.checkpoint_id}"
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
    others = {request.id for request in waiting_requests(store)} - {stop.request}
    for request in (stop.request, *sorted(others)):
        answer = rq.RequestAnswer(request, rq.RequestOutcome.STOPPED, sentence, record.checkpoint_id, savepoint)
        answer_request(store, answer)
    return JobOutcome(record.checkpoint_id, sentence, stop=stop, savepoint=savepoint)
