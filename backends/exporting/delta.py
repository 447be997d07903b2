"""Delta tables, through deltalake: data files first, then one entry of the log.

The files are written here and not by ``write_deltalake``, which holds whatever wide rows it is
given (3 GB for 1 GB of values of 1 MiB, deltalake 1.6), and whose commit cannot wait for the files
of other tables.

The log keeps the last version of each *application transaction*, and an export commits two of its
own: one identifies the state that the table holds, the other the checkpoint. A table of several
checkpoints has one for each, so an export adds those that are missing, even if older entries of the
log are gone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, StorageError

from .files import DataFile, Place, delta_options, write_files
from .source import Format, Source, attempt_of, digest63, lost_race, missing_of, other_table, plan_columns, require

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable, Schema
    from deltalake.transaction import AddAction

_OURS: Final = "; by ckpt export"
"""How the description of a table made by an export ends."""
_ONE: Final = 1
_SEVERAL: Final = 2
"""Whose rows a table has: those of one checkpoint, or of several."""
_NTZ: Final = "timestampNtz"


class DeltaTarget:
    """A table that one state is exported to. :meth:`write` first, then :meth:`commit`."""

    def __init__(self, place: Place, source: Source) -> None:
        _require(place)
        self.place, self.source = place, source
        self._uri = place.storage.url if place.local is not None else place.location
        self._options = delta_options(place)
        self.columns = plan_columns(source.state, source.stream().schema, Format.DELTA)
        self._files: list[DataFile] = []
        self._table = self._found()
        self._added: list[pa.Field] = []
        if self._table is not None:
            self._check_same(self._table)
            self._added = self._new_columns(self._table)
        self.missing = self._missing()
        """Ids of the checkpoints that the table does not have."""

    def write(self, batches: Iterable[pa.RecordBatch]) -> list[DataFile]:
        """Write the rows as data files, which do not belong to a table yet."""
        converted = (self.columns.convert(batch) for batch in batches)
        self._files = write_files(self.place, "", self.columns.schema, converted)
        return self._files

    def discard(self) -> None:
        """Delete what :meth:`write` wrote."""
        self.place.remove([file.path for file in self._files])
        self._files = []

    def commit(self) -> str:
        """Commit the data files as the table, or part of it. Returns the number of the new
        version.
        """
        from deltalake import DeltaTable, Schema
        from deltalake.exceptions import CommitFailedError, DeltaError

        schema = Schema.from_arrow(self.columns.schema)
        with _translated(self.place):
            try:
                if self._table is None:
                    self._create(schema)
                else:
                    self._change(self._table, schema)
            except DeltaError as error:
                lost = isinstance(error, CommitFailedError) or "table already exists" in str(error)
                if not lost:
                    raise  # Whether the log has the commit is not known, so nothing is deleted.
                self.discard()
                raise lost_race(self.place) from error
            self._files = []
            return str(DeltaTable(self._uri, storage_options=self._options).version())

    def mend(self) -> None:
        """Do nothing: the log is all there is."""

    def _create(self, schema: Schema) -> None:
        from deltalake.transaction import create_table_with_add_actions

        state = self.source.state
        create_table_with_add_actions(
            self._uri,
            schema,
            self._actions(),
            mode="error",
            name=f"{state.operator}/{state.name}",
            description=self._described,
            storage_options=self._options,
            commit_properties=self._properties(),
        )

    def _change(self, table: DeltaTable, schema: Schema) -> None:
        """Commit one version that adds rows, or replaces all existing rows by new ones."""
        features = table.protocol().reader_features or []
        if _has_plain_timestamps(self.columns.schema) and _NTZ not in features:
            from deltalake import TableFeatures

            table.alter.add_feature(TableFeatures.TimestampWithoutTimezone, allow_protocol_versions_increase=True)
        if self.source.several and self._added:
            table.alter.add_columns([field for field in schema.fields if field.name in self._names_added])
        mode = "append" if self.source.several else "overwrite"
        table.create_write_transaction(self._actions(), mode, schema, commit_properties=self._properties())

    @property
    def _names_added(self) -> set[str]:
        return {field.name for field in self._added}

    @property
    def _described(self) -> str:
        state = self.source.state
        return f"state {state.name!r} of operator {state.operator!r}, job {self.source.job_id!r}{_OURS}"

    def _actions(self) -> list[AddAction]:
        import time

        from deltalake.transaction import AddAction

        now = int(time.time() * 1000)
        return [
            AddAction(file.path, file.size_bytes, {}, now, True, json.dumps({"numRecords": file.rows}))
            for file in self._files
        ]

    def _properties(self) -> CommitProperties:
        from deltalake import CommitProperties, Transaction

        source = self.source
        transactions = [Transaction(self._app, _SEVERAL if source.several else _ONE)]
        if source.several:
            transactions.append(Transaction(f"{self._app}:rows", digest63(source.selection)))
            new = [(number, attempt) for number, attempt in source.checkpoints if int(number) in self.missing]
            transactions += [Transaction(f"{self._app}@{number}", digest63(attempt)) for number, attempt in new]
        else:
            new = list(source.checkpoints)
            transactions.append(Transaction(f"{self._app}:checkpoint", self._current))
        facts = {"job": source.job_id, "checkpoints": [[int(number), attempt] for number, attempt in new]}
        facts |= {"operator": source.state.operator, "state": source.state.name}
        return CommitProperties(
            custom_metadata={"stateformat": json.dumps(facts)},
            app_transactions=transactions,
            # A retry would add the rows to a table that another export has made meanwhile.
            max_commit_retries=0,
        )

    @property
    def _app(self) -> str:
        return "stateformat:" + json.dumps([self.source.job_id, self.source.state.operator, self.source.state.name])

    @property
    def _current(self) -> int:
        [(number, attempt)] = self.source.checkpoints
        return digest63(int(number), attempt_of(self.source, attempt))

    def _found(self) -> DeltaTable | None:
        from deltalake import DeltaTable

        with _translated(self.place):
            if DeltaTable.is_deltatable(self._uri, storage_options=self._options):
                return DeltaTable(self._uri, storage_options=self._options)
        if self.place.holds_others():
            raise InvalidInput(
                f"{self.place} holds files, but no Delta table; export to a folder that is new or empty",
                kind=ErrorKind.STORE_NOT_EMPTY,
            )
        return None

    def _check_same(self, table: DeltaTable) -> None:
        kind = table.transaction_version(self._app)
        if kind is None:
            found = _about(table).removesuffix(_OURS) if _is_ours(table) else None
            raise other_table(self.place, "", found, self._described.removesuffix(_OURS))
        if kind != (_SEVERAL if self.source.several else _ONE):
            held = {_ONE: "of one checkpoint", _SEVERAL: "of several checkpoints"}
            raise other_table(self.place, "rows", held[kind], held[_ONE if kind == _SEVERAL else _SEVERAL])
        chosen = table.transaction_version(f"{self._app}:rows")
        if self.source.several and chosen != digest63(self.source.selection):
            raise other_table(self.place, "selection", "another", self.source.selection)
        if table.metadata().partition_columns:
            raise InvalidInput(
                f"the table in {self.place} is partitioned now, by {', '.join(table.metadata().partition_columns)}, "
                "and an export writes tables that are not; export to another folder"
            )

    def _missing(self) -> tuple[int, ...]:
        table, source = self._table, self.source
        if table is None:
            return missing_of(source, self.place, {})
        if not source.several:
            there = table.transaction_version(f"{self._app}:checkpoint") == self._current
            return () if there else (int(source.checkpoints[0].checkpoint_id),)
        has: dict[int, str] = {}
        for number, attempt in source.checkpoints:
            digest = table.transaction_version(f"{self._app}@{number}")
            if digest is not None:
                has[int(number)] = attempt if digest == digest63(attempt) else "another"
        return missing_of(source, self.place, has)

    def _new_columns(self, table: DeltaTable) -> list[pa.Field]:
        """Return columns that the table lacks. Raises ``InvalidInput`` for a type that would have
        to change.
        """
        if not self.source.several:
            return []
        from deltalake import Schema

        before = {field.name.lower(): field for field in table.schema().fields}
        now = {field.name: field for field in Schema.from_arrow(self.columns.schema).fields}
        for name, field in now.items():
            old = before.get(name.lower())
            if old is not None and old.type != field.type:
                raise InvalidInput(
                    f"column {name!r} is {_type_name(old)} in the Delta table in {self.place}, and {_type_name(field)} "
                    "in the state now; Delta cannot change it where rows of older checkpoints stay: export to another "
                    "folder, or as Iceberg",
                    kind=ErrorKind.SCHEMA_CANNOT_EVOLVE,
                    column=name,
                )
        return [field for field in self.columns.schema if field.name.lower() not in before]


def check_no_table(root: Place) -> None:
    """Raise ``InvalidInput`` if a folder of tables is itself a table: its vacuum would delete
    them.
    """
    _require(root)
    from deltalake import DeltaTable

    uri = root.storage.url if root.local is not None else root.location
    with _translated(root):
        found = DeltaTable.is_deltatable(uri, storage_options=delta_options(root))
    if found:
        raise InvalidInput(
            f"{root} is itself a Delta table; export one state to where it is, or all states to another folder",
            kind=ErrorKind.STORE_NOT_EMPTY,
        )


def _require(place: Place) -> None:
    # Before 1.6, commits of our own data files omitted the application transactions.
    require("deltalake", "deltalake", (1, 6), "delta")
    if "%" in place.location:
        raise InvalidInput(
            f"deltalake reads the % in {place} as the start of an escape; export to a folder without one",
            kind=ErrorKind.INVALID_URL,
        )


def _is_ours(table: DeltaTable) -> bool:
    return _about(table).endswith(_OURS)


def _about(table: DeltaTable) -> str:
    return table.metadata().description or ""


def _type_name(field: Any) -> str:
    return str(getattr(field.type, "type", field.type))


def _has_plain_timestamps(schema: pa.Schema) -> bool:
    def within(kind: Any) -> bool:
        if pa.types.is_nested(kind):
            return any(within(kind.field(i).type) for i in range(kind.num_fields))
        return bool(kind == pa.timestamp("us"))

    return any(within(kind) for kind in schema.types)


@contextlib.contextmanager
def _translated(place: Place) -> Iterator[None]:
    """Translate deltalake's errors into plain sentences."""
    from deltalake.exceptions import DeltaError

    try:
        yield
    except CheckpointError:
        raise
    except (DeltaError, OSError) as error:
        if place.local is None:
            # stateformat's own client reports such errors in full: no bucket, no permission, no
            # answer.
            next(iter(place.storage.list("_delta_log/")), None)
        text = str(error).partition("\n")[0]
        raise StorageError(f"the Delta table in {place} could not be read or written: {text}") from error
