"""A fully finished operator keeps the parallelism that it had, whatever its neighbours are rescaled
to.
"""

from __future__ import annotations

import pyarrow as pa
import pytest
from stores import rescale_newest

import stateformat as sf
from stateformat.states import even_split_state

STATE = even_split_state("map", "buffer", columns={"n": pa.int64()})


def publish(store: sf.CheckpointStore, chain: str | None) -> sf.CommitPermit:
    graph = sf.JobGraph(
        (sf.Operator("source", 3, 8, chain=chain), sf.Operator("map", 3, 8, chain=chain)),
        (sf.Edge("e", "source", "map", sf.Partitioner.FORWARD),),
    )
    pending = store.begin(job_id="job", graph=graph, states=[STATE], parent=None)
    pending.mark_finished("source", range(3))
    for subtask in range(3):
        with pending.context.subtask("map", subtask) as writer:
            writer.write("buffer", pa.table({"n": [subtask]}))
        pending.add(writer)
    return pending.publish()


@pytest.mark.parametrize("chain", [None, "c"])
@pytest.mark.parametrize("parallelism", [1, 2, 5])
def test_what_follows_a_finished_source_over_a_forward_edge_is_rescaled_alone(
    parallelism: int, chain: str | None
) -> None:
    store = sf.open(f"memory://finished-edges-{parallelism}-{chain}")
    publish(store, chain)
    rescale_newest(store, parallelism)

    rescaled = store.open()
    assert rescaled.graph.operator("source").parallelism == 3
    assert rescaled.graph.operator("source").status is sf.Status.FULLY_FINISHED
    assert rescaled.graph.operator("map").parallelism == parallelism
    assert rescaled.read("map", "buffer").table()["n"].to_pylist() == [0, 1, 2]
    assert sf.validate(store.storage, level="full").ok
    rescaled.plan_restore(rescaled.graph.at(4)).check()
