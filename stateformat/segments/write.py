"""Write one segment: the rows of one state of one subtask as a Parquet file (SPEC.md section 5).

Theory of operation. A table is normalized and hashed (``normalize``), sorted (``sort``) and cut
into row groups (``row_groups``). While Arrow encodes one, a thread assembles the next and checks
its row keys. A stream in known order (no groups, or keyed rows with ``_key_group``) is written as
it comes. Any other is sorted first (``external_sort``), in bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ..errors import InvalidState
from ..model import Handle, Mode
from ..schema import KEY_GROUP, has_key_groups
from ..storage import Storage
from ..tables import BATCH_BYTES, HELD_BYTES, cut, prefetch, rebatch, row_sizes
from . import row_groups
from .external_sort import RUN_BYTES, SortedRuns
from .file_writer import SegmentPlace, SegmentWriter, WriteOptions
from .normalize import key_groups_of, normalize_rows, senders_of
from .plain import check_text
from .sort import Clustered, Groups, clustered, group_counts, is_clustered, segment_order
from .unique_keys import RowKeyCheck

# Tables in smaller chunks than this, in rows and in bytes, are copied into larger ones.
_CHUNK_ROWS_MIN: Final = 4096
_CHUNK_BYTES_MIN: Final = 1 << 20
_PIECE_ROWS_MAX: Final = 1 << 18
# Small row groups are prepared several at a time: handing one to another thread costs as much as
# writing a small one.
_SPAN_BYTES: Final = 4 << 20
_DEFAULTS: Final = WriteOptions()


def write_segment(
    storage: Storage,
    place: SegmentPlace,
    data: pa.Table | pa.RecordBatch | Iterable[pa.RecordBatch],
    options: WriteOptions = _DEFAULTS,
) -> Handle:
    """Write all rows of one state of one subtask in one layer, and return the handle.

    Without rows the handle names no segment.

    ``data`` has the declared columns in any order, and the own columns of its kind (SPEC.md 5.1);
    ``_key_group`` and the ids of committables may be missing. Keyed rows may be in any order, but a
    stream with ``_key_group`` must be sorted by it: else call :func:`write_unsorted`. Raises
    ``InvalidState`` for rows that contradict the declaration or repeat a row key; then nothing is
    visible.
    """
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    with SegmentWriter(storage, place, options) as writer:
        if isinstance(data, pa.Table):
            if len(data):
                _write_table(writer, place, _normalize(place, data), options)
            return writer.finish()
        batches = iter(data)
        first = next(batches, None)
        stream = chain([] if first is None else [first], batches)
        mode = place.state.mode
        has_groups = first is not None and KEY_GROUP.name in first.schema.names
        if mode is Mode.IN_FLIGHT or (mode is Mode.KEYED and not has_groups):
            _write_unsorted(writer, place, stream, options)
        else:
            _write_sorted(writer, place, _normalized(place, stream), options)
        return writer.finish()


def write_unsorted(
    storage: Storage, place: SegmentPlace, batches: Iterable[pa.RecordBatch], options: WriteOptions = _DEFAULTS
) -> Handle:
    """As :func:`write_segment`, for a stream in any order, of keyed rows or rows in flight."""
    with SegmentWriter(storage, place, options) as writer:
        _write_unsorted(writer, place, batches, options)
        return writer.finish()


def _normalized(place: SegmentPlace, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    for batch in batches:
        if len(batch):
            yield from cut(_normalize(place, pa.Table.from_batches([batch])), _PIECE_ROWS_MAX, BATCH_BYTES)


def _normalize(place: SegmentPlace, rows: pa.Table) -> pa.Table:
    fill: dict[str, Any] = {}
    if place.state.mode is Mode.COMMITTABLES:
        fill = {"_checkpoint_id": place.checkpoint_id, "_attempt_id": place.attempt_id}
    plain = normalize_rows(
        rows, place.state, schema_id=place.schema_id, delta=place.layer > 0, where=str(place), fill=fill
    )
    check_text(plain, str(place))
    return plain


def _groups(place: SegmentPlace, rows: pa.Table, options: WriteOptions) -> Groups | None:
    """Return the group of each row; None in modes without groups."""
    state = place.state
    if has_key_groups(state):
        return key_groups_of(rows, state, place.operator, trust=options.trust_key_groups, where=str(place))
    return senders_of(rows) if state.mode is Mode.IN_FLIGHT else None


def _write_table(writer: SegmentWriter, place: SegmentPlace, table: pa.Table, options: WriteOptions) -> None:
    table = _in_large_chunks(table)
    groups = _groups(place, table, options)
    row_bytes = 1 + table.nbytes // len(table)
    limit = row_groups.row_limit(
        options.row_group_rows, len(table), row_groups.decoded_bytes_of(table), table.num_columns
    )
    sizes = _uneven_sizes(table, limit)
    if groups is None:
        ordered, counts = table, np.array([len(table)])
    else:
        ordered, counts = clustered(table, place.state, groups)
        writer.counts = counts
        if sizes is not None and isinstance(ordered, Clustered):
            sizes = sizes[segment_order(table, place.state, groups)]
    stops = row_groups.split_table(counts, limit)
    pieces = row_groups.stop_batches([0, *stops], max(1, _SPAN_BYTES // row_bytes))
    if sizes is not None:
        stops, ends = row_groups.split_sizes(stops, counts, sizes, row_groups.row_group_bytes(table.num_columns))
        pieces = row_groups.stop_batches([0, *stops], _SPAN_BYTES, ends[[0, *stops]].tolist())
    # From here on the rows and their groups are needed only in order.
    del table, groups, sizes
    check = _row_key_check(place, options)

    def prepare(stops: Sequence[int]) -> list[pa.Table]:
        """Return consecutive row groups; ``stops`` begins with where the first one starts."""
        rows = ordered.slice(stops[0], stops[-1] - stops[0])
        if check is not None:
            check.add(rows)
        return [rows.slice(start - stops[0], stop - start) for start, stop in pairwise(stops)]

    calls = (partial(prepare, span) for span in pieces)
    cheap = isinstance(ordered, pa.Table) and check is None
    # One worker: the check takes rows in their order.
    with closing((call() for call in calls) if cheap else prefetch(calls)) as prepared:
        for tables in prepared:
            for rows in tables:
                writer.write(rows)
    if check is not None:
        check.finish()


def _in_large_chunks(table: pa.Table) -> pa.Table:
    """Return the table in larger chunks: every chunk costs the encoder a call per column."""
    chunks = max((column.num_chunks for column in table.columns), default=0)
    size_bytes = table.nbytes
    if chunks <= 1 + max(len(table) // _CHUNK_ROWS_MIN, size_bytes // _CHUNK_BYTES_MIN):
        return table
    if size_bytes <= HELD_BYTES:
        return table.combine_chunks()
    return pa.Table.from_batches(rebatch([table], table.schema, _PIECE_ROWS_MAX), schema=table.schema)


def _uneven_sizes(table: pa.Table, limit: int) -> Any:
    """Return the bytes of each row; None if any ``limit`` rows fit in a row group."""
    fixed, varying = row_sizes(table.columns)
    if varying is None or (fixed + int(varying.max())) * limit <= row_groups.split_bytes(table.num_columns):
        return None
    return varying + fixed


def _row_key_check(place: SegmentPlace, options: WriteOptions) -> RowKeyCheck | None:
    wanted = options.check_unique and place.state.mode is Mode.KEYED
    return RowKeyCheck(place.state, str(place)) if wanted else None


def _write_unsorted(
    writer: SegmentWriter, place: SegmentPlace, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> None:
    """Write batches in any order; beyond ``RUN_BYTES`` they wait in a temporary file."""
    pending: list[pa.Table] = []
    size_bytes = 0
    with closing(SortedRuns(place.state)) as runs:

        def set_aside() -> None:
            rows = pa.concat_tables(pending)
            pending.clear()
            groups = _groups(place, rows, options)
            assert groups is not None
            runs.add(rows, groups)

        for rows in _normalized(place, batches):
            pending.append(rows)
            size_bytes += rows.nbytes
            if size_bytes >= RUN_BYTES:
                set_aside()
                size_bytes = 0
        if runs.count:
            if pending:
                set_aside()
            _write_sorted(writer, place, runs.merged(), replace(options, trust_key_groups=True))
        elif pending:
            _write_table(writer, place, pa.concat_tables(pending), options)


def _write_sorted(
    writer: SegmentWriter, place: SegmentPlace, tables: Iterable[pa.Table], options: WriteOptions
) -> None:
    """Write tables in segment order; those of keyed state have ``_key_group``."""
    check = _row_key_check(place, options)
    pending = _PendingRows(writer, options.row_group_rows)
    last = -1
    for rows in tables:
        groups = _groups(place, rows, options)
        if groups is not None:
            if groups[0] < last or not is_clustered(rows, place.state, groups):
                raise InvalidState(
                    f"{place}: a stream with _key_group must be sorted by it, and group {int(groups.min())} follows a "
                    f"greater one; sort it, or leave the column out to have the rows clustered"
                )
            last = int(groups[-1])
        if check is not None:
            check.add(rows)
        pending.add(rows, groups)
        pending.write_full()
    pending.write_all()
    if check is not None:
        check.finish()


class _PendingRows:
    """Rows in segment order that are not yet cut into row groups."""

    def __init__(self, writer: SegmentWriter, row_group_rows: int) -> None:
        self._writer = writer
        self._row_group_rows = row_group_rows
        self._parts: list[tuple[pa.Table, Groups | None]] = []
        self._count = 0
        self._size_bytes = 0
        # The group in which the last row group ends. Its rest shares no row group with the next.
        self._begun = -1

    def add(self, rows: pa.Table, groups: Groups | None) -> None:
        self._parts.append((rows, groups))
        self._count += len(rows)
        self._size_bytes += row_groups.decoded_bytes_of(rows)

    def write_full(self) -> None:
        limit = self._row_limit()
        while self._count >= 2 * row_groups.grown_limit(limit, self._writer.row_groups):
            self._write(limit)

    def write_all(self) -> None:
        while self._count:
            self._write(self._row_limit(), all_rows=True)

    def _row_limit(self) -> int:
        columns = self._parts[0][0].num_columns
        return row_groups.row_limit(self._row_group_rows, self._count, self._size_bytes, columns)

    def _write(self, limit: int, *, all_rows: bool = False) -> None:
        """Write up to 64 row groups; the last one only if ``all_rows`` are there."""
        table = pa.concat_tables(rows for rows, _ in self._parts)
        groups = None if self._parts[0][1] is None else np.concatenate([groups for _, groups in self._parts])
        counts = np.array([len(table)]) if groups is None else group_counts(groups)
        begun = groups is not None and int(groups[0]) == self._begun
        stops = row_groups.split_groups(counts, row_groups.grown_limit(limit, self._writer.row_groups), begun=begun)
        written = 0
        for stop in stops[:64] if all_rows else stops[:-1][:64]:
            # In one chunk: every chunk costs the encoder a call per column.
            self._writer.write(table.slice(written, stop - written).combine_chunks())
            self._writer.add_counts(None if groups is None else groups[written:stop])
            self._begun = -1 if groups is None else int(groups[stop - 1])
            written = stop
        self._parts, self._count, self._size_bytes = [], 0, 0
        if written < len(table):
            self.add(table.slice(written), None if groups is None else groups[written:])


__all__ = ["SegmentPlace", "WriteOptions", "write_segment", "write_unsorted"]
