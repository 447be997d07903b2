"""What a repartition reads and writes, known before anything is written: from logs and listings.

It relies on these facts about Spark: state of batch *n* has version *n* + 1; the number of state
partitions is in the offset log, for all operators of the query, and takes precedence over the
session's; a partition without a file of a version fails to load, so empty ones get a file too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple
from uuid import NAMESPACE_URL, UUID, uuid5

from stateformat.errors import ErrorKind, InvalidInput, UnsupportedFormat
from stateformat.storage import ObjectInfo, Storage

from ...framing import damaged
from ..copying import is_of
from ..edits import PARTITIONS_CONF, PROVIDER_CONF, edit_commit, edit_offsets, moved_operators
from ..logs import MAX_PARTITIONS, OperatorInfo, batches, begun_logs, check_source_logs, read_small
from ..rocksdb_store import read_snapshot
from ..schemas import SCHEMA_ADVICE
from ..source import READERS, SparkSource
from ..stores import HDFS_PROVIDER, ROCKSDB_PROVIDER, Store, StoreReader
from .editing import Edit, RowFunction, followers, leader

PROVIDERS: Final[Mapping[str, str]] = {"hdfs": HDFS_PROVIDER, "rocksdb": ROCKSDB_PROVIDER}
"""Classes by stateformat's names."""
_PARTITION: Final = re.compile(r"state/(\d+)/(\d+)/(?:([^/]+)/)?(.+)")
_STATE_FILE: Final = re.compile(r"(\d+)(_[^/]*)?\.(delta|snapshot|changelog|zip)")


NO_FAMILIES: Final[Mapping[str, Any]] = {
    "numInternalKeys": 0,
    "columnFamilyMapping": {},
    "columnFamilyTypeMap": {},
    "maxColumnFamilyId": 0,
}
"""What Spark 4.3 writes for a database without column families."""


class Source(NamedTuple):
    """One partition of one store, to be read."""

    unit: Unit
    partition: int
    files: tuple[ObjectInfo, ...]

    @property
    def path(self) -> str:
        """The partition's folder, for errors."""
        return self.unit.stores[0].folder(self.partition)

    @property
    def size_bytes(self) -> int:
        """Stored bytes."""
        return sum(item.size_bytes for item in self.files)


class Target(NamedTuple):
    """One partition of one store, to be written."""

    unit: int
    """The unit's number in the plan."""
    partition: int


@dataclass(frozen=True)
class Unit:
    """A store: everything in one folder per partition; one state, or its column families."""

    number: int
    operator: OperatorInfo
    stores: tuple[Store, ...]
    hashed: tuple[int, ...]
    """For each of ``stores``, how many key columns determine a partition; 0: it has no keys."""
    before: int
    after: int
    provider_before: str
    provider_after: str
    ids: tuple[str, ...] = ()
    """Checkpoint format 2: the id of the new files, by partition."""
    about: Mapping[str, Any] = field(default_factory=lambda: NO_FAMILIES)
    """For RocksDB: what Spark's metadata of a database says of its column families."""
    edits: Mapping[int, Edit] = field(default_factory=dict)
    """What becomes of the rows of ``stores``, by their position; all others stay as they are."""

    @property
    def reader(self) -> StoreReader:
        """What reads its files."""
        return READERS[PROVIDERS[self.provider_before]]

    @property
    def internal(self) -> list[int]:
        """The numbers of Spark's own column families, whose keys it counts separately."""
        kinds = self.about.get("columnFamilyTypeMap") or {}
        return [self.families[name] for name, own in kinds.items() if own and name in self.families]

    @property
    def rekeyed(self) -> bool:
        """Whether rows of several partitions may come to have one key."""
        return any(edit.function is not None and edit.function.rekeys for edit in self.edits.values())

    @property
    def name(self) -> str:
        """The store's name."""
        return self.stores[0].store_name or self.stores[0].name

    @property
    def version(self) -> int:
        """The state version, batch + 1."""
        return self.stores[0].version

    @property
    def keyed(self) -> bool:
        """Whether its rows are partitioned by key; otherwise partition 0 has them all."""
        return any(self.hashed)

    @property
    def targets(self) -> int:
        """How many partitions are written."""
        return self.after if self.keyed else 1

    @property
    def families(self) -> Mapping[str, int]:
        """The numbers of the column families; empty if there are none."""
        return self.about.get("columnFamilyMapping") or {}


@dataclass(frozen=True)
class RepartitionPlan:
    """Everything that :mod:`run` needs."""

    query_id: str
    batch: int
    newest: int
    """The query's newest committed batch."""
    units: tuple[Unit, ...]
    sources: tuple[Source, ...]
    before: int
    after: int
    provider_before: str
    """``hdfs`` or ``rocksdb``, as ``provider_after``."""
    provider_after: str
    copies: tuple[ObjectInfo, ...]
    """Files that stay as they are."""
    edits: tuple[tuple[str, bytes], ...]
    """Files that change, whole."""
    left_out: tuple[int, ...]
    """Batches whose state is not in the copy: the state reader cannot go back to them."""
    notes: tuple[str, ...] = ()

    @property
    def is_edited(self) -> bool:
        """Whether rows change."""
        return any(unit.edits for unit in self.units)

    @cached_property
    def size_bytes(self) -> int:
        """Stored bytes to be read."""
        return sum(source.size_bytes for source in self.sources)

    def targets(self) -> Iterator[Target]:
        """Yield every partition of every store, in order."""
        for unit in self.units:
            for partition in range(unit.targets):
                yield Target(unit.number, partition)


def plan_repartition(
    folder: Storage,
    target_url: str,
    parallelism: int | None = None,
    provider: Literal["rocksdb"] | None = None,
    *,
    source: SparkSource | None = None,
    functions: Mapping[tuple[str, str], RowFunction] | None = None,
) -> RepartitionPlan:
    """Plan the copy of a committed batch at another number of partitions, or with other rows.

    Reads logs and schemas and lists files; no data file is opened.

    Args:
        folder: the checkpoint.
        target_url: where the copy will lie: some queries name their own files by absolute paths.
        parallelism: the new number of partitions of all stateful operators; None keeps it.
        provider: ``rocksdb``; None keeps the query's. State is not moved back.
        source: the batch; None is the newest.
        functions: what is done with the rows of states, by operator and state.

    Raises ``InvalidInput``, ``UnsupportedFormat`` and ``DamagedCheckpoint``.
    """
    source = source or SparkSource(folder)
    before = source.offsets.partitions
    parallelism = before if parallelism is None else parallelism
    if not 1 <= parallelism <= MAX_PARTITIONS:
        raise InvalidInput(
            f"{parallelism} is no number of partitions; give 1 to {MAX_PARTITIONS}", kind=ErrorKind.INVALID_PARALLELISM
        )
    provider_before = {name: short for short, name in PROVIDERS.items()}.get(source.provider, "")
    provider_after = provider or provider_before
    _check_provider(source, provider_before, provider_after)
    units = tuple(_units(source, parallelism, provider_before, provider_after, target_url))
    if not units:
        raise InvalidInput(
            f"{folder.url} has no stateful operator, so there is no state to deal anew. The partitions of its "
            f"shuffles are {PARTITIONS_CONF}: Spark 4.3 takes that of the session at a restart, Spark 3.5 that of the "
            "newest offset log, whatever the session says",
            kind=ErrorKind.INVALID_ARGUMENT,
        )
    for unit in units:
        _check_numbers(unit, source)
    units = tuple(_edited(units, source, functions or {}))
    sources = tuple(_sources(units, source))
    listed = folder.list("")
    for one in begun_logs(folder, source.offsets):
        check_source_logs(one, {item.path for item in listed})
    edits = tuple(_edits(source, units, listed, parallelism, provider_after, target_url))
    listed = [item for item in listed if is_of(item.path, source.batch)]
    changed = dict(edits)
    there = {item.path for item in listed}
    return RepartitionPlan(
        query_id=source.query_id,
        batch=source.batch,
        newest=source.batches[-1],
        units=units,
        sources=sources,
        before=before,
        after=parallelism,
        provider_before=provider_before,
        provider_after=provider_after,
        copies=tuple(item for item in listed if _is_copied(item.path, changed, there)),
        edits=edits,
        left_out=tuple(batch for batch in source.batches if batch < source.batch),
        notes=tuple(note.message for note in source.notes if note.kind == "elsewhere"),
    )


def _check_provider(source: SparkSource, before: str, after: str) -> None:
    source.reader  # noqa: B018 - an unknown provider is refused with its name
    unknown = ["/".join(key) for key, store in source.stores.items() if not store.schema.known]
    if unknown:
        raise UnsupportedFormat(
            f"Spark before 3.1 did not write which columns {unknown[0]} has, so its partitions cannot be computed: "
            f"{SCHEMA_ADVICE}, and rescale then",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
        )
    refused = [note for note in source.notes if note.kind == "refused"]
    if refused:
        raise UnsupportedFormat(
            f"{refused[0].subject} cannot be read, and without it the copy would not be whole: {refused[0].message}",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
        )
    if after == "hdfs" and any(store.unique_ids for store in source.stores.values()):
        raise UnsupportedFormat(
            f"commits/{source.batch} names files of the default store by ids (checkpoint format 2), which is not known",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
        )
    if before != after and any(store.has_row_checksums for store in source.stores.values()):
        raise UnsupportedFormat(
            "its rows carry checksums (spark.sql.streaming.stateStore.rowChecksum.enabled), which are different in "
            "RocksDB; leave --provider out",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
        )


def _units(source: SparkSource, after: int, provider_before: str, provider_after: str, url: str) -> Iterator[Unit]:
    grouped: dict[tuple[int, str], list[tuple[Store, int]]] = {}
    found_stores = [(store, source.shapes[key].hashed) for key, store in source.stores.items()]
    for store, hashed in [*found_stores, *source.hidden.values()]:
        grouped.setdefault((store.operator, store.store_name or store.name), []).append((store, hashed))
    operators = {info.id: info for info in source.operators}
    for number, ((operator, name), found) in enumerate(grouped.items()):
        stores, counts = tuple(store for store, _ in found), tuple(count for _, count in found)
        keyed = any(counts)
        ids: tuple[str, ...] = ()
        if stores[0].unique_ids:
            # The same for the same copy: a task that runs twice writes the same names.
            made = uuid5(NAMESPACE_URL, f"{url} {source.query_id} {source.batch} {operator} {name}")
            ids = tuple(str(unique_id(made, partition)) for partition in range(after if keyed else 1))
        about = (source.offsets.partitions, after, provider_before, provider_after, ids)
        unit = Unit(number, operators[operator], stores, counts, *about)
        if provider_before == "rocksdb":
            unit = _with_families(unit, _about(source, unit))
        yield unit


def _with_families(unit: Unit, about: Mapping[str, Any]) -> Unit:
    """Return a unit without the column families that the database does not have.

    Spark lists some of its own in the schema but does not create them (of lists with a TTL).
    """
    known = about.get("columnFamilyMapping") or {}
    pairs = zip(unit.stores, unit.hashed, strict=True)
    kept = [(store, hashed) for store, hashed in pairs if not _is_absent(store, known)]
    stores, hashed = tuple(store for store, _ in kept), tuple(count for _, count in kept)
    return replace(unit, about=about, stores=stores, hashed=hashed)


def _is_absent(store: Store, known: Mapping[str, int]) -> bool:
    return (store.family or "").startswith("$") and store.family not in known


def _about(source: SparkSource, unit: Unit) -> dict[str, Any]:
    """Return what the newest zip of the first partition says about column families."""
    files = unit.reader.files(unit.stores[0], 0, source.listing)
    zips = [item for item in files if item.path.endswith(".zip")]
    if not zips:
        return dict(NO_FAMILIES)
    found = dict(read_snapshot(source.folder, zips[-1]).metadata)
    return {name: value for name, value in found.items() if name not in ("sstFiles", "logFiles", "numKeys")}


def unique_id(made: UUID, number: int) -> UUID:
    """Return one of many ids that are derived from one."""
    return UUID(int=made.int ^ number)


def _edited(
    units: Sequence[Unit], source: SparkSource, functions: Mapping[tuple[str, str], RowFunction]
) -> Iterator[Unit]:
    """Yield the units with what becomes of their rows, and of those that follow from them."""
    edits: dict[int, dict[int, Edit]] = {unit.number: {} for unit in units}
    places = {
        (unit.operator.uid, store.family or store.name): (unit, at)
        for unit in units
        for at, store in enumerate(unit.stores)
    }
    for (operator, name), function in functions.items():
        store, shape = source.stores[operator, name], source.shapes[operator, name]
        family = store.family or store.name
        first = leader(family)
        if first is not None:
            raise InvalidInput(
                f"{operator}/{name} counts the rows of {operator}/{first}, and follows them: change those",
                kind=ErrorKind.STATE_NOT_ALLOWED,
            )
        found = followers(family, listed=shape.kind == "list")
        derived = [(places[operator, one], how) for one, how in found.items() if (operator, one) in places]
        unit, at = places[operator, family]
        edits[unit.number][at] = Edit(
            shape,
            function,
            renumbered=family.endswith("keyWithIndexToValue"),
            derived=tuple((there, index, how) for (there, index), how in derived),
        )
        for (there, index), _ in derived:
            edits[there.number][index] = Edit()
    for unit in units:
        yield replace(unit, edits=edits[unit.number])


def _check_numbers(unit: Unit, source: SparkSource) -> None:
    """Compare numbers of partitions: in the offset log, the operator's metadata, the folders."""
    path = unit.operator.path or f"state/{unit.operator.id}"
    for info in unit.operator.stores:
        if info.name == unit.name and unit.keyed and info.partitions != unit.before:
            raise damaged(
                path,
                f"store {info.name!r} has {info.partitions} partitions here and {unit.before} in {source.offsets.path}",
                kind=ErrorKind.DAMAGED_MANIFEST,
            )
    most = unit.before if unit.keyed else 1
    for folder, files in source.listing.folders.items():
        found = _PARTITION.fullmatch(f"{folder}/x")
        if not found or int(found[1]) != unit.operator.id or (found[3] or "default") != unit.name:
            continue
        newest = max((int(name[1]) for one in files if (name := _STATE_FILE.fullmatch(one))), default=0)
        if int(found[2]) >= most and newest >= unit.version:
            raise damaged(
                folder,
                f"it holds state of version {newest}, and the store has {most} partitions, 0 to {most - 1}",
                kind=ErrorKind.DAMAGED_MANIFEST,
            )


def _sources(units: Sequence[Unit], source: SparkSource) -> Iterator[Source]:
    for unit in units:
        for partition in range(unit.before if unit.keyed else 1):
            files = unit.reader.files(unit.stores[0], partition, source.listing)
            yield Source(unit, partition, tuple(files))


def _edits(
    source: SparkSource,
    units: Sequence[Unit],
    listed: Sequence[ObjectInfo],
    after: int,
    provider: str,
    url: str,
) -> Iterator[tuple[str, bytes]]:
    """Yield the files to change: operators' metadata first, offsets and commits last."""
    moved = moved_operators(source, listed, (source.offsets.partitions, after), url)
    yield from ((path, data) for path, data in moved if is_of(path, source.batch))
    ids: dict[str, list[list[str]]] = {}
    for unit in units:
        if unit.ids:
            for partition, one in enumerate(unit.ids):
                found_ids = ids.setdefault(str(unit.operator.id), [])
                found_ids.extend([] for _ in range(partition + 1 - len(found_ids)))
                found_ids[partition].append(one)
    if ids:
        path = f"commits/{source.batch}"
        yield path, edit_commit(read_small(source.folder, path), ids, path)
    conf = {PARTITIONS_CONF: str(after)}
    if PROVIDERS[provider] != source.provider:
        conf[PROVIDER_CONF] = PROVIDERS[provider]
    for batch in batches(source.folder, "offsets"):
        if source.batch <= batch <= source.batch + 1:
            path = f"offsets/{batch}"
            yield path, edit_offsets(read_small(source.folder, path), conf, path)


def _is_copied(path: str, edits: Mapping[str, bytes], there: Set[str]) -> bool:
    folder, _, name = path.rpartition("/")
    if path in edits:
        return False
    # Hadoop's checksum of a file that is not copied, was changed, or is gone. Beside the last Spark
    # writes no file of that name.
    if name.startswith(".") and name.endswith(".crc"):
        of = f"{folder}/{name[1:-4]}" if folder else name[1:-4]
        return of in there and _is_copied(of, edits, there)
    if name.startswith(".") and name.endswith(".tmp"):
        return False
    found = _PARTITION.fullmatch(path)
    return found is None or f"/{found[4]}".startswith("/_metadata/") or found[3] == "_metadata"
