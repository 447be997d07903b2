"""All states of one subtask: made from their declarations, restored from a checkpoint, written into the next.

A subtask may be written whole each time, or what has changed of it only (``changes``, ``folding``): then whoever runs it counts
versions (:meth:`SubtaskStates.begin`), and says in which layers each state lies. One that was left behind can catch up with the
layers that others have written, and one that is not needed for now can be kept on disk (``spilling``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.state.changes import BEFORE
from backends.state.collections import KeyedList, KeyedMap
from backends.state.entries import Entries
from backends.state.ownership import OwnedKeys
from backends.state.spilling import loading, saving
from backends.state.store import KeyedRows, without
from backends.state.timers import TimerSet
from backends.state.value import KeyedValue
from stateformat.checkpoint import ReadTask
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.folding import Layer
from stateformat.hashing import DEFAULT_KEY_HASH
from stateformat.key_groups import check_parallelism, key_group_count
from stateformat.model import Kind, Mode, Operator, SchemaVersion, State
from stateformat.schema import CLEAR, DELETE, KEY_GROUP, OP, UPSERT
from stateformat.snapshot import SnapshotWriter

Keyed = KeyedValue | KeyedMap | KeyedList | TimerSet
AnyState = TypeVar("AnyState", KeyedValue, KeyedMap, KeyedList, TimerSet, Entries)

_Rows = tuple[pa.RecordBatch, Any]
"""Rows of a layer, and their key groups where those are known."""

_KEYED: Final[Mapping[Kind, type[Keyed]]] = {
    Kind.VALUE: KeyedValue,
    Kind.MAP: KeyedMap,
    Kind.LIST: KeyedList,
    Kind.TIMERS: TimerSet,
}
_ENTRIES: Final = frozenset({Mode.EVEN_SPLIT, Mode.UNION, Mode.BROADCAST})


class SubtaskStates:
    """All declared states of one subtask of one operator, empty until :meth:`restore`.

    ``states`` may hold those of other operators, and of modes that are the runtime's (progress, in flight, coordinator,
    committables): they are passed over. Belongs to one thread at a time. Raises ``InvalidInput`` (INVALID_PARALLELISM) for
    a subtask that the operator does not have.
    """

    def __init__(self, operator: Operator, subtask: int, states: Sequence[State]) -> None:
        ceiling = key_group_count(operator)
        check_parallelism(operator.parallelism, ceiling, operator=operator.uid)
        if not 0 <= subtask < operator.parallelism:
            raise InvalidInput(
                f"operator {operator.uid!r} has subtasks 0 to {operator.parallelism - 1}; there is no subtask {subtask}",
                kind=ErrorKind.INVALID_PARALLELISM,
            )
        self.operator = operator
        self.subtask = subtask
        self.layers: Mapping[str, Sequence[Layer]] | None = None
        """What :meth:`snapshot` is told of layers where its caller knows nothing of them."""
        self.kept: Mapping[str, int] = {}
        """What the last snapshot returned."""
        self.version = 0
        """The version of the layers that the last snapshot wrote, where versions are counted (:meth:`begin`)."""
        self._max_parallelism = ceiling
        self._declared = {state.name: state for state in states if state.operator == operator.uid}
        self._kept: dict[str, Keyed | Entries] = {}
        for state in self._declared.values():
            if state.mode is Mode.KEYED and state.kind is not None:
                self._kept[state.name] = _KEYED[state.kind](operator, state)
            elif state.mode in _ENTRIES:
                self._kept[state.name] = Entries(state)
        self._keyed = {name: kept for name, kept in self._kept.items() if not isinstance(kept, Entries)}

    def own_keys(self, key_by: Sequence[Sequence[str]]) -> None:
        """From here on refuse new keys of other subtasks, as ``InvalidState``. ``key_by``: by which columns inputs are keyed."""
        for name, kept in self._keyed.items():
            columns = self._declared[name].key_columns
            owned = OwnedKeys(self.operator, self.subtask, name, columns, tuple(map(tuple, key_by)))
            for rows in kept.stores:
                if isinstance(rows, KeyedRows):
                    rows.owned = owned

    @property
    def all(self) -> Mapping[str, Keyed | Entries]:
        """Every state, by name."""
        return self._kept

    def value(self, name: str) -> KeyedValue:
        """The keyed value state of this name; ``InvalidInput`` (kind UNKNOWN_STATE) where there is none."""
        return self._find(name, KeyedValue, "keyed value")

    def map(self, name: str) -> KeyedMap:
        """The keyed map state of this name; ``InvalidInput`` as :meth:`value`."""
        return self._find(name, KeyedMap, "keyed map")

    def list(self, name: str) -> KeyedList:
        """The keyed list state of this name; ``InvalidInput`` as :meth:`value`."""
        return self._find(name, KeyedList, "keyed list")

    def timers(self, name: str) -> TimerSet:
        """The timers of this name; ``InvalidInput`` as :meth:`value`."""
        return self._find(name, TimerSet, "timers")

    def entries(self, name: str) -> Entries:
        """The even-split, union or broadcast state of this name; ``InvalidInput`` as :meth:`value`."""
        return self._find(name, Entries, "even-split, union or broadcast")

    def _find(self, name: str, kind: type[AnyState], what: str) -> AnyState:
        found = self._kept.get(name)
        if not isinstance(found, kind):
            known = ", ".join(f"{known!r} ({self._describe(known)})" for known in self._kept) or "none"
            raise InvalidInput(
                f"operator {self.operator.uid!r} has no state {name!r} that is {what}; declared are {known}",
                kind=ErrorKind.UNKNOWN_STATE,
                operator=self.operator.uid,
                state=name,
            )
        return found

    def _describe(self, name: str) -> str:
        state = self._declared[name]
        return state.kind.value if state.kind else state.mode.value

    def restore(self, tasks: Mapping[str, ReadTask]) -> None:
        """Take what a plan gives this subtask (``Checkpoint.restore``), by name of state, in the schemas declared here.

        Once, before anything else. States that are not kept here are passed over, and those of which there is no task stay
        empty. Raises what reading raises (``DamagedCheckpoint``, ``CheckpointExpired``); throw the object away then.
        """
        for name, kept in self._kept.items():
            task = tasks.get(name)
            if task is None:
                continue
            current = self._declared[name].current
            if isinstance(kept, Entries):
                kept.replace(task.table(as_schema=current))
                continue
            # Row keys stand once in what is right, so nothing is searched for; where perhaps they do not, once more with searching.
            if not self._fill(kept, task, current, quickly=not kept.changes.rows.used):
                _replace(kept, ())
                self._fill(kept, task, current, quickly=False)

    def _fill(self, kept: Keyed, task: ReadTask, current: SchemaVersion, *, quickly: bool) -> bool:
        rows = kept.changes.rows
        with kept.changes.taking(BEFORE):
            if quickly:
                rows.fill(pc.sum(task.slices["rows"]).as_py() or 0)
            for batch in task.batches(as_schema=current):
                kept.restore(without(batch, [KEY_GROUP.name]), self._groups(task, batch))
            return not quickly or rows.filled()

    def _groups(self, task: ReadTask, rows: pa.RecordBatch) -> Any:
        """The key groups of rows that are read, if they are those of this operator too."""
        saved = task.record.graph.operator(self.operator.uid)
        hashed_alike = (saved.max_parallelism, saved.key_hash or DEFAULT_KEY_HASH) == (
            self._max_parallelism,
            self.operator.key_hash or DEFAULT_KEY_HASH,
        )
        return rows.column(KEY_GROUP.name).to_numpy() if hashed_alike else None

    # Versions ---------------------------------------------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        """What changes from here on, until the next snapshot, is of this version, which is greater than any before.

        Before the first call nothing is tracked: what :meth:`restore` took is then what the layers have that are there, and a
        state that was changed by others than it is written whole. ``InvalidInput`` for a version that is not greater.
        """
        for kept in self._keyed.values():
            kept.changes.begin(version)

    def _begin_together(self) -> None:
        """A snapshot that failed has ended the version of the states before the one that failed: let all go on from the same."""
        versions = [kept.changes.version for kept in self._keyed.values() if kept.changes.version is not None]
        if versions:
            self.version = max(versions)
            self.begin(self.version)

    def catch_up(self, tasks: Mapping[str, ReadTask], layers: Mapping[str, Sequence[Layer]]) -> None:
        """Take what others have written since: go from an older snapshot of this subtask to a newer one.

        ``tasks`` of keyed states read the layers that are newer than what is here, and ``layers`` says of each which these are, lowest
        first, with their versions. A layer may hold changes that are here already. A base (layer 0, or a layer without rows)
        replaces everything, so what the layers say is what there is afterwards. Of other states a task reads everything.
        Changes that are in no layer must not be here. Raises as :meth:`restore` does, and ``InvalidInput`` where layers are not
        those of the task; throw the object away then.
        """
        for name, kept in self._kept.items():
            if isinstance(kept, Entries):
                if name in tasks:
                    kept.replace(tasks[name].table(as_schema=self._declared[name].current))
            elif layers.get(name):
                self._take_layers(name, kept, tasks.get(name), layers[name])

    def _take_layers(self, name: str, kept: Keyed, task: ReadTask | None, layers: Sequence[Layer]) -> None:
        stored = iter(()) if task is None else task.layers(as_schema=self._declared[name].current)
        for layer in layers:
            # A layer without rows is a base, and has no segment.
            number, batches = next(stored, (-1, iter(()))) if layer.rows else (0, iter(()))
            if layer.version is None or number < 0:
                raise _no_layers(name, layers)
            with kept.changes.taking(layer.version):
                rows = ((batch, None if task is None else self._groups(task, batch)) for batch in batches)
                if number:
                    exactly = _apply(kept, list(rows))
                else:
                    exactly = True
                    _replace(kept, rows)
            kept.changes.took(layer.version, exactly=exactly)
        if next(stored, None) is not None:
            raise _no_layers(name, layers)

    def snapshot(
        self, writer: SnapshotWriter, layers: Mapping[str, Sequence[Layer]] | None = None
    ) -> Mapping[str, int]:
        """Write every state that is kept here, or say that it is empty; other states are for the caller to report.

        ``layers``, by default :attr:`layers`: in which each keyed state lies now, lowest first; what is missing lies in none. With
        it only what has changed is written where that is less: a delta to the lowest of them, or nothing (``SnapshotWriter``
        says that such a state is carried). Returns, and keeps as :attr:`kept`, how many of the lowest layers stay
        underneath, by name; 0 where a state was written whole. Without layers everything is written whole.

        Row keys are unique by construction and ``_key_group`` is that of the keys, so ``WriteOptions(check_unique=False,
        trust_key_groups=True)`` saves the writer two checks. Nothing may change while this runs.
        """
        known = self.layers if layers is None else layers
        self._begin_together()
        counts = {}
        for name, kept in self._kept.items():
            if not isinstance(kept, Entries):
                counts[name] = kept.changes.write(writer, name, None if known is None else known.get(name, ()))
            elif len(kept):
                writer.write(name, kept.rows())
            else:
                writer.empty(name)
        self.kept = counts
        return counts

    # Memory -----------------------------------------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """About how much memory all states take."""
        return sum(
            kept.rows().nbytes
            if isinstance(kept, Entries)
            else sum(store.size_bytes for store in kept.stores) + kept.changes.size_bytes
            for kept in self._kept.values()
        )

    def save(self, directory: Path) -> None:
        """Write everything, and what is known of its changes, into a folder of its own: for :meth:`load` on this machine."""
        with saving(directory) as (saver, facts):
            for name, kept in self._kept.items():
                if isinstance(kept, Entries):
                    saver.table(kept.rows())
                    facts[name] = None
                    continue
                known, buried = kept.changes.facts()
                saver.table(buried)
                facts[name] = {"changes": known, "stores": [saver.rows(store) for store in kept.stores]}

    def load(self, directory: Path) -> None:
        """Have what was saved by states with the same declarations; this one must be new.

        ``InvalidInput`` where nothing was saved, or not all of it; throw the object away then.
        """
        with loading(directory, [*self._kept]) as (loader, facts):
            for name, kept in self._kept.items():
                table = loader.table()
                if isinstance(kept, Entries):
                    kept.replace(table)
                    continue
                for store, known in zip(kept.stores, facts[name]["stores"], strict=True):
                    loader.rows(store, known)
                kept.changes.recall(facts[name]["changes"], table)
                kept.loaded()


def _replace(kept: Keyed, base: Iterable[_Rows]) -> None:
    """Have these rows and no others."""
    for store in kept.stores:
        store.clear()
    kept.loaded()
    for rows, groups in base:
        kept.restore(without(rows, [KEY_GROUP.name]), groups)


def _apply(kept: Keyed, delta: Sequence[_Rows]) -> bool:
    """Apply a layer (SPEC.md section 5.4). False: it clears keys, so what it says of their rows below nobody knows here."""
    clears_any = False
    for rows, _ in delta:
        clears = np.flatnonzero(rows.column(OP.name).to_numpy() == CLEAR)
        if len(clears):
            clears_any = True
            kept.clear_keys(rows.take(pa.array(clears)))
    for rows, groups in delta:
        operations = rows.column(OP.name).to_numpy()
        deletes, upserts = np.flatnonzero(operations == DELETE), np.flatnonzero(operations == UPSERT)
        if len(deletes):
            gone = rows.take(pa.array(deletes))
            there = kept.remove(gone)
            kept.changes.bury_unknown(pa.Table.from_batches([gone]).filter(pa.array(~there)))
        if len(upserts):
            living = without(rows.take(pa.array(upserts)), [KEY_GROUP.name, OP.name])
            kept.replace(living, None if groups is None else groups[upserts])
    return not clears_any


def _no_layers(name: str, layers: Sequence[Layer]) -> InvalidInput:
    return InvalidInput(
        f"state {name!r} is to take the layers {[tuple(layer) for layer in layers]}, and its task has not just these, or one has no "
        "version; restore from the checkpoint"
    )
