"""A store in a bucket of S3, or of a server that speaks its protocol and honors ``If-None-Match``.

Theory of operation. The conditional PUT that creates an object is sent exactly once, by a client of
its own (``client``): a repeated PUT whose first response was lost would meet its own object and
report a conflict. It is one part and never empty, since servers ignore the condition on a multipart
upload and some clients drop it for an empty body. Everything else is retried after a transient
failure.

Some servers ignore the condition altogether. So the first ``create`` of every storage creates
``.probe``, which is not an object of the store. A 412 proves that the condition works; two creates
that succeed disprove it. The probe stays, so the next storage needs one request, and no permission
to delete.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from threading import Lock
from typing import Any, Final

import pyarrow as pa

from stateformat import paths as layout
from stateformat.errors import ErrorKind, StorageError
from stateformat.storage import (
    CreateOutcome,
    Leftover,
    Link,
    ObjectInfo,
    Storage,
    check_path,
    check_relative,
    is_object_name,
    is_object_path,
)

from ..checks import NewObject, check_created, check_name, check_prefix, check_range, missing
from .client import S3Client, client_of
from .errors import RangesIgnored, answer_of, client_errors, is_missing_object, outcome_of
from .files import MultipartOutput, RangeFile, abort_upload, begun_uploads, copy_by_server
from .place import S3Place, address_of

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 8 * 2**20
_READS_AT_ONCE: Final = 8
_SMALL_READS_AT_ONCE: Final = 16
_DELETED_AT_ONCE: Final = 1000
_LISTED_AT_ONCE: Final = 1000
_PROBE: Final = ".probe"
_PROBES_MAX: Final = 3


def from_url(url: str, options: Mapping[str, Any]) -> S3Storage:
    """Return the storage of ``s3://bucket/prefix``. Sends nothing. Raises ``InvalidInput``.

    The options are ``s3_place.OPTIONS``. What they leave out comes from the environment and the AWS
    configuration (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``, ``AWS_PROFILE`` …).
    """
    return S3Storage(*address_of(url, options), dict(options))


class _Process:
    """What a storage keeps in one process: its client, and whether the probe was passed."""

    def __init__(self, client: S3Client) -> None:
        self.client = client
        self.lock = Lock()
        self.honors_condition = False


class S3Storage(S3Place):
    """A store under a prefix of a bucket. Implements :class:`stateformat.storage.Storage`."""

    reads_at_once = _SMALL_READS_AT_ONCE

    @staticmethod
    def _check(path: str) -> str:
        return check_path(path)

    def __init__(self, bucket: str, prefix: str, options: dict[str, Any]) -> None:
        super().__init__(bucket, prefix, options)
        self._processes: dict[int, _Process] = {}

    def exists(self) -> bool:
        """Return whether the bucket exists and, under a prefix, anything but the probe."""
        try:
            with self._translated("look for", ""):
                page = self._client.call("list_objects_v2", Bucket=self._bucket, Prefix=self._key(""), MaxKeys=2)
        except StorageError as error:
            if error.details.get("code") == "NoSuchBucket":
                return False
            raise
        return not self._prefix or any(item["Key"] != self._key(_PROBE) for item in page.get("Contents", ()))

    def read(self, path: str) -> pa.Buffer:
        """Return the whole object: one request for up to 8 MiB, parallel ones for the rest."""
        self._check(path)
        head = self._fetch(path, 0, _READ_BYTES)
        if len(head) < _READ_BYTES:
            return pa.py_buffer(head)
        buffer = pa.allocate_buffer(self.size(path))
        view = memoryview(buffer).cast("B")
        view[:_READ_BYTES] = head
        self._fill(path, _READ_BYTES, view[_READ_BYTES:])
        return buffer

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        check_range(path, offset, length, self._check)
        if 0 < length <= _READ_BYTES:
            return pa.py_buffer(self._fetch(path, offset, length))
        buffer = pa.allocate_buffer(max(0, min(length, self.size(path) - offset)))
        self._fill(path, offset, memoryview(buffer).cast("B"))
        return buffer

    def open_input(self, path: str) -> pa.NativeFile:
        size_bytes = self.size(path)
        file = RangeFile(lambda offset, length: self.read_range(path, offset, length), size_bytes)
        return pa.PythonFile(file, mode="r")

    def size(self, path: str) -> int:
        self._check(path)
        with self._reading("look at", path):
            return int(self._client.call("head_object", Bucket=self._bucket, Key=self._key(path))["ContentLength"])

    def open_output(self, path: str) -> NewObject:
        """Begin a new object. Unlike ``create`` this overwrites, so the name must be new."""
        key = self._key(self._check(path))
        with self._translated("write", path):
            return MultipartOutput(self._client, self._bucket, key, path, self._translated)

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

    def _listed(self, prefix: str, **more: str) -> builtins.list[ObjectInfo]:
        found: list[ObjectInfo] = []
        skipped_length = len(self._key(""))
        arguments: dict[str, Any] = {
            "Bucket": self._bucket,
            "Prefix": self._key(prefix),
            "MaxKeys": _LISTED_AT_ONCE,
            **more,
        }
        while True:
            with self._translated("list", prefix):
                page = self._client.call("list_objects_v2", **arguments)
            for item in page.get("Contents", ()):
                path = item["Key"][skipped_length:]
                # "Directory" markers and savepoints below our prefix are not objects of this store.
                if self._is_listed(path):
                    found.append(ObjectInfo(path, int(item["Size"])))
            if not page.get("IsTruncated"):
                return sorted(found)
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def _is_listed(self, path: str) -> bool:
        return is_object_path(path)

    def folder(self) -> S3Folder:
        """Return the same prefix for objects of any name. See
        :func:`stateformat.storage.folder_of`.
        """
        return S3Folder(self._bucket, self._prefix, self._options)

    def names(self, folder: str) -> builtins.list[str]:
        return [item.path for item in self.list(folder) if "/" not in item.path[len(folder) :]]

    def names_after(self, path: str) -> builtins.list[str]:
        folder = self._check(path)[: path.rindex("/") + 1]
        found = self._listed(folder, StartAfter=self._key(path))
        return [item.path for item in found if item.path > path and "/" not in item.path[len(folder) :]]

    def delete(self, paths: Iterable[str]) -> None:
        """Delete these objects; missing ones are ignored.

        Publication records are deleted one by one in the given order, since a crash between two has
        a meaning. The others are deleted up to 1000 at a time, in any order.
        """
        checked = [self._check(path) for path in paths]
        for is_record, group in groupby(checked, key=lambda path: path.startswith("checkpoints/")):
            names, at_once = list(group), 1 if is_record else _DELETED_AT_ONCE
            for start in range(0, len(names), at_once):
                self._delete(names[start : start + at_once])

    def leftovers(self) -> builtins.list[Leftover]:
        skipped_length = len(self._key(""))
        with self._translated("list the uploads of", ""):
            found = begun_uploads(self._client, self._bucket, self._key(""))
            named = [Leftover(key[skipped_length:], size_bytes, upload_id) for key, size_bytes, upload_id in found]
        return sorted(upload for upload in named if is_object_path(upload.path))

    def discard(self, leftovers: Iterable[Leftover]) -> None:
        for path, _, upload_id in leftovers:
            with self._translated("abort the upload of", path):
                abort_upload(self._client, self._bucket, self._key(self._check(path)), upload_id)

    def link_from(self, source: Storage, path: str, size_bytes: int) -> Link | None:
        """Let the server copy an object, large ones in parts.

        None for a store on another server or with other credentials, and if the server refuses.
        """
        if not isinstance(source, S3Storage) or source._client is not self._client:
            return None
        place = {"Bucket": self._bucket, "Key": self._key(self._check(path))}
        try:
            copy_by_server(self._client, {"Bucket": source._bucket, "Key": source._key(path)}, place, size_bytes)
        except client_errors() as error:
            failed = self._storage_error(error, "copy", path)
            if is_missing_object(failed):
                raise missing(source.url, path) from error
            # The bytes are then transferred through here, and that reports whatever is wrong.
            logger.info("the server does not copy %s to %s: %s", path, self.url, failed)
            return None
        return Link.COPIED

    def savepoints(self) -> builtins.list[str]:
        return sorted({*self._folders_in(layout.SAVEPOINTS)})

    def _folders_in(self, place: str) -> Iterator[str]:
        begin = self._key(place)
        arguments: dict[str, Any] = {"Bucket": self._bucket, "Prefix": begin, "Delimiter": "/"}
        while True:
            with self._translated("list", place):
                page = self._client.call("list_objects_v2", **arguments)
            names = [item["Prefix"][len(begin) : -1] for item in page.get("CommonPrefixes", ())]
            yield from filter(is_object_name, names)
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def savepoint(self, name: str) -> S3Storage:
        return S3Storage(self._bucket, self._key(layout.SAVEPOINTS + check_name(name)), self._options)

    def remove_savepoint(self, name: str) -> None:
        there = self.savepoint(name)
        there.delete([item.path for item in there.list(layout.RECORDS)])
        there.delete([item.path for item in there.list("")])
        there.discard(there.leftovers())
        there._delete([_PROBE])

    @property
    def _process(self) -> _Process:
        # By process, and without a lock, as in ``client_of``.
        pid = os.getpid()
        return self._processes.get(pid) or self._processes.setdefault(pid, _Process(client_of(self._options)))

    @property
    def _client(self) -> S3Client:
        return self._process.client

    def _fetch(self, path: str, offset: int, length: int) -> bytes:
        """Return at most ``length`` bytes, which is above 0, with one request."""
        try:
            return self._ranges(path, [(offset, length)])[0]
        except StorageError as error:
            # 416: the range begins at the end or beyond it, as any range of an empty object does.
            if error.details.get("status") == 416:
                return b""
            raise

    def _fill(self, path: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset`` on, with several requests at once. All bytes must exist."""
        starts = range(0, view.nbytes, _READ_BYTES)
        for first in range(0, len(starts), _READS_AT_ONCE):
            begins = starts[first : first + _READS_AT_ONCE]
            spans = [(offset + begin, min(_READ_BYTES, view.nbytes - begin)) for begin in begins]
            for begin, (_, length), piece in zip(begins, spans, self._ranges(path, spans), strict=True):
                if len(piece) < length:
                    raise StorageError(
                        f"{path} in {self._where} is shorter than its size: {len(piece)} bytes came of {length} "
                        f"from {offset + begin}. Read it again",
                        path=path,
                    )
                view[begin : begin + length] = piece

    def _ranges(self, path: str, spans: Sequence[tuple[int, int]]) -> builtins.list[bytes]:
        try:
            with self._reading("read", path):
                return self._client.read(self._bucket, self._key(path), spans)
        except RangesIgnored as error:
            offset, length = spans[0]
            raise StorageError(
                f"the server ignores ranges: {error.size_bytes} bytes of {path} in {self._where} came where {length} "
                f"were asked for from {offset}. Use a server that answers range requests",
                kind=ErrorKind.STORAGE_UNSUITABLE,
                path=path,
            ) from error

    def _put_if_absent(self, path: str, data: bytes) -> tuple[CreateOutcome, BaseException | None]:
        """Send one request. Returns outcome and error; ``StorageError`` if it certainly did
        nothing.
        """
        try:
            self._client.put_if_absent(self._bucket, self._key(path), data)
        except client_errors() as error:
            outcome = outcome_of(error)
            if outcome is None:
                raise self._storage_error(error, "create", path) from error
            return outcome, error
        return CreateOutcome.CREATED, None

    def _probe(self) -> None:
        """Return if the server honors the condition, raise otherwise. The lock is held."""
        with self._translated("create", ""):
            self._client.prepare()
        created = 0
        error: BaseException | None = None
        for _ in range(_PROBES_MAX):
            outcome, error = self._put_if_absent(_PROBE, b"probe\n")
            if error is not None and answer_of(error).status == 412:
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
            raise self._storage_error(error, "create", "objects") from error
        raise StorageError(f"{self._where} gives no clear answer to a conditional write. Try again")

    def _delete(self, paths: Sequence[str]) -> None:
        if len(paths) == 1:
            with self._translated("delete", paths[0]):
                self._client.call("delete_object", Bucket=self._bucket, Key=self._key(paths[0]))
            return
        objects = [{"Key": self._key(path)} for path in dict.fromkeys(paths)]
        with self._translated("delete", "objects"):
            answer = self._client.call(
                "delete_objects", Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}
            )
        failed = [one for one in answer.get("Errors", ()) if one.get("Code") not in ("NoSuchKey", "NoSuchVersion")]
        if failed:
            key, code = failed[0].get("Key"), failed[0].get("Code")
            raise StorageError(
                f"cannot delete {key} in {self._where}: {code}. Check the right s3:DeleteObject", code=code
            )

    @contextlib.contextmanager
    def _reading(self, operation: str, path: str) -> Iterator[None]:
        """Like ``_translated``, but a missing object is ``FileNotFoundError``."""
        try:
            with self._translated(operation, path):
                yield
            return
        except StorageError as error:
            if not is_missing_object(error):
                raise
            if error.details["code"] != "NoSuchKey":
                # The response to a HEAD does not say what is missing. This raises for the bucket.
                self.list("requests/")
        raise missing(self.url, path)


class S3Folder(S3Storage):
    """A prefix with objects of any name, read as it is; for folders that are not stores."""

    @staticmethod
    def _check(path: str) -> str:
        return check_relative(path)

    def list(self, prefix: str) -> builtins.list[ObjectInfo]:
        """Return every object whose path begins with ``prefix``, but no "directory" markers;
        sorted.
        """
        return self._listed(prefix)

    def folders(self) -> Iterator[tuple[str, Storage]]:
        """See :class:`stateformat.storage.HasFolders`."""
        return ((name, S3Folder(self._bucket, self._key(name), self._options)) for name in self._folders_in(""))

    def _is_listed(self, path: str) -> bool:
        return bool(path) and not path.endswith("/")
