"""Union state: every new subtask gets every entry, old subtasks in order.

So it says nothing about one subtask, and the plan names each handle once, for everyone. Since an entry may have been any
subtask's to keep, an operator of which some subtasks are finished may have no union state at all (a refusal).
"""

from __future__ import annotations

from .tables import EVERY, Handles, Slices


def share_union(handles: Handles) -> Slices:
    """Each handle with rows, whole, for every new subtask; in manifest order, which is that of the entries."""
    return Slices.whole(handles, EVERY)
