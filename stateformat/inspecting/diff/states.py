"""One state on both sides: how it is declared, and which of its rows differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow.compute as pc

from ...manifest import Ints, integers
from ...model import Capability, Mode, State
from ..comparing import RowShape, Side, Step, keyed_runs, planned, side_of
from .columns import ColumnChange, Columns, side_by_side
from .counting import Counted, counted
from .graphs import MemberChange
from .pattern import Pattern, pattern_of
from .sequences import OTHER, order_of

if TYPE_CHECKING:
    from ...reading import Checkpoint

_SEQUENCES: Final = (Mode.UNION, Mode.EVEN_SPLIT)


@dataclass(frozen=True)
class Renames:
    """What a rewrite or import renamed on purpose, so that it is not a difference."""

    operators: Mapping[str, str] = field(default_factory=dict)
    """New uids by old uids."""
    states: Mapping[tuple[str, str], State] = field(default_factory=dict)
    """What states became, by old uid and name."""
    shapes: Mapping[tuple[str, str], RowShape] = field(default_factory=dict)
    """What their rows became, if columns were renamed or extracted from others."""
    apart: frozenset[str] = frozenset()
    """Operators of the later side without an earlier one."""


class Sizes(NamedTuple):
    """The size of a state on one side."""

    rows: int | None
    """None if unknown: layers that were not merged, rows some of which have expired, another
    system's metadata.
    """
    stored_rows: int | None
    """Of all layers; for broadcast state, of one copy."""
    stored_bytes: int
    layers: int
    """How many different layers its handles are in."""
    owners: int
    """How many subtasks have rows."""


@dataclass(frozen=True)
class StateDiff:
    """What differs in one state."""

    operator: str
    name: str
    change: str
    """same, changed, added, removed, or replaced: another state of that name, not compared."""
    before: State | None
    after: State | None
    was: tuple[str, str] | None = None
    """Operator and name before, if they differ."""
    declared: tuple[MemberChange, ...] = ()
    """What differs in mode, kind or key columns; if nothing, then in how long rows live."""
    columns: tuple[ColumnChange, ...] = ()
    sizes_before: Sizes | None = None
    sizes_after: Sizes | None = None
    counted: Counted | None = None
    """None if rows were not compared."""
    order: str | None = None
    """The order of union and even_split state with equal entries: same, rotated, other."""
    pattern: Pattern | None = None

    @property
    def same(self) -> bool:
        """Whether nothing relevant differs."""
        return self.change == "same"

    def __repr__(self) -> str:
        rows = self.counted
        counts = "" if rows is None else f", {rows.added} added, {rows.removed} removed, {rows.changed} changed"
        return f"StateDiff({self.operator}/{self.name}: {self.change}{counts})"


@dataclass
class Pair:
    """A state of two checkpoints to be compared; call :meth:`plan` first, then :meth:`diff`."""

    before: Checkpoint
    after: Checkpoint
    old: State | None
    """As the earlier checkpoint declares it."""
    becomes: State | None
    """As it is declared after the renames."""
    new: State | None
    shape: RowShape | None = None
    whole: bool = False
    """Whether each subtask's copy of broadcast state and its progress count."""

    def __post_init__(self) -> None:
        some = self.new or self.becomes
        assert some is not None
        self._state = some
        self._columns: Columns | None = None
        self._sides: tuple[Side | None, Side | None] = (None, None)
        self._steps: tuple[Step, ...] = ()
        self._sizes: list[Sizes] = []
        self._seen = [_Seen(), _Seen()]
        self._rehash = False

    @property
    def place(self) -> tuple[str, str]:
        """Operator and name, as the later checkpoint has them."""
        return self._state.operator, self._state.name

    @property
    def is_compared(self) -> bool:
        """Whether both sides have the state, and it is the same state."""
        return self.old is not None and self.new is not None and not self._declared()

    def plan(self) -> int:
        """Plan by metadata what to read. Returns about how many stored bytes that is."""
        if not self.is_compared:
            sides = self._side(self.before, self.old), self._side(self.after, self.new)
            self._sizes = [_sizes(side) for side in sides]
            return 0
        assert self.old is not None
        assert self.becomes is not None
        assert self.new is not None
        related = self.before.record.job_id == self.after.record.job_id and self.shape is None
        related = related and Capability.FIELD_IDS in self.before.capabilities & self.after.capabilities
        self._columns = columns = side_by_side(self.becomes, self.new, by_id=related)
        state = replace(self.new, schemas=(columns.after,))
        more = {}
        if state.mode is Mode.PROGRESS:
            state = replace(state, key_columns=("_edge",))
            more = {"edge_by_edge": True}
        old = side_of(self.before, self.old, columns.before, shape=self.shape, seen=self._seen[0], **more)
        new = side_of(self.after, self.new, columns.after, seen=self._seen[1], **more)
        if old is not None and not columns.keys_alike:
            old = replace(old, layout=None)
        self._rehash = old is not None and new is not None and old.layout != new.layout
        self._sides, self._state = (old, new), state
        self._steps = (*planned(old, new, state, 1), *self._steps_of_owners(columns, state))
        self._sizes = [_sizes(side) for side in self._sides]
        if not self._steps and state.mode not in _SEQUENCES:
            # Of a million handles, only those to be read are kept.
            self._sides = None, None
        return sum(step.size_bytes for step in self._steps)

    def _steps_of_owners(self, columns: Columns, state: State) -> Iterator[Step]:
        """Yield the steps that compare what each subtask has of broadcast state and of progress.

        Where a subtask does not run, the first copy of its side stands in. A rescale deals progress
        out anew (SPEC.md section 6.2), so only all of it together can be compared.
        """
        sides = (self.before, self.old, columns.before, self.shape), (self.after, self.new, columns.after, None)
        operators = [checkpoint.graph.operator(state.operator) for checkpoint, state, *_ in sides if state]
        counts = [one.parallelism for one in operators]
        own = state.mode is Mode.PROGRESS and counts[0] == counts[1] and self.after.record.rescaled_from is None
        if not self.whole or not (own or state.mode is Mode.BROADCAST):
            return
        for i in range(max(counts)):
            owners = [i if i < one.parallelism and i not in one.done else None for one in operators]
            old, new = (
                side_of(checkpoint, state, schema, shape=shape, subtask=owner, edge_by_edge=own)
                for (checkpoint, state, schema, shape), owner in zip(sides, owners, strict=True)
                if state is not None
            )
            yield from planned(old, new, state, 1)

    def diff(self, rows: int, read: Callable[[int], None]) -> StateDiff:
        """Read, and return what differs. Keeps ``rows`` rows of each kind."""
        some = self.new or self.becomes
        assert some is not None
        was = None
        if self.old is not None and (self.old.operator, self.old.name) != (some.operator, some.name):
            was = self.old.operator, self.old.name
        found = StateDiff(some.operator, some.name, "same", self.old, self.new, was)
        sizes = self._sizes
        if not self.is_compared:
            change = "added" if self.old is None else "removed" if self.new is None else "replaced"
            return replace(
                found,
                change=change,
                declared=self._declared(),
                sizes_before=None if self.old is None else sizes[0],
                sizes_after=None if self.new is None else sizes[1],
            )
        assert self._columns is not None
        operator = self.after.graph.operator(self._state.operator) if self._state.mode is Mode.KEYED else None
        done = counted(self._steps, self._state, operator, rehash=self._rehash, rows=rows, read=read)
        sizes = self._counted_sizes(sizes, done)
        equal = not (done.added or done.removed or done.changed)
        old, new = self._sides
        order = None
        if self._state.mode in _SEQUENCES and equal and old is not None and new is not None:
            order = order_of(old, new, cyclic=self._state.mode is Mode.EVEN_SPLIT)
        declared = self._lives()
        same = equal and order != OTHER and not self._columns.changes and not declared
        return replace(
            found,
            change="same" if same else "changed",
            declared=declared,
            columns=self._columns.changes,
            sizes_before=sizes[0],
            sizes_after=sizes[1],
            counted=done,
            order=order,
            pattern=self._pattern(done),
        )

    def _declared(self) -> tuple[MemberChange, ...]:
        if self.becomes is None or self.new is None:
            return ()
        old, new = self.becomes, self.new
        found = (
            MemberChange("mode", old.mode.value, new.mode.value),
            MemberChange("kind", old.kind and old.kind.value, new.kind and new.kind.value),
            MemberChange("clock", old.clock, new.clock),
            MemberChange("key_columns", list(old.key_columns), list(new.key_columns)),
        )
        return tuple(member for member in found if member.before != member.after)

    def _lives(self) -> tuple[MemberChange, ...]:
        """Return what happened to the ttl."""
        assert self.becomes is not None
        assert self.new is not None
        ttls = self.becomes.ttl, self.new.ttl
        before, after = (None if ttl is None else str(ttl) for ttl in ttls)
        return () if ttls[0] == ttls[1] else (MemberChange("ttl", before, after),)

    def _side(self, checkpoint: Checkpoint, state: State | None) -> Side | None:
        return None if state is None else side_of(checkpoint, state, state.current)

    def _counted_sizes(self, sizes: list[Sizes], done: Counted) -> list[Sizes]:
        """Return the sizes, completed by the comparison's counts, or by what one side implies for
        the other.
        """
        mode, gained = self._state.mode, done.added - done.removed
        found = []
        for size, side, seen in zip(sizes, self._sides, self._seen, strict=True):
            read_whole = side is not None and any(_reads_whole(step, side) for step in self._steps)
            found.append(size._replace(rows=seen.rows) if size.rows is None and read_whole else size)
        before, after = found[0].rows, found[1].rows
        if mode is Mode.PROGRESS:
            return found
        if before is None and after is not None:
            found[0] = found[0]._replace(rows=after - gained)
        if after is None and before is not None:
            found[1] = found[1]._replace(rows=before + gained)
        return found

    def _pattern(self, done: Counted) -> Pattern | None:
        groups = done.groups
        if groups is None or not groups.total.any():
            return None
        old, new = self._sides
        if self._rehash:
            # The rows before were in another numbering: take the later ones, without the changes.
            rows = None if new is None else _group_rows(new, len(groups.total))
            rows = None if rows is None else np.maximum(rows - groups.added + groups.removed, 0)
        else:
            rows = None if old is None else _group_rows(old, len(groups.total))
        return pattern_of(groups.total, rows)


class _Seen:
    """Counts rows."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, rows: int) -> None:
        self.rows += rows


def _reads_whole(step: Step, side: Side) -> bool:
    """Return whether a step reads a side in one piece, unchanged."""
    return any(one is side for one in vars(step).values())


def _sizes(side: Side | None) -> Sizes:
    if side is None:
        return Sizes(0, 0, 0, 0, 0)
    slices, state = side.task.slices, side.task.state
    rows, layers = slices["rows"], integers(slices["layer"])
    stored = None if rows.null_count else pc.sum(rows).as_py() or 0
    exact = stored if not layers.any() and state.mode is not Mode.PROGRESS and not side.hides else None
    owner = slices["subtask"]
    owners = pc.count_distinct(owner, mode="all").as_py()
    return Sizes(exact, stored, side.stored_bytes, len(np.flatnonzero(np.bincount(layers))), owners)


def _group_rows(side: Side, count: int) -> Ints | None:
    """Return the stored rows of each key group; None if unknown."""
    if side.handles["rows_per_group"].null_count:
        return None
    runs = keyed_runs(side.handles, np.zeros(len(side.handles), np.int64), 1)
    found: Ints = np.bincount(runs.group, runs.rows, minlength=count)[:count].astype(np.int64)
    return found


def pairs_of(before: Checkpoint, after: Checkpoint, renames: Renames, *, whole: bool = False) -> Iterator[Pair]:
    """Yield the states of both checkpoints, in the order of the later one, then those that are
    gone.
    """
    old: dict[tuple[str, str], tuple[State, State]] = {}
    for state in before.states:
        becomes = renames.states.get((state.operator, state.name))
        if becomes is None:
            becomes = replace(state, operator=renames.operators.get(state.operator, state.operator))
        old[becomes.operator, becomes.name] = state, becomes
    for state in after.states:
        if state.operator in renames.apart:
            continue
        found = old.pop((state.operator, state.name), None)
        shape = None if found is None else renames.shapes.get((found[0].operator, found[0].name))
        was, becomes = found or (None, None)
        yield Pair(before, after, was, becomes, state, shape, whole)
    for gone in old.values():
        yield Pair(before, after, *gone, None)
