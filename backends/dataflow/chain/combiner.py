"""Combine rows before they are sent to an operator."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidState
from stateformat.graph import Edge

from ..api import Operator
from ..casting import columns_text
from ..graph import Job
from .errors import Guard


class Combiner:
    """The sending end of an edge whose rows may be combined.

    ``schema``: that of combined rows.
    """

    def __init__(self, logic: Operator, edge: Edge, schema: pa.Schema) -> None:
        self.schema = schema
        self._logic = logic
        self._edge = edge
        self._guard = Guard(edge.target, None)

    def combine(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Return the rows of a batch, combined; None if it is better to send them as they are."""
        with self._guard("combine"):
            combined = self._logic.combine(batch, self._edge.input)
        if combined is not None and not combined.schema.equals(self.schema):
            raise InvalidState(
                f"operator {self._edge.target!r} combined rows into columns {columns_text(combined.schema)}; it "
                f"declares {columns_text(self.schema)}",
                kind=ErrorKind.SCHEMA_MISMATCH,
                operator=self._edge.target,
            )
        return combined


def combiners_of(job: Job, edges: Iterable[Edge]) -> dict[str, Combiner]:
    """Return the combiners of edges whose rows may be combined, by edge id."""
    found = {}
    for edge in edges:
        logic, schema = job.logic(edge.target), job.combined_schema(edge)
        if isinstance(logic, Operator) and schema is not None:
            found[edge.id] = Combiner(logic, edge, schema)
    return found
