"""A source over Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.states import Columns, as_schema

from ...dataflow.api import Split
from ...dataflow.operators import empty_batch
from .enumerators import check_at_least, check_position
from .files import FileSource, Paths, plain_type
from .memory import BATCH_ROWS

SPLIT_BYTES = 256 * 1024 * 1024


class ParquetSource(FileSource):
    """The rows of Parquet files, file after file.

    Example::

        flights = flow.source(ParquetSource("flights/"), uid="flights", event_time="departed_at")
        planes = flow.source(ParquetSource("planes-*.parquet", columns=["tailnum", "seats"]), uid="planes")

    ``paths``: a file, a directory, a pattern, or a list of these; see ``files.find_files`` for order and hidden names.
    ``columns``: those to read, in this order; all, unless given. Types are those of the first file, with dictionaries and
    large strings made plain; ``schema`` says them where there is no file yet. A file that differs is refused when its turn
    comes. A split is a file, or of one larger than ``split_bytes`` some of its row groups; a position counts rows.

    ``grows``: ``paths`` is one directory, to which files are added while the job runs, each whole at once (written under a
    hidden name and renamed); ``until``: the name of a file in it after which no more come.

    Raises ``InvalidInput`` for no files and columns that are not there.
    """

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
        if schema is not None:
            found = as_schema(schema)
        elif self._files:
            with _opened(self._files[0]) as file:
                found = file.schema_arrow
        else:
            raise InvalidInput(f"{paths} has no files yet, so nobody knows the columns; give the schema")
        missing = [name for name in columns or () if name not in found.names]
        if missing:
            raise InvalidInput(
                f"{self._files[0] if self._files else paths} has no columns {missing}; it has {', '.join(found.names)}",
                kind=ErrorKind.SCHEMA_MISMATCH,
            )
        fields = [found.field(name) for name in (found.names if columns is None else columns)]
        self._schema = pa.schema([pa.field(field.name, plain_type(field.type)) for field in fields])

    @property
    def schema(self) -> pa.Schema:
        """The columns that are read, all nullable."""
        return self._schema

    def _cut(self, path: str, size_bytes: int) -> Iterator[dict[str, int]]:
        if size_bytes <= self._split_bytes:
            yield {}
            return
        with _opened(path) as file:
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
        with _opened(path) as file:
            metadata = file.metadata
            # A file that differs is told of whether it has rows or not.
            self._conformed(empty_batch(file.schema_arrow), path)
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
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                conformed = self._conformed(batch, path)
                yield conformed.slice(skip) if skip else conformed
                skip = 0


def _opened(path: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise InvalidInput(f"{path} is no Parquet file: {error}", path=path) from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}", path=path) from error


__all__ = ["ParquetSource"]
