"""What can be saved of a damaged query: the newest batch that a copy can have whole, and how.

A snapshot is not needed where an older one and all changes after it are there: a copy without the
damaged one is whole. What else is damaged has no second copy in the folder, and an older batch is
what is left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

import numpy as np

from stateformat.errors import CheckpointError, DamagedCheckpoint, ErrorKind
from stateformat.findings import Finding
from stateformat.storage import InFront, ObjectInfo, Storage

from ..framing import DAMAGED_ADVICE, spark_decode
from ..source import Level
from .checks import check_source
from .copying import is_of
from .logs import batches, committed, read_offsets
from .rocksdb_store import read_changes
from .source import SparkSource
from .stores import Store, read_whole

_LEVELS: Final[tuple[Level, ...]] = ("quick", "full")
Told = Callable[[int], None]
"""Called with the batch that is looked at."""


class _AsOf(InFront):
    """A checkpoint's folder as of a batch, without some files."""

    def __init__(self, folder: Storage, listed: Sequence[ObjectInfo], batch: int, left_out: Set[str]) -> None:
        super().__init__(folder)
        self._items = [item for item in listed if is_of(item.path, batch) and item.path not in left_out]

    def list(self, prefix: str) -> list[ObjectInfo]:
        return [item for item in self._items if item.path.startswith(prefix)]


@dataclass(frozen=True)
class Mended:
    """The newest batch that a copy can have whole."""

    source: SparkSource
    """Reads the folder as of the batch, without what is left out."""
    left_out: tuple[str, ...]
    """Files that the copy does without."""
    newest: int
    """The newest committed batch."""
    lost: Mapping[int, str]
    """Newer batches, which no copy can have, and what is wrong with each."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong with the newest batch."""
        return not self.left_out and not self.lost

    @property
    def rows(self) -> int:
        """The rows of all states in the copy; reads them."""
        return sum(int(np.sum(self.source.group_rows(part))) for part in self.source.parts)


def mend(folder: Storage, checkpoint_id: int | None = None, told: Told = lambda _: None) -> Mended:
    """Find the newest batch, not after ``checkpoint_id``'s, that a copy can have whole.

    Raises ``DamagedCheckpoint`` if there is none, and ``NotFound`` without any committed batch.
    """
    listed = folder.list("")
    there = committed(folder)
    wanted = [batch for batch in reversed(there) if checkpoint_id is None or batch < checkpoint_id]
    lost: dict[int, str] = {}
    for batch in wanted:
        told(batch)
        try:
            source, left_out = _mended(folder, listed, batch)
        except CheckpointError as error:
            lost[batch] = str(error).removesuffix(DAMAGED_ADVICE)
            continue
        return Mended(source, tuple(sorted(left_out)), there[-1], lost)
    why = next(iter(lost.values()), "it has no batch before that")
    raise DamagedCheckpoint(
        f"{folder.url} has no batch that a copy could have whole; the newest: {why}",
        kind=ErrorKind.DAMAGED_MANIFEST,
        url=folder.url,
    )


def _mended(folder: Storage, listed: Sequence[ObjectInfo], batch: int) -> tuple[SparkSource, set[str]]:
    left_out = _unreadable_offsets(folder, batch)
    first: dict[str | None, Finding] = {}
    while True:
        source = SparkSource(_AsOf(folder, listed, batch, left_out), batch + 1)
        errors: list[Finding] = []
        for level in _LEVELS:
            errors = errors or [one for one in check_source(source, level, lambda *_: None) if one.severity == "error"]
        if not errors:
            _check_lineages(source, left_out)
            return source, left_out
        for one in errors:
            if (base := _base(source, one)) is None:
                # Where leaving the base out did not help, what was wrong with it is what is wrong.
                raise _lost(first.get(_place_of(one), one))
            first.setdefault(_place_of(one), one)
            left_out.add(base)


def _place_of(found: Finding) -> str | None:
    """Return the folder of the partition that a finding is about, by its file if it has one."""
    place = re.match(r"state/\d+/\d+/", found.path)
    return place[0] if place else f"{found.operator}/{found.subtask}"


def _lost(found: Finding) -> DamagedCheckpoint:
    place = f"{found.path}: " if found.path and not found.message.startswith(found.path) else ""
    message = found.message.removesuffix(DAMAGED_ADVICE)
    return DamagedCheckpoint(f"{place}{message}", kind=found.kind, path=found.path)


def _unreadable_offsets(folder: Storage, batch: int) -> set[str]:
    """Return the next batch's offsets if nobody can read them: Spark makes new ones."""
    if batch + 1 in batches(folder, "offsets"):
        try:
            read_offsets(folder, batch + 1)
        except CheckpointError:
            return {f"offsets/{batch + 1}"}
    return set()


def _base(source: SparkSource, found: Finding) -> str | None:
    """Return the snapshot on which a damaged partition is based, if it has one to do without."""
    for (operator, _), store in source.stores.items():
        for partition in range(store.partitions):
            of = (operator, partition) == (found.operator, found.subtask)
            if of or (found.path and found.path.startswith(f"{store.folder(partition)}/")):
                return _snapshot(source, store, partition)
    return None


def _snapshot(source: SparkSource, store: Store, partition: int) -> str | None:
    try:
        paths = [item.path for item in source.reader.files(store, partition, source.listing)]
    except CheckpointError:
        return None
    return next((path for path in paths if path.endswith((".snapshot", ".zip"))), None)


def _check_lineages(source: SparkSource, left_out: Set[str]) -> None:
    """Raise ``DamagedCheckpoint`` where Spark would not find the older snapshot.

    In checkpoint format 2 the newest changelog names the versions that it is based on, and Spark
    looks for a snapshot among these alone.
    """
    for store in source.stores.values():
        for partition in range(store.partitions) if store.unique_ids else ():
            place = f"{store.folder(partition)}/"
            files = source.reader.files(store, partition, source.listing)
            if not any(path.startswith(place) for path in left_out) or not files[-1].path.endswith(".changelog"):
                continue
            data = spark_decode(store.codec, read_whole(source.folder, files[-1]), files[-1].path)
            known = {number for number, _ in read_changes(data, files[-1].path).lineage}
            first = int(files[0].path.removeprefix(place).split("_")[0]) if files[0].path.endswith(".zip") else 1
            if first not in known:
                raise DamagedCheckpoint(
                    f"{files[-1].path} names no older snapshot, so Spark would not find {files[0].path}",
                    kind=ErrorKind.OBJECT_MISSING,
                    path=files[-1].path,
                )
