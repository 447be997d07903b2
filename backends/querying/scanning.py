"""How DuckDB scans a table of stateformat: batches are made as it asks for them.

A table is registered as a pyarrow dataset, from which DuckDB asks only for the columns and rows
that it needs. Which keys these have is known before: from the filters in the plan of the query.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from .connection import duckdb_module, quoted

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from .relations import Pins, Relation

    Used = Sequence[tuple[Relation, str | None]]

_PINS_MAX: Final = 1000
"""If there are more keys than these, all rows are read and DuckDB looks for the keys."""
_COLUMN: Final = re.compile(r'(?:^|")(\d+)\.\d+(?:$|")', re.MULTILINE)
_PIN: Final = re.compile(r'\("(\d+)\.(\d+)" (?:= (.*)|IN \((.*)\))\)', re.DOTALL)
"""A filter of a plan that only names values of a column."""


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


class Scanned(ds.Dataset):  # type: ignore[misc]
    """The rows of a relation, by the names that a query uses.

    ``pins``: the only values of columns, by the names of the state, that a scan with a filter asks
    for.
    """

    def __init__(self, relation: Relation, scans: Scans, pins: Pins) -> None:
        self._relation = relation
        self._scans = scans
        self._pins = pins

    @property
    def schema(self) -> pa.Schema:
        """All columns."""
        return _renamed(self._relation, self._relation.names)

    def scanner(self, columns: list[str] | None = None, filter: pc.Expression | None = None, **_: Any) -> _Scan:
        """Return what DuckDB reads: these columns of the rows for which the filter is true."""
        schema = self.schema
        chosen = schema.names if columns is None else columns
        batches = self._scans.watch(self._batches(chosen, filter))
        return _Scan(pa.schema([schema.field(name) for name in chosen]), batches)

    def _batches(self, columns: Sequence[str], condition: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        pins = {} if condition is None else self._pins
        if not all(pins.values()):
            return
        names = dict(zip(self._relation.names, self._relation.source.schema.names, strict=True))
        read = [name for name in names if name in columns or _may_use(condition, name)]
        own = [names[name] for name in read]
        source = self._relation.source
        whole = own == source.schema.names and not pins
        for batch in source.batches() if whole else source.part(own, pins):
            table = pa.Table.from_arrays([batch[name] for name in own], names=read)
            yield from (table if condition is None else table.filter(condition)).select(columns).to_batches()


def _may_use(condition: pc.Expression | None, name: str) -> bool:
    """Return whether a name stands in the text of a condition, which has no list of its columns."""
    return condition is not None and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(condition)) is not None


class _Scan:
    """What DuckDB needs of pyarrow's ``Scanner``."""

    def __init__(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        self.projected_schema = schema
        self._batches = batches

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the rows."""
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._batches)


def register(connection: DuckDBPyConnection, used: Used, scans: Scans, pins: Mapping[int, Pins]) -> None:
    """Make relations views: of a state in the schema of its operator, or in another one."""
    for number, (relation, schema) in enumerate(used):
        rows = Scanned(relation, scans, pins.get(number, {}))
        _view(connection, relation, schema, rows, relation.names)


def planned_pins(connection: DuckDBPyConnection, used: Used, text: str) -> Mapping[int, Pins]:
    """Return the values that key columns have in all scans of a relation, by its number.

    They stand in DuckDB's plan of the query over empty tables, whose columns are called
    ``relation.column``, by numbers.
    """
    if not any(relation.source.pinned for relation, _ in used):
        return {}
    for number, (relation, schema) in enumerate(used):
        names = [f"{number}.{i}" for i in range(len(relation.names))]
        _view(connection, relation, schema, ds.dataset(_renamed(relation, names).empty_table()), names)
    try:
        plan = json.loads(connection.execute(f"explain (format json)\n{text}").fetchall()[0][1])
    except (duckdb_module().Error, ValueError, RecursionError):
        return {}
    found: dict[int, Pins] = {}
    pending = list(plan)
    while pending:
        node = pending.pop()
        pending += node["children"]
        filters, columns = (_listed(node["extra_info"].get(name, [])) for name in ("Filters", "Projections"))
        # A scan without a filter, which may get one while the query runs, asks for any value.
        for number in {int(one) for one in _COLUMN.findall("\n".join([*filters, *columns]))} & {*range(len(used))}:
            pins = _pins(connection, used[number][0], number, filters)
            before = found.get(number)
            if before is not None:
                pins = {name: [*before[name], *values] for name, values in pins.items() if name in before}
            found[number] = pins
    return found


def _listed(said: str | Sequence[str]) -> Sequence[str]:
    """What a plan says of one or several things."""
    return [said] if isinstance(said, str) else said


def _pins(connection: DuckDBPyConnection, relation: Relation, number: int, filters: Sequence[str]) -> Pins:
    """Return the values of columns that the filters of one scan let through."""
    pins: dict[str, list[Any]] = {}
    for match in filter(None, map(_PIN.fullmatch, filters)):
        if int(match[1]) != number:
            continue
        column = relation.source.schema.field(int(match[2]))
        values = _values(connection, match[3] or match[4], column.type)
        if column.name in relation.source.pinned and values is not None:
            pins[column.name] = [one for one in pins.get(column.name, values) if one in values]
    return pins


def _values(connection: DuckDBPyConnection, text: str, kind: pa.DataType) -> list[Any] | None:
    """Return values that a plan shows as SQL; None if DuckDB's equality of their type is not that
    of keys.
    """
    if not (kind in (pa.string(), pa.binary(), pa.bool_(), pa.date32()) or pa.types.is_integer(kind)):
        return None
    try:
        rows = connection.execute(f"select unnest([{text}])").fetchall()
        values: list[Any] = pa.array([value for (value,) in rows], kind).to_pylist()
    except (duckdb_module().Error, pa.ArrowException):
        return None
    return values if len(values) <= _PINS_MAX and None not in values else None


def _view(
    connection: DuckDBPyConnection, relation: Relation, schema: str | None, rows: ds.Dataset, names: Sequence[str]
) -> None:
    hidden = f"_rows of {relation.sql_name}"
    connection.register(hidden, rows)
    place = quoted(relation.name)
    if relation.schema_name:
        named = quoted(schema or relation.schema_name)
        connection.execute(f"create schema if not exists {named}")
        place = f"{named}.{place}"
    columns = ", ".join(f"{quoted(name)} as {quoted(own)}" for name, own in zip(names, relation.names, strict=True))
    connection.execute(f"create or replace view {place} as select {columns} from {quoted(hidden)}")  # noqa: S608 - quoted


def _renamed(relation: Relation, names: Sequence[str]) -> pa.Schema:
    return pa.schema([field.with_name(name) for field, name in zip(relation.source.schema, names, strict=True)])
