"""Whether changes lie where the rows lie, or in a few key groups: what a person would call odd."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ...manifest import Ints

MOST: Final = 0.8
"""The share of the changes that makes a place theirs …"""
WITHIN: Final = 0.5
"""… if at most this share of the rows lies there."""
DISPERSION: Final = 3.0
"""How much more than by chance the counts must vary: the variance of the counts over that of rows
which change at random."""


class Pattern(NamedTuple):
    """Key groups in which most of the changes lie, though few of the rows do."""

    ranges: tuple[tuple[int, int], ...]
    changes: float
    """Their share of the changes, 0 to 1."""
    rows: float
    """Their share of the rows."""


def pattern_of(changes: Ints, rows: Ints | None) -> Pattern | None:
    """The key groups where the changes are; None where they are spread as the rows are.

    Args:
        changes: changed rows of each key group.
        rows: stored rows of each; None where nobody counts them: then each has as many.
    """
    total = int(changes.sum())
    weights = np.ones(len(changes)) if rows is None else np.maximum(rows, changes).astype(np.float64)
    used = np.flatnonzero(weights)
    if not total or len(used) < 2:
        return None
    share = weights[used] / weights.sum()
    expected = total * share
    dispersion = float((((changes[used] - expected) ** 2) / expected).sum()) / (len(used) - 1)
    if dispersion <= DISPERSION:
        return None
    rate = changes[used] / expected
    order = np.argsort(-rate, kind="stable")
    last = order[int(np.searchsorted(np.cumsum(changes[used][order]), MOST * total))]
    # A group that changes about as much as the last one belongs to them.
    chosen = used[rate >= rate[last] / 2]
    part = float(weights[chosen].sum() / weights.sum())
    if part > WITHIN:
        return None
    return Pattern(_ranges(chosen), float(changes[chosen].sum() / total), part)


def _ranges(groups: Ints) -> tuple[tuple[int, int], ...]:
    begins = np.flatnonzero(np.append(True, np.diff(groups) > 1))
    ends = np.append(begins[1:], len(groups)) - 1
    return tuple(zip(groups[begins].tolist(), groups[ends].tolist(), strict=True))
