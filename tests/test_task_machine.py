"""A task in worlds that do anything that is legal, in any order: see ``task_world.py`` for what is asserted."""

from __future__ import annotations

import random

from hypothesis import given, settings, strategies as st

from stateformat.backends.dataflow.task import TaskState
from tests.task_cases import edge
from tests.task_world import World

SHAPES = {
    "one channel": lambda: [edge("a", 1)],
    "two inputs": lambda: [edge("a", 2), edge("f", 1, input=1)],
    "hashed": lambda: [edge("h", 3, overtakable=True)],
    "mixed": lambda: [edge("a", 1), edge("h", 2, input=1, overtakable=True)],
    "head of a loop": lambda: [edge("a", 1), edge("loop", 2, input=1, feedback=True)],
    "head with two inputs": lambda: [
        edge("h", 2, overtakable=True),
        edge("a", 1, input=2),
        edge("loop", 1, input=1, feedback=True),
    ],
}


def live(shape: str, steps: int, *, unaligned: bool, seed: int) -> World:
    choose = random.Random(seed)
    world = World(SHAPES[shape](), unaligned=unaligned, first=seed)
    for _ in range(steps):
        possible = world.steps()
        if not possible:
            break
        choose.choice(possible)()
    return world


@settings(max_examples=400, deadline=None)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    steps=st.integers(0, 160),
    unaligned=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_whatever_happens_in_whatever_order(shape: str, steps: int, unaligned: bool, seed: int) -> None:
    world = live(shape, steps, unaligned=unaligned, seed=seed)
    world.run_out()
    assert world.task.state is TaskState.ENDED
