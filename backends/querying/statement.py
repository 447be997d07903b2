"""What a query may be: one statement that DuckDB takes for a SELECT, and the tables that it names.

A condition is one expression over the rows of any stream. What neither may reach, files and
settings, the locked connection refuses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.model import known_names
from stateformat.tables import ArrowStream

from .connection import duckdb_module, first_line, folded, locked, quoted, told_apart, words_quoted

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


_CATALOGS: Final = frozenset(("information_schema", "pg_catalog"))
_LISTINGS: Final = frozenset(("__show_tables_expanded", '"tables"', "tables"))
_EXPLAIN: Final = re.compile(r"\s*explain\s+(analyze\s+)?", re.IGNORECASE)
READS: Final = "ckpt sql reads, and nothing else: give one SELECT, WITH, FROM, VALUES, DESCRIBE, SUMMARIZE or EXPLAIN"


@dataclass(frozen=True)
class TableName:
    """A table that a query names."""

    name: str
    schema: str = ""
    catalog: str = ""

    def __str__(self) -> str:
        parts = [*filter(None, (self.catalog, self.schema, self.name))]
        return ".".join(quoted(part) if "." in part and len(parts) > 1 else part for part in parts)


@dataclass(frozen=True)
class Statement:
    """A query."""

    text: str
    """A SELECT, in DuckDB's sense; for an EXPLAIN the query that is explained."""
    tables: tuple[TableName, ...]
    """Without those of its own WITH clauses."""
    sees_catalog: bool = False
    """Whether it looks into DuckDB's own catalog tables."""
    lists_tables: bool = False
    """SHOW TABLES in any form; then ``text`` is not for DuckDB."""
    explain: str = ""
    """EXPLAIN, with or without ANALYZE."""


def parse(connection: DuckDBPyConnection, sql: str, otherwise: Iterable[str] = ()) -> Statement:
    """Return what a query is; ``InvalidInput`` for anything that does not only read.

    ``otherwise``: the same query in other words, of which the first that reads is taken where the
    query itself does not.
    """
    try:
        return _parsed_alone(connection, sql)
    except InvalidInput:
        for text in otherwise:
            with suppress(InvalidInput):
                return _parsed_alone(connection, text)
        raise


def _parsed_alone(connection: DuckDBPyConnection, sql: str) -> Statement:
    if not sql.strip():
        raise InvalidInput(f"the query is empty. {READS}")
    kind = _kind(connection, sql)
    if kind == "EXPLAIN":
        begin = _EXPLAIN.match(sql)
        if begin is None or _kind(connection, sql[begin.end() :]) != "SELECT":
            raise InvalidInput(f"what is explained is no query, or comes with options. {READS}")
        inner = _reading(connection, sql[begin.end() :])
        if inner.lists_tables:
            raise InvalidInput("a list of tables has no plan to explain; leave EXPLAIN out")
        return replace(inner, explain="explain analyze " if begin[1] else "explain ")
    if kind == "MULTI":
        raise InvalidInput(
            "PIVOT without the values that become columns is several statements; give them, as in PIVOT t ON c IN "
            "('a', 'b') USING sum(n)"
        )
    if kind != "SELECT":
        raise InvalidInput(f"{kind} is refused. {READS}", statement=kind)
    return _reading(connection, sql)


def _kind(connection: DuckDBPyConnection, sql: str) -> str:
    """Return the kind of the one statement in a text."""
    duckdb = duckdb_module()
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise query_error(error, sql) from None
    if len(statements) != 1:
        count = f"{len(statements)} statements" if statements else "no statement"
        raise InvalidInput(f"the query holds {count}. {READS}")
    try:
        return str(statements[0].type.name).upper()
    except ValueError:
        # A kind that DuckDB's Python package does not know.
        return "a statement of this kind"


def _reading(connection: DuckDBPyConnection, text: str) -> Statement:
    """Return a SELECT, and the tables that it names."""
    root = _tree(connection, text)
    tables: list[TableName] = []
    own_names: set[str] = set()
    sees_catalog = False
    for node in nodes(root):
        kind = node.get("type")
        if kind == "SHOW_REF" and node is root.get("from_table") and _is_listing(node):
            return Statement(text, (), lists_tables=True)
        if kind == "BASE_TABLE" or (kind == "SHOW_REF" and node.get("table_name")):
            tables.append(TableName(*(str(node.get(f"{part}_name") or "") for part in ("table", "schema", "catalog"))))
        sees_catalog |= str(node.get("function_name", "")).startswith("duckdb_")
        own_names |= {folded(str(entry["key"])) for entry in _ctes(node)}
    named = [table for table in tables if table.schema or folded(table.name) not in own_names]
    own = [table for table in named if not _in_catalog(table)]
    return Statement(text, tuple(dict.fromkeys(own)), sees_catalog or len(own) < len(named))


def _tree(connection: DuckDBPyConnection, text: str) -> dict[str, Any]:
    """Return the node of a SELECT, as DuckDB's parser makes it."""
    duckdb = duckdb_module()
    try:
        rows = connection.execute("select json_serialize_sql(?::varchar)", [text]).fetchall()
        parsed = json.loads(rows[0][0])
    except duckdb.Error as error:
        raise query_error(error, text) from None
    except RecursionError:
        raise InvalidInput("the query is nested too deeply to be checked; simplify it") from None
    if parsed["error"] or len(parsed["statements"]) != 1:
        raise InvalidInput(f"the query cannot be checked: {parsed.get('error_message', '')}. {READS}")
    found: dict[str, Any] = parsed["statements"][0]["node"]
    return found


def _is_listing(node: dict[str, Any]) -> bool:
    """Return whether a SHOW lists tables."""
    return node.get("table_name") in _LISTINGS or node.get("show_type") == "SHOW_FROM"


def _ctes(node: dict[str, Any]) -> list[dict[str, Any]]:
    found = node.get("cte_map")
    entries = found.get("map", []) if isinstance(found, dict) else []
    return [entry for entry in entries if isinstance(entry, dict) and "key" in entry]


def _in_catalog(table: TableName) -> bool:
    name, schema = folded(table.name), folded(table.schema)
    return schema in _CATALOGS or (not schema and name.startswith("duckdb_"))


def nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a tree of JSON, the outer ones first."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield node
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)


_PLACE: Final = re.compile(r"^LINE (\d+): (.*)\n( *)\^", re.MULTILINE)


def query_error(error: Exception, text: str = "", *, lines_before: int = 0) -> InvalidInput:
    """Return DuckDB's message on a query, as one sentence with the position.

    ``text`` is the query; ``lines_before``: how many lines preceded it in what DuckDB got.
    """
    full = str(error)
    message = first_line(error)
    for line in full.split("\n")[1:]:
        if line.startswith(("Candidate bindings:", "Did you mean")):
            message += f"; {line[0].lower()}{line[1:].strip().rstrip('?')}"
    place = _PLACE.search(full)
    number = int(place[1]) - lines_before if place is not None else 0
    lines = text.split("\n")
    if place is not None and 0 < number <= len(lines):
        at = len(place[3]) - len(f"LINE {place[1]}: ")
        # DuckDB truncates long lines on both sides.
        begun = place[2].startswith("...")
        shown = place[2].removeprefix("...").removesuffix("...")
        column = lines[number - 1].find(shown) + at - 3 * begun
        message += f" (line {number}, column {column + 1})" if shown in lines[number - 1] else f" (line {number})"
    return InvalidInput(f"the query cannot be run: {message}")


_ROWS: Final = "rows"
_EXAMPLE: Final = "n > 0"
_BEFORE: Final = "select (("
_MEMORY_BYTES: Final = 128 << 20
_TEXTS: Final = (pa.string(), pa.large_string(), pa.string_view())
_NUMBER: Final = re.compile(rb"-?\d[\d.]*")
_OWN_NAMES: Final = frozenset(("user", "current_user", "session_user", "current_role"))
"""Names that DuckDB silently takes for its own user if no column has the name."""


def where_rows(stream: ArrowStream, condition: str) -> ArrowStream:
    """Return the rows of a stream for which a condition is true, in their order.

    The columns and their types are the stream's. ``condition`` is one expression of DuckDB's SQL
    over them, of type BOOLEAN, without subqueries, aggregates and windows. Columns whose names
    differ only in case are ``n``, ``N_2``. Rows for which it is NULL are left out. Reads nothing
    before it is scanned; each scan checks a batch at a time. Picklable if the stream is.

    Raises ``InvalidInput`` for anything else, and if DuckDB is not installed. Scanning raises it
    too, for a value that the condition cannot take (a cast that fails), and what scanning the
    stream raises.
    """
    return ChosenRows(stream, *_checked(stream.schema, condition))


@dataclass(frozen=True)
class Purge:
    """A function that leaves out the rows of a table for which one of some conditions is true."""

    conditions: tuple[str, ...]

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Return the other rows. Raises as :func:`where_rows`."""
        for given in self.conditions:
            condition, used = _checked(rows.schema, given)
            with locked(threads=1, memory_bytes=_MEMORY_BYTES) as connection:
                masks = [_mask(connection, batch, condition, used) for batch in rows.to_batches() if batch.num_rows]
            mask = pa.chunked_array(masks, pa.bool_())
            rows = rows.filter(pc.invert(pc.fill_null(mask, fill_value=False)))
        return rows


@dataclass(frozen=True)
class ChosenRows(ArrowStream):
    """What :func:`where_rows` returns."""

    stream: ArrowStream
    condition: str
    used: tuple[int, ...]
    """Positions of the columns that the condition may use."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch. Reads nothing."""
        return self.stream.schema

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Stream the rows."""
        with locked(threads=1, memory_bytes=_MEMORY_BYTES) as connection:
            for batch in self.stream.batches():
                chosen = batch.filter(_mask(connection, batch, self.condition, self.used)) if batch.num_rows else batch
                if chosen.num_rows:
                    yield chosen


def _mask(connection: DuckDBPyConnection, batch: pa.RecordBatch, condition: str, used: tuple[int, ...]) -> pa.Array:
    """Return whether the condition is true, for each row."""
    connection.register(_ROWS, _columns(pa.Table.from_batches([batch]), used))
    try:
        # The condition was checked to be one expression.
        mask = connection.sql(f"select ({condition}\n) from {_ROWS}").to_arrow_table().column(0)  # noqa: S608
    except duckdb_module().Error as error:
        raise _refusal(condition, first_line(error) + _in_quotes(connection, condition, batch.schema)) from None
    assert len(mask) == batch.num_rows
    return mask.combine_chunks()


def _in_quotes(connection: DuckDBPyConnection, condition: str, schema: pa.Schema) -> str:
    """Say how numbers that are compared with columns of text are written, and the types; or ""."""
    texts = {folded(name) for name in told_apart([one.name for one in schema if one.type in _TEXTS])}
    written, said = condition.encode(), ""
    found: dict[int, tuple[re.Match[bytes], str]] = {}
    for node in nodes(_expression(connection, condition)):
        parts = [node[side] for side in ("left", "right") if side in node] or node.get("children", [])
        named = [part["column_names"][-1] for part in parts if part.get("class") == "COLUMN_REF"]
        if not str(node.get("type")).startswith("COMPARE_") or not any(folded(name) in texts for name in named):
            continue
        for part in parts:
            at = int(part.get("query_location", 0)) - len(_BEFORE)
            number = _NUMBER.match(written, at) if part.get("class") == "CONSTANT" and at >= 0 else None
            if number is not None:
                found[at] = (number, named[0])
    for at, (number, name) in sorted(found.items(), reverse=True):
        written = b"%b'%b'%b" % (written[:at], number[0], written[number.end() :])
        said = f". Column {name!r} is text, and {number[0].decode()} is a number; write "
    return said and said + written.decode()


def _columns(table: pa.Table, used: tuple[int, ...]) -> pa.Table:
    names = told_apart(table.column_names)
    if not used:
        # For DuckDB a table without columns has no rows.
        return pa.table({"row": pa.nulls(len(table), pa.bool_())})
    return table.select(list(used)).rename_columns([names[i] for i in used])


def _checked(schema: pa.Schema, condition: str) -> tuple[str, tuple[int, ...]]:
    """Return a condition as DuckDB takes it, and the columns that it may use; ``InvalidInput`` for
    anything that is not a condition.
    """
    if not condition.strip():
        raise _refusal(condition, "it is empty")
    names = told_apart(schema.names)
    with locked(threads=1, memory_bytes=_MEMORY_BYTES) as connection:
        condition, tree = _read(connection, condition, names)
        parts = [node for node in nodes(tree) if "class" in node]
        if any(node["class"] == "SUBQUERY" for node in parts):
            raise _refusal(condition, "it has a subquery, and a condition looks at one row")
        if any(node["class"] == "PARAMETER" for node in parts):
            raise _refusal(condition, "it has a parameter, and nothing gives it a value")
        named = [name for node in parts for name in node.get("column_names", [])]
        whole = any(node["class"] == "STAR" for node in parts)
        known = {folded(name) for name in named}
        taken = next((name for name in named if folded(name) in _OWN_NAMES - {folded(one) for one in names}), None)
        if taken is not None:
            raise _no_column(condition, taken, names)
        used = tuple(i for i, name in enumerate(names) if whole or folded(name) in known)
        empty = _columns(schema.empty_table(), used)
        _bind(connection, condition, empty, names)
    return condition, used


def _read(connection: DuckDBPyConnection, condition: str, names: list[str]) -> tuple[str, dict[str, Any]]:
    """Return a condition, with reserved words quoted where it needs that, and its tree."""
    try:
        return condition, _expression(connection, condition)
    except InvalidInput:
        for text in words_quoted(condition, names):
            with suppress(InvalidInput):
                return text, _expression(connection, text)
        raise


def _bind(connection: DuckDBPyConnection, condition: str, empty: pa.Table, names: list[str]) -> None:
    duckdb = duckdb_module()
    try:
        connection.register(_ROWS, empty)
        # In a filter, DuckDB refuses aggregates, windows and anything that makes several rows of
        # one.
        connection.execute(f"select 1 from {_ROWS} where ({condition}\n)").fetchall()  # noqa: S608 - was checked
        described = connection.execute(f"describe select ({condition}\n) from {_ROWS}").fetchall()  # noqa: S608
    except duckdb.Error as error:
        what = first_line(error)
        missing = isinstance(error, duckdb.BinderException) and what.startswith("Referenced column")
        if missing:
            given = what.split('"')[1] if what.count('"') > 1 else ""
            raise _no_column(condition, given, names) from None
        raise _refusal(condition, what) from None
    types = [str(row[1]) for row in described]
    if types != ["BOOLEAN"]:
        several = len(types) > 1 or types[0].startswith(("STRUCT", "TUPLE"))
        what = "several values" if several else f"of type {types[0]}"
        raise _refusal(condition, f"it is {what}, and a condition is true or false; compare it, as in {_EXAMPLE}")


def _expression(connection: DuckDBPyConnection, condition: str) -> dict[str, Any]:
    """Return DuckDB's tree of the condition; ``InvalidInput`` for anything but a single
    expression.
    """
    given, plain = (_parsed(connection, text) for text in (condition, "true"))
    if given["error"]:
        position = given.get("position", "")
        at = int(position) - len(_BEFORE) + 1 if position.isdigit() else 0
        where = f" at character {at}" if 0 < at <= len(condition) else ""
        raise _refusal(condition, given["error_message"].split("\n")[0] + where)
    # Text that ends the expression and begins something else gives another statement than a
    # constant does.
    several = len(given["statements"]) != 1
    node, frame = given["statements"][0]["node"], plain["statements"][0]["node"]
    chosen = node.pop("select_list", [])
    frame.pop("select_list")
    if several or len(chosen) != 1 or node != frame:
        raise _refusal(condition, "it is more than one expression")
    found: dict[str, Any] = chosen[0]
    return found


def _parsed(connection: DuckDBPyConnection, text: str) -> dict[str, Any]:
    # With two pairs of parentheses, text that closes both cannot continue.
    rows = connection.execute("select json_serialize_sql(?::varchar)", [f"{_BEFORE}{text}\n))"]).fetchall()
    try:
        found: dict[str, Any] = json.loads(rows[0][0])
    except RecursionError:
        raise _refusal(text, "it is nested too deeply") from None
    return found


def _no_column(condition: str, given: str, names: list[str]) -> InvalidInput:
    return _refusal(condition, f"there is no column {given!r}; {known_names(names, given)}", ErrorKind.SCHEMA_MISMATCH)


def _refusal(condition: str, what: str, kind: ErrorKind = ErrorKind.INVALID_ARGUMENT) -> InvalidInput:
    return InvalidInput(f"the condition {condition!r} cannot be used: {what}", kind=kind, condition=condition)
