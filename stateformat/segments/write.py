"""Write one segment: the rows of one state of one subtask as a Parquet file (SPEC.md section 5).

Theory of operation. A table is conformed to its declaration, given key groups (``rows``), and put in order
(``clustering``). Its row groups are cut beforehand (``row_groups``), and while Arrow encodes one, the next is put together
and checked for duplicate row keys in another thread; both leave the interpreter's lock alone. ``segments.file_writer`` makes the
file.

A stream of batches is written as it comes where its order is known to be right: in the modes without groups, and for keyed
rows that carry ``_key_group``. Other streams are sorted first; what is more than some megabytes waits in a temporary file
(``sorting``). Either way memory is bounded, in bytes and not in rows.
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
from .external_sort import RUN_BYTES, SortedRuns
from .file_writer import SegmentPlace, SegmentWriter, WriteOptions
from .normalize import cluster, key_groups_of, normalize_rows, senders_of
from .row_groups import (
    decoded_bytes_of,
    grown_limit,
    row_group_bytes,
    row_limit,
    split_bytes,
    split_groups,
    split_sizes,
    split_table,
    stop_batches,
)
from .sort import Clustered, Groups, clustered, group_counts, is_clustered, segment_order
from .unique_keys import RowKeyCheck

# Tables in smaller chunks than this, in rows and in bytes, are copied into larger ones.
_CHUNK_ROWS_MIN: Final = 4096
_CHUNK_BYTES_MIN: Final = 1 << 20
_PIECE_ROWS_MAX: Final = 1 << 18
# Row groups that are small are prepared several at a time: each hand-over to another thread costs as much as a small one.
_SPAN_BYTES: Final = 4 << 20
_DEFAULTS: Final = WriteOptions()


def write_segment(
    storage: Storage,
    place: SegmentPlace,
    data: pa.Table | pa.RecordBatch | Iterable[pa.RecordBatch],
    options: WriteOptions = _DEFAULTS,
) -> Handle:
    """Write all rows of one state of one subtask in one layer; returns their handle. No rows: a handle without a segment.

    ``data`` has the declared columns by name in any order, and the own columns of its kind (SPEC.md section 5.1).
    ``_key_group`` may be left out and is computed; ``_checkpoint_id`` and ``_attempt_id`` of committables may, and are those
    of ``place``. Keyed rows come in any order. A stream whose batches carry ``_key_group`` is written as it comes, with
    about two row groups in memory, and must be sorted by it, unless :func:`write_unsorted` is called.

    Raises ``InvalidState``, the writer's fault, where the rows contradict the declaration or a row key stands twice, and
    ``StorageError``; nothing is visible then.
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
    """The same for a stream in any order, whether its batches carry ``_key_group`` or not; of keyed rows or rows in flight."""
    with SegmentWriter(storage, place, options) as writer:
        _write_unsorted(writer, place, batches, options)
        return writer.finish()


def _normalized(place: SegmentPlace, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows as the segment has them, some megabytes at a time."""
    for batch in batches:
        if len(batch):
            yield from cut(_normalize(place, pa.Table.from_batches([batch])), _PIECE_ROWS_MAX, BATCH_BYTES)


def _normalize(place: SegmentPlace, rows: pa.Table) -> pa.Table:
    fill: dict[str, Any] = {}
    if place.state.mode is Mode.COMMITTABLES:
        fill = {"_checkpoint_id": place.checkpoint_id, "_attempt_id": place.attempt_id}
    return normalize_rows(
        rows, place.state, schema_id=place.schema_id, delta=place.layer > 0, where=str(place), fill=fill
    )


def _groups(place: SegmentPlace, rows: pa.Table, options: WriteOptions) -> Groups | None:
    """The group of each row; None in modes without groups."""
    state = place.state
    if has_key_groups(state):
        return key_groups_of(rows, state, place.operator, trust=options.trust_key_groups, where=str(place))
    return senders_of(rows) if state.mode is Mode.IN_FLIGHT else None


def _write_table(writer: SegmentWriter, place: SegmentPlace, table: pa.Table, options: WriteOptions) -> None:
    table = _in_large_chunks(table)
    groups = _groups(place, table, options)
    row_bytes = 1 + table.nbytes // len(table)
    limit = row_limit(options.row_group_rows, len(table), decoded_bytes_of(table), table.num_columns)
    sizes = _uneven_sizes(table, limit)
    if groups is None:
        ordered, counts = table, np.array([len(table)])
    else:
        ordered, counts = clustered(table, place.state, groups)
        writer.counts = counts
        if sizes is not None and isinstance(ordered, Clustered):
            sizes = sizes[segment_order(table, place.state, groups)]
    stops = split_table(counts, limit)
    pieces = stop_batches([0, *stops], max(1, _SPAN_BYTES // row_bytes))
    if sizes is not None:
        stops, ends = split_sizes(stops, counts, sizes, row_group_bytes(table.num_columns))
        pieces = stop_batches([0, *stops], _SPAN_BYTES, ends[[0, *stops]].tolist())
    # From here on the rows and their groups are needed in order only.
    del table, groups, sizes
    check = _row_key_check(place, options)

    def prepare(stops: Sequence[int]) -> list[pa.Table]:
        """Row groups that follow each other; ``stops`` begins with where the first one starts."""
        rows = ordered.slice(stops[0], stops[-1] - stops[0])
        if check is not None:
            check.add(rows)
        return [rows.slice(start - stops[0], stop - start) for start, stop in pairwise(stops)]

    calls = (partial(prepare, span) for span in pieces)
    cheap = isinstance(ordered, pa.Table) and check is None
    # One worker: the check takes rows in their order.
    with closing((call() for call in calls) if cheap else prefetch(calls)) as prepared:
        for row_groups in prepared:
            for rows in row_groups:
                writer.write(rows)
    if check is not None:
        check.finish()


def _in_large_chunks(table: pa.Table) -> pa.Table:
    """The table in chunks of thousands of rows or a megabyte: every chunk costs the encoder a call per column."""
    chunks = max((column.num_chunks for column in table.columns), default=0)
    size_bytes = table.nbytes
    if chunks <= 1 + max(len(table) // _CHUNK_ROWS_MIN, size_bytes // _CHUNK_BYTES_MIN):
        return table
    if size_bytes <= HELD_BYTES:
        return table.combine_chunks()
    return pa.Table.from_batches(rebatch([table], table.schema, _PIECE_ROWS_MAX), schema=table.schema)


def _uneven_sizes(table: pa.Table, limit: int) -> Any:
    """The bytes of each row; None where ``limit`` rows are no more than a row group may have, whichever they are."""
    fixed, varying = row_sizes(table.columns)
    if varying is None or (fixed + int(varying.max())) * limit <= split_bytes(table.num_columns):
        return None
    return varying + fixed


def _row_key_check(place: SegmentPlace, options: WriteOptions) -> RowKeyCheck | None:
    wanted = options.check_unique and place.state.mode is Mode.KEYED
    return RowKeyCheck(place.state, str(place)) if wanted else None


def _write_unsorted(
    writer: SegmentWriter, place: SegmentPlace, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> None:
    """Write batches that come in any order; what is more than ``RUN_BYTES`` waits in a temporary file."""
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
    """Write tables as they come, in the order of a segment; those of keyed state carry ``_key_group``."""
    check = _row_key_check(place, options)
    pending: list[tuple[pa.Table, Groups | None]] = []
    count = size_bytes = 0
    # The group of which row groups were written already, if it may go on: its rest shares no row group with the next.
    begun = last = -1
    for rows in tables:
        groups = _groups(place, rows, options)
        if groups is not None:
            if groups[0] < last or not is_clustered(rows, place.state, groups):
                raise InvalidState(
                    f"{place}: a stream with _key_group is sorted by it, and here group {int(groups.min())} follows a "
                    f"greater one; sort it, or leave the column out to have the rows clustered"
                )
            last = int(groups[-1])
        if check is not None:
            check.add(rows)
        pending.append((rows, groups))
        count, size_bytes = count + len(rows), size_bytes + decoded_bytes_of(rows)
        limit = row_limit(options.row_group_rows, count, size_bytes, rows.num_columns)
        while count >= 2 * grown_limit(limit, writer.row_groups):
            pending, begun = _flush(writer, pending, limit, begun)
            count = sum(len(rows) for rows, _ in pending)
            size_bytes = sum(decoded_bytes_of(rows) for rows, _ in pending)
    while count:
        limit = row_limit(options.row_group_rows, count, size_bytes, pending[0][0].num_columns)
        pending, begun = _flush(writer, pending, limit, begun, all_rows=True)
        count = sum(len(rows) for rows, _ in pending)
        size_bytes = sum(decoded_bytes_of(rows) for rows, _ in pending)
    if check is not None:
        check.finish()


def _flush(
    writer: SegmentWriter,
    pending: Sequence[tuple[pa.Table, Groups | None]],
    limit: int,
    begun: int,
    *,
    all_rows: bool = False,
) -> tuple[list[tuple[pa.Table, Groups | None]], int]:
    """Write row groups from the front, up to 64; what is left, and the group that they end in the middle of.

    The last one is left, because rows may come that belong into it, unless ``all_rows`` are there.
    """
    limit = grown_limit(limit, writer.row_groups)
    table = pa.concat_tables(rows for rows, _ in pending)
    groups = None if pending[0][1] is None else np.concatenate([groups for _, groups in pending])
    counts = np.array([len(table)]) if groups is None else group_counts(groups)
    stops = split_groups(counts, limit, begun=groups is not None and int(groups[0]) == begun)
    chosen = stops[:64] if all_rows else stops[:-1][:64]
    for start, stop in pairwise([0, *chosen]):
        # Small batches in one piece: every chunk costs the encoder a call per column.
        writer.write(table.slice(start, stop - start).combine_chunks())
        writer.add_counts(None if groups is None else groups[start:stop])
        begun = -1 if groups is None else int(groups[stop - 1])
    written = chosen[-1] if chosen else 0
    rest = table.slice(written)
    return ([(rest, None if groups is None else groups[written:])] if len(rest) else []), begun


__all__ = ["SegmentPlace", "WriteOptions", "cluster", "write_segment", "write_unsorted"]
