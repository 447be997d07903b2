"""What the format asks of a storage: the :class:`Storage` protocol, and nothing that implements it.

A store is a flat set of named, immutable objects under relative paths (SPEC.md section 2.2). The
publication protocol rests on three guarantees (section 2.1):

1. *read-after-write*: once a write has returned, everyone reads it, whole;
2. *create-if-absent*: of concurrent :meth:`Storage.create` calls for one name exactly one wins, and
   nobody sees a part of the object;
3. *honest listing*: a listing holds every name that existed during the whole of it, and its
   greatest name is not less than the greatest that existed when it began.

Implementations are found by URL scheme through the entry-point group ``stateformat.storages``; each
entry is a function ``(url: str, options: Mapping[str, Any]) -> Storage``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple, Protocol, runtime_checkable

from ..errors import ErrorKind, InvalidInput

if TYPE_CHECKING:
    import pyarrow as pa

TOP_LEVEL: Final = ("checkpoints", "manifests", "requests", "segments")
"""The first parts of all objects' paths. Whatever else lies beside them is not the store's."""

# Control characters, the backslash, and what is no character but stands for a byte that is none.
_FORBIDDEN: Final = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")

REFUSALS: Final = frozenset({ErrorKind.STORAGE_REFUSED, ErrorKind.STORAGE_UNSUITABLE, ErrorKind.INVALID_PATH})
"""Kinds of ``StorageError`` that say: nothing was done, nor will be until someone changes
something.
"""


class CreateOutcome(Enum):
    """What is known after one attempt to create an object."""

    CREATED = "created"
    """This very call created it."""
    CONFLICT = "conflict"
    """Something is in the way; perhaps our own bytes, after a lost answer."""
    UNKNOWN = "unknown"
    """No trustworthy answer: a lost connection, a time-out, a 5xx. Read back to learn."""


class ObjectInfo(NamedTuple):
    """A listed object: its path relative to the store, and its size."""

    path: str
    size_bytes: int


class Leftover(NamedTuple):
    """What a writer has begun and not ended; it still writes, or it died. No listing has it."""

    path: str
    """The object that it was to become; a long name may be cut."""
    size_bytes: int
    name: str
    """The storage's own name for it: a temporary file, an upload."""


class OutputObject(Protocol):
    """A new object being written. Not visible before :meth:`close` returns; then whole and durable.

    As a context manager it closes on success and aborts when the block raises.
    """

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes; returns how many."""

    def close(self) -> None:
        """Make the object visible, whole and durable. Raises ``StorageError``."""

    def abort(self) -> None:
        """Discard the object; nothing stays under its name. Never raises."""

    def __enter__(self) -> OutputObject: ...

    def __exit__(self, *exc: object) -> None: ...


@runtime_checkable
class Storage(Protocol):
    """A store of immutable objects. Thread-safe and picklable (``memory://`` in one process only).

    Methods that read raise ``FileNotFoundError`` for a missing object; any other failure is a
    :class:`~stateformat.errors.StorageError` that names the object and the operation.
    """

    @property
    def url(self) -> str:
        """The address of the store for :func:`open_storage`, without credentials."""

    def exists(self) -> bool:
        """Whether the store exists: a directory, or a bucket with an object under the prefix."""

    def read(self, path: str) -> pa.Buffer:
        """The whole object."""

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        """At most ``length`` bytes from ``offset``; fewer at the end of the object."""

    def open_input(self, path: str) -> pa.NativeFile | BinaryIO:
        """A seekable file, for Parquet readers of some row groups. The caller closes it."""

    def size(self, path: str) -> int:
        """The object's size in bytes."""

    def open_output(self, path: str) -> OutputObject:
        """Begin a new object, whose name carries a random id and is never used twice."""

    def create(self, path: str, data: bytes) -> CreateOutcome:
        """Create-if-absent of a small object (< 5 MiB), atomic and whole, in one attempt.

        Raises ``StorageError``, of a kind in :data:`REFUSALS` where nothing was created
        (``STORAGE_UNSUITABLE``: the storage ignores the condition). ``details["visible"]`` says
        that the object exists but may not survive a power failure.
        """

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose path begins with ``prefix`` (``"checkpoints/"``), sorted by path."""

    def delete(self, paths: Iterable[str]) -> None:
        """Delete these objects; missing ones are fine."""


@runtime_checkable
class TellsLeftovers(Protocol):
    """A :class:`Storage` that can list what writers have begun; gc discards it (SPEC.md section
    9).
    """

    def leftovers(self) -> list[Leftover]:
        """Everything begun and not ended, by dead and living writers, sorted."""

    def discard(self, leftovers: Iterable[Leftover]) -> None:
        """Remove these; missing ones are fine. A writer that still lives fails when it closes."""


@runtime_checkable
class MakesDurable(Protocol):
    """A :class:`Storage` that shows an object a moment before it would survive a power failure.

    The writer waits, but may die meanwhile; then whoever builds on the object waits instead.
    """

    def make_durable(self, paths: Iterable[str]) -> None:
        """Return when these existing objects would survive a power failure."""


@runtime_checkable
class ListsNames(Protocol):
    """A :class:`Storage` in which names alone, or the last of them, cost less than a listing."""

    def names(self, folder: str) -> list[str]:
        """Paths directly in a folder (``"checkpoints/"``), sorted; complete as a listing."""

    def names_after(self, path: str) -> list[str]:
        """Greater paths than ``path`` in its folder, sorted, by one look.

        It has every name that existed during the whole of it: look twice to conclude from a missing
        one.
        """


def names(storage: Storage, folder: str) -> list[str]:
    """:meth:`ListsNames.names` for any storage."""
    if isinstance(storage, ListsNames):
        return storage.names(folder)
    return [item.path for item in storage.list(folder)]


def names_after(storage: Storage, path: str) -> list[str]:
    """:meth:`ListsNames.names_after` for any storage."""
    if isinstance(storage, ListsNames):
        return storage.names_after(path)
    return [item.path for item in storage.list(path[: path.rindex("/") + 1]) if item.path > path]


@runtime_checkable
class ReadsAtOnce(Protocol):
    """A :class:`Storage` in which a small read is mostly waiting, as over a network."""

    reads_at_once: int
    """How many small reads, and so segments to open ahead, are worth having under way."""


def reads_at_once(storage: Storage) -> int:
    """:class:`ReadsAtOnce` for any storage; 1 if unknown: a thread costs more than a file."""
    return max(1, int(getattr(storage, "reads_at_once", 1)))


def make_durable(storage: Storage, paths: Iterable[str]) -> None:
    """:meth:`MakesDurable.make_durable` for any storage, before relying on others' objects."""
    if isinstance(storage, MakesDurable):
        storage.make_durable(paths)


@runtime_checkable
class HasFolder(Protocol):
    """A :class:`Storage` that can also be read as a plain folder, whatever lies there."""

    def folder(self) -> Storage:
        """The same place, for files with any relative path: hidden ones too, in any folder.

        ``list`` takes any prefix and lists files of any name. Nothing is written by opening it.
        """


@runtime_checkable
class HoldsSavepoints(Protocol):
    """A :class:`Storage` that reaches the stores in ``savepoints/`` below its own store.

    They lie beside the four folders and are no part of the store (SPEC.md section 10).
    """

    def savepoints(self) -> list[str]:
        """The names of the folders there, sorted, also of those that hold no checkpoint."""

    def savepoint(self, name: str) -> Storage:
        """The storage of ``savepoints/NAME``, with the options of this one."""

    def remove_savepoint(self, name: str) -> None:
        """Delete the objects of the store there, records first, and what its writers have begun.

        Anything else in the folder stays. No link is followed: one in the way is a
        ``StorageError`` before anything is deleted.
        """


class Link(Enum):
    """How an object of another store came into this one."""

    SHARED = "shared"
    """Both names lead to the same bytes, which are kept once (a hard link)."""
    COPIED = "copied"
    """The server has copied it by itself."""


@runtime_checkable
class LinksObjects(Protocol):
    """A :class:`Storage` that takes objects of another store without their bytes passing here."""

    def link_from(self, source: Storage, path: str, size_bytes: int) -> Link | None:
        """Make the object ``path`` of this store that of another store, whole.

        ``size_bytes`` is how long it should be; who calls verifies that it is. It may not be
        durable before :func:`make_durable`. None where this cannot be done, as between two disks or
        servers; then nothing was. Raises ``FileNotFoundError`` where the source has no such object,
        and ``StorageError``, also where the name is taken here.
        """


@runtime_checkable
class SharesBytes(Protocol):
    """A :class:`Storage` in which one object's bytes may be kept under several names."""

    def shared(self, prefix: str) -> dict[str, tuple[str, int]]:
        """The objects whose path begins with ``prefix`` that share their bytes with other names.

        By path: what stands for the bytes, and how many names they have on the storage.
        """


def folder_of(storage: Storage) -> Storage | None:
    """:meth:`HasFolder.folder` for any storage; None where it holds only objects of stores."""
    return storage.folder() if isinstance(storage, HasFolder) else None


def check_relative(path: str) -> str:
    """The path, if it stays in its folder: relative, without empty, ``.`` or ``..`` parts."""
    if any(part in ("", ".", "..") for part in path.split("/")) or re.search(r"[\x00\ud800-\udfff]", path):
        raise InvalidInput(
            f"path {path!r} leaves its folder; legal paths are relative and have no part that is empty, . or ..",
            kind=ErrorKind.INVALID_PATH,
            path=path,
        )
    return path


def is_object_name(name: str) -> bool:
    """Whether one part of a path below the first is legal: not empty, hidden, or forbidden."""
    return bool(name) and not name.startswith(".") and _FORBIDDEN.search(name) is None


def is_object_path(path: str) -> bool:
    """Whether an object can have this path (SPEC.md section 2.2)."""
    first, *others = path.split("/")
    return first in TOP_LEVEL and bool(others) and all(is_object_name(part) for part in others)


def check_path(path: str) -> str:
    """The path, if an object can have it (:func:`is_object_path`), else ``InvalidInput``."""
    if not is_object_path(path):
        raise InvalidInput(
            f"path {path!r} leaves the store or is not one of its objects; legal paths are relative, lie under "
            "checkpoints/, manifests/, segments/ or requests/, and have no empty or dotted part",
            kind=ErrorKind.INVALID_PATH,
            path=path,
        )
    return path
