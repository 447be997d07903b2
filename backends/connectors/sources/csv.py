"""A source over CSV files."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv

from stateformat.states import Columns

from ...dataflow.api import Split
from .enumerators import check_position
from .files import FileSource, Paths
from .memory import BATCH_ROWS


class CsvSource(FileSource):
    """Reads CSV files, one after another.

    Example::

        flights = flow.source(CsvSource("flights.csv", nulls=["NA"]), uid="flights")
        schema = {"at": pa.timestamp("us"), "what": pa.string()}
        events = flow.source(CsvSource("in/", schema=schema), uid="events")

    ``paths``: a file, a directory (only its ``*.csv`` is read), a pattern, or a list of these. Of
    directories and patterns, names that begin with "." or "_" are skipped. Files whose names end
    with the suffix of a compression (``.gz``, ``.zst`` …) are decompressed. ``column_names``: the
    names of the columns, if the first line does not have them. ``schema``: the types, made plain as
    for ``ParquetSource``. By default they are inferred from the first megabyte of the first file,
    and a later value that does not fit is an error: then give the schema. ``columns``: those to
    read; all by default. ``nulls``: values that mean null unless quoted, by default the empty
    field. Empty lines are skipped; quoted line breaks are part of a value.

    A split is a file. A position counts its rows; resuming parses the rows before it again.
    ``grows`` and ``until`` are as for ``ParquetSource``. Raises ``InvalidInput`` for no files, and
    for columns that they do not have.
    """

    kind = "CSV"
    suffix = ".csv"

    def __init__(
        self,
        paths: Paths,
        *,
        schema: Columns | None = None,
        columns: Sequence[str] | None = None,
        column_names: Sequence[str] | None = None,
        delimiter: str = ",",
        nulls: Sequence[str] = ("",),
        batch_rows: int = BATCH_ROWS,
        grows: bool = False,
        until: str | None = None,
    ) -> None:
        super().__init__(paths, batch_rows=batch_rows, grows=grows, until=until)
        self._column_names = None if column_names is None else list(column_names)
        self._delimiter = delimiter
        self._nulls = list(nulls)
        self._schema = pa.schema(self._fields(schema, columns))
        self._check_first()

    def _schema_of(self, path: str) -> pa.Schema:
        with self._opened(path, None) as reader:
            found = reader.schema
        # A column without any value may hold anything, so it is text.
        return pa.schema([field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in found])

    def _check_file(self, path: str) -> None:
        # Arrow would take the first of two columns of one name.
        names = self._column_names
        if names is None:
            # A header of enormous names is none of Python's (csv.Error), and Arrow reads it.
            # Like Arrow, utf-8-sig takes no byte order mark for a part of a name.
            with self._reported(path), pa.input_stream(path) as file, contextlib.suppress(csv.Error):
                text = io.TextIOWrapper(file, "utf-8-sig", "replace", newline="")
                names = next(filter(None, csv.reader(text, delimiter=self._delimiter)), [])
        if names:
            self._check_names(path, names, self._schema.names)

    def _cut(self, path: str, size_bytes: int) -> list[dict[str, int]]:  # noqa: ARG002 - lines are found by reading them
        return [{}]

    def _batches(self, split: Split, payload: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        self._check_file(payload["path"])
        skip, rows = split.position, 0
        with self._opened(payload["path"], self._schema) as reader:
            for batch in reader:
                rows += batch.num_rows
                if skip < batch.num_rows:
                    yield self._cast(batch.slice(skip), payload["path"])
                skip = max(0, skip - batch.num_rows)
        check_position(payload["path"], split, rows)

    def _opened(self, path: str, schema: pa.Schema | None) -> pa_csv.CSVStreamingReader:
        types = {} if schema is None else {"column_types": schema, "include_columns": schema.names}
        with self._reported(path):
            return pa_csv.open_csv(
                path,
                read_options=pa_csv.ReadOptions(column_names=self._column_names),
                parse_options=pa_csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
                convert_options=pa_csv.ConvertOptions(
                    null_values=self._nulls, strings_can_be_null=True, quoted_strings_can_be_null=False, **types
                ),
            )
