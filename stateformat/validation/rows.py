"""Checks the rows of one segment against its state and its handles (SPEC.md sections 5.1 to 5.4).

Batches come in the order of the file. Each is checked by itself with the functions that writers
use. Between batches the check keeps the last row's place in the order, the rows per group, and the
row keys of the incomplete group, so memory does not grow with the segment. Each broken rule is
reported once per segment, with the first row that breaks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ErrorKind, InvalidInput, InvalidState
from ..graph import Operator
from ..keys import MAX_PARALLELISM_LIMIT, hash_keys, key_groups, normalize_key_column
from ..manifest import HandleRows, group_faults
from ..model import CheckpointId, Mode, State
from ..schema import KEY_GROUP, has_key_groups
from ..segments import RowKeyCheck, is_clustered, normalize_rows

Report = Callable[[ErrorKind, str, str], None]
"""Called with the kind, the clause, and the rest of a sentence that begins with the segment."""

_DAMAGED = ErrorKind.DAMAGED_SEGMENT


class GroupRows(NamedTuple):
    """The rows of each group of a segment, from the first with rows to the last."""

    first: int
    counts: npt.NDArray[np.int64]

    def spread(self) -> npt.NDArray[np.int64]:
        """Return the rows of every possible group."""
        found = np.zeros(MAX_PARALLELISM_LIMIT, np.int64)
        found[self.first : self.first + len(self.counts)] = self.counts
        return found


@dataclass
class RowsCheck:
    """Takes the batches of a segment by :meth:`add`, then :meth:`finish`. Never raises."""

    operator: Operator
    state: State
    schema_id: int
    delta: bool
    checkpoint_id: CheckpointId
    report: Report
    subtasks: Mapping[str, int] = field(default_factory=dict)
    """For rows in flight that this very checkpoint caught: how many senders and receivers there
    are, by column.
    """

    def __post_init__(self) -> None:
        self.rows = 0
        self.newest_prepared = 0
        self._reported: set[str] = set()
        self._counts = np.zeros(MAX_PARALLELISM_LIMIT, np.int64)
        self._last: tuple[int, ...] = ()
        self._edges: set[str] = set()
        self._open_channels = np.zeros((4, 0), np.int64)
        keyed = self.state.mode is Mode.KEYED and self.state.key_columns
        self._unique = RowKeyCheck(self.state, "it") if keyed else None

    def _report_once(self, kind: ErrorKind, clause: str, rule: str, what: str) -> None:
        if rule not in self._reported:
            self._reported.add(rule)
            self.report(kind, clause, what)

    @property
    def _is_sorted(self) -> bool:
        return not {"order", "range"} & self._reported

    def add(self, batch: pa.RecordBatch) -> None:
        """Check the next rows, which have the columns of the segment."""
        start, self.rows = self.rows, self.rows + batch.num_rows
        if not batch.num_rows:
            return
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            self._report_once(_DAMAGED, "SPEC 3.7", "values", f"holds values that are not of their type: {error}")
            return
        table = pa.Table.from_batches([batch])
        try:
            normalize_rows(table, self.state, schema_id=self.schema_id, delta=self.delta, where="it")
        except InvalidState as error:
            own = error.kind is ErrorKind.NULL_NOT_ALLOWED or self.state.mode is not Mode.KEYED
            clause = "SPEC 5.1" if own else "SPEC 5.4"
            self._report_once(error.kind, clause, f"conform {error.kind}", f"breaks its declaration: {error}")
        self._keys(table)
        groups = self._groups(table, start)
        if groups is not None:
            self._order(table, groups, start)
            self._counts += np.bincount(np.clip(groups, 0, len(self._counts) - 1), minlength=len(self._counts))
        if self._unique is not None and self._is_sorted:
            self._check_unique(lambda check: check.add(table))
        if groups is not None and self.state.mode is Mode.IN_FLIGHT:
            self._channels(table, groups)
        if self.state.mode is Mode.COMMITTABLES:
            self._committables(table)
        if self.state.mode is Mode.PROGRESS:
            self._progress(table)

    def finish(self, segment_rows: int, handles: HandleRows) -> None:
        """Check the row count, and the rows of each group against the handles."""
        if self._unique is not None and self._is_sorted:
            self._check_unique(RowKeyCheck.finish)
        if self.rows != segment_rows:
            what = f"holds {self.rows:,} rows, the manifest says {segment_rows:,}"
            self._report_once(_DAMAGED, "SPEC 4.1", "count", what)
        elif self._last and self._is_sorted:
            for subtask, what in group_faults(self._counts, handles, whole=has_key_groups(self.state)):
                self._report_once(_DAMAGED, "SPEC 4.3", f"groups {subtask}", what)

    @property
    def group_rows(self) -> GroupRows | None:
        """The rows of each group; None in modes without groups, and if there are no rows."""
        filled = np.flatnonzero(self._counts)
        if not len(filled):
            return None
        first = int(filled[0])
        return GroupRows(first, self._counts[first : filled[-1] + 1].copy())

    # ---- rules -----------------------------------------------------------------------------------

    def _check_unique(self, step: Callable[[RowKeyCheck], None]) -> None:
        assert self._unique is not None
        try:
            step(self._unique)
        except InvalidState as error:
            self._report_once(error.kind, "SPEC 5.3", "unique", f"holds a row key twice: {error}")
            self._unique = None

    def _keys(self, table: pa.Table) -> None:
        for name in (*self.state.key_columns, "_map_key"):
            if name in table.column_names and any(
                normalize_key_column(leaf) is not leaf for leaf in _float_leaves(table[name].combine_chunks())
            ):
                what = f"holds -0.0, or a NaN other than the one allowed, in key column {name!r}"
                self._report_once(_DAMAGED, "SPEC 5.3", f"normal {name}", what)

    def _groups(self, table: pa.Table, start: int) -> npt.NDArray[np.int32] | None:
        """Return the verified group of each row, or None in modes without groups."""
        if not has_key_groups(self.state):
            if self.state.mode is not Mode.IN_FLIGHT:
                return None
            return _ints(table["_sender"])
        stored, ceiling = _ints(table[KEY_GROUP.name]), self.operator.max_parallelism or 1
        if stored.min() < 0 or stored.max() >= ceiling:
            what = f"has {KEY_GROUP.name} {stored.min()} to {stored.max()}; it is from 0 to {ceiling - 1}"
            self._report_once(_DAMAGED, "SPEC 5.3", "range", what)
        try:
            columns = [table[name] for name in self.state.key_columns]
            computed = key_groups(hash_keys(columns, self.operator.key_hash or ""), ceiling)
        except InvalidInput as error:
            self._report_once(error.kind, "SPEC 5.3", "hash", f"cannot have its key groups verified: {error}")
            return stored
        wrong = stored != computed
        if wrong.any():
            row = int(wrong.argmax())
            what = (
                f"has key group {stored[row]} on row {start + row}, whose key hashes to {computed[row]} of {ceiling}"
                f" ({int(wrong.sum())} such rows)"
            )
            self._report_once(_DAMAGED, "SPEC 5.3", "hashed", what)
        return stored

    def _order(self, table: pa.Table, groups: npt.NDArray[np.int32], start: int) -> None:
        columns = [groups]
        if self.state.mode is Mode.IN_FLIGHT:
            columns += [table[name].combine_chunks().to_numpy(zero_copy_only=False) for name in ("_sender", "_seq")]
        first, last = (tuple(int(column[at]) for column in columns) for at in (0, -1))
        if (self._last and first < self._last) or not is_clustered(table, self.state, groups):
            by = "(group, _sender, _seq)" if self.state.mode is Mode.IN_FLIGHT else KEY_GROUP.name
            self._report_once(_DAMAGED, "SPEC 5.2", "order", f"is not sorted by {by}, at or after row {start}")
        self._last = last

    def _committables(self, table: pa.Table) -> None:
        bounds = pc.min_max(table["_checkpoint_id"]).as_py()
        self.newest_prepared = max(self.newest_prepared, bounds["max"] or 0)
        if bounds["max"] is not None and bounds["max"] > self.checkpoint_id:
            what = f"holds committables prepared under {bounds['min']} to {bounds['max']}"
            self._report_once(_DAMAGED, "SPEC 5.1", "prepared", f"{what}; this is checkpoint {self.checkpoint_id}")

    def _channels(self, table: pa.Table, groups: npt.NDArray[np.int32]) -> None:
        """Check that no record of a channel appears twice (section 5.1).

        A repeated record has the same key, so it is in the same group. Rows of one group, sender
        and number are neighbors; the last of them are kept for the next batch.
        """
        for name, count in self.subtasks.items():
            bounds = pc.min_max(table[name]).as_py()
            if count <= bounds["max"] < MAX_PARALLELISM_LIMIT:
                what = f"has {name} {bounds['max']}; the rows were caught by this checkpoint, where it is from 0 to"
                self._report_once(_DAMAGED, "SPEC 5.1", name, f"{what} {count - 1}")
        columns = [groups, *(table[name].combine_chunks().to_numpy() for name in ("_sender", "_seq", "_receiver"))]
        rows = np.stack([column.astype(np.int64) for column in columns])
        rows = np.concatenate([self._open_channels, rows], axis=1)
        rows = rows[:, np.lexsort(rows[::-1])]
        twice = (rows[:, 1:] == rows[:, :-1]).all(axis=0)
        if twice.any():
            _, sender, number, receiver = rows[:, int(twice.argmax())].tolist()
            what = (
                f"holds record {number} of the channel from {sender} to {receiver} twice ({int(twice.sum())} such rows)"
            )
            self._report_once(_DAMAGED, "SPEC 5.1", "channel", what)
        # There are no more receivers than this.
        self._open_channels = rows[:, (rows[:3] == rows[:3, -1:]).all(axis=0)][:, -MAX_PARALLELISM_LIMIT:]

    def _progress(self, table: pa.Table) -> None:
        """Check that each edge has at most one row (section 6.2); the edge may be gone."""
        for edge in table["_edge"].to_pylist():
            if edge in self._edges:
                self._report_once(_DAMAGED, "SPEC 6.2", "edge", f"has the progress of edge {edge!r} twice")
            self._edges.add(edge)


def _float_leaves(array: pa.Array) -> Iterator[pa.Array]:
    """Yield the floats in a key column; nulls become zeros."""
    if pa.types.is_struct(array.type):
        for child in array.flatten():
            yield from _float_leaves(child)
    elif pa.types.is_floating(array.type):
        yield pc.fill_null(array, pa.scalar(0.0, array.type)) if array.null_count else array


def _ints(column: Any) -> npt.NDArray[np.int32]:
    found: npt.NDArray[np.int32] = pc.fill_null(column, -1).to_numpy()
    return found
