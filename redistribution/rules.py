"""What a topology may not do to a checkpoint: each rule yields refusals, which are findings.

A plan collects them all, so the user sees everything that has to change at once. The rules of a
graph and of handles are those of ``stateformat.rules``, said in the words of a restore. The others
are here.

What would be *lost* (the state of a missing operator, in-flight records) is refused if it has rows.
What would be *misread* (keys, schemas) is refused wherever it is declared, so a restore does not
depend on whether a state happens to be empty.

Statuses are the checkpoint's; edges are the topology's, since the new job uses those. After a
rescale the record calls a partially finished operator *running*; the rules use the status from
``rescaled_from``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

from stateformat import rules, words
from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput
from stateformat.findings import Finding
from stateformat.graph import Edge, JobGraph, Operator, Partitioner, Status, SubtaskSet
from stateformat.keys import DEFAULT_KEY_HASH, MAX_PARALLELISM_LIMIT, default_max_parallelism
from stateformat.model import PER_SUBTASK_MODES, Mode, Record, State
from stateformat.rules import Reporters
from stateformat.schema import has_key_groups
from stateformat.states import check_columns_known, column_name, evolution_faults, split_drop
from stateformat.ttl import TTL_COLUMN, Ttl

from .columns import ColumnAction, ColumnPlan, column_plans, lost_columns
from .tables import Handles, damaged

_VALIDATE: Final = "`ckpt validate` lists everything that is wrong with the checkpoint; restore from another one"


def refusal(
    kind: ErrorKind, operator: str, message: str, advice: str, details: Mapping[str, Any] | None = None
) -> Finding:
    """Return one reason why a restore is refused. ``details``: the values, for programs."""
    return Finding(kind, "", message, advice, operator=operator, details=details or {})


def warning(kind: ErrorKind, operator: str, message: str) -> Finding:
    """Return something that the plan does and that the caller may not expect."""
    return Finding(kind, "", message, "", operator=operator, severity="warning")


# ---- the checkpoint ------------------------------------------------------------------------------
#
# Publishing enforces these rules and ``ckpt validate`` reports them. A planner checks them again,
# because a plan for a checkpoint that contradicts itself would lose state silently.


def checkpoint_refusals(record: Record, states: Sequence[State], handles: Sequence[StateHandles]) -> Iterator[Finding]:
    """Refuse union state of finished subtasks, contradicting statuses, and missing handles.

    ``states`` are the record's in byte order; ``handles`` is what stands in the manifest of each.
    """
    for state in states:
        operator = record.graph.operator(state.operator)
        if state.mode is Mode.UNION and operator.status is Status.PARTIALLY_FINISHED:
            done = len(operator.finished) + len(operator.finishing)
            message = (
                f"operator {operator.uid!r} has union state {state.name!r}, but {done} of its {operator.parallelism} "
                "subtasks are finished, and their entries are lost"
            )
            advice = "restore from a checkpoint from before they finished, or keep that state in another mode"
            details = {"state": state.name, "done": done, "parallelism": operator.parallelism}
            yield refusal(ErrorKind.UNION_PARTIALLY_FINISHED, operator.uid, message, advice, details)
    for operator in record.graph.operators:
        yield from _range_refusals(operator)
    of_states = [
        (state, record.graph.operator(state.operator), found) for state, found in zip(states, handles, strict=True)
    ]
    reporting = [of_state for of_state in of_states if of_state[0].mode in PER_SUBTASK_MODES]
    for state, operator, found in reporting:
        yield from _unwanted(state, operator, found.reporters.outside, "are not subtasks of it")
    for state, operator, found in reporting:
        yield from _unwanted(state, operator, found.reporters.ended, "are finished or finishing")
    for state, _, found in reporting:
        yield from _absent(state, found.reporters.missing)
    for state, operator, found in of_states:
        if state.mode is Mode.COORDINATOR:
            yield from _coordinator(state, operator, found.count)


@dataclass(frozen=True, slots=True)
class StateHandles:
    """What the manifest has of a state."""

    count: int
    """Its handles."""
    rows: int
    reporters: Reporters


def check_state(state: State, operator: Operator, handles: Handles) -> StateHandles:
    """Return what the handles of a state hold.

    Raises ``DamagedCheckpoint`` for groups of another subtask, or in two handles of a layer: either
    would silently lose or duplicate rows (SPEC.md sections 4.3 and 5.3).
    """
    if has_key_groups(state):
        # The rule of the mode refuses groups that do not exist.
        exists = handles.last_group < (operator.max_parallelism or 0)
        _check_groups(operator, handles.where(exists & (handles.rows > 0)))
    found = rules.reporters(operator, handles.subtask, handles.layer)
    return StateHandles(len(handles), int(handles.rows.sum()), found)


def _check_groups(operator: Operator, handles: Handles) -> None:
    moved, shared = rules.misplaced_groups(
        operator, handles.subtask, handles.layer, handles.first_group, handles.last_group
    )
    if len(moved):
        at = int(moved[0])
        low, high = rules.owned_groups(operator, int(handles.subtask[at]))
        groups = f"{handles.first_group[at]} to {handles.last_group[at]}"
        what = f"has key groups {groups}, but its subtask {handles.subtask[at]} owns {low} to {high}"
        raise damaged(int(handles.number[at]), what)
    if len(shared):
        number = int(handles.number[shared[0]])
        raise damaged(number, "shares key groups with another handle of its subtask and layer")


def check_owners(record: Record, states: Sequence[State]) -> None:
    """Raise ``DamagedCheckpoint`` for a state whose operator is not in the graph."""
    for state in states:
        if state.operator not in record.graph.by_uid:
            raise DamagedCheckpoint(
                f"state {state.name!r} of operator {state.operator!r} belongs to an operator that the graph of "
                f"checkpoint {record.checkpoint_id} lacks; `ckpt validate` lists everything that is wrong",
                kind=ErrorKind.UNKNOWN_OPERATOR,
                operator=state.operator,
                state=state.name,
            )


def _range_refusals(operator: Operator) -> Iterator[Finding]:
    ranges = sorted((*operator.finished.ranges, *operator.finishing.ranges))
    disjoint = all(one[1] < other[0] for one, other in pairwise(ranges))
    within = all(0 <= first <= last < operator.parallelism for first, last in ranges)
    if not (disjoint and within):
        message = (
            f"operator {operator.uid!r} has parallelism {operator.parallelism} and is said to be finished in "
            f"{operator.finished or 'none'} and finishing in {operator.finishing or 'none'}, which "
            + ("overlap" if within else "are not all subtasks of it")
        )
        details = {"finished": str(operator.finished), "finishing": str(operator.finishing)}
        yield refusal(ErrorKind.STATUS_CONTRADICTION, operator.uid, message, _VALIDATE, details)


def _unwanted(state: State, operator: Operator, subtasks: SubtaskSet, why: str) -> Iterator[Finding]:
    if subtasks:
        message = (
            f"operator {operator.uid!r} of parallelism {operator.parallelism} has {state.mode} state {state.name!r} of "
            f"subtasks {subtasks}, which {why}"
        )
        details = {"state": state.name, "subtasks": str(subtasks)}
        yield refusal(ErrorKind.STATUS_CONTRADICTION, operator.uid, message, _VALIDATE, details)


def _absent(state: State, subtasks: SubtaskSet) -> Iterator[Finding]:
    if subtasks:
        message = (
            f"operator {state.operator!r} has no handle of {state.mode} state {state.name!r} for its running subtasks "
            f"{subtasks}; that is damage, since empty state has handles too"
        )
        details = {"state": state.name, "subtasks": str(subtasks)}
        yield refusal(ErrorKind.HANDLE_MISSING, state.operator, message, _VALIDATE, details)


def _coordinator(state: State, operator: Operator, count: int) -> Iterator[Finding]:
    wanted = 0 if operator.status is Status.FULLY_FINISHED else 1
    if count != wanted:
        kind = ErrorKind.HANDLE_MISSING if count < wanted else ErrorKind.STATUS_CONTRADICTION
        message = (
            f"operator {operator.uid!r} is {operator.status.replace('_', ' ')} and has {count} handles of its "
            f"coordinator's state {state.name!r}, not {wanted}"
        )
        yield refusal(kind, operator.uid, message, _VALIDATE, {"state": state.name, "handles": count})


# ---- the topology --------------------------------------------------------------------------------


def topology_refusals(topology: JobGraph, statuses: Mapping[str, Status]) -> Iterator[Finding]:
    """Refuse repeated uids and edges, unknown operators, cycles, and unequal parallelisms."""
    invalid = ErrorKind.INVALID_TOPOLOGY
    for found in rules.repeated_names(topology):
        if "uid" in found.details:
            message = f"operator {found.operator!r} is twice in the topology"
            yield _said(found, invalid, found.operator, "give each operator a uid of its own", message)
        else:
            edge_id = found.details["edge"]
            message, target = f"edge {edge_id!r} is twice in the topology", topology.by_edge[edge_id].target
            yield _said(found, invalid, target, "give each edge an id of its own", message)
    for edge in topology.edges:
        for found in [*rules.missing_ends(edge, topology)][:1]:
            message = f"edge {edge.id!r} joins operator {found.operator!r}, which the topology does not have"
            yield _said(found, invalid, found.operator, "add the operator or remove the edge", message)
    for found in rules.cycles(topology, "the topology"):
        advice = "mark the edge that closes the loop as a feedback edge"
        yield _said(found, invalid, found.details["cycle"][0], advice)
    for found in rules.unequal_parallelism(topology, statuses):
        first = found.details["operators"][0]
        yield _said(found, ErrorKind.PARALLELISM_DIFFERS, first, "give them one parallelism")


def predecessor_refusals(topology: JobGraph, statuses: Mapping[str, Status]) -> Iterator[Finding]:
    """Refuse finished operators whose predecessors are not finished enough (FLIP-147)."""
    for found in rules.unfit_predecessors(topology, statuses):
        uid, full = found.operator, found.details["status"] == Status.FULLY_FINISHED
        kind = ErrorKind.FULLY_FINISHED_PREDECESSOR if full else ErrorKind.PARTIALLY_FINISHED_PREDECESSOR
        advice = f"give {uid!r} a new uid so that it starts anew, or restore from a checkpoint from before it finished"
        yield _said(found, kind, uid, advice)


def _said(found: Finding, kind: ErrorKind, operator: str, advice: str, message: str = "") -> Finding:
    """Return the finding of a rule that validation has too, in the words of a restore."""
    return refusal(kind, operator, message or found.message, advice, found.details)


def unchain(
    topology: JobGraph, statuses: Mapping[str, Status]
) -> tuple[JobGraph, tuple[str, ...], list[Finding], list[Finding]]:
    """Break up chains whose operators differ in status.

    Operators with the same status stay chained; their chain is named after the old one and the
    status. A chain with a pinned operator is left as it is and refused.

    Returns the topology, the names of the broken chains, refusals and warnings.
    """
    changes: dict[str, Operator] = {}
    broken: list[str] = []
    refusals: list[Finding] = []
    warnings: list[Finding] = []
    for chain, members in rules.chains(topology).items():
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
            refusals.append(refusal(ErrorKind.CHAIN_PINNED, pinned[0].uid, message, advice, details))
            continue
        broken.append(chain)
        for status, part in parts.items():
            name = f"{chain}/{status}" if len(part) > 1 else None
            changes |= {operator.uid: replace(operator, chain=name) for operator in part}
        message = f"chain {chain!r} is broken up, since its operators differ in status: {differ}"
        warnings.append(warning(ErrorKind.UNCHAINED, members[0].uid, message))
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


# ---- numbers, keys, states, records in flight ----------------------------------------------------

_DECLARED_BY_PROGRAMS = frozenset({Mode.KEYED, Mode.EVEN_SPLIT, Mode.UNION, Mode.BROADCAST})
"""Modes of states that a program declares by name."""


_NO_SINK = "is not a sink that could commit them"


@dataclass(frozen=True)
class Match:
    """A checkpoint and the topology into which it is to be restored."""

    record: Record
    topology: JobGraph
    statuses: Mapping[str, Status]
    """``rules.saved_statuses`` of the record."""
    rows: Mapping[tuple[str, str], int]
    """The rows of each state over all handles, by (operator, name)."""
    wanted: Mapping[tuple[str, str], State]
    """The states that the new program declares, by (operator, name)."""
    drop: Collection[str]
    """What the caller gives up: ``uid``, ``uid/state`` or ``uid/state.column``."""
    foreign: bool = False
    """Whether the checkpoint is another system's, which is imported where a store is rewritten."""
    query: str = ""
    """The address of a query that ``ckpt rescale`` copies."""

    def changed(self, rewrite: str, imported: str = "") -> str:
        """Return the command that changes the checkpoint; options of an import may differ."""
        return f"`ckpt import {imported or rewrite} --to STORE`" if self.foreign else f"`ckpt rewrite {rewrite}`"

    @cached_property
    def _kept(self) -> Mapping[str, list[State]]:
        found: dict[str, list[State]] = defaultdict(list)
        for state in self.record.states:
            if not self.dropped(state):
                found[state.operator].append(state)
        return found

    @cached_property
    def _split_drop(self) -> tuple[list[str], dict[tuple[str, str], frozenset[str]]]:
        return split_drop(self.drop, self.record.states, self.record.graph.by_uid)

    @property
    def given_up(self) -> Mapping[tuple[str, str], frozenset[str]]:
        """The columns that the caller gives up, by (operator, state)."""
        return self._split_drop[1]

    @property
    def drop_whole(self) -> list[str]:
        """The operators and states that the caller gives up."""
        return self._split_drop[0]

    @cached_property
    def columns(self) -> Mapping[tuple[str, str], tuple[ColumnPlan, ...]]:
        """The plans for the columns of states that are declared or lose some, by (operator, state).

        States of finished operators, and those that the topology does not restore, are left out.
        """
        restarted = {operator.uid for operator, _ in self.restarted}
        found = {}
        for state in self.record.states:
            key = (state.operator, state.name)
            wanted, given_up = self.wanted.get(key), self.given_up.get(key, frozenset())
            takes = state.operator in (self.topology.by_uid if state.mode is Mode.COMMITTABLES else restarted)
            takes = takes and (state.mode is not Mode.IN_FLIGHT or self.rows_of(state) > 0)
            if takes and (wanted is not None or given_up) and not self.dropped(state):
                found[key] = column_plans(state, wanted, given_up)
        return found

    def dropped(self, state: State) -> bool:
        """Whether the caller gives up this state."""
        return not {state.operator, f"{state.operator}/{state.name}"}.isdisjoint(self.drop_whole)

    def kept(self, uid: str) -> Sequence[State]:
        """Return the states of an operator that are not given up."""
        return self._kept.get(uid, ())

    def rows_of(self, state: State) -> int:
        """Return the rows over all handles of a state."""
        return self.rows.get((state.operator, state.name), 0)

    def has_keys(self, uid: str) -> bool:
        """Whether an operator declares keyed state, or keyed records are in flight to it."""
        return any(
            state.mode is Mode.KEYED or (state.mode is Mode.IN_FLIGHT and state.key_columns and self.rows_of(state) > 0)
            for state in self.kept(uid)
        )

    @cached_property
    def restarted(self) -> Sequence[tuple[Operator, Operator]]:
        """The operators of the checkpoint that the topology starts, each with the saved one."""
        saved = self.record.graph.by_uid
        return [
            (operator, saved[operator.uid])
            for operator in self.topology.operators
            if operator.uid in saved and self.statuses[operator.uid] is not Status.FULLY_FINISHED
        ]


def check_drop(match: Match) -> None:
    """Raise ``InvalidInput`` for an entry of ``drop`` that names nothing that can be given up."""
    for (uid, state_name), columns in match.given_up.items():
        state = match.record.state(uid, state_name)
        keys = columns & {*state.key_columns, "_map_key"}
        if keys:
            what = f"column {sorted(keys)[0]!r} is a key of state {state_name!r} of operator {uid!r}"
            raise InvalidInput(f"{what}; keys are never dropped", operator=uid)
        check_columns_known(state, columns)
    for name in match.drop_whole:
        if name in match.record.graph.by_uid:
            if name in match.topology.by_uid:
                raise InvalidInput(
                    f"operator {name!r} is in the topology, so it cannot be dropped; drop a state of it as "
                    f"'{name}/STATE', or give it a new uid",
                    operator=name,
                )
        elif not any(f"{state.operator}/{state.name}" == name for state in match.record.states):
            raise InvalidInput(
                f"nothing to drop under {name!r}: checkpoint {match.record.checkpoint_id} has the operators "
                f"{', '.join(match.record.graph.by_uid) or 'none'}; a state is named UID/STATE, a column "
                "UID/STATE.COLUMN",
                operator=name,
            )


def resolve(operator: Operator, saved: Operator | None, *, finished: bool) -> Operator:
    """Fill in what the topology leaves open, from the checkpoint or by default.

    The max parallelism of a finished operator has no meaning and is at least its parallelism.
    """
    ceiling, key_hash = operator.max_parallelism, operator.key_hash
    if ceiling is None and saved is not None:
        ceiling = saved.max_parallelism
    if ceiling is None:
        ceiling = default_max_parallelism(min(max(operator.parallelism, 1), MAX_PARALLELISM_LIMIT))
    if finished:
        ceiling = max(ceiling, operator.parallelism)
    if key_hash is None:
        key_hash = (saved.key_hash if saved else None) or DEFAULT_KEY_HASH
    return replace(operator, max_parallelism=ceiling, key_hash=key_hash, finished=SubtaskSet(), finishing=SubtaskSet())


def parallelism_refusals(match: Match) -> Iterator[Finding]:
    """Refuse numbers outside 1 … 32768, and parallelism above max parallelism."""
    for operator in match.topology.operators:
        uid, wanted, chosen = operator.uid, operator.parallelism, operator.max_parallelism
        saved = match.record.graph.by_uid.get(uid)
        finished = match.statuses.get(uid) is Status.FULLY_FINISHED
        numbers = {"parallelism": wanted} | ({} if chosen is None or finished else {"max parallelism": chosen})
        wrong = {what: number for what, number in numbers.items() if not 1 <= number <= MAX_PARALLELISM_LIMIT}
        for what, number in wrong.items():
            message = f"operator {uid!r} is asked for {what} {number}, which is not within 1 to {MAX_PARALLELISM_LIMIT}"
            advice, details = "choose a number within the range", {what.replace(" ", "_"): number}
            yield refusal(ErrorKind.INVALID_PARALLELISM, uid, message, advice, details)
        if wrong or finished:
            continue
        ceiling = chosen if chosen is not None else saved.max_parallelism if saved else None
        if ceiling is not None and wanted > ceiling:
            adopted = " (adopted from the checkpoint)" if chosen is None else ""
            message = (
                f"operator {uid!r} is asked for parallelism {wanted}, but its max parallelism is {ceiling}{adopted}"
            )
            raised = match.changed(f"--max-parallelism {wanted}")
            advice = f"choose at most {ceiling}, or raise the max parallelism of the checkpoint with {raised}"
            if match.query:
                advice += f"; `ckpt rescale {match.query} --parallelism {wanted} --to COPY` copies the query itself"
            details = {"parallelism": wanted, "max_parallelism": ceiling, "adopted": chosen is None}
            yield refusal(ErrorKind.PARALLELISM_ABOVE_MAX, uid, message, advice, details)


def key_refusals(match: Match) -> Iterator[Finding]:
    """Refuse what separates key groups from their records: max parallelism, key hash, edges."""
    inputs = rules.inputs_by_target(match.topology)
    for operator, saved in match.restarted:
        uid = operator.uid
        if not match.has_keys(uid):
            continue
        if operator.max_parallelism is not None and operator.max_parallelism != saved.max_parallelism:
            saved_max, wanted_max = saved.max_parallelism, operator.max_parallelism
            message = f"operator {uid!r} has keyed state of max parallelism {saved_max} and is asked for {wanted_max}"
            changed = match.changed(f"--max-parallelism {wanted_max}")
            advice = f"leave it open to adopt the saved one, or change the checkpoint with {changed}"
            details: dict[str, object] = {"saved": saved_max, "wanted": wanted_max}
            yield refusal(ErrorKind.MAX_PARALLELISM_CHANGED, uid, message, advice, details)
        before = saved.key_hash or DEFAULT_KEY_HASH
        if operator.key_hash is not None and operator.key_hash != before:
            message = f"operator {uid!r} has keyed state hashed by {before!r} and is asked for {operator.key_hash!r}"
            advice = "leave it open to adopt the saved one; a key hash never changes"
            details = {"saved": before, "wanted": operator.key_hash}
            yield refusal(ErrorKind.KEY_HASH_CHANGED, uid, message, advice, details)
        pointwise = [edge for edge in inputs.get(uid, ()) if not edge.partitioner.all_to_all]
        keyed = [state.name for state in match.kept(uid) if state.mode is Mode.KEYED]
        if operator.parallelism != saved.parallelism and pointwise and keyed:
            edge, state = pointwise[0], keyed[0]
            message = (
                f"operator {uid!r} has keyed state {state!r} behind {edge.partitioner} edge {edge.id!r}, which does "
                f"not send by key; it cannot go from parallelism {saved.parallelism} to {operator.parallelism}"
            )
            advice = f"keep parallelism {saved.parallelism}, or put a hash edge before the operator"
            details = {"saved": saved.parallelism, "wanted": operator.parallelism, "edge": edge.id, "state": state}
            yield refusal(ErrorKind.KEYED_BEHIND_POINTWISE, uid, message, advice, details)


def state_refusals(match: Match) -> Iterator[Finding]:
    """Refuse states that no operator would take, or that the new program could not read."""
    for operator in match.record.graph.operators:
        # Progress of a removed operator is not a loss: a stateless operator may leave the job.
        held = [state for state in match.kept(operator.uid) if state.mode is not Mode.PROGRESS]
        lost = {state.name: match.rows_of(state) for state in held if match.rows_of(state)}
        if operator.uid not in match.topology.by_uid and lost:
            states = ", ".join(f"{name!r} with {_counted(rows, 'row')}" for name, rows in lost.items())
            message = (
                f"operator {operator.uid!r} is not in the topology, but the checkpoint holds state of it: {states}"
            )
            renamed = match.changed(f"--rename {operator.uid}=NEW", f"--map {operator.uid}=NEW")
            advice = (
                f"keep the operator under this uid, give its state another one with {renamed}, or give it up with "
                f"drop={str(operator.uid)!r}"
            )
            details = {"states": list(lost), "rows": sum(lost.values())}
            yield refusal(ErrorKind.OPERATOR_MISSING, operator.uid, message, advice, details)
    declares = {operator for operator, _ in match.wanted}
    for operator, _ in match.restarted:
        for state in match.kept(operator.uid):
            wanted = match.wanted.get((state.operator, state.name))
            if wanted is not None:
                # The schema of an edge matters only while records are in flight on it.
                if state.mode is not Mode.IN_FLIGHT or match.rows_of(state):
                    yield from _schema_refusal(match, state, wanted)
                continue
            if state.mode is Mode.COORDINATOR and not operator.coordinator:
                yield from _missing_refusal(match, state, "has no coordinator")
            elif state.mode in _DECLARED_BY_PROGRAMS and operator.uid in declares:
                yield from _missing_refusal(match, state, "declares no such state")
            elif state.mode is Mode.COMMITTABLES and operator.uid in declares:
                yield from _missing_refusal(match, state, _NO_SINK)
    for uid, status in match.statuses.items():
        if status is Status.FULLY_FINISHED and uid in match.topology.by_uid:
            for state in match.kept(uid):
                wanted = match.wanted.get((uid, state.name))
                if state.mode is not Mode.COMMITTABLES or not match.rows_of(state):
                    continue
                if wanted is not None:
                    yield from _schema_refusal(match, state, wanted)
                elif uid in declares:
                    yield from _missing_refusal(match, state, _NO_SINK)


def _missing_refusal(match: Match, state: State, lacks: str) -> Iterator[Finding]:
    rows = match.rows_of(state)
    if rows:
        message = (
            f"the checkpoint holds {state.mode} state {state.name!r} of operator {state.operator!r} with "
            f"{_counted(rows, 'row')}, but the operator now {lacks}"
        )
        place = f"{state.operator}/{state.name}"
        renamed = _renamed(match, state)
        if renamed is None:
            advice = f"declare it again, or give it up with drop='{place}'"
        else:
            advice = (
                f"the new state {renamed!r} has the same key: if it is this one under another name, `ckpt rewrite "
                f"--rename {place}={renamed}` gives it that name. Else declare it again, or give it up with "
                f"drop='{place}'"
            )
        details = {"state": state.name, "mode": state.mode.value, "rows": rows}
        yield refusal(ErrorKind.STATE_MISSING, state.operator, message, advice, details)


def _renamed(match: Match, state: State) -> str | None:
    """Return the only new state of the operator with the same mode, kind and key; None if none."""
    saved = {one.name for one in match.kept(state.operator)}

    def shape(one: State) -> object:
        return one.mode, one.kind, [(field.name, field.type) for field in one.current.fields if field.name in keys(one)]

    def keys(one: State) -> tuple[str, ...]:
        return (*one.key_columns, "_map_key")

    found = [
        name
        for (uid, name), one in match.wanted.items()
        if uid == state.operator and name not in saved and shape(one) == shape(state)
    ]
    return found[0] if len(found) == 1 else None


def _schema_refusal(match: Match, saved: State, wanted: State) -> Iterator[Finding]:
    faults = evolution_faults(saved, wanted)
    columns = match.columns.get((saved.operator, saved.name), ())
    if faults:
        values = [item.name for item in saved.current.fields if item.name not in (*saved.key_columns, "_map_key")]
        changed = [
            plan.saved
            for plan in columns
            if plan.action is ColumnAction.REFUSED and plan.column and plan.saved in values
        ]
        if saved.ttl is not None and wanted.ttl is not None and saved.ttl.clock != wanted.ttl.clock:
            changed.append(TTL_COLUMN)
        replace_values = ""
        if changed:
            names, new = ", ".join(map(repr, changed)), "new columns" if len(changed) > 1 else "a new column"
            replace_values = f"give the values of {names} up with {_drops(saved, changed)} and begin with {new}, "
        where = f"state {saved.name!r} of operator {saved.operator!r}"
        message = f"{where} cannot be read as it is now declared: {'; '.join(faults)}"
        drop = f"give the whole state up with drop='{saved.operator}/{saved.name}'"
        advice = f"declare what the saved state can become, {replace_values}or {drop}"
        details = {"state": saved.name, "faults": faults}
        yield refusal(ErrorKind.SCHEMA_CANNOT_EVOLVE, saved.operator, message, advice, details)
    lost = [name for name in lost_columns(columns) if name not in saved.key_columns]
    if lost and (saved.mode, saved.kind) == (wanted.mode, wanted.kind):
        if saved.ttl is not None and TTL_COLUMN in lost:
            yield _ttl_refusal(saved, saved.ttl)
            lost.remove(TTL_COLUMN)
        if lost:
            yield _column_refusal(saved, lost)


def _ttl_refusal(saved: State, ttl: Ttl) -> Finding:
    """Refuse to let rows that expire live forever unless the program says so."""
    message = (
        f"rows of state {saved.name!r} of operator {saved.operator!r} expire {words.duration(ttl.duration_us)} after "
        "their last access in the checkpoint, and the program declares no ttl for it: they would live for ever"
    )
    advice = (
        f"declare the ttl again; or say so where the state is declared (drops=[{TTL_COLUMN!r}]), or with "
        f"{_drops(saved, [TTL_COLUMN])}"
    )
    details = {"state": saved.name, "columns": [TTL_COLUMN]}
    return refusal(ErrorKind.COLUMN_MISSING, saved.operator, message, advice, details)


def _column_refusal(saved: State, lost: Sequence[str]) -> Finding:
    """Refuse to lose columns that the program neither declares nor gives up."""
    plural, them = ("s", "them") if len(lost) > 1 else ("", "it")
    changes = (
        f"say what became of {them} where the state is declared (renames={{{lost[0]!r}: 'NEW'}} or drops={[*lost]}), "
    )
    message = (
        f"state {saved.name!r} of operator {saved.operator!r} has the column{plural} {', '.join(map(repr, lost))} in "
        f"the checkpoint, which the program does not declare: {'their' if plural else 'its'} values would be lost"
    )
    changes = changes if saved.mode in _DECLARED_BY_PROGRAMS else ""
    advice = f"declare {them} again, {changes}or give {them} up with {_drops(saved, lost)}"
    details = {"state": saved.name, "columns": list(lost)}
    return refusal(ErrorKind.COLUMN_MISSING, saved.operator, message, advice, details)


def _drops(state: State, columns: Sequence[str | None]) -> str:
    return ", ".join(f"drop='{column_name(state, str(name))}'" for name in columns)


def in_flight_refusals(match: Match) -> Iterator[Finding]:
    """Refuse in-flight records on an edge that may hold none, is gone or has changed."""
    for operator, saved in match.restarted:
        for state in match.kept(operator.uid):
            if state.mode is Mode.IN_FLIGHT and match.rows_of(state):
                before = match.record.graph.by_edge.get(state.edge or "")
                after = match.topology.by_edge.get(state.edge or "")
                same = operator.parallelism == saved.parallelism
                found = _in_flight_fault(state, before, after, same=same)
                if found:
                    code, fault, advice = found
                    records = f"{_counted(match.rows_of(state), 'record')} in flight on edge {state.edge!r}"
                    details = {"edge": state.edge or "", "state": state.name, "rows": match.rows_of(state)}
                    details |= {} if same else {"saved": saved.parallelism}
                    yield refusal(
                        code, operator.uid, f"operator {operator.uid!r} has {records}, {fault}", advice, details
                    )


def _in_flight_fault(
    state: State, before: Edge | None, after: Edge | None, *, same: bool
) -> tuple[ErrorKind, str, str] | None:
    give_up = f"or give the records up with drop='{state.operator}/{state.name}'"
    if before is None or (not before.feedback and before.partitioner not in (Partitioner.HASH, Partitioner.REBALANCE)):
        what = f"which is a {before.partitioner} edge" if before else "which the checkpoint's graph does not have"
        fault = f"{what}; only hash, rebalance and feedback edges may hold records"
        return ErrorKind.IN_FLIGHT_NOT_ALLOWED, fault, f"restore from another checkpoint, {give_up}"
    if after is None or after.target != state.operator:
        fault = "which no longer leads into it" if after else "which the topology does not have"
        return ErrorKind.IN_FLIGHT_EDGE_MISSING, fault, f"keep the edge for the next restore, {give_up}"
    if any(getattr(after, name) != getattr(before, name) for name in ("partitioner", "key_columns", "feedback")):
        fault = f"which was {_edge_text(before)} and would be {_edge_text(after)}"
        return ErrorKind.IN_FLIGHT_EDGE_CHANGED, fault, f"keep the edge as it was for the next restore, {give_up}"
    if before.partitioner is Partitioner.BROADCAST and not same:
        fault = "a broadcast feedback edge, and every subtask has its own copy of them; the parallelism cannot change"
        return ErrorKind.IN_FLIGHT_BROADCAST, fault, f"keep the parallelism for the next restore, {give_up}"
    return None


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _edge_text(edge: Edge) -> str:
    keys = f" by {', '.join(edge.key_columns)}" if edge.key_columns else ""
    return f"{edge.partitioner}{keys}{', feedback' if edge.feedback else ''}"
