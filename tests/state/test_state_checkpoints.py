"""The running state through a checkpoint: written by some subtasks, restored by as many, by fewer
and by more.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stateformat.backends.state import SubtaskStates
from stateformat.errors import InvalidInput, InvalidState
from stateformat.graph import Edge, JobGraph, Operator, OperatorId, Partitioner
from stateformat.keys import hash_keys, register_key_hash
from stateformat.model import State
from stateformat.reading import Checkpoint
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import open as open_store

KEYS = {"user": pa.string(), "day": pa.int32()}
USERS = ["ann", "bob", "", None, *(f"u{number}" for number in range(40))]
STATES = (
    declare.value_state("op", "total", keys=KEYS, values={"n": pa.int64(), "tags": pa.list_(pa.string())}),
    declare.map_state("op", "pages", keys=KEYS, map_key=pa.string(), values={"n": pa.int64()}),
    declare.list_state("op", "last", keys=KEYS, values={"at": pa.timestamp("us")}),
    declare.timers("op", "wake", keys=KEYS, values={"why": pa.string()}),
    declare.even_split_state("op", "splits", columns={"split": pa.string()}),
    declare.union_state("op", "offsets", columns={"offset": pa.int64()}),
    declare.broadcast_state("op", "rules", columns={"rule": pa.string()}),
    declare.progress_state("op"),
    declare.value_state("op", "never used", keys=KEYS, values={"n": pa.int64()}),
    declare.value_state("other", "total", keys=KEYS, values={"n": pa.int64()}),
)
KEYED = ("total", "pages", "last", "wake")


def graph(parallelism: int, **more: Any) -> JobGraph:
    source, target = OperatorId("in"), OperatorId("op")
    return JobGraph(
        (Operator(source, 1, 128), Operator(target, parallelism, 128, **more)),
        (Edge("in-op", source, target, Partitioner.HASH, key_columns=tuple(KEYS)),),
    )


def run(topology: JobGraph, states: Sequence[State]) -> list[SubtaskStates]:
    operator = topology.operator("op")
    return [SubtaskStates(operator, subtask, states) for subtask in range(operator.parallelism)]


def taken(subtasks: Sequence[SubtaskStates], topology: JobGraph, states: Sequence[State], **options: Any) -> Checkpoint:
    """A checkpoint of the subtasks, opened from its store."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    mine = tuple(state for state in states if state.operator == "op")
    pending = store.begin(parent=None, job_id="j", graph=topology, states=mine, options=WriteOptions(**options))
    for number, subtask in enumerate(subtasks):
        with pending.context.subtask("op", number) as writer:
            subtask.snapshot(writer)
            if any(state.name == "progress" for state in mine):
                writer.empty("progress")
        pending.add(writer.snapshot())
    pending.add(pending.context.subtask("in", 0).snapshot())
    return pending.publish().checkpoint()


def restored(
    checkpoint: Checkpoint, topology: JobGraph, states: Sequence[State] = STATES, drop: Sequence[str] = ()
) -> list[SubtaskStates]:
    declared = [state for state in states if state.operator == "op"]
    plan = checkpoint.plan_restore(topology, states=declared, drop=drop)
    subtasks = run(plan.topology, states)
    for number, subtask in enumerate(subtasks):
        subtask.restore(checkpoint.restore(plan, "op", number))
    return subtasks


def filled(topology: JobGraph, **more: Any) -> list[SubtaskStates]:
    """Subtasks with something of everything, each with the keys that it owns."""
    rows = 400
    numbers = np.arange(rows)
    table = pa.table(
        {
            "user": [USERS[number % len(USERS)] for number in range(rows)],
            "day": pa.array(numbers % 3, pa.int32()),
            "n": numbers,
            "tags": [["t"] * (number % 3) if number % 5 else None for number in range(rows)],
            "_map_key": [f"p{number % 4}" if number % 6 else None for number in range(rows)],
            "at": pa.array(numbers, pa.timestamp("us")),
            "_timestamp": numbers % 90,
            "why": [f"w{number}" for number in range(rows)],
        }
    )
    subtasks = run(topology, STATES)
    context = open_store("memory://unused").begin(parent=None, job_id="j", graph=topology, states=STATES[:-1]).context
    owners = context.owners("op", "total", table)
    for number, subtask in enumerate(subtasks):
        [mine] = table.filter(pa.array(owners == number)).combine_chunks().to_batches()
        keys = mine.select([*KEYS])
        subtask.value("total").put(keys, mine.select(["n", "tags"]))
        subtask.map("pages").put(mine.select([*KEYS, "_map_key", "n"]))
        subtask.list("last").append(keys, mine.select(["at"]))
        subtask.timers("wake").set(mine.select([*KEYS, "_timestamp", "why"]))
        # Some go again, so that there are holes.
        some = mine.slice(0, len(mine) // 8)
        subtask.value("total").delete(some)
        subtask.map("pages").delete(some)
        subtask.list("last").clear(some.slice(0, 5))
        subtask.timers("wake").due(9)
        subtask.entries("splits").replace(pa.table({"split": [f"{number}-{index}" for index in range(3)]}))
        subtask.entries("offsets").append_one(offset=number)
        subtask.entries("rules").replace(pa.table({"rule": ["r1", "r2"]}))
    return subtasks


def contents(subtasks: Iterable[SubtaskStates]) -> dict[str, Counter[str]]:
    """The keyed rows of all subtasks together."""
    found: dict[str, Counter[str]] = {name: Counter() for name in KEYED}
    for subtask in subtasks:
        for name, kept in zip(
            KEYED,
            (subtask.value("total"), subtask.map("pages"), subtask.list("last"), subtask.timers("wake")),
            strict=True,
        ):
            found[name].update(map(repr, kept.rows().to_pylist()))
    return found


@pytest.mark.parametrize("parallelism", [1, 2, 3, 7])
@pytest.mark.parametrize("trusting", [False, True])
def test_what_was_kept_is_restored_at_any_parallelism(parallelism: int, trusting: bool) -> None:
    before = filled(graph(3))
    checkpoint = taken(before, graph(3), STATES, check_unique=not trusting, trust_key_groups=trusting)
    after = restored(checkpoint, graph(parallelism))
    assert len(after) == parallelism
    wanted = contents(before)
    assert min(sum(rows.values()) for rows in wanted.values()) > 50
    assert contents(after) == wanted
    splits = [row for subtask in after for row in subtask.entries("splits").rows()["split"].to_pylist()]
    assert splits == [f"{number}-{index}" for number in range(3) for index in range(3)]
    for subtask in after:
        assert sorted(subtask.entries("offsets").rows()["offset"].to_pylist()) == [0, 1, 2]
        assert subtask.entries("rules").rows()["rule"].to_pylist() == ["r1", "r2"]
        assert len(subtask.value("never used")) == 0
    # Once more, from what was restored: groups and owners are those that the writer computes.
    again = restored(taken(after, graph(parallelism), STATES), graph(2))
    assert contents(again) == wanted


def test_restored_state_goes_on_as_if_nothing_had_happened() -> None:
    before = filled(graph(2))
    after = restored(taken(before, graph(2), STATES), graph(2))
    for old, new in zip(before, after, strict=True):
        keys = pa.record_batch({"user": ["ann", "bob", None], "day": pa.array([0, 1, 2], pa.int32())})
        for subtask in (old, new):
            subtask.list("last").append(keys, pa.record_batch({"at": pa.array([7, 8, 9], pa.timestamp("us"))}))
            subtask.map("pages").clear(keys)
            subtask.value("total").add(keys, pa.record_batch({"n": [1, 1, 1]}), {"n": "sum"})
        lists = [subtask.list("last").get(keys).to_pylist() for subtask in (old, new)]
        assert lists[0] == lists[1]
        assert lists[0]
        assert [row["n"] for row in old.value("total").get(keys)[0].to_pylist()] == [
            row["n"] for row in new.value("total").get(keys)[0].to_pylist()
        ]
        while (stop := old.timers("wake").next_timestamp()) is not None:
            due = [subtask.timers("wake").due(stop + 10) for subtask in (old, new)]
            assert due[0] is not None
            assert due[0].equals(due[1])
        assert len(new.timers("wake")) == 0
    assert contents(before) == contents(after)


def test_a_list_is_restored_in_the_order_of_its_indexes_and_goes_on_after_the_greatest() -> None:
    states = (declare.list_state("op", "l", keys={"k": pa.int64()}, values={"n": pa.int64()}),)
    store = open_store(f"memory://{uuid.uuid4().hex}")
    pending = store.begin(parent=None, job_id="j", graph=graph(1), states=states)
    with pending.context.subtask("op", 0) as writer:
        writer.write("l", pa.table({"k": [1, 2, 1, 1], "_index": [30, -5, -7, 4], "n": [1, 2, 3, 4]}))
    pending.add(writer.snapshot())
    pending.add(pending.context.subtask("in", 0).snapshot())
    [subtask] = restored(pending.publish().checkpoint(), graph(1), states)
    subtask.list("l").append_one((1,), n=5)
    subtask.list("l").append_one((2,), n=6)
    assert [row["n"] for row in subtask.list("l").get_one(1)] == [3, 4, 1, 5]
    assert [(row["k"], row["_index"]) for row in subtask.list("l").rows().to_pylist()][-2:] == [(1, 31), (2, 0)]


def test_state_is_restored_into_columns_declared_anew() -> None:
    old = declare.value_state("op", "v", keys={"k": pa.int64()}, values={"n": pa.int32(), "gone": pa.string()})
    new = declare.value_state(
        "op",
        "v",
        keys={"k": pa.int64()},
        values={"more": pa.float64(), "count": pa.int64()},
        previous=old,
        renames={"n": "count"},
        defaults={"more": "0.5"},
    )
    before = run(graph(1), [old])
    before[0].value("v").put_one((1,), n=5, gone="x")
    rows = [
        row
        for subtask in restored(taken(before, graph(1), [old]), graph(2), [new], drop=["op/v.gone"])
        for row in subtask.value("v").rows().to_pylist()
    ]
    assert rows == [{"k": 1, "more": 0.5, "count": 5}]


def test_key_groups_are_those_of_the_hash_that_the_operator_names() -> None:
    register_key_hash("test-constant-seven", _seven)
    topology = graph(2, key_hash="test-constant-seven")
    states = (declare.value_state("op", "v", keys={"k": pa.int64()}, values={"n": pa.int64()}),)
    before = run(topology, states)
    # Every key has group 7, so all of them are those of subtask 0.
    before[0].value("v").put(pa.record_batch({"k": [*range(50)]}), pa.record_batch({"n": [*range(50)]}))
    after = restored(taken(before, topology, states), graph(5, key_hash="test-constant-seven"), states)
    assert [len(subtask.value("v")) for subtask in after] == [50, 0, 0, 0, 0]


def _seven(columns: Sequence[pa.ChunkedArray]) -> np.ndarray:
    return np.full(len(columns[0]), 7, np.int32)


def test_key_groups_are_computed_anew_where_the_operator_has_another_number_of_them() -> None:
    states = (declare.value_state("op", "v", keys={"k": pa.int64()}, values={"n": pa.int64()}),)
    before = run(graph(1), states)
    before[0].value("v").put(pa.record_batch({"k": [*range(50)]}), pa.record_batch({"n": [*range(50)]}))
    saved = taken(before, graph(1), states)
    few = JobGraph((Operator(OperatorId("in"), 1, 8), Operator(OperatorId("op"), 1, 8)))
    after = run(few, states)
    after[0].restore({"v": saved.read("op", "v")})
    # The writer compares the groups with the keys.
    again = taken(after, few, states).read("op", "v").table()
    assert sorted(again["k"].to_pylist()) == [*range(50)]
    assert again["_key_group"].to_pylist() == sorted((hash_keys([again["k"]]) % 8).tolist())


def test_keys_of_another_subtask_are_refused_by_the_writer() -> None:
    states = (declare.value_state("op", "v", keys={"k": pa.int64()}, values={"n": pa.int64()}),)
    before = run(graph(2), states)
    both = pa.record_batch({"k": [*range(50)]})
    assert len({*(hash_keys([both["k"]]) % 128 // 64).tolist()}) == 2
    before[1].value("v").put(both, pa.record_batch({"n": [*range(50)]}))
    with pytest.raises(InvalidState, match="owns key groups 64 to 127"):
        taken(before, graph(2), states)


def test_only_states_of_the_operator_and_of_these_modes_are_kept_here() -> None:
    subtask = SubtaskStates(graph(3).operator("op"), 2, STATES)
    assert len(subtask.value("total")) == 0
    assert subtask.value("total").rows().schema.names == ["user", "day", "n", "tags"]
    with pytest.raises(InvalidInput, match=r"no state 'pages' that is keyed value; declared are 'total' \(value\)"):
        subtask.value("pages")
    with pytest.raises(InvalidInput, match="no state 'progress' that is even-split"):
        subtask.entries("progress")
    with pytest.raises(InvalidInput, match="there is no subtask 3"):
        SubtaskStates(graph(3).operator("op"), 3, STATES)
