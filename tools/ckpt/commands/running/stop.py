"""``ckpt stop``: asks the job of a store to stop with a savepoint, waits, and reports the outcome.

Command and job share nothing but the store (SPEC.md section 2.4). The command writes a request, and
waits for the run's answer or for a newest record which says that the job stopped by this request,
or has finished. A stop in a record is final, even if its run died before it answered; only its
savepoint may be missing then.

However the command ends (also by an error or an interruption), it removes the request and its
answer. Then it reads the record once more, because a run may have been about to publish.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import click

from stateformat.words import label

from ...exit_status import FINE, PROBLEMS, UNAVAILABLE
from ...options import Address, AddressType, SecondsType, Session, command
from ...output import Document, Step
from ...text import Look, render

if TYPE_CHECKING:
    from stateformat.model import Record, StopMode
    from stateformat.requests import RequestAnswer, StopRequest
    from stateformat.store import CheckpointStore

TIMEOUT_SECONDS: Final = 300
PAUSE_SECONDS: Final = 0.05
PAUSE_SECONDS_MAX: Final = 2.0
PAUSE_GROWTH: Final = 1.3

SILENCE_SECONDS: Final = 10.0
"""After this time without an answer the command asks whether the job runs at all."""

TIMED_OUT: Final = "timed_out"
"""No run answered in time. This outcome and the next two are the command's own;
``requests.RequestOutcome`` has the others."""
NOT_DRAINED: Final = "not_drained"
"""The job stopped, but without the drain that was asked for."""
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
@click.option("--to", "target", type=AddressType("never"), metavar="URL", help="The store for the savepoint.")
@click.option(
    "--timeout",
    type=SecondsType(min=0),
    default=TIMEOUT_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the job.",
)
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
    on from there. The request is withdrawn on timeout and on Ctrl-C.

    A job that has already stopped or finished is not asked.

    Exit status: 0 stopped or finished; 1 it failed, was refused, or is not what was asked for; 3 no
    run answered, or the savepoint is missing.
    """
    from stateformat.model import StopMode

    store = session.store(address, *(() if target is None else (target.url,)))
    savepoint = None if target is None else _another_store(session.store(target.url, address.url), store)
    with session.output.progress("Waiting for the job to stop", unit="s") as step:
        attempt = StopAttempt(
            store,
            StopMode.DRAIN if drain else StopMode.NO_DRAIN,
            savepoint,
            open_store=lambda url: session.store(url, address.url),
            step=step,
            note=session.output.note,
        )
        session.changes("the request was withdrawn; a run that had begun to stop by it may still do so")
        try:
            result = attempt.run(timeout, if_stopped=even_if_stopped)
        except BaseException:
            if attempt.left_behind:
                session.changes("the request could not be removed")
                session.output.note(attempt.left_behind)
            raise
    document = attempt.document(result)
    session.output.show(document, draw)
    return status_of(document)


def status_of(document: Document) -> int:
    """The exit status for an outcome."""
    if document["outcome"] == "stopped" and document["request"]:
        return FINE if document["savepoint"] else UNAVAILABLE
    if document["outcome"] in ("stopped", "finished"):
        return FINE
    return UNAVAILABLE if document["outcome"] == TIMED_OUT else PROBLEMS


def _another_store(there: CheckpointStore, store: CheckpointStore) -> str:
    """The absolute URL of the savepoint's store: the job may run in another directory."""
    from stateformat.errors import InvalidInput

    if there.url == store.url:
        raise InvalidInput(f"{store.url} cannot hold its own savepoint; give another address with --to", url=there.url)
    return there.url


def _require_empty(there: CheckpointStore) -> None:
    from stateformat.errors import ErrorKind, InvalidInput
    from stateformat.paths import RECORDS

    if there.storage.list(RECORDS):
        raise InvalidInput(
            f"{there.url} holds a checkpoint already, and a savepoint needs a store of its own; the job was not asked",
            kind=ErrorKind.STORE_NOT_EMPTY,
            url=there.url,
        )


@dataclass(frozen=True)
class StopResult:
    """How an attempt ended."""

    outcome: str
    message: str
    """Sentences; a line end begins a new paragraph."""
    checkpoint_id: int | None = None
    """Where the job stopped or finished."""
    savepoint: str | None = None
    """The savepoint's URL."""
    answered: bool = False
    """Whether a run answered."""


class StopAttempt:
    """One attempt to stop a job: makes a request, waits, removes the request.

    ``savepoint`` is its URL, None for the default, and ``open_store`` opens that store. ``step``
    takes the seconds waited and the timeout, ``note`` sentences for the user. ``wait`` and
    ``clock`` replace time.
    """

    def __init__(
        self,
        store: CheckpointStore,
        mode: StopMode,
        savepoint: str | None,
        *,
        open_store: Callable[[str], CheckpointStore],
        step: Step = lambda _done, _total: None,
        note: Callable[[str], None] = lambda _: None,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._mode, self._savepoint = store, mode, savepoint
        self._open_store, self._step, self._note = open_store, step, note
        self._wait, self._clock = wait, clock
        self._begin = clock()
        self.request: StopRequest | None = None
        self.newest: Record | None = None
        """The newest checkpoint, as of the last poll."""
        self.left_behind = ""
        """A sentence, if the request could not be removed."""

    def document(self, result: StopResult) -> Document:
        """What the command prints."""
        return {
            "store": self._store.url,
            "request": None if self.request is None else self.request.id,
            "mode": str(self._mode),
            "outcome": result.outcome,
            "checkpoint_id": result.checkpoint_id,
            "savepoint": result.savepoint,
            "answered": result.answered,
            "message": result.message,
            "waited_seconds": round(self._clock() - self._begin, 1),
        }

    def run(self, timeout_seconds: float, *, if_stopped: bool = False) -> StopResult:
        """Ask, wait, clean up. A finished job is not asked, a stopped one only with ``if_stopped``.

        Raises what the store raises.
        """
        self._poll()
        if self.newest is not None and _all_finished(self.newest):
            return self._check_result(self._finished(self.newest))
        if self.newest is not None and self.newest.stop is not None and not if_stopped:
            return self._check_result(self._stopped_before(self.newest))
        if self._savepoint is not None:
            _require_empty(self._open_store(self._savepoint))
        request = self.request = self._store.request_stop(self._mode, self._savepoint)
        try:
            result = self._wait_for(request, timeout_seconds)
        except BaseException:
            self._withdraw(request)
            raise
        self._withdraw(request)
        if result is None:
            self._poll()
            result = self._from_record(request) or self._silence(request, timeout_seconds)
        return self._check_result(replace(result, message=f"{result.message} {self.left_behind}".strip()))

    def _check_result(self, result: StopResult) -> StopResult:
        """The result, or how it falls short of what was asked for."""
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

    def _copy_advice(self, checkpoint_id: int | None, url: str) -> str:
        return f"`ckpt copy {self._store.url}@{checkpoint_id} {url}` makes the savepoint."

    def _record_of(self, result: StopResult) -> Record | None:
        """The record at which the job stopped or finished; None if there is none, or unreadable."""
        from stateformat.errors import CheckpointError

        if result.outcome not in ("stopped", "finished"):
            return None
        # A run's answer holds, whether its record can be read now or not.
        with contextlib.suppress(CheckpointError):
            self._poll()
        record = self.newest
        return record if record is not None and record.checkpoint_id == result.checkpoint_id else None

    def _wait_for(self, request: StopRequest, timeout_seconds: float) -> StopResult | None:
        """A run's answer, or what the newest record says for certain; None on timeout."""
        pause, silent = PAUSE_SECONDS, True
        while True:
            answer = self._store.request_answer(request.id)
            if answer is not None:
                return self._from_answer(answer)
            self._poll()
            if self.newest is not None and _all_finished(self.newest) and not _is_stop_of(self.newest, request):
                # If all tasks have finished there is no further checkpoint, so no stop can come.
                return self._finished(self.newest)
            waited = self._clock() - self._begin
            if waited >= timeout_seconds:
                return None
            if silent and waited >= SILENCE_SECONDS:
                silent = False
                self._note(
                    f"No run has answered for {SILENCE_SECONDS:g} s. A run that works answers when it has stopped. If "
                    "the job does not run, press Ctrl-C."
                )
            self._step(int(waited), int(timeout_seconds))
            self._wait(min(pause, timeout_seconds - waited))
            pause = min(pause * PAUSE_GROWTH, PAUSE_SECONDS_MAX)

    def _poll(self) -> None:
        """Read the newest record if it is another than before; else this is one listing."""
        from stateformat.history import newest_record, record_ids

        known = 0 if self.newest is None else self.newest.checkpoint_id
        if max(record_ids(self._store.storage), default=0) != known:
            self.newest = newest_record(self._store.storage)

    def _withdraw(self, request: StopRequest) -> None:
        """Remove the request and its answer. A failure is reported beside the result."""
        from stateformat.errors import StorageError
        from stateformat.paths import request_path

        try:
            self._store.withdraw_request(request.id)
        except StorageError as error:
            path = request_path(request.newest, request.id)
            self.left_behind = f"The request could not be removed ({error}): delete {path} in {self._store.url}."

    def _from_answer(self, answer: RequestAnswer) -> StopResult:
        message = answer.message
        if answer.outcome == "stopped" and answer.savepoint is None and "ckpt copy" not in message:
            message = f"{message} The stop stands; {self._copy_advice(answer.checkpoint_id, 'URL')}".strip()
        return StopResult(answer.outcome.value, message, answer.checkpoint_id, answer.savepoint, answered=True)

    def _finished(self, record: Record) -> StopResult:
        number = record.checkpoint_id
        how = f"by request {record.stop.request}" if record.stop else "without having been asked"
        message = f"Everything in checkpoint {number} has finished, {how}; there is nothing to stop."
        return StopResult("finished", message, number)

    def _stopped_before(self, record: Record) -> StopResult:
        """The job stopped earlier, or by another request."""
        from stateformat.requests import savepoint_of_stop

        assert record.stop is not None
        number, mode = record.checkpoint_id, record.stop.mode.replace("_", " ")
        url = savepoint_of_stop(self._store.url, record)
        message = (
            f"The job stopped ({mode}) at checkpoint {number}, by request {record.stop.request}, and has published "
            "nothing since. If it was resumed a moment ago, ask with --even-if-stopped."
        )
        return StopResult("stopped", message, number, url if self._has_savepoint(url, record) else None)

    def _from_record(self, request: StopRequest) -> StopResult | None:
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
            return StopResult("stopped", f"{message} The savepoint is complete.", number, url)
        return StopResult("stopped", f"{message} There is no savepoint yet; {self._copy_advice(number, url)}", number)

    def _has_savepoint(self, url: str, record: Record) -> bool:
        from stateformat.errors import CheckpointError

        try:
            return self._open_store(url).open(record.checkpoint_id).record.attempt_id == record.attempt_id
        except CheckpointError:
            return False

    def _silence(self, request: StopRequest, timeout_seconds: float) -> StopResult:
        newest = self.newest
        waited = f"No run has answered within {timeout_seconds:g} s, and the request was withdrawn"
        if newest is None or newest.checkpoint_id <= request.newest:
            seen = "no checkpoint was published meanwhile, so perhaps none is running"
        elif newest.stop is not None:
            return self._stopped_before(newest)
        else:
            seen = (
                f"checkpoint {newest.checkpoint_id} was published meanwhile, so a run is alive, and may still stop if "
                "it had begun to. Wait longer (`--timeout`)"
            )
        return StopResult(TIMED_OUT, f"{waited}; {seen}.")


def _is_stop_of(record: Record, request: StopRequest) -> bool:
    return record.stop is not None and record.stop.request == request.id


def _all_finished(record: Record) -> bool:
    from stateformat.graph import Status

    operators = record.graph.operators
    return bool(operators) and all(operator.status is Status.FULLY_FINISHED for operator in operators)


def draw(document: Document, look: Look) -> Iterator[str]:
    """The page: the outcome, where the savepoint is, what the run said."""
    stopped = document["outcome"] == "stopped"
    title = f"Stopped at checkpoint {document['checkpoint_id']}" if stopped else TITLES[document["outcome"]]
    request = f"{document['request']}, {document['mode'].replace('_', ' ')}" if document["request"] else "none"
    facts = [
        ("store", label(document["store"])),
        ("request", request),
        ("savepoint", label(document["savepoint"] or "none")),
        ("waited", f"{document['waited_seconds']:g} s"),
    ]
    yield from render.page_head(title, facts, look)
    for text in filter(None, document["message"].split("\n")):
        yield ""
        yield from render.paragraph(label(text), look)
