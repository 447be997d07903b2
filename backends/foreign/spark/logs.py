"""What a query records about itself: its id, the offset log, the commit log, the operators'
metadata.

A batch is done when it has a commit; state of batch *n* has version *n* + 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, Final, Protocol

from stateformat.errors import CheckpointError, ErrorKind, NotFound, UnsupportedFormat
from stateformat.storage import ObjectInfo, Storage

from ..framing import damaged
from ..limits import SMALL_BYTES, check
from .schemas import parse_json

_NUMBER: Final = re.compile(r"0|[1-9]\d{0,17}")
_NO_NAME: Final = re.compile(r"[/\\\x00-\x1f\ud800-\udfff]|^\.")
"""Characters that the name of a store, which is the name of a folder, never has."""
_QUERY_ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
PARTITIONS: Final = "spark.sql.shuffle.partitions"
PROVIDER: Final = "spark.sql.streaming.stateStore.providerClass"
STRICT: Final = "spark.sql.streaming.statefulOperator.useStrictDistribution"
_SINCE_SCHEMAS: Final = ("spark.sql.streaming.stateStore.compression.codec", STRICT)
"""Settings that no Spark before 3.1, the first that writes schemas, has in its offset log."""
_TIMES_MS: Final = 1 << 52
"""Milliseconds are below this, so that microseconds fit 64 bits."""
MAX_PARTITIONS: Final = 32768
"""The limit for stateformat's key groups; Spark's number of partitions is not limited."""

LOG_OFFSET: Final = re.compile(r'^\{"logOffset":(\d{1,12})\}$')
_SOURCE_LOG: Final = re.compile(r"sources/([^/]+)/([0-9]{1,18})(\.compact)?")
"""The offset of a file source: the newest number in its own log."""
UNFINISHED: Final = "this copy was begun and not ended: remove the folder and copy again"
"""What :func:`begun_path` holds."""


@dataclass(frozen=True)
class OffsetLog:
    """One file of the offset log: what a batch began with."""

    batch: int
    version: int
    metadata: Mapping[str, Any]
    offsets: Mapping[str, str | None]
    """JSON by the source's position, or in version 2 its name; None if it has no offset yet."""

    @property
    def conf(self) -> Mapping[str, str]:
        """The settings that are fixed for the query's life."""
        found = self.metadata.get("conf")
        return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}

    @property
    def has_schemas(self) -> bool:
        """Whether the Spark that began the batch writes which columns its states have."""
        return any(name in self.conf for name in _SINCE_SCHEMAS)

    @property
    def path(self) -> str:
        """The file, relative to the checkpoint."""
        return f"offsets/{self.batch}"

    def number(self, name: str) -> int:
        """Return a number of the metadata, 0 if it is missing."""
        found = self.metadata.get(name, 0)
        if isinstance(found, bool) or not isinstance(found, int) or abs(found) >= _TIMES_MS:
            raise damaged(self.path, f"its {name} is {found!r}, no number", kind=ErrorKind.DAMAGED_MANIFEST)
        return found

    @cached_property
    def partitions(self) -> int:
        """The number of state partitions."""
        text = self.conf.get(PARTITIONS, "")
        if not _NUMBER.fullmatch(text) or not 0 < int(text) <= MAX_PARTITIONS:
            raise damaged(
                self.path,
                f"its conf has {PARTITIONS} = {text!r}, not a number of 1 to {MAX_PARTITIONS}",
                kind=ErrorKind.DAMAGED_MANIFEST,
            )
        return int(text)


@dataclass(frozen=True)
class CommitLog:
    """One file of the commit log: what a batch ended with."""

    batch: int
    metadata: Mapping[str, Any]

    @property
    def watermark_ms(self) -> int | None:
        """The watermark of the next batch."""
        found = self.metadata.get("nextBatchWatermarkMs")
        return found if isinstance(found, int) else None

    @property
    def stateful(self) -> list[int]:
        """The stateful operators that it names; checkpoint format 1 names none."""
        ids = self.metadata.get("stateUniqueIds")
        return [int(name) for name in ids if is_number(name)] if isinstance(ids, dict) else []

    def unique_ids(self, operator: int, store: int) -> tuple[str, ...]:
        """Return the ids of a store's files by partition; empty in checkpoint format 1."""
        ids = self.metadata.get("stateUniqueIds")
        found = ids.get(str(operator)) if isinstance(ids, dict) else None
        if not found:
            return ()
        try:
            return tuple(str(stores[min(store, len(stores) - 1)]) for stores in found)
        except (TypeError, IndexError, KeyError) as error:
            raise damaged(
                f"commits/{self.batch}",
                f"its stateUniqueIds of operator {operator} are no list of lists",
                kind=ErrorKind.DAMAGED_MANIFEST,
            ) from error


@dataclass(frozen=True)
class StoreInfo:
    """What the operator metadata says about a store."""

    name: str
    prefix_columns: int
    partitions: int


@dataclass(frozen=True)
class OperatorInfo:
    """What an operator's metadata says; for Spark 3.5, what follows from its stores."""

    id: int
    name: str
    """Spark's name: ``stateStoreSave``, ``dedupe`` …"""
    stores: tuple[StoreInfo, ...]
    path: str | None
    """The metadata file; None in Spark 3.5, which writes none."""
    properties: Mapping[str, Any]
    schema_paths: Mapping[str, tuple[str, ...]]
    """Version 2: by store, the absolute paths of its schema files, oldest first."""

    @property
    def uid(self) -> str:
        """The operator's uid in stateformat."""
        return f"operator-{self.id}"


class Reads(Protocol):
    """What logs are read from: a ``Storage``, or :class:`Remembered`."""

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return all files whose path begins with ``prefix``."""

    def read_range(self, path: str, offset: int, length: int) -> Any:
        """Return at most ``length`` bytes of a file, from ``offset`` on."""


class Remembered:
    """A folder whose small files are read only once, and some ahead of time, several at once."""

    def __init__(self, folder: Storage, ahead: Sequence[str]) -> None:
        self._folder = folder
        self._lists: dict[str, list[ObjectInfo]] = {}
        self._files: dict[str, Any] = {}
        if (at_once := folder.reads_at_once) > 1:
            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(self._try, ahead))

    def _try(self, path: str) -> None:
        # A file that cannot be read is tried again, and reported, when it is needed.
        with suppress(FileNotFoundError, CheckpointError):
            self.read_range(path, 0, SMALL_BYTES + 1)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See :meth:`Reads.list`."""
        if prefix not in self._lists:
            self._lists[prefix] = self._folder.list(prefix)
        return self._lists[prefix]

    def read_range(self, path: str, offset: int, length: int) -> Any:
        """See :meth:`Reads.read_range`; the file's beginning is kept."""
        if path not in self._files:
            if sum(map(len, self._files.values())) > SMALL_BYTES:
                self._files.clear()
            self._files[path] = self._folder.read_range(path, 0, offset + length)
        return self._files[path][offset : offset + length]


def is_number(name: str) -> bool:
    """Return whether the name of a file or folder is a batch, a version, an operator or a
    partition.
    """
    return _NUMBER.fullmatch(name) is not None


def batches(folder: Reads, log: str) -> list[int]:
    """Return the batches that have files in ``offsets`` or ``commits``, ascending."""
    found = (item.path.removeprefix(f"{log}/") for item in folder.list(f"{log}/"))
    return sorted(int(name) for name in found if is_number(name))


def read_small(folder: Reads, path: str, limit: int = SMALL_BYTES) -> bytes:
    """Return a small file. Raises ``DamagedCheckpoint`` if it is missing or not small."""
    try:
        data = folder.read_range(path, 0, limit + 1)
    except FileNotFoundError as error:
        raise damaged(path, "it is missing", kind=ErrorKind.OBJECT_MISSING) from error
    check(path, "the file", len(data), limit)
    return bytes(data)


def read_lines(folder: Reads, path: str, versions: Sequence[int]) -> tuple[int, list[str]]:
    """Return the version of a log file and its other lines."""
    try:
        first, *lines = read_small(folder, path).decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise damaged(path, f"it is no text ({error})", kind=ErrorKind.DAMAGED_MANIFEST) from error
    if not re.fullmatch(r"v[1-9]\d{0,3}", first):
        raise damaged(path, f"it begins with {first[:20]!r} and no version", kind=ErrorKind.DAMAGED_MANIFEST)
    if int(first[1:]) not in versions:
        raise UnsupportedFormat(
            f"{path}: it is of version {first}; known are {', '.join(f'v{v}' for v in versions)}. Use a newer "
            "stateformat",
            path=path,
        )
    if not lines:
        raise damaged(path, "it ends after its version", kind=ErrorKind.DAMAGED_MANIFEST)
    return int(first[1:]), lines


def read_query_id(folder: Reads) -> str:
    """Return the query's id."""
    try:
        found = parse_json(read_small(folder, "metadata").decode(), "metadata").get("id")
    except UnicodeDecodeError as error:
        raise damaged("metadata", f"the query's id is no text ({error})", kind=ErrorKind.DAMAGED_MANIFEST) from error
    if not isinstance(found, str) or not found:
        raise damaged("metadata", f"its id is {found!r}", kind=ErrorKind.DAMAGED_MANIFEST)
    return found


def read_offsets(folder: Reads, batch: int) -> OffsetLog:
    """Return the offset log of a batch."""
    path = f"offsets/{batch}"
    version, lines = read_lines(folder, path, (1, 2))
    metadata = parse_json(lines[0], path) if lines[0].strip() else {}
    offsets: dict[str, str | None] = {}
    for index, line in enumerate(lines[1:]):
        name, colon, text = line.partition(":") if version == 2 else (str(index), ":", line)
        if not colon or name in offsets:
            raise damaged(path, f"its line {line[:40]!r} names no source of its own", kind=ErrorKind.DAMAGED_MANIFEST)
        offsets[name] = None if text == "-" else text
    return OffsetLog(batch, version, metadata, offsets)


def read_commit(folder: Reads, batch: int) -> CommitLog:
    """Return the commit log of a batch."""
    path = f"commits/{batch}"
    _, lines = read_lines(folder, path, (1, 2, 3))
    return CommitLog(batch, parse_json(lines[0], path) if lines[0].strip() != "{}" else {})


def committed(folder: Reads) -> list[int]:
    """Return the committed batches, ascending. Raises ``NotFound`` if there are none, or for a copy
    that is not complete.
    """
    found = batches(folder, "commits")
    if is_begun(folder, found[-1] if found else -1):
        raise NotFound(UNFINISHED, kind=ErrorKind.STORE_EMPTY)
    if not found:
        raise NotFound(_nothing_committed(folder), kind=ErrorKind.STORE_EMPTY)
    return found


def begun_path(batch: int) -> str:
    """Return the file that a copy of a batch has until it is complete.

    Spark takes it for the offsets of the newest batch, which it reads before anything else, and
    refuses to start with its text. It is written first and deleted last, which every storage does
    at once.
    """
    return f"offsets/{batch + 2}"


def is_begun(folder: Reads, committed_batch: int) -> bool:
    """Return whether a folder is a copy that is not complete."""
    begun = batches(folder, "offsets")
    if not begun or (begun[-1] <= committed_batch + 1 and committed_batch >= 0):
        return False
    return bytes(folder.read_range(f"offsets/{begun[-1]}", 0, len(UNFINISHED) + 1)) == UNFINISHED.encode()


def _nothing_committed(folder: Reads) -> str:
    """Return what a folder without commits has, what is missing, and what that means."""
    begun, state = batches(folder, "offsets"), bool(folder.list("state/"))
    if not begun and not state:
        return "the query has begun no batch yet: it has no offsets/, commits/ and state/. Let it finish its first one"
    if not begun:
        return (
            "the query has state/, and no offsets/ and commits/: nothing else says of which batch the state is. Spark "
            "4.3 refuses to start on it, an older one begins anew at batch 0. Put both folders back from a copy"
        )
    first, last = begun[0], begun[-1]
    batch = f"batch {last}" if first == last else f"batches {first} to {last}"
    again = f"Spark runs batch {last} again at the next start"
    if not state:
        done = ". If batches had ended before, put both folders back from a copy"
        return f"the query has offsets/ of {batch}, and no commits/ and state/: no batch has ended. {again}{done}"
    return (
        f"the query has offsets/ of {batch}, state/, and no commits/: Spark before 2.2 wrote none, a later one does "
        f"with each batch that ends. {again}, and commits it: read the query then, or put commits/ back from a copy"
    )


def read_operator(folder: Reads, operator: int, batch: int, names: Mapping[str, int]) -> OperatorInfo | None:
    """Return an operator's metadata as of a batch; None if Spark wrote none (3.5).

    ``names`` are the files below ``state/<operator>/_metadata``.
    """
    base = f"state/{operator}/_metadata"
    newer = [int(name) for name in names if is_number(name) and int(name) <= batch]
    path = f"{base}/v2/{max(newer)}" if newer else f"{base}/metadata"
    if not newer and "metadata" not in names:
        return None
    _, lines = read_lines(folder, path, (1, 2))
    found = parse_json(lines[0], path)
    try:
        info = found["operatorInfo"]
        stores = tuple(
            StoreInfo(str(item["storeName"]), int(item["numColsPrefixKey"]), int(item["numPartitions"]))
            for item in found["stateStoreInfo"]
        )
        paths = {
            str(item["storeName"]): tuple(map(str, item.get("stateSchemaFilePaths") or ()))
            for item in found["stateStoreInfo"]
        }
        identity, name = int(info["operatorId"]), str(info["operatorName"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise damaged(
            path, f"it lacks a part of an operator's metadata ({error!r})", kind=ErrorKind.DAMAGED_MANIFEST
        ) from error
    text = found.get("operatorPropertiesJson")
    properties = parse_json(text, path) if isinstance(text, str) and text.strip() else {}
    names_of = [store.name for store in stores]
    if len(set(names_of)) < len(names_of) or any(not name or _NO_NAME.search(name) for name in names_of):
        raise damaged(path, f"its stores are named {names_of}", kind=ErrorKind.DAMAGED_MANIFEST)
    if identity != operator:
        raise damaged(path, f"it is of operator {identity}, not {operator}", kind=ErrorKind.DAMAGED_MANIFEST)
    return OperatorInfo(operator, name, stores, path, properties, paths)


def recognises(folder: Reads) -> bool:
    """Return whether a folder has what a streaming query writes, even if most of it is gone."""
    try:
        begun = batches(folder, "offsets")
        if begun and (folder.list("commits/") or folder.list("state/") or read_offsets(folder, begun[-1])):
            return True
        return _QUERY_ID.fullmatch(read_query_id(folder)) is not None
    except (OSError, CheckpointError):
        return False


def begun_logs(folder: Storage, newest: OffsetLog) -> tuple[OffsetLog, ...]:
    """Return a batch's offsets, and those of the next batch if it has begun."""
    after = newest.batch + 1
    return (newest, read_offsets(folder, after)) if after in batches(folder, "offsets") else (newest,)


def check_source_logs(offsets: OffsetLog, there: Set[str], elsewhere: Set[str | None] = frozenset()) -> None:
    """Raise ``DamagedCheckpoint`` if a file source's log does not reach as far as its offset.

    Without it Spark does not start. Every so often a ``N.compact`` replaces what came before.
    ``there``: the checkpoint's files; ``elsewhere``: sources that go on elsewhere.
    """
    for number, text in offsets.offsets.items():
        found = LOG_OFFSET.search(text or "")
        if found is None or number in elsewhere:
            continue
        last = int(found[1])
        logs = [match for path in there if (match := _SOURCE_LOG.fullmatch(path)) and match[1] == number]
        compacted = [int(match[2]) for match in logs if match[3]]
        if any(one >= last for one in compacted):
            continue
        kept = {int(match[2]) for match in logs}
        # The offset may be any number: no more are looked at than there are files.
        missing = next(one for one in count(max(compacted, default=-1) + 1) if one not in kept)
        if missing <= last:
            raise damaged(
                f"sources/{number}/{missing}",
                f"it is missing, or a link, and {offsets.path} has offset {last} of that source",
                kind=ErrorKind.OBJECT_MISSING,
            )
