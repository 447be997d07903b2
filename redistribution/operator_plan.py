"""What a plan does with each operator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from stateformat.graph import JobGraph, OperatorId, Status, shortened

from .rules import Match


class Action(StrEnum):
    """What a plan does with an operator."""

    START = "start"
    SKIP_FINISHED = "skip_finished"
    NEW = "new"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class OperatorPlan:
    """One operator of the topology, or of the checkpoint alone (dropped)."""

    uid: OperatorId
    name: str
    action: Action
    old_parallelism: int
    """The saved parallelism; 0 for a new operator."""
    parallelism: int
    """The resolved parallelism of the topology; 0 for a dropped operator."""
    max_parallelism: int
    """The resolved max parallelism of the topology; 0 for a dropped operator."""
    status: Status | None
    """The checkpoint's status, or the one before a rescale; None for a new operator."""
    saved_rows: int = 0
    """Rows over all handles and layers."""

    def __repr__(self) -> str:
        was = f"{self.old_parallelism} → {self.parallelism}"
        return f"OperatorPlan({shortened(self.uid)}, {self.action}, {was} of {self.max_parallelism})"

    @property
    def starts(self) -> bool:
        """Whether its subtasks are started."""
        return self.action in (Action.START, Action.NEW)


def operator_plans(match: Match, resolved: JobGraph) -> tuple[OperatorPlan, ...]:
    """Plan the operators of the resolved topology in its order, then those not in it."""
    rows: Counter[str] = Counter()
    for (uid, _), count in match.rows.items():
        rows[uid] += count
    saved_by_uid = match.record.graph.by_uid
    plans = []
    for operator in resolved.operators:
        saved, status = saved_by_uid.get(operator.uid), match.statuses.get(operator.uid)
        started = Action.NEW if saved is None else Action.START
        plans.append(
            OperatorPlan(
                uid=operator.uid,
                name=operator.display_name,
                action=Action.SKIP_FINISHED if status is Status.FULLY_FINISHED else started,
                old_parallelism=saved.parallelism if saved else 0,
                parallelism=operator.parallelism,
                max_parallelism=operator.max_parallelism or 0,
                status=status,
                saved_rows=rows[operator.uid],
            )
        )
    for saved in match.record.graph.operators:
        if saved.uid not in resolved.by_uid:
            status, saved_rows = match.statuses[saved.uid], rows[saved.uid]
            plans.append(
                OperatorPlan(saved.uid, saved.display_name, Action.DROPPED, saved.parallelism, 0, 0, status, saved_rows)
            )
    return tuple(plans)
