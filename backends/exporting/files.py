"""The folder that an export writes into, local or in an object store, as each library wants it
named, and its Parquet files.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.storage import Storage, open_storage, without_secrets
from stateformat.tables import rebatch, release_memory_after

from ..storage.object_clients import headers_of_objects, s3_access


class CountedOutput:
    """An object being written, with the methods of a file that pyarrow's writers need."""

    closed = False

    def __init__(self, output: Any) -> None:
        self._output = output
        self.size_bytes = 0

    def write(self, data: Any) -> int:
        """Write all bytes."""
        written = int(self._output.write(data))
        self.size_bytes += written
        return written

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self.size_bytes

    def flush(self) -> None:
        """Do nothing: bytes become visible only when all are written."""


_LEFT_BEHIND: Final = re.compile(
    r"catalog\.db|metadata/[^/]*\.avro|(data/)?part-\d{5,}-[0-9a-f]{32}\.zstd\.parquet|(.*/)?\.[^/]*"
)


def _path_of(url: str) -> Path:
    return Path(unquote(urlsplit(url).path, errors="surrogateescape"))


@dataclass(frozen=True)
class Place:
    """A folder, and how to access it. Opening it writes nothing."""

    address: str
    """A path, or a URL."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the URL's storage."""

    def __str__(self) -> str:
        return without_secrets(self.address)

    @cached_property
    def storage(self) -> Storage:
        """The folder as a storage, for files with any relative path. Raises ``InvalidInput``."""
        storage = open_storage(self.address, **self.options).folder()
        if storage is None:
            raise InvalidInput(
                f"{self} cannot hold tables; give a path, or a URL of a folder, as s3://bucket/folder",
                kind=ErrorKind.INVALID_URL,
            )
        if storage.url.startswith("file://") and _path_of(storage.url).is_file():
            raise InvalidInput(f"{self} is a file; give a folder that is new or empty", kind=ErrorKind.INVALID_URL)
        return storage

    @cached_property
    def local(self) -> Path | None:
        """The directory; None if the place is not local."""
        url = self.storage.url
        return _path_of(url) if url.startswith("file://") else None

    @property
    def location(self) -> str:
        """The absolute path, or the URL, as Iceberg and Delta take it."""
        return self.storage.url.rstrip("/") if self.local is None else os.fspath(self.local)

    def at(self, *names: str) -> Place:
        """Return a folder in this one."""
        return Place("/".join((self.address.rstrip("/") or "/", *names)), self.options)

    def files(self) -> list[str]:
        """List the files here, by relative path; the smallest first."""
        return [item.path for item in self.storage.list("")]

    def holds_others(self) -> bool:
        """Return whether there is anything but the remains of an export that was killed."""
        return not all(_LEFT_BEHIND.fullmatch(path) for path in self.files())

    def remove(self, paths: list[str]) -> None:
        """Delete files, and the local directories that become empty. Never raises."""
        with contextlib.suppress(Exception):
            self.storage.delete(paths)
        if self.local is not None:
            folders = {folder for path in paths for folder in (self.local / path).parents}
            for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
                if folder == self.local or self.local in folder.parents:
                    with contextlib.suppress(OSError):
                        folder.rmdir()

    @contextlib.contextmanager
    def new_file(self, name: str, *, replace: bool = False) -> Iterator[CountedOutput]:
        """Provide a file to write, which exists once the block has succeeded, and not before.

        Raises ``InvalidInput`` if there is one that is not to be replaced.
        """
        if not replace:
            with contextlib.suppress(FileNotFoundError):
                self.storage.size(name)
                raise InvalidInput(f"{self}/{name} exists; give another name, or replace it (--force)")
        with self.storage.open_output(name) as output:
            yield CountedOutput(output)

    def replace(self, path: str, data: bytes) -> None:
        """Write a small file, replacing an existing one, so that it is always complete."""
        if self.local is None:
            with self.storage.open_output(path) as output:
                output.write(data)
            return
        final = self.local / path
        draft = final.with_name(f".{final.name}.{secrets.token_hex(8)}.tmp")
        try:
            draft.write_bytes(data)
            draft.replace(final)
        finally:
            draft.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(place: Place) -> Iterator[Place]:
    """Provide a folder whose files appear at ``place`` all at once, when the block has succeeded.

    ``place`` does not exist, or is empty. On S3 the files appear one by one, and are deleted if the
    block fails. Raises ``InvalidInput`` for a place that is not empty.
    """
    found = os.listdir(place.local) if place.local is not None and place.local.is_dir() else place.files()  # noqa: PTH208
    if found:
        raise InvalidInput(
            f"{place} holds {found[0]}; files go to a folder that is new or empty: give another",
            kind=ErrorKind.STORE_NOT_EMPTY,
            url=str(place),
        )
    if place.local is None:
        try:
            yield place
        except BaseException:
            place.remove(place.files())
            raise
        return
    final = place.local
    final.parent.mkdir(parents=True, exist_ok=True)
    draft = final.with_name(f".{final.name}.{secrets.token_hex(8)}.tmp")
    draft.mkdir()
    try:
        yield Place(os.fspath(draft))
        draft.replace(final)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


FILE_BYTES: Final = 128 << 20
"""A file ends with the row group that reaches this size."""
GROUP_ROWS: Final = 1 << 19
GROUP_BYTES: Final = 16 << 20
"""The most that a row group takes in memory."""


@dataclass(frozen=True)
class DataFile:
    """A file that was written."""

    path: str
    """Relative to the folder."""
    rows: int
    size_bytes: int
    metadata: Any
    """Parquet's, with the statistics of each row group."""


def row_groups(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Join small batches, so that row groups are worth the cost of their headers."""
    return rebatch((pa.Table.from_batches([batch]) for batch in batches), schema, GROUP_ROWS, GROUP_BYTES)


def write_file(place: Place, path: str, schema: pa.Schema, groups: Iterator[pa.RecordBatch]) -> DataFile | None:
    """Write one file of the next row groups; it becomes visible when it is complete.

    It ends at ``FILE_BYTES`` or with the rows. Returns None, and writes no file, if there are no
    rows.
    """
    from pyarrow import parquet as pq

    first = next(groups, None)
    if first is None:
        return None
    rows = 0
    with place.new_file(path, replace=True) as counted:
        with pq.ParquetWriter(counted, schema, compression="zstd", store_decimal_as_integer=True) as writer:
            batch: pa.RecordBatch | None = first
            while batch is not None:
                # The writer would split at its own number of rows.
                writer.write_batch(batch, row_group_size=GROUP_ROWS)
                rows += batch.num_rows
                release_memory_after(batch.nbytes)
                batch = next(groups, None) if counted.size_bytes < FILE_BYTES else None
        metadata = writer.writer.metadata
    return DataFile(path, rows, counted.size_bytes, metadata)


def write_files(place: Place, folder: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> list[DataFile]:
    """Write all rows as files of a table, under names that were never used before.

    If that fails, the files written so far are deleted.
    """
    written: list[DataFile] = []
    run = secrets.token_hex(16)
    groups = row_groups(batches, schema)
    try:
        while True:
            path = f"{folder}part-{len(written):05d}-{run}.zstd.parquet"
            file = write_file(place, path, schema, groups)
            if file is None:
                return written
            written.append(file)
    except BaseException:
        place.remove([file.path for file in written])
        raise


_PATIENCE: Final = {"max_retries": "5", "retry_timeout": "30s", "connect_timeout": "4s"}
"""For deltalake, the same as for stateformat's storages; its defaults would wait for minutes."""


def iceberg_properties(place: Place) -> dict[str, str]:
    """Return the properties of a catalog whose tables are there."""
    if place.local is not None:
        return {"py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO"}
    if headers_of_objects(place.options):
        raise InvalidInput(
            "the option s3_additional_kwargs is not for Iceberg tables: pyiceberg would write their metadata without "
            "it. Set the encryption of the bucket, or export as Delta or Parquet"
        )
    names = {
        "endpoint": "s3.endpoint",
        "key": "s3.access-key-id",
        "secret": "s3.secret-access-key",
        "token": "s3.session-token",
        "region": "s3.region",
    }
    found = {names[name]: value for name, value in _access(place.options).items() if name in names}
    anonymous = {"s3.anonymous": "true"} if place.options.get("anon") else {}
    # s3fs looks for credentials where the store's client does.
    return {"py-io-impl": "pyiceberg.io.fsspec.FsspecFileIO", **found, **anonymous}


def delta_options(place: Place) -> dict[str, str]:
    """Return the storage options of a Delta table that is there."""
    if place.local is not None:
        return {}
    names = {
        "endpoint": "AWS_ENDPOINT_URL",
        "key": "AWS_ACCESS_KEY_ID",
        "secret": "AWS_SECRET_ACCESS_KEY",
        "token": "AWS_SESSION_TOKEN",
        "region": "AWS_REGION",
    }
    access = _access(place.options)
    found = {names[name]: value for name, value in access.items() if name in names}
    plain = {"AWS_ALLOW_HTTP": "true"} if access.get("endpoint", "").startswith("http://") else {}
    anonymous = {"AWS_SKIP_SIGNATURE": "true"} if place.options.get("anon") else {}
    # A commit creates its log entry if it is absent; servers that ignore that condition would lose
    # one.
    headers = {f"AWS_{name.upper()}": str(value) for name, value in headers_of_objects(place.options).items()}
    return {"AWS_CONDITIONAL_PUT": "etag", **_PATIENCE, **found, **plain, **anonymous, **headers}


def _access(options: Mapping[str, Any]) -> dict[str, str]:
    """Return where the server of S3 is, and the credentials, as the store's own client finds
    them.
    """
    given = s3_access(options)
    found = {name: given.get(name) for name in ("region", "key", "secret", "token")}
    found["endpoint"] = given["endpoint_url"]
    if given["session"] is not None and not (given.get("key") or given.get("anon")):
        credentials = given["session"].get_credentials()
        if credentials is not None:
            frozen = credentials.get_frozen_credentials()
            found |= {"key": frozen.access_key, "secret": frozen.secret_key, "token": frozen.token}
    return {name: str(value) for name, value in found.items() if value}
