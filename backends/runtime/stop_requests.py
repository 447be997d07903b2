"""StopService a job that runs here: requests in the store, what is answered, and the savepoint that is copied at the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import stateformat as sf
from stateformat.errors import CheckpointError, InvalidInput
from stateformat.model import Stop, StopMode
from stateformat.publication import CommitPermit
from stateformat.stop_requests import (
    SAVEPOINT_PROPERTY,
    StopAnswer,
    StopOutcome,
    StopRequest,
    asking_order,
    counts_for,
    savepoint_of_stop,
)
from stateformat.storage import check_no_secrets, check_outside, without_secrets
from stateformat.store import CheckpointStore

from ..dataflow import events as ev
from .clock import Clock
from .driver import Driver
from .outcome import JobOutcome

logger = logging.getLogger(__name__)


class StopService:
    """Sees requests, hands each to the coordinator once, and tells users what has become of them."""

    def __init__(
        self,
        store: CheckpointStore,
        driver: Driver,
        clock: Clock,
        *,
        every_us: int | None,
        restored_from: CommitPermit | None,
        savepoint_options: Mapping[str, Any],
    ) -> None:
        self._store = store
        self._driver = driver
        self._clock = clock
        self._every_us = every_us
        self._restored_from = restored_from.ref.checkpoint_id if restored_from else 0
        self._seen: set[str] = set()
        self._savepoint_options = savepoint_options
        self.next_us: int | None = None if every_us is None else clock.now_us()

    def is_due(self, now_us: int) -> bool:
        """Whether it is time to look for requests."""
        return self.next_us is not None and now_us >= self.next_us

    def poll(self) -> None:
        """Look for requests in the store, if it is time to."""
        if self._every_us is None or not self.is_due(self._clock.now_us()):
            return
        self.next_us = self._clock.now_us() + self._every_us
        for request in sorted(waiting_requests(self._store), key=asking_order):
            if request.id in self._seen:
                continue
            if not counts_for(request, self._restored_from):
                message = (
                    f"the run that was asked when checkpoint {request.newest} was the newest has ended; this one went on from "
                    f"checkpoint {self._restored_from}. Ask again"
                )
                self._turn_down(request, StopOutcome.MISSED, message)
                continue
            try:
                self.request_stop(request.id, request.mode, request.savepoint)
            except InvalidInput as error:
                self._turn_down(request, StopOutcome.REFUSED, str(error))

    def _turn_down(self, request: StopRequest, outcome: StopOutcome, message: str) -> None:
        self._seen.add(request.id)
        answer_stop(self._store, StopAnswer(request.id, outcome, message))

    def request_stop(self, request: str, mode: StopMode, savepoint: str | None) -> None:
        """A user asks for a stop. Raises ``InvalidInput`` for a savepoint's URL that the record must not show, or that is no place."""
        if savepoint is not None:
            check_no_secrets(savepoint, "the savepoint's URL")
            check_outside(savepoint, self._store.url)
        self._seen.add(request)
        if savepoint is not None:
            self._driver.stop_properties[request] = {SAVEPOINT_PROPERTY: savepoint}
        self._driver.inbox.append(ev.StopRequested(mode, request))

    def answer_failures(self) -> None:
        """Answer the requests that have come to nothing."""
        while self._driver.failed_stops:
            failed = self._driver.failed_stops.pop(0)
            if self._driver.ended is not None:
                continue  # The job came to its own end before: :func:`end_finished` tells all who have asked.
            goes_on = "the job goes on" if failed.goes_on else "the job starts again from its newest checkpoint"
            message = f"the stop has failed, and {goes_on}: {failed.reason}"
            self._driver.warn(message)
            answer_stop(self._store, StopAnswer(failed.request, StopOutcome.FAILED, message))

    def outcome(self, ended: ev.JobEnded) -> JobOutcome:
        """Every task has ended: make the savepoint if the job was stopped, and say how it has ended."""
        permit = self._driver.permit
        if ended.stop is None or permit is None:
            return end_finished(self._store, permit)
        return end_stopped(self._store, permit, Stop(ended.stop.mode, ended.stop.request), self._savepoint_options)


def waiting_requests(store: CheckpointStore) -> list[StopRequest]:
    """The requests that wait; none where they cannot be read now."""
    try:
        return store.stop_requests()
    except (CheckpointError, OSError) as error:
        logger.warning("requests could not be read, they will be looked for again: %s", error)
        return []


def answer_stop(store: CheckpointStore, answer: StopAnswer) -> None:
    """Leave an answer for whoever asked; that it cannot be left is no failure of the job."""
    try:
        store.answer_stop(answer)
    except (CheckpointError, OSError) as error:
        logger.warning("the answer to request %s could not be written: %s", answer.request, error)


def end_finished(store: CheckpointStore, permit: CommitPermit | None, *, before: bool = False) -> JobOutcome:
    """The job has come to its own end, now or ``before`` this run. Whoever had asked for a stop is told so."""
    newest = permit.ref.checkpoint_id if permit else None
    if before:
        sentence = f"the job had finished: in checkpoint {newest} every operator has ended, and nothing was started"
    else:
        at = f"; its last checkpoint is {newest}" if newest else ""
        sentence = f"the job has finished: every input has ended{at}"
    for request in waiting_requests(store):
        answer_stop(store, StopAnswer(request.id, StopOutcome.FINISHED, sentence, newest))
    return JobOutcome(newest, sentence)


def end_stopped(
    store: CheckpointStore, permit: CommitPermit, stop: Stop, savepoint_options: Mapping[str, Any]
) -> JobOutcome:
    """The job has stopped at the checkpoint of ``permit``, and all is committed: copy it, and tell everybody who asked.

    Does nothing twice: a copy that is there already is the same copy. A copy that fails changes nothing of the stop.
    ``savepoint_options``: with what the copy's store is opened.
    """
    record = permit.record
    wanted = savepoint_of_stop(store.url, record)
    savepoint: str | None = wanted
    sentence = f"the job has stopped ({stop.mode.replace('_', ' ')}) at checkpoint {record.checkpoint_id}"
    try:
        # A record may be another writer's: what it says is shown, and left behind, for everybody to read.
        check_no_secrets(wanted, "the savepoint's URL")
        store.copy(permit.checkpoint(), sf.open(wanted, **savepoint_options))
        sentence += f", savepoint {wanted}"
    except (CheckpointError, OSError) as error:
        savepoint, wanted = None, without_secrets(wanted)
        sentence += (
            f"; its copy to {wanted} failed: {error}. The stop stands: run `ckpt copy {store.url}@{record.checkpoint_id} "
            f"{wanted}`"
        )
    others = {request.id for request in waiting_requests(store)} - {stop.request}
    for request in (stop.request, *sorted(others)):
        answer_stop(store, StopAnswer(request, StopOutcome.STOPPED, sentence, record.checkpoint_id, savepoint))
    return JobOutcome(record.checkpoint_id, sentence, stop=stop, savepoint=savepoint)


__all__ = ["StopService", "end_finished", "end_stopped"]
