"""What the file sink asks of a file system: the seam behind which another one may stand.

Six steps, each of which either happens or does not: create a file under a new name, make its bytes durable, rename it, give it
a second name unless that is taken, make the names of a folder durable, remove names. Names are relative to the directory, with
slashes. Everything that fails is a ``StorageError`` that names the file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from stateformat.errors import ErrorKind, StorageError


class Directory:
    """A local directory. Holds nothing open, so it may be copied and sent to other processes of the same machine."""

    def __init__(self, root: str | os.PathLike[str], *, durable: bool = True) -> None:
        self._root = Path(root).expanduser().absolute()
        self._durable = durable

    def __str__(self) -> str:
        return str(self._root)

    def make(self, folder: str) -> None:
        """Have a folder, and those that lead to it; their names are durable on return."""
        path = self._root / folder
        with self.translated("make", folder):
            missing = [path, *path.parents][: sum(not each.exists() for each in [path, *path.parents])]
            path.mkdir(parents=True, exist_ok=True)
            for made in missing:
                self._sync(made.parent)

    def create(self, name: str) -> pa.NativeFile:
        """A new file, to be written and closed. The name must be new."""
        with self.translated("create", name):
            os.close(os.open(self._root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            return pa.OSFile(str(self._root / name), "wb")

    def sync_file(self, name: str) -> int:
        """Make the bytes of a closed file durable; how many there are."""
        with self.translated("sync", name):
            self._sync(self._root / name)
            return (self._root / name).stat().st_size

    def sync(self, folder: str) -> None:
        """Make the names in a folder durable."""
        with self.translated("sync", folder):
            self._sync(self._root / folder)

    def rename(self, old: str, new: str) -> None:
        """Rename a file within a folder; ``new`` must be a name that nobody else uses."""
        with self.translated("rename", old):
            (self._root / old).rename(self._root / new)

    def link(self, old: str, new: str) -> None:
        """Give a file a second name. Nothing happens where that name is taken, or the file is not there."""
        with self.translated("link", old), contextlib.suppress(FileExistsError, FileNotFoundError):
            (self._root / new).hardlink_to(self._root / old)

    def size(self, name: str) -> int | None:
        """The size of a file in bytes; None where there is none."""
        with self.translated("look at", name):
            try:
                return (self._root / name).stat().st_size
            except FileNotFoundError:
                return None

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; none where there is no folder."""
        with self.translated("list", folder):
            try:
                return sorted(each.name for each in (self._root / folder).iterdir())
            except FileNotFoundError:
                return []

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; those that are gone are passed over. Not synced: what a power failure brings back is removed again."""
        for name in names:
            with self.translated("remove", name):
                (self._root / name).unlink(missing_ok=True)

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

    def _sync(self, path: Path) -> None:
        if not self._durable:
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


__all__ = ["Directory"]
