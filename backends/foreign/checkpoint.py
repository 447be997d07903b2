"""A foreign checkpoint as users see it: whatever reads stateformat's checkpoints reads it.

A part of a source is a handle. If the metadata does not give the number of rows, they are counted
when ``handles`` is first needed: planning and import need it, reading does not, ``ckpt inspect``
has it for small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from threading import Lock
from typing import Any, Final, NoReturn, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import CheckpointError, DamagedCheckpoint, ErrorKind, InvalidInput, UnsupportedFormat
from stateformat.findings import Counts, Finding, Report, ordered
from stateformat.formats import Outside, only_read
from stateformat.graph import JobGraph
from stateformat.manifest import handles_table
from stateformat.model import Handle, Mode, Record, SchemaVersion, State, Totals
from stateformat.reading import EVERYTHING, Checkpoint, Groups, ReadTask, Wanted, evolve_table, split_between_owners
from stateformat.redistribution import RestorePlan, warning
from stateformat.schema import PLANNING_COLUMNS, SLICE_SCHEMA, has_key_groups, segment_schema
from stateformat.storage import Storage
from stateformat.tables import rebatch

from .limits import STATE_BYTES, memory_named, too_large
from .source import ForeignSource, Level, Note, Opened, Part, Progress, unreadable

_SLICES: Final = pa.schema([field.with_nullable(True) if field.name == "rows" else field for field in SLICE_SCHEMA])
"""Of a state whose rows nobody has counted yet, ``rows`` is null."""
COUNTED_BYTES: Final = 16 << 20
"""With more bytes of state than these, rows are counted only where they must be."""
COUNTED_PARTS: Final = 64
"""With more parts than these on a storage that is far away, too: each takes requests."""
_ADVICE: Final = "take another checkpoint or savepoint, or a copy of this one"


@dataclass(frozen=True)
class ForeignFormat:
    """How one foreign format is recognised and opened. ``backends.foreign`` has the list."""

    system: str
    """As in a sentence: "a Flink savepoint"."""
    recognises: Callable[[Storage], bool]
    """Returns whether a folder has what this format reads, with a few small requests."""
    sources: Callable[[Storage, Outside | None], Opened]
    """Returns all checkpoints that can be opened."""
    source: Callable[[Storage, int | None, Outside | None], ForeignSource]
    """Opens one, by default the newest. Raises ``NotFound`` for an unknown id."""
    check: Callable[[Any, Level, Progress], Iterable[Finding]]
    """Finds all that is wrong with a source; ``quick`` reads metadata, names and sizes, ``full``
    everything.
    """

    def found(self, folder: Storage, outside: Outside | None) -> ForeignFolder | None:
        """The entry point of ``stateformat.formats``."""
        return ForeignFolder(self, folder, outside) if self.recognises(folder) else None


@dataclass(frozen=True)
class ForeignFolder:
    """The checkpoints in one folder. Implements ``stateformat.formats.ForeignCheckpoints``."""

    form: ForeignFormat
    folder: Storage
    outside: Outside | None

    @property
    def system(self) -> str:
        return self.form.system

    def history(self) -> tuple[list[Record], dict[int, CheckpointError]]:
        with memory_named(self.folder.url):
            opened = self.form.sources(self.folder, self.outside)
            if not opened.sources:
                record_of(self._source(None))  # the reason, where the newest one's record has it
                raise DamagedCheckpoint(
                    f"no checkpoint in {self.folder.url}, {self.system}, can be opened; "
                    f"`ckpt validate {self.folder.url}` says why"
                )
            return [record_of(source) for source in opened.sources], opened.damaged

    def open(self, checkpoint_id: int | None = None) -> ForeignCheckpoint:
        with memory_named(self.folder.url):
            return ForeignCheckpoint(self.folder, self._source(checkpoint_id), self.system)

    def validate(self, checkpoint_id: int | None, level: Level, progress: Callable[[int, int], None] | None) -> Report:
        seen, findings = _Seen(progress), list[Finding]()
        chosen, counts = None, Counts()
        try:
            with memory_named(self.folder.url):
                source = self._source(checkpoint_id)
                for problem in self.form.check(source, level, seen):
                    findings.append(problem)
                chosen = source.record.checkpoint_id
                counts = Counts(records=1, handles=len(source.parts), files=source.used_files(), bytes=seen.bytes)
        except (DamagedCheckpoint, UnsupportedFormat, InvalidInput) as error:
            # What it is based on cannot be read; the check may have reported that, and more.
            ended = error.kind is ErrorKind.LIMIT_EXCEEDED
            if ended or not any(problem.severity == "error" for problem in findings):
                path = str(error.details.get("path", ""))
                findings.append(Finding(error.kind, self.system, str(error), advice=_ADVICE, path=path))
        return Report(self.folder.url, chosen, level, ordered(findings), counts)

    def _source(self, checkpoint_id: int | None) -> ForeignSource:
        return self.form.source(self.folder, checkpoint_id, self.outside)


def record_of(source: ForeignSource) -> Record:
    """Return the record of a source; its totals have no rows if nobody counted them."""
    return _with_totals(source.record, source.parts)


def _with_totals(record: Record, parts: Sequence[Part]) -> Record:
    known = [part.rows for part in parts if part.rows is not None]
    rows = sum(known) if len(known) == len(parts) else None
    paths = {part.path for part in parts}
    stored = sum(part.size_bytes for part in parts)
    if stored > STATE_BYTES:
        raise too_large("the checkpoint", "the files of its states, by the sizes that are given,", stored, STATE_BYTES)
    return replace(record, totals=Totals(handles=len(parts), rows=rows, segments=len(paths), bytes=stored))


class _Seen:
    """Passes progress on, and remembers how many bytes were checked."""

    def __init__(self, progress: Callable[[int, int], None] | None) -> None:
        self._progress = progress
        self.bytes = 0

    def __call__(self, done: int, total: int) -> None:
        self.bytes = max(self.bytes, done)
        if self._progress is not None:
            self._progress(done, total)


class ForeignCheckpoint(Checkpoint):
    """A checkpoint over a :class:`ForeignSource`. Thread-safe and picklable; it only reads.

    ``record`` and ``notes``, by default the source's, may lack states: nothing is read of those.
    """

    def __init__(
        self,
        folder: Storage,
        source: ForeignSource,
        system: str,
        record: Record | None = None,
        notes: Sequence[Note] | None = None,
    ) -> None:
        self.parts = source.parts
        if record is not None:
            self.parts = [part for part in self.parts if (part.operator, part.state) in record.by_state]
        super().__init__(folder, _with_totals(record or source.record, self.parts))
        self.source = source
        self.system: str = system
        self.query = folder.url if source.goes_on_from_copies else ""
        self.notes: tuple[Note, ...] = tuple(source.notes if notes is None else notes)
        self._counting = Lock()
        self._handles: pa.Table | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ForeignCheckpoint, (self.storage, self.source, self.system, self.record, self.notes)

    def __repr__(self) -> str:
        return f"ForeignCheckpoint({self.storage.url}@{self.id}, {self.system})"

    def plan_restore(
        self, topology: JobGraph, *, states: Sequence[State] = (), drop: Collection[str] = (), to_show: bool = False
    ) -> RestorePlan:
        """See ``Checkpoint.plan_restore``; the plan warns of what cannot be read."""
        plan = super().plan_restore(topology, states=states, drop=drop, to_show=to_show)
        unread = [
            warning(ErrorKind.STATE_NOT_READ, note.operator(self.graph), unreadable(note.subject, note.message))
            for note in self.notes
            if note.kind == "refused"
        ]
        return replace(plan, warnings=(*plan.warnings, *unread))

    @property
    def handles(self) -> pa.Table:
        """All parts as handles, with exact rows: reads data files on first use."""
        with self._counting:
            if self._handles is None:
                with memory_named(self.storage.url):
                    counted = handles_table(self._counted(part) for part in self.parts)
                self._handles = counted.select(PLANNING_COLUMNS)
            return self._handles

    @property
    def outline(self) -> pa.Table:
        """The handles without reading a data file; rows that nobody has counted are null."""
        return self._outlined(self.parts)

    @property
    def counted(self) -> pa.Table:
        """``handles`` where the data files have at most :data:`COUNTED_BYTES`, are few or near, and
        can be read, else ``outline``.
        """
        is_near = self.storage.reads_at_once == 1
        if self.record.totals.bytes <= COUNTED_BYTES and (is_near or len(self.parts) <= COUNTED_PARTS):
            with suppress(CheckpointError):
                return self.handles
        return self.outline

    def _outlined(self, parts: Sequence[Part]) -> pa.Table:
        known = pa.array([part.rows for part in parts], pa.int64())
        handles = handles_table(self._handle(part, part.rows) for part in parts).select(PLANNING_COLUMNS)
        for name in ("rows", "segment_rows"):
            number = handles.schema.get_field_index(name)
            handles = handles.set_column(number, pa.field(name, pa.int64()), known)
        return handles

    def read(self, operator: str, state: str, subtask: int | None = None) -> ReadTask:
        """See ``Checkpoint.read``; nothing is counted first, so rows of ``slices`` may be null."""
        operator = self.operator_uid(operator)
        declared = self.record.state(operator, state)
        parts = [
            part
            for part in self.parts
            if (part.operator, part.state) == (operator, state) and subtask in (None, part.subtask)
        ]
        rows = [
            {
                "operator": operator, "state": state, "mode": declared.mode, "subtask": part.subtask, "layer": 0,
                "handle": number, "row_start": 0, "rows": part.rows,
                "first_group": part.first_group, "last_group": part.last_group, "bytes": part.size_bytes,
            }
            for number, part in enumerate(parts)
        ]  # fmt: skip
        return self._foreign_task(declared, parts, pa.Table.from_pylist(rows, _SLICES))

    def task_of(self, state: State, slices: pa.Table) -> ReadTask:
        """See ``Checkpoint.task_of``."""
        numbers = pc.dictionary_encode(slices["handle"]).combine_chunks()
        column = slices.schema.get_field_index("handle")
        slices = slices.set_column(column, "handle", numbers.indices.cast(pa.int64()))
        return self._foreign_task(state, [self.parts[number] for number in numbers.dictionary.to_pylist()], slices)

    def _foreign_task(self, state: State, parts: Sequence[Part], slices: pa.Table) -> ForeignReadTask:
        handles, record = self._outlined(parts), self.record_for(state)
        return ForeignReadTask(self.storage, record, handles, slices, self.source, tuple(parts))

    def _counted(self, part: Part) -> Handle:
        found = self.source.group_rows(part)
        if isinstance(found, int):
            return self._handle(part, found)
        present = np.flatnonzero(found)
        if part.first_group is None or not len(present):
            return self._handle(part, 0)
        first, last = int(present[0]), int(present[-1])
        return self._handle(part, int(found.sum()))._replace(
            first_group=part.first_group + first,
            last_group=part.first_group + last,
            rows_per_group=found[first : last + 1].tolist(),
        )

    def _handle(self, part: Part, rows: int | None) -> Handle:
        """Return a part as a handle; one that nobody has counted has no number of rows yet."""
        state = self.record.state(part.operator, part.state)
        has_rows = bool(part.size_bytes if rows is None else rows)
        stored = part.size_bytes if has_rows else 0
        return Handle(
            operator=part.operator,
            state=part.state,
            mode=state.mode,
            subtask=part.subtask,
            layer=0,
            edge=None,
            schema_id=state.current.id,
            # Parts in one file, or in the metadata, are distinguished by what they are.
            path=f"{part.path or 'inline'}#{_escaped(part.operator)}/{part.state}/{part.subtask}" if has_rows else None,
            rows=rows or 0,
            segment_rows=rows or 0,
            size_bytes=stored,
            uncompressed_bytes=stored,
        )

    def of_store(self, why: str) -> NoReturn:
        """Refused: no checkpoint of a store can refer to files of another system."""
        raise InvalidInput(only_read(self.storage.url, self.system, why), url=self.storage.url)


@dataclass(frozen=True, repr=False)
class ForeignReadTask(ReadTask):
    """Slices of one state of a foreign checkpoint. Picklable."""

    source: ForeignSource
    parts: tuple[Part, ...]
    """By the number that ``slices`` have as ``handle``."""

    def with_slices(self, slices: pa.Table) -> Self:
        """See ``ReadTask.with_slices``."""
        return replace(self, slices=slices)

    def at_groups(self, groups: Groups) -> ForeignReadTask:
        """See ``ReadTask.at_groups``; how many rows a key group has is not known."""
        chosen = [
            {**row, "rows": None, "first_group": first, "last_group": last}
            for row in self.slices.to_pylist()
            for first, last in _runs(groups, row["first_group"], row["last_group"])
            if row["rows"] != 0
        ]
        return self.with_slices(pa.Table.from_pylist(chosen, _SLICES))

    def split(self, parts: int) -> Sequence[ForeignReadTask]:
        """See ``ReadTask.split``, but splits between the parts of the source: none is read in
        pieces.
        """
        if self.state.mode in (Mode.PROGRESS, Mode.BROADCAST) or parts < 2:
            return [self]
        tables = split_between_owners(self.slices, parts)
        return [self] if len(tables) < 2 else [self.with_slices(slices) for slices in tables]

    def reader(self, as_schema: SchemaVersion | None, wanted: Wanted = EVERYTHING) -> _ForeignReader:
        """See ``ReadTask.reader``."""
        return _ForeignReader(self, as_schema, wanted)

    def missing(self, path: str) -> Exception:
        """See ``ReadTask.missing``."""
        return DamagedCheckpoint(
            f"{path} is missing from {self.storage.url}; `ckpt validate {self.storage.url}` lists everything that is "
            "wrong",
            kind=ErrorKind.OBJECT_MISSING,
            path=path,
        )


class _ForeignReader:
    """Reads the slices of a task, as ``reading.scan.SliceReader`` does those of segments."""

    def __init__(self, task: ForeignReadTask, as_schema: SchemaVersion | None, wanted: Wanted) -> None:
        self._task = task
        self._wanted = wanted
        self._target = as_schema or task.state.current
        self._schema = segment_schema(replace(task.state, schemas=(self._target,)))
        self.schema: pa.Schema = wanted.schema_of(self._schema)

    def batches(self, batch_rows: int = 131_072) -> Iterator[pa.RecordBatch]:
        """Stream the rows, as ``ReadTask.batches`` says."""
        if batch_rows < 1:
            raise InvalidInput(f"batch_rows is {batch_rows}; it must be at least 1")
        with memory_named(self._task.storage.url):
            for batch in rebatch(map(self._wanted.rows, self._tables()), self._schema, batch_rows):
                yield self._wanted.of(batch)

    def layers(self) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
        """Stream the one layer that a foreign state has."""
        if self._task.state.mode is not Mode.KEYED:
            raise InvalidInput(
                f"state {self._task.state.name!r} is {self._task.state.mode}; only keyed state has layers"
            )
        yield 0, self.batches()

    def _tables(self) -> Iterator[pa.Table]:
        state = self._task.state
        slices = [row for row in self._task.slices.to_pylist() if row["rows"] != 0]
        if has_key_groups(state):
            # Owners come in their order; the rows of each come by key group.
            for _, owned in groupby(slices, key=lambda row: row["subtask"]):
                for row in sorted(owned, key=lambda row: row["first_group"]):
                    yield from _named(state, self._keyed(row))
            return
        for row in slices:
            yield from _named(state, self._cut(row))

    def _keyed(self, row: Mapping[str, Any]) -> Iterator[pa.Table]:
        part = self._task.parts[row["handle"]]
        read = 0
        for batch in self._task.source.read(part, row["first_group"], row["last_group"]):
            read += batch.num_rows
            yield self._evolved(batch)
        if row["rows"] not in (None, read):
            raise self._changed(part, row["rows"], read)

    def _cut(self, row: Mapping[str, Any]) -> Iterator[pa.Table]:
        part, skipped, left = self._task.parts[row["handle"]], row["row_start"], row["rows"]
        for batch in self._task.source.read(part):
            ahead = min(skipped, batch.num_rows)
            chosen = batch.slice(ahead, left)
            skipped, left = skipped - ahead, None if left is None else left - chosen.num_rows
            yield self._evolved(chosen)
        if left:
            raise self._changed(part, row["rows"], row["rows"] - left)

    def _evolved(self, batch: pa.RecordBatch) -> pa.Table:
        return evolve_table(pa.Table.from_batches([batch]), self._task.state.current, self._target)

    def _changed(self, part: Part, counted: int, read: int) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            f"state {part.state!r} of {part.operator!r}, subtask {part.subtask}, had {counted} rows when it was "
            f"counted, and {read} when it was read; did its files change meanwhile? Open the checkpoint again",
            path=part.path or "",
        )


def _runs(groups: Groups, first: int | None, last: int | None) -> Iterator[tuple[int | None, int | None]]:
    """Yield runs of the groups in first … last, or these two if no groups are known."""
    if first is None or last is None:
        yield first, last
        return
    mine = groups[(groups >= first) & (groups <= last)]
    for run in np.split(mine, np.flatnonzero(np.diff(mine) > 1) + 1) if len(mine) else ():
        yield int(run[0]), int(run[-1])


def _escaped(uid: str) -> str:
    """A uid without slash, so that the name of its state cannot be mistaken for a part of it."""
    return uid.replace("%", "%25").replace("/", "%2F")


def _named(state: State, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield the tables; an error for what cannot be decoded names its state, in the form for
    `--drop`.
    """
    try:
        yield from tables
    except UnsupportedFormat as error:
        message = unreadable(f"{state.operator}/{state.name}", str(error))
        raise UnsupportedFormat(message, kind=error.kind, **error.details) from error
