"""``ckpt stop``: asks the job of a store to stop with a savepoint, waits, and tells what came of it.

Theory of operation. The command and the job share nothing but the store (SPEC.md section 2.4). It leaves a request there and
looks for two things until the time is up: the answer; and a newest checkpoint that has changed, whose record may say
that the job stops there by this request, or that everything in it has finished. A stop that stands in a record stands,
whether its run lived to answer or not; without an answer the savepoint may be missing, so it is looked for.

Whatever happens, the command leaves no request behind: it is removed with its answer at the end, after an error and after
an interruption too. Only then is the record looked at a last time, for a run that was just about to publish.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import click

from ..exit_status import FINE, PROBLEMS, UNAVAILABLE
from ..options import Address, AddressType, SecondsType, Session, command
from ..output import Document, Step
from ..text import Look, facts, heading, label, paragraph

if TYPE_CHECKING:
    from stateformat.model import Record
    from stateformat.stop_requests import StopAnswer, StopRequest
    from stateformat.store import CheckpointStore

TIMEOUT_SECONDS: Final = 300
PAUSE_SECONDS: Final = 0.05
PAUSE_SECONDS_MAX: Final = 2.0
PAUSE_GROWTH: Final = 1.3

SILENCE_SECONDS: Final = 10.0
"""After so long without an answer the command asks whether the job runs at all."""

TIMED_OUT: Final = "timed_out"
"""Nothing was heard until the time was up. This outcome and the next two are the command's own; the others are those of
``requests.StopOutcome``."""
NOT_DRAINED: Final = "not_drained"
"""A drain was asked for, and the job has stopped without one."""
NOT_SAVED: Final = "not_saved"
"""The job has stopped or finished, and there is no savepoint where ``--to`` wants one."""

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
@click.option("--to", "target", type=AddressType("never"), metavar="URL", help="Where the savepoint goes.")
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
    help="Ask although the newest checkpoint is that of a stop: the job was resumed and has not published yet.",
)
def stop(
    session: Session, address: Address, *, drain: bool, target: Address | None, timeout: float, even_if_stopped: bool
) -> int:
    """Ask a running job to stop with a savepoint, and wait.

    The job stops at its next checkpoint, which is copied to a store of its own: the savepoint, by default below the store in
    savepoints/. Without --drain nothing is flushed, and the job can go on from there. The request is withdrawn when the
    time is up, and on Ctrl-C.

    A job that has stopped or finished already is not asked.

    Exit status: 0 stopped or finished; 1 it failed, was refused, or is not what was asked for; 3 no run answered, or the
    savepoint is missing.
    """
    from stateformat.model import StopMode

    store = session.store(address.url, *(() if target is None else (target.url,)))
    savepoint = None if target is None else _another_store(session.store(target.url, address.url), store)
    mode = StopMode.DRAIN if drain else StopMode.NO_DRAIN
    asking = Asking(store, savepoint_store=lambda url: session.store(url, address.url))
    session.changes("the request was withdrawn; a run that had begun to stop by it may still do so")
    try:
        with session.output.progress("Waiting for the job to stop", unit="s") as step:
            told = asking.ask(
                mode,
                savepoint,
                timeout_seconds=timeout,
                step=step,
                note=session.output.note,
                if_stopped=even_if_stopped,
            )
    except BaseException:
        if asking.left_behind:
            session.changes("the request could not be removed")
            session.output.note(asking.left_behind)
        raise
    document = asking.document(mode, told)
    session.output.show(document, draw)
    return status_of(document)


def status_of(document: Document) -> int:
    """The exit status of an outcome."""
    if document["outcome"] == "stopped" and document["request"]:
        return FINE if document["savepoint"] else UNAVAILABLE
    if document["outcome"] in ("stopped", "finished"):
        return FINE
    return UNAVAILABLE if document["outcome"] == TIMED_OUT else PROBLEMS


def _another_store(there: CheckpointStore, store: CheckpointStore) -> str:
    """The absolute URL of a store for a savepoint: the job may run in another directory."""
    from stateformat.errors import InvalidInput

    if there.url == store.url:
        raise InvalidInput(f"{store.url} cannot hold its own savepoint; give another address with --to", url=there.url)
    return there.url


def _require_empty(there: CheckpointStore) -> None:
    from stateformat.errors import ErrorKind, InvalidInput
    from stateformat.paths import RECORDS

    if there.storage.list(RECORDS):
        raise InvalidInput(
            f"{there.url} holds a checkpoint already, and a savepoint is a store of its own; the job was not asked",
            kind=ErrorKind.STORE_NOT_EMPTY,
            url=there.url,
        )


@dataclass(frozen=True)
class Told:
    """What came of it: a word, sentences, for a stop the checkpoint and its savepoint; ``answered``: by a run."""

    outcome: str
    message: str
    checkpoint_id: int | None = None
    savepoint: str | None = None
    answered: bool = False


class Asking:
    """One request, from its making to its removal. ``wait`` is called with seconds; ``clock`` tells them."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        savepoint_store: Callable[[str], CheckpointStore],
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._savepoint_store = savepoint_store
        self._wait = wait
        self._clock = clock
        self._begin = clock()
        self.request: StopRequest | None = None
        self.newest: Record | None = None
        """The newest checkpoint, as it was last seen."""
        self.left_behind = ""
        """A sentence where the request could not be removed."""

    def document(self, mode: str, told: Told) -> Document:
        """What the command prints."""
        return {
            "store": self._store.url,
            "request": None if self.request is None else self.request.id,
            "mode": str(mode),
            "outcome": told.outcome,
            "checkpoint_id": told.checkpoint_id,
            "savepoint": told.savepoint,
            "answered": told.answered,
            "message": told.message,
            "waited_seconds": round(self._clock() - self._begin, 1),
        }

    def ask(
        self,
        mode: str,
        savepoint: str | None,
        *,
        timeout_seconds: float,
        step: Step,
        note: Callable[[str], None] = lambda _: None,
        if_stopped: bool = False,
    ) -> Told:
        """Make the request, wait for what comes of it, and remove it again. Raises what the store raises.

        A job that has finished, or stopped, is not asked; one that has stopped is with ``if_stopped``. ``note`` is called
        with sentences while the command waits.
        """
        told = self._ask(mode, savepoint, timeout_seconds, step, note, if_stopped)
        return self._judged(mode, savepoint, told)

    def _ask(
        self,
        mode: str,
        savepoint: str | None,
        timeout_seconds: float,
        step: Step,
        note: Callable[[str], None],
        if_stopped: bool,
    ) -> Told:
        from stateformat.model import StopMode

        self._look()
        if self.newest is not None and _all_finished(self.newest):
            return self._own_end(self.newest)
        if self.newest is not None and self.newest.stop is not None and not if_stopped:
            return self._stopped_before(self.newest)
        if savepoint is not None:
            _require_empty(self._savepoint_store(savepoint))
        request = self.request = self._store.request_stop(StopMode(mode), savepoint)
        try:
            told = self._wait_for(request, timeout_seconds, step, note)
        except BaseException:
            self._withdraw(request)
            raise
        self._withdraw(request)
        if told is None:
            self._look()
            told = self._from_record(request) or self._silence(request, timeout_seconds)
        return replace(told, message=f"{told.message} {self.left_behind}".strip())

    def _judged(self, mode: str, savepoint: str | None, told: Told) -> Told:
        """What came of it, held against what was asked for."""
        from stateformat.model import StopMode

        record = self._record_of(told)
        if record is None:
            return told
        number, drained = record.checkpoint_id, record.stop is not None and record.stop.mode is StopMode.DRAIN
        if told.outcome == "stopped" and mode == StopMode.DRAIN and not drained:
            how = (
                "Only a run can drain: start the job again so that it goes on (resume=True, --resume), then ask again."
            )
            return replace(told, outcome=NOT_DRAINED, message=f"{told.message} {how}")
        if told.outcome == "stopped" and told.answered:
            after = "The job has ended for good." if drained else "Started again to resume, the job goes on from there."
            return replace(told, message=f"{told.message}\n{after}".strip())
        if savepoint is None or (told.outcome == "stopped" and self.request is not None):
            return told
        if self._stands(savepoint, record):
            return replace(told, savepoint=savepoint)
        copy = f"`ckpt copy {self._store.url}@{number} {savepoint}` makes the savepoint."
        return replace(told, outcome=NOT_SAVED, message=f"{told.message} {copy}", savepoint=None)

    def _record_of(self, told: Told) -> Record | None:
        """The checkpoint at which the job has stopped or finished; None where it did not, or cannot be looked at."""
        from stateformat.errors import CheckpointError

        if told.outcome not in ("stopped", "finished"):
            return None
        # What a run has answered stands, whether its record can be read now or not.
        with contextlib.suppress(CheckpointError):
            self._look()
        record = self.newest
        return record if record is not None and record.checkpoint_id == told.checkpoint_id else None

    def _wait_for(
        self, request: StopRequest, timeout_seconds: float, step: Step, note: Callable[[str], None]
    ) -> Told | None:
        """What a run has answered, or the newest record alone says for certain; None when the time is up."""
        pause, silent = PAUSE_SECONDS, True
        while True:
            answer = self._store.stop_answer(request.id)
            if answer is not None:
                return self._from_answer(answer)
            self._look()
            if self.newest is not None and _all_finished(self.newest) and not _is_stop_of(self.newest, request):
                # Tasks that have all finished take no further checkpoint, so no stop can come after this.
                return self._own_end(self.newest)
            waited = self._clock() - self._begin
            if waited >= timeout_seconds:
                return None
            if silent and waited >= SILENCE_SECONDS:
                silent = False
                note(
                    f"No run has answered for {SILENCE_SECONDS:g} s. One that is at work answers when it has stopped; if the "
                    "job does not run, press Ctrl-C."
                )
            step(int(waited), int(timeout_seconds))
            self._wait(min(pause, timeout_seconds - waited))
            pause = min(pause * PAUSE_GROWTH, PAUSE_SECONDS_MAX)

    def _look(self) -> None:
        """Read the newest record if there is another than before: mostly this is one listing."""
        from stateformat.history import newest_record, record_ids

        known = 0 if self.newest is None else self.newest.checkpoint_id
        if max(record_ids(self._store.storage), default=0) != known:
            self.newest = newest_record(self._store.storage)

    def _withdraw(self, request: StopRequest) -> None:
        """Remove the request and its answer. A failure is told beside what came of it, and hides nothing."""
        from stateformat.errors import StorageError
        from stateformat.paths import request_path

        try:
            self._store.withdraw_stop(request.id)
        except StorageError as error:
            path = request_path(request.newest, request.id)
            self.left_behind = f"The request could not be removed ({error}): delete {path} in {self._store.url}."

    def _from_answer(self, answer: StopAnswer) -> Told:
        message = answer.message
        if answer.outcome == "stopped" and answer.savepoint is None and "ckpt copy" not in message:
            copy = f"`ckpt copy {self._store.url}@{answer.checkpoint_id} URL` makes the savepoint."
            message = f"{message} The stop stands; {copy}".strip()
        return Told(answer.outcome.value, message, answer.checkpoint_id, answer.savepoint, answered=True)

    def _own_end(self, record: Record) -> Told:
        number = record.checkpoint_id
        how = f"by request {record.stop.request}" if record.stop else "without having been asked"
        return Told(
            "finished", f"Everything in checkpoint {number} has finished, {how}; there is nothing to stop.", number
        )

    def _stopped_before(self, record: Record) -> Told:
        """The job has stopped by a request of somebody else, or before."""
        from stateformat.stop_requests import savepoint_of_stop

        assert record.stop is not None
        number, mode = record.checkpoint_id, record.stop.mode.replace("_", " ")
        url = savepoint_of_stop(self._store.url, record)
        message = (
            f"The job stopped ({mode}) at checkpoint {number}, by request {record.stop.request}, and has published "
        )
        message += "nothing since. Was it resumed a moment ago? Then ask with --even-if-stopped."
        stands = self._stands(url, record)
        return Told("stopped", message, number, url if stands else None)

    def _from_record(self, request: StopRequest) -> Told | None:
        """A stop that stands in the newest record, although no run has answered."""
        record = self.newest
        if record is None or not _is_stop_of(record, request):
            return None
        number, url = record.checkpoint_id, request.savepoint_at(self._store.url, record.checkpoint_id)
        message = (
            f"Checkpoint {number} is the stop that was asked for, but its run has not said that it has ended: it is still "
            "at work, or it died. The stop stands; if the run died, start the job again, and it commits what is prepared "
            "and ends."
        )
        if self._stands(url, record):
            return Told("stopped", f"{message} The savepoint is complete.", number, url)
        return Told(
            "stopped",
            f"{message} There is no savepoint yet; `ckpt copy {self._store.url}@{number} {url}` makes it.",
            number,
        )

    def _stands(self, url: str, record: Record) -> bool:
        from stateformat.errors import CheckpointError

        try:
            return self._savepoint_store(url).open(record.checkpoint_id).record.attempt_id == record.attempt_id
        except CheckpointError:
            return False

    def _silence(self, request: StopRequest, timeout_seconds: float) -> Told:
        newest = self.newest
        waited = f"No run has answered within {timeout_seconds:g} s, and the request was withdrawn"
        if newest is None or newest.checkpoint_id <= request.newest:
            seen = "no checkpoint was published meanwhile, so perhaps none is running"
        elif newest.stop is not None:
            return self._stopped_before(newest)
        else:
            seen = (
                f"checkpoint {newest.checkpoint_id} was published meanwhile, so a run is alive: it may still stop, if it had "
                "begun to. Wait longer (`--timeout`)"
            )
        return Told(TIMED_OUT, f"{waited}; {seen}.")


def _is_stop_of(record: Record, request: StopRequest) -> bool:
    return record.stop is not None and record.stop.request == request.id


def _all_finished(record: Record) -> bool:
    from stateformat.graph import Status

    operators = record.graph.operators
    return bool(operators) and all(operator.status is Status.FULLY_FINISHED for operator in operators)


def draw(document: Document, look: Look) -> Iterator[str]:
    """The page: what came of it, where the savepoint is, what the run said."""
    stopped = document["outcome"] == "stopped"
    title = f"Stopped at checkpoint {document['checkpoint_id']}" if stopped else TITLES[document["outcome"]]
    yield heading(title, look)
    yield ""
    drain = document["mode"] == "drain"
    yield from facts(
        [
            ("store", label(document["store"])),
            (
                "request",
                f"{document['request']}, {'drain' if drain else 'no drain'}" if document["request"] else "none",
            ),
            ("savepoint", label(document["savepoint"] or "none")),
            ("waited", f"{document['waited_seconds']:g} s"),
        ],
        look,
    )
    for text in filter(None, document["message"].split("\n")):
        yield ""
        yield from paragraph(label(text), look)
