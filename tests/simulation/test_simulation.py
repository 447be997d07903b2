"""The runtime core under random dataflows, interleavings and faults (``tests/simulation``), and
that the simulator finds mistakes.

``make simulate SEEDS=N FIRST=F`` runs more seeds; each replays exactly.
"""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from stateformat.errors import StorageError
from stateformat.storage import CreateOutcome
from tests.simulation import graphs
from tests.simulation.mutations import MUTATIONS
from tests.simulation.run import RESCALED_SEEDS, Failed, simulate
from tests.simulation.storage import Crash, Disk, Do, Faults, FaultyStorage
from tests.tally import Tally

SEEDS = 100
DRAWN = 300
BLOCK = 20
SEARCHED = 500
"""A mutation is found among this many seeds. Any change in the order of events changes which seeds
find it.
"""
FINDS = {
    "drop the ended-channel mark": (18, 26),
    "log all loop records": (18,),
    "commit before publish": (0, 1),
    "skip the read-back after a lost answer": (4, 25),
    "deal out the state of finishing subtasks": (0, 1),
    "call end_input twice after a restore": (5,),
    "count feedback edges when finding roots": (9,),
    "forget the union refusal": (80,),
    "merge two broadcast copies": (68,),
    "end on any checkpoint instead of the savepoint": (2, 71),
    "let a watermark fall back": (4,),
    "a zombie publishes": (14, 16),
    "clean up one id too far": (14,),
    "expire the highest first": (16,),
    "roll back without looking": (397,),
    "name parents by id only": (43,),
    "forget what a sink put off": (0, 1),
    "return what has expired": (27, 28),
    "expire by event time only": (9, 13),
    "name only the newest part of a log": (1, 3),
}
"""Seeds that find each, the first to be tried; ``python -m tests.simulation --mutations`` finds
them anew.
"""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Disable logging: there are thousands of restarts, each with warnings."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


FAST = BLOCK
"""This many seeds are among the fast tests, the others among the truth tests."""


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=[pytest.mark.truth] if first >= FAST else []) for first in range(0, SEEDS, BLOCK)],
)
def test_whatever_happens_every_record_has_its_effect_once(first: int, tally: Tally) -> None:
    checkpoints = 0
    for seed in range(first, first + BLOCK):
        with tally.trying("simulated histories of a job"):
            checkpoints += simulate(seed, thorough=False).checkpoints
    assert checkpoints > BLOCK


def test_running_jobs_are_rescaled_among_the_seeds() -> None:
    counts: Counter[str] = Counter()
    for seed in range(2, SEEDS, RESCALED_SEEDS):
        counts += simulate(seed, thorough=False).counts
        if counts["rescales answered"] > 1:
            return
    raise AssertionError(f"few were: {counts}")


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulator_finds_what_is_broken_on_purpose(name: str) -> None:
    with MUTATIONS[name]():
        found = next((seed for seed in (*FINDS[name], *range(SEARCHED)) if fails(seed)), None)
    assert found is not None, f"{name}: none of {SEARCHED} seeds shows it"


def test_every_mutation_has_its_seeds() -> None:
    assert FINDS.keys() == MUTATIONS.keys()


def fails(seed: int) -> bool:
    """Return whether a seed finds something."""
    try:
        simulate(seed)
    except Failed:
        return True
    return False


def test_a_seed_replays_exactly_in_another_process_too() -> None:
    story = simulate(3).story
    assert simulate(3).story == story
    code = "from tests.simulation.run import simulate; print(*simulate(3).story, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "99"},
    )
    assert done.stdout.splitlines() == "\n".join(story).splitlines()


def test_seeds_draw_every_kind_of_operator_edge_and_source() -> None:
    drawn = [graphs.draw(random.Random(f"graph {seed}")) for seed in range(DRAWN)]
    kinds = Counter(op.kind for graph in drawn for op in graph.ops)
    edges = Counter(edge.partitioner for graph in drawn for op in graph.ops for edge in op.inputs)
    loops = Counter(op.feedback.partitioner for graph in drawn for op in graph.ops if op.feedback)
    wanted = {*graphs.KEYED_KINDS, "delay", *graphs.PLAIN_KINDS, "even", "odd", "again", "leave", "sink"}
    assert {kind for kind, count in kinds.items() if count >= 10} == wanted
    assert min(edges.values()) >= 20
    assert len(edges) == 5
    assert len(loops) == 2
    assert 0.2 < sum(graph.bounded for graph in drawn) / DRAWN < 0.9


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk("simulated-storage")
    yield disk
    disk.forget()


def faulty(disk: Disk, faults: Faults) -> FaultyStorage:
    return FaultyStorage(disk, faults, random.Random(1))


def test_a_lost_answer_says_nothing_of_what_was_done(disk: Disk) -> None:
    storage = faulty(disk, Faults(lose=1000, budget=2))
    assert storage.create("manifests/a", b"1") is CreateOutcome.UNKNOWN
    with pytest.raises(StorageError, match="no answer"), storage.open_output("segments/b") as output:
        output.write(b"2")
    assert disk.storage.read("manifests/a") == b"1"
    assert disk.storage.read("segments/b") == b"2"


def test_what_fails_was_not_done_and_what_is_late_is_done_later(disk: Disk) -> None:
    storage = faulty(disk, Faults(fail=1000, budget=1))
    assert storage.create("manifests/a", b"1") is CreateOutcome.UNKNOWN
    assert disk.storage.list("manifests/") == []
    storage = faulty(disk, Faults(late=1000, budget=1))
    assert storage.create("manifests/a", b"1") is CreateOutcome.UNKNOWN
    assert disk.storage.list("manifests/") == []
    for _ in range(6):
        storage.exists()
        storage.list("manifests/")
    assert [item.path for item in disk.storage.list("manifests/")] == ["manifests/a"]


def test_a_process_that_has_died_writes_nothing_any_more(disk: Disk) -> None:
    storage = faulty(disk, Faults(die=1000, budget=1))
    with pytest.raises(Crash):
        storage.create("manifests/a", b"1")
    seen = disk.storage.list("")
    for request in (lambda: storage.create("manifests/b", b"1"), lambda: storage.delete(["manifests/a"])):
        with pytest.raises(Crash):
            request()
    assert disk.storage.list("") == seen


def test_faults_come_about_as_often_as_they_are_asked_for() -> None:
    rng = random.Random(2)
    drawn = Counter(Faults(fail=100, lose=50, refuse=50).draw(rng, "create") for _ in range(10_000))
    assert 4500 < drawn[Do.FAIL] < 5500
    assert 2000 < drawn[Do.LOSE] < 3000
    assert 2000 < drawn[Do.REFUSE] < 3000
    others = Counter(Faults(fail=100).draw(rng, "read") for _ in range(10_000))
    assert 850 < others[Do.FAIL] < 1150
    assert Faults(refuse=1000).draw(rng, "read") is Do.IT
