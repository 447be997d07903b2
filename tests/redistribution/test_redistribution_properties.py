"""Beyond small worlds: any parallelism, layers, many handles a subtask, segments shared with
others; and many states.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings, strategies as st

from stateformat.graph import Status
from stateformat.keys import key_group_range
from stateformat.redistribution import RestorePlan, rescale
from tests.redistribution.redistribution_cases import (
    FakeCheckpoint,
    Part,
    checkpoint,
    deliver,
    edge,
    op,
    planned,
    published,
    restored,
    state,
)
from tests.redistribution.redistribution_oracle import expected

RELAXED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def operators(draw: Any, uid: str) -> tuple[Any, list[Any], list[Part], list[Any]]:
    """An operator with its states, parts and edges. Key groups lie where their subtask is, as the
    format demands.
    """
    ceiling = draw(st.integers(1, 300))
    parallelism = draw(st.integers(1, min(ceiling, 24)))
    done = draw(st.sets(st.integers(0, parallelism - 1), max_size=parallelism - 1)) if draw(st.booleans()) else set()
    operator = op(uid, parallelism, ceiling, finished=done)
    names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=3)
    modes = st.sampled_from(["keyed", "even_split", "broadcast", "progress", "hashed", "balanced"])
    wanted = draw(st.dictionaries(names, modes, max_size=4))
    if list(wanted.values()).count("progress") > 1:
        wanted = {name: mode for name, mode in wanted.items() if mode != "progress"}
    states, parts, edges = [], [], []
    for name, mode in wanted.items():
        on = None
        if mode in ("hashed", "balanced"):
            on = edge(uid, uid, "hash" if mode == "hashed" else "rebalance", id=f"{uid}{name}", feedback=True)
            edges.append(on)
        declared = state(uid, name, "in_flight" if on else mode, on=on)
        states.append(declared)
        for subtask in range(parallelism):
            if subtask in done:
                continue
            layers = draw(st.integers(1, 3)) if mode == "keyed" else 1
            pieces = draw(st.integers(1, 2)) if mode in ("even_split", "broadcast") else 1
            for layer in range(layers):
                for piece in range(pieces):
                    tokens = [f"{name}/{subtask}/{layer}/{piece}/{n}" for n in range(draw(st.integers(0, 9)))]
                    if mode in ("keyed", "hashed"):
                        first, last = key_group_range(subtask, parallelism=parallelism, max_parallelism=ceiling)
                        tokens = [(draw(st.integers(first, last)), token) for token in tokens]
                    elif mode == "balanced":
                        tokens = [(draw(st.integers(0, 40)), token) for token in tokens]
                    before, after = draw(st.integers(0, 5)), draw(st.integers(0, 5))
                    parts.append(Part(uid, name, subtask, tuple(tokens), layer, before, after))
    return operator, states, parts, edges


@st.composite
def checkpoints(draw: Any) -> FakeCheckpoint:
    uids = draw(st.lists(st.sampled_from(["a", "B", "é", "a/b", "z9"]), min_size=1, max_size=3, unique=True))
    drawn = [draw(operators(uid)) for uid in uids]
    return checkpoint(
        [operator for operator, *_ in drawn],
        [item for _, states, _, _ in drawn for item in states],
        [part for _, _, parts, _ in drawn for part in parts],
        [item for *_, edges in drawn for item in edges],
    )


def topology(data: Any, source: FakeCheckpoint) -> dict[str, int]:
    return {
        operator.uid: data.draw(st.integers(1, min(operator.max_parallelism or 1, 60)))
        for operator in source.record.graph.operators
    }


@RELAXED
@given(source=checkpoints(), data=st.data())
def test_every_row_goes_where_the_oracle_says(source: FakeCheckpoint, data: Any) -> None:
    chosen = topology(data, source)
    plan = planned(source, chosen)
    kept = {
        operator.uid
        for operator in source.record.graph.operators
        if operator.status is Status.RUNNING and chosen[operator.uid] == operator.parallelism
    }
    assert deliver(source, plan.slices) == expected(source, chosen, progress_stays=lambda uid: uid in kept)
    assert RestorePlan.from_json(plan.to_json()) == plan


@RELAXED
@given(source=checkpoints(), data=st.data())
def test_a_rescale_keeps_every_row_and_restores_to_the_plan(source: FakeCheckpoint, data: Any) -> None:
    plan = planned(source, topology(data, source))
    after = published(source, rescale(source, plan))

    def unshared(delivered: dict[Any, Any]) -> dict[Any, Any]:
        shared = {(item.operator, item.name) for item in source.record.states if item.mode == "progress"}
        return {key: rows for key, rows in delivered.items() if key[:2] not in shared}

    assert unshared(restored(after, {})) == unshared(deliver(source, plan.slices))
    copied = {(item.operator, item.name) for item in source.record.states if item.mode == "broadcast"}
    assert rows_of(after, copied) == rows_of(source, copied)


def rows_of(source: FakeCheckpoint, left_out: set[tuple[str, str]]) -> Counter[Any]:
    return Counter(row for part in source.parts if (part.operator, part.state) not in left_out for row in part.rows)
