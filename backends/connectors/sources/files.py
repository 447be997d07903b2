"""What sources over files have in common: which files, in what order, dealt as splits, read again from any row.

Theory of operation. A split is a file, or a part of a large one. Its payload is JSON: the path, the size that the file had when
the split was made, and what the kind of file adds. Its position counts rows. A split that comes out of a checkpoint is data: only
files in the folders that the source reads are opened. Files never change while a job lives: that the size
still is the same is checked whenever a reader opens one, because a position in a file that was replaced means nothing.

Files are read in the order of their names, or of the list given. Names that begin with "." or "_" are nobody's output yet.
Two enumerators: of files that are there when the job begins (a list), and of a directory that grows (:class:`DirectoryEnumerator`).
"""

from __future__ import annotations

import glob
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput, StorageError

from ...dataflow.api import Chunk, NoSplit, ReaderContext, Source, Split, SplitEnumerator
from .enumerators import ListEnumerator, check_at_least

Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"


class FileSource(Source):
    """A source over files of one kind. A kind says what columns a file has, how it is cut, and how it is read."""

    suffix: str
    """What the names of files in a directory end with."""

    def __init__(self, paths: Paths, *, batch_rows: int, grows: bool, until: str | None) -> None:
        check_at_least("batch_rows", batch_rows, 1)
        self._batch_rows = batch_rows
        self._directory: str | None = None
        if until is not None and not grows:
            raise InvalidInput(f"until={until!r} is for a directory that grows; give grows=True too")
        if grows:
            if not isinstance(paths, (str, os.PathLike)) or not Path(paths).is_dir():
                raise InvalidInput(f"{paths!r} is to grow and is no directory; make it before the job starts")
            self._directory = str(Path(paths).absolute())
        self._until = until
        self._files = find_files(paths, self.suffix, may_be_none=grows)
        folders = {os.path.dirname(file) for file in self._files}  # noqa: PTH120 - names, not paths, are what is wanted
        self._folders = frozenset(folders | ({self._directory} if self._directory else set()))
        self.bounded = not grows or until is not None

    def enumerator(self) -> SplitEnumerator:
        """Deals the splits of the files in order."""
        if self._directory is not None:
            return DirectoryEnumerator(self._directory, self.suffix, self._splits_of, until=self._until)
        return ListEnumerator(lambda: (split for path in self._files for split in self._splits_of(path)))

    def _splits_of(self, path: str) -> Iterator[Split]:
        size_bytes = _size_of(path)
        for part in self._cut(path, size_bytes):
            payload = {"path": path, "size_bytes": size_bytes, **part}
            yield Split("#".join([path, *(str(value) for value in part.values())]), json.dumps(payload).encode())

    def read(self, split: Split, context: ReaderContext) -> Iterator[Chunk]:  # noqa: ARG002 - no clock is needed
        """The rest of a file or of its part, in batches of at most ``batch_rows``."""
        payload = json.loads(split.payload)
        path, size_bytes = payload["path"], payload["size_bytes"]
        self._check_place(path)
        found = _size_of(path)
        if found != size_bytes:
            raise InvalidInput(
                f"{path} has {found} bytes and had {size_bytes} when the job found it; the rows that were read of it mean "
                "nothing in another file. Put back what was there, or start the job afresh",
                kind=ErrorKind.OBJECT_SIZE_DIFFERS,
                path=path,
            )
        try:
            position = split.position
            for batch in self._batches(split, payload):
                for first in range(0, batch.num_rows, self._batch_rows):
                    part = batch.slice(first, self._batch_rows)
                    position += part.num_rows
                    yield Chunk(part, position)
        except (pa.ArrowException, KeyError, UnicodeDecodeError) as error:
            raise InvalidInput(
                f"{path} cannot be read from row {split.position} on: {error}; mend the file, or give the schema that fits",
                path=path,
            ) from error
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{path} cannot be read: {error}", path=path) from error

    def _check_place(self, path: str) -> None:
        """``InvalidInput`` for a file in none of the folders that the source reads: a split comes out of a checkpoint."""
        folder, name = os.path.split(path)
        resolved = {os.path.realpath(each) for each in self._folders}
        if name in ("", ".", "..") or (folder not in self._folders and os.path.realpath(folder) not in resolved):
            raise InvalidInput(
                f"a split of the source is of {path!r}, which lies in none of the folders that it reads "
                f"({', '.join(sorted(self._folders))}). If the source was given another path since, give it the old one too "
                "until its files are read; otherwise something else has written the checkpoint: do not go on from it",
                kind=ErrorKind.INVALID_PATH,
                path=path,
            )

    def _conformed(self, batch: pa.RecordBatch, path: str) -> pa.RecordBatch:
        """A batch in the schema of the source; ``InvalidInput`` where a file has other columns or types."""
        columns = []
        for field in self.schema:
            index = batch.schema.get_field_index(field.name)
            if index < 0:
                raise InvalidInput(
                    f"{path} has no column {field.name!r}, or two; it has {', '.join(batch.schema.names)}. The files of a "
                    "source have the same columns: read it as a source of its own",
                    kind=ErrorKind.SCHEMA_MISMATCH,
                    path=path,
                )
            column = batch.column(index)
            if plain_type(column.type) != field.type:
                raise InvalidInput(
                    f"column {field.name!r} of {path} is {column.type} and {field.type} in the source; read it as a source of "
                    "its own, or give the schema",
                    kind=ErrorKind.SCHEMA_MISMATCH,
                    path=path,
                )
            columns.append(column if column.type == field.type else column.cast(field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    @abstractmethod
    def _cut(self, path: str, size_bytes: int) -> Iterable[dict[str, int]]:
        """The parts of a file; one that is empty: the whole of it."""

    @abstractmethod
    def _batches(self, split: Split, payload: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """The rows of a part from ``split.position`` on, in the schema of the source."""


class DirectoryEnumerator(SplitEnumerator):
    """Deals the files of a directory, in the order of their names, and those that appear later, each once.

    A file is complete when it appears: whoever writes it gives it a hidden name and then renames it. Among the files found
    at one look the order is that of names; a later look finds later files. ``until``: when a file of this name is there,
    no more come, and the source ends. Keeps every ``file`` (utf8) that it has seen, for ever, so that none is dealt twice,
    with ``id`` (utf8) and ``payload`` (binary) of the splits that are left, both null where a file was dealt.
    """

    columns = pa.schema(
        [pa.field("file", pa.string(), nullable=False), pa.field("id", pa.string()), pa.field("payload", pa.binary())]
    )

    def __init__(
        self, directory: str, suffix: str, splits_of: Callable[[str], Iterable[Split]], *, until: str | None = None
    ) -> None:
        self._directory = directory
        self._suffix = suffix
        self._splits_of = splits_of
        self._until = until
        self._seen: dict[str, None] = {}
        self._left: list[tuple[str, Split]] = []

    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:  # noqa: ARG002 - whoever asks gets the next
        """The next one; the directory is looked at when none is left."""
        if not self._left:
            # What is there when the end is told of was there before: so the end is looked for first.
            over = self._until is not None and (Path(self._directory) / self._until).exists()
            for file in find_files(self._directory, self._suffix, may_be_none=True):
                if file not in self._seen:
                    self._left += [(file, split) for split in self._splits_of(file)]
                    self._seen[file] = None
            if not self._left:
                return NoSplit.NEVER if over else NoSplit.LATER
        return self._left.pop(0)[1]

    def snapshot(self) -> pa.Table:
        """All files seen, and the splits that are left."""
        left = [(file, split.id, split.payload) for file, split in self._left]
        rows = [*((file, None, None) for file in self._seen), *left]
        columns = zip(*rows, strict=True) if rows else ([], [], [])
        return pa.table(
            [pa.array(list(values), field.type) for values, field in zip(columns, self.columns, strict=True)],
            schema=self.columns,
        )

    def restore(self, rows: pa.Table) -> None:
        """Take back what was seen and what was left."""
        self._seen, self._left = {}, []
        for row in rows.select(self.columns.names).to_pylist():
            if row["id"] is None:
                self._seen[row["file"]] = None
            else:
                self._left.append((row["file"], Split(row["id"], row["payload"])))


def find_files(paths: Paths, suffix: str, *, may_be_none: bool = False) -> list[str]:
    """Absolute paths of files: one file, the files of a directory, of a pattern (``*?[``), or a list of any of these.

    Files of a directory are those directly in it whose names end with ``suffix`` and begin with neither "." nor "_". Folders
    that a pattern meets are passed over, unless they are named like files. Sorted where a directory or a pattern is given; each once. Raises ``InvalidInput`` where there is none.
    """
    found: dict[str, None] = {}
    for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        text = str(Path(path).expanduser().absolute())
        if os.path.isdir(text):  # noqa: PTH112 - names, not paths, are what is wanted
            names = sorted(name for name in os.listdir(text) if name.endswith(suffix) and name[0] not in "._")  # noqa: PTH208
            files = [os.path.join(text, name) for name in names]  # noqa: PTH118
        elif any(sign in text for sign in "*?[") and not os.path.exists(text):  # noqa: PTH110
            files = sorted(name for name in glob.glob(text, recursive=True) if _is_output(name, suffix))  # noqa: PTH207
        else:
            files = [text]
        if not files and not may_be_none:
            raise InvalidInput(
                f"{path} has no file that ends with {suffix!r}; name files, or a directory that has some",
                kind=ErrorKind.INVALID_PATH,
            )
        found |= dict.fromkeys(files)
    return list(found)


def _is_output(path: str, suffix: str) -> bool:
    """Whether what a pattern has met is to be read. A folder that looks like data is: then reading it says what is wrong."""
    if not (os.path.isfile(path) or path.endswith(suffix)):  # noqa: PTH113
        return False
    return os.path.basename(path)[0] not in "._"  # noqa: PTH119


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that states hold for what files have: no dictionaries, no large strings, seconds as microseconds."""
    types = pa.types
    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if types.is_large_string(kind):
        return pa.string()
    if types.is_large_binary(kind):
        return pa.binary()
    if types.is_timestamp(kind) and kind.unit in ("s", "ms"):
        return pa.timestamp("us", kind.tz)
    return kind


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read: {error.strerror}; a job needs its files as long as it reads", path=path
        ) from error


__all__ = ["DirectoryEnumerator", "FileSource", "Paths", "find_files", "plain_type"]
