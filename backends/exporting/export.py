"""An export as a whole: planned, written, and then made visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from stateformat.errors import CheckpointError, StorageError

from .columns import Format, Note
from .delta import DeltaTarget, check_no_table
from .iceberg import IcebergCatalog, IcebergTarget
from .parquet import check_partitions, write_partitioned
from .place import Place, whole_folder
from .source import Source, Step, batches_of, folder_names

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
        to.storage  # noqa: B018 - an address that is none is refused before anything else
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
