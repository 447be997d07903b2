"""A storage that reads each record and manifest once.

Both never change under their name while they are part of the history, and a report looks at one
instant. Segments, listings and whatever else go to the storage itself.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, Final

import pyarrow as pa

from .. import paths as layout
from ..storage import Storage

BYTES_MAX: Final = 96 << 20
"""Bytes that are kept; what is read when it is full is read again."""


class RememberingStorage:
    """A storage in front of another. Thread-safe; for one report."""

    def __init__(self, storage: Storage) -> None:
        self._inner = storage
        self._known: dict[str, pa.Buffer] = {}
        self._size_bytes = 0
        self._lock = Lock()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._inner.__class__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return repr(self._inner)

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        """Return a part of an object; one that is remembered is not asked for again."""
        if offset or not path.startswith((layout.RECORDS, layout.MANIFESTS)):
            return self._inner.read_range(path, offset, length)
        with self._lock:
            known = self._known.get(path)
        if known is not None:
            return known.slice(0, min(length, known.size))
        data = self._inner.read_range(path, 0, length)
        with self._lock:
            # Less than was asked for is the whole object.
            if data.size < length and path not in self._known and self._size_bytes + data.size <= BYTES_MAX:
                self._known[path] = data
                self._size_bytes += data.size
        return data
