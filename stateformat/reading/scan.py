"""Reads slices of segments as rows: verified, evolved and merged (SPEC.md 5.4, 5.7 and 6.2).

A slice is read a piece at a time by ``segments.reader``, which verifies it, and converted to the
schema that the caller asks for. Keyed state in layers is merged a chunk of key groups at a time.
The manifest says how many rows each group has, so chunks are planned before anything is read. A key
group that is too large by itself is merged by row key (``overlay``).

Two pieces are read ahead. If reading is mostly waiting (``storage.reads_at_once``), the next few
segments are opened ahead as well. Memory is a few pieces, whatever the size of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, islice
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from ..errors import DamagedCheckpoint, ErrorKind, InvalidInput
from ..manifest import Manifest, integers
from ..model import Handle, Mode, Record, SchemaVersion
from ..schema import KEY_GROUP, OP, has_key_groups, segment_schema
from ..segments import PIECE_ROWS_MAX, SegmentReader
from ..storage import Storage
from ..tables import SizedCall, copy_rows, merge_sorted, prefetch, rebatch
from .expiry import Hidden
from .merge import evolve_table, merge_layers
from .overlay import Keys, merged_piecewise
from .pieces import SegmentPiece, coalesced, group_counts, pieces_of
from .wanted import EVERYTHING, Wanted

WHOLE_BYTES_MAX: Final = 64 << 20
"""A segment up to this size is fetched in one read if every row is wanted."""
CHUNK_BYTES_MAX: Final = 16 << 20
"""The approximate size of the key groups that are merged at a time."""
MERGED_BYTES_MAX: Final = 32 << 20
"""Key groups whose layers take more are split, and a single group is merged piece by piece."""
LARGE_ROW_BYTES: Final = 1024
"""Chunks with larger rows count twice in the memory limit for reading ahead."""
_OPENED_BYTES_MAX: Final = 32 << 20
"""The bytes that segments opened ahead may hold together."""
_SMALL_BYTES: Final = 64 << 10
"""Up to this size one whole read is cheaper than two ranges."""
_SHARE_MAX: Final = 0.5
"""A share of the width of a row. If less is wanted, a whole segment is read at once only …"""
_WHOLE_OF_FEW_BYTES_MAX: Final = 1 << 20
"""… up to this size."""
_Call = SizedCall[pa.Table]
"""Reads a piece of a segment."""


class _RowRange(NamedTuple):
    """Rows start … stop − 1 of a segment, in a piece."""

    piece: SegmentPiece
    reader: SegmentReader
    start: int
    stop: int


@dataclass
class SliceReader:
    """Reads slices of one state: the first of ``record``.

    ``slices``: a ``schema.SLICE_SCHEMA`` table whose ``handle`` numbers rows of
    ``manifest.handles``. ``as_schema``: the schema that rows are converted to; the state's current
    one if None. ``wanted``: which of its columns and rows to return; others are read only if layers
    are merged by them or rows verified.

    Reading raises ``InvalidInput`` for slices that do not fit the manifest, ``DamagedCheckpoint``
    (kind ``OBJECT_MISSING`` for a missing object, which may have expired), ``InvalidState`` for a
    schema that cannot evolve, and ``StorageError``.

    If the state says what time it was, :meth:`batches` leaves out what had expired by then.
    """

    storage: Storage
    record: Record
    manifest: Manifest
    slices: pa.Table
    as_schema: SchemaVersion | None = None
    wanted: Wanted = EVERYTHING
    values: Callable[[], list[Handle]] | None = None

    def __post_init__(self) -> None:
        self._state = self.record.states[0]
        self._target = self.as_schema or self._state.current
        schemas = (*self._state.schemas[:-1], self._target)
        whole = segment_schema(replace(self._state, schemas=schemas))
        self.schema: pa.Schema = self.wanted.schema_of(whole)
        self._columns: frozenset[str] | None = None
        self._hidden = Hidden.of(self._state, self._target)
        if self._hidden is not None:
            self._target = self._hidden.target
            whole = segment_schema(replace(self._state, schemas=(*self._state.schemas[:-1], self._target)))
        self._read_schema: pa.Schema = whole
        if self.wanted.columns is not None:
            columns = self._needed(whole, self.wanted.columns)
            self._columns = None if columns.issuperset(whole.names) else columns
        if self._columns is not None:
            fields = tuple(item for item in self._target.fields if item.name in self._columns)
            self._target = replace(self._target, fields=fields)
            self._read_schema = pa.schema([field for field in whole if field.name in self._columns])
        self._share = 1.0 if self._columns is None else _width(self._read_schema) / _width(whole)

    def _needed(self, schema: pa.Schema, columns: Sequence[str]) -> frozenset[str]:
        """Return which columns of the target schema must be read: one at least, to count rows."""
        state, names = self._state, {*columns}
        if self._hidden is not None:
            names.add(self._hidden.column)
        if state.mode is Mode.PROGRESS:
            return frozenset(schema.names)
        if state.mode is Mode.IN_FLIGHT:
            names |= {"_sender", "_seq"}
        if self.wanted.keys is not None:
            names |= {*state.key_columns}
        if (integers(self.slices["layer"]) > 0).any():
            names |= {*state.key_columns, *state.row_key}
        if has_key_groups(state):
            names.add(KEY_GROUP.name)
        return frozenset(names or {schema.names[0]})

    def batches(self, batch_rows: int = 131_072) -> Iterator[pa.RecordBatch]:
        """Stream the rows in batches of up to ``batch_rows`` rows and 16 MiB.

        Columns: ``schema``, without ``_op``. Order: subtasks as in the slices. Within one, keyed
        rows by ``_key_group`` with their layers merged, in-flight records by ``_seq`` in each
        channel (section 5.2), other modes as their slices come. Progress is one row per edge over
        all slices.
        """
        if batch_rows < 1:
            raise InvalidInput(f"batch_rows is {batch_rows}; it must be at least 1")
        pieces = pieces_of(self._state, self.manifest, self.slices, self.values)
        owners = [list(group) for _, group in groupby(pieces, key=lambda piece: piece.subtask)]
        calls: Generator[_Call, None, None]
        if self._state.mode is Mode.PROGRESS and pieces:
            rows = pa.concat_tables(call() for call in self._in_order(pieces))
            calls = (call for call in [SizedCall(partial(_merge_progress, rows), rows.nbytes)])
        elif self._state.mode is Mode.KEYED:
            calls = self._keyed(owners)
        elif self._state.mode is Mode.IN_FLIGHT:
            calls = self._in_flight(owners)
        else:
            calls = self._in_order(coalesced(pieces))
        if self._hidden is not None:
            calls = self._hidden.left_out(calls)
        names = self.schema.names
        reads_more = names != self._read_schema.names
        for batch in self._made(calls, batch_rows):
            yield batch.select(names) if reads_more else batch

    def layers(self) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
        """Stream the layers of keyed state, lowest first, unmerged: number and batches.

        Columns: ``schema``, above layer 0 with ``_op``. Order within a layer: subtasks as they
        come, then ``_key_group``. The caller reads the batches of a layer before it asks for the
        next one.
        """
        pieces = pieces_of(self._state, self.manifest, self.slices, self.values)
        if pieces and self._state.mode is not Mode.KEYED:
            raise InvalidInput(f"state {self._state.name!r} is {self._state.mode}; only keyed state has layers")
        pieces.sort(key=lambda piece: piece.handle.layer)
        for layer, group in groupby(pieces, key=lambda piece: piece.handle.layer):
            owners = groupby(group, key=lambda piece: piece.subtask)
            ordered = [coalesced(sorted(of_one, key=lambda piece: piece.first_group)) for _, of_one in owners]
            yield layer, self._made(self._in_order([*chain.from_iterable(ordered)]), delta=layer > 0)

    def _made(
        self, calls: Generator[_Call, None, None], batch_rows: int = 131_072, *, delta: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Run the calls, some at a time, and cut their rows into small batches."""
        schema = self._read_schema.insert(1, OP) if delta else self._read_schema
        workers = max(2, self.storage.reads_at_once)
        with closing(prefetch(calls, workers=workers, depth=workers + 1)) as made:
            yield from rebatch(made, schema, batch_rows)

    def _in_order(self, pieces: Sequence[SegmentPiece]) -> Generator[_Call, None, None]:
        with closing(self._opened(pieces)) as readers:
            ranges = (
                _RowRange(piece, reader, piece.row_start, piece.row_start + piece.rows)
                for piece, reader in zip(pieces, readers, strict=True)
            )
            for piece, reader, start, stop in self._joined(ranges):
                for call in reader.calls(start, stop - start):
                    yield self._evolved(call, piece)

    def _joined(self, ranges: Iterable[_RowRange]) -> Iterator[_RowRange]:
        """Join ranges of rows that share a row group, if rows of other keys are left out."""
        if self.wanted.keys is None:
            yield from ranges
            return
        held: _RowRange | None = None
        for item in ranges:
            if held is not None and _share_row_group(held, item):
                held = held._replace(stop=item.stop)
                continue
            if held is not None:
                yield held
            held = item
        if held is not None:
            yield held

    def _streams(self, segments: Sequence[Sequence[SegmentPiece]]) -> list[Iterator[pa.Table]]:
        """Read each list of pieces as a stream; all streams together hold a few megabytes."""
        whole = sum(piece.handle.size_bytes for pieces in segments for piece in pieces) <= WHOLE_BYTES_MAX
        return [self._windows(pieces, CHUNK_BYTES_MAX // len(segments), whole=whole) for pieces in segments]

    def _windows(self, pieces: Sequence[SegmentPiece], size_bytes: int, *, whole: bool) -> Iterator[pa.Table]:
        """Read the pieces about ``size_bytes`` at a time, each table in memory of its own."""
        for piece, reader in zip(pieces, self._opened(pieces, whole=whole), strict=True):
            step = max(1, size_bytes // max(1, self._row_bytes(piece)))
            end = piece.row_start + piece.rows
            for start in range(piece.row_start, end, step):
                for call in reader.calls(start, min(step, end - start)):
                    table = self._evolved(call, piece)()
                    # A slice would keep the whole row group in memory.
                    yield table if step >= piece.rows else copy_rows(table)

    def _in_flight(self, owners: Iterable[Sequence[SegmentPiece]]) -> Generator[_Call, None, None]:
        """Read the records in flight of each subtask in turn: by group, sender and ``_seq``."""
        for pieces in owners:
            segments: dict[object, list[SegmentPiece]] = {}
            for piece in coalesced(pieces):
                segments.setdefault(piece.handle.path, []).append(piece)
            # Each segment is in this order already. If they share no group, they need no merge.
            ordered = sorted(segments.values(), key=lambda of: min(piece.first_group for piece in of))
            begins = [min(piece.first_group for piece in of) for of in ordered]
            ends = [max(piece.end_group for piece in of) for of in ordered]
            if all(end <= begin for end, begin in zip(ends, begins[1:], strict=False)):
                yield from self._in_order([*chain.from_iterable(ordered)])
                continue
            groups = ["_key_group"] if "_key_group" in self._read_schema.names else []
            with closing(merge_sorted(self._streams(list(segments.values())), [*groups, "_sender", "_seq"])) as tables:
                for table in tables:
                    yield SizedCall(partial(_itself, table), table.nbytes)

    def _keyed(self, owners: Iterable[Sequence[SegmentPiece]]) -> Generator[_Call, None, None]:
        """Read the keyed state of each subtask in turn, by key group, its layers merged."""
        ordered = [
            coalesced(sorted(pieces, key=lambda piece: (piece.handle.layer, piece.first_group))) for pieces in owners
        ]
        if any(not len(piece.counts) for pieces in ordered for piece in pieces):
            handle = f"a handle of keyed state {self._state.name!r} of {self._state.operator!r}"
            message = f"{handle} does not say how many rows each key group has"
            raise DamagedCheckpoint(message, kind=ErrorKind.DAMAGED_MANIFEST)
        for layered, group in groupby(ordered, key=lambda pieces: pieces[-1].handle.layer > 0):
            if layered:
                yield from chain.from_iterable(self._layered(pieces) for pieces in group)
            else:
                yield from self._in_order([*chain.from_iterable(group)])

    def _layered(self, pieces: Sequence[SegmentPiece]) -> Generator[_Call, None, None]:
        # Readers stay open over all chunks: together they hold as much as one whole segment.
        whole = sum(piece.handle.size_bytes for piece in pieces) <= WHOLE_BYTES_MAX
        readers = list(self._opened(pieces, whole=whole))
        for first, last in _chunks(pieces, max(map(self._row_bytes, pieces))):
            yield from self._chunk(pieces, readers, first, last)

    def _chunk(
        self, pieces: Sequence[SegmentPiece], readers: Sequence[SegmentReader], first: int, last: int
    ) -> Generator[_Call, None, None]:
        """Read the key groups first … last, both inclusive, their layers merged."""
        # By layer, lowest first: the pieces are sorted that way.
        layers: dict[int, list[_Call]] = {}
        rows = 0
        ranges = [
            _RowRange(piece, reader, *(piece.row_start + piece.rows_before(group) for group in (first, last + 1)))
            for piece, reader in zip(pieces, readers, strict=True)
        ]
        for piece, reader, start, stop in self._joined(item for item in ranges if item.start < item.stop):
            rows += stop - start
            calls = (self._evolved(call, piece) for call in reader.calls(start, stop - start))
            layers.setdefault(piece.handle.layer, []).extend(calls)
        size_bytes = sum(call.size_bytes for calls in layers.values() for call in calls)
        if not layers:
            return
        if size_bytes <= MERGED_BYTES_MAX:
            # A merge holds its rows twice. That matters only for large rows: small ones merge
            # slowly.
            times = 2 if size_bytes > LARGE_ROW_BYTES * rows else 1
            yield SizedCall(partial(self._merged, list(layers.values())), times * size_bytes)
        elif first < last:
            middle = (first + last) // 2
            yield from self._chunk(pieces, readers, first, middle)
            yield from self._chunk(pieces, readers, middle + 1, last)
        elif len(layers) == 1:
            yield from (
                SizedCall(partial(self._merged, [[call]]), call.size_bytes)
                for calls in layers.values()
                for call in calls
            )
        else:
            yield from merged_piecewise(list(layers.values()), Keys(self._state.row_key, self._state.key_columns))

    def _merged(self, layers: Sequence[Sequence[_Call]]) -> pa.Table:
        flat = [call.call for calls in layers for call in calls]
        at_once = min(self.storage.reads_at_once, len(flat))
        read = prefetch((call for call in flat), workers=at_once, depth=at_once) if at_once > 1 else (c() for c in flat)
        with closing(read):
            found = [pa.concat_tables(islice(read, len(calls))) for calls in layers]
        tables = [table for table in found if len(table)]
        if not tables:
            return self._read_schema.empty_table()
        return merge_layers(tables, self._state.row_key, self._state.key_columns, includes_base=True)

    def _row_bytes(self, piece: SegmentPiece) -> int:
        """Return about how many bytes a row of a piece takes in memory."""
        width = _row_width(self._read_schema)
        if self._columns is not None and all(pa.types.is_primitive(kind) for kind in self._read_schema.types):
            return width
        return max(width, piece.handle.uncompressed_bytes // max(1, piece.handle.segment_rows))

    def _opened(self, pieces: Sequence[SegmentPiece], *, whole: bool = True) -> Generator[SegmentReader, None, None]:
        """Open readers of the pieces, several at a time while they hold a few megabytes."""
        # Parts of one handle that follow each other share a reader.
        distinct = [next(group) for _, group in groupby(pieces, key=_place)]
        fetched = [
            piece.handle.size_bytes if self._is_whole(piece, whole) else piece.handle.footer_bytes
            for piece in distinct
            if self._inline(piece) is None
        ]
        at_once = min(self.storage.reads_at_once, len(fetched), _OPENED_BYTES_MAX // max([1, *fetched]))
        calls = (self._reader(piece, whole).open for piece in distinct)
        opened = (call() for call in calls) if at_once < 2 else prefetch(calls, workers=at_once, depth=at_once)
        with closing(opened):
            place, reader = None, None
            for piece in pieces:
                if reader is None or _place(piece) != place:
                    place, reader = _place(piece), next(opened)
                yield reader

    def _reader(self, piece: SegmentPiece, whole: bool) -> SegmentReader:
        inline, is_whole = self._inline(piece), self._is_whole(piece, whole)
        handle, columns = piece.handle, self._stored_columns(piece.handle)
        return SegmentReader(
            self.storage, self.record, self._state, handle, inline=inline, whole=is_whole, columns=columns
        )

    def _stored_columns(self, handle: Handle) -> list[str] | None:
        """Return the names of the needed columns in the handle's segment; None for all."""
        if self._columns is None:
            return None
        ids = {item.id for item in self._target.fields}
        stored = self._state.by_schema_id[handle.schema_id].fields
        own = {OP.name, *self._read_schema.names} - {item.name for item in self._target.fields}
        return [*own, *(item.name for item in stored if item.id in ids)]

    def _is_whole(self, piece: SegmentPiece, allowed: bool) -> bool:
        handle = piece.handle
        # Reading a few of the columns alone is faster.
        bytes_max = WHOLE_BYTES_MAX if self._share > _SHARE_MAX else _WHOLE_OF_FEW_BYTES_MAX
        all_rows = piece.rows == handle.segment_rows and allowed and handle.size_bytes <= bytes_max
        return all_rows or handle.size_bytes <= _SMALL_BYTES

    def _inline(self, piece: SegmentPiece) -> pa.Buffer | None:
        return self.manifest.inline(piece.handle.path) if piece.handle.path is not None else None

    def _evolved(self, call: _Call, piece: SegmentPiece) -> _Call:
        old = self._state.by_schema_id[piece.handle.schema_id]
        return SizedCall(lambda: self.wanted.rows(evolve_table(call(), old, self._target)), call.size_bytes)


def _share_row_group(before: _RowRange, after: _RowRange) -> bool:
    reader = before.reader
    return (
        reader is after.reader and before.stop <= after.start and reader.share_row_group(before.stop - 1, after.start)
    )


def _place(piece: SegmentPiece) -> tuple[object, ...]:
    return piece.handle.path, piece.handle.row_start, piece.handle.rows, piece.handle.layer


def _itself(table: pa.Table) -> pa.Table:
    return table


def _width(schema: pa.Schema) -> int:
    """Return about how many bytes a row of these columns takes as stored."""
    return sum(item.type.bit_width // 8 or 1 if pa.types.is_primitive(item.type) else 16 for item in schema)


def _row_width(schema: pa.Schema) -> int:
    return sum(item.type.bit_width // 8 if pa.types.is_primitive(item.type) else 4 for item in schema)


def _chunks(pieces: Sequence[SegmentPiece], row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last key group of chunks of a few megabytes, at least one group each."""
    first = min(piece.first_group for piece in pieces)
    rows = group_counts(pieces)
    limit = max(1, min(PIECE_ROWS_MAX, CHUNK_BYTES_MAX // max(1, row_bytes)))
    ends = np.cumsum(rows)
    group = done = 0
    while group < len(rows):
        after = max(group + 1, int(np.searchsorted(ends, done + limit, "right")))
        yield first + group, first + after - 1
        group, done = after, int(ends[after - 1])


def _merge_progress(rows: pa.Table) -> pa.Table:
    """Merge to one row per edge: the lowest watermark; ended only if all are (SPEC.md 6.2)."""
    merged = rows.group_by("_edge", use_threads=False).aggregate([("_watermark", "min"), ("_ended", "all")])
    columns = [merged["_edge"], merged["_watermark_min"], merged["_ended_all"]]
    return pa.Table.from_arrays(columns, schema=rows.schema)
