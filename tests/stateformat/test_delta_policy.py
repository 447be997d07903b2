"""How a program that writes deltas by the library alone keeps its layers few, and what many
cost.
"""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends.rewrite import RewriteSpec, rewrite
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.states import UNKNOWN_MAX, Layer, should_fold, value_state
from stateformat.states.delta_policy import LAYERS_MAX

GRAPH = JobGraph((Operator(OperatorId("op"), 1, 128),))
STATE = value_state("op", "s", keys={"k": pa.int64()}, values={"v": pa.int64()})


def epoch(store: Any, parent: Any, number: int, *, rows: int, whole: bool) -> Any:
    pending = store.begin(job_id="j", graph=GRAPH, states=[STATE], parent=parent)
    with pending.context.subtask("op", 0) as writer:
        if whole:
            writer.write("s", pa.table({"k": range(rows), "v": [number] * rows}))
        else:
            writer.write("s", pa.table({"k": [number], "v": [number], "_op": pa.array([0], pa.int8())}), delta=True)
    pending.add(writer)
    return pending.publish()


@pytest.mark.parametrize(
    ("layers", "rows", "folds"),
    [
        ([], 1, True),
        ([1000], 0, False),
        ([1000], 10, False),
        ([1000], 500, True),
        ([1000, 200, 200], 50, False),
        ([1000, 200, 200], 200, True),
        ([10**9] + [1] * (UNKNOWN_MAX - 1), 1, False),
        ([10**9] + [1] * UNKNOWN_MAX, 1, True),
    ],
)
def test_a_state_is_folded_when_deltas_come_to_half_of_the_base_or_are_many(
    layers: list[int], rows: int, folds: bool
) -> None:
    for row_bytes in (0, 10):
        assert should_fold([Layer(None, count, count * row_bytes) for count in layers], rows) is folds


def test_a_program_that_asks_keeps_its_layers_few_and_its_rows() -> None:
    store = sf.open("memory://folding")
    parent, most = epoch(store, None, 0, rows=500, whole=True), 0
    for number in range(1, 60):
        whole = parent.checkpoint().should_fold("op", "s", 0, rows=1)
        parent = epoch(store, parent, number, rows=500, whole=whole)
        most = max(most, len(parent.checkpoint().layers("op", "s", 0)))
    assert 1 < most <= UNKNOWN_MAX + 1
    assert parent.checkpoint().read("op", "s").table().num_rows == 500
    assert sum(layer.rows for layer in parent.checkpoint().layers("op", "s", 0)) >= 500


def test_more_layers_than_are_advised_are_told_once_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    store = sf.open("memory://many-layers")
    parent = epoch(store, None, 0, rows=100, whole=True)
    with caplog.at_level(logging.WARNING):
        for number in range(1, LAYERS_MAX + 3):
            parent = epoch(store, parent, number, rows=0, whole=False)
    [told] = [record.getMessage() for record in caplog.records]
    assert "'s' of operator 'op' lies in 65 layers" in told
    assert "should_fold" in told
    # What is carried is not kept in a chunk for every checkpoint that wrote some of it.
    assert parent.checkpoint().handles["path"].num_chunks <= 8
    # What it advises.
    rewrite(store, store.open(), RewriteSpec())
    assert len(store.open().layers("op", "s", 0)) == 1
