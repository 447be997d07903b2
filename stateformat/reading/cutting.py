"""Slices cut again: to some key groups, or into parts of about equal size. Opens nothing.

A slice keeps its handle; only its rows and groups become fewer. The manifest counts the rows of
each key group, so a cut is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import CheckpointError, ErrorKind
from ..graph import Operator
from ..keys import DEFAULT_KEY_HASH, key_group_count
from ..manifest import Manifest
from ..model import Mode, State
from ..schema import SLICE_SCHEMA, has_key_groups
from ..segments import groups_of_keys
from .pieces import SegmentPiece, pieces_of

Groups = npt.NDArray[np.int64]


def groups_of(keys: pa.Table, operator: Operator) -> Groups | None:
    """Return the key groups of keys, ascending, each once; None where nobody can compute them."""
    name = operator.key_hash or DEFAULT_KEY_HASH
    if name != DEFAULT_KEY_HASH and any(map(_has_float, keys.schema.types)):
        return None  # To other systems -0.0 may be another key than 0.0.
    try:
        found = groups_of_keys(keys.columns, key_group_count(operator), name)
    except CheckpointError as error:
        if error.kind not in (ErrorKind.UNKNOWN_KEY_HASH, ErrorKind.UNSUPPORTED_KEY_TYPE):
            raise
        return None
    return np.unique(found).astype(np.int64)


def _has_float(kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return any(_has_float(field.type) for field in kind)
    return bool(pa.types.is_floating(kind))


def cut_to_groups(state: State, manifest: Manifest, slices: pa.Table, groups: Groups) -> pa.Table:
    """Return the parts of slices with key groups that are in ``groups``, in the same order."""
    near = _near(slices, groups)
    return _table(
        row
        for piece, row in _pieces(state, manifest, near)
        for first, last in _runs(piece, groups)
        for row in _cut(piece, row, first, last)
    )


def _near(slices: pa.Table, groups: Groups) -> pa.Table:
    """Return the slices whose range of groups has one that is wanted."""
    ranges = [pc.fill_null(slices[name], -1).to_numpy() for name in ("first_group", "last_group")]
    within = np.searchsorted(groups, ranges[0], "left") < np.searchsorted(groups, ranges[1], "right")
    return slices.filter(pa.array(within))


def _runs(piece: SegmentPiece, groups: Groups) -> Iterator[tuple[int, int]]:
    """Yield the first and last group of runs of wanted groups without rows of others between."""
    wanted = groups[(groups >= piece.first_group) & (groups < piece.end_group)] - piece.first_group
    wanted = wanted[piece.counts[wanted] > 0]
    if not len(wanted):
        return
    ends = np.cumsum(piece.counts)
    breaks = np.flatnonzero(ends[wanted[1:]] - piece.counts[wanted[1:]] > ends[wanted[:-1]])
    firsts = wanted[np.concatenate([[0], breaks + 1])]
    lasts = wanted[np.concatenate([breaks, [len(wanted) - 1]])]
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        yield piece.first_group + first, piece.first_group + last


def split_slices(state: State, manifest: Manifest, slices: pa.Table, parts: int) -> list[pa.Table]:
    """Return up to ``parts`` parts of about equal stored bytes; in order they are the slices.

    A key group of one owner stays whole, with all its layers. Records in flight are cut between
    owners, progress and broadcast state not at all, other modes anywhere.
    """
    if state.mode in (Mode.PROGRESS, Mode.BROADCAST) or parts < 2:
        return [slices]
    if state.mode is Mode.IN_FLIGHT:
        return split_between_owners(slices, parts)
    found = list(_pieces(state, manifest, slices))
    parts = min(parts, sum(piece.rows for piece, _ in found))
    cut = _split_groups if has_key_groups(state) else _split_rows
    tables = [_table(iter(rows)) for rows in cut(found, parts) if rows]
    return tables or [slices]


def split_between_owners(slices: pa.Table, parts: int) -> list[pa.Table]:
    """Return parts that hold all slices of an owner, or none."""
    rows = slices.to_pylist()
    owners = [len(list(group)) for _, group in groupby(rows, key=lambda row: row["subtask"])]
    ends = np.cumsum(owners)
    sizes = np.diff(np.concatenate([[0], np.cumsum([row["bytes"] for row in rows])])[np.append(0, ends)])
    of_part = _parts_of(sizes.astype(np.float64), parts)
    cuts = [0, *ends[np.flatnonzero(np.diff(of_part))].tolist(), len(rows)] if len(rows) else []
    tables = [slices.slice(start, stop - start) for start, stop in pairwise(cuts)]
    return tables or [slices]


_Row = dict[str, Any]


def _split_groups(found: Sequence[tuple[SegmentPiece, _Row]], parts: int) -> list[list[_Row]]:
    owners = [list(group) for _, group in groupby(found, key=lambda one: one[0].subtask)]
    firsts, weights = [], []
    for owned in owners:
        first = min(piece.first_group for piece, _ in owned)
        weight = np.zeros(max(piece.end_group for piece, _ in owned) - first, np.float64)
        for piece, row in owned:
            at = piece.first_group - first
            weight[at : at + len(piece.counts)] += piece.counts * (_size(row) / piece.rows)
        firsts.append(first)
        weights.append(weight)
    of_group = _parts_of(np.concatenate([*weights, np.zeros(0)]), parts)
    cut: list[list[_Row]] = [[] for _ in range(parts)]
    begin = 0
    for owned, first, weight in zip(owners, firsts, weights, strict=True):
        mine = of_group[begin : begin + len(weight)]
        begin += len(weight)
        starts = np.flatnonzero(np.diff(mine, prepend=-1))
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(mine)], strict=True):
            for piece, row in owned:
                cut[mine[start]].extend(_cut(piece, row, first + start, first + stop - 1))
    return cut


def _split_rows(found: Sequence[tuple[SegmentPiece, _Row]], parts: int) -> list[list[_Row]]:
    ends = np.cumsum([_size(row) for _, row in found], dtype=np.float64)
    borders = ends[-1] * np.arange(1, parts) / parts if len(ends) else np.zeros(0)
    cut: list[list[_Row]] = [[] for _ in range(parts)]
    for end, (piece, row) in zip(ends.tolist(), found, strict=True):
        size = _size(row)
        inside = np.rint((borders - end + size) / size * piece.rows)
        cuts = np.clip(np.concatenate([[0], inside, [piece.rows]]), 0, piece.rows).astype(np.int64)
        for part in np.flatnonzero(np.diff(cuts)).tolist():
            start, stop = int(cuts[part]), int(cuts[part + 1])
            cut[part].append(_part(row, piece.row_start + start, stop - start, row["first_group"], row["last_group"]))
    return cut


def _parts_of(weights: npt.NDArray[np.float64], parts: int) -> npt.NDArray[np.int64]:
    """Return the part of each unit, ascending: the one in which its middle lies."""
    ends = np.cumsum(weights)
    total = max(float(ends[-1]), 1e-9) if len(ends) else 1.0
    return np.minimum(((ends - weights / 2) * (parts / total)).astype(np.int64), parts - 1)


def _pieces(state: State, manifest: Manifest, slices: pa.Table) -> Iterator[tuple[SegmentPiece, _Row]]:
    filled = slices.filter(pc.greater(slices["rows"], 0))
    return zip(pieces_of(state, manifest, filled), filled.to_pylist(), strict=True)


def _size(row: _Row) -> float:
    """The bytes of a slice; never 0, so that rows decide where nobody counted bytes."""
    return float(row["bytes"]) or float(row["rows"])


def _cut(piece: SegmentPiece, row: _Row, first: int, last: int) -> Iterator[_Row]:
    """Yield the slice with the groups first … last of a piece, if they have rows there."""
    low, high = max(0, first - piece.first_group), max(0, last + 1 - piece.first_group)
    inside = np.flatnonzero(piece.counts[low:high])
    if len(inside):
        start, rows = int(piece.counts[:low].sum()), int(piece.counts[low:high].sum())
        groups = piece.first_group + low + inside
        yield _part(row, piece.row_start + start, rows, int(groups[0]), int(groups[-1]))


def _part(row: _Row, row_start: int, rows: int, first: int | None, last: int | None) -> _Row:
    size_bytes = row["bytes"] * rows // row["rows"]
    return {**row, "row_start": row_start, "rows": rows, "first_group": first, "last_group": last, "bytes": size_bytes}


def _table(rows: Iterator[_Row]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), SLICE_SCHEMA)
