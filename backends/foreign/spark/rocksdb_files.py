"""The files of a RocksDB store: the contents of a zip, the tables, and what can be wrong with
them.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from stateformat.errors import CheckpointError, ErrorKind, UnsupportedFormat
from stateformat.storage import ObjectInfo, Storage

from ..framing import damaged
from ..limits import SMALL_BYTES, ZIP_ENTRIES, check
from ..source import Level
from ..sst.merge import merged
from ..sst.table import Table, open_table
from .rocksdb_keys import delimiter_of
from .schemas import parse_json
from .stores import Listing, Store, read_whole

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


def read_snapshot(folder: Storage, item: ObjectInfo) -> Snapshot:
    """Read the ``metadata`` of a zip."""
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
            snapshot = read_snapshot(folder, item)
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
