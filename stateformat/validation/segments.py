"""Segments against the handles that name them (SPEC.md sections 4.1, 4.4, 5 and 7.2).

Theory of operation. Handles are gathered by the segment that they name, so a segment is looked at once however many share
it. Quick costs one ranged read per segment that is an object: presence and size come from one listing of the store, the
rest stands in the footer. Full reads every byte twice, once for the digest and once, in batches, for the rows, so that
memory does not grow with the segment. What lies after a broken check is not parsed: damaged bytes are told and left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from ..errors import CheckpointError, ErrorKind, StorageError
from ..graph import Operator, SubtaskSet
from ..manifest import Manifest, handle_rows, integers, row_group_faults, take_rows
from ..model import Mode, Record, State
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
from ..problems import ADVICE_RESTORE, ADVICE_WRITER, Problem
from ..schema import segment_schema
from ..segments import CODECS, ENCODINGS, PARQUET_ERRORS, ROW_GROUPS_MAX
from ..storage import Storage
from .rows import RowsCheck

Level = Literal["quick", "full"]

CHUNK_BYTES: Final = 4 << 20
BATCH_ROWS: Final = 65_536
# A segment up to this size is fetched once and kept, instead of once for its digest and once for its rows.
WHOLE_BYTES_MAX: Final = 16 << 20

_DAMAGED: Final = ErrorKind.DAMAGED_SEGMENT


@dataclass(frozen=True)
class Segment:
    """A segment as the manifest describes it, with all handles that name it (planning columns)."""

    operator: Operator
    state: State
    facts: Mapping[str, Any]
    handles: pa.Table
    inline: pa.Buffer | None

    @property
    def path(self) -> str:
        """Its path, under which it lies unless it is inline."""
        return str(self.facts["path"])

    def describe(self) -> str:
        """The segment and whose rows it holds, for messages."""
        layer = f", layer {self.facts['layer']}" if self.facts["layer"] else ""
        return (
            f"segment {self.path} (state {self.state.name!r} of operator {self.operator.uid!r}, {self._whose()}{layer})"
        )

    def _whose(self) -> str:
        subtasks = {value for value in self.handles["subtask"].to_pylist() if value is not None}
        found = SubtaskSet.of(subtasks)
        return (f"subtask {found}" if len(found) == 1 else f"subtasks {found}") if subtasks else "its coordinator"

    @property
    def subtask(self) -> int | None:
        """The subtask whose rows it holds; None where there are several, or none."""
        found = set(self.handles["subtask"].to_pylist())
        return found.pop() if len(found) == 1 else None


@dataclass
class SegmentResult:
    """What a look at one segment came to."""

    problems: list[Problem]
    bytes: int = 0
    rows: int = 0


def segments_of(record: Record, manifest: Manifest, usable: np.ndarray[Any, Any]) -> tuple[int, Iterator[Segment]]:
    """How many distinct segments there are, and each of them, in the order in which the manifest first names them.

    ``usable`` marks the handles that may be looked at: those with a legal path, of a state and schema that exist.
    """
    named = usable & pc.is_valid(manifest.handles["path"]).to_numpy()
    handles = manifest.handles if named.all() else manifest.handles.filter(pa.array(named))
    codes = integers(pc.dictionary_encode(handles["path"].combine_chunks()).indices)
    bounds = np.concatenate([[0], np.cumsum(np.bincount(codes))]) if len(codes) else np.zeros(1, np.int64)
    # Handles of one segment are neighbours as a rule: it holds rows of one state.
    if (codes[1:] < codes[:-1]).any():
        handles = take_rows(handles, pa.array(np.argsort(codes, kind="stable")))

    def each() -> Iterator[Segment]:
        states: Mapping[tuple[str, str], State] = record.by_state
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            mine = handles.slice(start, stop - start)
            facts = mine.slice(0, 1).to_pylist()[0]
            operator = record.graph.operator(facts["operator"])
            inline = manifest.inline(facts["path"])
            yield Segment(operator, states[facts["operator"], facts["state"]], facts, mine, inline)

    return len(bounds) - 1, each()


def check_segment(
    storage: Storage,
    record: Record,
    segment: Segment,
    *,
    sizes: Mapping[str, int],
    level: Level,
    done: Callable[[int], None],
) -> SegmentResult:
    """Everything that is wrong with one segment. ``sizes``: the objects under ``segments/`` by one listing. Never raises.

    ``done`` is called with bytes, as they are checked, and comes to the size of the segment in all.
    """
    check = _SegmentCheck(storage, record, segment, done)
    try:
        check.run(sizes, level)
    except FileNotFoundError:
        check.tell(ErrorKind.OBJECT_MISSING, "SPEC 2.3", "is not there any more", ADVICE_RESTORE)
    except StorageError as error:
        check.tell(error.kind, "SPEC 2.1", f"could not be read: {error}", "try again; check the storage if it stays so")
    except CheckpointError as error:
        check.tell(error.kind, "SPEC 5", f"could not be checked: {error}")
    finally:
        check.done()
    return check.result


class _SegmentCheck:
    def __init__(self, storage: Storage, record: Record, segment: Segment, done: Callable[[int], None]) -> None:
        self._storage = storage
        self._record = record
        self._segment = segment
        self._whole = segment.inline
        self._pages: Footer
        self._headers_told = False
        self._done, self._left = done, int(segment.facts["size_bytes"])
        self.result = SegmentResult([])

    def done(self, size_bytes: int | None = None) -> None:
        """So many bytes are checked; all that is left, where no number is given."""
        size_bytes = self._left if size_bytes is None else min(size_bytes, self._left)
        if size_bytes:
            self._left -= size_bytes
            self._done(size_bytes)

    def tell(self, kind: ErrorKind, clause: str, what: str, advice: str = ADVICE_WRITER) -> None:
        segment = self._segment
        self.result.problems.append(
            Problem(
                kind,
                clause,
                f"{segment.describe()} {what}",
                advice,
                path=segment.path,
                operator=segment.operator.uid,
                state=segment.state.name,
                subtask=segment.subtask,
            )
        )

    def run(self, sizes: Mapping[str, int], level: Level) -> None:
        facts = self._segment.facts
        if not self._there(sizes):
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

    def _there(self, sizes: Mapping[str, int]) -> bool:
        segment = self._segment
        found = sizes.get(segment.path) if segment.inline is None else segment.inline.size
        if found is None:
            self.tell(ErrorKind.OBJECT_MISSING, "SPEC 2.3", "is not in the store", ADVICE_RESTORE)
            return False
        if found != segment.facts["size_bytes"]:
            what = f"has {found:,} bytes, the manifest says {segment.facts['size_bytes']:,}"
            self.tell(ErrorKind.OBJECT_SIZE_DIFFERS, "SPEC 4.1", what, ADVICE_RESTORE)
            return False
        return True

    def _digest(self) -> bool:
        """The digest of every byte."""
        digest, size = xxhash.xxh3_128(), int(self._segment.facts["size_bytes"])
        if self._whole is not None:
            digest.update(self._whole)
        else:
            for offset in range(0, size, CHUNK_BYTES):
                length = min(CHUNK_BYTES, size - offset)
                digest.update(self._storage.read_range(self._segment.path, offset, length))
                self.done(length // 2)  # The other half when its rows are read.
        self.result.bytes += size
        return self._same_digest(digest.digest(), "digest", "its digest")

    def _same_digest(self, found: bytes, column: str, what: str) -> bool:
        due = self._segment.facts[column]
        if found != due:
            differ = f"is damaged: {what} is {found.hex()}, the manifest says {due.hex()}"
            self.tell(ErrorKind.OBJECT_DIGEST_DIFFERS, "SPEC 7.2", differ, ADVICE_RESTORE)
        return bool(found == due)

    def _footer(self) -> Any:
        """The footer's metadata, verified before it is parsed; None where it cannot be had."""
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
            what = f"does not end in a Parquet footer of {length} bytes, which is what the manifest says"
            self.tell(_DAMAGED, "SPEC 4.1", what)
            return None
        try:
            self._pages = read_footer(tail)
            if self._pages.arrow_schema:
                # Arrow acts on one as soon as it opens the file.
                self.tell(_DAMAGED, "SPEC 3.7", "carries an ARROW:schema, which readers must not act on")
                return None
            rows = sum(group.rows for group in self._pages.row_groups)
            check_size(size, rows, sum(decoded_bytes(self._pages)))
        except LimitFault as error:
            self.tell(ErrorKind.LIMIT_EXCEEDED, "SPEC 7.4", f"is too large for its size: {error}")
            return None
        except ValueError as error:
            self.tell(_DAMAGED, "SPEC 5.6", f"has a footer that is not Parquet's: {error}")
            return None
        try:
            # Metadata is parsed from the end of a file; what lies before it is not looked at.
            return pq.read_metadata(pa.BufferReader(b"PAR1" + tail.to_pybytes()))
        except PARQUET_ERRORS as error:
            self.tell(_DAMAGED, "SPEC 5.6", f"has a footer that is not Parquet's: {error}")
            return None

    def _bound(self, metadata: Any) -> bool:
        """The footer belongs to this place (section 5.6)."""
        stored = {key.decode("utf-8", "replace"): value for key, value in (metadata.metadata or {}).items()}
        record, facts = self._record, self._segment.facts
        due = {
            "version": "1",
            "job_id": record.job_id,
            "operator": facts["operator"],
            "state": facts["state"],
            "schema_id": str(facts["schema_id"]),
        }
        sound = True
        for name, value in due.items():
            found = stored.get(f"stateformat.{name}")
            if found != value.encode("utf-8"):
                shown = "absent" if found is None else repr(found.decode("utf-8", "replace"))
                self.tell(_DAMAGED, "SPEC 5.6", f"says in its footer that {name} is {shown}; here it is {value!r}")
                sound = False
        written = stored.get("stateformat.checkpoint_id", b"").decode("utf-8", "replace")
        number = int(written) if written.isascii() and written.isdigit() and len(written) <= 16 else 0
        if not 1 <= number <= record.checkpoint_id:
            what = f"says in its footer that checkpoint_id is {written!r}; this is checkpoint {record.checkpoint_id}"
            self.tell(_DAMAGED, "SPEC 5.6", what)
            sound = False
        if "stateformat.write_id" not in stored:
            self.tell(_DAMAGED, "SPEC 5.6", "has no write_id in its footer")
        return sound

    def _shaped(self, metadata: Any) -> bool:
        """Columns, sizes and row groups of the footer are those of the manifest."""
        segment, facts = self._segment, self._segment.facts
        sound = True
        due = segment_schema(segment.state, facts["schema_id"], delta=facts["layer"] > 0)
        try:
            schema = metadata.schema.to_arrow_schema()
        except PARQUET_ERRORS as error:
            self.tell(_DAMAGED, "SPEC 5.1", f"has columns that cannot be read: {error}")
            return False
        if not schema.equals(due, check_metadata=False):
            here, there = _one_line(schema), _one_line(due)
            self.tell(_DAMAGED, "SPEC 5.1", f"has the columns [{here}]; schema {facts['schema_id']} says [{there}]")
            # Where only nullability differs the rows can still be judged.
            sound = [(item.name, item.type) for item in schema] == [(item.name, item.type) for item in due]
        counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        for what, here, there in (
            ("rows", metadata.num_rows, facts["segment_rows"]),
            ("rows in its row groups", sum(counts), facts["segment_rows"]),
            (
                "uncompressed bytes",
                sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)),
                facts["uncompressed_bytes"],
            ),
        ):
            if here != there:
                self.tell(_DAMAGED, "SPEC 4.1", f"has {here:,} {what} by its footer; the manifest says {there:,}")
                sound = False
        if len(counts) > ROW_GROUPS_MAX:
            self.tell(_DAMAGED, "SPEC 5.5", f"has {len(counts):,} row groups; at most {ROW_GROUPS_MAX:,} are allowed")
        if segment.state.mode is Mode.KEYED:
            for fault in row_group_faults(counts, handle_rows(segment.handles)):
                self.tell(_DAMAGED, "SPEC 5.5", fault)
        return sound

    def _rows(self, metadata: Any) -> None:
        """Every row, with page checksums."""
        segment, facts = self._segment, self._segment.facts
        rows = RowsCheck(
            segment.operator,
            segment.state,
            facts["schema_id"],
            delta=facts["layer"] > 0,
            checkpoint_id=self._record.checkpoint_id,
            report=self.tell,
        )
        try:
            check_columns(self._pages, CODECS, ENCODINGS)
            for number in range(len(self._pages.row_groups)):
                held = self._bytes_of(number)
                self._check_pages(number, held)
                with pq.ParquetFile(
                    pa.PythonFile(PartialFile(held, facts["size_bytes"]), "r")
                    if self._whole is None
                    else pa.BufferReader(self._whole),
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
            self.tell(ErrorKind.LIMIT_EXCEEDED, "SPEC 7.4", f"is too large for its size: {error}")
            return
        except PARQUET_ERRORS as error:
            self.tell(_DAMAGED, "SPEC 5.5", f"cannot be decoded after row {rows.rows}: {error}", ADVICE_RESTORE)
            return
        finally:
            self.result.rows += rows.rows
        rows.finish(facts["segment_rows"], handle_rows(segment.handles))

    def _check_pages(self, number: int, held: tuple[ByteRange, ...]) -> None:
        """The pages of a row group. Raises ``FooterFault`` for what nobody may decode; a digest vouches for the rest."""
        try:
            check_pages(self._pages, number, number, held, is_verified=False)
        except FooterFault as fault:
            # Readers of slices refuse pages that fail this. Nothing but a digest of the whole protects them.
            check_pages(self._pages, number, number, held)
            if not self._headers_told:
                self._headers_told = True
                self.tell(_DAMAGED, "SPEC 5.5", f"cannot be read by slice: row group {number}: {fault}")

    def _bytes_of(self, number: int) -> tuple[ByteRange, ...]:
        """The bytes of a row group: of a segment that is not in memory no more than these are held at a time."""
        if self._whole is not None:
            return (ByteRange(0, self._whole),)
        end = self._segment.facts["size_bytes"] - self._segment.facts["footer_bytes"]
        path, wanted = self._segment.path, byte_ranges(self._pages, number, number)
        if sum(length for _, length in wanted) > end:
            raise ValueError(f"row group {number} lies beyond the file")
        return tuple(ByteRange(start, self._storage.read_range(path, start, length)) for start, length in wanted)


def _one_line(schema: pa.Schema) -> str:
    return ", ".join(f"{item.name} {item.type}{'' if item.nullable else ' not null'}" for item in schema)
