"""Checks segments and their rows against the handles that name them (SPEC.md 4.1 to 7.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from ..errors import CheckpointError, ErrorKind, InvalidInput, InvalidState, StorageError
from ..findings import ADVICE_RESTORE, ADVICE_STORAGE, ADVICE_WRITER, Finding, Level
from ..graph import Operator, SubtaskSet
from ..keys import MAX_PARALLELISM_LIMIT, hash_keys, key_groups, normalize_key_column
from ..manifest import (
    HandleRows,
    Ints,
    Manifest,
    Mask,
    before,
    codes_of,
    group_faults,
    handle_rows,
    integers,
    row_group_faults,
    take_rows,
)
from ..model import CheckpointId, CheckpointKind, Mode, Record, State
from ..parquet import (
    ByteRange,
    Footer,
    FooterFault,
    LimitFault,
    PartialFile,
    byte_ranges,
    check_columns,
    check_pages,
    check_size,
    decoded_bytes,
    read_footer,
)
from ..schema import KEY_GROUP, has_key_groups, segment_schema
from ..segments import CODECS, ENCODINGS, PARQUET_ERRORS, ROW_GROUPS_MAX, RowKeyCheck, is_clustered, normalize_rows
from ..storage import Storage

# ---- rows ----------------------------------------------------------------------------------------
#
# Checks the rows of one segment against its state and its handles (SPEC.md sections 5.1 to 5.4).
#
# Batches come in the order of the file. Each is checked by itself with the functions that writers
# use. Between batches the check keeps the last row's place in the order, the rows per group, and
# the row keys of the incomplete group, so memory does not grow with the segment. Each broken rule
# is reported once per segment, with the first row that breaks it.


Report = Callable[[ErrorKind, str, str], None]
"""Called with the kind, the clause, and the rest of a sentence that begins with the segment."""

_DAMAGED = ErrorKind.DAMAGED_SEGMENT


class GroupRows(NamedTuple):
    """The rows of each group of a segment, from the first with rows to the last."""

    first: int
    counts: npt.NDArray[np.int64]

    def spread(self) -> npt.NDArray[np.int64]:
        """Return the rows of every possible group."""
        found = np.zeros(MAX_PARALLELISM_LIMIT, np.int64)
        found[self.first : self.first + len(self.counts)] = self.counts
        return found


@dataclass
class RowsCheck:
    """Takes the batches of a segment by :meth:`add`, then :meth:`finish`. Never raises."""

    operator: Operator
    state: State
    schema_id: int
    delta: bool
    checkpoint_id: CheckpointId
    report: Report
    subtasks: Mapping[str, int] = field(default_factory=dict)
    """For rows in flight that this very checkpoint caught: how many senders and receivers there
    are, by column.
    """

    def __post_init__(self) -> None:
        self.rows = 0
        self.newest_prepared = 0
        self._reported: set[str] = set()
        self._counts = np.zeros(MAX_PARALLELISM_LIMIT, np.int64)
        self._last: tuple[int, ...] = ()
        self._edges: set[str] = set()
        self._open_channels = np.zeros((4, 0), np.int64)
        keyed = self.state.mode is Mode.KEYED and self.state.key_columns
        self._unique = RowKeyCheck(self.state, "it") if keyed else None

    def _report_once(self, kind: ErrorKind, clause: str, rule: str, what: str) -> None:
        if rule not in self._reported:
            self._reported.add(rule)
            self.report(kind, clause, what)

    @property
    def _is_sorted(self) -> bool:
        return not {"order", "range"} & self._reported

    def add(self, batch: pa.RecordBatch) -> None:
        """Check the next rows, which have the columns of the segment."""
        start, self.rows = self.rows, self.rows + batch.num_rows
        if not batch.num_rows:
            return
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            self._report_once(_DAMAGED, "SPEC 3.7", "values", f"holds values that are not of their type: {error}")
            return
        table = pa.Table.from_batches([batch])
        try:
            normalize_rows(table, self.state, schema_id=self.schema_id, delta=self.delta, where="it")
        except InvalidState as error:
            own = error.kind is ErrorKind.NULL_NOT_ALLOWED or self.state.mode is not Mode.KEYED
            clause = "SPEC 5.1" if own else "SPEC 5.4"
            self._report_once(error.kind, clause, f"conform {error.kind}", f"breaks its declaration: {error}")
        self._keys(table)
        groups = self._groups(table, start)
        if groups is not None:
            self._order(table, groups, start)
            self._counts += np.bincount(np.clip(groups, 0, len(self._counts) - 1), minlength=len(self._counts))
        if self._unique is not None and self._is_sorted:
            self._check_unique(lambda check: check.add(table))
        if groups is not None and self.state.mode is Mode.IN_FLIGHT:
            self._channels(table, groups)
        if self.state.mode is Mode.COMMITTABLES:
            self._committables(table)
        if self.state.mode is Mode.PROGRESS:
            self._progress(table)

    def finish(self, segment_rows: int, handles: HandleRows) -> None:
        """Check the row count, and the rows of each group against the handles."""
        if self._unique is not None and self._is_sorted:
            self._check_unique(RowKeyCheck.finish)
        if self.rows != segment_rows:
            what = f"holds {self.rows:,} rows, the manifest says {segment_rows:,}"
            self._report_once(_DAMAGED, "SPEC 4.1", "count", what)
        elif self._last and self._is_sorted:
            for subtask, what in group_faults(self._counts, handles, whole=has_key_groups(self.state)):
                self._report_once(_DAMAGED, "SPEC 4.3", f"groups {subtask}", what)

    @property
    def group_rows(self) -> GroupRows | None:
        """The rows of each group; None in modes without groups, and if there are no rows."""
        filled = np.flatnonzero(self._counts)
        if not len(filled):
            return None
        first = int(filled[0])
        return GroupRows(first, self._counts[first : filled[-1] + 1].copy())

    # ---- rules -----------------------------------------------------------------------------------

    def _check_unique(self, step: Callable[[RowKeyCheck], None]) -> None:
        assert self._unique is not None
        try:
            step(self._unique)
        except InvalidState as error:
            self._report_once(error.kind, "SPEC 5.3", "unique", f"holds a row key twice: {error}")
            self._unique = None

    def _keys(self, table: pa.Table) -> None:
        for name in (*self.state.key_columns, "_map_key"):
            if name in table.column_names and any(
                normalize_key_column(leaf) is not leaf for leaf in _float_leaves(table[name].combine_chunks())
            ):
                what = f"holds -0.0, or a NaN other than the one allowed, in key column {name!r}"
                self._report_once(_DAMAGED, "SPEC 5.3", f"normal {name}", what)

    def _groups(self, table: pa.Table, start: int) -> npt.NDArray[np.int32] | None:
        """Return the verified group of each row, or None in modes without groups."""
        if not has_key_groups(self.state):
            if self.state.mode is not Mode.IN_FLIGHT:
                return None
            return _ints(table["_sender"])
        stored, ceiling = _ints(table[KEY_GROUP.name]), self.operator.max_parallelism or 1
        if stored.min() < 0 or stored.max() >= ceiling:
            what = f"has {KEY_GROUP.name} {stored.min()} to {stored.max()}; it is from 0 to {ceiling - 1}"
            self._report_once(_DAMAGED, "SPEC 5.3", "range", what)
        try:
            columns = [table[name] for name in self.state.key_columns]
            computed = key_groups(hash_keys(columns, self.operator.key_hash or ""), ceiling)
        except InvalidInput as error:
            self._report_once(error.kind, "SPEC 5.3", "hash", f"cannot have its key groups verified: {error}")
            return stored
        wrong = stored != computed
        if wrong.any():
            row = int(wrong.argmax())
            what = (
                f"has key group {stored[row]} on row {start + row}, whose key hashes to {computed[row]} of {ceiling}"
                f" ({int(wrong.sum())} such rows)"
            )
            self._report_once(_DAMAGED, "SPEC 5.3", "hashed", what)
        return stored

    def _order(self, table: pa.Table, groups: npt.NDArray[np.int32], start: int) -> None:
        columns = [groups]
        if self.state.mode is Mode.IN_FLIGHT:
            columns += [table[name].combine_chunks().to_numpy(zero_copy_only=False) for name in ("_sender", "_seq")]
        first, last = (tuple(int(column[at]) for column in columns) for at in (0, -1))
        if (self._last and first < self._last) or not is_clustered(table, self.state, groups):
            by = "(group, _sender, _seq)" if self.state.mode is Mode.IN_FLIGHT else KEY_GROUP.name
            self._report_once(_DAMAGED, "SPEC 5.2", "order", f"is not sorted by {by}, at or after row {start}")
        self._last = last

    def _committables(self, table: pa.Table) -> None:
        bounds = pc.min_max(table["_checkpoint_id"]).as_py()
        self.newest_prepared = max(self.newest_prepared, bounds["max"] or 0)
        if bounds["max"] is not None and bounds["max"] > self.checkpoint_id:
            what = f"holds committables prepared under {bounds['min']} to {bounds['max']}"
            self._report_once(_DAMAGED, "SPEC 5.1", "prepared", f"{what}; this is checkpoint {self.checkpoint_id}")

    def _channels(self, table: pa.Table, groups: npt.NDArray[np.int32]) -> None:
        """Check that no record of a channel appears twice (section 5.1).

        A repeated record has the same key, so it is in the same group. Rows of one group, sender
        and number are neighbors; the last of them are kept for the next batch.
        """
        for name, count in self.subtasks.items():
            bounds = pc.min_max(table[name]).as_py()
            if count <= bounds["max"] < MAX_PARALLELISM_LIMIT:
                what = f"has {name} {bounds['max']}; the rows were caught by this checkpoint, where it is from 0 to"
                self._report_once(_DAMAGED, "SPEC 5.1", name, f"{what} {count - 1}")
        columns = [groups, *(table[name].combine_chunks().to_numpy() for name in ("_sender", "_seq", "_receiver"))]
        rows = np.stack([column.astype(np.int64) for column in columns])
        rows = np.concatenate([self._open_channels, rows], axis=1)
        rows = rows[:, np.lexsort(rows[::-1])]
        twice = (rows[:, 1:] == rows[:, :-1]).all(axis=0)
        if twice.any():
            _, sender, number, receiver = rows[:, int(twice.argmax())].tolist()
            what = (
                f"holds record {number} of the channel from {sender} to {receiver} twice ({int(twice.sum())} such rows)"
            )
            self._report_once(_DAMAGED, "SPEC 5.1", "channel", what)
        # There are no more receivers than this.
        self._open_channels = rows[:, (rows[:3] == rows[:3, -1:]).all(axis=0)][:, -MAX_PARALLELISM_LIMIT:]

    def _progress(self, table: pa.Table) -> None:
        """Check that each edge has at most one row (section 6.2); the edge may be gone."""
        for edge in table["_edge"].to_pylist():
            if edge in self._edges:
                self._report_once(_DAMAGED, "SPEC 6.2", "edge", f"has the progress of edge {edge!r} twice")
            self._edges.add(edge)


def _float_leaves(array: pa.Array) -> Iterator[pa.Array]:
    """Yield the floats in a key column; nulls become zeros."""
    if pa.types.is_struct(array.type):
        for child in array.flatten():
            yield from _float_leaves(child)
    elif pa.types.is_floating(array.type):
        yield pc.fill_null(array, pa.scalar(0.0, array.type)) if array.null_count else array


def _ints(column: Any) -> npt.NDArray[np.int32]:
    found: npt.NDArray[np.int32] = pc.fill_null(column, -1).to_numpy()
    return found


# ---- segments ------------------------------------------------------------------------------------
#
# Checks segments against the handles that name them (SPEC.md sections 4.1, 4.4, 5 and 7.2).
#
# Handles are grouped by segment, so a segment is checked once however many share it. Quick costs
# one ranged read per segment that is an object: presence and size come from one listing, the rest
# from the footer. Full reads every byte twice, for the digest and for the rows, in bounded memory.
# After a failed check nothing further is parsed.


CHUNK_BYTES: Final = 4 << 20
BATCH_ROWS: Final = 65_536
WHOLE_BYTES_MAX: Final = 16 << 20
"""Up to this size a segment is fetched once for both digest and rows."""

_ADVICE_HASH: Final = (
    "validate again where the hash is known. Where nobody knows it, rows can be read and rescaled all the same; only "
    "that each lies in the key group of its key is not shown"
)


@dataclass(frozen=True)
class Segment:
    """A segment as the manifest describes it."""

    operator: Operator
    state: State
    facts: Mapping[str, Any]
    """The planning columns of the first handle that names it."""
    handles: pa.Table
    """All handles that name it."""
    inline: pa.Buffer | None

    @property
    def path(self) -> str:
        """The path of its object, unless it is inline."""
        return str(self.facts["path"])

    def describe(self) -> str:
        """Name the segment and whose rows it holds."""
        subtasks = SubtaskSet.of({value for value in self.handles["subtask"].to_pylist() if value is not None})
        owner = f"subtask{'s' if len(subtasks) > 1 else ''} {subtasks}" if subtasks else "its coordinator"
        layer = f", layer {self.facts['layer']}" if self.facts["layer"] else ""
        return f"segment {self.path} (state {self.state.name!r} of operator {self.operator.uid!r}, {owner}{layer})"

    @property
    def subtask(self) -> int | None:
        """The subtask whose rows it holds; None for several or none."""
        found = set(self.handles["subtask"].to_pylist())
        return found.pop() if len(found) == 1 else None


@dataclass
class SegmentResult:
    """The problems of one segment, and what was read of it."""

    problems: list[Finding]
    bytes: int = 0
    rows: int = 0
    newest_id: int = 0
    """The greatest checkpoint id that the segment itself names; no older checkpoint may have it."""
    row_groups: tuple[int, ...] = ()
    """The rows of each row group."""
    group_rows: GroupRows | None = None
    """The rows of each key group or sender, where they were counted."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing at all was found."""
        return not self.problems


def segments_of(manifest: Manifest, usable: Mask) -> tuple[Ints, Ints]:
    """Return which handles name segments, sorted by segment, and where those of each begin.

    Segments are in the order of their first handles; the last bound is the number of handles.
    ``usable`` marks the handles that are sound by themselves and whose state and schema exist.
    """
    named = usable & pc.is_valid(manifest.handles["path"]).to_numpy()
    rows = np.flatnonzero(named)
    codes = codes_of(manifest.handles["path"])[0][rows]
    if not named.all():
        # Leave out paths that only unusable handles name.
        codes = integers(pc.dictionary_encode(pa.array(codes)).indices)
    bounds = before(np.bincount(codes)) if len(codes) else np.zeros(1, np.int64)
    # Usually the handles of one segment are neighbors already.
    if (codes[1:] < codes[:-1]).any():
        rows = rows[np.argsort(codes, kind="stable")]
    return rows, bounds


def segment_of(record: Record, manifest: Manifest, rows: Ints, bounds: Ints, number: int) -> Segment:
    """Return one of :func:`segments_of`."""
    own = rows[bounds[number] : bounds[number + 1]]
    first, count = int(own[0]), len(own)
    together = int(own[-1]) - first + 1 == count
    mine = manifest.handles.slice(first, count) if together else take_rows(manifest.handles, pa.array(own))
    facts = mine.slice(0, 1).to_pylist()[0]
    operator, state = record.graph.operator(facts["operator"]), record.state(facts["operator"], facts["state"])
    return Segment(operator, state, facts, mine, manifest.inline(facts["path"]))


def check_segment(
    storage: Storage,
    record: Record,
    segment: Segment,
    *,
    sizes: Mapping[str, int],
    level: Level,
    done: Callable[[int], None],
) -> SegmentResult:
    """Return everything that is wrong with one segment. Never raises.

    ``sizes``: the sizes of all objects under ``segments/``, by path.
    ``done`` is called with numbers of checked bytes that add up to the size of the segment.
    """
    check = _SegmentCheck(storage, record, segment, done)
    try:
        check.run(sizes, level)
    except FileNotFoundError:
        check.report(ErrorKind.OBJECT_MISSING, "SPEC 2.3", "was deleted meanwhile", ADVICE_RESTORE)
    except StorageError as error:
        check.report(error.kind, "SPEC 2.1", f"could not be read: {error}", ADVICE_STORAGE)
    except CheckpointError as error:
        check.report(error.kind, "SPEC 5", f"could not be checked: {error}")
    finally:
        check.done()
    return check.result


def check_other_handles(storage: Storage, record: Record, segment: Segment, known: SegmentResult) -> SegmentResult:
    """Check other handles of a segment that was sound, without reading it again."""
    check = _SegmentCheck(storage, record, segment, lambda _: None)
    check.compare_handles(known)
    return replace(known, problems=check.result.problems, bytes=0, rows=0)


class _SegmentCheck:
    def __init__(self, storage: Storage, record: Record, segment: Segment, done: Callable[[int], None]) -> None:
        self._storage = storage
        self._record = record
        self._segment = segment
        self._whole = segment.inline
        self._pages: Footer
        self._headers_reported = False
        self._done, self._left = done, int(segment.facts["size_bytes"])
        self.result = SegmentResult([])

    def done(self, size_bytes: int | None = None) -> None:
        """Report ``size_bytes`` as checked, or all bytes that are left."""
        size_bytes = self._left if size_bytes is None else min(size_bytes, self._left)
        if size_bytes:
            self._left -= size_bytes
            self._done(size_bytes)

    def report(self, kind: ErrorKind, clause: str, what: str, advice: str = ADVICE_WRITER) -> None:
        segment, message = self._segment, f"{self._segment.describe()} {what}"
        uid, state = segment.operator.uid, segment.state.name
        problem = Finding(kind, clause, message, advice, segment.path, uid, state, segment.subtask)
        if kind is ErrorKind.UNKNOWN_KEY_HASH:
            # Nothing is wrong with it; only someone who knows the hash can check the rest.
            problem = replace(problem, severity="warning", advice=_ADVICE_HASH)
        self.result.problems.append(problem)

    def run(self, sizes: Mapping[str, int], level: Level) -> None:
        facts = self._segment.facts
        if not self._is_stored(sizes):
            return
        if level == "full" and self._segment.inline is None and facts["size_bytes"] <= WHOLE_BYTES_MAX:
            self._whole = self._storage.read_range(self._segment.path, 0, facts["size_bytes"] + 1)
        if (self._whole is not None or level == "full") and not self._digest():
            return
        metadata = self._footer()
        if metadata is None:
            return
        sound = self._bound(metadata) & self._shaped(metadata)
        if level == "full" and sound:
            self._rows(metadata)

    def _is_stored(self, sizes: Mapping[str, int]) -> bool:
        segment = self._segment
        found = sizes.get(segment.path) if segment.inline is None else segment.inline.size
        if found is None:
            self.report(ErrorKind.OBJECT_MISSING, "SPEC 2.3", "is not in the store", ADVICE_RESTORE)
            return False
        if found != segment.facts["size_bytes"]:
            what = f"has {found:,} bytes, the manifest says {segment.facts['size_bytes']:,}"
            self.report(ErrorKind.OBJECT_SIZE_DIFFERS, "SPEC 4.1", what, ADVICE_RESTORE)
            return False
        return True

    def _digest(self) -> bool:
        digest, size = xxhash.xxh3_128(), int(self._segment.facts["size_bytes"])
        if self._whole is not None:
            digest.update(self._whole)
        else:
            for offset in range(0, size, CHUNK_BYTES):
                length = min(CHUNK_BYTES, size - offset)
                digest.update(self._storage.read_range(self._segment.path, offset, length))
                self.done(length // 2)  # The other half is reported when its rows are read.
        self.result.bytes += size
        return self._same_digest(digest.digest(), "digest", "its digest")

    def _same_digest(self, found: bytes, column: str, what: str) -> bool:
        expected = self._segment.facts[column]
        if found != expected:
            differ = f"is damaged: {what} is {found.hex()}, the manifest says {expected.hex()}"
            self.report(ErrorKind.OBJECT_DIGEST_DIFFERS, "SPEC 7.2", differ, ADVICE_RESTORE)
        return bool(found == expected)

    def _footer(self) -> Any:
        """Return the footer's metadata, verified before it is parsed, or None."""
        facts = self._segment.facts
        size, length = facts["size_bytes"], facts["footer_bytes"]
        if self._whole is not None:
            tail = self._whole.slice(size - length, length)
        else:
            tail = self._storage.read_range(self._segment.path, size - length, length)
            self.result.bytes += length
        if not self._same_digest(xxhash.xxh3_128_digest(tail), "footer_digest", "the digest of its footer"):
            return None
        end = tail.slice(length - 8, 8).to_pybytes()
        if end[4:] != b"PAR1" or int.from_bytes(end[:4], "little") != length - 8:
            what = f"does not end in a Parquet footer of {length} bytes, as the manifest says"
            self.report(_DAMAGED, "SPEC 4.1", what)
            return None
        try:
            self._pages = read_footer(tail)
            if self._pages.arrow_schema:
                # Arrow would act on it as soon as it opens the file.
                self.report(_DAMAGED, "SPEC 3.7", "carries an ARROW:schema, which readers must not act on")
                return None
            rows = sum(group.rows for group in self._pages.row_groups)
            check_size(size, rows, sum(decoded_bytes(self._pages)))
            # Arrow reads metadata from the end of a file, and nothing before it.
            return pq.read_metadata(pa.BufferReader(b"PAR1" + tail.to_pybytes()))
        except LimitFault as error:
            self.report(ErrorKind.LIMIT_EXCEEDED, "SPEC 7.4", f"is too large for its size: {error}")
        except (ValueError, *PARQUET_ERRORS) as error:
            self.report(_DAMAGED, "SPEC 5.6", f"has a footer that is not Parquet's: {error}")
        return None

    def _bound(self, metadata: Any) -> bool:
        """Check that the footer belongs to this place (section 5.6)."""
        stored = {key.decode("utf-8", "replace"): value for key, value in (metadata.metadata or {}).items()}
        record, facts = self._record, self._segment.facts
        expected = {"version": "1", "job_id": record.job_id, "schema_id": str(facts["schema_id"])}
        expected |= {"operator": facts["operator"], "state": facts["state"]}
        sound = True
        for name, value in expected.items():
            found = stored.get(f"stateformat.{name}")
            if found != value.encode("utf-8"):
                shown = "absent" if found is None else repr(found.decode("utf-8", "replace"))
                self.report(_DAMAGED, "SPEC 5.6", f"says in its footer that {name} is {shown}; here it is {value!r}")
                sound = False
        written = stored.get("stateformat.checkpoint_id", b"").decode("utf-8", "replace")
        number = int(written) if written.isascii() and written.isdigit() and len(written) <= 16 else 0
        self.result.newest_id = number
        if not 1 <= number <= record.checkpoint_id:
            what = f"says in its footer that checkpoint_id is {written!r}; this is checkpoint {record.checkpoint_id}"
            self.report(_DAMAGED, "SPEC 5.6", what)
            sound = False
        if "stateformat.write_id" not in stored:
            self.report(_DAMAGED, "SPEC 5.6", "has no write_id in its footer")
        return sound

    def _shaped(self, metadata: Any) -> bool:
        segment, facts = self._segment, self._segment.facts
        sound = True
        expected = segment_schema(segment.state, facts["schema_id"], delta=facts["layer"] > 0)
        try:
            schema = metadata.schema.to_arrow_schema()
        except PARQUET_ERRORS as error:
            self.report(_DAMAGED, "SPEC 5.1", f"has columns that cannot be read: {error}")
            return False
        if not schema.equals(expected, check_metadata=False):
            here, there = _one_line(schema), _one_line(expected)
            self.report(_DAMAGED, "SPEC 5.1", f"has the columns [{here}]; schema {facts['schema_id']} says [{there}]")
            # Rows whose columns differ only in nullability can still be checked.
            sound = [(item.name, item.type) for item in schema] == [(item.name, item.type) for item in expected]
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        counts = [group.num_rows for group in groups]
        size_bytes = sum(group.total_byte_size for group in groups)
        for what, here, there in (
            ("rows", metadata.num_rows, facts["segment_rows"]),
            ("rows in its row groups", sum(counts), facts["segment_rows"]),
            ("uncompressed bytes", size_bytes, facts["uncompressed_bytes"]),
        ):
            if here != there:
                self.report(_DAMAGED, "SPEC 4.1", f"has {here:,} {what} by its footer; the manifest says {there:,}")
                sound = False
        if len(counts) > ROW_GROUPS_MAX:
            self.report(_DAMAGED, "SPEC 5.5", f"has {len(counts):,} row groups; at most {ROW_GROUPS_MAX:,} are allowed")
        self.result.row_groups = tuple(counts)
        self._row_groups()
        return sound

    def _row_groups(self) -> None:
        if self._segment.state.mode is Mode.KEYED:
            for fault in row_group_faults(self.result.row_groups, handle_rows(self._segment.handles)):
                self.report(_DAMAGED, "SPEC 5.5", fault)

    def compare_handles(self, known: SegmentResult) -> None:
        """Compare the handles with what was found in the segment before."""
        self.result.row_groups = known.row_groups
        self._row_groups()
        if known.group_rows is not None:
            whole = has_key_groups(self._segment.state)
            for _, what in group_faults(known.group_rows.spread(), handle_rows(self._segment.handles), whole=whole):
                self.report(_DAMAGED, "SPEC 4.3", what)

    def _rows(self, metadata: Any) -> None:
        segment, facts = self._segment, self._segment.facts
        rows = RowsCheck(
            segment.operator,
            segment.state,
            facts["schema_id"],
            delta=facts["layer"] > 0,
            checkpoint_id=self._record.checkpoint_id,
            report=self.report,
            subtasks=self._channel_ends(),
        )
        try:
            check_columns(self._pages, CODECS, ENCODINGS)
            for number in range(len(self._pages.row_groups)):
                held = self._bytes_of(number)
                self._check_pages(number, held)
                source = pa.PythonFile(PartialFile(held, facts["size_bytes"]), "r")
                with pq.ParquetFile(
                    source if self._whole is None else pa.BufferReader(self._whole),
                    metadata=metadata,
                    page_checksum_verification=True,
                    arrow_extensions_enabled=False,
                    pre_buffer=False,
                ) as file:
                    for batch in file.iter_batches(BATCH_ROWS, row_groups=[number], use_threads=False):
                        rows.add(batch)
                self.done(int(facts["size_bytes"]) // (2 * len(self._pages.row_groups)))
        except (FileNotFoundError, StorageError):
            raise
        except LimitFault as error:
            self.report(ErrorKind.LIMIT_EXCEEDED, "SPEC 7.4", f"is too large for its size: {error}")
            return
        except PARQUET_ERRORS as error:
            self.report(_DAMAGED, "SPEC 5.5", f"cannot be decoded after row {rows.rows}: {error}", ADVICE_RESTORE)
            return
        finally:
            self.result.rows += rows.rows
        rows.finish(facts["segment_rows"], handle_rows(segment.handles))
        self.result.newest_id = max(self.result.newest_id, rows.newest_prepared)
        self.result.group_rows = rows.group_rows

    def _channel_ends(self) -> Mapping[str, int]:
        """Return how many senders and receivers rows in flight have, if a run caught them for this
        checkpoint: only rescales and rewrites leave other ones (section 5.1).
        """
        record, state = self._record, self._segment.state
        edge = record.graph.by_edge.get(state.edge or "")
        own = record.kind is CheckpointKind.CHECKPOINT and self.result.newest_id == record.checkpoint_id
        if edge is None or not own:
            return {}
        return {
            "_sender": record.graph.operator(edge.source).parallelism,
            "_receiver": record.graph.operator(edge.target).parallelism,
        }

    def _check_pages(self, number: int, held: tuple[ByteRange, ...]) -> None:
        """Check the pages of a row group; raise ``FooterFault`` if they are unsafe to decode."""
        try:
            check_pages(self._pages, number, number, held, is_verified=False)
        except FooterFault as fault:
            # These pages are safe only because the digest of the file is right: slices cannot be
            # read separately.
            check_pages(self._pages, number, number, held)
            if not self._headers_reported:
                self._headers_reported = True
                self.report(_DAMAGED, "SPEC 5.5", f"cannot be read by slice: row group {number}: {fault}")

    def _bytes_of(self, number: int) -> tuple[ByteRange, ...]:
        if self._whole is not None:
            return (ByteRange(0, self._whole),)
        end = self._segment.facts["size_bytes"] - self._segment.facts["footer_bytes"]
        path, wanted = self._segment.path, byte_ranges(self._pages, number, number)
        if sum(length for _, length in wanted) > end:
            raise ValueError(f"row group {number} lies beyond the file")
        return tuple(ByteRange(start, self._storage.read_range(path, start, length)) for start, length in wanted)


def _one_line(schema: pa.Schema) -> str:
    return ", ".join(f"{item.name} {item.type}{'' if item.nullable else ' not null'}" for item in schema)
