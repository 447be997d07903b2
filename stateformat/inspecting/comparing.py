"""How the rows of one state in two checkpoints are compared: the steps, and what need not be read.

Theory of operation. A *run* is the rows of one key group in one handle. A key group is a sequence
of runs, lowest layer first. Runs are equal if their segments (by digest) and rows are. The runs
with which both sides begin are common; the rest of each side is above them.

A key group that has the same runs on both sides is left out. If both sides begin with the same
runs, the layers above determine which keys can differ. Groups of both kinds are gathered into steps
by how much has to be held. A group whose layers are too large to hold, or a range of groups that
share nothing, is read as two streams.

If the number of key groups or the key hash differs, groups cannot be compared one by one: the keys
are put into buckets. For rows without keys, those that both sides refer to are left out, and the
others are put into buckets. Everything is read for other systems' checkpoints, which have no
digests, for rows that are reshaped before they are compared, and for states whose expired rows are
left out: rows in segments of both sides may have expired since.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..keys import DEFAULT_KEY_HASH, MAX_PARALLELISM_LIMIT
from ..manifest import Ints, Mask, before, codes_of, integers, lists, one_chunk, spread
from ..model import Field, Mode, SchemaVersion, State
from ..reading import Keys, Overlay, ReadTask, evolve_table
from ..schema import KEY_GROUP, SLICE_SCHEMA, children, segment_schema
from ..tables import HELD_BYTES, Spill, prefetch
from .matching import differences, places_of, surplus

if TYPE_CHECKING:
    from ..reading import Checkpoint


Tables = Generator[pa.Table, None, None]
NOTHING_SEEN: Final = -(2**63)
"""The watermark of an input from which nothing has been seen."""
CHUNK_BYTES: Final = 4 << 20
"""About how many bytes of each side are compared at once."""
_ALL: Final = 1 << 31


class RowShape(Protocol):
    """Converts rows of a state to rows of the state that it becomes. Picklable."""

    @property
    def state(self) -> State: ...

    @property
    def apply(self) -> Callable[[pa.RecordBatch], Iterator[pa.RecordBatch]]: ...


@dataclass(frozen=True)
class Side:
    """What is read of one state of one checkpoint. Picklable."""

    task: ReadTask
    schema: SchemaVersion
    """The columns that are compared, with the same names and types on both sides, in the field ids
    of the state (or of what ``shape`` converts it to).
    """
    layout: object = None
    """Sides with equal layouts have equal key groups for equal keys; None: unknown."""
    shape: RowShape | None = None
    """Applied to the rows before they are compared."""
    edge_by_edge: bool = False
    """For progress: an input from which nothing has been seen is left out (SPEC.md section 6.2)."""
    seen: Callable[[int], None] | None = None
    """Called with the row count of each table that :meth:`rows` yields."""

    @property
    def handles(self) -> pa.Table:
        """The handles that are read."""
        return self.task.handles

    @property
    def stored_bytes(self) -> int:
        """About how many stored bytes are read."""
        return self.task.stored_bytes

    @property
    def hides(self) -> bool:
        """Whether expired rows are left out: then equal bytes need not mean equal rows."""
        return self.task.state.ttl_now_us is not None and self.task.state.ttl is not None

    def of(self, task: ReadTask) -> Side:
        """Return the same for another part of the state."""
        return replace(self, task=task)

    def rows(self) -> Tables:
        """Stream the rows, with ``_key_group`` if they are identified by key."""
        if not self.task.slices.num_rows:
            return
        state = self.task.state
        batches = self.task.batches(as_schema=None if self.shape else self.schema)
        for batch in batches:
            for shaped in (batch,) if self.shape is None else self.shape.apply(batch):
                table = pa.Table.from_batches([shaped])
                if self.shape is not None:
                    table = evolve_table(table, self.shape.state.current, self.schema)
                if state.mode is Mode.IN_FLIGHT and KEY_GROUP.name in table.column_names:
                    table = table.drop_columns([KEY_GROUP.name])
                if self.edge_by_edge:
                    seen = pc.or_(table["_ended"], pc.greater(table["_watermark"], NOTHING_SEEN))
                    table = table.filter(seen)
                if self.seen is not None:
                    self.seen(len(table))
                yield table

    def layers(self) -> list[pa.Table]:
        """Return the layers of keyed state, lowest first."""
        found = self.task.layers(as_schema=self.schema)
        return [pa.Table.from_batches(batches) for _, batches in found]

    def readings(self) -> Mapping[int, object]:
        """How rows are converted to those compared, by schema id: if equal, equal bytes mean equal
        rows.
        """
        state = self.task.state
        return {
            schema.id: tuple(
                (item.name, _reading({old.id: old for old in schema.fields}, item)) for item in self.schema.fields
            )
            for schema in state.schemas
        }


def _reading(known: Mapping[int, Field], item: Field) -> object:
    old = known.get(item.id)
    if old is None:
        return item.type if isinstance(item.type, str) else item.type[0], item.default
    if isinstance(old.type, str) or isinstance(item.type, str):
        return old.name, old.type, item.type
    inner = {one.id: one for one in children(old)}
    return old.name, old.type[0], tuple((one.name, _reading(inner, one)) for one in children(item))


class Step(ABC):
    """A part of a comparison. Picklable."""

    size_bytes: int
    """About how many stored bytes are read."""

    @abstractmethod
    def changes(self) -> Tables:
        """Yield the rows that differ, in the columns in which they are compared, with
        ``_change``.
        """


@dataclass(frozen=True)
class ByStreams(Step):
    """All rows of both sides, compared as two whole streams, or some key groups at a time.

    ``row_key``: what identifies a row; empty for rows without a key. ``grouped``: both sides come
    by ``_key_group``, and equal keys have equal groups.
    """

    old: Side | None
    new: Side | None
    row_key: tuple[str, ...]
    grouped: bool
    size_bytes: int = 0

    def changes(self) -> Tables:
        """See :meth:`Step.changes`; by key group if ``grouped``."""
        with closing(_rows(self.old)) as old, closing(_rows(self.new)) as new:
            parts = _by_groups(old, new) if self.grouped else iter([(old, new, False)])
            large: list[tuple[Iterator[pa.Table], Iterator[pa.Table]]] = []

            def calls() -> Generator[Callable[[], list[pa.Table]], None, None]:
                for mine, theirs, fits in parts:
                    if not fits:
                        large.append((mine, theirs))
                        return
                    yield partial(self._compared, [*mine], [*theirs])

            while True:
                with closing(prefetch(calls(), workers=2, depth=2)) as compared:
                    for tables in compared:
                        yield from tables
                if not large:
                    return
                with closing(differences(*large.pop(), self.row_key, by_group=self.grouped)) as found:
                    yield from found

    def _compared(self, old: list[pa.Table], new: list[pa.Table]) -> list[pa.Table]:
        return list(differences(old, new, self.row_key, by_group=True))


def _by_groups(old: Tables, new: Tables) -> Iterator[tuple[Iterator[pa.Table], Iterator[pa.Table], bool]]:
    """Yield both sides of some key groups at a time, to be read before the next ones, and whether
    they may be held.
    """
    first, second = _ByGroup(old), _ByGroup(new)
    while True:
        first.hold()
        second.hold()
        lowest, complete = min(first.lowest, second.lowest), min(first.complete, second.complete)
        # If not even one group fits, it is compared while it is read.
        last = max(lowest, complete)
        if last == _ALL and not (first.held or second.held):
            return
        yield first.until(last), second.until(last), complete >= lowest


class _ByGroup:
    """A stream by ``_key_group``, read some key groups at a time."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self.held: deque[tuple[pa.Table, Ints]] = deque()
        self.complete = -1
        """The last key group of which all rows are held."""

    @property
    def lowest(self) -> int:
        """The first key group of which rows are held."""
        return int(self.held[0][1][0]) if self.held else _ALL

    def hold(self) -> None:
        """Read on until enough is held."""
        while self.complete < _ALL and sum(table.nbytes for table, _ in self.held) < CHUNK_BYTES:
            self._read()

    def until(self, last: int) -> Iterator[pa.Table]:
        """Remove and yield the rows of key groups up to this one, reading on as far as it goes."""
        while self.held and self.lowest <= last:
            table, groups = self.held.popleft()
            stop = int(np.searchsorted(groups, last, "right"))
            if stop < len(table):
                self.held.appendleft((table.slice(stop), groups[stop:]))
            yield table.slice(0, stop)
            while not self.held and self.complete < _ALL:
                self._read()

    def _read(self) -> None:
        table = next(self._tables, None)
        if table is None:
            self.complete = _ALL
        elif len(table):
            groups = integers(table[KEY_GROUP.name])
            self.held.append((table, groups))
            self.complete = int(groups[-1]) - 1


def _rows(side: Side | None) -> Tables:
    if side is not None:
        yield from side.rows()


@dataclass(frozen=True)
class ByLayers(Step):
    """Key groups that begin with the same layers on both sides.

    Only rows that the layers above name, or whose key they clear, can differ: those layers are
    held, and the common rows are streamed past them. ``common``: the layers that both sides have;
    ``old`` and ``new``: the layers above them on each side.
    """

    common: Side
    old: Side | None
    new: Side | None
    keys: Keys
    size_bytes: int = 0

    def changes(self) -> Tables:
        """See :meth:`Step.changes`."""
        above = [[] if side is None else side.layers() for side in (self.old, self.new)]
        named = Overlay([*above[0], *above[1]], self.keys)
        # A clear may affect any number of rows.
        with Spill[int]() as touched:
            with closing(self.common.rows()) as rows:
                suspects = (table.filter(pa.array(named.may_touch(table))) for table in rows)
                for table in _joined(suspects):
                    touched.add(0, table.filter(pa.array(named.touches(table))))
            both = all(above)
            sides = [
                _standing(touched, Overlay(layers, self.keys) if both else named if layers else None)
                for layers in above
            ]
            yield from differences(sides[0], sides[1], self.keys.row_key, by_group=True)


def _standing(below: Spill[int], above: Overlay | None) -> Iterator[pa.Table]:
    """Yield the rows that remain."""
    for table in _joined(pa.Table.from_batches([batch]) for batch in below.read(0)):
        yield table if above is None else table.filter(pa.array(~above.touches(table)))
    if above is not None:
        yield above.upserts


def _joined(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the rows in tables of some megabytes."""
    held: list[pa.Table] = []
    size_bytes = 0
    for table in tables:
        if len(table):
            held.append(table)
            size_bytes += table.nbytes
        if size_bytes >= CHUNK_BYTES:
            yield pa.concat_tables(held)
            held, size_bytes = [], 0
    if held:
        yield pa.concat_tables(held)


_POSITIONS: Final = 1 << 40
"""More rows than a segment can have."""
_ABOVE_BYTES: Final = HELD_BYTES // 2
"""The size of the layers above in a step, roughly, unless one key group has more."""


def planned(old: Side | None, new: Side | None, state: State, parts: int) -> tuple[Step, ...]:
    """Return the steps, in order: about ``parts`` or more if they can be cut.

    ``state`` says how rows are identified: by its ``row_key`` if it is keyed (or progress, whose
    key is the edge), by all columns otherwise. A side is None if it has no rows.
    """
    if old is None and new is None:
        return ()
    sides = _Sides(old, new, state)
    hides = any(side is not None and side.hides for side in (old, new))
    codes = None if hides else segment_codes(old, new)
    if state.mode is Mode.KEYED and (
        old is None or new is None or (old.layout is not None and old.layout == new.layout)
    ):
        return tuple(sides.ranges(parts) if codes is None else sides.keyed(codes, parts))
    return sides.whole() if codes is None or state.mode is Mode.KEYED else sides.by_row(codes)


def side_of(
    checkpoint: Checkpoint, state: State, schema: SchemaVersion, *, subtask: int | None = None, **more: Any
) -> Side | None:
    """Return what is read of a state of a checkpoint, as ``schema``; None if it has no rows.

    Reads the manifest. ``state`` is as the checkpoint declares it; ``subtask`` is the one whose
    rows are read, instead of all (or of one copy); ``more`` are further fields of the side.
    """
    whole = subtask is None
    task = checkpoint.state(state).task if whole else checkpoint.read(state.operator, state.name, subtask)
    if not task.slices.num_rows:
        return None
    operator = checkpoint.graph.operator(state.operator)
    layout = (operator.max_parallelism, operator.key_hash or DEFAULT_KEY_HASH)
    return Side(task, schema, **{"layout": layout, **more})


class _Groups(NamedTuple):
    """Key groups whose runs differ, ascending."""

    number: Ints
    above: Ints
    """Bytes of the layers that are not common, on both sides."""
    read: Ints
    """Bytes of everything that has to be read."""
    has_common: Mask


@dataclass(frozen=True)
class _Sides:
    """What is read of both sides; None if there are no rows."""

    old: Side | None
    new: Side | None
    state: State

    def handles(self, side: Side | None) -> pa.Table:
        """The handles of a side."""
        some = side or self.new or self.old
        assert some is not None
        return some.handles if side is not None else some.handles.slice(0, 0)

    def whole(self) -> tuple[Step, ...]:
        """Return a step that compares all rows of both sides, in buckets."""
        row_key = self.state.row_key if self.state.mode in (Mode.KEYED, Mode.PROGRESS) else ()
        return (_streams(self.old, self.new, row_key, grouped=False),)

    def by_row(self, codes: tuple[Ints, Ints]) -> tuple[Step, ...]:
        """Return the step that compares rows without a key: those that both sides refer to are left
        out.
        """
        old, new = self.handles(self.old), self.handles(self.new)
        runs = row_runs(old, codes[0], new, codes[1]), row_runs(new, codes[1], old, codes[0])
        left = unmatched(*runs)
        if not (left[0].any() or left[1].any()):
            return ()
        if self.state.mode is Mode.PROGRESS:
            # Its rows are those of all subtasks together.
            return self.whole()
        sides = [_cut(task, one.of(mask)) for task, one, mask in zip((self.old, self.new), runs, left, strict=True)]
        return (_streams(sides[0], sides[1], (), grouped=False),)

    def keyed(self, codes: tuple[Ints, Ints], parts: int) -> Iterator[Step]:
        """Yield the steps that compare rows with a key, by key group."""
        width = _row_width(segment_schema(self.state))
        old = keyed_runs(self.handles(self.old), codes[0], width)
        new = keyed_runs(self.handles(self.new), codes[1], width)
        shared = common(old, new)
        groups = _differing(old, new, shared)
        chosen = np.zeros(int(groups.number.max(initial=0)) + 2, np.bool_)
        chosen[groups.number] = True
        for streams, first, last in _stretches(groups, parts):
            mine, theirs = (_within(runs, first, last, chosen) for runs in (old, new))
            shared_side = None if streams else _cut(self.new, new.of(theirs & shared[1]))
            if shared_side is None:
                sides = _cut(self.old, old.of(mine)), _cut(self.new, new.of(theirs))
                yield _streams(sides[0], sides[1], self.state.row_key, grouped=True)
                continue
            sides = _cut(self.old, old.of(mine & ~shared[0])), _cut(self.new, new.of(theirs & ~shared[1]))
            keys = Keys(self.state.row_key, self.state.key_columns)
            yield ByLayers(shared_side, sides[0], sides[1], keys, _stored(shared_side, *sides))

    def ranges(self, parts: int) -> Iterator[Step]:
        """Yield steps that compare rows with a key in ranges of key groups, if none are known to be
        equal.
        """
        if parts < 2:
            yield _streams(self.old, self.new, self.state.row_key, grouped=True)
            return
        some = self.new or self.old
        assert some is not None
        slices = some.task.slices.sort_by("first_group")
        sizes = np.cumsum(integers(slices["bytes"]))
        share = max(1, int(sizes[-1]) // max(1, parts))
        last = np.flatnonzero(np.diff(sizes // share, append=-1))
        # Layers start over at the first groups.
        ends = [*np.maximum.accumulate(integers(slices["last_group"]))[last[:-1]].tolist(), MAX_PARALLELISM_LIMIT - 1]
        first = 0
        for end in ends:
            sides = _clipped(self.old, first, end), _clipped(self.new, first, end)
            first = end + 1
            yield _streams(sides[0], sides[1], self.state.row_key, grouped=True)


def _streams(old: Side | None, new: Side | None, row_key: tuple[str, ...], *, grouped: bool) -> Step:
    return ByStreams(old, new, row_key, grouped, _stored(old, new))


def _stored(*sides: Side | None) -> int:
    return sum(side.stored_bytes for side in sides if side is not None)


def _clipped(side: Side | None, first: int, last: int) -> Side | None:
    """Return the rows of these key groups."""
    if side is None or first > last:
        return None
    task = side.task.at_groups(np.arange(first, last + 1))
    return side.of(task) if task.slices.num_rows else None


def _within(runs: Runs, first: int, last: int, chosen: Mask) -> Mask:
    """Return the runs of the chosen key groups first … last."""
    mask = np.zeros(len(runs.group), np.bool_)
    low, high = np.searchsorted(runs.group, [first, last + 1])
    mask[low:high] = chosen[runs.group[low:high]]
    return mask


def _differing(old: Runs, new: Runs, shared: tuple[Mask, Mask]) -> _Groups:
    """Return the key groups whose runs differ."""
    count = 1 + int(max(old.group.max(initial=-1), new.group.max(initial=-1)))

    def total(runs: Runs, mask: Mask) -> Ints:
        found: Ints = np.bincount(runs.group[mask], runs.size_bytes[mask], minlength=count).astype(np.int64)
        return found

    above = total(old, ~shared[0]) + total(new, ~shared[1])
    below = total(new, shared[1])
    number = np.flatnonzero(above)
    return _Groups(number, above[number], (above + below)[number], below[number] > 0)


def _stretches(groups: _Groups, parts: int) -> Iterator[tuple[bool, int, int]]:
    """Yield consecutive groups that are compared together: whether as streams, the first and the
    last.
    """
    streams = _as_streams(groups)
    limit = max(1, int(groups.read.sum()) // parts) if parts > 1 else 1 << 62
    numbers, above, read = (column.tolist() for column in (groups.number, groups.above, groups.read))
    start = held = size_bytes = 0
    for at in range(len(numbers)):
        ends = streams[at] != streams[start] or size_bytes + read[at] > limit
        if at > start and (ends or (not streams[at] and held + above[at] > _ABOVE_BYTES)):
            yield streams[start], numbers[start], numbers[at - 1]
            start, held, size_bytes = at, 0, 0
        held, size_bytes = held + above[at], size_bytes + read[at]
    if numbers:
        yield streams[start], numbers[start], numbers[-1]


def _as_streams(groups: _Groups) -> list[bool]:
    """Return which groups are too large to hold, alone or with neighbors that share nothing
    either.
    """
    alone = ~groups.has_common
    stretch = np.cumsum(np.diff(alone, prepend=False))
    sizes = np.bincount(stretch, groups.above)
    found: list[bool] = ((groups.above > HELD_BYTES) | (alone & (sizes[stretch] > HELD_BYTES))).tolist()
    return found


def _row_width(schema: pa.Schema) -> int:
    return sum(item.type.bit_width // 8 if pa.types.is_primitive(item.type) else 16 for item in schema)


class Runs(NamedTuple):
    """Rows of handles of a task; for keyed state by (group, layer, handle)."""

    group: Ints
    """-1 if the rows are not of one key group."""
    handle: Ints
    segment: Ints
    start: Ints
    rows: Ints
    size_bytes: Ints
    """Approximate size in memory."""

    def of(self, mask: Mask) -> Runs:
        """Return some of the runs."""
        return Runs(*(column[mask] for column in self))


def segment_codes(old: Side | None, new: Side | None) -> tuple[Ints, Ints] | None:
    """Return a number per handle, equal for segments with equal bytes that are read in the same
    way.

    None if segments have no digest, or rows are reshaped before they are compared.
    """
    sides = [side for side in (old, new) if side is not None]
    if any(side.shape is not None for side in sides):
        return None
    chunks = [chunk for side in sides for chunk in side.handles["digest"].chunks]
    codes, _ = codes_of(pa.chunked_array(chunks, pa.binary(16)))
    if (codes < 0).any():
        return None
    numbers: dict[object, int] = {}
    readings = []
    for side in sides:
        known = side.readings()
        ids, found = np.unique(integers(side.handles["schema_id"]), return_inverse=True)
        # A handle with an undeclared schema is damage, which reading reports.
        each = [numbers.setdefault(known.get(number, number), len(numbers)) for number in ids.tolist()]
        readings.append(np.array(each, np.int64)[found])
    codes = codes * max(1, len(numbers)) + np.concatenate(readings)
    count = 0 if old is None else len(old.handles)
    return codes[:count], codes[count:]


def keyed_runs(handles: pa.Table, segments: Ints, row_bytes: int) -> Runs:
    """Return the runs of keyed state. ``row_bytes``: how much memory a row takes at least."""
    starts, ends, counts = lists(one_chunk(handles["rows_per_group"]))
    owner, nth = spread(ends - starts)
    place = starts[owner] + nth
    above = before(counts)
    group = integers(handles["first_group"])[owner] + nth
    start = integers(handles["row_start"])[owner] + above[place] - above[starts[owner]]
    sizes = counts[place] * _row_bytes(handles, row_bytes)[owner]
    order = np.lexsort((owner, integers(handles["layer"])[owner], group))
    runs = Runs(group, owner, segments[owner], start, counts[place], sizes)
    return Runs(*(column[order] for column in runs)).of(counts[place][order] > 0)


def _row_bytes(handles: pa.Table, least: int) -> Ints:
    stored = integers(handles["uncompressed_bytes"]) // np.maximum(1, integers(handles["segment_rows"]))
    return np.maximum(stored, least)


def common(old: Runs, new: Runs) -> tuple[Mask, Mask]:
    """Return the runs with which a key group begins on both sides."""
    places = places_of(old.group), places_of(new.group)
    width = 1 + max(int(place.max(initial=0)) for place in places)
    mine, theirs = old.group * width + places[0], new.group * width + places[1]
    at = np.searchsorted(theirs, mine)
    found = at < len(theirs)
    found[found] = theirs[at[found]] == mine[found]
    here = at[found]
    found[found] = (
        (old.segment[found] == new.segment[here])
        & (old.start[found] == new.start[here])
        & (old.rows[found] == new.rows[here])
    )
    # After the first run that differs, nothing is common.
    differing = np.cumsum(~found)
    first = np.arange(len(found)) - places[0]
    shared: Mask = differing - (differing - ~found)[first] == 0
    also = np.zeros(len(new.group), np.bool_)
    also[at[shared]] = True
    return shared, also


def row_runs(handles: pa.Table, segments: Ints, others: pa.Table, other_segments: Ints) -> Runs:
    """Return the rows of handles, cut wherever a handle of either side begins or ends."""
    cuts = []
    for table, codes in ((handles, segments), (others, other_segments)):
        start = codes * _POSITIONS + integers(table["row_start"])
        cuts += [start, start + integers(table["rows"])]
    edges = np.unique(np.concatenate(cuts))
    low, high = np.searchsorted(edges, cuts[0]), np.searchsorted(edges, cuts[1])
    owner, nth = spread(high - low)
    begin = edges[low[owner] + nth]
    rows = edges[low[owner] + nth + 1] - begin
    return Runs(np.full_like(owner, -1), owner, segments[owner], begin % _POSITIONS, rows, rows)


def unmatched(old: Runs, new: Runs) -> tuple[Mask, Mask]:
    """Return the runs that one side has more often than the other."""
    numbers = np.concatenate([runs.segment * _POSITIONS + runs.start for runs in (old, new)])
    codes = np.unique(numbers, return_inverse=True)[1]
    first, second = codes[: len(old.start)], codes[len(old.start) :]
    return surplus(first, second)


def _cut(side: Side | None, runs: Runs) -> Side | None:
    """Return a side of these runs only: owners by key group, each with its runs in order."""
    if side is None or not len(runs.start):
        return None
    return side.of(side.task.with_slices(_slices(side.handles, runs)))


def _slices(handles: pa.Table, runs: Runs) -> pa.Table:
    order = np.lexsort((runs.start, runs.handle))
    group, handle, start, rows = (column[order] for column in (runs.group, runs.handle, runs.start, runs.rows))
    # Consecutive runs in one handle are one slice.
    goes_on = (handle[1:] == handle[:-1]) & (start[1:] == start[:-1] + rows[:-1])
    begins = np.flatnonzero(np.append(True, ~goes_on)[: len(handle)])
    ends = np.append(begins[1:], len(handle)) - 1
    chosen = handle[begins]
    length = start[ends] + rows[ends] - start[begins]
    share = length / np.maximum(1, integers(handles["segment_rows"]))[chosen]
    stored = np.rint(share * integers(handles["size_bytes"])[chosen]).astype(np.int64)
    first, last = (integers(handles[name])[chosen] for name in ("first_group", "last_group"))
    grouped, whole = first >= 0, group[begins] < 0
    first, last = np.where(whole, first, group[begins]), np.where(whole, last, group[ends])
    table = pa.table(
        [
            *(handles[name].take(pa.array(chosen)) for name in ("operator", "state", "mode", "subtask", "layer")),
            pa.array(chosen),
            pa.array(start[begins]),
            pa.array(length),
            pa.array(first.astype(np.int32), mask=~grouped),
            pa.array(last.astype(np.int32), mask=~grouped),
            pa.array(stored),
        ],
        schema=SLICE_SCHEMA,
    )
    return table.take(pa.array(_by_owner(table)))


def _by_owner(slices: pa.Table) -> Ints:
    owner, first = integers(slices["subtask"]) + 1, integers(slices["first_group"])
    lowest = np.full(int(owner.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(lowest, owner, first)
    return np.lexsort((integers(slices["row_start"]), integers(slices["handle"]), owner, lowest[owner]))
