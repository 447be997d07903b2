"""Expiry by age: age only chooses how far the deletion goes, and clocks that jump harm nothing."""

from __future__ import annotations

import random
import time
from uuid import uuid4

import pytest

import stateformat as sf
from stateformat import paths as layout
from stateformat.errors import InvalidInput
from stateformat.history import record_ids
from stateformat.model import CheckpointId
from stateformat.store import CheckpointStore
from tests import stores

NOW = 1_000
"""Seconds. The age in all cases is 100 s."""
AGE_US = 100 * 10**6


def store_of(times: list[int], monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """A store whose checkpoints 1, 2, … were published at these seconds, by a clock that jumps."""
    store, job = sf.open(f"memory://{uuid4().hex}"), stores.counts_job()
    permit = None
    with monkeypatch.context() as patch:
        for second in times:
            patch.setattr(time, "time_ns", lambda second=second: second * 10**9)
            permit = job.publish(store, permit)
    return store


def left(store: CheckpointStore) -> list[int]:
    return [int(number) for number in record_ids(store.storage)]


@pytest.mark.parametrize(
    ("times", "keep", "stays"),
    [
        ([100, 200, 890, 900, 901, 950], 1, [4, 5, 6]),
        ([100, 200, 890, 900, 901, 950], 4, [3, 4, 5, 6]),
        ([100, 200, 300, 400], 1, [4]),  # the newest never goes
        ([100, 200, 300, 400], 9, [1, 2, 3, 4]),
        ([950, 960, 970], 1, [1, 2, 3]),
        # The clock went back for a while: what is younger keeps all that is above it.
        ([100, 950, 200, 960], 1, [2, 3, 4]),
        ([950, 100, 200, 960], 1, [1, 2, 3, 4]),
        ([100, 1, 1, 1], 1, [4]),
        ([100, 1, 1, 1], 3, [2, 3, 4]),
        # A time of the future says nothing: it goes with the next that does.
        ([100, 9_999, 200, 950], 1, [4]),
        ([100, 9_999, 950, 960], 1, [2, 3, 4]),
        ([9_999, 9_999, 9_999], 1, [1, 2, 3]),
        ([9_999, 9_999, 200, 9_999], 1, [4]),
    ],
)
def test_what_is_beyond_the_number_and_older_goes_lowest_first(
    times: list[int], keep: int, stays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(times, monkeypatch)
    plan = store.expire(keep, older_than_us=AGE_US, now_us=NOW * 10**6, delete=False)
    assert left(store) == [*range(1, len(times) + 1)]
    done = store.expire(keep, older_than_us=AGE_US, now_us=NOW * 10**6)
    assert left(store) == stays
    assert plan.records == done.records
    assert sf.validate(store.storage, level="full").ok
    assert store.collect_garbage(delete=False).objects == ()


@pytest.mark.parametrize("seed", range(25))
def test_whatever_clocks_say_no_more_goes_than_by_number_and_a_prefix_goes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    times = [draw.choice((1, 500, 899, 900, 901, 999, 1_000, 1_001, 10**6)) for _ in range(draw.randint(1, 9))]
    keep, now = draw.randint(1, 4), draw.choice((0, 1, 1_000, 10**7))
    store = store_of(times, monkeypatch)
    store.expire(keep, older_than_us=AGE_US, now_us=now * 10**6)
    gone = len(times) - len(left(store))
    assert left(store) == [*range(gone + 1, len(times) + 1)]
    assert gone <= max(0, len(times) - keep)
    known = [second for second in times[:gone] if second <= now]
    assert all(second < now - 100 for second in known)
    assert bool(known) is bool(gone)
    if gone < len(times) - keep:
        # It ended at one that is younger, or nothing above says more.
        first_told = next((second for second in times[gone : len(times) - keep] if second <= now), None)
        assert first_told is None or first_told >= now - 100
    assert len(left(store)) >= 1


def test_a_record_that_cannot_be_read_goes_with_the_next_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    for times, stays in (([100, 200, 300, 950], [4]), ([100, 200, 950, 960], [2, 3, 4])):
        store = store_of(times, monkeypatch)
        path = layout.record_path(CheckpointId(2))
        store.storage.delete([path])
        store.storage.create(path, b"{}\n")
        store.expire(older_than_us=AGE_US, now_us=NOW * 10**6)
        assert left(store) == stays


def test_few_records_are_read_to_learn_that_none_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of([*range(950, 970)], monkeypatch)
    asked: list[str] = []
    read = type(store.storage).read_range

    def reading(self: object, path: str, *more: int) -> object:
        asked.append(path)
        return read(self, path, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(type(store.storage), "read_range", reading)
    from stateformat.history.retention import cut_by_age

    ids = [CheckpointId(number) for number in range(1, 20)]
    assert cut_by_age(store.storage, ids, 900 * 10**6, NOW * 10**6) == 0
    assert len(asked) <= 1


def test_an_age_is_not_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="0 or more"):
        store_of([1], monkeypatch).expire(older_than_us=-1)


def test_nothing_expires_unless_it_is_said_how_much_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of([1, 2, 3], monkeypatch)
    with pytest.raises(InvalidInput, match="how many checkpoints to keep, or for how long"):
        store.expire()
    assert left(store) == [1, 2, 3]
