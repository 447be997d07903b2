"""Which checkpoints refer to which objects of a store. Lists each folder and reads each manifest
once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ... import paths as layout
from ...errors import CheckpointError, ErrorKind, StorageError
from ...history import (
    Garbage,
    Uses,
    collect_garbage,
    expire,
    record_and_manifest,
    record_ids,
    require_records,
)
from ...manifest import Ints, Manifest, codes_of, first_uses, integers, state_runs, take_rows
from ...model import CheckpointId, Record
from ...storage import InFront, Leftover, ObjectInfo, Storage

TRIES = 5
"""How many times a store is read at most, if it changes meanwhile."""
Key = tuple[str, str]
"""Operator and state."""


@dataclass(frozen=True)
class Named:
    """What one checkpoint refers to: arrays with an entry for each of its segments."""

    record: Record
    at: Ints
    """Its number among the listed segments; -1 if it is in the manifest or gone."""
    state: Ints
    """Its number in ``Naming.states``."""
    size_bytes: Ints
    inline: Any
    """Whether it is in the manifest."""


@dataclass
class Naming:
    """A store as it was at one instant."""

    objects: dict[str, list[ObjectInfo]]
    """By folder."""
    leftovers: list[Leftover]
    shared: dict[str, tuple[str, int]]
    """Objects whose bytes have several names (``Storage.shared``)."""
    named: dict[CheckpointId, Named] = field(default_factory=dict)
    unreadable: dict[CheckpointId, CheckpointError] = field(default_factory=dict)
    states: dict[Key, int] = field(default_factory=dict)
    garbage: Garbage = field(default_factory=Garbage)
    kept: Garbage | None = None


class SeenOnce(InFront):
    """A storage as it was when it was first read, for functions that read several times."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._listed: dict[str, list[ObjectInfo]] = {}
        self._begun: list[Leftover] | None = None
        self._records: dict[str, pa.Buffer] = {}

    # Of the listing that is kept.
    names, names_after = Storage.names, Storage.names_after

    def exists(self) -> bool:
        return bool(self.list(layout.RECORDS)) or self._inner.exists()

    def list(self, prefix: str) -> list[ObjectInfo]:
        folder = prefix[: prefix.index("/") + 1]
        if folder not in self._listed:
            self._listed[folder] = self._inner.list(folder)
        found = self._listed[folder]
        return found if prefix == folder else [item for item in found if item.path.startswith(prefix)]

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        if not path.startswith(layout.RECORDS):
            return self._inner.read_range(path, offset, length)
        if path not in self._records:
            self._records[path] = self._inner.read_range(path, offset, length)
        return self._records[path]

    def leftovers(self) -> Any:
        if self._begun is None:
            self._begun = self._inner.leftovers()
        return self._begun

    def discard(self, leftovers: Iterable[Leftover]) -> None:  # noqa: ARG002
        raise AssertionError("nothing is deleted here")


def read_naming(storage: Storage, keep: int | None) -> Naming:
    """Read a store once, and again if its checkpoints have changed meanwhile.

    ``keep``: also find what expiring all but this many would free. Raises ``NotFound``, and
    ``StorageError`` if the store changes each time.
    """
    for _ in range(TRIES):
        found = _Reading(storage).read(keep)
        if found is not None:
            return found
    raise StorageError(
        f"the checkpoints of {storage.url} changed {TRIES} times in a row while they were read; try again",
        kind=ErrorKind.HISTORY_UNSTABLE,
    )


class _Reading:
    """One reading of a store."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._seen: Any = SeenOnce(storage)
        self._uses: dict[CheckpointId, Uses | CheckpointError] = {}

    def read(self, keep: int | None) -> Naming | None:
        """Return what is there; None if the checkpoints have changed since the listing."""
        seen = self._seen
        ids = record_ids(seen)
        require_records(self._storage, ids)
        segments = seen.list(layout.SEGMENTS)
        self._listed = pa.array([item.path for item in segments], pa.string())
        folders = (layout.RECORDS, layout.MANIFESTS, layout.SEGMENTS, layout.REQUESTS)
        self._found = Naming(
            {folder: seen.list(folder) for folder in folders}, self._leftovers(), _shared(self._storage)
        )
        for checkpoint_id in reversed(ids):
            # What cannot be read is listed in `unreadable`; the search for garbage explains the
            # consequences.
            if isinstance(error := self._keep(checkpoint_id), CheckpointError):
                self._found.unreadable[checkpoint_id] = error
        self._found.garbage = collect_garbage(seen, delete=False, read=self._again)
        if keep is not None:
            self._found.kept = expire(seen, keep, delete=False, read=self._again)
        return self._found if record_ids(self._storage) == ids else None

    def _leftovers(self) -> list[Leftover]:
        try:
            found: list[Leftover] = self._seen.leftovers()
        except StorageError:
            # Listing uploads needs a permission of its own; the search for garbage warns if it is
            # missing.
            return []
        return found

    def _keep(self, checkpoint_id: CheckpointId) -> CheckpointError | None:
        """Read a checkpoint, and keep what it refers to."""
        try:
            record, manifest = record_and_manifest(self._seen, checkpoint_id)
        except CheckpointError as error:
            self._uses[checkpoint_id] = error
            return error
        if manifest is None or not isinstance(record, Record):
            self._uses[checkpoint_id] = Uses(record, None)
            return record if isinstance(record, CheckpointError) else None
        paths, named = self._named(record, manifest)
        self._found.named[checkpoint_id] = named
        self._uses[checkpoint_id] = Uses(record, paths)
        return None

    def _again(self, _: Storage, checkpoint_id: CheckpointId) -> Uses:
        found = self._uses[checkpoint_id]
        if isinstance(found, CheckpointError):
            raise found
        return found

    def _named(self, record: Record, manifest: Manifest) -> tuple[pa.Array, Named]:
        handles = manifest.handles
        state_of_row = np.zeros(handles.num_rows, np.int64)
        for key, start, stop in state_runs(handles):
            state_of_row[start:stop] = self._found.states.setdefault(key, len(self._found.states))
        first = first_uses(codes_of(handles["path"])[0])
        rows = pa.array(first)
        chosen = take_rows(handles.select(["path", "size_bytes"]), rows)
        paths = chosen["path"].combine_chunks()
        inline = manifest.is_inline().take(rows).to_numpy().astype(bool)
        at = np.where(inline, -1, integers(pc.index_in(paths, value_set=self._listed)))
        return paths, Named(record, at, state_of_row[first], integers(chosen["size_bytes"]), inline)


def _shared(storage: Storage) -> dict[str, tuple[str, int]]:
    return storage.shared("")
