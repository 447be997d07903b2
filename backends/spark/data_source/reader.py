"""The reader: it plans the tasks of a read, and runs in each of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.model import known_names

from .failures import without_traceback
from .filters import with_keys_of
from .options import ReadOptions
from .streams import Readable, parts_of
from .types import arrow_columns, fitted, spark_columns

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

SPARK_KEEPS_FILTERS_APART: Final = hasattr(DataSourceReader, "pushLimit")
"""Whether Spark plans the filters of each query separately.

Spark 4.3 does not: a DataFrame keeps the plan that it last made with filters, and reads no more
than that for any other query, or for another use in the same query. Rows are missing without a
warning. The fix came with the pushdown of limits (SPARK-58551).
"""
_FILTERS_WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"
"""The module that a worker runs to plan a read with filters."""


def reader_of(options: ReadOptions, found: Readable, columns: StructType) -> DataSourceReader:
    """Return a reader of these columns: all of the stream, or those that a user named."""
    pushes = SPARK_KEEPS_FILTERS_APART if options.push_filters is None else options.push_filters
    kind = StateReaderWithFilters if pushes and _plans_filters() else StateReader
    return kind(options.partitions, chosen(found, columns), arrow_columns(columns))


class Part(InputPartition):  # type: ignore[misc]
    """What one task reads: ``value`` is one part of the stream."""


class StateReader(DataSourceReader):  # type: ignore[misc]
    """Reads a stream in parallel tasks."""

    def __init__(self, parts: int | None, stream: Readable, schema: pa.Schema) -> None:
        self._parts = parts
        self._stream: Readable | None = stream
        self._schema = schema

    def __getstate__(self) -> dict[str, Any]:
        # The reader is sent to every task, whose partition says what to read.
        return {**self.__dict__, "_stream": None}

    def partitions(self) -> list[InputPartition]:
        """Return a partition for each task."""
        assert self._stream is not None
        with without_traceback():
            return [Part(part) for part in parts_of(self._stream, self._parts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Stream the batches of one partition."""
        with without_traceback():
            for batch in partition.value.batches():
                yield fitted(batch, self._schema)


class StateReaderWithFilters(StateReader):
    """A reader that uses filters. Spark refuses it where filter pushdown is off."""

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:  # noqa: N802 - Spark's name
        """Read only the keys that filters on all key columns allow. Spark still applies each."""
        assert self._stream is not None
        with without_traceback():
            self._stream = with_keys_of(self._stream, filters)
        return filters


def chosen(stream: Readable, columns: StructType) -> Readable:
    """Return the stream with only these columns. ``InvalidInput`` if names or types differ."""
    whole = spark_columns(stream.schema)
    if whole == columns:
        return stream
    types = {column.name: column.dataType for column in whole}
    for column in columns:
        if column.name not in types:
            raise InvalidInput(
                f"the schema names a column {column.name!r}, which is not read; {known_names([*types], column.name)}",
                kind=ErrorKind.SCHEMA_MISMATCH,
            )
        given, found = column.dataType.simpleString(), types[column.name].simpleString()
        if given != found:
            raise InvalidInput(
                f"the schema says that column {column.name!r} is {given}, and it is {found}; leave the schema out, and "
                "cast after reading",
                kind=ErrorKind.SCHEMA_MISMATCH,
            )
    return stream.select(columns.names)


def _plans_filters() -> bool:
    """Return whether this worker plans a read with filters, that is, filter pushdown is on.

    A planning worker does not see the session's settings. But each kind of planning runs its own
    module: either the daemon has imported it, or Python was started with it.
    """
    started = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _FILTERS_WORKER in sys.modules or (started is not None and started.name == _FILTERS_WORKER)
