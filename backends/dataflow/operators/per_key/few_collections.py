"""Python's collector of cycles, made rarer while many objects are made at once.

A piece makes some hundred thousand tuples and objects, none of them garbage. By default the
collector looks at them every 700 new ones, which took two thirds of the time of a piece. What a
user's function leaves in cycles is still collected, a hundred thousand objects later.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_THRESHOLDS: Final = (100_000, 50, 1000)
_inside: Final[list[tuple[int, int, int]]] = []
"""What was set when each of those within came, in whatever thread; the first is what was before."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Within, collections are rare. A collector that is switched off stays so."""
    before = gc.get_threshold()
    _inside.append(before)
    if before[0]:
        gc.set_threshold(*map(max, _THRESHOLDS, before))
    try:
        yield
    finally:
        first = _inside.pop()
        if not _inside:
            gc.set_threshold(*first)
