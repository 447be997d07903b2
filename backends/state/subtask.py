"""All states of one subtask: restored from a checkpoint, written into the next, kept on disk.

A state without keys is a list of rows that is replaced or appended to.

States that do not fit in memory for now are on local disk. Arrays are written in their memory
layout, one after another in one file. A second file describes them; if it is missing, nothing was
saved. The bytes are for this machine and this version of the code; nothing verifies them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import Operator, brief
from stateformat.keys import DEFAULT_KEY_HASH, check_parallelism, key_group_count
from stateformat.model import Kind, Mode, SchemaVersion, State
from stateformat.reading import ReadTask
from stateformat.schema import CLEAR, DELETE, KEY_GROUP, OP, UPSERT
from stateformat.snapshot import SnapshotWriter
from stateformat.states import Layer
from stateformat.tables import rebatch

from .columns import ColumnBuffer
from .expiry import lives_longer
from .keyed_collections import KeyedList, KeyedMap
from .keyed_value import KeyedState, KeyedValue, one_values
from .rows import KeyedRows, OwnedKeys, RowNormalizer, Rows, without
from .timers import TimerSet
from .versions import BEFORE

_BATCHES_MAX: Final = 64
_JOINED_ROWS: Final = 1 << 18


class Entries:
    """Rows of an even-split, union or broadcast state, in order (SPEC.md section 3.6).

    Batches have the declared columns; nullable ones may be missing. Others raise ``InvalidState``,
    and the state is unchanged.
    """

    def __init__(self, state: State) -> None:
        self._normalizer = RowNormalizer(state, [item.name for item in state.current.fields], only=True)
        self._table = self._normalizer.schema.empty_table()

    def __repr__(self) -> str:
        return brief(self, f"{self._table.num_rows:,} rows")

    def __len__(self) -> int:
        return len(self._table)

    def rows(self) -> pa.Table:
        """Return all rows, in order."""
        return self._table

    def replace(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Replace all rows."""
        self._table = self._fitted(rows)

    def append(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Append rows."""
        table = pa.concat_tables([self._table, self._fitted(rows)])
        if max((column.num_chunks for column in table.columns), default=0) > _BATCHES_MAX:
            table = pa.Table.from_batches(rebatch([table], table.schema, _JOINED_ROWS), schema=table.schema)
        self._table = table

    def append_one(self, **values: Any) -> None:
        """Append one row; ``InvalidInput`` for an unknown column or a value of another type."""
        self.append(one_values(self._normalizer, values))

    def clear(self) -> None:
        """Delete all rows."""
        self._table = self._normalizer.schema.empty_table()

    def _fitted(self, rows: pa.Table | pa.RecordBatch) -> pa.Table:
        batches = rows.to_batches() if isinstance(rows, pa.Table) else [rows]
        schema = self._normalizer.schema
        return pa.Table.from_batches(
            [pa.RecordBatch.from_arrays(self._normalizer.fit(batch), schema=schema) for batch in batches], schema=schema
        )


_ARRAYS: Final = "states.bin"
_FACTS: Final = "states.json"
_FREE_SHARE: Final = 8
"""Loading leaves room for one eighth more rows than were saved."""


class Saver:
    """Writes arrays, one after another."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def array(self, array: Any) -> str:
        """Write an array; returns its description."""
        if isinstance(array, np.ndarray):
            self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            return f"{array.dtype.str}:{len(array)}"
        self.table(pa.Table.from_arrays([pa.chunked_array([array])], ["values"]))
        return "arrow"

    def table(self, table: pa.Table) -> None:
        with pa.ipc.new_stream(self._file, table.schema) as writer:
            writer.write_table(table)

    def rows(self, rows: Rows) -> dict[str, Any]:
        """Write a store; returns its description."""
        buffers = [buffer.export_arrays(rows.used) for column in rows.buffers for buffer in column]
        facts: dict[str, Any] = {"used": rows.used, "count": rows.count}
        facts["buffers"] = [[self.array(array) for array in arrays] for arrays in buffers]
        facts["arrays"] = {
            name: [self.array(array) for array in buffer.export_arrays(rows.used)]
            for name, buffer in rows.arrays.items()
            if name != "stamp"
        }
        if isinstance(rows, KeyedRows):
            facts["index"] = [self.array(rows.index.export_array()), rows.index.taken]
        return facts


class Loader:
    """Reads what a :class:`Saver` wrote, in the same order."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def array(self, what: str, capacity: int = 0) -> Any:
        """Read an array of at least ``capacity``, padded with zeros."""
        if what == "arrow":
            return self.table()["values"].combine_chunks()
        kind, count = what.split(":")
        array = np.zeros(max(capacity, int(count)), kind)
        read = array[: int(count)]
        if len(read) and self._file.readinto(read.view(np.uint8).data) != read.nbytes:  # type: ignore[attr-defined]
            raise _incomplete(f"it ends before an array of {read.nbytes} bytes does")
        return array

    def _buffer(self, buffer: ColumnBuffer, arrays: Sequence[str], capacity: int) -> None:
        if arrays:
            buffer.import_arrays([self.array(what, 0 if number else capacity) for number, what in enumerate(arrays)])
        else:
            buffer.reserve(capacity, 0)

    def table(self) -> pa.Table:
        return pa.ipc.open_stream(self._file).read_all()

    def rows(self, rows: Rows, facts: Mapping[str, Any]) -> None:
        used = facts["used"]
        capacity = used + used // _FREE_SHARE + 1024
        buffers = [buffer for column in rows.buffers for buffer in column]
        for buffer, arrays in zip(buffers, facts["buffers"], strict=True):
            self._buffer(buffer, arrays, capacity)
        for name, arrays in facts["arrays"].items():
            if name not in rows.arrays:
                rows.add_array(name, np.dtype(arrays[0].split(":")[0]))
            self._buffer(rows.arrays[name], arrays, capacity)
        for name, array in rows.arrays.items():
            if name not in facts["arrays"]:
                array.reserve(capacity, 0)
        rows.used, rows.count, rows.capacity = used, facts["count"], capacity
        if isinstance(rows, KeyedRows):
            what, taken = facts["index"]
            rows.index.import_array(self.array(what), taken)


@contextmanager
def saving(directory: Path) -> Iterator[tuple[Saver, dict[str, Any]]]:
    """Yield a saver, and a dictionary of descriptions to fill, which is written as JSON at the
    end.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _FACTS).unlink(missing_ok=True)
    facts: dict[str, Any] = {}
    with (directory / _ARRAYS).open("wb") as file:
        yield Saver(file), facts
    (directory / f"{_FACTS}.part").write_text(json.dumps(facts))
    (directory / f"{_FACTS}.part").replace(directory / _FACTS)


@contextmanager
def loading(directory: Path, names: Sequence[str]) -> Iterator[tuple[Loader, Mapping[str, Any]]]:
    """Yield a loader and the descriptions; ``InvalidInput`` without a complete save of these
    names.
    """
    try:
        facts = json.loads((directory / _FACTS).read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{directory} holds no states: {error}; restore from the checkpoint") from error
    if [*facts] != [*names]:
        raise InvalidInput(f"{directory} holds the states {[*facts]}, and not {[*names]}; restore from the checkpoint")
    try:
        with (directory / _ARRAYS).open("rb") as file:
            yield Loader(file), facts
    except (OSError, pa.ArrowException) as error:
        raise _incomplete(error) from error


def _incomplete(why: object) -> InvalidInput:
    return InvalidInput(f"{_ARRAYS} is not what was saved: {why}; restore from the checkpoint")


AnyState = TypeVar("AnyState", KeyedValue, KeyedMap, KeyedList, TimerSet, Entries)

_Rows = tuple[pa.RecordBatch, Any]
"""Rows of a layer, and their key groups if those are known."""

_KEYED: Final[Mapping[Kind, type[KeyedValue | KeyedMap | KeyedList | TimerSet]]] = {
    Kind.VALUE: KeyedValue,
    Kind.MAP: KeyedMap,
    Kind.LIST: KeyedList,
    Kind.TIMERS: TimerSet,
}
_ENTRIES: Final = frozenset({Mode.EVEN_SPLIT, Mode.UNION, Mode.BROADCAST})


class SubtaskStates:
    """All declared states of one subtask of one operator, empty until :meth:`restore`.

    States of other operators and the runtime's own are ignored. An object belongs to one thread at
    a time. Raises ``InvalidInput`` (INVALID_PARALLELISM) for a subtask that the operator does not
    have.
    """

    def __init__(self, operator: Operator, subtask: int, states: Sequence[State]) -> None:
        ceiling = key_group_count(operator)
        check_parallelism(operator.parallelism, ceiling, operator=operator.uid)
        if not 0 <= subtask < operator.parallelism:
            raise InvalidInput(
                f"operator {operator.uid!r} has subtasks 0 to {operator.parallelism - 1}; there is no subtask "
                f"{subtask}",
                kind=ErrorKind.INVALID_PARALLELISM,
            )
        self.operator = operator
        self.subtask = subtask
        self.layers: Mapping[str, Sequence[Layer]] | None = None
        """The layers for :meth:`snapshot` if its caller gives none."""
        self.layers_kept: Mapping[str, int] = {}
        """What the last :meth:`snapshot` returned."""
        self.version = 0
        """The version of the layers that the last snapshot wrote, if versions are counted."""
        self._max_parallelism = ceiling
        self._declared = {state.name: state for state in states if state.operator == operator.uid}
        self.all: dict[str, KeyedState | Entries] = {}
        for state in self._declared.values():
            if state.mode is Mode.KEYED and state.kind is not None:
                self.all[state.name] = _KEYED[state.kind](operator, state)
            elif state.mode in _ENTRIES:
                self.all[state.name] = Entries(state)
        self._keyed = {name: kept for name, kept in self.all.items() if not isinstance(kept, Entries)}
        self._expiring = [kept.expiry for kept in self._keyed.values() if kept.expiry is not None]

    def __repr__(self) -> str:
        return brief(self, self.operator.uid, f"subtask {self.subtask}", f"{len(self.all)} states")

    def own_keys(self, key_by: Sequence[Sequence[str]]) -> None:
        """Refuse new keys of other subtasks. ``key_by``: the key columns of each input."""
        for name, kept in self._keyed.items():
            columns = self._declared[name].key_columns
            owned = OwnedKeys(self.operator, self.subtask, name, columns, tuple(map(tuple, key_by)))
            for rows in kept.stores:
                if isinstance(rows, KeyedRows):
                    rows.owned = owned

    def value(self, name: str) -> KeyedValue:
        """Return the value state of this name; ``InvalidInput`` (UNKNOWN_STATE) if there is none.
        The next methods do the same for the other kinds.
        """
        return self._find(name, KeyedValue, "keyed value")

    def map(self, name: str) -> KeyedMap:
        return self._find(name, KeyedMap, "keyed map")

    def list(self, name: str) -> KeyedList:
        return self._find(name, KeyedList, "keyed list")

    def timers(self, name: str) -> TimerSet:
        return self._find(name, TimerSet, "timers")

    def entries(self, name: str) -> Entries:
        return self._find(name, Entries, "even-split, union or broadcast")

    def _find(self, name: str, kind: type[AnyState], what: str) -> AnyState:
        found = self.all.get(name)
        if not isinstance(found, kind):
            known = ", ".join(f"{known!r} ({self._describe(known)})" for known in self.all) or "none"
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

    @property
    def expire(self) -> bool:
        """Whether the rows of some state expire."""
        return bool(self._expiring)

    def advance(self, *, event_time_us: int | None, processing_time_us: int) -> None:
        """Set the clocks by which rows expire; neither goes back. Timers never expire.

        ``event_time_us``: the watermark of the subtask; None if it is unusable, as at the end of
        time: nothing waits for what expires there.
        """
        for expiry in self._expiring:
            now_us = event_time_us if expiry.ttl.clock == "event_time" else processing_time_us
            if now_us is not None:
                expiry.advance(now_us)

    def restore(self, tasks: Mapping[str, ReadTask]) -> None:
        """Restore what a plan gives this subtask, by name of state; called once, before anything
        else.

        States without a task stay empty; tasks of other states are ignored. Raises what reading
        raises; the object is unusable then.
        """
        for name, kept in self.all.items():
            task = tasks.get(name)
            if task is None:
                continue
            current = self._declared[name].current
            if isinstance(kept, Entries):
                kept.replace(task.table(as_schema=current))
                continue
            # A row key occurs once in a sound checkpoint, so nothing is searched for. If one may
            # occur twice, everything is read again with searching.
            if not self._fill(kept, task, current, quickly=not kept.changes.rows.used):
                _replace(kept, ())
                self._fill(kept, task, current, quickly=False)
            if kept.expiry is not None:
                kept.expiry.go_on(task.state)
            if lives_longer(task.state, self._declared[name]):
                kept.changes.cleared()

    def _fill(self, kept: KeyedState, task: ReadTask, current: SchemaVersion, *, quickly: bool) -> bool:
        rows = kept.changes.rows
        with kept.changes.taking(BEFORE):
            if quickly:
                rows.fill(pc.sum(task.slices["rows"]).as_py() or 0)
            # Rows that had expired at the checkpoint are not among them.
            for batch in task.batches(as_schema=current):
                kept.restore(without(batch, [KEY_GROUP.name]), self._groups(task, batch))
            return not quickly or rows.filled()

    def _groups(self, task: ReadTask, rows: pa.RecordBatch) -> Any:
        """Return the key groups in a batch, if they are also those of this operator."""
        saved = task.record.graph.operator(self.operator.uid)
        hashed_alike = (saved.max_parallelism, saved.key_hash or DEFAULT_KEY_HASH) == (
            self._max_parallelism,
            self.operator.key_hash or DEFAULT_KEY_HASH,
        )
        return rows.column(KEY_GROUP.name).to_numpy() if hashed_alike else None

    def begin(self, version: int) -> None:
        """Changes until the next snapshot have this version, greater than any before.

        Before the first call nothing is tracked. A state that only :meth:`restore` has changed
        equals its layers; any other is written whole. Raises ``InvalidInput`` for a version that is
        not greater.
        """
        for kept in self._keyed.values():
            kept.changes.begin(version)

    def _begin_together(self) -> None:
        """Give all states the same version. After a failed snapshot some have ended theirs."""
        versions = [kept.changes.version for kept in self._keyed.values() if kept.changes.version is not None]
        if versions:
            self.version = max(versions)
            self.begin(self.version)

    def catch_up(self, tasks: Mapping[str, ReadTask], layers: Mapping[str, Sequence[Layer]]) -> None:
        """Move from an older snapshot of this subtask to a newer one that others have written.

        ``tasks`` read the layers that are missing here, and ``layers`` names these by state, lowest
        first. A layer may contain changes that are here already. A base (layer 0, or a layer
        without rows) replaces everything. Tasks of states without keys read everything, and those
        of states whose rows expire give the time. Nothing may be here that is in no layer. Raises
        ``InvalidInput`` if layers and tasks differ; the object is unusable then.
        """
        for name, kept in self.all.items():
            if isinstance(kept, Entries):
                if name in tasks:
                    kept.replace(tasks[name].table(as_schema=self._declared[name].current))
                continue
            if layers.get(name):
                self._take_layers(name, kept, tasks.get(name), layers[name])
            if kept.expiry is not None and name in tasks:
                kept.expiry.go_on(tasks[name].state)

    def _take_layers(self, name: str, kept: KeyedState, task: ReadTask | None, layers: Sequence[Layer]) -> None:
        stored = iter(()) if task is None else task.layers(as_schema=self._declared[name].current)
        for layer in layers:
            # A layer without rows is a base without a segment.
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
        """Write every state. Returns how many of the lowest layers stay, by name; 0 for a state
        written whole.

        ``layers``, by default :attr:`layers`: the current layers of each keyed state, lowest first.
        With them a state is written as a delta if that is less, or carried over if nothing has
        changed.

        Row keys are unique and ``_key_group`` is right by construction, so ``check_unique=False``
        and ``trust_key_groups=True`` save two checks. Nothing may change while this runs.
        """
        known = self.layers if layers is None else layers
        self._begin_together()
        counts = {}
        for name, kept in self.all.items():
            if not isinstance(kept, Entries):
                if kept.expiry is not None:
                    writer.set_now(name, kept.expiry.now_us)
                counts[name] = kept.changes.write(writer, name, None if known is None else known.get(name, ()))
            elif len(kept):
                writer.write(name, kept.rows())
            else:
                writer.empty(name)
        self.layers_kept = counts
        return counts

    @property
    def size_bytes(self) -> int:
        return sum(
            kept.rows().nbytes
            if isinstance(kept, Entries)
            else sum(store.size_bytes for store in kept.stores) + kept.changes.size_bytes
            for kept in self.all.values()
        )

    def save(self, directory: Path) -> None:
        """Write everything into a folder of its own, for :meth:`load` on this machine."""
        with saving(directory) as (saver, facts):
            for name, kept in self.all.items():
                if isinstance(kept, Entries):
                    saver.table(kept.rows())
                    facts[name] = None
                    continue
                known, buried = kept.changes.facts()
                saver.table(buried)
                facts[name] = {"changes": known, "stores": [saver.rows(store) for store in kept.stores]}

    def load(self, directory: Path) -> None:
        """Load what states with the same declarations have saved; this one must be new.

        Raises ``InvalidInput`` for an incomplete save; the object is unusable then.
        """
        with loading(directory, [*self.all]) as (loader, facts):
            for name, kept in self.all.items():
                table = loader.table()
                if isinstance(kept, Entries):
                    kept.replace(table)
                    continue
                for store, known in zip(kept.stores, facts[name]["stores"], strict=True):
                    loader.rows(store, known)
                kept.changes.recall(facts[name]["changes"], table)
                kept.loaded()


def _replace(kept: KeyedState, base: Iterable[_Rows]) -> None:
    for store in kept.stores:
        store.clear()
    kept.loaded()
    for rows, groups in base:
        kept.restore(without(rows, [KEY_GROUP.name]), groups)


def _apply(kept: KeyedState, delta: Sequence[_Rows]) -> bool:
    """Apply a delta (SPEC.md section 5.4). Returns False if it clears keys, whose rows below are
    unknown.
    """
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
        f"state {name!r} is to take the layers {[tuple(layer) for layer in layers]}, but its task has not just these, "
        "or one has no version; restore from the checkpoint"
    )
