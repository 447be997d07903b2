"""Work done ahead of the loop that needs its results.

Rows are gathered while others are encoded, and pieces fetched and decoded while others are used. Order is kept. No more
than a few results exist at a time, and large ones are counted in bytes over all readers of the process, so memory is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from threading import Lock
from typing import Final, Generic, TypeVar

from .pieces import release_memory_after

T = TypeVar("T")

AHEAD_BYTES: Final = 16 << 20
"""While results of this size wait in the process, no further one is made ahead; every reader may have one all the same."""


@dataclass(frozen=True, slots=True)
class SizedCall(Generic[T]):
    """A call, and about how many bytes its result takes."""

    call: Callable[[], T]
    size_bytes: int

    def __call__(self) -> T:
        """Make the call."""
        return self.call()


def _made(call: Callable[[], T], size_bytes: int) -> T:
    """The result of a call that is made in a thread of the pool."""
    result = call()
    release_memory_after(size_bytes)
    return result


class _Held:
    """The bytes of all results in this process that were made ahead and are not yet taken."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._lock = Lock()

    def add(self, size_bytes: int) -> None:
        """So many more; fewer where negative."""
        with self._lock:
            self.size_bytes += size_bytes


_HELD: Final = _Held()


class _Waiting(Generic[T]):
    """Results on their way, in order."""

    def __init__(self, pool: ThreadPoolExecutor, calls: Iterator[Callable[[], T]], depth: int) -> None:
        self._pool = pool
        self._calls = calls
        self._depth = depth
        self._futures: deque[tuple[Future[T], int]] = deque()

    def fill(self) -> bool:
        """Begin as many calls as may be; whether any result is to come."""
        while len(self._futures) < self._depth and (not self._futures or _HELD.size_bytes < AHEAD_BYTES):
            call = next(self._calls, None)
            if call is None:
                break
            size_bytes = call.size_bytes if isinstance(call, SizedCall) else 0
            _HELD.add(size_bytes)
            self._futures.append((self._pool.submit(_made, call, size_bytes), size_bytes))
        return bool(self._futures)

    def take(self) -> T:
        """The next result."""
        future, size_bytes = self._futures.popleft()
        try:
            result = future.result()
        finally:
            _HELD.add(-size_bytes)
        release_memory_after(size_bytes)
        self.fill()
        return result

    def drop(self) -> None:
        """Nothing of it will be taken."""
        _HELD.add(-sum(size_bytes for _, size_bytes in self._futures))


def prefetch(
    calls: Generator[Callable[[], T], None, None], *, workers: int = 1, depth: int = 2
) -> Generator[T, None, None]:
    """The results of ``calls`` in their order, made by ``workers`` threads, at most ``depth`` before they are taken.

    ``calls`` itself runs in the caller's thread, and one call alone does too. With one worker calls never overlap. Calls that
    are :class:`SizedCall` wait while results of ``AHEAD_BYTES`` are held in the process, unless nothing else of this reader is on
    its way. An error of a call comes where its result would have come. When this generator ends or is closed, so is
    ``calls``; what has not begun by then never does, and no thread is left. Threads give speed only as far as calls leave the
    interpreter's lock, as work of pyarrow and of storages does.
    """
    pool: ThreadPoolExecutor | None = None
    waiting: _Waiting[T] | None = None
    try:
        first = list(islice(calls, 2))
        if len(first) < 2:
            for call in first:
                yield call()
            return
        pool = ThreadPoolExecutor(workers, thread_name_prefix="stateformat-ahead")
        waiting = _Waiting(pool, chain(first, calls), depth)
        del first
        while waiting.fill():
            yield waiting.take()
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        if waiting is not None:
            waiting.drop()
        calls.close()
