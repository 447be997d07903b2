"""Where a file sink writes in a bucket of S3: uploads in parts that are completed when their checkpoint is committed.

Theory of operation. S3 has no rename. There are two ways around that. *Copying*: an object under a hidden name, copied by the
server when it is committed; the bytes are stored twice, a copy of 5 GiB and more is one of parts, and what crashes leave
behind are objects that somebody may read. *Multipart uploads*: parts are no object before the upload is completed, which
moves no byte. Hadoop's S3A committers, EMR's and Flink's sink all take the second way, and so does this one. A file costs a
request to begin, one for every 16 MiB, one to complete and two to look, which is what copying and deleting cost too::

    a temporary file of the worker, without a name                                   being written; a crash leaves nothing
    an upload to the path below, that lists nowhere but among uploads                prepared: named by a checkpoint
    <prefix>/part-<id>-<attempt>-<uid>-<subtask>-<number>-<write id>.parquet         committed: seen by any reader

1. *Write.* An upload is bound to its key when it begins, and the key has to say for which checkpoint it is, or cleaning could not
   tell what another run is about to publish from what nobody will. That is not known before the snapshot. So until then a
   file lies on the worker (in memory up to 8 MiB, then in ``TMPDIR``), as with S3A's staging committer.
2. *Prepare*: begin an upload, send the parts. Each goes with its MD5, which the server compares, so nothing is prepared that is
   not what was written. The committable holds the id of the upload, the tags of the parts and the digest of the whole; the
   upload has the digest as metadata, which the object will inherit.
3. *Commit*: look for the object; if it is not there, look for the upload under this very key, complete it with these tags, and look. Size and digest of what is there
   have to be those of the committable. Looking first spares servers a second completion, which cost data in an old Ceph
   (ceph#16732). Completing again does nothing: there is no such upload any more, and the look decides. Two that complete at
   once are told by some servers that it is under way, that a part is invalid, or that there is no upload, while no object
   is there yet; so where the look finds nothing, both are repeated for some seconds before the file is called lost.
4. *Clean*: abort the sink's uploads for checkpoints up to the newest id that it does not carry. Nothing else aborts what was prepared,
   since only the checkpoint knows: Flink's writer once aborted uploads that a checkpoint still held (FLINK-40595).

Not built on ``Storage``, which names only what a checkpoint store holds, and neither copies nor leaves an object unfinished on
purpose; but on the clients, the options and the sentences of its S3 implementation (``s3.place``).

The price: what a checkpoint writes has to fit into ``TMPDIR``, and goes up within the snapshot. A rule of the bucket that aborts
unfinished uploads after some days loses what a job prepared that is not started again by then; that is said when it is.
No condition is asked of the server, and a listing of the prefix shows committed files alone.
"""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
import time
from base64 import b64encode
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import md5
from secrets import token_hex
from typing import Any, Final, Self

import pyarrow as pa
import xxhash

from stateformat.errors import ErrorKind, InvalidInput, StorageError

from ...storage.s3 import S3Place, abort_upload, address_of, uploads_under
from .directories import NewFile, Ready, lost, size_differs
from .part_names import PATH_PREFIX, PartName, file_name_of
from .uploads import PARTS_MAX, Upload

PART_BYTES: Final = 16 * 2**20
"""Of a part, unless the file needs larger ones to be no more than ``PARTS_MAX``."""
PARTS_AT_ONCE: Final = 3
COMMITS_AT_ONCE: Final = 8
MEMORY_BYTES: Final = 8 * 2**20
"""A file that is being written goes from memory to the disk when it grows beyond this."""
PAUSES_SECONDS: Final = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Between looking for an object that is neither prepared nor there, and looking again."""
DIGEST: Final = "stateformat-xxh3-128"
"""Under which name the metadata of an object has the digest of the file."""


class S3Directory(S3Place):
    """A prefix of a bucket. Implements ``directories.OutputDirectory``; takes the options of an ``s3://`` storage."""

    @classmethod
    def at(cls, url: str, options: Mapping[str, Any]) -> Self:
        """``s3://bucket/prefix``. Nothing is sent. Raises ``InvalidInput``."""
        return cls(*address_of(url, options), dict(options))

    def __str__(self) -> str:
        return self.url

    def begin(self, uid: str) -> NewFile:  # noqa: ARG002 - the name comes with the checkpoint
        """A new file on this machine."""
        return _SpooledFile()

    def prepare(self, files: Sequence[tuple[NewFile, PartName]]) -> list[str]:
        """Upload closed files; what is to be completed of each. Where one fails, nothing stays of any."""
        begun: list[tuple[str, Upload]] = []
        try:
            for file, part in files:
                if not isinstance(file, _SpooledFile):
                    raise TypeError(f"{file!r} is no file of this place")
                begun.append((part.path, self._upload(file, part.path)))
        except BaseException:
            for path, upload in begun:
                self._forget(path, upload.upload_id)
            raise
        for file, _ in files:
            file.discard()
        return [upload.text() for _, upload in begun]

    def commit(self, files: Sequence[Ready]) -> None:
        """Complete the uploads, several at once. ``StorageError`` where one is lost, or an object is another."""
        uploads = [_upload_of(file) for file in files]
        if len(files) < 2:
            for file, upload in zip(files, uploads, strict=True):
                self._publish(file, upload)
            return
        with ThreadPoolExecutor(min(COMMITS_AT_ONCE, len(files)), "commit") as pool:
            for done in [pool.submit(self._publish, *each) for each in zip(files, uploads, strict=True)]:
                done.result()

    def prepared(self, uid: str) -> Sequence[PartName]:
        """What the keys of uploads say that have not ended."""
        return [name for name, _ in self._begun(uid)]

    def clean(self, uid: str, newest_id: int, carried: Sequence[Ready]) -> list[str]:
        """Abort uploads that no checkpoint holds; the paths that they would have had."""
        uploads = [(file.path, Upload.read(file.pending)) for file in carried]
        kept = {(path, upload.upload_id) for path, upload in uploads if upload is not None}
        forgotten = []
        for name, upload_id in self._begun(uid):
            if name.checkpoint_id > newest_id or (name.path, upload_id) in kept:
                continue
            with self._translated("abort the upload of", name.path):
                abort_upload(self._client, self._bucket, self._key(name.path), upload_id)
            forgotten.append(name.path)
        return forgotten

    def _begun(self, uid: str) -> list[tuple[PartName, str]]:
        """The uploads of a sink that have not ended, by path."""
        skipped_length, owner = len(self._key("")), file_name_of(uid)
        with self._translated("list the uploads of", ""):
            found = uploads_under(self._client, self._bucket, self._key(PATH_PREFIX))
            begun = sorted((key[skipped_length:], upload_id) for key, upload_id in found)
        named = [(PartName.of_path(path), upload_id) for path, upload_id in begun]
        return [(name, upload_id) for name, upload_id in named if name is not None and name.owner == owner]

    def _upload(self, file: _SpooledFile, path: str) -> Upload:
        place, digest = {"Bucket": self._bucket, "Key": self._key(path)}, file.digest
        with self._translated("write", path):
            begun = self._client.call("create_multipart_upload", Metadata={DIGEST: digest}, **place)
        upload_id: str = begun["UploadId"]
        under_way: deque[Future[Any]] = deque()
        tags: list[str] = []
        try:
            for number, data in enumerate(file.parts(), start=1):
                if len(under_way) == PARTS_AT_ONCE:
                    tags.append(self._tag_of(under_way.popleft(), path))
                sent = b64encode(md5(data, usedforsecurity=False).digest()).decode()
                part = {"PartNumber": number, "UploadId": upload_id, "Body": data, "ContentMD5": sent}
                with self._translated("write", path):
                    under_way.append(self._client.begin("upload_part", **place, **part))
            tags += [self._tag_of(each, path) for each in under_way]
        except BaseException:
            # A part that arrives after the upload was aborted would stay for ever.
            for each in under_way:
                with contextlib.suppress(Exception):
                    each.result()
            self._forget(path, upload_id)
            raise
        return Upload(upload_id, digest, tags)

    def _tag_of(self, part: Future[Any], path: str) -> str:
        with self._translated("write", path):
            tag: str = part.result()["ETag"]
            return tag

    def _forget(self, path: str, upload_id: str) -> None:
        # No checkpoint holds it; best effort, since the next run cleans.
        with contextlib.suppress(Exception):
            abort_upload(self._client, self._bucket, self._key(path), upload_id)

    def _publish(self, file: Ready, upload: Upload) -> None:
        """Complete an upload that may have been completed, or may be in this moment."""
        if self._is_there(file, upload):
            return
        for pause_seconds in (*PAUSES_SECONDS, None):
            failed = self._complete(file, upload)
            if self._is_there(file, upload):
                return
            if failed is not None and not self._may_be_under_way(file, upload, failed):
                raise failed
            if pause_seconds is not None:
                time.sleep(pause_seconds)
        raise lost(
            file,
            self,
            f"as upload {upload.upload_id} (a rule of the bucket that aborts unfinished uploads may have ended it)",
        ) from failed

    def _may_be_under_way(self, file: Ready, upload: Upload, failed: StorageError) -> bool:
        """Whether a server may answer so to the second of two that complete an upload at once."""
        if failed.details.get("code") in ("NoSuchUpload", "InvalidPart", "OperationAborted"):
            return True
        # Not every server has a word for an upload that has ended: of some it is a 500.
        place = {"Bucket": self._bucket, "Key": self._key(file.path), "UploadId": upload.upload_id}
        try:
            with self._translated("write", file.path):
                self._client.call("list_parts", **place, MaxParts=1)
        except StorageError as error:
            return error.details.get("code") == "NoSuchUpload"
        return False

    def _complete(self, file: Ready, upload: Upload) -> StorageError | None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(upload.tags, start=1)]
        place = {"Bucket": self._bucket, "Key": self._key(file.path), "UploadId": upload.upload_id}
        try:
            with self._translated("write", file.path):
                # There are servers that complete an upload of another key under that key.
                begun = uploads_under(self._client, self._bucket, place["Key"])
                if (place["Key"], upload.upload_id) not in begun:
                    return _no_such_upload(file, self)
                self._client.call("complete_multipart_upload", **place, MultipartUpload={"Parts": parts})
        except StorageError as error:
            return error
        return None

    def _is_there(self, file: Ready, upload: Upload) -> bool:
        """Whether the object is there. Raises ``StorageError`` where it is another."""
        try:
            with self._translated("look at", file.path):
                found = self._client.call("head_object", Bucket=self._bucket, Key=self._key(file.path))
        except StorageError as error:
            if error.details.get("status") == 404:
                return False
            raise
        if int(found["ContentLength"]) != file.size_bytes:
            raise size_differs(file, self, int(found["ContentLength"]))
        digest = found.get("Metadata", {}).get(DIGEST)
        if digest != upload.digest:
            raise StorageError(
                f"{file.path} in {self} has the digest {digest} in its metadata and was prepared with {upload.digest}; "
                "something else has written it. Remove it if it is not wanted",
                kind=ErrorKind.OBJECT_DIGEST_DIFFERS,
                path=file.path,
            )
        return True


def _upload_of(file: Ready) -> Upload:
    upload = Upload.read(file.pending)
    if upload is None:
        raise InvalidInput(
            f"{file.path} was not prepared as an upload but as {file.pending[:200]!r}; commit it once with the directory "
            "under which it was prepared, then change the directory",
            kind=ErrorKind.INVALID_ARGUMENT,
            path=file.path,
        )
    return upload


def _no_such_upload(file: Ready, where: object) -> StorageError:
    return StorageError(f"{where} has no upload for {file.path} of this id", path=file.path, code="NoSuchUpload")


class _Spool(io.RawIOBase):
    """What a Parquet writer writes to: kept on this machine, counted and digested on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.file = tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES)  # noqa: SIM115 - as long as the sink wants it
        self.digest = xxhash.xxh3_128()
        self.size_bytes = 0

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Any, /) -> int:
        """Append."""
        view = memoryview(data).cast("B")
        self.file.write(view)
        self.digest.update(view)
        self.size_bytes += view.nbytes
        return view.nbytes

    def close(self) -> None:
        """Free the memory, or the disk; a crash of the sink does so too."""
        self.file.close()
        super().close()


class _SpooledFile:
    """A file that is being written on this machine, without a name."""

    def __init__(self) -> None:
        self.write_id = token_hex(8)
        self._spool = _Spool()
        self.stream = pa.PythonFile(self._spool, mode="w")

    @property
    def digest(self) -> str:
        """Of what was written, in hexadecimal."""
        return self._spool.digest.hexdigest()

    def close(self) -> int:
        """Nothing is to be done before it is prepared."""
        return self._spool.size_bytes

    def parts(self) -> Iterator[bytes]:
        """What was written, in parts."""
        part_bytes = max(PART_BYTES, math.ceil(self._spool.size_bytes / PARTS_MAX))
        with self.translated():
            self._spool.file.seek(0)
        while True:
            with self.translated():
                data = self._spool.file.read(part_bytes)
            if not data:
                return
            yield data

    def discard(self) -> None:
        """Free the memory, or the disk."""
        self._spool.close()

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Errors name the disk."""
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"cannot keep a file for S3 in {tempfile.gettempdir()}: {error.strerror or error}; see that there is room for "
                "what a checkpoint writes, or set TMPDIR",
                kind=ErrorKind.STORAGE_FAILED,
            ) from error


__all__ = ["S3Directory"]
