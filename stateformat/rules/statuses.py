"""Rules of a job graph that validation and restore planning share (SPEC.md sections 3.4 and 3.5).

Statuses are an argument, because a plan checks a topology with the statuses of a checkpoint; an
operator without one is new and runs. All rules ignore feedback edges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from ..graph import Edge, JobGraph, Operator, Partitioner, Status
from ..model import RescaledFrom


def saved_statuses(graph: JobGraph, rescaled_from: RescaledFrom | None) -> dict[str, Status]:
    """Return the status of every operator by uid: before a rescale, if that says more."""
    # After a rescale all subtasks of a partially finished operator run again (section 6.4).
    statuses: dict[str, Status] = {operator.uid: operator.status for operator in graph.operators}
    for former in rescaled_from.operators if rescaled_from else ():
        if statuses.get(former.uid) is Status.RUNNING and (former.finished or former.finishing):
            statuses[former.uid] = Status.PARTIALLY_FINISHED
    return statuses


def inputs_by_target(graph: JobGraph) -> dict[str, list[Edge]]:
    """Return the edges by their target, without feedback edges."""
    inputs: dict[str, list[Edge]] = defaultdict(list)
    for edge in graph.edges:
        if not edge.feedback:
            inputs[edge.target].append(edge)
    return inputs


def chains(graph: JobGraph) -> dict[str, list[Operator]]:
    """Return the operators of each chain."""
    found: dict[str, list[Operator]] = defaultdict(list)
    for operator in graph.operators:
        if operator.chain is not None:
            found[operator.chain].append(operator)
    return found


def cycle(graph: JobGraph) -> Sequence[str]:
    """Return the uids along a cycle without a feedback edge, closed; empty if there is none."""
    upstream = {target: {edge.source for edge in edges} for target, edges in inputs_by_target(graph).items()}
    try:
        TopologicalSorter(upstream).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return ()


class Unequal(NamedTuple):
    """The ends of a forward edge, or the operators of a chain, that differ in parallelism."""

    what: str
    """``forward edge 'e'`` or ``chain 'c'``."""
    members: tuple[Operator, ...]

    def __str__(self) -> str:
        numbers = ", ".join(f"{operator.uid!r} has {operator.parallelism}" for operator in self.members)
        return f"{self.what} joins operators of different parallelism: {numbers}"


def unequal_parallelism(graph: JobGraph, statuses: Mapping[str, Status]) -> Iterator[Unequal]:
    """Yield forward edges and chains of started operators whose ends differ in parallelism."""
    for edge in graph.edges:
        ends = [graph.by_uid[uid] for uid in (edge.source, edge.target) if uid in graph.by_uid]
        if edge.partitioner is Partitioner.FORWARD and len(ends) == 2:
            yield from _unequal(f"forward edge {edge.id!r}", ends, statuses)
    for chain, members in chains(graph).items():
        yield from _unequal(f"chain {chain!r}", members, statuses)


def _unequal(what: str, members: Sequence[Operator], statuses: Mapping[str, Status]) -> Iterator[Unequal]:
    started = [operator for operator in members if statuses.get(operator.uid) is not Status.FULLY_FINISHED]
    if len({operator.parallelism for operator in started}) > 1:
        yield Unequal(what, tuple(started))


class Unfit(NamedTuple):
    """A finished operator whose predecessor has not finished enough."""

    operator: Operator
    status: Status
    predecessor: str
    predecessor_status: Status | None
    """None for a new operator."""
    all_to_all: bool

    def __str__(self) -> str:
        found = self.predecessor_status
        is_what = "is new" if found is None else f"is {found.replace('_', ' ')}"
        full = self.status is Status.FULLY_FINISHED
        wanted = "fully finished" if full or self.all_to_all else "partially finished at least"
        over = "" if full else f", over {'an ALL_TO_ALL edge' if self.all_to_all else 'POINTWISE edges'}"
        return (
            f"operator {self.operator.uid!r} is {self.status.replace('_', ' ')}, but its predecessor "
            f"{self.predecessor!r}{over} {is_what} and would have to be {wanted}"
        )


def unfit_predecessors(graph: JobGraph, statuses: Mapping[str, Status]) -> Iterator[Unfit]:
    """Yield finished operators whose predecessors have not finished enough (FLIP-147).

    Every predecessor of a fully finished operator must be fully finished. So must those of a
    partially finished one over an ALL_TO_ALL edge; over POINTWISE edges alone a predecessor needs
    at least one finished subtask.
    """
    inputs = inputs_by_target(graph)
    for operator in graph.operators:
        status = statuses.get(operator.uid, Status.RUNNING)
        if status is Status.RUNNING:
            continue
        joining: dict[str, bool] = {}
        for edge in inputs.get(operator.uid, ()):
            joining[edge.source] = joining.get(edge.source, False) or edge.partitioner.all_to_all
        for source, all_to_all in joining.items():
            found = statuses.get(source)
            enough = found is Status.FULLY_FINISHED or (
                status is Status.PARTIALLY_FINISHED and not all_to_all and found is Status.PARTIALLY_FINISHED
            )
            if not enough:
                yield Unfit(operator, status, source, found, all_to_all)
