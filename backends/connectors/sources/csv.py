"""A source over CSV files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv

from stateformat.errors import InvalidInput, StorageError
from stateformat.states import Columns, as_schema

from ...dataflow.api import Split
from .enumerators import check_position
from .files import FileSource, Paths, plain_type
from .memory import BATCH_ROWS


class CsvSource(FileSource):
    """The rows of CSV files, file after file.

    Example::

        flights = flow.source(CsvSource("flights.csv", nulls=["NA"]), uid="flights")
        events = flow.source(CsvSource("in/", schema={"at": pa.timestamp("us"), "what": pa.string()}), uid="events")

    ``paths``: a file, a directory, a pattern, or a list of these; see ``files.find_files``. Files whose names end with a
    suffix of a compression (``.gz``, ``.zst`` …) are decompressed; in a directory only ``*.csv`` is looked at. The first
    line of each has the names of the columns, unless ``column_names`` gives them. ``schema``: the columns to read, with their
    types, made plain as for ``ParquetSource``. Without it the types are those that fit the first megabyte of the first file, and a value that does not fit later
    on is an error that says so: give the schema then. ``columns``: those to read, of all. ``nulls``: what stands for null
    unless it is quoted; the empty field, unless given. Lines that are empty are no rows, quoted line breaks are part of a value.

    A split is a file; a position counts its rows, and reading on from there parses what is before. ``grows`` and ``until``
    as for ``ParquetSource``.
    """

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
        if schema is not None:
            given = as_schema(schema).remove_metadata()
            self._schema = pa.schema([field.with_type(plain_type(field.type)) for field in given])
        elif self._files:
            self._schema = self._inferred(self._files[0])
        else:
            raise InvalidInput(f"{paths} has no files yet, so nobody knows the columns; give the schema")
        if columns is not None:
            missing = [name for name in columns if name not in self._schema.names]
            if missing:
                raise InvalidInput(f"there are no columns {missing}; there are {', '.join(self._schema.names)}")
            self._schema = pa.schema([self._schema.field(name) for name in columns])

    @property
    def schema(self) -> pa.Schema:
        """The columns that are read."""
        return self._schema

    def _inferred(self, path: str) -> pa.Schema:
        with self._opened(path, None) as reader:
            found = reader.schema
        # A column without any value may hold anything, so it is text.
        return pa.schema(
            [
                pa.field(field.name, pa.string() if pa.types.is_null(field.type) else plain_type(field.type))
                for field in found
            ]
        )

    def _cut(self, path: str, size_bytes: int) -> list[dict[str, int]]:  # noqa: ARG002 - lines are found by reading them
        return [{}]

    def _batches(self, split: Split, payload: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        skip, rows = split.position, 0
        with self._opened(payload["path"], self._schema) as reader:
            for batch in reader:
                rows += batch.num_rows
                if skip < batch.num_rows:
                    yield self._conformed(batch.slice(skip), payload["path"])
                skip = max(0, skip - batch.num_rows)
        check_position(payload["path"], split, rows)

    def _opened(self, path: str, schema: pa.Schema | None) -> pa_csv.CSVStreamingReader:
        types = {} if schema is None else {"column_types": schema, "include_columns": schema.names}
        try:
            return pa_csv.open_csv(
                path,
                read_options=pa_csv.ReadOptions(column_names=self._column_names),
                parse_options=pa_csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
                convert_options=pa_csv.ConvertOptions(
                    null_values=self._nulls, strings_can_be_null=True, quoted_strings_can_be_null=False, **types
                ),
            )
        except (pa.ArrowException, KeyError) as error:
            raise InvalidInput(
                f"{path} cannot be read as CSV: {error}; mend the file, or give the schema that fits", path=path
            ) from error
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error}", path=path) from error


__all__ = ["CsvSource"]
