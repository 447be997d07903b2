"""Rows that any Arrow tool can scan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import pyarrow as pa


class ArrowStream(ABC):
    """Rows in batches, through the Arrow PyCapsule interface: ``duckdb.sql("from rows")`` works.

    They can be scanned any number of times, by several threads at once. Asking for a stream costs
    nothing; its first batch opens what is read. A stream dropped half read ends its threads.
    """

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns of every batch. Reads nothing."""

    @abstractmethod
    def batches(self) -> Iterator[pa.RecordBatch]:
        """Stream the rows."""

    def table(self) -> pa.Table:
        """Return all rows as one table."""
        return pa.Table.from_batches(self.batches(), schema=self.schema)

    def __arrow_c_schema__(self) -> object:
        """Return the columns as a PyCapsule of an ArrowSchema."""
        return self.schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return the rows as a PyCapsule of an ArrowArrayStream, cast to a requested schema.

        An error of :meth:`batches` reaches the consumer as text, to which pyarrow adds a trace.
        """
        reader = pa.RecordBatchReader.from_batches(self.schema, self._checked())
        return reader.__arrow_c_stream__(requested_schema)

    def _checked(self) -> Iterator[pa.RecordBatch]:
        """Stream the rows; refuse batches that a consumer would take for others."""
        for batch in self.batches():
            if not batch.schema.equals(self.schema):
                raise TypeError(f"a batch has the columns {batch.schema}, its stream {self.schema}")
            yield batch
