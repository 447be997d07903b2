"""What a topology may not do to a checkpoint, and what a checkpoint may not contain: each rule a function of refusals.

Nothing here raises for a fault of the two; a plan collects every refusal, so that one look shows all there is to change.
Rules of the graph stand in ``rules.graph``. Two notions of "exists" are used on purpose: what would be *lost* (the state of
a missing operator, in-flight records) is refused only where there are rows; what would be *misread* (keys, schemas) is
refused wherever it is declared, so that a restore does not depend on whether a state happened to be empty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from stateformat.errors import InvalidInput
from stateformat.graph import Edge, JobGraph, Operator, Partitioner, Status, SubtaskSet
from stateformat.keys import DEFAULT_KEY_HASH, MAX_PARALLELISM_LIMIT, default_max_parallelism
from stateformat.model import Mode, Record, State
from stateformat.rules import inputs_by_target
from stateformat.states import column_name, evolution_faults, split_drop
from stateformat.states.continuation import check_columns_known

from ..columns import ColumnAction, ColumnPlan, column_plans, lost_columns
from .refusals import Refusal, RefusalCode

_DECLARED_BY_PROGRAMS = frozenset({Mode.KEYED, Mode.EVEN_SPLIT, Mode.UNION, Mode.BROADCAST})
"""Modes of states that a program declares by name. The others come and go with sinks, coordinators and edges."""


@dataclass(frozen=True)
class Match:
    """A checkpoint beside the topology that it is to be restored into.

    ``statuses`` are those of ``graph_rules.saved_statuses``; ``rows`` the rows of each state of the record by (operator,
    name), over all of its handles; ``wanted`` the states that the new program declares, by (operator, name); ``drop``
    what the caller gives up: uids of operators that the topology lacks, ``uid/state`` and ``uid/state.column``.
    """

    record: Record
    topology: JobGraph
    statuses: Mapping[str, Status]
    rows: Mapping[tuple[str, str], int]
    wanted: Mapping[tuple[str, str], State]
    drop: Collection[str]

    @cached_property
    def _kept(self) -> Mapping[str, list[State]]:
        found: dict[str, list[State]] = defaultdict(list)
        for state in self.record.states:
            if not self.dropped(state):
                found[state.operator].append(state)
        return found

    @cached_property
    def _parted(self) -> tuple[list[str], dict[tuple[str, str], frozenset[str]]]:
        return split_drop([name for name in self.drop if name not in self.record.graph.by_uid], self.record.states)

    @property
    def given_up(self) -> Mapping[tuple[str, str], frozenset[str]]:
        """The columns that the caller gives up, by (operator, state); some may be gone already."""
        return self._parted[1]

    @property
    def drop_whole(self) -> list[str]:
        """What the caller gives up of operators and states."""
        return [*(name for name in self.drop if name in self.record.graph.by_uid), *self._parted[0]]

    @cached_property
    def columns(self) -> Mapping[tuple[str, str], tuple[ColumnPlan, ...]]:
        """What becomes of the columns of each state that is declared, or of which some are given up, by (operator, state).

        Those of operators that have finished, and of states that no part of the topology takes, become nothing.
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
        """Whether the caller gives this state up."""
        return state.operator in self.drop or f"{state.operator}/{state.name}" in self.drop

    def kept(self, uid: str) -> Sequence[State]:
        """The states of an operator that are not given up."""
        return self._kept.get(uid, ())

    def rows_of(self, state: State) -> int:
        """Rows over all handles of a state."""
        return self.rows.get((state.operator, state.name), 0)

    def has_keys(self, uid: str) -> bool:
        """Whether key groups of an operator mean something: a keyed state is declared, or keyed records are in flight."""
        return any(
            state.mode is Mode.KEYED or (state.mode is Mode.IN_FLIGHT and state.key_columns and self.rows_of(state) > 0)
            for state in self.kept(uid)
        )

    @cached_property
    def restarted(self) -> Sequence[tuple[Operator, Operator]]:
        """Operators of the topology that the checkpoint has and that are to be started, each with what was saved."""
        saved = self.record.graph.by_uid
        return [
            (operator, saved[operator.uid])
            for operator in self.topology.operators
            if operator.uid in saved and self.statuses[operator.uid] is not Status.FULLY_FINISHED
        ]


def check_drop(match: Match) -> None:
    """``InvalidInput`` for an entry of ``drop`` that gives up nothing that can be given up: the caller's slip."""
    for (uid, state_name), columns in match.given_up.items():
        state = match.record.state(uid, state_name)
        keys = columns & {*state.key_columns, "_map_key"}
        if keys:
            raise InvalidInput(
                f"column {sorted(keys)[0]!r} is a key of state {state_name!r} of operator {uid!r}; keys are never dropped",
                operator=uid,
            )
        check_columns_known(state, columns)
    for name in match.drop_whole:
        if name in match.record.graph.by_uid:
            if name in match.topology.by_uid:
                raise InvalidInput(
                    f"operator {name!r} is in the topology, so it cannot be dropped; drop a state of it as '{name}/STATE', "
                    "or give it a new uid",
                    operator=name,
                )
        elif not any(f"{state.operator}/{state.name}" == name for state in match.record.states):
            raise InvalidInput(
                f"nothing to drop under {name!r}: checkpoint {match.record.checkpoint_id} has the operators "
                f"{', '.join(match.record.graph.by_uid) or 'none'}; a state is named UID/STATE, a column UID/STATE.COLUMN",
                operator=name,
            )


def resolve(operator: Operator, saved: Operator | None, *, finished: bool) -> Operator:
    """The operator as it will run: what the topology leaves open is adopted from the checkpoint, or the default.

    For a fully finished operator max parallelism means nothing any more and is raised to its parallelism at least.
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


def parallelism_refusals(match: Match) -> Iterator[Refusal]:
    """Numbers outside 1 … 32768 and, for operators that are started, parallelism above max parallelism."""
    for operator in match.topology.operators:
        uid, wanted, chosen = operator.uid, operator.parallelism, operator.max_parallelism
        saved = match.record.graph.by_uid.get(uid)
        finished = match.statuses.get(uid) is Status.FULLY_FINISHED
        numbers = {"parallelism": wanted} | ({} if chosen is None or finished else {"max parallelism": chosen})
        wrong = {what: number for what, number in numbers.items() if not 1 <= number <= MAX_PARALLELISM_LIMIT}
        for what, number in wrong.items():
            yield Refusal(
                RefusalCode.INVALID_PARALLELISM,
                uid,
                f"operator {uid!r} is asked for {what} {number}, which is not within 1 to {MAX_PARALLELISM_LIMIT}",
                "choose a number within the range",
                {what.replace(" ", "_"): number},
            )
        if wrong or finished:
            continue
        ceiling = chosen if chosen is not None else saved.max_parallelism if saved else None
        if ceiling is not None and wanted > ceiling:
            yield Refusal(
                RefusalCode.PARALLELISM_ABOVE_MAX,
                uid,
                f"operator {uid!r} is asked for parallelism {wanted}, but its max parallelism is {ceiling}"
                + ("" if chosen is not None else " (adopted from the checkpoint)"),
                f"choose at most {ceiling}, or raise the max parallelism of the checkpoint with `ckpt rewrite`",
                {"parallelism": wanted, "max_parallelism": ceiling, "adopted": chosen is None},
            )


def key_refusals(match: Match) -> Iterator[Refusal]:
    """Key groups that would mean something else, or would not meet their records: max parallelism, hash, edges."""
    inputs = inputs_by_target(match.topology)
    for operator, saved in match.restarted:
        uid = operator.uid
        if not match.has_keys(uid):
            continue
        if operator.max_parallelism is not None and operator.max_parallelism != saved.max_parallelism:
            yield Refusal(
                RefusalCode.MAX_PARALLELISM_CHANGED,
                uid,
                f"operator {uid!r} has keyed state of max parallelism {saved.max_parallelism} and is asked for "
                f"{operator.max_parallelism}",
                "leave it open to adopt the saved one, or change the checkpoint with "
                f"`ckpt rewrite --max-parallelism {operator.max_parallelism}`",
                {"saved": saved.max_parallelism, "wanted": operator.max_parallelism},
            )
        before = saved.key_hash or DEFAULT_KEY_HASH
        if operator.key_hash is not None and operator.key_hash != before:
            yield Refusal(
                RefusalCode.KEY_HASH_CHANGED,
                uid,
                f"operator {uid!r} has keyed state hashed by {before!r} and is asked for {operator.key_hash!r}",
                "leave it open to adopt the saved one; a key hash never changes",
                {"saved": before, "wanted": operator.key_hash},
            )
        pointwise = [edge for edge in inputs.get(uid, ()) if not edge.partitioner.all_to_all]
        keyed = [state.name for state in match.kept(uid) if state.mode is Mode.KEYED]
        if operator.parallelism != saved.parallelism and pointwise and keyed:
            yield Refusal(
                RefusalCode.KEYED_BEHIND_POINTWISE,
                uid,
                f"operator {uid!r} has keyed state {keyed[0]!r} behind {pointwise[0].partitioner} edge {pointwise[0].id!r}, "
                f"which does not send by key; it cannot go from parallelism {saved.parallelism} to {operator.parallelism}",
                f"keep parallelism {saved.parallelism}, or put a hash edge before the operator",
                {
                    "saved": saved.parallelism,
                    "wanted": operator.parallelism,
                    "edge": pointwise[0].id,
                    "state": keyed[0],
                },
            )


def state_refusals(match: Match) -> Iterator[Refusal]:
    """States that nobody would take, or that the new program could not read."""
    for operator in match.record.graph.operators:
        # How far the inputs of an operator had come is nothing to lose once it is gone: a stateless one may leave the job.
        held = [state for state in match.kept(operator.uid) if state.mode is not Mode.PROGRESS]
        lost = {state.name: match.rows_of(state) for state in held if match.rows_of(state)}
        if operator.uid not in match.topology.by_uid and lost:
            yield Refusal(
                RefusalCode.OPERATOR_MISSING,
                operator.uid,
                f"operator {operator.uid!r} is not in the topology, but the checkpoint holds state of it: "
                + ", ".join(f"{name!r} with {_counted(rows, 'row')}" for name, rows in lost.items()),
                "keep the operator under this uid, give its state another one with "
                f"`ckpt rewrite --rename {operator.uid}=NEW`, or give it up with drop={str(operator.uid)!r}",
                {"states": list(lost), "rows": sum(lost.values())},
            )
    declares = {operator for operator, _ in match.wanted}
    for operator, _ in match.restarted:
        for state in match.kept(operator.uid):
            wanted = match.wanted.get((state.operator, state.name))
            if wanted is not None:
                # What is in flight is the runtime's: where nothing is, nobody reads what an edge once carried.
                if state.mode is not Mode.IN_FLIGHT or match.rows_of(state):
                    yield from _schema_refusal(match, state, wanted)
                continue
            by_name = state.mode in _DECLARED_BY_PROGRAMS and operator.uid in declares
            if state.mode is Mode.COORDINATOR and not operator.coordinator:
                yield from _missing_refusal(match, state, "has no coordinator")
            elif by_name:
                yield from _missing_refusal(match, state, "declares no such state")
            elif state.mode is Mode.COMMITTABLES and operator.uid in declares:
                yield from _missing_refusal(match, state, "is no sink that could commit them")
    for uid, status in match.statuses.items():
        if status is Status.FULLY_FINISHED and uid in match.topology.by_uid:
            for state in match.kept(uid):
                wanted = match.wanted.get((uid, state.name))
                if state.mode is not Mode.COMMITTABLES or not match.rows_of(state):
                    continue
                if wanted is not None:
                    yield from _schema_refusal(match, state, wanted)
                elif uid in declares:
                    yield from _missing_refusal(match, state, "is no sink that could commit them")


def _missing_refusal(match: Match, state: State, lacks: str) -> Iterator[Refusal]:
    """The rows of a state that its operator does not take; none where there are none."""
    rows = match.rows_of(state)
    if rows:
        yield Refusal(
            RefusalCode.STATE_MISSING,
            state.operator,
            f"the checkpoint holds {state.mode} state {state.name!r} of operator {state.operator!r} with "
            f"{_counted(rows, 'row')}, but the operator now {lacks}",
            f"declare it again, or give it up with drop='{state.operator}/{state.name}'",
            {"state": state.name, "mode": state.mode.value, "rows": rows},
        )


def _schema_refusal(match: Match, saved: State, wanted: State) -> Iterator[Refusal]:
    faults = evolution_faults(saved, wanted)
    columns = match.columns.get((saved.operator, saved.name), ())
    if faults:
        values = [item.name for item in saved.current.fields if item.name not in (*saved.key_columns, "_map_key")]
        changed = [
            plan.saved
            for plan in columns
            if plan.action is ColumnAction.REFUSED and plan.column and plan.saved in values
        ]
        begins_anew = (
            f"give the values of {', '.join(map(repr, changed))} up with {_drops(saved, changed)} and begin with "
            f"{'new columns' if len(changed) > 1 else 'a new column'}, "
            if changed
            else ""
        )
        yield Refusal(
            RefusalCode.SCHEMA_CANNOT_EVOLVE,
            saved.operator,
            f"state {saved.name!r} of operator {saved.operator!r} cannot be read as it is now declared: {'; '.join(faults)}",
            f"declare what the saved state can become, {begins_anew}or give the whole state up with "
            f"drop='{saved.operator}/{saved.name}'",
            {"state": saved.name, "faults": faults},
        )
    lost = [name for name in lost_columns(columns) if name not in saved.key_columns]
    if lost and (saved.mode, saved.kind) == (wanted.mode, wanted.kind):
        yield _column_refusal(saved, lost)


def _column_refusal(saved: State, lost: Sequence[str]) -> Refusal:
    """Columns that the checkpoint has and that nobody has named, though the program lacks them."""
    plural, they, them = ("s", "they are", "them") if len(lost) > 1 else ("", "it is", "it")
    renames = f"say what {they} called now with renames={{{lost[0]!r}: 'NEW'}} where the state is declared, "
    return Refusal(
        RefusalCode.COLUMN_MISSING,
        saved.operator,
        f"state {saved.name!r} of operator {saved.operator!r} has the column{plural} {', '.join(map(repr, lost))} in the "
        f"checkpoint, which the program does not declare: {'their' if plural else 'its'} values would be lost",
        f"declare {them} again, {renames if saved.mode in _DECLARED_BY_PROGRAMS else ''}or give {them} up with "
        + _drops(saved, lost),
        {"state": saved.name, "columns": list(lost)},
    )


def _drops(state: State, columns: Sequence[str | None]) -> str:
    return ", ".join(f"drop='{column_name(state, str(name))}'" for name in columns)


def in_flight_refusals(match: Match) -> Iterator[Refusal]:
    """In-flight records on an edge that may hold none, that is gone, or that would deliver them elsewhere."""
    for operator, saved in match.restarted:
        for state in match.kept(operator.uid):
            if state.mode is Mode.IN_FLIGHT and match.rows_of(state):
                before = match.record.graph.by_edge.get(state.edge or "")
                after = match.topology.by_edge.get(state.edge or "")
                found = _in_flight_fault(state, before, after, same=operator.parallelism == saved.parallelism)
                if found:
                    code, fault, advice = found
                    yield Refusal(
                        code,
                        operator.uid,
                        f"operator {operator.uid!r} has {_counted(match.rows_of(state), 'record')} in flight on edge {state.edge!r}, "
                        + fault,
                        advice,
                        {"edge": state.edge or "", "state": state.name, "rows": match.rows_of(state)}
                        | ({} if operator.parallelism == saved.parallelism else {"saved": saved.parallelism}),
                    )


def _in_flight_fault(
    state: State, before: Edge | None, after: Edge | None, *, same: bool
) -> tuple[RefusalCode, str, str] | None:
    give_up = f"or give the records up with drop='{state.operator}/{state.name}'"
    if before is None or (not before.feedback and before.partitioner not in (Partitioner.HASH, Partitioner.REBALANCE)):
        what = (
            "which the checkpoint's graph does not have" if before is None else f"which is a {before.partitioner} edge"
        )
        return (
            RefusalCode.IN_FLIGHT_NOT_ALLOWED,
            f"{what}; only hash, rebalance and feedback edges may hold records",
            f"restore from another checkpoint, {give_up}",
        )
    if after is None or after.target != state.operator:
        return (
            RefusalCode.IN_FLIGHT_EDGE_MISSING,
            "which does not lead into it any more" if after else "which the topology does not have",
            f"keep the edge for the next restore, {give_up}",
        )
    if (after.partitioner, after.key_columns, after.feedback) != (
        before.partitioner,
        before.key_columns,
        before.feedback,
    ):
        return (
            RefusalCode.IN_FLIGHT_EDGE_CHANGED,
            f"which was {_told(before)} and would be {_told(after)}",
            f"keep the edge as it was for the next restore, {give_up}",
        )
    if before.partitioner is Partitioner.BROADCAST and not same:
        return (
            RefusalCode.IN_FLIGHT_BROADCAST,
            "a broadcast feedback edge, and every subtask has its own copy of them; the parallelism cannot change",
            f"keep the parallelism for the next restore, {give_up}",
        )
    return None


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _told(edge: Edge) -> str:
    keys = f" by {', '.join(edge.key_columns)}" if edge.key_columns else ""
    return f"{edge.partitioner}{keys}{', feedback' if edge.feedback else ''}"
