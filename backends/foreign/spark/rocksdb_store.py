"""Spark's state store on RocksDB: ``V.zip`` with its table files, and ``V.changelog`` after it.

A zip has ``metadata``, which lists the table files of the database in ``SSTs/``; the state at
version V is the greatest zip up to V and the changelogs after it. In checkpoint format 2 names
include an id (``V_<id>.zip``), and a changelog says which files it is based on (its lineage).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from stateformat.errors import ErrorKind
from stateformat.storage import ObjectInfo, Storage

from ..byte_strings import ByteStrings
from ..framing import damaged, spark_decode
from ..limits import Decoded
from ..sst.merge import newest, read_tables
from ..sst.table import DELETE as _DELETE, MERGE as _MERGE, PUT as _PUT, Run, Tombstone
from .changelogs import DELETE, DELETE_RANGE, MERGE, PUT, Changes, read_changes
from .rocksdb_files import Snapshot, file_problems, open_tables, read_snapshot
from .rocksdb_keys import (
    PLAIN,
    delimiter_of,
    encoder_of,
    key_columns,
    key_without_sum,
    plain_rows,
    split_values,
    without_sums,
)
from .stores import Entries, Listing, Store, read_whole
from .unsafe_row import decode_rows

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
        nothing = ByteStrings(np.zeros(0, np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64))
        return Entries(nothing, nothing)
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
    for nth, changes in enumerate(logs):
        if store.has_row_checksums:
            changes = _deletes_checked(changes)
        run, stones = _applied(run, stones, changes, _LATER + (nth << 32), prefix)
    if not settled:
        keys, values = newest(run, stones, files[-1].path, delimiter=delimiter_of(store))
    path = files[-1].path
    if store.has_row_checksums and not store.multiple:
        values = without_sums(keys, values, path)
    if prefix is not None:
        keys = keys.without_prefix(len(prefix))
    return Entries(
        plain_rows(keys, path, "key") if encoder == PLAIN else keys,
        values if store.multiple else plain_rows(values, path, "value"),
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
    place = np.arange(len(repeated)) - (np.cumsum(counts) - counts)[repeated]
    return [
        *(column.take(repeated) for column in keys),
        pa.array(place, pa.int64()),
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
    found = list(stones)
    for at in np.flatnonzero(changes.kind == DELETE_RANGE).tolist():
        start, end = (_bytes(strings, at) for strings in (changes.key, changes.value))
        found.append(Tombstone(start, end, int(numbers[at])))
    chosen &= changes.kind != DELETE_RANGE
    kinds = np.zeros(256, np.uint64)
    kinds[PUT], kinds[MERGE], kinds[DELETE] = _PUT, _MERGE, _DELETE
    stamp = numbers[chosen] << np.uint64(8) | kinds[changes.kind[chosen]]
    key, value = (
        _joined(*pair) for pair in ((run.key, changes.key.take(chosen)), (run.value, changes.value.take(chosen)))
    )
    return Run(key, np.concatenate([run.stamp, stamp]), value), found


def _bytes(strings: ByteStrings, at: int) -> bytes:
    start = int(strings.start[at])
    return strings.data[start : start + int(strings.length[at])].tobytes()


def _joined(first: ByteStrings, second: ByteStrings) -> ByteStrings:
    shift = len(first.data)
    return ByteStrings(
        np.concatenate([first.data, second.data]),
        np.concatenate([first.start, second.start + shift]),
        np.concatenate([first.length, second.length]),
    )
