"""In which steps the rows of a state in two checkpoints are compared, and what need not be read.

Theory of operation. A key group that has the same runs on both sides (``matching``) is left out. If
both sides begin with the same runs, the other layers are above: these determine which keys can
differ. Groups of both kinds are gathered into steps by how much has to be held. A group whose
layers are too large to hold, or a range of groups that share nothing, is read as two streams.

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
from ...manifest import Ints, Mask, integers
from ...model import Mode, SchemaVersion, State
from ...reading import Keys
from ...schema import segment_schema
from ...tables import HELD_BYTES
from .differing import ByKey, ByRow, Comparison
from .matching import Runs, common, cut_side, keyed_runs, row_runs, segment_codes, unmatched
from .sides import Side
from .steps import ByLayers, ByStreams, Step

if TYPE_CHECKING:
    from ...reading import Checkpoint

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
        has_key = self.state.mode in (Mode.KEYED, Mode.PROGRESS) and bool(self.state.row_key)
        comparison: Comparison = ByKey(self.state.row_key, by_group=False) if has_key else ByRow()
        return (_streams(self.old, self.new, comparison, grouped=False),)

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
        return (_streams(sides[0], sides[1], ByRow(), grouped=False),)

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
            if streams:
                sides = _cut(self.old, old.of(mine)), _cut(self.new, new.of(theirs))
                yield _streams(sides[0], sides[1], ByKey(self.state.row_key), grouped=True)
                continue
            shared_side = _cut(self.new, new.of(theirs & shared[1]))
            sides = _cut(self.old, old.of(mine & ~shared[0])), _cut(self.new, new.of(theirs & ~shared[1]))
            keys = Keys(self.state.row_key, self.state.key_columns)
            yield ByLayers(shared_side, sides[0], sides[1], keys, _stored(shared_side, *sides))

    def ranges(self, parts: int) -> Iterator[Step]:
        """Yield steps that compare rows with a key in ranges of key groups, if none are known to be
        equal.
        """
        comparison = ByKey(self.state.row_key)
        if parts < 2:
            yield _streams(self.old, self.new, comparison, grouped=True)
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
            yield _streams(sides[0], sides[1], comparison, grouped=True)


def _streams(old: Side | None, new: Side | None, comparison: Comparison, *, grouped: bool) -> Step:
    return ByStreams(old, new, comparison, grouped, _stored(old, new))


def _stored(*sides: Side | None) -> int:
    return sum(side.stored_bytes for side in sides if side is not None)


def _cut(side: Side | None, runs: Runs) -> Side | None:
    return None if side is None or not len(runs.start) else cut_side(side, runs)


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
