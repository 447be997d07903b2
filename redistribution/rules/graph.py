"""What the graph demands of finished operators (FLIP-147), by the edges of the topology.

Statuses are the checkpoint's; edges are the topology's, since the new job runs along them. After a rescale every subtask of
a partially finished operator runs again, so its record says *running*; the rules take the status that it had, which
``rescaled_from`` keeps. The rules themselves stand in ``stateformat.rules.statuses``, because a checkpoint that breaks them in
its own graph is refused when it is published.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from stateformat.graph import JobGraph, Operator, Status
from stateformat.rules import Unequal, Unfit, chains, cycle, unequal_parallelism, unfit_predecessors

from .refusals import PlanWarning, Refusal, RefusalCode, WarningCode


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
    circle = cycle(topology)
    if circle:
        yield Refusal(
            RefusalCode.INVALID_TOPOLOGY,
            circle[0],
            f"the topology has a cycle without a feedback edge: {' → '.join(circle)}",
            "mark the edge that closes the loop as a feedback edge",
            {"cycle": list(circle)},
        )
    for found in unequal_parallelism(topology, statuses):
        yield _unequal(found)


def _repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return list(dict.fromkeys(name for name in names if name in seen or seen.add(name)))  # type: ignore[func-returns-value]


def _unequal(found: Unequal) -> Refusal:
    numbers = {str(operator.uid): operator.parallelism for operator in found.members}
    return Refusal(
        RefusalCode.PARALLELISM_DIFFERS,
        found.members[0].uid,
        str(found),
        "give them one parallelism",
        {"parallelism": list(numbers.values()), "operators": list(numbers)},
    )


def predecessor_refusals(topology: JobGraph, statuses: Mapping[str, Status]) -> Iterator[Refusal]:
    """Finished operators whose predecessors are not finished enough (``stateformat.rules.statuses.unfit_predecessors``)."""
    return (_predecessor_refusal(unfit) for unfit in unfit_predecessors(topology, statuses))


def _predecessor_refusal(unfit: Unfit) -> Refusal:
    uid, found = unfit.operator.uid, unfit.predecessor_status
    full = unfit.status is Status.FULLY_FINISHED
    return Refusal(
        RefusalCode.FULLY_FINISHED_PREDECESSOR if full else RefusalCode.PARTIALLY_FINISHED_PREDECESSOR,
        uid,
        str(unfit),
        f"give {uid!r} a new uid so that it starts anew, or restore from a checkpoint from before it finished",
        {
            "status": unfit.status.value,
            "predecessor": unfit.predecessor,
            "predecessor_status": "new" if found is None else found.value,
            "all_to_all": unfit.all_to_all,
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
    for chain, members in chains(topology).items():
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
