"""Operators that process one batch at a time and keep nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.graph import brief
from stateformat.segments import check_text
from stateformat.states import Columns, as_schema

from ..api import Operator
from ..casting import columns_text, fits_plain, made_plain, plain_schema

_MADE: Final = "what the function of a map returned"
_NO_BATCH: Final = "the function of a map returned {}; it returns a RecordBatch"
Predicate: TypeAlias = "pc.Expression | Callable[[pa.RecordBatch], pa.Array]"


class Map(Operator):
    """Calls a function on each batch.

    Example::

        flights.apply(Map(lambda batch: batch.select(["carrier", "dep_delay"])), uid="short")

    ``fn`` may return fewer or more rows, with the columns of ``schema`` in that order. It must be
    pure: after a restart it may be called again on the same rows. Without ``schema`` it is called
    once on an empty batch, when the dataflow is built, to learn the columns. Types are made plain:
    views, dictionaries, large offsets, and times in other units, if that changes no value; times in
    ns stay so if the input or ``schema`` has them. Raises ``InvalidInput`` if that fails or tells
    no type, and ``InvalidState`` if ``fn`` returns other columns, or text that is not UTF-8.
    """

    def __init__(self, fn: Callable[[pa.RecordBatch], pa.RecordBatch], schema: Columns | None = None) -> None:
        self._fn = fn
        declared = None if schema is None else as_schema(schema)
        self._schema = None if declared is None else plain_schema(declared, declared)
        self._known: pa.Schema | None = self._schema

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """``schema``, or the columns that the function returns for an empty batch."""
        if self._schema is None:
            empty = empty_batch(inputs[0])
            try:
                answer = self._fn(empty)
            except Exception as error:
                raise InvalidInput(
                    "the function of a map was called on a batch without rows, to learn its columns, and failed: "
                    f"{error}. Give Map the schema of what it returns."
                ) from error
            if not isinstance(answer, pa.RecordBatch):
                raise InvalidInput(_NO_BATCH.format(type(answer).__name__))
            untyped = [field.name for field in answer.schema if pa.types.is_null(field.type)]
            if untyped:
                raise InvalidInput(
                    f"the function of a map, called on a batch without rows, returned column {untyped[0]!r} without a "
                    "type. Give Map the schema of what it returns."
                )
            self._known = plain_schema(answer.schema.remove_metadata(), inputs[0])
        return self._known

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch:  # noqa: ARG002 - there is one
        """Call the function."""
        answer = self._fn(batch)
        schema = self._known
        if not isinstance(answer, pa.RecordBatch):
            raise InvalidState(_NO_BATCH.format(type(answer).__name__))
        if answer.schema != schema:
            if not fits_plain(answer.schema, schema):
                raise InvalidState(
                    f"the function of a map returned the columns {columns_text(answer.schema)} and should return "
                    f"{columns_text(schema)}. Cast them, or give Map the schema.",
                    kind=ErrorKind.SCHEMA_MISMATCH,
                )
            answer = made_plain(_MADE, answer, schema)
        if answer is not batch:
            check_text(answer, _MADE, checked=batch)
        return answer


class Filter(Operator):
    """Keeps the rows for which a predicate is true, in their order. Null counts as false.

    Example::

        flights.apply(Filter(pc.field("dep_delay") > 15), uid="late")
        flights.apply(Filter(lambda batch: pc.is_valid(batch["tailnum"])), uid="named")

    ``predicate`` is an Arrow expression over the columns, or a function that returns a boolean
    array for a batch. Raises ``InvalidInput`` for an expression that does not fit the columns.
    """

    def __init__(self, predicate: Predicate) -> None:
        self._predicate = predicate

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Return the input's columns; ``InvalidInput`` if the predicate does not fit them."""
        try:
            self._kept(empty_batch(inputs[0]))
        except Exception as error:
            raise InvalidInput(
                f"the predicate of a filter does not fit the columns {', '.join(inputs[0].names)}: {error}"
            ) from error
        return inputs[0]

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch:  # noqa: ARG002 - there is one
        """Keep the rows for which the predicate is true."""
        return self._kept(batch)

    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        predicate = self._predicate
        return batch.filter(predicate if isinstance(predicate, pc.Expression) else predicate(batch))


class Select(Operator):
    """Keeps some columns, in the given order; a mapping (new name → column) renames them.

    Example::

        flights.apply(Select("carrier", "dep_delay"), uid="short")
        flights.apply(Select({"airline": "carrier", "delay": "dep_delay"}), uid="renamed")
    """

    def __init__(self, *columns: str | Mapping[str, str]) -> None:
        self._columns: dict[str, str] = {}
        for column in columns:
            if not isinstance(column, str | Mapping):
                raise InvalidInput(
                    f"{column!r} is no column. Give names, or mappings from new names to those that are there."
                )
            self._columns |= {column: column} if isinstance(column, str) else dict(column)
        if not self._columns:
            raise InvalidInput("no column is selected. Name at least one.")

    def __repr__(self) -> str:
        return brief(self, *self._columns)

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Return the selected columns."""
        check_columns(inputs[0], self._columns.values(), "a selection")
        return pa.schema([inputs[0].field(old).with_name(new) for new, old in self._columns.items()])

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch:  # noqa: ARG002 - there is one
        """Select the columns, without copying."""
        return batch.select(list(self._columns.values())).rename_columns(list(self._columns))


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch without rows."""
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def check_columns(schema: pa.Schema, wanted: Any, who: str) -> None:
    """Raise ``InvalidInput`` for columns that a stream does not have."""
    missing = [name for name in wanted if name not in schema.names]
    if missing:
        raise InvalidInput(
            f"{who} needs the columns {missing}, which its input does not have. It has {', '.join(schema.names)}."
        )
