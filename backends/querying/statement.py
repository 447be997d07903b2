"""What a query may be: one statement that DuckDB's parser takes for a SELECT, and the tables that
it names.

What a SELECT must not reach, files and settings, the locked connection refuses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from stateformat.errors import InvalidInput

from .connection import duckdb_module, first_line, folded, quoted

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


def parse(connection: DuckDBPyConnection, sql: str) -> Statement:
    """Return what a query is; ``InvalidInput`` for anything that does not only read."""
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
