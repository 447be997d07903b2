"""Write one segment: the rows of one state of one subtask as a Parquet file (SPEC.md section 5).

Theory of operation. A table is conformed to its declaration, given key groups, and put in order (``rows``). Its row
groups are cut beforehand (``row_groups``), and while Arrow encodes one, the next is gathered and checked for duplicate
row keys in another thread; both leave the interpreter's lock alone. ``segment_writer`` makes the file.

A stream of batches is written as it comes, in bounded memory, where its order is known to be right: in the modes without
groups, and for keyed rows that carry ``_key_group``. Other streams are collected first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.ahead import ahead
from stateformat.errors import InvalidState
from stateformat.model import Handle, Mode
from stateformat.row_groups import check_row_groups, grown_limit, row_limit, split_groups, split_table
from stateformat.row_keys import RowKeyCheck
from stateformat.rows import (
    Gather,
    cluster,
    conform,
    group_counts,
    key_groups_of,
    row_order,
    senders_of,
    with_key_groups,
)
from stateformat.schema import KEY_GROUP, has_key_groups, segment_schema
from stateformat.segment_writer import SegmentPlace, SegmentWriter, WriteOptions
from stateformat.storage import Storage

# Tables in smaller chunks than this are copied into one: every chunk costs the encoder a call per column.
_CHUNK_ROWS_MIN: Final = 4096
_DEFAULTS: Final = WriteOptions()
_Groups = npt.NDArray[np.int32]


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
    about two row groups in memory (and, with ``check_unique``, the row keys of one key group), and must be sorted by it.

    Raises ``InvalidState``, the writer's fault, where the rows contradict the declaration or a row key stands twice, and
    ``StorageError``; nothing is visible then.
    """
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if not isinstance(data, pa.Table):
        data = _known_order(place, iter(data))
    with SegmentWriter(storage, place, options) as writer:
        if isinstance(data, pa.Table):
            _write_table(writer, place, data, options)
        else:
            _write_stream(writer, place, data, options)
        return writer.finish()


def _known_order(place: SegmentPlace, batches: Iterator[pa.RecordBatch]) -> pa.Table | Iterator[pa.RecordBatch]:
    """The stream itself if it can be written as it comes, else its rows."""
    first = next(batches, None)
    if first is None:
        return segment_schema(place.state, place.schema_id, delta=place.layer > 0).empty_table()
    stream = chain([first], batches)
    if place.state.mode is Mode.KEYED:
        return stream if KEY_GROUP.name in first.schema.names else pa.Table.from_batches(stream)
    return pa.Table.from_batches(stream) if place.state.mode is Mode.IN_FLIGHT else stream


def _conform(place: SegmentPlace, rows: pa.Table) -> pa.Table:
    fill: dict[str, Any] = {}
    if place.state.mode is Mode.COMMITTABLES:
        fill = {"_checkpoint_id": place.checkpoint_id, "_attempt_id": place.attempt_id}
    return conform(rows, place.state, schema_id=place.schema_id, delta=place.layer > 0, where=str(place), fill=fill)


def _grouped(place: SegmentPlace, rows: pa.Table, options: WriteOptions) -> tuple[pa.Table, _Groups | None]:
    """The rows with their groups, as a column too where the segment has it; None in modes without groups."""
    state = place.state
    if has_key_groups(state):
        groups = key_groups_of(rows, state, place.operator, trust=options.trust_key_groups, where=str(place))
        if KEY_GROUP.name not in rows.column_names:
            rows = with_key_groups(rows, groups)
        return rows, groups
    return rows, senders_of(rows, str(place)) if state.mode is Mode.IN_FLIGHT else None


def _write_table(writer: SegmentWriter, place: SegmentPlace, data: pa.Table, options: WriteOptions) -> None:
    if not len(data):
        return
    if max(column.num_chunks for column in data.columns) > 1 + len(data) // _CHUNK_ROWS_MIN:
        data = data.combine_chunks()
    table, groups = _grouped(place, _conform(place, data), options)
    counts = np.array([len(table)]) if groups is None else group_counts(groups)
    stops = split_table(counts, row_limit(options.row_group_rows, len(table), table.nbytes))
    order = None if groups is None else row_order(table, place.state, groups)
    ordered: pa.Table | Gather = table if order is None else Gather(table, order, counts)
    check = _row_key_check(place, options)

    def prepare(start: int, stop: int) -> pa.Table:
        rows = ordered.slice(start, stop - start)
        if check is not None:
            check.add(rows)
        return rows

    writer.counts = None if groups is None else counts
    calls = (partial(prepare, start, stop) for start, stop in zip([0, *stops], stops, strict=False))
    cheap = order is None and check is None
    # One worker: the check takes rows in their order.
    with closing((call() for call in calls) if cheap else ahead(calls)) as prepared:
        for rows in prepared:
            writer.write(rows)
    if check is not None:
        check.finish()


def _row_key_check(place: SegmentPlace, options: WriteOptions) -> RowKeyCheck | None:
    wanted = options.check_unique and place.state.mode is Mode.KEYED
    return RowKeyCheck(place.state, str(place)) if wanted else None


def _write_stream(
    writer: SegmentWriter, place: SegmentPlace, batches: Iterable[pa.RecordBatch], options: WriteOptions
) -> None:
    """Write batches as they come; those of keyed state carry ``_key_group`` and are sorted by it."""
    check = _row_key_check(place, options)
    keyed = place.state.mode is Mode.KEYED
    pending: list[pa.Table] = []
    count = size_bytes = 0
    # The group of which row groups were written already, if it may go on: its rest shares no row group with the next.
    begun = last = -1
    for batch in batches:
        if not len(batch):
            continue
        rows, groups = _grouped(place, _conform(place, pa.Table.from_batches([batch])), options)
        if groups is not None:
            if groups[0] < last or row_order(rows, place.state, groups) is not None:
                raise InvalidState(
                    f"{place}: a stream with _key_group is sorted by it, and here group {int(groups.min())} follows a "
                    f"greater one; sort it, or leave the column out to have the rows clustered"
                )
            last = int(groups[-1])
        if check is not None:
            check.add(rows)
        pending.append(rows)
        count, size_bytes = count + len(rows), size_bytes + rows.nbytes
        limit = row_limit(options.row_group_rows, count, size_bytes)
        while count >= 2 * grown_limit(limit, writer.row_groups):
            rest, begun = _flush(writer, pa.concat_tables(pending).combine_chunks(), limit, begun, keyed=keyed)
            pending, count, size_bytes = [rest], len(rest), rest.nbytes
    while count:
        limit = row_limit(options.row_group_rows, count, size_bytes)
        table = pa.concat_tables(pending).combine_chunks()
        rest, begun = _flush(writer, table, limit, begun, keyed=keyed, all_rows=True)
        pending, count, size_bytes = [rest], len(rest), rest.nbytes
    if check is not None:
        check.finish()


def _flush(
    writer: SegmentWriter, pending: pa.Table, limit: int, begun: int, *, keyed: bool, all_rows: bool = False
) -> tuple[pa.Table, int]:
    """Write row groups from the front, up to 64; what is left, and the group that they end in the middle of.

    The last one is left, because rows may come that belong into it, unless ``all_rows`` are there.
    """
    limit = grown_limit(limit, writer.row_groups)
    groups = pending[KEY_GROUP.name].combine_chunks().to_numpy() if keyed else None
    counts = np.array([len(pending)]) if groups is None else group_counts(groups)
    stops = split_groups(counts, limit, begun=groups is not None and int(groups[0]) == begun)
    for start, stop in zip([0, *stops], stops[:64] if all_rows else stops[:-1][:64], strict=False):
        check_row_groups(writer.row_groups, str(writer.place))
        writer.write(pending.slice(start, stop - start))
        writer.add_counts(None if groups is None else groups[start:stop])
        begun = -1 if groups is None else int(groups[stop - 1])
    written = stops[:64][-1] if all_rows else ([0, *stops[:-1][:64]])[-1]
    return pending.slice(written), begun


__all__ = ["SegmentPlace", "WriteOptions", "cluster", "write_segment"]
