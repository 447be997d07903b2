"""A directory of files as a source of DataFrames: the files in it, or also those added later.

A file must be complete when it appears, and must never change. Files are read once each, in the
order of (modification time, path). If the directory does not grow, the position is the list of
unread files. If it grows, the position has the files at most ``window`` older than the newest one
read, the time before which files are forgotten (``/floor``), and how many are (``/forgotten``). An
unknown file from before the floor came too late and is refused. It is detected because more files
are older than the floor than were read, or because the last listing did not have it. (Right after a
restart, a late file goes unnoticed if as many old files were removed.) A file is also refused if it
is remembered, or was in the last listing, and its size or time has changed, or if that changed
while Spark read it.

The driver itself lists files on a local disk. Other files (s3a, hdfs, abfss, …) are listed by
Spark, with the credentials for reading: a job over the format ``binaryFile`` that opens no file.
"""

from __future__ import annotations

import datetime
import fnmatch
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.graph import brief

from ..connectors.sources.basic import check_at_least
from ..connectors.sources.files import FileStat
from .offsets import Offsets, Position

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.types import StructType


logger = logging.getLogger(__name__)

_FLOOR, _FORGOTTEN, _OVER = "/floor", "/forgotten", "/over"
"""Names in a position that are not files. Paths in a position are relative."""
_NO_FLOOR = -(2**63)
_MS = datetime.timedelta(milliseconds=1)
_EXACT: Mapping[str, str] = {
    # File names are names, not patterns. Without the second setting, Spark 4.3 treats them as
    # patterns again when it looks for columns in folder names, and rereads what they match: rows
    # would be repeated.
    "__globPaths__": "false",
    "recursiveFileLookup": "true",
    # A session that skips unreadable files would lose rows.
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
}


class _Stat(NamedTuple):
    """What identifies a file, besides its path. Sorts in the order of reading."""

    modified_ms: int
    size_bytes: int

    @property
    def known(self) -> FileStat:
        """The same in µs."""
        return FileStat(self.modified_ms * 1000, self.size_bytes)

    def __str__(self) -> str:
        return f"{self.size_bytes}@{self.modified_ms}"


_Files = dict[str, _Stat]


class DirectoryFrames(Offsets):
    """Reads the files of a directory, whole files in each epoch.

    Example::

        DirectoryFrames("s3a://bucket/orders/", "json", schema="id bigint", grows=True)

    ``path``: a directory, as for Spark. ``format`` and ``options``: those of ``spark.read``.
    ``schema``: the columns of the files, as DDL or a ``StructType``; by default Spark infers them
    from the files that exist at the start. ``pattern``: what file names must match (``*.csv``).
    ``recursive``: read folders below, too. Folders ``name=value`` do not become columns: extract
    the value from ``_metadata.file_path`` in the transformation. Files and folders whose names
    begin with "." or "_" are skipped (but not ``_a=1``).

    An epoch reads all files that exist, or at most ``files_per_epoch`` of them and
    ``bytes_per_epoch`` in total, but always at least one. ``grows``: files are added while the job
    runs. ``until``: the name of a file in the directory after which no more come (such as
    ``_SUCCESS``); then the source ends. ``window``: how much older than the newest file read a new
    file may be, by the file system's modification time. The job remembers the files of that period:
    a checkpoint writes the new ones. None: any age, and it remembers all files.

    Raises ``InvalidInput`` for options that contradict each other; when it is read, for a directory
    that does not exist, or has no files and no schema, and for files that changed or came too late;
    and ``StorageError`` if the directory cannot be listed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        format: str = "parquet",
        *,
        schema: str | StructType | None = None,
        options: Mapping[str, Any] | None = None,
        pattern: str = "*",
        recursive: bool = False,
        grows: bool = False,
        until: str | None = None,
        files_per_epoch: int | None = None,
        bytes_per_epoch: int | None = None,
        window: datetime.timedelta | None = datetime.timedelta(days=1),
    ) -> None:
        if until is not None and not grows:
            raise InvalidInput(f"until={until!r} is for a directory that grows. Give grows=True too.")
        for name, value in (("files_per_epoch", files_per_epoch), ("bytes_per_epoch", bytes_per_epoch)):
            if value is not None:
                check_at_least(name, value, 1)
        if window is not None and window < datetime.timedelta():
            raise InvalidInput(f"window is {window}. It must be at least 0, or None for any age.")
        self._path = os.fspath(path)
        self.places = (self._path,)
        self._format = format
        self._columns = schema
        self._options = dict(options or {})
        self._pattern = pattern
        self._recursive = recursive
        self._grows = grows
        self._until = until
        self._files_per_epoch = files_per_epoch
        self._bytes_per_epoch = bytes_per_epoch
        self._window_ms = None if window is None else window // _MS
        self.bounded = not grows or until is not None
        self.remembers = grows
        # What was found in the directory. It is valid for the position returned last.
        self._root: str | None = None
        self._looked: _Files | None = None
        self._waiting: list[str] = []
        self._last: Position | None = None
        self._known: _Files = {}  # The files of the position returned last.
        self._fresh: Position | None = None
        # Shared by the copies that runs use: the next run would not notice what this one has
        # refused.
        self._refused: dict[str, tuple[_Stat, InvalidInput]] = {}

    def __repr__(self) -> str:
        return brief(self, self._path)

    def __str__(self) -> str:
        return f"the directory {self._path}"

    def first(self, spark: SparkSession) -> Position:
        """Return an empty position; if the directory does not grow, one with all files unread."""
        return {} if self._grows else _written(self._look(spark))

    def ended(self, position: Position) -> bool:
        """Return whether no files are left, or all before the file ``until`` have been read."""
        return _OVER in position if self._grows else not position

    def latest(self, spark: SparkSession, position: Position) -> Position:
        """Return the position after the next files. Lists again once all found have been read."""
        if not self._grows:
            left = _read_back(position)
            taken = set(self._taken(sorted(left, key=lambda path: (left[path].modified_ms, path)), left))
            return {path: value for path, value in position.items() if path not in taken}
        if position is not self._last:
            self._looked, self._waiting = None, []
            self._known = _read_back(position)
        self._last = self._next(spark, position, self._known)
        return self._last

    def _next(self, spark: SparkSession, position: Position, known: _Files) -> Position:
        fresh = not self._waiting
        if fresh:
            # The file that marks the end is written last, so check for it first.
            over = self._until is not None and self._is_there(spark, self._until)
            files = self._look(spark)
            self._check(files, known, position)
            floor = _floor_of(position)
            new = [path for path, stat in files.items() if path not in known and stat.modified_ms >= floor]
            self._looked, self._waiting = files, sorted(new, key=lambda path: (files[path].modified_ms, path))
            if not new:
                return {**position, _OVER: 1} if over else position
        assert self._looked is not None
        taken_now = self._taken(self._waiting, self._looked)
        self._waiting = self._waiting[len(taken_now) :]
        stop = self._behind(position, known, {path: self._looked[path] for path in taken_now})
        self._fresh = stop if fresh else None
        return stop

    def _taken(self, paths: Iterable[str], files: _Files) -> list[str]:
        taken: list[str] = []
        size_bytes = 0
        for path in paths:
            size_bytes += files[path].size_bytes
            if taken and (
                (self._files_per_epoch is not None and len(taken) == self._files_per_epoch)
                or (self._bytes_per_epoch is not None and size_bytes > self._bytes_per_epoch)
            ):
                break
            taken.append(path)
        return taken

    def _behind(self, position: Position, known: _Files, taken: _Files) -> Position:
        """Return the position after more files. It has all of them: the range is built from it.

        The floor never passes a waiting file: files are taken in order, so waiting ones are newer.
        """
        floor = _floor_of(position)
        if self._window_ms is not None:
            newest = max(stat.modified_ms for files in (known, taken) for stat in files.values())
            floor = max(floor, newest - self._window_ms)
        kept = {path: stat for path, stat in known.items() if stat.modified_ms >= floor}
        stop: dict[str, int | str] = {**{path: position[path] for path in kept}, **_written(taken)}
        if floor != _NO_FLOOR:
            stop[_FLOOR] = floor
            stop[_FORGOTTEN] = int(position.get(_FORGOTTEN, 0)) + len(known) - len(kept)
        self._known = {**kept, **taken}
        return stop

    def _check(self, files: _Files, known: _Files, position: Position) -> None:
        """Raise ``InvalidInput`` for files that were rewritten or came too late."""
        for path, (refused, why) in self._refused.items():
            if files.get(path) == refused:
                raise why
        for path, stat in known.items():
            if (found := files.get(path, stat)) != stat:
                self._check_same(path, stat, found)
        floor, before = _floor_of(position), self._looked
        old = [path for path, stat in files.items() if stat.modified_ms < floor and path not in known]
        late = [] if before is None else [path for path in old if path not in before]
        forgotten = int(position.get(_FORGOTTEN, 0))
        if late or len(old) > forgotten:
            new = f" ({sorted(late)[0]!r} is new)" if late else ""
            window = datetime.timedelta(milliseconds=self._window_ms or 0)
            error = InvalidInput(
                f"{self} has {len(old)} files from before {_time(floor)}{new}, of which {forgotten} were read: some "
                f"came later than the window of {window} allows. Write them again, which makes them new, and give a "
                "wider window.",
                kind=ErrorKind.LIMIT_EXCEEDED,
            )
            self._refused.update({path: (files[path], error) for path in late})
            raise error
        for path in set(files) - set(known) - set(old):
            # All files of the last listing have been read. So this file was forgotten, and is newer
            # than the floor now.
            if before is not None and path in before:
                try:
                    self._check_same(path, before[path], files[path])
                except InvalidInput as error:
                    self._refused[path] = files[path], error
                    raise

    def _check_same(self, path: str, was: _Stat, found: _Stat | None) -> None:
        was.known.check(f"File {path!r} of {self}", path, None if found is None else found.known)

    def sample(self, spark: SparkSession) -> DataFrame:
        """Return an empty DataFrame with the columns, including hidden ones (``_metadata``)."""
        # It reads no file, since the directory may not exist yet.
        return self._reader(spark).schema(self._schema(spark)).load([])

    def frame(self, spark: SparkSession, start: Position, stop: Position) -> DataFrame:
        """Return the rows of the files in between, checked for changes unless just listed."""
        files = self._between(start, stop)
        if not files:
            return self.sample(spark)
        if self._fresh is not stop:
            self.check(spark, start, stop)
        self._fresh = None
        return self._reader(spark).schema(self._schema(spark)).load(self._addresses(spark, files))

    def check(self, spark: SparkSession, start: Position, stop: Position) -> None:
        """Raise ``InvalidInput`` for a file that is not as it was found."""
        # Spark reads to the length that a file had when it made the plan, and one line more.
        files = self._between(start, stop)
        found = self._stats(spark, files) if files else {}
        for path, stat in files.items():
            self._check_same(path, stat, found.get(path))

    def rows_estimate(self, start: Position, stop: Position) -> int | None:
        return None if self._between(start, stop) else 0

    def _between(self, start: Position, stop: Position) -> _Files:
        more, less = (stop, start) if self._grows else (start, stop)
        return _read_back({path: value for path, value in more.items() if path not in less})

    def _reader(self, spark: SparkSession) -> DataFrameReader:
        return spark.read.format(self._format).options(**{**self._options, **_EXACT})

    def _schema(self, spark: SparkSession) -> StructType:
        """Return the given schema, or the one Spark infers, once, so that all ranges share it."""
        if isinstance(self._columns, str):
            self._columns = spark.createDataFrame([], self._columns).schema
        elif self._columns is None:
            files = self._look(spark)
            if not files:
                raise InvalidInput(f"{self} has no files yet, so its columns are unknown. Give the schema.")
            self._columns = self._reader(spark).load(self._addresses(spark, files)).schema
        return self._columns

    def _addresses(self, spark: SparkSession, paths: Iterable[str]) -> list[str]:
        return [f"{self._address(spark)}/{path}" for path in sorted(paths)]

    def _address(self, spark: SparkSession) -> str:
        """Return the full address of the directory, without a slash at its end."""
        if self._root is None:
            hadoop = spark._jvm.org.apache.hadoop.fs
            path = hadoop.Path(self._path)
            self._root = path.getFileSystem(spark._jsc.hadoopConfiguration()).makeQualified(path).toString().rstrip("/")
        return self._root

    def _local(self, spark: SparkSession) -> str | None:
        address = self._address(spark)
        return address.removeprefix("file:") if urlsplit(address).scheme == "file" else None

    def _look(self, spark: SparkSession) -> _Files:
        """Return every file to read, with its size and time."""
        local = self._local(spark)
        try:
            found = dict(_walk(local, self._recursive)) if local is not None else self._listed(spark)
        except (FileNotFoundError, NotADirectoryError) as error:
            if local is None and self._grows:
                # An object store has no empty directories: the first file creates one.
                logger.warning("%s has nothing yet. Waiting for the first file.", self)
                return {}
            raise InvalidInput(
                f"{self} does not exist, or is no directory. Make it before the job starts.",
                kind=ErrorKind.INVALID_PATH,
                path=self._path,
            ) from error
        except OSError as error:
            raise StorageError(f"{self} cannot be listed: {error}", path=self._path) from error
        before = self._looked or {}
        return {path: stat for path, stat in found.items() if path in before or self._is_output(path)}

    def _is_output(self, path: str) -> bool:
        *folders, name = path.split("/")
        if (folders and not self._recursive) or not fnmatch.fnmatchcase(name, self._pattern) or path == self._until:
            return False
        return not any(_is_hidden(part) for part in (*folders, name)) and not name.endswith("._COPYING_")

    def _stats(self, spark: SparkSession, files: Iterable[str]) -> _Files:
        local = self._local(spark)
        if local is not None:
            return {path: stat for path in files if (stat := _stat(f"{local}/{path}")) is not None}
        # One listing costs less than a request per file, and a missing file would fail a read of
        # these paths.
        wanted = set(files)
        return {path: stat for path, stat in self._look(spark).items() if path in wanted}

    def _is_there(self, spark: SparkSession, name: str) -> bool:
        local = self._local(spark)
        if local is not None:
            return os.path.exists(f"{local}/{name}")  # noqa: PTH110
        path = spark._jvm.org.apache.hadoop.fs.Path(self._address(spark), name)
        return bool(path.getFileSystem(spark._jsc.hadoopConfiguration()).exists(path))

    def _listed(self, spark: SparkSession) -> _Files:
        from pyspark.errors import AnalysisException

        reader = spark.read.format("binaryFile").options(**_EXACT)
        try:
            rows = reader.load(self._address(spark)).select("path", "modificationTime", "length").toArrow()
        except AnalysisException as error:
            if error.getCondition() != "PATH_NOT_FOUND":
                raise
            raise FileNotFoundError(self._path) from error
        root = self._address(spark) + "/"
        modified_ms = pc.divide(rows["modificationTime"].cast(pa.int64()), 1000).to_pylist()
        stats = zip(rows["path"].to_pylist(), modified_ms, rows["length"].to_pylist(), strict=True)
        return {path.removeprefix(root): _Stat(modified, size) for path, modified, size in stats}


def _walk(root: str, recursive: bool, below: str = "") -> Iterator[tuple[str, _Stat]]:
    with os.scandir(f"{root}/{below}") as entries:
        for entry in entries:
            if entry.is_dir():
                if recursive and not _is_hidden(entry.name):
                    yield from _walk(root, recursive, f"{below}{entry.name}/")
            elif (stat := _stat(entry.path)) is not None:
                yield below + entry.name, stat


def _stat(path: str) -> _Stat | None:
    try:
        found = os.stat(path)  # noqa: PTH116
    except FileNotFoundError:
        return None
    return _Stat(found.st_mtime_ns // 1_000_000, found.st_size)


def _is_hidden(name: str) -> bool:
    """Return whether Spark treats a name as hidden."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _written(files: _Files) -> dict[str, int | str]:
    return {path: str(stat) for path, stat in files.items()}


def _floor_of(position: Position) -> int:
    """Return the time, in ms, before which all files are forgotten."""
    return int(position.get(_FLOOR, _NO_FLOOR))


def _read_back(position: Position) -> _Files:
    found = {}
    for path, value in position.items():
        if ".." in path.split("/"):
            raise InvalidInput(
                f"The position of the source has the file {path!r}, which does not lie in its directory, so the source "
                "has not written it. Something else has written the checkpoint: do not go on from it.",
                kind=ErrorKind.INVALID_PATH,
                path=path,
            )
        if not path.startswith("/"):
            size_bytes, modified_ms = str(value).split("@")
            found[path] = _Stat(int(modified_ms), int(size_bytes))
    return found


def _time(modified_ms: int) -> str:
    return datetime.datetime.fromtimestamp(modified_ms / 1000, datetime.UTC).isoformat(" ", "milliseconds")
