"""``ckpt stop``: asks the job of a store to stop with a savepoint, waits, and reports the outcome.

A stop in a record is final, even if its run died before it answered; only its savepoint may be
missing then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from ...asking import (
    TIMED_OUT,
    Attempt,
    Result,
    converse,
    draw_answer,
    savepoint_place,
    target_option,
    timeout_option,
)
from ...exit_status import FINE, PROBLEMS, UNAVAILABLE
from ...options import Address, Session, command
from ...output import Document
from ...text import Look

if TYPE_CHECKING:
    from stateformat.model import Record, StopMode
    from stateformat.requests import RequestAnswer, StopRequest
    from stateformat.store import CheckpointStore

NOT_DRAINED: Final = "not_drained"
"""The job stopped, but without the drain that was asked for. This outcome, the next and
``TIMED_OUT`` are the command's own; ``requests.RequestOutcome`` has the others."""
NOT_SAVED: Final = "not_saved"
"""The job stopped or finished, but ``--to`` has no savepoint."""

TITLES: Final = {
    "failed": "The stop failed",
    "refused": "The stop was refused",
    "finished": "The job has finished",
    NOT_DRAINED: "The job has stopped without a drain",
    NOT_SAVED: "The job has ended, and there is no savepoint",
    "missed": "The request came too late for its run",
    TIMED_OUT: "No run has answered",
}


@command("stop", checkpoint="never")
@click.option("--drain", is_flag=True, help="End the job for good: fire all timers, finish every operator.")
@target_option
@timeout_option
@click.option(
    "--even-if-stopped",
    is_flag=True,
    help="Ask even if the newest checkpoint is a stop: the job was resumed, and has not published yet.",
)
def stop(
    session: Session, address: Address, *, drain: bool, target: Address | None, timeout: float, even_if_stopped: bool
) -> int:
    """Ask a running job to stop with a savepoint, and wait.

    The job stops at its next checkpoint, which is copied to a store of its own: the savepoint, by
    default in savepoints/ below the store. Without --drain nothing is flushed, and the job can go
    on from there. The request is withdrawn on timeout, Ctrl-C, SIGTERM and SIGHUP. After --timeout
    it expires: a run that starts later does not obey it.

    A job that has already stopped or finished is not asked.

    Exit status: 0 stopped or finished; 1 it failed, was refused, or is not what was asked for; 3 no
    run answered, or the savepoint is missing.
    """
    from stateformat.model import StopMode

    store, savepoint = savepoint_place(session, address, target)
    mode = StopMode.DRAIN if drain else StopMode.NO_DRAIN
    document = converse(
        session,
        address,
        "Waiting for the job to stop",
        partial(StopAttempt, store, mode, savepoint, if_stopped=even_if_stopped),
        timeout,
        withdrawn="the request was withdrawn; a run that had begun to stop by it may still do so",
    )
    session.output.show(document, draw)
    return status_of(document)


def status_of(document: Document) -> int:
    """The exit status for an outcome."""
    if document["outcome"] == "stopped" and document["request"]:
        return FINE if document["savepoint"] else UNAVAILABLE
    if document["outcome"] in ("stopped", "finished"):
        return FINE
    return UNAVAILABLE if document["outcome"] == TIMED_OUT else PROBLEMS


class StopAttempt(Attempt["StopRequest"]):
    """One attempt to stop a job. A finished job is not asked, a stopped one only ``if_stopped``."""

    def __init__(
        self, store: CheckpointStore, mode: StopMode, savepoint: str | None, *, if_stopped: bool = False, **how: Any
    ) -> None:
        super().__init__(store, savepoint, **how)
        self._mode, self._if_stopped = mode, if_stopped

    def document(self, result: Result) -> Document:
        found = super().document(result)
        return {"store": found["store"], "request": found["request"], "mode": str(self._mode), **found}

    @property
    def silence(self) -> str:
        return "A running job answers when it has stopped. If the job does not run, press Ctrl-C."

    def _known(self) -> Result | None:
        if self.newest is not None and self.newest.graph.is_finished:
            return self._finished(self.newest)
        from stateformat.rescaling import lasting_stop

        # A job that has stopped only to be rescaled goes on by itself.
        if self.newest is not None and lasting_stop(self.newest) is not None and not self._if_stopped:
            return self._stopped_before(self.newest)
        return None

    def _ask(self, timeout_us: int) -> StopRequest:
        return self._store.request_stop(self._mode, self._savepoint, timeout_us=timeout_us)

    def _checked(self, result: Result) -> Result:
        from stateformat.model import StopMode

        record = self._record_of(result)
        if record is None:
            return result
        drained = record.stop is not None and record.stop.mode is StopMode.DRAIN
        if result.outcome == "stopped" and self._mode is StopMode.DRAIN and not drained:
            advice = (
                "Only a run can drain: start the job again so that it goes on (resume=True, --resume), then ask again."
            )
            return replace(result, outcome=NOT_DRAINED, message=f"{result.message} {advice}")
        if result.outcome == "stopped" and result.answered:
            after = "The job has ended for good." if drained else "Started again to resume, the job goes on from there."
            return replace(result, message=f"{result.message}\n{after}".strip())
        if self._savepoint is None or (result.outcome == "stopped" and self.request is not None):
            return result
        if self._has_savepoint(self._savepoint, record):
            return replace(result, savepoint=self._savepoint)
        message = f"{result.message} {self._copy_advice(record.checkpoint_id, self._savepoint)}"
        return replace(result, outcome=NOT_SAVED, message=message, savepoint=None)

    def _record_of(self, result: Result) -> Record | None:
        """The record at which the job stopped or finished; None if there is none, or unreadable."""
        from stateformat.errors import CheckpointError

        if result.outcome not in ("stopped", "finished"):
            return None
        # A run's answer holds, whether its record can be read now or not.
        with contextlib.suppress(CheckpointError):
            self._poll()
        record = self.newest
        return record if record is not None and record.checkpoint_id == result.checkpoint_id else None

    def _decided(self, request: StopRequest) -> Result | None:
        newest = self.newest
        # If all tasks have finished there is no further checkpoint, so no stop can come.
        ended = newest is not None and newest.graph.is_finished and not _is_stop_of(newest, request)
        return self._finished(newest) if newest is not None and ended else None

    def _answered(self, answer: RequestAnswer) -> Result:
        message = answer.message
        if answer.outcome == "stopped" and answer.savepoint is None and "ckpt copy" not in message:
            message = f"{message} The stop stands; {self._copy_advice(answer.checkpoint_id, 'URL')}".strip()
        return Result(answer.outcome.value, message, answer.checkpoint_id, answer.savepoint, answered=True)

    def _finished(self, record: Record) -> Result:
        number = record.checkpoint_id
        how = f"by request {record.stop.request}" if record.stop else "without having been asked"
        message = f"Everything in checkpoint {number} has finished, {how}; there is nothing to stop."
        return Result("finished", message, number)

    def _stopped_before(self, record: Record) -> Result:
        """The job stopped earlier, or by another request."""
        from stateformat.requests import savepoint_of_stop

        assert record.stop is not None
        number, mode = record.checkpoint_id, record.stop.mode.replace("_", " ")
        url = savepoint_of_stop(self._store.url, record)
        message = (
            f"The job stopped ({mode}) at checkpoint {number}, by request {record.stop.request}, and has published "
            "nothing since. If it was resumed a moment ago, ask with --even-if-stopped."
        )
        return Result("stopped", message, number, url if self._has_savepoint(url, record) else None)

    def _from_record(self, request: StopRequest) -> Result | None:
        """The stop in the newest record, by this request, if no run has answered."""
        record = self.newest
        if record is None or not _is_stop_of(record, request):
            return None
        number, url = record.checkpoint_id, request.savepoint_at(self._store.url, record.checkpoint_id)
        message = (
            f"Checkpoint {number} is the stop that was asked for, but its run has not said that it has ended: it is "
            "still at work, or it died. The stop stands. If the run died, start the job again: it commits what is "
            "prepared, and ends."
        )
        if self._has_savepoint(url, record):
            return Result("stopped", f"{message} The savepoint is complete.", number, url)
        return Result("stopped", f"{message} There is no savepoint yet; {self._copy_advice(number, url)}", number)

    def _has_savepoint(self, url: str, record: Record) -> bool:
        from stateformat.errors import CheckpointError

        try:
            return self._open_store(url).open(record.checkpoint_id).record.attempt_id == record.attempt_id
        except CheckpointError:
            return False

    def _unanswered(self, request: StopRequest, waited: str) -> Result:
        from stateformat.rescaling import lasting_stop

        stopped = self._from_record(request)
        if stopped is not None:
            return stopped
        newest = self.newest
        if newest is None or newest.checkpoint_id <= request.newest:
            seen = "no checkpoint was published meanwhile, so perhaps none is running"
        elif lasting_stop(newest) is not None:
            return self._stopped_before(newest)
        else:
            seen = (
                f"checkpoint {newest.checkpoint_id} was published meanwhile, so a run is alive, and may still stop if "
                "it had begun to. Wait longer (`--timeout`)"
            )
        return Result(TIMED_OUT, f"{waited}; {seen}.")


def _is_stop_of(record: Record, request: StopRequest) -> bool:
    return record.stop is not None and record.stop.request == request.id


def draw(document: Document, look: Look) -> Iterator[str]:
    """The page: the outcome, where the savepoint is, what the run said."""
    title = TITLES.get(document["outcome"], "The job has not stopped")
    if document["outcome"] == "stopped":
        title = f"Stopped at checkpoint {document['checkpoint_id']}"
    request = f"{document['request']}, {document['mode'].replace('_', ' ')}" if document["request"] else "none"
    yield from draw_answer(document, title, request, look)
