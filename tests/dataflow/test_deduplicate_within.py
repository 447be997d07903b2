"""Duplicates are removed for a while: against a loop over the rows."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.connectors import MemorySource
from stateformat.backends.dataflow import Dataflow, Deduplicate
from stateformat.backends.dataflow.testing import OperatorHarness
from stateformat.errors import InvalidInput

COLUMNS = {"k": pa.int64(), "n": pa.int64(), "at": pa.int64()}
SEEDS = [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.truth) for seed in range(3, 16))]


def expected(rows: list[dict[str, Any]], within_us: int) -> list[int]:
    """The numbers of the rows that pass."""
    last: dict[int, int] = {}
    passed = []
    for row in rows:
        if row["k"] not in last or row["at"] >= last[row["k"]] + within_us:
            last[row["k"]] = row["at"]
            passed.append(row["n"])
    return passed


@pytest.mark.parametrize("within_us", [1, 7, 40, 10**15])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_passes_depends_on_the_rows_of_a_key_alone(seed: int, within_us: int) -> None:
    chance = random.Random(seed)
    rows = [
        {"k": chance.randrange(4), "n": n, "at": 1_000 + n // 2 - chance.randrange(chance.choice([1, 12]))}
        for n in range(400)
    ]
    harness = OperatorHarness(
        Deduplicate("k", within=within_us, time="at"), COLUMNS, key_by="k", parallelism=chance.choice([1, 3])
    )
    at, came = 0, []
    while at < len(rows):
        # Rows in any pieces, watermarks behind the rows to come, restarts at any parallelism.
        size = chance.choice([1, 5, 60])
        harness.push(rows[at : at + size])
        at += size
        if at < len(rows) and chance.random() < 0.6:
            harness.advance(min(row["at"] for row in rows[at:]))
        if chance.random() < 0.1:
            came += harness.take_output()["n"].to_pylist()
            harness = OperatorHarness.restore(harness.snapshot(), parallelism=chance.choice([1, 2, 3]))
    assert sorted([*came, *harness.output["n"].to_pylist()]) == expected(rows, within_us)
    assert harness.operator().late_records == 0


def test_what_passes_does_not_depend_on_batches_at_the_ends_of_int64_either() -> None:
    times = [0, 2**53, 2**53 + 90, 2**63 - 1, 2**63 - 1]
    rows = [{"k": 0, "n": n, "at": at} for n, at in enumerate(times)]
    for size in (1, 2, 5):
        harness = OperatorHarness(Deduplicate("k", within=50, time="at"), COLUMNS, key_by="k")
        for first in range(0, len(rows), size):
            harness.push(rows[first : first + size])
        assert harness.output["n"].to_pylist() == [0, 1]
    # Before all of them is late once event time has begun.
    harness.advance(-(2**63) + 5).push([{"k": 0, "n": 9, "at": -(2**63)}, {"k": 1, "n": 9, "at": -(2**63) + 1}])
    assert harness.operator().late_records == 2


def test_the_state_has_the_keys_that_may_still_have_duplicates() -> None:
    harness = OperatorHarness(Deduplicate("k", within=100, time="at"), COLUMNS, key_by="k")
    for n in range(50):
        harness.push([{"k": n, "n": n, "at": 10 * n}]).advance(10 * n)
    assert sorted(harness.state("seen")["k"].to_pylist()) == [*range(40, 50)]


def test_rows_behind_the_watermark_and_rows_without_a_time_are_dropped_and_counted() -> None:
    harness = OperatorHarness(Deduplicate("k", within=100, time="at"), COLUMNS, key_by="k")
    harness.advance(1_000).push(
        [{"k": 1, "n": 1, "at": 999}, {"k": 2, "n": 2, "at": None}, {"k": 3, "n": 3, "at": 1_000}]
    )
    assert harness.output["n"].to_pylist() == [3]
    again = OperatorHarness.restore(harness.snapshot())
    operator = again.operator()
    assert isinstance(operator, Deduplicate)
    assert (operator.late_records, operator.untimed_records) == (1, 1)


def test_without_a_time_it_is_that_of_the_clock() -> None:
    within = timedelta(microseconds=100)
    harness = OperatorHarness(Deduplicate("k", within=within), COLUMNS, key_by="k")
    start = harness.context().processing_time_us
    for n, after_us in enumerate([0, 50, 99, 100, 150, 199, 200, 350]):
        harness.advance_processing_time(start + after_us).push([{"k": 1, "n": n, "at": None}])
    # A row that is dropped does not keep the next one from passing.
    assert harness.output["n"].to_pylist() == [0, 3, 6, 7]


def test_keys_that_were_known_for_ever_count_from_the_restart_on() -> None:
    harness = OperatorHarness(Deduplicate("k"), COLUMNS, key_by="k")
    harness.push([{"k": k, "n": k, "at": 1} for k in range(3)]).advance(500)
    again = OperatorHarness.restore(harness.snapshot(), Deduplicate("k", within=100, time="at"))
    again.push([{"k": 0, "n": 10, "at": 599}, {"k": 1, "n": 11, "at": 600}])
    assert again.output["n"].to_pylist() == [11]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"time": "at"}, "needs within"),
        ({"within": 0, "time": "at"}, "within of removing duplicates is 0"),
        ({"within": 1.5}, "within of removing duplicates is 1.5"),
        ({"within": 5, "time": "nothing"}, "nothing"),
        ({"within": 5, "time": "word"}, "event time 'word' is string"),
    ],
)
def test_what_is_no_time_is_refused_when_the_dataflow_is_built(arguments: Any, message: str) -> None:
    rows = pa.table({"k": [1], "at": [1], "word": ["a"]})
    stream = Dataflow("job").source(MemorySource(rows), uid="rows").key_by("k")
    with pytest.raises(InvalidInput, match=message):
        stream.deduplicate(uid="once", **arguments)


def test_a_hot_key_with_many_rows_that_pass_takes_no_loop() -> None:
    rows = pa.record_batch({"k": pa.array([1] * 200_000), "at": pa.array(range(200_000))})
    driven = OperatorHarness(Deduplicate("k", within=2, time="at"), rows.schema, key_by="k")
    driven.push(rows)
    assert driven.output["at"].to_pylist() == [*range(0, 200_000, 2)]
