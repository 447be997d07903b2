"""Partitioned Parquet: a folder for each value of some columns, named as in Hive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Final
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.model import known_names
from stateformat.tables import ArrowStream, Spill, split_by_bucket

from .data_files import DataFile, row_groups, write_file
from .place import Place
from .source import Step, batches_of

PARTITIONS_MAX: Final = 10_000
NULL: Final = "__HIVE_DEFAULT_PARTITION__"
_NAME_BYTES_MAX: Final = 255
"""The limit for the name of a folder, on the file systems in use."""


def check_partitions(schema: pa.Schema, columns: Sequence[str], what: str) -> None:
    """Raise ``InvalidInput`` for columns that cannot be folders; ``what`` has the schema."""
    for name in columns:
        if name not in schema.names:
            raise InvalidInput(
                f"{what} has no column {name!r}; {known_names(schema.names, name)}",
                kind=ErrorKind.SCHEMA_MISMATCH,
                column=name,
            )
        kind = schema.field(name).type
        if pa.types.is_nested(kind) or pa.types.is_floating(kind) or pa.types.is_binary(kind):
            raise InvalidInput(
                f"column {name!r} of {what} is {kind}, which cannot be a folder name; partition by integers, text, "
                "booleans, decimals, dates or timestamps",
                kind=ErrorKind.UNSUPPORTED_TYPE,
                column=name,
            )
    if len(set(columns)) < len(columns) or len(columns) == len(schema.names):
        problem = "named twice" if len(set(columns)) < len(columns) else "all a folder; a file needs one"
        raise InvalidInput(f"columns {', '.join(columns)} of {what} are {problem}")


def write_partitioned(
    place: Place, stream: ArrowStream, columns: Sequence[str], step: Step = lambda _rows: None
) -> list[DataFile]:
    """Write a folder ``column=value`` for each value, with the other columns in its files.

    Rows wait in a temporary file, so memory does not grow with the number of folders. Their order
    in a folder is that of the stream. Raises ``InvalidInput`` for more than ``PARTITIONS_MAX``
    folders, and for a value that is too long for a name.
    """
    others = [i for i, name in enumerate(stream.schema.names) if name not in columns]
    schema = pa.schema([stream.schema.field(i) for i in others])
    with Spill[str]() as waiting:
        for batch in batches_of(stream, step):
            folders = pc.dictionary_encode(_folders(batch, columns))
            names = folders.dictionary.to_pylist()
            rows = pa.Table.from_arrays([batch.column(i) for i in others], schema=schema)
            for code, part in split_by_bucket(rows, folders.indices.to_numpy()):
                waiting.add(names[code], part)
            if len(waiting.sizes) > PARTITIONS_MAX:
                raise InvalidInput(
                    f"columns {', '.join(columns)} have more than {PARTITIONS_MAX:,} values; partition by columns with "
                    "fewer, or choose rows with a condition",
                    kind=ErrorKind.LIMIT_EXCEEDED,
                )
        return [
            file for folder in sorted(waiting.sizes) for file in _files(place, folder, schema, waiting.read(folder))
        ]


def _files(place: Place, folder: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[DataFile]:
    groups = row_groups(batches, schema)
    for number in count():
        file = write_file(place, f"{folder}/part-{number:05d}.parquet", schema, groups)
        if file is None:
            return
        yield file


def _folders(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.Array:
    """Return the folder of each row."""
    parts = []
    for name in columns:
        values = pc.dictionary_encode(batch[name], null_encoding="encode")
        texts = pc.cast(values.dictionary, pa.string()).to_pylist()
        head = quote(name, safe="")
        folders = [f"{head}={NULL if text is None else quote(text, safe=_SAFE)}" for text in texts]
        longest = max(folders, key=len, default="")
        if len(longest) > _NAME_BYTES_MAX:
            raise InvalidInput(
                f"a value of column {name!r} makes a name of {len(longest)} bytes, and a folder's has at most "
                f"{_NAME_BYTES_MAX}: {longest[:60]}...; partition by another column",
                kind=ErrorKind.LIMIT_EXCEEDED,
                column=name,
            )
        parts.append(pc.take(pa.array(folders, pa.string()), values.indices))
    return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, "/")


_SAFE: Final = " "
"""Every other character that is not plain in a URL is encoded, as readers of such folders
expect.
"""
