"""``ckpt savepoint``: asks the job of a store for a savepoint, and waits; the job goes on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

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
    from stateformat.requests import SavepointRequest

SAVED: Final = "saved"
TITLES: Final = {
    "failed": "The savepoint failed",
    "refused": "The savepoint was refused",
    "finished": "The job has finished",
    TIMED_OUT: "No run has answered",
}
OTHERWISE: Final = "No savepoint was made"


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
    store, place = savepoint_place(session, address, target)
    document = converse(
        session,
        address,
        "Waiting for the savepoint",
        partial(SavepointAttempt, store, place),
        timeout,
        withdrawn="the request was withdrawn; a run that had begun with it may still make the savepoint",
    )
    session.output.show(document, draw)
    return status_of(document)


def status_of(document: Document) -> int:
    """The exit status for an outcome."""
    if document["outcome"] == SAVED:
        return FINE
    return UNAVAILABLE if document["outcome"] == TIMED_OUT else PROBLEMS


class SavepointAttempt(Attempt["SavepointRequest"]):
    """One attempt to have a savepoint made. A finished job is not asked."""

    @property
    def silence(self) -> str:
        return (
            "A running job answers when the savepoint is made, which takes as long as a copy takes."
            f"{self._stop_told()} If the job does not run, press Ctrl-C{self._advice()}"
        )

    def _advice(self) -> str:
        """What needs no running job, as the end of a sentence."""
        if self.newest is None:
            return "."
        here = f"{self._store.url}@{self.newest.checkpoint_id}"
        made = f"ckpt pin {here} NAME" if self._savepoint is None else f"ckpt copy {here} {self._savepoint}"
        return f": `{made}` makes a savepoint of its newest checkpoint without it."

    def _known(self) -> Result | None:
        newest = self.newest
        if newest is None or not newest.graph.is_finished:
            return None
        message = f"Everything in checkpoint {newest.checkpoint_id} has finished, so no job was asked{self._advice()}"
        return Result("finished", message, newest.checkpoint_id)

    def _ask(self, timeout_us: int) -> SavepointRequest:
        return self._store.request_savepoint(self._savepoint, timeout_us=timeout_us)

    def _unanswered(self, request: SavepointRequest, waited: str) -> Result:
        newest = self.newest
        if newest is None or newest.checkpoint_id <= request.newest:
            seen = f"no checkpoint was published meanwhile, so perhaps none is running{self._advice()}"
        else:
            where = request.savepoint_at(self._store.url, newest.checkpoint_id)
            seen = (
                f"checkpoint {newest.checkpoint_id} was published meanwhile, so a run is alive, and may still make a "
                f"savepoint, as {where}. Wait longer (`--timeout`)."
            )
        return Result(TIMED_OUT, f"{waited}; {seen}")


def draw(document: Document, look: Look) -> Iterator[str]:
    """The page: the outcome, where the savepoint is, what the run said."""
    title = TITLES.get(document["outcome"], OTHERWISE)
    if document["outcome"] == SAVED:
        title = f"Savepoint of checkpoint {document['checkpoint_id']}"
    yield from draw_answer(document, title, document["request"] or "none", look)
