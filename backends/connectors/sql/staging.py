"""Where rows lie between a subtask that has prepared them and the driver that commits them: objects under a URL.

Theory of operation. A subtask may run on another machine than the driver, knows no password of the database, and must have made
its rows durable before the checkpoint is published. So it puts them, as Arrow streams, into a place that both can reach. An
object lives through two names::

    <staging>/<uid>/<write id>.open                                       put while the epoch lasts; named by nobody
    <staging>/<uid>/<id>-<attempt>-<subtask>-<number>-<write id>.prepared named by a checkpoint

Every name has a write id of its own, so none ever means two contents. A local directory is synced; of another file system
only that is asked which object stores promise: what was put is there, whole.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import pyarrow as pa

from stateformat.errors import ErrorKind, StorageError
from stateformat.storage import without_secrets

from ..sinks import Directory


class Staged(NamedTuple):
    """An object: its name, relative to the place, and what is in it."""

    name: str
    rows: int
    size_bytes: int
    digest: str


class Staging(ABC):
    """A place for staged objects. Holds nothing open and may be pickled. Raises ``StorageError``."""

    @abstractmethod
    def put(self, name: str, body: Any) -> None:
        """Store an object under a new name; it is there and durable on return."""

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """An object; None where there is none."""

    @abstractmethod
    def rename(self, old: str, new: str) -> None:
        """Give an object another name; an error where it is gone."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """The names in a folder, without it, sorted; none where there is no folder."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that are gone are passed over."""


class LocalStaging(Staging):
    """A local or shared directory. ``durable=False`` syncs nothing."""

    def __init__(self, root: str | os.PathLike[str], *, durable: bool = True) -> None:
        self._directory = Directory(root, durable=durable)

    def __str__(self) -> str:
        return str(self._directory)

    def put(self, name: str, body: Any) -> None:
        """Store an object: written aside, synced, renamed, and the name synced."""
        folder, _, _ = name.rpartition("/")
        aside = f"{name}.part"
        self._directory.make(folder)
        with self._directory.create(aside) as file, self._directory.translated("write", aside):
            file.write(body)
        self._directory.sync_file(aside)
        self._directory.rename(aside, name)
        self._directory.sync(folder)

    def get(self, name: str) -> bytes | None:
        """Read an object."""
        return self._directory.read(name)

    def rename(self, old: str, new: str) -> None:
        """Rename, durably."""
        self._directory.rename(old, new)
        self._directory.sync(new.rpartition("/")[0])

    def names(self, folder: str) -> list[str]:
        """List a folder."""
        return self._directory.names(folder)

    def remove(self, names: Iterable[str]) -> None:
        """Remove."""
        self._directory.remove(names)


class RemoteStaging(Staging):
    """A folder of any file system that fsspec knows; ``options`` go to it, and to the workers."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/")
        self._options = dict(options)

    def __str__(self) -> str:
        return without_secrets(self._url)

    def _at(self, name: str) -> tuple[Any, str]:
        # fsspec keeps file systems by their options, so this opens no second one.
        import fsspec

        system, root = fsspec.core.url_to_fs(self._url, **self._options)
        return system, f"{root.rstrip('/')}/{name}"

    def put(self, name: str, body: Any) -> None:
        """Put an object."""
        with self._translated("put", name):
            system, path = self._at(name)
            system.makedirs(path.rpartition("/")[0], exist_ok=True)
            system.pipe_file(path, bytes(body))

    def get(self, name: str) -> bytes | None:
        """Get an object."""
        with self._translated("get", name):
            system, path = self._at(name)
            try:
                return bytes(system.cat_file(path))
            except FileNotFoundError:
                return None

    def rename(self, old: str, new: str) -> None:
        """Copy and remove, which is all that object stores have."""
        with self._translated("rename", old):
            system, path = self._at(old)
            system.cp_file(path, self._at(new)[1])
            system.rm_file(path)

    def names(self, folder: str) -> list[str]:
        """List a folder, as it is now."""
        with self._translated("list", folder):
            system, path = self._at(folder)
            system.invalidate_cache()
            try:
                return sorted(each.rstrip("/").rpartition("/")[2] for each in system.ls(path, detail=False))
            except FileNotFoundError:
                return []

    def remove(self, names: Iterable[str]) -> None:
        """Remove."""
        for name in names:
            with self._translated("remove", name), contextlib.suppress(FileNotFoundError):
                system, path = self._at(name)
                system.rm_file(path)

    @contextlib.contextmanager
    def _translated(self, what: str, name: str) -> Iterator[None]:
        # Every client has errors of its own, and not all are those of the operating system.
        try:
            yield
        except Exception as error:
            raise StorageError(
                f"cannot {what} {self}/{name}: {type(error).__name__}: {error}; see that the place is there and can be "
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
    """Put rows under a name."""
    out = pa.BufferOutputStream()
    rows = rows.combine_chunks().replace_schema_metadata(None)
    with pa.ipc.new_stream(out, rows.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(rows, max_chunksize=65_536)
    body = out.getvalue()
    staging.put(name, memoryview(body))
    return Staged(name, rows.num_rows, body.size, _digest(body))


def read_staged(staging: Staging, staged: Staged) -> pa.Table:
    """The rows under a name. ``StorageError`` where they are gone or others."""
    body = staging.get(staged.name)
    if body is None:
        raise StorageError(
            f"{staged.name} was prepared in {staging} with {staged.rows} rows and is not there, and the database has no "
            "mark that it was committed. Put the object back, from a backup, or go on from a checkpoint that does not hold it; "
            "where its rows are known to be in the table, docs/sinks.md says how to mark it",
            kind=ErrorKind.OBJECT_MISSING,
            path=staged.name,
        )
    if (len(body), _digest(body)) != (staged.size_bytes, staged.digest):
        raise StorageError(
            f"{staged.name} in {staging} has {len(body)} bytes with digest {_digest(body)} and was prepared with "
            f"{staged.size_bytes} and {staged.digest}; something else has written it. Put back what was there, from a backup",
            kind=ErrorKind.OBJECT_DIGEST_DIFFERS,
            path=staged.name,
        )
    try:
        rows = pa.ipc.open_stream(body).read_all()
    except (pa.ArrowException, OSError) as error:
        raise StorageError(
            f"{staged.name} in {staging} is not an Arrow stream, though its size and digest are those of the checkpoint: "
            f"{error}. Something else has written it; go on from a checkpoint that does not hold it",
            kind=ErrorKind.DAMAGED_SEGMENT,
            path=staged.name,
        ) from error
    if rows.num_rows != staged.rows:
        raise StorageError(
            f"{staged.name} in {staging} has {rows.num_rows} rows and was prepared with {staged.rows}; something else has "
            "written it, or the checkpoint. Go on from a checkpoint that does not hold it",
            kind=ErrorKind.DAMAGED_SEGMENT,
            path=staged.name,
        )
    return rows


def _digest(body: Any) -> str:
    return blake2b(body, digest_size=16).hexdigest()


__all__ = ["LocalStaging", "RemoteStaging", "Staged", "Staging", "read_staged", "stage", "staging_at"]
