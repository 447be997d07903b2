"""What every storage does in the same way: checks of arguments, and the life of an object being
written.

A storage checks a name before it touches anything, so no path leaves the store whatever a manifest
says. It refuses what only some storages can do (S3 cannot create an empty record conditionally), so
code that runs on the memory storage runs on all of them.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Self

from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.graph import brief
from stateformat.storage import TOP_LEVEL, check_path, is_object_name

CREATE_LIMIT_BYTES: Final = 5 * 2**20
"""``create`` takes less than this. S3 clients may split a larger body and send no condition."""

PathCheck = Callable[[str], str]
"""Returns a path, or raises ``InvalidInput``: ``check_path``, or ``check_relative`` in folders."""


def check_prefix(prefix: str) -> str:
    """Return ``prefix``. Raises ``InvalidInput`` unless a legal path can begin with it."""
    first, *others = prefix.split("/")
    legal = first in TOP_LEVEL if others else any(name.startswith(first) for name in TOP_LEVEL)
    if others and not others[-1]:
        others.pop()
    if not legal or not all(is_object_name(part) for part in others):
        raise InvalidInput(
            f"no object of a store can begin with {prefix!r}. List a prefix under checkpoints/, manifests/, "
            "segments/ or requests/",
            kind=ErrorKind.INVALID_PATH,
            path=prefix,
        )
    return prefix


def check_name(name: str) -> str:
    """Return the name of a folder in ``savepoints/`` if it is one part of a path, else raise."""
    if "/" in name or not is_object_name(name):
        raise InvalidInput(f"{name!r:.80} is no name of a savepoint", kind=ErrorKind.INVALID_PATH, name=name)
    return name


def check_created(path: str, data: bytes, check: PathCheck = check_path) -> None:
    """Raise ``InvalidInput`` for a ``create`` that not every storage can do: an illegal path, no
    bytes or too many.
    """
    check(path)
    if not 0 < len(data) < CREATE_LIMIT_BYTES:
        raise InvalidInput(
            f"{path} cannot be created with {len(data)} bytes: a conditional create takes at least 1 byte and less "
            f"than {CREATE_LIMIT_BYTES}. Write larger objects with open_output",
            kind=ErrorKind.LIMIT_EXCEEDED if data else ErrorKind.INVALID_ARGUMENT,
            path=path,
            size_bytes=len(data),
        )


def check_range(path: str, offset: int, length: int, check: PathCheck = check_path) -> None:
    """Raise ``InvalidInput`` for an illegal path, and a negative offset or length. A range beyond
    the end is legal.
    """
    check(path)
    if offset < 0 or length < 0:
        raise InvalidInput(
            f"the range of {length} bytes from {offset} in {path} is illegal. Offset and length are not negative",
            path=path,
            offset=offset,
            length=length,
        )


def check_options(scheme: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ``InvalidInput`` for options that a storage does not know, such as misspelt ones."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        takes = f"Known are {', '.join(sorted(known))}" if known else "It takes none"
        raise InvalidInput(f"{scheme} storage has no option {', '.join(unknown)}. {takes}", options=unknown)


def missing(url: str, path: str) -> FileNotFoundError:
    """Return the error that every reading method raises for an object that does not exist."""
    return FileNotFoundError(errno.ENOENT, f"no such object in the store {url}", path)


def name_taken(where: str, path: str) -> StorageError:
    """Return the error for a writer that closes an object whose name is taken."""
    return StorageError(f"{path} exists already in {where}. Objects never change: take a new write id", path=path)


class NewObject(ABC):
    """An object being written, on any storage: open, then published or aborted, once.

    A failed step discards the object, so that one whose write failed half-way is never published
    with a gap. Not thread-safe.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._end = ""

    def __repr__(self) -> str:
        return brief(self, self._path)

    @abstractmethod
    def _append(self, data: memoryview) -> None:
        """Append these bytes. The caller may reuse them afterwards."""

    @abstractmethod
    def _publish(self) -> None:
        """Make the object visible, complete and durable."""

    @abstractmethod
    def _discard(self) -> None:
        """Free everything. Never raises."""

    @property
    def closed(self) -> bool:
        return bool(self._end)

    def write(self, data: bytes | memoryview) -> int:
        self._check_open("write to")
        view = memoryview(data).cast("B")
        try:
            self._append(view)
        except BaseException:
            self.abort()
            raise
        return view.nbytes

    def flush(self) -> None:  # noqa: B027 - the same for every storage
        """Do nothing. pyarrow calls it; bytes are visible only after :meth:`close`."""

    def close(self) -> None:
        """Make the object visible, complete and durable, once.

        Raises ``InvalidInput`` after :meth:`abort`.
        """
        if self._end == "published":
            return
        self._check_open("close")
        try:
            self._publish()
        except BaseException:
            self.abort()
            raise
        self._end = "published"

    def abort(self) -> None:
        if not self._end:
            self._end = "aborted"
            self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc and exc[0] is not None:
            self.abort()
        elif not self._end:
            self.close()

    def _check_open(self, verb: str) -> None:
        if self._end:
            raise InvalidInput(
                f"cannot {verb} {self._path}: it was {self._end} before. Open a new object", path=self._path
            )
