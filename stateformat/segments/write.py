"""Writes segments (SPEC.md section 5): digests, one Parquet file, whole segments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from .. import parquet, paths
from ..errors import ErrorKind, InvalidInput, InvalidState
from ..graph import Operator
from ..model import AttemptId, CheckpointId, Handle, JobId, Mode, State, new_write_id
from ..schema import KEY_GROUP, has_key_groups, segment_schema
from ..storage import OutputObject, Storage
from ..tables import BATCH_BYTES, HELD_BYTES, cut, prefetch, rebatch, release_memory_after, row_sizes
from . import row_groups
from .normalize import check_text, key_groups_of, normalize_rows, senders_of
from .sort import (
    RUN_BYTES,
    Clustered,
    Groups,
    RowKeyCheck,
    SortedRuns,
    clustered,
    group_counts,
    is_clustered,
    segment_order,
)

# ---- digests -------------------------------------------------------------------------------------
#
# The digest of the format, XXH3-128 (SPEC.md section 1), and the sink that computes it for a
# segment.


def digest(data: bytes | memoryview | pa.Buffer) -> bytes:
    """Return the digest of ``data``: 16 bytes."""
    return xxhash.xxh3_128_digest(data)


class SinkResult(NamedTuple):
    """Size and digests of a finished segment (SPEC.md 4.1), and its bytes if it is inline."""

    size_bytes: int
    digest: bytes
    footer_bytes: int
    footer_digest: bytes
    inline: bytes | None


class SegmentSink:
    """A write-only file for Parquet writers, ended by :meth:`finish` or :meth:`abort`.

    It opens its object once it reaches ``inline_bytes_max``: a smaller segment costs no request.
    """

    def __init__(self, open_output: Callable[[], OutputObject], inline_bytes_max: int) -> None:
        self._open_output = open_output
        self._inline_bytes_max = inline_bytes_max
        self._held: list[bytes] = []
        self._size_bytes = 0
        self._digest = xxhash.xxh3_128()
        self._tail: list[bytes] | None = None
        self._output: OutputObject | None = None
        self._ended = False
        self.muted = False
        """Whether what is written is discarded."""
        self.error: BaseException | None = None
        """An error of the storage: the Parquet writer may lose it."""

    @property
    def closed(self) -> bool:
        return False

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes; return how many. Ignored after the end: a failed writer may flush."""
        if self._ended or self.muted:
            return len(data)
        try:
            self._digest.update(data)
            self._size_bytes += len(data)
            if self._tail is not None:
                self._tail.append(bytes(data))
            if self._output is not None:
                self._output.write(data)
            else:
                self._held.append(bytes(data))
                if self._size_bytes >= self._inline_bytes_max:
                    self._begin_object()
        except BaseException as error:
            self.error = error
            raise
        return len(data)

    def tell(self) -> int:
        return self._size_bytes

    def flush(self) -> None:
        """Does nothing; pyarrow calls it."""

    def close(self) -> None:
        """Does nothing; pyarrow calls it before the segment is known to be good."""

    def expect_footer(self) -> None:
        """Keep what is written from now on: buffered pages and the footer."""
        self._tail = []

    def tail(self) -> pa.Buffer:
        """Return what was written since :meth:`expect_footer`."""
        return pa.py_buffer(b"".join(self._tail or []))

    def finish(self) -> SinkResult:
        """Make the object visible, or keep it inline. The bytes must end in a Parquet footer."""
        tail = self.tail().to_pybytes()
        footer_bytes = int.from_bytes(tail[-8:-4], "little") + 8
        inline = b"".join(self._held) if self._output is None else None
        if self._output is not None:
            self._output.close()
        self._ended = True
        footer_digest = digest(tail[-footer_bytes:])
        return SinkResult(self._size_bytes, self._digest.digest(), footer_bytes, footer_digest, inline)

    def abort(self) -> None:
        """Discard everything; nothing becomes visible. Does nothing after :meth:`finish`."""
        if not self._ended:
            self._ended = True
            if self._output is not None:
                self._output.abort()

    def _begin_object(self) -> None:
        self._output = self._open_output()
        for data in self._held:
            self._output.write(data)
        self._held = []


# ---- files ---------------------------------------------------------------------------------------
#
# Write one Parquet file of state into a storage (SPEC.md sections 5.5 and 5.6).


_SINK_BUFFER_BYTES: Final = 1 << 20
_MAGIC_BYTES: Final = 4
# Rows that take fewer bytes in Arrow reach no limit: Parquet counts at most 16 times as many, for
# values of one byte.
_SMALL_GROUP_BYTES: Final = parquet.DECODED_BYTES_MAX // 32
_SMALL_SEGMENT_BYTES: Final = parquet.SEGMENT_BYTES_MAX // 32
_BATCH_BYTES: Final = 1 << 20
_BATCH_ROWS_MAX: Final = 8192
_CODECS: Final[dict[str, dict[str, Any]]] = {
    "lz4": {"compression": "lz4"},
    "zstd": {"compression": "zstd", "compression_level": 1},
    "snappy": {"compression": "snappy"},
    "none": {"compression": "none"},
}


@dataclass(frozen=True)
class WriteOptions:
    """How segments are written. Readers accept every choice.

    - ``codec``: ``lz4`` (fast), ``zstd`` (level 1; smaller strings, for slow networks), ``snappy``
      (which every Parquet reader knows), ``none``.
    - ``encoding``: ``fast`` is BYTE_STREAM_SPLIT for fixed-width columns, and dictionaries for
      texts that repeat; ``plain`` is for readers that lack these.
    - ``row_group_rows``: the most rows of a row group, if 1,024 row groups suffice.
    - ``inline_bytes_max``: smaller segments are stored in the manifest (SPEC.md section 4.4).
    - ``check_unique``: refuse a repeated row key. Turn it off if the runtime rules it out.
    - ``trust_key_groups``: do not compare a given ``_key_group`` with the hash of the keys.

    Raises ``InvalidInput`` for values out of range.
    """

    codec: Literal["lz4", "zstd", "snappy", "none"] = "lz4"
    encoding: Literal["fast", "plain"] = "fast"
    row_group_rows: int = 32_768
    inline_bytes_max: int = 16_384
    check_unique: bool = True
    trust_key_groups: bool = False

    def __post_init__(self) -> None:
        """Raise ``InvalidInput`` for values out of range."""
        if self.codec not in _CODECS or self.encoding not in ("fast", "plain"):
            raise InvalidInput(
                f"codec {self.codec!r} with encoding {self.encoding!r}: codecs are {', '.join(_CODECS)}, encodings "
                "fast and plain"
            )
        if self.row_group_rows < 1 or self.inline_bytes_max < 0:
            raise InvalidInput(
                f"row_group_rows is {self.row_group_rows}, inline_bytes_max {self.inline_bytes_max}; at least 1 and 0"
            )


@dataclass(frozen=True)
class SegmentPlace:
    """Where a segment belongs, as its footer and handle say (SPEC.md section 5.6)."""

    job_id: JobId
    checkpoint_id: CheckpointId
    attempt_id: AttemptId
    operator: Operator
    state: State
    subtask: int | None
    layer: int
    schema_id: int

    def __str__(self) -> str:
        whose = "coordinator" if self.subtask is None else f"subtask {self.subtask}"
        return f"state {self.state.name!r} of {self.operator.uid!r} {whose}"


class SegmentWriter:
    """Writes one Parquet file: row groups in, a handle out. A failed one leaves nothing behind."""

    def __init__(self, storage: Storage, place: SegmentPlace, options: WriteOptions) -> None:
        self.place = place
        self.row_groups = 0
        self.counts: npt.NDArray[np.int64] | None = None
        self._options = options
        self._rows = 0
        self._largest_bytes = 0
        self._decoded_bytes = 0
        self._write_id = new_write_id()
        label = f"{place.operator.uid}-{place.state.name}-{'c' if place.subtask is None else place.subtask}"
        self._path = paths.segment_path(place.checkpoint_id, self._write_id, label=label)
        self._sink = SegmentSink(lambda: storage.open_output(self._path), options.inline_bytes_max)
        self._parquet: pq.ParquetWriter | None = None
        self._metadata: list[Any] = []
        # The paths of texts stored by dictionaries; None until the first rows are seen.
        self._dictionaries: frozenset[str] | None = None if options.encoding == "fast" else frozenset()

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._sink.abort()
        if error is not None and self._parquet is not None:
            # Nothing reaches the aborted sink; closing only frees what Arrow holds.
            self._parquet.is_open = False
        if isinstance(error, Exception) and self._sink.error is not None and self._sink.error is not error:
            raise self._sink.error from error

    def write(self, rows: pa.Table) -> None:
        """Write a row group, or several if it would take a reader too much memory."""
        limit = row_groups.grown_limit(row_groups.split_bytes(rows.num_columns), self.row_groups)
        for part, taken in row_groups.split_large(rows, limit):
            row_groups.check_row_groups(self.row_groups, str(self.place))
            self._choose_dictionaries(part, taken)
            if self._parquet is None:
                self._open(part)
            assert self._parquet is not None
            self._parquet.write_table(part, row_group_size=len(part))
            self.row_groups += 1
            self._rows += len(part)
            release_memory_after(taken)
            self._largest_bytes = max(self._largest_bytes, taken)
            self._decoded_bytes += taken

    def add_counts(self, groups: npt.NDArray[np.int32] | None) -> None:
        """Count the groups of the rows that were just written."""
        if groups is None:
            return
        more, old = group_counts(groups), self.counts
        if old is not None:
            more[: len(old)] += old
        self.counts = more

    def finish(self) -> Handle:
        """Close the file and make it visible; return its handle."""
        place, state = self.place, self.place.state
        owner = (place.operator.uid, state.name, state.mode)
        handle = Handle(*owner, place.subtask, place.layer, state.edge, place.schema_id)
        if self._parquet is None:
            return handle
        metadata = self._end_file()
        self._check_limits(metadata)
        uncompressed = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
        result = self._sink.finish()
        handle = handle._replace(path=self._path, rows=self._rows, segment_rows=self._rows, **result._asdict())
        handle = handle._replace(uncompressed_bytes=uncompressed)
        if self.counts is None:
            return handle
        present = np.flatnonzero(self.counts)
        first, last = int(present[0]), int(present[-1])
        counts = self.counts[first : last + 1].tolist()
        return handle._replace(first_group=first, last_group=last, rows_per_group=counts)

    def _choose_dictionaries(self, rows: pa.Table, taken: int) -> None:
        """Choose texts for dictionaries by the first row group.

        At a row group that readers would refuse, drop them for the rest of the file.
        """
        if self._dictionaries is None:
            self._dictionaries = row_groups.paths_that_pay(rows)
        if self._dictionaries and not row_groups.are_readable(rows, self._dictionaries, taken):
            self._dictionaries = frozenset()
            if self._parquet is not None:
                # A writer of Arrow has one set of encodings, so another one continues.
                self._end_quietly(self._parquet)
                self._parquet = None

    def _end_quietly(self, writer: pq.ParquetWriter) -> None:
        """Close a writer only for its metadata: its footer is not written."""
        self._output.flush()
        self._sink.muted = True
        writer.close()
        self._output.close()
        self._sink.muted = False

    def _end_file(self) -> Any:
        """Write the footer; return its metadata."""
        assert self._parquet is not None
        self._sink.expect_footer()
        if not self._metadata:
            self._parquet.close()
            self._output.close()
            return self._metadata[0]
        self._end_quietly(self._parquet)
        metadata, others = self._metadata
        metadata.append_row_groups(others)
        footer = pa.BufferOutputStream()
        metadata.write_metadata_file(footer)
        self._sink.write(footer.getvalue().to_pybytes()[_MAGIC_BYTES:])
        return metadata

    def _check_limits(self, metadata: Any) -> None:
        """Raise ``InvalidState`` (LIMIT_EXCEEDED) for what readers would refuse (SPEC.md 7.4)."""
        if self._largest_bytes <= _SMALL_GROUP_BYTES and self._decoded_bytes <= _SMALL_SEGMENT_BYTES:
            return
        try:
            footer = parquet.read_footer(self._sink.tail())
            decoded = parquet.decoded_bytes(footer)
            parquet.check_size(self._sink.tell(), self._rows, sum(decoded))
            for number, (group, fixed) in enumerate(zip(footer.row_groups, decoded, strict=True)):
                parquet.check_row_group(group, fixed + parquet.string_bytes(footer, metadata.row_group(number)))
        except parquet.FooterFault as fault:
            codec = self._options.codec
            other = f", or choose codec 'none' rather than {codec!r}, for readers trust what is stored at length"
            raise InvalidState(
                f"{self.place} would be stored as no reader may read it (SPEC.md section 7.4): {fault}. Split its "
                f"largest values, raise the parallelism of the operator{'' if codec == 'none' else other}",
                kind=ErrorKind.LIMIT_EXCEEDED,
            ) from fault

    def _open(self, rows: pa.Table) -> None:
        place, options = self.place, self._options
        schema = segment_schema(place.state, place.schema_id, delta=place.layer > 0)
        fast = options.encoding == "fast"
        # The encoder checks the page size after each batch, so large rows come in small batches.
        row_bytes = max(1, rows.nbytes // max(1, len(rows)))
        self._output = pa.BufferedOutputStream(pa.PythonFile(self._sink, "w"), _SINK_BUFFER_BYTES)
        written = self._sink.tell()
        self._sink.muted = written > 0
        self._parquet = pq.ParquetWriter(
            self._output,
            schema,
            **_CODECS[options.codec],
            use_dictionary=sorted(self._dictionaries or ()) or False,
            use_byte_stream_split=fast and _split_paths(schema),
            write_statistics=[KEY_GROUP.name] if KEY_GROUP.name in schema.names else False,
            write_page_checksum=True,
            store_schema=False,
            write_batch_size=min(_BATCH_ROWS_MAX, max(1, _BATCH_BYTES // row_bytes)),
            metadata_collector=self._metadata,
        )
        if written:
            # It has begun a file and counts from there; now its pages are where it says.
            for start in range(_MAGIC_BYTES, written, _SINK_BUFFER_BYTES):
                self._output.write(bytes(min(_SINK_BUFFER_BYTES, written - start)))
            self._output.flush()
            self._sink.muted = False
        self._parquet.add_key_value_metadata(
            {
                "stateformat.version": "1",
                "stateformat.job_id": place.job_id,
                "stateformat.checkpoint_id": str(place.checkpoint_id),
                "stateformat.operator": place.operator.uid,
                "stateformat.state": place.state.name,
                "stateformat.schema_id": str(place.schema_id),
                "stateformat.write_id": self._write_id,
            }
        )


def _split_paths(schema: pa.Schema) -> list[str]:
    """Return the Parquet paths of the leaves that are written in BYTE_STREAM_SPLIT.

    Arrow takes encodings by path, and two leaves may have one path: field ``b`` of a struct ``a``,
    and a column ``a.b``. Those are left out.
    """
    leaves = [leaf for field in schema for leaf in _leaves(field.name, field.type)]
    count = Counter(path for path, _ in leaves)
    return [path for path, is_split in leaves if is_split and count[path] == 1]


def _leaves(path: str, kind: Any) -> Iterator[tuple[str, bool]]:
    """Yield the Parquet path of each leaf of a column, and whether BYTE_STREAM_SPLIT suits it."""
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_list(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    elif pa.types.is_map(kind):
        yield from _leaves(f"{path}.key_value.key", kind.key_type)
        yield from _leaves(f"{path}.key_value.value", kind.item_type)
    else:
        # Decimals are fixed-width too, but DuckDB and others read them only in plain encoding.
        yield path, pa.types.is_primitive(kind) and not (pa.types.is_boolean(kind) or pa.types.is_decimal(kind))


# ---- segments ------------------------------------------------------------------------------------
#
# Write one segment: the rows of one state of one subtask as a Parquet file (SPEC.md section 5).
#
# Theory of operation. A table is normalized and hashed (``normalize``), sorted (``sort``) and cut
# into row groups (``row_groups``). While Arrow encodes one, a thread assembles the next and checks
# its row keys. A stream in known order (no groups, or keyed rows with ``_key_group``) is written as
# it comes. Any other is sorted first (``write_unsorted``), in bounded memory.


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
