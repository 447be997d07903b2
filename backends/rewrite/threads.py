"""The engine of ``--engine local``: the tasks of a rewrite in threads of this process.

Arrow reads, hashes, sorts and compresses outside the interpreter's lock, so threads are enough. Memory: every thread holds
a row group and a few batches; where max parallelism changes, the rows of one state at a time.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa

from backends.rewrite.planning import RewritePlan, Source
from backends.rewrite.work import deal, write_move, write_target
from stateformat.errors import InvalidInput
from stateformat.model import Handle
from stateformat.snapshot import WriteContext

T = TypeVar("T")


@dataclass(frozen=True)
class ThreadEngine:
    """Runs tasks on ``threads`` threads; None is one for each processor."""

    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise InvalidInput(f"{self.threads} threads rewrite nothing; give at least 1, or None for all processors")

    def run(self, context: WriteContext, plan: RewritePlan, done: Callable[[int], None]) -> list[Handle]:
        """A handle for each move and each target, in any order. ``done`` is told how many segments are written."""
        threads = (os.cpu_count() or 1) if self.threads is None else self.threads
        with ThreadPoolExecutor(threads, thread_name_prefix="rewrite") as pool:
            # The largest first, so that the last to end is a small one.
            moves = sorted(plan.moves, key=lambda move: -move.bytes)
            handles = _finished(
                [pool.submit(write_move, context.only(move.place.operator), move) for move in moves], done
            )
            for _, sources in _by_state(plan.sources):
                handles += self._rehash(pool, context, plan, sources, done)
        return handles

    def _rehash(
        self,
        pool: ThreadPoolExecutor,
        context: WriteContext,
        plan: RewritePlan,
        sources: Sequence[Source],
        done: Callable[[int], None],
    ) -> list[Handle]:
        """All rows of one state, dealt into a buffer for each target, then written."""
        buffers: dict[int, list[pa.RecordBatch]] = defaultdict(list)
        dealt: list[Future[list[tuple[int, pa.RecordBatch]]]] = [
            pool.submit(lambda source: list(deal(source)), source) for source in sources
        ]
        for frames in _finished(dealt, lambda _: None):
            for target, batch in frames:
                buffers[target].append(batch)
        places = [(plan.targets[target], batches) for target, batches in sorted(buffers.items())]
        writing = [pool.submit(write_target, context.only(place.operator), place, batches) for place, batches in places]
        return _finished(writing, done)


def _by_state(sources: Iterable[Source]) -> list[tuple[int, list[Source]]]:
    """Sources of one state together: those that deal to the same targets."""
    found: dict[int, list[Source]] = defaultdict(list)
    for source in sources:
        found[source.first_target].append(source)
    return list(found.items())


def _finished(futures: Sequence[Future[T]], done: Callable[[int], None]) -> list[T]:
    """The results, in order of the tasks. At the first failure the tasks not yet begun are dropped, and it is raised."""
    for future in futures:
        future.add_done_callback(lambda ended: None if ended.cancelled() or ended.exception() else done(1))
    _, left = wait(futures, return_when=FIRST_EXCEPTION)
    for future in left:
        future.cancel()
    wait(futures)
    failed = [future for future in futures if not future.cancelled() and future.exception()]
    for future in failed:
        future.result()
    return [future.result() for future in futures]


__all__ = ["ThreadEngine"]
