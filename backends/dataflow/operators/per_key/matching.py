"""Which elements a list had before it was changed."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Sequence


def places_before(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[int]:
    """Return for each element of ``new`` its place in ``old``, −1 if it is new.

    Places ascend, so an element that was moved counts as new. Among equal elements that could stay,
    the last do. Two searches, one from each end, find all that stay if the list was filtered or
    extended at one end, and most of them in any other case.
    """
    last = len(old) - 1
    backward = [place if place < 0 else last - place for place in _in_order(old[::-1], new[::-1])[::-1]]
    if -1 not in backward:
        return backward
    forward = _in_order(old, new)
    return forward if forward.count(-1) < backward.count(-1) else backward


def _in_order(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[int]:
    """Match each element with the first equal one after the previous match."""
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
