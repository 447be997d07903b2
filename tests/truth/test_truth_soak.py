"""Three minutes of a soak: half of them a job with every operator on both executors, fed and
killed, and half of them the job in process without a kill, in which a leak shows.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.soak import answers, feeding, watching
from tests.soak.__main__ import soak
from tests.tally import Tally

pytestmark = [pytest.mark.truth, pytest.mark.spark, pytest.mark.timeout(1500)]

OBJECTS_MAX = 80
"""For a store that keeps ten checkpoints: three objects each, and the layers below them."""
MEMORY_MAX_MB = {"local": 600, "spark": 4_000}
"""About twice what the processes of a job use."""
LEAK_MAX_MB = 50
"""In three quarters of a minute. The memory of a job in process stays within 20 MB."""


def test_a_job_that_is_fed_and_killed_loses_and_repeats_nothing_and_its_store_stays_small(
    tmp_path: Path, tally: Tally
) -> None:
    for job in soak(tmp_path, minutes=1.5, kill_every_s=25):
        with tally.trying(f"soak: killed on {job.executor}", tried=job.kills):
            assert job.kills >= 2
            assert answers.differences(job.folder) == dict.fromkeys(answers.EXPECTED, 0)
            assert max(sample.objects for sample in job.samples) <= OBJECTS_MAX
            assert max(sample.prepared for sample in job.samples) <= OBJECTS_MAX
            assert max(sample.memory_bytes for sample in job.samples) / 1e6 <= MEMORY_MAX_MB[job.executor]


def test_a_job_in_process_that_is_not_killed_leaks_nothing_and_a_quiet_source_holds_nothing_up(
    tmp_path: Path,
) -> None:
    [job] = soak(tmp_path, minutes=1.5, executors=["local"], kill_every_s=math.inf)
    assert answers.differences(job.folder) == dict.fromkeys(answers.EXPECTED, 0)
    memory, objects, prepared, *_ = watching.growth(job.samples, samples_min=8)
    assert memory.after <= memory.before + LEAK_MAX_MB
    assert objects.is_flat
    assert prepared.is_flat
    windows_written_at = {path.stat().st_mtime // 5 for path in (job.folder / "out" / "windows").glob("*.parquet")}
    assert len(windows_written_at) >= 3


def test_what_grows_from_the_second_quarter_of_a_soak_to_the_last_is_told() -> None:
    def sample(at_s: int, *, memory: int, objects: int, processor_s: float) -> watching.Sample:
        return watching.Sample(at_s, 100 + at_s, memory, objects, 0, at_s, at_s**2, processor_s)

    flat = [
        sample(at_s, memory=200_000_000 + at_s, objects=30 + at_s % 5, processor_s=at_s / 100) for at_s in range(160)
    ]
    assert [figure.what for figure in watching.growth(flat) if not figure.is_flat] == []
    growing = [sample(at_s, memory=2_000_000 * at_s, objects=at_s, processor_s=at_s**2 / 1000) for at_s in range(160)]
    told = [figure.what for figure in watching.growth(growing) if not figure.is_flat]
    assert told == ["memory, MB", "objects of the store", "processor time in a second, ms"]


def test_an_order_that_is_fed_twice_and_one_that_is_lost_are_both_told(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    feeding.prepare(tmp_path)
    for number in range(2):
        pq.write_table(feeding.orders_of(number), tmp_path / "orders" / f"{number}.parquet")
    with answers.database(tmp_path) as known:
        tables = {name: known.sql(query).to_arrow_table() for name, query in answers.EXPECTED.items()}
    for name, table in tables.items():
        (tmp_path / "out" / name).mkdir()
        pq.write_table(table, tmp_path / "out" / name / "part.parquet")
    assert answers.differences(tmp_path) == dict.fromkeys(tables, 0)
    pq.write_table(tables["windows"].slice(1), tmp_path / "out" / "windows" / "part.parquet")
    pq.write_table(tables["laps"].slice(0, 1), tmp_path / "out" / "laps" / "again.parquet")
    assert answers.differences(tmp_path) == {name: int(name in ("windows", "laps")) for name in tables}
