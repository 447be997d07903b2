"""What differs between two job graphs: what counts as content, and what is placement.

Content is the operators, their statuses, and the edges. Placement is parallelism, max parallelism,
key hash, chain and name: a rescale changes the first, and loses nothing.

A rescale makes the subtasks of a partially finished operator running. Its record keeps the former
status, which is the one that counts here (SPEC.md sections 3.5 and 6.4). Finished subtasks are
compared one by one if both sides have the same number of subtasks, and as a status otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ...graph import Edge, Operator, Status, SubtaskSet
from ...model import Record

PLACEMENT: Final = ("name", "parallelism", "max_parallelism", "key_hash", "chain", "edge id")
"""Members of operators and edges that are not content."""


class MemberChange(NamedTuple):
    """A member of an operator or edge, on both sides, in its JSON form."""

    member: str
    before: Any
    after: Any

    @property
    def is_content(self) -> bool:
        """Whether it is content, and not placement."""
        return self.member not in PLACEMENT


class ElementChange(NamedTuple):
    """What happened to an operator (by uid), or to an edge (by its ends)."""

    change: str
    """added, removed, changed."""
    name: str
    members: tuple[MemberChange, ...] = ()
    was: str | None = None
    """The uid before, if a rewrite or import changed it."""

    @property
    def is_content(self) -> bool:
        """Whether any of it is content."""
        return self.change != "changed" or any(member.is_content for member in self.members)


@dataclass(frozen=True)
class GraphDiff:
    """What differs between two graphs."""

    operators: tuple[ElementChange, ...]
    edges: tuple[ElementChange, ...]

    @property
    def same(self) -> bool:
        """Whether no content differs."""
        return not any(change.is_content for change in (*self.operators, *self.edges))


def graph_diff(
    before: Record, after: Record, renames: Mapping[str, str], apart: Collection[str], only: str | None
) -> GraphDiff:
    """Compare two graphs.

    Args:
        before: the earlier record.
        after: the later one.
        renames: uids of ``before``, and what they are called now.
        apart: operators that are not compared, by today's uids.
        only: the one operator that is compared, with its edges; None for all.
    """
    mine = {renames.get(one.uid, one.uid): one for one in before.graph.operators}
    theirs = {one.uid: one for one in after.graph.operators}
    operators = []
    for uid in dict.fromkeys([*mine, *theirs]):
        if uid in apart or only not in (None, uid):
            continue
        old, new = mine.get(uid), theirs.get(uid)
        if old is None or new is None:
            operators.append(ElementChange("added" if old is None else "removed", uid))
            continue
        members = _operator_members(_status_of(old, before), _status_of(new, after), old, new)
        if members or old.uid != new.uid:
            operators.append(ElementChange("changed", uid, members, old.uid if old.uid != new.uid else None))

    def wanted(ends: _Ends) -> bool:
        both = {ends.source, ends.target}
        return both.isdisjoint(apart) and (only is None or only in both)

    sides = _edges(before, renames), _edges(after, {})
    places = sorted(ends for ends in {*sides[0], *sides[1]} if wanted(ends))
    edges = [change for ends in places for change in _edge_changes(ends, *(side.get(ends, []) for side in sides))]
    return GraphDiff(tuple(operators), tuple(edges))


class _Statuses(NamedTuple):
    """The status that counts, and the number of subtasks it is for."""

    status: Status
    parallelism: int
    finished: SubtaskSet
    finishing: SubtaskSet


def _status_of(operator: Operator, record: Record) -> _Statuses:
    former = [] if record.rescaled_from is None else record.rescaled_from.operators
    for one in former:
        if one.uid == operator.uid and operator.status is Status.RUNNING:
            status = Status.PARTIALLY_FINISHED if one.finished or one.finishing else Status.RUNNING
            return _Statuses(status, one.parallelism, one.finished, one.finishing)
    return _Statuses(operator.status, operator.parallelism, operator.finished, operator.finishing)


def _operator_members(before: _Statuses, after: _Statuses, old: Operator, new: Operator) -> tuple[MemberChange, ...]:
    found = [
        MemberChange(name, getattr(old, name), getattr(new, name))
        for name in ("name", "parallelism", "max_parallelism", "key_hash", "chain", "coordinator")
    ]
    found.append(MemberChange("status", before.status.value, after.status.value))
    if before.parallelism == after.parallelism:
        found += [
            MemberChange(name, _ranges(getattr(before, name)), _ranges(getattr(after, name)))
            for name in ("finished", "finishing")
        ]
    return tuple(member for member in found if member.before != member.after)


def _ranges(subtasks: SubtaskSet) -> list[list[int]]:
    return [list(pair) for pair in subtasks.ranges]


class _Ends(NamedTuple):
    """The ends of an edge, by today's uids."""

    source: str
    target: str
    input: int
    feedback: bool

    def __str__(self) -> str:
        where = f" (input {self.input})" if self.input else ""
        return f"{self.source} -> {self.target}{where}{', back' if self.feedback else ''}"


def _edges(record: Record, renames: Mapping[str, str]) -> dict[_Ends, list[Edge]]:
    found: dict[_Ends, list[Edge]] = {}
    for edge in sorted(record.graph.edges, key=lambda one: one.id):
        source, target = (renames.get(uid, uid) for uid in (edge.source, edge.target))
        found.setdefault(_Ends(source, target, edge.input, edge.feedback), []).append(edge)
    return found


def _edge_changes(ends: _Ends, before: list[Edge], after: list[Edge]) -> Iterator[ElementChange]:
    for old, new in zip(before, after, strict=False):
        members = [
            MemberChange("edge id", old.id, new.id),
            MemberChange("partitioner", old.partitioner.value, new.partitioner.value),
            MemberChange("key_columns", list(old.key_columns), list(new.key_columns)),
        ]
        changed = tuple(member for member in members if member.before != member.after)
        if changed:
            yield ElementChange("changed", str(ends), changed)
    yield from (ElementChange("removed", str(ends)) for _ in before[len(after) :])
    yield from (ElementChange("added", str(ends)) for _ in after[len(before) :])
