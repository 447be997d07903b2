"""Progress: the watermark of each input of a subtask, and whether the input has ended.

A subtask keeps its own progress if it is settled (same parallelism, all subtasks run, no rescale in
between) and so is everything upstream of it over forward and rescale edges. Otherwise each new
subtask gets the rows of all, and its reader takes for each input the least watermark, ended only if
ended in all (SPEC.md section 6.2).

Upstream counts because, over a point-to-point edge, a subtask knows the watermark of a few
producers only. A producer that takes over splits from a slower one may send older records, which
would be dropped as late.
"""

from __future__ import annotations

from .tables import EVERY, Handles, Slices, States


def share_progress(handles: Handles, states: States) -> Slices:
    """Give subtasks their own handle of undisturbed states, and all handles of the others."""
    own = states.undisturbed[handles.state]
    kept = handles.where(own)
    return Slices.concat([Slices.whole(kept, kept.subtask), Slices.whole(handles.where(~own), EVERY)])
