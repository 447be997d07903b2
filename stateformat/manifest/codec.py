"""The manifest as bytes: a Parquet file (SPEC.md sections 4.5, 7.1 and 7.4).

Bytes are parsed only after size and digest have been checked, and decompressed only after the
footer agrees with the record and the pages are known to be safe to decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from ..errors import REPAIR_ADVICE, DamagedCheckpoint, ErrorKind, InvalidState
from ..model import ManifestRef, Mode
from ..parquet import ByteRange, FooterFault, LimitFault, check_columns, check_pages, read_footer, without_arrow_schema
from ..record import MANIFEST_BYTES_MAX
from ..schema import MANIFEST_SCHEMA, PLANNING_COLUMNS
from .rules import as_numpy, broken_rules, first_unsorted, handle_faults, integers, one_chunk
from .table import INLINE_BYTES_MAX, Manifest

ROW_GROUP_ROWS_MAX: Final = 131_072
"""Handles in a row group (SPEC.md section 4.5)."""
DECODED_BYTES_MAX: Final = 256 << 20
"""The memory that any manifest may take (SPEC.md section 7.4)."""
EXPANSION_MAX: Final = 512
"""A larger manifest may take this many times its stored size: similar handles compress well."""
PLANNING_SCHEMA: Final = pa.schema([MANIFEST_SCHEMA.field(name) for name in PLANNING_COLUMNS])
# Columns with few distinct values; for the others a dictionary only costs.
_DICTIONARY_COLUMNS: Final = ("operator", "state", "mode", "subtask", "layer", "edge", "schema_id", "inline")
# Decoded from a dictionary, they take a fraction of the time and no more memory than they need.
REPEATED_TEXTS: Final = ("operator", "state", "mode", "edge")
_GROWING: Final = ("path", "rows_per_group")
"""Columns for which Arrow doubles its memory while it reads."""
_COUNTS_COLUMN: Final = "rows_per_group.list.element"
_SAMPLE: Final = 65_536
_CODECS: Final = frozenset({"ZSTD", "UNCOMPRESSED"})
_ENCODINGS: Final = frozenset({"PLAIN", "RLE", "RLE_DICTIONARY"})
_KEPT_ENCODED: Final = frozenset({"inline"})
PARQUET_ERRORS: Final = (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, IndexError)


def encode_manifest(table: pa.Table) -> pa.Buffer:
    """Return the Parquet file (SPEC.md section 4.5) of sorted handles (``schema.MANIFEST_SCHEMA``).

    Raises ``InvalidState`` (LIMIT_EXCEEDED) if readers would refuse it (section 7.4).
    """
    assert first_unsorted(table) is None, "handles are sorted before they are encoded"
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.cast(MANIFEST_SCHEMA),
        sink,
        compression="zstd",
        compression_level=1,
        use_dictionary=[*_DICTIONARY_COLUMNS, *([_COUNTS_COLUMN] if _repeat(table["rows_per_group"]) else [])],
        # More than may be inline: otherwise the writer drops its dictionary and repeats the bytes.
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
    """Return whether a sample of the rows per group has few distinct values.

    If so, a dictionary halves the time to read them.
    """
    sample = pc.list_flatten(lists.slice(0, _SAMPLE)).slice(0, _SAMPLE)
    return bool(pc.count_distinct(sample).as_py() * 8 <= len(sample))


def manifest_ref(path: str, data: pa.Buffer) -> ManifestRef:
    """Return what a record says of the manifest at ``path``, computed from its bytes.

    Raises ``DamagedCheckpoint`` for bytes that are not a Parquet file.
    """
    try:
        uncompressed = sum(group.uncompressed_bytes for group in read_footer(data).row_groups)
    except FooterFault as error:
        raise _damaged(ManifestRef(path, 0, "", 0), f"it cannot be read as Parquet: {error}") from error
    return ManifestRef(path, data.size, xxhash.xxh3_128_hexdigest(data), uncompressed)


def decode_manifest(data: pa.Buffer, ref: ManifestRef) -> Manifest:
    """Return the manifest that a record names, from its bytes, verified (SPEC.md 4 and 7.1).

    Raises ``DamagedCheckpoint``: OBJECT_SIZE_DIFFERS or OBJECT_DIGEST_DIFFERS before anything is
    parsed, INVALID_PATH, LIMIT_EXCEEDED, or DAMAGED_MANIFEST. It never raises another error.
    """
    verify_manifest(data, ref)
    manifest = read_manifest(data, ref)
    for fault in handle_faults(manifest.handles):
        raise _damaged(ref, fault.message, fault.kind)
    return manifest


def verify_manifest(data: pa.Buffer, ref: ManifestRef) -> None:
    """Compare size and digest with the record, or raise ``DamagedCheckpoint``."""
    if data.size != ref.size_bytes:
        message = f"it has {data.size:,} bytes, the record says {ref.size_bytes:,}"
        raise _damaged(ref, message, ErrorKind.OBJECT_SIZE_DIFFERS)
    digest = xxhash.xxh3_128_hexdigest(data)
    if digest != ref.digest:
        raise _damaged(ref, f"its digest is {digest}, the record says {ref.digest}", ErrorKind.OBJECT_DIGEST_DIFFERS)


def read_manifest(data: pa.Buffer, ref: ManifestRef) -> Manifest:
    """Return the manifest of verified bytes without checking its values."""
    try:
        with open_manifest(data) as file:
            check_file(file, ref)
            expected = file.metadata.num_rows
            with open_file(data, read_dictionary=[*REPEATED_TEXTS], metadata=file.metadata) as again:
                columns = _planning_columns(again)
    except LimitFault as error:
        raise _damaged(ref, f"it would not fit: {error}", ErrorKind.LIMIT_EXCEEDED) from error
    except PARQUET_ERRORS as error:
        raise _damaged(ref, f"it cannot be read as Parquet: {error}") from error
    for column in columns:
        if len(column) != expected:
            raise _damaged(ref, f"it has {len(column)} rows, its footer says {expected}")
    # Parquet writers choose the nullability of columns, so nulls are checked with the values.
    handles = pa.table(columns, schema=PLANNING_SCHEMA)
    return Manifest(handles, read_inline=partial(_read_inline, data, expected))


def decode_columns(data: pa.Buffer, ref: ManifestRef, names: Sequence[str]) -> pa.Table:
    """Return some columns of a record's manifest, in this order; size and digest are verified.

    Texts that repeat, and ``inline``, are dictionaries. The rules for values are not checked: who
    only asks what thousands of manifests name need not pay for them. Raises as
    :func:`decode_manifest` for what is not a manifest.
    """
    verify_manifest(data, ref)
    encoded = [name for name in names if name in REPEATED_TEXTS or name in _KEPT_ENCODED]
    try:
        with open_manifest(data, names, read_dictionary=encoded) as file:
            check_file(file, ref)
            found = file.read(columns=list(names), use_threads=False).select(names)
            for name in encoded:
                check_codes(found[name])
            if len(found) != file.metadata.num_rows:
                raise ValueError(f"it has {len(found)} rows, its footer says {file.metadata.num_rows}")
    except LimitFault as error:
        raise _damaged(ref, f"it would not fit: {error}", ErrorKind.LIMIT_EXCEEDED) from error
    except PARQUET_ERRORS as error:
        raise _damaged(ref, f"it cannot be read as Parquet: {error}") from error
    return found


def _planning_columns(file: pq.ParquetFile) -> list[pa.ChunkedArray]:
    """Return the planning columns of a manifest, in order.

    Columns that Arrow builds by doubling are read alone, so that a million handles take little more
    memory than the result.
    """
    found = {name: file.read(columns=[name], use_threads=False)[name] for name in _GROWING}
    _release(file)
    rest = file.read(columns=[name for name in PLANNING_COLUMNS if name not in found], use_threads=False)
    found |= zip(rest.column_names, rest.columns, strict=True)
    del rest
    columns = [typed(found.pop(item.name), item.type) for item in PLANNING_SCHEMA]
    _release(file)
    return columns


def _release(file: pq.ParquetFile) -> None:
    """Give back the memory that decoding has used and freed; otherwise Arrow keeps it."""
    if file.metadata.num_rows > ROW_GROUP_ROWS_MAX:
        pa.default_memory_pool().release_unused()


def _read_inline(data: pa.Buffer, rows: int) -> pa.ChunkedArray:
    """Return the inline column as a dictionary."""
    try:
        with open_file(data, read_dictionary=["inline"]) as file:
            column = file.read(columns=["inline"])["inline"]
        # Arrow does not check that the codes of a forged dictionary are within its bounds.
        column.validate(full=True)
        column = column.unify_dictionaries()
        if len(column) != rows:
            raise ValueError(f"there are {len(column)} for {rows} handles")
    except PARQUET_ERRORS as error:
        message = f"the inline segments of a manifest cannot be read: {error}"
        raise DamagedCheckpoint(
            f"{message}; `ckpt validate` lists what else is wrong", kind=ErrorKind.DAMAGED_MANIFEST
        ) from error
    return column


def typed(column: pa.ChunkedArray, expected: pa.DataType) -> pa.ChunkedArray:
    """Return a column as ``MANIFEST_SCHEMA`` has it: texts in one chunk, lists with its element."""
    if column.type == expected:
        return column
    if pa.types.is_dictionary(column.type):
        return _without_dictionary(column)
    chunks = [
        pa.ListArray.from_buffers(expected, len(c), c.buffers()[:2], c.null_count, c.offset, [c.values])
        for c in column.chunks
    ]
    return pa.chunked_array(chunks, expected)


def _without_dictionary(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the texts in one chunk. They may not be UTF-8: a rule says for which handles."""
    check_codes(column)
    decoded = pa.chunked_array([chunk.dictionary_decode() for chunk in column.chunks], column.type.value_type)
    whole = one_chunk(decoded)
    return whole if isinstance(whole, pa.ChunkedArray) else pa.chunked_array([whole])


def check_codes(column: pa.ChunkedArray) -> None:
    """Raise ``ValueError`` for codes beyond a forged dictionary: Arrow does not check them."""
    for chunk in column.chunks:
        codes = integers(chunk.indices.drop_null())
        if codes.min(initial=0) < 0 or codes.max(initial=-1) >= len(chunk.dictionary):
            raise ValueError("a code lies beyond its dictionary")


def open_manifest(data: pa.Buffer, names: Sequence[str] | None = None, **options: Any) -> pq.ParquetFile:
    """Open a manifest as a Parquet file whose pages are safe to decode (SPEC.md 4.5 and 7.4).

    ``names``: only those of these columns; all by default. Raises ``LimitFault``, ``FooterFault``,
    and what pyarrow raises.
    """
    if data.size > MANIFEST_BYTES_MAX:
        raise LimitFault(f"it has more than {MANIFEST_BYTES_MAX:,} bytes")
    footer = read_footer(data)
    for number, group in enumerate(footer.row_groups):
        if group.rows > ROW_GROUP_ROWS_MAX:
            raise FooterFault(f"row group {number} has {group.rows:,} rows; at most {ROW_GROUP_ROWS_MAX:,} are allowed")
    check_columns(footer, _CODECS, _ENCODINGS, clause="SPEC 4.5")
    limit = max(DECODED_BYTES_MAX, EXPANSION_MAX * data.size)
    chosen = None if names is None else [at for at, leaf in enumerate(footer.leaves) if leaf.path in names]
    last = len(footer.row_groups) - 1
    check_pages(footer, 0, last, (ByteRange(0, data),), leaves=chosen, limit=limit, kept_encoded=_KEPT_ENCODED)
    return open_file(data, **options)


def open_file(data: pa.Buffer, **options: Any) -> pq.ParquetFile:
    """Open a manifest that :func:`open_manifest` has found safe."""
    return pq.ParquetFile(
        pa.BufferReader(without_arrow_schema(data)),
        page_checksum_verification=True,
        arrow_extensions_enabled=False,
        **options,
    )


def check_file(file: pq.ParquetFile, ref: ManifestRef) -> None:
    """Check columns and sizes by the footer, before anything is decompressed."""
    metadata, schema = file.metadata, file.schema_arrow
    if schema.names != MANIFEST_SCHEMA.names:
        message = f"its columns are {', '.join(schema.names)}; they must be {', '.join(MANIFEST_SCHEMA.names)}"
        raise _damaged(ref, message)
    for found, expected in zip(schema, MANIFEST_SCHEMA, strict=True):
        type_ = found.type.value_type if pa.types.is_dictionary(found.type) else found.type
        both_lists = pa.types.is_list(type_) and pa.types.is_list(expected.type)
        # The name of a list's element is the writer's choice.
        same = type_.value_type == expected.type.value_type if both_lists else type_ == expected.type
        if not same:
            raise _damaged(ref, f"its column {expected.name} is {type_}; it must be {expected.type}")
    claimed = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    if claimed != ref.uncompressed_bytes:
        raise _damaged(ref, f"its footer says {claimed:,} uncompressed bytes, the record {ref.uncompressed_bytes:,}")


def _damaged(ref: ManifestRef, message: str, kind: ErrorKind = ErrorKind.DAMAGED_MANIFEST) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"manifest {ref.path} is damaged: {message}{REPAIR_ADVICE}", kind=kind, path=ref.path)


# ---- outline -------------------------------------------------------------------------------------
#
# The columns of a manifest that a plan needs, read in less time and memory than all of it.
#
# Each row group is decoded and checked by itself, in two threads, and what a plan does not need is
# freed. So a million handles are never in memory whole. Faults are only detected here;
# ``codec.decode_manifest`` then reports them.


_COLUMNS: Final = (
    *("operator", "state", "subtask", "layer", "path", "row_start", "rows", "segment_rows", "size_bytes"),
    *("first_group", "last_group", "rows_per_group"),
)
_THREADS: Final = 2


def decode_outline(data: pa.Buffer, ref: ManifestRef) -> pa.Table:
    """Return the part of the manifest of a record that ``redistribution`` needs, verified.

    The rows are those of ``Manifest.handles``. Operators and states are dictionaries; paths are
    null except for in-flight records, whose order depends on them. Raises as ``decode_manifest``.
    """
    from concurrent.futures import ThreadPoolExecutor  # Needed only to plan, not to inspect.

    verify_manifest(data, ref)
    try:
        with open_manifest(data) as file:
            check_file(file, ref)
            metadata = file.metadata
        groups = range(metadata.num_row_groups)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="stateformat-outline") as pool:
            parts = list(pool.map(lambda number: _part(data, metadata, number), groups))
    except PARQUET_ERRORS:
        parts = []
    sound = [part for part in parts if part is not None]
    if not sound or len(sound) < len(parts) or _falls(sound):
        return decode_manifest(data, ref).handles
    return pa.concat_tables(sound)


def _part(data: pa.Buffer, metadata: Any, number: int) -> pa.Table | None:
    """Return the columns of a row group; None if something is wrong with it."""
    with open_file(data, read_dictionary=[*REPEATED_TEXTS], metadata=metadata) as file:
        read = file.read_row_group(number, columns=list(PLANNING_COLUMNS), use_threads=False)
    columns = {}
    for item in PLANNING_SCHEMA:
        columns[item.name] = column = read[item.name]
        if item.name in REPEATED_TEXTS:
            check_codes(column)
        else:
            columns[item.name] = typed(column, item.type)
    handles = pa.table(columns)
    if handles.num_rows != metadata.row_group(number).num_rows or not len(handles) or broken_rules(handles):
        return None
    moved = as_numpy(pc.equal(handles["mode"], Mode.IN_FLIGHT.value))
    columns["path"] = handles["path"].take(pa.array(np.arange(len(moved)), mask=~moved))
    kept = pa.table({name: columns[name] for name in _COLUMNS})
    del read, columns, handles
    # Otherwise Arrow keeps what this thread has freed.
    pa.default_memory_pool().release_unused()
    return kept


def _falls(parts: list[pa.Table]) -> bool:
    """Return whether some part begins with a handle that belongs before the end of the last one."""
    seams = (pa.concat_tables([one.slice(len(one) - 1), other.slice(0, 1)]) for one, other in pairwise(parts))
    return any(first_unsorted(seam) is not None for seam in seams)
