"""What lies below, and above, a folder that is neither a store nor another system's checkpoint.

The search goes level by level, nearest first. It looks into a folder with one request, and asks no
more of one in which nothing has the name of a part of a checkpoint.
"""

from __future__ import annotations

import builtins
import re
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from .. import paths as layout
from ..errors import CheckpointError, DamagedCheckpoint, ErrorKind
from ..formats import Format, foreign_checkpoints, installed
from ..storage import InFront, Look, ObjectInfo, Storage

FOLDERS: Final = 1000
"""How many folders a search looks into, and :data:`DEPTH` how many levels below the first."""
DEPTH: Final = 8
_ABOVE: Final = 6
"""How many folders above a place are asked whether it lies in a checkpoint."""
_SHOWN: Final = 5
# How Flink names the folders of checkpoints, and of savepoints.
_CHECKPOINT: Final = re.compile(r"chk-(\d{1,18})")
_BY_FLINK: Final = re.compile(r"chk-\d{1,18}|savepoint-[0-9a-f]{6}-[0-9a-f]{12}")
_FILE: Final = "_metadata"


@dataclass(frozen=True)
class Place:
    """A store, or a checkpoint of another system, below a folder."""

    storage: Storage
    """The plain folder to open."""
    path: str
    """Where it is, relative to the folder that was searched; of one of several in a folder of
    Flink's, its own folder.
    """
    format: str | None = None
    """Which other system's it is; None for a store."""
    system: str = "a store"
    """That in words."""
    checkpoint_id: int | None = None
    """Of one of several in a folder."""
    home: Storage | None = None
    """The folder of its ``_metadata``."""
    fault: CheckpointError | None = None
    """Why it is known without opening it to be incomplete."""

    @property
    def address(self) -> str:
        """What ``ckpt`` and :func:`stateformat.open` take."""
        return self.storage.url + ("" if self.checkpoint_id is None else f"@{self.checkpoint_id}")


@dataclass(frozen=True)
class Below:
    """What a search has found, nearest first, and what it has left out."""

    url: str
    places: tuple[Place, ...]
    passed_over: Mapping[str, str]
    """Why folders were not looked into, by path."""
    looked_into: int
    left_out: int
    """Folders that were seen, and not looked into because there are too many."""

    def __bool__(self) -> bool:
        return bool(self.places)

    def __str__(self) -> str:
        """Say which checkpoints there are, and how to see one, and all."""
        known = self._known
        shown = ", ".join(f"{place.path} ({place.system})" for place in known[:_SHOWN])
        more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
        verb, one, none = ("are", "one of them", "None is") if len(known) > 1 else ("is", "that", "It is not")
        give = f"Give {one}: `ckpt inspect {shlex.quote(known[0].address)}`"
        if known[0].fault is not None:
            give = f"{none} complete"
        return f"In it {verb} {shown}{more}. {give}; `ckpt history {shlex.quote(self.url)}` lists all"

    @property
    def _known(self) -> Sequence[Place]:
        """The places that are not known to be incomplete, if there are any."""
        return [place for place in self.places if place.fault is None] or self.places

    def to_json(self) -> list[str]:
        """Return the addresses that the sentence names, for the details of an error."""
        return [place.address for place in self._known[:_SHOWN]]


def places_below(folder: Storage) -> Below:
    """Return the stores and the checkpoints of other systems below a plain folder, itself excluded.

    Reads little, writes nothing. Raises ``StorageError`` if the folder itself cannot be listed.
    """
    see = partial(_see, formats=installed())
    places: list[Place] = []
    passed_over: dict[str, str] = {}
    level, looked_into = [("", folder)], 0
    for _ in range(DEPTH + 1):
        now, level = level[: FOLDERS - looked_into], level[FOLDERS - looked_into :]
        looked_into += len(now)
        with ThreadPoolExecutor(max(1, min(len(now), folder.reads_at_once))) as pool:
            seen = list(pool.map(see, now))
        for one in seen:
            places += one.places
            passed_over |= one.passed_over
            level += one.below
        if not level or looked_into == FOLDERS:
            break
    return Below(folder.url, tuple(places), passed_over, looked_into, len(level))


@dataclass
class _Seen:
    """One folder that was looked into."""

    places: list[Place] = field(default_factory=list)
    below: list[tuple[str, Storage]] = field(default_factory=list)
    """The folders in it that are to be looked into."""
    passed_over: dict[str, str] = field(default_factory=dict)


class _Looked(InFront):
    """A plain folder that was looked into: what is not there is not asked for, and listings are
    kept.
    """

    def __init__(self, folder: Storage, look: Look) -> None:
        super().__init__(folder)
        self._look = look
        self._lists: dict[str, list[ObjectInfo]] = {}

    def folder(self) -> Storage:
        return self

    def look(self) -> Look:
        return self._look

    def list(self, prefix: str) -> list[ObjectInfo]:
        first, slash, _ = prefix.partition("/")
        # A link is asked for, and refused.
        names = [*self._look.folders, *(self._look.links if slash else self._look.files)]
        if not any(name == first if slash else name.startswith(first) for name in names):
            return []
        if prefix not in self._lists:
            self._lists[prefix] = super().list(prefix)
        return self._lists[prefix]

    def names(self, folder: str) -> builtins.list[str]:
        return [*super().names(folder)] if folder.partition("/")[0] in self._look.folders else []

    def read_range(self, path: str, offset: int, length: int) -> Any:
        if "/" not in path and path not in self._look.files:
            raise FileNotFoundError(path)
        return super().read_range(path, offset, length)


def _see(place: tuple[str, Storage], formats: Mapping[str, Format]) -> _Seen:
    path, folder = place
    try:
        look = folder.look()
        return _seen(path, _Looked(folder, look), look, formats)
    except CheckpointError as error:
        if not path:
            raise
        return _Seen(passed_over={path: str(error)})


def _seen(path: str, folder: Storage, look: Look, formats: Mapping[str, Format]) -> _Seen:
    base = f"{path}/" if path else ""
    found = _Seen()
    inside = dict(look.folders)
    if path:
        if any(map(layout.record_id, folder.names(layout.RECORDS))):
            found.places.append(Place(folder, path))
            savepoints = layout.SAVEPOINTS.rstrip("/")
            inside = {name: there for name, there in inside.items() if name == savepoints}
        for name, recognises in formats.items():
            if (what := recognises(folder, None)) is not None:
                many = [] if _FILE in look.files else [key for key in inside if _CHECKPOINT.fullmatch(key)]
                one = Place(folder, path, name, what.system, home=folder)
                found.places += _flinks(one, {key: inside[key] for key in many}) if many else [one]
                inside = {key: there for key, there in inside.items() if many and key not in many}
        if not found.places and _BY_FLINK.fullmatch(path.rpartition("/")[2]) and (look.files or look.folders):
            found.places.append(Place(folder, path, "flink", "begun by Flink", fault=_unfinished()))
            inside = {}
    for name, there in inside.items():
        if name.startswith("."):
            found.passed_over[base + name] = "it is hidden"
        else:
            found.below.append((base + name, there))
    found.passed_over |= {base + name: "it is a link, and links are not followed" for name in look.links}
    return found


def _flinks(job: Place, inside: Mapping[str, Storage]) -> list[Place]:
    """Return the checkpoints in a folder of Flink's, newest first."""
    complete = {
        item.path.partition("/")[0]
        for item in job.storage.list("chk-")
        if item.path.count("/") == 1 and item.path.endswith(f"/{_FILE}")
    }
    found = []
    for name in sorted(inside, key=lambda name: int(name[4:]), reverse=True):
        path = f"{job.path}/{name}"
        fault = None if name in complete else _unfinished()
        found.append(Place(job.storage, path, job.format, job.system, int(name[4:]), inside[name], fault))
    return found


def _unfinished() -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"it has no {_FILE}: Flink has not completed it, or it was copied in part", kind=ErrorKind.OBJECT_MISSING
    )


def place_around(storage: Storage) -> str:
    """Say in which store or other system's checkpoint a place lies that is none; empty for none."""
    inside, above = "", storage
    for _ in range(_ABOVE):
        outer = above.above()
        if outer is None:
            break
        inside = f"{above.url[len(outer.url) :].strip('/')}/{inside}".rstrip("/")
        above = outer
        with suppress(CheckpointError):
            if any(map(layout.record_id, above.names(layout.RECORDS))):
                checkpoint_id = layout.record_id(inside)
                at = "" if checkpoint_id is None else f"@{checkpoint_id}"
                return f"it is a place in the store {above.url}: `ckpt inspect {shlex.quote(above.url + at)}`"
            found = foreign_checkpoints(above)
            if found is not None:
                address = shlex.quote(_of_job(above) or above.url)
                return f"it is a place in {above.url}, {found.system}: `ckpt inspect {address}`"
    return ""


def _of_job(folder: Storage) -> str:
    """Return the address of a folder ``chk-N`` as one of its job's, whose files it may share."""
    match, job = _CHECKPOINT.fullmatch(folder.url.rpartition("/")[2]), folder.above()
    return f"{job.url}@{match[1]}" if match and job is not None and foreign_checkpoints(job) is not None else ""
