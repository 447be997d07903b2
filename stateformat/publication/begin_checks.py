"""Check a checkpoint when it begins, before any state is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..errors import ErrorKind, InvalidInput
from ..findings import all_messages
from ..graph import JobGraph, Status, SubtaskSet, all_of
from ..model import RESERVED_PROPERTIES, RUN_PROPERTIES, State
from ..rules import check_duties, check_graph, check_states


def check_arguments(
    graph: JobGraph,
    states: Iterable[State],
    job_id: str,
    job_name: str,
    properties: Mapping[str, str],
    *,
    is_new: bool,
) -> tuple[State, ...]:
    """Return the states as a tuple. Raises ``InvalidInput`` for an argument of the wrong type."""
    if not isinstance(graph, JobGraph):
        raise InvalidInput(
            f"the graph is of type {type(graph).__name__}; give a JobGraph", kind=ErrorKind.INVALID_GRAPH
        )
    for what, text in (("job id", job_id), ("job name", job_name)):
        if not isinstance(text, str):
            raise InvalidInput(f"the {what} is {text!r}; give text")
    if not job_id:
        raise InvalidInput("the job id is empty; a store belongs to one job, by its id")
    if not isinstance(properties, Mapping):
        raise InvalidInput(f"properties are of type {type(properties).__name__}; give a mapping of text to text")
    for name, value in properties.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidInput(f"property {name!r} is {value!r}; names and values are text, so give {str(value)!r}")
        if is_new and name.startswith(RESERVED_PROPERTIES) and name not in RUN_PROPERTIES:
            raise InvalidInput(
                f"property {name!r} begins with {RESERVED_PROPERTIES!r}, which the format keeps for itself; choose "
                "another name"
            )
    return all_of(State, states, "the states of a checkpoint")


def check_beginning(graph: JobGraph, states: Sequence[State], parent: JobGraph | None, *, is_new: bool) -> None:
    """Raise ``InvalidInput`` with every fault of a complete graph and its states."""
    known = _with_finished(graph, parent)
    problems = [*check_graph(known), *check_states(known, states), *(check_duties(graph) if is_new else ())]
    if problems:
        raise InvalidInput(
            f"no checkpoint can begin with this job: {all_messages(problems)}",
            kind=problems[0].kind,
            problems=tuple(problems),
        )


def _with_finished(graph: JobGraph, parent: JobGraph | None) -> JobGraph:
    """Return the graph with the operators that had fully finished in ``parent`` finished."""
    changed = {}
    for before in parent.operators if parent else ():
        operator = graph.by_uid.get(before.uid)
        if operator is not None and operator.parallelism > 0 and before.status is Status.FULLY_FINISHED:
            ended = SubtaskSet.all(operator.parallelism)
            changed[operator.uid] = replace(operator, finished=ended, finishing=SubtaskSet())
    return graph.with_operators(changed)
