"""What the graph demands of finished operators, chains among them; and that every refusal has its
test.
"""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import pytest

from stateformat.redistribution import RefusalCode, RestorePlan, WarningCode, rescale
from tests.redistribution.redistribution_cases import checkpoint, edge, graph, op, planned, published

RUNNING: list[int] = []
PARTIAL = [1]
FULL = [0, 1]
NEW = None
ALL_TO_ALL, POINTWISE = ("rebalance", "hash", "broadcast"), ("forward", "rescale")
FULLY, PARTIALLY = ["fully_finished_predecessor"], ["partially_finished_predecessor"]


@pytest.mark.parametrize(
    ("predecessor", "operator", "partitioners", "codes"),
    [
        # Flink's tables of finished operators.
        *((FULL, FULL, [name], []) for name in (*ALL_TO_ALL, *POINTWISE)),
        *(
            (before, FULL, [name], FULLY)
            for before, name in product((PARTIAL, RUNNING, NEW), (*ALL_TO_ALL, *POINTWISE))
        ),
        *((FULL, PARTIAL, [name], []) for name in (*ALL_TO_ALL, *POINTWISE)),
        *((before, PARTIAL, [name], PARTIALLY) for before, name in product((PARTIAL, RUNNING, NEW), ALL_TO_ALL)),
        *((PARTIAL, PARTIAL, [name], []) for name in POINTWISE),
        *((before, PARTIAL, [name], PARTIALLY) for before, name in product((RUNNING, NEW), POINTWISE)),
        *((before, RUNNING, ["hash", "forward"], []) for before in (FULL, PARTIAL, RUNNING, NEW)),
        # Of two edges from one predecessor the all-to-all one decides.
        (PARTIAL, PARTIAL, ["forward", "hash"], PARTIALLY),
        (PARTIAL, PARTIAL, ["forward", "rescale"], []),
    ],
)
def test_finished_operators_want_finished_predecessors(
    predecessor: list[int] | None, operator: list[int], partitioners: list[str], codes: list[str]
) -> None:
    edges = [edge("in", "a", name, id=f"e{number}") for number, name in enumerate(partitioners)]
    saved = [op("a", 2, finished=operator)] + ([] if predecessor is NEW else [op("in", 2, finished=predecessor)])
    planned(checkpoint(saved), graph(op("in", 2, None), op("a", 2, None), edges=edges), *codes)


def test_finishing_counts_as_finished() -> None:
    wanted = graph(op("in", 2, None), op("a", 2, None), edges=[edge("in", "a", "forward")])
    planned(checkpoint([op("in", 2, finishing=[0]), op("a", 2, finishing=[0])]), wanted)
    planned(checkpoint([op("in", 2, finishing=[0], finished=[1]), op("a", 2, finishing=[0, 1])]), wanted)


def test_feedback_edges_count_for_nothing() -> None:
    edges = [edge("body", "head", feedback=True), edge("head", "body")]
    planned(checkpoint([op("head", 2, finished=FULL), op("body", 2)], edges=edges), 2)


def test_the_edges_are_those_of_the_new_topology() -> None:
    source = checkpoint([op("in", 2), op("a", 2, finished=FULL)], edges=[edge("in", "a")])
    planned(source, graph(op("in", 2, None), op("a", 2, None)))


def test_after_a_rescale_the_former_statuses_count() -> None:
    operators = [op("in", 2, finished=PARTIAL), op("a", 2, finished=PARTIAL)]
    source = checkpoint(operators, edges=[edge("in", "a", "forward")])
    rescaled = published(source, rescale(source, planned(source, 3)))
    assert all(not operator.finished for operator in rescaled.record.graph.operators)
    planned(rescaled, 2)
    pair = op("in", 2, None), op("a", 2, None)
    planned(rescaled, graph(*pair, edges=[edge("in", "a", "hash")]), *PARTIALLY)
    planned(rescaled, graph(*pair, op("new", 2, None), edges=[edge("new", "a", "forward")]), *PARTIALLY)


def chain(pinned: bool, *finished: list[int], codes: tuple[str, ...] = ()) -> RestorePlan:
    names = "abcd"[: len(finished)]
    edges = [edge(source, target, "forward") for source, target in pairwise(names)]
    source = checkpoint([op(name, 2, finished=done) for name, done in zip(names, finished, strict=True)], edges=edges)
    operators = [op(name, 2, None, chain="c", pinned=pinned and name == "b") for name in names]
    return planned(source, graph(*operators, edges=edges), *codes)


def test_a_chain_whose_operators_differ_in_status_is_broken_up_with_a_warning() -> None:
    plan = chain(False, FULL, FULL, PARTIAL, RUNNING)
    assert plan.unchained == ("c",)
    assert plan.warnings[0].code is WarningCode.UNCHAINED
    # What has one status stays together, under a name of its own.
    assert [operator.chain for operator in plan.topology.operators] == ["c/fully_finished"] * 2 + [None, None]


@pytest.mark.parametrize(
    ("statuses", "codes"),
    [((FULL, FULL), ()), ((PARTIAL, PARTIAL), ()), ((RUNNING, RUNNING), ()), ((FULL, RUNNING), ("chain_pinned",))],
)
def test_a_chain_of_one_status_stays_whole_and_a_pinned_one_is_refused(
    statuses: tuple[list[int], ...], codes: tuple[str, ...]
) -> None:
    plan = chain(True, *statuses, codes=codes)
    assert plan.unchained == ()
    assert [operator.chain for operator in plan.topology.operators] == ["c", "c"]


def test_every_code_is_refused_by_some_test() -> None:
    tests = Path(__file__).resolve().parent.parent
    names = (Path(__file__).name, "test_redistribution_refusals.py", "test_local_evolving.py")
    text = "".join(next(tests.rglob(name)).read_text() for name in names)
    assert [code.value for code in RefusalCode if f'"{code.value}"' not in text] == []
