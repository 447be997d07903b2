"""Keys in sentences, where Python has no objects for their dates and times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from stateformat.backends.rewrite import RewriteSpec, Transform, rewrite
from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.states import declare
from stateformat.store import open as open_store
from stateformat.tables import python_rows
from tests.stores import counts_job, refused

FAR = pa.array([-3_650_000, 3_650_000], pa.int32()).cast(pa.date32())
TIMES = pa.array([5, 9000 * 365 * 86_400_000_000], pa.int64()).cast(pa.timestamp("us", "UTC"))
KEYS = pa.table({"day": FAR, "at": pa.StructArray.from_arrays([TIMES, pa.array([1, None])], ["t", "n"])})
DAYS = ["-8024-08-22", "11963-05-13"]
STATE = declare.value_state("counter", "counts", keys={"day": pa.date32()}, values={"n": pa.int64()})
ROWS = pa.table({"day": FAR, "n": [1, 2]})


@pytest.mark.parametrize("rows", [KEYS, KEYS.combine_chunks().to_batches()[0], pa.concat_tables([KEYS, KEYS[:0]])])
def test_times_that_python_lacks_are_text(rows: pa.Table | pa.RecordBatch) -> None:
    assert python_rows(rows) == [
        {"day": DAYS[0], "at": {"t": "1970-01-01 00:00:00.000005Z", "n": 1}},
        {"day": DAYS[1], "at": {"t": "10964-01-10 00:00:00.000000Z", "n": None}},
    ]
    assert python_rows(rows.select([])) == rows.select([]).to_pylist()


def test_equal_keys_are_refused_by_name(tmp_path: Path) -> None:
    twice = pa.concat_tables([ROWS, ROWS])
    job = replace(counts_job(parallelism=1), states=(STATE,), rows={("counter", "counts"): lambda _: twice})
    error = refused(
        InvalidState, lambda: job.publish(open_store(str(tmp_path)), None), kind=ErrorKind.DUPLICATE_ROW_KEY
    )
    assert all(day in str(error) for day in DAYS)


def failing(rows: pa.Table) -> pa.Table:
    if len(rows):
        raise ValueError("no")
    return rows


def moving(rows: pa.Table) -> pa.Table:
    days = [day + 1 for day in rows["day"].cast(pa.int32()).to_pylist()]
    return rows.set_column(0, "day", pa.array(days, pa.int32()).cast(pa.date32()))


@pytest.mark.parametrize(("function", "said"), [(failing, "first key {'day': '"), (moving, "changed keys: of ")])
def test_a_function_that_fails_is_told_of_with_the_key(
    tmp_path: Path, function: Callable[[pa.Table], pa.Table], said: str
) -> None:
    store = open_store(str(tmp_path))
    job = replace(counts_job(parallelism=1), states=(STATE,), rows={("counter", "counts"): lambda _: ROWS})
    job.publish(store, None)
    spec = RewriteSpec(transforms={("counter", "counts"): Transform(function)})
    refused(InvalidInput, lambda: rewrite(store, store.open(), spec), said)
