"""All states of one subtask: made from their declarations, restored from a checkpoint, written into the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import pyarrow as pa

from backends.state.collections import KeyedList, KeyedMap
from backends.state.entries import Entries
from backends.state.store import without
from backends.state.timers import TimerSet
from backends.state.value import KeyedValue
from stateformat.checkpoint import ReadTask
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.hashing import DEFAULT_KEY_HASH
from stateformat.key_groups import check_parallelism, default_max_parallelism
from stateformat.model import Kind, Mode, Operator, State
from stateformat.schema import KEY_GROUP
from stateformat.snapshot import SnapshotWriter

Keyed = KeyedValue | KeyedMap | KeyedList | TimerSet
Kept = TypeVar("Kept", KeyedValue, KeyedMap, KeyedList, TimerSet, Entries)

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
        ceiling = operator.max_parallelism or default_max_parallelism(operator.parallelism)
        check_parallelism(operator.parallelism, ceiling, operator=operator.uid)
        if not 0 <= subtask < operator.parallelism:
            raise InvalidInput(
                f"operator {operator.uid!r} has subtasks 0 to {operator.parallelism - 1}; there is no subtask {subtask}",
                kind=ErrorKind.INVALID_PARALLELISM,
            )
        self.operator = operator
        self.subtask = subtask
        self._max_parallelism = ceiling
        self._declared = {state.name: state for state in states if state.operator == operator.uid}
        self._kept: dict[str, Keyed | Entries] = {}
        for state in self._declared.values():
            if state.mode is Mode.KEYED and state.kind is not None:
                self._kept[state.name] = _KEYED[state.kind](operator, state)
            elif state.mode in _ENTRIES:
                self._kept[state.name] = Entries(state)

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

    def _find(self, name: str, kind: type[Kept], what: str) -> Kept:
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
        for name, task in tasks.items():
            kept = self._kept.get(name)
            if kept is None:
                continue
            current = self._declared[name].current
            if isinstance(kept, Entries):
                kept.replace(task.table(as_schema=current))
                continue
            saved = task.record.graph.operator(self.operator.uid)
            hashed_alike = (saved.max_parallelism, saved.key_hash or DEFAULT_KEY_HASH) == (
                self._max_parallelism,
                self.operator.key_hash or DEFAULT_KEY_HASH,
            )
            for batch in task.batches(as_schema=current):
                groups = batch.column(KEY_GROUP.name).to_numpy() if hashed_alike else None
                kept.restore(without(batch, [KEY_GROUP.name]), groups)

    def snapshot(self, writer: SnapshotWriter) -> None:
        """Write every state that is kept here, or say that it is empty; other states are for the caller to report.

        Row keys are unique by construction and ``_key_group`` is that of the keys, so ``WriteOptions(check_unique=False,
        trust_key_groups=True)`` saves the writer two checks. Nothing may change while this runs.
        """
        for name, kept in self._kept.items():
            rows: pa.Table | None = kept.rows() if isinstance(kept, Entries) else kept.segment_rows()
            if rows is None or not len(rows):
                writer.empty(name)
            else:
                writer.write(name, rows)
