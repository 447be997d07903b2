"""Where rows lie, as Arrow streams, between the subtask that prepares them and the driver's commit.

An object has two names. Each holds a random write id, so none ever means two contents::

    <uid>/<write id>.open                                        put while the epoch lasts
    <uid>/<id>-<attempt>-<subtask>-<number>-<write id>.prepared  named by a checkpoint
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from stateformat.errors import ErrorKind, StorageError
from stateformat.storage import without_secrets

from ..sinks.local_directory import LocalFiles


class Staged(NamedTuple):
    """An object: its name, relative to the place, and its content."""

    name: str
    rows: int
    size_bytes: int
    digest: str


class Staging(Protocol):
    """A place for staged objects. Can be pickled. Raises ``StorageError``."""

    def put(self, name: str, body: Any) -> None:
        """Store an object under a new name. It is durable on return."""

    def read(self, name: str) -> bytes | None:
        """An object; None where there is none."""

    def rename(self, old: str, new: str) -> None:
        """Give an object another name, durably. Raises where it is gone."""

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; none where there is no folder."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that are gone are passed over."""


class LocalStaging(LocalFiles):
    """A local or shared directory. ``durable=False`` syncs nothing."""

    def put(self, name: str, body: Any) -> None:
        aside = f"{name}.part"
        self.make(name.rpartition("/")[0])
        with self.create(aside) as file, self.translated("write", aside):
            file.write(body)
        self.sync_file(aside)
        self.rename(aside, name)

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self.sync(new.rpartition("/")[0])


class RemoteStaging:
    """A folder of any file system that fsspec knows. ``options`` go to it, and to the workers."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/")
        self._options = dict(options)

    def __str__(self) -> str:
        return without_secrets(self._url)

    def _at(self, name: str) -> tuple[Any, str]:
        # fsspec caches file systems by their options.
        import fsspec

        system, root = fsspec.core.url_to_fs(self._url, **self._options)
        return system, f"{root.rstrip('/')}/{name}"

    def put(self, name: str, body: Any) -> None:
        with self._translated("put", name):
            system, path = self._at(name)
            system.makedirs(path.rpartition("/")[0], exist_ok=True)
            system.pipe_file(path, bytes(body))

    def read(self, name: str) -> bytes | None:
        with self._translated("read", name):
            system, path = self._at(name)
            try:
                return bytes(system.cat_file(path))
            except FileNotFoundError:
                return None

    def rename(self, old: str, new: str) -> None:
        """Copy and remove: object stores have no rename."""
        with self._translated("rename", old):
            system, path = self._at(old)
            system.cp_file(path, self._at(new)[1])
            system.rm_file(path)

    def names(self, folder: str) -> list[str]:
        with self._translated("list", folder):
            system, path = self._at(folder)
            system.invalidate_cache()
            try:
                return sorted(each.rstrip("/").rpartition("/")[2] for each in system.ls(path, detail=False))
            except FileNotFoundError:
                return []

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with self._translated("remove", name), contextlib.suppress(FileNotFoundError):
                system, path = self._at(name)
                system.rm_file(path)

    @contextlib.contextmanager
    def _translated(self, what: str, name: str) -> Iterator[None]:
        # Each client has errors of its own.
        try:
            yield
        except Exception as error:
            raise StorageError(
                f"cannot {what} {self}/{name}: {type(error).__name__}: {error}. See that the place is there and can be "
                "written from the workers and the driver",
                kind=ErrorKind.STORAGE_FAILED,
                path=name,
            ) from error


def staging_at(url: str | os.PathLike[str], options: Mapping[str, Any], *, durable: bool) -> Staging:
    """The place under a URL, or a path."""
    text = os.fspath(url)
    if text.startswith("file://"):
        return LocalStaging(text.removeprefix("file://"), durable=durable)
    return RemoteStaging(text, options) if "://" in text else LocalStaging(text, durable=durable)


def stage(staging: Staging, name: str, rows: pa.Table) -> Staged:
    """Put rows under a name, as an Arrow stream."""
    out = pa.BufferOutputStream()
    rows = rows.combine_chunks().replace_schema_metadata(None)
    with pa.ipc.new_stream(out, rows.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(rows, max_chunksize=65_536)
    body = out.getvalue()
    staging.put(name, memoryview(body))
    return Staged(name, rows.num_rows, body.size, _digest(body))


def read_staged(staging: Staging, staged: Staged) -> pa.Table:
    """The rows under a name. ``StorageError`` where they are gone or have changed."""
    body = staging.read(staged.name)
    if body is None:
        raise StorageError(
            f"{staged.name} was prepared in {staging} with {staged.rows} rows and is not there, and the database has "
            "no mark that it was committed. Put the object back, from a backup, or go on from a checkpoint that does "
            "not hold it. If its rows are known to be in the table, docs/sinks.md says how to mark it",
            kind=ErrorKind.OBJECT_MISSING,
            path=staged.name,
        )
    if (len(body), _digest(body)) != (staged.size_bytes, staged.digest):
        raise StorageError(
            f"{staged.name} in {staging} has {len(body)} bytes with digest {_digest(body)} and was prepared with "
            f"{staged.size_bytes} and {staged.digest}: it was changed since. Put back what was there, from a backup",
            kind=ErrorKind.OBJECT_DIGEST_DIFFERS,
            path=staged.name,
        )
    try:
        rows = pa.ipc.open_stream(body).read_all()
    except (pa.ArrowException, OSError) as error:
        raise StorageError(
            f"{staged.name} in {staging} is not an Arrow stream, though its size and digest are those of the "
            f"checkpoint: {error}. Go on from a checkpoint that does not hold it",
            kind=ErrorKind.DAMAGED_SEGMENT,
            path=staged.name,
        ) from error
    if rows.num_rows != staged.rows:
        raise StorageError(
            f"{staged.name} in {staging} has {rows.num_rows} rows and was prepared with {staged.rows}: it, or the "
            "checkpoint, was changed since. Go on from a checkpoint that does not hold it",
            kind=ErrorKind.DAMAGED_SEGMENT,
            path=staged.name,
        )
    return rows


def _digest(body: Any) -> str:
    return blake2b(body, digest_size=16).hexdigest()
