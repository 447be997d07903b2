"""Functions on items, run as tasks: :class:`Workers` runs them in threads.

Rewrite and bootstrap run so, and know neither threads nor Spark, where
``stateformat.backends.spark.rewrite`` runs the same functions. A function needs only its arguments,
which are small and can be pickled; a task may be repeated if its only effect is on a storage.

Arrow reads, hashes, sorts and compresses without the interpreter's lock, so threads are enough. A
large task holds some row groups in memory, and large tasks run one after another. Rows on the way
to their target wait in a temporary file.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from threading import Condition
from typing import Final, Protocol, TypeAlias, TypeVar

import pyarrow as pa

from stateformat.tables import Spill

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")
T = TypeVar("T")

Done: TypeAlias = Callable[[int], None]
"""Told how much more is done, as a task counts it, from any thread."""

Sized: TypeAlias = tuple[int, I]
"""An item, after the bytes of state that its task reads."""
Note: TypeAlias = Callable[[int, int], None]
"""Adds a number to what is noted for a target."""
Deal: TypeAlias = Callable[[I, Note], Iterator[tuple[int, pa.RecordBatch]]]
"""Reads an item and yields its rows, each batch with the number of its target."""
Write: TypeAlias = Callable[[T, Iterator[pa.RecordBatch], int, Done], R]
"""Takes a target, all rows dealt to it, and the sum of what was noted for it."""

AT_ONCE_BYTES: Final = 64 << 20
"""Tasks that run together have at most this much stored state, unless one alone has more."""


class Tasks(Protocol):
    """Runs functions on items, in tasks that may be repeated. Raises the first failure."""

    def map(self, function: Callable[[I, Done], R], items: Sequence[Sized[I]], done: Done) -> list[R]:
        """Return the result of every item, in any order."""
        ...

    def exchange(
        self, deal: Deal[I], groups: Iterable[Sequence[Sized[I]]], write: Write[T, R], targets: Sequence[T], done: Done
    ) -> list[R]:
        """Deal the items out; return the results of all targets that got rows or notes.

        No target is written before all items of its group are dealt. Groups share no target.
        """
        ...


class Workers:
    """Threads that run tasks together as far as their sizes in bytes allow. Close it with
    ``with``.
    """

    def __init__(self, threads: int | None = None) -> None:
        count = (os.cpu_count() or 1) if threads is None else threads
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="tasks")
        self._running = 0
        self._changed = Condition()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        # Where an interrupt left the tasks, those that have not begun never do.
        self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[I, Done], R], items: Sequence[Sized[I]], done: Done) -> list[R]:
        """Return the results, of the largest item first, so that the last to end is a small one."""
        ordered = sorted(items, key=lambda item: -item[0])
        return self._run((size, partial(function, item, done)) for size, item in ordered)

    def exchange(
        self, deal: Deal[I], groups: Iterable[Sequence[Sized[I]]], write: Write[T, R], targets: Sequence[T], done: Done
    ) -> list[R]:
        """Deal out and write one group after the other; rows wait in a temporary file."""
        return [one for group in groups for one in self._exchange(deal, group, write, targets, done)]

    def _exchange(
        self, deal: Deal[I], items: Sequence[Sized[I]], write: Write[T, R], targets: Sequence[T], done: Done
    ) -> list[R]:
        noted: dict[int, int] = defaultdict(int)
        lock = threading.Lock()
        with Spill[int]() as buckets:

            def note(target: int, count: int) -> None:
                with lock:
                    noted[target] += count

            def set_aside(item: I) -> None:
                for target, batch in deal(item, note):
                    buckets.add(target, pa.Table.from_batches([batch]))

            self._run((size, partial(set_aside, item)) for size, item in items)
            return self.write_buckets(buckets, write, targets, noted, done)

    def write_buckets(
        self, buckets: Spill[int], write: Write[T, R], targets: Sequence[T], noted: Mapping[int, int], done: Done
    ) -> list[R]:
        """Write each target with rows or notes; return the results in order of the targets."""
        return self._run(
            (
                buckets.sizes.get(number, 0),
                partial(write, targets[number], buckets.read(number), noted.get(number, 0), done),
            )
            for number in sorted(buckets.sizes.keys() | noted.keys())
        )

    def _run(self, tasks: Iterable[tuple[int, Callable[[], R]]]) -> list[R]:
        """Return the results, in order. Raises the first failure, and cancels the tasks not yet
        begun.
        """
        futures = [self._pool.submit(self._once_there_is_room, size_bytes, task) for size_bytes, task in tasks]
        _, left = wait(futures, return_when=FIRST_EXCEPTION)
        for future in left:
            future.cancel()
        wait(futures)
        for future in futures:
            if not future.cancelled() and future.exception():
                future.result()
        return [future.result() for future in futures]

    def _once_there_is_room(self, size_bytes: int, task: Callable[[], R]) -> R:
        """Run a task while the bytes of those that run stay within a limit, or none other runs."""
        size_bytes = min(size_bytes, AT_ONCE_BYTES)
        with self._changed:
            self._changed.wait_for(lambda: not self._running or self._running + size_bytes <= AT_ONCE_BYTES)
            self._running += size_bytes
        try:
            return task()
        finally:
            with self._changed:
                self._running -= size_bytes
                self._changed.notify_all()
