"""Whole states as slices of segments, made for many small states at once.

Apart from its rows, a state of one handle costs Arrow and numpy calls for tables of one row. So the
handles of consecutive states become slices together, in a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa

from ..findings import Finding
from ..graph import JobGraph
from ..manifest import Ints, Manifest, before, integers, sort_handles, state_runs, take_rows
from ..model import Handle, State
from ..rules import HandleChecks
from ..schema import SLICE_SCHEMA
from .pieces import HandleValues

WINDOW_HANDLES: Final = 256
"""How many handles become slices together; those of one state always do."""
_NUMBER: Final = SLICE_SCHEMA.get_field_index("handle")


class WholeStates:
    """The states of a manifest, each whole. Thread-safe."""

    def __init__(self, graph: JobGraph, manifest: Manifest) -> None:
        self._graph, self._manifest = graph, manifest
        self._bounds: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for name, start, stop in state_runs(manifest.handles):
            self._bounds.setdefault(name, []).append((start, stop))
        self._stops = np.array([runs[-1][1] for runs in self._bounds.values()], np.int64)
        self._window = self._made(np.zeros(0, np.int64))

    def of(self, state: State) -> WholeState:
        """Return the handles of one state."""
        runs = self._bounds.get((state.operator, state.name), [(0, 0)])
        if len(runs) > 1:
            # In a damaged manifest a state may occur twice.
            rows = np.concatenate([np.arange(*run) for run in runs])
            return WholeState(state, self._made(rows), 0, len(rows))
        start, stop = runs[0]
        window = self._window
        if not window.first <= start <= stop <= window.end:
            near = self._stops[: self._stops.searchsorted(start + WINDOW_HANDLES, "right")]
            window = self._made(np.arange(start, max(stop, int(near.max(initial=0)))))
            if not window.is_sorted and stop < window.end:
                window = self._made(np.arange(start, stop))
            self._window = window
        return WholeState(state, window, start - window.first, stop - window.first)

    def _made(self, numbers: Ints) -> _Window:
        return _Window(self._graph, self._manifest, numbers)


class WholeState:
    """The handles of one state: rows ``start`` … ``stop`` − 1 of a window."""

    def __init__(self, state: State, window: _Window, start: int, stop: int) -> None:
        self._state, self._window, self._start, self._stop = state, window, start, stop

    def problems(self) -> Iterator[Finding]:
        """Return what is wrong with them, compared with graph and state."""
        return self._window.checks.problems(self._state, self._start, self._stop)

    def read(self, subtask: int | None) -> tuple[pa.Table, pa.Table, Callable[[], list[Handle]] | None]:
        """Return those that have rows, their slices, and the handles as values.

        All are parts of larger tables. ``subtask``: only what this one wrote, without the values.
        """
        window = self._window
        first, count = int(window.filled[self._start]), int(window.filled[self._stop] - window.filled[self._start])
        handles, slices = window.handles.slice(first, count), window.slices.slice(first, count)
        if subtask is not None:
            mine = pa.array(np.flatnonzero(integers(handles["subtask"]) == subtask))
            handles = take_rows(handles, mine)
            return handles, whole_slices(handles), None
        numbers = window.slices.column(_NUMBER).slice(0, count)
        slices = slices.set_column(_NUMBER, SLICE_SCHEMA.field(_NUMBER), numbers)
        return handles, slices, partial(window.values.of, first, first + count)


class _Window:
    """Some handles, by number, and those that have rows, with every column and as slices."""

    def __init__(self, graph: JobGraph, manifest: Manifest, numbers: Ints) -> None:
        self.first = int(numbers[0]) if len(numbers) else 0
        self.end = self.first + len(numbers)
        every = manifest.rows(pa.array(numbers))
        ordered = sort_handles(every)
        self.is_sorted = ordered is every
        self.checks = HandleChecks(graph, ordered)
        has_rows = integers(every["rows"]) > 0
        self.filled = before(has_rows.astype(np.int64))
        """How many handles before each have rows."""
        self.handles = every if has_rows.all() else every.filter(pa.array(has_rows)).combine_chunks()
        self.slices = whole_slices(self.handles)
        self.values = HandleValues(self.handles)


def whole_slices(handles: pa.Table) -> pa.Table:
    """Return slices of these whole handles, for the subtasks that wrote them."""
    share = integers(handles["rows"]) / np.maximum(integers(handles["segment_rows"]), 1)
    stored = np.rint(share * integers(handles["size_bytes"])).astype(np.int64)
    own = {"handle": pa.array(np.arange(handles.num_rows)), "bytes": pa.array(stored)}
    columns = [own[name] if name in own else handles[name] for name in SLICE_SCHEMA.names]
    return pa.table(columns, schema=SLICE_SCHEMA)
