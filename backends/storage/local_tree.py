"""The directories of a local store: walked without following links, durable, scanned until stable.

Theory of operation. Every access walks from the root by directory descriptors and follows no
symbolic link below the root. Before anything new is created in a directory, the parent that names
it has been synced, even if another process made it and may have died before its own sync. A
directory is listed until two scans agree and every file of them still exists afterwards:
``readdir`` promises nothing about names that come and go meanwhile, and a name that has gone may
have been the greatest.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NoReturn

from stateformat.errors import ErrorKind, StorageError
from stateformat.storage import TOP_LEVEL, ObjectInfo, is_object_name

logger = logging.getLogger(__name__)

TEMPORARY: Final = ".tmp-"
"""How names of temporary files begin. Names of objects never begin with a dot."""
_RECORDS: Final = "checkpoints"
_REQUESTS: Final = "requests"
"""In this folder anything but a plain file is ignored, so that it cannot prevent a stop."""

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_CHILD: Final = _DIRECTORY | os.O_NOFOLLOW
# Without O_NONBLOCK, opening a named pipe in the place of an object would wait forever.
_OBJECT: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SCANS_MAX: Final = 1000
_WARNINGS_MAX: Final = 100

Parts = tuple[str, ...]
"""A directory of the store as the parts of its path; empty for the root."""


class DirectoryTree:
    """The tree of directories under ``root``, an absolute path. ``durable=False`` syncs nothing."""

    def __init__(self, root: str, *, durable: bool) -> None:
        self.root = root
        self.durable = durable
        # Directories whose names are known to be durable; the empty one is the root.
        self._synced: set[Parts] = set()
        self._warned: set[str] = set()

    def sync(self, descriptor: int) -> None:
        """Make a file's bytes, or a directory's names, survive a power failure."""
        if self.durable:
            os.fsync(descriptor)

    def open(self, parts: Parts, *, make: bool = False) -> int:
        """Return a descriptor of a directory, reached without following a link.

        ``make``: create what is missing, durably.
        """
        if make:
            self._make_root()
        descriptor = os.open(self.root, _DIRECTORY)
        try:
            for depth in range(1, len(parts) + 1):
                child = self._open_child(descriptor, parts[:depth], make=make)
                os.close(descriptor)
                descriptor = child
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def opened(self, parts: Parts, *, make: bool = False) -> AbstractContextManager[int]:
        return _closing(self.open(parts, make=make))

    @contextlib.contextmanager
    def open_object(self, parts: Parts, name: str) -> Iterator[tuple[int, int]]:
        with self.opened(parts) as directory:
            opened = _closing(os.open(name, _OBJECT, dir_fd=directory))
        with opened as descriptor:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EISDIR, "not a plain file", "/".join((*parts, name)))
            yield descriptor, status.st_size

    def files(self, parts: Parts, start: str, *, temporary: bool = False) -> Iterator[ObjectInfo]:
        """Yield the objects, or temporary files, below a directory whose names begin with
        ``start``.
        """
        try:
            opened = self.opened(parts)
        except FileNotFoundError:
            return
        with opened as descriptor:
            for name, size_bytes in self._scan_until_stable(descriptor, parts, start, temporary=temporary):
                if size_bytes is None:
                    yield from self._below((*parts, name), temporary=temporary)
                else:
                    yield ObjectInfo("/".join((*parts, name)), size_bytes)

    def linked(self, parts: Parts, start: str) -> Iterator[tuple[str, tuple[str, int]]]:
        """Yield the objects of :meth:`files` that have several names: device and inode, and how
        many.
        """
        for path, _ in self.files(parts, start):
            *parents, name = path.split("/")
            with contextlib.suppress(FileNotFoundError), self.opened(tuple(parents)) as directory:
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if status.st_nlink > 1:
                    yield path, (f"{status.st_dev}:{status.st_ino}", status.st_nlink)

    def any_files(self, parts: Parts, start: str) -> Iterator[ObjectInfo]:
        """Yield plain files of any name below a directory, in no order; ``start`` begins the first
        name.

        One scan: files that come and go meanwhile may be missed. Links are ignored.
        """
        try:
            opened = self.opened(parts)
        except FileNotFoundError:
            return
        with opened as descriptor:
            with os.scandir(descriptor) as found:
                entries = [entry for entry in found if entry.name.startswith(start)]
                sizes = [(entry.name, _size(entry.name, descriptor)) for entry in entries if _is_file(entry)]
            below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for name, size_bytes in sizes:
            yield ObjectInfo("/".join((*parts, name)), size_bytes)
        for name in below:
            yield from self.any_files((*parts, name), "")

    def _below(self, parts: Parts, *, temporary: bool) -> Iterator[ObjectInfo]:
        try:
            yield from self.files(parts, "", temporary=temporary)
        except OSError as error:
            if parts[0] != _REQUESTS or len(parts) == 1:
                raise
            self._pass_over("/".join(parts), f"cannot be listed ({error.strerror})")

    def _pass_over(self, path: str, what: str) -> None:
        if path not in self._warned and len(self._warned) < _WARNINGS_MAX:
            self._warned.add(path)
            logger.warning("%s in the store %s %s; it is ignored", json.dumps(path), self.root, what)

    def names(self, parts: Parts) -> list[str]:
        """Return the names of the objects directly in a directory, sorted, as :meth:`files` finds
        them.
        """
        try:
            opened = self.opened(parts)
        except FileNotFoundError:
            return []
        with opened as descriptor:
            found = self._scan_until_stable(descriptor, parts, "", temporary=False, sizes=False)
            return [name for name, size_bytes in found if size_bytes is not None]

    def names_after(self, parts: Parts, name: str) -> list[str]:
        """Return the greater names of objects directly in a directory, sorted, from one scan of
        it.
        """
        try:
            opened = self.opened(parts)
        except FileNotFoundError:
            return []
        with opened as descriptor:
            entries = os.listdir(descriptor)  # noqa: PTH208 - Path cannot list a descriptor
            if max(entries, default="") <= name:
                return []  # The usual case, of which no name need be looked at.
            greater = sorted(entry for entry in entries if entry > name and is_object_name(entry))
            return [entry for entry in greater if self._is_object(entry, descriptor, parts)]

    def _is_object(self, name: str, directory: int, parts: Parts) -> bool:
        """Return whether a plain file has the name. Raises if anything else has the name of a
        record.
        """
        try:
            mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(mode) and not (stat.S_ISDIR(mode) and not name.endswith(".json")):
            raise OSError(errno.ENOTDIR, "not a plain file", "/".join((*parts, name)))
        return stat.S_ISREG(mode)

    def unlink(self, parts: Parts, names: Iterable[str], *, durable: bool) -> None:
        """Remove files, if they exist, in order, and a segment directory that is then empty."""
        with contextlib.suppress(FileNotFoundError), self.opened(parts) as directory:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
            if durable:
                self.sync(directory)
        if parts[0] == "segments" and len(parts) > 1:
            # Best effort: a directory that is not empty, or gone already, stays as it is.
            with contextlib.suppress(OSError), self.opened(parts[:-1]) as parent:
                os.rmdir(parts[-1], dir_fd=parent)
                self._synced.discard(parts)

    def folders(self, parts: Parts) -> list[str]:
        """Return the names of the directories in one beside the objects, sorted, without links."""
        try:
            opened = self.opened(parts)
        except FileNotFoundError:
            return []
        with opened as directory, os.scandir(directory) as entries:
            return sorted(
                entry.name for entry in entries if is_object_name(entry.name) and entry.is_dir(follow_symlinks=False)
            )

    def look(self) -> tuple[list[str], dict[str, int], list[str]]:
        """Return the names of the folders in the root, of its files with the times of their last
        change, in microseconds, and of links to folders; sorted.
        """
        folders, files, links = [], {}, []
        with contextlib.suppress(FileNotFoundError), self.opened(()) as directory, os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                elif _is_file(entry):
                    with contextlib.suppress(FileNotFoundError):  # It is gone by now.
                        files[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns // 1000
                else:
                    with contextlib.suppress(OSError):  # A link in a circle leads nowhere.
                        links += [entry.name] * entry.is_dir()
        return folders, files, links

    def remove_store(self, place: Parts) -> None:
        """Remove the objects of the store in a directory below the root, records first, durably.

        Temporary files are removed too, and the directories that are then empty. Raises ``OSError``
        for a link on the way to the store's folders before anything is removed; a link in them is
        removed, and not followed.
        """
        folders = [(*place, name) for name in TOP_LEVEL]
        for folder in folders:
            try:
                with contextlib.suppress(FileNotFoundError), self.opened(folder):
                    pass
            except OSError as error:
                raise OSError(error.errno, error.strerror, "/".join(folder)) from error
        # Records are first in the alphabet of TOP_LEVEL, and without a record nothing is a
        # checkpoint.
        for folder in folders:
            self._remove_all(folder)
        for parts in (place, place[:-1]):
            with contextlib.suppress(OSError), self.opened(parts[:-1]) as parent:
                os.rmdir(parts[-1], dir_fd=parent)
                self.sync(parent)

    def _remove_all(self, parts: Parts) -> None:
        with contextlib.suppress(FileNotFoundError), self.opened(parts) as directory:
            with os.scandir(directory) as found:
                entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
            for name, is_directory in sorted(entries):
                if is_directory:
                    self._remove_all((*parts, name))
                else:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=directory)
            self.sync(directory)
        with contextlib.suppress(OSError), self.opened(parts[:-1]) as parent:
            os.rmdir(parts[-1], dir_fd=parent)

    @contextlib.contextmanager
    def translated(self, operation: str, path: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            self._fail(operation, path, error)

    def _make_root(self) -> None:
        """Make the root and the directories above it, each durable before the next is created in
        it.
        """
        root = Path(self.root)
        if () in self._synced and root.is_dir():
            return
        self._synced.clear()
        missing = [directory for directory in (root, *root.parents) if not directory.exists()]
        deepest = missing[-1].parent if missing else root
        # The deepest that exists is synced too: the process that made it may have died before its
        # sync. Those above were durable before it was made.
        self._sync_name(deepest)
        for directory in reversed(missing):
            directory.mkdir(exist_ok=True)
            self._sync_name(directory)
        self._synced.add(())

    def _sync_name(self, directory: Path) -> None:
        # A directory that we may not open is one that we did not change.
        with contextlib.suppress(PermissionError), _closing(os.open(directory.parent, _DIRECTORY)) as descriptor:
            self.sync(descriptor)

    def _open_child(self, parent: int, parts: Parts, *, make: bool) -> int:
        made = False
        try:
            child = os.open(parts[-1], _CHILD, dir_fd=parent)
        except FileNotFoundError:
            if not make:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(parts[-1], dir_fd=parent)
            made = True
            child = os.open(parts[-1], _CHILD, dir_fd=parent)
        if make and (made or parts not in self._synced):
            try:
                self.sync(parent)
            except BaseException:
                os.close(child)
                raise
            self._synced.add(parts)
        return child

    def _scan_until_stable(
        self, directory: int, parts: Parts, start: str, *, temporary: bool, sizes: bool = True
    ) -> list[tuple[str, int | None]]:
        """Return names, sorted, with sizes in bytes (0 without ``sizes``); ``None`` for a
        directory.
        """
        before: list[tuple[str, bool]] | None = None
        for _ in range(_SCANS_MAX):
            now = self._scan(directory, parts, start, temporary=temporary)
            if now == before:
                # A file that is gone by now invalidates the scan: without it, the greatest name
                # could be missing. If the greatest still exists after the scan, no greater one
                # existed when the scan began: records are deleted lowest first, so the scan would
                # have seen it.
                if not sizes:
                    # A third scan that shows them all proves the same as looking at each.
                    before = self._scan(directory, parts, start, temporary=temporary)
                    if set(now) <= set(before):
                        return [(name, None if is_directory else 0) for name, is_directory in now]
                    continue
                with contextlib.suppress(FileNotFoundError):
                    return [(name, None if is_directory else _size(name, directory)) for name, is_directory in now]
            before = now
        raise StorageError(
            f"directory {'/'.join(parts)} of the store {self.root} changed during each of {_SCANS_MAX} scans. List it "
            "again when fewer writers are at work",
            kind=ErrorKind.HISTORY_UNSTABLE,
        )

    def _scan(self, directory: int, parts: Parts, start: str, *, temporary: bool) -> list[tuple[str, bool]]:
        """Return names of directories, and of objects or temporary files, sorted; True for a
        directory.
        """
        found = []
        with os.scandir(directory) as entries:
            for entry in entries:
                name = entry.name
                is_temporary = name.startswith(TEMPORARY)
                # In the root only the format's directories count; users keep savepoints there.
                wanted = is_object_name(name) or (is_temporary and temporary) if parts else name in TOP_LEVEL
                if not wanted or not name.startswith(start):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if parts == (_RECORDS,) and name.endswith(".json"):
                        # Ignoring it would hide that a record is gone.
                        raise OSError(errno.ENOTDIR, "not a plain file", "/".join((*parts, name)))
                    found.append((name, True))
                elif parts and entry.is_file(follow_symlinks=False):
                    if is_temporary == temporary:
                        found.append((name, False))
                elif parts[:1] == (_REQUESTS,):
                    self._pass_over("/".join((*parts, name)), "is no plain file")
                elif entry.is_symlink() or not parts or _exists(name, directory):
                    raise OSError(errno.ENOTDIR, "not a plain file", "/".join((*parts, name)))
        return sorted(found)

    def _fail(self, operation: str, path: str, error: OSError) -> NoReturn:
        # In all cases but the last nothing was done, and a retry would do nothing either.
        kind, said = ErrorKind.STORAGE_REFUSED, error.strerror or error
        link = self._link_on(path) or (self._link_on(error.filename) if isinstance(error.filename, str) else None)
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and not Path(self.root).is_dir():
            why = "it is no directory, and a store is one. Check the address"
        elif link:
            kind = ErrorKind.INVALID_PATH
            why = f"{link} is a symbolic link, and links in a store are not followed. Put the file itself in its place"
        elif error.errno in (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EEXIST):
            named = f"{said}, {error.filename}" if error.filename else said
            why = f"something else stands where a directory or a plain file belongs ({named}). Move it out of the store"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            why = f"not permitted ({said}). Check the owner and mode of the directory and of the file"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = f"no room is left ({said}). Free some, or let retention keep fewer checkpoints"
        else:
            kind = ErrorKind.STORAGE_FAILED
            why = f"{said}. Check the disk and the mount"
        message = f"cannot {operation} {path or 'objects'} in the store {self.root}: {why}"
        raise StorageError(message, kind=kind, path=path) from error

    def _link_on(self, path: str) -> str | None:
        way = Path()
        for part in path.split("/"):
            way /= part
            with contextlib.suppress(OSError):  # A name too long for the system is no link.
                if (self.root / way).is_symlink():
                    return str(way)
        return None


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_file(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False)


def _size(name: str, directory: int) -> int:
    return os.stat(name, dir_fd=directory, follow_symlinks=False).st_size


def _exists(name: str, directory: int) -> bool:
    # Some file systems give no type with a name, and an entry that is gone by now has none at all.
    try:
        _size(name, directory)
    except FileNotFoundError:
        return False
    return True
