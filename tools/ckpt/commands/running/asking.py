"""Asking the running job of a store for something, and waiting: ``ckpt stop``, ``ckpt savepoint``,
``ckpt rescale --running``.

Command and job share nothing but the store (SPEC.md section 2.4). The command writes a request, and
waits for the run's answer, or for a newest record that says all there is to say.

However the command ends (also by an error or an interruption), it removes the request and its
answer. Then it reads the record once more, because a run may have been about to publish. A stop in
a record is final, even if its run died before it answered; only its savepoint may be missing then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import click

from stateformat.pages.blocks import Block, Facts, Heading, Note

from ...exit_status import FINE, PROBLEMS, UNAVAILABLE
from ...options import Address, AddressType, SecondsType, Session, command
from ...output import Document, Step

if TYPE_CHECKING:
    from stateformat.model import Record
    from stateformat.requests import JobRequest, RequestAnswer
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

WAITING: Final = {"stop": "for the job to stop", "savepoint": "for the savepoint", "rescale": "for the job to go on"}
WITHDRAWN: Final = {
    "stop": "that had begun to stop by it may still do so",
    "savepoint": "that had begun with it may still make the savepoint",
    "rescale": "that had begun to stop by it may still be rescaled",
}
"""Of an interrupted command: what a run may still do."""
TITLES: Final = {
    "finished": "The job has finished",
    NOT_DRAINED: "The job has stopped without a drain",
    NOT_SAVED: "The job has ended, and there is no savepoint",
    "missed": "The request came too late for its run",
    TIMED_OUT: "No run has answered",
}
OTHERWISE: Final = {
    "stop": "The job has not stopped",
    "savepoint": "No savepoint was made",
    "rescale": "The job was not rescaled",
}

target_option = click.option(
    "--to", "target", type=AddressType("never"), metavar="URL", help="The store for the savepoint."
)
timeout_option = click.option(
    "--timeout",
    type=SecondsType(min=0),
    default=TIMEOUT_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the job.",
)


@dataclass(frozen=True)
class Result:
    """How an attempt ended."""

    outcome: str
    message: str
    """Sentences; a line end begins a new paragraph."""
    checkpoint_id: int | None = None
    """Where the job stopped or finished, or what was copied."""
    savepoint: str | None = None
    """The savepoint's URL."""
    answered: bool = False
    """Whether a run answered."""


class Attempt:
    """One attempt to ask a job: makes a request, waits, removes the request.

    ``kind`` is that of the request, ``arguments`` its members: ``mode`` of a stop, ``parallelism``
    and ``operators`` of a rescale. ``savepoint`` is its URL, None for the default, and
    ``open_store`` opens that store. A finished job is not asked, and a stopped one is asked to stop
    only ``if_stopped``. ``step`` takes the seconds waited and the timeout, ``note`` sentences for
    the user. ``wait`` and ``clock`` replace time.
    """

    def __init__(
        self,
        store: CheckpointStore,
        kind: str,
        arguments: Mapping[str, Any],
        savepoint: str | None,
        *,
        open_store: Callable[[str], CheckpointStore],
        if_stopped: bool = False,
        step: Step = lambda _done, _total: None,
        note: Callable[[str], None] = lambda _: None,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._kind, self._arguments, self._savepoint = store, kind, arguments, savepoint
        self._open_store, self._if_stopped, self._step, self._note = open_store, if_stopped, step, note
        self._wait, self._clock = wait, clock
        self._begin = clock()
        self.request: JobRequest | None = None
        self.newest: Record | None = None
        """The newest checkpoint, as of the last poll."""
        self.left_behind = ""
        """A sentence, if the request could not be removed."""

    def document(self, result: Result) -> Document:
        """What the command prints."""
        first, last = dict[str, Any](), dict[str, Any]()
        if self._kind == "stop":
            first = {"mode": str(self._arguments["mode"])}
        if self._kind == "rescale":
            operators = [{"uid": uid, "parallelism": size} for uid, size in self._arguments["operators"].items()]
            last = {"parallelism": self._arguments["parallelism"], "operators": operators}
        return {
            "store": self._store.url,
            "request": None if self.request is None else self.request.id,
            **first,
            "outcome": result.outcome,
            "checkpoint_id": result.checkpoint_id,
            "savepoint": result.savepoint,
            "answered": result.answered,
            "message": result.message,
            "waited_seconds": round(self._clock() - self._begin, 1),
            **last,
        }

    def run(self, timeout_seconds: float) -> Result:
        """Ask, wait, clean up. Raises what the store raises."""
        self._poll()
        known = self._known()
        if known is not None:
            return self._checked(known)
        if self._savepoint is not None:
            _require_empty(self._open_store(self._savepoint))
        ask = getattr(self._store, f"request_{self._kind}")
        # It expires: if this process is killed, it cannot withdraw.
        request: JobRequest = ask(savepoint=self._savepoint, timeout_us=int(timeout_seconds * 1e6), **self._arguments)
        self.request = request
        try:
            result = self._wait_for(request, timeout_seconds)
        except BaseException:
            self._withdraw(request)
            raise
        self._withdraw(request)
        if result is None:
            self._poll()
            result = self._unanswered(request, f"No run has answered within {timeout_seconds:g} s")
        return self._checked(replace(result, message=f"{result.message} {self.left_behind}".strip()))

    # Waiting --------------------------------------------------------------------------------------

    def _wait_for(self, request: JobRequest, timeout_seconds: float) -> Result | None:
        """A run's answer, or what the newest record says for certain; None on timeout."""
        pause, silent = PAUSE_SECONDS, True
        while True:
            answer = self._store.request_answer(request.id)
            if answer is not None:
                return self._answered(answer)
            self._poll()
            # If all tasks have finished there is no further checkpoint, so no stop can come. A
            # savepoint can: the job still copies.
            if self._has_finished and self._kind != "savepoint" and not self._is_stop_of(request):
                return self._finished()
            waited = self._clock() - self._begin
            if waited >= timeout_seconds:
                return None
            if silent and waited >= SILENCE_SECONDS:
                silent = False
                self._note(f"No run has answered for {SILENCE_SECONDS:g} s. {self.silence}")
            self._step(int(waited), int(timeout_seconds))
            self._wait(min(pause, timeout_seconds - waited))
            pause = min(pause * PAUSE_GROWTH, PAUSE_SECONDS_MAX)

    def _poll(self) -> None:
        """Read the newest record if it is another than before; else this is one listing."""
        from stateformat.history import newest_record, record_ids

        known = 0 if self.newest is None else self.newest.checkpoint_id
        if max(record_ids(self._store.storage), default=0) != known:
            self.newest = newest_record(self._store.storage)

    def _withdraw(self, request: JobRequest) -> None:
        """Remove the request and its answer. A failure is reported beside the result."""
        from stateformat.errors import StorageError

        try:
            self._store.withdraw_request(request.id)
        except StorageError as error:
            self.left_behind = (
                f"The request could not be removed ({error}): delete {request.path} in {self._store.url}."
            )

    @property
    def silence(self) -> str:
        """Said once, when nothing has been heard for a while."""
        newest = self.newest
        stop = "" if newest is None or newest.stop is None else f" Checkpoint {newest.checkpoint_id} is a stop."
        if self._kind == "stop":
            return "A running job answers when it has stopped. If the job does not run, press Ctrl-C."
        if self._kind == "savepoint":
            return (
                f"A running job answers when the savepoint is made, which takes as long as a copy takes.{stop} If the "
                f"job does not run, press Ctrl-C{self._without_a_job()}"
            )
        return (
            "A running job answers when it has published its first checkpoint at the new parallelism, or at once if it "
            f"refuses.{stop} If the job does not run, press Ctrl-C: without --running its newest checkpoint is "
            "rescaled."
        )

    # What the records say -------------------------------------------------------------------------

    @property
    def _has_finished(self) -> bool:
        return self.newest is not None and self.newest.graph.is_finished

    def _is_stop_of(self, request: JobRequest) -> bool:
        stop = None if self.newest is None else self.newest.stop
        return self._kind == "stop" and stop is not None and stop.request == request.id

    def _known(self) -> Result | None:
        """The result, if the newest record says that there is nothing to ask."""
        from stateformat.rescaling import lasting_stop

        if self._has_finished:
            return self._finished()
        asks_anew = self._kind != "stop" or self._if_stopped or self.newest is None
        # A job that has stopped only to be rescaled goes on by itself.
        return None if asks_anew or lasting_stop(self._record) is None else self._stopped_before()

    @property
    def _record(self) -> Record:
        assert self.newest is not None
        return self.newest

    def _finished(self) -> Result:
        record = self._record
        number, message = record.checkpoint_id, f"Everything in checkpoint {record.checkpoint_id} has finished"
        if self._kind == "savepoint":
            return Result("finished", f"{message}, so no job was asked{self._without_a_job()}", number)
        if self._kind == "rescale":
            return Result("finished", f"{message}; there is nothing to rescale.", number)
        how = f"by request {record.stop.request}" if record.stop else "without having been asked"
        return Result("finished", f"{message}, {how}; there is nothing to stop.", number)

    def _without_a_job(self) -> str:
        """What makes a savepoint without a running job, as the end of a sentence."""
        if self.newest is None:
            return "."
        here = f"{self._store.url}@{self.newest.checkpoint_id}"
        made = f"ckpt pin {here} NAME" if self._savepoint is None else f"ckpt copy {here} {self._savepoint}"
        return f": `{made}` makes a savepoint of its newest checkpoint without it."

    def _stopped_before(self) -> Result:
        """The job stopped earlier, or by another request."""
        from stateformat.requests import savepoint_of_stop

        record = self._record
        assert record.stop is not None
        number, mode = record.checkpoint_id, record.stop.mode.replace("_", " ")
        url = savepoint_of_stop(self._store.url, record)
        message = (
            f"The job stopped ({mode}) at checkpoint {number}, by request {record.stop.request}, and has published "
            "nothing since. If it was resumed a moment ago, ask with --even-if-stopped."
        )
        return Result("stopped", message, number, url if self._has_savepoint(url, record) else None)

    def _stopped_by(self, request: JobRequest) -> Result:
        """The stop in the newest record, by this request, of which no run has said anything."""
        record = self._record
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

    def _copy_advice(self, checkpoint_id: int | None, url: str) -> str:
        return f"`ckpt copy {self._store.url}@{checkpoint_id} {url}` makes the savepoint."

    # The end --------------------------------------------------------------------------------------

    def _answered(self, answer: RequestAnswer) -> Result:
        """The result that a run's answer is."""
        message = answer.message
        if (self._kind, answer.outcome, answer.savepoint) == ("stop", "stopped", None) and "ckpt copy" not in message:
            message = f"{message} The stop stands; {self._copy_advice(answer.checkpoint_id, 'URL')}".strip()
        return Result(answer.outcome.value, message, answer.checkpoint_id, answer.savepoint, answered=True)

    def _unanswered(self, request: JobRequest, waited: str) -> Result:
        """The result in the end, by the records."""
        from stateformat.requests import rescale_outcome
        from stateformat.rescaling import lasting_stop

        waited, newest = f"{waited}, and the request was withdrawn", self.newest
        if self._is_stop_of(request):
            return self._stopped_by(request)
        known = rescale_outcome(self._store.storage, request) if self._kind == "rescale" else None
        if known is not None:
            return Result(known.outcome.value, f"{known.message}.", known.checkpoint_id)
        if newest is None or newest.checkpoint_id <= request.newest:
            end = self._without_a_job() if self._kind == "savepoint" else "."
            seen = f"no checkpoint was published meanwhile, so perhaps none is running{end}"
            return Result(TIMED_OUT, f"{waited}; {seen}")
        if self._kind == "stop" and lasting_stop(newest) is not None:
            return self._stopped_before()
        if self._kind == "rescale" and newest.stop is not None and newest.stop.request == request.id:
            seen = (
                f"checkpoint {newest.checkpoint_id} is the stop of this rescale, and the job has not published since: "
                "its run is still at work, or it died. Started again, the job goes on at the new parallelism."
            )
            return Result(TIMED_OUT, f"{waited}; {seen}")
        may = {
            "stop": "stop if it had begun to",
            "savepoint": f"make a savepoint, as {request.savepoint_at(self._store.url, newest.checkpoint_id)}",
            "rescale": "go on at the new parallelism if it had begun to",
        }[self._kind]
        seen = (
            f"checkpoint {newest.checkpoint_id} was published meanwhile, so a run is alive, and may still {may}. Wait "
            "longer (`--timeout`)."
        )
        return Result(TIMED_OUT, f"{waited}; {seen}")

    def _checked(self, result: Result) -> Result:
        """The result, or how it falls short of the stop that was asked for."""
        record = self._record_of(result) if self._kind == "stop" else None
        if record is None:
            return result
        drained = record.stop is not None and record.stop.mode == "drain"
        if result.outcome == "stopped" and self._arguments["mode"] == "drain" and not drained:
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


def ask_job(
    session: Session,
    address: Address,
    target: Address | None,
    timeout: float,
    kind: str,
    arguments: Mapping[str, Any],
    *,
    if_stopped: bool = False,
) -> int:
    """Ask the running job of a store, wait, and show what became of it; returns the exit status."""
    store, savepoint = _savepoint_place(session, address, target)
    with session.output.progress(f"Waiting {WAITING[kind]}", unit="s") as step:
        attempt = Attempt(
            store,
            kind,
            arguments,
            savepoint,
            open_store=lambda url: session.store(url, address.url),
            if_stopped=if_stopped,
            step=step,
            note=session.output.note,
        )
        session.changes(f"the request was withdrawn; a run {WITHDRAWN[kind]}")
        try:
            result = attempt.run(timeout)
        except BaseException:
            if attempt.left_behind:
                session.changes("the request could not be removed")
                session.output.note(attempt.left_behind)
            raise
    document = attempt.document(result)
    session.output.show(document, lambda document: page(kind, document))
    return status_of(kind, document)


def _savepoint_place(session: Session, address: Address, target: Address | None) -> tuple[CheckpointStore, str | None]:
    """The store, and the absolute URL of the savepoint's: the job may run in another directory."""
    from stateformat.errors import InvalidInput

    store = session.store(address, *(() if target is None else (target.url,)))
    if target is None:
        return store, None
    there = session.target(target, address.url)
    if there.url == store.url:
        raise InvalidInput(f"{store.url} cannot hold its own savepoint; give another address with --to", url=there.url)
    return store, there.url


def _require_empty(there: CheckpointStore) -> None:
    from stateformat.errors import ErrorKind, InvalidInput
    from stateformat.paths import RECORDS

    if there.storage.list(RECORDS):
        raise InvalidInput(
            f"{there.url} holds a checkpoint already, and a savepoint needs a store of its own; the job was not asked",
            kind=ErrorKind.STORE_NOT_EMPTY,
            url=there.url,
        )


def status_of(kind: str, document: Document) -> int:
    """The exit status for an outcome: fine, not what was asked for, or something is missing."""
    done, is_saved = document["outcome"], document["savepoint"] is not None
    if done == TIMED_OUT:
        return UNAVAILABLE
    if (kind, done) == ("rescale", "rescaled"):
        owes = document["answered"] and document["checkpoint_id"] is not None
        return UNAVAILABLE if owes and not is_saved else FINE
    if (kind, done) == ("stop", "stopped"):
        return UNAVAILABLE if document["request"] and not is_saved else FINE
    return FINE if (kind, done) in (("stop", "finished"), ("savepoint", "saved")) else PROBLEMS


def page(kind: str, document: Document) -> Iterator[Block]:
    """Make the page: the outcome, where the savepoint is, what the run said."""
    from stateformat.rescaling import WantedParallelism

    asked = ""
    if kind == "stop":
        asked = f", {document['mode'].replace('_', ' ')}"
    elif kind == "rescale":
        operators = {each["uid"]: each["parallelism"] for each in document["operators"]}
        asked = f", {WantedParallelism(document['parallelism'], operators).describe()}"
    facts = [
        ("store", document["store"]),
        ("request", f"{document['request']}{asked}" if document["request"] else "none"),
        ("savepoint", document["savepoint"] or "none"),
        ("waited", f"{document['waited_seconds']:g} s"),
    ]
    yield Heading(_title(kind, document["outcome"], document["checkpoint_id"]))
    yield Facts(facts)
    yield from map(Note, filter(None, document["message"].split("\n")))


def _title(kind: str, outcome: str, number: int | None) -> str:
    match kind, outcome:
        case "stop", "stopped":
            return f"Stopped at checkpoint {number}"
        case "savepoint", "saved":
            return f"Savepoint of checkpoint {number}"
        case "rescale", "rescaled":
            return "Nothing to rescale" if number is None else f"Rescaled, with checkpoint {number} as the first"
        case "rescale", "stopped":
            return "The job has stopped"
        case _, "failed":
            return f"The {kind} failed"
        case _, "refused":
            return f"The {kind} was refused"
        case "savepoint", "missed":
            return OTHERWISE[kind]
    return TITLES.get(outcome, OTHERWISE[kind])


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

    mode = StopMode.DRAIN if drain else StopMode.NO_DRAIN
    return ask_job(session, address, target, timeout, "stop", {"mode": mode}, if_stopped=even_if_stopped)


@command("savepoint", checkpoint="never")
@target_option
@timeout_option
def savepoint(session: Session, address: Address, *, target: Address | None, timeout: float) -> int:
    """Ask a running job for a savepoint; the job keeps running.

    The job takes a checkpoint, and copies it to a store of its own while it keeps running. This
    copy is the savepoint, by default in savepoints/ below the store. The request is withdrawn on
    timeout, Ctrl-C, SIGTERM and SIGHUP; after --timeout it expires.

    A job that has finished is not asked. `ckpt pin` and `ckpt copy` make a savepoint of an existing
    checkpoint, and need no running job.

    Exit status: 0 the savepoint is made; 1 it failed, was refused, or the job has finished; 3 no
    run answered.
    """
    return ask_job(session, address, target, timeout, "savepoint", {})
