"""What differs between two checkpoints, of one store or of two: :func:`diff_checkpoints`.

``declarations`` compares graphs and columns; a :class:`Pair` is one state on both sides, whose
rows ``counting`` counts; a :class:`CheckpointDiff` is what is found, also as JSON (docs/json.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .. import words
from ..documents import Document, JsonRows, objects
from ..errors import CheckpointError, ErrorKind, InvalidInput
from ..manifest import Ints, group_rows, integers
from ..model import Capability, CheckpointKind, Mode, Record, State, known_names
from ..rescaling import lasting_stop
from .comparing import RowShape, Side, Step, planned, side_of
from .counting import OTHER, SAMPLE_ROWS, Counted, Pattern, counted, order_of, pattern_of
from .declarations import ColumnChange, Columns, ElementChange, GraphDiff, MemberChange, graph_diff, side_by_side

if TYPE_CHECKING:
    from ..model import State
    from ..reading import Checkpoint


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
            self._sizes = [_sizes_of(side) for side in sides]
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
        self._sizes = [_sizes_of(side) for side in self._sides]
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


def _sizes_of(side: Side | None) -> Sizes:
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
    _, group, rows = group_rows(side.handles)
    found: Ints = np.bincount(group, rows, minlength=count)[:count].astype(np.int64)
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


_SHOWN: Final = 300
"""Characters of a member of a record."""


@dataclass(frozen=True)
class CheckpointDiff:
    """What differs between two checkpoints."""

    before: Checkpoint
    after: Checkpoint
    graph: GraphDiff | None
    """None if only states of one name were compared."""
    states: tuple[StateDiff, ...]
    read_bytes: int
    """About how many stored bytes of segments were read."""
    operator: str | None = None
    state: str | None = None
    """With ``operator``, what the comparison was limited to."""

    @property
    def same(self) -> bool:
        """Whether the content is the same.

        The content is the operators, their statuses, the edges, the declared columns, and the rows
        of every state, the runtime's included. How it is stored does not count: parallelism, max
        parallelism, key hash, layers, encodings, files.
        """
        return (self.graph is None or self.graph.same) and all(state.same for state in self.states)

    def __repr__(self) -> str:
        differ = sum(not state.same for state in self.states)
        found = "same content" if self.same else f"{differ} of {len(self.states)} states differ"
        return f"CheckpointDiff({self.before!r}, {self.after!r}: {found})"

    def _repr_html_(self) -> str:
        """What differs, for notebooks."""
        from ..pages.difference import difference_page
        from ..pages.html import notebook

        return notebook(
            f"From checkpoint {self.before.id} to {self.after.id}", lambda: difference_page(self.document())
        )

    def document(self, *, rows: int | None = None) -> dict[str, Any]:
        """Return the difference as a JSON document (docs/json.md).

        ``rows``: how many of the kept rows it shows at most, of each kind and state; None for none.
        """
        return _document(self, rows)


def _document(diff: CheckpointDiff, rows: int | None) -> Document:
    """Return the whole document, with up to ``rows`` rows of each kind of each state."""
    return {
        "same": diff.same,
        "before": _checkpoint(diff.before),
        "after": _checkpoint(diff.after),
        "selection": {"operator": diff.operator, "state": diff.state},
        "graph": None
        if diff.graph is None
        else {
            "same": diff.graph.same,
            "operators": [_element(change) for change in diff.graph.operators],
            "edges": [_element(change) for change in diff.graph.edges],
        },
        "states": [_state(state, rows) for state in diff.states],
        "read_bytes": diff.read_bytes,
    }


def proof_document(diff: CheckpointDiff, *, copied: bool = False, own: Collection[str] = ()) -> Document:
    """Return what ``--prove`` reports: whether the content is the same, how much there is, and the
    cost.

    ``copied``: the result is a savepoint, which has all that its source's record says. ``own``:
    properties that the result has of its own.
    """
    changes = list(_record_changes(diff.before, diff.after, copied, own))
    same = diff.same and not changes
    sizes = [
        (state.sizes_after, state.after is not None and state.after.mode is Mode.PROGRESS)
        for state in diff.states
        if state.sizes_after is not None
    ]
    exact = all(size.rows is not None or is_progress for size, is_progress in sizes)
    counts = [size.rows if exact and size.rows is not None else size.stored_rows for size, _ in sizes]
    return {
        "same": same,
        "states": len(diff.states),
        "rows": None if None in counts else sum(filter(None, counts)),
        "counts_layers": not exact,
        "read_bytes": diff.read_bytes,
        "record": [change._asdict() for change in changes],
        "difference": None if same else diff.document(),
    }


def _record_changes(
    before: Checkpoint, after: Checkpoint, copied: bool, own: Collection[str]
) -> Iterator[MemberChange]:
    """Yield what a checkpoint's record lost, besides its graph and its states."""
    old, new = before.record, after.record
    kept, found = (record.properties if copied else record.lasting_properties for record in (old, new))
    # An import adds what it knows of the source.
    names = kept if Capability.RECORD in after.capabilities - before.capabilities else {*kept, *found}
    for name in sorted({*names} - {*own}):
        if kept.get(name) != found.get(name):
            yield MemberChange(f"properties.{name}", kept.get(name), found.get(name))
    if copied:
        old = replace(old, kind=CheckpointKind.SAVEPOINT)
    elif Capability.RECORD in before.capabilities:
        old = replace(new, job_id=old.job_id, job_name=old.job_name, stop=lasting_stop(old))
    else:
        old = new
    for member in fields(Record):
        was, now = getattr(old, member.name), getattr(new, member.name)
        if was != now and member.name != "properties":
            yield MemberChange(member.name, str(was)[:_SHOWN], str(now)[:_SHOWN])


def _checkpoint(checkpoint: Checkpoint) -> Document:
    record = checkpoint.record
    return {
        "store": checkpoint.storage.url,
        "checkpoint_id": record.checkpoint_id,
        "attempt_id": record.attempt_id,
        "kind": record.kind.value,
        "system": checkpoint.system,
        "job_id": record.job_id,
        "job_name": record.job_name,
        "created_at": words.moment(record.created_at_us),
        "operators": len(record.graph.operators),
        "totals": asdict(record.totals),
    }


def _element(change: ElementChange) -> Document:
    return {
        "name": change.name,
        "was": change.was,
        "change": change.change,
        "counts": change.is_content,
        "members": [{**member._asdict(), "counts": member.is_content} for member in change.members],
    }


def _state(diff: StateDiff, rows: int | None) -> Document:
    declared = diff.after or diff.before
    assert declared is not None
    counted = diff.counted
    found: Document = {
        "operator": diff.operator,
        "state": diff.name,
        "was": None if diff.was is None else {"operator": diff.was[0], "state": diff.was[1]},
        "change": diff.change,
        **_declaration(declared),
        "declared": [member._asdict() for member in diff.declared],
        "columns": [_column(change) for change in diff.columns],
        "before": _sizes_document(diff.sizes_before),
        "after": _sizes_document(diff.sizes_after),
        "added": None if counted is None else counted.added,
        "removed": None if counted is None else counted.removed,
        "changed": None if counted is None else counted.changed,
        "order": diff.order,
        "pattern": None
        if diff.pattern is None
        else {
            "groups": [list(pair) for pair in diff.pattern.ranges],
            "changes": round(diff.pattern.changes, 4),
            "rows": None if diff.pattern.rows is None else round(diff.pattern.rows, 4),
        },
        "groups": None if counted is None else _groups(counted),
        "read_bytes": 0 if counted is None else counted.read_bytes,
    }
    if rows is not None:
        found["row_columns"], found["sample"] = ([], []) if counted is None else _sample(counted, rows)
    return found


def _declaration(state: State) -> Document:
    return {
        "mode": state.mode.value,
        "kind": None if state.kind is None else state.kind.value,
        "key_columns": list(state.key_columns),
    }


def column_changes(before: State, after: State) -> list[Document]:
    """Return what happened to the columns of a state within one job's history."""
    return [_column(change) for change in side_by_side(before, after, by_id=True).changes]


def _column(change: ColumnChange) -> Document:
    return {**change._asdict(), "compared": change.is_compared}


def _sizes_document(sizes: Sizes | None) -> Document | None:
    return None if sizes is None else sizes._asdict()


def _groups(counted: Counted) -> JsonRows | None:
    """Return the key groups in which rows differ."""
    if counted.groups is None:
        return None
    group = np.flatnonzero(counted.groups.total)
    parts = {name: values[group] for name, values in counted.groups._asdict().items()}
    return JsonRows(group=group, max_parallelism=np.full(len(group), len(counted.groups.added)), **parts)


def _sample(counted: Counted, rows: int) -> tuple[list[Document], list[Document]]:
    """Return the columns, and for up to ``rows`` rows of each kind what they were and are."""
    tables = counted.sample
    columns = next(([*table.schema] for table in tables if table is not None), [])
    found = [{"before": row, "after": None} for row in _objects(tables.removed, rows)]
    pairs = zip(_objects(tables.before, rows), _objects(tables.after, rows), strict=True)
    found += [{"before": before, "after": after} for before, after in pairs]
    found += [{"before": None, "after": row} for row in _objects(tables.added, rows)]
    return [{"name": column.name, "type": str(column.type)} for column in columns], found


def _objects(table: pa.Table | None, rows: int) -> list[Document]:
    return [] if table is None else objects(table.slice(0, rows).to_batches(), rows)


Progress = Callable[[int, int], None]
"""Called with the stored bytes read so far, and all that will be read."""


def diff_checkpoints(
    before: Checkpoint,
    after: Checkpoint,
    *,
    operator: str | None = None,
    state: str | None = None,
    rows: int = SAMPLE_ROWS,
    renames: Renames | None = None,
    whole: bool = False,
    progress: Progress | None = None,
) -> CheckpointDiff:
    """Compare two checkpoints, of one store or two, stateformat's or another system's.

    Rows are compared in the columns of ``after``. Keyed rows are matched by row key, progress by
    input; all others are compared with their multiplicity, and union and even_split state also in
    order, over all subtasks. Values are equal if their bits are, except that every NaN equals every
    other. What metadata shows to be equal is not read.

    Args:
        before: the earlier checkpoint, or the source of a copy.
        after: the later one.
        operator: compare only this operator, by uid or name.
        state: compare only states of this name.
        rows: how many of the added, removed and changed rows of each state to keep.
        renames: what was renamed on purpose; by default nothing.
        whole: also compare each subtask's copy of broadcast state, and its progress.
        progress: called with how much has been read.

    Raises ``InvalidInput`` for an operator or state that neither checkpoint has, and what reading
    raises: ``DamagedCheckpoint``, ``CheckpointExpired``, ``StorageError``.
    """
    renames = renames or Renames()
    uid = None if operator is None else _uid(before, after, operator, renames)
    pairs = _chosen(pairs_of(before, after, renames, whole=whole), uid, state)
    total = sum(pair.plan() for pair in pairs)
    done = 0

    def read(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        if progress is not None:
            progress(min(done, total), total)

    found = []
    for number, pair in enumerate(pairs):
        found.append(pair.diff(rows, read))
        pairs[number] = None  # type: ignore[call-overload]  # what it planned is not needed any more
    graph = None
    if state is None:
        graph = graph_diff(before.record, after.record, renames.operators, renames.apart, uid)
    return CheckpointDiff(before, after, graph, tuple(found), done, uid, state)


def _uid(before: Checkpoint, after: Checkpoint, operator: str, renames: Renames) -> str:
    """Return the uid, as the later checkpoint has it, of an operator that either has."""
    try:
        return after.operator_uid(operator)
    except CheckpointError:
        try:
            uid = before.operator_uid(operator)
        except CheckpointError:
            pass
        else:
            return renames.operators.get(uid, uid)
        raise


def prove_checkpoints(
    before: Checkpoint,
    after: Checkpoint,
    *,
    renames: Renames | None = None,
    progress: Progress | None = None,
) -> CheckpointDiff:
    """Compare a checkpoint with what was made of it, rows that have expired and all copies
    included.
    """
    sides = before.with_expired(), after.with_expired()
    return diff_checkpoints(*sides, rows=0, renames=renames, whole=True, progress=progress)


def _chosen(pairs: Iterable[Pair], operator: str | None, state: str | None) -> list[Pair]:
    of_operator = [pair for pair in pairs if operator in (None, pair.place[0])]
    found = [pair for pair in of_operator if state in (None, pair.place[1])]
    if state is not None and not found:
        where = "the checkpoints have" if operator is None else f"operator {operator!r} has"
        names = [pair.place[1] for pair in of_operator]
        raise InvalidInput(
            f"{where} no state {state!r}; {known_names(names, state)}", kind=ErrorKind.UNKNOWN_STATE, state=state
        )
    return found
