"""Iceberg tables, through pyiceberg: one SQLite catalog in the folder, or none on S3.

Theory of operation. The rows first become data files, which no reader looks for. One commit makes
them the table: the catalog replaces the name of the table's metadata file if it is still the one
that was read. Then ``metadata/version-hint.text`` gets the name of that file, for readers that have
only the folder. On S3, which cannot hold a SQLite file, there is only the hint, and the last of two
exports that commit at once wins.

The summary of a snapshot lists the checkpoints in the table (``stateformat.checkpoints``):
``id:attempt`` of each. Properties of the table identify its state, and give the Iceberg field ids
of its fields.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput, StorageError

from .columns import Format, plan_columns
from .data_files import DataFile, write_files
from .held import attempt_of, lost_race, missing_of, other_table, require
from .iceberg_schema import arrow_schema, evolved_schema, ids_of, new_schema
from .place import Place
from .s3_options import iceberg_properties
from .source import Source

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table, Transaction

CATALOG_FILE: Final = "catalog.db"
CATALOG_NAME: Final = "stateformat"
HINT: Final = "metadata/version-hint.text"
_PREFIX: Final = "stateformat."
_SUFFIX: Final = ".metadata.json"


class IcebergCatalog:
    """The tables in a folder and below it."""

    def __init__(self, root: Place) -> None:
        require("pyiceberg", "pyiceberg.catalog.sql", (0, 11), "iceberg")
        self._root = root
        self._catalog: Any = None
        self._made = False
        self.is_shared = False
        """Whether another export was seen to use the catalog."""

    def table(self, place: Place, name: tuple[str, str], source: Source) -> IcebergTarget:
        """Return the table of a state at a place, which may exist already.

        Raises ``InvalidInput`` for a table of another state, and for one that is not in this
        catalog.
        """
        found = self._find(place, name, source)
        return IcebergTarget(self, place, name, source, found)

    def open(self) -> Catalog:
        """Return pyiceberg's catalog, created if it is missing; ``StorageError`` if that fails."""
        from pyiceberg.catalog.sql import SqlCatalog
        from sqlalchemy.exc import SQLAlchemyError

        if self._catalog is None:
            file = None if self._root.local is None else self._root.local / CATALOG_FILE
            if file is not None and not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                self._made = True
            url = "sqlite:///:memory:" if file is None else _sqlite_url(file)
            properties = iceberg_properties(self._root)
            try:
                self._catalog = SqlCatalog(CATALOG_NAME, uri=url, warehouse=self._root.location, **properties)
            except SQLAlchemyError as error:
                # Two exports that create it at once.
                self.is_shared = True
                raise catalog_failed(self._root, error) from error
        catalog: Catalog = self._catalog
        return catalog

    def make_namespace(self, name: str) -> None:
        """Create a namespace if it is missing; ``StorageError`` if the catalog fails."""
        from sqlalchemy.exc import SQLAlchemyError

        try:
            self.open().create_namespace_if_not_exists(name)
        except SQLAlchemyError as error:
            self.is_shared = True
            raise catalog_failed(self._root, error) from error

    def close(self) -> None:
        """Close the catalog, and delete it if it was created here and has no table.

        Not if another export uses it: its table may be added to the catalog at any moment.
        """
        if self._catalog is None:
            return
        empty = False
        if self._made and not self.is_shared:
            tables = (self._catalog.list_tables(namespace) for namespace in self._catalog.list_namespaces())
            empty = not any(tables)
        self._catalog.engine.dispose()
        self._catalog = None
        if empty and self._root.local is not None:
            (self._root.local / CATALOG_FILE).unlink(missing_ok=True)

    def _find(self, place: Place, name: tuple[str, str], source: Source) -> Table | None:
        from pyiceberg.exceptions import NoSuchTableError

        hint = _read_hint(place)
        if self._root.local is None:
            if hint is None:
                return None
            self.make_namespace(name[0])
            return self.open().register_table(name, f"{place.location}/metadata/{hint}{_SUFFIX}")
        table = None
        if (self._root.local / CATALOG_FILE).exists():
            with contextlib.suppress(NoSuchTableError):
                table = self.open().load_table(name)
        if table is None:
            if hint is not None:
                from pyiceberg.table import StaticTable

                there = StaticTable.from_metadata(f"{place.location}/metadata/{hint}{_SUFFIX}")
                check_same(place, source, there.properties)
            if hint is not None or place.holds_others():
                what = "an Iceberg table that is not in" if hint is not None else "files, but no table of"
                raise InvalidInput(
                    f"{place} holds {what} the catalog {self._root}/{CATALOG_FILE}; export to the folder whose "
                    f"{CATALOG_FILE} has the table, or to one that is new or empty",
                    kind=ErrorKind.STORE_NOT_EMPTY,
                )
            return None
        if table.location() != place.location:
            raise InvalidInput(
                f"the catalog {self._root}/{CATALOG_FILE} has the table {'.'.join(name)} in {table.location()}, and "
                f"this export would have it in {place}; export one state to where it is, or all states to another "
                "folder",
                kind=ErrorKind.STORE_NOT_EMPTY,
            )
        if hint is not None and _number(hint) > _number(_version(table)):
            raise InvalidInput(
                f"the table in {place} has gone on to {hint}, and {self._root}/{CATALOG_FILE} still names "
                f"{_version(table)}: another catalog has the table now; export to that catalog's folder",
                kind=ErrorKind.INVALID_ARGUMENT,
            )
        return table


class IcebergTarget:
    """A table that one state is exported to. :meth:`write` first, then :meth:`commit`."""

    def __init__(
        self, catalog: IcebergCatalog, place: Place, name: tuple[str, str], source: Source, table: Table | None
    ) -> None:
        self._catalog, self.place, self._name, self.source, self._table = catalog, place, name, source, table
        self.columns = plan_columns(source.state, source.stream().schema, Format.ICEBERG)
        self._files: list[DataFile] = []
        self._schema: Schema | None = None
        self._hint = None if table is None else _version(table)
        if table is not None:
            self._check_same(table)
        self.missing = self._missing()
        """Ids of the checkpoints that the table does not have."""

    def write(self, batches: Iterable[pa.RecordBatch]) -> list[DataFile]:
        """Write the rows as data files, which do not belong to a table yet."""
        table = self._table
        if table is None:
            self._schema = new_schema(self.columns)
        else:
            ids = json.loads(table.properties.get(f"{_PREFIX}field-ids", "{}"))
            self._schema = evolved_schema(
                self.columns, table.schema(), ids, table.metadata.last_column_id, rows_stay=self.source.several
            )
        converted = (self.columns.convert(batch) for batch in batches)
        self._files = write_files(self.place, "data/", arrow_schema(self.columns, self._schema), converted)
        return self._files

    def discard(self) -> None:
        """Delete what :meth:`write` wrote."""
        self.place.remove([file.path for file in self._files])
        self._files = []

    def commit(self) -> str:
        """Commit the data files as the table, or part of it. Returns the id of the new snapshot."""
        from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError
        from sqlalchemy.exc import SQLAlchemyError

        if self._table is None:
            try:
                self._catalog.make_namespace(self._name[0])
            except StorageError:
                self.discard()
                raise
        try:
            table = self._created() if self._table is None else self._changed(self._table)
        except (CommitFailedException, TableAlreadyExistsError) as error:
            self._catalog.is_shared = True
            self.discard()
            raise lost_race(self.place) from error
        except SQLAlchemyError as error:
            # Whether the table has it is not known, so nothing is deleted.
            self._catalog.is_shared = True
            raise catalog_failed(self.place, error) from error
        if self.place.local is None and _read_hint(self.place) != self._hint:
            # Without a catalog nothing separates two writers; this check shortens the time in which
            # one can be lost.
            self.discard()
            raise lost_race(self.place)
        self._table, self._files = table, []
        self.mend()
        snapshot = table.current_snapshot()
        return str(snapshot.snapshot_id) if snapshot is not None else ""

    def mend(self) -> None:
        """Let the hint name the table's metadata, which it may not do after a crash."""
        assert self._table is not None
        version = _version(self._table)
        if _read_hint(self.place) != version:
            self.place.replace(HINT, version.encode())

    def _created(self) -> Table:
        assert self._schema is not None
        catalog = self._catalog.open()
        properties = {**_identity(self.source), f"{_PREFIX}field-ids": json.dumps(ids_of(self.columns, self._schema))}
        transaction = catalog.create_table_transaction(
            self._name, schema=self._schema, location=self.place.location, properties=properties
        )
        with transaction.update_snapshot(self._summary(())).fast_append() as append:
            for file in self._data_files(transaction):
                append.append_data_file(file)
        return transaction.commit_transaction()

    def _changed(self, table: Table) -> Table:
        """Commit one snapshot that adds rows, or replaces all existing ones. Returns the table
        after it.
        """
        transaction = table.transaction()
        self._evolve(transaction)
        has = _exported(table)
        replaced = [] if self.source.several else [task.file for task in table.scan().plan_files()]
        update = transaction.update_snapshot(self._summary(has if self.source.several else ()))
        with update.overwrite() if replaced else update.fast_append() as change:
            for old in replaced:
                change.delete_data_file(old)
            for file in self._data_files(transaction):
                change.append_data_file(file)
        # Not ``transaction.commit_transaction``: it would add the rows again, after those of
        # another export that committed first.
        self._catalog.open().commit_table(table, transaction._requirements, transaction._updates)
        return table.refresh()

    def _evolve(self, transaction: Transaction) -> None:
        from pyiceberg.table.update import AddSchemaUpdate, AssertCurrentSchemaId, SetCurrentSchemaUpdate

        assert self._schema is not None
        old = transaction.table_metadata.schema()
        if old.fields == self._schema.fields:
            return
        same = [one for one in transaction.table_metadata.schemas if one.fields == self._schema.fields]
        requirement = (AssertCurrentSchemaId(current_schema_id=old.schema_id),)
        if same:
            updates: tuple[Any, ...] = (SetCurrentSchemaUpdate(schema_id=same[0].schema_id),)
        else:
            number = max(one.schema_id for one in transaction.table_metadata.schemas) + 1
            new = self._schema.model_copy(update={"schema_id": number})
            updates = (AddSchemaUpdate(schema=new), SetCurrentSchemaUpdate(schema_id=-1))
        transaction._apply(updates, requirement)
        known = json.loads(transaction.table_metadata.properties.get(f"{_PREFIX}field-ids", "{}"))
        ids = {**known, **ids_of(self.columns, self._schema)}
        transaction.set_properties({f"{_PREFIX}field-ids": json.dumps(ids)})

    def _data_files(self, transaction: Transaction) -> Iterator[Any]:
        from pyiceberg.io.pyarrow import (
            compute_statistics_plan,
            data_file_statistics_from_parquet_metadata,
            parquet_path_to_id_mapping,
        )
        from pyiceberg.manifest import DataFile as IcebergFile, DataFileContent, FileFormat
        from pyiceberg.typedef import Record

        metadata = transaction.table_metadata
        schema = metadata.schema()
        plan = compute_statistics_plan(schema, metadata.properties)
        mapping = parquet_path_to_id_mapping(schema)
        for file in self._files:
            unbounded = _unbounded(file.metadata, plan, mapping)
            statistics = data_file_statistics_from_parquet_metadata(file.metadata, {**plan, **unbounded}, mapping)
            yield IcebergFile.from_args(
                content=DataFileContent.DATA,
                file_path=f"{self.place.location}/{file.path}",
                file_format=FileFormat.PARQUET,
                partition=Record(),
                file_size_in_bytes=file.size_bytes,
                sort_order_id=None,
                spec_id=metadata.default_spec_id,
                equality_ids=None,
                key_metadata=None,
                **statistics.to_serialized_dict(),
            )

    def _check_same(self, table: Table) -> None:
        check_same(self.place, self.source, table.properties)
        if not table.spec().is_unpartitioned():
            raise InvalidInput(
                f"the table in {self.place} is partitioned now ({table.spec()}), and an export writes tables that are "
                "not; export to another folder"
            )

    def _missing(self) -> tuple[int, ...]:
        has = {} if self._table is None else dict(_exported(self._table))
        return missing_of(self.source, self.place, has)

    def _summary(self, has: Iterable[tuple[int, str]]) -> dict[str, str]:
        checkpoints = {**dict(has), **{int(i): attempt_of(self.source, a) for i, a in self.source.checkpoints}}
        return {
            f"{_PREFIX}checkpoints": ",".join(f"{number}:{attempt}" for number, attempt in sorted(checkpoints.items()))
        }


def _unbounded(metadata: Any, plan: Mapping[int, Any], ids: Mapping[str, int]) -> dict[int, Any]:
    """Return, without bounds, those parts of a plan of statistics whose bounds Python cannot
    represent.

    These include dates and timestamps before the year 1 and after 9999, which pyiceberg cannot
    hold.
    """
    from pyiceberg.io.pyarrow import MetricModeTypes, MetricsMode

    found = {}
    for at in range(metadata.num_row_groups):
        group = metadata.row_group(at)
        for column in (group.column(number) for number in range(group.num_columns)):
            number = ids[column.path_in_schema]
            try:
                if column.is_stats_set and column.statistics.logical_type.type in ("DATE", "TIMESTAMP"):
                    column.statistics.min, column.statistics.max  # noqa: B018 - making them is the question
            except (OverflowError, ValueError):
                found[number] = replace(plan[number], mode=MetricsMode(MetricModeTypes.COUNTS))
    return found


def catalog_failed(place: Place, error: Exception) -> StorageError:
    """Return SQLite's error as its first line: the rest is the statement."""
    reason = str(error).partition("\n")[0]
    return StorageError(f"the catalog of {place} failed: {reason}; export again")


def _identity(source: Source) -> dict[str, str]:
    """Return the properties that identify the content of a table."""
    held = {
        "job-id": source.job_id,
        "operator": source.state.operator,
        "state": source.state.name,
        "rows": "of several checkpoints" if source.several else "of one checkpoint",
        **({"selection": source.selection} if source.several else {}),
    }
    return {f"{_PREFIX}{name}": value for name, value in held.items()}


def check_same(place: Place, source: Source, properties: Mapping[str, str]) -> None:
    """Raise ``InvalidInput`` for a table of something else."""
    for name, value in _identity(source).items():
        if properties.get(name) != value:
            raise other_table(place, name.removeprefix(_PREFIX), properties.get(name), value)


def _exported(table: Table) -> Sequence[tuple[int, str]]:
    """Return the checkpoints in the table, by the nearest snapshot that an export made."""
    from pyiceberg.table.snapshots import ancestors_of

    for snapshot in ancestors_of(table.current_snapshot(), table.metadata):
        summary = snapshot.summary
        text = summary.additional_properties.get(f"{_PREFIX}checkpoints") if summary is not None else None
        if text is not None:
            pairs = (part.split(":", 1) for part in text.split(",") if part)
            return [(int(number), attempt) for number, attempt in pairs]
    return []


def _sqlite_url(file: Path) -> str:
    """Return the URL that SQLAlchemy accepts for this file, whatever characters its path has."""
    from sqlalchemy import URL, make_url

    url = URL.create("sqlite", database=os.fspath(file)).render_as_string()
    if make_url(url).database != os.fspath(file):
        raise InvalidInput(
            f"SQLAlchemy has no address for the catalog {file}; export to a folder with a plainer name",
            kind=ErrorKind.INVALID_URL,
        )
    return url


def _read_hint(place: Place) -> str | None:
    try:
        return bytes(place.storage.read(HINT)).decode()
    except FileNotFoundError:
        return None


def _version(table: Table) -> str:
    return str(table.metadata_location).rpartition("/")[2].removesuffix(_SUFFIX)


def _number(version: str) -> int:
    digits = version.partition("-")[0]
    return int(digits) if digits.isdecimal() else 0
