"""What every storage does alike: checks of arguments, and the life of an object that is being written.

A storage checks a name before it touches anything, so that no path leaves the store whatever a manifest says, and
refuses what only some storages could do (an empty record cannot be created conditionally on S3), so that code which runs
on the memory storage runs on all of them.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, Final, Self

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.storage import TOP_LEVEL, check_path, is_object_name

CREATE_LIMIT_BYTES: Final = 5 * 2**20
"""``create`` takes less than this. From 5 MiB on, clients of S3 may split a body, and a split body has no condition."""


def check_prefix(prefix: str) -> str:
    """Return ``prefix`` if a legal path can begin with it (the empty one included), else raise ``InvalidInput``."""
    first, *others = prefix.split("/")
    legal_first = first in TOP_LEVEL if others else any(name.startswith(first) for name in TOP_LEVEL)
    if (
        not legal_first
        or not all(is_object_name(part) for part in others[:-1])
        or (others and others[-1] and not is_object_name(others[-1]))
    ):
        raise InvalidInput(
            f"no object of a store can begin with {prefix!r}; list a prefix under checkpoints/, manifests/, segments/ or "
            "requests/",
            kind=ErrorKind.INVALID_PATH,
            path=prefix,
        )
    return prefix


def check_created(path: str, data: bytes) -> None:
    """Refuse a ``create`` that some storage could not do atomically: an illegal path, no bytes, or too many of them."""
    check_path(path)
    if not 0 < len(data) < CREATE_LIMIT_BYTES:
        raise InvalidInput(
            f"{path} cannot be created with {len(data)} bytes: a conditional create takes between 1 byte and less than "
            f"{CREATE_LIMIT_BYTES}; write larger objects with open_output",
            kind=ErrorKind.LIMIT_EXCEEDED if data else ErrorKind.INVALID_ARGUMENT,
            path=path,
            size_bytes=len(data),
        )


def check_range(path: str, offset: int, length: int) -> None:
    """Refuse an illegal path and a range that is none. A range beyond the end is fine; it is only short."""
    check_path(path)
    if offset < 0 or length < 0:
        raise InvalidInput(
            f"range of {length} bytes from {offset} in {path} is none; offset and length are not negative",
            path=path,
            offset=offset,
            length=length,
        )


def check_options(scheme: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse options that a storage does not know: a misspelt one would otherwise be ignored."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        takes = f"known are {', '.join(sorted(known))}" if known else "it takes none"
        raise InvalidInput(f"{scheme} storage has no option {', '.join(unknown)}; {takes}", options=unknown)


def missing(url: str, path: str) -> FileNotFoundError:
    """The error of every method that reads an object which is not there."""
    return FileNotFoundError(errno.ENOENT, f"no such object in the store {url}", path)


class NewObject(ABC):
    """The life of an object that is being written, on any storage: open, then published or aborted, once.

    A storage gives three steps: ``_append`` bytes, ``_publish`` under the final name, ``_discard`` everything. A step
    that fails discards, so an object whose write failed half-way can never be published with a hole in it.
    Not thread-safe: one writer, one thread at a time.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._end = ""

    @abstractmethod
    def _append(self, data: memoryview) -> None:
        """Take these bytes; they may be reused by the caller afterwards."""

    @abstractmethod
    def _publish(self) -> None:
        """Make the object visible, whole and durable."""

    @abstractmethod
    def _discard(self) -> None:
        """Free everything. Never raises."""

    @property
    def closed(self) -> bool:
        """Whether the object was published or aborted; pyarrow asks."""
        return bool(self._end)

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes (anything with the buffer protocol); returns how many."""
        self._check_open("write to")
        view = memoryview(data).cast("B")
        try:
            self._append(view)
        except BaseException:
            self.abort()
            raise
        return view.nbytes

    def flush(self) -> None:  # noqa: B027 - the same for every storage
        """Nothing: bytes are visible and durable after ``close``, never before. pyarrow calls it."""

    def close(self) -> None:
        """Make the object visible, whole and durable. A second call does nothing; after ``abort`` it is refused."""
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
        """Forget the object. Nothing happens if it is published already."""
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
                f"cannot {verb} {self._path}: it was {self._end} before; open a new object", path=self._path
            )
