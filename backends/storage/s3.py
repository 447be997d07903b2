"""Stores in a bucket of S3, and what only S3 has: uploads that are told, and ended later.

obstore sends an upload in parts from its first byte to its end. It neither lists uploads, which gc
discards when their writer is dead, nor ends one that another process began, which is how a file
sink commits, and it gives one up after a 409 or a broken body. So on S3 the requests for uploads go
through botocore, with our retries.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from importlib.util import find_spec
from typing import Any, Final

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.storage import Leftover, Link, Storage, is_object_path

from . import object_answers as answers
from .object_clients import Client, ObjectPlace, configured, place_of, s3_access, s3_options
from .objects import PARTS_AT_ONCE, ObjectStorage, Upload

COPIED_AT_ONCE_BYTES: Final = 512 * 2**20
"""The most bytes that the server is asked to copy in one request. It takes no more than 5 GiB, and
sends nothing meanwhile.
"""
_CONNECTIONS: Final = 32


def from_url(url: str, options: Mapping[str, Any]) -> S3Storage:
    """Return the storage of ``s3://bucket/prefix``. Sends nothing. Raises ``InvalidInput``.

    What the options leave out comes from the environment and the AWS configuration
    (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``, ``AWS_PROFILE`` …).
    """
    options = configured(url, options)
    return S3Storage(*place_of(url, options), options)


class S3Uploads(ObjectPlace):
    """Uploads in parts under a prefix of a bucket."""

    def _call(self, method: str, **arguments: Any) -> Any:
        """Call an operation of botocore's S3 client on the bucket, by name, with retries."""
        client = self._client
        if method == "head_object":
            return client.call(_head, arguments["Key"])
        single = client.made("botocore", lambda: _botocore(client, self._options))

        operation = single.meta.service_model.operation_model(single.meta.method_to_api_mapping[method])
        additional = s3_options(self._options).get("s3_additional_kwargs") or {}
        known = {name: value for name, value in additional.items() if name in operation.input_shape.members}

        def attempt() -> Any:
            answer = getattr(single, method)(Bucket=self._place.bucket, **known, **arguments)
            if method.startswith("upload_part") and "ETag" not in answer.get("CopyPartResult", answer):
                raise answers.BrokenAnswer("an answer to a part without its tag")
            return answer

        return client.retrying(attempt)

    def _uploads_under(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield path and upload id of the uploads under a prefix. Some may just have ended."""
        prefix, skipped_length = self._key(prefix), len(self._key(""))
        arguments: dict[str, Any] = {"Prefix": prefix}
        while True:
            page = self._call("list_multipart_uploads", **arguments)
            for upload in page.get("Uploads", ()):
                # Some servers ignore the prefix.
                if upload["Key"].startswith(prefix):
                    yield upload["Key"][skipped_length:], upload["UploadId"]
            if not page.get("IsTruncated"):
                return
            # Some servers leave out where the next page begins.
            last = {"Key": page.get("NextKeyMarker"), "UploadId": page.get("NextUploadIdMarker")}
            last = last if last["Key"] else (page.get("Uploads") or [{}])[-1]
            if not last.get("Key"):
                raise answers.BrokenAnswer("a page of a listing that does not say where the next one begins")
            arguments |= {"KeyMarker": last["Key"], "UploadIdMarker": last["UploadId"]}

    def _complete(self, path: str, upload_id: str, tags: Sequence[str]) -> None:
        """Make the object of an upload whose parts have these tags."""
        parts = {"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]}
        self._call("complete_multipart_upload", Key=self._key(path), UploadId=upload_id, MultipartUpload=parts)

    def _abort(self, path: str, upload_id: str) -> None:
        """End an upload without an object. One that has ended already is ignored."""
        with self._translated("abort the upload of", path):
            try:
                self._call("abort_multipart_upload", Key=self._key(path), UploadId=upload_id)
            except answers.client_errors() as error:
                if answers.answer_of(error).code != "NoSuchUpload":
                    raise

    def _uploaded_bytes(self, path: str, upload_id: str) -> int | None:
        """Return the size of an upload's parts so far; None if it has ended meanwhile."""
        arguments: dict[str, Any] = {"Key": self._key(path), "UploadId": upload_id}
        size_bytes = 0
        while True:
            try:
                page = self._call("list_parts", **arguments)
            except answers.client_errors() as error:
                if answers.answer_of(error).code == "NoSuchUpload":
                    return None
                raise
            size_bytes += sum(int(part["Size"]) for part in page.get("Parts", ()))
            if not page.get("IsTruncated"):
                return size_bytes
            arguments["PartNumberMarker"] = page["NextPartNumberMarker"]


class PartsUpload:
    """An :class:`~.objects.Upload` with our retries, which can also be ended by another process.

    ``more``: arguments for beginning it.
    """

    def __init__(self, place: S3Uploads, path: str, **more: Any) -> None:
        self._place, self._path = place, path
        self.upload_id: str = place._call("create_multipart_upload", Key=place._key(path), **more)["UploadId"]
        self._pool = ThreadPoolExecutor(PARTS_AT_ONCE, "part")
        self._under_way: deque[Future[Any]] = deque()
        self._tags: list[str] = []

    def send(self, data: bytes, /, **more: Any) -> None:
        self._begin("upload_part", Body=data, **more)

    def copy(self, **part: Any) -> None:
        """Let the server copy the next part from another object."""
        self._begin("upload_part_copy", **part)

    def end(self) -> None:
        self._place._complete(self._path, self.upload_id, self.tags())

    def _begin(self, method: str, **part: Any) -> None:
        while len(self._under_way) >= PARTS_AT_ONCE:
            self._wait_for_oldest()
        number = len(self._tags) + len(self._under_way) + 1
        part |= {"Key": self._place._key(self._path), "PartNumber": number, "UploadId": self.upload_id}
        # The context has the counters of the operation.
        context = copy_context()
        self._under_way.append(self._pool.submit(context.run, lambda: self._place._call(method, **part)))

    def tags(self) -> list[str]:
        """Return the tags of all parts, when they are sent."""
        while self._under_way:
            self._wait_for_oldest()
        self._pool.shutdown()
        return self._tags

    def _wait_for_oldest(self) -> None:
        answer = self._under_way.popleft().result()
        self._tags.append(answer.get("CopyPartResult", answer)["ETag"])

    def abandon(self) -> None:
        # A part that arrives after the abort would remain forever. If the abort fails, gc or a rule
        # of the bucket finds the upload.
        self._pool.shutdown()
        with contextlib.suppress(Exception):
            self._place._abort(self._path, self.upload_id)


class S3Storage(S3Uploads, ObjectStorage):
    """A store in S3, or on a server that speaks its protocol and honors ``If-None-Match``."""

    def _upload(self, path: str) -> Upload:
        return PartsUpload(self, path)

    def leftovers(self) -> list[Leftover]:
        found = []
        with self._translated("list the uploads of", ""):
            for path, upload_id in self._uploads_under(""):
                size_bytes = self._uploaded_bytes(path, upload_id) if is_object_path(path) else None
                if size_bytes is not None:
                    found.append(Leftover(path, size_bytes, upload_id))
        return sorted(found)

    def discard(self, leftovers: Iterable[Leftover]) -> None:
        for path, _, upload_id in leftovers:
            self._abort(self._check(path), upload_id)

    def link_from(self, source: Storage, path: str, size_bytes: int) -> Link | None:
        """Let the server copy an object, large ones in parts, all from one state of the source."""
        if size_bytes <= COPIED_AT_ONCE_BYTES or not isinstance(source, S3Storage):
            return super().link_from(source, path, size_bytes)
        return self._copied(source, path, lambda: self._copy_parts(source, path))

    def _copy_parts(self, source: S3Storage, path: str) -> None:
        found = source._call("head_object", Key=source._key(path))
        size_bytes = int(found["ContentLength"])
        same = {"CopySource": {"Bucket": source._place.bucket, "Key": source._key(path)}}
        upload = PartsUpload(self, path)
        try:
            for first in range(0, size_bytes, COPIED_AT_ONCE_BYTES):
                last = min(first + COPIED_AT_ONCE_BYTES, size_bytes) - 1
                upload.copy(CopySourceRange=f"bytes={first}-{last}", CopySourceIfMatch=found["ETag"], **same)
            upload.end()
        except BaseException:
            upload.abandon()
            raise

    def remove_savepoint(self, name: str) -> None:
        super().remove_savepoint(name)
        there = self.savepoint(name)
        assert isinstance(there, S3Storage)
        there.discard(there.leftovers())


def _head(store: Any, key: str) -> dict[str, Any]:
    """Look at an object as botocore does, which takes headers that were cut off for whole."""
    import obstore

    found = obstore.get(store, key, options={"head": True})
    return {"ContentLength": found.meta["size"], "ETag": found.meta["e_tag"], "Metadata": found.attributes}


def _botocore(client: Client, options: Mapping[str, Any]) -> Any:
    if find_spec("botocore") is None:
        raise InvalidInput(
            f"uploads of {client.place.url} need botocore, which is not installed: pip install 'stateformat[s3]'",
            kind=ErrorKind.MISSING_DEPENDENCY,
        )
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import Session

    given = s3_access(options)
    config: dict[str, Any] = {
        "max_pool_connections": _CONNECTIONS,
        **(given.get("config_kwargs") or {}),
        **{name: timeout.total_seconds() for name, timeout in client.timeouts.items()},
        "retries": {"total_max_attempts": 1, "mode": "standard"},
    }
    if given.get("anon"):
        config["signature_version"] = UNSIGNED
    return (given["session"] or Session()).create_client(
        "s3",
        config=Config(**config),
        endpoint_url=given["endpoint_url"] or None,
        region_name=given["region"],
        verify=given.get("verify"),
        aws_access_key_id=given.get("key"),
        aws_secret_access_key=given.get("secret"),
        aws_session_token=given.get("token"),
    )
