"""Work done ahead of the loop that needs its results.

Rows are gathered while others are encoded, and pieces fetched and decoded while others are used. Order is kept, and no more
than a few results exist at a time, so memory is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def ahead(
    calls: Generator[Callable[[], T], None, None], *, workers: int = 1, depth: int = 2
) -> Generator[T, None, None]:
    """The results of ``calls`` in their order, made by ``workers`` threads, at most ``depth`` before they are taken.

    ``calls`` itself runs in the caller's thread, and one call alone does too. With one worker calls never overlap. An error
    of a call comes where its result would have come. When this generator ends or is closed, so is ``calls``; what has not
    begun by then never does, and no thread is left. Threads give speed only as far as calls leave the interpreter's lock,
    as work of pyarrow and of storages does.
    """
    pool: ThreadPoolExecutor | None = None
    try:
        first = list(islice(calls, 2))
        if len(first) < 2:
            for call in first:
                yield call()
            return
        pool = ThreadPoolExecutor(workers, thread_name_prefix="stateformat-ahead")
        waiting: deque[Future[T]] = deque(pool.submit(call) for call in first)
        waiting.extend(pool.submit(call) for call in islice(calls, depth - 2))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(call) for call in islice(calls, 1))
            yield result
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        calls.close()
