"""Where a file sink writes: the seam behind which a local directory stands, and a bucket (``s3_directory``).

Theory of operation. A place does four things with files. *Begin*: a file that nobody sees. *Prepare*: files become durable
under the name that a checkpoint will hold, and are still seen by nobody. *Commit*: they are seen; doing it again, or twice
at once, does nothing. *Clean*: what was prepared for checkpoints that are past and is not carried goes.

In a local directory, a file lives through three names, all on one file system::

    <directory>/.pending/<uid>/<write id>.open                                       being written, or forgotten by a crash
    <directory>/.pending/<uid>/<id>-<attempt>-<subtask>-<number>-<write id>.prepared whole, synced, named by a checkpoint
    <directory>/part-<id>-<attempt>-<uid>-<subtask>-<number>-<write id>.parquet      committed: seen by any reader

1. *Prepare*: sync the bytes, rename to the prepared name, sync the folder. A name that is gone (see 3) fails, so nothing
   is ever named that is not there.
2. *Commit*: link the final name, sync the directory, unlink the prepared one. A file whose final name is there has been
   committed; where neither is, something is lost and that is said. A crash between any two of these is mended by
   committing again.
3. *Clean*: remove open files, and prepared ones. An open file of a run that still lives goes too; that run then fails at
   its next snapshot, before it has promised anything.

Hidden names (``.pending``), and not ending in ``.parquet``, are passed over by Parquet readers, by Spark, and by globs.
The steps below (create, sync, rename, link, remove) either happen or do not. Names are relative to the directory, with
slashes. Everything that fails is a ``StorageError`` that names the file.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.storage import without_secrets

from ...storage import check_options
from .part_names import PartName, file_name_of, pending_folder
from .uploads import Upload

_DURABLE_NAMES: set[Path] = set()
"""Folders of whose names this process knows that they are durable."""


class Ready(NamedTuple):
    """A file that was prepared: what a committable says of it, in the order of its columns."""

    pending: str
    """What the place needs to commit it."""
    path: str
    """The name under which it is seen, once it is."""
    rows: int
    size_bytes: int

    def is_prepared_as(self, name: PartName) -> bool:
        """Whether ``pending`` is what some place writes for a file of this name."""
        return self.pending == name.pending or Upload.read(self.pending) is not None


class NewFile(Protocol):
    """A file that is being written and that no reader sees."""

    write_id: str
    stream: Any
    """A ``pa.NativeFile``, to write to."""

    def close(self) -> int:
        """End it; its size in bytes."""
        ...

    def discard(self) -> None:
        """Forget it, closed or not. Never prepared then."""
        ...

    def translated(self) -> AbstractContextManager[None]:
        """Turn what goes wrong while it is written into a sentence."""
        ...


class OutputDirectory(Protocol):
    """Where a sink writes. Holds nothing open, and may be copied and pickled."""

    def begin(self, uid: str) -> NewFile:
        """A new file of a sink."""
        ...

    def prepare(self, files: Sequence[tuple[NewFile, PartName]]) -> list[str]:
        """Make closed files durable, all of one sink. What a commit needs of each, for :attr:`Ready.pending`."""
        ...

    def commit(self, files: Sequence[Ready]) -> None:
        """Make files seen that are not yet. ``StorageError`` where one is lost, or is another than was prepared."""
        ...

    def prepared(self, uid: str) -> Sequence[PartName]:
        """What the sink ``uid`` has prepared and nobody has committed yet."""
        ...

    def clean(self, uid: str, newest_id: int, carried: Sequence[Ready]) -> list[str]:
        """Remove what the sink ``uid`` prepared for checkpoints up to ``newest_id``, but for ``carried``; names of what went."""
        ...


def open_directory(address: str | os.PathLike[str], durable: bool, options: Mapping[str, Any]) -> OutputDirectory:
    """The place of a path or URL: ``s3://bucket/prefix``, with the options of such a storage, or a local directory."""
    scheme, separator, rest = str(address).partition("://")
    if scheme == "s3" and separator:
        from .s3_directory import S3Directory

        return S3Directory.at(str(address), options)
    if separator and scheme != "file":
        raise InvalidInput(
            f"no file sink for {scheme}:// (in {without_secrets(str(address))}); known are file, s3, and paths",
            kind=ErrorKind.UNKNOWN_SCHEME,
        )
    if re.match(r"[A-Za-z0-9+.-]{2,}:/[^/]", str(address)):
        raise InvalidInput(
            f"{str(address)!r} was a URL before it became a path, which has one slash less; give the URL as a str",
            kind=ErrorKind.INVALID_URL,
        )
    check_options("file://", options, ())
    return Directory(rest if separator else address, durable=durable)


def lost(file: Ready, where: object, what: str) -> StorageError:
    """The error for a file that is neither prepared nor committed."""
    rows = "1 row is" if file.rows == 1 else f"{file.rows} rows are"
    return StorageError(
        f"{file.path} was prepared in {where} and is there neither under that name nor {what}; its {rows} lost. Put the "
        "file back, from a backup, or go on from a checkpoint that does not hold it. If the sink has moved, and "
        "the file is in its old place, give up committing it once: drop='UID/committables', with the uid of this sink",
        kind=ErrorKind.OBJECT_MISSING,
        path=file.path,
    )


def size_differs(file: Ready, where: object, found: int) -> StorageError:
    """The error for a file that has another size."""
    return StorageError(
        f"{file.path} in {where} has {found} bytes and was prepared with {file.size_bytes}; something else has written it. "
        "Remove it if it is not wanted",
        kind=ErrorKind.OBJECT_SIZE_DIFFERS,
        path=file.path,
    )


class Directory:
    """A local directory. Holds nothing open, so it may be copied and sent to other processes of the same machine."""

    def __init__(self, root: str | os.PathLike[str], *, durable: bool = True) -> None:
        self._root = Path(root).expanduser().absolute()
        self._durable = durable

    def __str__(self) -> str:
        return str(self._root)

    def begin(self, uid: str) -> NewFile:
        """A new file under an open name."""
        folder = pending_folder(uid)
        self.make(folder)
        return _LocalFile(self, folder)

    def prepare(self, files: Sequence[tuple[NewFile, PartName]]) -> list[str]:
        """Rename closed files; their new names. ``StorageError`` where a file is gone."""
        names = []
        for file, part in files:
            names.append(part.pending)
            self.rename(f"{PurePosixPath(part.pending).parent}/{file.write_id}.open", part.pending)
        for folder in {str(PurePosixPath(name).parent) for name in names}:
            self.sync(folder)
        return names

    def commit(self, files: Sequence[Ready]) -> None:
        """Link the final names. ``StorageError`` where a file is neither prepared nor committed, or has another size."""
        for file in files:
            # What was prepared in a bucket may lie here, copied, under its final name.
            if Upload.read(file.pending) is None:
                self.link(file.pending, file.path)
            found = self.size(file.path)
            if found is None:
                raise lost(file, self, f"as {file.pending}")
            if found != file.size_bytes:
                raise size_differs(file, self, found)
        if files:
            # Only what is durable under its final name may lose the other one.
            self.sync("")
        self.remove(file.pending for file in files if Upload.read(file.pending) is None)

    def prepared(self, uid: str) -> Sequence[PartName]:
        """What the prepared names say."""
        return prepared_names(uid, self.names(pending_folder(uid)))

    def clean(self, uid: str, newest_id: int, carried: Sequence[Ready]) -> list[str]:
        """Remove open files, and prepared ones that no checkpoint holds."""
        folder, kept = pending_folder(uid), {file.pending for file in carried}
        found = [(name, f"{folder}/{name}") for name in self.names(folder)]
        forgotten = [path for name, path in found if path not in kept and is_forgotten(uid, name, newest_id)]
        self.remove(forgotten)
        return forgotten

    def make(self, folder: str) -> None:
        """Have a folder, and those that lead to it; their names are durable on return."""
        with self.translated("make", folder):
            path = self._folder(folder)
            missing = {each for each in [path, *path.parents] if not each.exists()}
            path.mkdir(parents=True, exist_ok=True)
            if not self._durable:
                return
            for each in [path, *path.parents]:
                # Of one that is there, somebody may have died before its name was durable. Once in a process is enough.
                if each in missing or each not in _DURABLE_NAMES:
                    with contextlib.suppress(*([] if each in missing else [OSError])):
                        self._sync(each.parent)
                    _DURABLE_NAMES.add(each)

    def create(self, name: str) -> pa.NativeFile:
        """A new file, to be written and closed. The name must be new."""
        with self.translated("create", name):
            os.close(os.open(self._at(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            return pa.OSFile(str(self._root / name), "wb")

    def sync_file(self, name: str) -> int:
        """Make the bytes of a closed file durable; how many there are."""
        with self.translated("sync", name):
            self._sync(self._at(name))
            return self._at(name).stat().st_size

    def sync(self, folder: str) -> None:
        """Make the names in a folder durable."""
        with self.translated("sync", folder):
            self._sync(self._at(folder))

    def rename(self, old: str, new: str) -> None:
        """Rename a file within a folder; ``new`` must be a name that nobody else uses."""
        with self.translated("rename", old):
            self._at(old).rename(self._at(new))

    def link(self, old: str, new: str) -> None:
        """Give a file a second name. Nothing happens where that name is taken, or the file is not there.

        ``StorageError`` for what is no file.
        """
        with self.translated("link", old), contextlib.suppress(FileExistsError, FileNotFoundError):
            path = self._at(old)
            self._check_file(path, old)
            self._at(new).hardlink_to(path)

    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None where there is none. ``StorageError`` for what is no file."""
        with self.translated("read", name), contextlib.suppress(FileNotFoundError):
            path = self._at(name)
            self._check_file(path, name)
            return path.read_bytes()
        return None

    def size(self, name: str) -> int | None:
        """The size of a file in bytes; None where there is none."""
        with self.translated("look at", name):
            try:
                return self._at(name).stat().st_size
            except FileNotFoundError:
                return None

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; none where there is no folder."""
        with self.translated("list", folder):
            try:
                return sorted(each.name for each in self._folder(folder).iterdir())
            except FileNotFoundError:
                return []

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; those that are gone are passed over. Not synced: what a power failure brings back is removed again."""
        for name in names:
            with self.translated("remove", name):
                self._at(name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def translated(self, what: str, name: str) -> Iterator[None]:
        """Turn what the file system says into a sentence."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"cannot {what} {self._root / name}: {error.strerror or error}; see that the directory is there, can be "
                "written, and has room",
                kind=ErrorKind.STORAGE_FAILED,
                path=name,
            ) from error

    def _at(self, name: str) -> Path:
        """Where a file lies, or a folder. ``StorageError`` where a link in the directory leads elsewhere."""
        parts = PurePosixPath(name).parts
        for depth in range(1, len(parts)):
            self._refuse_link(self._root.joinpath(*parts[:depth]), name)
        return self._root / name

    def _folder(self, name: str) -> Path:
        """Where a folder lies that is no link itself."""
        return self._at(f"{name}/file").parent

    def _check_file(self, path: Path, name: str) -> None:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise StorageError(
                f"{path} is not a file, and a sink prepares files; something else has put it there. Remove it",
                kind=ErrorKind.INVALID_PATH,
                path=name,
            )

    def _refuse_link(self, folder: Path, name: str) -> None:
        if folder.is_symlink():
            raise StorageError(
                f"{folder} is a link, and a sink works only in folders of its own. Put a folder in its place, with the "
                "files that the link leads to",
                kind=ErrorKind.INVALID_PATH,
                path=name,
            )

    def _sync(self, path: Path) -> None:
        if not self._durable:
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _LocalFile:
    """An open file of a local directory."""

    def __init__(self, directory: Directory, folder: str) -> None:
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
        """Remove it."""
        # Nobody misses the end of a file that goes away, even on a full disk.
        with contextlib.suppress(OSError, pa.ArrowException):
            self.stream.close()
        self._directory.remove([self._name])

    def translated(self) -> AbstractContextManager[None]:
        """Errors name the file."""
        return self._directory.translated("write", self._name)


def prepared_names(uid: str, names: Iterable[str]) -> list[PartName]:
    """What the names in the folder of a sink say that are those of prepared files."""
    found = (PartName.of_staged(f"{file_name_of(uid)}/{name}") for name in names)
    return [name for name in found if name is not None]


def is_forgotten(uid: str, name: str, newest_id: int) -> bool:
    """Whether what lies in a sink's folder under this name goes unless a checkpoint holds it."""
    if name.endswith((".open", ".part")):
        return True
    return any(prepared.checkpoint_id <= newest_id for prepared in prepared_names(uid, [name]))


__all__ = [
    "Directory",
    "NewFile",
    "OutputDirectory",
    "Ready",
    "is_forgotten",
    "lost",
    "open_directory",
    "prepared_names",
    "size_differs",
]
