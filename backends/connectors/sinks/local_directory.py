"""A local directory as the place of a file sink.

A file has three names, all on one file system::

    .pending/<uid>/<write id>.open                                        being written
    .pending/<uid>/<id>-<attempt>-<subtask>-<number>-<write id>.prepared  named by a checkpoint
    part-<id>-<attempt>-<uid>-<subtask>-<number>-<write id>.parquet       committed: seen

*Prepare* syncs the bytes, renames, and syncs the folder; a name that is gone fails. *Commit* links
the final name, syncs the directory, and unlinks the prepared name. A file with its final name is
committed; one with neither is lost, and raises. So committing again mends a crash between any two
steps. *Clean* takes open files of a run that still lives, too; that run then fails at its next
snapshot, before it has promised anything.

Parquet readers, Spark and globs pass over hidden names and those that do not end in ``.parquet``.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Final

import pyarrow as pa

from stateformat.errors import ErrorKind, PublishConflict, StorageError

from .directory import NewFile, PreparedFile, forgotten_paths, lost, prepared_names, size_differs
from .part_names import PartName, pending_folder
from .uploads import Upload

_OPEN: Final = (".open", ".part")
"""How the names of files end that are being written."""
_DURABLE_NAMES: Final[set[Path]] = set()
"""Folders whose names this process knows to be durable."""


class LocalFiles:
    """The steps on files of a local directory, each atomic. Names are relative to it."""

    def __init__(self, root: str | os.PathLike[str], *, durable: bool = True) -> None:
        self._root = Path(root).expanduser().absolute()
        self._durable = durable

    def __str__(self) -> str:
        return str(self._root)

    def make(self, folder: str) -> None:
        """Make a folder, and those that lead to it. Their names are durable on return."""
        with self.translated("make", folder):
            path = self._folder(folder)
            missing = {each for each in [path, *path.parents] if not each.exists()}
            path.mkdir(parents=True, exist_ok=True)
            if not self._durable:
                return
            for each in [path, *path.parents]:
                # The maker of one that is there may have died before its sync. Once in a process
                # will do.
                if each in missing or each not in _DURABLE_NAMES:
                    with contextlib.suppress(*([] if each in missing else [OSError])):
                        self._sync(each.parent)
                    _DURABLE_NAMES.add(each)

    def create(self, name: str) -> pa.NativeFile:
        with self.translated("create", name):
            os.close(os.open(self._at(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            return pa.OSFile(str(self._root / name), "wb")

    def sync_file(self, name: str) -> int:
        """Make the bytes of a closed file durable. Returns their number."""
        with self.translated("sync", name):
            self._sync(self._at(name))
            return self._at(name).stat().st_size

    def sync(self, folder: str) -> None:
        with self.translated("sync", folder):
            self._sync(self._at(folder))

    def rename(self, old: str, new: str) -> None:
        with self.translated("rename", old):
            self._at(old).rename(self._at(new))

    def link(self, old: str, new: str) -> None:
        """Give a file a second name, unless that is taken or the file is not there."""
        with self.translated("link", old), contextlib.suppress(FileExistsError, FileNotFoundError):
            path = self._at(old)
            self._check_file(path, old)
            self._at(new).hardlink_to(path)

    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None for none. ``StorageError`` for anything but a file."""
        with self.translated("read", name), contextlib.suppress(FileNotFoundError):
            path = self._at(name)
            self._check_file(path, name)
            return path.read_bytes()
        return None

    def size(self, name: str) -> int | None:
        with self.translated("look at", name), contextlib.suppress(FileNotFoundError):
            return self._at(name).stat().st_size
        return None

    def names(self, folder: str) -> list[str]:
        with self.translated("list", folder), contextlib.suppress(FileNotFoundError):
            return sorted(each.name for each in self._folder(folder).iterdir())
        return []

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, if they are there. Not synced: it can be repeated."""
        for name in names:
            with self.translated("remove", name):
                self._at(name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def translated(self, what: str, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            if isinstance(error, FileNotFoundError) and what in ("sync", "rename") and name.endswith(_OPEN):
                raise PublishConflict(
                    f"{self._root / name}, which this run was writing, is gone: another run of the job has begun, "
                    "and has removed what it took for left behind. This one commits nothing more; let one of them run",
                    path=name,
                ) from error
            raise StorageError(
                f"cannot {what} {self._root / name}: {error.strerror or error}. See that the directory is there, can "
                "be written, and has room",
                kind=ErrorKind.STORAGE_FAILED,
                path=name,
            ) from error

    def _at(self, name: str) -> Path:
        """Where a file or folder lies. ``StorageError`` where a link leads elsewhere."""
        parts = PurePosixPath(name).parts
        for depth in range(1, len(parts)):
            folder = self._root.joinpath(*parts[:depth])
            if folder.is_symlink():
                raise StorageError(
                    f"{folder} is a link, and a sink works only in folders of its own. Put a folder in its place, with "
                    "the files that the link leads to",
                    kind=ErrorKind.INVALID_PATH,
                    path=name,
                )
        return self._root / name

    def _folder(self, name: str) -> Path:
        """Where a folder lies that is no link itself."""
        return self._at(f"{name}/file").parent

    def _check_file(self, path: Path, name: str) -> None:
        if not stat.S_ISREG(path.lstat().st_mode):
            message = f"{path} is not a file, and a sink prepares files alone. Put back the file that was there"
            raise StorageError(message, kind=ErrorKind.INVALID_PATH, path=name)

    def _sync(self, path: Path) -> None:
        if not self._durable:
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class LocalDirectory(LocalFiles):
    """A local directory as the place of a file sink. Implements :class:`OutputDirectory`."""

    def begin(self, uid: str) -> NewFile:
        folder = pending_folder(uid)
        self.make(folder)
        return _LocalFile(self, folder)

    def prepare(self, files: Sequence[tuple[NewFile, PartName]]) -> list[str]:
        for file, part in files:
            self.rename(f"{PurePosixPath(part.pending).parent}/{file.write_id}.open", part.pending)
        names = [part.pending for _, part in files]
        for folder in {str(PurePosixPath(name).parent) for name in names}:
            self.sync(folder)
        return names

    def commit(self, files: Sequence[PreparedFile]) -> None:
        # What was prepared in a bucket may lie here, copied, under its final name.
        pending = {file.pending for file in files if Upload.read(file.pending) is None}
        for file in files:
            if file.pending in pending:
                self.link(file.pending, file.path)
            found = self.size(file.path)
            if found is None:
                raise lost(file, self, f"as {file.pending}")
            if found != file.size_bytes:
                raise size_differs(file, self, found)
        if files:
            # A prepared name may go only when the final one is durable.
            self.sync("")
        self.remove(sorted(pending))

    def prepared(self, uid: str) -> Sequence[PartName]:
        return prepared_names(uid, self.names(pending_folder(uid)))

    def clean(self, uid: str, newest_id: int, carried: Sequence[PreparedFile]) -> list[str]:
        folder = pending_folder(uid)
        forgotten = forgotten_paths(uid, folder, self.names(folder), newest_id, {file.pending for file in carried})
        self.remove(forgotten)
        return forgotten


class _LocalFile:
    """A :class:`NewFile` of a local directory."""

    def __init__(self, directory: LocalDirectory, folder: str) -> None:
        self.write_id = token_hex(8)
        self._directory = directory
        self._name = f"{folder}/{self.write_id}.open"
        self.stream = directory.create(self._name)

    def close(self) -> int:
        """End the file, and make its bytes durable."""
        with self.translated():
            self.stream.close()
        return self._directory.sync_file(self._name)

    def discard(self) -> None:
        # The end of a file that goes away does not matter, even on a full disk.
        with contextlib.suppress(OSError, pa.ArrowException):
            self.stream.close()
        self._directory.remove([self._name])

    def translated(self) -> AbstractContextManager[None]:
        return self._directory.translated("write", self._name)
