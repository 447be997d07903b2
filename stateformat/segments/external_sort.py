"""A stream of rows in no order, sorted as a segment has them, in bounded memory (SPEC.md section 5.2).

Theory of operation. Rows are gathered until they are some megabytes, sorted, and set aside as a *run*. When all have come
the runs are merged: of each run the first piece is held, and the least of the last rows of these pieces is a bound up to
which every row that can still come is known. These rows are sorted and given out, and the pieces that are used up are
followed by the next ones of their runs. Many runs are first merged to fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..model import Mode, State
from ..schema import KEY_GROUP, has_key_groups
from ..tables import Spill, take_rows
from .sort import Groups, clustered

_PIECE_BYTES: Final = 256 << 10
_RUNS_MAX: Final = 32
"""So many runs are merged at a time, with a piece of each in memory."""
_SLICE_BYTES: Final = 8 << 20
RUN_BYTES: Final = 64 << 20
"""What is sorted in memory and becomes a run."""

_Order = list[npt.NDArray[np.int64]]
"""Columns by which rows are sorted, the first one first."""


class SortedRuns:
    """Takes tables in any order, and gives all of their rows back sorted by group; rows in flight by sender and number too.

    Close it after the last row was taken.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._spill: Spill[int] = Spill(_PIECE_BYTES)
        self.count = 0
        """How many runs there are."""

    def add(self, rows: pa.Table, groups: Groups) -> None:
        """Set a run aside. Rows have the columns of a segment; ``_key_group`` is added where the state has it."""
        ordered, _ = clustered(rows, self._state, groups)
        step = max(1, _SLICE_BYTES * len(rows) // max(1, rows.nbytes))
        for start in range(0, len(rows), step):
            self._spill.add(self.count, ordered.slice(start, min(step, len(rows) - start)))
        self.count += 1

    def merged(self) -> Iterator[pa.Table]:
        """All rows, sorted, a few megabytes at a time."""
        runs = [self._spill.read(run) for run in range(self.count)]
        yield from self._merge(runs)

    def close(self) -> None:
        """Give the temporary file back."""
        self._spill.close()

    def _merge(self, runs: list[Iterator[pa.RecordBatch]]) -> Iterator[pa.Table]:
        if len(runs) <= _RUNS_MAX:
            yield from self._merge_few(runs)
            return
        longer: Spill[int] = Spill(_PIECE_BYTES)
        with longer:
            count = 0
            for start in range(0, len(runs), _RUNS_MAX):
                for rows in self._merge_few(runs[start : start + _RUNS_MAX]):
                    longer.add(count, rows)
                count += 1
            yield from self._merge([longer.read(run) for run in range(count)])

    def _merge_few(self, runs: Iterable[Iterator[pa.RecordBatch]]) -> Iterator[pa.Table]:
        heads = [head for head in (_Head(run, self._order_of) for run in runs) if head.more()]
        while heads:
            bound = min(head.last() for head in heads)
            parts = [head.take(bound) for head in heads]
            rows = pa.concat_tables(part for part in parts if len(part))
            yield self._sorted(rows)
            heads = [head for head in heads if head.more()]

    def _order_of(self, rows: pa.Table) -> _Order:
        names = [KEY_GROUP.name] if has_key_groups(self._state) else []
        if self._state.mode is Mode.IN_FLIGHT:
            names += ["_sender", "_seq"]
        return [rows[name].to_numpy().astype(np.int64) for name in names]

    def _sorted(self, rows: pa.Table) -> pa.Table:
        order = self._order_of(rows)
        places = np.lexsort(order[::-1])
        if (places[1:] > places[:-1]).all():
            return rows
        columns = [take_rows(column, places) for column in rows.columns]
        return pa.Table.from_arrays(columns, schema=rows.schema)


class _Head:
    """The rows of a run that come next."""

    def __init__(self, run: Iterator[pa.RecordBatch], order_of: Callable[[pa.Table], _Order]) -> None:
        self._run = run
        self._order_of = order_of
        self._rows: pa.Table | None = None
        self._order: _Order = []

    def more(self) -> bool:
        """Whether there are any; the next piece is read where need be."""
        if self._rows is None:
            batch = next(self._run, None)
            if batch is None:
                return False
            self._rows = pa.Table.from_batches([batch])
            self._order = self._order_of(self._rows)
        return True

    def last(self) -> tuple[int, ...]:
        """Where in the order the last of them stands."""
        return tuple(int(column[-1]) for column in self._order)

    def take(self, bound: tuple[int, ...]) -> pa.Table:
        """Those that stand at ``bound`` or before it."""
        assert self._rows is not None
        start, count = 0, len(self._rows)
        for column, value in zip(self._order, bound, strict=True):
            level = column[start:count]
            start, count = start + int(level.searchsorted(value)), start + int(level.searchsorted(value, "right"))
        taken, rest = self._rows.slice(0, count), self._rows.slice(count)
        self._rows = rest if len(rest) else None
        self._order = [column[count:] for column in self._order]
        return taken
