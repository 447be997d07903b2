"""Which elements a list had before it was changed."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Sequence


def places_before(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[int]:
    """For each element of ``new`` its place in ``old``, −1 for one that is new.

    Places ascend, so an element that was put elsewhere is a new one. Of equal ones that could stay,
    the last do. Two searches, from each end, find all that stay of a list that was filtered, or to
    which was added at one end; of any other list most.
    """
    last = len(old) - 1
    backward = [place if place < 0 else last - place for place in _in_order(old[::-1], new[::-1])[::-1]]
    if -1 not in backward:
        return backward
    forward = _in_order(old, new)
    return forward if forward.count(-1) < backward.count(-1) else backward


def _in_order(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[int]:
    """Each element is the first equal one behind the one before."""
    places = defaultdict(list)
    for place, value in enumerate(old):
        places[value].append(place)
    found = []
    begin = 0
    for value in new:
        equal = places.get(value, ())
        at = bisect_left(equal, begin)
        found.append(equal[at] if at < len(equal) else -1)
        begin = found[-1] + 1 or begin
    return found
