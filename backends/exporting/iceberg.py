"""Iceberg tables, through pyiceberg: one SQLite catalog in the folder, or none on S3.

Theory of operation. The rows first become data files, which no reader looks for. One transaction
makes them the table: ``update_schema``, ``delete`` for another checkpoint, ``add_files``. The
catalog replaces the name of the table's metadata file if it is still the one that was read. Then
``metadata/version-hint.text`` gets the name of that file, for readers that have only the folder. On
S3, which cannot hold a SQLite file, there is only the hint, and the last of two exports that commit
at once wins.

The files are written here and not by ``append``, which makes an empty list of a null list of
structs (pyiceberg 0.12), and reads a stream to its end before the first file is complete.

The summary of a snapshot lists the checkpoints in the table (``stateformat.checkpoints``):
``id:attempt`` of each. Properties of the table identify its state, and give the Iceberg field ids
of its fields.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput, StorageError

from .files import DataFile, Place, iceberg_properties, write_files
from .source import (
    Column,
    Columns,
    Format,
    Source,
    attempt_of,
    lost_race,
    missing_of,
    nested,
    other_table,
    plan_columns,
    require,
)

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table, Transaction
    from pyiceberg.types import IcebergType, NestedField

CATALOG_FILE: Final = "catalog.db"
CATALOG_NAME: Final = "stateformat"
HINT: Final = "metadata/version-hint.text"
_PREFIX: Final = "stateformat."
_FIELD_IDS: Final = f"{_PREFIX}field-ids"
_SUFFIX: Final = ".metadata.json"
_RETRIES: Final = {"commit.retry.num-retries": "0"}
"""A retry would add the rows again, after those of another export that committed first."""


class IcebergCatalog:
    """The tables in a folder and below it."""

    def __init__(self, root: Place) -> None:
        require("pyiceberg", "pyiceberg.catalog.sql", (0, 12), "iceberg")
        self._root = root
        self._catalog: Any = None

    def table(self, place: Place, name: tuple[str, str], source: Source) -> IcebergTarget:
        """Return the table of a state at a place, which may exist already.

        Raises ``InvalidInput`` for a table of another state, and for one that is not in this
        catalog.
        """
        return IcebergTarget(self, place, name, source, self._find(place, name, source))

    def open(self) -> Catalog:
        """Return pyiceberg's catalog, created if it is missing; ``StorageError`` if that fails."""
        from pyiceberg.catalog.sql import SqlCatalog

        if self._catalog is None:
            url = "sqlite:///:memory:"
            if self._root.local is not None:
                file = self._root.local / CATALOG_FILE
                file.parent.mkdir(parents=True, exist_ok=True)
                url = _sqlite_url(file)
            # Of two exports that create it at once, one fails.
            with _translated(self._root):
                self._catalog = SqlCatalog(
                    CATALOG_NAME, uri=url, warehouse=self._root.location, **iceberg_properties(self._root)
                )
        catalog: Catalog = self._catalog
        return catalog

    def make_namespace(self, name: str) -> None:
        """Create a namespace if it is missing; ``StorageError`` if the catalog fails."""
        with _translated(self._root):
            self.open().create_namespace_if_not_exists(name)

    def close(self) -> None:
        """Close the catalog."""
        if self._catalog is not None:
            self._catalog.engine.dispose()
            self._catalog = None

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
        self._transaction: Transaction | None = None
        self._hint = None if table is None else _version(table)
        if table is not None:
            self._check_same(table)
        has = {} if table is None else dict(_exported(table))
        self.missing = missing_of(source, place, has)
        """Ids of the checkpoints that the table does not have."""

    def write(self, batches: Iterable[pa.RecordBatch]) -> list[DataFile]:
        """Write the rows as data files, which do not belong to a table yet."""
        self._transaction = self._started()
        ids = _ids_of(self.columns.all, self._transaction.table_metadata.schema())
        known = json.loads(self._transaction.table_metadata.properties.get(_FIELD_IDS, "{}"))
        self._transaction.set_properties({_FIELD_IDS: json.dumps({**known, **ids}), **_RETRIES, **self._metrics})
        converted = (self.columns.convert(batch) for batch in batches)
        self._files = write_files(self.place, "data/", _with_ids(self.columns, ids), converted)
        return self._files

    def discard(self) -> None:
        """Delete what :meth:`write` wrote."""
        self.place.remove([file.path for file in self._files])
        self._files = []

    def commit(self) -> str:
        """Commit the data files as the table, or part of it. Returns the id of the new snapshot."""
        from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError
        from pyiceberg.expressions import AlwaysTrue

        assert self._transaction is not None
        has: Sequence[tuple[int, str]] = ()
        if self._table is not None and self.source.several:
            has = _exported(self._table)
        elif self._table is not None and next(iter(self._table.scan().plan_files()), None) is not None:
            self._transaction.delete(AlwaysTrue())
        paths = [f"{self.place.location}/{file.path}" for file in self._files]
        self._transaction.add_files(paths, self._summary(has), check_duplicate_files=False)
        try:
            with _translated(self.place):  # Whether the table has it is not known then, so nothing is deleted.
                table = self._transaction.commit_transaction()
        except (CommitFailedException, TableAlreadyExistsError) as error:
            self.discard()
            raise lost_race(self.place) from error
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

    def _started(self) -> Transaction:
        """Return a transaction in which the table has the columns of the export."""
        table = self._table
        if table is None:
            self._catalog.make_namespace(self._name[0])
            return self._catalog.open().create_table_transaction(
                self._name,
                schema=self.columns.schema,
                location=self.place.location,
                properties=_identity(self.source),
            )
        if not _RETRIES.items() <= table.properties.items():
            # Of an export by an older release. How often a commit is tried is read before it.
            with table.transaction() as first:
                first.set_properties(_RETRIES)
        transaction = table.transaction()
        _evolve(transaction, self.columns, rows_stay=self.source.several)
        return transaction

    @property
    def _metrics(self) -> dict[str, str]:
        """Properties for columns whose bounds pyiceberg cannot hold: Python has no date before the
        year 1 and after 9999.
        """
        names = [".".join(path) for path, column in _paths(self.columns.all) if pa.types.is_temporal(column.type)]
        return {f"write.metadata.metrics.column.{name}": "counts" for name in names}

    def _check_same(self, table: Table) -> None:
        check_same(self.place, self.source, table.properties)
        if not table.spec().is_unpartitioned():
            raise InvalidInput(
                f"the table in {self.place} is partitioned now ({table.spec()}), and an export writes tables that are "
                "not; export to another folder"
            )

    def _summary(self, has: Iterable[tuple[int, str]]) -> dict[str, str]:
        checkpoints = {**dict(has), **{int(i): attempt_of(self.source, a) for i, a in self.source.checkpoints}}
        return {
            f"{_PREFIX}checkpoints": ",".join(f"{number}:{attempt}" for number, attempt in sorted(checkpoints.items()))
        }


@contextlib.contextmanager
def _translated(place: Place) -> Iterator[None]:
    """Translate SQLite's errors into their first line: the rest is the statement."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except SQLAlchemyError as error:
        reason = str(error).partition("\n")[0]
        raise StorageError(f"the catalog of {place} failed: {reason}; export again") from error


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


def _paths(columns: Sequence[Column], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Column]]:
    for column in columns:
        path = (*above, column.name)
        yield path, column
        yield from _paths(column.children, path)


def _ids_of(columns: Sequence[Column], schema: Schema) -> dict[str, int]:
    """Return Iceberg's id of each column, by the column's permanent name."""
    return {column.key: schema.find_field(".".join(path)).field_id for path, column in _paths(columns)}


def _with_ids(columns: Columns, ids: Mapping[str, int]) -> pa.Schema:
    """Return the columns of data files."""

    def typed(column: Column) -> pa.DataType:
        parts = column.children
        if not parts:
            return column.type
        return nested(column.type, [typed(p) for p in parts], [p.name for p in parts], [ids[p.key] for p in parts])

    return pa.schema([pa.field(c.name, typed(c), metadata={"PARQUET:field_id": str(ids[c.key])}) for c in columns.all])


def _evolve(transaction: Transaction, columns: Columns, *, rows_stay: bool) -> None:
    """Give a table the columns of an export.

    A column keeps its id when its name or position changes or its type is widened. A new column, or
    one whose type the old one cannot become, gets a new id; others are removed. If ``rows_stay``,
    raises ``InvalidInput`` for such a type: the existing rows would lose their values.
    """
    old = transaction.table_metadata.schema()
    ids = json.loads(transaction.table_metadata.properties.get(_FIELD_IDS, "{}"))
    kept: dict[int, Column] = {}

    def keep(parts: Sequence[Column]) -> None:
        for column in parts:
            known = ids.get(column.key)
            before = None if known is None else old.find_column_name(known)
            if before is None:
                continue
            if _may_stay(column, old, ids):
                kept[known] = column
                keep(column.children)
            elif rows_stay:
                raise InvalidInput(
                    f"column {before!r} is {old.find_type(known)} in the Iceberg table, and {column.type} in the "
                    "state now, which the rows of older checkpoints cannot become: export to another folder",
                    kind=ErrorKind.SCHEMA_CANNOT_EVOLVE,
                    column=before,
                )

    keep(columns.all)
    with transaction.update_schema() as update:
        for field in _removed(old.fields, kept):
            update.delete_column(str(old.find_column_name(field.field_id)))
        for number, column in kept.items():
            if old.find_field(number).name != column.name:
                update.rename_column(str(old.find_column_name(number)), column.name)
    names = columns.schema.names
    with transaction.update_schema() as update:
        update.union_by_name(columns.schema)
        if transaction.table_metadata.schema().column_names != names:
            update.move_first(names[0])
            for before, after in pairwise(names):
                update.move_after(after, before)


def _removed(fields: Sequence[NestedField], kept: Mapping[int, Column]) -> Iterator[NestedField]:
    for field in fields:
        if field.field_id not in kept:
            yield field
        else:
            yield from _removed(_members(field.field_type), kept)


def _members(kind: Any) -> Sequence[NestedField]:
    """Return the fields of a struct, or of the structs in a list or a map."""
    from pyiceberg.types import ListType, MapType, StructType

    if isinstance(kind, ListType):
        return _members(kind.element_type)
    if isinstance(kind, MapType):
        return _members(kind.value_type)
    return kind.fields if isinstance(kind, StructType) else ()


def _may_stay(column: Column, old: Schema, ids: Mapping[str, int], *, wider: bool = True) -> bool:
    """Return whether a column of the table can become this one."""
    from pyiceberg.exceptions import ResolveError
    from pyiceberg.schema import promote
    from pyiceberg.types import DecimalType, FloatType, IntegerType, ListType, MapType, StructType

    known = ids.get(column.key)
    if known is None or old.find_column_name(known) is None:
        return False
    before, parts = old.find_type(known), column.children
    if pa.types.is_struct(column.type):
        # pyiceberg cannot change a struct that has no members for a moment.
        return isinstance(before, StructType) and any(_may_stay(part, old, ids, wider=wider) for part in parts)
    if pa.types.is_map(column.type):
        key, value = parts
        same_key = isinstance(before, MapType) and _may_stay(key, old, ids, wider=False)
        return same_key and _may_stay(value, old, ids, wider=wider)
    if parts:
        return isinstance(before, ListType) and _may_stay(parts[0], old, ids, wider=wider)
    after = _primitive(column.type)
    if before == after or not (wider and isinstance(before, IntegerType | FloatType | DecimalType)):
        return bool(before == after)
    try:
        return bool(promote(before, after))
    except ResolveError:
        return False


def _primitive(kind: Any) -> IcebergType:
    from pyiceberg.io.pyarrow import pyarrow_to_schema

    [field] = pyarrow_to_schema(pa.schema([pa.field("_", kind, metadata={"PARQUET:field_id": "1"})])).fields
    return field.field_type
