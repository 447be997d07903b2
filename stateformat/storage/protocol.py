"""What the format asks of a storage: the :class:`Storage` protocol and nothing that implements it.

Theory of operation. A store is a flat set of named, immutable objects. Names are relative, ``/``-separated paths
(SPEC.md section 2.2). Three guarantees carry everything that the publication protocol promises (section 2.1):

1. *read-after-write*: what was written is read, whole, by everybody, as soon as the write has returned;
2. *create-if-absent*: of any number of concurrent :meth:`Storage.create` calls for one name exactly one wins, and the
   object is never seen in part;
3. *honest listing*: a listing holds every name that existed during the whole of it, and its greatest name is not less
   than the greatest that existed when it began.

Implementations live in ``backends/storage`` and are found by URL scheme through the entry-point group
``stateformat.storages``; each entry is a function ``(url: str, options: Mapping[str, Any]) -> Storage``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, Protocol, runtime_checkable

from ..errors import ErrorKind, InvalidInput

if TYPE_CHECKING:
    import pyarrow as pa

TOP_LEVEL: Final = ("checkpoints", "manifests", "requests", "segments")
"""With what the paths of objects begin. Whatever else lies beside these is none of the store's business."""

# Control characters, the backslash, and what is no character but stands for a byte that is none.
_FORBIDDEN: Final = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")
# A URL that pathlib has made a path of.
_FLATTENED: Final = re.compile(r"[A-Za-z0-9+.-]{2,}:/[^/]")

REFUSALS: Final = frozenset({ErrorKind.STORAGE_REFUSED, ErrorKind.STORAGE_UNSUITABLE, ErrorKind.INVALID_PATH})
"""Kinds of ``StorageError`` with which a request was refused: it has certainly done nothing, and would again do nothing
until somebody changes something (rights, room on the disk, the bucket). No other kind says what was done."""


class CreateOutcome(Enum):
    """What is known after one attempt to create an object."""

    CREATED = "created"
    """Our bytes are there, by this very call."""
    CONFLICT = "conflict"
    """The storage said that something is in the way (it may be our own bytes of an answer that was lost)."""
    UNKNOWN = "unknown"
    """No trustworthy answer: a lost connection, a time-out, a 5xx after the request was sent. Read back to learn."""


class ObjectInfo(NamedTuple):
    """One listed object: its path relative to the store and its size in bytes."""

    path: str
    size_bytes: int


class Leftover(NamedTuple):
    """What a writer has begun and not ended: it is writing still, or it died. No object, and never listed as one."""

    path: str
    """The object that it was to become; a long name may be cut."""
    size_bytes: int
    name: str
    """What the storage itself calls it: a temporary file, an upload."""


class OutputObject(Protocol):
    """A new object being written. It becomes visible, whole and durable, when :meth:`close` returns; never before.

    As a context manager it closes on success and aborts when the block raises.
    """

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes; returns how many."""
        ...

    def close(self) -> None:
        """Make the object visible under its final name, whole and durable. Raises ``StorageError``."""
        ...

    def abort(self) -> None:
        """Forget the object; nothing stays under its final name. Never raises."""
        ...

    def __enter__(self) -> OutputObject: ...

    def __exit__(self, *exc: object) -> None: ...


@runtime_checkable
class Storage(Protocol):
    """A store of immutable objects. Thread-safe and picklable (``memory://`` within one process only).

    A missing object is the built-in ``FileNotFoundError``, raised by every method that reads; every other failure is a
    :class:`~stateformat.errors.StorageError` that names the object and the operation.
    """

    @property
    def url(self) -> str:
        """The address of the store, with which :func:`open_storage` finds it again, without credentials."""
        ...

    def exists(self) -> bool:
        """Whether the store is there at all (a directory, a bucket and at least one object under the prefix)."""
        ...

    def read(self, path: str) -> pa.Buffer:
        """The whole object."""
        ...

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        """At most ``length`` bytes from ``offset``: fewer where the object ends earlier, never padded."""
        ...

    def open_input(self, path: str) -> pa.NativeFile | BinaryIO:
        """A seekable file, for Parquet readers that fetch only some row groups. The caller closes it."""
        ...

    def size(self, path: str) -> int:
        """The object's size in bytes."""
        ...

    def open_output(self, path: str) -> OutputObject:
        """Begin a new object under a name that nobody uses twice (it carries a random id)."""
        ...

    def create(self, path: str, data: bytes) -> CreateOutcome:
        """Create-if-absent of a small object (< 5 MiB), atomic and whole. One attempt: the caller decides on retries.

        Raises ``StorageError``: of a kind of :data:`REFUSALS` where it is certain that nothing was created by this request
        (``STORAGE_UNSUITABLE`` where the storage is known to ignore the condition), of another kind where it is not.
        ``details["visible"]`` says that the object stands, and that it may not survive a power failure.
        """
        ...

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose path begins with ``prefix`` (``"checkpoints/"``), sorted by path; empty if there are none."""
        ...

    def delete(self, paths: Iterable[str]) -> None:
        """Delete these objects; one that is already gone is fine."""
        ...


@runtime_checkable
class TellsLeftovers(Protocol):
    """What a :class:`Storage` has besides where an object that is being written shows, as a file or an upload.

    ``gc`` asks for it and discards what belongs to attempts that have ended (SPEC.md section 9). A storage in which
    nothing is left behind, or something else tidies up, does without.
    """

    def leftovers(self) -> list[Leftover]:
        """Everything begun and not ended, of the dead and of the living, sorted."""
        ...

    def discard(self, leftovers: Iterable[Leftover]) -> None:
        """Remove these; one that is already gone is fine. A writer that still lives then fails to close its object."""
        ...


@runtime_checkable
class MakesDurable(Protocol):
    """What a :class:`Storage` has besides where an object may be seen a moment before it survives a power failure.

    Whoever writes an object waits until it is durable; but the writer may die between the two, and then whoever builds
    on what it finds has to wait in its place.
    """

    def make_durable(self, paths: Iterable[str]) -> None:
        """Return when these objects, which stand, would survive a power failure."""
        ...


@runtime_checkable
class ListsNames(Protocol):
    """What a :class:`Storage` has besides where names alone, or the last of them, are cheaper than a listing with sizes.

    Publishing then costs the same however many records are kept.
    """

    def names(self, folder: str) -> list[str]:
        """The paths of the objects directly in a folder (``"checkpoints/"``), sorted; as complete as :meth:`Storage.list`."""
        ...

    def names_after(self, path: str) -> list[str]:
        """The paths in the folder of ``path`` that are greater, sorted, by one look.

        A look holds every name that existed during the whole of it. A name that comes, or goes, meanwhile may be missing,
        so whoever concludes something from a missing name looks twice.
        """
        ...


def names(storage: Storage, folder: str) -> list[str]:
    """The same for any storage."""
    if isinstance(storage, ListsNames):
        return storage.names(folder)
    return [item.path for item in storage.list(folder)]


def names_after(storage: Storage, path: str) -> list[str]:
    """The same for any storage."""
    if isinstance(storage, ListsNames):
        return storage.names_after(path)
    return [item.path for item in storage.list(path[: path.rindex("/") + 1]) if item.path > path]


@runtime_checkable
class ReadsAtOnce(Protocol):
    """What a :class:`Storage` has besides where a small read is mostly waiting, as over a network."""

    reads_at_once: int
    """How many small reads it is worth to have under way: so many segments are opened ahead of the one that is read."""


def reads_at_once(storage: Storage) -> int:
    """What the storage says of :class:`ReadsAtOnce`; 1 where it says nothing, since another thread costs more than a file."""
    return max(1, int(getattr(storage, "reads_at_once", 1)))


def make_durable(storage: Storage, paths: Iterable[str]) -> None:
    """The same for any storage. Called for objects that this process did not write and is about to rely on."""
    if isinstance(storage, MakesDurable):
        storage.make_durable(paths)


def is_object_name(name: str) -> bool:
    """Whether one part of a path is legal below the first: not empty, not hidden, no character that is forbidden."""
    return bool(name) and not name.startswith(".") and _FORBIDDEN.search(name) is None


def is_object_path(path: str) -> bool:
    """Whether a path is one that an object can have (SPEC.md section 2.2).

    Legal: relative, ``/``-separated, first part of :data:`TOP_LEVEL`, at least one more part, no part empty or beginning
    with a dot, no backslash, no control character, no lone surrogate.
    """
    first, *others = path.split("/")
    return first in TOP_LEVEL and bool(others) and all(is_object_name(part) for part in others)


def check_path(path: str) -> str:
    """Return ``path`` if an object can have it (:func:`is_object_path`), else raise ``InvalidInput``."""
    if not is_object_path(path):
        raise InvalidInput(
            f"path {path!r} leaves the store or is not one of its objects; legal paths are relative, lie under "
            "checkpoints/, manifests/, segments/ or requests/, and have no empty or dotted part",
            kind=ErrorKind.INVALID_PATH,
            path=path,
        )
    return path


def as_url(url: str | os.PathLike[str]) -> str:
    """A URL or path as text; ``InvalidInput`` for anything else."""
    try:
        found: object = os.fspath(url)
    except TypeError:
        found = None
    if not isinstance(found, str):
        raise InvalidInput(
            f"{url!r} is of type {type(url).__name__}; give a URL, or a path as text or pathlib.Path",
            kind=ErrorKind.INVALID_URL,
        )
    if not isinstance(url, str) and _FLATTENED.match(found):
        raise InvalidInput(
            f"{found!r} was a URL before it became a path, which has one slash less; give the URL as text",
            kind=ErrorKind.INVALID_URL,
        )
    return found


def open_storage(url: str | os.PathLike[str], **options: Any) -> Storage:
    """The storage of a URL, found by scheme through the entry-point group ``stateformat.storages``.

    A plain path is ``file://``. ``options`` go to the storage as they are (``endpoint_url``, ``key``, ``secret`` for
    ``s3://``). Raises ``InvalidInput`` for an unknown scheme or a missing extra, with the line that installs it.
    """
    from importlib.metadata import entry_points

    from .addresses import without_secrets

    url = as_url(url)
    scheme, separator, _ = url.partition("://")
    if not separator:
        scheme, url = "file", url
    if not url.strip():
        raise InvalidInput("the store's address is empty; give a path or a URL", kind=ErrorKind.INVALID_URL)
    found = {entry.name: entry for entry in entry_points(group="stateformat.storages")}
    if scheme not in found:
        raise InvalidInput(
            f"no storage for {scheme}:// (in {without_secrets(url)}); known are {', '.join(sorted(found))}. Others can be added through "
            "the entry-point group stateformat.storages",
            kind=ErrorKind.UNKNOWN_SCHEME,
            url=without_secrets(url),
        )
    factory: Any = found[scheme].load()
    checked: Mapping[str, Any] = options
    storage: Storage = factory(url, checked)
    return storage
