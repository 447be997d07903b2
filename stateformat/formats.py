"""Checkpoints of other systems, found where a stateformat store was expected.

Packages bring formats through the entry-point group ``stateformat.formats``. Each entry is a
function ``(folder: Storage, outside: Outside | None) -> ForeignCheckpoints | None``, which checks
whether the folder holds what it can read. An address may name the format: ``flink:PATH``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from .errors import ErrorKind, InvalidInput, NotFound
from .storage import Storage, local_path, open_storage

if TYPE_CHECKING:
    from .errors import CheckpointError
    from .findings import Report
    from .model import Record
    from .reading import Checkpoint

GROUP: Final = "stateformat.formats"
Outside = Callable[[str], Storage]
"""Opens the folder at a URL that the metadata of a foreign checkpoint names."""

# Schemes of URLs (`s3://`) are not formats.
_PREFIX: Final = re.compile(r"([a-z][a-z0-9-]+):(?!//)(.+)", re.DOTALL)


Format = Callable[[Storage, Outside | None], "ForeignCheckpoints | None"]
"""What a package brings: it returns the checkpoints in a plain folder if it can read them."""


class ForeignCheckpoints(Protocol):
    """The checkpoints of another system in one folder; there is at least one."""

    @property
    def system(self) -> str:
        """What it is, in a sentence: "a Flink savepoint"."""

    def history(self) -> tuple[list[Record], dict[int, CheckpointError]]:
        """Return the checkpoints that can be opened, newest first, and why newer ones cannot."""

    def open(self, checkpoint_id: int | None) -> Checkpoint:
        """Return one, by default the newest. Raises ``NotFound`` for an unknown id."""

    def validate(self, checkpoint_id: int | None, level: Any, progress: Callable[[int, int], None] | None) -> Report:
        """Report everything that is wrong with one, by default the newest."""


def split_format(address: str) -> tuple[str | None, str]:
    """Return the format and the rest of ``flink:PATH``; None if the address names no format.

    Only formats that are installed count; ``other:PATH`` is a path. The file ``_metadata`` stands
    for its folder, as it does for Flink, which also takes spaces around it and slashes after it.
    """
    match = _PREFIX.fullmatch(address)
    name, place = (match[1], match[2]) if match and match[1] in _formats() else (None, address)
    file = place.strip().rstrip("/")
    folder, slash, last = file.rpartition("/")
    if last == "_metadata":
        path = local_path(file)
        if path is None or Path(path).is_file():
            place = folder or slash or "."
    return name, place


def foreign_checkpoints(
    storage: Storage, name: str | None = None, outside: Outside | None = None
) -> ForeignCheckpoints | None:
    """Return the checkpoints in the folder of a storage, or None if no format recognizes them.

    ``name``: look for this format only, and raise ``NotFound`` if it is not there. ``outside``
    opens files in other folders that the metadata names; without it they are not read.
    """
    folder = storage.folder()
    found = None
    if folder is not None:
        formats = installed()
        wanted = [formats[name]] if name is not None else formats.values()
        made = [recognises(folder, outside) for recognises in wanted]
        there = [one for one in made if one is not None]
        if len(there) > 1:
            raise InvalidInput(
                f"{storage.url} is {' and '.join(one.system for one in there)} at once; say which is meant: "
                f"{' or '.join(f'{key}:PATH' for key in formats)}",
                kind=ErrorKind.INVALID_URL,
                url=storage.url,
            )
        found = there[0] if there else None
    if found is None and name is not None:
        raise NotFound(
            f"there is no {name} checkpoint at {storage.url}; check the address",
            kind=ErrorKind.STORE_NOT_FOUND,
            url=storage.url,
        )
    return found


def refuse_foreign(storage: Storage, name: str | None = None) -> None:
    """Raise ``InvalidInput`` if a run would begin in another system's checkpoint."""
    found = foreign_checkpoints(storage, name)
    if found is not None:
        raise InvalidInput(
            only_read(storage.url, found.system, "and nothing is ever written there"),
            kind=ErrorKind.STORE_NOT_EMPTY,
            url=storage.url,
        )


def only_read(url: str, system: str, why: str) -> str:
    """Return the sentence that refuses to do in another system's checkpoint what a store takes."""
    return f"{url} is {system}, {why}; `ckpt import {url} --to STORE` makes a store of it"


def open_folder(url: str, options: Mapping[str, Any]) -> Storage:
    """Return the folder at a URL. Raises ``InvalidInput`` if its storage has no folders."""
    folder = open_storage(url, **options).folder()
    if folder is None:
        raise InvalidInput(f"the storage of {url} holds only stores of checkpoints; give a folder or s3://")
    return folder


def installed() -> dict[str, Format]:
    """Return the function of each format that is installed, by name, sorted."""
    formats = _formats()
    return {name: formats[name].load() for name in sorted(formats)}


def _formats() -> dict[str, Any]:
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=GROUP)}
