"""Sort a stream of unordered rows in bounded memory, by merging runs (SPEC.md 5.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa

from ..model import Mode, State
from ..schema import KEY_GROUP, has_key_groups
from ..tables import Spill, merge_sorted
from .sort import Groups, clustered

_PIECE_BYTES: Final = 256 << 10
_RUNS_MAX: Final = 32
"""Runs merged at a time; more are first merged into fewer."""
_SLICE_BYTES: Final = 8 << 20
RUN_BYTES: Final = 64 << 20
"""The rows of one run, which are sorted in memory."""


class SortedRuns:
    """Takes tables in any order and returns all rows in segment order. Close it afterwards.

    ``then`` names integer columns without nulls by which rows of one group are ordered too; the
    rows of each table already are.
    """

    def __init__(self, state: State, then: Sequence[str] = ()) -> None:
        self._state = state
        self._keys = [KEY_GROUP.name] if has_key_groups(state) else []
        if state.mode is Mode.IN_FLIGHT:
            self._keys += ["_sender", "_seq"]
        self._keys += then
        self._spill: Spill[int] = Spill(_PIECE_BYTES)
        self.count = 0
        """The number of runs."""

    def add(self, rows: pa.Table, groups: Groups) -> None:
        """Set a run aside. Rows have the columns of a segment, with or without ``_key_group``."""
        ordered, _ = clustered(rows, self._state, groups)
        step = max(1, _SLICE_BYTES * len(rows) // max(1, rows.nbytes))
        for start in range(0, len(rows), step):
            self._spill.add(self.count, ordered.slice(start, min(step, len(rows) - start)))
        self.count += 1

    def merged(self) -> Iterator[pa.Table]:
        """Return all rows, sorted, a few megabytes at a time."""
        return self._merge(self._spill, range(self.count))

    def close(self) -> None:
        self._spill.close()

    def _merge(self, spill: Spill[int], runs: range) -> Iterator[pa.Table]:
        if len(runs) <= _RUNS_MAX:
            streams = [(pa.Table.from_batches([batch]) for batch in spill.read(run)) for run in runs]
            yield from merge_sorted(streams, self._keys)
            return
        starts = range(0, len(runs), _RUNS_MAX)
        with Spill[int](_PIECE_BYTES) as longer:
            for run, start in enumerate(starts):
                for rows in self._merge(spill, runs[start : start + _RUNS_MAX]):
                    longer.add(run, rows)
            yield from self._merge(longer, range(len(starts)))
