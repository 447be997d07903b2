"""Handles and slices as numpy arrays: what the rules work on.

A plan for a million handles must not loop over them. :func:`read_handles` turns the manifest into
columns, every rule is a function from :class:`Handles` and :class:`States` to :class:`Slices`, and
:func:`assemble` makes the table of all slices. States are in byte order of (operator, name), so a
state's number is also its rank. No rule looks beyond one operator, so :func:`blocks` hands out some
operators at a time, and :func:`read_part` their columns, which fit the processor's cache.

Null is -1 in every integer array here. In slices the subtask -1 is :data:`EVERY`: each new subtask
reads a slice of ``union`` or ``progress``, and the driver one of ``coordinator`` or
``committables``. So a union state of p old and q new subtasks costs p slices, not p * q.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import DamagedCheckpoint, ErrorKind
from stateformat.graph import brief
from stateformat.manifest import Ints, Mask, integers, one_chunk, state_runs
from stateformat.model import Mode, State
from stateformat.schema import SLICE_SCHEMA

Block: TypeAlias = tuple[range, tuple[int, int]]
"""The numbers of the states of some whole operators, and where their handles begin and end."""
EVERY: Final = -1
"""The subtask of a slice that belongs to no single subtask."""
_NONE = np.empty(0, dtype=np.int64)
_NUMBERS: Final = ("subtask", "layer", "row_start", "rows", "first_group", "last_group")
_BLOCK_ROWS: Final = 16_384


@dataclass(frozen=True, slots=True, repr=False)
class States:
    """The states of a record, one entry each, in byte order of (operator, name)."""

    operator: Ints
    """Numbers operators in byte order of their uids."""
    parallelism: Ints
    """The operator's new parallelism; 0 keeps the state out of every rule."""
    max_parallelism: Ints
    """The operator's saved max parallelism, which made the key groups."""
    settled: Mask
    """The parallelism stays and every subtask runs, so each subtask can keep its own state."""
    undisturbed: Mask
    """Settled, and so is everything upstream over point-to-point edges (see ``modes``)."""

    def __repr__(self) -> str:
        return brief(self, f"{len(self.operator):,} states")


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The rows per group of all handles in a row, in the chunks of the manifest, without a copy.

    A position counts groups from the first handle on. The groups of one handle lie in one chunk.
    Positions given to the methods ascend.
    """

    chunks: tuple[Ints, ...]
    bases: Ints
    """The positions at which chunks begin, then the end."""

    def sums(self, start: Ints, stop: Ints) -> Ints:
        """Sum the groups start … stop - 1 of each range; ranges are disjoint and not empty."""
        found = np.empty(len(start), dtype=np.int64)
        for values, base, these in self._by_chunk(start):
            edges = np.empty(2 * (these.stop - these.start), dtype=np.int64)
            edges[::2], edges[1::2] = start[these] - base, stop[these] - base
            if edges[-1] == len(values):
                edges = edges[:-1]
            found[these] = np.add.reduceat(values, edges)[::2]
        return found

    def at(self, position: Ints) -> Ints:
        """Return the rows of single groups."""
        found = np.empty(len(position), dtype=np.int64)
        for values, base, these in self._by_chunk(position):
            found[these] = values[position[these] - base]
        return found

    def held(self, position: Ints, step: int) -> Ints:
        """Return the next group with rows, behind each position (step 1) or before it (step -1)."""
        found = np.empty(len(position), dtype=np.int64)
        for values, base, these in self._by_chunk(position):
            held = np.flatnonzero(values)
            at = np.searchsorted(held, position[these] - base)
            found[these] = held[at if step > 0 else at - 1] + base
        return found

    def between(self, start: int, stop: int) -> GroupRows:
        """Return the groups at these positions alone, at the same positions."""
        cut = np.clip(self.bases, start, stop)
        first, last = (cut - self.bases)[:-1].tolist(), (cut[1:] - self.bases[:-1]).tolist()
        chunks = tuple(values[i:j] for values, i, j in zip(self.chunks, first, last, strict=True))
        return GroupRows(chunks, cut)

    def _by_chunk(self, position: Ints) -> Iterator[tuple[Ints, int, slice]]:
        borders = np.searchsorted(position, self.bases).tolist()
        for values, base, first, last in zip(self.chunks, self.bases.tolist(), borders, borders[1:], strict=False):
            if last > first:
                yield values, base, slice(first, last)


@dataclass(frozen=True, slots=True)
class Handles:
    """Manifest rows in manifest order.

    The rows per group of a handle are in ``group_rows`` from position ``group_start`` on. All
    handles of a manifest have small numbers as int32, which takes half of the memory. Rules work
    on parts, in which everything is int64.
    """

    number: Ints
    """The manifest row."""
    state: Ints
    """An index into :class:`States`."""
    subtask: Ints
    layer: Ints
    row_start: Ints
    rows: Ints
    first_group: Ints
    last_group: Ints
    group_start: Ints
    group_rows: GroupRows

    def __len__(self) -> int:
        return len(self.number)

    def where(self, chosen: Mask | slice) -> Handles:
        """Return the handles that a mask or slice selects; they share all of ``group_rows``."""
        whole = not isinstance(chosen, slice) and self.number.dtype == np.int64 and bool(chosen.all())
        return self if whole else self._chosen(chosen, self.group_rows)

    def part(self, start: int, stop: int) -> Handles:
        """Return the handles ``start`` … ``stop - 1`` of a manifest with their groups."""
        bounds = [int(self.group_start[at] if at < len(self) else self.group_rows.bases[-1]) for at in (start, stop)]
        return self._chosen(slice(start, stop), self.group_rows.between(*bounds))

    def _chosen(self, chosen: Mask | slice, group_rows: GroupRows) -> Handles:
        columns = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "group_rows"}
        picked = {name: column[chosen].astype(np.int64, copy=False) for name, column in columns.items()}
        return Handles(**picked, group_rows=group_rows)


@dataclass(frozen=True, slots=True)
class Slices:
    """Parts of handles with the new subtask, in the order in which it reads them."""

    handle: Ints
    """The manifest row."""
    state: Ints
    subtask: Ints
    layer: Ints
    row_start: Ints
    rows: Ints
    first_group: Ints
    last_group: Ints

    def __len__(self) -> int:
        return len(self.handle)

    @classmethod
    def none(cls) -> Slices:
        """Return no slices."""
        return cls(*[_NONE] * len(fields(cls)))

    @classmethod
    def whole(cls, handles: Handles, subtask: Ints | int) -> Slices:
        """Return each handle with rows as one slice; ``subtask``: one number or one per handle."""
        chosen = np.flatnonzero(handles.rows > 0)
        return cls.part(handles, chosen, np.full(len(chosen), subtask) if isinstance(subtask, int) else subtask[chosen])

    @classmethod
    def part(cls, handles: Handles, chosen: Ints, subtask: Ints, **columns: Ints) -> Slices:
        """Return slices of the handles at the positions ``chosen``, which may repeat.

        ``subtask`` and ``columns`` have one entry per slice. Columns that are not given are the
        handle's.
        """
        picked = {
            "handle": handles.number[chosen],
            "state": handles.state[chosen],
            "subtask": subtask,
            "layer": handles.layer[chosen],
        }
        for name in ("row_start", "rows", "first_group", "last_group"):
            picked[name] = columns[name] if name in columns else getattr(handles, name)[chosen]
        return cls(**picked)

    @classmethod
    def concat(cls, parts: Sequence[Slices]) -> Slices:
        """Return the slices of all parts in a row."""
        parts = [part for part in parts if len(part)] or [cls.none()]
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(cls)))

    def take(self, chosen: Ints | Mask) -> Slices:
        """Return the slices at these positions, or those that a mask selects."""
        return Slices(*(getattr(self, item.name)[chosen] for item in fields(self)))

    def ordered(self) -> Slices:
        """Sort by (state, subtask with :data:`EVERY` first, layer), stably."""
        if not len(self):
            return self
        layers = int(self.layer.max()) + 1
        subtasks = int(self.subtask.max()) + 2
        key = (self.state * subtasks + self.subtask + 1) * layers + self.layer
        if bool((key[1:] >= key[:-1]).all()):
            return self
        return self.take(np.argsort(key, kind="stable"))


def run_starts(*columns: Ints) -> Mask:
    """Return the mask of entries that differ from the entry before them in any column."""
    found = np.ones(len(columns[0]), dtype=np.bool_)
    found[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return found


def read_handles(table: pa.Table, states: Sequence[State]) -> Handles:
    """Return the planning columns of a manifest as arrays.

    ``states`` are the record's, in byte order of (operator, name). Raises ``DamagedCheckpoint``,
    the writer's fault, for unknown or unsorted states, and for rows whose groups are missing or
    wrong.
    """
    return _read(table, states, state_numbers(table, states), 0)


def read_part(table: pa.Table, states: Sequence[State], numbers: Ints, bounds: tuple[int, int]) -> Handles:
    """Return one of :func:`blocks` of a manifest, as :func:`read_handles` would.

    ``numbers`` are the :func:`state_numbers` of the whole manifest.
    """
    start, stop = bounds
    found = _read(table.slice(start, stop - start), states, numbers[start:stop], start)
    return found.part(0, len(found))


def _read(table: pa.Table, states: Sequence[State], state: Ints, first_row: int) -> Handles:
    numbers = {name: _narrow(table[name]) for name in _NUMBERS}
    first_group, rows = numbers["first_group"], numbers["rows"]
    grouped = np.array([state.mode in (Mode.KEYED, Mode.IN_FLIGHT) for state in states], dtype=np.bool_)
    bare = np.flatnonzero((rows > 0) & (first_group < 0) & (grouped[state] if len(state) else False))
    if len(bare):
        raise damaged(first_row + int(bare[0]), "has rows, but no groups, which its mode demands")
    group_start, group_rows = _groups(table, first_group, numbers["last_group"], first_row)
    row = np.arange(first_row, first_row + table.num_rows, dtype=np.int32)
    return Handles(row, state, **numbers, group_start=group_start, group_rows=group_rows)


def _narrow(column: pa.ChunkedArray) -> Any:
    """Return an integer column in its own type, with nulls as -1. Copies nothing if there are no
    nulls.
    """
    filled = pc.fill_null(column, -1) if column.null_count else column
    return one_chunk(filled).to_numpy(zero_copy_only=False)


def damaged(row: int, what: str) -> DamagedCheckpoint:
    """Return the error for a manifest row that contradicts itself, which ``what`` describes."""
    return DamagedCheckpoint(
        f"manifest row {row} {what}; `ckpt validate` lists everything that is wrong",
        kind=ErrorKind.DAMAGED_MANIFEST,
        row=row,
    )


def _groups(table: pa.Table, first_group: Ints, last_group: Ints, first_row: int) -> tuple[Ints, GroupRows]:
    counts = np.where(first_group >= 0, last_group - first_group + 1, 0)
    starts, chunks, bases, row = [], [], [0], 0
    for lists in table["rows_per_group"].chunks:
        offsets = lists.offsets.to_numpy().astype(np.int64)
        wrong = np.flatnonzero(offsets[1:] - offsets[:-1] != counts[row : row + len(lists)])
        if len(wrong):
            row += int(wrong[0])
            found = offsets[wrong[0] + 1] - offsets[wrong[0]]
            raise damaged(
                first_row + row, f"has groups {first_group[row]} to {last_group[row]}, but the rows of {found} groups"
            )
        row += len(lists)
        values = lists.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
        starts.append(offsets[:-1] - offsets[0] + bases[-1])
        chunks.append(values)
        bases.append(bases[-1] + len(values))
    return np.concatenate([_NONE, *starts]), GroupRows(tuple(chunks), np.array(bases, dtype=np.int64))


def state_numbers(table: pa.Table, states: Sequence[State]) -> Ints:
    """Return the number of each handle's state. Handles are sorted, so states are runs.

    Raises ``DamagedCheckpoint`` for unknown or unsorted states.
    """
    runs = list(state_runs(table))
    sizes = np.array([stop - start for _, start, stop in runs], dtype=np.int64)
    ranks: dict[tuple[str, str], int] = {(state.operator, state.name): rank for rank, state in enumerate(states)}
    numbers: list[int] = []
    for (operator, state), _, _ in runs:
        rank = ranks.get((operator, state), -1)
        if rank < 0 or (numbers and rank <= numbers[-1]):
            wrong = "which the record does not declare" if rank < 0 else "out of order"
            raise DamagedCheckpoint(
                f"the manifest names state {state!r} of operator {operator!r}, {wrong}; "
                "`ckpt validate` lists everything that is wrong",
                kind=ErrorKind.DAMAGED_MANIFEST,
                operator=operator,
                state=state,
            )
        numbers.append(rank)
    found: Ints = np.repeat(np.array(numbers, dtype=np.int32), sizes)
    return found


def blocks(numbers: Ints, states: Sequence[State]) -> Iterator[Block]:
    """Yield the numbers of some whole operators' states, and which :meth:`Handles.part` is theirs.

    Every state is in one block, even without handles. ``numbers`` are those of all handles' states.
    """
    bounds = np.searchsorted(numbers, np.arange(len(states) + 1, dtype=numbers.dtype)).tolist()
    first = 0
    for number in range(1, len(states)):
        if bounds[number] - bounds[first] >= _BLOCK_ROWS and states[number].operator != states[number - 1].operator:
            yield range(first, number), (bounds[first], bounds[number])
            first = number
    yield range(first, len(states)), (bounds[first], bounds[-1])


def assemble(slices: Slices, table: pa.Table, states: Sequence[State]) -> pa.Table:
    """Return the slices as a sorted table of ``SLICE_SCHEMA``; ``table`` is the manifest.

    ``bytes`` of a slice is the size of its segment times its share of the segment's rows, rounded
    down.
    """
    if not len(slices):
        return SLICE_SCHEMA.empty_table()
    slices = slices.ordered()
    low = int(slices.handle.min())
    table = table.slice(low, int(slices.handle.max()) - low + 1)
    sizes = integers(table["size_bytes"])[slices.handle - low]
    segment_rows = np.maximum(integers(table["segment_rows"])[slices.handle - low], 1)
    # They are sorted by state.
    begins = np.flatnonzero(run_starts(slices.state))
    named = [states[number] for number in slices.state[begins].tolist()]
    sizes_of = np.diff(np.append(begins, len(slices)))

    def text(values: list[str]) -> pa.Array:
        distinct = {value: code for code, value in enumerate(dict.fromkeys(values))}
        codes = np.repeat(np.array([distinct[value] for value in values], np.int32), sizes_of)
        return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array([*distinct], pa.string()))

    def nullable(values: Ints) -> pa.Array:
        return pa.array(values.astype(np.int32), mask=values < 0 if values.min() < 0 else None)

    return pa.table(
        [
            text([state.operator for state in named]),
            text([state.name for state in named]),
            text([state.mode.value for state in named]),
            nullable(slices.subtask),
            pa.array(slices.layer.astype(np.int32)),
            pa.array(slices.handle),
            pa.array(slices.row_start),
            pa.array(slices.rows),
            nullable(slices.first_group),
            nullable(slices.last_group),
            pa.array((sizes * (slices.rows / segment_rows)).astype(np.int64)),
        ],
        schema=SLICE_SCHEMA,
    )
