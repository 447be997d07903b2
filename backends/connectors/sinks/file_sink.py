"""A two-phase-commit sink of Parquet files in a directory or a bucket.

``local_directory`` and ``s3_directory`` take a file from one step to the next; docs/sinks.md
shows the steps. The name of a file holds checkpoint, attempt and a random write id, so no name ever
means two contents, and a commit may be repeated, late or by two drivers at once. A file's name is
known only in the snapshot: until then its checkpoint is not.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import brief
from stateformat.publication import CommitPermit
from stateformat.storage import local_path, resolved, without_secrets
from stateformat.tables import table_from_python

from ...dataflow.api import OperatorContext, Prepared, TwoPhaseCommitSink
from ...storage import check_options
from ...storage.object_clients import S3, service_of
from ..sources.basic import check_at_least, not_null
from .directory import NewFile, OutputDirectory, PreparedFile
from .local_directory import LocalDirectory
from .part_names import PartName, file_name_of, foreign_name
from .uploads import Upload

logger = logging.getLogger(__name__)

ROWS_PER_FILE: Final = 5_000_000
ROW_GROUP_ROWS: Final = 131_072
COMPRESSIONS: Final = ("brotli", "gzip", "lz4", "none", "snappy", "zstd")


class FileSink(TwoPhaseCommitSink):
    """Writes Parquet files that appear when their checkpoint is committed, each row exactly once.

    Example::

        delays.apply(FileSink("out/"), uid="out")
        delays.apply(FileSink("s3://bucket/delays", endpoint_url="https://…"), uid="out")

    A directory belongs to the sinks of one job; several with different uids may share it. The sink
    creates a missing directory, but not a bucket. Each subtask writes one file per checkpoint in
    which it had rows, or several of ``rows_per_file`` rows, in row groups of at most
    ``row_group_rows``. ``compression``: brotli, gzip, lz4, none, snappy or zstd. ``durable=False``
    syncs nothing in a local directory: for tests and benchmarks. ``options``: those of an ``s3://``
    store; they are pickled, and never shown in messages. Call :meth:`clean` when a run begins.

    Committables (not nullable): ``pending`` (utf8: the prepared name relative to the directory; in
    S3, JSON with ``upload_id``, ``digest`` and ``tags``), ``path`` (utf8, relative to the
    directory), ``rows`` and ``size_bytes`` (int64). Raises ``InvalidInput`` for an illegal address
    or option, and ``StorageError`` if the destination fails or has lost what was prepared.
    """

    committable_columns = not_null(pending=pa.string(), path=pa.string(), rows=pa.int64(), size_bytes=pa.int64())

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
        known = [name for name in COMPRESSIONS if name == "none" or pa.Codec.is_available(name)]
        if not isinstance(compression, str) or compression.lower() not in known:
            raise InvalidInput(f"compression is {compression!r}. Known are {', '.join(known)}")
        self._directory = _open_directory(directory, durable, options)
        self.places = (str(self._directory),)
        self._rows_per_file = rows_per_file
        self._row_group_rows = row_group_rows
        self._compression = compression
        self._writing: _ParquetFile | None = None
        self._closed: list[_Closed] = []

    def __repr__(self) -> str:
        return brief(self)

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Nothing is emitted. Raises ``InvalidInput`` for a column that Parquet cannot hold."""
        for field in inputs[0]:
            try:
                pq.write_table(pa.schema([field]).empty_table(), pa.BufferOutputStream())
            except (pa.ArrowException, ValueError) as error:
                raise InvalidInput(
                    f"column {field.name!r} of {self._directory} is {field.type}, which Parquet cannot hold: "
                    f"{str(error).rstrip('.')}. Cast it before the sink, or leave it out",
                    kind=ErrorKind.UNSUPPORTED_TYPE,
                    column=field.name,
                ) from error
        return super().output_schema(*inputs)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._writing = None
        self._closed = []

    def process(self, batch: pa.RecordBatch, input: int) -> None:  # noqa: ARG002 - there is one
        while batch.num_rows:
            if self._writing is None:
                file = self._directory.begin(self.context.uid)
                self._writing = _ParquetFile(file, batch.schema, self._row_group_rows, self._compression)
            room = self._rows_per_file - self._writing.rows
            self._writing.write(batch.slice(0, room))
            batch = batch.slice(min(room, batch.num_rows))
            if self._writing.rows == self._rows_per_file:
                self._end_file()

    def _end_file(self) -> None:
        if self._writing is not None:
            self._closed.append(self._writing.close())
            self._writing = None

    def prepare_commit(self, prepared: Prepared) -> pa.Table | None:
        self._end_file()
        if not self._closed:
            return None
        owner, subtask = file_name_of(self.context.uid), self.context.subtask
        names = [
            PartName(*prepared, owner, subtask, number, closed.file.write_id)
            for number, closed in enumerate(self._closed)
        ]
        files = [closed.file for closed in self._closed]
        pending = self._directory.prepare(list(zip(files, names, strict=True)))
        rows = [
            PreparedFile(place, name.path, closed.rows, closed.size_bytes)._asdict()
            for place, name, closed in zip(pending, names, self._closed, strict=True)
        ]
        self._closed = []
        return table_from_python(rows, self.committable_columns, "the committables")

    def check_committables(self, uid: str, committables: pa.Table, *, renamed: bool = False) -> None:
        _files_of(committables, None if renamed else uid)

    def commit(self, permit: CommitPermit, committables: pa.Table) -> None:  # noqa: ARG002 - holding it is the right
        """Make the files visible that are not yet. Raises ``StorageError``.

        Raises ``DamagedCheckpoint`` for a name that no file sink writes, before it does anything.
        """
        self._directory.commit(_files_of(committables))

    def prepared_attempts(self, uid: str) -> set[Prepared]:
        return {Prepared(name.checkpoint_id, name.attempt_id) for name in self._directory.prepared(uid)}

    def clean(self, uid: str, newest_id: int, carried: pa.Table | None = None) -> list[str]:
        """Remove what crashed runs of the sink ``uid`` left. Returns the removed names.

        Call it when a run begins: after the committables of the newest checkpoint, ``newest_id`` (0
        for none), were committed and before any subtask opens. Files prepared under higher ids
        stay, and so do those in ``carried``: the committables of all checkpoints that a run may
        start from.
        """
        forgotten = self._directory.clean(uid, newest_id, [] if carried is None else _files_of(carried))
        if forgotten:
            logger.info("removed %d files of %s that no checkpoint holds", len(forgotten), self._directory)
        return forgotten

    def close(self) -> None:
        """Remove what no checkpoint holds: its rows will be read again."""
        files = [closed.file for closed in self._closed]
        if self._writing is not None:
            files.append(self._writing.abandon())
        self._writing, self._closed = None, []
        for file in files:
            file.discard()


def _open_directory(address: str | os.PathLike[str], durable: bool, options: Mapping[str, Any]) -> OutputDirectory:
    url = resolved(os.fspath(address))
    scheme = url.partition("://")[0]
    if service_of(scheme) is S3:
        from .s3_directory import S3Directory

        return S3Directory.at(url, options)
    path = local_path(url)
    if path is None:
        raise InvalidInput(
            f"no file sink for {scheme}:// (in {without_secrets(url)}). Known are file, s3, s3a, s3n, s3p, and paths",
            kind=ErrorKind.UNKNOWN_SCHEME,
        )
    check_options("file://", options, ())
    return LocalDirectory(path, durable=durable)


def _files_of(committables: pa.Table, uid: str | None = None) -> Sequence[PreparedFile]:
    """The files of the rows. ``DamagedCheckpoint`` for one that no sink, or not ``uid``, made."""
    if not committables.num_rows:
        return []
    sink = f"sink {uid!r}" if uid else "a file sink"
    files = []
    for row in committables.select([*PreparedFile._fields, "_checkpoint_id", "_attempt_id"]).to_pylist():
        prepared = row.pop("_checkpoint_id"), row.pop("_attempt_id")
        file = PreparedFile(**row)
        name = PartName.of_path(file.path)
        if name is None or name[:2] != prepared or (uid is not None and name.owner != file_name_of(uid)):
            raise foreign_name(sink, prepared, "path", file.path)
        if file.pending != name.pending and Upload.read(file.pending) is None:
            raise foreign_name(sink, prepared, "pending", file.pending)
        files.append(file)
    return files


@dataclass(frozen=True)
class _Closed:
    file: NewFile
    rows: int
    size_bytes: int


class _ParquetFile:
    """A Parquet file being written. Gathers small batches, for row groups of some size."""

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
        self._flush()
        with self._file.translated():
            self._writer.close()
        return _Closed(self._file, self.rows, self._file.close())

    def abandon(self) -> NewFile:
        self._gathered = []
        # The end of a file that goes away does not matter, even on a full disk.
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()
        return self._file
