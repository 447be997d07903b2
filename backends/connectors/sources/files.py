"""Sources of rows in files, CSV or Parquet: which files, in what order, and reading from any row.

Theory of operation. A split is a file, or a part of a large one. Its payload is JSON: the path, the
file's size and modification time when the split was made, and what the kind of file adds. Its
position counts rows. A split comes out of a checkpoint, so only files in the source's own folders
are opened. Files must not change while a job lives: a position in another file means nothing. A
reader looks at size and time again after each read, before it passes rows on. An enumerator of a
directory that grows looks at those of all files whenever it lists.

Files are read in the order of their names, or of the list given. Names that begin with "." or "_"
are passed over: such files are still being written.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import io
import json
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.graph import brief
from stateformat.segments import keeps_values, plain_type
from stateformat.states import Columns, as_schema
from stateformat.words import precise_moment

from ...dataflow.api import Chunk, NoSplit, ReaderContext, Source, Split, SplitEnumerator, StartingPoint
from ...dataflow.casting import check_columns, plain_column, plain_schema
from ...dataflow.operators.row_steps import empty_batch
from .basic import BATCH_ROWS, ListEnumerator, check_at_least, check_position, not_null

SEEN_FILES = 4096
"""How many files that were read a listing of a directory that grows looks at again: some 15 ms."""
Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"


class FileStat(NamedTuple):
    """What identifies a file, besides its path."""

    modified_us: int | None
    """None: not known, in checkpoints of earlier releases."""
    size_bytes: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileStat:
        """Of an answer of the operating system."""
        return cls(found.st_mtime_ns // 1000, found.st_size)

    def __str__(self) -> str:
        if self.modified_us is None:
            return f"{self.size_bytes} bytes"
        return f"{self.size_bytes} bytes of {precise_moment(self.modified_us)}"

    def check(self, what: str, path: str, found: FileStat | None) -> None:
        """Raise ``InvalidInput`` unless ``what``, once this file, still is. None: it is gone."""
        same_time = found is not None and self.modified_us in (None, found.modified_us)
        if found is None or found.size_bytes != self.size_bytes or not same_time:
            raise InvalidInput(
                f"{what} had {self} when the job found it, and {'is gone' if found is None else f'has {found}'} now. "
                "Files must be whole when they appear (write under a hidden name, then rename) and stay as they are. "
                "Put back what was there, with its time (cp -p, touch -d), and new rows into a file of another name; "
                "or start the job afresh",
                kind=ErrorKind.OBJECT_SIZE_DIFFERS,
                path=path,
            )


class FileSource(Source):
    """Base of sources that read files of one format: how to find, split and read them."""

    kind: str
    """The format, as messages name it."""
    suffix: str
    """How the names of files in a directory end."""
    _schema: pa.Schema

    def __init__(self, paths: Paths, *, batch_rows: int, grows: bool, until: str | None) -> None:
        check_at_least("batch_rows", batch_rows, 1)
        self._batch_rows = batch_rows
        self._directory: str | None = None
        if until is not None and not grows:
            raise InvalidInput(f"until={until!r} is for a directory that grows. Give grows=True too")
        if grows:
            if not isinstance(paths, (str, os.PathLike)) or not Path(paths).is_dir():
                raise InvalidInput(f"{paths!r} is to grow and is no directory. Make it before the job starts")
            self._directory = str(Path(paths).absolute())
        self._paths = paths
        self._until = until
        self._files = find_files(paths, self.suffix, may_be_none=grows)
        folders = {os.path.dirname(file) for file in self._files}  # noqa: PTH120 - names, not paths, are what is wanted
        self._folders = frozenset(folders | ({self._directory} if self._directory else set()))
        given = [paths] if isinstance(paths, (str, os.PathLike)) else paths
        self.places = tuple(str(Path(path).absolute()) for path in given if Path(path).is_dir())
        self.bounded = not grows or until is not None

    def __repr__(self) -> str:
        return brief(self, str(self._paths))

    def _fields(self, schema: Columns | None, columns: Sequence[str] | None) -> list[pa.Field]:
        """The columns to read, with plain types: of ``schema`` or else of the first file.

        Times in ns stay so if ``schema`` says it.
        """
        if schema is not None:
            found = as_schema(schema).remove_metadata()
        elif self._files:
            found = self._schema_of(self._files[0])
        else:
            raise InvalidInput(f"{self._paths} has no files yet, so the columns are unknown. Give the schema")
        missing = [name for name in columns or () if name not in found.names]
        if missing:
            raise InvalidInput(
                f"{self._files[0] if self._files else self._paths} has no columns {missing}. "
                f"It has {', '.join(found.names)}",
                kind=ErrorKind.SCHEMA_MISMATCH,
            )
        wanted = found.names if columns is None else list(columns)
        self._check_names(str(self._paths) if schema is not None else self._files[0], found.names, wanted)
        fields = [found.field(name) for name in wanted]
        self._of_first = {} if schema is not None else {field.name: field.type for field in fields}
        plain = plain_schema(pa.schema(fields), None if schema is None else pa.schema(fields))
        check_columns(f"the schema of {self._paths}", plain)
        return [*plain]

    def _check_first(self) -> None:
        """Raise ``InvalidInput`` now if the first file does not fit. It may be read and gone."""
        if self._files and os.path.isfile(self._files[0]):  # noqa: PTH113
            self._check_file(self._files[0])

    def _check_names(self, path: str, names: Sequence[str], wanted: Iterable[str]) -> None:
        """Raise ``InvalidInput`` unless a file has each of the columns once."""
        for name in wanted:
            if (count := names.count(name)) != 1:
                raise InvalidInput(
                    f"{path} has {count or 'no'} column{'s' * (count > 1)} {name!r}. It has {', '.join(names)}. "
                    + (
                        "Rename all but one of them, or name the columns to read"
                        if count
                        else "All files of a source have the same columns: read this one as a source of its own"
                    ),
                    kind=ErrorKind.SCHEMA_MISMATCH,
                    path=path,
                )

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def enumerator(self) -> SplitEnumerator:
        if self._directory is not None:
            return DirectoryEnumerator(self._directory, self.suffix, self._splits_of, until=self._until)
        return ListEnumerator(lambda: (split for path in self._files for split in self._splits_of(path)))

    def _splits_of(self, path: str) -> Iterator[Split]:
        stat = _stat_of(path)
        for part in self._cut(path, stat.size_bytes):
            payload = {"path": path, **stat._asdict(), **part}
            yield Split("#".join([path, *(str(value) for value in part.values())]), json.dumps(payload).encode())

    def behind(self, position: Paths) -> StartingPoint:
        """Begin after these files: paths, directories or patterns, as for the source itself.

        Raises ``InvalidInput`` for a file that the source would never read.
        """
        covered = find_files(position, self.suffix)
        start = files_behind(covered)
        for path in covered:
            self._check_covered(path)
        if self._directory is not None:
            return start
        read = {*covered}
        left = [path for path in self._files if path not in read]
        splits = (split for path in left for split in self._splits_of(path))
        return start._replace(enumerator=ListEnumerator.keeping(dict(enumerate(splits))))

    def _check_covered(self, path: str) -> None:
        """Raise ``InvalidInput`` for a file that the source would never read."""
        known = os.path.dirname(path) == self._directory if self._directory is not None else path in self._files  # noqa: PTH120
        if not known:
            places = self._directory or f"{len(self._files)} files of {', '.join(sorted(self._folders))}"
            raise InvalidInput(
                f"a source is to begin behind {path}, which it does not read: it reads {places}. Name the files as the "
                "source finds them",
                kind=ErrorKind.INVALID_PATH,
                path=path,
            )

    def read(self, split: Split, context: ReaderContext) -> Iterator[Chunk]:  # noqa: ARG002 - no clock is needed
        """Read the rest of a file or a part of it, in batches of at most ``batch_rows``."""
        payload = json.loads(split.payload)
        path, was = payload["path"], FileStat(payload.get("modified_us"), payload["size_bytes"])
        self._check_folder(path)
        was.check(path, path, _stat_of(path))
        position = split.position
        with self._reported(path, f" from row {position} on"):
            for batch in self._batches(split, payload):
                # Rows that were read before are those of the file that was found.
                was.check(path, path, _stat_of(path))
                for first in range(0, batch.num_rows, self._batch_rows):
                    part = batch.slice(first, self._batch_rows)
                    position += part.num_rows
                    yield Chunk(part, position)
            was.check(path, path, _stat_of(path))

    @contextlib.contextmanager
    def _reported(self, path: str, where: str = "") -> Iterator[None]:
        """Turn errors of reading a file into ``InvalidInput`` or ``StorageError``."""
        try:
            yield
        except (pa.ArrowException, KeyError, UnicodeDecodeError) as error:
            raise InvalidInput(
                f"{path} cannot be read as {self.kind}{where}: {str(error).rstrip('.')}. Mend the file, or give the "
                "schema that fits",
                path=path,
            ) from error
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{path} cannot be read: {error}", path=path) from error

    def _check_folder(self, path: str) -> None:
        folder, name = os.path.split(path)
        resolved = {os.path.realpath(each) for each in self._folders}
        if name in ("", ".", "..") or (folder not in self._folders and os.path.realpath(folder) not in resolved):
            raise InvalidInput(
                f"a split of the source is of {path!r}, which lies in none of the folders that it reads "
                f"({', '.join(sorted(self._folders))}). If the source was given another path since, give it the old "
                "one too until its files are read. Otherwise the checkpoint was tampered with: do not go on from it",
                kind=ErrorKind.INVALID_PATH,
                path=path,
            )

    def _cast(self, batch: pa.RecordBatch, path: str) -> pa.RecordBatch:
        """A batch in the source's schema. ``InvalidInput`` for a file of other columns or types."""
        columns = []
        self._check_names(path, batch.schema.names, self.schema.names)
        for field in self.schema:
            column = batch.column(field.name)
            what = f"column {field.name!r} of {path}"
            if plain_type(column.type) != field.type and not keeps_values(column.type, field.type):
                raise InvalidInput(
                    f"{what} is {column.type} and should be {field.type}, as {self._says}. "
                    f"{self._advice(field.name, plain_type(column.type))}",
                    kind=ErrorKind.SCHEMA_MISMATCH,
                    path=path,
                )
            columns.append(plain_column(what, column, field.type, self._advice(field.name, column.type)))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    @property
    def _says(self) -> str:
        return f"{self._files[0]} says" if self._of_first else "the schema of the source says"

    def _advice(self, name: str, found: pa.DataType) -> str:
        if not self._of_first:
            return f"Declare {name!r} as {found}, or read this file as a source of its own and cast in a map"
        if keeps_values(self._of_first[name], found):
            return f"Give the source a schema in which {name!r} is {found}"
        return "Read this file as a source of its own, and cast in a map"

    @abstractmethod
    def _check_file(self, path: str) -> None:
        """Raise ``InvalidInput`` for a file that has not the columns of the source."""

    @abstractmethod
    def _schema_of(self, path: str) -> pa.Schema:
        """The columns of a file."""

    @abstractmethod
    def _cut(self, path: str, size_bytes: int) -> Iterable[dict[str, int]]:
        """The parts of a file; an empty one is the whole file."""

    @abstractmethod
    def _batches(self, split: Split, payload: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """The rows of a part from ``split.position`` on, in the schema of the source."""


class DirectoryEnumerator(SplitEnumerator):
    """Assigns the files of a directory, and those that appear later, each once.

    A file must be complete when it appears (write it under a hidden name, then rename it) and must
    not change. It may be removed once it has been read. Listings compare the size and the
    modification time of the files assigned before: one that was appended to, rewritten, or removed
    and made anew is refused with ``InvalidInput``. Of more than ``SEEN_FILES``, each looks at as
    many in turn, and the first and the last listing at all. Files found in one listing are assigned
    in the order of their names. ``until``: once a file with this name exists, no more come, and the
    source ends.

    Its log has every ``file`` (utf8) that was assigned, permanently, so none is assigned twice,
    with ``size_bytes`` and ``modified_us`` (int64, since 1970). These are null in logs of earlier
    releases, and in a second row once the file has been seen. It also keeps ``file``, ``id`` (utf8)
    and ``payload`` (binary) of the remaining splits of a file that was split. A file is split when
    its turn comes; the first listing after a restart finds the others again. (Null ``id`` and
    ``payload`` mean an assigned file: :func:`files_behind` writes these, and so did earlier
    releases, which had no log.)
    """

    columns = pa.schema(
        [pa.field("file", pa.string(), nullable=False), pa.field("id", pa.string()), pa.field("payload", pa.binary())]
    )
    log_columns = pa.schema(
        [*not_null(file=pa.string()), pa.field("size_bytes", pa.int64()), pa.field("modified_us", pa.int64())]
    )

    def __init__(
        self, directory: str, suffix: str, splits_of: Callable[[str], Iterable[Split]], *, until: str | None = None
    ) -> None:
        self._directory = directory
        self._suffix = suffix
        self._splits_of = splits_of
        self._until = until
        self._dealt: dict[str, FileStat | None] = {}
        """By name in the directory. Of files of another, where the source was before, only the log
        knows."""
        self._new: dict[str, FileStat | None] = {}
        """By path, what the log has yet to gain."""
        self._unseen: list[str] | None = None
        """Names of assigned files that listings have yet to look at. None: there was no listing."""
        self._found: deque[str] = deque()
        """Names that wait."""
        self._left: deque[tuple[str, Split]] = deque()

    def __repr__(self) -> str:
        return brief(self, self._directory)

    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:  # noqa: ARG002 - any reader gets the next
        """Return the next split. Lists the directory when none is left."""
        looked = over = False
        while not self._left:
            if self._found:
                path = self._path(self._found[0])
                stat = _stat_of(path)
                self._left.extend((path, split) for split in self._splits_of(path))
                self._note(self._found.popleft(), stat)
            elif looked:
                return NoSplit.NEVER if over else NoSplit.LATER
            else:
                # Looked for first: what comes before the end in the directory must be seen after
                # it here.
                over = self._until is not None and (Path(self._directory) / self._until).exists()
                self._found.extend(self._look(over))
                looked = True
        return self._left.popleft()[1]

    def _look(self, over: bool) -> list[str]:
        """List the new files. ``InvalidInput`` if one that was assigned has changed.

        A listing looks at some of these in turn, the first and the last one at all.
        """
        there = {*_names_in(self._directory, self._suffix)}
        is_whole = over or self._unseen is None
        if is_whole or not self._unseen:
            self._unseen = [*self._dealt]
        seen = self._unseen if is_whole else self._unseen[-SEEN_FILES:]
        for name in seen:
            path = self._path(name)
            with contextlib.suppress(FileNotFoundError):
                if name in there:
                    was, found = self._dealt[name], FileStat.of(os.stat(path))  # noqa: PTH116
                    if was is None:
                        self._note(name, found)
                    elif was != found:
                        was.check(path, path, found)
        self._unseen = self._unseen[: -len(seen)]
        return sorted(there - self._dealt.keys())

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)  # noqa: PTH118 - a name, not a path, is what is kept

    def _note(self, name: str, stat: FileStat) -> None:
        self._dealt[name] = self._new[self._path(name)] = stat

    def snapshot(self) -> pa.Table:
        columns = {
            "file": [file for file, _ in self._left],
            "id": [split.id for _, split in self._left],
            "payload": [split.payload for _, split in self._left],
        }
        return pa.table(columns, schema=self.columns)

    def restore(self, rows: pa.Table) -> None:
        is_left = pc.is_valid(rows["id"])
        left = rows.filter(is_left)
        splits = map(Split, left["id"].to_pylist(), left["payload"].to_pylist())
        self._left = deque(zip(left["file"].to_pylist(), splits, strict=True))
        dealt = rows["file"].filter(pc.invert(is_left)).to_pylist()
        self._new |= dict.fromkeys(dealt)
        self._own(dealt, [None] * len(dealt))

    def logged(self) -> pa.Table:
        new, self._new = self._new, {}
        columns = {
            "file": [*new],
            "size_bytes": [stat and stat.size_bytes for stat in new.values()],
            "modified_us": [stat and stat.modified_us for stat in new.values()],
        }
        return pa.table(columns, schema=self.log_columns)

    def restore_log(self, rows: pa.Table) -> None:
        paths, sizes, times = (rows[name].to_pylist() for name in self.log_columns.names)
        both = zip(times, sizes, strict=True)
        self._own(paths, [None if size is None else FileStat(time, size) for time, size in both])

    def _own(self, paths: Iterable[str], stats: Iterable[FileStat | None]) -> None:
        """Know those that lie in its directory."""
        for path, stat in zip(paths, stats, strict=True):
            folder, name = os.path.split(path)
            if folder == self._directory and (stat is not None or name not in self._dealt):
                self._dealt[name] = stat


def files_behind(paths: Sequence[str]) -> StartingPoint:
    """A source over a directory that grows, which has seen these files, given as it finds them."""
    seen = {"file": pa.array(list(dict.fromkeys(paths)), pa.string())}
    count = len(seen["file"])
    columns = {**seen, "id": pa.nulls(count, pa.string()), "payload": pa.nulls(count, pa.binary())}
    return StartingPoint(pa.table(columns, schema=DirectoryEnumerator.columns), (), f"behind {count} files")


def _names_in(directory: str, suffix: str) -> list[str]:
    """The names of a directory that are files of a source, in any order; none if it is gone."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(directory)  # noqa: PTH208
        return [name for name in names if name.endswith(suffix) and name[0] not in "._"]
    return []


def find_files(paths: Paths, suffix: str, *, may_be_none: bool = False) -> list[str]:
    """Absolute paths of a file, the files of a directory or pattern (``*?[``), or a list of these.

    Files of a directory are those directly in it whose names end with ``suffix`` and begin with
    neither "." nor "_". A pattern passes folders over, unless they are named like files. Sorted for
    a directory or a pattern; each once. Raises ``InvalidInput`` where there is no file.
    """
    found: dict[str, None] = {}
    for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        text = str(Path(path).expanduser().absolute())
        if os.path.isdir(text):  # noqa: PTH112 - names, not paths, are what is wanted
            files = [os.path.join(text, name) for name in sorted(_names_in(text, suffix))]  # noqa: PTH118
        elif any(sign in text for sign in "*?[") and not os.path.exists(text):  # noqa: PTH110
            files = sorted(name for name in glob.glob(text, recursive=True) if _is_wanted(name, suffix))  # noqa: PTH207
        else:
            files = [text]
        if not files and not may_be_none:
            raise InvalidInput(
                f"{path} has no file that ends with {suffix!r}. Name files, or a directory that has some",
                kind=ErrorKind.INVALID_PATH,
            )
        found |= dict.fromkeys(files)
    return list(found)


def _is_wanted(path: str, suffix: str) -> bool:
    """Whether a match of a pattern is read. A folder named like a file is, and then fails."""
    if not (os.path.isfile(path) or path.endswith(suffix)):  # noqa: PTH113
        return False
    return os.path.basename(path)[0] not in "._"  # noqa: PTH119


def _stat_of(path: str) -> FileStat:
    try:
        return FileStat.of(os.stat(path))  # noqa: PTH116
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read: {error.strerror}. A job needs its files as long as it reads", path=path
        ) from error


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


SPLIT_BYTES = 256 * 1024 * 1024


class ParquetSource(FileSource):
    """Reads Parquet files, one after another.

    Example::

        flights = flow.source(ParquetSource("flights/"), uid="flights", event_time="departed_at")
        planes = flow.source(ParquetSource("planes-*.parquet", columns=["tailnum"]), uid="planes")

    ``paths``: a file, a directory, a pattern, or a list of these. Files of a directory (only
    ``*.parquet``) or a pattern are sorted; names that begin with "." or "_" are skipped.
    ``columns``: those to read, in this order; all by default. Types are those of ``schema``, or of
    the first file, made *plain*: without dictionaries, views and large offsets, times in µs, and
    columns of nulls alone as text. All columns are nullable. Other types of a file are cast if that
    changes no value: nulls to anything, narrower numbers to wider ones, an instant to another zone,
    ns to µs. Anything else is refused with file, column and types when its turn comes, in the first
    file now. Times finer than µs need a ``schema`` with ``timestamp[ns]``, which no key, state or
    event time can hold. A split is a file, or some row groups of one larger than ``split_bytes``; a
    position counts rows.

    ``grows``: ``paths`` is a directory to which files are added while the job runs, each written
    under a hidden name and renamed. ``until``: once a file with this name exists, no more come.

    Files must not change. A file whose size or modification time is not as it was found is refused
    when it is read, and in a directory that grows also when it was read before.

    Raises ``InvalidInput`` for no files, and for columns that they do not have.
    """

    kind = "Parquet"
    suffix = ".parquet"

    def __init__(
        self,
        paths: Paths,
        *,
        columns: Sequence[str] | None = None,
        schema: Columns | None = None,
        batch_rows: int = BATCH_ROWS,
        split_bytes: int = SPLIT_BYTES,
        grows: bool = False,
        until: str | None = None,
    ) -> None:
        super().__init__(paths, batch_rows=batch_rows, grows=grows, until=until)
        check_at_least("split_bytes", split_bytes, 1)
        self._split_bytes = split_bytes
        self._schema = pa.schema([pa.field(field.name, field.type) for field in self._fields(schema, columns)])
        self._check_first()

    def _schema_of(self, path: str) -> pa.Schema:
        with self._opened(path) as file:
            return file.schema_arrow

    def _check_file(self, path: str) -> None:
        self._cast(empty_batch(self._schema_of(path)), path)

    def _cut(self, path: str, size_bytes: int) -> Iterator[dict[str, int]]:
        if size_bytes <= self._split_bytes:
            yield {}
            return
        with self._opened(path) as file:
            metadata = file.metadata
            first, gathered = 0, 0
            for group in range(metadata.num_row_groups):
                row_group = metadata.row_group(group)
                gathered += sum(row_group.column(c).total_compressed_size for c in range(row_group.num_columns))
                if gathered >= self._split_bytes or group == metadata.num_row_groups - 1:
                    yield {"first_row_group": first, "end_row_group": group + 1}
                    first, gathered = group + 1, 0

    def _batches(self, split: Split, payload: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        path = payload["path"]
        with self._opened(path) as file:
            metadata = file.metadata
            # Refuses a file with other columns even if it has no rows.
            self._cast(empty_batch(file.schema_arrow), path)
            groups = range(payload.get("first_row_group", 0), payload.get("end_row_group", metadata.num_row_groups))
            rows = [metadata.row_group(group).num_rows for group in groups]
            check_position(path, split, sum(rows))
            # Whole row groups are skipped unread.
            skip, at = split.position, 0
            while at < len(rows) and skip >= rows[at]:
                skip, at = skip - rows[at], at + 1
            if at == len(rows):
                return
            names = self._schema.names
            for batch in file.iter_batches(self._batch_rows, row_groups=list(groups[at:]), columns=names):
                if skip < batch.num_rows:
                    yield self._cast(batch.slice(skip), path)
                skip = max(0, skip - batch.num_rows)

    def _opened(self, path: str) -> pq.ParquetFile:
        with self._reported(path):
            # Spark writes INT96 by default, which in nanoseconds would hold 1677 to 2262 alone.
            return pq.ParquetFile(path, coerce_int96_timestamp_unit="us")
