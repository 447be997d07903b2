"""The rescale of a running job: the check before the stop, the start after it, and the fallback.

A rescale is a stop without drain whose record has the parallelism at which the job goes on. So even
if the process ends in between, the next start finds that parallelism in the newest record:

=====================================  =========================================================
newest checkpoint                      what a start does
=====================================  =========================================================
the stop                               makes its savepoint, and starts at the new parallelism
the stop, after such a start failed    starts at the old parallelism, and answers ``failed``
a later one                            goes on from it. If this process made it, the request
                                       is answered ``rescaled``, and the new parallelism stays
=====================================  =========================================================

A start at the new parallelism has failed if anything raises before its first checkpoint is
published. A run that is discarded without a failure just begins again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stateformat import requests as rq
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import JobGraph, Status
from stateformat.model import ParentRef, Record, known_names
from stateformat.publication import CommitPermit
from stateformat.rescaling import rescale_of
from stateformat.words import label

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedStop:
    """The savepoint of a stop."""

    url: str | None
    """None if the copy failed."""
    words: str
    """The end of a sentence: where it is, or why there is none."""


@dataclass
class _GoingOn:
    """A job that goes on after the stop of a rescale, until its next checkpoint is published."""

    request: str
    stop: ParentRef
    saved: SavedStop
    moved: str
    """Which operators, at which parallelism."""
    in_force_before: Mapping[str, int]
    undone: str
    """Which operators a start by the program sets back to what; empty: none."""
    counts_from: int
    """The checkpoint that decides which requests count, as for the run that has stopped."""
    failure: str = ""
    """Why the start at the new parallelism failed."""
    is_back: bool = False
    """Whether it goes on at the old parallelism."""
    is_answered: bool = False


def _refuse(*_: object) -> object:
    raise InvalidInput("this run was made without its runtime, so it cannot be rescaled")


class Rescales:
    """The rescales of one start of a job.

    ``check`` compiles the job for a start from the newest checkpoint at these parallelisms, by uid,
    and raises what that start would raise.
    """

    def __init__(self, check: Callable[[CommitPermit | None, Mapping[str, int]], object] = _refuse) -> None:
        self.in_force: Mapping[str, int] = {}
        """The parallelism by uid, which overrides the program's as long as this process lives."""
        self._check = check
        self._going_on: _GoingOn | None = None
        self._answers: list[rq.RequestAnswer] = []
        self._counts_from: int | None = None

    # A start --------------------------------------------------------------------------------------

    def begin(
        self,
        permit: CommitPermit | None,
        save: Callable[[CommitPermit], SavedStop],
        program: Callable[[Record], Mapping[str, int]] = lambda _: {},
    ) -> None:
        """Decide at which parallelism the run starts; ``save`` makes the savepoint of a stop.

        ``program`` returns the parallelism by uid of a start from a record.
        """
        current = self._going_on
        if current is not None and (permit is None or permit.ref != current.stop):
            # Its checkpoint was published, but the run ended before it noticed.
            self._conclude(current)
            self._going_on = None
        wanted = rescale_of(permit.record) if permit is not None else None
        if permit is None or wanted is None:
            return
        if self._going_on is not None:
            if self._going_on.failure:
                self._going_on.is_back = True
                self.in_force = self._going_on.in_force_before
            return
        graph, stop = permit.record.graph, permit.record.stop
        sizes = wanted.of(graph)
        assert stop is not None
        moved = graph.with_operators({uid: replace(graph.by_uid[uid], parallelism=sizes[uid]) for uid in sizes})
        self._going_on = _GoingOn(
            request=stop.request,
            stop=permit.ref,
            saved=save(permit),
            moved=moved_words(graph, sizes),
            in_force_before=self.in_force,
            undone=moved_words(moved, program(replace(permit.record, graph=moved))),
            counts_from=permit.ref.checkpoint_id if self._counts_from is None else self._counts_from,
        )
        self.in_force = {**self.in_force, **sizes}
        logger.info("the job goes on from its stop at checkpoint %s: %s", permit.ref.checkpoint_id, wanted.describe())

    def fell_back(self, error: Exception) -> bool:
        """Return whether to go on at the old parallelism, as a run at the new one failed."""
        current = self._going_on
        if current is None or current.failure:
            return False
        current.failure = str(error) or type(error).__name__
        return True

    # A run ----------------------------------------------------------------------------------------

    @property
    def request(self) -> str | None:
        """The request that stopped the job, if the run goes on from there."""
        return None if self._going_on is None else self._going_on.request

    def counts_from(self, restored_from: int) -> int:
        """Return the checkpoint that decides which requests count for a run."""
        self._counts_from = restored_from if self._going_on is None else self._going_on.counts_from
        return self._counts_from

    def check(self, request: rq.JobRequest, graph: JobGraph, permit: CommitPermit | None) -> str:
        """Return what the rescale would move, in words; "" for nothing.

        ``graph`` is the run's, ``permit`` is the newest checkpoint's. Raises what a start would.
        """
        finished = _finished(permit.record) if permit is not None else frozenset()
        for uid in request.operators:
            if uid not in graph.by_uid:
                raise InvalidInput(
                    f"the job has no operator {label(uid)!r}; {known_names(list(graph.by_uid), uid)}",
                    kind=ErrorKind.UNKNOWN_OPERATOR,
                )
            if uid in finished:
                raise InvalidInput(
                    f"operator {label(uid)!r} has finished and is not started again, so it has no parallelism to "
                    "change. Leave it out",
                    operator=uid,
                )
        sizes = {uid: number for uid, number in request.wanted.of(graph).items() if uid not in finished}
        moved = moved_words(graph, sizes)
        if moved:
            self._check(permit, {**self.in_force, **sizes})
        return moved

    def answers(self, published: int) -> list[rq.RequestAnswer]:
        """Return the answers that are due once a run has published this many checkpoints."""
        current = self._going_on
        if current is not None and (published or current.is_back):
            self._conclude(current)
        if published:
            self._going_on = None
        found, self._answers = self._answers, []
        return found

    def end_failed(self, error: BaseException) -> list[rq.RequestAnswer]:
        """Return the answer for a job that failed at both parallelisms."""
        current = self._going_on
        if current is not None:
            current.is_back, current.failure = True, current.failure or str(error)
            current.failure += f". There it failed, too, and the job has ended: {error}"
        return self.answers(0)

    def _conclude(self, current: _GoingOn) -> None:
        if current.is_answered:
            return
        current.is_answered = True
        stopped, first = current.stop.checkpoint_id, current.stop.checkpoint_id + 1
        if current.is_back:
            outcome = rq.RequestOutcome.FAILED
            message = (
                f"the job could not start at the new parallelism ({current.moved}), so it goes on at the old one from "
                f"checkpoint {stopped}{current.saved.words}. The reason: {current.failure}"
            )
        else:
            outcome = rq.RequestOutcome.RESCALED
            message = (
                f"the job has stopped at checkpoint {stopped} and goes on at the new parallelism ({current.moved}), "
                f"where its first checkpoint is {first}{current.saved.words}"
            )
            if current.undone:
                message += (
                    f". The program sets its parallelism, so its next start goes back ({current.undone}). Leave the "
                    "number out of the program, and a start keeps that of the checkpoint; or give the new one at each "
                    "start (--parallelism, --operator-parallelism)"
                )
        at = stopped if current.is_back else first
        self._answers.append(rq.RequestAnswer(current.request, outcome, message, at, current.saved.url))


def moved_words(before: JobGraph, after: Mapping[str, int]) -> str:
    """Return which operators change parallelism: ``'in', 'op' at 4, not 2; 'out' at 1, not 2``."""
    moved: dict[tuple[int, int], list[str]] = {}
    for operator in before.operators:
        now = after.get(operator.uid, operator.parallelism)
        if now != operator.parallelism:
            moved.setdefault((now, operator.parallelism), []).append(repr(label(operator.uid)))
    return _some([f"{_some(uids)} at {now}, not {was}" for (now, was), uids in moved.items()], "; ")


def parallelism_words(record: Record, topology: JobGraph) -> str:
    """Say which operators start at another parallelism than the record's; "" if none.

    A topology of ``plan_of`` differs from the record only where the program says so.
    """
    finished = _finished(record)
    moved = moved_words(
        record.graph, {one.uid: one.parallelism for one in topology.operators if one.uid not in finished}
    )
    if not moved:
        return ""
    return (
        f"the program sets another parallelism than checkpoint {record.checkpoint_id}, and the program "
        f"takes precedence: {moved}"
    )


def _finished(record: Record) -> frozenset[str]:
    return frozenset(one.uid for one in record.graph.operators if one.status is Status.FULLY_FINISHED)


def _some(words: Sequence[str], between: str = ", ", most: int = 5) -> str:
    """Join the first few words, and say how many more there are."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return between.join(words[:most]) + more
