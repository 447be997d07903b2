"""Read one segment, and return only verified rows (SPEC.md section 7.2).

Theory of operation. A *whole* read compares size and digest with the handle before parsing. A read
*in ranges* compares the digest of the footer, then fetches the wanted row groups, a few megabytes
at a time; Arrow verifies the checksums of their pages, and ``pages`` their headers. Either way the
footer must agree with handle and place (section 5.6), codecs and encodings must be in section 5.5,
and rows must have the groups that the handle names. All damage, and a missing object
(OBJECT_MISSING), is ``DamagedCheckpoint`` with the object's name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from .. import parquet
from ..errors import DamagedCheckpoint, ErrorKind, InvalidInput, StorageError
from ..model import Handle, Mode, Record, State
from ..schema import KEY_GROUP, has_key_groups, segment_schema
from ..storage import Storage
from ..tables import SizedCall, copy_rows, prefetch
from .row_groups import CODECS, ENCODINGS, PARQUET_ERRORS, ROW_GROUPS_MAX
from .write import digest

PIECE_BYTES_MAX: Final = 8 << 20
"""Uncompressed bytes decoded at a time, unless one row group has more."""
PIECE_ROWS_MAX: Final = 1 << 20
# Smaller data is decoded faster than it is handed to other threads.
_DECLARED_BYTES_MAX: Final = 8 * PIECE_BYTES_MAX
_REMOTE_HOLE_BYTES: Final = 256 << 10
"""If a read is mostly waiting, reading this many unneeded bytes is faster than skipping them."""
_THREADS_BYTES_MIN: Final = 1 << 20
_STORED_BYTES_MIN: Final = 1 << 20


class SegmentReader:
    """The rows of one handle. One thread opens it, at the latest by its first read; then any reads.

    ``inline`` has the segment's bytes. ``whole`` fetches and verifies the whole object at once.
    ``columns``: which columns of the segment to read, in its order, and the one that tells groups.
    """

    def __init__(
        self,
        storage: Storage,
        record: Record,
        state: State,
        handle: Handle,
        *,
        inline: pa.Buffer | None = None,
        whole: bool = False,
        columns: Collection[str] | None = None,
    ) -> None:
        if handle.path is None or handle.digest is None or handle.footer_digest is None or handle.rows < 1:
            raise InvalidInput(f"a handle of no rows of state {handle.state!r} names no segment and cannot be read")
        self._storage = storage
        self._record = record
        self._state = state
        self.handle = handle
        self._path = handle.path
        self._inline = inline
        self._whole = whole or inline is not None
        self._opened = False
        self._metadata: Any = None
        self._file: pq.ParquetFile | None = None
        self._held: tuple[parquet.ByteRange, ...] = ()
        self._group_column: str | None = None
        if has_key_groups(state):
            self._group_column = KEY_GROUP.name
        elif state.mode is Mode.IN_FLIGHT:
            self._group_column = "_sender"
        self._whole_schema = self._schema = segment_schema(state, handle.schema_id, delta=handle.layer > 0)
        self._leaves = None if columns is None else self._chosen_leaves(columns)
        groups = [] if handle.rows_per_group is None else handle.rows_per_group
        self._counts: npt.NDArray[np.int64] = np.asarray(groups, np.int64)
        self._group_ends = np.concatenate([np.zeros(1, np.int64), self._counts.cumsum()])

    def open(self) -> SegmentReader:
        """Fetch and verify what every read needs, once."""
        if not self._opened:
            self._open()
        return self

    def calls(self, row_start: int, rows: int) -> Iterator[SizedCall[pa.Table]]:
        """Return rows row_start … row_start + rows − 1, as calls that read some megabytes each."""
        handle = self.handle
        if rows < 1 or row_start < handle.row_start or row_start + rows > handle.row_start + handle.rows:
            raise InvalidInput(
                f"rows {row_start} to {row_start + rows - 1} were asked of {self._path}, of which the handle holds "
                f"rows {handle.row_start} to {handle.row_start + handle.rows - 1}; plan again from this manifest"
            )
        self.open()
        for first, last in self._pieces(row_start, row_start + rows):
            call = partial(self._piece, first, last, row_start, row_start + rows)
            begin, end = int(self._starts[first]), int(self._starts[last + 1])
            share = (min(row_start + rows, end) - max(row_start, begin)) / (end - begin)
            yield SizedCall(call, int((self._sizes[last + 1] - self._sizes[first]) * share))

    def share_row_group(self, row: int, other: int) -> bool:
        """Return whether two rows are always read together. The reader must be open."""
        found = self._starts.searchsorted([row, other], "right")
        return bool(found[0] == found[1])

    def _piece(self, first: int, last: int, start: int, stop: int) -> pa.Table:
        begin = int(self._starts[first])
        start, stop = max(start, begin), min(stop, int(self._starts[last + 1]))
        whole = self._read(first, last)
        table = whole.slice(start - begin, stop - start)
        if 2 * len(table) < len(whole):
            # The rest of the row groups need not stay in memory because of it.
            table = copy_rows(table)
        self._check_groups(table, start)
        return table

    # ---- opening ---------------------------------------------------------------------------------

    def _open(self) -> None:
        handle = self.handle
        if self._whole:
            data = self._inline if self._inline is not None else self._fetch(None)
            self._check_bytes(data, handle.size_bytes, handle.digest, "it")
            footer = data
        else:
            if not 12 <= handle.footer_bytes <= handle.size_bytes:
                raise self._damaged(
                    f"its handle says {handle.footer_bytes} bytes of footer in {handle.size_bytes}",
                    ErrorKind.DAMAGED_MANIFEST,
                )
            footer = self._fetch((handle.size_bytes - handle.footer_bytes, handle.footer_bytes))
            self._check_bytes(footer, handle.footer_bytes, handle.footer_digest, "its footer")
        with self._translated():
            self._footer = parquet.read_footer(footer)
            if self._footer.arrow_schema:
                # Arrow acts on one as soon as it opens the file.
                raise self._damaged("it holds an ARROW:schema, which a segment must not")
            self._check_shape(self._footer)
            file = self._parquet(pa.BufferReader(footer), is_verified=self._whole)
            self._metadata = metadata = file.metadata
            self._check_footer(metadata, file.schema_arrow)
            self._plan_sizes(self._footer)
        if self._whole:
            self._file, self._held = file, (parquet.ByteRange(0, footer),)
        self._opened = True

    def _fetch(self, span: tuple[int, int] | None) -> pa.Buffer:
        try:
            # If an object is larger than its handle says, only enough to prove that is read.
            start, length = span or (0, self.handle.size_bytes + 1)
            return self._storage.read_range(self._path, start, length)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(
                f"{self._path}, which a handle of state {self.handle.state!r} names, is missing from "
                f"{self._storage.url}",
                kind=ErrorKind.OBJECT_MISSING,
                path=self._path,
            ) from error

    def _check_bytes(self, data: pa.Buffer, size_bytes: int, expected: bytes | None, what: str) -> None:
        if data.size != size_bytes:
            raise self._damaged(
                f"{what} has {data.size:,} bytes, the manifest says {size_bytes:,}", ErrorKind.OBJECT_SIZE_DIFFERS
            )
        found = digest(data)
        if found != expected:
            raise self._damaged(
                f"the digest of {what} is {found.hex()}, the manifest says {expected.hex() if expected else 'none'}",
                ErrorKind.OBJECT_DIGEST_DIFFERS,
            )

    def _check_shape(self, footer: parquet.Footer) -> None:
        handle, groups = self.handle, footer.row_groups
        if len(groups) > ROW_GROUPS_MAX:
            raise self._damaged(f"it has {len(groups):,} row groups; at most {ROW_GROUPS_MAX:,} are allowed")
        declared = [group.uncompressed_bytes for group in groups]
        for what, found, due in (
            ("rows", sum(group.rows for group in groups), handle.segment_rows),
            ("rows in all", footer.rows, handle.segment_rows),
            ("uncompressed bytes", sum(declared), handle.uncompressed_bytes),
        ):
            if found != due:
                raise self._damaged(f"its footer says {found:,} {what}, the manifest {due:,}")
        parquet.check_columns(footer, CODECS, ENCODINGS)
        decoded = parquet.decoded_bytes(footer)
        parquet.check_size(handle.size_bytes, handle.segment_rows, sum(decoded))
        self._starts = np.array([*accumulate((group.rows for group in groups), initial=0)])
        self._declared = np.array([*accumulate(declared, initial=0)])

    def _plan_sizes(self, footer: parquet.Footer) -> None:
        """Sum up the memory that the wanted columns of each row group take."""
        leaves, sizes = self._leaves, [group.uncompressed_bytes for group in footer.row_groups]
        if leaves is not None:
            stored = zip(parquet.stored_bytes(footer, leaves), parquet.stored_bytes(footer), strict=True)
            sizes = [size * part // max(1, whole) for size, (part, whole) in zip(sizes, stored, strict=True)]
        # Neither shows how large a dictionary of strings makes its row group, so that row group is
        # decoded alone.
        alone = (PIECE_BYTES_MAX * repeats for repeats in parquet.have_string_dictionary(footer, leaves))
        self._sizes = np.array([*accumulate(map(max, sizes, parquet.decoded_bytes(footer, leaves), alone), initial=0)])

    def _check_footer(self, metadata: Any, schema: pa.Schema) -> None:
        handle, record = self.handle, self._record
        said = metadata.metadata or {}
        for name, value in (
            ("version", "1"),
            ("job_id", record.job_id),
            ("operator", handle.operator),
            ("state", handle.state),
            ("schema_id", str(handle.schema_id)),
        ):
            entry = said.get(f"stateformat.{name}".encode())
            if entry != value.encode():
                raise self._damaged(
                    f"it says {name} {(entry or b'none').decode(errors='replace')!r} and is read as {value!r}"
                )
        written = said.get(b"stateformat.checkpoint_id", b"")
        if not (written.isdigit() and 0 < int(written) <= record.checkpoint_id):
            raise self._damaged(f"it says checkpoint_id {written!r}, and checkpoint {record.checkpoint_id} names it")
        due = self._whole_schema
        if not schema.equals(due, check_metadata=False):
            raise self._damaged(f"its columns are {_one_line(schema)}; they should be {_one_line(due)}")

    # ---- reading ---------------------------------------------------------------------------------

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (first, last) row groups of pieces that hold rows start … stop − 1."""
        first = int(self._starts.searchsorted(start, "right")) - 1
        end = int(self._starts.searchsorted(stop, "left"))
        while first < end:
            by_size = self._sizes.searchsorted(self._sizes[first] + PIECE_BYTES_MAX, "right")
            by_rows = self._starts.searchsorted(self._starts[first] + PIECE_ROWS_MAX, "right")
            # The sizes of some columns are estimates, but they cannot exceed this.
            by_bound = self._declared.searchsorted(self._declared[first] + _DECLARED_BYTES_MAX, "right")
            last = max(first, min(int(by_size), int(by_rows), int(by_bound), end + 1) - 2)
            yield first, last
            first = last + 1

    def _read(self, first: int, last: int) -> pa.Table:
        large = self._sizes[last + 1] - self._sizes[first] > _THREADS_BYTES_MIN
        with self._translated():
            held = self._held or self._fetched(first, last)
            # No digest covers these bytes, and page checksums do not cover the headers.
            if not parquet.check_pages(
                self._footer, first, last, held, leaves=self._leaves, is_verified=bool(self._held)
            ):
                held = self._verified_whole()
            file = self._file
            if file is None:
                part = parquet.PartialFile(held, self.handle.size_bytes)
                file = self._parquet(pa.PythonFile(part, "r"), is_verified=False)
            # By numbers: a name with a dot could also be that of a nested column.
            table = file.reader.read_row_groups(
                [*range(first, last + 1)], column_indices=self._leaves, use_threads=bool(large)
            )
        rows = int(self._starts[last + 1] - self._starts[first])
        if len(table) != rows:
            raise self._damaged(f"row groups {first} to {last} have {len(table):,} rows, the footer says {rows:,}")
        return pa.Table.from_arrays(table.columns, schema=self._schema)

    def _parquet(self, source: Any, *, is_verified: bool) -> pq.ParquetFile:
        """Open bytes; if a digest has verified them all, page checksums would add nothing."""
        return pq.ParquetFile(
            source,
            metadata=self._metadata,
            page_checksum_verification=not is_verified,
            arrow_extensions_enabled=False,
            # The bytes are in memory. With it, an Arrow thread may be the last to release our file;
            # if Python shuts down meanwhile, that ends the process with SIGABRT.
            pre_buffer=False,
        )

    def _verified_whole(self) -> tuple[parquet.ByteRange, ...]:
        """Return all bytes, kept for the next row groups: only the digest verifies these pages."""
        data = self._fetch(None)
        self._check_bytes(data, self.handle.size_bytes, self.handle.digest, "it")
        self._file = self._parquet(pa.BufferReader(data), is_verified=True)
        self._held = (parquet.ByteRange(0, data),)
        return self._held

    def _fetched(self, first: int, last: int) -> tuple[parquet.ByteRange, ...]:
        """Return the bytes of these row groups, usually by one request: they are contiguous."""
        at_once = self._storage.reads_at_once
        hole_bytes = parquet.HOLE_BYTES_MAX if at_once < 2 else _REMOTE_HOLE_BYTES
        wanted = parquet.byte_ranges(self._footer, first, last, self._leaves, hole_bytes=hole_bytes)
        stored, end = sum(length for _, length in wanted), self.handle.size_bytes - self.handle.footer_bytes
        declared = sum(group.uncompressed_bytes for group in self._footer.row_groups[first : last + 1])
        if wanted and (wanted[-1][0] + wanted[-1][1] > end or stored > 2 * declared + _STORED_BYTES_MIN):
            raise self._damaged(
                f"row groups {first} to {last} lie in {stored:,} bytes, or beyond byte {end:,} of the file"
            )
        calls = (partial(self._fetch, span) for span in wanted)
        if at_once < 2:
            return tuple(parquet.ByteRange(start, call()) for (start, _), call in zip(wanted, calls, strict=True))
        fetched = prefetch(calls, workers=min(at_once, len(wanted)), depth=len(wanted))
        return tuple(parquet.ByteRange(start, data) for (start, _), data in zip(wanted, fetched, strict=True))

    def _chosen_leaves(self, columns: Collection[str]) -> list[int]:
        """Keep these columns in the schema, at least one; return the numbers of their leaves."""
        ends = [*accumulate((_leaf_count(field.type) for field in self._schema), initial=0)]
        wanted = {*columns, self._group_column} & {*self._schema.names} or {self._schema.names[0]}
        chosen = [at for at, name in enumerate(self._schema.names) if name in wanted]
        self._schema = pa.schema([self._schema.field(at) for at in chosen])
        return [leaf for at in chosen for leaf in range(ends[at], ends[at + 1])]

    def _check_groups(self, table: pa.Table, start: int) -> None:
        handle = self.handle
        if self._group_column is None:
            return
        if handle.first_group is None or int(self._group_ends[-1]) != handle.rows:
            raise self._damaged("its handle does not say how many rows each group has", ErrorKind.DAMAGED_MANIFEST)
        low, counts = start - handle.row_start, self._counts
        if len(table) < handle.rows:
            counts = np.diff(np.clip(self._group_ends, low, low + len(table)))
        groups = np.repeat(np.arange(len(counts), dtype=np.int32) + np.int32(handle.first_group), counts)
        row = 0
        for chunk in table[self._group_column].chunks:
            due: npt.NDArray[np.int32] = groups[row : row + len(chunk)]
            if (chunk.to_numpy() != due).any():
                at = int(np.argmax(chunk.to_numpy() != due))
                raise self._damaged(
                    f"row {start + row + at} has {self._group_column} {chunk[at].as_py()}, the manifest says {due[at]}"
                )
            row += len(chunk)

    # ---- errors ----------------------------------------------------------------------------------

    def _damaged(self, why: str, kind: ErrorKind = ErrorKind.DAMAGED_SEGMENT) -> DamagedCheckpoint:
        place = "the manifest" if self._inline is not None else self._storage.url
        return DamagedCheckpoint(
            f"segment {self._path} in {place} is damaged: {why}. It holds state {self.handle.state!r} of "
            f"{self.handle.operator!r}; `ckpt validate` lists everything that is wrong",
            kind=kind,
            path=self._path,
        )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (DamagedCheckpoint, StorageError):
            raise
        except parquet.LimitFault as error:
            raise self._damaged(str(error), ErrorKind.LIMIT_EXCEEDED) from error
        except PARQUET_ERRORS as error:
            raise self._damaged(f"it cannot be read as Parquet: {error}") from error


def _leaf_count(kind: Any) -> int:
    """Return how many columns of Parquet hold values of a type."""
    return sum(_leaf_count(kind.field(at).type) for at in range(kind.num_fields)) if pa.types.is_nested(kind) else 1


def _one_line(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}{'' if field.nullable else ' not null'}" for field in schema)
