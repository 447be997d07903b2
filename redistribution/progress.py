"""Progress: the watermark that was seen per input, and whether the input has ended.

A subtask keeps its own where nothing that it hears was dealt anew: its operator is settled (same parallelism, nobody
finished or finishing, no rescale in between) and so is everything upstream of it over forward and rescale edges. Otherwise
each new subtask gets the rows of all, and whoever reads them takes per input the least watermark, ended only if ended in all
(SPEC.md section 6.2).

Why upstream counts: over a point-to-point edge a subtask knows the watermark of a few producers only. If a producer is given
the splits of another that was behind, what it sends may be older than what its consumer has seen, and would be dropped as
late. The least watermark of all is never too new. Over hash, rebalance and broadcast edges everyone has seen the least already.
"""

from __future__ import annotations

from .tables import EVERY, Handles, Slices, States


def share_progress(handles: Handles, states: States) -> Slices:
    """The own handle for undisturbed states, all handles for every subtask for the others."""
    own = states.undisturbed[handles.state]
    kept = handles.where(own)
    return Slices.concat([Slices.whole(kept, kept.subtask), Slices.whole(handles.where(~own), EVERY)])
