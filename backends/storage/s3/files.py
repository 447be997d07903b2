"""Files of an S3 store: written in parts, left unfinished, or read by ranges."""

from __future__ import annotations

import contextlib
import io
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Final

from ..checks import NewObject
from .client import S3Client
from .errors import answer_of

PART_BYTES: Final = 16 * 2**20
"""The size of a part. 10,000 of them (S3's limit) make 156 GiB; a smaller object is one PUT."""
PARTS_AT_ONCE: Final = 3
"""Parts of one object that are sent while the next one fills: up to 80 MiB of memory an object."""


COPIED_AT_ONCE_BYTES: Final = 512 * 2**20
"""The most bytes that the server is asked to copy in one request."""


class PartsUpload:
    """A multipart upload that sends several parts at once; ``more``: arguments for beginning it."""

    def __init__(self, client: S3Client, bucket: str, key: str, **more: Any) -> None:
        self._client = client
        self._place = {"Bucket": bucket, "Key": key}
        self.upload_id: str = client.call("create_multipart_upload", **self._place, **more)["UploadId"]
        self._under_way: deque[Future[Any]] = deque()
        self._tags: list[str] = []

    def send(self, data: bytes, **more: Any) -> None:
        """Send the next part, when fewer than ``PARTS_AT_ONCE`` are under way."""
        while len(self._under_way) >= PARTS_AT_ONCE:
            self._wait_for_oldest()
        number = len(self._tags) + len(self._under_way) + 1
        part = {"PartNumber": number, "UploadId": self.upload_id, "Body": data, **more}
        self._under_way.append(self._client.begin("upload_part", **self._place, **part))

    def copy(self, **part: Any) -> None:
        """Let the server copy the next part from another object."""
        while len(self._under_way) >= PARTS_AT_ONCE:
            self._wait_for_oldest()
        number = len(self._tags) + len(self._under_way) + 1
        place = {**self._place, "PartNumber": number, "UploadId": self.upload_id}
        self._under_way.append(self._client.begin("upload_part_copy", **place, **part))

    def tags(self) -> list[str]:
        while self._under_way:
            self._wait_for_oldest()
        return self._tags

    def _wait_for_oldest(self) -> None:
        answer = self._under_way.popleft().result()
        self._tags.append(answer.get("CopyPartResult", answer)["ETag"])

    def abandon(self) -> None:
        """Abort the upload. Never raises: gc, or a rule of the bucket, finds what remains."""
        # A part that arrives after the abort would remain forever.
        while self._under_way:
            with contextlib.suppress(Exception):
                self._under_way.popleft().result()
        with contextlib.suppress(Exception):
            self._client.call("abort_multipart_upload", UploadId=self.upload_id, **self._place)


def copy_by_server(client: S3Client, source: Mapping[str, str], target: Mapping[str, str], size_bytes: int) -> None:
    """Let the server copy an object, in parts if it is large. Raises what the client raises.

    ``source`` and ``target`` are buckets and keys. One request takes at most 5 GiB, and a server
    sends nothing during a long copy, so objects larger than :data:`COPIED_AT_ONCE_BYTES` are copied
    in parts, all from one state of the source (its ETag). A target is complete or absent.
    """
    if size_bytes <= COPIED_AT_ONCE_BYTES:
        client.call("copy_object", **target, CopySource=dict(source))
        return
    found = client.call("head_object", **source)
    size_bytes, same = int(found["ContentLength"]), {"CopySource": dict(source), "CopySourceIfMatch": found["ETag"]}
    upload = PartsUpload(client, target["Bucket"], target["Key"])
    try:
        for first in range(0, size_bytes, COPIED_AT_ONCE_BYTES):
            last = min(first + COPIED_AT_ONCE_BYTES, size_bytes) - 1
            upload.copy(CopySourceRange=f"bytes={first}-{last}", **same)
        complete_upload(client, target["Bucket"], target["Key"], upload.upload_id, upload.tags())
    except BaseException:
        upload.abandon()
        raise


class MultipartOutput(NewObject):
    """A new object in S3: one PUT when it is small, a multipart upload when it outgrows one part.

    s3fs's own file publishes what it has when it is dropped without being closed; this one doesn't.
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
        self._bucket, self._key = bucket, key
        self._translated = translated
        self._buffer = bytearray()
        self._upload: PartsUpload | None = None
        self._size_bytes = 0

    def _append(self, data: memoryview) -> None:
        self._size_bytes += data.nbytes
        while data.nbytes:
            taken = data[: PART_BYTES - len(self._buffer)]
            self._buffer += taken
            data = data[taken.nbytes :]
            if len(self._buffer) == PART_BYTES:
                with self._translated("write", self._path):
                    self._send()

    def _send(self) -> PartsUpload:
        if self._upload is None:
            self._upload = PartsUpload(self._client, self._bucket, self._key)
        if self._buffer:
            self._upload.send(bytes(self._buffer))
            self._buffer.clear()
        return self._upload

    def _publish(self) -> None:
        with self._translated("write", self._path):
            if self._upload is None:
                self._client.call("put_object", Bucket=self._bucket, Key=self._key, Body=bytes(self._buffer))
                return
            upload = self._send()
            try:
                complete_upload(self._client, self._bucket, self._key, upload.upload_id, upload.tags())
            except OSError as error:
                # A try whose response was lost may have completed the upload, which then is gone,
                # and the object exists. No other writer uses its name.
                if answer_of(error).status != 404 or not self._is_there():
                    raise

    def _discard(self) -> None:
        self._buffer = bytearray()
        if self._upload is not None:
            self._upload.abandon()

    def _is_there(self) -> bool:
        try:
            found = self._client.call("head_object", Bucket=self._bucket, Key=self._key)
            return int(found["ContentLength"]) == self._size_bytes
        except FileNotFoundError:
            return False


def complete_upload(client: S3Client, bucket: str, key: str, upload_id: str, tags: Sequence[str]) -> None:
    """Make the object of a multipart upload whose parts have these tags."""
    parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]
    client.call(
        "complete_multipart_upload", Bucket=bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts}
    )


def uploads_under(client: S3Client, bucket: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield key and upload id of the multipart uploads under a prefix. Some may just have ended."""
    arguments: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
    while True:
        page = client.call("list_multipart_uploads", **arguments)
        for upload in page.get("Uploads", ()):
            # Some servers ignore the prefix.
            if upload["Key"].startswith(prefix):
                yield upload["Key"], upload["UploadId"]
        if not page.get("IsTruncated"):
            return
        arguments |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def begun_uploads(client: S3Client, bucket: str, prefix: str) -> Iterator[tuple[str, int, str]]:
    """Yield key, size so far, and upload id of the unfinished multipart uploads under a prefix."""
    for key, upload_id in uploads_under(client, bucket, prefix):
        size_bytes = _uploaded_bytes(client, bucket, key, upload_id)
        if size_bytes is not None:
            yield key, size_bytes, upload_id


def _uploaded_bytes(client: S3Client, bucket: str, key: str, upload_id: str) -> int | None:
    """Return the size of an upload's parts so far; None if it has ended meanwhile."""
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
    """End a multipart upload without an object. One that has ended already is ignored."""
    try:
        client.call("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload_id)
    except FileNotFoundError as error:
        if answer_of(error).code != "NoSuchUpload":
            raise


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

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(view.nbytes)
        view[: len(data)] = data
        return len(data)
