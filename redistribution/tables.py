"""Handles and slices as numpy arrays: what the rules work on.

Theory of operation. A plan for a million handles must not loop over them. So the manifest is turned into columns once
(:func:`read_handles`), every rule is a function from :class:`Handles` and :class:`States` to :class:`Slices`, and the
slices of all rules become an Arrow table at the end (:func:`assemble`). Handles stand in manifest order (SPEC.md section
4.2), states in byte order of (operator, name), so a state's number is also its rank and sorting is by integers. No rule
looks beyond one operator, so rules work on some operators at a time (:func:`blocks`): what lies between their columns
and the table then fits the processor's cache and is never much, and the cost is linear.

Null is -1 in every integer array here: a handle without subtask, a handle without groups. In slices the subtask -1 means
:data:`EVERY`: for the modes ``union`` and ``progress`` each new subtask reads the slice, for ``coordinator`` and
``committables`` the driver takes it. Thus p old and q new subtasks of a union state cost p slices and not p * q.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import DamagedCheckpoint, ErrorKind
from stateformat.manifest import state_runs
from stateformat.model import Mode, State
from stateformat.schema import SLICE_SCHEMA

if TYPE_CHECKING:
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int64]"
Flags: TypeAlias = "npt.NDArray[np.bool_]"

EVERY: Final = -1
"""The subtask of a slice that is not one subtask's."""
_NONE = np.empty(0, dtype=np.int64)
_BLOCK_ROWS: Final = 65_536


@dataclass(frozen=True, slots=True)
class States:
    """The states of a record, one entry each, in byte order of (operator, name).

    ``operator`` numbers operators in byte order of uid. ``parallelism`` (the new one; 0 where the state is dealt to
    nobody) and ``max_parallelism`` (the saved one, in which the key groups were made) are the operator's.
    ``settled``: the parallelism stays and nobody is finished or finishing, so everyone can keep its own.
    ``undisturbed``: settled, and nothing that it hears point to point was dealt anew (see ``progress``).
    """

    operator: Ints
    parallelism: Ints
    max_parallelism: Ints
    settled: Flags
    undisturbed: Flags


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The rows per group of all handles in a row, kept in the chunks in which the manifest was read.

    A position counts groups from the first handle on; ``bases`` are the positions at which chunks begin, then the end. A
    handle's groups lie in one chunk. Positions given to the methods ascend. (Put together, a million handles' groups are
    some hundred megabytes that would be copied for nothing.)
    """

    chunks: tuple[Ints, ...]
    bases: Ints

    def sums(self, start: Ints, stop: Ints) -> Ints:
        """Rows of the groups start … stop - 1 of each range; ranges are disjoint, not empty and within a chunk."""
        found = np.empty(len(start), dtype=np.int64)
        for values, base, these in self._by_chunk(start):
            edges = np.empty(2 * (these.stop - these.start), dtype=np.int64)
            edges[::2], edges[1::2] = start[these] - base, stop[these] - base
            if edges[-1] == len(values):
                edges = edges[:-1]
            found[these] = np.add.reduceat(values, edges)[::2]
        return found

    def at(self, position: Ints) -> Ints:
        """Rows of single groups."""
        found = np.empty(len(position), dtype=np.int64)
        for values, base, these in self._by_chunk(position):
            found[these] = values[position[these] - base]
        return found

    def held(self, position: Ints, step: int) -> Ints:
        """From each position the next group with rows: behind it for a step of 1, before it for -1. There is one."""
        found = np.empty(len(position), dtype=np.int64)
        for values, base, these in self._by_chunk(position):
            held = np.flatnonzero(values)
            at = np.searchsorted(held, position[these] - base)
            found[these] = held[at if step > 0 else at - 1] + base
        return found

    def between(self, start: int, stop: int) -> GroupRows:
        """The groups at these positions alone, at the same positions."""
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
    """Manifest rows in manifest order. ``number`` is the manifest row, ``state`` an index into :class:`States`.

    The rows per group of a handle stand in ``group_rows`` from the position ``group_start`` on; ``group_rows`` is shared by
    all handles of the manifest and is not narrowed by :meth:`where`.
    """

    number: Ints
    state: Ints
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

    def where(self, mask: Flags) -> Handles:
        """The handles that a mask selects, in the same order."""
        if bool(mask.all()):
            return self
        columns = {item.name: getattr(self, item.name) for item in fields(self)}
        return Handles(
            **{name: column if name == "group_rows" else column[mask] for name, column in columns.items()},
        )

    def part(self, start: int, stop: int) -> Handles:
        """Handles ``start`` … ``stop - 1`` of all that the manifest has, with their groups: a view."""
        columns = {
            item.name: getattr(self, item.name)[start:stop] for item in fields(self) if item.name != "group_rows"
        }
        first, last = (
            int(self.group_start[at] if at < len(self) else self.group_rows.bases[-1]) for at in (start, stop)
        )
        return Handles(**columns, group_rows=self.group_rows.between(first, last))


@dataclass(frozen=True, slots=True)
class Slices:
    """Parts of handles with the new subtask that gets them (:data:`EVERY` for -1).

    ``handle`` is a manifest row. Slices that one subtask reads stand in the order in which it reads them.
    """

    handle: Ints
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
        """No slices."""
        return cls(*[_NONE] * len(fields(cls)))

    @classmethod
    def whole(cls, handles: Handles, subtask: Ints | int) -> Slices:
        """Each handle as one slice, save those without rows: nothing is read from them."""
        return cls.part(handles, np.flatnonzero(handles.rows > 0), subtask=subtask)

    @classmethod
    def part(cls, handles: Handles, chosen: Ints, *, subtask: Ints | int, **columns: Ints) -> Slices:
        """Slices of the handles at the positions ``chosen`` (repeated or not), whole but for the columns given.

        ``subtask`` is one number for all, or one for each entry of ``handles``. Columns are parallel to ``chosen``.
        """
        picked = {
            "handle": handles.number[chosen],
            "state": handles.state[chosen],
            "subtask": np.full(len(chosen), subtask) if isinstance(subtask, int) else subtask[chosen],
            "layer": handles.layer[chosen],
        }
        for name in ("row_start", "rows", "first_group", "last_group"):
            picked[name] = columns[name] if name in columns else getattr(handles, name)[chosen]
        return cls(**picked)

    @classmethod
    def concat(cls, parts: Sequence[Slices]) -> Slices:
        """All of them, one part after the other."""
        parts = [part for part in parts if len(part)]
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.none()
        return cls(*(np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(cls)))

    def to(self, subtask: Ints) -> Slices:
        """The same slices for other subtasks, one each."""
        return replace(self, subtask=subtask)

    def take(self, order: npt.NDArray[Any]) -> Slices:
        """The slices at these positions, or those that a mask selects."""
        return Slices(*(getattr(self, item.name)[order] for item in fields(self)))

    def ordered(self) -> Slices:
        """Sorted by (state, subtask with :data:`EVERY` first, layer); equal ones keep their order."""
        if not len(self):
            return self
        layers = int(self.layer.max()) + 1
        subtasks = int(self.subtask.max()) + 2
        key = (self.state * subtasks + self.subtask + 1) * layers + self.layer
        if bool((key[1:] >= key[:-1]).all()):
            return self
        return self.take(np.argsort(key, kind="stable"))


def spread(counts: Ints) -> tuple[Ints, Ints]:
    """For each position its number as often as its count, and the running number within it: [2, 1] gives [0, 0, 1], [0, 1, 0]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - first[owner]


def before(values: Ints) -> Ints:
    """Prefix sums with a leading 0: entry *i* is the sum of everything before position *i*; one longer than the input."""
    sums = np.empty(len(values) + 1, dtype=np.int64)
    sums[0] = 0
    np.cumsum(values, out=sums[1:])
    return sums


def read_handles(table: pa.Table, states: Sequence[State]) -> Handles:
    """The planning columns of a manifest as arrays; ``states`` are the record's, in byte order of (operator, name).

    Raises ``DamagedCheckpoint`` (kind ``DAMAGED_MANIFEST``) where a handle names a state that the record lacks, where
    states are out of order, where rows that must be grouped are not, or where ``rows_per_group`` has another length than the
    range of groups: the writer's fault.
    """
    first_group = _integers(table, "first_group")
    last_group = _integers(table, "last_group")
    state = _state_numbers(table, states)
    rows = _integers(table, "rows")
    grouped = np.array([state.mode in (Mode.KEYED, Mode.IN_FLIGHT) for state in states], dtype=np.bool_)
    bare = np.flatnonzero((rows > 0) & (first_group < 0) & (grouped[state] if len(state) else False))
    if len(bare):
        raise damaged(int(bare[0]), "has rows, but no groups, which its mode demands")
    group_start, group_rows = _groups(table, first_group, last_group)
    return Handles(
        number=np.arange(table.num_rows),
        state=state,
        subtask=_integers(table, "subtask"),
        layer=_integers(table, "layer"),
        row_start=_integers(table, "row_start"),
        rows=rows,
        first_group=first_group,
        last_group=last_group,
        group_start=group_start,
        group_rows=group_rows,
    )


def damaged(row: int, what: str) -> DamagedCheckpoint:
    """The error for a manifest row that contradicts itself; ``what`` is the predicate of the sentence."""
    return DamagedCheckpoint(
        f"manifest row {row} {what}; `ckpt validate` lists everything that is wrong",
        kind=ErrorKind.DAMAGED_MANIFEST,
        row=row,
    )


def _integers(table: pa.Table, name: str) -> Ints:
    column = table[name]
    if column.null_count:
        column = pc.fill_null(column, -1)
    found: Ints = column.to_numpy().astype(np.int64, copy=False)
    return found


def _groups(table: pa.Table, first_group: Ints, last_group: Ints) -> tuple[Ints, GroupRows]:
    counts = np.where(first_group >= 0, last_group - first_group + 1, 0)
    starts, chunks, bases, row = [], [], [0], 0
    for lists in table["rows_per_group"].chunks:
        offsets = lists.offsets.to_numpy().astype(np.int64)
        wrong = np.flatnonzero(offsets[1:] - offsets[:-1] != counts[row : row + len(lists)])
        if len(wrong):
            row += int(wrong[0])
            raise damaged(
                row,
                f"has groups {first_group[row]} to {last_group[row]}, but the rows of "
                f"{offsets[wrong[0] + 1] - offsets[wrong[0]]} groups",
            )
        row += len(lists)
        values = lists.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
        starts.append(offsets[:-1] - offsets[0] + bases[-1])
        chunks.append(values)
        bases.append(bases[-1] + len(values))
    return np.concatenate([_NONE, *starts]), GroupRows(tuple(chunks), np.array(bases, dtype=np.int64))


def _state_numbers(table: pa.Table, states: Sequence[State]) -> Ints:
    """The number of each handle's state. Handles are sorted, so states are runs and strings are compared twice each."""
    runs = list(state_runs(table))
    sizes = np.array([stop - start for _, start, stop in runs], dtype=np.int64)
    ranks: dict[tuple[str, str], int] = {(state.operator, state.name): rank for rank, state in enumerate(states)}
    numbers: list[int] = []
    for (operator, state), _, _ in runs:
        rank = ranks.get((operator, state), -1)
        if rank < 0 or (numbers and rank <= numbers[-1]):
            raise DamagedCheckpoint(
                f"the manifest names state {state!r} of operator {operator!r}, "
                + ("which the record does not declare" if rank < 0 else "out of order")
                + "; `ckpt validate` lists everything that is wrong",
                kind=ErrorKind.DAMAGED_MANIFEST,
                operator=operator,
                state=state,
            )
        numbers.append(rank)
    return np.repeat(np.array(numbers, dtype=np.int64), sizes)


def blocks(handles: Handles, states: Sequence[State]) -> Iterator[tuple[range, Handles]]:
    """All handles of a manifest, some whole operators at a time: the numbers of their states, and the handles.

    Every state is in one block, also one without handles. ``states`` are those of :func:`read_handles`.
    """
    bounds = np.searchsorted(handles.state, np.arange(len(states) + 1)).tolist()
    first = 0
    for number in range(1, len(states)):
        if bounds[number] - bounds[first] >= _BLOCK_ROWS and states[number].operator != states[number - 1].operator:
            yield range(first, number), handles.part(bounds[first], bounds[number])
            first = number
    yield range(first, len(states)), handles.part(bounds[first], bounds[-1])


def assemble(slices: Slices, table: pa.Table, states: Sequence[State]) -> pa.Table:
    """The slices as a table of ``SLICE_SCHEMA``, sorted; ``table`` is the manifest and gives the stored sizes.

    ``bytes`` of a slice is the size of its segment times its share of the segment's rows, rounded down.
    """
    if not len(slices):
        return SLICE_SCHEMA.empty_table()
    slices = slices.ordered()
    low = int(slices.handle.min())
    table = table.slice(low, int(slices.handle.max()) - low + 1)
    sizes = _integers(table, "size_bytes")[slices.handle - low]
    segment_rows = np.maximum(_integers(table, "segment_rows")[slices.handle - low], 1)
    # Sorted by state, and a block has few of all.
    first, last = int(slices.state[0]), int(slices.state[-1])
    named = states[first : last + 1]
    number = pa.array((slices.state - first).astype(np.int32))

    def text(values: list[str]) -> pa.Array:
        return pa.DictionaryArray.from_arrays(number, pa.array(values, pa.string())).cast(pa.string())

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
