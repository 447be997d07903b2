"""One operator in one subtask, driven by hand: a context over the real state of a subtask, and what came out.

:class:`Driven` plays what an activation does and nothing more: calls hooks in order, gathers what they emit, fires timers as time
passes, snapshots and restores. Restoring goes through the rows of the states, dealt to another parallelism where asked.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from backends.dataflow.api import Operator, Output
from backends.dataflow.descriptors import ListState, MapState, Timers, ValueState
from backends.dataflow.events import MAX_WATERMARK, MIN_WATERMARK
from backends.state import Entries, KeyedList, KeyedMap, KeyedValue, TimerSet
from stateformat.model import Operator as Place
from stateformat.model import OperatorId

MAX_PARALLELISM = 128
_KINDS: dict[type, Any] = {ValueState: KeyedValue, MapState: KeyedMap, ListState: KeyedList, Timers: TimerSet}


class Context:
    """What an operator asks of its subtask."""

    uid = "op"
    max_parallelism = MAX_PARALLELISM

    def __init__(self, states: Mapping[str, Any], subtask: int, parallelism: int, *, restored: bool) -> None:
        self.states = states
        self.subtask = subtask
        self.parallelism = parallelism
        self.restored = restored
        self.watermark = MIN_WATERMARK

    def value_state(self, name: str) -> Any:
        return self.states[name]

    map_state = list_state = timers = entries = value_state

    def send_to_coordinator(self, message: bytes) -> None:
        raise AssertionError(f"no coordinator hears {message!r}")


class Driven:
    """An operator at work."""

    def __init__(
        self,
        prototype: Operator,
        *inputs: pa.Schema,
        subtask: int = 0,
        parallelism: int = 1,
        restored: Mapping[str, pa.Table] | None = None,
    ) -> None:
        self.prototype = prototype
        self.inputs = inputs
        self.schema = prototype.output_schema(*inputs)
        self.operator = copy.copy(prototype)
        place = Place(OperatorId("op"), parallelism, MAX_PARALLELISM)
        self.states = {}
        for descriptor in prototype.states(*inputs):
            self.states[descriptor.name] = _make(place, descriptor, (restored or {}).get(descriptor.name))
        self.context = Context(self.states, subtask, parallelism, restored=restored is not None)
        self.out: list[pa.RecordBatch] = []
        self.operator.open(self.context)  # type: ignore[arg-type]

    def _emit(self, output: Output) -> None:
        if output is None:
            return
        for batch in [output] if isinstance(output, pa.RecordBatch) else output:
            assert batch.schema == self.schema, (batch.schema, self.schema)
            self.out.append(batch)

    def give(self, batch: pa.RecordBatch | pa.Table, input: int = 0) -> Driven:
        for part in [batch] if isinstance(batch, pa.RecordBatch) else batch.to_batches():
            self._emit(self.operator.process(part, input))
        return self

    def advance(self, timestamp: int) -> Driven:
        self.context.watermark = timestamp
        for name, state in self.states.items():
            if hasattr(state, "due"):
                while (due := state.due(timestamp)) is not None and due.num_rows:
                    self._emit(self.operator.on_timer(due, name))
        return self

    def end_input(self, input: int = 0) -> Driven:
        self._emit(self.operator.end_input(input))
        return self

    def end(self, *inputs: int) -> Driven:
        self.advance(MAX_WATERMARK)
        for number in inputs or (0,):
            self.end_input(number)
        self._emit(self.operator.finish())
        return self

    def taken(self) -> pa.Table:
        """What came out since the last time."""
        table = pa.Table.from_batches(self.out, self.schema)
        self.out = []
        return table

    def snapshot(self) -> dict[str, pa.Table]:
        self.operator.snapshot()
        return {name: state.rows() for name, state in self.states.items()}

    def again(self, **place: int) -> Driven:
        """A new activation from a snapshot of this one; what came out stays behind."""
        return Driven(self.prototype, *self.inputs, restored=self.snapshot(), **place)


def _make(place: Place, descriptor: Any, rows: pa.Table | None) -> Any:
    declared = descriptor.declare("op")
    state = _KINDS[type(descriptor)](place, declared) if type(descriptor) in _KINDS else Entries(declared)
    if isinstance(state, Entries):
        if rows is not None:
            state.replace(rows)
        return state
    for batch in rows.to_batches() if rows is not None else ():
        state.restore(batch)
    return state


def rows_of(table: pa.Table | Iterable[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    """Rows as tuples, sorted as text."""
    table = table if isinstance(table, pa.Table) else pa.Table.from_batches(list(table))
    return sorted(zip(*(column.to_pylist() for column in table.columns), strict=True), key=repr)
