"""A storage that remembers parts of segments: what is read again needs no further request."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, cast

from .protocol import Storage

if TYPE_CHECKING:
    import pyarrow as pa

_HELD_BYTES: Final = 64 << 20


class RememberedReads:
    """A storage in front of another, for one command. What was read last is held, up to 64 MiB.

    Only parts of segments: they never change. Not picklable as such; a copy is the storage itself.
    """

    def __init__(self, storage: Storage) -> None:
        self._inner = storage
        self._held: OrderedDict[tuple[str, int, int], pa.Buffer] = OrderedDict()
        self._held_bytes = 0
        self._lock = Lock()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._inner.__class__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._inner,)

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        """As of any storage."""
        if not path.startswith("segments/"):
            return self._inner.read_range(path, offset, length)
        place = (path, offset, length)
        with self._lock:
            if place in self._held:
                self._held.move_to_end(place)
                return self._held[place]
        data = self._inner.read_range(path, offset, length)
        with self._lock:
            if place not in self._held:
                self._held[place] = data
                self._held_bytes += data.size
            while self._held_bytes > _HELD_BYTES:
                self._held_bytes -= self._held.popitem(last=False)[1].size
        return data


def remembered(storage: Storage) -> Storage:
    """The storage, and what it has read last."""
    return cast("Storage", RememberedReads(storage))


def _itself(storage: Storage) -> Storage:
    return storage
