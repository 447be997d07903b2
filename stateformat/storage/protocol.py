"""What the format requires of a storage: the class :class:`Storage`, without implementations.

A store is a flat set of named, immutable objects under relative paths (SPEC.md section 2.2). The
publication protocol rests on three guarantees (section 2.1):

1. *read-after-write*: once a write has returned, every reader sees the whole object;
2. *create-if-absent*: of concurrent :meth:`Storage.create` calls for one name exactly one wins, and
   no reader sees part of the object;
3. *honest listing*: a listing has every name that existed throughout it, and its greatest name is
   not less than the greatest that existed when it began.

Implementations are found by URL scheme through the entry-point group ``stateformat.storages``; each
entry is a function ``(url: str, options: Mapping[str, Any]) -> Storage``.
"""

from __future__ import annotations

import builtins
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple, Protocol

from ..errors import ErrorKind, InvalidInput

if TYPE_CHECKING:
    import pyarrow as pa

TOP_LEVEL: Final = ("checkpoints", "manifests", "requests", "segments")
"""The first part of every object's path. Anything else beside them does not belong to the store."""

# Control characters, the backslash, and surrogates, which stand for undecodable bytes.
_FORBIDDEN: Final = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")

REFUSALS: Final = frozenset({ErrorKind.STORAGE_REFUSED, ErrorKind.STORAGE_UNSUITABLE, ErrorKind.INVALID_PATH})
"""Kinds of ``StorageError`` after which nothing was done, and a retry will not help until someone
changes something.
"""


class CreateOutcome(Enum):
    """What is known after one attempt to create an object."""

    CREATED = "created"
    """This call created it."""
    CONFLICT = "conflict"
    """Something already has this name; perhaps from this very call, if its response was lost."""
    UNKNOWN = "unknown"
    """No reliable answer: a lost connection, a time-out, a 5xx. Read the object back to find
    out.
    """


class ObjectInfo(NamedTuple):
    """A listed object: its path relative to the store, and its size."""

    path: str
    size_bytes: int


class Leftover(NamedTuple):
    """What a writer has begun and not ended: it is still writing, or it died. No listing includes
    it.
    """

    path: str
    """The object it was to become; a long name may be cut."""
    size_bytes: int
    name: str
    """The storage's own name for it: a temporary file, an upload."""


class Look(NamedTuple):
    """What lies directly in a plain folder, by name."""

    folders: dict[str, Storage]
    """Each a plain folder; hidden ones too."""
    files: dict[str, int | None]
    """When each was written, in microseconds; None if the storage does not say."""
    links: tuple[str, ...] = ()
    """Links to folders, which are not followed."""


class OutputObject(Protocol):
    """A new object being written. Not visible before :meth:`close` returns; then complete and
    durable.

    As a context manager it closes on success and aborts when the block raises.
    """

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes and return how many."""

    def close(self) -> None:
        """Make the object visible, complete and durable. Raises ``StorageError``."""

    def abort(self) -> None:
        """Discard the object; nothing remains under its name. Never raises."""

    def __enter__(self) -> OutputObject: ...

    def __exit__(self, *exc: object) -> None: ...


class Link(Enum):
    """How an object of another store was added to this one."""

    SHARED = "shared"
    """Both names refer to the same bytes, which are stored once (a hard link)."""
    COPIED = "copied"
    """The server copied it."""


class Storage(ABC):
    """A store of immutable objects. Thread-safe and picklable (``memory://`` in one process only).

    Methods that read raise ``FileNotFoundError`` for a missing object; any other failure is a
    :class:`~stateformat.errors.StorageError` that names the object and the operation.

    A subclass has the abstract methods, and those others that it can do better than, or at all
    unlike, the default. A class that has the abstract methods without being a subclass is taken
    too: :func:`open_storage` and ``CheckpointStore`` add the rest.
    """

    reads_at_once: int = 1
    """How many small reads to have under way, and so how many segments to open ahead: more than 1
    where a small read is mostly waiting, as over a network. A thread costs more than reading a
    file.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    @property
    @abstractmethod
    def url(self) -> str:
        """The address of the store for :func:`open_storage`, without credentials."""

    @abstractmethod
    def exists(self) -> bool:
        """Return whether the store exists: a directory, or a bucket with an object under the
        prefix.
        """

    @abstractmethod
    def read(self, path: str) -> pa.Buffer:
        """Return the whole object."""

    @abstractmethod
    def open_output(self, path: str) -> OutputObject:
        """Begin a new object, whose name contains a random id and is never reused."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> CreateOutcome:
        """Create a small object (< 5 MiB) if absent, atomically, in one attempt.

        Raises ``StorageError``; its kind is in :data:`REFUSALS` if nothing was created
        (``STORAGE_UNSUITABLE``: the storage ignores the condition). ``details["visible"]`` says
        that the object exists but may not survive a power failure.
        """

    @abstractmethod
    def list(self, prefix: str) -> builtins.list[ObjectInfo]:
        """Return all objects whose path begins with ``prefix`` (``"checkpoints/"``), sorted by
        path.
        """

    @abstractmethod
    def delete(self, paths: Iterable[str]) -> None:
        """Delete these objects; missing ones are ignored."""

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        """Return at most ``length`` bytes from ``offset``; fewer at the end of the object."""
        whole = self.read(path)
        start = min(offset, whole.size)
        return whole.slice(start, min(length, whole.size - start))

    def open_input(self, path: str) -> pa.NativeFile | BinaryIO:
        """Return a seekable file, for readers of a few Parquet row groups. The caller closes it."""
        import pyarrow as pa

        return pa.BufferReader(self.read(path))

    def size(self, path: str) -> int:
        """Return the object's size in bytes."""
        return int(self.read(path).size)

    def names(self, folder: str) -> builtins.list[str]:
        """Return the paths directly in a folder (``"checkpoints/"``), sorted; as complete as a
        listing.
        """
        return [item.path for item in self.list(folder) if "/" not in item.path[len(folder) :]]

    def names_after(self, path: str) -> builtins.list[str]:
        """Return the paths greater than ``path`` in its folder, sorted, from one look.

        It has every name that existed throughout the look: look twice before concluding anything
        from a missing name.
        """
        return [name for name in self.names(path[: path.rindex("/") + 1]) if name > path]

    def leftovers(self) -> builtins.list[Leftover]:
        """Return everything begun and not ended, by dead and living writers, sorted, so that gc can
        discard it (SPEC.md section 9).
        """
        return []

    def discard(self, leftovers: Iterable[Leftover]) -> None:  # noqa: B027 - nothing is left over by default
        """Remove these; missing ones are ignored. If the writer is still alive, its close fails."""

    def make_durable(self, paths: Iterable[str]) -> None:  # noqa: B027 - objects are durable by default
        """Return when these existing objects would survive a power failure.

        For storages where an object becomes visible shortly before: its writer waits for that, but
        may die meanwhile. Call it before relying on others' objects.
        """

    def folder(self) -> Storage | None:
        """Return the same place as a plain folder, for files with any relative path, in any folder,
        hidden ones too. None if it holds only objects of stores.

        ``list`` takes any prefix and lists files of any name. Opening it writes nothing.
        """
        return None

    def look(self) -> Look:
        """Return what lies directly in this plain folder, by one request where there are few names;
        nothing if the storage does not know.
        """
        return Look({}, {})

    def above(self) -> Storage | None:
        """Return the plain folder that this place lies in; None at the top, or if the storage does
        not know.
        """
        return None

    def savepoints(self) -> builtins.list[str]:
        """Return the names of the folders in ``savepoints/`` below the store, sorted, including
        those without a checkpoint.

        They lie beside the four folders and do not belong to the store (SPEC.md section 10).
        """
        return []

    def savepoint(self, name: str) -> Storage:  # noqa: ARG002
        """Return the storage of ``savepoints/NAME``, with the options of this one.

        Raises ``InvalidInput`` if the storage has none.
        """
        raise InvalidInput(
            f"the storage of {self.url} keeps no savepoints below a store; copy the checkpoint to a store of its own "
            "(`ckpt copy`)",
            url=self.url,
        )

    def remove_savepoint(self, name: str) -> None:
        """Delete the objects of the store there, records first, and what its writers have begun.

        Anything else in the folder stays. Links are not followed: a link in the way is a
        ``StorageError`` before anything is deleted.
        """
        self.savepoint(name)

    def link_from(self, source: Storage, path: str, size_bytes: int) -> Link | None:  # noqa: ARG002
        """Make the object ``path`` of this store from that of another store, whole, without passing
        its bytes through the process.

        ``size_bytes`` is the expected length; the caller verifies it. The object may not be durable
        before :meth:`make_durable`. Returns None, having done nothing, if this is impossible, as
        between two disks or servers. Raises ``FileNotFoundError`` if the source has no such object,
        and ``StorageError``, also if the name is taken here.
        """
        return None

    def shared(self, prefix: str) -> dict[str, tuple[str, int]]:  # noqa: ARG002
        """Return the objects whose path begins with ``prefix`` and that share their bytes with
        other names.

        By path: a value that identifies the bytes, and how many names they have on the storage.
        """
        return {}


def check_relative(path: str) -> str:
    """Return the path if it stays in its folder: relative, without empty, ``.`` or ``..`` parts."""
    if any(part in ("", ".", "..") for part in path.split("/")) or re.search(r"[\x00\ud800-\udfff]", path):
        raise InvalidInput(
            f"path {path!r} leaves its folder; legal paths are relative and have no part that is empty, . or ..",
            kind=ErrorKind.INVALID_PATH,
            path=path,
        )
    return path


def is_object_name(name: str) -> bool:
    """Return whether one part of a path below the first is legal: not empty, hidden, or
    forbidden.
    """
    return bool(name) and not name.startswith(".") and _FORBIDDEN.search(name) is None


def is_object_path(path: str) -> bool:
    """Return whether an object can have this path (SPEC.md section 2.2)."""
    first, *others = path.split("/")
    return first in TOP_LEVEL and bool(others) and all(is_object_name(part) for part in others)


def check_path(path: str) -> str:
    """Return the path if an object can have it (:func:`is_object_path`); else raise
    ``InvalidInput``.
    """
    if not is_object_path(path):
        raise InvalidInput(
            f"path {path!r} leaves the store or is not one of its objects; legal paths are relative, lie under "
            "checkpoints/, manifests/, segments/ or requests/, and have no empty or dotted part",
            kind=ErrorKind.INVALID_PATH,
            path=path,
        )
    return path
