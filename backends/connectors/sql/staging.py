"""Where rows lie, as Arrow streams, between the subtask that prepares them and the driver's commit.

An object has two names. Each holds a random write id, so none ever means two contents::

    <uid>/<write id>.open                                        put while the epoch lasts
    <uid>/<id>-<attempt>-<subtask>-<number>-<write id>.prepared  named by a checkpoint
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.storage import as_url, local_path, open_storage, without_secrets

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
    """A folder of any storage that takes files of any name, pickled with its options."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        folder = open_storage(url, **options).folder()
        if folder is None:
            raise InvalidInput(
                f"{without_secrets(url)} takes only the objects of stores, and rows are staged under other names. Give "
                "a directory, or the URL of a bucket",
                kind=ErrorKind.INVALID_URL,
            )
        self._folder = folder

    def __str__(self) -> str:
        return self._folder.url

    def put(self, name: str, body: Any) -> None:
        with self._folder.open_output(name) as out:
            out.write(body)

    def read(self, name: str) -> bytes | None:
        try:
            return bytes(self._folder.read(name))
        except FileNotFoundError:
            return None

    def rename(self, old: str, new: str) -> None:
        """Copy and remove: object stores have no rename."""
        body = self.read(old)
        if body is None:
            raise StorageError(
                f"{old} in {self} is gone, and was to become {new}. See that nobody else removes what is there",
                kind=ErrorKind.OBJECT_MISSING,
                path=old,
            )
        self.put(new, body)
        self._folder.delete([old])

    def names(self, folder: str) -> list[str]:
        return [path.rpartition("/")[2] for path in self._folder.names(f"{folder}/")]

    def remove(self, names: Iterable[str]) -> None:
        self._folder.delete(names)


def staging_at(url: str | os.PathLike[str], options: Mapping[str, Any], *, durable: bool) -> Staging:
    """The place at an address. Raises ``InvalidInput``."""
    place = local_path(as_url(url))
    return RemoteStaging(os.fspath(url), options) if place is None else LocalStaging(place, durable=durable)


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
