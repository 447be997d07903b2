"""Write one Parquet file of state into a storage (SPEC.md sections 5.5 and 5.6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from .. import parquet, paths
from ..errors import ErrorKind, InvalidInput, InvalidState
from ..graph import Operator
from ..model import AttemptId, CheckpointId, Handle, JobId, State, new_write_id
from ..schema import KEY_GROUP, segment_schema
from ..storage import Storage
from ..tables import release_memory_after
from . import dictionaries, row_groups
from .digests import SegmentSink
from .sort import group_counts

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
            self._dictionaries = dictionaries.paths_that_pay(rows)
        if self._dictionaries and not dictionaries.are_readable(rows, self._dictionaries, taken):
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
