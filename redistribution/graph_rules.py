"""What the graph demands of finished operators (FLIP-147), by the edges of the topology.

Statuses are the checkpoint's; edges are the topology's, since the new job runs along them. After a rescale every subtask of
a partially finished operator runs again, so its record says *running*; the rules take the status that it had, which
``rescaled_from`` keeps. An operator that the checkpoint does not know is new and counts as running. Feedback edges count
for none of this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from redistribution.refusals import PlanWarning, Refusal, RefusalCode, WarningCode
from stateformat.model import Edge, JobGraph, Operator, Partitioner, Record, Status


def saved_statuses(record: Record) -> dict[str, Status]:
    """The status of every operator of a checkpoint, by uid; for a rescaled one the former status where that said more."""
    statuses: dict[str, Status] = {operator.uid: operator.status for operator in record.graph.operators}
    for former in record.rescaled_from.operators if record.rescaled_from else ():
        if statuses.get(former.uid) is Status.RUNNING and (former.finished or former.finishing):
            statuses[former.uid] = Status.PARTIALLY_FINISHED
    return statuses


def inputs_by_target(graph: JobGraph) -> dict[str, list[Edge]]:
    """Edges by the operator that they lead into, feedback edges left out."""
    inputs: dict[str, list[Edge]] = defaultdict(list)
    for edge in graph.edges:
        if not edge.feedback:
            inputs[edge.target].append(edge)
    return inputs


def topology_refusals(topology: JobGraph, statuses: Mapping[str, Status]) -> Iterator[Refusal]:
    """What is wrong with a topology by itself: uids, edges, and equal parallelisms where they must be equal.

    Operators that are not started count for no equality: nothing flows into or out of them, and they keep their numbers.
    """
    for uid in _repeated(operator.uid for operator in topology.operators):
        yield Refusal(
            RefusalCode.INVALID_TOPOLOGY,
            uid,
            f"operator {uid!r} stands twice in the topology",
            "give each operator a uid of its own",
            {"uid": uid},
        )
    for edge_id in _repeated(edge.id for edge in topology.edges):
        yield Refusal(
            RefusalCode.INVALID_TOPOLOGY,
            topology.by_edge[edge_id].target,
            f"edge {edge_id!r} stands twice in the topology",
            "give each edge an id of its own",
            {"edge": edge_id},
        )
    for edge in topology.edges:
        ends = [topology.by_uid.get(uid) for uid in (edge.source, edge.target)]
        if None in ends:
            missing = edge.source if ends[0] is None else edge.target
            yield Refusal(
                RefusalCode.INVALID_TOPOLOGY,
                missing,
                f"edge {edge.id!r} joins operator {missing!r}, which the topology does not have",
                "add the operator or remove the edge",
                {"edge": edge.id, "missing": missing},
            )
        elif edge.partitioner is Partitioner.FORWARD:
            yield from _unequal(f"forward edge {edge.id!r}", [end for end in ends if end], statuses)
    for chain, members in _chains(topology).items():
        yield from _unequal(f"chain {chain!r}", members, statuses)


def _repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return list(dict.fromkeys(name for name in names if name in seen or seen.add(name)))  # type: ignore[func-returns-value]


def _unequal(what: str, members: list[Operator], statuses: Mapping[str, Status]) -> Iterator[Refusal]:
    started = [operator for operator in members if statuses.get(operator.uid) is not Status.FULLY_FINISHED]
    if len({operator.parallelism for operator in started}) > 1:
        numbers = {str(operator.uid): operator.parallelism for operator in started}
        yield Refusal(
            RefusalCode.PARALLELISM_DIFFERS,
            started[0].uid,
            f"{what} joins operators of different parallelism: "
            + ", ".join(f"{uid!r} has {number}" for uid, number in numbers.items()),
            "give them one parallelism",
            {"parallelism": list(numbers.values()), "operators": list(numbers)},
        )


def predecessor_refusals(topology: JobGraph, statuses: Mapping[str, Status]) -> Iterator[Refusal]:
    """Finished operators whose predecessors are not finished enough.

    A fully finished operator wants every predecessor fully finished. A partially finished one wants the same over an
    ALL_TO_ALL edge: a subtask could not have ended before all of the predecessor's. Over POINTWISE edges alone it wants
    some finished subtask. A predecessor with edges of both sorts is judged by the ALL_TO_ALL one.
    """
    inputs = inputs_by_target(topology)
    for operator in topology.operators:
        status = statuses.get(operator.uid, Status.RUNNING)
        if status is Status.RUNNING:
            continue
        edges: dict[str, list[Edge]] = defaultdict(list)
        for edge in inputs.get(operator.uid, ()):
            edges[edge.source].append(edge)
        for source, joining in edges.items():
            all_to_all = any(edge.partitioner.all_to_all for edge in joining)
            found = statuses.get(source)
            if found is Status.FULLY_FINISHED:
                continue
            if status is Status.PARTIALLY_FINISHED and not all_to_all and found is Status.PARTIALLY_FINISHED:
                continue
            yield _predecessor_refusal(operator, status, source, found, all_to_all=all_to_all)


def _predecessor_refusal(
    operator: Operator, status: Status, source: str, found: Status | None, *, all_to_all: bool
) -> Refusal:
    is_what = "is new" if found is None else f"is {found.replace('_', ' ')}"
    full = status is Status.FULLY_FINISHED
    wanted = "fully finished" if full or all_to_all else "partially finished at least"
    over = "" if full else f", over {'an ALL_TO_ALL edge' if all_to_all else 'POINTWISE edges'}"
    return Refusal(
        RefusalCode.FULLY_FINISHED_PREDECESSOR if full else RefusalCode.PARTIALLY_FINISHED_PREDECESSOR,
        operator.uid,
        f"operator {operator.uid!r} is {status.replace('_', ' ')}, but its predecessor {source!r}{over} {is_what} "
        f"and would have to be {wanted}",
        f"give {operator.uid!r} a new uid so that it starts anew, or restore from a checkpoint from before it finished",
        {
            "status": status.value,
            "predecessor": source,
            "predecessor_status": "new" if found is None else found.value,
            "all_to_all": all_to_all,
        },
    )


def unchain(
    topology: JobGraph, statuses: Mapping[str, Status]
) -> tuple[JobGraph, tuple[str, ...], list[Refusal], list[PlanWarning]]:
    """The topology with chains broken up whose operators differ in status; which these are; refusals and warnings.

    Operators of one status stay chained, under the name of the old chain and that status; one alone is in no chain. A
    chain with a pinned operator is left as it is and refused.
    """
    changes: dict[str, Operator] = {}
    broken: list[str] = []
    refusals: list[Refusal] = []
    warnings: list[PlanWarning] = []
    for chain, members in _chains(topology).items():
        parts: dict[Status, list[Operator]] = defaultdict(list)
        for operator in members:
            parts[statuses.get(operator.uid, Status.RUNNING)].append(operator)
        if len(parts) < 2:
            continue
        told = "; ".join(
            f"{', '.join(repr(str(operator.uid)) for operator in part)} {'are' if len(part) > 1 else 'is'} "
            f"{status.replace('_', ' ')}"
            for status, part in parts.items()
        )
        pinned = [operator for operator in members if operator.pinned]
        if pinned:
            refusals.append(
                Refusal(
                    RefusalCode.CHAIN_PINNED,
                    pinned[0].uid,
                    f"chain {chain!r} is pinned, but its operators differ in status: {told}",
                    "do not pin the chain, so that it can be broken up",
                    {"chain": chain, "operators": [str(operator.uid) for operator in members]},
                )
            )
            continue
        broken.append(chain)
        for status, part in parts.items():
            name = f"{chain}/{status}" if len(part) > 1 else None
            changes |= {operator.uid: replace(operator, chain=name) for operator in part}
        warnings.append(
            PlanWarning(
                WarningCode.UNCHAINED,
                members[0].uid,
                f"chain {chain!r} is broken up, since its operators differ in status: {told}",
            )
        )
    operators = tuple(changes.get(operator.uid, operator) for operator in topology.operators)
    return replace(topology, operators=operators), tuple(broken), refusals, warnings


def _chains(topology: JobGraph) -> dict[str, list[Operator]]:
    chains: dict[str, list[Operator]] = defaultdict(list)
    for operator in topology.operators:
        if operator.chain is not None:
            chains[operator.chain].append(operator)
    return chains


def disturbed(topology: JobGraph, dealt_anew: Iterable[str]) -> set[str]:
    """The operators given and all that hear them point to point, over any number of forward and rescale edges."""
    reached = set(dealt_anew)
    targets: dict[str, list[str]] = defaultdict(list)
    for edge in topology.edges:
        if not edge.partitioner.all_to_all and not edge.feedback:
            targets[edge.source].append(edge.target)
    waiting = list(reached)
    while waiting:
        for target in targets.get(waiting.pop(), ()):
            if target not in reached:
                reached.add(target)
                waiting.append(target)
    return reached
