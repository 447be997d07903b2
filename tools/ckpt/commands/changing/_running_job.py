"""``ckpt rescale --running``: asks the job to go on at another parallelism, and waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from ...asking import TIMED_OUT, Attempt, Result, draw_answer
from ...exit_status import FINE, PROBLEMS, UNAVAILABLE
from ...output import Document
from ...text import Look

if TYPE_CHECKING:
    from stateformat.requests import RescaleRequest

RESCALED: Final = "rescaled"
TITLES: Final = {
    "failed": "The rescale failed",
    "refused": "The rescale was refused",
    "finished": "The job has finished",
    "stopped": "The job has stopped",
    "missed": "The request came too late for its run",
    TIMED_OUT: "No run has answered",
}
OTHERWISE: Final = "The job was not rescaled"


class RescaleAttempt(Attempt["RescaleRequest"]):
    """One attempt to have a running job rescaled. A finished job is not asked."""

    def __init__(self, *args: Any, parallelism: int | None, operators: Mapping[str, int], **more: Any) -> None:
        super().__init__(*args, **more)
        self._parallelism, self._operators = parallelism, operators

    def document(self, result: Result) -> Document:
        operators = [{"uid": uid, "parallelism": number} for uid, number in self._operators.items()]
        return {**super().document(result), "parallelism": self._parallelism, "operators": operators}

    @property
    def silence(self) -> str:
        return (
            "A running job answers when it has published its first checkpoint at the new parallelism, or at once if "
            f"it refuses.{self._stop_told()} If the job does not run, press Ctrl-C: without --running its "
            "newest checkpoint is rescaled."
        )

    def _known(self) -> Result | None:
        newest = self.newest
        if newest is None or not newest.graph.is_finished:
            return None
        message = f"Everything in checkpoint {newest.checkpoint_id} has finished; there is nothing to rescale."
        return Result("finished", message, newest.checkpoint_id)

    def _ask(self, timeout_us: int) -> RescaleRequest:
        return self._store.request_rescale(self._parallelism, self._operators, self._savepoint, timeout_us=timeout_us)

    def _decided(self, request: RescaleRequest) -> Result | None:  # noqa: ARG002 - whatever was asked
        return self._known()

    def _unanswered(self, request: RescaleRequest, waited: str) -> Result:
        from stateformat.requests import rescale_outcome

        known = rescale_outcome(self._store.storage, request)
        if known is not None:
            return Result(known.outcome.value, known.message + ".", known.checkpoint_id)
        newest = self.newest
        if newest is None or newest.checkpoint_id <= request.newest:
            seen = "no checkpoint was published meanwhile, so perhaps none is running"
        elif newest.stop is not None and newest.stop.request == request.id:
            seen = (
                f"checkpoint {newest.checkpoint_id} is the stop of this rescale, and the job has not published since: "
                "its run is still at work, or it died. Started again, the job goes on at the new parallelism"
            )
        else:
            seen = (
                f"checkpoint {newest.checkpoint_id} was published meanwhile, so a run is alive, and may still go on at "
                "the new parallelism if it had begun to. Wait longer (`--timeout`)"
            )
        return Result(TIMED_OUT, f"{waited}; {seen}.")


def status_of(document: Document) -> int:
    """The exit status for an outcome."""
    if document["outcome"] == RESCALED:
        stopped = document["answered"] and document["checkpoint_id"] is not None
        return UNAVAILABLE if stopped and document["savepoint"] is None else FINE
    return UNAVAILABLE if document["outcome"] == TIMED_OUT else PROBLEMS


def draw_rescaled(document: Document, look: Look) -> Iterator[str]:
    """The page: the outcome, what was asked for, where the savepoint is, what the run said."""
    from stateformat.rescaling import WantedParallelism

    title = TITLES.get(document["outcome"], OTHERWISE)
    if document["outcome"] == RESCALED:
        first = document["checkpoint_id"]
        title = "Nothing to rescale" if first is None else f"Rescaled, with checkpoint {first} as the first"
    operators = {each["uid"]: each["parallelism"] for each in document["operators"]}
    wanted = WantedParallelism(document["parallelism"], operators).describe()
    request = f"{document['request']}, {wanted}" if document["request"] else "none"
    yield from draw_answer(document, title, request, look)
