"""What differs in what two checkpoints declare: their job graphs, and the columns of a state.

Content of a graph is the operators, their statuses, and the edges. Placement is parallelism, max
parallelism, key hash, chain and name: a rescale changes the first, and loses nothing. It makes the
subtasks of a partially finished operator running, but its record keeps the former status, which is
the one that counts here (SPEC.md sections 3.5 and 6.4). Finished subtasks are compared one by one
if both sides have the same number of subtasks, and as a status otherwise.

Within one job's history a field is the same if its id is, and otherwise if its name is. An id
counts only if the field had the same name on both sides at some time: after a rollback, or in
stores that merely share a job id, an id may mean two things.

Rows are compared in the columns of the later declaration. If a type differs, they are compared as
the wider one; if neither type can be widened to the other, the column is reported, and not
compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final, NamedTuple

from ..graph import Edge, Operator, Status, SubtaskSet
from ..model import Field, Record, SchemaVersion, State
from ..schema import children, nesting
from ..states import type_text, widening_faults

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


Names = Mapping[int, frozenset[str]]
_FRESH_IDS: Final = 1 << 30
"""Ids of fields that a side lacks begin here: no schema has so many."""


class ColumnChange(NamedTuple):
    """What happened to a column, or to a field in it (``place.name``)."""

    change: str
    """added, dropped, renamed, widened, narrowed, retyped, nullable, required or default."""
    column: str
    """Its name afterwards; its name before if it was dropped."""
    was: str | None = None
    """Its name before, if it was renamed; its default before, if that changed."""
    type: str | None = None
    """Afterwards; before if it was dropped."""
    type_was: str | None = None
    default: str | None = None

    @property
    def is_compared(self) -> bool:
        """Whether rows are compared in this column."""
        return self.change not in ("dropped", "retyped")


@dataclass(frozen=True)
class Columns:
    """The columns of two declarations, side by side."""

    changes: tuple[ColumnChange, ...]
    before: SchemaVersion
    """The schema that the earlier rows are read in, with the ids of their own state."""
    after: SchemaVersion
    """The same columns with the ids of the later state."""
    keys_alike: bool
    """Whether keys have the same types, and so the same hash."""


class _Pair(NamedTuple):
    old: Field | None
    new: Field | None


def side_by_side(before: State, after: State, *, by_id: bool) -> Columns:
    """Match the columns of two declarations with the same key columns."""
    matching = _Matching(_names(before) if by_id else {}, _names(after) if by_id else {})
    pairs = matching.pairs(before.current.fields, after.current.fields)
    fresh = count(_FRESH_IDS)
    shared = [both for pair in pairs if (both := _shared(pair, matching, fresh)) is not None]
    types = {pair.new.name: _bare(pair.old) == _bare(pair.new) for pair in pairs if pair.old and pair.new}
    return Columns(
        tuple(change for pair in pairs for change in _changes(pair, matching)),
        SchemaVersion(before.current.id, tuple(old for old, _ in shared)),
        SchemaVersion(after.current.id, tuple(new for _, new in shared)),
        all(types.get(name, False) for name in after.key_columns),
    )


def _bare(item: Field) -> object:
    """Return a type without what does not affect a hash: ids and names."""
    return item.type if isinstance(item.type, str) else (item.type[0], tuple(map(_bare, children(item))))


def _names(state: State) -> Names:
    """Return the names that each field id has had."""
    found: dict[int, set[str]] = {}
    for schema in state.schemas:
        for item in _all(schema.fields):
            found.setdefault(item.id, set()).add(item.name)
    return {number: frozenset(names) for number, names in found.items()}


def _all(fields: Iterable[Field]) -> Iterator[Field]:
    for item in fields:
        yield item
        yield from _all(children(item))


@dataclass(frozen=True)
class _Matching:
    """By id: the names that a field has had, on each side; empty if ids mean nothing."""

    old: Names
    new: Names

    def _is_known(self, field_id: int) -> bool:
        """Return whether an id is one field on both sides."""
        return bool(self.old.get(field_id, frozenset()) & self.new.get(field_id, frozenset()))

    def pairs(self, before: Sequence[Field], after: Sequence[Field]) -> list[_Pair]:
        """Return the fields in the order of ``after``, then those that only ``before`` has."""
        by_id = {item.id: item for item in before if self._is_known(item.id)}
        # A field that the other side once had and now lacks was dropped: another field may have its
        # name.
        by_name = {item.name: item for item in before if not self._is_known(item.id)}
        found = []
        for item in after:
            old = by_id.get(item.id) if self._is_known(item.id) else by_name.get(item.name)
            found.append(_Pair(old, item))
        taken = {pair.old.id for pair in found if pair.old is not None}
        return [*found, *(_Pair(item, None) for item in before if item.id not in taken)]

    def inner(self, old: Field, new: Field) -> list[_Pair]:
        """Return the pairs of nested fields; those of lists and maps by position."""
        if isinstance(new.type, str) or new.type[0] == "struct":
            return self.pairs(children(old), children(new))
        return [_Pair(*pair) for pair in zip(children(old), children(new), strict=True)]


def _shared(pair: _Pair, matching: _Matching, fresh: Iterator[int]) -> tuple[Field, Field] | None:
    """Return what a field is compared as, in the ids of either side; None if it is not compared."""
    old, new = pair
    if new is None:
        return None
    if old is None:
        missing = _with_fresh_ids(new, fresh)
        return replace(missing, nullable=True), new
    if isinstance(old.type, str) and isinstance(new.type, str):
        if not widening_faults(_free(old), _free(new)):
            kind = new.type
        elif not widening_faults(_free(new), _free(old)):
            kind = old.type
        else:
            return None
        return replace(old, name=new.name, type=kind), replace(new, type=kind)
    if isinstance(old.type, str) or isinstance(new.type, str) or old.type[0] != new.type[0]:
        return None
    inner = [_shared(one, matching, fresh) for one in matching.inner(old, new) if one.new is not None]
    kept = [both for both in inner if both is not None]
    if not kept or (new.type[0] != "struct" and len(kept) < len(inner)):
        return None
    return (
        replace(old, name=new.name, type=nesting(new.type, tuple(both[0] for both in kept))),
        replace(new, type=nesting(new.type, tuple(both[1] for both in kept))),
    )


def _free(item: Field) -> Field:
    return replace(item, nullable=True)


def _with_fresh_ids(item: Field, fresh: Iterator[int]) -> Field:
    kind = item.type
    if not isinstance(kind, str):
        kind = nesting(kind, tuple(_with_fresh_ids(inner, fresh) for inner in children(item)))
    return replace(item, id=next(fresh), type=kind)


def _changes(pair: _Pair, matching: _Matching, above: str = "") -> Iterator[ColumnChange]:
    old, new = pair
    if new is None:
        assert old is not None
        yield ColumnChange("dropped", above + old.name, type=type_text(old.type))
        return
    name = above + new.name
    if old is None:
        yield ColumnChange("added", name, type=type_text(new.type), default=new.default)
        return
    if old.name != new.name:
        yield ColumnChange("renamed", name, was=above + old.name, type=type_text(new.type))
    if old.nullable != new.nullable:
        yield ColumnChange("nullable" if new.nullable else "required", name, type=type_text(new.type))
    if old.default != new.default:
        yield ColumnChange("default", name, was=old.default, type=type_text(new.type), default=new.default)
    nested = not isinstance(old.type, str) and not isinstance(new.type, str) and old.type[0] == new.type[0]
    if nested:
        for inner in matching.inner(old, new):
            yield from _changes(inner, matching, f"{name}.")
    elif old.type != new.type:
        widened = not widening_faults(_free(old), _free(new))
        change = "widened" if widened else "narrowed" if not widening_faults(_free(new), _free(old)) else "retyped"
        yield ColumnChange(change, name, type=type_text(new.type), type_was=type_text(old.type))
