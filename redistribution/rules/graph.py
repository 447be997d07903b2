"""What the graph requires of finished operators (FLIP-147), by the edges of the topology.

Statuses are the checkpoint's; edges are the topology's, since the new job uses those. After a
rescale the record calls a partially finished operator *running*; the rules use the status from
``rescaled_from``. Publishing enforces the same rules (``stateformat.rules.statuses``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from stateformat.graph import JobGraph, Operator, Status
from stateformat.rules.statuses import Unequal, Unfit, chains, cycle, unequal_parallelism, unfit_predecessors

from .refusals import PlanWarning, Refusal, RefusalCode, WarningCode


def topology_refusals(topology: JobGraph, statuses: Mapping[str, Status]) -> Iterator[Refusal]:
    """Refuse repeated uids and edges, unknown operators, cycles, and unequal parallelisms.

    Operators that are not started may differ in parallelism: nothing flows into or out of them.
    """
    invalid = RefusalCode.INVALID_TOPOLOGY
    for uid in _repeated(operator.uid for operator in topology.operators):
        message = f"operator {uid!r} is twice in the topology"
        yield Refusal(invalid, uid, message, "give each operator a uid of its own", {"uid": uid})
    for edge_id in _repeated(edge.id for edge in topology.edges):
        message, target = f"edge {edge_id!r} is twice in the topology", topology.by_edge[edge_id].target
        yield Refusal(invalid, target, message, "give each edge an id of its own", {"edge": edge_id})
    for edge in topology.edges:
        ends = [topology.by_uid.get(uid) for uid in (edge.source, edge.target)]
        if None in ends:
            missing = edge.source if ends[0] is None else edge.target
            message = f"edge {edge.id!r} joins operator {missing!r}, which the topology does not have"
            details = {"edge": edge.id, "missing": missing}
            yield Refusal(invalid, missing, message, "add the operator or remove the edge", details)
    circle = cycle(topology)
    if circle:
        message = f"the topology has a cycle without a feedback edge: {' → '.join(circle)}"
        advice = "mark the edge that closes the loop as a feedback edge"
        yield Refusal(invalid, circle[0], message, advice, {"cycle": list(circle)})
    for found in unequal_parallelism(topology, statuses):
        yield _unequal(found)


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _unequal(found: Unequal) -> Refusal:
    numbers = {str(operator.uid): operator.parallelism for operator in found.members}
    details = {"parallelism": list(numbers.values()), "operators": list(numbers)}
    uid = found.members[0].uid
    return Refusal(RefusalCode.PARALLELISM_DIFFERS, uid, str(found), "give them one parallelism", details)


def predecessor_refusals(topology: JobGraph, statuses: Mapping[str, Status]) -> Iterator[Refusal]:
    """Refuse finished operators whose predecessors are not finished enough."""
    return (_predecessor_refusal(unfit) for unfit in unfit_predecessors(topology, statuses))


def _predecessor_refusal(unfit: Unfit) -> Refusal:
    uid, found = unfit.operator.uid, unfit.predecessor_status
    full = unfit.status is Status.FULLY_FINISHED
    code = RefusalCode.FULLY_FINISHED_PREDECESSOR if full else RefusalCode.PARTIALLY_FINISHED_PREDECESSOR
    advice = f"give {uid!r} a new uid so that it starts anew, or restore from a checkpoint from before it finished"
    details = {
        "status": unfit.status.value,
        "predecessor": unfit.predecessor,
        "predecessor_status": "new" if found is None else found.value,
        "all_to_all": unfit.all_to_all,
    }
    return Refusal(code, uid, str(unfit), advice, details)


def unchain(
    topology: JobGraph, statuses: Mapping[str, Status]
) -> tuple[JobGraph, tuple[str, ...], list[Refusal], list[PlanWarning]]:
    """Break up chains whose operators differ in status.

    Operators with the same status stay chained; their chain is named after the old one and the
    status. A chain with a pinned operator is left as it is and refused.

    Returns the topology, the names of the broken chains, refusals and warnings.
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
        differ = "; ".join(
            f"{', '.join(repr(str(operator.uid)) for operator in part)} {'are' if len(part) > 1 else 'is'} "
            f"{status.replace('_', ' ')}"
            for status, part in parts.items()
        )
        pinned = [operator for operator in members if operator.pinned]
        if pinned:
            message = f"chain {chain!r} is pinned, but its operators differ in status: {differ}"
            advice = "do not pin the chain, so that it can be broken up"
            details = {"chain": chain, "operators": [str(operator.uid) for operator in members]}
            refusals.append(Refusal(RefusalCode.CHAIN_PINNED, pinned[0].uid, message, advice, details))
            continue
        broken.append(chain)
        for status, part in parts.items():
            name = f"{chain}/{status}" if len(part) > 1 else None
            changes |= {operator.uid: replace(operator, chain=name) for operator in part}
        message = f"chain {chain!r} is broken up, since its operators differ in status: {differ}"
        warnings.append(PlanWarning(WarningCode.UNCHAINED, members[0].uid, message))
    operators = tuple(changes.get(operator.uid, operator) for operator in topology.operators)
    return replace(topology, operators=operators), tuple(broken), refusals, warnings


def disturbed(topology: JobGraph, redistributed: Iterable[str]) -> set[str]:
    """Return the operators and all that are downstream of them over forward and rescale edges."""
    reached = set(redistributed)
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
