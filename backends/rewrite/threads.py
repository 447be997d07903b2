"""The engine ``local``: the tasks of a rewrite in threads of this process.

Arrow reads, hashes, sorts and compresses without the interpreter's lock, so threads are enough. A
large task holds some row groups in memory, and large tasks run one after another. If max
parallelism changes, rows on their way to their new subtask wait in a temporary file.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
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
"""Tasks that run together have no more stored state than this, unless one alone has more."""


@dataclass(frozen=True)
class ThreadEngine:
    """Runs tasks on ``threads`` threads; None is one for each processor."""

    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise InvalidInput(f"{self.threads} threads rewrite nothing; give at least 1, or None for all processors")

    def run(self, context: WriteContext, plan: RewritePlan, done: Callable[[int], None], seen: Seen) -> list[Handle]:
        """A handle for each place of a move and each target, in any order."""
        threads = (os.cpu_count() or 1) if self.threads is None else self.threads
        sources: dict[int, list[RehashSource]] = defaultdict(list)
        for source in plan.sources:
            sources[source.first_target].append(source)
        with ThreadPoolExecutor(threads, thread_name_prefix="rewrite") as pool:
            # The largest first, so that the last to end is a small one.
            moves = sorted(plan.moves, key=lambda move: -move.bytes)
            gate = _Gate(AT_ONCE_BYTES)

            def write(move: Move) -> list[Handle]:
                return list(write_move(context.only(move.place.operator), move, done, partial(seen, move.place)))

            writing = [pool.submit(gate.run, move.bytes, partial(write, move)) for move in moves]
            handles = [handle for written in _results(writing) for handle in written]
            for of_state in sources.values():
                handles += _rehash(pool, gate, context, plan, of_state, done, seen)
        return handles


class _Gate:
    """Runs tasks together as long as the sum of their bytes stays within a limit."""

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
    pool: ThreadPoolExecutor,
    gate: _Gate,
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

        _results([pool.submit(gate.run, source.bytes, partial(spill, source)) for source in sources])

        def write(target: int) -> Handle:
            place = plan.targets[target]
            unique = plan.is_transformed(place)
            own = context.only(place.operator)
            return write_target(own, place, buckets.read(target), done, check_unique=unique)

        writing = [
            pool.submit(gate.run, buckets.sizes[target], partial(write, target)) for target in sorted(buckets.sizes)
        ]
        return _results(writing)


def _results(futures: Sequence[Future[T]]) -> list[T]:
    """The results, in order. Raises the first failure, and cancels the tasks not yet begun."""
    _, left = wait(futures, return_when=FIRST_EXCEPTION)
    for future in left:
        future.cancel()
    wait(futures)
    for future in futures:
        if not future.cancelled() and future.exception():
            future.result()
    return [future.result() for future in futures]
