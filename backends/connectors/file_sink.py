"""A two-phase-commit sink that writes Parquet files into a directory, of which a reader sees only what is committed.

Theory of operation. A file lives through three names, all on one file system::

    <directory>/.pending/<uid>/<write id>.open                                       being written, or forgotten by a crash
    <directory>/.pending/<uid>/<id>-<attempt>-<subtask>-<number>-<write id>.prepared whole, synced, named by a checkpoint
    <directory>/part-<id>-<attempt>-<uid>-<subtask>-<number>-<write id>.parquet      committed: seen by any reader

1. *Write.* Rows go to an open file. One that has ``rows_per_file`` rows is closed and the next begun. Its name says nothing of
   checkpoints, for nobody knows yet in which it will lie.
2. *Prepare*, in a snapshot: close, sync the bytes, rename to the prepared name, sync the directory. From here on nothing but the
   disk can fail. The committable names both names and the size. A name that is gone (see 4) fails the snapshot, so
   nothing is ever named that is not there.
3. *Commit*, once the checkpoint is published: link the final name, sync the directory, unlink the prepared one. A file whose
   final name is there has been committed; where neither is, something is lost and that is said. A crash between any two of
   these is mended by committing again, and committing twice is committing once: the names hold the checkpoint and attempt
   under which a file was prepared, and a write id that no other file has, so no name ever means two contents, whoever
   runs a task twice.
4. *Clean*, when a run begins and has committed: remove open files, and prepared ones under ids up to the newest checkpoint's
   that it does not carry. Those under greater ids may belong to a run that is about to publish them. An open file
   of a run that still lives goes too; that run then fails at its next snapshot, before it has promised anything.

Hidden names (``.pending``), and not ending in ``.parquet``, are passed over by Parquet readers, by Spark, and by globs.
"""

from __future__ import annotations

import contextlib
import logging
import re
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import PurePosixPath
from secrets import token_hex
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from backends.connectors.directories import Directory
from backends.connectors.enumerators import check_at_least
from backends.dataflow.api import OperatorContext, Prepared, TwoPhaseCommitSink
from stateformat.errors import ErrorKind, StorageError
from stateformat.publication import CommitPermit

logger = logging.getLogger(__name__)

ROWS_PER_FILE: Final = 5_000_000
ROW_GROUP_ROWS: Final = 131_072
_PENDING: Final = ".pending"
_PREPARED: Final = re.compile(r"(?P<id>\d{20})-[^/]*\.prepared")


class FileSink(TwoPhaseCommitSink):
    """Writes Parquet files that appear in a directory when their checkpoint is committed, each row exactly once.

    Example::

        delays.apply(FileSink("out/"), uid="out")

    A directory belongs to the sinks of one job; several of them, of different uids, may share it. It is made where it is not
    there. Readers: ``pyarrow.parquet.read_table("out/")``, ``spark.read.parquet("out/")``, ``'out/*.parquet'`` in DuckDB.
    Each subtask writes a file per checkpoint in which it had rows, or several where it had more than ``rows_per_file``, in row
    groups of at most ``row_group_rows``. ``compression`` as pyarrow knows it. ``durable=False`` syncs nothing: for tests
    and benchmarks. Call :meth:`clean` when a run begins.

    Committables: ``pending``, ``path`` (utf8, relative to the directory), ``rows`` and ``size_bytes`` (int64). Raises
    ``StorageError`` where the file system fails, or has lost what was prepared.
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
        directory: Any,
        *,
        rows_per_file: int = ROWS_PER_FILE,
        row_group_rows: int = ROW_GROUP_ROWS,
        compression: str = "zstd",
        durable: bool = True,
    ) -> None:
        check_at_least("rows_per_file", rows_per_file, 1)
        check_at_least("row_group_rows", row_group_rows, 1)
        self._directory = Directory(directory, durable=durable)
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
        folder = pending_folder(self.context.uid)
        self._directory.make(folder)
        name = f"{folder}/{token_hex(8)}.open"
        return _OpenFile(self._directory, name, schema, self._row_group_rows, self._compression)

    def _end(self) -> None:
        if self._writing is not None:
            self._closed.append(self._writing.close())
            self._writing = None

    def prepare_commit(self, prepared: Prepared) -> pa.Table | None:
        """Make what was written durable under names of this attempt. ``StorageError`` where a file is gone."""
        self._end()
        if not self._closed:
            return None
        folder, uid = pending_folder(self.context.uid), file_name_of(self.context.uid)
        rows = []
        for number, file in enumerate(self._closed):
            stem = f"{prepared.checkpoint_id:020d}-{prepared.attempt_id}"
            place = f"{self.context.subtask:05d}-{number:05d}-{PurePosixPath(file.name).stem}"
            pending, final = f"{folder}/{stem}-{place}.prepared", f"part-{stem}-{uid}-{place}.parquet"
            self._directory.rename(file.name, pending)
            rows.append((pending, final, file.rows, file.size_bytes))
        self._directory.sync(folder)
        self._closed = []
        columns = zip(*rows, strict=True)
        return pa.table(
            [pa.array(values, field.type) for values, field in zip(columns, self.committable_columns, strict=True)],
            schema=self.committable_columns,
        )

    def commit(self, permit: CommitPermit, committables: pa.Table) -> None:  # noqa: ARG002 - holding it is the right
        """Make files visible that are not yet. ``StorageError`` where one is neither prepared nor committed."""
        rows = committables.select(self.committable_columns.names).to_pylist()
        for row in rows:
            self._link(row)
        if rows:
            # Only what is durable under its final name may lose the other one.
            self._directory.sync("")
        self._directory.remove(row["pending"] for row in rows)

    def _link(self, row: dict[str, Any]) -> None:
        pending, path, size_bytes = row["pending"], row["path"], row["size_bytes"]
        self._directory.link(pending, path)
        found = self._directory.size(path)
        if found is None:
            raise StorageError(
                f"{path} was prepared in {self._directory} and is there neither under that name nor as {pending}; its "
                f"{row['rows']} rows are lost. Put the file back, from a backup, or go on from a checkpoint that does not "
                "hold it",
                kind=ErrorKind.OBJECT_MISSING,
                path=path,
            )
        if found != size_bytes:
            raise StorageError(
                f"{path} in {self._directory} has {found} bytes and was prepared with {size_bytes}; something else has "
                "written it. Remove it if it is not wanted",
                kind=ErrorKind.OBJECT_SIZE_DIFFERS,
                path=path,
            )

    def clean(self, uid: str, newest_id: int, carried: pa.Table | None = None) -> list[str]:
        """Remove what crashed runs of the sink ``uid`` left; the names of what was removed, relative to the directory.

        Call it when a run begins: after the committables of the newest checkpoint, ``newest_id`` (0: there is none), were
        committed and before any subtask opens. ``carried``: those committables which that checkpoint, or the run, will
        commit again. Never touches a prepared file under a greater id, nor one that is carried.
        """
        folder = pending_folder(uid)
        kept = set() if carried is None else set(carried["pending"].to_pylist())
        found = [f"{folder}/{name}" for name in self._directory.names(folder)]
        forgotten = [name for name in found if name not in kept and _is_forgotten(PurePosixPath(name).name, newest_id)]
        self._directory.remove(forgotten)
        if forgotten:
            logger.info("removed %d files of %s that no checkpoint holds", len(forgotten), self._directory)
        return forgotten

    def close(self) -> None:
        """Throw away what no checkpoint holds: its rows come again."""
        names = [file.name for file in self._closed]
        if self._writing is not None:
            names.append(self._writing.give_up())
        self._writing, self._closed = None, []
        self._directory.remove(names)


def _is_forgotten(name: str, newest_id: int) -> bool:
    if name.endswith(".open"):
        return True
    prepared = _PREPARED.fullmatch(name)
    return prepared is not None and int(prepared["id"]) <= newest_id


@dataclass(frozen=True)
class _Closed:
    name: str
    rows: int
    size_bytes: int


class _OpenFile:
    """A Parquet file that is being written. Small batches are gathered, so that row groups are not small."""

    def __init__(
        self, directory: Directory, name: str, schema: pa.Schema, row_group_rows: int, compression: str
    ) -> None:
        self._directory = directory
        self.name = name
        self.rows = 0
        self._row_group_rows = row_group_rows
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = 0
        self._file = directory.create(name)
        self._writer = pq.ParquetWriter(self._file, schema.remove_metadata(), compression=compression)

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows, sooner or later."""
        self._gathered.append(batch.replace_schema_metadata(None))
        self._gathered_rows += batch.num_rows
        self.rows += batch.num_rows
        if self._gathered_rows >= self._row_group_rows:
            self._flush()

    def _flush(self) -> None:
        if self._gathered:
            with self._directory.translated("write", self.name):
                self._writer.write_table(pa.Table.from_batches(self._gathered), row_group_size=self._row_group_rows)
            self._gathered, self._gathered_rows = [], 0

    def close(self) -> _Closed:
        """End the file, and make its bytes durable."""
        self._flush()
        with self._directory.translated("write", self.name):
            self._writer.close()
            self._file.close()
        return _Closed(self.name, self.rows, self._directory.sync_file(self.name))

    def give_up(self) -> str:
        """Stop writing; the name of what is to be removed."""
        self._gathered = []
        # Nobody misses the end of a file that goes away, even on a full disk.
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()
        with contextlib.suppress(OSError, pa.ArrowException):
            self._file.close()
        return self.name


def pending_folder(uid: str) -> str:
    """Where the files of a sink are until they are committed, relative to its directory."""
    return f"{_PENDING}/{file_name_of(uid)}"


def file_name_of(uid: str) -> str:
    """A uid as part of a file name: what is not a letter, digit, dot or hyphen is replaced, and a digest tells such apart."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", uid)[:60]
    if name == uid and name.strip("."):
        return name
    return f"{name}-{blake2s(uid.encode(errors='surrogatepass'), digest_size=4).hexdigest()}"


__all__ = ["FileSink", "file_name_of", "pending_folder"]
