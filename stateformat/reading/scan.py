"""Reads slices of segments as rows: verified, evolved and merged (SPEC.md 5.4, 5.7 and 6.2).

A slice is read a piece at a time by ``segments.reader``, which verifies it, and brought to the
schema that the caller asks for. Keyed state in layers is merged a chunk of key groups at a time.
The manifest says how many rows each group has, so chunks are planned before anything is read. A key
group that is too large by itself is merged by row key (``overlay``).

Two pieces are read ahead. Where reading is mostly waiting (``storage.reads_at_once``), the next few
segments are opened ahead as well. Memory is a few pieces, whatever the size of the state.
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
# What handles of one segment, layer and schema agree in.
_OF_LAYER: Final = ("path", "layer", "schema_id")
_OF_SEGMENT: Final = ("digest", "footer_digest", "footer_bytes", "size_bytes", "uncompressed_bytes", "segment_rows")

_Call = SizedCall[pa.Table]
"""Reads a piece of a segment."""


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


def _pieces(state: State, manifest: Manifest, slices: pa.Table) -> list[SegmentPiece]:
    rows = [row for row in slices.to_pylist() if row["rows"]]
    if not rows:
        return []
    names = {(row["operator"], row["state"]) for row in rows}
    numbers = [row["handle"] for row in rows]
    if names != {(state.operator, state.name)} or min(numbers) < 0 or max(numbers) >= len(manifest.handles):
        raise InvalidInput(
            f"slices name states {sorted(names)} and handles up to {max(numbers)} of {len(manifest.handles)}"
        )
    chosen = manifest.handles.take(pa.array(numbers, pa.int64()))
    counts = chosen["rows_per_group"].combine_chunks()
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


def _coalesced(pieces: Iterable[SegmentPiece]) -> list[SegmentPiece]:
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
    counts = _group_counts(run)
    handle = first.handle._replace(row_start=first.row_start, rows=rows)
    if len(counts):
        last_group = run[-1].end_group - 1
        handle = handle._replace(first_group=first.first_group, last_group=last_group, rows_per_group=counts.tolist())
    return replace(first, handle=handle, rows=rows, counts=counts)


def _group_counts(pieces: Sequence[SegmentPiece]) -> npt.NDArray[np.int64]:
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


@dataclass
class SliceReader:
    """Reads slices of one state: the first of ``record``.

    ``slices``: a ``schema.SLICE_SCHEMA`` table whose ``handle`` numbers rows of
    ``manifest.handles``. ``as_schema``: the schema to which the rows are brought; the state's
    current one if None.

    Reading raises ``InvalidInput`` for slices that do not fit the manifest, ``DamagedCheckpoint``
    (kind ``OBJECT_MISSING`` for a missing object, which may have expired), ``InvalidState`` for a
    schema that cannot evolve, and ``StorageError``.
    """

    storage: Storage
    record: Record
    manifest: Manifest
    slices: pa.Table
    as_schema: SchemaVersion | None = None

    def __post_init__(self) -> None:
        self._state = self.record.states[0]
        self._target = self.as_schema or self._state.current
        schemas = (*self._state.schemas[:-1], self._target)
        self.schema: pa.Schema = segment_schema(replace(self._state, schemas=schemas))

    def batches(self, batch_rows: int = 131_072) -> Iterator[pa.RecordBatch]:
        """Stream the rows in batches of up to ``batch_rows`` rows and 16 MiB.

        Columns: ``schema``, without ``_op``. Order: subtasks as in the slices. Within one, keyed
        rows by ``_key_group`` with their layers merged, in-flight records by ``_seq`` in each
        channel (section 5.2), other modes as their slices come. Progress is one row per edge over
        all slices.
        """
        if batch_rows < 1:
            raise InvalidInput(f"batch_rows is {batch_rows}; it must be at least 1")
        pieces = _pieces(self._state, self.manifest, self.slices)
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
            calls = self._in_order(_coalesced(pieces))
        yield from _made(calls, self.schema, batch_rows)

    def layers(self) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
        """Stream the layers of keyed state, lowest first, unmerged: number and batches.

        Columns: ``schema``, above layer 0 with ``_op``. Order within a layer: subtasks as they
        come, then ``_key_group``. The caller reads the batches of a layer before it asks for the
        next one.
        """
        pieces = _pieces(self._state, self.manifest, self.slices)
        if pieces and self._state.mode is not Mode.KEYED:
            raise InvalidInput(f"state {self._state.name!r} is {self._state.mode}; only keyed state has layers")
        pieces.sort(key=lambda piece: piece.handle.layer)
        for layer, group in groupby(pieces, key=lambda piece: piece.handle.layer):
            owners = groupby(group, key=lambda piece: piece.subtask)
            ordered = [_coalesced(sorted(of_one, key=lambda piece: piece.first_group)) for _, of_one in owners]
            schema = self.schema.insert(1, OP) if layer else self.schema
            yield layer, _made(self._in_order([*chain.from_iterable(ordered)]), schema)

    def _in_order(self, pieces: Sequence[SegmentPiece]) -> Generator[_Call, None, None]:
        with closing(self._opened(pieces)) as readers:
            for piece, reader in zip(pieces, readers, strict=True):
                for call in reader.calls(piece.row_start, piece.rows):
                    yield self._evolved(call, piece)

    def _streams(self, segments: Sequence[Sequence[SegmentPiece]]) -> list[Iterator[pa.Table]]:
        """Read each list of pieces as a stream; all streams together hold a few megabytes."""
        whole = sum(piece.handle.size_bytes for pieces in segments for piece in pieces) <= WHOLE_BYTES_MAX
        return [self._windows(pieces, CHUNK_BYTES_MAX // len(segments), whole=whole) for pieces in segments]

    def _windows(self, pieces: Sequence[SegmentPiece], size_bytes: int, *, whole: bool) -> Iterator[pa.Table]:
        """Read the pieces about ``size_bytes`` at a time, each table in memory of its own."""
        for piece, reader in zip(pieces, self._opened(pieces, whole=whole), strict=True):
            step = max(1, size_bytes // max(1, _stored_row_bytes(piece), _row_width(self.schema)))
            end = piece.row_start + piece.rows
            for start in range(piece.row_start, end, step):
                for call in reader.calls(start, min(step, end - start)):
                    table = self._evolved(call, piece)()
                    # A slice would keep the whole row group alive.
                    yield table if step >= piece.rows else copy_rows(table)

    def _in_flight(self, owners: Iterable[Sequence[SegmentPiece]]) -> Generator[_Call, None, None]:
        """Read the records in flight of each subtask in turn: by group, sender and ``_seq``."""
        for pieces in owners:
            segments: dict[object, list[SegmentPiece]] = {}
            for piece in _coalesced(pieces):
                segments.setdefault(piece.handle.path, []).append(piece)
            # Each segment is in this order already. If they share no group, they need no merge.
            ordered = sorted(segments.values(), key=lambda of: min(piece.first_group for piece in of))
            begins = [min(piece.first_group for piece in of) for of in ordered]
            ends = [max(piece.end_group for piece in of) for of in ordered]
            if all(end <= begin for end, begin in zip(ends, begins[1:], strict=False)):
                yield from self._in_order([*chain.from_iterable(ordered)])
                continue
            groups = ["_key_group"] if "_key_group" in self.schema.names else []
            with closing(merge_sorted(self._streams(list(segments.values())), [*groups, "_sender", "_seq"])) as tables:
                for table in tables:
                    yield SizedCall(partial(_itself, table), table.nbytes)

    def _keyed(self, owners: Iterable[Sequence[SegmentPiece]]) -> Generator[_Call, None, None]:
        """Read the keyed state of each subtask in turn, by key group, its layers merged."""
        ordered = [
            _coalesced(sorted(pieces, key=lambda piece: (piece.handle.layer, piece.first_group))) for pieces in owners
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
        for first, last in _chunks(pieces, _row_width(self.schema)):
            yield from self._chunk(pieces, readers, first, last)

    def _chunk(
        self, pieces: Sequence[SegmentPiece], readers: Sequence[SegmentReader], first: int, last: int
    ) -> Generator[_Call, None, None]:
        """Read the key groups first … last, both inclusive, their layers merged."""
        # By layer, lowest first: the pieces are sorted so.
        layers: dict[int, list[_Call]] = {}
        rows = 0
        for piece, reader in zip(pieces, readers, strict=True):
            start = piece.row_start + int(piece.counts[: max(0, first - piece.first_group)].sum())
            stop = piece.row_start + int(piece.counts[: max(0, last + 1 - piece.first_group)].sum())
            if start < stop:
                rows += stop - start
                calls = (self._evolved(call, piece) for call in reader.calls(start, stop - start))
                layers.setdefault(piece.handle.layer, []).extend(calls)
        size_bytes = sum(call.size_bytes for calls in layers.values() for call in calls)
        if not layers:
            return
        if size_bytes <= MERGED_BYTES_MAX:
            # A merge holds its rows twice. That counts only where rows are large: small ones merge
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
        tables = [pa.concat_tables(call() for call in calls) for calls in layers]
        return merge_layers(tables, self._state.row_key, self._state.key_columns, includes_base=True)

    def _opened(self, pieces: Sequence[SegmentPiece], *, whole: bool = True) -> Generator[SegmentReader, None, None]:
        """Open readers of the pieces, several at a time while they hold a few megabytes."""
        fetched = [
            piece.handle.size_bytes if self._is_whole(piece, whole) else piece.handle.footer_bytes
            for piece in pieces
            if self._inline(piece) is None
        ]
        at_once = min(reads_at_once(self.storage), len(fetched), _OPENED_BYTES_MAX // max([1, *fetched]))
        calls = (self._reader(piece, whole).open for piece in pieces)
        if at_once < 2:
            return (call() for call in calls)
        return prefetch(calls, workers=at_once, depth=at_once)

    def _reader(self, piece: SegmentPiece, whole: bool) -> SegmentReader:
        inline, is_whole = self._inline(piece), self._is_whole(piece, whole)
        return SegmentReader(self.storage, self.record, self._state, piece.handle, inline=inline, whole=is_whole)

    def _is_whole(self, piece: SegmentPiece, allowed: bool) -> bool:
        handle = piece.handle
        all_rows = piece.rows == handle.segment_rows and allowed and handle.size_bytes <= WHOLE_BYTES_MAX
        return all_rows or handle.size_bytes <= _SMALL_BYTES

    def _inline(self, piece: SegmentPiece) -> pa.Buffer | None:
        return self.manifest.inline(piece.handle.path) if piece.handle.path is not None else None

    def _evolved(self, call: _Call, piece: SegmentPiece) -> _Call:
        old = self._state.by_schema_id[piece.handle.schema_id]
        return SizedCall(lambda: evolve_table(call(), old, self._target), call.size_bytes)


def _itself(table: pa.Table) -> pa.Table:
    return table


def _made(
    calls: Generator[_Call, None, None], schema: pa.Schema, batch_rows: int = 131_072
) -> Iterator[pa.RecordBatch]:
    """Make the calls, two at a time, and cut their rows into small batches."""
    with closing(prefetch(calls, workers=2, depth=3)) as made:
        yield from rebatch(made, schema, batch_rows)


def _stored_row_bytes(piece: SegmentPiece) -> int:
    return piece.handle.uncompressed_bytes // max(1, piece.handle.segment_rows)


def _row_width(schema: pa.Schema) -> int:
    return sum(item.type.bit_width // 8 if pa.types.is_primitive(item.type) else 4 for item in schema)


def _chunks(pieces: Sequence[SegmentPiece], row_width: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last key group of chunks of a few megabytes, at least one group each."""
    first = min(piece.first_group for piece in pieces)
    rows = _group_counts(pieces)
    row_bytes = max(_stored_row_bytes(piece) for piece in pieces)
    limit = max(1, min(PIECE_ROWS_MAX, CHUNK_BYTES_MAX // max(1, row_bytes, row_width)))
    ends = np.cumsum(rows)
    group = done = 0
    while group < len(rows):
        after = max(group + 1, int(np.searchsorted(ends, done + limit, "right")))
        yield first + group, first + after - 1
        group, done = after, int(ends[after - 1])


def _merge_progress(rows: pa.Table) -> pa.Table:
    """Merge to one row per edge: the least watermark; ended only if ended in all (SPEC.md 6.2)."""
    merged = rows.group_by("_edge", use_threads=False).aggregate([("_watermark", "min"), ("_ended", "all")])
    columns = [merged["_edge"], merged["_watermark_min"], merged["_ended_all"]]
    return pa.Table.from_arrays(columns, schema=rows.schema)
