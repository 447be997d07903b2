"""Where a file sink writes: what a place does, and what all places share.

Implementers are ``local_directory`` and ``s3_directory``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import pyarrow as pa

from stateformat.errors import ErrorKind, StorageError

from .part_names import PartName, file_name_of


class PreparedFile(NamedTuple):
    """A prepared file, as a committable holds it, in the order of its columns."""

    pending: str
    """What the place needs to commit it."""
    path: str
    """Its name once it is committed."""
    rows: int
    size_bytes: int


class NewFile(Protocol):
    """A file that is being written and that no reader sees."""

    write_id: str
    stream: pa.NativeFile

    def close(self) -> int:
        """End it; its size in bytes."""

    def discard(self) -> None:
        """Remove it, closed or not."""

    def translated(self) -> AbstractContextManager[None]:
        """Turn errors of writing it into sentences."""


class OutputDirectory(Protocol):
    """Where a sink writes. Can be copied and pickled. ``StorageError`` names the file."""

    def begin(self, uid: str) -> NewFile:
        """A new file of the sink ``uid``."""

    def prepare(self, files: Sequence[tuple[NewFile, PartName]]) -> list[str]:
        """Make closed files of one sink durable. Returns :attr:`PreparedFile.pending` of each."""

    def commit(self, files: Sequence[PreparedFile]) -> None:
        """Make files seen that are not yet. ``StorageError`` where one is lost, or has changed."""

    def prepared(self, uid: str) -> Sequence[PartName]:
        """The files of the sink ``uid`` that are prepared and not committed."""

    def clean(self, uid: str, newest_id: int, carried: Sequence[PreparedFile]) -> list[str]:
        """Remove what ``uid`` prepared for ids up to ``newest_id``, except ``carried``."""


def lost(file: PreparedFile, where: object, what: str) -> StorageError:
    """The error for a file that is neither prepared nor committed."""
    rows = "1 row is" if file.rows == 1 else f"{file.rows} rows are"
    return StorageError(
        f"{file.path} was prepared in {where} and is there neither under that name nor {what}; its {rows} lost. Put "
        "the file back, from a backup, or go on from a checkpoint that does not hold it. If the sink has moved, and "
        "the file is in its old place, give up committing it once: drop='UID/committables', with the uid of this sink",
        kind=ErrorKind.OBJECT_MISSING,
        path=file.path,
    )


def size_differs(file: PreparedFile, where: object, found: int) -> StorageError:
    """The error for a file that has another size."""
    return StorageError(
        f"{file.path} in {where} has {found} bytes and was prepared with {file.size_bytes}: it was changed since. "
        "Remove it if it is not wanted",
        kind=ErrorKind.OBJECT_SIZE_DIFFERS,
        path=file.path,
    )


def prepared_names(uid: str, names: Iterable[str]) -> list[PartName]:
    """Those of the names in the sink's folder that are of prepared files, read."""
    found = (PartName.of_staged(f"{file_name_of(uid)}/{name}") for name in names)
    return [name for name in found if name is not None]


def forgotten_paths(uid: str, folder: str, names: Iterable[str], newest_id: int, kept: Collection[str]) -> list[str]:
    """The paths of what cleaning removes of these names in the folder of the sink ``uid``.

    That is what is open, or prepared for ids up to ``newest_id``, and is not ``kept``.
    """

    def is_forgotten(name: str) -> bool:
        if name.endswith((".open", ".part")):
            return True
        return any(part.checkpoint_id <= newest_id for part in prepared_names(uid, [name]))

    paths = {f"{folder}/{name}": name for name in names}
    return [path for path, name in paths.items() if path not in kept and is_forgotten(name)]
