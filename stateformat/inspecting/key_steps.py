"""The rows of one key along the history: what changed when.

Theory of operation. Checkpoints come newest first, and each is compared with the next one that can
be read. If both have the same rows of the same segments (by digest) in every layer of the key's
group, and the same columns, nothing has changed, and nothing is read. Otherwise the rows of the key
on both sides are compared in the latest schema. Checkpoints that cannot be read are reported, and
skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from ..errors import (
    CheckpointError,
    CheckpointExpired,
    DamagedCheckpoint,
    InvalidInput,
    InvalidState,
    UnsupportedFormat,
)
from ..manifest import take_rows
from ..model import Record, State
from ..reading import StateRows, Wanted
from ..schema import row_schema
from ..tables import HELD_BYTES
from .matching import differences
from .over_time import declared_in

if TYPE_CHECKING:
    from ..reading import Checkpoint

_UNREADABLE: Final = (DamagedCheckpoint, UnsupportedFormat, CheckpointExpired)


class KeyStep(NamedTuple):
    """What happened to a key's rows at one checkpoint."""

    record: Record
    since: Record | None
    """The earlier checkpoint that it was compared with; None for the oldest."""
    changes: Iterator[pa.Table]
    """Rows with ``_change`` (``StateChanges``), to be read before the next step; for the oldest
    checkpoint all are inserts. Empty if only the schema has changed.
    """
    rows: tuple[int, int] = (0, 0)
    """How many rows the key had before and has now."""
    declared: tuple[State, State] | None = None
    """The state before and now, if its columns differ."""
    fault: CheckpointError | None = None
    """Why the rows cannot be read, or not converted to the newest schema."""


@dataclass
class _Side:
    """The rows of the key in one checkpoint."""

    record: Record
    newest: State
    declared: State | None = None
    rows: StateRows | None = None
    mark: tuple[Any, ...] | None = ()
    """Equal for equal rows of equal segments; None if unknown."""
    held: list[pa.Table] | None = None
    count: int = 0
    """How many rows there are, once they have been read."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, state: State, key: pa.Table) -> _Side:
        declared = declared_in(checkpoint, state)
        if declared is None:
            return cls(checkpoint.record, state)
        rows = checkpoint.state(declared).at_keys(key)
        return cls(checkpoint.record, state, declared, rows, _mark(rows))

    def hold(self) -> CheckpointError | None:
        """Read the rows, and hold them while they are few. Returns the error if they cannot be
        read.
        """
        held: list[pa.Table] = []
        size_bytes = self.count = 0
        try:
            for table in self.tables():
                self.count += len(table)
                size_bytes += table.nbytes
                if size_bytes <= HELD_BYTES:
                    held.append(table)
        except (*_UNREADABLE, InvalidState) as error:
            return error  # InvalidState: the columns went another way since.
        if size_bytes <= HELD_BYTES:
            self.held = held
        return None

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows in the newest schema."""
        if self.held is not None or self.rows is None:
            yield from self.held or ()
            return
        wanted = Wanted(tuple(row_schema(self.newest).names), self.rows.keys)
        for batch in self.rows.task.batches(as_schema=self.newest.current, wanted=wanted):
            yield pa.Table.from_batches([batch])


def _mark(rows: StateRows) -> tuple[Any, ...] | None:
    """Return what is read of each layer, by digest."""
    slices = rows.task.slices
    digests = take_rows(rows.task.handles.select(["digest"]), slices["handle"])["digest"].to_pylist()
    if None in digests:
        return None
    places = (slices[name].to_pylist() for name in ("layer", "row_start", "rows"))
    # Rows of equal segments may have expired meanwhile.
    lives = (rows.state.ttl, rows.state.ttl_now_us) if rows.state.ttl_now_us is not None else ()
    return (*lives, *sorted(zip(*places, digests, strict=True)))


def latest_declaration(checkpoints: Iterable[Checkpoint], state: State) -> State:
    """Return the declaration with the latest schema; after a rollback the newest checkpoint lacks
    it.
    """
    found = [one.record.by_state.get((state.operator, state.name)) for one in checkpoints]
    same = (state.mode, state.kind, state.clock, state.key_columns)
    alike = (one for one in found if one is not None and (one.mode, one.kind, one.clock, one.key_columns) == same)
    return max((state, *alike), key=lambda one: one.current.id)


def key_history(checkpoints: Iterable[Checkpoint], state: State, key: pa.Table) -> Iterator[KeyStep]:
    """Yield what happened to a key, newest first, at each checkpoint where something did.

    ``checkpoints``: newest first; each is released before the next is taken, since it keeps its
    manifest. ``state``: its :func:`latest_declaration`, whose schema all rows have. ``key``: one
    row, as ``keys_from_json`` returns it. A checkpoint that is damaged or has expired is a step
    with ``fault``; one with another state of this name is too, and ends the history.

    Raises ``StorageError`` if the storage fails.
    """
    newer: _Side | None = None
    faults: list[KeyStep] = []
    for checkpoint in checkpoints:
        try:
            older = _Side.of(checkpoint, state, key)
        except (*_UNREADABLE, InvalidInput) as error:
            faults.append(_failed(checkpoint.record, error))
            if isinstance(error, InvalidInput):
                break
            continue
        if newer is not None and not _proven_equal(newer, older):
            fault = older.hold()
            if fault is not None:
                faults.append(_failed(older.record, fault))
                continue
            yield from _step(newer, older)
        yield from faults
        newer, faults = older, []
    if newer is not None:
        yield from _step(newer, None)
    yield from faults


def _proven_equal(newer: _Side, older: _Side) -> bool:
    return newer.mark is not None and newer.mark == older.mark and _declared(newer, older) is None


def _declared(newer: _Side, older: _Side | None) -> tuple[State, State] | None:
    if older is None or newer.declared is None or older.declared is None:
        return None
    before, now = older.declared, newer.declared
    return None if before.current.fields == now.current.fields else (before, now)


def _failed(record: Record, error: CheckpointError) -> KeyStep:
    return KeyStep(record, None, iter(()), fault=error)


def _step(newer: _Side, older: _Side | None) -> Iterator[KeyStep]:
    """Yield the step between two checkpoints, or to the oldest; none if nothing has changed."""
    fault = newer.hold()
    if fault is not None:
        yield _failed(newer.record, fault)
        return
    rows = (0 if older is None else older.count), newer.count
    declared = _declared(newer, older)
    before = () if older is None else older.tables()
    changed = differences(before, newer.tables(), newer.newest.row_key)
    with closing(changed) as every:
        tables = (table for table in every if len(table))
        first = next(tables, None)
        if first is not None or (declared is not None and any(rows)):
            changes = iter(()) if first is None else chain([first], tables)
            yield KeyStep(newer.record, None if older is None else older.record, changes, rows, declared)
