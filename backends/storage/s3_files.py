"""The files over an S3 store's client: one being written in parts, those never finished, one read by ranges."""

from __future__ import annotations

import contextlib
import io
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Final

from backends.storage.s3_client import S3Client
from backends.storage.s3_errors import answer_of
from backends.storage.shared import NewObject

PART_BYTES: Final = 16 * 2**20
"""Size of the parts of a large object; 10,000 of them (S3's limit) make 156 GiB. Smaller objects go in one PUT."""
PARTS_AT_ONCE: Final = 3
"""How many parts of one object are under way while the next one fills: up to 80 MiB of memory for each object."""


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
        self._under_way: deque[Future[Any]] = deque()
        self._tags: list[str] = []
        self._upload_id = ""
        self._size_bytes = 0

    def _append(self, data: memoryview) -> None:
        self._size_bytes += data.nbytes
        while data.nbytes:
            taken = data[: PART_BYTES - len(self._buffer)]
            self._buffer += taken
            data = data[taken.nbytes :]
            if len(self._buffer) == PART_BYTES:
                with self._translated("write", self._path):
                    self._begin_part()

    def _publish(self) -> None:
        with self._translated("write", self._path):
            if not self._upload_id:
                self._client.call("put_object", Body=bytes(self._buffer), **self._place)
                return
            if self._buffer:
                self._begin_part()
            while self._under_way:
                self._take_part()
            self._complete()

    def _discard(self) -> None:
        self._buffer = bytearray()
        # A part that arrives after the upload was aborted would stay for ever.
        while self._under_way:
            with contextlib.suppress(Exception):
                self._under_way.popleft().result()
        if self._upload_id:
            # Best effort; gc finds what stays behind, and so does the bucket's life-cycle rule for incomplete uploads.
            with contextlib.suppress(Exception):
                self._client.call("abort_multipart_upload", UploadId=self._upload_id, **self._place)

    def _begin_part(self) -> None:
        if not self._upload_id:
            self._upload_id = self._client.call("create_multipart_upload", **self._place)["UploadId"]
        while len(self._under_way) >= PARTS_AT_ONCE:
            self._take_part()
        number = len(self._tags) + len(self._under_way) + 1
        part = {"PartNumber": number, "UploadId": self._upload_id, "Body": bytes(self._buffer)}
        self._under_way.append(self._client.begin("upload_part", **self._place, **part))
        self._buffer.clear()

    def _take_part(self) -> None:
        """Wait for the oldest part under way. Those after it go on meanwhile."""
        self._tags.append(self._under_way.popleft().result()["ETag"])

    def _complete(self) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(self._tags, start=1)]
        upload = {"UploadId": self._upload_id, "MultipartUpload": {"Parts": parts}}
        try:
            self._client.call("complete_multipart_upload", **self._place, **upload)
        except OSError as error:
            # A try whose answer was lost may have completed it: then there is no such upload any more, and our object is
            # there. Nobody else writes under its name.
            if answer_of(error).status != 404 or not self._is_there():
                raise

    def _is_there(self) -> bool:
        try:
            return int(self._client.call("head_object", **self._place)["ContentLength"]) == self._size_bytes
        except FileNotFoundError:
            return False


def uploads_under(client: S3Client, bucket: str, prefix: str) -> Iterator[tuple[str, str]]:
    """The multipart uploads under a prefix of keys that are listed: key and upload id. Some may just have ended."""
    arguments: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
    while True:
        page = client.call("list_multipart_uploads", **arguments)
        for upload in page.get("Uploads", ()):
            # There are servers that do not heed the prefix.
            if upload["Key"].startswith(prefix):
                yield upload["Key"], upload["UploadId"]
        if not page.get("IsTruncated"):
            return
        arguments |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def begun_uploads(client: S3Client, bucket: str, prefix: str) -> Iterator[tuple[str, int, str]]:
    """The multipart uploads under a prefix of keys that have not ended: key, size of the parts so far, upload id."""
    for key, upload_id in uploads_under(client, bucket, prefix):
        size_bytes = _uploaded_bytes(client, bucket, key, upload_id)
        if size_bytes is not None:
            yield key, size_bytes, upload_id


def _uploaded_bytes(client: S3Client, bucket: str, key: str, upload_id: str) -> int | None:
    """What the parts of an upload take so far; None if it has ended meanwhile."""
    arguments: dict[str, Any] = {"Bucket": bucket, "Key": key, "UploadId": upload_id}
    size_bytes = 0
    while True:
        try:
            page = client.call("list_parts", **arguments)
        except FileNotFoundError as error:
            if answer_of(error).code == "NoSuchUpload":
                return None
            raise
        size_bytes += sum(int(part["Size"]) for part in page.get("Parts", ()))
        if not page.get("IsTruncated"):
            return size_bytes
        arguments["PartNumberMarker"] = page["NextPartNumberMarker"]


def abort_upload(client: S3Client, bucket: str, key: str, upload_id: str) -> None:
    """End a multipart upload without an object. One that has ended is fine."""
    try:
        client.call("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload_id)
    except FileNotFoundError as error:
        if answer_of(error).code != "NoSuchUpload":
            raise


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
