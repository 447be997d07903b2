"""A run that goes on without a state whose segments were lost."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from stateformat.backends.runtime import driver
from stateformat.repairing import losses_of
from tests.local_jobs import Count, Line, rows


@pytest.mark.parametrize("parallelism", [2, 3])
def test_a_lost_state_that_is_dropped_begins_anew_and_the_job_goes_on(
    parallelism: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # State is written as objects, however small.
    monkeypatch.setattr(driver, "_OPTIONS", replace(driver._OPTIONS, inline_bytes_max=0))
    every = [rows(key, key=key) for key in range(20)]
    first, second = (pa.Table.from_batches(every * count).combine_chunks().to_batches()[0] for count in (3, 1))
    line = Line([first, second], op=Count, how="key_by", parallelism=2, shut=True)
    run = line.begin()
    line.tap.let(0, 1)
    while sum(call.startswith("op/") and " process " in call for call in line.log.calls) < 2:
        run.step()
    line.bench.checkpoint(run)
    store = line.bench.store
    lost = [path for path in store.open().handles["path"].to_pylist() if path and "/op-count-0" in path]
    line.bench.storage.inner.delete(lost)
    found = losses_of(store.storage, store.diagnose())
    assert found is not None
    ((operator, state),) = found.states
    line.tap.let(0)
    assert line.run(parallelism, drop=[f"{operator}/{state}"]).sentence
    assert line.out.seen == [1] * 20
