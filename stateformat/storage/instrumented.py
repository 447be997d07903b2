"""A storage that is watched: the same storage, with every operation counted and, at level DEBUG, told.

Theory of operation. ``CheckpointStore`` puts one :class:`InstrumentedStorage` in front of its storage, so whatever the library does,
in any thread, on any backend, passes here once. An observed storage is meant to be taken for the storage itself: it has its
class for ``isinstance``, its ``repr``, and every attribute that the protocol does not name; so it can do what that storage
can (``storage.TellsLeftovers``, ``storage.MakesDurable``), and nothing else.

What it hands out is what the storage hands out, with one exception. An object being written comes back in a shell that
counts; a file being read comes back as it is, because pyarrow reads a native one without the interpreter's lock, and a
shell would take that away. So who reads such a file counts its bytes (:func:`read_input`, :func:`count_input`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any, BinaryIO

from .protocol import CreateOutcome, ObjectInfo, OutputObject, Storage
from .stats import Stats, current_stats, stats_of

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

Measure = Callable[[Any], tuple[int, int]]
"""Objects and bytes of an answer."""


def instrumented(storage: Storage, stats: Stats | None = None) -> InstrumentedStorage:
    """The storage, observed: itself if it is so already (and no other ``stats`` are to be filled)."""
    if isinstance(storage, InstrumentedStorage) and stats in (None, storage.stats):
        return storage
    return InstrumentedStorage(storage, Stats() if stats is None else stats)


def read_input(storage: Storage, file: Any, size_bytes: int) -> bytes:
    """Read from a file of :meth:`Storage.open_input`: at most so many bytes, none at its end. Counted."""
    stats, start = stats_of(storage), perf_counter()
    outer = current_stats.set(stats)
    try:
        chunk: bytes = file.read(size_bytes)
    finally:
        current_stats.reset(outer)
    stats.count("open_input", calls=0, size_bytes=len(chunk), seconds=perf_counter() - start)
    return chunk


def count_input(storage: Storage, size_bytes: int) -> None:
    """Say that somebody else has read so many bytes from such a file."""
    stats_of(storage).count("open_input", calls=0, size_bytes=size_bytes)


class InstrumentedStorage:
    """A storage in front of another. Implements :class:`stateformat.storage.protocol.Storage`.

    A pickled copy begins at zero and counts what is done in its own process: a worker sends ``storage.stats`` back, and the
    driver takes it by :meth:`Stats.include`. A forked child goes on from what had been counted.
    """

    def __init__(self, storage: Storage, stats: Stats) -> None:
        self._inner = storage
        self.stats = stats

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The storage's: who asks what kind of storage this is means that one."""
        return self._inner.__class__

    def __getattr__(self, name: str) -> Any:
        # Only what is not found here comes here. Unpickling asks before there is a storage to ask.
        if name == "_inner":
            raise AttributeError(name)
        found = getattr(self._inner, name)
        if name == "leftovers":
            return lambda: self._observe(name, "", found, (), _many)
        if name in ("names", "names_after"):
            return lambda path: self._observe("list", path, found, (path,), _many)
        if name in ("discard", "make_durable"):
            return lambda items: self._each(name, found, items)
        return found

    def __repr__(self) -> str:
        return repr(self._inner)

    def __reduce__(self) -> tuple[Any, ...]:
        return (instrumented, (self._inner,))

    @property
    def url(self) -> str:
        """The storage's."""
        return self._inner.url

    def exists(self) -> bool:
        """Counted; no objects."""
        found: bool = self._observe("exists", "", self._inner.exists, (), _nothing)
        return found

    def read(self, path: str) -> pa.Buffer:
        """Counted with the object's bytes."""
        return self._observe("read", path, self._inner.read, (path,), _content)

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        """Counted with the bytes that came."""
        return self._observe("read_range", path, self._inner.read_range, (path, offset, length), _content)

    def open_input(self, path: str) -> pa.NativeFile | BinaryIO:
        """The opening is counted; the bytes are by who reads them."""
        return self._observe("open_input", path, self._inner.open_input, (path,), _one)

    def size(self, path: str) -> int:
        """Counted; no bytes are moved."""
        found: int = self._observe("size", path, self._inner.size, (path,), _one)
        return found

    def open_output(self, path: str) -> OutputObject:
        """The call is counted at once; objects, bytes and seconds when the output is closed or aborted."""
        start = perf_counter()
        outer = current_stats.set(self.stats)
        try:
            output = self._inner.open_output(path)
        except BaseException as error:
            self._count("open_output", path, perf_counter() - start, error=error)
            raise
        finally:
            current_stats.reset(outer)
        self.stats.count("open_output")
        return _ObservedOutput(output, path, self, perf_counter() - start)

    def create(self, path: str, data: bytes) -> CreateOutcome:
        """Counted with the bytes that were sent; a conflict and an unknown outcome are counted as such."""

        def measure(outcome: CreateOutcome) -> tuple[int, int]:
            return int(outcome is CreateOutcome.CREATED), len(data)

        outcome: CreateOutcome = self._observe("create", path, self._inner.create, (path, data), measure)
        if outcome is CreateOutcome.CONFLICT:
            self.stats.event(conflicts=1)
        elif outcome is CreateOutcome.UNKNOWN:
            self.stats.event(unknown_outcomes=1)
            logger.warning("create %s of %s: no answer, so whether it was created is unknown", path, self.url)
        return outcome

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Counted with the objects listed."""
        found: list[ObjectInfo] = self._observe("list", prefix, self._inner.list, (prefix,), _many)
        return found

    def delete(self, paths: Iterable[str]) -> None:
        """Counted with the objects that were to be deleted, also those that were gone."""
        self._each("delete", self._inner.delete, paths)

    def _each(self, operation: str, call: Callable[[Any], None], items: Iterable[Any]) -> None:
        """Make a call for several objects at once."""
        given = [*items]
        paths = [getattr(item, "path", item) for item in given[:1]]
        first = f"{paths[0]} and {len(given) - 1} more" if len(given) > 1 else "".join(paths)
        self._observe(operation, first, call, (given,), lambda _: (len(given), 0))

    def _observe(self, operation: str, path: str, call: Callable[..., Any], given: tuple[Any, ...], of: Measure) -> Any:
        """Make the call; count it, and tell it."""
        start = perf_counter()
        outer = current_stats.set(self.stats)
        try:
            answer = call(*given)
        except BaseException as error:
            self._count(operation, path, perf_counter() - start, error=error)
            raise
        finally:
            current_stats.reset(outer)
        objects, size_bytes = of(answer)
        self._count(operation, path, perf_counter() - start, objects=objects, size_bytes=size_bytes)
        return answer

    def _count(
        self,
        operation: str,
        path: str,
        seconds: float,
        *,
        calls: int = 1,
        objects: int = 0,
        size_bytes: int = 0,
        error: BaseException | None = None,
    ) -> None:
        failed = error is not None and not isinstance(error, FileNotFoundError)
        self.stats.count(
            operation, calls=calls, objects=objects, size_bytes=size_bytes, seconds=seconds, failures=int(failed)
        )
        if logger.isEnabledFor(logging.DEBUG):
            what = f"raised {type(error).__name__}" if error is not None else _told(operation, objects, size_bytes)
            subject = f"{operation} {path} of {self.url}" if path else f"{operation} of {self.url}"
            logger.debug("%s: %s%.1f ms", subject, what and f"{what}, ", seconds * 1000)


class _ObservedOutput:
    """An object being written: counts what went through it, once, when it ends."""

    def __init__(self, inner: OutputObject, path: str, storage: InstrumentedStorage, opening_seconds: float) -> None:
        self._inner = inner
        self._path = path
        self._storage = storage
        self._seconds = opening_seconds
        self._size_bytes = 0
        self._ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, data: bytes | memoryview) -> int:
        start = perf_counter()
        outer = current_stats.set(self._storage.stats)
        try:
            count = self._inner.write(data)
        except BaseException as error:
            self._end(start, error=error)
            raise
        finally:
            current_stats.reset(outer)
        self._seconds += perf_counter() - start
        self._size_bytes += count
        return count

    def close(self) -> None:
        self._ending(self._inner.close, objects=1)

    def abort(self) -> None:
        self._ending(self._inner.abort, objects=0)

    def __enter__(self) -> _ObservedOutput:
        self._inner.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ending(lambda: self._inner.__exit__(*exc), objects=int(not exc or exc[0] is None))

    def _ending(self, call: Callable[[], None], *, objects: int) -> None:
        start = perf_counter()
        outer = current_stats.set(self._storage.stats)
        try:
            call()
        except BaseException as error:
            self._end(start, error=error)
            raise
        finally:
            current_stats.reset(outer)
        self._end(start, objects=objects)

    def _end(self, start: float, *, objects: int = 0, error: BaseException | None = None) -> None:
        # A second ending (a context manager after close, an abort after a failure) is none.
        if self._ended:
            return
        self._ended = True
        seconds = self._seconds + perf_counter() - start
        self._storage._count(
            "open_output", self._path, seconds, calls=0, objects=objects, size_bytes=self._size_bytes, error=error
        )


def _told(operation: str, objects: int, size_bytes: int) -> str:
    """What an operation has done, for its line in the log."""
    if operation in ("create", "open_output") and not objects:
        return "nothing was created"
    if operation in ("read", "read_range", "create", "open_output"):
        return f"{size_bytes:,} bytes"
    return f"{objects:,} objects" if operation not in ("exists", "open_input", "size") else ""


def _nothing(_: Any) -> tuple[int, int]:
    return 0, 0


def _one(_: Any) -> tuple[int, int]:
    return 1, 0


def _content(data: Any) -> tuple[int, int]:
    return 1, len(data)


def _many(found: Any) -> tuple[int, int]:
    return len(found), 0


__all__ = ["InstrumentedStorage", "count_input", "instrumented", "read_input"]
