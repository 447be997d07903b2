"""Work done ahead of the loop that needs its results.

Rows are gathered while others are encoded, and ranges fetched while others are decoded. Order is kept, and no more than a
few results exist at a time, so memory is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class _End:
    """What stands for the end of the items."""


def ahead(items: Generator[T, None, None], *, depth: int = 2) -> Generator[T, None, None]:
    """The same items in their order, made in a thread of their own, at most ``depth`` before they are taken.

    The first two are made in the caller's thread, so that few items cost no thread. An error comes where its item would
    have come. When this generator ends or is closed, so is ``items``, and no thread is left. The thread gives speed only as
    far as making an item leaves the interpreter's lock, as work of pyarrow and of storages does.
    """
    pool: ThreadPoolExecutor | None = None
    try:
        first, second = next(items, _End), next(items, _End)
        if second is not _End:
            pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stateformat-ahead")
            waiting: deque[Future[T | type[_End]]] = deque(pool.submit(next, items, _End) for _ in range(depth))
        if not isinstance(first, type):
            yield first
        if pool is None or isinstance(second, type):
            return
        yield second
        while not isinstance(item := waiting.popleft().result(), type):
            waiting.append(pool.submit(next, items, _End))
            yield item
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        items.close()
