"""Parquet files of an export, written one after the other, none larger than readers like."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from stateformat.tables import rebatch, release_memory_after

from .place import Place

FILE_BYTES: Final = 128 << 20
"""A file ends with the row group that reaches this size."""
GROUP_ROWS: Final = 1 << 19
GROUP_BYTES: Final = 16 << 20
"""The most that a row group takes in memory."""


@dataclass(frozen=True)
class DataFile:
    """A file that was written."""

    path: str
    """Relative to the folder."""
    rows: int
    size_bytes: int
    metadata: Any
    """Parquet's, with the statistics of each row group."""


def row_groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Join small batches, so that row groups are worth the cost of their headers."""
    return rebatch((pa.Table.from_batches([batch]) for batch in batches), schema, GROUP_ROWS, GROUP_BYTES)


def write_file(place: Place, path: str, schema: pa.Schema, groups: Iterator[pa.RecordBatch]) -> DataFile | None:
    """Write one file of the next row groups; it becomes visible when it is complete.

    It ends at ``FILE_BYTES`` or with the rows. Returns None, and writes no file, if there are no
    rows.
    """
    from pyarrow import parquet as pq

    first = next(groups, None)
    if first is None:
        return None
    rows = 0
    with place.new_file(path, replace=True) as counted:
        with pq.ParquetWriter(counted, schema, compression="zstd", store_decimal_as_integer=True) as writer:
            batch: pa.RecordBatch | None = first
            while batch is not None:
                # The writer would split at its own number of rows.
                writer.write_batch(batch, row_group_size=GROUP_ROWS)
                rows += batch.num_rows
                release_memory_after(batch.nbytes)
                batch = next(groups, None) if counted.size_bytes < FILE_BYTES else None
        metadata = writer.writer.metadata
    return DataFile(path, rows, counted.size_bytes, metadata)


def write_files(place: Place, folder: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> list[DataFile]:
    """Write all rows as files of a table, under names that were never used before.

    If that fails, the files written so far are deleted.
    """
    written: list[DataFile] = []
    run = secrets.token_hex(16)
    groups = row_groups(batches, schema)
    try:
        while True:
            path = f"{folder}part-{len(written):05d}-{run}.zstd.parquet"
            file = write_file(place, path, schema, groups)
            if file is None:
                return written
            written.append(file)
    except BaseException:
        place.remove([file.path for file in written])
        raise
