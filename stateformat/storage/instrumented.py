"""Storages in front of another: one counts every operation and, at level DEBUG, logs it; one
remembers what it has read of objects that never change.

They can be used in place of the storage. Files opened for reading are not wrapped, because pyarrow
reads a native file without the interpreter's lock; :func:`read_input` counts those reads.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from inspect import signature
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from .. import paths as layout
from ..errors import InvalidInput
from .protocol import CreateOutcome, OutputObject, Storage
from .stats import OPERATIONS, Stats, current_stats, stats_of

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

Done = Callable[[Any, float, BaseException | None], None]
"""Takes the result of a call, its seconds, and its error if it failed."""


def instrumented(storage: Storage, stats: Stats | None = None) -> InstrumentedStorage:
    """Return the storage, counted; the same object if it is counted already, unless with other
    ``stats``.
    """
    if isinstance(storage, InstrumentedStorage) and stats in (None, storage.stats):
        return storage
    storage = whole(storage)
    inner = storage._inner if type(storage) is InFront else storage
    return InstrumentedStorage(inner, Stats() if stats is None else stats)


def whole(storage: Any) -> Storage:
    """Return a storage of any class with the abstract methods of ``Storage`` as a ``Storage``.

    Raises ``InvalidInput`` for anything else.
    """
    if isinstance(storage, Storage):
        return storage
    if isinstance(storage, str | os.PathLike):
        raise InvalidInput("a storage is wanted here, and this is an address: open it with open_storage")
    if lacking := sorted(name for name in Storage.__abstractmethods__ if not hasattr(storage, name)):
        raise InvalidInput(
            f"{type(storage).__name__} is no storage: it has no {', '.join(lacking)}. See docs/storages.md"
        )
    return InFront(storage)


def plain(storage: Storage) -> Storage:
    """Return the storage behind those that are in front of it."""
    while isinstance(storage, InFront):
        storage = storage._inner
    return storage


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


def _passed(name: str) -> Any:
    def method(self: InFront, *given: Any, **named: Any) -> Any:
        if named:
            given = signature(getattr(Storage, name)).bind(self, *given, **named).args[1:]
        return self._ask(name, *given)

    return method


class InFront(Storage):
    """A storage in front of another, which is asked for everything. Subclasses do some themselves.

    The other may be of any class that has the abstract methods of :class:`Storage`.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        # Unpickling calls this before there is a storage.
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def url(self) -> str:
        return str(self._inner.url)

    @property
    def reads_at_once(self) -> int:  # type: ignore[override]
        return max(1, int(getattr(self._inner, "reads_at_once", 1)))

    def _ask(self, name: str, *given: Any) -> Any:
        """Call a method of the other; the default is called here, so that what it asks is seen."""
        method, default = getattr(self._inner, name, None), getattr(Storage, name)
        if method is None or getattr(method, "__func__", None) is default:
            return default(self, *given)
        return self._call(name, method, given)

    def _call(self, name: str, method: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        found = method(*given)
        if name == "look":
            return found._replace(folders={folder: whole(inside) for folder, inside in found.folders.items()})
        return whole(found) if name in ("folder", "savepoint", "above") and found is not None else found

    exists = _passed("exists")
    read = _passed("read")
    read_range = _passed("read_range")
    open_input = _passed("open_input")
    size = _passed("size")
    open_output = _passed("open_output")
    create = _passed("create")
    list = _passed("list")
    delete = _passed("delete")
    names = _passed("names")
    names_after = _passed("names_after")
    leftovers = _passed("leftovers")
    discard = _passed("discard")
    make_durable = _passed("make_durable")
    folder = _passed("folder")
    look = _passed("look")
    above = _passed("above")
    savepoints = _passed("savepoints")
    savepoint = _passed("savepoint")
    remove_savepoint = _passed("remove_savepoint")
    link_from = _passed("link_from")
    shared = _passed("shared")


class InstrumentedStorage(InFront):
    """A storage in front of another. A pickled copy counts from zero, for :meth:`Stats.include`."""

    def __init__(self, storage: Storage, stats: Stats) -> None:
        super().__init__(storage)
        self.stats = stats

    def __reduce__(self) -> tuple[Any, ...]:
        return (instrumented, (self._inner,))

    def _call(self, name: str, method: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        if name in ("folder", "savepoint", "above"):
            found = super()._call(name, method, given)
            return None if found is None else instrumented(found, self.stats)
        if name == "open_output":
            return _ObservedOutput(given[0], method, self)
        operation = {"remove_savepoint": "delete"}.get(name, name if name in OPERATIONS else "list")
        if name in ("delete", "discard", "make_durable"):
            # All that are given count, even those that do not exist.
            given = ([*given[0]],)
        elif name == "link_from":
            given = (plain(given[0]), *given[1:])

        def done(answer: Any, seconds: float, error: BaseException | None) -> None:
            objects, size_bytes = _moved(name, given, answer) if error is None else (0, 0)
            self._count(operation, _subject(name, given), seconds, error, objects=objects, size_bytes=size_bytes)

        answer = _run(self.stats, method, given, done)
        if answer is CreateOutcome.CONFLICT:
            self.stats.event(conflicts=1)
        elif answer is CreateOutcome.UNKNOWN:
            self.stats.event(unknown_outcomes=1)
            logger.warning("create %s of %s: no answer, so whether it was created is unknown", given[0], self.url)
        if name == "look":
            inside = {folder: instrumented(there, self.stats) for folder, there in answer.folders.items()}
            return answer._replace(folders=inside)
        return answer

    def _count(self, operation: str, path: str, seconds: float, error: BaseException | None, **counts: int) -> None:
        failed = error is not None and not isinstance(error, FileNotFoundError)
        self.stats.count(operation, seconds=seconds, failures=int(failed), **counts)
        if logger.isEnabledFor(logging.DEBUG):
            what = f"raised {type(error).__name__}" if error is not None else _done(operation, **counts)
            subject = f"{operation} {path} of {self.url}" if path else f"{operation} of {self.url}"
            logger.debug("%s: %s%.1f ms", subject, what and f"{what}, ", seconds * 1000)


def _moved(name: str, given: tuple[Any, ...], answer: Any) -> tuple[int, int]:
    """Return the objects and the bytes of a call that succeeded."""
    if name in ("exists", "remove_savepoint"):
        return 0, 0
    if name in ("read", "read_range"):
        return 1, len(answer)
    if name == "create":
        return int(answer is CreateOutcome.CREATED), len(given[1])
    if name in ("open_input", "size"):
        return 1, 0
    if name == "link_from":
        return int(answer is not None), 0
    if name == "look":
        return len(answer.files), 0
    return len(given[0] if answer is None else answer), 0


def _subject(name: str, given: tuple[Any, ...]) -> str:
    """Return the path that a line of the log names."""
    if name in ("savepoints", "remove_savepoint"):
        return layout.SAVEPOINTS + "".join(given)
    if name == "link_from":
        return str(given[1])
    items = given[0] if given else ""
    if isinstance(items, str):
        return items
    first = str(getattr(items[0], "path", items[0])) if items else ""
    return f"{first} and {len(items) - 1} more" if len(items) > 1 else first


class _ObservedOutput:
    """An object being written. Counts what was written once, when it ends."""

    def __init__(self, path: str, open_output: Callable[[str], OutputObject], storage: InstrumentedStorage) -> None:
        self._path = path
        self._storage = storage
        self._seconds = 0.0
        self._size_bytes = 0
        self._ended = False
        storage.stats.count("open_output")
        self._inner: Any = self._timed(open_output, path)

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


MOST_BYTES: Final = 64 << 20

_Place = tuple[str, int, int | None]
"""Path, offset and length of a read; the length is None if it goes to the end of the object."""


class RememberedReads(InFront):
    """A storage in front of another, for one command. It keeps what was read last.

    Listings go to the storage itself. Pickling it pickles the storage behind it.
    """

    def __init__(self, storage: Storage, folders: tuple[str, ...], most_bytes: int) -> None:
        super().__init__(storage)
        self._folders = folders
        self._held: OrderedDict[_Place, pa.Buffer] = OrderedDict()
        self._held_bytes, self._most_bytes = 0, most_bytes
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._inner,)

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        """See :meth:`Storage.read_range`."""
        if not path.startswith(self._folders):
            return super().read_range(path, offset, length)
        with self._lock:
            for place in ((path, offset, None), (path, offset, length)):
                if place in self._held:
                    self._held.move_to_end(place)
                    return self._held[place].slice(0, min(length, self._held[place].size))
        data = super().read_range(path, offset, length)
        self._hold((path, offset, None if data.size < length else length), data)
        return data

    def _hold(self, place: _Place, data: pa.Buffer) -> None:
        with self._lock:
            if place in self._held or data.size > self._most_bytes:
                return
            self._held[place] = data
            self._held_bytes += data.size
            while self._held_bytes > self._most_bytes:
                self._held_bytes -= self._held.popitem(last=False)[1].size


def remembered(
    storage: Storage, folders: tuple[str, ...] = (layout.SEGMENTS,), most_bytes: int = MOST_BYTES
) -> Storage:
    """Return the storage, which keeps so many bytes of its last reads in ``folders``."""
    return RememberedReads(storage, folders, most_bytes)


def _itself(storage: Storage) -> Storage:
    return storage
