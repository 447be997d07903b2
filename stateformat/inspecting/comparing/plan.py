"""In which steps the rows of a state in two checkpoints are compared, and what need not be read.

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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from ...keys import DEFAULT_KEY_HASH, MAX_PARALLELISM_LIMIT
from ...manifest import Ints, Mask, before, codes_of, integers, lists, one_chunk, spread
from ...model import Mode, SchemaVersion, State
from ...reading import Keys
from ...schema import SLICE_SCHEMA, segment_schema
from ...tables import HELD_BYTES
from .rows import places_of, surplus
from .steps import ByLayers, ByStreams, Side, Step

if TYPE_CHECKING:
    from ...reading import Checkpoint

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
