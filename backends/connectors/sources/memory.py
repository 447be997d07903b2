"""A source over rows in memory: for tests, examples, and small tables that join a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import pyarrow as pa

from stateformat.errors import InvalidInput
from stateformat.graph import brief

from ...dataflow.api import Chunk, ReaderContext, Source, Split, StartingPoint
from ...dataflow.casting import check_columns, made_plain, plain_schema
from .enumerators import ListEnumerator, check_at_least, check_position

BATCH_ROWS = 65_536
"""How many rows a batch of a source has by default."""


class MemorySource(Source):
    """Reads the rows of a table, in order.

    Example::

        names = pa.table({"carrier": ["AA"], "name": ["American"]})
        airlines = flow.source(MemorySource(names), uid="airlines")

    ``rows``: a table, a batch, or batches of one schema. They are divided into ``splits``
    contiguous parts whose sizes differ by at most one row, read in batches of at most
    ``batch_rows``. A position counts the rows of a part. Types are made plain as for
    ``ParquetSource``. Raises ``InvalidInput`` for an empty iterable of batches, which has no
    schema, for two columns of one name, and for times that are no whole microseconds.
    """

    def __init__(
        self,
        rows: pa.Table | pa.RecordBatch | Iterable[pa.RecordBatch],
        *,
        splits: int = 1,
        batch_rows: int = BATCH_ROWS,
    ) -> None:
        check_at_least("splits", splits, 1)
        check_at_least("batch_rows", batch_rows, 1)
        if isinstance(rows, pa.RecordBatch):
            rows = [rows]
        if not isinstance(rows, pa.Table):
            rows = _table(rows)
        what, schema = "a MemorySource", plain_schema(rows.schema)
        check_columns(what, schema)
        self._table = made_plain(what, rows, schema).combine_chunks()
        self._splits = splits
        self._batch_rows = batch_rows

    def __repr__(self) -> str:
        return brief(self, f"{self._table.num_rows:,} rows")

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    def enumerator(self) -> ListEnumerator:
        return ListEnumerator(self._parts)

    def _parts(self) -> Iterator[Split]:
        rows, extra = divmod(self._table.num_rows, self._splits)
        first = 0
        for number in range(self._splits):
            count = rows + (number < extra)
            if count:
                yield Split(f"part-{number:05d}", json.dumps({"first_row": first, "rows": count}).encode())
            first += count

    def behind(self, position: int) -> StartingPoint:
        """Begin after this many rows of the table. Raises ``InvalidInput`` if it has fewer."""
        check_at_least("the position of a MemorySource", position, 0)
        if position > self._table.num_rows:
            raise InvalidInput(f"the MemorySource has {self._table.num_rows} rows, and cannot begin behind {position}")
        begun, left = [], {}
        for number, split in enumerate(self._parts()):
            part = json.loads(split.payload)
            if part["first_row"] >= position:
                left[number] = split
            elif position < part["first_row"] + part["rows"]:
                begun.append(split._replace(position=position - part["first_row"]))
        return StartingPoint(ListEnumerator.keeping(left), tuple(begun), f"behind {position} rows")

    def read(self, split: Split, context: ReaderContext) -> Iterator[Chunk]:  # noqa: ARG002 - no clock is needed
        part = json.loads(split.payload)
        first, rows = part["first_row"], part["rows"]
        check_position("that part", split, min(rows, self._table.num_rows - first))
        position = split.position
        rest = self._table.slice(first + position, rows - position)
        for batch in rest.to_batches(max_chunksize=self._batch_rows):
            position += batch.num_rows
            yield Chunk(batch, position)


def _table(rows: object) -> pa.Table:
    try:
        batches = list(rows)  # type: ignore[call-overload]
        if batches:
            return pa.Table.from_batches(batches)
    except (TypeError, pa.ArrowException) as error:
        raise InvalidInput(
            f"{type(rows).__name__} holds no record batches of one schema: {error}. Give an Arrow table, like "
            "pa.table(…) or pa.Table.from_pandas(…)"
        ) from error
    raise InvalidInput("no batch is given, so the columns are unknown. Give a table, which may be empty")
