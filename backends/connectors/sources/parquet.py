"""A source over Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stateformat.states import Columns

from ...dataflow.api import Split
from ...dataflow.operators.row_steps import empty_batch
from .enumerators import check_at_least, check_position
from .files import FileSource, Paths
from .memory import BATCH_ROWS

SPLIT_BYTES = 256 * 1024 * 1024


class ParquetSource(FileSource):
    """Reads Parquet files, one after another.

    Example::

        flights = flow.source(ParquetSource("flights/"), uid="flights", event_time="departed_at")
        planes = flow.source(ParquetSource("planes-*.parquet", columns=["tailnum"]), uid="planes")

    ``paths``: a file, a directory, a pattern, or a list of these. Files of a directory (only
    ``*.parquet``) or a pattern are sorted; names that begin with "." or "_" are skipped.
    ``columns``: those to read, in this order; all by default. Types are those of ``schema``, or of
    the first file, made *plain*: without dictionaries, views and large offsets, times in µs, and
    columns of nulls alone as text. All columns are nullable. Other types of a file are cast if that
    changes no value: nulls to anything, narrower numbers to wider ones, an instant to another zone,
    ns to µs. Anything else is refused with file, column and types when its turn comes, in the first
    file now. Times finer than µs need a ``schema`` with ``timestamp[ns]``, which no key, state or
    event time can hold. A split is a file, or some row groups of one larger than ``split_bytes``; a
    position counts rows.

    ``grows``: ``paths`` is a directory to which files are added while the job runs, each written
    under a hidden name and renamed. ``until``: once a file with this name exists, no more come.

    Files must not change. A file whose size or modification time is not as it was found is refused
    when it is read, and in a directory that grows also when it was read before.

    Raises ``InvalidInput`` for no files, and for columns that they do not have.
    """

    kind = "Parquet"
    suffix = ".parquet"

    def __init__(
        self,
        paths: Paths,
        *,
        columns: Sequence[str] | None = None,
        schema: Columns | None = None,
        batch_rows: int = BATCH_ROWS,
        split_bytes: int = SPLIT_BYTES,
        grows: bool = False,
        until: str | None = None,
    ) -> None:
        super().__init__(paths, batch_rows=batch_rows, grows=grows, until=until)
        check_at_least("split_bytes", split_bytes, 1)
        self._split_bytes = split_bytes
        self._schema = pa.schema([pa.field(field.name, field.type) for field in self._fields(schema, columns)])
        self._check_first()

    def _schema_of(self, path: str) -> pa.Schema:
        with self._opened(path) as file:
            return file.schema_arrow

    def _check_file(self, path: str) -> None:
        self._cast(empty_batch(self._schema_of(path)), path)

    def _cut(self, path: str, size_bytes: int) -> Iterator[dict[str, int]]:
        if size_bytes <= self._split_bytes:
            yield {}
            return
        with self._opened(path) as file:
            metadata = file.metadata
            first, gathered = 0, 0
            for group in range(metadata.num_row_groups):
                row_group = metadata.row_group(group)
                gathered += sum(row_group.column(c).total_compressed_size for c in range(row_group.num_columns))
                if gathered >= self._split_bytes or group == metadata.num_row_groups - 1:
                    yield {"first_row_group": first, "end_row_group": group + 1}
                    first, gathered = group + 1, 0

    def _batches(self, split: Split, payload: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        path = payload["path"]
        with self._opened(path) as file:
            metadata = file.metadata
            # Refuses a file with other columns even if it has no rows.
            self._cast(empty_batch(file.schema_arrow), path)
            groups = range(payload.get("first_row_group", 0), payload.get("end_row_group", metadata.num_row_groups))
            rows = [metadata.row_group(group).num_rows for group in groups]
            check_position(path, split, sum(rows))
            # Whole row groups are skipped unread.
            skip, at = split.position, 0
            while at < len(rows) and skip >= rows[at]:
                skip, at = skip - rows[at], at + 1
            if at == len(rows):
                return
            names = self._schema.names
            for batch in file.iter_batches(self._batch_rows, row_groups=list(groups[at:]), columns=names):
                if skip < batch.num_rows:
                    yield self._cast(batch.slice(skip), path)
                skip = max(0, skip - batch.num_rows)

    def _opened(self, path: str) -> pq.ParquetFile:
        with self._reported(path):
            # Spark writes INT96 by default, which in nanoseconds would hold 1677 to 2262 alone.
            return pq.ParquetFile(path, coerce_int96_timestamp_unit="us")
