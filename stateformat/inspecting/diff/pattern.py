"""Whether changes are spread like the rows, or are in a few key groups, which would be unusual."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ...manifest import Ints

MORE: Final = 0.2
"""How much greater the share of the changes must be than that of the rows …"""
TIMES: Final = 1.5
"""… and in each key group of a place, how many times that of the rows."""
WITHIN: Final = 0.5
"""The greatest share of the rows that is still a place."""
FEW: Final = 10
"""How many rows each key group is assumed to have in addition, so that a few rows make no
pattern.
"""
DISPERSION: Final = 3.0
"""How much more than by chance the counts must vary: the ratio of their variance to that of rows
which change at random.
"""


class Pattern(NamedTuple):
    """Key groups that have many of the changes, though they had few of the rows."""

    ranges: tuple[tuple[int, int], ...]
    changes: float
    """Their share of the changes, 0 to 1."""
    rows: float | None
    """Their share of the rows before; None if there were none, or they are not counted."""


def pattern_of(changes: Ints, rows: Ints | None) -> Pattern | None:
    """Return the key groups where the changes are; None if changes are spread like the rows.

    Args:
        changes: changed rows of each key group.
        rows: stored rows of each before the changes, since added rows do not explain why they were
            added there. None if unknown: then every group counts the same.
    """
    total = int(changes.sum())
    if not total or len(changes) < 2:
        return None
    weights = np.ones(len(changes), np.int64) if rows is None else rows + FEW
    share = weights / weights.sum()
    expected = total * share
    dispersion = float((((changes - expected) ** 2) / expected).sum()) / (len(changes) - 1)
    if dispersion <= DISPERSION:
        return None
    times = changes / expected
    order = np.argsort(-times, kind="stable")
    part, within = np.cumsum(changes[order]) / total, np.cumsum(share[order])
    # The groups that stand out most: with one more, the rows would grow by more than the changes.
    fit = (times[order] >= TIMES) & (within <= WITHIN)
    last = int(np.argmax(np.where(fit, part - within, 0.0)))
    if not fit[last] or part[last] - within[last] < MORE:
        return None
    chosen = np.sort(order[: last + 1])
    of_rows = None if rows is None or not rows.any() else float(rows[chosen].sum() / rows.sum())
    return Pattern(_ranges(chosen), float(part[last]), of_rows)


def _ranges(groups: Ints) -> tuple[tuple[int, int], ...]:
    begins = np.flatnonzero(np.append(True, np.diff(groups) > 1))
    ends = np.append(begins[1:], len(groups)) - 1
    return tuple(zip(groups[begins].tolist(), groups[ends].tolist(), strict=True))
