"""Where a file sink writes in a bucket of S3: multipart uploads, completed with their checkpoint.

Theory of operation. S3 has no rename, but a multipart upload is no object before it is completed,
which moves no byte. (A copy of a hidden object would store the bytes twice, and leave objects
behind after a crash.) An upload is bound to its key when it begins, and the key holds the
checkpoint. So until the snapshot a file lies on the worker, in memory or ``TMPDIR``. The
committable holds the upload's id, the parts' tags and the file's digest, which becomes metadata of
the object.

A commit looks for the object. If it is missing, the commit looks for the upload under this very
key, completes it, and looks again; size and digest must be the committable's. Looking first spares
servers a second completion, which lost data in an old Ceph (ceph#16732). Of two drivers that
complete at once, some servers tell one that it is under way, that a part is invalid, or that there
is no upload, while the object is still missing. So a commit looks and completes again for some
seconds before it calls a file lost. No condition is asked of the server.
"""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import md5
from secrets import token_hex
from typing import Any, Final, Self

import pyarrow as pa
import xxhash

from stateformat.errors import ErrorKind, InvalidInput, StorageError

from ...storage.object_clients import configured, place_of
from ...storage.s3 import PartsUpload, S3Uploads
from .directory import NewFile, PreparedFile, lost, size_differs
from .part_names import PATH_PREFIX, PartName, file_name_of
from .uploads import PARTS_MAX, Upload

PART_BYTES: Final = 16 * 2**20
"""Of a part, unless the file would have more than ``PARTS_MAX``."""
COMMITS_AT_ONCE: Final = 8
MEMORY_BYTES: Final = 8 * 2**20
"""A file being written moves from memory to disk beyond this."""
PAUSES_SECONDS: Final = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Between two looks for an object that is neither prepared nor there."""
DIGEST: Final = "stateformat-xxh3-128"
"""The name of the file's digest in the metadata of an object."""


class S3Directory(S3Uploads):
    """A prefix of a bucket as the place of a file sink. Implements ``OutputDirectory``."""

    @classmethod
    def at(cls, url: str, options: Mapping[str, Any]) -> Self:
        options = configured(url, options)
        return cls(*place_of(url, options), options)

    def __str__(self) -> str:
        return self.url

    def begin(self, uid: str) -> NewFile:  # noqa: ARG002 - the name comes with the checkpoint
        return _SpooledFile()

    def prepare(self, files: Sequence[tuple[NewFile, PartName]]) -> list[str]:
        """Upload closed files. Where one fails, nothing stays of any."""
        begun: list[tuple[str, Upload]] = []
        try:
            for file, part in files:
                if not isinstance(file, _SpooledFile):
                    raise TypeError(f"{file!r} is no file of this place")
                begun.append((part.path, self._upload(file, part.path)))
        except BaseException:
            for path, upload in begun:
                # Best effort, since the next run cleans.
                with contextlib.suppress(Exception):
                    self._abort(path, upload.upload_id)
            raise
        for file, _ in files:
            file.discard()
        return [upload.text() for _, upload in begun]

    def commit(self, files: Sequence[PreparedFile]) -> None:
        uploads = [_upload_of(file) for file in files]
        if len(files) < 2:
            for file, upload in zip(files, uploads, strict=True):
                self._commit(file, upload)
            return
        with ThreadPoolExecutor(min(COMMITS_AT_ONCE, len(files)), "commit") as pool:
            for done in [pool.submit(self._commit, *each) for each in zip(files, uploads, strict=True)]:
                done.result()

    def prepared(self, uid: str) -> Sequence[PartName]:
        return [name for name, _ in self._begun(uid)]

    def clean(self, uid: str, newest_id: int, carried: Sequence[PreparedFile]) -> list[str]:
        uploads = [(file.path, Upload.read(file.pending)) for file in carried]
        kept = {(path, upload.upload_id) for path, upload in uploads if upload is not None}
        forgotten = []
        for name, upload_id in self._begun(uid):
            if name.checkpoint_id > newest_id or (name.path, upload_id) in kept:
                continue
            self._abort(name.path, upload_id)
            forgotten.append(name.path)
        return forgotten

    def _begun(self, uid: str) -> list[tuple[PartName, str]]:
        owner = file_name_of(uid)
        with self._translated("list the uploads of", ""):
            begun = sorted(self._uploads_under(PATH_PREFIX))
        named = [(PartName.of_path(path), upload_id) for path, upload_id in begun]
        return [(name, upload_id) for name, upload_id in named if name is not None and name.owner == owner]

    def _upload(self, file: _SpooledFile, path: str) -> Upload:
        with self._translated("write", path):
            upload = PartsUpload(self, path, Metadata={DIGEST: file.digest})
            try:
                for data in file.parts():
                    checksum = b64encode(md5(data, usedforsecurity=False).digest()).decode()
                    upload.send(data, ContentMD5=checksum)
                return Upload(upload.upload_id, file.digest, upload.tags())
            except BaseException:
                upload.abandon()
                raise

    def _commit(self, file: PreparedFile, upload: Upload) -> None:
        if self._is_there(file, upload):
            return
        for pause_seconds in (*PAUSES_SECONDS, None):
            failed = self._ended(file, upload)
            if self._is_there(file, upload):
                return
            if failed is not None and not self._may_be_under_way(file, upload, failed):
                raise failed
            if pause_seconds is not None:
                time.sleep(pause_seconds)
        rule = "a rule of the bucket that aborts unfinished uploads may have ended it"
        raise lost(file, self, f"as upload {upload.upload_id} ({rule})") from failed

    def _may_be_under_way(self, file: PreparedFile, upload: Upload, failed: StorageError) -> bool:
        """Whether servers answer so to the second of two drivers that complete at once."""
        if failed.details.get("code") in ("NoSuchUpload", "InvalidPart", "OperationAborted"):
            return True
        # Some servers answer with a 500 for an upload that has ended.
        try:
            with self._translated("write", file.path):
                self._call("list_parts", Key=self._key(file.path), UploadId=upload.upload_id, MaxParts=1)
        except StorageError as error:
            return error.details.get("code") == "NoSuchUpload"
        return False

    def _ended(self, file: PreparedFile, upload: Upload) -> StorageError | None:
        try:
            with self._translated("write", file.path):
                # Some servers complete an upload of another key under that key.
                if (file.path, upload.upload_id) not in self._uploads_under(file.path):
                    message = f"{self} has no upload for {file.path} of this id"
                    return StorageError(message, path=file.path, code="NoSuchUpload")
                self._complete(file.path, upload.upload_id, upload.tags)
        except StorageError as error:
            return error
        return None

    def _is_there(self, file: PreparedFile, upload: Upload) -> bool:
        """Whether the object is there. ``StorageError`` for another object."""
        try:
            with self._translated("look at", file.path):
                found = self._call("head_object", Key=self._key(file.path))
        except StorageError as error:
            if error.details.get("status") == 404:
                return False
            raise
        if int(found["ContentLength"]) != file.size_bytes:
            raise size_differs(file, self, int(found["ContentLength"]))
        digest = found.get("Metadata", {}).get(DIGEST)
        if digest != upload.digest:
            raise StorageError(
                f"{file.path} in {self} has the digest {digest} in its metadata and was prepared with {upload.digest}: "
                "it was changed since. Remove it if it is not wanted",
                kind=ErrorKind.OBJECT_DIGEST_DIFFERS,
                path=file.path,
            )
        return True


def _upload_of(file: PreparedFile) -> Upload:
    upload = Upload.read(file.pending)
    if upload is None:
        raise InvalidInput(
            f"{file.path} was not prepared as an upload but as {file.pending[:200]!r}. Commit it once with the "
            "directory under which it was prepared, then change the directory",
            kind=ErrorKind.INVALID_ARGUMENT,
            path=file.path,
        )
    return upload


class _Spool(io.RawIOBase):
    """What a Parquet writer writes to: kept on this machine, counted and digested."""

    def __init__(self) -> None:
        super().__init__()
        self.file = tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES)  # noqa: SIM115 - closed with this
        self.digest = xxhash.xxh3_128()
        self.size_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self.file.write(view)
        self.digest.update(view)
        self.size_bytes += view.nbytes
        return view.nbytes

    def close(self) -> None:
        self.file.close()
        super().close()


class _SpooledFile:
    """A :class:`NewFile` on this machine, without a name. A crash frees its memory or disk."""

    def __init__(self) -> None:
        self.write_id = token_hex(8)
        self._spool = _Spool()
        self.stream = pa.PythonFile(self._spool, mode="w")

    @property
    def digest(self) -> str:
        return self._spool.digest.hexdigest()

    def close(self) -> int:
        return self._spool.size_bytes

    def parts(self) -> Iterator[bytes]:
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
        self._spool.close()

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"cannot keep a file for S3 in {tempfile.gettempdir()}: {error.strerror or error}. See that there is "
                "room for what a checkpoint writes, or set TMPDIR",
                kind=ErrorKind.STORAGE_FAILED,
            ) from error
