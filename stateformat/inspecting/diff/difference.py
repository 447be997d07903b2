"""What differs between two checkpoints, also as a JSON document (docs/json.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from ... import words
from ...documents import Document, JsonRows, objects
from ...model import Capability, CheckpointKind, Mode, Record
from ...rescaling import lasting_stop
from .columns import ColumnChange, side_by_side
from .counting import Counted
from .graphs import ElementChange, GraphDiff, MemberChange
from .states import Sizes, StateDiff

if TYPE_CHECKING:
    from ...model import State
    from ...reading import Checkpoint

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
        from ...pages.difference import difference_page
        from ...pages.html import notebook

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
        "before": _sizes(diff.sizes_before),
        "after": _sizes(diff.sizes_after),
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


def _sizes(sizes: Sizes | None) -> Document | None:
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
