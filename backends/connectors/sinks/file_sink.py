"""A two-phase-commit sink that writes Parquet files into a directory or a bucket, of which a reader sees only what is committed.

Theory of operation. What the sink does is the same everywhere; how a file gets from one step to the next is the place's
(``directories`` for a local file system, ``s3_directory`` for S3).

1. *Write.* Rows go to an open file. One that has ``rows_per_file`` rows is closed and the next begun. Its name says nothing of
   checkpoints, for nobody knows yet in which it will lie.
2. *Prepare*, in a snapshot: files become durable under names of the checkpoint and attempt. From here on nothing but the
   place can fail. The committable says where the file is, what its name will be, and its size.
3. *Commit*, once the checkpoint is published: files are seen. Committing twice is committing once, by one driver or two, now
   or late: the names hold the checkpoint and attempt under which a file was prepared, and a write id that no other file
   has, so no name ever means two contents, whoever runs a task twice.
4. *Clean*, when a run begins and has committed: remove what was prepared under ids up to the newest checkpoint's that no
   checkpoint of the store carries. What is under greater ids may belong to a run that is about to publish it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from stateformat.errors import InvalidInput
from stateformat.publication import CommitPermit

from ...dataflow.api import OperatorContext, Prepared, TwoPhaseCommitSink
from ..sources import check_at_least
from .directories import NewFile, Ready, open_directory
from .foreign_names import foreign_name
from .part_names import PartName, file_name_of, pending_folder

logger = logging.getLogger(__name__)

ROWS_PER_FILE: Final = 5_000_000
ROW_GROUP_ROWS: Final = 131_072
COMPRESSIONS: Final = ("brotli", "gzip", "lz4", "none", "snappy", "zstd")
"""What Parquet files may be compressed with."""


class FileSink(TwoPhaseCommitSink):
    """Writes Parquet files that appear in a directory when their checkpoint is committed, each row exactly once.

    Example::

        delays.apply(FileSink("out/"), uid="out")
        delays.apply(FileSink("s3://bucket/delays", endpoint_url="https://…"), uid="out")

    A directory belongs to the sinks of one job; several of them, of different uids, may share it. It is made where it is not
    there, a bucket is not. Readers: ``pyarrow.parquet.read_table("out/")``, ``spark.read.parquet("out/")``,
    ``'out/*.parquet'`` in DuckDB. Each subtask writes a file per checkpoint in which it had rows, or several where it had more
    than ``rows_per_file``, in row groups of at most ``row_group_rows``. ``compression``: one of :data:`COMPRESSIONS`.
    ``durable=False`` syncs nothing in a local directory: for tests and benchmarks. ``options``: those of an ``s3://`` store,
    as ``stateformat.open`` takes them; they travel in pickles and stand in no message. Call :meth:`clean` when a run begins.

    Committables: ``pending`` (utf8: the prepared name relative to the directory; in S3, JSON with ``upload_id``, ``digest``
    and ``tags``), ``path`` (utf8, relative to the directory), ``rows`` and ``size_bytes`` (int64). Raises ``InvalidInput``
    for an address, an option or a compression that is none, and ``StorageError`` where the place fails, or has lost what was
    prepared.
    """

    committable_columns = pa.schema(
        [
            pa.field("pending", pa.string(), nullable=False),
            pa.field("path", pa.string(), nullable=False),
            pa.field("rows", pa.int64(), nullable=False),
            pa.field("size_bytes", pa.int64(), nullable=False),
        ]
    )

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        rows_per_file: int = ROWS_PER_FILE,
        row_group_rows: int = ROW_GROUP_ROWS,
        compression: str = "zstd",
        durable: bool = True,
        **options: Any,
    ) -> None:
        check_at_least("rows_per_file", rows_per_file, 1)
        check_at_least("row_group_rows", row_group_rows, 1)
        check_compression(compression)
        self._directory = open_directory(directory, durable, options)
        self._rows_per_file = rows_per_file
        self._row_group_rows = row_group_rows
        self._compression = compression
        self._writing: _OpenFile | None = None
        self._closed: list[_Closed] = []

    def open(self, context: OperatorContext) -> None:
        """Begin with nothing: files that were prepared are the checkpoint's, rows after them come again."""
        super().open(context)
        self._writing = None
        self._closed = []

    def process(self, batch: pa.RecordBatch, input: int) -> None:  # noqa: ARG002 - there is one
        """Write a batch."""
        while batch.num_rows:
            if self._writing is None:
                self._writing = self._begin(batch.schema)
            room = self._rows_per_file - self._writing.rows
            self._writing.write(batch.slice(0, room))
            batch = batch.slice(min(room, batch.num_rows))
            if self._writing.rows == self._rows_per_file:
                self._end()

    def _begin(self, schema: pa.Schema) -> _OpenFile:
        return _OpenFile(self._directory.begin(self.context.uid), schema, self._row_group_rows, self._compression)

    def _end(self) -> None:
        if self._writing is not None:
            self._closed.append(self._writing.close())
            self._writing = None

    def prepare_commit(self, prepared: Prepared) -> pa.Table | None:
        """Make what was written durable under names of this attempt. ``StorageError`` where a file is gone."""
        self._end()
        if not self._closed:
            return None
        owner, subtask = file_name_of(self.context.uid), self.context.subtask
        names = [
            PartName(prepared.checkpoint_id, prepared.attempt_id, owner, subtask, number, closed.file.write_id)
            for number, closed in enumerate(self._closed)
        ]
        files = [closed.file for closed in self._closed]
        pending = self._directory.prepare(list(zip(files, names, strict=True)))
        rows = [
            Ready(place, name.path, closed.rows, closed.size_bytes)
            for place, name, closed in zip(pending, names, self._closed, strict=True)
        ]
        self._closed = []
        columns = zip(*rows, strict=True)
        return pa.table(
            [pa.array(values, field.type) for values, field in zip(columns, self.committable_columns, strict=True)],
            schema=self.committable_columns,
        )

    def check_committables(self, uid: str, committables: pa.Table, *, renamed: bool = False) -> None:
        """Raise ``DamagedCheckpoint`` for names that this sink cannot have written for the attempt in the row."""
        _ready(committables, None if renamed else uid)

    def commit(self, permit: CommitPermit, committables: pa.Table) -> None:  # noqa: ARG002 - holding it is the right
        """Make files visible that are not yet.

        Raises ``StorageError`` where one is neither prepared nor committed, and ``DamagedCheckpoint`` where a name is not
        one that a file sink writes; then nothing is done.
        """
        self._directory.commit(_ready(committables))

    def prepared_attempts(self, uid: str) -> set[Prepared]:
        """Under which ids files lie prepared and not committed."""
        return {Prepared(name.checkpoint_id, name.attempt_id) for name in self._directory.prepared(uid)}

    def clean(self, uid: str, newest_id: int, carried: pa.Table | None = None) -> list[str]:
        """Remove what crashed runs of the sink ``uid`` left; the names of what was removed, relative to the directory.

        Call it when a run begins: after the committables of the newest checkpoint, ``newest_id`` (0: there is none), were
        committed and before any subtask opens. ``carried``: the committables of every checkpoint that may be started from.
        Never touches a prepared file under a greater id, nor one that is carried.
        """
        forgotten = self._directory.clean(uid, newest_id, [] if carried is None else _ready(carried))
        if forgotten:
            logger.info("removed %d files of %s that no checkpoint holds", len(forgotten), self._directory)
        return forgotten

    def close(self) -> None:
        """Throw away what no checkpoint holds: its rows come again."""
        files = [closed.file for closed in self._closed]
        if self._writing is not None:
            files.append(self._writing.give_up())
        self._writing, self._closed = None, []
        for file in files:
            file.discard()


def check_compression(name: str) -> None:
    """Refuse a compression that Parquet, or this pyarrow, does not know. Raises ``InvalidInput``."""
    known = [each for each in COMPRESSIONS if each == "none" or pa.Codec.is_available(each)]
    if not isinstance(name, str) or name.lower() not in known:
        raise InvalidInput(f"compression is {name!r}; known are {', '.join(known)}")


def _ready(committables: pa.Table, uid: str | None = None) -> Sequence[Ready]:
    """The files that rows name. ``DamagedCheckpoint`` where no file sink, or not that of ``uid``, has made one of them."""
    if not committables.num_rows:
        return []
    files = []
    for row in committables.select([*Ready._fields, "_checkpoint_id", "_attempt_id"]).to_pylist():
        prepared = row.pop("_checkpoint_id"), row.pop("_attempt_id")
        file = Ready(**row)
        name = PartName.of_path(file.path)
        if name is None or name[:2] != prepared or (uid is not None and name.owner != file_name_of(uid)):
            raise foreign_name(f"sink {uid!r}" if uid else "a file sink", prepared, "path", file.path)
        if not file.is_prepared_as(name):
            raise foreign_name(f"sink {uid!r}" if uid else "a file sink", prepared, "pending", file.pending)
        files.append(file)
    return files


@dataclass(frozen=True)
class _Closed:
    file: NewFile
    rows: int
    size_bytes: int


class _OpenFile:
    """A Parquet file that is being written. Small batches are gathered, so that row groups are not small."""

    def __init__(self, file: NewFile, schema: pa.Schema, row_group_rows: int, compression: str) -> None:
        self._file = file
        self.rows = 0
        self._row_group_rows = row_group_rows
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = 0
        try:
            with file.translated():
                self._writer = pq.ParquetWriter(file.stream, schema.remove_metadata(), compression=compression)
        except BaseException:
            file.discard()
            raise

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows, sooner or later."""
        self._gathered.append(batch.replace_schema_metadata(None))
        self._gathered_rows += batch.num_rows
        self.rows += batch.num_rows
        if self._gathered_rows >= self._row_group_rows:
            self._flush()

    def _flush(self) -> None:
        if self._gathered:
            with self._file.translated():
                self._writer.write_table(pa.Table.from_batches(self._gathered), row_group_size=self._row_group_rows)
            self._gathered, self._gathered_rows = [], 0

    def close(self) -> _Closed:
        """End the file."""
        self._flush()
        with self._file.translated():
            self._writer.close()
        return _Closed(self._file, self.rows, self._file.close())

    def give_up(self) -> NewFile:
        """Stop writing; the file, which is to be discarded."""
        self._gathered = []
        # Nobody misses the end of a file that goes away, even on a full disk.
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()
        return self._file


__all__ = ["COMPRESSIONS", "FileSink", "file_name_of", "pending_folder"]
