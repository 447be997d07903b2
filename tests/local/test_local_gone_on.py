"""A run that goes on from a checkpoint whose lost segments were given up."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from stateformat.backends.runtime import driver
from stateformat.keys import hash_keys, key_groups, subtask_of_key_group
from stateformat.publication import CommitPermit
from stateformat.repairing import Scope, go_on, losses_of
from tests.local_jobs import Count, Line, rows

KEYS = range(20)


@pytest.fixture
def _objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """State is written as objects, however small."""
    monkeypatch.setattr(driver, "_OPTIONS", replace(driver._OPTIONS, inline_bytes_max=0))


def of_subtask(number: int, parallelism: int = 2) -> set[int]:
    """The keys of a subtask."""
    groups = key_groups(hash_keys([pa.array(KEYS, pa.int64())]), 128)
    owners = subtask_of_key_group(groups, parallelism=parallelism, max_parallelism=128)
    return {key for key, owner in zip(KEYS, owners.tolist(), strict=True) if owner == number}


def lose(line: Line, *labels: str) -> None:
    """Lose the newest checkpoint's segments with these labels."""
    store = line.bench.store
    paths = [path for path in store.open().handles["path"].to_pylist() if path]
    gone = [path for path in paths for label in labels if path.rpartition("/")[2].startswith(label)]
    assert len(gone) == len(labels)
    line.bench.storage.inner.delete(gone)


def give_up(line: Line, scope: Scope) -> CommitPermit:
    store = line.bench.store
    diagnosis = store.diagnose(level="full")
    losses = losses_of(store.storage, diagnosis)
    assert losses is not None
    result = go_on(store.storage, diagnosis, losses, give_up=scope)
    assert result.permit is not None
    return result.permit


@pytest.mark.usefixtures("_objects")
@pytest.mark.parametrize("parallelism", [2, 1, 3])
@pytest.mark.parametrize("scope", ["rows", "keys"])
def test_keys_of_lost_key_groups_begin_anew_and_all_others_go_on(parallelism: int, scope: Scope) -> None:
    every = [rows(key, key=key) for key in KEYS]
    first = [pa.Table.from_batches(every * 3).combine_chunks().to_batches()[0]]
    second = [pa.Table.from_batches(every).combine_chunks().to_batches()[0]]
    line = Line([*first, *second], op=Count, how="key_by", parallelism=2, shut=True)
    run = line.begin()
    line.tap.let(0, 1)
    while sum(call.startswith("op/") and " process " in call for call in line.log.calls) < 2:
        run.step()
    line.bench.checkpoint(run)
    lose(line, "op-count-0")
    permit = give_up(line, scope)
    assert permit.ref.checkpoint_id == line.bench.newest_id
    line.tap.let(0)
    assert line.run(parallelism).sentence
    counted = {key: 1 if key in of_subtask(0) else 4 for key in KEYS}
    assert line.out.seen == sorted(counted.values())


@pytest.mark.usefixtures("_objects")
def test_output_of_lost_committables_is_not_committed_and_the_run_goes_on() -> None:
    line = Line([rows(1), rows(2), rows(3)], shut=True)
    run = line.begin()
    line.let(run, 2)
    line.out.later = [9, 9, 9]
    line.bench.checkpoint(run)
    line.out.later = []
    before = line.out.seen
    lose(line, "out-committables-0")
    give_up(line, "rows")
    line.tap.let(0)
    assert line.run().sentence
    assert line.out.seen == sorted([*before, 3])
