"""The engine ``local``: runs the tasks of a rewrite in threads of this process.

Arrow reads, hashes, sorts and compresses without the interpreter's lock, so threads are enough. A
large task holds some row groups in memory, and large tasks run one after another. If max
parallelism changes, rows on the way to their new subtask wait in a temporary file.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from threading import Condition
from typing import Final, TypeVar

import pyarrow as pa

from stateformat.errors import InvalidInput
from stateformat.model import Handle
from stateformat.snapshot import WriteContext
from stateformat.tables import Spill

from .planning import Move, RehashSource, RewritePlan
from .work import Seen, distribute, write_move, write_target

T = TypeVar("T")

AT_ONCE_BYTES: Final = 64 << 20
"""Tasks that run together have at most this much stored state, unless one alone has more."""


@dataclass(frozen=True)
class ThreadEngine:
    """Runs tasks on ``threads`` threads; None is one for each processor."""

    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise InvalidInput(f"{self.threads} threads rewrite nothing; give at least 1, or None for all processors")

    def run(self, context: WriteContext, plan: RewritePlan, done: Callable[[int], None], seen: Seen) -> list[Handle]:
        """Return a handle for each place of a move and each target, in any order."""
        sources: dict[int, list[RehashSource]] = defaultdict(list)
        for source in plan.sources:
            sources[source.first_target].append(source)
        with Workers(self.threads) as workers:
            # The largest first, so that the last to end is a small one.
            moves = sorted(plan.moves, key=lambda move: -move.bytes)

            def write(move: Move) -> list[Handle]:
                return list(write_move(context.only(move.place.operator), move, done, partial(seen, move.place)))

            written = workers.run((move.bytes, partial(write, move)) for move in moves)
            handles = [handle for of_move in written for handle in of_move]
            for of_state in sources.values():
                handles += _rehash(workers, context, plan, of_state, done, seen)
        return handles


class Workers:
    """Threads that run tasks together as far as their sizes in bytes allow. Close it with
    ``with``.
    """

    def __init__(self, threads: int | None = None) -> None:
        count = (os.cpu_count() or 1) if threads is None else threads
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="rewrite")
        self._gate = _Gate(AT_ONCE_BYTES)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown()

    def run(self, tasks: Iterable[tuple[int, Callable[[], T]]]) -> list[T]:
        """Run tasks, each with its bytes. Returns the results in order, or raises a failure."""
        return _results([self._pool.submit(self._gate.run, size_bytes, task) for size_bytes, task in tasks])

    def run_buckets(self, buckets: Spill[int], task: Callable[[int, Iterator[pa.RecordBatch]], T]) -> list[T]:
        """Run a task for each bucket, with its number and its rows, in order of the numbers."""
        return self.run(
            (buckets.sizes[number], partial(_with_rows, task, number, buckets)) for number in sorted(buckets.sizes)
        )


def _with_rows(task: Callable[[int, Iterator[pa.RecordBatch]], T], number: int, buckets: Spill[int]) -> T:
    return task(number, buckets.read(number))


class _Gate:
    """Runs tasks together while the sum of their bytes stays within a limit."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._running = 0
        self._changed = Condition()

    def run(self, size_bytes: int, task: Callable[[], T]) -> T:
        """Run a task once there is room for it. There is always room if no other runs."""
        size_bytes = min(size_bytes, self._bytes_max)
        with self._changed:
            self._changed.wait_for(lambda: not self._running or self._running + size_bytes <= self._bytes_max)
            self._running += size_bytes
        try:
            return task()
        finally:
            with self._changed:
                self._running -= size_bytes
                self._changed.notify_all()


def _rehash(
    workers: Workers,
    context: WriteContext,
    plan: RewritePlan,
    sources: Sequence[RehashSource],
    done: Callable[[int], None],
    seen: Seen,
) -> list[Handle]:
    """Distribute the rows of one state to a bucket per target, then write each bucket."""
    buckets: Spill[int] = Spill()
    with buckets:

        def spill(source: RehashSource) -> None:
            place = plan.targets[source.first_target]
            for target, batch in distribute(source, partial(seen, place)):
                buckets.add(target, pa.Table.from_batches([batch]))

        workers.run((source.bytes, partial(spill, source)) for source in sources)

        def write(target: int, rows: Iterator[pa.RecordBatch]) -> Handle:
            place = plan.targets[target]
            unique = plan.is_transformed(place)
            return write_target(context.only(place.operator), place, rows, done, check_unique=unique)

        return workers.run_buckets(buckets, write)


def _results(futures: Sequence[Future[T]]) -> list[T]:
    """Return the results, in order. Raises the first failure, and cancels the tasks not yet
    begun.
    """
    _, left = wait(futures, return_when=FIRST_EXCEPTION)
    for future in left:
        future.cancel()
    wait(futures)
    for future in futures:
        if not future.cancelled() and future.exception():
            future.result()
    return [future.result() for future in futures]
