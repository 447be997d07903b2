"""What an epoch begins from: layers of states, what workers keep, and the levels of an epoch."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.dataflow import events as ev
from stateformat.backends.runtime import OperatorState, merge_snapshot
from stateformat.backends.spark.epoch import levels_of
from stateformat.backends.spark.messages import RestorePoint
from stateformat.backends.spark.task_cache import CachedTask, TaskCache, local_directory
from stateformat.backends.state import SubtaskStates
from stateformat.graph import Edge, JobGraph, Operator, OperatorId, Partitioner
from stateformat.model import ON_TOP, CheckpointId, Handle, Mode
from stateformat.snapshot import Snapshot, WriteContext
from stateformat.states import declare
from stateformat.store import open as open_store
from tests.worlds.dataflow import tiny_job

KEYS = {"key": pa.int64()}
STATES = (
    declare.value_state("op", "sum", keys=KEYS, values={"n": pa.int64()}),
    declare.value_state("op", "rare", keys=KEYS, values={"n": pa.int64()}),
    declare.even_split_state("op", "list", columns={"n": pa.int64()}),
)
Versions = Mapping[str, tuple[int | None, ...]]


def handle(state: str, layer: int, rows: int = 10, *, path: str | None = "") -> Handle:
    mode = Mode.EVEN_SPLIT if state == "list" else Mode.KEYED
    name = f"{state}-{layer}" if path == "" else path
    return Handle("op", state, mode, 0, layer, None, 1, name, 0, rows, rows * 2, rows * 100)


def state_of(versions: Versions, *handles: Handle) -> OperatorState:
    return OperatorState(Snapshot("op", 0, handles), versions)


def layers(found: OperatorState, state: str) -> list[tuple[int, str | None]]:
    return [(item.layer, item.path) for item in found.snapshot.handles if item.state == state]


SUM = (handle("sum", 0), handle("sum", 1))
TOP, WHOLE, EMPTY = handle("sum", ON_TOP, path="new"), handle("sum", 0, path="whole"), handle("sum", 0, 0, path=None)


@pytest.mark.parametrize(
    ("before", "written", "kept", "found", "versions"),
    [
        (
            state_of({"sum": (3, 5, 8)}, handle("sum", 0), handle("sum", 2), handle("sum", 3)),
            [TOP],
            {"sum": 2},
            {"sum": [(0, "sum-0"), (2, "sum-2"), (3, "new")]},
            {"sum": (3, 5, 9)},
        ),
        (
            state_of({"sum": (3, None), "rare": (1,)}, *SUM, handle("rare", 0)),
            [],
            {"sum": 2, "rare": 1},
            {"sum": [(0, "sum-0"), (1, "sum-1")], "rare": [(0, "rare-0")]},
            {"sum": (3, None), "rare": (1,)},
        ),
        (state_of({"sum": (3, 4)}, *SUM), [WHOLE], {"sum": 0}, {"sum": [(0, "whole")]}, {"sum": (9,)}),
        (state_of({"sum": (3,)}, SUM[0]), [EMPTY], {"sum": 0}, {"sum": [(0, None)]}, {"sum": (9,)}),
        (
            None,
            [SUM[0], handle("list", 0)],
            {"sum": 0},
            {"sum": [(0, "sum-0")], "list": [(0, "list-0")]},
            {"sum": (9,)},
        ),
        (
            state_of({"sum": (1,)}, SUM[0], handle("list", 0)),
            [handle("list", 0, path="later")],
            {"sum": 1},
            {"sum": [(0, "sum-0")], "list": [(0, "later")]},
            {"sum": (1,)},
        ),
        (
            state_of({"sum": (None, 7)}, SUM[0], handle("sum", 0, path="b"), handle("sum", 1)),
            [TOP],
            {"sum": 1},
            {"sum": [(0, "sum-0"), (0, "b"), (1, "new")]},
            {"sum": (None, 9)},
        ),
    ],
    ids=["a delta", "nothing", "whole", "whole and empty", "the first", "not keyed: whole", "several segments"],
)
def test_a_snapshot_is_merged_with_the_layers_that_stay(
    before: OperatorState | None, written: list[Handle], kept: Mapping[str, int], found: Any, versions: Versions
) -> None:
    merged = merge_snapshot(Snapshot("op", 0, tuple(written)), kept, before, 9)
    assert {state: layers(merged, state) for state in found} == found
    assert merged.versions == versions
    assert merged.snapshot.carried == ()


def test_a_layer_of_several_segments_counts_once_with_the_rows_of_all_and_their_share_of_bytes() -> None:
    found = state_of({"sum": (None, 7)}, handle("sum", 0, 10), handle("sum", 0, 30, path="b"), handle("sum", 1, 5))
    point = RestorePoint({"op": found})
    assert point.layers("op") == {"sum": [(None, 40, 2000), (7, 5, 250)]}
    assert point.layers("another") == {}


@pytest.mark.parametrize(
    ("versions", "version", "can"),
    [
        ({"sum": (3, 6, 9)}, 3, True),
        ({"sum": (3, 6, 9)}, 8, True),
        ({"sum": (3, 6, 9)}, 2, False),
        ({"sum": (9,)}, 8, False),
        ({"sum": (None, 9)}, 1, True),
        ({"sum": (None, 9), "rare": (5,)}, 4, False),
        ({"sum": (None, 9), "rare": (5,)}, 5, True),
        ({"sum": ()}, 1, True),
        ({}, 1, True),
    ],
)
def test_a_state_can_catch_up_unless_one_was_written_whole_since(versions: Versions, version: int, can: bool) -> None:
    assert RestorePoint({"op": state_of(versions)}).can_catch_up(version) is can


def graph() -> JobGraph:
    source, target = OperatorId("in"), OperatorId("op")
    edge = Edge("in-op", source, target, Partitioner.HASH, key_columns=("key",))
    return JobGraph((Operator(source, 1, 128), Operator(target, 1, 128)), (edge,))


def empty_states() -> SubtaskStates:
    return SubtaskStates(graph().operator("op"), 0, STATES)


def sums_of(states: SubtaskStates) -> dict[int, int]:
    return {row["key"]: row["n"] for row in states.value("sum").rows().to_pylist()}


class Epochs:
    """The states of one subtask over epochs, none of which is published."""

    def __init__(self) -> None:
        store = open_store(f"memory://{uuid.uuid4().hex}")
        self.context: WriteContext = store.begin(parent=None, job_id="j", graph=graph(), states=STATES).context
        self.point = RestorePoint()
        self.version = 0
        self.states = empty_states()

    def epoch(self, sums: Mapping[int, int], entries: Sequence[int] = ()) -> None:
        """Write what has changed as a worker does; make a restore point as the driver does."""
        self.version += 1
        context = replace(self.context, checkpoint_id=CheckpointId(self.version))
        states = self.states
        states.begin(self.version)
        keys, values = (pa.array(each, pa.int64()) for each in (sums.keys(), sums.values()))
        states.value("sum").put(pa.record_batch({"key": keys}), pa.record_batch({"n": values}))
        states.entries("list").replace(pa.table({"n": pa.array(entries, pa.int64())}))
        with context.subtask("op", 0) as writer:
            kept = states.snapshot(writer, self.point.layers("op"))
        merged = merge_snapshot(writer.snapshot(), kept, self.point.operators.get("op"), self.version)
        self.point = RestorePoint({"op": merged}, barrier=self.version)
        self.context = context

    def restored(self) -> SubtaskStates:
        """New states, read as they are now."""
        fresh = empty_states()
        fresh.restore(self.point.read_tasks(self.context, "op"))
        return fresh


def test_states_that_no_manifest_names_are_read_whole() -> None:
    epochs = Epochs()
    for number in range(1, 6):
        epochs.epoch({n: n for n in range(500)} if number == 1 else {number: -number, 1000 + number: 1}, [number])
    assert len(epochs.point.operators["op"].versions["sum"]) > 1
    fresh = epochs.restored()
    assert sums_of(fresh) == sums_of(epochs.states)
    assert fresh.entries("list").rows()["n"].to_pylist() == [5]


@pytest.mark.parametrize("behind", [1, 2, 4])
def test_a_worker_that_is_behind_reads_only_the_layers_above_what_it_has(behind: int) -> None:
    epochs = Epochs()
    epochs.epoch({n: n for n in range(500)}, [1])
    old = epochs.restored()
    old.begin(1)
    with epochs.context.subtask("op", 0) as writer:
        old.snapshot(writer, epochs.point.layers("op"))
    for number in range(behind):
        epochs.epoch({number: -1, 600 + number: 1}, [number])
    point = epochs.point
    assert point.can_catch_up(1)
    tasks = point.read_tasks(epochs.context, "op", above=1)
    assert tasks["sum"].slices.num_rows < len(point.operators["op"].versions["sum"])
    wanted = {name: [item for item in some if (item.version or 0) > 1] for name, some in point.layers("op").items()}
    old.catch_up(tasks, wanted)
    assert sums_of(old) == sums_of(epochs.states)
    assert old.entries("list").rows()["n"].to_pylist() == [behind - 1]


class Chain:
    """In place of an operator chain: states, and whether it was closed."""

    def __init__(self, rows: int = 0, *, fails: bool = False) -> None:
        self.states = {"op": empty_states()}
        numbers = pa.array(range(rows), pa.int64())
        self.states["op"].value("sum").put(pa.record_batch({"key": numbers}), pa.record_batch({"n": numbers}))
        self.closed = False
        self.fails = fails

    def close(self) -> None:
        self.closed = True
        if self.fails:
            raise OSError("it does not close")


LARGE = 1 << 40
FIRST, SECOND, THIRD = (("run", ev.TaskId("op", number)) for number in range(3))


class Cache(TaskCache):
    """A cache of tasks that are made for it."""

    def add(self, key: Any, token: bytes, chain: Any = None, *, limit_bytes: int = LARGE) -> tuple[CachedTask, Chain]:
        chain = chain or Chain()
        cached = CachedTask(token, 1, chain)
        self.keep(key, cached, limit_bytes=limit_bytes)
        return cached, chain


def test_what_is_kept_is_taken_once_by_a_token_that_counts() -> None:
    cache = Cache()
    mine, chain = cache.add(FIRST, b"accepted")
    assert cache.take(SECOND, {b"accepted": 1}) is None
    assert cache.take(FIRST, {b"other": 2, b"accepted": 1}) is mine
    assert cache.take(FIRST, {b"accepted": 1}) is None
    assert not chain.closed


def test_what_an_attempt_has_left_that_does_not_count_is_released() -> None:
    cache = Cache()
    _, chain = cache.add(FIRST, b"refused", Chain(fails=True))
    assert cache.take(FIRST, {b"accepted": 1}) is None
    assert chain.closed
    assert cache.take(FIRST, {b"refused": 1}) is None


def test_a_later_attempt_takes_the_place_of_an_earlier_one() -> None:
    cache = Cache()
    (_, early), (second, late) = cache.add(FIRST, b"first"), cache.add(FIRST, b"second")
    assert (early.closed, late.closed) == (True, False)
    assert cache.take(FIRST, {b"first": 1, b"second": 2}) is second


def test_what_was_used_least_recently_goes_to_disk_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/elsewhere")
    assert local_directory() == str(tmp_path)
    cache = Cache()
    size = Chain(1000).states["op"].size_bytes
    made = [cache.add(key, b"token", Chain(1000), limit_bytes=2 * size + size // 2) for key in (FIRST, SECOND, THIRD)]
    assert [chain.closed for _, chain in made] == [True, False, False]
    assert len(list(tmp_path.iterdir())) == 1
    back = cache.take(FIRST, {b"token": 1})
    assert back is not None
    assert (back.chain, back.version) == (None, 1)
    assert sums_of(back.states({"op": empty_states()})["op"]) == {n: n for n in range(1000)}
    back.release()
    assert list(tmp_path.iterdir()) == []
    in_memory = cache.take(SECOND, {b"token": 1})
    assert in_memory is made[1][0]
    assert in_memory.states({}) is made[1][1].states


def test_what_does_not_fit_on_the_disk_either_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(SubtaskStates, "save", full)
    cache = Cache()
    _, chain = cache.add(FIRST, b"token", Chain(10), limit_bytes=0)
    assert chain.closed
    assert cache.take(FIRST, {b"token": 1}) is None


def test_what_other_runs_have_left_is_released() -> None:
    cache = Cache()
    (_, before), (new, after) = cache.add(("old run", FIRST[1]), b"token"), cache.add(FIRST, b"token")
    cache.drop_others({"run"})
    assert (before.closed, after.closed) == (True, False)
    assert cache.take(FIRST, {b"token": 1}) is new


@pytest.mark.parametrize("value", ["", "/nowhere/at/all"])
def test_without_a_directory_of_spark_the_system_has_one(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", value)
    assert local_directory() is None


@pytest.mark.parametrize(
    ("vertices", "edges", "finished", "levels", "last"),
    [
        ({"a": 1}, [], [], {"a": 0}, 0),
        ({"a": 1, "b": 1, "c": 2}, ["a hash b", "b hash c"], [], {"a": 0, "b": 1, "c": 2}, 2),
        # The longest way counts: c waits for b.
        ({"a": 1, "b": 1, "c": 1}, ["a hash b", "a hash c", "b hash c"], [], {"a": 0, "b": 1, "c": 2}, 2),
        ({"a": 1, "x": 1, "b": 1}, ["a hash b", "x hash b"], [], {"a": 0, "x": 0, "b": 1}, 1),
        # An edge leaves from within a chain.
        ({"a+m": 1, "b": 1}, ["m hash b"], [], {"a": 0, "b": 1}, 1),
        # What has finished is not there: its consumers come first.
        ({"a": 1, "b": 1, "c": 1}, ["a hash b", "b hash c"], ["a"], {"b": 0, "c": 1}, 1),
        ({"a": 1, "x": 1, "b": 1, "c": 1}, ["a hash b", "b hash c", "x hash c"], ["a", "b"], {"x": 0, "c": 1}, 1),
        # A loop has one level more, where its head hears what was fed back.
        ({"a": 1, "h": 1, "b": 1}, ["a hash h", "h hash b", "b feedback h"], [], {"a": 0, "h": 1, "b": 2}, 3),
        ({"a": 1, "h": 1}, ["a hash h", "h feedback h"], [], {"a": 0, "h": 1}, 2),
        ({"a": 1, "h": 1, "c": 1}, ["a hash h", "h hash c", "h feedback h"], ["a", "h"], {"c": 0}, 0),
        ({"a": 1}, [], ["a"], {}, 0),
    ],
)
def test_each_task_comes_behind_all_that_it_reads(
    vertices: dict[str, int], edges: list[str], finished: list[str], levels: dict[str, int], last: int
) -> None:
    job: Any = tiny_job(vertices, *edges)
    assert levels_of(job.vertices, finished) == (levels, last)
