"""Make calls in threads, ahead of the loop that needs their results, in order and in bounded
memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from threading import Lock
from typing import Final, Generic, TypeVar

from .pieces import keep_memory, release_memory_after

T = TypeVar("T")

AHEAD_BYTES: Final = 16 << 20
"""While results of this size are waiting in the process, a reader makes only one ahead."""


@dataclass(frozen=True, slots=True)
class SizedCall(Generic[T]):
    """A call, and about how many bytes its result takes."""

    call: Callable[[], T]
    size_bytes: int

    def __call__(self) -> T:
        return self.call()


class _Held:
    def __init__(self) -> None:
        self.size_bytes = 0
        self._lock = Lock()

    def add(self, size_bytes: int) -> None:
        with self._lock:
            self.size_bytes += size_bytes


_HELD: Final = _Held()


def _make(call: Callable[[], T], size_bytes: int) -> T:
    result = call()
    release_memory_after(size_bytes)
    return result


class _Queue(Generic[T]):
    """The results that are being made, in order."""

    def __init__(self, calls: Iterator[Callable[[], T]], workers: int, depth: int) -> None:
        self._pool = ThreadPoolExecutor(workers, "stateformat-ahead", initializer=keep_memory)
        self._calls = calls
        self._depth = depth
        self._futures: deque[tuple[Future[T], int]] = deque()

    def fill(self) -> bool:
        """Begin as many calls as allowed; return False if no result is to come."""
        while len(self._futures) < self._depth and (not self._futures or _HELD.size_bytes < AHEAD_BYTES):
            call = next(self._calls, None)
            if call is None:
                break
            size_bytes = call.size_bytes if isinstance(call, SizedCall) else 0
            _HELD.add(size_bytes)
            self._futures.append((self._pool.submit(_make, call, size_bytes), size_bytes))
        return bool(self._futures)

    def take(self) -> T:
        future, size_bytes = self._futures.popleft()
        try:
            result = future.result()
        finally:
            _HELD.add(-size_bytes)
        release_memory_after(size_bytes)
        self.fill()
        return result

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        _HELD.add(-sum(size_bytes for _, size_bytes in self._futures))


def prefetch(
    calls: Generator[Callable[[], T], None, None], *, workers: int = 1, depth: int = 2
) -> Generator[T, None, None]:
    """Yield the results of ``calls`` in order, made by ``workers`` threads, up to ``depth`` ahead.

    ``calls`` itself runs in the caller's thread, and so does a single call. An error of a call is
    raised in place of its result. Closing this generator closes ``calls``, cancels what has not
    begun, and leaves no thread.
    """
    with closing(calls):
        first = list(islice(calls, 2))
        if len(first) < 2:
            for call in first:
                yield call()
            return
        keep_memory()
        queue = _Queue(chain(first, calls), workers, depth)
        del first
        with closing(queue):
            while queue.fill():
                yield queue.take()
