"""The clients of an S3 store, and the files over them: one being written in parts, one read by ranges.

Two clients, because two things are wanted of them. s3fs retries, which is right for everything that can be done twice.
The other, plain botocore, sends one request and reports what came of it, which is right for the conditional PUT alone.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any, Final

from backends.storage.shared import NewObject

PART_BYTES: Final = 16 * 2**20
"""Size of the parts of a large object; 10,000 of them (S3's limit) make 156 GiB. Smaller objects go in one PUT."""

_CONNECT_TIMEOUT_SECONDS: Final = 5
_READ_TIMEOUT_SECONDS: Final = 15

_CLIENTS: dict[tuple[Any, ...], S3Client] = {}


def client_of(options: Mapping[str, Any]) -> S3Client:
    """The client of this process for these options, made on first use.

    Shared by all storages with the same options, because making one takes some 0.2 s and a worker is sent a storage with
    every task. What the environment says of AWS counts as options. The process id is part of the key, since a client does
    not survive a fork; and there is no lock, which a fork could copy in its locked state: two threads may make a client
    each, and one is kept.
    """
    environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    key = (os.getpid(), repr(sorted(options.items())), environment)
    return _CLIENTS.get(key) or _CLIENTS.setdefault(key, S3Client(options))


class S3Client:
    """What one process uses to talk to the server. Thread-safe; never shared with another process, never pickled."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import s3fs

        self._options = options
        # The instance cache would hand the instance of the parent process to its children.
        self.fs: Any = s3fs.S3FileSystem(**options, use_listings_cache=False, skip_instance_cache=True)
        # On top of botocore's own retries, and once more for a body that broke off.
        self.fs.retries = 2
        self._lock = Lock()
        self._single: Any = None

    def call(self, method: str, **arguments: Any) -> Any:
        """One operation of botocore's S3 client, by name, with retries."""
        return self.fs.call_s3(method, **arguments)

    def put_if_absent(self, bucket: str, key: str, body: bytes) -> None:
        """Send exactly one PUT with ``If-None-Match: *``. Raises what botocore raises."""
        self.prepare()
        self._single.put_object(Bucket=bucket, Key=key, Body=body, IfNoneMatch="*", **self._put_options)

    def prepare(self) -> None:
        """Make the client that never retries, unless it is there. Raises what botocore raises; nothing is sent."""
        with self._lock:
            if self._single is None:
                self._single = self._make_single()

    def _make_single(self) -> Any:
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.session import Session

        options = self._options
        config = {
            "connect_timeout": _CONNECT_TIMEOUT_SECONDS,
            "read_timeout": _READ_TIMEOUT_SECONDS,
            **(options.get("config_kwargs") or {}),
            "retries": {"total_max_attempts": 1, "mode": "standard"},
        }
        for of_aiobotocore_only in ("connector_args", "http_session_cls"):
            config.pop(of_aiobotocore_only, None)
        arguments = {
            "endpoint_url": options.get("endpoint_url"),
            "use_ssl": options.get("use_ssl", True),
            "aws_access_key_id": options.get("key"),
            "aws_secret_access_key": options.get("secret"),
            "aws_session_token": options.get("token"),
            **(options.get("client_kwargs") or {}),
        }
        if options.get("anon"):
            config["signature_version"] = UNSIGNED
        single = Session(profile=options.get("profile")).create_client("s3", config=Config(**config), **arguments)
        accepted = single.meta.service_model.operation_model("PutObject").input_shape.members
        additional = options.get("s3_additional_kwargs") or {}
        self._put_options = {name: value for name, value in additional.items() if name in accepted}
        return single


class MultipartOutput(NewObject):
    """A new object in S3: one PUT when it is small, a multipart upload when it outgrows one part.

    Not s3fs's own file, which publishes what it has when it is dropped without being closed.
    """

    def __init__(
        self,
        client: S3Client,
        bucket: str,
        key: str,
        path: str,
        translated: Callable[[str, str], AbstractContextManager[None]],
    ) -> None:
        super().__init__(path)
        self._client = client
        self._place = {"Bucket": bucket, "Key": key}
        self._translated = translated
        self._buffer = bytearray()
        self._parts: list[dict[str, Any]] = []
        self._upload_id = ""

    def _append(self, data: memoryview) -> None:
        while data.nbytes:
            taken = data[: PART_BYTES - len(self._buffer)]
            self._buffer += taken
            data = data[taken.nbytes :]
            if len(self._buffer) == PART_BYTES:
                self._upload_part()

    def _publish(self) -> None:
        if not self._upload_id:
            with self._translated("write", self._path):
                self._client.call("put_object", Body=bytes(self._buffer), **self._place)
            return
        if self._buffer:
            self._upload_part()
        with self._translated("write", self._path):
            upload = {"UploadId": self._upload_id, "MultipartUpload": {"Parts": self._parts}}
            self._client.call("complete_multipart_upload", **self._place, **upload)

    def _discard(self) -> None:
        self._buffer = bytearray()
        if self._upload_id:
            # Best effort; the bucket's life-cycle rule for incomplete uploads takes what stays behind.
            with contextlib.suppress(Exception):
                self._client.call("abort_multipart_upload", UploadId=self._upload_id, **self._place)

    def _upload_part(self) -> None:
        with self._translated("write", self._path):
            if not self._upload_id:
                self._upload_id = self._client.call("create_multipart_upload", **self._place)["UploadId"]
            number = len(self._parts) + 1
            part = {"PartNumber": number, "UploadId": self._upload_id, "Body": bytes(self._buffer)}
            answer = self._client.call("upload_part", **self._place, **part)
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})
        self._buffer.clear()


class RangeFile(io.RawIOBase):
    """A seekable file of which every read is one range of the object. Not buffered: Parquet readers ask for whole chunks."""

    def __init__(self, read_range: Callable[[int, int], Any], size_bytes: int) -> None:
        super().__init__()
        self._read_range = read_range
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Offset of the next read, in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move; seeking beyond the end is allowed and reads nothing there."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        if origin + offset < 0:
            raise ValueError(f"cannot seek to {origin + offset}, before the beginning")
        self._position = origin + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        """At most ``size`` bytes; all that are left if it is negative or none."""
        left = max(0, self._size_bytes - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        if not wanted:
            return b""
        data: bytes = self._read_range(self._position, wanted).to_pybytes()
        self._position += len(data)
        return data

    def readall(self) -> bytes:
        """All bytes that are left."""
        return self.read()

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer; returns how many bytes came."""
        view = memoryview(buffer).cast("B")
        data = self.read(view.nbytes)
        view[: len(data)] = data
        return len(data)
