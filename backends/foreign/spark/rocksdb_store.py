"""Spark's state store on RocksDB: ``V.zip`` with its table files, and ``V.changelog`` after it.

A zip has ``metadata``, which lists the table files of the database in ``SSTs/``; the state at
version V is the greatest zip up to V and the changelogs after it. In checkpoint format 2 names
include an id (``V_<id>.zip``), and a changelog says which files it is based on (its *lineage*).

A changelog has the changes of one version, one after another. Version 1 is a chain like the default
store's deltas. Version 2 begins with the text ``v2``, and each change with a byte for its kind; it
ends with the byte 0. Versions 3 and 4 are 1 and 2 with a lineage before the changes.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import CheckpointError, ErrorKind, UnsupportedFormat
from stateformat.storage import ObjectInfo, Storage

from ..byte_strings import ByteStrings, Octets, ramp
from ..framing import damaged, json_value, modified_utf8, spark_decode
from ..limits import SMALL_BYTES, ZIP_ENTRIES, Decoded, check
from ..source import Level
from ..sst.merge import merged, newest, read_tables
from ..sst.table import DELETE as _DELETE, MERGE as _MERGE, PUT as _PUT, Run, Table, Tombstone, open_table
from .hdfs_store import parse_chains
from .rocksdb_keys import (
    PLAIN,
    delimiter_of,
    encoder_of,
    key_columns as key_columns,
    key_without_sum,
    plain_rows,
    split_values,
    without_sums,
)
from .schemas import parse_json
from .stores import Entries, Listing, Store, read_whole
from .unsafe_row import decode_rows

DELETE, PUT, MERGE, DELETE_RANGE = 0x10, 0x01, 0x11, 0x20
_KINDS: Final = (DELETE, PUT, MERGE, DELETE_RANGE)
_VERSION: Final = re.compile(r"v(\d{1,4})")
_END: Final = np.full(4, 0xFF, np.uint8)


class Changes(NamedTuple):
    """The changes of one version of a partition, in their order."""

    path: str
    version: int
    """Of the file's format."""
    lineage: tuple[tuple[int, str], ...]
    """The versions before it, back to the newest zip, with their ids."""
    kind: npt.NDArray[np.uint8]
    """``DELETE``, ``PUT``, ``MERGE`` or ``DELETE_RANGE``."""
    key: ByteStrings
    value: ByteStrings
    """Empty for deletes; for a deleted range of keys its end, which is not deleted."""


def read_changes(data: Octets, path: str) -> Changes:
    """Parse one changelog, decompressed. Raises ``DamagedCheckpoint``, ``UnsupportedFormat``."""
    version, at = _version(data)
    if not 1 <= version <= 4:
        raise UnsupportedFormat(
            f"{path}: the changelog is of version {version}; 1 to 4 are known. Use a newer stateformat",
            kind=ErrorKind.UNSUPPORTED_VERSION,
            path=path,
            version=version,
        )
    lineage: tuple[tuple[int, str], ...] = ()
    if version >= 3:
        size = int.from_bytes(data[at : at + 2].tobytes(), "big")
        if at + 2 + size > len(data):
            raise damaged(path, f"its lineage has {size} bytes, {len(data) - at - 2} are left")
        lineage = _lineage(modified_utf8(data[at + 2 : at + 2 + size], path), path)
        at += 2 + size
    if version in (1, 3):
        ends = np.array([len(data) - at], np.int64)
        chain = parse_chains(data[at:], ends, np.array([True]), [path])
        kind = np.where(chain.values.length < 0, DELETE, PUT).astype(np.uint8)
    else:
        if len(data) == at:
            raise damaged(path, "it holds no end mark")
        # The byte before an entry counts as following the previous one; an end mark is added to the
        # chain.
        body = np.concatenate([data[at + 1 :], _END])
        chain = parse_chains(body, np.array([len(body)]), np.array([True]), [path], gap=1)
        kinds = np.append(data[at : at + 1], body[chain.values.start + np.maximum(chain.values.length, 0)])
        kind = kinds[:-1]
        if kinds[-1] != 0:
            raise damaged(path, f"byte {int(kinds[-1]):#x} stands where 0 ends it")
        known = np.isin(kind, _KINDS)
        if not known.all():
            raise damaged(path, f"a change is of the unknown type {int(kind[np.argmin(known)]):#x}")
        if ((kind == DELETE) != (chain.values.length < 0)).any():
            raise damaged(path, "a change has a value and deletes, or has none and does not")
    values = chain.values
    plain = ByteStrings(values.data, values.start, np.maximum(values.length, 0))
    return Changes(path, version, lineage, kind, chain.keys, plain)


def _version(data: Octets) -> tuple[int, int]:
    """Return the version and where the rest begins. Version 1 has no mark; Spark reads it the same
    way.
    """
    size = int.from_bytes(data[:2].tobytes(), "big")
    text = data[2 : 2 + size].tobytes()
    found = _VERSION.fullmatch(text.decode("ascii", "replace")) if size <= 8 else None
    return (int(found[1]), 2 + size) if found else (1, 0)


def _lineage(text: str, path: str) -> tuple[tuple[int, str], ...]:
    try:
        return tuple((int(item["version"]), str(item["checkpointUniqueId"])) for item in json_value(text))
    except (ValueError, TypeError, KeyError) as error:
        raise damaged(path, f"its lineage cannot be read ({text[:60]!r})") from error


_METADATA_MAX: Final = 1 << 24
_ZIP_ENTRY: Final = b"PK\1\2"
_ZIP_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_SST_NAME: Final = re.compile(r"[^/\\\x00]+\.sst")


@dataclass(frozen=True)
class Snapshot:
    """What the ``metadata`` of a zip contains."""

    path: str
    tables: tuple[tuple[str, int], ...]
    """Names in ``SSTs/``, and sizes."""
    keys: int
    """Of all column families that are not Spark's own; negative if not counted."""
    internal_keys: int
    """Of Spark's own families."""
    families: Mapping[str, int]
    """The numbers of the column families; empty if keys have none."""
    internal: frozenset[str]
    """Which of them are Spark's own."""
    metadata: Mapping[str, Any]
    """All of it, as Spark wrote it."""


def read_snapshot(folder: Storage, item: ObjectInfo, *, whole: bool = False) -> Snapshot:
    """Read the ``metadata`` of a zip; ``whole``: also compare each file in it with its checksum."""
    path = item.path
    data = read_whole(folder, item, SMALL_BYTES)
    check(path, "the files in it", data.count(_ZIP_ENTRY), ZIP_ENTRIES, "entries")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        names = {info.filename: info.file_size for info in archive.infolist()}
        _check_entries(path, archive.infolist())
        logs = {name: size for name, size in names.items() if name.endswith(".log") and size}
        if not 0 < names.get("metadata", 0) <= _METADATA_MAX:
            raise damaged(path, f"its metadata has {names.get('metadata', 0)} bytes")
        text = archive.read("metadata").decode("utf-8")
        if whole:
            check(path, "what is in it", sum(names.values()), SMALL_BYTES, "bytes")
            if (torn := archive.testzip()) is not None:
                raise damaged(path, f"{torn!a} in it is not what its checksum says")
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, ValueError, OSError) as error:
        raise damaged(path, f"it is no zip that can be read ({error})") from error
    if logs:
        raise UnsupportedFormat(
            f"{path} holds a log of RocksDB ({next(iter(logs))}) that is not empty: changes may stand in it alone. Let "
            "the query run one more batch",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            path=path,
        )
    version, _, body = text.partition("\n")
    if version.strip() != "v1":
        raise UnsupportedFormat(
            f"{path}: its metadata is of version {version[:20]!r}; v1 is known. Use a newer stateformat",
            kind=ErrorKind.UNSUPPORTED_VERSION,
            path=path,
        )
    return _snapshot(path, parse_json(body, path))


def _check_entries(path: str, entries: Sequence[zipfile.ZipInfo]) -> None:
    """Check that each name is there once, and that no other compression than Spark's is used."""
    for info in entries:
        if info.compress_type not in _ZIP_METHODS:
            raise UnsupportedFormat(
                f"{path}: {info.filename!a} in it is compressed by method {info.compress_type}; only what is "
                "stored or deflated is read, as Spark writes it. Put the zip back from a copy",
                kind=ErrorKind.UNSUPPORTED_FEATURE,
                path=path,
            )
    if len({info.filename for info in entries}) < len(entries):
        raise damaged(path, "it has two files of one name")


def _snapshot(path: str, found: Mapping[str, Any]) -> Snapshot:
    listed, families = found.get("sstFiles") or [], found.get("columnFamilyMapping") or {}
    own = found.get("columnFamilyTypeMap") or {}
    keys, internal = found.get("numKeys", -1), found.get("numInternalKeys", -1)
    wrong = not all(isinstance(one, dict) for one in (families, own))
    wrong |= not all(isinstance(one, int) for one in (keys, internal))
    if wrong or not all(isinstance(one, int) and 0 <= one < 1 << 16 for one in families.values()):
        raise damaged(path, "its numbers of keys or column families are none", kind=ErrorKind.DAMAGED_MANIFEST)
    if found.get("logFiles"):
        raise UnsupportedFormat(
            f"{path} lists logs of RocksDB, which are not read here. Let the query run one more batch",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            path=path,
        )
    tables: list[tuple[str, int]] = []
    for item in listed if isinstance(listed, list) else [listed]:
        name, size = (item.get("dfsSstFileName"), item.get("sizeBytes")) if isinstance(item, dict) else ("", 0)
        if not isinstance(name, str) or not _SST_NAME.fullmatch(name) or not isinstance(size, int):
            raise damaged(path, f"it lists the table file {item!r}", kind=ErrorKind.DAMAGED_MANIFEST)
        tables.append((name, size))
    if len({name for name, _ in tables}) < len(tables):
        raise damaged(path, "it lists a table file twice", kind=ErrorKind.DAMAGED_MANIFEST)
    marked = frozenset(name for name in families if own.get(name))
    return Snapshot(path, tuple(tables), keys, internal, dict(families), marked, found)


def open_tables(folder: Storage, place: str, snapshot: Snapshot) -> list[Table]:
    """Open the table files that a zip lists."""
    tables = []
    for name, size in snapshot.tables:
        path = f"{place}/SSTs/{name}"
        try:
            found = folder.size(path)
        except FileNotFoundError as error:
            raise damaged(
                path, f"it is missing, and {snapshot.path} lists it", kind=ErrorKind.OBJECT_MISSING
            ) from error
        if found != size:
            raise damaged(
                path, f"it has {found} bytes, {snapshot.path} says {size}", kind=ErrorKind.OBJECT_SIZE_DIFFERS
            )
        tables.append(open_table(partial(folder.read_range, path), size, path))
    return tables


def file_problems(
    folder: Storage, store: Store, partition: int, files: Sequence[ObjectInfo], listing: Listing, level: Level
) -> Iterator[CheckpointError]:
    """Find table files that are missing or have another size; in full, also numbers of keys that
    differ.

    For one partition of a store, whatever column families it has.
    """
    place = store.folder(partition)
    known = listing.files(f"{place}/SSTs")
    for item in files:
        if not item.path.endswith(".zip"):
            continue
        try:
            snapshot = read_snapshot(folder, item, whole=level == "full")
        except CheckpointError as error:
            yield error
            continue
        found = list(_table_problems(snapshot, place, known))
        yield from found
        if store.family is not None and store.family not in snapshot.families:
            yield damaged(item.path, f"it has no column family {store.family!r}", kind=ErrorKind.DAMAGED_MANIFEST)
        elif level == "full" and store.family is not None and not found:
            try:
                _compare_numbers(folder, store, place, snapshot)
            except CheckpointError as error:
                yield error


def _table_problems(snapshot: Snapshot, place: str, known: Mapping[str, int]) -> Iterator[CheckpointError]:
    for name, size in snapshot.tables:
        path = f"{place}/SSTs/{name}"
        if name not in known:
            yield damaged(path, f"it is missing, and {snapshot.path} lists it", kind=ErrorKind.OBJECT_MISSING)
        elif known[name] != size:
            yield damaged(
                path, f"it has {known[name]} bytes, {snapshot.path} says {size}", kind=ErrorKind.OBJECT_SIZE_DIFFERS
            )


def _compare_numbers(folder: Storage, store: Store, place: str, snapshot: Snapshot) -> None:
    """Count the keys of all column families together, and compare with the number in the zip."""
    keys, _ = merged(open_tables(folder, place, snapshot), delimiter=delimiter_of(store))
    if len(keys) and int(keys.length.min()) < 2:
        raise damaged(snapshot.path, "a key of its tables is shorter than the number of a column family")
    families = keys.fixed(0, "<u2").astype(np.int64) if len(keys) else np.zeros(0, np.int64)
    unknown = ~np.isin(families, list(snapshot.families.values()))
    if unknown.any():
        number = int(families[np.argmax(unknown)])
        raise damaged(snapshot.path, f"its tables have keys of the column family {number}, which it does not name")
    if snapshot.keys < 0 or snapshot.internal_keys < 0:
        return
    own = np.isin(families, [snapshot.families[name] for name in snapshot.internal])
    for what, have, want in (
        ("keys", int((~own).sum()), snapshot.keys),
        ("keys of Spark's own", int(own.sum()), snapshot.internal_keys),
    ):
        if have != want:
            raise damaged(snapshot.path, f"its tables have {have} {what}, its metadata says {want}")


FILE: Final = re.compile(r"([1-9]\d{0,17})(?:_([^/.]+))?\.(zip|changelog)")
"""Names of the store's files: version, id, kind."""
_LATER: Final = 1 << 55
"""Changes of changelogs get sequence numbers above this, which no table file reaches."""


def files(store: Store, partition: int, listing: Listing) -> list[ObjectInfo]:
    """Return the zip and the changelogs that make up a partition, the oldest first.

    In checkpoint format 2 also files of the same versions left by other attempts, if the listing
    does not distinguish them: :func:`entries` follows the lineage.
    """
    folder = store.folder(partition)
    known: dict[int, list[tuple[str, str, str]]] = {}
    for name in listing.files(folder):
        if match := FILE.fullmatch(name):
            known.setdefault(int(match[1]), []).append((match[2] or "", match[3], name))
    own = store.unique_ids[partition] if store.unique_ids else ""
    found: list[str] = []
    for version in range(store.version, 0, -1):
        some = [item for item in known.get(version, ()) if bool(item[0]) == bool(store.unique_ids)]
        if own and version == store.version:
            some = [item for item in some if item[0] == own]
        zips, changes = ([item for item in some if item[1] == kind] for kind in ("zip", "changelog"))
        if zips and len({item[0] for item in some}) == 1:
            found.append(zips[0][2])
            break
        if not changes and not zips:
            name = f"{version}{f'_{own}' if own and version == store.version else ''}.changelog"
            raise damaged(
                f"{folder}/{name}",
                f"it is missing, and no zip from {version} to {store.version} makes it needless",
                kind=ErrorKind.OBJECT_MISSING,
            )
        found += sorted((item[2] for item in some), reverse=True)
    sizes = listing.files(folder)
    return [ObjectInfo(f"{folder}/{name}", sizes[name]) for name in reversed(found)]


def entries(folder: Storage, store: Store, partition: int, files: Sequence[ObjectInfo]) -> Entries:
    """Read a partition whole: of the store, or of its column family.

    Keys and values as in the database, without the number of the family and without the version
    byte before plain keys and single values.
    """
    encoder = encoder_of(store)
    place = store.folder(partition)
    if not files:
        return Entries(ByteStrings.joined(()), ByteStrings.joined(()))
    zips, logs = _chain(folder, store, files)
    snapshot = read_snapshot(folder, zips) if zips else None
    prefix = _family_prefix(store, snapshot, place)
    low, high = (None, None) if prefix is None else (prefix, _after(prefix))
    tables = open_tables(folder, place, snapshot) if snapshot else []
    run, stones = read_tables(tables, low, high)
    settled = False  # Whether each key is there once, as its newest value.
    if snapshot is not None and prefix is None and snapshot.keys >= 0:
        keys, values = newest(run, stones, snapshot.path, delimiter=delimiter_of(store))
        if len(keys) != snapshot.keys:
            raise damaged(snapshot.path, f"its tables have {len(keys)} keys, its metadata says {snapshot.keys}")
        run, stones, settled = Run(keys, np.ones(len(keys), np.uint64), values), [], not logs
    removed: list[ByteStrings] = []
    for nth, changes in enumerate(logs):
        if store.has_row_checksums:
            changes = _deletes_checked(changes)
        run, stones = _applied(run, stones, changes, _LATER + (nth << 32), prefix)
        gone = changes.key.take(changes.kind == DELETE)
        removed.append(gone if prefix is None else gone.take(gone.fixed(0, "<u2") == int.from_bytes(prefix, "little")))
    if not settled:
        keys, values = newest(run, stones, files[-1].path, delimiter=delimiter_of(store))
    path = files[-1].path
    if store.has_row_checksums and not store.multiple:
        values = without_sums(keys, values, path)
    dropped = ByteStrings.joined(removed)
    if prefix is not None:
        keys, dropped = keys.without_prefix(len(prefix)), dropped.without_prefix(len(prefix))
    return Entries(
        plain_rows(keys, path, "key") if encoder == PLAIN else keys,
        values if store.multiple else plain_rows(values, path, "value"),
        plain_rows(dropped, path, "key") if encoder == PLAIN else dropped,
    )


def stored(store: Store, entries: Entries) -> Entries:
    """Return entries as they are in the database: with the number of the family, and versions.

    These bytes precede those of :func:`entries`.
    """
    lead = (2 if store.family is not None else 0) + (encoder_of(store) == PLAIN)
    keys, values = entries.keys, entries.values
    tail = 0 if store.multiple else 1 + 8 * store.has_row_checksums
    return Entries(
        ByteStrings(keys.data, keys.start - lead, keys.length + lead),
        ByteStrings(values.data, values.start - tail, values.length + tail),
    )


problems = file_problems


def count(store: Store, entries: Entries) -> int:
    """Return how many rows the entries decode to: for a list one per value."""
    if not store.multiple:
        return len(entries.keys)
    return int(split_values(store, stored(store, entries).keys, entries.values, store.name)[0].sum())


def columns(store: Store, entries: Entries, path: str) -> list[pa.Array]:
    """Decode entries: the key's columns, then the value's; for a list one row per value."""
    keys = key_columns(store, entries.keys, path)
    if not store.multiple:
        return [*keys, *decode_rows(entries.values, store.schema.value, path)]
    counts, rows = split_values(store, stored(store, entries).keys, entries.values, path)
    repeated = np.repeat(np.arange(len(counts)), counts)
    return [
        *(column.take(repeated) for column in keys),
        pa.array(ramp(counts)),
        *decode_rows(rows, store.schema.value, path),
    ]


def _chain(folder: Storage, store: Store, files: Sequence[ObjectInfo]) -> tuple[ObjectInfo | None, list[Changes]]:
    """Return the zip that a version is based on, and the changes after it, the oldest first."""
    named = [(FILE.fullmatch(item.path.rpartition("/")[2]), item) for item in files]
    known = {(int(match[1]), match[2] or "", match[3]): item for match, item in named if match}
    version = max(number for number, _, _ in known)
    own = next(one for number, one, _ in known if number == version)
    ids = {version: own}
    logs: list[Changes] = []
    decoded = Decoded(sum(item.size_bytes for item in files))
    while version and (version, ids[version], "zip") not in known:
        item = known.get((version, ids[version], "changelog"))
        if item is None:
            raise damaged(
                f"{store.folder(0)}/{version}{f'_{ids[version]}' if ids[version] else ''}.changelog",
                "it is missing, and a later changelog goes on from it",
                kind=ErrorKind.OBJECT_MISSING,
            )
        data = spark_decode(store.codec, read_whole(folder, item), item.path, decoded)
        logs.append(read_changes(data, item.path))
        if own:
            ids.update({number: one for number, one in logs[-1].lineage if number < version})
            if version > 1 and version - 1 not in ids:
                raise damaged(item.path, f"its lineage does not name version {version - 1}")
        version -= 1
        ids.setdefault(version, "")
    logs.reverse()
    return (known[version, ids[version], "zip"] if version else None), logs


def _family_prefix(store: Store, snapshot: Snapshot | None, place: str) -> bytes | None:
    """Return the bytes before each key of the store's column family; None if there are none."""
    families = snapshot.families if snapshot is not None else {}
    name = store.family or "default"
    if store.family is None and not families:
        return None
    if name not in families:
        where = snapshot.path if snapshot is not None else f"{place}: no zip"
        raise damaged(
            snapshot.path if snapshot is not None else place,
            f"{where} names the column family {name!r}, of which keys carry the number",
            kind=ErrorKind.OBJECT_MISSING,
        )
    return families[name].to_bytes(2, "little")


def _after(prefix: bytes) -> bytes | None:
    """Return the least key above all that begin with a prefix of two bytes."""
    number = int.from_bytes(prefix, "big") + 1
    return number.to_bytes(2, "big") if number < 1 << 16 else None


def _deletes_checked(changes: Changes) -> Changes:
    """Remove the checksums from the keys that are deleted; in other changes the values have
    them.
    """
    deleted = changes.kind == DELETE
    plain = key_without_sum(changes.key.take(deleted), changes.path)
    start, length = changes.key.start.copy(), changes.key.length.copy()
    start[deleted], length[deleted] = plain.start, plain.length
    return changes._replace(key=ByteStrings(changes.key.data, start, length))


def _applied(
    run: Run, stones: Sequence[Tombstone], changes: Changes, sequence: int, prefix: bytes | None
) -> tuple[Run, list[Tombstone]]:
    """Apply changes to entries; for a column family only its own."""
    chosen = np.ones(len(changes.key), np.bool_)
    if prefix is not None:
        if len(chosen) and int(changes.key.length.min()) < len(prefix):
            raise damaged(changes.path, "a key is shorter than the number of its column family")
        chosen = changes.key.fixed(0, "<u2") == int.from_bytes(prefix, "little")
    numbers = np.arange(sequence, sequence + len(chosen), dtype=np.uint64)
    ranges = np.flatnonzero(changes.kind == DELETE_RANGE).tolist()
    found = [*stones, *(Tombstone(changes.key.bytes(at), changes.value.bytes(at), int(numbers[at])) for at in ranges)]
    chosen &= changes.kind != DELETE_RANGE
    kinds = np.zeros(256, np.uint64)
    kinds[PUT], kinds[MERGE], kinds[DELETE] = _PUT, _MERGE, _DELETE
    stamp = numbers[chosen] << np.uint64(8) | kinds[changes.kind[chosen]]
    key, value = (
        ByteStrings.joined(pair)
        for pair in ((run.key, changes.key.take(chosen)), (run.value, changes.value.take(chosen)))
    )
    return Run(key, np.concatenate([run.stamp, stamp]), value), found
