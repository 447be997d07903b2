"""An export as a whole: planned, written, and then made visible. Tables, files, and Parquet in a
folder for each value of some columns, named as in Hive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, StorageError
from stateformat.model import known_names
from stateformat.tables import ArrowStream, Spill, split_by_bucket

from .delta import DeltaTarget, check_no_table
from .files import DataFile, Place, row_groups, whole_folder, write_file
from .iceberg import IcebergCatalog, IcebergTarget
from .source import Format, Note, Source, Step, batches_of, folder_names

WriteFile = Callable[[Any, pa.Schema, Iterator[pa.RecordBatch]], int]
"""Writes batches of a schema into a binary file; returns the number of rows."""


@dataclass(frozen=True)
class Exported:
    """What happened to one state."""

    operator: str
    state: str
    path: str
    added: tuple[int, ...]
    """Ids of the checkpoints whose rows were written."""
    present: tuple[int, ...]
    """Ids of the checkpoints whose rows the table had before."""
    rows: int
    files: int
    bytes: int
    version: str | None
    """Iceberg's snapshot or Delta's version; None for files, and if nothing was added."""
    notes: tuple[Note, ...]


class TableExport:
    """States being exported into tables; :meth:`run` writes. Close it, or use it in a ``with``.

    ``targets`` describes what will be written and where: ``place``, ``columns`` with its notes, and
    ``missing``, the checkpoints that the table does not have.
    """

    def __init__(self, sources: Sequence[Source], file_format: Format, to: Place, *, alone: bool) -> None:
        # An address that is none is refused before anything else.
        if to.storage.url.partition("://")[0] not in ("file", "s3"):
            raise InvalidInput(
                f"{to} cannot hold {Format(file_format).value} tables: they are written to a path or to s3:// only. "
                "Export Parquet or CSV files there, or tables elsewhere",
                kind=ErrorKind.INVALID_URL,
            )
        self._open = ExitStack()
        self.targets: list[IcebergTarget | DeltaTarget] = []
        try:
            catalog = IcebergCatalog(to) if Format(file_format) is Format.ICEBERG else None
            if catalog is not None:
                self._open.callback(catalog.close)
            elif not alone:
                check_no_table(to)
            for source, names in zip(sources, folder_names(sources), strict=True):
                place = to if alone else to.at(*names)
                if catalog is not None:
                    self.targets.append(catalog.table(place, names, source))
                else:
                    self.targets.append(DeltaTarget(place, source))
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the catalog."""
        self._open.close()

    def run(self, step: Step = lambda _rows: None) -> list[Exported]:
        """Write all data files, and only then commit the tables, one after the other.

        A failure before the first commit leaves every table as it was. What was committed before a
        later failure stays, and the next export skips it.
        """
        pending = [target for target in self.targets if target.missing]
        done: dict[int, Exported] = {}
        try:
            written = [
                (target, target.write(batches_of(target.source.stream(target.missing), step))) for target in pending
            ]
        except BaseException:
            for target in pending:
                target.discard()
            raise
        for number, (target, files) in enumerate(written):
            try:
                version = target.commit()
            except BaseException as error:
                for later, _ in written[number + 1 :]:
                    later.discard()
                if number and isinstance(error, CheckpointError):
                    raise StorageError(
                        f"{error}; {number} of {len(written)} tables have their rows, and the next export passes them "
                        "over"
                    ) from error
                raise
            counts = (sum(file.rows for file in files), len(files), sum(file.size_bytes for file in files))
            done[id(target)] = _exported(target, target.missing, *counts, version)
        for target in self.targets:
            if not target.missing:
                target.mend()
        return [done.get(id(target)) or _exported(target, (), 0, 0, 0, None) for target in self.targets]


def _exported(
    target: IcebergTarget | DeltaTarget,
    added: tuple[int, ...],
    rows: int,
    files: int,
    size_bytes: int,
    version: str | None,
) -> Exported:
    source = target.source
    present = tuple(int(ref.checkpoint_id) for ref in source.checkpoints if int(ref.checkpoint_id) not in added)
    state = source.state
    notes = target.columns.notes
    return Exported(
        state.operator, state.name, str(target.place), added, present, rows, files, size_bytes, version, notes
    )


def export_files(
    sources: Sequence[Source],
    to: Place,
    suffix: str,
    write: WriteFile,
    *,
    partition_by: Sequence[str] = (),
    alone: bool = False,
    step: Step = lambda _rows: None,
) -> list[Exported]:
    """Write ``OPERATOR/STATE.SUFFIX`` for each state into a folder that is new or empty.

    With ``partition_by`` a state gets a folder of Parquet files instead: ``to`` itself if it is
    ``alone``. Raises ``InvalidInput`` for a folder that is not empty.
    """
    for source in sources:
        schema = source.stream().schema
        if partition_by:
            check_partitions(schema, partition_by, f"state {str(source)!r}")
    found = []
    with whole_folder(to) as draft:
        for source, names in zip(sources, folder_names(sources), strict=True):
            if partition_by:
                folder = "/".join("" if alone else names)
                files = write_partitioned(draft.at(*names) if not alone else draft, source.stream(), partition_by, step)
                rows, size_bytes = sum(file.rows for file in files), sum(file.size_bytes for file in files)
                number = len(files)
            else:
                folder = f"{'/'.join(names)}{suffix}"
                rows, size_bytes = _write_one(draft, folder, source, write, step)
                number = 1
            ids = tuple(int(ref.checkpoint_id) for ref in source.checkpoints)
            path = f"{to}/{folder}" if folder else str(to)
            state = source.state
            found.append(Exported(state.operator, state.name, path, ids, (), rows, number, size_bytes, None, ()))
    return found


def _write_one(place: Place, path: str, source: Source, write: WriteFile, step: Step) -> tuple[int, int]:
    with place.new_file(path, replace=True) as file:
        stream = source.stream()
        return write(file, stream.schema, batches_of(stream, step)), file.size_bytes


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
