"""What a plan does with each operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from stateformat.graph import JobGraph, OperatorId, Status, shortened

from .rules import Match


class Action(StrEnum):
    """What becomes of an operator."""

    START = "start"
    SKIP_FINISHED = "skip_finished"
    NEW = "new"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class OperatorPlan:
    """One operator of the topology, or of the checkpoint alone (dropped).

    ``old_parallelism`` is the saved one, 0 for a new operator; ``parallelism`` and ``max_parallelism`` are the topology's,
    resolved, and 0 for a dropped one. ``status`` is what the checkpoint says, or what it was before a rescale; None for
    a new operator. ``saved_rows`` are the rows over all handles, in all layers.
    """

    uid: OperatorId
    name: str
    action: Action
    old_parallelism: int
    parallelism: int
    max_parallelism: int
    status: Status | None
    saved_rows: int = 0

    def __repr__(self) -> str:
        was = f"{self.old_parallelism} → {self.parallelism}"
        return f"OperatorPlan({shortened(self.uid)}, {self.action}, {was} of {self.max_parallelism})"

    @property
    def starts(self) -> bool:
        """Whether its subtasks are started."""
        return self.action in (Action.START, Action.NEW)


def operator_plans(match: Match, resolved: JobGraph) -> tuple[OperatorPlan, ...]:
    """The operators of the resolved topology in its order, then those of the checkpoint that it lacks."""
    return tuple(_plans(match, resolved))


def _plans(match: Match, resolved: JobGraph) -> Iterator[OperatorPlan]:
    saved_by_uid = match.record.graph.by_uid
    rows: dict[str, int] = {}
    for (uid, _), count in match.rows.items():
        rows[uid] = rows.get(uid, 0) + count
    for operator in resolved.operators:
        saved = saved_by_uid.get(operator.uid)
        status = match.statuses.get(operator.uid)
        if saved is None:
            action = Action.NEW
        else:
            action = Action.SKIP_FINISHED if status is Status.FULLY_FINISHED else Action.START
        yield OperatorPlan(
            uid=operator.uid,
            name=operator.display_name,
            action=action,
            old_parallelism=saved.parallelism if saved else 0,
            parallelism=operator.parallelism,
            max_parallelism=operator.max_parallelism or 0,
            status=status,
            saved_rows=rows.get(operator.uid, 0),
        )
    for operator in match.record.graph.operators:
        if operator.uid not in resolved.by_uid:
            yield OperatorPlan(
                uid=operator.uid,
                name=operator.display_name,
                action=Action.DROPPED,
                old_parallelism=operator.parallelism,
                parallelism=0,
                max_parallelism=0,
                status=match.statuses[operator.uid],
                saved_rows=rows.get(operator.uid, 0),
            )
