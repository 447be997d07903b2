"""Write one segment: the rows of one state of one subtask as a Parquet file (SPEC.md section 5).

Theory of operation. A table is conformed to its declaration, given key groups (``rows``), and put in order
(``clustering``). Its row groups are cut beforehand (``row_groups``), and while Arrow encodes one, the next is put together
and checked for duplicate row keys in another thread; both leave the interpreter's lock alone. ``segment_writer`` makes the
file.

A stream of batches is written as it comes, in bounded memory, where its order is known to be right: in the modes without
groups, and for keyed rows that carry ``_key_group``. Other streams are collected first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa

from stateformat.ahead import ahead
from stateformat.clustering import Groups, clustered, group_counts, in_order, one_array
from stateformat.errors import InvalidState
from stateformat.model import Handle, Mode
from stateformat.row_groups import decoded_bytes_of, grown_limit, row_limit, spans, split_groups, split_table
from stateformat.row_keys import RowKeyCheck
from stateformat.rows import cluster, conform, key_groups_of, senders_of
from stateformat.schema import KEY_GROUP, has_key_groups, segment_schema
from stateformat.segment_writer import SegmentPlace, SegmentWriter, WriteOptions
from stateformat.storage import Storage

# Tables in smaller chunks than this are copied into one: every chunk costs the encoder a call per column.
_CHUNK_ROWS_MIN: Final = 4096
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


def _groups(place: SegmentPlace, rows: pa.Table, options: WriteOptions) -> Groups | None:
    """The group of each row; None in modes without groups."""
    state = place.state
    if has_key_groups(state):
        return key_groups_of(rows, state, place.operator, trust=options.trust_key_groups, where=str(place))
    return senders_of(rows) if state.mode is Mode.IN_FLIGHT else None


def _write_table(writer: SegmentWriter, place: SegmentPlace, data: pa.Table, options: WriteOptions) -> None:
    if not len(data):
        return
    if max(column.num_chunks for column in data.columns) > 1 + len(data) // _CHUNK_ROWS_MIN:
        data = data.combine_chunks()
    table = _conform(place, data)
    groups = _groups(place, table, options)
    row_bytes = 1 + table.nbytes // len(table)
    limit = row_limit(options.row_group_rows, len(table), decoded_bytes_of(table))
    if groups is None:
        ordered, stops = table, split_table(np.array([len(table)]), limit)
    else:
        ordered, writer.counts = clustered(table, place.state, groups)
        stops = split_table(writer.counts, limit)
    # From here on the rows and their groups are needed in order only.
    del data, table, groups
    check = _row_key_check(place, options)

    def prepare(stops: Sequence[int]) -> list[pa.Table]:
        """Row groups that follow each other; ``stops`` begins with where the first one starts."""
        rows = ordered.slice(stops[0], stops[-1] - stops[0])
        if check is not None:
            check.add(rows)
        return [rows.slice(start - stops[0], stop - start) for start, stop in pairwise(stops)]

    calls = (partial(prepare, span) for span in spans([0, *stops], max(1, _SPAN_BYTES // row_bytes)))
    cheap = isinstance(ordered, pa.Table) and check is None
    # One worker: the check takes rows in their order.
    with closing((call() for call in calls) if cheap else ahead(calls)) as prepared:
        for row_groups in prepared:
            for rows in row_groups:
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
        rows = _conform(place, pa.Table.from_batches([batch]))
        groups = _groups(place, rows, options)
        if groups is not None:
            if groups[0] < last or not in_order(rows, place.state, groups):
                raise InvalidState(
                    f"{place}: a stream with _key_group is sorted by it, and here group {int(groups.min())} follows a "
                    f"greater one; sort it, or leave the column out to have the rows clustered"
                )
            last = int(groups[-1])
        if check is not None:
            check.add(rows)
        pending.append(rows)
        count, size_bytes = count + len(rows), size_bytes + decoded_bytes_of(rows)
        limit = row_limit(options.row_group_rows, count, size_bytes)
        while count >= 2 * grown_limit(limit, writer.row_groups):
            rest, begun = _flush(writer, pa.concat_tables(pending).combine_chunks(), limit, begun, keyed=keyed)
            pending, count, size_bytes = [rest], len(rest), decoded_bytes_of(rest)
    while count:
        limit = row_limit(options.row_group_rows, count, size_bytes)
        table = pa.concat_tables(pending).combine_chunks()
        rest, begun = _flush(writer, table, limit, begun, keyed=keyed, all_rows=True)
        pending, count, size_bytes = [rest], len(rest), decoded_bytes_of(rest)
    if check is not None:
        check.finish()


def _flush(
    writer: SegmentWriter, pending: pa.Table, limit: int, begun: int, *, keyed: bool, all_rows: bool = False
) -> tuple[pa.Table, int]:
    """Write row groups from the front, up to 64; what is left, and the group that they end in the middle of.

    The last one is left, because rows may come that belong into it, unless ``all_rows`` are there.
    """
    limit = grown_limit(limit, writer.row_groups)
    groups = one_array(pending[KEY_GROUP.name]).to_numpy() if keyed else None
    counts = np.array([len(pending)]) if groups is None else group_counts(groups)
    stops = split_groups(counts, limit, begun=groups is not None and int(groups[0]) == begun)
    for start, stop in zip([0, *stops], stops[:64] if all_rows else stops[:-1][:64], strict=False):
        writer.write(pending.slice(start, stop - start))
        writer.add_counts(None if groups is None else groups[start:stop])
        begun = -1 if groups is None else int(groups[stop - 1])
    written = stops[:64][-1] if all_rows else ([0, *stops[:-1][:64]])[-1]
    return pending.slice(written), begun


__all__ = ["SegmentPlace", "WriteOptions", "cluster", "write_segment"]
