"""The memory storage: the model for the other storages, and the store of tests and examples.

Stores live in one dictionary of the process, by name, so opening ``memory://name`` twice sees the
same objects. One lock makes every operation atomic. A store exists from its first object on. A
storage unpickled in another process raises, since it would be empty there.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterable, Mapping
from threading import RLock
from typing import Any

import pyarrow as pa

from stateformat import paths as layout
from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.storage import CreateOutcome, Link, ObjectInfo, Storage, check_path

from . import checks as shared

_STORES: dict[str, dict[str, bytes]] = {}
_LOCK = RLock()
"""Reentrant: garbage collection may reset a store at any point of an operation."""


def from_url(url: str, options: Mapping[str, Any]) -> MemoryStorage:
    """Return the storage of ``memory://name``; the name may have slashes. It takes no options."""
    shared.check_options("memory://", options, ())
    name = url.removeprefix("memory://")
    if not name.strip("/"):
        raise InvalidInput(f"{url} names no store. Write memory://name", kind=ErrorKind.INVALID_URL, url=url)
    return MemoryStorage(name)


class MemoryStorage(Storage):
    """A store in this process.

    Implements :class:`stateformat.storage.Storage`; ``create`` never returns ``UNKNOWN``.
    """

    def __init__(self, name: str) -> None:
        self._name = name.strip("/")

    @classmethod
    def reset(cls, name: str) -> None:
        """Delete the store of this name and all its objects. For tests."""
        with _LOCK:
            _STORES.pop(name.strip("/"), None)

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def exists(self) -> bool:
        with _LOCK:
            return self._name in _STORES

    def read(self, path: str) -> pa.Buffer:
        return pa.py_buffer(self._get(path))

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        shared.check_range(path, offset, length)
        data = self._get(path)
        return pa.py_buffer(memoryview(data)[offset : offset + length])

    def open_input(self, path: str) -> pa.NativeFile:
        return pa.BufferReader(self.read(path))

    def size(self, path: str) -> int:
        return len(self._get(path))

    def open_output(self, path: str) -> shared.NewObject:
        return _MemoryOutput(self, check_path(path))

    def create(self, path: str, data: bytes) -> CreateOutcome:
        shared.check_created(path, data)
        return CreateOutcome.CREATED if self._put(path, bytes(data)) else CreateOutcome.CONFLICT

    def list(self, prefix: str) -> list[ObjectInfo]:
        shared.check_prefix(prefix)
        with _LOCK:
            objects = _STORES.get(self._name, {})
            return sorted(ObjectInfo(path, len(data)) for path, data in objects.items() if path.startswith(prefix))

    def delete(self, paths: Iterable[str]) -> None:
        checked = [check_path(path) for path in paths]
        for path in checked:
            with _LOCK:
                _STORES.get(self._name, {}).pop(path, None)

    def link_from(self, source: Storage, path: str, size_bytes: int) -> Link | None:  # noqa: ARG002
        if not isinstance(source, MemoryStorage):
            return None
        if not self._put(path, source._get(path)):
            raise shared.name_taken(self.url, path)
        return Link.SHARED

    def savepoints(self) -> builtins.list[str]:
        below = f"{self._name}/{layout.SAVEPOINTS}"
        with _LOCK:
            return sorted({name[len(below) :].partition("/")[0] for name in _STORES if name.startswith(below)})

    def savepoint(self, name: str) -> MemoryStorage:
        return MemoryStorage(f"{self._name}/{layout.SAVEPOINTS}{shared.check_name(name)}")

    def remove_savepoint(self, name: str) -> None:
        self.reset(self.savepoint(name)._name)

    def __repr__(self) -> str:
        return f"MemoryStorage({self._name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self._name, os.getpid()))

    def _get(self, path: str) -> bytes:
        check_path(path)
        with _LOCK:
            try:
                return _STORES[self._name][path]
            except KeyError:
                raise shared.missing(self.url, path) from None

    def _put(self, path: str, data: bytes) -> bool:
        with _LOCK:
            objects = _STORES.setdefault(self._name, {})
            if path in objects:
                return False
            objects[path] = data
            return True


class _MemoryOutput(shared.NewObject):
    def __init__(self, storage: MemoryStorage, path: str) -> None:
        super().__init__(path)
        self._storage = storage
        self._parts: list[bytes] = []

    def _append(self, data: memoryview) -> None:
        self._parts.append(bytes(data))

    def _publish(self) -> None:
        if not self._storage._put(self._path, b"".join(self._parts)):
            raise shared.name_taken(self._storage.url, self._path)
        self._parts = []

    def _discard(self) -> None:
        self._parts = []


def _rebuild(name: str, pid: int) -> MemoryStorage:
    if os.getpid() != pid:
        raise StorageError(
            f"memory://{name} lives in process {pid} and cannot be reached from process {os.getpid()}. Give workers a "
            "path or an s3:// store",
            kind=ErrorKind.STORAGE_UNSUITABLE,
        )
    return MemoryStorage(name)
