"""Slices with the handles that they cut: what a reader opens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import InvalidInput
from ..manifest import Manifest, one_chunk, take_rows
from ..model import Handle, State

# What handles of one segment, layer and schema agree in.
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
        """The group behind the last one."""
        return self.first_group + len(self.counts)

    def rows_before(self, group: int) -> int:
        """Return how many rows of the slice come before a group."""
        return int(self.counts[: max(0, group - self.first_group)].sum())


def pieces_of(state: State, manifest: Manifest, slices: pa.Table) -> list[SegmentPiece]:
    """Return the slices that have rows. Raises ``InvalidInput`` for one that fits no handle."""
    rows = [row for row in slices.to_pylist() if row["rows"]]
    if not rows:
        return []
    names = {(row["operator"], row["state"]) for row in rows}
    numbers = [row["handle"] for row in rows]
    if names != {(state.operator, state.name)} or min(numbers) < 0 or max(numbers) >= len(manifest.handles):
        raise InvalidInput(
            f"slices name states {sorted(names)} and handles up to {max(numbers)} of {len(manifest.handles)}"
        )
    chosen = take_rows(manifest.handles, pa.array(numbers, pa.int64()))
    counts = one_chunk(chosen["rows_per_group"])
    others = chosen.drop_columns(["rows_per_group"]).to_pylist()
    pieces = []
    for number, (row, fields) in enumerate(zip(rows, others, strict=True)):
        of_group = counts[number].values
        handle = Handle(**fields, rows_per_group=None if of_group is None else of_group.to_numpy())
        if (handle.operator, handle.state) not in names:
            raise InvalidInput(f"a slice of {names} names a handle of state {handle.state!r} of {handle.operator!r}")
        first, cut = _cut_counts(handle, row["row_start"] - handle.row_start, row["rows"])
        wanted = (row["first_group"], row["last_group"])
        if len(cut) and None not in wanted and not wanted[0] <= first <= first + len(cut) - 1 <= wanted[1]:
            raise InvalidInput(
                f"a slice of {handle.path} should hold groups {wanted[0]} to {wanted[1]}, but its rows are of groups "
                f"{first} to {first + len(cut) - 1}; plan again from this manifest"
            )
        pieces.append(SegmentPiece(row["subtask"], handle, row["row_start"], row["rows"], first, cut))
    return pieces


def coalesced(pieces: Iterable[SegmentPiece]) -> list[SegmentPiece]:
    """Join pieces that continue in one segment, so that they open it once and share row groups."""
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
    """Sum the rows of each group, from the least group of the pieces on."""
    first = min(piece.first_group for piece in pieces)
    counts = np.zeros(max(piece.end_group for piece in pieces) - first, np.int64)
    for piece in pieces:
        counts[piece.first_group - first :][: len(piece.counts)] += piece.counts
    return counts


def _cut_counts(handle: Handle, low: int, rows: int) -> tuple[int, npt.NDArray[np.int64]]:
    """Return the first group and the rows of each in ``rows`` rows from a handle's row ``low``."""
    if handle.rows_per_group is None or handle.first_group is None:
        return 0, np.zeros(0, np.int64)
    ends = np.concatenate([[0], np.cumsum(np.asarray(handle.rows_per_group, np.int64))])
    counts = np.diff(np.clip(ends, low, low + rows))
    present = np.flatnonzero(counts)
    if not len(present):
        return 0, np.zeros(0, np.int64)
    return handle.first_group + int(present[0]), counts[present[0] : present[-1] + 1]
