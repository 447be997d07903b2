"""A storage in front of another that counts every operation and, at level DEBUG, logs it.

It can be used in place of the storage. Files opened for reading are not wrapped, because pyarrow
reads a native file without the interpreter's lock; :func:`read_input` counts those reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Any, BinaryIO, Final

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
    kind = _kind_of(*(name for name in OPTIONAL if hasattr(storage, name)))
    return kind(storage, Stats() if stats is None else stats)


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

    def __getattr__(self, name: str) -> Any:
        # Unpickling calls this before there is a storage.
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

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
        return _ObservedOutput(path, self)

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
            self._count(operation, path, seconds, error, objects=objects, size_bytes=size_bytes)

        return _run(self.stats, call, given, done)

    def _count(self, operation: str, path: str, seconds: float, error: BaseException | None, **counts: int) -> None:
        failed = error is not None and not isinstance(error, FileNotFoundError)
        self.stats.count(operation, seconds=seconds, failures=int(failed), **counts)
        if logger.isEnabledFor(logging.DEBUG):
            what = f"raised {type(error).__name__}" if error is not None else _done(operation, **counts)
            subject = f"{operation} {path} of {self.url}" if path else f"{operation} of {self.url}"
            logger.debug("%s: %s%.1f ms", subject, what and f"{what}, ", seconds * 1000)


class _Optional(InstrumentedStorage):
    """What only some storages do. A counted one has the methods of the storage behind it."""

    _inner: Any

    def folder(self) -> Storage:
        return instrumented(self._inner.folder(), self.stats)

    def folders(self) -> Iterator[tuple[str, Storage]]:
        return ((name, instrumented(inside, self.stats)) for name, inside in self._inner.folders())

    def leftovers(self) -> Any:
        return self._observe("leftovers", "", self._inner.leftovers, (), _many)

    def discard(self, leftovers: Iterable[Any]) -> None:
        self._each("discard", self._inner.discard, leftovers)

    def make_durable(self, paths: Iterable[str]) -> None:
        self._each("make_durable", self._inner.make_durable, paths)

    def names(self, folder: str) -> Any:
        return self._observe("list", folder, self._inner.names, (folder,), _many)

    def names_after(self, path: str) -> Any:
        return self._observe("list", path, self._inner.names_after, (path,), _many)

    def shared(self, prefix: str) -> Any:
        return self._observe("list", prefix, self._inner.shared, (prefix,), _many)

    def savepoints(self) -> Any:
        return self._observe("list", layout.SAVEPOINTS, self._inner.savepoints, (), _many)

    def savepoint(self, name: str) -> Storage:
        return instrumented(self._inner.savepoint(name), self.stats)

    def remove_savepoint(self, name: str) -> None:
        path = f"{layout.SAVEPOINTS}{name}"
        self._observe("delete", path, self._inner.remove_savepoint, (name,), lambda _: (0, 0))

    def link_from(self, source: Storage, path: str, size_bytes: int) -> Any:
        given = (plain(source), path, size_bytes)
        return self._observe("link_from", path, self._inner.link_from, given, _linked)


OPTIONAL: Final = {name: method for name, method in vars(_Optional).items() if not name.startswith("_")}
"""By name. From Python 3.12 on, ``isinstance`` with a protocol asks the class for its methods, not
``__getattr__``.
"""


@cache
def _kind_of(*names: str) -> type[InstrumentedStorage]:
    """Return the class of counted storages with these methods of :class:`_Optional`."""
    return type("InstrumentedStorage", (InstrumentedStorage,), {name: OPTIONAL[name] for name in names})


class _ObservedOutput:
    """An object being written. Counts what was written once, when it ends."""

    def __init__(self, path: str, storage: InstrumentedStorage) -> None:
        self._path = path
        self._storage = storage
        self._seconds = 0.0
        self._size_bytes = 0
        self._ended = False
        storage.stats.count("open_output")
        self._inner: Any = self._timed(storage._inner.open_output, path)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def write(self, data: bytes | memoryview) -> int:
        count: int = self._timed(self._inner.write, data)
        self._size_bytes += count
        return count

    def close(self) -> None:
        self._timed(self._inner.close)
        self._end(objects=1)

    def abort(self) -> None:
        self._timed(self._inner.abort)
        self._end(objects=0)

    def __enter__(self) -> _ObservedOutput:
        self._inner.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._timed(self._inner.__exit__, *exc)
        self._end(objects=int(not exc or exc[0] is None))

    def _timed(self, call: Callable[..., Any], *given: Any) -> Any:
        """Make a call; one that fails ends the object."""

        def done(_: Any, seconds: float, error: BaseException | None) -> None:
            self._seconds += seconds
            if error is not None:
                self._end(objects=0, error=error)

        return _run(self._storage.stats, call, given, done)

    def _end(self, *, objects: int, error: BaseException | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        counts = {"calls": 0, "objects": objects, "size_bytes": self._size_bytes}
        self._storage._count("open_output", self._path, self._seconds, error, **counts)


def _done(operation: str, *, objects: int, size_bytes: int, **_: int) -> str:
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
