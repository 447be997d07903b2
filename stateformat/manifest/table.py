"""The manifest as bytes and in memory (SPEC.md section 4): one row per handle, in Parquet.

A :class:`Manifest` holds the planning columns. It reads the inline bytes, a last column of their
own, when a caller first asks for them. Handles that share an inline segment carry the same bytes;
read back they stay a dictionary as long as possible, so that a small file cannot fill the memory.

Bytes are parsed once size and digest are right, and decompressed once the footer agrees with the
record. ``manifest.rules`` has the rules for rows, ``manifest.slicing`` cuts handles for new subtasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from ..errors import REPAIR_ADVICE, DamagedCheckpoint, ErrorKind, InvalidState
from ..model import Handle, ManifestRef, Totals
from ..parquet import ByteRange, FooterFault, LimitFault, check_columns, check_pages, read_footer, without_arrow_schema
from ..record import MANIFEST_BYTES_MAX
from ..schema import MANIFEST_SCHEMA, PLANNING_COLUMNS
from .handle_sharing import codes_of, inline_faults
from .rules import HandleFault, Ints, first_unsorted, handle_faults, integers, take_rows

ROW_GROUP_ROWS_MAX: Final = 131_072
"""Handles in a row group (SPEC.md section 4.5)."""

DECODED_BYTES_MAX: Final = 256 << 20
"""The memory that any manifest may take (SPEC.md section 7.4)."""

EXPANSION_MAX: Final = 512
"""A larger manifest may take this many times its stored size: similar handles compress well."""

INLINE_BYTES_MAX: Final = 4 << 20
"""Bytes of all distinct inline segments of a manifest (SPEC.md section 4.4)."""

INLINE_EXPANDED_BYTES_MAX: Final = 256 << 20
"""Inline bytes summed over handles, shared segments once per handle."""

PLANNING_SCHEMA: Final = pa.schema([MANIFEST_SCHEMA.field(name) for name in PLANNING_COLUMNS])

# Columns with few distinct values; in the others a dictionary only costs.
_DICTIONARY_COLUMNS: Final = ("operator", "state", "mode", "subtask", "layer", "edge", "schema_id", "inline")
_COUNTS_COLUMN: Final = "rows_per_group.list.element"
_SAMPLE: Final = 65_536
_CODECS: Final = frozenset({"ZSTD", "UNCOMPRESSED"})
_ENCODINGS: Final = frozenset({"PLAIN", "RLE", "RLE_DICTIONARY"})
_KEPT_ENCODED: Final = frozenset({"inline"})
_PARQUET_ERRORS: Final = (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, IndexError)


class Manifest:
    """All handles of a checkpoint, with or without the ``inline`` column. Thread-safe."""

    def __init__(self, handles: pa.Table, *, data: pa.Buffer | None = None) -> None:
        self.handles: pa.Table = handles.select(PLANNING_COLUMNS)
        self._data = data
        self._lock = Lock()
        self._inline: pa.ChunkedArray | None = None
        self._by_path: Mapping[str, pa.Buffer] | None = None
        if "inline" in handles.column_names:
            self._inline = handles["inline"]
        elif data is None:
            self._inline = pa.chunked_array([pa.nulls(handles.num_rows, pa.binary())])

    def __repr__(self) -> str:
        return f"Manifest({self.handles.num_rows} handles)"

    def inline(self, path: str) -> pa.Buffer | None:
        """Return the unverified bytes of an inline segment, or None for one that is an object."""
        with self._lock:
            if self._by_path is None:
                self._by_path = self._buffers(self._column())
            return self._by_path.get(path)

    def full(self) -> pa.Table:
        """Return every column (``schema.MANIFEST_SCHEMA``), in the manifest's order.

        Raises ``DamagedCheckpoint`` (LIMIT_EXCEEDED) where inline bytes would take over 256 MiB.
        """
        with self._lock:
            column = self._column()
        return _with_inline(self.handles, column)

    def rows(self, indices: pa.Array | pa.ChunkedArray) -> pa.Table:
        """Return some rows with every column, in the order of ``indices``."""
        with self._lock:
            column = self._column()
            if self.handles["rows"].num_chunks > 1:
                # Every subtask that restores from this manifest takes rows of it.
                self.handles = self.handles.combine_chunks()
        return _with_inline(take_rows(self.handles, indices), column.take(indices))

    def inline_bytes(self) -> int:
        """Return the bytes of the distinct inline segments, before the manifest compresses them."""
        return self.inline_faults()[0]

    def inline_faults(self) -> tuple[int, list[HandleFault]]:
        """Return the bytes of the distinct inline segments, and the broken rules of section 4.4."""
        with self._lock:
            column = self._column()
        encoded = (column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)).combine_chunks()
        codes, values = integers(encoded.indices), encoded.dictionary
        used = values.take(pa.array(np.unique(codes[codes >= 0])))
        return pc.sum(pc.binary_length(used)).as_py() or 0, inline_faults(self.handles, codes, values)

    def _column(self) -> pa.ChunkedArray:
        """Return the inline column, read at first use, as a dictionary if it comes from bytes."""
        if self._inline is None:
            try:
                with _open(self._data, read_dictionary=["inline"]) as file:
                    column = file.read(columns=["inline"])["inline"]
                # Arrow does not check that the codes of a forged dictionary lie within it.
                column.validate(full=True)
                column = column.unify_dictionaries()
                if len(column) != self.handles.num_rows:
                    raise ValueError(f"there are {len(column)} for {self.handles.num_rows} handles")
            except _PARQUET_ERRORS as error:
                message = f"the inline segments of a manifest cannot be read: {error}"
                raise DamagedCheckpoint(
                    f"{message}; `ckpt validate` lists what else is wrong", kind=ErrorKind.DAMAGED_MANIFEST
                ) from error
            self._inline = column
        return self._inline

    def _buffers(self, column: pa.ChunkedArray) -> Mapping[str, pa.Buffer]:
        present = pc.indices_nonzero(pc.and_(pc.is_valid(column), pc.is_valid(self.handles["path"])))
        paths = pc.dictionary_encode(self.handles["path"].take(present).combine_chunks())
        _, first = np.unique(integers(paths.indices), return_index=True)
        values = _plain(column.take(present.take(pa.array(first))))
        return dict(zip(paths.dictionary.to_pylist(), (value.as_buffer() for value in values), strict=True))


def _with_inline(handles: pa.Table, column: pa.ChunkedArray) -> pa.Table:
    return pa.table([*handles.columns, _plain(column)], schema=MANIFEST_SCHEMA)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return inline bytes as plain binary, or raise if sharing would make them too large."""
    if not pa.types.is_dictionary(column.type):
        return column
    expanded = sum(_expanded_bytes(chunk) for chunk in column.chunks)
    if expanded > INLINE_EXPANDED_BYTES_MAX:
        raise DamagedCheckpoint(
            f"the inline segments of these handles would take {expanded:,} bytes of memory; at most "
            f"{INLINE_EXPANDED_BYTES_MAX:,} are read. `ckpt rewrite` makes objects of such segments",
            kind=ErrorKind.LIMIT_EXCEEDED,
        )
    return column.cast(pa.binary())


def _expanded_bytes(chunk: pa.DictionaryArray) -> int:
    lengths = integers(pc.binary_length(chunk.dictionary), null=0)
    codes = integers(chunk.indices)
    return int(lengths[codes[codes >= 0]].sum()) if len(lengths) else 0


# ---- tables of handles ---------------------------------------------------------------------------


def handles_table(handles: Iterable[Handle]) -> pa.Table:
    """Return handles as a table (``schema.MANIFEST_SCHEMA``), in the order given."""
    columns = list(zip(*handles, strict=True)) or [()] * len(MANIFEST_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, MANIFEST_SCHEMA, strict=True)]
    return pa.table(arrays, schema=MANIFEST_SCHEMA)


def sort_handles(table: pa.Table) -> pa.Table:
    """Sort by (operator, state, subtask with null first, layer), strings by bytes (SPEC.md 4.2).

    Stable: handles that are equal in these keep the order of their entries.
    """
    if first_unsorted(table) is None:
        return table
    keys = (integers(table["layer"]), integers(table["subtask"]), _ranks(table["state"]), _ranks(table["operator"]))
    return take_rows(table, pa.array(np.lexsort(keys)))


def _ranks(column: pa.ChunkedArray) -> Ints:
    """Return the rank of each string among the distinct ones, by bytes."""
    encoded = pc.dictionary_encode(column.combine_chunks())
    order = pc.array_sort_indices(encoded.dictionary).to_numpy()
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return ranks[integers(encoded.indices)]


def totals(table: pa.Table) -> Totals:
    """Count handles, rows, and the distinct segments with their bytes (SPEC.md section 3.2)."""
    codes, count = codes_of(table["path"])
    sizes = np.zeros(count, np.int64)
    sizes[codes[codes >= 0]] = integers(table["size_bytes"])[codes >= 0]
    rows = pc.sum(table["rows"]).as_py() or 0
    return Totals(handles=table.num_rows, rows=rows, segments=count, bytes=int(sizes.sum()))


def spill_inline(table: pa.Table, limit: int = INLINE_BYTES_MAX) -> list[str]:
    """Return the paths of inline segments that must become objects, largest first (SPEC.md 4.4).

    The distinct ones that stay have at most ``limit`` bytes together, and at most 64 times as many
    counted once for each handle that shares them.
    """
    inline = table.select(["path", "inline"]).filter(pc.is_valid(table["inline"]))
    if not inline.num_rows:
        return []
    paths = pc.dictionary_encode(inline["path"].combine_chunks())
    codes = integers(paths.indices)
    lengths = integers(pc.binary_length(_plain(inline["inline"])))
    sizes = np.zeros(len(paths.dictionary), np.int64)
    sizes[codes] = lengths
    shared = sizes * np.bincount(codes, minlength=len(sizes))
    order = np.argsort(-sizes, kind="stable")
    # The bytes that are left without the k largest, for every k.
    left = sizes.sum() - np.cumsum(sizes[order]) + sizes[order]
    left_shared = shared.sum() - np.cumsum(shared[order]) + shared[order]
    spilled = order[(left > limit) | (left_shared > limit * 64)]
    found: list[str] = paths.dictionary.take(pa.array(spilled)).to_pylist()
    return found


# ---- bytes ---------------------------------------------------------------------------------------


def encode_manifest(table: pa.Table) -> pa.Buffer:
    """Return the Parquet file (SPEC.md section 4.5) of sorted handles (``schema.MANIFEST_SCHEMA``).

    Raises ``InvalidState`` (LIMIT_EXCEEDED) where readers would refuse it (section 7.4).
    """
    assert first_unsorted(table) is None, "handles are sorted before they are encoded"
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.cast(MANIFEST_SCHEMA),
        sink,
        compression="zstd",
        compression_level=1,
        use_dictionary=[*_DICTIONARY_COLUMNS, *([_COUNTS_COLUMN] if _repeat(table["rows_per_group"]) else [])],
        # More than may be inline: else the writer gives up its dictionary and repeats the bytes.
        dictionary_pagesize_limit=2 * INLINE_BYTES_MAX,
        write_page_checksum=True,
        write_statistics=["operator", "state"],
        row_group_size=ROW_GROUP_ROWS_MAX,
        store_schema=False,
    )
    data = sink.getvalue()
    try:
        open_manifest(data).close()
    except FooterFault as fault:
        message = f"readers would refuse the manifest of {table.num_rows:,} handles: {fault}"
        raise InvalidState(f"{message}; write fewer and larger segments", kind=ErrorKind.LIMIT_EXCEEDED) from fault
    return data


def _repeat(lists: pa.ChunkedArray) -> bool:
    """Whether a sample of the rows per group has few values: then a dictionary halves the read."""
    sample = pc.list_flatten(lists.slice(0, _SAMPLE)).slice(0, _SAMPLE)
    return bool(pc.count_distinct(sample).as_py() * 8 <= len(sample))


def manifest_ref(path: str, data: pa.Buffer) -> ManifestRef:
    """Return what a record says of a manifest that lies under ``path``, by its bytes.

    Raises ``DamagedCheckpoint`` for bytes that are not a Parquet file.
    """
    try:
        uncompressed = sum(group.uncompressed_bytes for group in read_footer(data).row_groups)
    except FooterFault as error:
        raise _damaged(ManifestRef(path, 0, "", 0), f"it cannot be read as Parquet: {error}") from error
    return ManifestRef(path, data.size, xxhash.xxh3_128_hexdigest(data), uncompressed)


def decode_manifest(data: pa.Buffer, ref: ManifestRef) -> Manifest:
    """Return the manifest of the bytes that a record names, verified (SPEC.md sections 4 and 7.1).

    Raises ``DamagedCheckpoint``: OBJECT_SIZE_DIFFERS or OBJECT_DIGEST_DIFFERS before anything is
    parsed, INVALID_PATH, LIMIT_EXCEEDED, or DAMAGED_MANIFEST. It never raises another error.
    """
    verify_manifest(data, ref)
    handles = read_handles(data, ref)
    for fault in handle_faults(handles):
        raise _damaged(ref, fault.describe(handles), fault.kind)
    return Manifest(handles, data=data)


def verify_manifest(data: pa.Buffer, ref: ManifestRef) -> None:
    """Compare size and digest with the record, or raise ``DamagedCheckpoint``."""
    if data.size != ref.size_bytes:
        message = f"it has {data.size:,} bytes, the record says {ref.size_bytes:,}"
        raise _damaged(ref, message, ErrorKind.OBJECT_SIZE_DIFFERS)
    digest = xxhash.xxh3_128_hexdigest(data)
    if digest != ref.digest:
        raise _damaged(ref, f"its digest is {digest}, the record says {ref.digest}", ErrorKind.OBJECT_DIGEST_DIFFERS)


def read_handles(data: pa.Buffer, ref: ManifestRef) -> pa.Table:
    """Return the planning columns (``PLANNING_SCHEMA``) of verified bytes, values unchecked."""
    try:
        with open_manifest(data) as file:
            _check_file(file, ref)
            table = file.read(columns=list(PLANNING_COLUMNS))
            expected = file.metadata.num_rows
    except LimitFault as error:
        raise _damaged(ref, f"it would not fit: {error}", ErrorKind.LIMIT_EXCEEDED) from error
    except _PARQUET_ERRORS as error:
        raise _damaged(ref, f"it cannot be read as Parquet: {error}") from error
    if table.num_rows != expected:
        raise _damaged(ref, f"it has {table.num_rows} rows, its footer says {expected}")
    # Parquet writers choose the nullability of columns, so nulls are checked with the values.
    columns = [_typed(column, kind) for column, kind in zip(table.columns, PLANNING_SCHEMA.types, strict=True)]
    return pa.table(columns, schema=PLANNING_SCHEMA)


def read_unpublished(data: pa.Buffer, path: str) -> pa.Table:
    """Return the planning columns of an unpublished manifest."""
    return read_handles(data, manifest_ref(path, data))


def _typed(column: pa.ChunkedArray, expected: pa.DataType) -> pa.ChunkedArray:
    if column.type == expected:
        return column
    chunks = [
        pa.ListArray.from_buffers(expected, len(c), c.buffers()[:2], c.null_count, c.offset, [c.values])
        for c in column.chunks
    ]
    return pa.chunked_array(chunks, expected)


def open_manifest(data: pa.Buffer) -> pq.ParquetFile:
    """Open a manifest as a Parquet file whose pages are safe to decode (SPEC.md 4.5 and 7.4).

    Raises ``LimitFault``, ``FooterFault``, and what pyarrow raises.
    """
    if data.size > MANIFEST_BYTES_MAX:
        raise LimitFault(f"it has more than {MANIFEST_BYTES_MAX:,} bytes")
    footer = read_footer(data)
    for number, group in enumerate(footer.row_groups):
        if group.rows > ROW_GROUP_ROWS_MAX:
            raise FooterFault(f"row group {number} has {group.rows:,} rows; at most {ROW_GROUP_ROWS_MAX:,} are allowed")
    check_columns(footer, _CODECS, _ENCODINGS, clause="SPEC 4.5")
    limit = max(DECODED_BYTES_MAX, EXPANSION_MAX * data.size)
    check_pages(footer, 0, len(footer.row_groups) - 1, (ByteRange(0, data),), limit=limit, kept_encoded=_KEPT_ENCODED)
    return _open(data)


def _open(data: pa.Buffer, **options: Any) -> pq.ParquetFile:
    return pq.ParquetFile(
        pa.BufferReader(without_arrow_schema(data)),
        page_checksum_verification=True,
        arrow_extensions_enabled=False,
        **options,
    )


def _check_file(file: pq.ParquetFile, ref: ManifestRef) -> None:
    """Check columns and sizes by the footer, before anything is decompressed."""
    metadata, schema = file.metadata, file.schema_arrow
    if schema.names != MANIFEST_SCHEMA.names:
        message = f"its columns are {', '.join(schema.names)}; they must be {', '.join(MANIFEST_SCHEMA.names)}"
        raise _damaged(ref, message)
    for found, expected in zip(schema, MANIFEST_SCHEMA, strict=True):
        both_lists = pa.types.is_list(found.type) and pa.types.is_list(expected.type)
        # The name of a list's element is the writer's choice.
        same = found.type.value_type == expected.type.value_type if both_lists else found.type == expected.type
        if not same:
            raise _damaged(ref, f"its column {expected.name} is {found.type}; it must be {expected.type}")
    claimed = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    if claimed != ref.uncompressed_bytes:
        raise _damaged(ref, f"its footer says {claimed:,} uncompressed bytes, the record {ref.uncompressed_bytes:,}")


def _damaged(ref: ManifestRef, message: str, kind: ErrorKind = ErrorKind.DAMAGED_MANIFEST) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"manifest {ref.path} is damaged: {message}{REPAIR_ADVICE}", kind=kind, path=ref.path)
