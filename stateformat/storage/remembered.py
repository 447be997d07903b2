"""A storage that remembers what it has read of objects that never change, and reads it once
only.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, cast

from .. import paths as layout
from .instrumented import OPTIONAL
from .protocol import Storage

if TYPE_CHECKING:
    import pyarrow as pa

MOST_BYTES: Final = 64 << 20

_Place = tuple[str, int, int | None]
"""Path, offset and length of a read; the length is None if it goes to the end of the object."""


class RememberedReads:
    """A storage in front of another, for one command. It keeps what was read last.

    Listings go to the storage itself. Pickling it pickles the storage behind it.
    """

    def __init__(self, storage: Storage, folders: tuple[str, ...], most_bytes: int) -> None:
        self._inner = storage
        self._folders = folders
        self._held: OrderedDict[_Place, pa.Buffer] = OrderedDict()
        self._held_bytes, self._most_bytes = 0, most_bytes
        self._lock = Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._inner,)

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        """See :meth:`Storage.read_range`."""
        if not path.startswith(self._folders):
            return self._inner.read_range(path, offset, length)
        with self._lock:
            for place in ((path, offset, None), (path, offset, length)):
                if place in self._held:
                    self._held.move_to_end(place)
                    return self._held[place].slice(0, min(length, self._held[place].size))
        data = self._inner.read_range(path, offset, length)
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
    kind = _kind_of(*(name for name in OPTIONAL if hasattr(storage, name)))
    return cast("Storage", kind(storage, folders, most_bytes))


@cache
def _kind_of(*names: str) -> type[RememberedReads]:
    """Return the class for storages that have these optional methods."""

    def passed(name: str) -> Any:
        return lambda self, *given: getattr(self._inner, name)(*given)

    return type("RememberedReads", (RememberedReads,), {name: passed(name) for name in names})


def _itself(storage: Storage) -> Storage:
    return storage
