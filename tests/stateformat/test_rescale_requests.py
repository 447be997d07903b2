"""The parallelism that a rescale asks for: what its record says, and what readers make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stateformat.backends.storage import MemoryStorage
from stateformat.errors import InvalidInput
from stateformat.graph import SubtaskSet
from stateformat.model import RESCALE_PROPERTY, CheckpointKind, Record, Stop, StopMode
from stateformat.rescaling import WantedParallelism, lasting_stop, rescale_of
from stateformat.store import CheckpointStore
from tests import stores

STOP = Stop(StopMode.NO_DRAIN, 32 * "a")
WANTED = WantedParallelism(4, {"counts": 2})


@pytest.fixture
def store() -> CheckpointStore:
    MemoryStorage.reset("rescale-requests")
    return stores.counts_store("memory://rescale-requests")


@pytest.fixture
def record(store: CheckpointStore) -> Record:
    """A record of a stop for a rescale."""
    return replace(store.open().record, stop=STOP, properties={RESCALE_PROPERTY: WANTED.encode()})


@pytest.mark.parametrize("wanted", [WANTED, WantedParallelism(4), WantedParallelism(None, {"a b": 1, "c": 32768})])
def test_what_is_written_is_read_back(wanted: WantedParallelism) -> None:
    assert WantedParallelism.decode(wanted.encode()) == wanted


REFUSED = [
    "",
    "[]",
    "4",
    "{",
    '{"parallelism":0}',
    '{"parallelism":true}',
    '{"parallelism":32769}',
    '{"operators":[1]}',
]
REFUSED += ['{"parallelism":"4"}', '{"operators":{"a":null}}', '{"operators":{"a":1.5}}', 40_000 * "["]


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:30])
def test_what_no_run_has_written_makes_an_ordinary_stop(record: Record, text: str) -> None:
    odd = replace(record, properties={RESCALE_PROPERTY: text})
    assert rescale_of(odd) is None
    assert lasting_stop(odd) == STOP


def test_a_job_goes_on_only_from_the_stop_itself(record: Record) -> None:
    assert (rescale_of(record), lasting_stop(record)) == (WANTED, None)
    for kind in set(CheckpointKind) - {CheckpointKind.CHECKPOINT}:
        assert rescale_of(replace(record, kind=kind)) is None
    drained = Stop(StopMode.DRAIN, STOP.request)
    assert lasting_stop(replace(record, stop=drained)) == drained
    assert rescale_of(replace(record, stop=None)) is None
    assert lasting_stop(replace(record, properties={})) == STOP


def test_operators_that_have_finished_have_no_part_in_it(record: Record) -> None:
    graph = record.graph
    first = graph.operators[0]
    finished = graph.with_operators({first.uid: replace(first, finished=SubtaskSet.of(range(first.parallelism)))})
    assert set(WantedParallelism(7).of(graph).values()) == {7}
    assert WantedParallelism(7).of(finished).keys() == {one.uid for one in graph.operators} - {first.uid}
    kept = WantedParallelism(None, {first.uid: 9}).of(graph)
    assert kept == {one.uid: 9 if one.uid == first.uid else one.parallelism for one in graph.operators}


def test_it_is_told_in_few_words() -> None:
    assert WantedParallelism(4, {"x\n": 1}).describe() == "parallelism 4, 'x\\\\n' at 1"
    many = WantedParallelism(None, {f"op{number}": 1 for number in range(9)}).describe()
    assert many.endswith("'op4' at 1, 4 more")


def test_a_run_may_name_the_property_and_nobody_another_reserved_one(store: CheckpointStore) -> None:
    job = stores.counts_job()
    permit = job.publish(store, store.start("counts"), stop=STOP, properties={RESCALE_PROPERTY: WANTED.encode()})
    assert rescale_of(permit.record) == WANTED
    with pytest.raises(InvalidInput, match="keeps for itself"):
        job.publish(store, permit, properties={"stateformat.other": "x"})
