"""The running state in layers, written by several workers in turn: what is stored, taken over and
kept on disk.

In each epoch some worker, new, left behind or up to date, brings itself up to date, changes the
state and writes what it must. After each, the checkpoint must hold what the dictionaries do. Keys
have nulls, strings and structs.
"""

from __future__ import annotations

import random
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stateformat.backends.dataflow import Dataflow, Operator, Timers, ValueState
from stateformat.backends.dataflow.compile import compile_job
from stateformat.backends.dataflow.graph import graph_of
from stateformat.backends.state import (
    Layer,
    SubtaskStates,
    columns as parts_module,
    keyed_collections as chains_module,
    rows as store_module,
)
from stateformat.errors import DamagedCheckpoint, InvalidInput
from stateformat.model import State
from stateformat.segments import WriteOptions
from stateformat.states import declare, delta_policy as folding
from stateformat.store import open as open_store
from stateformat.validation import validate
from tests.dataflow.test_chain_snapshots import KEY, Chunks, Pass, command, started
from tests.state.layers_world import GRAPH, OPERATOR, Driver, Model, change, check, contents, expected, foreign, fresh

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.truth) for seed in range(1, 8))]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holes are closed, arenas squeezed and layers folded as if states were large."""
    monkeypatch.setattr(store_module, "HOLES_MIN", 3)
    monkeypatch.setattr(parts_module, "_SQUEEZE_ROWS_MIN", 3)
    monkeypatch.setattr(parts_module, "_ARRAYS_MAX", 2)
    monkeypatch.setattr(chains_module, "_STEP_ELEMENTS", 1)
    monkeypatch.setattr(folding, "_LAYER_ROWS", 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_that_take_turns_write_what_dictionaries_hold(seed: int, hasty: None, tmp_path: Path) -> None:
    model, driver = Model(random.Random(seed)), Driver()
    chance = model.chance
    workers: list[tuple[int, SubtaskStates | Path]] = []
    deltas = folds = 0
    for version in range(1, 26):
        if version > 3 and chance.random() < 0.12:
            driver.epoch(version, foreign(driver, model))
            check(driver, model)
            continue
        if workers and chance.random() < 0.85:
            known, states = workers.pop(chance.choice([-1, chance.randrange(len(workers))]))
            if isinstance(states, Path):
                folder, states = states, fresh()
                states.load(folder)
            states.catch_up(*driver.newer(known))
            states.begin(version)
        else:
            states = driver.restored(version)
        assert contents(states) == expected(model)
        if version == 1 or chance.random() < 0.85:
            change(states, model, deletes_only=chance.random() < 0.2, filling=version == 1)
        before = driver.layers
        states.layers = before if chance.random() < 0.97 else None
        driver.epoch(version, lambda writer, _, states=states: states.snapshot(writer))
        deltas += sum(kept > 0 for kept in states.layers_kept.values())
        folds += sum(0 < kept < len(before.get(name, ())) for name, kept in states.layers_kept.items())
        check(driver, model)
        if chance.random() < 0.3:
            states.save(tmp_path / str(version))
            workers.append((version, tmp_path / str(version)))
        else:
            workers.append((version, states))
    assert deltas > 32
    assert folds > 2
    assert not validate(driver.store.storage, level="full").findings
    for known, states in workers:
        if isinstance(states, SubtaskStates):
            states.catch_up(*driver.newer(known))
            assert contents(states) == expected(model)


NUMBERS = (declare.value_state("op", "v", keys={"k": pa.int64()}, values={"n": pa.int64()}),)


KEYS_ONLY = (declare.value_state("op", "v", keys={"k": pa.int64()}, values={}),)


def numbers(*keys: int, start: int = 0) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    return pa.record_batch({"k": pa.array(keys, pa.int64())}), pa.record_batch(
        {"n": [*range(start, start + len(keys))]}
    )


def put(states: SubtaskStates, keys: Any, start: int = 0) -> None:
    given, values = numbers(*keys, start=start)
    kept = states.value("v")
    kept.put(given, values if "n" in kept.rows().schema.names else one_column_less(values))


def one_column_less(values: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), len(values), [None]))


def begun(rows: int = 0, declared: tuple[State, ...] = NUMBERS) -> tuple[Driver, SubtaskStates]:
    """A driver, and its worker, which has written ``rows`` rows as version 1."""
    driver = Driver(declared)
    states = driver.restored(1)
    put(states, range(rows))
    driver.epoch(1, states.snapshot)
    return driver, states


def held(states: SubtaskStates) -> dict[int, int]:
    table = states.value("v").rows()
    return dict(zip(table["k"].to_pylist(), table["n"].to_pylist(), strict=True))


@pytest.mark.parametrize("hot", [False, True], ids=["any keys change", "mostly the same keys change"])
def test_layers_stay_few_and_what_is_written_is_a_few_times_what_has_changed(
    hot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "_LAYER_ROWS", 1)
    base, few, epochs = 6_000, 40, 150
    states = SubtaskStates(OPERATOR, 0, NUMBERS)
    store = open_store("memory://few")
    context = store.begin(parent=None, job_id="j", graph=GRAPH, states=NUMBERS).context
    chance = np.random.default_rng(5)
    layers: list[Layer] = []
    written = most = whole = changed = 0
    for version in range(1, epochs + 1):
        states.begin(version)
        keys = range(base) if version == 1 else chance.integers(0, 200 if hot and version % 4 else base, few)
        put(states, keys)
        with context.subtask("op", 0) as writer:
            kept = states.snapshot(writer, {"v": layers})["v"]
        [handle] = writer.snapshot().handles
        layers = [*layers[:kept], Layer(version, handle.rows, handle.size_bytes)]
        most = max(most, len(layers))
        whole += not kept
        if version > 1:
            written += handle.rows
            changed += len({*keys})
        assert [layer.version for layer in layers] == sorted({layer.version for layer in layers if layer.version})
        assert sum(layer.rows for layer in layers[1:]) < base / 2 + few
    # Each delta is half of the one below it, and all are half of the base.
    assert most <= 2 + np.log2(base / 2 / few)
    assert 1 + (not hot) <= whole <= 3
    # A row is written again when what it lies in has grown by half.
    assert changed < written - base * (whole - 1) < changed * (1 + np.log(base / 2 / few) / np.log(1.5))


def test_an_epoch_without_changes_writes_nothing_and_keeps_every_layer() -> None:
    driver, states = begun(50)
    states.begin(2)
    put(states, [3])
    assert driver.epoch(2, states.snapshot) == {"v": 1}
    before = driver.chain["v"]
    for version in (3, 4):
        states.begin(version)
        assert driver.epoch(version, states.snapshot) == {"v": 0}
        assert states.layers_kept == {"v": 2}
    assert driver.chain["v"] == before
    # Of a state that was never written it is said that there is nothing.
    driver, states = begun()
    assert [layer for layer, _ in driver.chain["v"]] == [Layer(1, 0, 0)]
    states.begin(2)
    driver.epoch(2, states.snapshot)
    assert states.layers_kept == {"v": 1}


def test_deletes_alone_make_a_delta_and_what_came_and_went_makes_none() -> None:
    driver, states = begun(2000)
    states.begin(2)
    states.value("v").delete(numbers(5, 7, 2001)[0])
    assert driver.epoch(2, states.snapshot) == {"v": 2}
    [(_, base), (number, batches)] = [(n, [*rows]) for n, rows in driver.checkpoint.read("op", "v", 0).layers()]
    assert sum(map(len, base)) == 2000
    assert (number, base[0].schema.names) == (1, ["_key_group", "k", "n"])
    assert sorted(pa.Table.from_batches(batches).select(["_op", "k", "n"]).to_pylist(), key=str) == [
        {"_op": 1, "k": 5, "n": None},
        {"_op": 1, "k": 7, "n": None},
    ]
    states.begin(3)
    put(states, [3000, 3001])
    states.value("v").delete(numbers(3000, 3001)[0])
    assert driver.epoch(3, states.snapshot) == {"v": 0}
    assert states.layers_kept == {"v": 2}
    # One that is deleted and set again is an upsert, and no delete.
    states.begin(4)
    put(states, [9], start=77)
    states.value("v").delete(numbers(9)[0])
    put(states, [9, 5], start=78)
    assert driver.epoch(4, states.snapshot) == {"v": 3}
    assert held(driver.restored()) == {**{key: key for key in range(2000) if key != 7}, 9: 78, 5: 79}


def test_of_a_state_of_keys_only_what_is_new_is_a_change_and_what_is_set_again_is_none() -> None:
    driver, states = begun(3000, KEYS_ONLY)
    states.begin(2)
    put(states, [5, 3000, 6])
    assert driver.epoch(2, states.snapshot) == {"v": 1}
    assert sorted(driver.restored().value("v").rows()["k"].to_pylist()) == [*range(3001)]
    states.begin(3)
    put(states, [5])
    assert driver.epoch(3, states.snapshot) == {"v": 0}


def test_a_state_is_written_whole_when_it_was_cleared_or_few_rows_are_left() -> None:
    driver, states = begun(2000)
    states.begin(2)
    states.value("v").clear()
    put(states, [1, 2])
    driver.epoch(2, states.snapshot)
    assert states.layers_kept == {"v": 0}
    assert held(driver.restored()) == {1: 0, 2: 1}
    driver, states = begun(2000)
    states.begin(2)
    states.value("v").delete(numbers(*range(900))[0])
    assert driver.epoch(2, states.snapshot) == {"v": 900}
    states.begin(3)
    states.value("v").delete(numbers(*range(900, 1990))[0])
    assert driver.epoch(3, states.snapshot) == {"v": 10}
    assert states.layers_kept == {"v": 0}


def test_layers_from_before_are_never_folded_and_when_they_are_too_many_the_state_is_written_whole() -> None:
    driver, states = begun(20_000)
    for version in range(2, 19):
        states = driver.restored(version)
        put(states, [version, version + 1], start=version)
        driver.chain["v"] = [(layer._replace(version=None), handle) for layer, handle in driver.chain["v"]]
        driver.epoch(version, states.snapshot)
        assert states.layers_kept["v"] == (version - 1 if version < 18 else 0)
        # What the same worker writes afterwards is folded.
        if version == 9:
            states.begin(100)
            put(states, [100])
            assert len(driver.layers["v"]) == version
            assert states.snapshot(*writing(driver)) == {"v": version - 1}
    # Versions of layers that were there before this worker was do not help it: it does not know
    # what is in them.
    driver, _ = begun(3000)
    for version in (2, 3, 4):
        states = driver.restored(version)
        put(states, [version])
        driver.epoch(version, states.snapshot)
        assert states.layers_kept["v"] == version - 1


def writing(driver: Driver) -> Any:
    context = driver.store.begin(parent=driver.permit, job_id="j", graph=GRAPH, states=NUMBERS).context
    return context.subtask("op", 0), driver.layers


def test_what_changed_before_anybody_asked_or_is_in_no_layer_that_is_known_is_written_whole() -> None:
    driver, _ = begun(3000)
    states = driver.restored()
    put(states, [5], start=9)
    states.begin(2)
    put(states, [6], start=9)
    assert states.snapshot(*writing(driver)) == {"v": 0}
    # A layer that is not there, one from the future, and layers in disorder.
    for versions in ([1, 1], [1, 2], [1, 7], [2, 1], [1, None]):
        states = driver.restored(2)
        put(states, [5], start=9)
        writer, _ = writing(driver)
        assert states.snapshot(writer, {"v": [Layer(version, 3000, 30_000) for version in versions]}) == {"v": 0}
    # Hooks that change a state between two epochs are in the later one.
    states = driver.restored(2)
    put(states, [5], start=9)
    driver.epoch(2, states.snapshot)
    put(states, [6], start=9)
    states.begin(3)
    driver.epoch(3, states.snapshot)
    found = held(driver.restored())
    assert (found[5], found[6]) == (9, 9)
    with pytest.raises(InvalidInput, match="version 2 begins after version 4"):
        states.begin(2)


def test_states_on_disk_go_on_where_they_were_and_half_a_save_is_refused(tmp_path: Path) -> None:
    model, driver = Model(random.Random(1)), Driver()
    states = driver.restored(1)
    change(states, model, filling=True)
    driver.epoch(1, states.snapshot)
    change(states, model, deletes_only=True)
    states.save(tmp_path)
    again = fresh()
    again.load(tmp_path)
    assert contents(again) == expected(model)
    assert again.value("value").rows().equals(states.value("value").rows())
    assert again.timers("timers").next_timestamp() == states.timers("timers").next_timestamp()
    assert 0.5 < again.size_bytes / states.size_bytes < 2
    assert states.size_bytes > 100 * 4 * 30
    again.begin(2)
    change(again, model)
    driver.epoch(2, again.snapshot)
    assert any(again.layers_kept.values())
    check(driver, model)
    (tmp_path / "states.bin").write_bytes((tmp_path / "states.bin").read_bytes()[:-9])
    with pytest.raises(InvalidInput, match="not what was saved"):
        fresh().load(tmp_path)
    (tmp_path / "states.json").unlink()
    with pytest.raises(InvalidInput, match="holds no states"):
        fresh().load(tmp_path)
    states.save(tmp_path)
    with pytest.raises(InvalidInput, match="holds the states"):
        SubtaskStates(OPERATOR, 0, NUMBERS).load(tmp_path)


def test_layers_that_are_not_those_of_the_task_are_refused() -> None:
    driver, states = begun(3000)
    old = driver.restored(2)
    states.begin(2)
    put(states, [5], start=9)
    driver.epoch(2, states.snapshot)
    tasks, layers = driver.newer(1)
    for wrong in (layers["v"] * 2, [layers["v"][0]._replace(version=None)]):
        with pytest.raises(InvalidInput, match="restore from the checkpoint"):
            driver.restored(2).catch_up(tasks, {"v": wrong})
    with pytest.raises(InvalidInput, match="restore from the checkpoint"):
        driver.restored(2).catch_up(driver.newer(0)[0], layers)
    old.catch_up(tasks, layers)
    assert held(old) == held(states)
    rules = Driver()
    states = fresh()
    states.entries("rules").append_one(rule=1)
    rules.epoch(1, states.snapshot)
    with pytest.raises(InvalidInput, match="only keyed state has layers"):
        next(rules.checkpoint.read("op", "rules").layers())


@pytest.mark.parametrize("declared", [NUMBERS, KEYS_ONLY], ids=["with values", "keys only"])
@pytest.mark.parametrize("again", ["set by the other", "set by itself", "never set", "cleared"])
def test_a_row_that_was_deleted_before_a_worker_came_stays_away_when_the_layer_that_says_so_is_folded(
    again: str, declared: tuple[State, ...]
) -> None:
    """The delete of version 2 is in another's layer of version 4, and then in one of the worker
    that never saw the row.
    """
    driver, first = begun(3000, declared)
    first.begin(2)
    first.value("v").delete(numbers(5)[0])
    driver.epoch(2, first.snapshot)
    second = driver.restored(3)
    if again == "set by itself":
        put(second, [5])
    driver.epoch(3, second.snapshot)
    first.catch_up(*driver.newer(2))
    first.begin(4)
    put(first, [5] if again == "set by the other" else [4000])
    if again == "cleared":
        clear = pa.table({"_op": pa.array([2, 0], pa.int8()), "k": [5, 4000]})
        driver.epoch(4, lambda writer, _: writer.write("v", clear, delta=True) and {"v": 1})
    else:
        driver.epoch(4, first.snapshot)
    assert [layer.version for layer in driver.layers["v"]] == [1, 4]
    second.catch_up(*driver.newer(3))
    second.begin(5)
    second.value("v").delete(numbers(5, 7)[0])
    driver.epoch(5, second.snapshot)
    assert [layer.version for layer in driver.layers["v"]] == ([1, 4, 5] if again == "cleared" else [1, 5])
    left = {*range(3000), *([] if again == "set by the other" else [4000])} - {5, 7}
    assert {*driver.restored().value("v").rows()["k"].to_pylist()} == left


def test_a_delete_is_told_though_the_holes_were_closed_since() -> None:
    driver, states = begun(6000)
    states.begin(2)
    put(states, range(9000, 10_000))
    driver.epoch(2, states.snapshot)
    states.begin(3)
    states.value("v").delete(numbers(5, 9005)[0])
    put(states, range(20_000, 35_000))
    states.value("v").delete(numbers(*range(20_000, 35_000))[0])
    assert states.value("v").changes.rows.used == 6998
    assert driver.epoch(3, states.snapshot) == {"v": 2}
    assert states.layers_kept == {"v": 2}
    assert len(held(driver.restored())) == 6998
    # What was buried is in the layers that are folded now, but for the one that lives again.
    states.begin(4)
    put(states, [5])
    assert driver.epoch(4, states.snapshot) == {"v": 2}
    assert sorted(held(driver.restored())) == sorted({*range(6000), *range(9000, 10_000)} - {9005})


def test_layers_are_verified_as_they_are_read() -> None:
    driver = Driver(NUMBERS)
    driver.options = WriteOptions(inline_bytes_max=0)
    states = driver.restored(1)
    put(states, range(3000))
    driver.epoch(1, states.snapshot)
    states.begin(2)
    put(states, range(10), start=7)
    driver.epoch(2, states.snapshot)
    task = driver.checkpoint.read("op", "v", 0)
    assert [(number, sum(map(len, batches))) for number, batches in task.layers()] == [(0, 3000), (1, 10)]
    path = driver.chain["v"][1][1].path
    assert path is not None
    storage = driver.store.storage
    data = bytearray(storage.read(path).to_pybytes())
    storage.delete([path])
    with pytest.raises(DamagedCheckpoint, match="is missing"):
        [sum(map(len, batches)) for _, batches in task.layers()]
    data[len(data) // 3] ^= 1
    with storage.open_output(path) as output:
        output.write(bytes(data))
    with pytest.raises(DamagedCheckpoint, match="digest"):
        [sum(map(len, batches)) for _, batches in task.layers()]


class Summing(Operator):
    def states(self, *inputs: pa.Schema) -> list[object]:
        return [ValueState("sum", KEY, {"n": pa.int64()}), Timers("due", KEY)]

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch:
        return batch


def test_an_activation_gives_the_states_of_its_operators_and_writes_them_as_they_are_told_to_be() -> None:
    flow = Dataflow("sums", parallelism=2)
    flow.source(Chunks(), uid="source").key_by("key").apply(Summing(), uid="sums").apply(Pass(), uid="behind")
    job = compile_job(flow, graph_of(flow), unaligned=False)
    activation, _ = started(job)["sums", 0]
    assert {*activation.states} == {"sums", "behind"}
    states = activation.states["sums"]
    states.begin(1)
    states.layers = {}
    store = open_store(f"memory://{uuid.uuid4().hex}")
    pending = store.begin(job_id=job.flow.job_id, graph=job.graph, states=job.states, parent=None)
    keys = pa.table({"key": [*range(20)]})
    mine = keys.filter(pa.array(pending.context.owners("sums", "sum", keys) == 0)).to_batches()[0]
    states.value("sum").put(mine, pa.record_batch({"n": mine.column("key")}))
    written = {snapshot.operator: snapshot for snapshot in activation.snapshot(command(1), pending.context).close()}
    assert states.layers_kept == {"sum": 0, "due": 0}
    assert written["sums"].carried == ()
    states.begin(2)
    states.layers = {"sum": [Layer(1, len(mine), 100)], "due": [Layer(1, 0, 0)]}
    written = {snapshot.operator: snapshot for snapshot in activation.snapshot(command(2), pending.context).close()}
    assert states.layers_kept == {"sum": 1, "due": 1}
    assert written["sums"].carried == ("sum", "due")


def test_a_row_key_that_a_segment_has_twice_is_there_once_and_the_last_one_counts() -> None:
    driver = Driver(NUMBERS)
    driver.options = WriteOptions(check_unique=False)
    keys, values = numbers(1, 2, 1, 3, 2, 1)
    table = pa.Table.from_batches([keys]).append_column("n", values["n"])

    def write(writer: Any, _: Any) -> dict[str, int]:
        writer.write("v", table)
        return {"v": 0}

    driver.epoch(1, write)
    states = driver.restored(2)
    assert held(states) == {1: 5, 2: 4, 3: 3}
    put(states, [2], start=8)
    assert held(states) == {1: 5, 2: 8, 3: 3}
