"""A storage in front of another that counts every operation and, at level DEBUG, logs it.

It can be used in place of the storage. Files opened for reading are not wrapped, because pyarrow
reads a native file without the interpreter's lock; :func:`read_input` counts those reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any, BinaryIO

from .. import paths as layout
from .protocol import CreateOutcome, Link, ObjectInfo, OutputObject, Storage
from .stats import Stats, current_stats, stats_of

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

Measure = Callable[[Any], tuple[int, int]]
"""Returns the objects and bytes of a call's result."""
Done = Callable[[Any, float, BaseException | None], None]
"""Takes the result of a call, its seconds, and its error if it failed."""


def instrumented(storage: Storage, stats: Stats | None = None) -> InstrumentedStorage:
    """Return the storage, counted; the same object if it is counted already, unless with other
    ``stats``.
    """
    if isinstance(storage, InstrumentedStorage) and stats in (None, storage.stats):
        return storage
    return InstrumentedStorage(storage, Stats() if stats is None else stats)


def plain(storage: Storage) -> Storage:
    """Return the storage behind a counted one."""
    return storage._inner if isinstance(storage, InstrumentedStorage) else storage


def read_input(storage: Storage, file: Any, size_bytes: int) -> bytes:
    """Read up to ``size_bytes`` from a file of :meth:`Storage.open_input`, and count the read."""
    stats = stats_of(storage)

    def done(chunk: bytes, seconds: float, error: BaseException | None) -> None:
        if error is None:
            stats.count("open_input", calls=0, size_bytes=len(chunk), seconds=seconds)

    chunk: bytes = _run(stats, file.read, (size_bytes,), done)
    return chunk


def _run(stats: Stats, call: Callable[..., Any], given: tuple[Any, ...], done: Done) -> Any:
    """Make a call for ``stats``; ``done`` gets its outcome before it returns."""
    start = perf_counter()
    outer = current_stats.set(stats)
    try:
        answer = call(*given)
    except BaseException as error:
        done(None, perf_counter() - start, error)
        raise
    finally:
        current_stats.reset(outer)
    done(answer, perf_counter() - start, None)
    return answer


class InstrumentedStorage:
    """A storage in front of another. A pickled copy counts from zero, for :meth:`Stats.include`."""

    def __init__(self, storage: Storage, stats: Stats) -> None:
        self._inner = storage
        self.stats = stats

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._inner.__class__

    def __getattr__(self, name: str) -> Any:
        # Unpickling calls this before there is a storage.
        if name == "_inner":
            raise AttributeError(name)
        found = getattr(self._inner, name)
        if name == "leftovers":
            return lambda: self._observe(name, "", found, (), _many)
        if name in ("folder", "savepoint"):
            return lambda *given: instrumented(found(*given), self.stats)
        if name == "savepoints":
            return lambda: self._observe("list", layout.SAVEPOINTS, found, (), _many)
        if name == "remove_savepoint":
            return lambda item: self._observe("delete", f"{layout.SAVEPOINTS}{item}", found, (item,), lambda _: (0, 0))
        if name == "link_from":
            return lambda source, path, size: self._observe(name, path, found, (plain(source), path, size), _linked)
        if name in ("names", "names_after", "shared"):
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
        return self._inner.url

    def exists(self) -> bool:
        found: bool = self._observe("exists", "", self._inner.exists, (), lambda _: (0, 0))
        return found

    def read(self, path: str) -> pa.Buffer:
        return self._observe("read", path, self._inner.read, (path,), _content)

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        return self._observe("read_range", path, self._inner.read_range, (path, offset, length), _content)

    def open_input(self, path: str) -> pa.NativeFile | BinaryIO:
        return self._observe("open_input", path, self._inner.open_input, (path,), _one)

    def size(self, path: str) -> int:
        found: int = self._observe("size", path, self._inner.size, (path,), _one)
        return found

    def open_output(self, path: str) -> OutputObject:
        """The call is counted now; objects, bytes and seconds when the output ends."""
        output = _ObservedOutput(path, self)
        output.open(self._inner.open_output)
        return output

    def create(self, path: str, data: bytes) -> CreateOutcome:
        """Counts the bytes sent; also counts conflicts and unknown outcomes."""

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
        found: list[ObjectInfo] = self._observe("list", prefix, self._inner.list, (prefix,), _many)
        return found

    def delete(self, paths: Iterable[str]) -> None:
        """Counts all objects given, even those that did not exist."""
        self._each("delete", self._inner.delete, paths)

    def _each(self, operation: str, call: Callable[[Any], None], items: Iterable[Any]) -> None:
        given = [*items]
        paths = [getattr(item, "path", item) for item in given[:1]]
        first = f"{paths[0]} and {len(given) - 1} more" if len(given) > 1 else "".join(paths)
        self._observe(operation, first, call, (given,), lambda _: (len(given), 0))

    def _observe(self, operation: str, path: str, call: Callable[..., Any], given: tuple[Any, ...], of: Measure) -> Any:
        """Make the call, count it and log it."""

        def done(answer: Any, seconds: float, error: BaseException | None) -> None:
            objects, size_bytes = of(answer) if error is None else (0, 0)
            self._count(operation, path, seconds, objects=objects, size_bytes=size_bytes, error=error)

        return _run(self.stats, call, given, done)

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
            what = f"raised {type(error).__name__}" if error is not None else _done(operation, objects, size_bytes)
            subject = f"{operation} {path} of {self.url}" if path else f"{operation} of {self.url}"
            logger.debug("%s: %s%.1f ms", subject, what and f"{what}, ", seconds * 1000)


class _ObservedOutput:
    """An object being written. Counts what was written once, when it ends."""

    def __init__(self, path: str, storage: InstrumentedStorage) -> None:
        self._path = path
        self._storage = storage
        self._inner: Any = None
        self._seconds = 0.0
        self._size_bytes = 0
        self._ended = False

    def open(self, call: Callable[[str], OutputObject]) -> None:
        """Begin the object. The call is counted even if it fails."""
        self._inner = _run(self._storage.stats, call, (self._path,), self._opened)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, data: bytes | memoryview) -> int:
        count: int = _run(self._storage.stats, self._inner.write, (data,), self._written)
        return count

    def close(self) -> None:
        self._end_by(self._inner.close, objects=1)

    def abort(self) -> None:
        self._end_by(self._inner.abort, objects=0)

    def __enter__(self) -> _ObservedOutput:
        self._inner.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end_by(lambda: self._inner.__exit__(*exc), objects=int(not exc or exc[0] is None))

    def _end_by(self, call: Callable[[], None], *, objects: int) -> None:
        _run(self._storage.stats, call, (), lambda _, seconds, error: self._end(seconds, objects, error))

    def _opened(self, _: Any, seconds: float, error: BaseException | None) -> None:
        self._storage.stats.count("open_output")
        self._seconds = seconds
        if error is not None:
            self._end(0.0, 0, error)

    def _written(self, count: Any, seconds: float, error: BaseException | None) -> None:
        if error is not None:
            self._end(seconds, 0, error)
            return
        self._seconds += seconds
        self._size_bytes += count

    def _end(self, seconds: float, objects: int, error: BaseException | None) -> None:
        # Closing twice, or aborting after a failure, ends nothing more.
        if self._ended:
            return
        self._ended = True
        self._storage._count(
            "open_output",
            self._path,
            self._seconds + seconds,
            calls=0,
            objects=0 if error else objects,
            size_bytes=self._size_bytes,
            error=error,
        )


def _done(operation: str, objects: int, size_bytes: int) -> str:
    if operation in ("create", "open_output") and not objects:
        return "nothing was created"
    if operation in ("read", "read_range", "create", "open_output"):
        return f"{size_bytes:,} bytes"
    return f"{objects:,} objects" if operation not in ("exists", "open_input", "size") else ""


def _one(_: Any) -> tuple[int, int]:
    return 1, 0


def _linked(done: Link | None) -> tuple[int, int]:
    return int(done is not None), 0


def _content(data: Any) -> tuple[int, int]:
    return 1, len(data)


def _many(found: Any) -> tuple[int, int]:
    return len(found), 0
