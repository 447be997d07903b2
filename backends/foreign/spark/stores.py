"""The state stores of Spark, as their readers present them: one protocol for all providers.

A store is one of an operator's (``default``, or the four of a join), at one state version. Its
reader finds the files of a partition, reads their entries, and decodes entries into columns. A
repartition moves entries, as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import pyarrow as pa

from stateformat.errors import CheckpointError, ErrorKind
from stateformat.storage import ObjectInfo, Storage

from .. import limits
from ..byte_strings import ByteStrings
from ..framing import damaged
from ..limits import FILE_BYTES
from ..source import Level
from .schemas import SparkField, StoreSchema

HDFS_PROVIDER: Final = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
ROCKSDB_PROVIDER: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
CLAUSE: Final = "Spark state store"
"""The source of the rules that problems refer to."""


class Entries(NamedTuple):
    """Live entries of one partition, keys distinct, always in the same order for the same files.

    Bytes as stored, without their framing: the leading version byte of RocksDB, checksums.
    """

    keys: ByteStrings
    values: ByteStrings
    removed: ByteStrings | None = None
    """Keys that the files remove, some perhaps several times; None if there are none to know."""

    def slice(self, start: int, stop: int) -> Entries:
        """Return the entries ``start`` … ``stop`` − 1."""
        return Entries(self.keys.slice(start, stop), self.values.slice(start, stop))


@dataclass(frozen=True)
class KeyLayout:
    """How keys of a column family are stored, if not as its schema has them."""

    key: tuple[SparkField, ...]
    """The columns in the files; structs may be among them."""
    paths: tuple[tuple[int, ...], ...]
    """For each column of the schema: which of the stored ones, and which fields within it."""


@dataclass(frozen=True)
class Store:
    """One store of one operator at one state version, in all its partitions."""

    operator: int
    name: str
    """The store's name, which is also the state's name in stateformat."""
    version: int
    """Batch + 1."""
    partitions: int
    schema: StoreSchema
    conf: Mapping[str, str] = field(repr=False)
    """``conf`` of the batch's offset log."""
    prefix_columns: int = 0
    """``numColsPrefixKey``."""
    family: str | None = None
    """The column family within the store; None if the store has none."""
    store_name: str = ""
    """The folder's store, for families, if it is not ``name``."""
    layout: KeyLayout | None = None
    """None if keys are stored as the schema has them."""
    multiple: bool = False
    """Whether a key has several values: of a list, or of a join's rows at one time. The schema's
    key then ends with the position of each.
    """
    unique_ids: tuple[str, ...] = ()
    """Checkpoint format 2: the id of the version's files by partition; else empty."""

    def folder(self, partition: int) -> str:
        """Return the folder of a partition's files, relative to the checkpoint."""
        store = self.store_name or self.name
        base = f"state/{self.operator}/{partition}"
        return base if store == "default" else f"{base}/{store}"

    @property
    def codec(self) -> str:
        """The codec of the files."""
        return self.conf.get("spark.sql.streaming.stateStore.compression.codec", "lz4")

    @property
    def has_row_checksums(self) -> bool:
        """Whether every entry has a checksum of itself."""
        return self.conf.get("spark.sql.streaming.stateStore.rowChecksum.enabled", "false") == "true"


class Listing:
    """All files below ``state/`` by folder: listed once."""

    def __init__(self, found: Iterable[ObjectInfo]) -> None:
        self.folders: dict[str, dict[str, int]] = {}
        for item in found:
            folder, _, name = item.path.rpartition("/")
            self.folders.setdefault(folder, {})[name] = item.size_bytes

    def files(self, folder: str) -> Mapping[str, int]:
        """Return the files directly in a folder: sizes by name."""
        return self.folders.get(folder, {})


def read_whole(folder: Storage, item: ObjectInfo, limit: int = FILE_BYTES) -> bytes:
    """Read a listed file. Raises ``DamagedCheckpoint`` if it is missing, and ``UnsupportedFormat``
    if it is too large.
    """
    try:
        return bytes(limits.read_whole(folder, item.path, limit, item.size_bytes))
    except FileNotFoundError as error:
        raise damaged(item.path, "it is missing", kind=ErrorKind.OBJECT_MISSING) from error


class StoreReader(Protocol):
    """What a provider's module provides."""

    def files(self, store: Store, partition: int, listing: Listing) -> Sequence[ObjectInfo]:
        """Return the files that make up a partition at the version, the oldest first.

        Uses only the listing. Raises ``DamagedCheckpoint`` if one is missing.
        """

    def entries(self, folder: Storage, store: Store, partition: int, files: Sequence[ObjectInfo]) -> Entries:
        """Read a partition whole, comparing every checksum."""

    def count(self, store: Store, entries: Entries) -> int:
        """Return how many rows entries decode to: one each, or one for each of several values."""

    def key_columns(self, store: Store, keys: ByteStrings, path: str) -> list[pa.Array]:
        """Decode keys."""

    def columns(self, store: Store, entries: Entries, path: str) -> list[pa.Array]:
        """Decode entries: the key columns of the schema, then the value columns, a row an entry.

        If an entry has several values, there are more rows than entries.
        """

    def problems(
        self,
        folder: Storage,
        store: Store,
        partition: int,
        files: Sequence[ObjectInfo],
        listing: Listing,
        level: Level,
    ) -> Iterable[CheckpointError]:
        """Return what is wrong with a partition's files, other than errors that reading its entries
        finds.
        """
