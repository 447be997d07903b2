"""A task in worlds that do anything that is legal, in any order: see ``task_world.py`` for what is
asserted.
"""

from __future__ import annotations

import random

from hypothesis import given, settings, strategies as st

from stateformat.backends.dataflow.task.states import TaskState
from tests.dataflow.task_world import World

SHAPES = {
    "one channel": "a:1",
    "two inputs": "a:2 f:1/1",
    "hashed": "h:3~",
    "mixed": "a:1 h:2/1~",
    "head of a loop": "a:1 loop:2/1*",
    "head with two inputs": "h:2~ a:1/2 loop:1/1*",
}


def live(shape: str, steps: int, *, unaligned: bool, seed: int) -> World:
    choose = random.Random(seed)
    world = World(SHAPES[shape], unaligned=unaligned, first=seed)
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
