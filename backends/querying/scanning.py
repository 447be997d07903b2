"""How DuckDB scans a table of stateformat: batches are made as it asks for them.

DuckDB 2.0 says which columns it needs, and which values of keys: then no others are read. It asks
through the protocol of its own Arrow sources, which is not public; if a version has another
protocol or none, whole rows are read, and DuckDB selects from them.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.tables import ArrowStream

from .connection import duckdb_module, quoted

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from .relations import Pins, Relation

_PINS_MAX: Final = 1000
"""If there are more keys than these, all rows are read and DuckDB looks for the keys."""
_PINNED_TYPES: Final = {
    "BIGINT": int,
    "BLOB": bytes,
    "BOOLEAN": bool,
    "DATE": datetime.date,
    "INTEGER": int,
    "SMALLINT": int,
    "TINYINT": int,
    "UBIGINT": int,
    "UINTEGER": int,
    "USMALLINT": int,
    "UTINYINT": int,
    "VARCHAR": str,
}
"""Types whose values are equal for DuckDB if they are for stateformat, and their Python values."""


class Scans:
    """The scans of one run of a query: what they have read, what went wrong, whether to
    continue.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.errors: list[Exception] = []
        self.stopped = False

    def watch(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Count rows; keep an error, because DuckDB passes on only its text."""
        try:
            for batch in batches:
                if self.stopped:
                    return
                self.rows += batch.num_rows
                yield batch
        except Exception as error:
            self.errors.append(error)
            raise


class Scanned(ArrowStream):
    """Rows of a relation that DuckDB pulls: some columns, by the names that it knows.

    ``columns``: their positions; None: all. ``pins``: values of columns, by the names of the
    state; rows with others are left out.
    """

    def __init__(
        self, relation: Relation, scans: Scans, columns: Sequence[int] | None = None, pins: Pins | None = None
    ) -> None:
        self._relation = relation
        self._scans = scans
        self._numbers = range(len(relation.names)) if columns is None else columns
        self._pins = pins or {}

    @property
    def schema(self) -> pa.Schema:
        """The columns, by their names in a query."""
        own, names = self._relation.source.schema, self._relation.names
        return pa.schema([own.field(i).with_name(names[i]) for i in self._numbers])

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Stream the rows."""
        if all(self._pins.values()):
            yield from self._scans.watch(self._wanted())

    def _wanted(self) -> Iterator[pa.RecordBatch]:
        schema, source = self.schema, self._relation.source
        known = source.schema
        wanted = [known.names[i] for i in self._numbers]
        whole = wanted == known.names and not self._pins
        read = list(dict.fromkeys([*wanted, *self._pins]))
        values = {name: pa.array(some, known.field(name).type) for name, some in self._pins.items()}
        for batch in source.batches() if whole else source.part(read, self._pins):
            for name, some in values.items():
                batch = batch.filter(pc.is_in(batch[name], some))
            yield pa.RecordBatch.from_arrays([batch[name] for name in wanted], schema=schema)


def register(connection: DuckDBPyConnection, relation: Relation, scans: Scans, schema: str | None = None) -> None:
    """Make a relation a view: of a state in the schema of its operator, or in another one."""
    hidden = f"_rows of {relation.sql_name}"
    whole = Scanned(relation, scans)
    if not _register_source(connection, hidden, whole, relation, scans):
        connection.register(hidden, whole)
    place = quoted(relation.name)
    if relation.schema_name:
        named = quoted(schema or relation.schema_name)
        connection.execute(f"create schema if not exists {named}")
        place = f"{named}.{place}"
    connection.execute(f"create or replace view {place} as select * from {quoted(hidden)}")  # noqa: S608 - quoted


def _register_source(
    connection: DuckDBPyConnection, name: str, whole: Scanned, relation: Relation, scans: Scans
) -> bool:
    """Register through DuckDB's protocol of sources; False if this version does not have it."""
    kind = _source_class()
    if kind is None or not hasattr(connection, "_register_arrow_source"):
        return False
    connection._register_arrow_source(name, kind(whole, relation, scans))
    return True


@cache
def _source_class() -> Any:
    """Return the class that DuckDB asks for columns and rows; None if this version does not do
    so.
    """
    if not duckdb_module().__version__.startswith("2.0."):
        return None
    try:
        from duckdb._sources import ArrowScanSource
        from duckdb._sources.nodes import Binary, Col, In, Lit
    except ImportError:
        return None

    def pin(relation: Relation, predicate: object) -> tuple[str, list[Any]] | None:
        """Return the column and its values, for a predicate that only names values of a pinned
        column.
        """
        if isinstance(predicate, Binary) and predicate.op == "=":
            column, values = predicate.left, [predicate.right]
        elif isinstance(predicate, In):
            column, values = predicate.operand, predicate.values
        else:
            return None
        if not isinstance(column, Col) or len(column.parts) != 1 or len(values) > _PINS_MAX:
            return None
        own = dict(zip(relation.names, relation.source.schema.names, strict=True)).get(column.parts[0])
        if own is None or own not in relation.source.pinned:
            return None
        for value in values:
            if not isinstance(value, Lit) or type(value.value) is not _PINNED_TYPES.get(value.type):
                return None
        return own, [value.value for value in values if isinstance(value, Lit)]

    class Source(ArrowScanSource):  # type: ignore[misc]
        """A relation, through DuckDB's protocol."""

        schema_is_stable = True

        def __init__(self, whole: Scanned, relation: Relation, scans: Scans) -> None:
            super().__init__(whole)
            self.relation = relation
            self.scans = scans

        def __arrow_c_schema__(self) -> object:
            return self.obj.__arrow_c_schema__()

        def accepts(self, predicate: object) -> bool:
            return pin(self.relation, predicate) is not None

        def stream(self, columns: Sequence[int] | None, filters: Sequence[object]) -> tuple[object, bool]:
            pins: dict[str, list[Any]] = {}
            for name, values in filter(None, (pin(self.relation, one) for one in filters)):
                pins[name] = [value for value in pins.get(name, values) if value in values]
            # Without a column there would be no rows.
            chosen = columns or None
            return Scanned(self.relation, self.scans, chosen, pins).__arrow_c_stream__(), chosen is not None

    return Source
