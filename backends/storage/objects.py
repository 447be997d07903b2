"""Stores in a bucket of S3, Google Cloud Storage or Azure, or of a server that speaks like them.

Theory of operation. ``create`` is one request with a condition: ``If-None-Match: *`` on S3 and
Azure, ``x-goog-if-generation-match: 0`` on Google's. It is sent exactly once: a repeated request
whose first answer was lost would meet its own object and report a conflict. It is one part and
never empty, since servers ignore the condition on a multipart upload. Everything else is retried
after a transient failure.

Some servers ignore the condition altogether. So the first ``create`` of every storage creates
``.probe``, which is not an object of the store. A refusal proves that the condition works; two
creates that succeed disprove it. The probe stays, so the next storage needs one request, and no
permission to delete.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from itertools import groupby
from queue import Empty, Queue
from threading import Event, Lock, Thread
from typing import Any, Final, Protocol

import pyarrow as pa

from stateformat import paths as layout
from stateformat.errors import CheckpointError, ErrorKind, StorageError
from stateformat.storage import (
    CreateOutcome,
    Link,
    Look,
    ObjectInfo,
    Storage,
    check_path,
    check_relative,
    is_object_name,
    is_object_path,
)

from . import object_answers as answers
from .checks import NewObject, check_created, check_name, check_prefix, check_range, missing
from .object_clients import Client, ObjectPlace, Place, client_of, configured, place_of

logger = logging.getLogger(__name__)

PART_BYTES: Final = 16 * 2**20
"""The size of a part. 10,000 of them (S3's limit) make 156 GiB; a smaller object is one PUT."""
PARTS_AT_ONCE: Final = 3
"""Parts of one object that are sent while the next one fills: up to 80 MiB of memory an object."""
_READ_BYTES: Final = 8 * 2**20
_READS_AT_ONCE: Final = 8
_SMALL_READS_AT_ONCE: Final = 16
_DELETED_AT_ONCE: Final = 1000
_LISTED_AT_ONCE: Final = 1000
_PROBE: Final = ".probe"
_PROBES_MAX: Final = 3


def from_url(url: str, options: Mapping[str, Any]) -> ObjectStorage:
    """Return the storage of a URL (``object_clients.place_of``). Sends nothing. Raises
    ``InvalidInput``.

    What the options leave out comes from the environment and the service's configuration
    (``AWS_PROFILE``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME`` …).
    """
    options = configured(url, options)
    return ObjectStorage(*place_of(url, options), options)


class _Process:
    """What a storage keeps in one process: its client, and whether the probe was passed."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.lock = Lock()
        self.honors_condition = False


class ObjectStorage(ObjectPlace, Storage):
    """A prefix of a bucket as a store. Implements :class:`stateformat.storage.Storage`."""

    reads_at_once = _SMALL_READS_AT_ONCE
    _check = staticmethod(check_path)

    def __init__(self, place: Place, prefix: str, options: dict[str, Any]) -> None:
        super().__init__(place, prefix, options)
        self._processes: dict[int, _Process] = {}

    def exists(self) -> bool:
        """Return whether the bucket exists and, under a prefix, anything but the probe."""
        try:
            found = self.folder()._listed("", operation="look for", enough=2)
        except StorageError as error:
            if answers.is_missing_bucket(error):
                return False
            if answers.is_unreadable_name(error):
                return True
            raise
        return not self._prefix or any(item.path != _PROBE for item in found)

    def read(self, path: str) -> pa.Buffer:
        """Return the whole object: one request for up to 8 MiB, parallel ones for the rest."""
        self._check(path)
        head, size_bytes = self._fetch(path, 0, _READ_BYTES)
        if size_bytes <= _READ_BYTES:
            return pa.py_buffer(head)
        buffer = pa.allocate_buffer(size_bytes)
        view = memoryview(buffer).cast("B")
        view[:_READ_BYTES] = head
        self._fill(path, _READ_BYTES, view[_READ_BYTES:])
        return buffer

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        check_range(path, offset, length, self._check)
        if 0 < length <= _READ_BYTES:
            return pa.py_buffer(self._fetch(path, offset, length)[0])
        buffer = pa.allocate_buffer(max(0, min(length, self.size(path) - offset)))
        self._fill(path, offset, memoryview(buffer).cast("B"))
        return buffer

    def open_input(self, path: str) -> pa.NativeFile:
        size_bytes = self.size(path)
        file = RangeFile(lambda offset, length: self.read_range(path, offset, length), size_bytes)
        return pa.PythonFile(file, mode="r")

    def size(self, path: str) -> int:
        self._check(path)
        import obstore

        with self._reading("look at", path):
            return int(self._client.call(obstore.head, self._key(path))["size"])

    def open_output(self, path: str) -> NewObject:
        """Begin a new object. Unlike ``create`` this overwrites, so the name must be new."""
        self._check(path)
        with self._translated("write", path):
            return _Output(self, path, self._client)

    def _upload(self, path: str) -> Upload:
        """Begin a new object that is sent in parts."""
        return _Upload(self._client, self._key(path))

    def create(self, path: str, data: bytes) -> CreateOutcome:
        """Create an object if it is absent, by exactly one request; the first call also probes.

        Raises ``StorageError`` (kind ``STORAGE_UNSUITABLE``) if the server ignores the condition.
        """
        check_created(path, data, self._check)
        with self._translated("create", path):
            process = self._process
        with process.lock:
            if not process.honors_condition:
                self._probe()
                process.honors_condition = True
        outcome, error = self._put_if_absent(path, bytes(data))
        if outcome is CreateOutcome.UNKNOWN:
            # The caller is told, and warns.
            logger.info("create %s of %s: no answer (%s)", path, self.url, type(error).__name__)
        return outcome

    def list(self, prefix: str) -> list[ObjectInfo]:
        return self._listed(check_prefix(prefix))

    def _listed(
        self, prefix: str, after: str = "", *, operation: str = "list", enough: int = 0
    ) -> builtins.list[ObjectInfo]:
        """Return objects by prefix, sorted; only those after a path, or the first ones, if so
        asked.
        """
        import obstore

        folder = prefix[: prefix.rfind("/") + 1]
        # Clients list folders. Services list in the order of names, so the rest of a prefix is
        # where to begin, and where to end.
        offset = after or (prefix[:-1] if prefix != folder and len(prefix) - 1 > len(folder) else "")
        above = self._key("")
        more = {"offset": self._key(offset)} if offset else {}

        def pages(store: Any) -> builtins.list[ObjectInfo]:
            found: builtins.list[ObjectInfo] = []
            for page in obstore.list(store, self._key(folder).rstrip("/") or None, chunk_size=_LISTED_AT_ONCE, **more):
                # Some servers ignore the prefix.
                inside = [item for item in page if item["path"].startswith(above)]
                named = [ObjectInfo(item["path"].removeprefix(above), int(item["size"])) for item in inside]
                # "Directory" markers and savepoints below our prefix are not objects of this store.
                found += [item for item in named if item.path.startswith(prefix) and self._is_listed(item.path)]
                last = named[-1].path if named else ""
                if (last > prefix and not last.startswith(prefix)) or (enough and len(found) >= enough):
                    break
            return found

        with self._translated(operation, prefix):
            return sorted(item for item in self._client.call(pages) if item.path > after)

    def _is_listed(self, path: str) -> bool:
        return is_object_path(path)

    def folder(self) -> ObjectFolder:
        """Return the same prefix for objects of any name. See
        :func:`stateformat.storage.folder_of`.
        """
        return ObjectFolder(self._place, self._prefix, self._options)

    def names_after(self, path: str) -> builtins.list[str]:
        folder = self._check(path)[: path.rindex("/") + 1]
        return [item.path for item in self._listed(folder, path) if "/" not in item.path[len(folder) :]]

    def delete(self, paths: Iterable[str]) -> None:
        """Delete these objects; missing ones are ignored.

        Publication records are deleted one by one in the given order, since a crash between two has
        a meaning. The others are deleted up to 1000 at a time, in any order.
        """
        checked = [self._check(path) for path in paths]
        for is_record, group in groupby(checked, key=lambda path: path.startswith("checkpoints/")):
            names, at_once = [*dict.fromkeys(group)], 1 if is_record else _DELETED_AT_ONCE
            for start in range(0, len(names), at_once):
                self._delete(names[start : start + at_once])

    def link_from(self, source: Storage, path: str, size_bytes: int) -> Link | None:  # noqa: ARG002
        """Let the server copy an object. None for a store in another bucket or with other options,
        and if the server refuses.
        """
        import obstore

        if not isinstance(source, ObjectStorage):
            return None
        return self._copied(source, path, lambda: self._client.call(obstore.copy, source._key(path), self._key(path)))

    def _copied(self, source: ObjectStorage, path: str, copy: Callable[[], None]) -> Link | None:
        if source._client is not self._client:
            return None
        self._check(path)
        try:
            copy()
        except CheckpointError:
            raise
        except answers.client_errors() as error:
            failed = self._failure("copy", path, error)
            if answers.is_missing_object(failed):
                raise missing(source.url, path) from error
            # The bytes are then transferred through here, and that reports whatever is wrong.
            logger.info("the server does not copy %s to %s: %s", path, self.url, failed)
            return None
        return Link.COPIED

    def savepoints(self) -> builtins.list[str]:
        return sorted(filter(is_object_name, self._look(layout.SAVEPOINTS)[0]))

    def _look(self, place: str) -> tuple[set[str], dict[str, int]]:
        """Return the names of the folders in one, and of the objects with the times of their
        writing, in microseconds.
        """
        import obstore

        begin = self._key(place)
        with self._translated("list", place):
            page = self._client.call(obstore.list_with_delimiter, begin.rstrip("/") or None)
        folders = {folder[len(begin) :] for folder in page["common_prefixes"] if folder.startswith(begin)} - {""}
        files = {item["path"][len(begin) :]: int(item["last_modified"].timestamp() * 1e6) for item in page["objects"]}
        # "Directory" markers are no files.
        return folders, {name: files[name] for name in sorted(files.keys() - folders - {""})}

    def above(self) -> ObjectFolder | None:
        parent = self._prefix.rpartition("/")[0]
        return ObjectFolder(self._place, parent, self._options) if self._prefix else None

    def savepoint(self, name: str) -> ObjectStorage:
        return type(self)(self._place, self._key(layout.SAVEPOINTS + check_name(name)), self._options)

    def remove_savepoint(self, name: str) -> None:
        there = self.savepoint(name)
        there.delete([item.path for item in there.list(layout.RECORDS)])
        there.delete([item.path for item in there.list("")])
        there._delete([_PROBE])

    @property
    def _process(self) -> _Process:
        # By process, and without a lock, as in ``client_of``.
        pid = os.getpid()
        return self._processes.get(pid) or self._processes.setdefault(
            pid, _Process(client_of(self._place, self._options))
        )

    @property
    def _client(self) -> Client:
        return self._process.client

    def _fetch(self, path: str, offset: int, length: int) -> tuple[Any, int]:
        """Return at most ``length`` bytes, which is above 0, with one request, and the object's
        size.
        """
        import obstore

        def fetch(store: Any) -> tuple[Any, int]:
            found = obstore.get(store, self._key(path), options={"range": (offset, offset + length)})
            (start, stop), data = found.range, found.buffer()
            if len(data) != stop - start:
                raise answers.BrokenAnswer(f"{len(data)} bytes came of {stop - start}")
            return data, int(found.meta["size"])

        try:
            with self._reading("read", path):
                return self._client.call(fetch)
        except StorageError as error:
            # 416: the range begins at the end or beyond it, as any range of an empty object does.
            if error.details.get("status") == 416:
                return b"", 0
            raise

    def _fill(self, path: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` on, with several requests at once. All bytes must exist."""

        def fill(begin: int) -> None:
            length = min(_READ_BYTES, view.nbytes - begin)
            piece, _ = self._fetch(path, offset + begin, length)
            if len(piece) < length:
                raise StorageError(
                    f"{path} in {self._where} is shorter than its size: {len(piece)} bytes came of {length} "
                    f"from {offset + begin}. Read it again",
                    path=path,
                )
            view[begin : begin + length] = piece

        starts = range(0, view.nbytes, _READ_BYTES)
        if len(starts) < 2:
            for begin in starts:
                fill(begin)
            return
        with ThreadPoolExecutor(min(_READS_AT_ONCE, len(starts)), "read") as pool:
            # The context has the counters of the operation.
            for done in [pool.submit(copy_context().run, fill, begin) for begin in starts]:
                done.result()

    def _put_if_absent(self, path: str, data: bytes) -> tuple[CreateOutcome, BaseException | None]:
        """Send one request. Returns outcome and error; ``StorageError`` if it certainly did
        nothing.
        """
        import obstore

        try:
            obstore.put(self._client.once, self._key(path), data, mode="create", use_multipart=False)
        except CheckpointError:
            raise
        except answers.client_errors() as error:
            if (outcome := answers.outcome_of(error)) is None:
                raise self._failure("create", path, error) from error
            return outcome, error
        return CreateOutcome.CREATED, None

    def _probe(self) -> None:
        """Return if the server honors the condition, raise otherwise. The lock is held."""
        created = 0
        error: BaseException | None = None
        for _ in range(_PROBES_MAX):
            outcome, error = self._put_if_absent(_PROBE, b"probe\n")
            if error is not None and answers.proves_condition(error):
                return
            created += outcome is CreateOutcome.CREATED
            if created > 1:
                # Nothing was changed: it created the same bytes twice.
                raise StorageError(
                    f"the server of {self._where} ignores If-None-Match: it created {self._key(_PROBE)} twice. Two "
                    "runs could publish the same checkpoint there. Use a server with conditional writes",
                    kind=ErrorKind.STORAGE_UNSUITABLE,
                )
        if error is not None:
            raise self._failure("create", "objects", error) from error
        raise StorageError(f"{self._where} gives no clear answer to a conditional write. Try again")

    def _delete(self, paths: builtins.list[str]) -> None:
        import obstore

        keys: Any = [self._key(path) for path in paths]
        where = paths[0] if len(paths) == 1 else "objects"
        with self._translated("delete", where):
            try:
                self._client.call(obstore.delete, keys if len(keys) > 1 else keys[0])
                return
            except FileNotFoundError as error:
                # Some services say so, and then may not have deleted the others.
                if answers.is_missing_bucket(error):
                    raise
        for path in paths if len(paths) > 1 else ():
            self._delete([path])

    @contextlib.contextmanager
    def _reading(self, operation: str, path: str) -> Iterator[None]:
        """Like ``_translated``, but a missing object is ``FileNotFoundError``."""
        try:
            with self._translated(operation, path):
                yield
            return
        except StorageError as error:
            if not answers.is_missing_object(error):
                raise
            if not error.details["code"]:
                # The response to a HEAD does not say what is missing. This raises for the bucket.
                self.list("requests/")
        raise missing(self.url, path)


class ObjectFolder(ObjectStorage):
    """A prefix with objects of any name, read as it is; for folders that are not stores."""

    _check = staticmethod(check_relative)

    def list(self, prefix: str) -> builtins.list[ObjectInfo]:
        """Return every object whose path begins with ``prefix``, but no "directory" markers;
        sorted.
        """
        found = self._listed(prefix)
        folders = {item.path[: item.path.rfind("/")] for item in found}
        return [item for item in found if item.size_bytes or item.path not in folders]

    def look(self) -> Look:
        folders, files = self._look("")
        inside: dict[str, Storage] = {
            name: ObjectFolder(self._place, self._key(name), self._options) for name in sorted(folders)
        }
        return Look(inside, {**files})

    def _is_listed(self, path: str) -> bool:
        return bool(path)


class Upload(Protocol):
    """An object that is being sent in parts. Raises what a client raises."""

    def send(self, data: bytes, /) -> None:
        """Send the next part, when there is room for it."""

    def end(self) -> None:
        """Return when the object exists."""

    def abandon(self) -> None:
        """Return when the parts are discarded. Never raises."""


class _Output(NewObject):
    """A new object: one PUT when it is small, parts when it outgrows one."""

    def __init__(self, storage: ObjectStorage, path: str, client: Client) -> None:
        super().__init__(path)
        self._storage, self._client = storage, client
        self._buffer = bytearray()
        self._size_bytes = 0
        self._upload: Upload | None = None

    def _append(self, data: memoryview) -> None:
        self._size_bytes += data.nbytes
        while data.nbytes:
            taken = data[: PART_BYTES - len(self._buffer)]
            self._buffer += taken
            data = data[taken.nbytes :]
            if len(self._buffer) == PART_BYTES:
                with self._storage._translated("write", self._path):
                    self._send()

    def _send(self) -> Upload:
        if self._upload is None:
            self._upload = self._storage._upload(self._path)
        if self._buffer:
            self._upload.send(bytes(self._buffer))
            self._buffer.clear()
        return self._upload

    def _publish(self) -> None:
        import obstore

        key = self._storage._key(self._path)
        with self._storage._translated("write", self._path):
            if self._upload is None:
                self._client.call(obstore.put, key, bytes(self._buffer), use_multipart=False)
                return
            upload = self._send()
            try:
                upload.end()
            except answers.client_errors():
                # A try whose answer was lost may have completed the upload, and a later one then
                # fails. No other writer uses its name.
                if not self._is_there(key):
                    raise

    def _discard(self) -> None:
        self._buffer = bytearray()
        if self._upload is not None:
            self._upload.abandon()

    def _is_there(self, key: str) -> bool:
        import obstore

        try:
            return int(self._client.call(obstore.head, key)["size"]) == self._size_bytes
        except answers.client_errors():
            return False


class _Abandoned(Exception):
    """The writer has given up."""


class _Upload:
    """An :class:`Upload` by obstore, in a thread that takes the parts from a queue. Not
    thread-safe.

    Abandoning it makes the queue raise there, and obstore then discards the parts.
    """

    def __init__(self, client: Client, key: str) -> None:
        import obstore

        self._error: BaseException | None = None
        self._ended = Event()
        parts: Queue[bytes | None] = Queue(1)
        abandoned, begun, store = Event(), Event(), client.patient

        def each() -> Iterator[bytes]:
            while (part := parts.get()) is not None:
                begun.set()
                yield part
            if abandoned.is_set():
                raise _Abandoned

        def attempt() -> None:
            try:
                obstore.put(
                    store, key, each(), use_multipart=True, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE
                )
            except BaseException as error:
                # Parts that were taken cannot be sent again.
                if not begun.is_set():
                    raise
                self._error = error

        def send() -> None:
            try:
                client.retrying(attempt)
            except BaseException as error:
                self._error = error
            finally:
                self._ended.set()
                # The writer may wait for room in the queue.
                with contextlib.suppress(Empty):
                    parts.get_nowait()

        self._parts, self._abandoned = parts, abandoned
        # The context has the counters of the operation.
        self._thread = Thread(target=copy_context().run, args=(send,), name="upload", daemon=True)
        self._thread.start()

    def send(self, data: bytes | None, /) -> None:
        if not self._ended.is_set():
            self._parts.put(data)
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        self.send(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        self._abandoned.set()
        with contextlib.suppress(BaseException):
            self.end()


class RangeFile(io.RawIOBase):
    """A seekable file, unbuffered: every read is one range of the object."""

    def __init__(self, read_range: Callable[[int, int], Any], size_bytes: int) -> None:
        super().__init__()
        self._read_range = read_range
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        if origin + offset < 0:
            raise ValueError(f"cannot seek to {origin + offset}, before the beginning")
        self._position = origin + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._size_bytes - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        if not wanted:
            return b""
        data: bytes = self._read_range(self._position, wanted).to_pybytes()
        self._position += len(data)
        return data
