"""What an open checkpoint restores by a plan, and which plans, operators and subtasks it
refuses.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.manifest import cut_handles
from stateformat.redistribution import rescale
from stateformat.segments import WriteOptions
from tests.segments import CountingStorage
from tests.stores import counts_job, counts_store, operator


def test_the_plan_of_another_checkpoint_restores_nothing() -> None:
    store = counts_store("memory://other-plan", checkpoints=2)
    old, new = store.open(1), store.open(2)
    with pytest.raises(sf.InvalidInput, match="the plan is for checkpoint 1"):
        new.restore(old.plan_restore(old.graph), "counter", 0)


def test_an_operator_that_the_checkpoint_does_not_know_starts_with_nothing() -> None:
    checkpoint = counts_store("memory://new-operator").open()
    graph = sf.JobGraph((*checkpoint.graph.operators, operator("new", 3)), checkpoint.graph.edges)
    plan = checkpoint.plan_restore(graph)
    assert checkpoint.restore(plan, "new", 2) == {}
    with pytest.raises(sf.InvalidInput, match="nor the topology has an operator 'neither'"):
        checkpoint.restore(plan, "neither", 0)


@pytest.mark.parametrize("subtask", [-1, 2, 7])
def test_a_subtask_that_is_not_planned_is_refused_rather_than_empty(subtask: int) -> None:
    checkpoint = counts_store(f"memory://subtask{subtask}").open()
    with pytest.raises(sf.InvalidInput, match="planned at parallelism 2"):
        checkpoint.restore(checkpoint.plan_restore(checkpoint.graph), "counter", subtask)


def test_layers_go_on_at_a_parallelism_at_which_some_subtasks_have_no_rows() -> None:
    store = counts_store("memory://carried", keys=5)
    permit = store.start("counts")
    assert permit is not None
    checkpoint = permit.checkpoint()
    plan = checkpoint.plan_restore(checkpoint.graph.at(parallelism=20))
    pending = store.begin(
        job_id="counts", graph=plan.topology, states=checkpoint.states, parent=permit, carried=checkpoint.carried(plan)
    )
    change = pa.table({"word": [f"w{i}" for i in range(3, 9)], "n": [0] * 6, "_op": pa.array([0] * 6, pa.int8())})
    owners = pending.context.owners("counter", "counts", change)
    for subtask in range(20):
        pending.add(pending.context.subtask("lines", subtask))
        with pending.context.subtask("counter", subtask) as writer:
            writer.write("counts", change.filter(pa.array(owners == subtask)), delta=True)
        pending.add(writer)
    pending.publish()
    rows = store.open().read("counter", "counts").table()
    found = dict(zip(rows["word"].to_pylist(), rows["n"].to_pylist(), strict=True))
    assert found == {"w0": 0, "w1": 1, "w2": 2, **{f"w{i}": 0 for i in range(3, 9)}}
    assert sf.validate(store, level="full").problems == ()


def test_what_a_rescale_has_cut_for_many_is_read_at_once_by_few() -> None:
    storage = CountingStorage("many-cuts")
    store = sf.CheckpointStore(storage)
    counts_job(1, 500).publish(store, None, options=WriteOptions(inline_bytes_max=0))
    checkpoint = store.open()
    dealt = rescale(checkpoint, checkpoint.plan_restore(checkpoint.graph.at(parallelism=128)))
    pending = store.begin(
        job_id="counts",
        graph=dealt.graph,
        states=dealt.states,
        parent=store.start("counts"),
        kind=sf.CheckpointKind.RESCALE,
        rescaled_from=dealt.rescaled_from,
    )
    pending.add_handles(cut_handles(checkpoint.manifest.full(), dealt.slices))
    pending.publish()
    many = store.open()
    plan = many.plan_restore(many.graph.at(parallelism=1))
    before = storage.reads
    rows = many.restore(plan, "counter", 0)["counts"].table()
    assert sorted(rows["n"].to_pylist()) == list(range(500))
    assert len(plan.slices_of("counter", 0)) > 100
    # One request: the segment, whole.
    assert storage.reads - before == 1
