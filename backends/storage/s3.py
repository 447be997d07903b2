"""A store in a bucket of S3, or of a server that speaks its protocol and honours ``If-None-Match`` on PUT.

Theory of operation. Everything goes through s3fs, but for one request: the PUT that creates an object if it is absent.
That one is sent exactly once, by a botocore client of its own whose retries are off. s3fs would repeat it three times
over (itself, botocore, and aiohttp, which sends a PUT again when a kept connection breaks), and a repeated PUT whose
first answer was lost meets its own object and reports a conflict. It is one part and never empty: servers ignore the
condition on a multipart upload, and some clients drop it for an empty body.

There are servers that ignore the condition altogether, and on these two runs could publish the same checkpoint. So the
first ``create`` of every storage probes: it creates a random key twice, and refuses the server if both succeed. The key
is ``requests/probe-<hex>``; it is deleted at once, and a crash may leave it behind, harmless and without meaning.

Clients belong to the process that made them: they are made on first use, again after a fork, and never pickled. The
options, which may hold credentials, travel in pickles and stand in no URL, ``repr`` or message.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from itertools import groupby
from threading import Lock
from typing import Any, Final

import pyarrow as pa

from backends.storage.s3_client import MultipartOutput, RangeFile, S3Client, client_of
from backends.storage.s3_errors import endpoint_name, is_missing_object, outcome_of, storage_error
from backends.storage.shared import (
    NewObject,
    check_created,
    check_options,
    check_prefix,
    check_range,
    is_object_path,
    missing,
)
from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.storage import CreateOutcome, ObjectInfo, check_path

logger = logging.getLogger(__name__)

OPTIONS: Final = (
    "anon",
    "client_kwargs",
    "config_kwargs",
    "endpoint_url",
    "key",
    "profile",
    "s3_additional_kwargs",
    "secret",
    "token",
    "use_ssl",
)
"""The options, as s3fs names them."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_READ_BYTES: Final = 8 * 2**20
_READS_AT_ONCE: Final = 8
_DELETED_AT_ONCE: Final = 1000
_LISTED_AT_ONCE: Final = 1000
_PROBES_MAX: Final = 3


def from_url(url: str, options: Mapping[str, Any]) -> S3Storage:
    """The storage of ``s3://bucket/prefix``. Nothing is sent, and s3fs not imported, before the first operation.

    Options are those of s3fs in :data:`OPTIONS`; what is not given comes from the environment and the AWS configuration
    (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``, ``AWS_PROFILE``, ...). Raises ``InvalidInput``.
    """
    check_options("s3://", options, OPTIONS)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if "@" in bucket or ":" in bucket:
        # The address is not repeated: what stands before the @ is a secret.
        raise InvalidInput(
            "an s3:// address names a bucket and nothing else before the first slash; pass credentials and the endpoint as "
            "options (key, secret, endpoint_url) or in the environment",
            kind=ErrorKind.INVALID_URL,
        )
    parts = prefix.rstrip("/").split("/") if prefix.rstrip("/") else []
    if not _BUCKET.fullmatch(bucket) or any(part in ("", ".", "..") or not part.isprintable() for part in parts):
        raise InvalidInput(f"{url!r} is no address of a store; write s3://bucket/prefix", kind=ErrorKind.INVALID_URL)
    endpoint = options.get("endpoint_url")
    if endpoint is not None and not str(endpoint).startswith(("http://", "https://")):
        raise InvalidInput(f"endpoint_url {endpoint!r} is no URL; it begins with http:// or https://")
    if find_spec("s3fs") is None:
        raise InvalidInput(
            f"s3fs is needed for {url} and is not installed: pip install 'stateformat[s3]'",
            kind=ErrorKind.MISSING_DEPENDENCY,
        )
    return S3Storage(bucket, "/".join(parts), dict(options))


class _Process:
    """What a storage keeps in one process: its client, and whether the probe has been passed."""

    def __init__(self, client: S3Client) -> None:
        self.client = client
        self.lock = Lock()
        self.honours_condition = False


class S3Storage:
    """A store under a prefix of a bucket. Implements :class:`stateformat.storage.Storage`; see :func:`from_url`."""

    def __init__(self, bucket: str, prefix: str, options: dict[str, Any]) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._options = options
        self._processes: dict[int, _Process] = {}

    @property
    def url(self) -> str:
        """``s3://bucket/prefix``, without credentials and endpoint."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def exists(self) -> bool:
        """Whether the bucket is there and, unless the store is the whole bucket, anything lies under the prefix."""
        try:
            with self._translated("look for", ""):
                page = self._client.call("list_objects_v2", Bucket=self._bucket, Prefix=self._key(""), MaxKeys=1)
        except StorageError as error:
            if error.details.get("code") == "NoSuchBucket":
                return False
            raise
        return not self._prefix or bool(page.get("Contents"))

    def read(self, path: str) -> pa.Buffer:
        """The whole object; one request up to 8 MiB, several at once for the rest of a larger one."""
        check_path(path)
        head = self._fetch(path, 0, _READ_BYTES)
        if len(head) < _READ_BYTES:
            return pa.py_buffer(head)
        buffer = pa.allocate_buffer(self.size(path))
        view = memoryview(buffer).cast("B")
        view[:_READ_BYTES] = head
        self._fill(path, _READ_BYTES, view[_READ_BYTES:])
        return buffer

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        """At most ``length`` bytes from ``offset``; one request for up to 8 MiB."""
        check_range(path, offset, length)
        if 0 < length <= _READ_BYTES:
            return pa.py_buffer(self._fetch(path, offset, length))
        buffer = pa.allocate_buffer(max(0, min(length, self.size(path) - offset)))
        self._fill(path, offset, memoryview(buffer).cast("B"))
        return buffer

    def open_input(self, path: str) -> pa.NativeFile:
        """A seekable file of which every read is one request."""
        size_bytes = self.size(path)
        file = RangeFile(lambda offset, length: self.read_range(path, offset, length), size_bytes)
        return pa.PythonFile(file, mode="r")

    def size(self, path: str) -> int:
        """The object's size in bytes."""
        check_path(path)
        with self._reading("look at", path):
            return int(self._client.call("head_object", Bucket=self._bucket, Key=self._key(path))["ContentLength"])

    def open_output(self, path: str) -> NewObject:
        """Begin a new object. Unlike ``create`` this would overwrite: the name must be one that nobody uses twice."""
        key = self._key(check_path(path))
        with self._translated("write", path):
            return MultipartOutput(self._client, self._bucket, key, path, self._translated)

    def create(self, path: str, data: bytes) -> CreateOutcome:
        """Create-if-absent by exactly one request, after a probe by the first create of this storage.

        Raises ``StorageError``, of kind ``STORAGE_UNSUITABLE`` if the server ignores the condition or does not know it.
        """
        check_created(path, data)
        with self._translated("create", path):
            process = self._process
        with process.lock:
            if not process.honours_condition:
                self._probe()
                process.honours_condition = True
        outcome, error = self._put_if_absent(path, bytes(data))
        if outcome is CreateOutcome.UNKNOWN:
            logger.warning("whether %s was created in %s is unknown: %s", path, self.url, type(error).__name__)
        return outcome

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose path begins with ``prefix``, sorted; the pages come ascending and from no cache."""
        check_prefix(prefix)
        found: list[ObjectInfo] = []
        skipped_length = len(self._key(""))
        arguments: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._key(prefix), "MaxKeys": _LISTED_AT_ONCE}
        while True:
            with self._translated("list", prefix):
                page = self._client.call("list_objects_v2", **arguments)
            for item in page.get("Contents", ()):
                path = item["Key"][skipped_length:]
                # Markers of "directories", savepoints in a prefix of ours and the like are no objects of this store.
                if is_object_path(path):
                    found.append(ObjectInfo(path, int(item["Size"])))
            if not page.get("IsTruncated"):
                return sorted(found)
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, paths: Iterable[str]) -> None:
        """Delete these objects; one that is already gone is fine.

        Publication records go one by one in the order given, since what a crash leaves of them has a meaning; the rest
        up to 1000 at a time, in no order.
        """
        checked = [check_path(path) for path in paths]
        for is_record, group in groupby(checked, key=lambda path: path.startswith("checkpoints/")):
            names = list(group)
            if is_record or len(names) == 1:
                for path in names:
                    with self._translated("delete", path):
                        self._client.call("delete_object", Bucket=self._bucket, Key=self._key(path))
                continue
            for start in range(0, len(names), _DELETED_AT_ONCE):
                self._delete_many(names[start : start + _DELETED_AT_ONCE])

    def __repr__(self) -> str:
        return f"S3Storage({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (S3Storage, (self._bucket, self._prefix, self._options))

    @property
    def _process(self) -> _Process:
        # As with the clients: by process, and without a lock.
        pid = os.getpid()
        return self._processes.get(pid) or self._processes.setdefault(pid, _Process(client_of(self._options)))

    @property
    def _client(self) -> S3Client:
        return self._process.client

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path

    def _fetch(self, path: str, offset: int, length: int) -> bytes:
        """At most ``length`` bytes, at least one asked for, by one request."""
        try:
            with self._reading("read", path):
                name = f"{self._bucket}/{self._key(path)}"
                data: bytes = self._client.fs.cat_file(name, start=offset, end=offset + length)
        except StorageError as error:
            # 416: the range begins at the end or beyond it, as every range of an empty object does.
            if error.details.get("status") == 416:
                return b""
            raise
        return self._checked_answer(path, data, length)

    def _fill(self, path: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` with what stands from ``offset``, by several requests at once. All of it must be there."""
        name = f"{self._bucket}/{self._key(path)}"
        starts = range(0, view.nbytes, _READ_BYTES)
        for first in range(0, len(starts), _READS_AT_ONCE):
            begins = starts[first : first + _READS_AT_ONCE]
            ends = [min(begin + _READ_BYTES, view.nbytes) for begin in begins]
            ranges = [[offset + begin for begin in begins], [offset + end for end in ends]]
            with self._reading("read", path):
                pieces = self._client.fs.cat_ranges([name] * len(begins), *ranges, on_error="raise")
            for begin, end, piece in zip(begins, ends, pieces, strict=True):
                if len(self._checked_answer(path, piece, end - begin)) < end - begin:
                    raise StorageError(
                        f"{path} in {self._where} is shorter than its size said: {len(piece)} bytes came of {end - begin} "
                        f"from {offset + begin}; read it again",
                        path=path,
                    )
                view[begin:end] = piece

    def _checked_answer(self, path: str, data: bytes, length: int) -> bytes:
        if len(data) > length:
            raise StorageError(
                f"the server ignores ranges: {len(data)} bytes of {path} in {self._where} came where {length} were asked "
                "for; use a server that answers range requests",
                kind=ErrorKind.STORAGE_UNSUITABLE,
                path=path,
            )
        return data

    def _put_if_absent(self, path: str, data: bytes) -> tuple[CreateOutcome, BaseException | None]:
        """Send the one request. Raises ``StorageError`` if it certainly did nothing; else the outcome and its error."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._client.put_if_absent(self._bucket, self._key(path), data)
        except (BotoCoreError, ClientError, OSError, http.client.HTTPException) as error:
            outcome = outcome_of(error)
            if outcome is None:
                raise self._storage_error(error, "create", path) from error
            return outcome, error
        return CreateOutcome.CREATED, None

    def _probe(self) -> None:
        """Create a random key twice; return if the second met the first, raise otherwise. The lock is held."""
        with self._translated("create", ""):
            self._client.prepare()
        error: BaseException | None = None
        for _ in range(_PROBES_MAX):
            path = f"requests/probe-{secrets.token_hex(16)}"
            try:
                outcomes = []
                for _ in range(2):
                    outcome, error = self._put_if_absent(path, b"probe\n")
                    outcomes.append(outcome)
                    if outcome is CreateOutcome.UNKNOWN:
                        break
            finally:
                with contextlib.suppress(StorageError):
                    self.delete([path])
            if outcomes == [CreateOutcome.CREATED, CreateOutcome.CONFLICT]:
                return
            if outcomes == [CreateOutcome.CREATED, CreateOutcome.CREATED]:
                raise StorageError(
                    f"the server of {self._where} ignores If-None-Match: it created {path} twice. Two runs could publish the "
                    "same checkpoint there; use a server with conditional writes",
                    kind=ErrorKind.STORAGE_UNSUITABLE,
                )
        if error is not None and outcomes[-1] is CreateOutcome.UNKNOWN:
            raise self._storage_error(error, "create", "objects") from error
        raise StorageError(
            f"the server of {self._where} reports a conflict for a key that nobody else has; it is not fit for publishing "
            "checkpoints",
            kind=ErrorKind.STORAGE_UNSUITABLE,
        )

    def _delete_many(self, paths: Iterable[str]) -> None:
        objects = [{"Key": self._key(path)} for path in dict.fromkeys(paths)]
        with self._translated("delete", "objects"):
            answer = self._client.call(
                "delete_objects", Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}
            )
        for failed in answer.get("Errors", ()):
            if failed.get("Code") not in ("NoSuchKey", "NoSuchVersion"):
                raise StorageError(
                    f"cannot delete {failed.get('Key')} in {self._where}: {failed.get('Code')}; check what the "
                    "credentials may do",
                    code=failed.get("Code"),
                )

    @property
    def _where(self) -> str:
        return f"{self.url} at {endpoint_name(self._options)}"

    def _storage_error(self, error: BaseException, operation: str, path: str) -> StorageError:
        client_kwargs = self._options.get("client_kwargs") or {}
        hidden = [self._options.get(name) for name in ("key", "secret", "token")]
        hidden += [value for name, value in client_kwargs.items() if name.startswith("aws_")]
        where = f"{path} in {self._where}" if path else self._where
        secret_texts = [str(text) for text in hidden if text]
        return storage_error(error, operation, where=where, bucket=self._bucket, secrets=secret_texts)

    @contextlib.contextmanager
    def _translated(self, operation: str, path: str) -> Iterator[None]:
        """Turn what the client says into a ``StorageError`` with a sentence."""
        from aiohttp import ClientError as HttpError
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except StorageError:
            raise
        except (OSError, BotoCoreError, ClientError, HttpError) as error:
            raise self._storage_error(error, operation, path) from error

    @contextlib.contextmanager
    def _reading(self, operation: str, path: str) -> Iterator[None]:
        """The same for one object; that it is missing is ``FileNotFoundError``."""
        try:
            with self._translated(operation, path):
                yield
            return
        except StorageError as error:
            if not is_missing_object(error):
                raise
            if error.details["code"] != "NoSuchKey":
                # The answer to a HEAD does not say what is missing. This raises if it is the bucket.
                self.list("requests/")
        raise missing(self.url, path)
