"""A folder that an export writes into, local or on S3, as each library wants it named."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.storage import Storage, folder_of, open_storage, without_secrets


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
        storage = folder_of(open_storage(self.address, **self.options))
        if storage is None:
            raise InvalidInput(
                f"{self} cannot hold tables; give a path, or a URL that begins with s3://",
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
