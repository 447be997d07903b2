"""Copies a query's checkpoint as of one committed batch: elsewhere, or back to an older batch.

Spark continues with the batch after it. Where that batch had begun, its offsets are copied too, so
that it gets the same input again. Sources' own logs are copied whole: what a source has seen stays
seen, and no input is lost, even if it is gone by now.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput, StorageError, UnsupportedFormat
from stateformat.storage import InFront, ObjectInfo, Storage, lies_in

from ..source import Progress
from .checks import check_source
from .edits import moved_operators
from .logs import UNFINISHED, batches, begun_logs, begun_path, check_source_logs, is_begun
from .offsets import Moved, SourceEdits, apply_edits
from .rocksdb_store import read_snapshot
from .source import SparkSource
from .stores import Store

_NUMBERED: Final = re.compile(r"(?:offsets|commits|state/\d+/_metadata/v2)/\.?(\d+)(?:\.crc)?")
_IN_PARTITION: Final = re.compile(r"state/\d+/\d+/(?!(?:[^/]+/)?_metadata/).*")
_PIECE_BYTES: Final = 8 * 2**20
_WRITERS: Final = 4
"""Files copied at a time: most of it is waiting."""


@dataclass(frozen=True)
class CopyPlan:
    """What a copy holds, from logs and listings."""

    source: SparkSource
    query_id: str
    batch: int
    newest: int
    """The query's newest committed batch."""
    runs_again: bool
    """Whether the batch after ``batch`` had begun: it gets the same input again."""
    copies: tuple[ObjectInfo, ...]
    edits: tuple[tuple[str, bytes], ...]
    """Files that change, whole: operators' metadata, which name schema files by absolute paths, and
    logs of what goes on elsewhere.
    """
    names: Mapping[str, str | None] = field(default_factory=dict)
    """Files that have another name in the copy."""
    moved: Sequence[Moved] = ()
    """The sources that go on elsewhere."""

    @property
    def size_bytes(self) -> int:
        """Bytes to be copied."""
        return sum(item.size_bytes for item in self.copies) + sum(len(data) for _, data in self.edits)


def plan_copy(source: SparkSource, target_url: str, changes: SourceEdits | None = None) -> CopyPlan:
    """Plan the copy of a batch: its logs, the files that make up its state, and all of the sources.

    Where ``changes`` moves a source, the batch after it gets other input, and its offsets are not
    copied.

    Raises ``UnsupportedFormat`` for state that cannot be read, ``DamagedCheckpoint`` for files that
    are missing, and ``InvalidInput`` for changes that do not fit the query.
    """
    changes = changes or SourceEdits()
    refused = [note for note in source.notes if note.kind == "refused"]
    if refused:
        raise UnsupportedFormat(
            f"{refused[0].subject} cannot be read, and without it the copy would not be whole: {refused[0].message}",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
        )
    listed = source.folder.list("")
    there = {item.path for item in listed}
    runs_again = source.batch + 1 in batches(source.folder, "offsets") and not changes.moves
    sources = apply_edits(source, listed, changes)
    elsewhere = {moved.before for moved in sources.moved if moved.new != moved.old}
    for one in begun_logs(source.folder, source.offsets)[: 1 + runs_again]:
        check_source_logs(one, there, elsewhere)
    state = set(_state_files(source))
    edits = {
        path: data
        for path, data in moved_operators(source, listed, (source.offsets.partitions,) * 2, target_url)
        if is_of(path, source.batch)
    }
    edits |= sources.edits
    names = dict(sources.names)
    if changes.moves:
        names |= {f"offsets/{source.batch + 1}": None, f"offsets/.{source.batch + 1}.crc": None}

    def is_copied(path: str) -> bool:
        folder, _, name = path.rpartition("/")
        if name.startswith(".") and name.endswith(".crc"):
            # Hadoop's checksum of a file. One that changes has none.
            of = f"{folder}/{name[1:-4]}".lstrip("/")
            return of in there and is_copied(of)
        if names.get(path, path) in (None, *edits) or (name.startswith(".") and name.endswith(".tmp")):
            return False
        return path in state if _IN_PARTITION.fullmatch(path) else is_of(path, source.batch)

    return CopyPlan(
        source=source,
        query_id=source.query_id,
        batch=source.batch,
        newest=source.batches[-1],
        runs_again=runs_again,
        copies=tuple(item for item in listed if is_copied(item.path)),
        edits=tuple(edits.items()),
        names=names,
        moved=sources.moved,
    )


def is_of(path: str, batch: int) -> bool:
    """Return whether a copy of a batch has a file; of state, all have."""
    found = _NUMBERED.fullmatch(path)
    return found is None or int(found[1]) <= batch + path.startswith("offsets/")


def _state_files(source: SparkSource) -> Iterator[str]:
    """Yield the files that make up the state of every partition at the batch's version."""
    zips: list[tuple[str, ObjectInfo]] = []
    stores = {store.folder(0): store for store in _stores(source)}
    for store in stores.values():
        for partition in range(store.partitions):
            for item in source.reader.files(store, partition, source.listing):
                yield item.path
                if item.path.endswith(".zip"):
                    zips.append((store.folder(partition), item))
    with ThreadPoolExecutor(max(1, source.folder.reads_at_once)) as pool:
        found = pool.map(lambda one: (one[0], read_snapshot(source.folder, one[1])), zips)
        for folder, snapshot in found:
            yield from (f"{folder}/SSTs/{name}" for name, _ in snapshot.tables)


def _stores(source: SparkSource) -> Iterator[Store]:
    yield from (store for store, _ in source.hidden.values())
    yield from source.stores.values()


def copy_query(
    folder: Storage, target: Storage, plan: CopyPlan, progress: Progress = lambda *_: None
) -> tuple[int, int]:
    """Write the copy into an empty folder, and validate it in full before Spark can start on it.

    ``progress`` is called with the bytes done, and all: of reading the original, copying, and
    validating the copy. Returns the number of files and their bytes.

    Raises ``DamagedCheckpoint`` before anything is written for an original that is not whole.
    """
    whole = 3 * max(1, plan.size_bytes)

    def share(number: int) -> Progress:
        return lambda done, of: progress((number * max(1, of) + done) * (whole // 3) // max(1, of), whole)

    check_target(folder, target)
    check_whole(plan.source, share(0), sources=False)  # The plan has looked at those that it needs.
    begin(target, plan.batch)
    copied = write_files(folder, target, plan.copies, plan.edits, share(1), plan.names)
    check_whole(SparkSource(Finished(target, plan.batch), plan.batch + 1), share(2))
    finish(target, plan.batch)
    return copied


class Finished(InFront):
    """A copy as it will be."""

    def __init__(self, folder: Storage, batch: int) -> None:
        super().__init__(folder)
        self._begun = begun_path(batch)

    def list(self, prefix: str) -> list[ObjectInfo]:
        return [item for item in super().list(prefix) if item.path != self._begun]


def check_whole(source: SparkSource, progress: Progress, *, sources: bool = True) -> None:
    """Raise ``DamagedCheckpoint`` for the first error that a full validation finds.

    ``sources``: also in their logs, of which a copy whose sources go on elsewhere needs others.
    """
    for finding in check_source(source, "full", progress):
        if finding.severity == "error" and (sources or not finding.path.startswith("sources/")):
            place = finding.path and not finding.message.startswith(finding.path)
            raise DamagedCheckpoint(
                f"{source.folder.url} is not whole at batch {source.batch}: "
                f"{f'{finding.path}: ' if place else ''}{finding.message}; {finding.advice}",
                kind=finding.kind,
                path=finding.path,
            )


def check_target(folder: Storage, target: Storage) -> None:
    """Raise ``InvalidInput`` unless the target is empty or absent, and not the source."""
    if lies_in(target.url, folder.url):
        raise InvalidInput(
            f"{target.url} is the checkpoint itself or lies in it, and it is never changed; name another folder"
        )
    there = [item.path for item in target.list("")] if target.exists() else []
    if not there:
        return
    unfinished = is_begun(target, -1)
    if unfinished:
        why = "it holds a copy that was begun and not ended (the newest file in offsets/ says so). "
        advice = "Remove the folder and run the command again"
    else:
        why = "it holds a query's checkpoint. " if "metadata" in there else f"it holds {there[0]!r}. "
        advice = "Name a folder that is empty or does not exist"
    raise InvalidInput(
        f"{target.url} is not empty: {why}{advice}", kind=ErrorKind.STORE_NOT_EMPTY, url=target.url, begun=unfinished
    )


def begin(target: Storage, batch: int) -> None:
    """Make an empty folder one on which Spark refuses to start, until :func:`finish`."""
    with target.open_output(begun_path(batch)) as output:
        output.write(UNFINISHED.encode())


def withdraw(target: Storage, batch: int, folders: tuple[str, ...] = ()) -> None:
    """Leave nothing in a folder that has only what :func:`begin` wrote, and files in ``folders``.

    Does nothing if there is anything else.
    """
    there = {item.path for item in target.list("")} if target.exists() else set()
    written = {path for path in there if path.startswith(folders)}
    if there - written == {begun_path(batch)}:
        target.delete(sorted(written))
        # Last, so that Spark never starts on a part.
        target.delete([begun_path(batch)])


def finish(target: Storage, batch: int) -> None:
    """Make it a checkpoint."""
    target.delete([begun_path(batch)])


def _piece(folder: Storage, path: str, at: int, length: int) -> Any:
    try:
        found = folder.read_range(path, at, length)
    except FileNotFoundError:
        found = b""
    if len(found) == length:
        return found
    raise StorageError(
        f"{path} in {folder.url} is gone, or shorter than it was, so the query is running. Copy again into an empty "
        "folder; stop the query first, if that happens again",
        kind=ErrorKind.HISTORY_UNSTABLE,
        path=path,
    )


def write_files(
    folder: Storage,
    target: Storage,
    copies: Sequence[ObjectInfo],
    edits: Sequence[tuple[str, bytes]],
    progress: Progress = lambda *_: None,
    names: Mapping[str, str | None] = MappingProxyType({}),
) -> tuple[int, int]:
    """Copy files, some under other ``names``, and write others; returns their number and bytes.

    ``metadata`` is the first, so that a query which is started on the folder meanwhile does not
    write its own.
    """
    made: dict[str, ObjectInfo | bytes] = {names.get(item.path) or item.path: item for item in copies}
    made |= edits
    sizes = {path: len(one) if isinstance(one, bytes) else one.size_bytes for path, one in made.items()}

    def write(path: str) -> int:
        one, whole = made[path], sizes[path]
        with target.open_output(path) as output:
            if isinstance(one, bytes):
                return output.write(memoryview(one))
            for at in range(0, whole, _PIECE_BYTES):
                output.write(memoryview(_piece(folder, one.path, at, min(_PIECE_BYTES, whole - at))))
        return whole

    done, whole = 0, sum(sizes.values())
    first = [path for path in sizes if path in ("metadata", ".metadata.crc")]
    with ThreadPoolExecutor(_WRITERS, thread_name_prefix="copy") as pool:
        for some in (first, [path for path in sizes if path not in first]):
            for size in pool.map(write, some):
                done += size
                progress(done, whole)
    return len(sizes), done
