"""Read the state of subtasks: slices of segments to rows, merged, evolved and verified (SPEC.md sections 5.4, 5.7, 6.2).

Theory of operation. Slices of one state come in and batches of one schema go out. What a slice holds is read a piece at a
time by ``segments.reader``, which verifies it, and brought to the schema that is asked for. Where keyed state lies in layers,
key groups are taken a chunk at a time, few enough for all layers of them to fit in memory; the manifest says how many rows
each group has, so chunks are planned before anything is read. A key group that is too large by itself is merged by row key,
piece by piece (``overlay``). Two pieces are read ahead of whoever takes the rows; and where
a read is mostly waiting (``storage.ReadsAtOnce``), a few segments are opened ahead of the one that is read, so that many small
ones do not cost a wait each.
Memory is a few pieces, whatever the size of the state, of its rows and of its key groups; a piece has at least one row, and a
row group of each layer.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import DamagedCheckpoint, ErrorKind, InvalidInput
from ..manifest import Manifest
from ..model import Handle, Mode, Record, SchemaVersion, State
from ..schema import OP, segment_schema
from ..segments import PIECE_ROWS_MAX, SegmentReader
from ..storage import Storage, reads_at_once
from ..tables import SizedCall, copy_rows, merge_sorted, prefetch, rebatch
from .merge import evolve_table, merge_layers
from .overlay import Keys, merged_piecewise

WHOLE_BYTES_MAX: Final = 64 << 20
"""A segment of which every row is wanted is fetched at once up to this size, and in ranges above."""
CHUNK_BYTES_MAX: Final = 16 << 20
"""Key groups whose layers have about as much are merged at a time."""
MERGED_BYTES_MAX: Final = 32 << 20
"""Layers of key groups that take more are not merged at once, but piece by piece."""
LARGE_ROW_BYTES: Final = 1024
"""Layers of rows that have more are merged one chunk at a time."""
# What segments that are opened ahead may hold together.
_OPENED_BYTES_MAX: Final = 32 << 20
# Below this a second request costs more than the bytes that it saves.
_SMALL_BYTES: Final = 64 << 10

_Call = SizedCall[pa.Table]
"""Reads a piece. Two are under way at a time."""


@dataclass(frozen=True)
class _Part:
    """A slice with the handle that it is a slice of."""

    subtask: int | None
    handle: Handle
    row_start: int
    rows: int
    first_group: int
    counts: npt.NDArray[np.int64]
    """Rows of each group of the slice from ``first_group`` on; empty in modes without groups."""


def read_slices(
    storage: Storage,
    record: Record,
    manifest: Manifest,
    slices: pa.Table,
    *,
    as_schema: SchemaVersion | None = None,
    batch_rows: int = 131_072,
) -> Iterator[pa.RecordBatch]:
    """The rows of slices of one state, as batches of at most ``batch_rows`` rows and 16 MiB, unless one row has more.

    ``slices`` is a ``schema.SLICE_SCHEMA`` table whose ``handle`` numbers rows of ``manifest.handles``. Columns:
    ``segment_schema`` of the state with its current schema, or with ``as_schema``; keyed rows without ``_op``. Order:
    subtasks as they come in ``slices``; within one, keyed rows by ``_key_group`` with its layers merged, records in flight
    of several segments by ``_seq`` in each channel (section 5.2), other modes as their slices come. Progress is one row per edge over all slices (SPEC.md section 6.2).

    Raises ``InvalidInput`` for slices that are none of this manifest, ``DamagedCheckpoint`` (kind ``OBJECT_MISSING`` for an
    object that is not there, which may have expired), ``InvalidState`` for a schema that cannot evolve, ``StorageError``.
    """
    if batch_rows < 1:
        raise InvalidInput(f"batch_rows is {batch_rows}; at least 1")
    parts, state = _parts(record, manifest, slices)
    if not parts or state is None:
        return
    reading = _Reading(storage, record, manifest, state, as_schema or state.current)
    calls: Generator[_Call, None, None]
    if state.mode is Mode.PROGRESS:
        rows = pa.concat_tables(call() for call in reading.in_order(parts))
        calls = (call for call in [SizedCall(partial(merge_progress, rows), rows.nbytes)])
    elif state.mode is Mode.KEYED:
        calls = reading.keyed([list(group) for _, group in groupby(parts, key=lambda part: part.subtask)])
    elif state.mode is Mode.IN_FLIGHT:
        calls = _in_flight(reading, [list(group) for _, group in groupby(parts, key=lambda part: part.subtask)])
    else:
        calls = reading.in_order(_coalesced(parts))
    with closing(prefetch(calls, workers=2, depth=3)) as made:
        yield from rebatch(made, reading.schema, batch_rows)


def _in_flight(reading: _Reading, owners: Iterable[Sequence[_Part]]) -> Generator[_Call, None, None]:
    """The records in flight of each subtask in turn: those of several segments by group, sender and ``_seq``.

    The rows of a segment are in this order already, and so are its parts, as they come.
    """
    for parts in owners:
        segments: dict[object, list[_Part]] = {}
        for part in _coalesced(parts):
            segments.setdefault(part.handle.path, []).append(part)
        # A group that one segment alone has needs no other; the usual case is one segment.
        ordered = sorted(segments.values(), key=lambda of: min(part.first_group for part in of))
        ends = [max(part.first_group + len(part.counts) for part in of) for of in ordered]
        begins = [min(part.first_group for part in of) for of in ordered]
        if all(end <= begin for end, begin in zip(ends, begins[1:], strict=False)):
            yield from reading.in_order([*chain.from_iterable(ordered)])
            continue
        groups = ["_key_group"] if "_key_group" in reading.schema.names else []
        with closing(merge_sorted(reading.streams(list(segments.values())), [*groups, "_sender", "_seq"])) as tables:
            for table in tables:
                yield SizedCall(partial(_itself, table), table.nbytes)


def _itself(table: pa.Table) -> pa.Table:
    return table


def read_layers(
    storage: Storage,
    record: Record,
    manifest: Manifest,
    slices: pa.Table,
    *,
    as_schema: SchemaVersion | None = None,
    batch_rows: int = 131_072,
) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
    """The layers of slices of one keyed state, lowest first, unmerged: the number of each, and its rows as batches.

    Columns: ``segment_schema``, above layer 0 with ``_op``. Order within a layer: subtasks as they come, then ``_key_group``.
    The batches of a layer are to be taken before the next one. The rest as :func:`read_slices`; ``InvalidInput`` for a state
    that has no layers.
    """
    parts, state = _parts(record, manifest, slices)
    if not parts or state is None:
        return
    if state.mode is not Mode.KEYED:
        raise InvalidInput(f"state {state.name!r} is {state.mode}; only keyed state has layers")
    reading = _Reading(storage, record, manifest, state, as_schema or state.current)
    for layer, group in groupby(sorted(parts, key=lambda part: part.handle.layer), key=lambda part: part.handle.layer):
        owners = groupby(group, key=lambda part: part.subtask)
        ordered = [_coalesced(sorted(of_one, key=lambda part: part.first_group)) for _, of_one in owners]
        yield layer, reading.layer([*chain.from_iterable(ordered)], batch_rows)


def _parts(record: Record, manifest: Manifest, slices: pa.Table) -> tuple[list[_Part], State | None]:
    """The slices that have rows, with their handles and counts; and the state, None where there are none."""
    rows = [row for row in slices.to_pylist() if row["rows"]]
    if not rows:
        return [], None
    names = {(row["operator"], row["state"]) for row in rows}
    numbers = [row["handle"] for row in rows]
    if len(names) != 1 or min(numbers) < 0 or max(numbers) >= len(manifest.handles):
        raise InvalidInput(
            f"slices name states {sorted(names)} and handles up to {max(numbers)} of {len(manifest.handles)}"
        )
    chosen = manifest.handles.take(pa.array(numbers, pa.int64()))
    counts = chosen["rows_per_group"].combine_chunks()
    others = chosen.drop_columns(["rows_per_group"]).to_pylist()
    parts = []
    for number, (row, fields) in enumerate(zip(rows, others, strict=True)):
        of_group = counts[number].values
        handle = Handle(**fields, rows_per_group=None if of_group is None else of_group.to_numpy())
        if (handle.operator, handle.state) not in names:
            raise InvalidInput(f"a slice of {names} names a handle of state {handle.state!r} of {handle.operator!r}")
        first, cut = _cut_counts(handle, row["row_start"] - handle.row_start, row["rows"])
        wanted = (row["first_group"], row["last_group"])
        if len(cut) and None not in wanted and not wanted[0] <= first <= first + len(cut) - 1 <= wanted[1]:
            raise InvalidInput(
                f"a slice of {handle.path} is to hold groups {wanted[0]} to {wanted[1]}, and its rows are of groups {first} "
                f"to {first + len(cut) - 1}; plan again from this manifest"
            )
        parts.append(_Part(row["subtask"], handle, row["row_start"], row["rows"], first, cut))
    return parts, record.state(*names.pop())


def _coalesced(parts: Iterable[_Part]) -> list[_Part]:
    """The parts, with those that go on in one segment as one: what a rescale cut for many subtasks is read at once.

    Read one by one, each of them would open the segment, and decode row groups that they share.
    """
    runs: list[list[_Part]] = []
    for part in parts:
        if runs and _goes_on(runs[-1][-1], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [run[0] if len(run) == 1 else _as_one(run) for run in runs]


def _goes_on(part: _Part, after: _Part) -> bool:
    one, other = part.handle, after.handle
    return (
        after.row_start == part.row_start + part.rows
        and (after.subtask, other.path, other.layer, other.schema_id)
        == (part.subtask, one.path, one.layer, one.schema_id)
        and (other.digest, other.footer_digest, other.footer_bytes) == (one.digest, one.footer_digest, one.footer_bytes)
        and (other.size_bytes, other.uncompressed_bytes, other.segment_rows)
        == (one.size_bytes, one.uncompressed_bytes, one.segment_rows)
        and (len(after.counts) > 0) is (len(part.counts) > 0)
        and after.first_group >= part.first_group + len(part.counts) - 1
    )


def _as_one(run: Sequence[_Part]) -> _Part:
    first, last = run[0], run[-1]
    rows = sum(part.rows for part in run)
    counts = np.zeros(last.first_group + len(last.counts) - first.first_group, np.int64)
    for part in run:
        counts[part.first_group - first.first_group :][: len(part.counts)] += part.counts
    handle = first.handle._replace(row_start=first.row_start, rows=rows)
    if len(counts):
        last_group = first.first_group + len(counts) - 1
        handle = handle._replace(first_group=first.first_group, last_group=last_group, rows_per_group=counts.tolist())
    return replace(first, handle=handle, rows=rows, counts=counts)


def _cut_counts(handle: Handle, low: int, rows: int) -> tuple[int, npt.NDArray[np.int64]]:
    """The first group with rows, and the rows of each group, in ``rows`` rows from the handle's row ``low`` on."""
    if handle.rows_per_group is None or handle.first_group is None:
        return 0, np.zeros(0, np.int64)
    ends = np.concatenate([[0], np.cumsum(np.asarray(handle.rows_per_group, np.int64))])
    counts = np.diff(np.clip(ends, low, low + rows))
    present = np.flatnonzero(counts)
    if not len(present):
        return 0, np.zeros(0, np.int64)
    return handle.first_group + int(present[0]), counts[present[0] : present[-1] + 1]


class _Reading:
    """What all slices of one call share."""

    def __init__(
        self, storage: Storage, record: Record, manifest: Manifest, state: State, target: SchemaVersion
    ) -> None:
        self.schema: pa.Schema = segment_schema(replace(state, schemas=(*state.schemas[:-1], target)))
        self._storage = storage
        self._record = record
        self._manifest = manifest
        self._state = state
        self._target = target

    def in_order(self, parts: Sequence[_Part]) -> Generator[_Call, None, None]:
        """The rows of the parts, one after another."""
        with closing(self._opened(parts)) as readers:
            for part, reader in zip(parts, readers, strict=True):
                for call in reader.calls(part.row_start, part.rows):
                    yield self._evolved(call, part)

    def streams(self, segments: Sequence[Sequence[_Part]]) -> list[Iterator[pa.Table]]:
        """The rows of each list of parts, for streams that are read side by side: together they hold a few megabytes."""
        whole = sum(part.handle.size_bytes for parts in segments for part in parts) <= WHOLE_BYTES_MAX
        return [self._windows(parts, CHUNK_BYTES_MAX // len(segments), whole=whole) for parts in segments]

    def _windows(self, parts: Sequence[_Part], size_bytes: int, *, whole: bool) -> Iterator[pa.Table]:
        """The rows of the parts, about so many bytes at a time, each in memory of its own."""
        for part, reader in zip(parts, self._opened(parts, whole=whole), strict=True):
            row_bytes = max(
                1, part.handle.uncompressed_bytes // max(1, part.handle.segment_rows), _row_width(self.schema)
            )
            step = max(1, size_bytes // row_bytes)
            for start in range(part.row_start, part.row_start + part.rows, step):
                for call in reader.calls(start, min(step, part.row_start + part.rows - start)):
                    table = self._evolved(call, part)()
                    # A slice would keep the whole row group alive.
                    yield table if step >= part.rows else copy_rows(table)

    def layer(self, parts: Sequence[_Part], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """The rows of the parts, which are of one layer, with ``_op`` if it is a delta."""
        schema = self.schema
        if parts[0].handle.layer:
            schema = schema.insert(1, OP)
        with closing(prefetch(self.in_order(parts), workers=2, depth=3)) as made:
            yield from rebatch(made, schema, batch_rows)

    def keyed(self, owners: Iterable[Sequence[_Part]]) -> Generator[_Call, None, None]:
        """The rows of each subtask's keyed state in turn; of one, by key group, its layers merged."""
        ordered = [
            _coalesced(sorted(parts, key=lambda part: (part.handle.layer, part.first_group))) for parts in owners
        ]
        if any(not len(part.counts) for parts in ordered for part in parts):
            raise DamagedCheckpoint(
                f"a handle of keyed state {self._state.name!r} of {self._state.operator!r} says no rows per key group",
                kind=ErrorKind.DAMAGED_MANIFEST,
            )
        for layered, group in groupby(ordered, key=lambda parts: parts[-1].handle.layer > 0):
            if layered:
                yield from chain.from_iterable(self._layered(parts) for parts in group)
            else:
                yield from self.in_order([*chain.from_iterable(group)])

    def _layered(self, parts: Sequence[_Part]) -> Generator[_Call, None, None]:
        """The rows of one subtask whose state lies in layers."""
        # Readers stay open over all chunks, so they may hold no more bytes together than one whole segment.
        whole = sum(part.handle.size_bytes for part in parts) <= WHOLE_BYTES_MAX
        readers = list(self._opened(parts, whole=whole))
        for first, last in _chunks(parts, _row_width(self.schema)):
            yield from self._chunk(parts, readers, first, last)

    def _chunk(
        self, parts: Sequence[_Part], readers: Sequence[SegmentReader], first: int, last: int
    ) -> Generator[_Call, None, None]:
        """The rows of key groups first … last, both inclusive, their layers merged."""
        # By layer, the lowest first, because parts are sorted so.
        layers: dict[int, list[_Call]] = {}
        rows = 0
        for part, reader in zip(parts, readers, strict=True):
            start = part.row_start + int(part.counts[: max(0, first - part.first_group)].sum())
            stop = part.row_start + int(part.counts[: max(0, last + 1 - part.first_group)].sum())
            if start < stop:
                rows += stop - start
                calls = (self._evolved(call, part) for call in reader.calls(start, stop - start))
                layers.setdefault(part.handle.layer, []).extend(calls)
        size_bytes = sum(call.size_bytes for calls in layers.values() for call in calls)
        if not layers:
            return
        if size_bytes <= MERGED_BYTES_MAX:
            # While they are merged they exist twice. Small rows, which cost more to merge, may take the memory for it.
            times = 2 if size_bytes > LARGE_ROW_BYTES * rows else 1
            yield SizedCall(partial(self._merged, list(layers.values())), times * size_bytes)
        elif first < last:
            middle = (first + last) // 2
            yield from self._chunk(parts, readers, first, middle)
            yield from self._chunk(parts, readers, middle + 1, last)
        elif len(layers) == 1:
            yield from (
                SizedCall(partial(self._merged, [[call]]), call.size_bytes)
                for calls in layers.values()
                for call in calls
            )
        else:
            yield from merged_piecewise(list(layers.values()), Keys(self._state.row_key, self._state.key_columns))

    def _merged(self, layers: Sequence[Sequence[_Call]]) -> pa.Table:
        tables = [pa.concat_tables(call() for call in calls) for calls in layers]
        return merge_layers(tables, self._state.row_key, self._state.key_columns, includes_base=True)

    def _opened(self, parts: Sequence[_Part], *, whole: bool = True) -> Generator[SegmentReader, None, None]:
        """Readers of the parts, opened several at a time, yet with no more than a few megabytes fetched for it."""
        fetched = [
            part.handle.size_bytes if self._is_whole(part, whole) else part.handle.footer_bytes
            for part in parts
            if self._inline(part) is None
        ]
        at_once = min(reads_at_once(self._storage), len(fetched), _OPENED_BYTES_MAX // max([1, *fetched]))
        calls = (self._reader(part, whole).open for part in parts)
        if at_once < 2:
            return (call() for call in calls)
        return prefetch(calls, workers=at_once, depth=at_once)

    def _reader(self, part: _Part, whole: bool) -> SegmentReader:
        inline, is_whole = self._inline(part), self._is_whole(part, whole)
        return SegmentReader(self._storage, self._record, self._state, part.handle, inline=inline, whole=is_whole)

    def _is_whole(self, part: _Part, allowed: bool) -> bool:
        handle = part.handle
        all_rows = part.rows == handle.segment_rows and allowed and handle.size_bytes <= WHOLE_BYTES_MAX
        return all_rows or handle.size_bytes <= _SMALL_BYTES

    def _inline(self, part: _Part) -> pa.Buffer | None:
        # Whoever decodes the manifest knows which paths are inline; no object lies under those.
        return self._manifest.inline(part.handle.path) if part.handle.path is not None else None

    def _evolved(self, call: _Call, part: _Part) -> _Call:
        old = self._state.by_schema_id[part.handle.schema_id]
        return SizedCall(lambda: evolve_table(call(), old, self._target), call.size_bytes)


def _row_width(schema: pa.Schema) -> int:
    """Bytes of a row in columns of fixed width: what it takes however little of it is stored."""
    return sum(item.type.bit_width // 8 if pa.types.is_primitive(item.type) else 4 for item in schema)


def _chunks(parts: Sequence[_Part], row_width: int) -> Iterator[tuple[int, int]]:
    """First and last key group, both inclusive, of chunks whose layers are merged at a time: a few megabytes of rows.

    A chunk is at least one key group.
    """
    first = min(part.first_group for part in parts)
    rows = np.zeros(max(part.first_group + len(part.counts) for part in parts) - first, np.int64)
    for part in parts:
        rows[part.first_group - first :][: len(part.counts)] += part.counts
    row_bytes = max(part.handle.uncompressed_bytes // max(1, part.handle.segment_rows) for part in parts)
    limit = max(1, min(PIECE_ROWS_MAX, CHUNK_BYTES_MAX // max(1, row_bytes, row_width)))
    ends = np.cumsum(rows)
    group = done = 0
    while group < len(rows):
        after = max(group + 1, int(np.searchsorted(ends, done + limit, "right")))
        yield first + group, first + after - 1
        group, done = after, int(ends[after - 1])


def merge_progress(rows: pa.Table) -> pa.Table:
    """Rows of several handles, one row per edge: the least watermark, ended only if ended in all (SPEC.md section 6.2)."""
    merged = rows.group_by("_edge", use_threads=False).aggregate([("_watermark", "min"), ("_ended", "all")])
    columns = [merged["_edge"], merged["_watermark_min"], merged["_ended_all"]]
    return pa.Table.from_arrays(columns, schema=rows.schema)
