"""A sink into a table in SQLite or PostgreSQL: the commit of a checkpoint is one transaction.

Theory of operation. Rows pass through a *staging* place, which subtasks write and the driver reads
(``sql.staging``), since workers have no password of the database. docs/sinks.md shows the way of a
row. In one transaction (``sql.databases``) the driver marks every object in
``stateformat_commits``, inserts the rows of those that had no mark, and forgets old marks. When
that is durable, it removes the objects.

A mark goes only after its object. So a checkpoint that is committed again after its marks have gone
is refused, for want of objects, and no row is ever inserted twice.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any, Final

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.graph import brief
from stateformat.publication import CommitPermit
from stateformat.tables import table_from_python

from ...dataflow.api import OperatorContext, Prepared, TwoPhaseCommitSink
from ..sinks.directory import forgotten_paths, prepared_names
from ..sinks.part_names import PartName, file_name_of, foreign_name
from ..sources.basic import check_at_least, not_null
from .databases import (
    Database,
    Mark,
    SqliteDatabase,
    SqlUrl,
    Transaction,
    check_columns,
    check_values,
    last_of_each_key,
)
from .staging import Staged, read_staged, stage, staging_at

logger = logging.getLogger(__name__)

MARKS_DAYS: Final = 90.0
OBJECT_BYTES: Final = 32 * 1024 * 1024
_DAY_SECONDS: Final = 86_400


class SqlSink(TwoPhaseCommitSink):
    """Writes rows into an SQLite or PostgreSQL table, each exactly once, with their checkpoint.

    Example::

        delays.apply(SqlSink("sqlite:///delays.db", "delays"), uid="out")
        newest = SqlSink(url, "public.newest", key="city", staging="s3://bucket/staging")
        delays.key_by("city").apply(newest, uid="newest")

    ``url``: ``sqlite:///relative.db``, ``sqlite:////absolute.db`` or
    ``postgresql://user@host/database`` (needs psycopg, the extra ``postgres``). Only the driver
    connects, and workers get no password. ``table``: a table, or for PostgreSQL ``schema.table``,
    created if missing. ``key``: the columns of a unique constraint; a row replaces an older one
    with the same key. Send all rows of a key to one subtask (``key_by``). Without it rows are
    added. ``staging``: a path or a URL that the driver and all workers can reach, with
    ``staging_options``; beside the file by default for SQLite. ``marks_days``: for how many days
    the database remembers that a checkpoint was committed; None: for ever. ``object_bytes``: how
    much a subtask buffers in memory. ``durable=False`` syncs nothing: for tests and benchmarks.

    Committables (not nullable): ``sink`` (utf8), ``object`` (utf8, its name in the staging area),
    ``subtask`` (int32), ``rows`` and ``size_bytes`` (int64), ``digest`` (utf8, 128-bit BLAKE2b in
    hexadecimal). Raises ``InvalidInput`` for illegal columns or tables, ``InvalidState`` for values
    that the database would refuse (before the checkpoint), ``StorageError`` if the database or the
    staging area fails.
    """

    committable_columns = not_null(
        sink=pa.string(),
        object=pa.string(),
        subtask=pa.int32(),
        rows=pa.int64(),
        size_bytes=pa.int64(),
        digest=pa.string(),
    )

    def __init__(
        self,
        url: str,
        table: str,
        *,
        key: str | Sequence[str] | None = None,
        staging: str | os.PathLike[str] | None = None,
        staging_options: Mapping[str, Any] | None = None,
        marks_days: float | None = MARKS_DAYS,
        object_bytes: int = OBJECT_BYTES,
        durable: bool = True,
    ) -> None:
        check_at_least("object_bytes", object_bytes, 1)
        if marks_days is not None and not marks_days > 0:
            raise InvalidInput(f"marks_days is {marks_days!r}. It takes a number of days above 0, or None")
        self._keys = (key,) if isinstance(key, str) else tuple(key or ())
        self._database = _database_at(SqlUrl(url), table, self._keys, durable)
        if staging is None and not self._database.url.is_sqlite:
            raise InvalidInput(
                f"the SQL sink of {self._database.shown} has no staging place. Give staging=, a directory or URL that "
                "the driver and all workers can reach",
                kind=ErrorKind.INVALID_ARGUMENT,
            )
        place = f"{self._database.url.path}-staging" if staging is None else staging
        self._staging = staging_at(place, staging_options or {}, durable=durable)
        self.places = (str(self._staging),)
        self._marks_days = marks_days
        self._object_bytes = object_bytes
        self._schema: pa.Schema | None = None
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_bytes = 0
        self._put: list[Staged] = []

    def __repr__(self) -> str:
        return brief(self, self._database.shown)

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Nothing is emitted. Raises ``InvalidInput`` for columns the database cannot have."""
        check_columns(self._database.kind, self._database.shown, inputs[0], self._keys)
        self._schema = inputs[0].remove_metadata()
        return super().output_schema(*inputs)

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._gathered, self._gathered_bytes, self._put = [], 0, []

    def process(self, batch: pa.RecordBatch, input: int) -> None:  # noqa: ARG002 - there is one
        if batch.num_rows:
            self._gathered.append(batch)
            self._gathered_bytes += batch.nbytes
            if self._gathered_bytes >= self._object_bytes:
                self._stage(f"{self._folder}/{token_hex(8)}.open")

    @property
    def _folder(self) -> str:
        return file_name_of(self.context.uid)

    def _stage(self, name: str) -> None:
        rows = pa.Table.from_batches(self._gathered)
        check_values(self._database.kind, self._database.shown, rows, self._keys)
        if self._keys:
            rows = last_of_each_key(rows, self._keys)
        self._put.append(stage(self._staging, name, rows))
        self._gathered, self._gathered_bytes = [], 0

    def prepare_commit(self, prepared: Prepared) -> pa.Table | None:
        of = PartName(*prepared, self._folder, self.context.subtask, 0, "")
        for number, staged in enumerate(self._put):
            name = of._replace(number=number, write_id=token_hex(8)).staged
            self._staging.rename(staged.name, name)
            self._put[number] = staged._replace(name=name)
        if self._gathered:
            self._stage(of._replace(number=len(self._put), write_id=token_hex(8)).staged)
        if not self._put:
            return None
        place = {"sink": self.context.uid, "subtask": self.context.subtask}
        rows = [dict(zip(("object", *Staged._fields[1:]), staged, strict=True)) | place for staged in self._put]
        self._put = []
        return table_from_python(rows, self.committable_columns, "the committables")

    def check_committables(self, uid: str, committables: pa.Table, *, renamed: bool = False) -> None:
        _objects(committables, None if renamed else uid)

    def commit(self, permit: CommitPermit, committables: pa.Table) -> None:  # noqa: ARG002 - holding it is the right
        """Insert what is not in the table yet, in one transaction. Raises ``StorageError``.

        Raises ``DamagedCheckpoint`` for an object that no SQL sink stages, before it does anything.
        """
        objects = _objects(committables)
        if not objects:
            return
        with self._database.transaction() as transaction:
            transaction.make(None)
            new = transaction.mark(list(objects))
            made: pa.Schema | None = None
            for mark, staged in objects.items():
                if mark in new:
                    rows = read_staged(self._staging, staged)
                    if rows.schema != made:
                        made = rows.schema
                        transaction.make(made)
                    transaction.insert(rows)
            self._forget(transaction, {mark.sink for mark in objects})
        logger.debug("committed %d of %d objects to %s", len(new), len(objects), self._database.shown)
        # Before any object goes: without it, its rows could not be inserted again.
        self._database.make_durable()
        self._staging.remove(staged.name for staged in objects.values())

    def _forget(self, transaction: Transaction, sinks: set[str]) -> None:
        if self._marks_days is None:
            return
        old = [mark for sink in sorted(sinks) for mark in transaction.expired(sink, self._marks_days * _DAY_SECONDS)]
        if old:
            # In this order: once the mark is gone, its object must not come back. People may insert
            # marks of any name.
            self._staging.remove(mark.object for mark in old if _is_made_by(mark.sink, mark))
            transaction.forget(old)

    def prepared_attempts(self, uid: str) -> set[Prepared]:
        names = prepared_names(uid, self._staging.names(file_name_of(uid)))
        return {Prepared(name.checkpoint_id, name.attempt_id) for name in names}

    def clean(self, uid: str, newest_id: int, carried: pa.Table | None = None) -> list[str]:
        """Create or check the table, and remove what :meth:`FileSink.clean` would."""
        if self._schema is not None:
            with self._database.transaction() as transaction:
                transaction.make(self._schema)
        folder = file_name_of(uid)
        kept = set() if carried is None else {staged.name for staged in _objects(carried).values()}
        forgotten = forgotten_paths(uid, folder, self._staging.names(folder), newest_id, kept)
        self._staging.remove(forgotten)
        if forgotten:
            logger.info("removed %d objects of %s that no checkpoint holds", len(forgotten), self._staging)
        return forgotten

    def close(self) -> None:
        """Remove what no checkpoint holds: its rows will be read again."""
        names = [staged.name for staged in self._put if staged.name.endswith(".open")]
        self._gathered, self._gathered_bytes, self._put = [], 0, []
        # Best effort: the next run removes them too.
        with contextlib.suppress(StorageError):
            self._staging.remove(names)


def _database_at(url: SqlUrl, table: str, keys: Sequence[str], durable: bool) -> Database:
    if url.is_sqlite:
        return SqliteDatabase(url, table, keys, durable)
    from .postgres import PostgresDatabase

    return PostgresDatabase(url, table, keys, durable)


def _objects(committables: pa.Table, uid: str | None = None) -> dict[Mark, Staged]:
    """What is to be committed, in the order in which it was prepared.

    ``DamagedCheckpoint`` for a name that no SQL sink, or not that of ``uid``, has made.
    """
    if not committables.num_rows:
        return {}
    names = ("_checkpoint_id", "subtask", "sink", "_attempt_id", "object", "rows", "size_bytes", "digest")
    rows = zip(*(committables[name].to_pylist() for name in names), strict=True)
    objects = {}
    # The sort is stable: what a subtask prepared under several attempts keeps its order.
    for checkpoint_id, subtask, sink, attempt_id, name, count, size_bytes, digest in sorted(
        rows, key=lambda row: row[:2]
    ):
        mark = Mark(sink, checkpoint_id, attempt_id, name, count)
        if uid is not None and sink != uid:
            raise foreign_name(f"sink {uid!r}", (checkpoint_id, attempt_id), "sink", sink)
        if not _is_made_by(sink, mark, subtask):
            raise foreign_name(f"sink {sink!r}", (checkpoint_id, attempt_id), "object", name)
        objects[mark] = Staged(name, count, size_bytes, digest)
    return objects


def _is_made_by(sink: str, mark: Mark, subtask: int | None = None) -> bool:
    name = PartName.of_staged(mark.object)
    if name is None or name[:3] != (mark.checkpoint_id, mark.attempt_id, file_name_of(sink)):
        return False
    return subtask is None or subtask == name.subtask
