"""The Arrow C stream of our rows: lazy, scanned by any tool, any number of times, from any thread;
errors reach the tool, and a stream that is dropped leaves nothing behind.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from stateformat.errors import DamagedCheckpoint, InvalidInput
from stateformat.tables import ArrowStream, SizedCall, prefetch

SENTENCE = "segment segments/7/x.parquet is damaged: ä; `ckpt validate` says more"
SCHEMA = pa.schema({"k": pa.int64(), "s": pa.string()})


def ended(rows: Numbers) -> bool:
    """Whether every scan ends; a thread of Arrow's may let go of one a moment later."""
    for _ in range(1000):
        gc.collect()
        if rows.begun == rows.ended:
            return True
        threading.Event().wait(0.01)
    return False


class Numbers(ArrowStream):
    """Four batches of three rows; fails in place of batch ``fails_at``."""

    def __init__(self, fails_at: int | None = None, error: Callable[[], Exception] | None = None) -> None:
        self.fails_at = fails_at
        # Made anew: an error that has been raised keeps the frames that it went through.
        self.error = error or (lambda: DamagedCheckpoint(SENTENCE))
        self.begun = self.ended = 0

    @property
    def schema(self) -> pa.Schema:
        return SCHEMA

    def batches(self) -> Iterator[pa.RecordBatch]:
        self.begun += 1
        try:
            for number in range(4):
                if number == self.fails_at:
                    raise self.error()
                keys = [3 * number + i for i in range(3)]
                yield pa.record_batch({"k": pa.array(keys, pa.int64()), "s": [f"s{key}" for key in keys]})
        finally:
            self.ended += 1


@pytest.fixture(scope="module", autouse=True)
def what_others_left_is_not_looked_at() -> Iterator[None]:
    """These tests collect garbage again and again; behind thousands of other tests that takes
    seconds each time, unless only what is new is gone through.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def reader(rows: object) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_stream(rows)


def written(rows: object, folder: Path) -> int:
    ds.write_dataset(reader(rows), folder, format="parquet")
    return int(ds.dataset(folder).count_rows())


def query(sql: str, rows: object) -> Any:
    with duckdb.connect() as connection:
        connection.register("rows", rows)
        return connection.execute(sql).fetchall()


TOOLS: dict[str, Callable[[Any, Path], int]] = {
    "duckdb": lambda rows, _: int(query("select sum(k - k + 1) from rows", rows)[0][0]),
    "duckdb count": lambda rows, _: int(query("select count(*) from rows", rows)[0][0]),
    "duckdb self join": lambda rows, _: int(query("select count(*) from rows a join rows b using (k)", rows)[0][0]),
    "polars": lambda rows, _: pl.DataFrame(rows).height,
    "polars from_arrow": lambda rows, _: len(pl.from_arrow(rows)),
    "pyarrow": lambda rows, _: pa.table(rows).num_rows,
    "pandas": lambda rows, _: len(pa.table(rows).to_pandas()),
    "dataset": written,
    "table": lambda rows, _: rows.table().num_rows,
}


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_reads_all_rows_again_and_again(tool: str, tmp_path: Path) -> None:
    rows = Numbers()
    for number in range(2):
        assert TOOLS[tool](rows, tmp_path / str(number)) == 12
    assert ended(rows)
    assert rows.begun >= 2


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("fails_at", [0, 3])
def test_an_error_is_told_by_every_tool(tool: str, fails_at: int, tmp_path: Path) -> None:
    rows = Numbers(fails_at)
    with pytest.raises(Exception, match="segments/7") as caught:
        TOOLS[tool](rows, tmp_path / "out")
    assert SENTENCE in str(caught.value)
    del caught
    assert ended(rows)


def test_a_batch_of_other_columns_is_refused() -> None:
    class Wrong(Numbers):
        def batches(self) -> Iterator[pa.RecordBatch]:
            yield pa.record_batch({"k": pa.array([1], pa.int32()), "s": ["x"]})

    with pytest.raises(pa.ArrowInvalid, match="a batch has the columns k: int32"):
        reader(Wrong()).read_all()


def test_asking_for_a_stream_or_its_columns_begins_nothing() -> None:
    rows = Numbers()
    capsules = [rows.__arrow_c_stream__() for _ in range(3)]
    stream = reader(rows)
    assert stream.schema.equals(SCHEMA)
    assert pa.schema(rows).equals(SCHEMA)
    assert rows.begun == 0
    stream.read_next_batch()
    assert rows.begun == 1
    del capsules, stream
    gc.collect()
    assert rows.ended == 1


def test_a_requested_schema_casts() -> None:
    narrow = pa.schema({"k": pa.int32(), "s": pa.string()})
    assert pa.table(Numbers(), schema=narrow).schema.equals(narrow)
    with pytest.raises(pa.ArrowInvalid, match="Failed to parse string: 's"):
        pa.table(Numbers(), schema=pa.schema({"k": pa.int64(), "s": pa.int64()}))


class Ahead(Numbers):
    """Reads ahead in threads, without end."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        table = Numbers().table()

        def calls() -> Iterator[SizedCall[pa.Table]]:
            while True:
                yield SizedCall(lambda: table, 1000)

        self.begun += 1
        try:
            for made in prefetch(calls(), workers=2, depth=3):  # type: ignore[arg-type]
                yield from made.to_batches()
        finally:
            self.ended += 1


def ahead() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("stateformat-ahead")]


@pytest.mark.parametrize("drop", ["release", "limit", "error", "thread"])
def test_a_stream_that_is_dropped_ends_its_threads(drop: str) -> None:
    rows = Ahead()
    if drop == "limit":
        assert len(query("select k from rows limit 5", rows)) == 5
    else:
        stream: Any = [reader(rows)]
        assert stream[0].read_next_batch().num_rows == 3
        assert ahead()
        if drop == "error":
            with pytest.raises(ZeroDivisionError):
                _raise_with(stream)
        elif drop == "thread":
            thread = threading.Thread(target=stream.clear)
            thread.start()
            thread.join()
        else:
            stream.clear()
    gc.collect()
    assert rows.begun == rows.ended == 1
    assert ahead() == []


def _raise_with(stream: list[Any]) -> None:
    held = stream.pop()
    raise ZeroDivisionError(held.schema)


def test_many_threads_scan_one_object_at_once() -> None:
    rows = Numbers()
    wanted = rows.table()
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(pa.table, rows) for _ in range(40)]
        bad = [pool.submit(reader(Numbers(n % 4, partial(InvalidInput, f"stream {n}"))).read_all) for n in range(40)]
        assert all(future.result().equals(wanted) for future in good)
        assert all(f"stream {n}" in str(future.exception()) for n, future in enumerate(bad))


def test_a_process_ends_with_streams_that_nobody_released() -> None:
    program = (
        "import pyarrow as pa\n"
        "from tests.stateformat.test_state_rows_stream import Ahead, Numbers, reader\n"
        "whole, half, failed = Numbers().__arrow_c_stream__(), reader(Ahead()), reader(Numbers(0))\n"
        "half.read_next_batch()\n"
        "try:\n    failed.read_next_batch()\nexcept pa.ArrowException:\n    print('read')\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "read\n", "")
