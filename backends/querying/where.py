"""The rows of a stream for which a condition in SQL is true."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.model import known_names
from stateformat.tables import ArrowStream

from .connection import duckdb_module, first_line, folded, locked, told_apart
from .statement import nodes

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_ROWS: Final = "rows"
_EXAMPLE: Final = "n > 0"
_BEFORE: Final = "select (("
_MEMORY_BYTES: Final = 128 << 20
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
    used = _checked(stream.schema, condition)
    return ChosenRows(stream, condition, used)


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
                chosen = batch.filter(self._mask(connection, batch)) if batch.num_rows else batch
                if chosen.num_rows:
                    yield chosen

    def _mask(self, connection: DuckDBPyConnection, batch: pa.RecordBatch) -> pa.Array:
        """Return whether the condition is true, for each row."""
        connection.register(_ROWS, _columns(pa.Table.from_batches([batch]), self.used))
        try:
            # The condition was checked to be one expression.
            mask = connection.sql(f"select ({self.condition}\n) from {_ROWS}").to_arrow_table().column(0)  # noqa: S608
        except duckdb_module().Error as error:
            raise _refusal(self.condition, first_line(error)) from None
        assert len(mask) == batch.num_rows
        return mask.combine_chunks()


def _columns(table: pa.Table, used: tuple[int, ...]) -> pa.Table:
    names = told_apart(table.column_names)
    if not used:
        # For DuckDB a table without columns has no rows.
        return pa.table({"row": pa.nulls(len(table), pa.bool_())})
    return table.select(list(used)).rename_columns([names[i] for i in used])


def _checked(schema: pa.Schema, condition: str) -> tuple[int, ...]:
    """Return the columns that a condition may use; ``InvalidInput`` for anything that is not a
    condition.
    """
    if not condition.strip():
        raise _refusal(condition, "it is empty")
    names = told_apart(schema.names)
    with locked(threads=1, memory_bytes=_MEMORY_BYTES) as connection:
        tree = _expression(connection, condition)
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
    return used


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
