"""Asking the running job of a store for something, and waiting: ``ckpt stop``, ``ckpt savepoint``,
``ckpt rescale --running``.

Command and job share nothing but the store (SPEC.md section 2.4). The command writes a request, and
waits for the run's answer, or for a newest record that says all there is to say.

However the command ends (also by an error or an interruption), it removes the request and its
answer. Then it reads the record once more, because a run may have been about to publish.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import click

from stateformat.words import label

from .options import Address, AddressType, SecondsType, Session
from .output import Document, Step
from .text import Look, render

if TYPE_CHECKING:
    from stateformat.model import Record
    from stateformat.requests import JobRequest, RequestAnswer
    from stateformat.store import CheckpointStore

R = TypeVar("R", bound="JobRequest")

TIMEOUT_SECONDS: Final = 300
PAUSE_SECONDS: Final = 0.05
PAUSE_SECONDS_MAX: Final = 2.0
PAUSE_GROWTH: Final = 1.3

SILENCE_SECONDS: Final = 10.0
"""After this time without an answer the command asks whether the job runs at all."""

TIMED_OUT: Final = "timed_out"
"""No run answered in time: an outcome of the command, not of a run."""

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


class Attempt(ABC, Generic[R]):
    """One attempt to ask a job: makes a request, waits, removes the request.

    ``savepoint`` is its URL, None for the default, and ``open_store`` opens that store. ``step``
    takes the seconds waited and the timeout, ``note`` sentences for the user. ``wait`` and
    ``clock`` replace time.
    """

    def __init__(
        self,
        store: CheckpointStore,
        savepoint: str | None,
        *,
        open_store: Callable[[str], CheckpointStore],
        step: Step = lambda _done, _total: None,
        note: Callable[[str], None] = lambda _: None,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._savepoint = store, savepoint
        self._open_store, self._step, self._note = open_store, step, note
        self._wait, self._clock = wait, clock
        self._begin = clock()
        self.request: R | None = None
        self.newest: Record | None = None
        """The newest checkpoint, as of the last poll."""
        self.left_behind = ""
        """A sentence, if the request could not be removed."""

    def document(self, result: Result) -> Document:
        """What the command prints."""
        return {
            "store": self._store.url,
            "request": None if self.request is None else self.request.id,
            "outcome": result.outcome,
            "checkpoint_id": result.checkpoint_id,
            "savepoint": result.savepoint,
            "answered": result.answered,
            "message": result.message,
            "waited_seconds": round(self._clock() - self._begin, 1),
        }

    def run(self, timeout_seconds: float) -> Result:
        """Ask, wait, clean up. Raises what the store raises."""
        self._poll()
        known = self._known()
        if known is not None:
            return self._checked(known)
        if self._savepoint is not None:
            _require_empty(self._open_store(self._savepoint))
        request = self.request = self._ask(int(timeout_seconds * 1e6))
        try:
            result = self._wait_for(request, timeout_seconds)
        except BaseException:
            self._withdraw(request)
            raise
        self._withdraw(request)
        if result is None:
            self._poll()
            waited = f"No run has answered within {timeout_seconds:g} s, and the request was withdrawn"
            result = self._unanswered(request, waited)
        return self._checked(replace(result, message=f"{result.message} {self.left_behind}".strip()))

    # What is asked --------------------------------------------------------------------------------

    @abstractmethod
    def _known(self) -> Result | None:
        """The result, if the newest record says that there is nothing to ask."""

    @abstractmethod
    def _ask(self, timeout_us: int) -> R:
        """Make the request, which expires then: if this process is killed, it cannot withdraw."""

    def _answered(self, answer: RequestAnswer) -> Result:
        """The result that a run's answer is."""
        return Result(answer.outcome.value, answer.message, answer.checkpoint_id, answer.savepoint, answered=True)

    @property
    @abstractmethod
    def silence(self) -> str:
        """Said once, when nothing has been heard for a while."""

    def _decided(self, request: R) -> Result | None:  # noqa: ARG002 - for those that the record decides
        """The result, if the newest record says already that no answer can change it."""
        return None

    @abstractmethod
    def _unanswered(self, request: R, waited: str) -> Result:
        """The result in the end. ``waited``: that no run has answered, as half a sentence."""

    def _checked(self, result: Result) -> Result:
        """The result, or how it falls short of what was asked for."""
        return result

    # Waiting --------------------------------------------------------------------------------------

    def _wait_for(self, request: R, timeout_seconds: float) -> Result | None:
        """A run's answer, or what the newest record says for certain; None on timeout."""
        pause, silent = PAUSE_SECONDS, True
        while True:
            answer = self._store.request_answer(request.id)
            if answer is not None:
                return self._answered(answer)
            self._poll()
            decided = self._decided(request)
            if decided is not None:
                return decided
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

    def _withdraw(self, request: R) -> None:
        """Remove the request and its answer. A failure is reported beside the result."""
        from stateformat.errors import StorageError

        try:
            self._store.withdraw_request(request.id)
        except StorageError as error:
            self.left_behind = (
                f"The request could not be removed ({error}): delete {request.path} in {self._store.url}."
            )

    def _stop_told(self) -> str:
        """A sentence, if the newest checkpoint is a stop."""
        newest = self.newest
        return "" if newest is None or newest.stop is None else f" Checkpoint {newest.checkpoint_id} is a stop."

    def _copy_advice(self, checkpoint_id: int | None, url: str) -> str:
        return f"`ckpt copy {self._store.url}@{checkpoint_id} {url}` makes the savepoint."


def converse(
    session: Session, address: Address, title: str, make: Callable[..., Attempt[R]], timeout: float, *, withdrawn: str
) -> Document:
    """Carry an attempt out with its progress; returns its document.

    ``make`` takes ``open_store``, ``step`` and ``note``. ``withdrawn``: said of an interrupted
    command.
    """
    with session.output.progress(title, unit="s") as step:
        attempt = make(open_store=lambda url: session.store(url, address.url), step=step, note=session.output.note)
        session.changes(withdrawn)
        try:
            result = attempt.run(timeout)
        except BaseException:
            if attempt.left_behind:
                session.changes("the request could not be removed")
                session.output.note(attempt.left_behind)
            raise
    return attempt.document(result)


def savepoint_place(session: Session, address: Address, target: Address | None) -> tuple[CheckpointStore, str | None]:
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


def draw_answer(document: Document, title: str, request: str, look: Look) -> Iterator[str]:
    """The page: the outcome, where the savepoint is, what the run said."""
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
