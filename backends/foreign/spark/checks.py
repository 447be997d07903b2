"""Everything that can be wrong with a checkpoint of Structured Streaming, each finding with its
place.

Spark itself notices little of it: it starts on swapped partitions, and its reader ignores a missing
last partition.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import CheckpointError, ErrorKind, UnsupportedFormat
from stateformat.findings import Finding, Severity
from stateformat.graph import SubtaskSet
from stateformat.storage import ObjectInfo, Storage

from ..advice import SPARK, advice_for
from ..framing import DAMAGED_ADVICE
from ..limits import read_whole
from ..source import Level, Part, Progress
from .hdfs_store import chain_names
from .logs import STRICT, batches, begun_logs, check_source_logs, is_number, read_offsets
from .schemas import SCHEMA_ADVICE
from .source import SparkSource
from .states import partitions_of
from .stores import CLAUSE, HDFS_PROVIDER, Listing, Store

_ADVICE_COPY: Final = advice_for(SPARK, "damage")
_ADVICE_PARTITIONS: Final = (
    "do not start the query on it: Spark reports no error, and its results are wrong. Put the partitions' files "
    "back from a copy"
)
_ADVICE_DELTAS: Final = (
    "the deltas that the snapshot stands for are all there: `ckpt repair QUERY --to COPY` writes a copy without it"
)
_ADVICE_CRC: Final = "remove the .crc file if the file beside it is the right one; Spark refuses to read it as it is"
_CRC_CHUNK: Final = 512


_JOIN_COUNTS: Final = ("keyToNumValues", "keyWithIndexToValue")
_JoinCounts: TypeAlias = "dict[tuple[str, str, int], dict[str, int]]"
"""Rows of a side of a join in a partition: the stored count, and the actual number."""


def check_source(source: SparkSource, level: Level, progress: Progress) -> Iterator[Finding]:
    """Yield what is wrong; ``quick`` checks logs, names and sizes, ``full`` also every byte."""
    for note in source.notes:
        if note.kind == "refused":
            operator, _, state = note.subject.partition("/")
            advice = f"`ckpt import` leaves it out with --drop {note.subject}, if the rest is worth something without"
            yield Finding(ErrorKind.UNSUPPORTED_FEATURE, CLAUSE, note.message, advice, operator=operator, state=state)
    for (uid, name), store in source.stores.items():
        if not store.schema.known:
            yield _problem(
                ErrorKind.UNSUPPORTED_FEATURE,
                f"Spark before 3.1 did not write which columns {uid}/{name} has: its files are read, and its keys are "
                "not compared with their partition",
                SCHEMA_ADVICE,
                severity="warning",
                operator=uid,
            )
    yield from _logs(source, level)
    yield from _source_logs(source)
    yield from _partitions(source)
    yield from _gone(source)
    found: dict[Part, Sequence[ObjectInfo]] = {}
    broken: dict[tuple[str, str, str], list[tuple[Part, CheckpointError]]] = {}
    for part in source.parts:
        try:
            found[part] = source.files(part)
        except CheckpointError as error:
            name = str(error.details.get("path", "")).rpartition("/")[2]
            broken.setdefault((part.operator, part.state, name), []).append((part, error))
            continue
        for item in found[part]:
            if not item.size_bytes:
                yield _problem(
                    ErrorKind.DAMAGED_SEGMENT,
                    f"{item.path} is empty; no file of Spark's is",
                    _ADVICE_COPY,
                    item.path,
                    part,
                )
    for same in broken.values():
        yield _of_errors(same)
    yield from _stale_sums(source, [item for files in found.values() for item in files], level)
    wrong: set[str] = set()
    for part, problem in _file_problems(source, found, level):
        yield problem
        wrong.add(_folder(source, part))
    found = {part: files for part, files in found.items() if _folder(source, part) not in wrong}
    if level == "full":
        total = sum(item.size_bytes for files in found.values() for item in files)
        done = 0
        joins: _JoinCounts = {}
        for part, files in found.items():
            yield from _content(source, part, joins)
            done += sum(item.size_bytes for item in files)
            progress(done, total)
        yield from _joins(source, joins)


def _source_logs(source: SparkSource) -> Iterator[Finding]:
    """Yield whether a source has lost a log, of this batch or of the next one that has begun."""
    logs = [source.offsets]
    with suppress(CheckpointError):  # `_logs` says what is wrong with the next one's offsets
        logs = [*begun_logs(source.folder, source.offsets)]
    there = {item.path for item in source.folder.list("sources/")}
    try:
        for one in logs:
            check_source_logs(one, there)
    except CheckpointError as error:
        yield _problem(error.kind, str(error).removesuffix(DAMAGED_ADVICE), _ADVICE_COPY, error.details["path"])


def _folder(source: SparkSource, part: Part) -> str:
    return source.stores[part.operator, part.state].folder(part.subtask or 0)


def _file_problems(
    source: SparkSource, found: Mapping[Part, Sequence[ObjectInfo]], level: Level
) -> Iterator[tuple[Part, Finding]]:
    """Yield what a provider's reader finds wrong with its files, once for each folder."""
    seen: set[str] = set()
    for part, files in found.items():
        folder = _folder(source, part)
        if folder not in seen:
            seen.add(folder)
            store = source.stores[part.operator, part.state]
            arguments = (source.folder, store, part.subtask or 0, files, source.listing, level)
            for error in source.reader.problems(*arguments):
                yield part, _of_error(error, part)


def _problem(
    kind: ErrorKind,
    message: str,
    advice: str,
    path: str = "",
    part: Part | None = None,
    severity: Severity = "error",
    operator: str = "",
) -> Finding:
    if part is None:
        return Finding(kind, CLAUSE, message, advice, path, operator, severity=severity)
    return Finding(kind, CLAUSE, message, advice, path, part.operator, part.state, part.subtask, severity)


def _of_error(error: CheckpointError, part: Part | None) -> Finding:
    message = str(error).removesuffix(DAMAGED_ADVICE)
    return _problem(error.kind, message, _ADVICE_COPY, str(error.details.get("path", "")), part)


def _of_errors(same: Sequence[tuple[Part, CheckpointError]]) -> Finding:
    """Return one finding for a file that is missing in many partitions."""
    first = _of_error(same[0][1], same[0][0])
    if len(same) == 1:
        return first
    partitions = SubtaskSet.of(part.subtask or 0 for part, _ in same)
    message = f"{first.message}; the same in {len(same)} partitions, {partitions}"
    return replace(first, message=message, subtask=None)


def _gone(source: SparkSource) -> Iterator[Finding]:
    """Compare the operators that have a folder with those that the query must have."""
    there = {info.id for info in source.operators}
    gone = sorted({*range(max(there, default=-1) + 1), *source.commit.stateful} - there)
    for number in gone:
        message = f"the query has a stateful operator {number}, and state/{number} is missing"
        yield _problem(ErrorKind.OBJECT_MISSING, message, _ADVICE_COPY, f"state/{number}")
    if not there and not gone:
        yield _problem(
            ErrorKind.OBJECT_MISSING,
            "there is no state/: the query has no stateful operator, or its state was removed; its logs do not say "
            "which",
            "if it aggregates, joins, deduplicates or keeps state of its own, put state/ back from a copy: Spark fails "
            "without it",
            "state/",
            severity="warning",
        )


def _logs(source: SparkSource, level: Level) -> Iterator[Finding]:
    begun = batches(source.folder, "offsets")
    newest, last = max(begun), source.batches[-1]
    if newest == last + 1:
        yield _problem(
            ErrorKind.STATE_NOT_ALLOWED,
            f"batch {newest} has begun and has no commit: Spark runs it again, from the state of batch {last}",
            f"nothing, if the query goes on; what batch {newest} wrote to its sink is written again",
            f"offsets/{newest}",
            severity="warning",
        )
    elif newest > last + 1:
        yield _problem(
            ErrorKind.OBJECT_MISSING,
            f"batches up to {newest} have begun, and the newest commit is that of {last}: commits/{last + 1} and later "
            "ones are missing",
            _ADVICE_COPY,
            f"commits/{last + 1}",
        )
    elif newest < last:
        yield _problem(
            ErrorKind.OBJECT_MISSING,
            f"batch {last} has a commit, and the newest offset log is that of {newest}",
            _ADVICE_COPY,
            f"offsets/{last}",
        )
    # The query restarts from the newest offsets and those before them; files for an older batch may
    # have been removed.
    if source.batch - 1 in begun:
        try:
            read_offsets(source.folder, source.batch - 1)
        except CheckpointError as error:
            yield _of_error(error, None)
    elif source.batch == last == newest > 0:
        yield _problem(
            ErrorKind.OBJECT_MISSING,
            f"offsets/{last - 1} is missing: Spark does not restart without the batch before its newest",
            _ADVICE_COPY,
            f"offsets/{last - 1}",
        )
    strict = source.offsets.conf.get(STRICT, "false") == "true"
    known = any(store.schema.known for store in source.stores.values())
    # In full every key is compared with its partition.
    if known and not strict and level == "quick":
        yield _problem(
            ErrorKind.UNSUPPORTED_FEATURE,
            "the query began before Spark 3.3 (useStrictDistribution is not true): its keys may be dealt by a part of "
            "their columns",
            "check it with --level full, which compares every key with its partition",
            severity="warning",
        )


def _partitions(source: SparkSource) -> Iterator[Finding]:
    wanted = source.offsets.partitions
    for operator in source.operators:
        for info in operator.stores:
            if info.partitions != wanted and operator.path is not None:
                yield _problem(
                    ErrorKind.INVALID_PARALLELISM,
                    f"store {info.name!r} of {operator.uid} has {info.partitions} partitions by {operator.path}, and "
                    f"{wanted} by {source.offsets.path}",
                    "the offset log is what Spark goes by; a repartition by Spark 4.3 leaves the other number behind",
                    operator.path,
                    operator=operator.uid,
                    # Spark's own repartitioning does this too, and does not support the default
                    # store.
                    severity="error" if source.provider == HDFS_PROVIDER else "warning",
                )
        live = max((s.partitions for (uid, _), s in source.stores.items() if uid == operator.uid), default=wanted)
        there = _partition_folders(source.listing, operator.id)
        left = sorted(number for number in there if number >= live)
        if left:
            yield _problem(
                ErrorKind.INVALID_PARALLELISM,
                f"{operator.uid} has {live} live partitions, and folders of {len(left)} more (the first is {left[0]})",
                "they may be what a repartitioning left; remove them if the number of partitions is right",
                f"state/{operator.id}/{left[0]}",
                operator=operator.uid,
                severity="warning",
            )
        gone = [number for number in range(live) if number not in there]
        if gone:
            yield _problem(
                ErrorKind.OBJECT_MISSING,
                f"{operator.uid} has {live} partitions, and {len(gone)} have no folder (the first is {gone[0]})",
                _ADVICE_COPY,
                f"state/{operator.id}/{gone[0]}",
                operator=operator.uid,
            )


def _partition_folders(listing: Listing, operator: int) -> set[int]:
    start = f"state/{operator}/"
    names = (path.removeprefix(start).partition("/")[0] for path in listing.folders if path.startswith(start))
    return {int(name) for name in names if is_number(name)}


def _stale_sums(source: SparkSource, files: Sequence[ObjectInfo], level: Level) -> Iterator[Finding]:
    """Compare Hadoop's ``.name.crc`` files, which are beside every file on local storage."""
    for item in files:
        folder, _, name = item.path.rpartition("/")
        path = f"{folder}/.{name}.crc"
        size = source.listing.files(folder).get(f".{name}.crc")
        if size is None:
            continue
        wanted = 8 + 4 * -(-item.size_bytes // _CRC_CHUNK)
        what = ""
        if size != wanted:
            what = f"it has {size} bytes, and {wanted} would belong to the {item.size_bytes} of {name}"
        elif level == "full":
            what = _compare_sums(source.folder, item, ObjectInfo(path, size))
        if what:
            message = f"{path} is not of the file beside it: {what}"
            yield _problem(ErrorKind.OBJECT_DIGEST_DIFFERS, message, _ADVICE_CRC, path, severity="warning")


def _compare_sums(folder: Storage, item: ObjectInfo, sums: ObjectInfo) -> str:
    try:
        stored, data = (memoryview(read_whole(folder, one.path, size=one.size_bytes)) for one in (sums, item))
    except (FileNotFoundError, UnsupportedFormat):
        return ""  # Whoever reads the file says so.
    if bytes(stored[:8]) != b"crc\x00" + _CRC_CHUNK.to_bytes(4, "big"):
        return "it does not begin as Hadoop's checksums do"
    found = [zlib.crc32(data[at : at + _CRC_CHUNK]) for at in range(0, len(data), _CRC_CHUNK)]
    wanted = np.frombuffer(stored[8:], ">u4")
    if len(wanted) != len(found):
        return "it has another number of checksums"
    differ = np.flatnonzero(wanted != np.array(found, np.uint32))
    return f"the checksum of byte {int(differ[0]) * _CRC_CHUNK} and on differs" if len(differ) else ""


def _content(source: SparkSource, part: Part, joins: _JoinCounts) -> Iterator[Finding]:
    """Decode a part completely, and compare each key's partition with its hash.

    Counts in ``joins`` how many rows of a side of a join there are, and how many there should be.
    """
    side, _, kind = part.state.partition("-")
    key = (part.operator, part.state)
    shape, store = source.shapes[key], source.stores[key]
    counted = kind in _JOIN_COUNTS and store.schema.known
    counts = joins.setdefault((part.operator, side, part.subtask or 0), {}) if counted else {}
    away: dict[int, int] = {}
    rows, first = 0, ""
    try:
        for _, columns in source.columns(part):
            dealt = shape.key_columns(columns)
            rows += len(columns[0])
            if counted:
                number = len(columns[0]) if kind == _JOIN_COUNTS[1] else pc.sum(columns[-1]).as_py() or 0
                counts[kind] = counts.get(kind, 0) + number
            if not dealt or not store.schema.known:
                continue
            first = first or _misplaced(dealt, store, part, away)
        removed = source.entries(part).removed
        if removed is not None and len(removed) and store.schema.known:
            # Of files that only remove, no row is there that could be in the wrong place.
            dealt = shape.key_columns(source.reader.key_columns(store, removed, part.path or ""))
            rows += len(removed)
            first = first or (_misplaced(dealt, store, part, away) if dealt else "")
    except CheckpointError as error:
        yield replace(_of_error(error, part), advice=_advice(source, store, str(error.details.get("path", ""))))
        return
    if away:
        yield _misdealt(part, away, rows, first)


def _misplaced(dealt: Sequence[pa.Array], store: Store, part: Part, away: dict[int, int]) -> str:
    """Count keys by the other partitions that they belong to; return the first such key."""
    groups = partitions_of(dealt, store.partitions)
    wrong = groups != part.subtask
    if not wrong.any():
        return ""
    numbers, many = np.unique(groups[wrong], return_counts=True)
    for number, count in zip(numbers.tolist(), many.tolist(), strict=True):
        away[number] = away.get(number, 0) + count
    at = int(np.argmax(wrong))
    return str([column[at].as_py() for column in dealt])[:200]


def _advice(source: SparkSource, store: Store, path: str) -> str:
    """Return what to do about a damaged file: without a snapshot its deltas may be enough."""
    folder, _, name = path.rpartition("/")
    if not name.endswith(".snapshot"):
        return _ADVICE_COPY
    try:
        chain_names([other for other in source.listing.files(folder) if other != name], store.version, folder)
    except CheckpointError:
        return _ADVICE_COPY
    return _ADVICE_DELTAS


def _joins(source: SparkSource, joins: _JoinCounts) -> Iterator[Finding]:
    """Compare how many rows a join has with the counts that it stores."""
    for (operator, side, partition), counts in joins.items():
        counted, there = (counts.get(kind, 0) for kind in _JOIN_COUNTS)
        # State format 4 of joins has other stores, and no such count.
        both = all((operator, f"{side}-{kind}") in source.stores for kind in _JOIN_COUNTS)
        if both and counted != there:
            state = f"{side}-{_JOIN_COUNTS[1]}"
            yield Finding(
                ErrorKind.STATE_MISSING,
                CLAUSE,
                f"the {side} side of {operator} counts {counted} rows in partition {partition}, and has {there}",
                "the two stores are not of one batch, or a file is another's: put the partition back from a copy",
                operator=operator,
                state=state,
                subtask=partition,
                severity="warning",
            )


def _misdealt(part: Part, away: Mapping[int, int], rows: int, first: str) -> Finding:
    count = sum(away.values())
    if len(away) == 1 and count == rows:
        where = f"all belong into partition {next(iter(away))}, whose files these seem to be"
    else:
        where = f"they belong into {len(away)} other partitions"
    return _problem(
        ErrorKind.DAMAGED_SEGMENT,
        f"{count} of {rows} keys in partition {part.subtask} of {part.operator}/{part.state} are not where their hash "
        f"says: {where}. The first is {first}",
        _ADVICE_PARTITIONS,
        part.path or "",
        part,
    )
