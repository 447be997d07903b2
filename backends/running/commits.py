"""The second phase of sinks, in the driver: after a publication, before a start, and at the end of a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa

from backends.dataflow.api import Dataflow, TwoPhaseCommitSink
from backends.dataflow.compile import Job
from backends.dataflow.failures import Guard
from backends.dataflow.flow_states import COMMITTABLES
from backends.running.clock import Clock
from backends.running.outcome import RunDiscarded
from stateformat.errors import InvalidState
from stateformat.publication import CommitPermit

COMMIT_TRIES = 10
COMMIT_WAIT_US = 1_000_000
"""How often, and after how long, a sink is asked again for what it has put off when the job ends."""


def sinks_of(flow: Dataflow) -> dict[str, TwoPhaseCommitSink]:
    """The sinks of a dataflow, the prototypes that commit, by uid."""
    return {uid: step.logic for uid, step in flow.steps.items() if isinstance(step.logic, TwoPhaseCommitSink)}


def held(permit: CommitPermit | None, job: Job, sinks: Iterable[str]) -> dict[str, pa.Table]:
    """What a checkpoint holds of these sinks, to be committed, by uid, in the columns that they declare in the job; nothing of one
    without rows.
    """
    if permit is None or "committables" not in permit.record.required_features:
        return {}
    found = {}
    for uid in sinks:
        declared = job.state(uid, COMMITTABLES)
        if declared is not None and (uid, COMMITTABLES) in permit.record.by_state:
            rows = permit.checkpoint().read(uid, COMMITTABLES).table(as_schema=declared.current)
            if rows.num_rows:
                found[uid] = rows
    return found


def commit(
    permit: CommitPermit, sinks: Mapping[str, TwoPhaseCommitSink], rows_of: Mapping[str, pa.Table]
) -> dict[str, pa.Table]:
    """Let the sinks commit what a checkpoint holds of them; returns what they want to try again, by uid.

    Called after publishing, and before anything starts from a checkpoint; the same rows may come twice. Raises ``OperatorError``
    for what a sink raises.
    """
    again: dict[str, pa.Table] = {}
    for uid, rows in rows_of.items():
        with Guard(uid, None)("commit"):
            left = sinks[uid].commit(permit, rows)
            if left is not None and (not isinstance(left, pa.Table) or left.column_names != rows.column_names):
                raise InvalidState(
                    f"it returned {type(left).__name__} that is not rows of what it was given, and not None"
                )
        if left is not None and left.num_rows:
            again[uid] = left
    return again


def commit_rest(
    permit: CommitPermit, sinks: Mapping[str, TwoPhaseCommitSink], left: Mapping[str, pa.Table], clock: Clock
) -> None:
    """The job ends, so no checkpoint follows with which what sinks have put off could come again: try it until it is done.

    Raises ``RunDiscarded`` for a sink that puts it off again and again, ``OperatorError`` for what one raises.
    """
    for _ in range(COMMIT_TRIES):
        if not left:
            return
        clock.wait_until(clock.now_us() + COMMIT_WAIT_US)
        left = commit(permit, sinks, left)
    if left:
        uid, rows = next(iter(left.items()))
        raise RunDiscarded(
            f"sink {uid!r} has put off {rows.num_rows} committables of checkpoint {permit.ref.checkpoint_id} for {COMMIT_TRIES} "
            "times, and the job ends with it; they stay in the checkpoint, and the next start tries again",
            counted=True,
        )


__all__ = ["commit", "commit_rest", "held", "sinks_of"]
