"""What the graph demands of finished operators, chains among them; and that every refusal has its test."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest

from stateformat.graph import Edge, JobGraph, Operator
from stateformat.redistribution import RefusalCode, RestorePlan, WarningCode, plan_restore, rescale
from tests.redistribution_cases import checkpoint, edge, op, published


def codes(plan: RestorePlan) -> list[str]:
    return [refusal.code.value for refusal in plan.refusals]


def graph(*operators: Operator, edges: Iterable[Edge] = ()) -> JobGraph:
    return JobGraph(operators, tuple(edges))


# Finished operators. The first two tables are Flink's (3.1).

RUNNING: list[int] = []
PARTIAL = [1]
FULL = [0, 1]


def statuses(predecessor: list[int] | None, operator: list[int], *partitioners: str) -> list[str]:
    """Refusals for an operator with these edges from a predecessor, which is new where it is None."""
    edges = [edge("in", "a", name, id=f"e{number}") for number, name in enumerate(partitioners)]
    saved = [op("a", 2, finished=operator)] + ([] if predecessor is None else [op("in", 2, finished=predecessor)])
    return codes(plan_restore(checkpoint(saved), graph(op("in", 2, None), op("a", 2, None), edges=edges)))


@pytest.mark.parametrize("partitioner", ["forward", "rescale", "rebalance", "hash", "broadcast"])
def test_a_fully_finished_operator_wants_predecessors_fully_finished(partitioner: str) -> None:
    refused = ["fully_finished_predecessor"]
    assert statuses(FULL, FULL, partitioner) == []
    assert statuses(PARTIAL, FULL, partitioner) == refused
    assert statuses(RUNNING, FULL, partitioner) == refused
    assert statuses(None, FULL, partitioner) == refused


@pytest.mark.parametrize("partitioner", ["rebalance", "hash", "broadcast"])
def test_a_partially_finished_operator_wants_all_to_all_predecessors_fully_finished(partitioner: str) -> None:
    refused = ["partially_finished_predecessor"]
    assert statuses(FULL, PARTIAL, partitioner) == []
    assert statuses(PARTIAL, PARTIAL, partitioner) == refused
    assert statuses(RUNNING, PARTIAL, partitioner) == refused
    assert statuses(None, PARTIAL, partitioner) == refused


@pytest.mark.parametrize("partitioner", ["forward", "rescale"])
def test_a_partially_finished_operator_wants_pointwise_predecessors_partially_finished(partitioner: str) -> None:
    refused = ["partially_finished_predecessor"]
    assert statuses(FULL, PARTIAL, partitioner) == []
    assert statuses(PARTIAL, PARTIAL, partitioner) == []
    assert statuses(RUNNING, PARTIAL, partitioner) == refused
    assert statuses(None, PARTIAL, partitioner) == refused


@pytest.mark.parametrize("predecessor", [FULL, PARTIAL, RUNNING, None])
def test_a_running_operator_wants_nothing(predecessor: list[int] | None) -> None:
    assert statuses(predecessor, RUNNING, "hash", "forward") == []


def test_two_edges_from_one_predecessor_are_judged_by_the_all_to_all_one() -> None:
    assert statuses(PARTIAL, PARTIAL, "forward", "hash") == ["partially_finished_predecessor"]
    assert statuses(PARTIAL, PARTIAL, "forward", "rescale") == []


def test_finishing_counts_as_finished() -> None:
    wanted = graph(op("in", 2, None), op("a", 2, None), edges=[edge("in", "a", "forward")])
    source = checkpoint([op("in", 2, finishing=[0]), op("a", 2, finishing=[0])])
    assert codes(plan_restore(source, wanted)) == []
    source = checkpoint([op("in", 2, finishing=[0], finished=[1]), op("a", 2, finishing=[0, 1])])
    assert codes(plan_restore(source, wanted)) == []


def test_feedback_edges_count_for_nothing() -> None:
    edges = [edge("body", "head", feedback=True), edge("head", "body")]
    source = checkpoint([op("head", 2, finished=FULL), op("body", 2)], edges=edges)
    assert codes(plan_restore(source, source.record.graph.at(2))) == []


def test_the_edges_are_those_of_the_new_topology() -> None:
    source = checkpoint([op("in", 2), op("a", 2, finished=FULL)], edges=[edge("in", "a")])
    assert codes(plan_restore(source, graph(op("in", 2, None), op("a", 2, None)))) == []


def test_after_a_rescale_the_former_statuses_count() -> None:
    source = checkpoint(
        [op("in", 2, finished=PARTIAL), op("a", 2, finished=PARTIAL)], edges=[edge("in", "a", "forward")]
    )
    dealt = published(source, rescale(source, plan_restore(source, source.record.graph.at(3))))
    assert all(not operator.finished for operator in dealt.record.graph.operators)
    assert codes(plan_restore(dealt, dealt.record.graph.at(2))) == []
    hashed = graph(op("in", 2, None), op("a", 2, None), edges=[edge("in", "a", "hash")])
    assert codes(plan_restore(dealt, hashed)) == ["partially_finished_predecessor"]
    new = graph(op("in", 2, None), op("a", 2, None), op("new", 2, None), edges=[edge("new", "a", "forward")])
    assert codes(plan_restore(dealt, new)) == ["partially_finished_predecessor"]


def chain(pinned: bool, *finished: list[int]) -> RestorePlan:
    names = "abcd"[: len(finished)]
    edges = [edge(source, target, "forward") for source, target in pairwise(names)]
    source = checkpoint([op(name, 2, finished=done) for name, done in zip(names, finished, strict=True)], edges=edges)
    operators = [op(name, 2, None, chain="c", pinned=pinned and name == "b") for name in names]
    return plan_restore(source, graph(*operators, edges=edges))


def test_a_chain_whose_operators_differ_in_status_is_broken_up_with_a_warning() -> None:
    plan = chain(False, FULL, FULL, PARTIAL, RUNNING)
    assert codes(plan) == []
    assert plan.unchained == ("c",)
    assert plan.warnings[0].code is WarningCode.UNCHAINED
    # What has one status stays together, under a name of its own.
    assert [operator.chain for operator in plan.topology.operators] == ["c/fully_finished"] * 2 + [None, None]


def test_a_chain_of_one_status_stays_whole() -> None:
    for done in (FULL, PARTIAL, RUNNING):
        plan = chain(True, done, done)
        assert codes(plan) == []
        assert plan.unchained == ()
        assert [operator.chain for operator in plan.topology.operators] == ["c", "c"]


def test_a_pinned_chain_is_not_broken_up_but_refused() -> None:
    plan = chain(True, FULL, RUNNING)
    assert codes(plan) == ["chain_pinned"]
    assert plan.unchained == ()
    assert [operator.chain for operator in plan.topology.operators] == ["c", "c"]


def test_every_code_is_refused_by_some_test() -> None:
    here = Path(__file__)
    others = ("test_redistribution_refusals.py", "test_evolving_jobs.py")
    told = "".join([here.read_text(), *(here.with_name(name).read_text() for name in others)])
    assert [code.value for code in RefusalCode if f'"{code.value}"' not in told] == []
