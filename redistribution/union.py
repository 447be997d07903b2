"""Union state: every new subtask gets every entry, in the order of the old subtasks.

The plan lists each handle once, for all. No operator with finished subtasks may have union state,
because any of them may have been the only one with an entry: ``rules.checkpoint`` refuses it.
"""

from __future__ import annotations

from .tables import EVERY, Handles, Slices


def share_union(handles: Handles) -> Slices:
    """Give each handle with rows to every new subtask, in manifest order."""
    return Slices.whole(handles, EVERY)
