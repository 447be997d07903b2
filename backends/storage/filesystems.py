"""Every other filesystem, through fsspec: for reading, and for folders that are written once.

``zip::``, ``sftp://``, ``hdfs://`` and whatever else fsspec knows. Stores of ours are read there,
and never published: these filesystems promise no ``create`` that refuses a name that is taken, and
two runs would both believe that theirs is the checkpoint. So the store refuses every change, while
its plain folder takes new files.

A listing asks for it anew, and fails if any part of it fails: fsspec's own ``find`` leaves out
folders that it cannot list. What fsspec raises may repeat a URL with its secrets, so a message
repeats only texts without a URL.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Final, NoReturn, cast

import pyarrow as pa

from stateformat import paths as layout
from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, NotFound, StorageError
from stateformat.storage import (
    CreateOutcome,
    Look,
    ObjectInfo,
    Storage,
    check_path,
    check_relative,
    is_object_name,
    is_object_path,
    without_secrets,
)

from .checks import NewObject, check_created, check_name, check_prefix, check_range, missing, name_taken
from .objects import RangeFile

_MEMORY_BYTES: Final = 16 * 2**20
_READ_AHEAD_BYTES: Final = 2**20
_READS_AT_ONCE: Final = 16
_TYPES: Final = ("file", "directory")
_CACHES: Final = ("blockcache", "cached", "filecache", "simplecache")
_HINTS: Final = {
    "dbfs": "dbfs: is mounted as /dbfs and /Volumes on a cluster of Databricks, and not here. Run this there; or copy "
    "the folder with `databricks fs cp -r`; or give the address in the bucket (s3://, abfss://, gs://); or the "
    "workspace, with the options instance and token",
    "hdfs": "hdfs:// needs Java and Hadoop's library libhdfs: set JAVA_HOME, HADOOP_HOME, and CLASSPATH to all jars of "
    "Hadoop. webhdfs://HOST:9870/path needs neither",
}


def from_url(url: str, options: Mapping[str, Any]) -> FsspecStorage:
    """Return the storage of a URL or chain that fsspec knows, as ``zip://inside::s3://bucket/a.zip``.

    ``options`` are those of the first filesystem; an option with the name of a scheme has those of
    that one, as a mapping or as JSON. Raises ``InvalidInput``.
    """
    import fsspec
    from fsspec.registry import get_filesystem_class, known_implementations, registry

    shown = without_secrets(url)
    known = {*known_implementations, *registry}
    parts = url.split("::")
    first, *others = [part.partition("://")[0] for part in parts if part is parts[0] or "://" in part or part in known]
    for scheme in (first, *others):
        if scheme not in known:
            raise InvalidInput(
                f"fsspec has no {scheme}:// (in {shown}). Check the address",
                kind=ErrorKind.UNKNOWN_SCHEME,
                scheme=scheme,
            )
        try:
            get_filesystem_class(scheme)
        except ImportError as error:
            if scheme in _HINTS:
                raise _unopened(shown, scheme, error) from None
            # fsspec says which package has it.
            raise InvalidInput(
                f"{shown} needs a package that is not installed. fsspec says: {error}",
                kind=ErrorKind.MISSING_DEPENDENCY,
            ) from error
    given = {name: _parsed(name, value, {first, *others}) for name, value in options.items()}
    try:
        filesystem, root = fsspec.url_to_fs(url, **given)
    except Exception as error:
        # A trace would show the URL, and what is secret in it.
        raise _unopened(shown, first, error) from None
    return FsspecStorage(filesystem, root, url=shown)


def _parsed(name: str, value: Any, schemes: set[str]) -> Any:
    if name not in schemes or not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidInput(f'the option {name} has the options of {name}://; write them as JSON: {{"name": "value"}}')
    return found


def _unopened(shown: str, scheme: str, error: Exception) -> CheckpointError:
    if scheme in _HINTS:
        return InvalidInput(
            f"{shown} cannot be opened ({type(error).__name__}). {_HINTS[scheme]}", kind=ErrorKind.INVALID_URL
        )
    if isinstance(error, FileNotFoundError):
        return NotFound(
            f"there is nothing at {shown}, or it cannot be reached. Check each part of the address",
            kind=ErrorKind.STORE_NOT_FOUND,
        )
    if isinstance(error, (TypeError, ValueError)):
        return InvalidInput(
            f"{shown} and its options do not fit fsspec's {scheme}:// "
            f"({_told(error) if isinstance(error, TypeError) else type(error).__name__}). Check both",
            kind=ErrorKind.INVALID_URL,
        )
    return StorageError(f"cannot open {shown}: {_told(error)}. Check the address, the credentials and the connection")


def _told(error: Exception) -> str:
    """Return what an error says, unless it repeats an address, which may have secrets."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text:.200}" if text and not any(sign in text for sign in ("://", "url:", "?")) else name


def _below(url: str, path: str) -> str:
    """Return the address of a folder below: in a chain, that is where its first own path is."""
    parts = url.split("::")
    for number, part in enumerate(parts):
        if "/" in part or part not in _CACHES:
            parts[number] = f"{part}/{path}" if "/" in part else f"{part}://{path}"
            break
    return "::".join(parts)


class FsspecStorage(Storage):
    """A place on a filesystem of fsspec, whose stores are only read.

    ``FsspecStorage(filesystem, "bucket/prefix")`` is that of a filesystem that a program has made;
    ``url`` is then how messages name it. Implements :class:`stateformat.storage.Storage`.
    """

    _check = staticmethod(check_path)

    def __init__(self, filesystem: Any, root: str = "", *, url: str | None = None) -> None:
        from fsspec.asyn import AsyncFileSystem
        from fsspec.implementations.arrow import ArrowFSWrapper
        from fsspec.implementations.dirfs import DirFileSystem

        self._url = without_secrets((url or filesystem.unstrip_protocol(root)).rstrip("/"))
        while isinstance(filesystem, DirFileSystem):
            filesystem, root = filesystem.fs, filesystem._join(root)
        self._filesystem = filesystem
        self._is_arrow = isinstance(filesystem, ArrowFSWrapper)
        self._root = filesystem._strip_protocol(root).rstrip("/")
        concurrent = isinstance(filesystem, AsyncFileSystem)
        self.reads_at_once = _READS_AT_ONCE if concurrent else 1
        # One request lists a whole bucket.
        self._lists_flat = concurrent and type(filesystem)._find is not AsyncFileSystem._find

    @property
    def url(self) -> str:
        return self._url

    def exists(self) -> bool:
        try:
            with self._translated("look for", ""):
                self._filesystem.invalidate_cache()
                self._filesystem.info(self._full(""))
        except FileNotFoundError:
            return False
        return True

    def read(self, path: str) -> pa.Buffer:
        self._check(path)
        with self._translated("read", path):
            return pa.py_buffer(self._filesystem.cat_file(self._full(path)))

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        check_range(path, offset, length, self._check)
        more: dict[str, Any] = {}
        if self.reads_at_once == 1:
            # Those that are not asynchronous read ahead, by 5 MiB if nobody tells them.
            more["block_size"] = max(1, min(length, _READ_AHEAD_BYTES))
        if self._is_arrow:
            # From the beginning, fsspec would open a stream, which cannot tell where it is.
            more["seekable"] = True
        with self._translated("read", path):
            try:
                data = self._filesystem.cat_file(self._full(path), start=offset or None, end=offset + length, **more)
            except FileNotFoundError:
                raise
            except Exception:
                # Servers refuse a range that begins at the end or beyond it.
                if length and offset < self._size(path):
                    raise
                data = b""
        # Some servers of HTTP answer with the whole file.
        return pa.py_buffer(data if len(data) <= length else data[offset : offset + length])

    def open_input(self, path: str) -> pa.NativeFile:
        file = RangeFile(lambda offset, length: self.read_range(path, offset, length), self.size(path))
        return pa.PythonFile(file, mode="r")

    def size(self, path: str) -> int:
        self._check(path)
        with self._translated("look at", path):
            return self._size(path)

    def open_output(self, path: str) -> NewObject:
        self._refuse(path)

    def create(self, path: str, data: bytes) -> CreateOutcome:  # noqa: ARG002
        self._refuse(path)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._refuse(path)

    def list(self, prefix: str) -> list[ObjectInfo]:
        return [item for item in self._listed(check_prefix(prefix)) if is_object_path(item.path)]

    def names(self, folder: str) -> builtins.list[str]:
        with self._translated("list", folder):
            found = self._entries(check_prefix(folder).rstrip("/"))
            return sorted(path for path, is_file, _ in found if is_file and is_object_path(path))

    def names_after(self, path: str) -> builtins.list[str]:
        return [name for name in self.names(self._check(path)[: path.rindex("/") + 1]) if name > path]

    def folder(self) -> FsspecFolder:
        """Return the same place for files of any name, which can be written."""
        return FsspecFolder(self._filesystem, self._root, url=self._url)

    def savepoints(self) -> builtins.list[str]:
        with self._translated("list", layout.SAVEPOINTS):
            return self._folders(layout.SAVEPOINTS.rstrip("/"))

    def savepoint(self, name: str) -> FsspecStorage:
        place = layout.SAVEPOINTS + check_name(name)
        return FsspecStorage(self._filesystem, self._full(place), url=_below(self._url, place))

    def remove_savepoint(self, name: str) -> None:
        self._refuse(layout.SAVEPOINTS + name)

    def _refuse(self, path: str) -> NoReturn:
        raise StorageError(
            f"no store is changed at {self.url}: {type(self._filesystem).__name__} of fsspec has no create that is "
            "known to refuse a name that is taken, and two runs could publish the same checkpoint. Keep the store in a "
            "directory or at s3://, gs:// or abfss://. It can be read here, and tables, savepoints of Flink and "
            "checkpoints of Spark can be written here",
            kind=ErrorKind.STORAGE_UNSUITABLE,
            path=path,
        )

    def _full(self, path: str) -> str:
        if not path:
            return self._root or str(self._filesystem.root_marker)
        return f"{self._root}/{path}" if self._root else f"{self._filesystem.root_marker}{path}"

    def _size(self, path: str) -> int:
        found = self._filesystem.info(self._full(path))
        if found["type"] == "directory":
            raise FileNotFoundError(path)
        size_bytes = found.get("size")
        return len(self._filesystem.cat_file(self._full(path))) if size_bytes is None else int(size_bytes)

    def _listed(self, prefix: str) -> builtins.list[ObjectInfo]:
        folder = prefix[: prefix.rfind("/") + 1].rstrip("/")
        with self._translated("list", prefix):
            return sorted(
                ObjectInfo(path, self._size(path) if size_bytes is None else size_bytes)
                for path, size_bytes in self._files(folder)
                if path.startswith(prefix)
            )

    def _files(self, folder: str) -> Iterator[tuple[str, int | None]]:
        if self._lists_flat:
            self._filesystem.invalidate_cache()
            found = self._filesystem.find(self._full(folder), detail=True).values()
            yield from ((path, size_bytes) for path, is_file, size_bytes in self._relative(found, folder) if is_file)
            return
        for path, is_file, size_bytes in self._entries(folder):
            if is_file:
                yield path, size_bytes
            else:
                yield from self._files(path)

    def _entries(self, folder: str) -> builtins.list[tuple[str, bool, int | None]]:
        """Return what is directly in a folder: path, whether it is a file, its size if known."""
        self._filesystem.invalidate_cache()
        try:
            found = self._filesystem.ls(self._full(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [entry for entry in self._relative(found, folder) if "/" not in entry[0][len(folder) + bool(folder) :]]

    def _relative(self, found: Iterable[Mapping[str, Any]], folder: str) -> Iterator[tuple[str, bool, int | None]]:
        root, above = self._full("").strip("/"), f"{folder}/" if folder else ""
        for entry in found:
            name = str(entry["name"]).strip("/")
            path = name[len(root) + bool(root) :]
            # Not the folder itself, a link of it to another order of its page (HTTP), or a link.
            inside = (not root or name.startswith(f"{root}/")) and path.startswith(above) and path != above
            if inside and path[len(above)] != "?" and entry["type"] in _TYPES and not entry.get("islink"):
                yield path, entry["type"] == "file", entry.get("size")

    def _folders(self, folder: str) -> builtins.list[str]:
        names = (path.rpartition("/")[2] for path, is_file, _ in self._entries(folder) if not is_file)
        return sorted(filter(is_object_name, names))

    @contextlib.contextmanager
    def _translated(self, operation: str, path: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            # fsspec takes a server of HTTP that refuses, or does not answer, for a missing file.
            cause = error.__cause__
            failed = type(cause).__module__.startswith("aiohttp") and getattr(cause, "status", 0) != 404
            if isinstance(error, FileNotFoundError) and not failed:
                raise missing(self.url, path) from error
            raise StorageError(
                f"cannot {operation} {path or 'the folder'} at {self.url}: {_told(error)}. Check the connection, the "
                "credentials and the rights",
                path=path,
            ) from None


class FsspecFolder(FsspecStorage):
    """A folder with files of any name: read as it is, and written once.

    Two writers of one name are not told apart: whoever writes here is the only one.
    """

    _check = staticmethod(check_relative)

    def open_output(self, path: str) -> NewObject:
        return _Output(self, self._check(path))

    def create(self, path: str, data: bytes) -> CreateOutcome:
        check_created(path, data, self._check)
        try:
            self.size(path)
        except FileNotFoundError:
            with self.open_output(path) as output:
                output.write(data)
            return CreateOutcome.CREATED
        return CreateOutcome.CONFLICT

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError), self._translated("delete", self._check(path)):
                try:
                    self._filesystem.rm_file(self._full(path))
                except RuntimeError:  # Not implemented: some have only rm
                    self._filesystem.rm(self._full(path))

    def list(self, prefix: str) -> list[ObjectInfo]:
        return self._listed(prefix)

    def names(self, folder: str) -> builtins.list[str]:
        with self._translated("list", folder):
            return sorted(path for path, is_file, _ in self._entries(folder.rstrip("/")) if is_file)

    def look(self) -> Look:
        with self._translated("list", ""):
            found = self._entries("")
        names = sorted(path for path, is_file, _ in found if not is_file)
        inside: dict[str, Storage] = {
            name: FsspecFolder(self._filesystem, self._full(name), url=_below(self._url, name)) for name in names
        }
        return Look(inside, dict.fromkeys(sorted(path for path, is_file, _ in found if is_file)))

    def send(self, path: str, file: BinaryIO) -> None:
        """Write a new file with the bytes of another."""
        with self._translated("write", path):
            if self._filesystem.exists(self._full(path)):
                raise name_taken(self.url, path)
            self._filesystem.makedirs(self._full(path).rpartition("/")[0], exist_ok=True)
            try:
                with self._filesystem.open(self._full(path), "wb") as out:
                    shutil.copyfileobj(file, out)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._filesystem.rm_file(self._full(path))
                raise


class _Output(NewObject):
    """Kept in memory, or in a temporary file, until it is complete."""

    def __init__(self, folder: FsspecFolder, path: str) -> None:
        super().__init__(path)
        self._folder = folder
        self._file = cast("BinaryIO", tempfile.SpooledTemporaryFile(_MEMORY_BYTES))  # noqa: SIM115

    def _append(self, data: memoryview) -> None:
        self._file.write(data)

    def _publish(self) -> None:
        self._file.seek(0)
        self._folder.send(self._path, self._file)
        self._file.close()

    def _discard(self) -> None:
        self._file.close()
