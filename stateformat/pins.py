"""Pins: checkpoints that a user keeps under a name, with the address ``STORE@NAME``.

A pin is a savepoint (SPEC.md section 10) in ``savepoints/NAME/`` below the store, made by
``publication.copy``: a separate store, which retention and garbage collection never see. The
savepoints of running jobs are there too, and have the same kind of address.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import paths as layout
from .errors import CheckpointError, ErrorKind, InvalidInput, NotFound, StorageError
from .formats import foreign_checkpoints
from .history import find_record, newest_record, record_ids
from .model import CheckpointKind, Record
from .publication import Progress, check_segments, copy
from .reading import Checkpoint
from .storage import (
    REFUSALS,
    Storage,
    as_url,
    instrumented,
    open_storage,
    split_name,
    stats_of,
)


@dataclass(frozen=True)
class Savepoint:
    """A store in ``savepoints/`` below another one."""

    name: str
    url: str
    record: Record | None = None
    """The record of its newest checkpoint; None if it cannot be read."""
    checkpoints: int = 1
    """How many records it has: more than one if a job has gone on in it."""
    fault: CheckpointError | None = None
    """Why the record cannot be read."""

    @property
    def is_claimed(self) -> bool:
        """Whether a job has gone on in it, so it is no longer a savepoint."""
        return self.checkpoints > 1 or (self.record is not None and self.record.kind is not CheckpointKind.SAVEPOINT)


class Pinned(NamedTuple):
    """What :func:`pin` has done."""

    record: Record
    url: str
    made: bool
    """False if the checkpoint was already pinned under this name."""


def pin(
    checkpoint: Checkpoint,
    name: str,
    *,
    progress: Progress | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Pinned:
    """Make a savepoint of a checkpoint in ``savepoints/NAME/`` below its store.

    It may be repeated: an interrupted copy is completed. Raises ``InvalidInput`` for a name that is
    illegal or taken (kind ``STORE_NOT_EMPTY``), for another system's checkpoint and for a storage
    that cannot hold savepoints; and what ``publication.copy`` raises.
    """
    layout.check_pin_name(name)
    store = checkpoint.storage
    check_segments(checkpoint)
    target = _place(store, name)
    held = _held(target, name)
    if held is not None:
        if held.record is not None and not held.is_claimed and held.record.ref == checkpoint.record.ref:
            return Pinned(held.record, held.url, made=False)
        raise _taken(held, store, checkpoint.record)
    return Pinned(copy(checkpoint, target, progress=progress, sleep=sleep), target.url, made=True)


def pins(store: Storage) -> list[Savepoint]:
    """Return the savepoints below a store, by name: pins, and those of jobs.

    Costs one listing, and a listing and a read for each savepoint. Folders without a record are
    skipped; if the storage cannot hold savepoints, there are none.
    """
    given = store.savepoints()
    with ThreadPoolExecutor(max(1, min(len(given), store.reads_at_once))) as pool:
        found = pool.map(lambda name: _held(store.savepoint(name), name), given)
        return [one for one in found if one is not None]


def unpin(store: Storage, name: str) -> Savepoint | None:
    """Remove the savepoint ``savepoints/NAME``, its record first; it may be repeated.

    Returns it, or None if only the remains of an interrupted pin or unpin were removed. Raises
    ``NotFound`` if nothing is there, and ``InvalidInput`` for a store in which a job has gone on,
    whose record cannot be read, or that is reached by a link.
    """
    place = _place(store, name)
    held = _held(place, name)
    if held is None and not place.list(""):
        raise NotFound(
            f"{store.url} has no savepoint {name!r}; {_listed(pins(store))}",
            kind=ErrorKind.STORE_NOT_FOUND,
            url=place.url,
        )
    if held is not None and held.fault is not None:
        raise InvalidInput(
            f"the record of {held.url} cannot be read, so whether it is a savepoint or a job's own store is unknown "
            f"({held.fault}); nothing was deleted. `ckpt validate {held.url}` says more",
            url=held.url,
        ) from held.fault
    if held is not None and held.is_claimed:
        raise InvalidInput(
            f"{held.url} is no savepoint any more: a job has gone on in it ({_contents(held)}). It is the job's store, "
            "and nothing was deleted",
            url=held.url,
        )
    store.remove_savepoint(name)
    return held


def open_address(url: str | os.PathLike[str], **options: Any) -> Storage:
    """Return the storage of a URL or path, or of the savepoint that ``STORE@NAME`` names.

    A store or another system's checkpoint at a path that ends in ``@NAME`` takes precedence. So
    does an empty place, if there is no such savepoint either. Only an address that ends in a name
    costs a look-up. ``options`` go to the storage.
    """
    url = as_url(url)
    place = open_storage(url, **options)
    store_url, name = split_name(url)
    if name is None:
        return place
    store = open_storage(store_url, **options)
    try:
        savepoint = store.savepoint(name)
        if not savepoint.names(layout.RECORDS):
            return place
    except InvalidInput:
        return place  # The storage keeps no savepoints.
    except StorageError as error:
        # A file is where the other's folder would be, or somebody else owns it.
        if error.kind in REFUSALS:
            return place
        raise
    if place.names(layout.RECORDS) or foreign_checkpoints(place) is not None:
        return place
    return savepoint


def is_named(storage: Storage, url: str) -> bool:
    """Return whether :func:`open_address` took ``url`` as ``STORE@NAME``, not as a place."""
    name = split_name(url)[1]
    return name is not None and storage.url.endswith(f"/{layout.SAVEPOINTS}{name}")


def _place(store: Storage, name: str) -> Storage:
    return instrumented(store.savepoint(name), stats_of(store))


def _held(place: Storage, name: str) -> Savepoint | None:
    """Return what is in a folder of savepoints; None without a record."""
    ids = record_ids(place)
    if not ids:
        return None
    try:
        record = newest_record(place) if len(ids) > 1 else find_record(place, ids[-1])
    except CheckpointError as error:
        return Savepoint(name, place.url, None, len(ids), error)
    return None if record is None else Savepoint(name, place.url, record, len(ids))


def _contents(held: Savepoint) -> str:
    if held.record is None:
        return "its record cannot be read"
    newest = f"{held.record.kind} {held.record.checkpoint_id} (attempt {held.record.attempt_id})"
    return newest if held.checkpoints == 1 else f"{held.checkpoints} checkpoints, the newest is {newest}"


def _taken(held: Savepoint, store: Storage, record: Record) -> InvalidInput:
    free = (
        "choose another name"
        if held.is_claimed or held.record is None
        else f"choose another name, or `ckpt unpin {store.url}@{held.name}` first"
    )
    return InvalidInput(
        f"the name {held.name!r} is taken: {held.url} holds {_contents(held)}, so checkpoint {record.checkpoint_id} "
        f"(attempt {record.attempt_id}) was not pinned; {free}",
        kind=ErrorKind.STORE_NOT_EMPTY,
        url=held.url,
    )


def _listed(found: list[Savepoint]) -> str:
    return f"it has {', '.join(one.name for one in found[:20])}" if found else "it has none"
