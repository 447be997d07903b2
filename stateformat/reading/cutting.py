"""Cut slices to some key groups, or into parts of about equal size, without opening files.

A slice keeps its handle; only its rows and groups become fewer. The manifest counts the rows of
each key group, so a cut is arithmetic on columns.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import CheckpointError, ErrorKind
from ..graph import Operator
from ..keys import DEFAULT_KEY_HASH, key_group_count, subtask_of_key_group
from ..manifest import Ints, before, integers, lists, one_chunk, spread
from ..model import Mode, State
from ..schema import has_key_groups
from ..segments import groups_of_keys

Groups: TypeAlias = Ints


def groups_of(keys: pa.Table, operator: Operator) -> Groups | None:
    """Return the key groups of keys, ascending, each once; None if they cannot be computed."""
    name = operator.key_hash or DEFAULT_KEY_HASH
    if name != DEFAULT_KEY_HASH and any(map(_has_float, keys.schema.types)):
        return None  # In other systems -0.0 and 0.0 may be different keys.
    try:
        found = groups_of_keys(keys.columns, key_group_count(operator), name)
    except CheckpointError as error:
        if error.kind not in (ErrorKind.UNKNOWN_KEY_HASH, ErrorKind.UNSUPPORTED_KEY_TYPE):
            raise
        return None
    return np.unique(found).astype(np.int64)


def key_group_of(key: pa.Table, operator: Operator) -> tuple[int, int] | None:
    """Return the key group of one key and the subtask that owns it.

    None if the key group cannot be computed.
    """
    groups = groups_of(key, operator)
    if groups is None:
        return None
    group = int(groups[0])
    owner = subtask_of_key_group(group, parallelism=operator.parallelism, max_parallelism=key_group_count(operator))
    return group, int(owner)


def _has_float(kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return any(_has_float(field.type) for field in kind)
    return bool(pa.types.is_floating(kind))


def cut_to_groups(handles: pa.Table, slices: pa.Table, groups: Groups) -> pa.Table:
    """Return the parts of slices with key groups that are in ``groups``, in the same order."""
    ranges = [integers(slices[name]) for name in ("first_group", "last_group")]
    near = np.searchsorted(groups, ranges[0], "left") < np.searchsorted(groups, ranges[1], "right")
    slices = slices.filter(pa.array(near))
    runs = _runs_of(handles, slices)
    runs = runs.at(np.flatnonzero(np.isin(runs.group, groups)))
    return _cut(slices, runs, _joined(runs, runs.of_slice))


def split_slices(state: State, handles: pa.Table, slices: pa.Table, parts: int) -> list[pa.Table]:
    """Return up to ``parts`` parts of about equal stored bytes; in order they give the slices.

    A key group of one owner stays whole, with all its layers. Records in flight are cut between
    owners, progress and broadcast state not at all, other modes anywhere.
    """
    if state.mode in (Mode.PROGRESS, Mode.BROADCAST) or parts < 2:
        return [slices]
    if state.mode is Mode.IN_FLIGHT:
        return split_between_owners(slices, parts)
    slices = slices.filter(pc.greater(slices["rows"], 0))
    if not len(slices):
        return [slices]
    parts = min(parts, pc.sum(slices["rows"]).as_py())
    if not has_key_groups(state):
        return _split_rows(slices, parts)
    runs = _runs_of(handles, slices)
    # In each owner's groups, all layers of a group are one unit, as large as its rows.
    unit = _owners(slices)[runs.of_slice] * (int(runs.group.max(initial=0)) + 1) + runs.group
    units, unit_of_run = np.unique(unit, return_inverse=True)
    sizes = _sizes(slices) / integers(slices["rows"])
    weights = np.bincount(unit_of_run, runs.rows * sizes[runs.of_slice], minlength=len(units))
    part = _parts_of(weights, parts)[unit_of_run]
    ordered = np.argsort(part, kind="stable")
    runs, part = runs.at(ordered), part[ordered]
    begins = _joined(runs, part * len(slices) + runs.of_slice)
    return _tables(_cut(slices, runs, begins), part[begins])


def split_between_owners(slices: pa.Table, parts: int) -> list[pa.Table]:
    """Return parts that hold all slices of an owner or none of them."""
    if not len(slices):
        return [slices]
    owners = _owners(slices)
    return _tables(slices, _parts_of(np.bincount(owners, integers(slices["bytes"])), parts)[owners])


def _split_rows(slices: pa.Table, parts: int) -> list[pa.Table]:
    """Cut slices without groups at the rows that are at equal shares of the stored bytes."""
    sizes, rows = _sizes(slices), integers(slices["rows"])
    ends, rows_before = np.cumsum(sizes), before(rows)
    borders = ends[-1] * np.arange(1, parts) / parts
    at = np.minimum(np.searchsorted(ends, borders), len(ends) - 1)
    inside = np.rint((borders - ends[at] + sizes[at]) / sizes[at] * rows[at]).astype(np.int64)
    cuts = rows_before[at] + np.clip(inside, 0, rows[at])
    begins = np.unique(np.concatenate([rows_before[:-1], cuts[cuts < rows_before[-1]]]))
    of_slice = np.searchsorted(rows_before, begins, "right") - 1
    start = integers(slices["row_start"])[of_slice] + begins - rows_before[of_slice]
    runs = _Runs(of_slice, np.full_like(begins, -1), start, np.diff(begins, append=rows_before[-1]))
    return _tables(_cut(slices, runs, np.arange(len(begins))), np.searchsorted(cuts, begins, "right"))


class _Runs(NamedTuple):
    """Rows of one key group in one slice, in the order of slices and groups; none is empty."""

    of_slice: Ints
    group: Ints
    """-1 if the slice is not cut by groups; then it keeps its own."""
    start: Ints
    rows: Ints

    def at(self, positions: Ints) -> _Runs:
        """Return the runs at these positions."""
        return _Runs(*(column[positions] for column in self))


def _runs_of(handles: pa.Table, slices: pa.Table) -> _Runs:
    chosen, row_start, rows = (integers(slices[name]) for name in ("handle", "row_start", "rows"))
    starts, ends, counts = lists(one_chunk(handles["rows_per_group"]))
    low, high = starts[chosen], ends[chosen]
    base = integers(handles["first_group"])[chosen]
    first, last = (integers(slices[name]) for name in ("first_group", "last_group"))
    begin = np.clip(low + first - base, low, high)
    end = np.clip(low + last - base + 1, begin, high)
    owner, nth = spread(end - begin)
    place, above = begin[owner] + nth, before(counts)
    start = integers(handles["row_start"])[chosen][owner] + above[place] - above[low][owner]
    # For a part of one sender's rows, the group has more rows than the slice.
    stop = np.minimum(start + counts[place], (row_start + rows)[owner])
    start = np.maximum(start, row_start[owner])
    runs = _Runs(owner, base[owner] + place - low[owner], start, stop - start)
    return runs.at(np.flatnonzero(runs.rows > 0))


def _joined(runs: _Runs, code: Ints) -> Ints:
    """Return where stretches begin: consecutive runs with one code whose rows are contiguous."""
    goes_on = (code[1:] == code[:-1]) & (runs.start[1:] == runs.start[:-1] + runs.rows[:-1])
    return np.flatnonzero(np.append(True, ~goes_on)[: len(code)])


def _cut(slices: pa.Table, runs: _Runs, begins: Ints) -> pa.Table:
    """Return a slice for each stretch of runs; ``begins`` are their first ones."""
    if not len(begins):
        return slices.slice(0, 0)
    ends = np.append(begins[1:], len(runs.start)) - 1
    of_slice = runs.of_slice[begins]
    found = slices.take(pa.array(of_slice))
    rows = runs.start[ends] + runs.rows[ends] - runs.start[begins]
    stored, whole = integers(found["bytes"]), integers(found["rows"])
    columns: dict[str, pa.Array] = {
        "row_start": pa.array(runs.start[begins]),
        "rows": pa.array(rows),
        # In this order no product exceeds 64 bits.
        "bytes": pa.array(stored // whole * rows + stored % whole * rows // whole),
    }
    if runs.group[0] >= 0:
        columns["first_group"] = pa.array(runs.group[begins].astype(np.int32))
        columns["last_group"] = pa.array(runs.group[ends].astype(np.int32))
    return pa.table([columns.get(name, found[name]) for name in slices.column_names], schema=slices.schema)


def _owners(slices: pa.Table) -> Ints:
    """Number the owners of slices from 0; the slices of an owner are consecutive."""
    subtask = integers(slices["subtask"])
    return np.cumsum(np.diff(subtask, prepend=subtask[:1]) != 0)


def _sizes(slices: pa.Table) -> npt.NDArray[np.float64]:
    """Return the bytes of slices; never 0, so that rows decide if the bytes are unknown."""
    stored = integers(slices["bytes"])
    return np.where(stored > 0, stored, integers(slices["rows"])).astype(np.float64)


def _parts_of(weights: npt.NDArray[Any], parts: int) -> Ints:
    """Return the part of each unit, ascending: the one that contains its middle."""
    ends = np.cumsum(weights)
    total = max(float(ends[-1]), 1e-9)
    return np.minimum(((ends - weights / 2) * (parts / total)).astype(np.int64), parts - 1)


def _tables(slices: pa.Table, part: Ints) -> list[pa.Table]:
    """Return the slices of each part that has any; the parts of ``slices`` ascend."""
    borders = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(slices)]
    return [slices.slice(start, stop - start) for start, stop in pairwise(borders)]
