"""Slices with the handles that they cut: what a reader opens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import InvalidInput
from ..manifest import Manifest, one_chunk, take_rows
from ..model import Handle, State

_PLAIN: Final = Handle._fields[: Handle._fields.index("rows_per_group")]
# What handles of one segment, layer and schema have in common.
_OF_LAYER: Final = ("path", "layer", "schema_id")
_OF_SEGMENT: Final = ("digest", "footer_digest", "footer_bytes", "size_bytes", "uncompressed_bytes", "segment_rows")


@dataclass(frozen=True)
class SegmentPiece:
    """A slice with the handle that it cuts."""

    subtask: int | None
    handle: Handle
    row_start: int
    rows: int
    first_group: int
    counts: npt.NDArray[np.int64]
    """Rows of each group of the slice, from ``first_group`` on; empty in modes without groups."""

    @property
    def end_group(self) -> int:
        """The group after the last one."""
        return self.first_group + len(self.counts)

    def rows_before(self, group: int) -> int:
        """Return how many rows of the slice come before a group."""
        return int(self.counts[: max(0, group - self.first_group)].sum())


class HandleValues:
    """Handles of a table as values; all are made when some are first requested."""

    def __init__(self, handles: pa.Table) -> None:
        self._handles = handles
        self._all: list[Handle] | None = None

    def of(self, start: int, stop: int) -> list[Handle]:
        """Return those from ``start`` to ``stop`` − 1."""
        if self._all is None:
            try:
                self._all = _values(self._handles)
            except UnicodeDecodeError:
                # Other handles are damaged.
                return _values(self._handles.slice(start, stop - start))
        return self._all[start:stop]


def pieces_of(
    state: State, manifest: Manifest, slices: pa.Table, values: Callable[[], list[Handle]] | None = None
) -> list[SegmentPiece]:
    """Return the slices that have rows. Raises ``InvalidInput`` for one that fits no handle.

    ``values`` gives the handles, if each slice is a whole one of them.
    """
    if values is not None:
        return [
            _piece(state, handle, handle.subtask, handle.row_start, handle.rows, handle.first_group, handle.last_group)
            for handle in values()
            if handle.rows
        ]
    rows = [row for row in slices.to_pylist() if row["rows"]]
    if not rows:
        return []
    names = {(row["operator"], row["state"]) for row in rows}
    numbers = [row["handle"] for row in rows]
    if names != {(state.operator, state.name)} or min(numbers) < 0 or max(numbers) >= len(manifest.handles):
        raise InvalidInput(
            f"slices name states {sorted(names)} and handles up to {max(numbers)} of {len(manifest.handles)}"
        )
    cuts = ("subtask", "row_start", "rows", "first_group", "last_group")
    handles = _values(take_rows(manifest.handles, pa.array(numbers, pa.int64())))
    return [_piece(state, handle, *(row[name] for name in cuts)) for row, handle in zip(rows, handles, strict=True)]


def _values(handles: pa.Table) -> list[Handle]:
    counts = one_chunk(handles["rows_per_group"])
    groups = [None if of_one.values is None else of_one.values.to_numpy() for of_one in counts]
    columns = [handles[name].to_pylist() for name in _PLAIN]
    return [Handle(*values) for values in zip(*columns, groups, strict=True)]


def _piece(
    state: State, handle: Handle, subtask: int | None, row_start: int, rows: int, low: int | None, high: int | None
) -> SegmentPiece:
    if (handle.operator, handle.state) != (state.operator, state.name):
        name = f"{state.name!r} of {state.operator!r}"
        raise InvalidInput(f"a slice of {name} names a handle of state {handle.state!r} of {handle.operator!r}")
    first, cut = _cut_counts(handle, row_start - handle.row_start, rows)
    if len(cut) and low is not None and high is not None and not low <= first <= first + len(cut) - 1 <= high:
        raise InvalidInput(
            f"a slice of {handle.path} should hold groups {low} to {high}, but its rows are of groups {first} to "
            f"{first + len(cut) - 1}; plan again from this manifest"
        )
    return SegmentPiece(subtask, handle, row_start, rows, first, cut)


def coalesced(pieces: Iterable[SegmentPiece]) -> list[SegmentPiece]:
    """Join contiguous pieces of one segment, so it is opened once and row groups are shared."""
    runs: list[list[SegmentPiece]] = []
    for piece in pieces:
        if runs and _continues(runs[-1][-1], piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [run[0] if len(run) == 1 else _as_one(run) for run in runs]


def _continues(piece: SegmentPiece, after: SegmentPiece) -> bool:
    return (
        after.row_start == piece.row_start + piece.rows
        and after.subtask == piece.subtask
        and all(getattr(after.handle, name) == getattr(piece.handle, name) for name in (*_OF_LAYER, *_OF_SEGMENT))
        and (len(after.counts) > 0) is (len(piece.counts) > 0)
        and after.first_group >= piece.end_group - 1
    )


def _as_one(run: Sequence[SegmentPiece]) -> SegmentPiece:
    first = run[0]
    rows = sum(piece.rows for piece in run)
    counts = group_counts(run)
    handle = first.handle._replace(row_start=first.row_start, rows=rows)
    if len(counts):
        last_group = run[-1].end_group - 1
        handle = handle._replace(first_group=first.first_group, last_group=last_group, rows_per_group=counts.tolist())
    return replace(first, handle=handle, rows=rows, counts=counts)


def group_counts(pieces: Sequence[SegmentPiece]) -> npt.NDArray[np.int64]:
    """Sum the rows of each group, from the lowest group of the pieces on."""
    first = min(piece.first_group for piece in pieces)
    counts = np.zeros(max(piece.end_group for piece in pieces) - first, np.int64)
    for piece in pieces:
        counts[piece.first_group - first :][: len(piece.counts)] += piece.counts
    return counts


def _cut_counts(handle: Handle, low: int, rows: int) -> tuple[int, npt.NDArray[np.int64]]:
    """Return the first group and the rows of each, in ``rows`` rows from a handle's row ``low``."""
    if handle.rows_per_group is None or handle.first_group is None:
        return 0, np.zeros(0, np.int64)
    counts: npt.NDArray[np.int64] = np.asarray(handle.rows_per_group, np.int64)
    if low == 0 and len(counts) and counts.min() > 0 and counts.sum() == rows:
        return handle.first_group, counts
    ends = np.concatenate([[0], np.cumsum(counts)])
    counts = np.diff(np.clip(ends, low, low + rows))
    present = np.flatnonzero(counts)
    if not len(present):
        return 0, np.zeros(0, np.int64)
    return handle.first_group + int(present[0]), counts[present[0] : present[-1] + 1]
