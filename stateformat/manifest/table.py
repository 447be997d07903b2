"""The manifest as bytes and in memory (SPEC.md section 4): one row per handle, in Parquet.

Theory of operation. Planning must cost what reading a table costs. So a :class:`Manifest` holds the planning columns and
fetches the inline bytes, which lie in a last column of their own, when somebody first asks for them. Nothing is parsed
before size and digest are right, and nothing is decompressed before the footer's sizes are those that the record
announced. The rules that rows must satisfy stand in ``manifest.rules``; cutting handles for new subtasks in
``manifest.slicing``.

Handles that share an inline segment carry the same bytes; Parquet's dictionary encoding keeps them once. Read back they
stay a dictionary until they are asked for, so that a small file cannot grow into a large memory.
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
from ..storage import Storage
from .handle_sharing import codes_of, inline_faults
from .rules import HandleFault, first_unsorted, handle_faults, integers, take_rows
from .slicing import cut_handles

ROW_GROUP_ROWS_MAX: Final = 131_072
"""Handles in a row group (SPEC.md section 4.5)."""

DECODED_BYTES_MAX: Final = 256 << 20
"""What any manifest may take in memory (SPEC.md section 7.4)."""

EXPANSION_MAX: Final = 512
"""A larger one may take so many times its size: a million handles, alike but for their numbers, are 3 MB stored, 400 MB read."""

INLINE_BYTES_MAX: Final = 4 << 20
"""Distinct inline segments of one manifest, together (SPEC.md section 4.4)."""

INLINE_EXPANDED_BYTES_MAX: Final = 256 << 20
"""Inline bytes summed over handles, shared ones as often as they are shared: what they may take in memory."""

PLANNING_SCHEMA: Final = pa.schema([MANIFEST_SCHEMA.field(name) for name in PLANNING_COLUMNS])

# Few distinct values, or equal bytes in many rows. The others are as good as random, where a dictionary only costs.
_DICTIONARY_COLUMNS: Final = ("operator", "state", "mode", "subtask", "layer", "edge", "schema_id", "inline")
_COUNTS_COLUMN: Final = "rows_per_group.list.element"
_SAMPLE: Final = 65_536
_CODECS: Final = frozenset({"ZSTD", "UNCOMPRESSED"})
_ENCODINGS: Final = frozenset({"PLAIN", "RLE", "RLE_DICTIONARY"})
_KEPT_ENCODED: Final = frozenset({"inline"})
_PARQUET_ERRORS: Final = (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, IndexError)


class Manifest:
    """All handles of a checkpoint. Thread-safe.

    Made by :func:`decode_manifest`, or from a table of handles with or without the ``inline`` column.
    """

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
        """The bytes of a segment that lies in the manifest; None for one that is an object. Verified by its reader."""
        with self._lock:
            if self._by_path is None:
                self._by_path = self._buffers(self._column())
            return self._by_path.get(path)

    def full(self) -> pa.Table:
        """Every column (``schema.MANIFEST_SCHEMA``), in the manifest's order.

        Raises ``DamagedCheckpoint`` (kind ``LIMIT_EXCEEDED``) where shared inline bytes would take more than 256 MiB.
        """
        with self._lock:
            column = self._column()
        return _with_inline(self.handles, column)

    def rows(self, indices: pa.Array | pa.ChunkedArray) -> pa.Table:
        """Some rows with every column, in the order of ``indices``."""
        with self._lock:
            column = self._column()
            if self.handles["rows"].num_chunks > 1:
                # To be taken from again and again, by everybody who restores from what was just published.
                self.handles = self.handles.combine_chunks()
        return _with_inline(take_rows(self.handles, indices), column.take(indices))

    def inline_bytes(self) -> int:
        """Bytes of the distinct segments that lie in the manifest. It compresses them, so it may be smaller."""
        return self.inline_faults()[0]

    def inline_faults(self) -> tuple[int, list[HandleFault]]:
        """Bytes of the distinct inline segments, and the rules of section 4.4 that handles break (for validation)."""
        with self._lock:
            column = self._column()
        encoded = (column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)).combine_chunks()
        codes, values = integers(encoded.indices), encoded.dictionary
        used = values.take(pa.array(np.unique(codes[codes >= 0])))
        return pc.sum(pc.binary_length(used)).as_py() or 0, inline_faults(self.handles, codes, values)

    def _column(self) -> pa.ChunkedArray:
        """The inline column, read at first use, as a dictionary where it was read."""
        if self._inline is None:
            try:
                with _open(self._data, read_dictionary=["inline"]) as file:
                    column = file.read(columns=["inline"])["inline"]
                # Arrow does not look whether the positions in a forged dictionary are in it.
                column.validate(full=True)
                column = column.unify_dictionaries()
                if len(column) != self.handles.num_rows:
                    raise ValueError(f"there are {len(column)} for {self.handles.num_rows} handles")
            except _PARQUET_ERRORS as error:
                raise DamagedCheckpoint(
                    f"the inline segments of a manifest cannot be read: {error}; `ckpt validate` lists what else is wrong",
                    kind=ErrorKind.DAMAGED_MANIFEST,
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
    """Inline bytes as plain binary, unless sharing would make them too large."""
    if not pa.types.is_dictionary(column.type):
        return column
    expanded = sum(_expanded_bytes(chunk) for chunk in column.chunks)
    if expanded > INLINE_EXPANDED_BYTES_MAX:
        raise DamagedCheckpoint(
            f"the inline segments of these handles would take {expanded:,} bytes of memory; at most "
            f"{INLINE_EXPANDED_BYTES_MAX:,} are read. Segments that so many handles share belong in objects: `ckpt rewrite`",
            kind=ErrorKind.LIMIT_EXCEEDED,
        )
    return column.cast(pa.binary())


def _expanded_bytes(chunk: pa.DictionaryArray) -> int:
    lengths = integers(pc.binary_length(chunk.dictionary), null=0)
    codes = integers(chunk.indices)
    return int(lengths[codes[codes >= 0]].sum()) if len(lengths) else 0


# ---- tables of handles -----------------------------------------------------------------------------------------------


def handles_table(handles: Iterable[Handle]) -> pa.Table:
    """Handles as a table (``schema.MANIFEST_SCHEMA``), in the order given."""
    columns = list(zip(*handles, strict=True)) or [()] * len(MANIFEST_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, MANIFEST_SCHEMA, strict=True)]
    return pa.table(arrays, schema=MANIFEST_SCHEMA)


def sort_handles(table: pa.Table) -> pa.Table:
    """The same rows by (operator, state, subtask with null first, layer), strings by their bytes (SPEC.md section 4.2).

    Stable: rows that are equal in these keep their order, which for even_split and union is the order of the entries.
    A table that is sorted is returned as it is.
    """
    if first_unsorted(table) is None:
        return table
    keys = (integers(table["layer"]), integers(table["subtask"]), _ranks(table["state"]), _ranks(table["operator"]))
    return take_rows(table, pa.array(np.lexsort(keys)))


def _ranks(column: pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The rank of each string among the distinct ones, by bytes."""
    encoded = pc.dictionary_encode(column.combine_chunks())
    order = pc.array_sort_indices(encoded.dictionary).to_numpy()
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return ranks[integers(encoded.indices)]


def totals(table: pa.Table) -> Totals:
    """Handles and rows; distinct segments, inline ones among them, and their sizes (SPEC.md section 3.2)."""
    codes, count = codes_of(table["path"])
    sizes = np.zeros(count, np.int64)
    sizes[codes[codes >= 0]] = integers(table["size_bytes"])[codes >= 0]
    return Totals(
        handles=table.num_rows,
        rows=pc.sum(table["rows"]).as_py() or 0,
        segments=len(sizes),
        bytes=int(sizes.sum()),
    )


def spill_inline(table: pa.Table, limit: int = INLINE_BYTES_MAX) -> list[str]:
    """Which inline segments must become objects, by path, largest first (SPEC.md section 4.4).

    As many as it takes for the distinct ones that stay to have at most ``limit`` bytes together, and, counted once for
    each handle that shares them, at most 64 times as many. Empty in the usual case.
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
    # What is left when the k largest have gone, for every k.
    left = sizes.sum() - np.cumsum(sizes[order]) + sizes[order]
    left_shared = shared.sum() - np.cumsum(shared[order]) + shared[order]
    spilled = order[(left > limit) | (left_shared > limit * 64)]
    found: list[str] = paths.dictionary.take(pa.array(spilled)).to_pylist()
    return found


# ---- bytes -----------------------------------------------------------------------------------------------------------


def encode_manifest(table: pa.Table) -> pa.Buffer:
    """The Parquet file of a table of handles (``schema.MANIFEST_SCHEMA``, sorted) by SPEC.md section 4.5.

    ``InvalidState`` of kind LIMIT_EXCEEDED where readers would refuse it (section 7.4); ``AssertionError`` for an unsorted
    table, which no caller of the library hands over.
    """
    assert first_unsorted(table) is None, "handles are sorted before they are encoded"
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.cast(MANIFEST_SCHEMA),
        sink,
        compression="zstd",
        compression_level=1,
        use_dictionary=[*_DICTIONARY_COLUMNS, *([_COUNTS_COLUMN] if _repeat(table["rows_per_group"]) else [])],
        # Above what may be inline, so that the writer never gives its dictionary up and repeats the bytes.
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
        raise InvalidState(
            f"{table.num_rows:,} handles would be a manifest that no reader may read: {fault}; write fewer and larger segments",
            kind=ErrorKind.LIMIT_EXCEEDED,
        ) from fault
    return data


def _repeat(lists: pa.ChunkedArray) -> bool:
    """Whether the rows per group, most of a large manifest, take few values; by a sample. Then they read twice as fast."""
    sample = pc.list_flatten(lists.slice(0, _SAMPLE)).slice(0, _SAMPLE)
    return bool(pc.count_distinct(sample).as_py() * 8 <= len(sample))


def manifest_ref(path: str, data: pa.Buffer) -> ManifestRef:
    """What a record says of a manifest that lies under ``path``."""
    metadata = pq.read_metadata(pa.BufferReader(data))
    return ManifestRef(path, data.size, xxhash.xxh3_128_hexdigest(data), _uncompressed_bytes(metadata))


def decode_manifest(data: pa.Buffer, ref: ManifestRef) -> Manifest:
    """The manifest of these bytes, which must be the ones that the record names (SPEC.md sections 4 and 7.1).

    Raises ``DamagedCheckpoint``: kind ``OBJECT_SIZE_DIFFERS`` or ``OBJECT_DIGEST_DIFFERS`` before anything is parsed,
    ``INVALID_PATH`` for a path that leaves the store, ``DAMAGED_MANIFEST`` for everything else; never another error.
    """
    verify_manifest(data, ref)
    handles = read_handles(data, ref)
    for fault in handle_faults(handles):
        raise _damaged(ref, fault.describe(handles), fault.kind)
    return Manifest(handles, data=data)


def verify_manifest(data: pa.Buffer, ref: ManifestRef) -> None:
    """Size and digest against the record, before anything is parsed."""
    if data.size != ref.size_bytes:
        raise _damaged(
            ref, f"it has {data.size:,} bytes, the record says {ref.size_bytes:,}", ErrorKind.OBJECT_SIZE_DIFFERS
        )
    digest = xxhash.xxh3_128_hexdigest(data)
    if digest != ref.digest:
        raise _damaged(ref, f"its digest is {digest}, the record says {ref.digest}", ErrorKind.OBJECT_DIGEST_DIFFERS)


def read_handles(data: pa.Buffer, ref: ManifestRef) -> pa.Table:
    """The planning columns (``PLANNING_SCHEMA``) of verified bytes; the rules for their values are not applied."""
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
    # Nullability is the writer's choice in Parquet; that required columns hold no null is a rule on values.
    return pa.table(
        [_typed(column, field.type) for column, field in zip(table.columns, PLANNING_SCHEMA, strict=True)],
        schema=PLANNING_SCHEMA,
    )


def unpublished_ref(data: pa.Buffer, path: str) -> ManifestRef:
    """What a record would say of these bytes, for which none vouches yet. ``DamagedCheckpoint`` for what is no Parquet."""
    try:
        uncompressed = sum(group.uncompressed_bytes for group in read_footer(data).row_groups)
    except FooterFault as error:
        raise _damaged(ManifestRef(path, 0, "", 0), f"it cannot be read as Parquet: {error}") from error
    return ManifestRef(path, data.size, xxhash.xxh3_128_hexdigest(data), uncompressed)


def read_unpublished(data: pa.Buffer, path: str) -> pa.Table:
    """The planning columns of a manifest for which no record vouches yet, judged as any other."""
    return read_handles(data, unpublished_ref(data, path))


def _typed(column: pa.ChunkedArray, expected: pa.DataType) -> pa.ChunkedArray:
    if column.type == expected:
        return column
    chunks = [
        pa.ListArray.from_buffers(expected, len(c), c.buffers()[:2], c.null_count, c.offset, [c.values])
        for c in column.chunks
    ]
    return pa.chunked_array(chunks, expected)


def read_manifest(storage: Storage, ref: ManifestRef) -> pa.Buffer:
    """The bytes of a manifest; of an object that is larger than the record says, one byte more than it says."""
    return storage.read_range(ref.path, 0, ref.size_bytes + 1)


def open_manifest(data: pa.Buffer) -> pq.ParquetFile:
    """A manifest as a Parquet file whose pages may be decoded. Raises what pyarrow raises, ``LimitFault``, ``FooterFault``.

    Judged by its own footer and pages before Arrow sees it: encodings, rows of a row group, memory (SPEC.md sections 4.5
    and 7.4).
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


def _uncompressed_bytes(metadata: Any) -> int:
    return sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))


def _check_file(file: pq.ParquetFile, ref: ManifestRef) -> None:
    """The footer: columns and sizes. Nothing has been decompressed yet."""
    metadata, schema = file.metadata, file.schema_arrow
    if schema.names != MANIFEST_SCHEMA.names:
        raise _damaged(
            ref, f"its columns are {', '.join(schema.names)}; they must be {', '.join(MANIFEST_SCHEMA.names)}"
        )
    for found, due in zip(schema, MANIFEST_SCHEMA, strict=True):
        same = (
            found.type.value_type == due.type.value_type
            if _both_lists(found.type, due.type)
            else found.type == due.type
        )
        if not same:
            raise _damaged(ref, f"its column {due.name} is {found.type}; it must be {due.type}")
    claimed = _uncompressed_bytes(metadata)
    if claimed != ref.uncompressed_bytes:
        raise _damaged(ref, f"its footer says {claimed:,} uncompressed bytes, the record {ref.uncompressed_bytes:,}")


def _both_lists(found: pa.DataType, due: pa.DataType) -> bool:
    return bool(pa.types.is_list(found) and pa.types.is_list(due))


def _damaged(ref: ManifestRef, message: str, kind: ErrorKind = ErrorKind.DAMAGED_MANIFEST) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"manifest {ref.path} is damaged: {message}{REPAIR_ADVICE}",
        kind=kind,
        path=ref.path,
    )


__all__ = [
    "INLINE_BYTES_MAX",
    "Manifest",
    "cut_handles",
    "decode_manifest",
    "encode_manifest",
    "handles_table",
    "manifest_ref",
    "open_manifest",
    "read_handles",
    "read_manifest",
    "read_unpublished",
    "sort_handles",
    "spill_inline",
    "totals",
    "verify_manifest",
]
