"""What an epoch begins from: layers of states, what workers keep, and the levels of an epoch."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.runtime import OperatorState, merge_snapshot
from stateformat.backends.spark.driver.epoch import levels_of
from stateformat.backends.spark.protocol import RestorePoint
from stateformat.backends.spark.worker.task_cache import CachedTask, TaskCache, local_directory
from stateformat.backends.state import SubtaskStates
from stateformat.graph import Edge, JobGraph, Operator, OperatorId, Partitioner
from stateformat.model import ON_TOP, CheckpointId, Handle, Mode
from stateformat.snapshot import Snapshot, WriteContext
from stateformat.states import declare
from stateformat.store import open as open_store
from tests.tiny_jobs import tiny_job

KEYS = {"key": pa.int64()}
STATES = (
    declare.value_state("op", "sum", keys=KEYS, values={"n": pa.int64()}),
    declare.value_state("op", "rare", keys=KEYS, values={"n": pa.int64()}),
    declare.even_split_state("op", "list", columns={"n": pa.int64()}),
)


def handle(state: str, layer: int, rows: int = 10, *, mode: Mode = Mode.KEYED, path: str = "") -> Handle:
    name = path or f"{state}-{layer}"
    return Handle("op", state, mode, 0, layer, None, 1, name, 0, rows, rows * 2, rows * 100)


def part(versions: Mapping[str, tuple[int | None, ...]], *handles: Handle) -> OperatorState:
    return OperatorState(Snapshot("op", 0, handles), versions)


def layers(found: OperatorState, state: str) -> list[tuple[int, str | None]]:
    return [(item.layer, item.path) for item in found.snapshot.handles if item.state == state]


# What a report and the base before make together ------------------------------------------------------------------------------


def test_a_delta_lies_one_above_the_layers_that_stay() -> None:
    before = part({"sum": (3, 5, 8)}, handle("sum", 0), handle("sum", 2), handle("sum", 3))
    found = merge_snapshot(Snapshot("op", 0, (handle("sum", ON_TOP, path="new"),)), {"sum": 2}, before, 9)
    assert layers(found, "sum") == [(0, "sum-0"), (2, "sum-2"), (3, "new")]
    assert found.versions == {"sum": (3, 5, 9)}


def test_what_was_not_written_stays_as_it_is() -> None:
    before = part({"sum": (3, None), "rare": (1,)}, handle("sum", 0), handle("sum", 1), handle("rare", 0))
    found = merge_snapshot(Snapshot("op", 0, ()), {"sum": 2, "rare": 1}, before, 9)
    assert layers(found, "sum") == [(0, "sum-0"), (1, "sum-1")]
    assert found.versions == {"sum": (3, None), "rare": (1,)}
    assert found.snapshot.carried == ()


def test_what_was_written_whole_hides_all_that_was_there() -> None:
    before = part({"sum": (3, 4)}, handle("sum", 0), handle("sum", 1))
    found = merge_snapshot(Snapshot("op", 0, (handle("sum", 0, path="whole"),)), {"sum": 0}, before, 9)
    assert layers(found, "sum") == [(0, "whole")]
    assert found.versions == {"sum": (9,)}


def test_what_was_written_whole_and_empty_is_a_layer_too() -> None:
    before = part({"sum": (3,)}, handle("sum", 0))
    empty = handle("sum", 0, rows=0)._replace(path=None)
    found = merge_snapshot(Snapshot("op", 0, (empty,)), {"sum": 0}, before, 9)
    assert found.versions == {"sum": (9,)}
    assert not RestorePoint({"op": found}).can_catch_up(8)


def test_without_a_base_everything_is_new_and_states_without_layers_are_whole_each_time() -> None:
    written = Snapshot("op", 0, (handle("sum", 0), handle("list", 0, mode=Mode.EVEN_SPLIT)))
    found = merge_snapshot(written, {"sum": 0}, None, 1)
    assert (layers(found, "sum"), layers(found, "list")) == ([(0, "sum-0")], [(0, "list-0")])
    again = merge_snapshot(
        Snapshot("op", 0, (handle("list", 0, mode=Mode.EVEN_SPLIT, path="later"),)), {"sum": 1}, found, 2
    )
    assert (layers(again, "sum"), layers(again, "list")) == ([(0, "sum-0")], [(0, "later")])
    assert again.versions == {"sum": (1,)}


def test_a_layer_of_several_segments_counts_once_with_the_rows_of_all_and_their_share_of_bytes() -> None:
    found = part({"sum": (None, 7)}, handle("sum", 0, 10), handle("sum", 0, 30, path="b"), handle("sum", 1, 5))
    base = RestorePoint({"op": found})
    assert base.layers("op") == {"sum": [(None, 40, 2000), (7, 5, 250)]}
    assert base.layers("another") == {}
    kept = merge_snapshot(Snapshot("op", 0, (handle("sum", ON_TOP, path="top"),)), {"sum": 1}, found, 8)
    assert layers(kept, "sum") == [(0, "sum-0"), (0, "b"), (1, "top")]


@pytest.mark.parametrize(
    ("versions", "version", "may"),
    [
        ({"sum": (3, 6, 9)}, 3, True),
        ({"sum": (3, 6, 9)}, 8, True),
        ({"sum": (3, 6, 9)}, 2, False),
        ({"sum": (None, 9)}, 1, True),
        ({"sum": (None, 9), "rare": (5,)}, 4, False),
        ({"sum": (None, 9), "rare": (5,)}, 5, True),
        ({"sum": ()}, 1, True),
        ({}, 1, True),
    ],
)
def test_a_state_may_catch_up_unless_something_was_written_whole_since(
    versions: Mapping[str, tuple[int | None, ...]], version: int, may: bool
) -> None:
    assert RestorePoint({"op": part(versions)}).can_catch_up(version) is may


# Through a store ---------------------------------------------------------------------------------------------------------


def graph() -> JobGraph:
    source, target = OperatorId("in"), OperatorId("op")
    return JobGraph(
        (Operator(source, 1, 128), Operator(target, 1, 128)),
        (Edge("in-op", source, target, Partitioner.HASH, key_columns=("key",)),),
    )


class Epochs:
    """The states of one subtask over epochs, none of which is published."""

    def __init__(self) -> None:
        store = open_store(f"memory://{uuid.uuid4().hex}")
        self.context: WriteContext = store.begin(parent=None, job_id="j", graph=graph(), states=STATES).context
        self.base = RestorePoint()
        self.version = 0
        self.states = self.made()

    def made(self) -> SubtaskStates:
        return SubtaskStates(graph().operator("op"), 0, STATES)

    def epoch(self, sums: Mapping[int, int], entries: Sequence[int] = ()) -> None:
        """Write what has changed, as a worker does, and take it for the base of the next epoch, as the driver does."""
        self.version += 1
        context = replace(self.context, checkpoint_id=CheckpointId(self.version))
        states = self.states
        states.begin(self.version)
        keys, values = (pa.array(some, pa.int64()) for some in (sums.keys(), sums.values()))
        states.value("sum").put(pa.record_batch({"key": keys}), pa.record_batch({"n": values}))
        states.entries("list").replace(pa.table({"n": pa.array(entries, pa.int64())}))
        with context.subtask("op", 0) as writer:
            kept = states.snapshot(writer, self.base.layers("op"))
        before = self.base.operators.get("op")
        self.base = RestorePoint(
            {"op": merge_snapshot(writer.snapshot(), kept, before, self.version)}, barrier=self.version
        )
        self.context = context

    @property
    def sums(self) -> dict[int, int]:
        return sums_of(self.states)


def sums_of(states: SubtaskStates) -> dict[int, int]:
    return {row["key"]: row["n"] for row in states.value("sum").rows().to_pylist()}


def several() -> tuple[Epochs, dict[int, dict[int, int]]]:
    """Five epochs, of which the first writes much and the others little; and what there was after each."""
    epochs, found = Epochs(), {}
    for number in range(1, 6):
        epochs.epoch({n: n for n in range(500)} if number == 1 else {number: -number, 1000 + number: 1}, [number])
        found[number] = epochs.sums
    return epochs, found


def test_a_base_that_no_manifest_names_is_read_whole() -> None:
    epochs, found = several()
    assert len(epochs.base.operators["op"].versions["sum"]) > 1
    fresh = epochs.made()
    fresh.restore(epochs.base.read_tasks(epochs.context, "op"))
    assert sums_of(fresh) == found[5]
    assert fresh.entries("list").rows()["n"].to_pylist() == [5]


@pytest.mark.parametrize("behind", [1, 2, 4])
def test_a_worker_that_is_behind_reads_only_the_layers_above_what_it_has(behind: int) -> None:
    epochs = Epochs()
    epochs.epoch({n: n for n in range(500)}, [1])
    old = epochs.made()
    old.restore(epochs.base.read_tasks(epochs.context, "op"))
    old.begin(1)
    with epochs.context.subtask("op", 0) as writer:
        old.snapshot(writer, epochs.base.layers("op"))
    for number in range(behind):
        epochs.epoch({number: -1, 600 + number: 1}, [number])
    base = epochs.base
    assert base.can_catch_up(1)
    tasks = base.read_tasks(epochs.context, "op", above=1)
    assert sum(slices.num_rows for slices in [tasks["sum"].slices]) < len(base.operators["op"].versions["sum"])
    wanted = {name: [item for item in some if (item.version or 0) > 1] for name, some in base.layers("op").items()}
    old.catch_up(tasks, wanted)
    assert sums_of(old) == epochs.sums
    assert old.entries("list").rows()["n"].to_pylist() == [behind - 1]


# What a worker keeps -------------------------------------------------------------------------------------------------------


class Activated:
    """In place of an activation: states, and whether it was closed."""

    def __init__(self, states: Mapping[str, SubtaskStates], *, fails: bool = False) -> None:
        self.states = states
        self.closed = False
        self.fails = fails

    def close(self) -> None:
        self.closed = True
        if self.fails:
            raise OSError("it does not close")


def kept(token: bytes, version: int = 1, rows: int = 0, *, fails: bool = False) -> tuple[CachedTask, Activated]:
    states = SubtaskStates(graph().operator("op"), 0, STATES)
    numbers = pa.array(range(rows), pa.int64())
    states.value("sum").put(pa.record_batch({"key": numbers}), pa.record_batch({"n": numbers}))
    activation = Activated({"op": states}, fails=fails)
    made: Any = activation
    return CachedTask(token, version, made), activation


LARGE = 1 << 40


def test_what_is_kept_is_taken_once_by_a_token_that_counts() -> None:
    cache = TaskCache()
    mine, activation = kept(b"accepted")
    cache.keep(("run", 1), mine, limit_bytes=LARGE)
    assert cache.take(("run", 2), {b"accepted": 1}) is None
    assert cache.take(("run", 1), {b"other": 2, b"accepted": 1}) is mine
    assert cache.take(("run", 1), {b"accepted": 1}) is None
    assert not activation.closed


def test_what_an_attempt_has_left_that_does_not_count_is_given_up() -> None:
    cache = TaskCache()
    mine, activation = kept(b"refused", fails=True)
    cache.keep(("run", 1), mine, limit_bytes=LARGE)
    assert cache.take(("run", 1), {b"accepted": 1}) is None
    assert activation.closed
    assert cache.take(("run", 1), {b"refused": 1}) is None


def test_a_later_attempt_takes_the_place_of_an_earlier_one() -> None:
    cache = TaskCache()
    first, early = kept(b"first")
    second, late = kept(b"second")
    cache.keep(("run", 1), first, limit_bytes=LARGE)
    cache.keep(("run", 1), second, limit_bytes=LARGE)
    assert (early.closed, late.closed) == (True, False)
    assert cache.take(("run", 1), {b"first": 1, b"second": 2}) is second


def test_what_was_not_used_for_longest_goes_to_disk_and_comes_back_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/elsewhere")
    assert local_directory() == str(tmp_path)
    cache = TaskCache()
    made = [kept(bytes([number]), number, 1000) for number in range(3)]
    size = made[0][1].states["op"].size_bytes
    for number, (one, _) in enumerate(made):
        cache.keep(("run", number), one, limit_bytes=2 * size + size // 2)
    assert [activation.closed for _, activation in made] == [True, False, False]
    assert len(list(tmp_path.iterdir())) == 1
    back = cache.take(("run", 0), {bytes([0]): 0})
    assert back is not None
    assert (back.chain, back.version) == (None, 0)
    empty = {"op": SubtaskStates(graph().operator("op"), 0, STATES)}
    assert sums_of(back.states(empty)["op"]) == {n: n for n in range(1000)}
    back.release()
    assert list(tmp_path.iterdir()) == []
    in_memory = cache.take(("run", 1), {bytes([1]): 1})
    assert in_memory is made[1][0]
    assert in_memory.states({}) is made[1][1].states


def test_what_does_not_fit_on_the_disk_either_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(SubtaskStates, "save", full)
    cache = TaskCache()
    mine, activation = kept(b"token", rows=10)
    cache.keep(("run", 1), mine, limit_bytes=0)
    assert activation.closed
    assert cache.take(("run", 1), {b"token": 1}) is None


def test_what_other_runs_have_left_is_given_up() -> None:
    cache = TaskCache()
    old, before = kept(b"token")
    new, after = kept(b"token")
    cache.keep(("old run", 1), old, limit_bytes=LARGE)
    cache.keep(("run", 1), new, limit_bytes=LARGE)
    cache.drop_others({"run"})
    assert (before.closed, after.closed) == (True, False)
    assert cache.take(("run", 1), {b"token": 1}) is new


def test_without_a_place_that_spark_names_files_lie_where_the_system_puts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "/nowhere/at/all"):
        monkeypatch.setenv("SPARK_LOCAL_DIRS", value)
        assert local_directory() is None


# Levels ------------------------------------------------------------------------------------------------------------------


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
