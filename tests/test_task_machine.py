"""A task in worlds that do anything that is legal, in any order: see ``task_world.py`` for what is asserted."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.dataflow.life import State
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


def live(shape: str, choices: list[int], *, unaligned: bool) -> World:
    world = World(SHAPES[shape](), unaligned=unaligned)
    for choice in choices:
        steps = world.steps()
        if not steps:
            break
        steps[choice % len(steps)]()
    return world


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    choices=st.lists(st.integers(0, 2**16), max_size=120),
    unaligned=st.booleans(),
)
def test_whatever_happens_in_whatever_order(shape: str, choices: list[int], unaligned: bool) -> None:
    world = live(shape, choices, unaligned=unaligned)
    world.run_out()
    assert world.task.state is State.ENDED
