"""A Structured Streaming checkpoint as a :class:`~..source.ForeignSource`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import CheckpointError, DamagedCheckpoint, ErrorKind, InvalidInput, NotFound, UnsupportedFormat
from stateformat.graph import JobGraph, Operator
from stateformat.keys import DEFAULT_KEY_HASH
from stateformat.model import (
    AttemptId,
    CheckpointId,
    CheckpointKind,
    JobId,
    ManifestRef,
    ParentRef,
    Record,
    Totals,
)
from stateformat.storage import ObjectInfo, Storage, named_below

from ..advice import advice_for
from ..byte_strings import cut
from ..framing import damaged
from ..limits import ENTRIES, check as check_limit
from ..source import Note, Opened, Part
from . import hdfs_store, rocksdb_store
from .logs import (
    PROVIDER,
    OperatorInfo,
    Reads,
    Remembered,
    StoreInfo,
    committed,
    is_number,
    read_commit,
    read_offsets,
    read_operator,
    read_query_id,
    read_small,
)
from .rocksdb_keys import encoder_of
from .schemas import SCHEMA_ADVICE, UNKNOWN_SCHEMA, StoreSchema, parse_schema_file
from .states import NESTED_KEY_HASH, UNKNOWN_KEY_HASH, Family, StateShape, families_of, infer_operator, shape_of
from .stores import HDFS_PROVIDER, ROCKSDB_PROVIDER, Entries, Listing, Store, StoreReader

READERS: Final[Mapping[str, StoreReader]] = {HDFS_PROVIDER: hdfs_store, ROCKSDB_PROVIDER: rocksdb_store}
"""By the class given in the offset log."""

_BATCH_ROWS: Final = 1 << 16
_BATCH_BYTES: Final = 1 << 25


class SparkSource:
    """One committed batch of a query, as a checkpoint; its id is the state version, batch + 1.

    Opening reads logs and schemas and lists files; data files are read by what yields rows.
    """

    goes_on_from_copies: ClassVar[bool] = True
    """``repartition`` writes a copy at another number of partitions."""

    def __init__(
        self,
        folder: Storage,
        checkpoint_id: int | None = None,
        *,
        listing: Listing | None = None,
        logs: Reads | None = None,
    ) -> None:
        """Open the newest committed batch, or that of ``checkpoint_id``.

        ``listing`` is that of ``state/``, if it is known already; ``logs`` is where logs and
        schemas are read, if they are known too.

        Raises ``NotFound``, ``DamagedCheckpoint`` and ``UnsupportedFormat``.
        """
        self.folder = folder
        self._logs = logs = logs or folder
        self.batches = committed(logs)
        self.batch = self.batches[-1] if checkpoint_id is None else checkpoint_id - 1
        if self.batch not in self.batches:
            raise NotFound(
                f"the query has no committed batch {self.batch}, which checkpoint {checkpoint_id} would be; it has "
                f"checkpoints {self.batches[0] + 1} to {self.batches[-1] + 1}",
                kind=ErrorKind.CHECKPOINT_NOT_FOUND,
            )
        self.query_id = read_query_id(logs)
        self.offsets = read_offsets(logs, self.batch)
        self.commit = read_commit(logs, self.batch)
        self.listing = listing or Listing(folder.list("state/"))
        self.provider = self.offsets.conf.get(PROVIDER, HDFS_PROVIDER)
        self.operators: tuple[OperatorInfo, ...] = tuple(self._operators())
        self.stores: dict[tuple[str, str], Store] = {}
        """By (operator, state): what is read."""
        self.shapes: dict[tuple[str, str], StateShape] = {}
        self.hidden: dict[tuple[str, str], tuple[Store, int]] = {}
        """Column families derived from others, and how many columns determine the partition of
        each.
        """
        self.notes: Sequence[Note] = ()
        self._find_states()
        self._kept: tuple[tuple[str, str, int], Entries] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Cached entries are not pickled.
        return {**self.__dict__, "_kept": None, "_logs": self.folder}

    @property
    def version(self) -> int:
        """The state version."""
        return self.batch + 1

    @property
    def reader(self) -> StoreReader:
        """The reader of the query's state store; ``UnsupportedFormat`` for an unknown provider."""
        found = READERS.get(self.provider)
        if found is None:
            raise UnsupportedFormat(
                f"the query's state is kept by {self.provider}; known are {', '.join(READERS)}",
                kind=ErrorKind.UNSUPPORTED_FEATURE,
                provider=self.provider,
            )
        return found

    def _operators(self) -> Iterator[OperatorInfo]:
        numbers = {path.split("/")[1] for path in self.listing.folders if path.count("/")}
        for number in sorted(int(text) for text in numbers if is_number(text)):
            names = self.listing.files(f"state/{number}/_metadata")
            newer = self.listing.files(f"state/{number}/_metadata/v2")
            found = read_operator(self._logs, number, self.batch, {**names, **newer})
            if found is None:
                schemas = self._schemas_of(number)
                # An operator without keys has all in partition 0; elsewhere its schema says so.
                alone = not any(one.known for one in schemas.values()) and not self._has_partitions(number)
                found = infer_operator(number, schemas, 1 if alone else self.offsets.partitions)
            yield found

    def _has_partitions(self, operator: int) -> bool:
        base = f"state/{operator}/"
        names = {path.removeprefix(base).partition("/")[0] for path in self.listing.folders if path.startswith(base)}
        return any(is_number(name) and name != "0" for name in names)

    def _schemas_of(self, operator: int) -> dict[str, StoreSchema]:
        """Return the schemas of the stores of partition 0; Spark 3.5 gives no other information on
        stores.
        """
        base = f"state/{operator}/0"
        found: dict[str, StoreSchema] = {}
        for path, files in self.listing.folders.items():
            if "schema" in files and path.startswith(f"{base}/") and path.endswith("/_metadata"):
                name = path.removeprefix(base).removesuffix("/_metadata").strip("/") or "default"
                found[name] = parse_schema_file(read_small(self._logs, f"{path}/schema"), f"{path}/schema")[0]
        if not found:
            unknown = self._schema(f"{base}/_metadata/schema")[0]
            # The stores of a join are folders of a partition; other operators have one, "default".
            below = [path.removeprefix(f"{base}/") for path in self.listing.folders if path.startswith(f"{base}/")]
            names = [name for name in below if not name.startswith("_") and "/" not in name]
            found = dict.fromkeys(names or ["default"], unknown)
        return found

    def _schema(self, path: str) -> list[StoreSchema]:
        """Return what a schema file declares. Spark before 3.1 wrote none: keys and values are then
        bytes.
        """
        folder, _, name = path.rpartition("/")
        if folder.endswith("/_metadata") and name not in self.listing.files(folder):
            if not self.offsets.has_schemas and self.provider == HDFS_PROVIDER:
                return [UNKNOWN_SCHEMA]
            # Spark does not write a file beside whose name another's checksum lies.
            orphan = f".{name}.crc" in self.listing.files(folder)
            raise DamagedCheckpoint(
                f"{path} is missing, so which columns the state has is not known. Put the file back from a copy, or "
                f"{f'remove its .{name}.crc and ' if orphan else ''}{SCHEMA_ADVICE}",
                kind=ErrorKind.OBJECT_MISSING,
                path=path,
            )
        return parse_schema_file(read_small(self._logs, path), path)

    def _find_states(self) -> None:
        notes: list[Note] = []
        for operator in self.operators:
            for index, store in enumerate(operator.stores):
                path, elsewhere = self._schema_path(operator, store.name)
                if elsewhere:
                    notes.append(Note("elsewhere", operator.uid, f"{elsewhere} is not here; {path} was read instead"))
                schemas = self._schema(path)
                if not schemas[0].known:
                    notes.append(
                        Note(
                            "opaque",
                            f"{operator.uid}/{store.name}",
                            "Spark before 3.1 did not write which columns a state has: keys and values are its bytes. "
                            f"To read them, {SCHEMA_ADVICE}, {path}",
                        )
                    )
                try:
                    families = list(families_of(operator, store, schemas))
                except UnsupportedFormat as error:
                    notes.append(Note("refused", f"{operator.uid}/{store.name}", str(error)))
                    continue
                ids = self.commit.unique_ids(operator.id, index)
                for family in families:
                    notes.extend(self._add(operator, store, family, ids))
                hidden = [family.family for family in families if family.kind == "hidden"]
                if hidden:
                    names = ", ".join(hidden)
                    message = f"what Spark keeps to find entries by, {names}, is not shown: it follows from the rest"
                    notes.append(Note("omitted", operator.uid, message))
        self.notes = tuple(notes)

    def _add(self, operator: OperatorInfo, info: StoreInfo, family: Family, ids: tuple[str, ...]) -> Iterator[Note]:
        key = (operator.uid, family.name)
        if key in self.stores or key in self.hidden:
            path, _ = self._schema_path(operator, info.name)
            raise damaged(path, f"it declares {family.name!r} twice", kind=ErrorKind.DAMAGED_MANIFEST)
        store = Store(
            operator=operator.id,
            name=family.name,
            version=self.version,
            # Spark's own repartitioning leaves the metadata's number as it was.
            partitions=(self.offsets.partitions if family.schema.known else info.partitions) if family.hashed else 1,
            schema=family.schema,
            conf=self.offsets.conf,
            prefix_columns=info.prefix_columns,
            family=None if family.family == "default" else family.family,
            store_name=info.name,
            layout=family.layout,
            multiple=family.multiple,
            unique_ids=ids,
        )
        if family.kind == "hidden":
            self.hidden[key] = (store, family.hashed)
            return
        try:
            if self.provider == ROCKSDB_PROVIDER:
                encoder_of(store)
            shape = shape_of(operator, info, family)
        except UnsupportedFormat as error:
            yield Note("refused", "/".join(key), str(error))
            return
        yield from shape.notes
        self.shapes[key], self.stores[key] = shape, store

    def _schema_path(self, operator: OperatorInfo, store: str) -> tuple[str, str]:
        """Return the schema file of a store, and where Spark says it is, if that is elsewhere."""
        named = operator.schema_paths.get(store)
        if named:
            # An absolute path, and so wrong after every move: the file in our folder is meant.
            path = f"state/{operator.id}/_stateSchema/{store}/{named[-1].rpartition('/')[2]}"
            return path, "" if named_below(named[-1], self.folder.url) == path else named[-1]
        base = f"state/{operator.id}/0" + ("" if store == "default" else f"/{store}")
        return f"{base}/_metadata/schema", ""

    @cached_property
    def record(self) -> Record:
        """The checkpoint in stateformat's terms."""
        made = hashlib.sha256(f"{self.query_id} {self.batch}".encode()).hexdigest()[:32]
        return Record(
            checkpoint_id=CheckpointId(self.version),
            attempt_id=AttemptId(made),
            kind=CheckpointKind.CHECKPOINT,
            job_id=JobId(self.query_id),
            graph=JobGraph(tuple(self._operator(info) for info in self.operators)),
            states=tuple(shape.state for shape in self.shapes.values()),
            manifest=ManifestRef("", 0, "", 0),
            totals=Totals(
                handles=len(self.parts),
                segments=len(self.parts),
                bytes=sum(part.size_bytes for part in self.parts),
            ),
            created_at_us=1000 * self.offsets.number("batchTimestampMs"),
            writer="Apache Spark Structured Streaming",
            parent=self._parent(),
            properties=self._properties(),
        )

    def _parent(self) -> ParentRef | None:
        if self.batch - 1 not in self.batches:
            return None
        made = hashlib.sha256(f"{self.query_id} {self.batch - 1}".encode()).hexdigest()[:32]
        return ParentRef(CheckpointId(self.batch), AttemptId(made))

    def _operator(self, info: OperatorInfo) -> Operator:
        own = [self.stores[key].partitions for key in self.stores if key[0] == info.uid]
        named = [store.partitions for store in info.stores]
        partitions = max(own or named or [1])
        shapes = [shape for (uid, _), shape in self.shapes.items() if uid == info.uid]
        key_hash = NESTED_KEY_HASH if any(shape.opaque for shape in shapes) else DEFAULT_KEY_HASH
        if not all(shape.schema.known for shape in shapes):
            key_hash = UNKNOWN_KEY_HASH
        return Operator(info.uid, partitions, partitions, info.name, key_hash)

    def _properties(self) -> dict[str, str]:
        watermark = self.commit.watermark_ms
        watermark = self.offsets.number("batchWatermarkMs") if watermark is None else watermark
        return {
            "spark.query_id": self.query_id,
            "spark.batch": str(self.batch),
            "spark.watermark_ms": str(watermark),
            "spark.state_store_provider": self.provider,
            "spark.state_partitions": str(self.offsets.partitions),
            **{f"spark.offsets.{name}": text for name, text in self.offsets.offsets.items() if text is not None},
        }

    @cached_property
    def parts(self) -> Sequence[Part]:
        """One part per state and partition, with sizes from the listing."""
        found = []
        parts = sum(store.partitions for store in self.stores.values())
        check_limit(self.offsets.path, "the states of all partitions", parts, ENTRIES, "entries")
        sharing = Counter((store.operator, store.store_name) for store in self.stores.values())
        for (operator, state), store in sorted(self.stores.items()):
            shares = sharing[store.operator, store.store_name]
            for partition in range(store.partitions):
                try:
                    files = self.reader.files(store, partition, self.listing)
                except DamagedCheckpoint:
                    files = []
                # Only the zip says which tables are of this version: all of them are counted.
                tables = self.listing.files(f"{store.folder(partition)}/SSTs").values()
                size = (sum(item.size_bytes for item in files) + sum(tables)) // shares
                path = files[-1].path if files else store.folder(partition)
                found.append(Part(operator, state, partition, size, path, None, partition, partition))
        return tuple(found)

    def files(self, part: Part) -> Sequence[ObjectInfo]:
        """Return the files of a part, the oldest first. Raises ``DamagedCheckpoint`` if one is
        missing.
        """
        store, _, partition = self._of(part)
        return self.reader.files(store, partition, self.listing)

    def used_files(self) -> int:
        """See ``ForeignSource``: snapshots, deltas, changelogs and tables of the newest version."""
        found: set[str] = set()
        for part in self.parts:
            store, _, partition = self._of(part)
            tables = f"{store.folder(partition)}/SSTs"
            found |= {f"{tables}/{name}" for name in self.listing.files(tables)}
            with suppress(DamagedCheckpoint):
                found |= {item.path for item in self.files(part)}
        return len(found)

    def _of(self, part: Part) -> tuple[Store, StateShape, int]:
        key = (part.operator, part.state)
        store = self.stores.get(key)
        if store is None or part.subtask is None or not 0 <= part.subtask < store.partitions:
            raise InvalidInput(
                f"the checkpoint has no part {part.operator}/{part.state}/{part.subtask}; `parts` lists them",
                kind=ErrorKind.UNKNOWN_STATE,
            )
        return store, self.shapes[key], part.subtask

    def entries(self, part: Part) -> Entries:
        """Return the entries of a part, as bytes. The last part read is kept."""
        key = (part.operator, part.state, part.subtask or 0)
        kept = self._kept
        if kept is not None and kept[0] == key:
            return kept[1]
        store, _, partition = self._of(part)
        self._kept = kept = None
        found = self.reader.entries(self.folder, store, partition, self.files(part))
        self._kept = (key, found)
        return found

    def group_rows(self, part: Part) -> npt.NDArray[np.int64]:
        """Return the number of rows of the part's one group."""
        return np.array([self.reader.count(self._of(part)[0], self.entries(part))], np.int64)

    def columns(self, part: Part) -> Iterator[tuple[Entries, list[pa.Array]]]:
        """Yield entries and what they decode to: columns by Spark's schema, some rows at once."""
        store, _, _ = self._of(part)
        entries, path = self.entries(part), part.path or store.folder(part.subtask or 0)
        for first, last in cut(entries.keys.length + np.maximum(entries.values.length, 0), _BATCH_BYTES):
            for start in range(first, last, _BATCH_ROWS):
                some = entries.slice(start, min(start + _BATCH_ROWS, last))
                yield some, self.reader.columns(store, some, path)

    def read(
        self, part: Part, first_group: int | None = None, last_group: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Stream a part's rows; nothing if its one group is outside the groups given."""
        _, shape, group = self._of(part)
        first = group if first_group is None else first_group
        last = group if last_group is None else last_group
        if not first <= group <= last:
            return
        as_bytes = replace(self.stores[part.operator, part.state], schema=shape.stored)
        for entries, columns in self.columns(part):
            stored = self.reader.columns(as_bytes, entries, part.path or "") if shape.opaque else None
            yield shape.batch(columns, group, stored)


def query_of(source: object, url: str, system: str, command: str) -> SparkSource:
    """Return the source of a query's checkpoint. Raises ``InvalidInput`` for another system's, with
    what to do in place of the command.
    """
    if not isinstance(source, SparkSource):
        told = advice_for(system, command, url) or f"`ckpt import {url} --to STORE` makes a store of it"
        raise InvalidInput(f"{url} is {system}. {told}")
    return source


def sources(folder: Storage) -> Opened:
    """Return the committed batches whose state can still be opened, newest first."""
    listing, found, failed = Listing(folder.list("state/")), Opened(), dict[int, CheckpointError]()
    done = committed(folder)
    logs = Remembered(folder, [f"{log}/{batch}" for batch in done for log in ("offsets", "commits")])
    for batch in reversed(done):
        try:
            source = SparkSource(folder, batch + 1, listing=listing, logs=logs)
            for part in source.parts:
                source.files(part)
        except CheckpointError as error:
            failed[batch + 1] = error
            continue
        # Spark removes the oldest state first, so what is missing above a whole batch was lost.
        found.damaged.update(failed)
        failed.clear()
        found.sources.append(source)
    return found if found.sources else Opened([], failed)
