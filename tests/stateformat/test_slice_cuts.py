"""Slices cut to key groups and into parts, against their rows one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stateformat.manifest import handles_table
from stateformat.model import Handle, State
from stateformat.reading.cutting import cut_to_groups, split_between_owners, split_slices
from stateformat.schema import SLICE_SCHEMA
from stateformat.states import declare

KEYED = declare.value_state("op", "keyed", keys={"k": pa.int64()}, values={"v": pa.int64()})
ENTRIES = declare.even_split_state("op", "entries", columns={"v": pa.int64()})
IN_FLIGHT = declare.in_flight_state("op", "flight", edge="e", columns={"v": pa.int64()})


def handle(random: np.random.Generator, state: State, number: int) -> Handle:
    counts = random.integers(0, 4, random.integers(1, 9)).tolist()
    counts[0], counts[-1] = counts[0] + 1, counts[-1] + 1
    first = int(random.integers(0, 12))
    groups: dict[str, Any] = {}
    if state is not ENTRIES:
        groups = {"first_group": first, "last_group": first + len(counts) - 1, "rows_per_group": counts}
    start = int(random.integers(0, 30))
    return Handle(
        "op", state.name, state.mode, number, number % 3, state.edge, 0, row_start=start, rows=sum(counts), **groups
    )


def groups_of(found: Handle) -> list[int | None]:
    """The group of each row."""
    counts = found.rows_per_group
    if counts is None:
        return [None] * found.rows
    return [group for group, count in enumerate(counts, found.first_group or 0) for _ in range(count)]


def world(seed: int, state: State) -> tuple[list[Handle], pa.Table]:
    """Handles, and slices of whole groups of them for some owners."""
    random = np.random.default_rng(seed)
    handles = [handle(random, state, number) for number in range(int(random.integers(1, 7)))]
    slices = []
    for owner in range(int(random.integers(1, 5))):
        for number, found in enumerate(handles):
            groups = groups_of(found)
            if state is ENTRIES:
                low, high = sorted(random.integers(0, found.rows + 1, 2).tolist())
            else:
                first, last = sorted(random.choice(np.array(groups), 2).tolist())
                low, high = groups.index(first), found.rows - groups[::-1].index(last)
            if low < high:
                ends = groups[low], groups[high - 1]
                size = int(random.integers(0, 2) * random.integers(1, 900))
                place = (owner, found.layer, number, found.row_start + low, high - low)
                slices.append(("op", state.name, state.mode.value, *place, *ends, size))
    rows = [dict(zip(SLICE_SCHEMA.names, row, strict=True)) for row in slices]
    return handles, pa.Table.from_pylist(rows, SLICE_SCHEMA)


def rows_of(handles: list[Handle], slices: pa.Table) -> list[tuple[int, int, int, int | None]]:
    """(owner, handle, row, group) of every row, in order; slices must tell their groups truly."""
    found = []
    for cut in slices.to_pylist():
        held = handles[cut["handle"]]
        assert cut["rows"] > 0
        groups = groups_of(held)[cut["row_start"] - held.row_start :][: cut["rows"]]
        assert (cut["first_group"], cut["last_group"]) == (groups[0], groups[-1])
        rows = range(cut["row_start"], cut["row_start"] + cut["rows"])
        found += [(cut["subtask"], cut["handle"], row, group) for row, group in zip(rows, groups, strict=True)]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_slices_cut_to_groups_have_the_rows_of_these_groups_and_no_others(seed: int) -> None:
    handles, slices = world(seed, KEYED)
    wanted = np.unique(np.random.default_rng(seed).integers(0, 20, 6))
    cut = cut_to_groups(handles_table(handles), slices, wanted)
    assert rows_of(handles, cut) == [row for row in rows_of(handles, slices) if row[3] in wanted]
    # Where no row of another group lies between, it is one slice.
    assert not {(row["subtask"], row["handle"], row["row_start"]) for row in cut.to_pylist()} & {
        (row["subtask"], row["handle"], row["row_start"] + row["rows"]) for row in cut.to_pylist()
    }


@pytest.mark.parametrize("state", [KEYED, ENTRIES, IN_FLIGHT], ids=lambda state: state.name)
@pytest.mark.parametrize("seed", range(40))
def test_parts_have_the_rows_once_and_groups_of_an_owner_whole(seed: int, state: State) -> None:
    handles, slices = world(seed, state)
    rows = rows_of(handles, slices)
    for parts in (1, 2, 5, 10_000):
        tables = split_slices(state, handles_table(handles), slices, parts)
        assert 1 <= len(tables) <= max(1, min(parts, len(rows)))
        found = [rows_of(handles, table) for table in tables]
        together = [row for part in found for row in part]
        # A part of keyed state has several layers of its groups: only owners are in order.
        assert (sorted(together) == sorted(rows)) if state is KEYED else (together == rows)
        width = {KEYED.name: 2, IN_FLIGHT.name: 1, ENTRIES.name: 4}[state.name]
        kept = [{(owner, group, number, row)[:width] for owner, number, row, group in part} for part in found]
        assert sum(map(len, kept)) == len(set[Any]().union(*kept))
        sizes = [sum(table["bytes"].to_pylist()) for table in tables]
        assert (
            sum(slices["bytes"].to_pylist()) - sum(map(len, tables)) <= sum(sizes) <= sum(slices["bytes"].to_pylist())
        )


def test_a_large_slice_is_cut_without_an_overflow_of_its_bytes() -> None:
    rows = 1 << 31
    held = Handle("op", "entries", ENTRIES.mode, 0, 0, None, 0, rows=rows)
    row = ("op", "entries", "even-split", 0, 0, 0, 0, rows, None, None, (1 << 50) + 7)
    slices = pa.Table.from_pylist([dict(zip(SLICE_SCHEMA.names, row, strict=True))], SLICE_SCHEMA)
    tables = split_slices(ENTRIES, handles_table([held]), slices, 2)
    assert [table["rows"].to_pylist() for table in tables] == [[rows // 2], [rows // 2]]
    assert [table["bytes"].to_pylist() for table in tables] == [[(1 << 49) + 3]] * 2


def test_no_slices_are_one_part() -> None:
    none = SLICE_SCHEMA.empty_table()
    assert split_slices(KEYED, handles_table([]), none, 3) == [none]
    assert split_between_owners(none, 3) == [none]
