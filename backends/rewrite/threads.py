"""The engine of ``--engine local``: the tasks of a rewrite in threads of this process.

Arrow reads, hashes, sorts and compresses outside the interpreter's lock, so threads are enough. Memory: a large
task holds some row groups, and large tasks run one after another; each reads and writes with threads of its own. Where max parallelism changes, rows on their way to their new subtask wait in a temporary file.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
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

from .planning import RewritePlan, Source
from .work import deal, write_move, write_target

T = TypeVar("T")

AT_ONCE_BYTES: Final = 64 << 20
"""Tasks that run at a time have together no more stored state than this, unless there is only one."""


@dataclass(frozen=True)
class ThreadEngine:
    """Runs tasks on ``threads`` threads; None is one for each processor."""

    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise InvalidInput(f"{self.threads} threads rewrite nothing; give at least 1, or None for all processors")

    def run(self, context: WriteContext, plan: RewritePlan, done: Callable[[int], None]) -> list[Handle]:
        """A handle for each move and each target, in any order. ``done`` is called with rows as they are written."""
        threads = (os.cpu_count() or 1) if self.threads is None else self.threads
        with ThreadPoolExecutor(threads, thread_name_prefix="rewrite") as pool:
            # The largest first, so that the last to end is a small one.
            moves = sorted(plan.moves, key=lambda move: -move.bytes)
            gate = _Gate(AT_ONCE_BYTES)
            writing = [
                pool.submit(gate.run, move.bytes, partial(write_move, context.only(move.place.operator), move, done))
                for move in moves
            ]
            handles = _finished(writing)
            for _, sources in _by_state(plan.sources):
                handles += _rehash(pool, gate, context, plan, sources, done)
        return handles


class _Gate:
    """Lets tasks run at a time as long as their bytes do not come to more than a limit together."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held = 0
        self._changed = Condition()

    def run(self, size_bytes: int, task: Callable[[], T]) -> T:
        """Run a task when there is room for it, which there is when no other runs."""
        size_bytes = min(size_bytes, self._bytes_max)
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + size_bytes <= self._bytes_max)
            self._held += size_bytes
        try:
            return task()
        finally:
            with self._changed:
                self._held -= size_bytes
                self._changed.notify_all()


def _rehash(
    pool: ThreadPoolExecutor,
    gate: _Gate,
    context: WriteContext,
    plan: RewritePlan,
    sources: Sequence[Source],
    done: Callable[[int], None],
) -> list[Handle]:
    """All rows of one state, dealt to a bucket for each target, then written."""
    buckets: Spill[int] = Spill()
    with buckets:

        def deal_one(source: Source) -> None:
            for target, batch in deal(source):
                buckets.add(target, pa.Table.from_batches([batch]))

        _finished([pool.submit(gate.run, source.bytes, partial(deal_one, source)) for source in sources])

        def write_one(target: int) -> Handle:
            place = plan.targets[target]
            return write_target(context.only(place.operator), place, buckets.read(target), done)

        writing = [
            pool.submit(gate.run, buckets.sizes[target], partial(write_one, target)) for target in sorted(buckets.sizes)
        ]
        return _finished(writing)


def _by_state(sources: Iterable[Source]) -> list[tuple[int, list[Source]]]:
    """Sources of one state together: those that deal to the same targets."""
    found: dict[int, list[Source]] = defaultdict(list)
    for source in sources:
        found[source.first_target].append(source)
    return list(found.items())


def _finished(futures: Sequence[Future[T]]) -> list[T]:
    """The results, in order of the tasks. At the first failure the tasks not yet begun are dropped, and it is raised."""
    _, left = wait(futures, return_when=FIRST_EXCEPTION)
    for future in left:
        future.cancel()
    wait(futures)
    failed = [future for future in futures if not future.cancelled() and future.exception()]
    for future in failed:
        future.result()
    return [future.result() for future in futures]


__all__ = ["ThreadEngine"]
