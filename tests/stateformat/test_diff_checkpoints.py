"""Two checkpoints compared as a whole, against DuckDB and plain Python: rows of every mode, what is
content and what is placement, and what is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stateformat.backends.rewrite import RewriteSpec, publish_rescaled, rewrite
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import DamagedCheckpoint, InvalidInput
from stateformat.graph import JobGraph, Operator, Partitioner, SubtaskSet
from stateformat.inspecting import CheckpointDiff, StateDiff, diff_checkpoints
from stateformat.inspecting.counting import pattern_of
from stateformat.inspecting.declarations import graph_diff
from stateformat.model import (
    AttemptId,
    CheckpointId,
    FormerStatus,
    ParentRef,
    Record,
    RescaledFrom,
    SchemaVersion,
    State,
)
from stateformat.reading import StoreCheckpoint
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from tests.servers.server import BUCKET, S3Server
from tests.stateformat.changing_histories import KEYS, OWN, joined, random_history
from tests.worlds import data as data_world
from tests.worlds.data import data_store
from tests.worlds.segments import CountingStorage
from tests.worlds.stores import counts_store, edge, flights_store, owned, refused

Counts = tuple[int, int, int]
BIG = WriteOptions(inline_bytes_max=0)


def state_of(diff: CheckpointDiff, operator: str, name: str) -> StateDiff:
    [found] = [one for one in diff.states if (one.operator, one.name) == (operator, name)]
    return found


def counts(state: StateDiff) -> Counts:
    """Rows added, removed, changed."""
    assert state.counted is not None
    return state.counted.added, state.counted.removed, state.counted.changed


def write(
    store: CheckpointStore,
    rows: Mapping[State, Sequence[pa.Table]],
    *,
    operator: Operator | None = None,
    job: str = "job",
    options: WriteOptions | None = None,
    **more: Any,
) -> None:
    """Publish a checkpoint of one operator: a table of each state for each running subtask."""
    one = operator or Operator("op", max(len(tables) for tables in rows.values()), 16)
    pending = store.begin(
        job_id=job, graph=JobGraph((one,)), states=[*rows], parent=store.start(job), options=options, **more
    )
    for subtask in range(one.parallelism):
        if subtask in one.finished:
            continue
        with pending.context.subtask("op", subtask) as writer:
            for state, tables in rows.items():
                writer.write(state.name, tables[subtask] if subtask < len(tables) else tables[0].slice(0, 0))
        pending.add(writer)
    pending.publish()


# ---- rows, against oracles


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.truth) for seed in (3, *range(10, 30)))])
def test_keyed_rows_are_counted_as_duckdb_counts_them(tmp_path: Path, seed: int) -> None:
    history = random_history(str(tmp_path), seed, steps=6)
    pairs = [*combinations(sorted(history.truth), 2)]
    for start, end in pairs if seed >= 10 else pairs[::4]:
        diff = diff_checkpoints(history.store.open(start), history.store.open(end))
        for kind in OWN:
            before, after = (history.rows(kind, at, as_of=end) for at in (start, end))
            wanted = joined(before, after, (*KEYS, *OWN[kind]))["_change"].to_pylist()
            found = state_of(diff, "op", kind)
            assert counts(found) == tuple(map(wanted.count, ("insert", "delete", "update_after")))
            if found.sizes_before is not None and found.sizes_before.rows is not None:
                assert found.sizes_before.rows == len(before)
            if found.sizes_after is not None and found.sizes_after.rows is not None:
                assert found.sizes_after.rows == len(after)


@pytest.mark.parametrize("start", range(1, 6))
@pytest.mark.parametrize("end", [2, 4, 6])
def test_every_state_of_the_shop_is_counted_in_either_direction(shop: CheckpointStore, start: int, end: int) -> None:
    diff = diff_checkpoints(shop.open(start), shop.open(end))
    for name in data_world.ROW_KEYS if start <= end else ():
        wanted = [row["_change"] for row in data_world.expected_changes(*name, start, end)]
        assert counts(state_of(diff, *name)) == tuple(map(wanted.count, ("insert", "delete", "update_after")))
    back = diff_checkpoints(shop.open(end), shop.open(start))
    assert back.same is diff.same
    if (start < data_world.EVOLVED) is (end < data_world.EVOLVED):
        for one, other in zip(diff.states, back.states, strict=True):
            assert counts(one) == (counts(other)[1], counts(other)[0], counts(other)[2])


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    return data_store(str(tmp_path_factory.mktemp("shop")))


def test_rows_that_are_kept_are_those_that_differ(shop: CheckpointStore) -> None:
    diff = diff_checkpoints(shop.open(5), shop.open(6), operator="totals", state="spent")
    [state] = diff.states
    sample = diff.document(rows=2)["states"][0]["sample"]
    found = [(one["before"] and one["before"]["user"], one["after"] and one["after"]["user"]) for one in sample]
    wanted = data_world.expected_changes("totals", "spent", 5, 6)
    of = {change: {row["user"] for row in wanted if row["_change"] == change} for change in ("delete", "insert")}
    assert {before for before, after in found if after is None} <= of["delete"]
    assert {after for before, after in found if before is None} <= of["insert"]
    assert [before == after for before, after in found if before and after] == [True]
    assert counts(state) == (2, 2, 1)


# ---- what is the same content


def test_a_rescale_a_rewrite_and_a_copy_are_the_same_content(tmp_path: Path) -> None:
    store, other = flights_store(str(tmp_path / "store")), open_store(str(tmp_path / "other"))
    source = store.open()
    store.copy(source, other)
    publish_rescaled(source, source.graph.at(3), store=store)
    rescaled = store.open()
    rewrite(store, rescaled, RewriteSpec(parallelism=2, max_parallelism=64, options=WriteOptions(codec="zstd")))
    for one in (other.open(), rescaled, store.open()):
        for before, after in ((source, one), (one, source)):
            diff = diff_checkpoints(before, after)
            assert diff.same, [state for state in diff.states if not state.same]
            assert diff.graph is not None
    assert diff_checkpoints(source, rescaled).read_bytes == diff_checkpoints(source, other.open()).read_bytes == 0


def test_entries_that_a_rescale_has_begun_to_deal_elsewhere_are_the_same_ring(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    states = [declare.even_split_state("op", name, columns={"n": pa.int64()}) for name in "abc"]
    tables = [[pa.table({"n": np.arange(start, start + 5)}) for start in (0, 5)] for _ in states]
    write(store, dict(zip(states, tables, strict=True)))
    source = store.open()
    for parallelism in (3, 4, 7):
        now = store.open()
        publish_rescaled(now, now.graph.at(parallelism), store=store)
        diff = diff_checkpoints(source, store.open())
        assert diff.same
    assert "rotated" in [state.order for state in diff.states]
    rewrite(store, store.open(), RewriteSpec())
    read = diff_checkpoints(source, store.open())
    assert [state.order for state in read.states] == [state.order for state in diff.states]
    assert read.same


ORDERS: Mapping[str, tuple[list[int], list[int], str, str]] = {
    # Entries before and after; the order as even_split state, and as union state.
    "same": ([1, 2, 3], [1, 2, 3], "same", "same"),
    "rotated": ([1, 2, 3, 4], [3, 4, 1, 2], "rotated", "other"),
    "two exchanged": ([1, 2, 3, 4], [1, 3, 2, 4], "other", "other"),
    "turned around": ([1, 2, 3, 4], [4, 3, 2, 1], "other", "other"),
    "equal entries": ([7, 7, 7], [7, 7, 7], "same", "same"),
    "equal entries in a ring": ([1, 7, 1, 7, 2], [7, 2, 1, 7, 1], "rotated", "other"),
    "equal entries, no ring": ([1, 7, 1, 7, 2, 2], [7, 2, 1, 7, 1, 2], "other", "other"),
    "two of one": ([1, 2], [2, 1], "rotated", "other"),
}


@pytest.mark.parametrize("case", ORDERS)
def test_the_order_of_entries_counts(tmp_path: Path, case: str) -> None:
    before, after, ring, line = ORDERS[case]
    store = open_store(str(tmp_path))
    split = declare.even_split_state("op", "split", columns={"n": pa.int64()})
    union = declare.union_state("op", "union", columns={"n": pa.int64()})
    for rows in (before, after):
        half = len(rows) // 2
        tables = [pa.table({"n": pa.array(part, pa.int64())}) for part in (rows[:half], rows[half:])]
        write(store, {split: tables, union: tables})
    diff = diff_checkpoints(store.open(1), store.open(2))
    assert state_of(diff, "op", "split").order == ring
    assert state_of(diff, "op", "union").order == line
    assert diff.same is (line == "same")


def test_progress_is_the_least_watermark_of_each_input(tmp_path: Path) -> None:
    store, progress = open_store(str(tmp_path)), declare.progress_state("op", "seen")

    def rows(*seen: tuple[str, int, bool]) -> pa.Table:
        return pa.table(
            {
                "_edge": pa.array([one[0] for one in seen], pa.string()),
                "_watermark": pa.array([one[1] for one in seen], pa.int64()),
                "_ended": pa.array([one[2] for one in seen], pa.bool_()),
            }
        )

    none = -(2**63)
    write(store, {progress: [rows(("a", 5, False), ("b", 9, True)), rows(("a", 3, False), ("b", 9, False))]})
    write(store, {progress: [rows(("a", 3, False), ("b", 9, False), ("c", none, False))]})
    write(store, {progress: [rows(("a", 4, False), ("b", 9, True))]})
    assert diff_checkpoints(store.open(1), store.open(2)).same
    found = diff_checkpoints(store.open(2), store.open(3))
    assert counts(found.states[0]) == (0, 0, 2)
    [change] = [one for one in found.document(rows=5)["states"][0]["sample"] if one["after"]["_edge"] == "a"]
    assert (change["before"]["_watermark"], change["after"]["_watermark"]) == (3, 4)


def test_floats_are_compared_by_their_bits_with_one_nan(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    state = declare.value_state("op", "s", keys={"k": pa.int64()}, values={"f": pa.float64()})
    odd = np.array([0x7FF8000000000001], np.uint64).view(np.float64)[0]
    for values in ([math.nan, 0.0, 1.0], [odd, -0.0, 1.0]):
        write(store, {state: [pa.table({"k": [1, 2, 3], "f": values})]})
    diff = diff_checkpoints(store.open(1), store.open(2))
    assert counts(diff.states[0]) == (0, 0, 1)
    assert diff.document(rows=1)["states"][0]["sample"][0]["before"]["k"] == 2


def test_rows_in_flight_are_the_same_in_other_key_groups(tmp_path: Path) -> None:
    store = flights_store(str(tmp_path / "store"))
    source, target = store.open(), open_store(str(tmp_path / "target"))
    rewrite(store, source, RewriteSpec(max_parallelism=32), target=target)
    diff = diff_checkpoints(source, target.open())
    assert diff.same
    assert {"overtaken"} <= {state.name for state in diff.states}


# ---- columns and declarations


def spent(store: CheckpointStore, state: State, rows: pa.Table, **more: Any) -> None:
    write(store, {state: [rows]}, **more)


def test_a_renamed_column_is_one_line_and_no_changed_row(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    first = declare.value_state("op", "s", keys={"k": pa.int64()}, values={"town": pa.string(), "n": pa.int32()})
    later = declare.value_state(
        "op",
        "s",
        keys={"k": pa.int64()},
        values={"city": pa.string(), "n": pa.int64(), "level": pa.int32()},
        previous=first,
        renames={"town": "city"},
        defaults={"level": "7"},
    )
    spent(store, first, pa.table({"k": [1, 2], "town": ["a", "b"], "n": pa.array([1, 2], pa.int32())}))
    spent(store, later, pa.table({"k": [1, 2], "city": ["a", "b"], "n": [1, 2], "level": pa.array([7, 7], pa.int32())}))
    diff = diff_checkpoints(store.open(1), store.open(2))
    assert counts(diff.states[0]) == (0, 0, 0)
    assert [(one.change, one.column, one.was) for one in diff.states[0].columns] == [
        ("renamed", "city", "town"),
        ("widened", "n", None),
        ("added", "level", None),
    ]
    assert not diff.same
    back = diff_checkpoints(store.open(2), store.open(1))
    assert counts(back.states[0]) == (0, 0, 0)
    assert [one.change for one in back.states[0].columns] == ["renamed", "narrowed", "dropped"]


COLUMNS: Mapping[str, tuple[dict[str, pa.DataType], dict[str, Any], dict[str, pa.DataType], dict[str, Any], list[str], Counts]] = {
    # Columns and a row before; columns and a row after; the lines; the counts.
    "order": ({"a": pa.int64(), "b": pa.int64()}, {"a": 1, "b": 2}, {"b": pa.int64(), "a": pa.int64()}, {"a": 1, "b": 2}, [], (0, 0, 0)),
    "wider": ({"a": pa.float32()}, {"a": 0.5}, {"a": pa.float64()}, {"a": 0.5}, ["widened a"], (0, 0, 0)),
    "narrower": ({"a": pa.int64()}, {"a": 2**40}, {"a": pa.int32()}, {"a": 5}, ["narrowed a"], (0, 0, 1)),
    "another type": ({"a": pa.int64(), "b": pa.int64()}, {"a": 1, "b": 1}, {"a": pa.string(), "b": pa.int64()}, {"a": "x", "b": 1}, ["retyped a"], (0, 0, 0)),
    "new": ({"a": pa.int64()}, {"a": 1}, {"a": pa.int64(), "b": pa.int64()}, {"a": 1, "b": 2}, ["added b"], (0, 0, 1)),
    "gone": ({"a": pa.int64(), "b": pa.int64()}, {"a": 1, "b": 2}, {"a": pa.int64()}, {"a": 1}, ["dropped b"], (0, 0, 0)),
    "inside": (
        {"s": pa.struct([pa.field("x", pa.int32()), pa.field("y", pa.string())])}, {"s": {"x": 1, "y": "a"}},
        {"s": pa.struct([pa.field("y", pa.string()), pa.field("x", pa.int64()), pa.field("z", pa.int8())])}, {"s": {"y": "a", "x": 1, "z": None}},
        ["widened s.x", "added s.z"], (0, 0, 0),
    ),
    "in a list": ({"l": pa.list_(pa.int32())}, {"l": [1]}, {"l": pa.list_(pa.int64())}, {"l": [1]}, ["widened l.element"], (0, 0, 0)),
    "nothing left to compare": ({"a": pa.int64()}, {"a": 1}, {"a": pa.string()}, {"a": "1"}, ["retyped a"], (0, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("case", COLUMNS)
def test_in_unrelated_stores_columns_go_by_name(tmp_path: Path, case: str) -> None:
    types, row, later, changed, lines, wanted = COLUMNS[case]
    stores = []
    for number, (columns, values) in enumerate(((types, row), (later, changed))):
        store = open_store(str(tmp_path / str(number)))
        state = declare.value_state("op", "s", keys={"k": pa.int64()}, values=columns)
        schema = pa.schema({"k": pa.int64(), **columns}.items())
        write(store, {state: [pa.Table.from_pylist([{"k": 1, **values}], schema)]}, job=f"job {number}")
        stores.append(store.open())
    diff = diff_checkpoints(*stores)
    assert [f"{one.change} {one.column}" for one in diff.states[0].columns] == lines
    assert counts(diff.states[0]) == wanted
    assert diff.same is (not lines)


def test_an_id_that_means_two_columns_does_not_join_them(tmp_path: Path) -> None:
    """As after a rollback: two programs have given the next id to different columns."""
    both = []
    for name, value in (("x", 1), ("y", 2)):
        store = open_store(str(tmp_path / name))
        first = declare.value_state("op", "s", keys={"k": pa.int64()}, values={"a": pa.int64()})
        later = declare.value_state(
            "op", "s", keys={"k": pa.int64()}, values={"a": pa.int64(), name: pa.int64()}, previous=first
        )
        spent(store, later, pa.table({"k": [1], "a": [1], name: [value]}))
        both.append(store.open())
    [state] = diff_checkpoints(*both).states
    assert {(one.change, one.column) for one in state.columns} == {("added", "y"), ("dropped", "x")}
    assert counts(state) == (0, 0, 1)


def test_a_column_that_was_dropped_and_came_back_is_another_one(tmp_path: Path) -> None:
    store, keys = open_store(str(tmp_path)), {"k": pa.int64()}
    first = declare.value_state("op", "s", keys=keys, values={"a": pa.int64(), "b": pa.int64()})
    middle = declare.value_state("op", "s", keys=keys, values={"b": pa.int64()}, previous=first)
    last = declare.value_state("op", "s", keys=keys, values={"a": pa.int64(), "b": pa.int64()}, previous=middle)
    for state in (first, last):
        spent(store, state, pa.table({"k": [1], "a": [5], "b": [6]}))
    [state_diff] = diff_checkpoints(store.open(1), store.open(2)).states
    assert {(one.change, one.column) for one in state_diff.columns} == {("added", "a"), ("dropped", "a")}


def test_another_state_of_the_same_name_is_not_compared(tmp_path: Path) -> None:
    checkpoints = []
    for number, kind in enumerate((pa.int64(), pa.string())):
        store = open_store(str(tmp_path / str(number)))
        keys = {"k": kind} if number else {"k": kind, "j": kind}
        state = declare.value_state("op", "s", keys=keys, values={"n": pa.int64()})
        rows = pa.table({**{name: pa.array([1], pa.int64()).cast(kind) for name in keys}, "n": [1]})
        write(store, {state: [rows]})
        checkpoints.append(store.open())
    [found] = diff_checkpoints(*checkpoints).states
    assert (found.change, [one.member for one in found.declared]) == ("replaced", ["key_columns"])
    assert found.counted is None


def test_keys_of_a_wider_type_are_compared_though_they_hash_apart(tmp_path: Path) -> None:
    checkpoints = []
    for number, kind in enumerate((pa.int32(), pa.int64())):
        store = open_store(str(tmp_path / str(number)))
        state = declare.value_state("op", "s", keys={"k": kind}, values={"n": pa.int64()})
        keys = pa.array(range(number, 50), kind)
        write(store, {state: [pa.table({"k": keys, "n": pa.array([1] * len(keys))})]})
        checkpoints.append(store.open())
    [found] = diff_checkpoints(*checkpoints).states
    assert counts(found) == (0, 1, 0)


# ---- the graph


A, B = Operator("a", 2, 16), Operator("b", 2, 16)
HASH = edge("a", "b", Partitioner.HASH, "k")
DONE = replace(A, finished=SubtaskSet.of([0]))
FORMER = RescaledFrom(
    ParentRef(CheckpointId(1), AttemptId("0" * 32)), (FormerStatus("a", 2, SubtaskSet.of([0]), SubtaskSet()),)
)
GRAPHS: Mapping[str, tuple[JobGraph, JobGraph, list[str], bool]] = {
    # Before, after; the lines; whether the content is the same.
    "equal": (JobGraph((A, B), (HASH,)), JobGraph((A, B), (HASH,)), [], True),
    "parallelism": (JobGraph((A,)), JobGraph((replace(A, parallelism=3),)), ["a changed parallelism"], True),
    "max parallelism": (JobGraph((A,)), JobGraph((replace(A, max_parallelism=8),)), ["a changed max_parallelism"], True),
    "name and chain": (JobGraph((A,)), JobGraph((replace(A, name="n", chain="c"),)), ["a changed name chain"], True),
    "coordinator": (JobGraph((A,)), JobGraph((replace(A, coordinator=True),)), ["a changed coordinator"], False),
    "a new operator": (JobGraph((A,)), JobGraph((A, B)), ["b added "], False),
    "one is gone": (JobGraph((A, B), (HASH,)), JobGraph((A,)), ["b removed ", "a -> b removed "], False),
    "status": (JobGraph((A,)), JobGraph((DONE,)), ["a changed status finished"], False),
    "another subtask": (
        JobGraph((DONE,)), JobGraph((replace(A, finished=SubtaskSet.of([1])),)), ["a changed finished"], False,
    ),
    "finished at another parallelism": (
        JobGraph((replace(A, finished=SubtaskSet.all(2)),)),
        JobGraph((replace(A, parallelism=3, finished=SubtaskSet.all(3)),)), ["a changed parallelism"], True,
    ),
    "edge id": (JobGraph((A, B), (HASH,)), JobGraph((A, B), (replace(HASH, id="e"),)), ["a -> b changed edge id"], True),
    "partitioner": (
        JobGraph((A, B), (HASH,)), JobGraph((A, B), (edge("a", "b", Partitioner.REBALANCE),)),
        ["a -> b changed partitioner key_columns"], False,
    ),
    "another input": (
        JobGraph((A, B), (HASH,)), JobGraph((A, B), (replace(HASH, input=1),)),
        ["a -> b removed ", "a -> b (input 1) added "], False,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return counts_store(str(tmp_path_factory.mktemp("record"))).open().record


@pytest.mark.parametrize("case", GRAPHS)
def test_of_a_graph_placement_is_shown_and_content_counts(record: Record, case: str) -> None:
    before, after, lines, same = GRAPHS[case]
    found = graph_diff(replace(record, graph=before), replace(record, graph=after), {}, (), None)
    said = [
        f"{one.name} {one.change} {' '.join(member.member for member in one.members)}"
        for one in (*found.operators, *found.edges)
    ]
    assert (said, found.same) == (lines, same)


def test_a_rescale_keeps_the_status_that_counts(record: Record) -> None:
    finished, running = replace(record, graph=JobGraph((DONE,))), replace(record, graph=JobGraph((A,)))
    dealt = replace(record, graph=JobGraph((replace(A, parallelism=3),)), rescaled_from=FORMER)
    assert graph_diff(finished, dealt, {}, (), None).same
    assert not graph_diff(running, dealt, {}, (), None).same
    assert not graph_diff(finished, running, {}, (), None).same


def test_renamed_operators_are_one(record: Record) -> None:
    before = replace(record, graph=JobGraph((A, B), (HASH,)))
    renamed = replace(A, uid="new")
    after = replace(record, graph=JobGraph((renamed, B), (replace(HASH, source="new"),)))
    found = graph_diff(before, after, {"a": "new"}, (), None)
    assert [(one.name, one.was) for one in found.operators] == [("new", "a")]
    assert found.same
    assert not graph_diff(before, after, {}, (), None).same


# ---- what is narrowed, refused, damaged


def test_only_an_operator_or_states_of_a_name_are_compared(shop: CheckpointStore) -> None:
    before, after = shop.open(1), shop.open(6)
    one = diff_checkpoints(before, after, operator="Totals per user")
    assert {state.operator for state in one.states} == {"totals"}
    assert one.graph is not None
    named = diff_checkpoints(before, after, state="spent")
    assert [state.name for state in named.states] == ["spent"]
    assert named.graph is None
    assert diff_checkpoints(shop.open(1), shop.open(2), state="refunds").same


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"operator": "total"}, "no operator 'total', .*did you mean 'totals'"),
        ({"state": "spend"}, "the checkpoints have no state 'spend'; did you mean 'spent'"),
        ({"operator": "totals", "state": "shards"}, "operator 'totals' has no state 'shards'"),
    ],
)
def test_what_neither_side_has_is_refused(shop: CheckpointStore, what: dict[str, Any], words: str) -> None:
    refused(InvalidInput, lambda: diff_checkpoints(shop.open(1), shop.open(2), **what), words)


@pytest.mark.parametrize("side", [1, 2])
def test_damage_on_one_side_is_a_sentence(tmp_path: Path, side: int) -> None:
    store = open_store(str(tmp_path))
    state = declare.value_state("op", "s", keys={"k": pa.int64()}, values={"n": pa.int64()})
    for n in (1, 2):
        write(store, {state: [pa.table({"k": range(100), "n": [n] * 100})]}, options=BIG)
    [path] = [tmp_path / one for one in store.open(side).handles["path"].to_pylist()]
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    error = refused(DamagedCheckpoint, lambda: diff_checkpoints(store.open(1), store.open(2)))
    assert path.name in str(error)


# ---- patterns

UNEVEN = np.array([100] * 64 + [900] * 64)
PATTERNS: Mapping[str, tuple[list[int] | np.ndarray, np.ndarray | None, list[tuple[int, int]] | None]] = {
    # Changes and rows of each key group; the ranges that are named.
    "none": (np.zeros(128, np.int64), None, None),
    "one": (np.eye(128, dtype=np.int64)[5], None, None),
    "one each in a few": (np.isin(np.arange(128), [3, 40, 77, 100]).astype(np.int64), None, None),
    "everywhere": (np.full(128, 50), np.full(128, 1000), None),
    "one subtask of four": ((np.arange(128) < 32) * 50, np.full(128, 1000), [(0, 31)]),
    "two ranges": (np.isin(np.arange(128), [3, 4, 90]) * 50, np.full(128, 1000), [(3, 4), (90, 90)]),
    "one group": (np.eye(128, dtype=np.int64)[5] * 20, None, [(5, 5)]),
    "as the rows lie": (UNEVEN // 10, UNEVEN, None),
    "not as the rows lie": (UNEVEN[::-1] // 10, UNEVEN, [(0, 63)]),
    "half in one group, the rest everywhere": (
        np.where(np.arange(128) == 124, 6400, 50),
        np.full(128, 250),
        [(124, 124)],
    ),
    "more in a group that had most": (
        np.where(np.arange(128) == 124, 6400, 50),
        np.where(np.arange(128) == 124, 13000, 250),
        [(124, 124)],
    ),
    "as much more in the group that had most": (
        np.where(np.arange(128) == 124, 6400, 50),
        np.where(np.arange(128) == 124, 32000, 250),
        None,
    ),
    "in a new state": (np.where(np.arange(128) == 124, 6400, 50), np.zeros(128, np.int64), [(124, 124)]),
    "groups without rows": (np.array([9, 0, 8, 0]), np.array([90, 0, 80, 0]), None),
}


@pytest.mark.parametrize("case", PATTERNS)
def test_a_pattern_is_changes_where_few_rows_were(case: str) -> None:
    changes, rows, ranges = PATTERNS[case]
    found = pattern_of(np.asarray(changes, np.int64), rows)
    assert (None if found is None else list(found.ranges)) == ranges


def test_changes_at_random_are_no_pattern() -> None:
    draw = np.random.default_rng(7)
    for size in (3, 30, 300, 30_000):
        for _ in range(50):
            changes = np.bincount(draw.integers(0, 128, size), minlength=128)
            assert pattern_of(changes, np.full(128, 5000)) is None


# ---- what is read


class Watched(CountingStorage):
    """Keeps how much of segments was read."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.read_bytes = 0

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        data = super().read_range(path, offset, length)
        if path.startswith("segments/"):
            self.read_bytes += data.size
        return data

    def open_input(self, path: str) -> Any:
        return MemoryStorage.open_input(self, path)  # Copies read so.


@pytest.fixture
def watched() -> Iterator[Callable[[str], Watched]]:
    names = []

    def make(name: str) -> Watched:
        names.append(f"diff-{name}")
        return Watched(names[-1])

    yield make
    for name in names:
        MemoryStorage.reset(name)


def test_copies_are_told_equal_by_digest_wherever_they_lie(watched: Callable[[str], Watched]) -> None:
    first, second = watched("first"), watched("second")
    store, other = CheckpointStore(first), CheckpointStore(second)
    value = declare.value_state("op", "s", keys={"k": pa.int64()}, values={"n": pa.int64()})
    split = declare.even_split_state("op", "e", columns={"n": pa.int64()})
    rows, op = pa.table({"k": range(20_000), "n": range(20_000)}), Operator("op", 2, 16)
    write(store, {value: [owned(rows, ["k"], op, i) for i in (0, 1)], split: [rows.select(["n"])] * 2}, options=BIG)
    store.copy(store.open(), other)
    # The copy goes on in its own store, with the segments under names of their own.
    third = CheckpointStore(watched("third"))
    publish_rescaled(store.open(), store.open().graph.at(3), store=store, target=third)
    for target in (other, third):
        first.read_bytes = second.read_bytes = 0
        diff = diff_checkpoints(store.open(), target.open())
        assert diff.same
        assert first.read_bytes == second.read_bytes == diff.read_bytes == 0


def test_equal_bytes_are_read_where_they_are_declared_otherwise(tmp_path: Path) -> None:
    """A segment is no proof where the two records read it as different columns."""
    store = open_store(str(tmp_path))
    first = declare.value_state("op", "s", keys={"k": pa.int64()}, values={"a": pa.int64(), "b": pa.int64()})
    table = pa.table({"k": [1, 2], "a": [1, 1], "b": [2, 2]})
    write(store, {first: [table]})
    before = store.open()
    columns = first.current.fields
    swapped = (columns[0], replace(columns[1], name="b"), replace(columns[2], name="a"))
    later = replace(first, schemas=(*first.schemas, SchemaVersion(2, swapped)))
    after = StoreCheckpoint(before.storage, replace(before.record, states=(later,)), manifest=before.manifest)
    [state] = diff_checkpoints(before, after).states
    assert [(one.change, one.column, one.was) for one in state.columns] == [
        ("renamed", "b", "a"),
        ("renamed", "a", "b"),
    ]
    assert counts(state) == (0, 0, 0)
    defaults = []
    for text in ("7", "8"):
        added = (*columns, replace(columns[2], id=4, name="c", default=text))
        grown = replace(first, schemas=(*first.schemas, SchemaVersion(2, added)), last_field_id=4)
        record = replace(before.record, states=(grown,))
        defaults.append(StoreCheckpoint(before.storage, record, manifest=before.manifest))
    [state] = diff_checkpoints(*defaults).states
    assert ([one.change for one in state.columns], counts(state)) == (["default"], (0, 0, 2))
    assert diff_checkpoints(defaults[0], defaults[0]).read_bytes == 0


def test_many_handles_without_rows_are_the_same_by_metadata(tmp_path: Path) -> None:
    """Twenty states of 4096 subtasks, rescaled to 1024."""
    store = open_store(str(tmp_path), durable=False)
    states = [declare.value_state("op", f"s{i}", keys={"k": pa.int64()}, values={}) for i in range(20)]
    operator = Operator("op", 4096, 4096)
    write(store, {state: [pa.table({"k": pa.array([], pa.int64())})] for state in states}, operator=operator)
    source = store.open()
    publish_rescaled(source, source.graph.at(1024), store=store)
    assert diff_checkpoints(source, store.open()).same


@pytest.mark.s3
def test_requests_on_s3_are_two_manifests_and_what_changed(moto: S3Server) -> None:
    data_store(f"s3://{BUCKET}/diff", **moto.options())
    store = open_store(f"s3://{BUCKET}/diff", **moto.options())

    def diff(start: int, end: int) -> tuple[CheckpointDiff, dict[str, int]]:
        ends = store.open(start), store.open(end)
        before = store.stats.copy()
        found = diff_checkpoints(*ends)
        since = store.stats.since(before).operations
        return found, {name: one.calls for name, one in since.items() if one.calls}

    found, calls = diff(3, 4)
    assert found.same
    assert calls == {"read_range": 2}
    found, calls = diff(5, 6)
    assert not found.same
    files = {one.path for one in store.storage.list("segments/")}
    touched = {path for path in store.open(5).handles["path"].to_pylist() if path in files}
    # The deltas of checkpoint 6 are inline. Of each file below them, two ranges at most.
    assert {*calls} == {"read_range"}
    assert calls["read_range"] <= 2 + 2 * len(touched)
