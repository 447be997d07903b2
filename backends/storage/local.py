"""A store in a directory of a local or mounted file system, safe against crashes and power loss.

An object is written to a hidden temporary file *in its final directory*, synced, and linked to its
final name. ``link`` fails if the name is taken, so exactly one of many wins, and nobody sees a torn
file. Then the temporary name is removed, and the directory is synced. Between the link and this
sync, readers see an object that a power failure may take back. Its writer waits; if it dies just
then, whatever relies on the object waits instead (:meth:`LocalStorage.make_durable`).
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, Final, NoReturn
from urllib.parse import quote, unquote

import pyarrow as pa

from stateformat import paths as layout
from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.storage import (
    CreateOutcome,
    Leftover,
    Link,
    Look,
    ObjectInfo,
    Storage,
    check_path,
    check_relative,
    is_object_path,
)

from .checks import NewObject, check_created, check_name, check_options, check_prefix, check_range, missing, name_taken
from .local_tree import TEMPORARY, DirectoryTree, Parts

logger = logging.getLogger(__name__)

_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES_MAX: Final = 20
_WRITE_BUFFER_BYTES: Final = 256 * 1024
_RANDOM_BYTES: Final = 8
_NAME_MAX_BYTES: Final = 255
_NO_LINK: Final = (errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP)


def from_url(url: str, options: Mapping[str, Any]) -> LocalStorage:
    """Return the storage of a path or a ``file://`` URL. Raises ``InvalidInput``.

    A path may begin with ``~``; a URL is percent-decoded and has no host. The one option is
    ``durable`` (true; false skips every sync).
    """
    check_options("file://", options, ("durable",))
    durable = options.get("durable", True)
    if not isinstance(durable, bool):
        raise InvalidInput(f"option durable of file:// storage is {durable!r}; it is True or False")
    path = url
    if url.startswith("file:/"):
        rest = url.removeprefix("file:")
        host, slash, rest = rest[2:].partition("/") if rest.startswith("//") else ("", "/", rest[1:])
        if host not in ("", "localhost") or not slash:
            shown = host.rpartition("@")[2]  # What stands before the @ may be a secret.
            raise InvalidInput(
                f"the file:// URL names a host, {shown!r}. A local path has three slashes: file:///path",
                kind=ErrorKind.INVALID_URL,
            )
        path = unquote("/" + rest, errors="surrogateescape")
    path = os.path.expanduser(path)  # noqa: PTH111 - Path.expanduser raises where there is no such user
    if not path.strip() or "\0" in path or path.startswith("~"):
        raise InvalidInput(
            f"{url!r} is no path. Give one like /path or file:///path", kind=ErrorKind.INVALID_URL, url=url
        )
    return LocalStorage(path, durable=durable)


class LocalStorage(Storage):
    """A store in a directory. Implements :class:`stateformat.storage.Storage`.

    Safe to share between processes. ``durable=False`` skips every sync: objects still appear
    complete, but may not survive a power failure.
    """

    @staticmethod
    def _check(path: str) -> str:
        return check_path(path)

    def __init__(self, root: str | os.PathLike[str], *, durable: bool = True) -> None:
        # Absolute at once: a worker that unpickles the storage has another working directory.
        absolute = os.path.abspath(os.fspath(root))  # noqa: PTH100 - Path.absolute() would keep ".." in the URL
        self._tree = DirectoryTree(absolute, durable=durable)

    @property
    def url(self) -> str:
        return "file://" + quote(self._tree.root, errors="surrogateescape")

    def exists(self) -> bool:
        with self._tree.translated("look for", ""):
            try:
                with self._tree.opened(()):
                    return True
            except FileNotFoundError:
                return False

    def read(self, path: str) -> pa.Buffer:
        with self._reading("read", path) as (descriptor, size_bytes):
            return _pread(descriptor, 0, size_bytes)

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        check_range(path, offset, length, self._check)
        with self._reading("read", path) as (descriptor, size_bytes):
            return _pread(descriptor, offset, max(0, min(length, size_bytes - offset)))

    def open_input(self, path: str) -> pa.NativeFile:
        """Return a seekable file that pyarrow reads without the interpreter's lock."""
        # pyarrow opens by name only. The name was checked just before, and the digests notice a
        # file that is exchanged afterwards.
        with self._reading("open", path):
            return pa.OSFile(os.path.join(self._tree.root, path))  # noqa: PTH118

    def size(self, path: str) -> int:
        with self._reading("look at", path) as (_, size_bytes):
            return size_bytes

    def open_output(self, path: str) -> NewObject:
        with self._tree.translated("write", path):
            return _LocalOutput(self._tree, self._check(path))

    def create(self, path: str, data: bytes) -> CreateOutcome:
        """Create an object if it is absent. The outcome is never ``UNKNOWN``.

        Missing permissions or space fail before the link, as one of ``storage.REFUSALS``. An error
        with ``details["visible"]`` comes from the last sync: the object exists, but may not survive
        a power failure. Delete nothing that it refers to.
        """
        check_created(path, data, self._check)
        with self._tree.translated("create", path):
            output = _LocalOutput(self._tree, path)
            try:
                output.write(data)
                return CreateOutcome.CREATED if output.link() else CreateOutcome.CONFLICT
            finally:
                output.abort()

    def folder(self) -> LocalFolder:
        """Return the same directory for files of any name. See
        :func:`stateformat.storage.folder_of`.
        """
        return LocalFolder(self._tree.root, durable=self._tree.durable)

    def above(self) -> LocalFolder | None:
        parent = os.path.dirname(self._tree.root)  # noqa: PTH120
        return None if parent == self._tree.root else LocalFolder(parent)

    def leftovers(self) -> list[Leftover]:
        with self._tree.translated("list", ""):
            found = self._tree.files((), "", temporary=True)
            return sorted(Leftover(_object_of(name), size_bytes, name) for name, size_bytes in found)

    def discard(self, leftovers: Iterable[Leftover]) -> None:
        names = [_split_temporary(leftover.name) for leftover in leftovers]
        for parents, group in groupby(names, key=lambda name: name[0]):
            with self._tree.translated("delete from", "/".join(parents)):
                self._tree.unlink(parents, [name for _, name in group], durable=False)

    def make_durable(self, paths: Iterable[str]) -> None:
        """Sync the directories of these objects; their bytes were synced before the link."""
        for parents in dict.fromkeys(_split(self._check(path))[0] for path in paths):
            with self._tree.translated("sync", "/".join(parents)), self._tree.opened(parents, make=True) as directory:
                self._tree.sync(directory)

    def list(self, prefix: str) -> list[ObjectInfo]:
        directory, slash, start = check_prefix(prefix).rpartition("/")
        with self._tree.translated("list", prefix):
            return sorted(self._tree.files(tuple(directory.split("/")) if slash else (), start))

    def names(self, folder: str) -> builtins.list[str]:
        with self._tree.translated("list", folder):
            parts = tuple(check_prefix(folder).rstrip("/").split("/"))
            return ["/".join((*parts, name)) for name in self._tree.names(parts)]

    def names_after(self, path: str) -> builtins.list[str]:
        parts, name = _split(self._check(path))
        with self._tree.translated("list", "/".join(parts)):
            return ["/".join((*parts, found)) for found in self._tree.names_after(parts, name)]

    def link_from(self, source: Storage, path: str, size_bytes: int) -> Link | None:  # noqa: ARG002
        """Link the file of another directory, if it is on this file system; else return None.

        None also if the system refuses the link: too many of them, or a file of another user.
        """
        if not isinstance(source, LocalStorage):
            return None
        parents, name = _split(self._check(path))
        gone = False
        with (
            source._reading("link", path) as (file, _),
            source._tree.opened(parents) as there,
            self._tree.translated("link", path),
            self._tree.opened(parents, make=True) as here,
        ):
            if not source._tree.durable:
                self._tree.sync(file)
            try:
                os.link(name, name, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
            except FileExistsError as error:
                raise name_taken(self._tree.root, path) from error
            except FileNotFoundError:
                # Another process may have removed it since it was opened.
                if name in os.listdir(there):  # noqa: PTH208
                    raise
                gone = True
            except OSError as error:
                if error.errno in _NO_LINK:
                    return None
                raise
            if not gone and not os.path.samestat(os.stat(name, dir_fd=here, follow_symlinks=False), os.fstat(file)):
                # The name was replaced since it was looked at.
                os.unlink(name, dir_fd=here)
                return None
        if gone:
            raise missing(source.url, path)
        return Link.SHARED

    def shared(self, prefix: str) -> dict[str, tuple[str, int]]:
        directory, slash, start = check_prefix(prefix).rpartition("/")
        with self._tree.translated("list", prefix):
            return dict(self._tree.linked(tuple(directory.split("/")) if slash else (), start))

    def savepoints(self) -> builtins.list[str]:
        with self._tree.translated("list", layout.SAVEPOINTS):
            return self._tree.folders((layout.SAVEPOINTS.rstrip("/"),))

    def savepoint(self, name: str) -> LocalStorage:
        place = os.path.join(self._tree.root, layout.SAVEPOINTS, check_name(name))  # noqa: PTH118
        return LocalStorage(place, durable=self._tree.durable)

    def remove_savepoint(self, name: str) -> None:
        place = (layout.SAVEPOINTS.rstrip("/"), check_name(name))
        with self._tree.translated("delete", "/".join(place)):
            self._tree.remove_store(place)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete these objects in the given order, and each segment directory that becomes empty.

        Deletions of records and requests are durable on return. A segment or manifest that a power
        failure brings back is garbage, as before.
        """
        names = [_split(self._check(path)) for path in paths]
        for parents, group in groupby(names, key=lambda name: name[0]):
            with self._tree.translated("delete from", "/".join(parents)):
                durable = not parents or parents[0] not in ("segments", "manifests")
                self._tree.unlink(parents, [name for _, name in group], durable=durable)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._tree.root!r}, durable={self._tree.durable})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self._tree.root, self._tree.durable))

    @contextlib.contextmanager
    def _reading(self, operation: str, path: str) -> Iterator[tuple[int, int]]:
        parents, name = _split(self._check(path))
        absent = False
        with self._tree.translated(operation, path):
            try:
                with self._tree.open_object(parents, name) as opened:
                    yield opened
            except OSError as error:
                # A name too long for the system names nothing.
                if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
                    raise
                absent = True
        if absent:
            raise missing(self.url, path)


class LocalFolder(LocalStorage):
    """A directory with files of any name, read as it is; for folders that are not stores."""

    @staticmethod
    def _check(path: str) -> str:
        return check_relative(path)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return every plain file whose path begins with ``prefix``, hidden ones too, sorted by
        path.

        Links are neither followed nor listed.
        """
        directory, slash, start = prefix.rpartition("/")
        with self._tree.translated("list", prefix):
            return sorted(self._tree.any_files(tuple(check_relative(directory).split("/")) if slash else (), start))

    def look(self) -> Look:
        with self._tree.translated("list", ""):
            folders, files, links = self._tree.look()
        inside: dict[str, Storage] = {name: LocalFolder(os.path.join(self._tree.root, name)) for name in folders}  # noqa: PTH118
        return Look(inside, {**files}, tuple(links))


class _LocalOutput(NewObject):
    """A temporary file in the final directory, until it is linked to its final name."""

    def __init__(self, tree: DirectoryTree, path: str) -> None:
        super().__init__(path)
        self._tree = tree
        parents, self._name = _split(path)
        self._temporary = _temporary_name(self._name)
        for tries_left in reversed(range(_TRIES_MAX)):
            try:
                descriptor = self._open_temporary(parents)
                break
            except FileNotFoundError:
                # gc removes empty directories, perhaps before the first file is in one.
                if not tries_left:
                    raise
        self._file = io.BufferedWriter(io.FileIO(descriptor, "wb"), _WRITE_BUFFER_BYTES)

    def _open_temporary(self, parents: Parts) -> int:
        self._directory = self._tree.open(parents, make=True)
        try:
            return os.open(self._temporary, _NEW_FILE, 0o666, dir_fd=self._directory)
        except BaseException:
            os.close(self._directory)
            raise

    def link(self) -> bool:
        """Give the file its final name, durably; returns False if the name is taken."""
        self._file.flush()
        self._tree.sync(self._file.fileno())
        here, ours = self._directory, True
        try:
            os.link(self._temporary, self._name, src_dir_fd=here, dst_dir_fd=here, follow_symlinks=False)
        except OSError as error:
            # Over a network the response may be lost; the repeated request then meets its own link.
            ours = self._is_linked()
            if not ours and not isinstance(error, FileExistsError):
                self._refuse(error)
        self._remove_temporary()
        # Also if the name is taken: the process that took it may have died before its sync.
        try:
            self._tree.sync(here)
        except OSError as error:
            raise StorageError(
                f"{self._path} stands in {self._tree.root}, but its directory could not be synced ({error.strerror}). "
                "It may not survive a power failure. Check the disk, then restart",
                path=self._path,
                visible=True,
            ) from error
        return ours

    def _is_linked(self) -> bool:
        try:
            there = os.stat(self._name, dir_fd=self._directory, follow_symlinks=False)
            return os.path.samestat(there, os.fstat(self._file.fileno()))
        except OSError:
            return False

    def _refuse(self, error: OSError) -> NoReturn:
        if error.errno in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK):
            raise StorageError(
                f"the file system of {self._tree.root} does not support hard links ({error.strerror}), so {self._path} "
                "cannot be created without the risk of overwriting another object. Put the store elsewhere",
                kind=ErrorKind.STORAGE_UNSUITABLE,
                path=self._path,
            ) from error
        if isinstance(error, FileNotFoundError):
            raise StorageError(
                f"{self._path} was not written to {self._tree.root}: its temporary file {self._temporary} was removed "
                "meanwhile. gc does so when another attempt has published. Restart from the newest checkpoint",
                path=self._path,
                removed=True,
            ) from error
        raise error

    def _append(self, data: memoryview) -> None:
        with self._tree.translated("write", self._path):
            self._file.write(data)

    def _publish(self) -> None:
        with self._tree.translated("write", self._path):
            if not self.link():
                raise name_taken(self._tree.root, self._path)
        self._free()

    def _discard(self) -> None:
        self._remove_temporary()
        self._free()

    def _remove_temporary(self) -> None:
        if not self._temporary:
            return
        try:
            # gc may have removed it.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary, dir_fd=self._directory)
            self._temporary = ""
        except OSError:
            logger.warning("temporary file %s of %s stays behind", self._temporary, self._path, exc_info=True)

    def _free(self) -> None:
        # Closing flushes, which may fail once more on a full disk; that loses nothing now.
        with contextlib.suppress(OSError):
            self._file.close()
        os.close(self._directory)


def _split(path: str) -> tuple[Parts, str]:
    *parents, name = path.split("/")
    return tuple(parents), name


def _temporary_name(name: str) -> str:
    """Return a new hidden name that contains the final one, cut to what a directory can hold."""
    hidden = f"{TEMPORARY}{os.urandom(_RANDOM_BYTES).hex()}-"
    cut = os.fsencode(name)[: _NAME_MAX_BYTES - len(hidden)]
    return hidden + cut.decode("utf-8", "ignore")


def _object_of(temporary: str) -> str:
    """Return the path of the object that a temporary file was to become; a long name may be cut."""
    directory, slash, name = temporary.rpartition("/")
    return directory + slash + name[len(TEMPORARY) + 2 * _RANDOM_BYTES + 1 :]


def _split_temporary(name: str) -> tuple[Parts, str]:
    *parents, last = name.split("/")
    if not last.startswith(TEMPORARY) or not is_object_path("/".join((*parents, last[1:]))):
        raise InvalidInput(f"{name!r} is no temporary file of a store. Discard what leftovers() returned", path=name)
    return tuple(parents), last


def _pread(descriptor: int, offset: int, length: int) -> pa.Buffer:
    """Return the bytes asked for, or fewer if the file is shorter, without an intermediate copy."""
    buffer = pa.allocate_buffer(length)
    view, filled = memoryview(buffer), 0
    while filled < length:
        # One call reads at most 2 GiB.
        count = os.preadv(descriptor, [view[filled:]], offset + filled)
        if not count:
            return buffer.slice(0, filled)
        filled += count
    return buffer


def _rebuild(kind: type[LocalStorage], root: str, durable: bool) -> LocalStorage:
    return kind(root, durable=durable)
