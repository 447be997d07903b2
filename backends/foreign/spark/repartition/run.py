"""Runs a repartition: reads and verifies everything, then writes.

What is read waits in a temporary file until all of it is verified, so nothing is written for a
checkpoint that is refused. An engine reads and writes state, with two functions whose arguments can
be pickled: :func:`deal` reads one partition of one store, verifies that its keys are where their
hash puts them, and yields pieces for other partitions; :func:`write_partition` makes the files of
one partition from pieces. Rows are moved as bytes. This module does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol
from uuid import NAMESPACE_URL, uuid5

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput, StorageError
from stateformat.storage import Storage
from stateformat.tables import Spill, python_rows

from ...byte_strings import ByteStrings, from_arrow
from ...framing import damaged, spark_decode, spark_encode, spark_joined
from ...limits import Decoded
from .. import rocksdb_keys, rocksdb_store
from ..copying import Finished, begin, check_target, check_whole, finish, withdraw, write_files
from ..hdfs_store import key_codes, parse_chains
from ..logs import batches
from ..schemas import SparkField, SparkType, has_values
from ..source import SparkSource
from ..states import INDEX, spark_hashes
from ..stores import Entries, Store
from ..unsafe_row import decode_rows
from .editing import Edit, Rows, encoded, equal_keys
from .plan import RepartitionPlan, Source, Target, Unit
from .store_files import END, entry_pieces, frame_pieces, framed, prefixed_keys, write_database, write_snapshot

_VOID: Final = SparkType("void", pa.null())


class Piece(NamedTuple):
    """Entries of one store for one partition."""

    target: Target
    keys: int
    rows: pa.RecordBatch
    """Of ``store_files.FRAMES`` or ``ENTRIES``."""


class Written(NamedTuple):
    """What was written for one partition of one store."""

    files: int
    size_bytes: int


def deal(folder: Storage, source: Source) -> Iterator[Piece]:
    """Read one partition of a store and yield its entries by their new partitions.

    Holds the whole partition. Raises ``DamagedCheckpoint`` if a key is in the wrong partition, or a
    file is missing or damaged.
    """
    unit, found = source.unit, 0
    for index, store in enumerate(unit.stores):
        entries = unit.reader.entries(folder, store, source.partition, source.files)
        found += len(entries.keys)
        if not len(entries.keys):
            continue
        targets, edit = _targets(unit, index, entries, source), unit.edits.get(index)
        if edit is None:
            yield from _dealt(unit, store, entries, targets)
        elif edit.function is not None:
            yield from _edited(unit, index, edit, entries, source)
    if unit.families:
        _check_count(folder, source, found)


def _edited(unit: Unit, index: int, edit: Edit, entries: Entries, source: Source) -> Iterator[Piece]:
    """Yield what a function makes of entries, and what follows of it in other stores."""
    store = unit.stores[index]
    rows = edit.rows(store, unit.reader, entries, source.partition)
    hashed = unit.hashed[index]
    made: list[tuple[Unit, int, Rows]] = [(unit, index, rows)]
    for there, at, derive in edit.derived:
        own = there.stores[at]
        fields = (*own.schema.key, INDEX) if own.multiple else own.schema.key
        made.append((there, at, derive(rows, hashed)._replace(fields=fields)))
    for there, at, some in made:
        if some.number:
            own = there.stores[at]
            found = encoded(own, some, there.families, rocksdb=there.provider_before == "rocksdb")
            yield from _dealt(there, own, found, _hashes(there, at, found, source.path) % there.after)


def _dealt(unit: Unit, store: Store, entries: Entries, targets: npt.NDArray[np.int64]) -> Iterator[Piece]:
    if unit.provider_after == "hdfs":
        rows = framed(entries.keys, _stored_values(store, entries))
        pieces = frame_pieces(rows, targets, store.codec)
    else:
        pieces = entry_pieces(*_rocksdb_entries(unit, store, entries), targets)
    for partition, keys, batch in pieces:
        yield Piece(Target(unit.number, partition), keys, batch)


def write_partition(
    folder: Storage, unit: Unit, partition: int, pieces: Iterable[pa.RecordBatch], keys: int
) -> Written:
    """Write the files of one partition of a store from its pieces; an empty one has files too.

    ``keys`` is how many entries the pieces hold.
    """
    place = unit.stores[0].folder(partition)
    if unit.rekeyed:
        pieces = list(pieces)
        _check_distinct(unit, place, pieces)
    if unit.provider_after == "hdfs":
        return Written(*write_snapshot(folder, place, unit.version, unit.stores[0].codec, pieces))
    name = f"{unit.version}_{unit.ids[partition]}" if unit.ids else str(unit.version)
    made = uuid5(NAMESPACE_URL, f"{folder.url} {place} {name}")
    about = {"numKeys": keys, **unit.about}
    return Written(*write_database(folder, place, name, pieces, about, unit.internal, made))


def _check_distinct(unit: Unit, place: str, pieces: Sequence[pa.RecordBatch]) -> None:
    """Raise ``InvalidInput`` if rows of two partitions have got one key."""
    if unit.provider_after == "hdfs":
        codec = unit.stores[0].codec
        frames = [row.as_buffer() for piece in pieces for row in piece["frames"]]
        whole = b"".join(map(bytes, spark_joined(codec, [*frames, spark_encode(codec, END)])))
        data = spark_decode(codec, whole, place, Decoded(len(whole)))
        keys = parse_chains(data, np.array([len(data)]), np.array([False]), [place]).keys
    else:
        keys = ByteStrings.joined([from_arrow(piece.column(0)) for piece in pieces])
    codes = key_codes(keys)
    values, counts = np.unique(codes, return_counts=True)
    if len(values) < len(keys):
        again = int(np.flatnonzero(codes == values[np.argmax(counts)])[0])
        key = _shown_key(unit, keys.slice(again, again + 1), place)
        raise equal_keys(f"{place} of operator-{unit.operator.id}", f"{key}, which rows of two partitions got")


def _shown_key(unit: Unit, key: ByteStrings, place: str) -> str:
    """Return a key, as it is stored, for people."""
    store = unit.stores[0]
    if unit.provider_after == "hdfs":
        columns = decode_rows(key, store.schema.key, place)
    else:
        names = {number: name for name, number in unit.families.items()}
        family = names[int(key.fixed(0, "<u2")[0])] if names else None
        store = next(one for one in unit.stores if family in (None, one.family, one.family or "default"))
        plain = rocksdb_keys.encoder_of(store) == rocksdb_keys.PLAIN
        columns = rocksdb_keys.key_columns(store, key.without_prefix(2 * bool(names) + plain), place)
    shown = {
        item.name: column for item, column in zip(store.schema.key, columns, strict=False) if has_values(item.type)
    }
    (row,) = python_rows(pa.table(shown))
    return str(row)


def _check_count(folder: Storage, source: Source, found: int) -> None:
    """Compare the keys of all column families with the number that the database gives.

    So a family that no schema names is not overlooked. Only a zip by itself gives the number,
    without changelogs.
    """
    if len(source.files) != 1:
        return
    said = rocksdb_store.read_snapshot(folder, source.files[0]).metadata
    counts = [said.get("numKeys", -1), said.get("numInternalKeys", -1)]
    if all(isinstance(one, int) and one >= 0 for one in counts) and sum(counts) != found:
        raise damaged(
            source.files[0].path,
            f"it says that there are {sum(counts)} keys, and the column families of the schema have {found}",
        )


def _targets(unit: Unit, index: int, entries: Entries, source: Source) -> npt.NDArray[np.int64]:
    """Return the new partition of each entry; verifies the old one."""
    store, hashes = unit.stores[index], _hashes(unit, index, entries, source.path)
    if not unit.keyed:
        return hashes
    found = hashes % unit.before
    wrong = np.flatnonzero(found != source.partition)
    if len(wrong):
        at = int(wrong[0])
        key = ", ".join(str(column[at].as_py()) for column in key_columns(unit, index, entries, source.path))
        raise DamagedCheckpoint(
            f"{source.path}: {len(wrong):,} of {len(found):,} keys of {store.name!r} lie in partition "
            f"{source.partition} and do not belong there; the first is ({key}), whose hash gives {int(found[at])} of "
            f"{unit.before}. Files of partitions were swapped: put them back from a copy. Or the query is older than "
            "Spark 3.3 and deals its rows otherwise (useStrictDistribution=false): then its number of partitions "
            "cannot be changed",
            path=source.path,
            operator=store.operator,
            partition=source.partition,
        )
    return hashes % unit.after


def _hashes(unit: Unit, index: int, entries: Entries, path: str) -> npt.NDArray[np.int64]:
    """Return Spark's hash of each key; 0 for a store without keys."""
    if not unit.keyed:
        return np.zeros(len(entries.keys), np.int64)
    return spark_hashes(key_columns(unit, index, entries, path)).astype(np.int64)


def key_columns(unit: Unit, index: int, entries: Entries, path: str) -> list[pa.Array]:
    """Return the columns that determine the partition of each entry."""
    store, hashed = unit.stores[index], unit.hashed[index]
    if unit.provider_before == "rocksdb":
        found = rocksdb_keys.key_columns(store, entries.keys, path)[:hashed]
        return [column for column, one in zip(found, store.schema.key, strict=False) if has_values(one.type)]
    # The words of the others are skipped, not decoded.
    fields = [one if at < hashed else SparkField(one.name, _VOID) for at, one in enumerate(store.schema.key)]
    found = decode_rows(entries.keys, fields, path)[:hashed]
    return [column for column, one in zip(found, fields, strict=False) if has_values(one.type)]


def _stored_values(store: Store, entries: Entries) -> ByteStrings:
    """Return values with the checksums before them, which readers remove."""
    values = entries.values
    if not store.has_row_checksums:
        return values
    return ByteStrings(values.data, values.start - 4, values.length + 4)


def _rocksdb_entries(unit: Unit, store: Store, entries: Entries) -> tuple[ByteStrings, ByteStrings]:
    """Return keys and values as RocksDB has them: each row after a version byte."""
    if unit.provider_before == "rocksdb":
        found = rocksdb_store.stored(store, entries)
        return _renumbered(found.keys, unit.families.get(store.family or "")), found.values
    fields = store.schema.key
    if not store.prefix_columns:
        return with_version(entries.keys), with_version(entries.values)
    by_offset = [lies_outside(one.type) for one in fields]
    keys = from_arrow(prefixed_keys(entries.keys, len(fields), store.prefix_columns, by_offset))
    return keys, with_version(entries.values)


def _renumbered(keys: ByteStrings, number: int | None) -> ByteStrings:
    """Return keys with the number of their column family, which may differ in other partitions."""
    if number is None or not len(keys) or int(keys.fixed(0, "<u2")[0]) == number:
        return keys
    prefix = pa.scalar(number.to_bytes(2, "little"), pa.binary())
    return from_arrow(pc.binary_join_element_wise(prefix, keys.without_prefix(2).to_arrow(), b""))


def lies_outside(kind: SparkType) -> bool:
    """Return whether the word of a column is an offset and a size."""
    if kind.kind == "decimal":
        return bool(kind.arrow.precision > 18)
    return kind.kind in ("string", "binary", "struct", "array", "map", "variant", "interval")


def with_version(rows: ByteStrings) -> ByteStrings:
    """Return each row after a byte 0, the version of Spark's encoding."""
    joined = pc.binary_join_element_wise(pa.scalar(b"\0", pa.binary()), rows.to_arrow(), b"")
    return from_arrow(joined)


WRITERS: Final = {"hdfs": 4, "rocksdb": 2}
"""Threads that write partitions: most of the time is waiting. Tables take memory."""
Progress = Callable[[str, int, int], None]
"""Called with ``reading`` or ``writing``, how much is done, and of how much: bytes, then
partitions.
"""


class Result(NamedTuple):
    """What was written for one partition of one store."""

    target: Target
    keys: int
    files: int
    size_bytes: int


@dataclass(frozen=True)
class Outcome:
    """What a repartition did."""

    plan: RepartitionPlan
    keys: tuple[npt.NDArray[np.int64], ...]
    """For each unit of the plan, the keys of each new partition."""
    sizes: tuple[npt.NDArray[np.int64], ...]
    """Their bytes, likewise."""
    files: int
    """All files of the copy."""
    size_bytes: int
    """All bytes of the copy."""


class Engine(Protocol):
    """Reads and writes state; nothing may be written before everything is read and verified."""

    def run(
        self, plan: RepartitionPlan, folder: Storage, target: Storage, proven: Callable[[], None], progress: Progress
    ) -> Sequence[Result]:
        """Return a result for every target of the plan; calls ``proven`` before the first write."""


def repartition(
    folder: Storage,
    target: Storage,
    plan: RepartitionPlan,
    *,
    engine: Engine | None = None,
    progress: Progress = lambda *_: None,
) -> Outcome:
    """Write the copy that ``plan`` describes into an empty folder.

    Args:
        folder: the checkpoint; nothing is written there.
        target: an empty or absent folder; ``InvalidInput`` (``STORE_NOT_EMPTY``) for any other.
        plan: of :func:`plan_repartition`.
        engine: who reads and writes state; this process by default.
        progress: told of what is done.

    Raises ``DamagedCheckpoint`` and ``UnsupportedFormat`` before anything is written,
    ``InvalidInput`` for rows of a function that cannot be, with nothing left in the folder (by the
    engine of this process), and ``StorageError`` where the query went on meanwhile, or a storage
    failed.
    """
    check_target(folder, target)

    def proven() -> None:
        check_still(folder, plan)
        begin(target, plan.batch)

    engine = engine or LocalEngine()
    try:
        results = engine.run(plan, folder, target, proven, progress)
    except BaseException as error:
        # After a refusal nothing is written any more, but by tasks of another engine.
        refused = isinstance(error, InvalidInput) and isinstance(engine, LocalEngine)
        folders = [f"{plan.units[one.unit].stores[0].folder(one.partition)}/" for one in plan.targets() if refused]
        withdraw(target, plan.batch, tuple(folders))
        raise
    keys = tuple(np.zeros(unit.targets, np.int64) for unit in plan.units)
    sizes = tuple(np.zeros(unit.targets, np.int64) for unit in plan.units)
    for result in results:
        keys[result.target.unit][result.target.partition] = result.keys
        sizes[result.target.unit][result.target.partition] = result.size_bytes
    check_still(folder, plan)
    files, size = write_files(folder, target, plan.copies, plan.edits)
    if plan.is_edited:
        check_whole(SparkSource(Finished(target, plan.batch), plan.batch + 1), lambda *_: None)
    finish(target, plan.batch)
    return Outcome(
        plan,
        keys,
        sizes,
        files + sum(result.files for result in results),
        size + sum(result.size_bytes for result in results),
    )


def check_still(folder: Storage, plan: RepartitionPlan) -> None:
    """Raise ``StorageError`` if the query has committed a batch since the plan was made."""
    newest = max(batches(folder, "commits"), default=-1)
    if newest != plan.newest:
        raise StorageError(
            f"{folder.url}: the newest batch was {plan.newest} and is {newest} now, so the query is running. Stop it, "
            "then run the command again into an empty folder",
            kind=ErrorKind.HISTORY_UNSTABLE,
        )


@dataclass(frozen=True)
class LocalEngine:
    """Reads one partition at a time in this process, and sets its entries aside by new partition.

    ``TMPDIR`` needs room for the compressed state.
    """

    def run(
        self, plan: RepartitionPlan, folder: Storage, target: Storage, proven: Callable[[], None], progress: Progress
    ) -> list[Result]:
        """Read, prove, then write; see :class:`Engine`."""
        keys: dict[Target, int] = {}
        done, whole = 0, plan.size_bytes
        waiting: Spill[Target] = Spill()
        with waiting:
            for source in plan.sources:
                for piece in deal(folder, source):
                    keys[piece.target] = keys.get(piece.target, 0) + piece.keys
                    waiting.add(piece.target, pa.Table.from_batches([piece.rows]))
                done += source.size_bytes
                progress("reading", done, whole)
            proven()
            targets = list(plan.targets())

            def write(one: Target) -> Result:
                count = keys.get(one, 0)
                written = write_partition(target, plan.units[one.unit], one.partition, waiting.read(one), count)
                return Result(one, count, *written)

            with ThreadPoolExecutor(WRITERS[plan.provider_after], thread_name_prefix="repartition") as pool:
                return list(_counted(pool.map(write, targets), len(targets), progress))


def _counted(results: Iterator[Result], count: int, progress: Progress) -> Iterator[Result]:
    for number, result in enumerate(results, 1):
        progress("writing", number, count)
        yield result
