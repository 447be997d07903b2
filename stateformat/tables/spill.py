"""Rows set aside in an unnamed temporary file in ``TMPDIR``, because they may not fit in memory."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from threading import Lock
from typing import Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import StorageError
from ..keys import hash_keys, mixed_hashes
from .pieces import copy_rows, cut, release_memory_after, take_rows

HELD_BYTES: Final = 32 << 20
"""What an operation holds in memory before it sets rows aside."""
_BUFFERED_BYTES: Final = 8 << 20
_PIECE_BYTES: Final = 4 << 20
_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_ROWS_MAX: Final = 1 << 18

H = TypeVar("H", bound=Hashable)


class Spill(Generic[H]):
    """Buckets of rows in one temporary file. Any thread may add, and read once all are added."""

    def __init__(self, piece_bytes: int = _PIECE_BYTES) -> None:
        self._piece_bytes = piece_bytes
        self._file: Any = None
        self._end = 0
        self._pieces: dict[H, list[tuple[int, int]]] = defaultdict(list)
        self._waiting: dict[H, list[pa.Table]] = defaultdict(list)
        self._waiting_bytes = 0
        self._lock = Lock()
        self.sizes: dict[H, int] = defaultdict(int)
        """Bytes in memory of each bucket that has rows."""

    def __enter__(self) -> Spill[H]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def add(self, bucket: H, rows: pa.Table) -> None:
        """Append rows to a bucket; all rows of one bucket have one schema."""
        if not len(rows):
            return
        size_bytes = rows.nbytes
        # A small slice of a large table would keep all of it in memory.
        mine = copy_rows(rows) if size_bytes < _BUFFERED_BYTES else rows
        with self._lock:
            self.sizes[bucket] += size_bytes
            self._waiting[bucket].append(mine)
            self._waiting_bytes += size_bytes
            if self._waiting_bytes >= _BUFFERED_BYTES:
                self._flush()

    def read(self, bucket: H) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a bucket in the order of :meth:`add`, in batches of some megabytes."""
        for start, length in self._pieces.get(bucket, ()):
            with pa.ipc.open_stream(os.pread(self._file.fileno(), length, start)) as stream:
                yield from stream
        for table in self._waiting.get(bucket, ()):
            for piece in cut(table, _ROWS_MAX, self._piece_bytes):
                yield from piece.to_batches()

    def close(self) -> None:
        self._waiting.clear()
        if self._file is not None:
            self._file.close()

    def _flush(self) -> None:
        try:
            for bucket, tables in self._waiting.items():
                table = pa.concat_tables(tables)
                for piece in cut(table, _ROWS_MAX, self._piece_bytes):
                    self._write(bucket, piece.combine_chunks())
        except OSError as error:
            raise StorageError(
                f"rows that do not fit in memory could not be spilled to disk in {tempfile.gettempdir()}: "
                f"{error.strerror}; let TMPDIR name a directory with more room"
            ) from error
        self._waiting.clear()
        release_memory_after(self._waiting_bytes)
        self._waiting_bytes = 0

    def _write(self, bucket: H, rows: pa.Table) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="stateformat-")  # noqa: SIM115
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema, options=_COMPRESSED) as stream:
            stream.write_table(rows)
        data = sink.getvalue()
        self._file.write(data)
        self._file.flush()
        self._pieces[bucket].append((self._end, data.size))
        self._end += data.size


def buckets_of(columns: Sequence[pa.ChunkedArray], count: int, level: int) -> npt.NDArray[np.int64]:
    """Return one of ``count`` buckets per row, by the hash of the columns and the ``level``."""
    return (mixed_hashes(hash_keys(columns), level).astype(np.int64) * count) >> 32


def split_by_bucket(rows: pa.Table, buckets: npt.NDArray[np.int64]) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of each bucket that has any, ascending; rows keep their order."""
    if not len(rows):
        return
    order = np.argsort(buckets, kind="stable")
    present, starts = np.unique(buckets[order], return_index=True)
    stops = [*starts[1:].tolist(), len(order)]
    for bucket, start, stop in zip(present.tolist(), starts.tolist(), stops, strict=True):
        columns = [take_rows(column, order[start:stop]) for column in rows.columns]
        yield bucket, pa.Table.from_arrays(columns, schema=rows.schema)
