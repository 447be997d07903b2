"""A problem of a checkpoint as a JSON document."""

from __future__ import annotations

from typing import Any

from stateformat.problems import Problem


def problem_document(problem: Problem) -> dict[str, Any]:
    """One finding; members that do not apply to it are null."""
    return {
        "kind": str(problem.kind),
        "clause": problem.clause,
        "message": problem.message,
        "advice": problem.advice,
        "path": problem.path or None,
        "operator": problem.operator or None,
        "state": problem.state or None,
        "subtask": problem.subtask,
    }
