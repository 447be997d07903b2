"""Ready-made sources, operators and sinks together, in jobs that are lost and run again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import stateformat as sf
from stateformat.backends.connectors import CollectSink, CsvSource, FileSink, MemorySource, ParquetSource, RateSource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.dataflow.operators.join import BroadcastJoin
from stateformat.backends.local import LocalRuntime
from stateformat.backends.runtime import JobOutcome, RunDiscarded

ROWS, KEYS, WINDOW_US = 4_000, 7, 250_000


def with_key(batch: pa.RecordBatch) -> pa.RecordBatch:
    n = batch["n"]
    return batch.append_column("key", pc.subtract(n, pc.multiply(pc.divide(n, KEYS), KEYS)))


def ticks_job(directory: Path, collected: CollectSink, shards: int) -> Dataflow:
    """Ticks, counted by key and window, named by a table; windows collected, totals in files."""
    flow = Dataflow("ticks", parallelism=2)
    ticks = flow.source(RateSource(rows_per_read=100, total=ROWS, shards=shards), uid="ticks", event_time="at")
    names = flow.source(
        MemorySource(pa.table({"number": range(KEYS), "name": [f"é{key}" for key in range(KEYS)]}), splits=3),
        uid="names",
    )
    keyed = ticks.map(with_key, uid="keyed").filter(pc.field("key") > 0, uid="some").key_by("key")
    windows = keyed.window(WINDOW_US, "at", {"rows": ("*", "count"), "last": ("n", "max")}, uid="windows")
    named = windows.apply(BroadcastJoin({"key": "number"}), names.broadcast(), uid="named")
    named.apply(collected, uid="collected")
    totals = named.key_by("name").aggregate({"rows": ("rows", "sum")}, emit="end", uid="totals")
    totals.apply(FileSink(directory / "totals", durable=False), uid="out")
    return flow


def expected_windows(shards: int) -> list[dict[str, Any]]:
    """By arithmetic: row n of each shard is at n milliseconds."""
    found: dict[tuple[int, int], list[int]] = {}
    for shard in range(shards):
        for n in range(ROWS // shards + (shard < ROWS % shards)):
            if n % KEYS:
                found.setdefault((n % KEYS, n * 1000 // WINDOW_US * WINDOW_US), []).append(n)
    return [
        {"key": key, "window_start": at, "rows": len(numbers), "last": max(numbers), "name": f"é{key}"}
        for (key, at), numbers in sorted(found.items())
    ]


def collected_windows(sink: CollectSink) -> list[dict[str, Any]]:
    table = sink.table().drop_columns("window_end")
    times = table["window_start"].cast(pa.int64())
    table = table.set_column(table.schema.get_field_index("window_start"), "window_start", times)
    return table.sort_by([("key", "ascending"), ("window_start", "ascending")]).to_pylist()


def runtime(directory: Path, **options: Any) -> LocalRuntime:
    store = sf.open(str(directory / "store"), durable=False)
    return LocalRuntime(store, checkpoint_interval_us=None, checkpoint_rows=600, **options)


@pytest.mark.parametrize(("shards", "parallelism"), [(1, 1), (4, 1), (4, 3), (3, 4)])
def test_a_job_over_ticks_gives_what_arithmetic_says(tmp_path: Path, shards: int, parallelism: int) -> None:
    sink = CollectSink()
    flow = ticks_job(tmp_path, sink, shards)
    runtime(tmp_path, parallelism=parallelism, seed=shards).run(flow)
    assert collected_windows(sink) == expected_windows(shards)


@pytest.mark.parametrize("seed", range(4))
def test_a_job_that_is_lost_again_and_again_writes_every_row_once(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    sink, totals = CollectSink(), {}
    for row in expected_windows(4):
        totals[row["name"]] = totals.get(row["name"], 0) + row["rows"]
    for life in range(100):
        # The driver's memory survives here; everything else of a run is lost between two steps.
        flow = ticks_job(tmp_path, sink, 4)
        run = runtime(tmp_path, parallelism=draw.randrange(1, 4), seed=life).begin(flow)
        if isinstance(run, JobOutcome):
            break
        for _ in range(draw.randrange(20, 260)):
            if not run.step():
                break
        assert visible_rows(tmp_path / "totals") in ({}, totals)
    else:
        raise AssertionError("a hundred lives were not enough")
    assert life > 2
    assert visible_rows(tmp_path / "totals") == totals
    assert collected_windows(sink) == expected_windows(4)
    assert not list((tmp_path / "totals").rglob("*.open"))


class CollectsLargeText(CollectSink):
    """A sink of release 0.1, which kept large types, in a process that is lost as it commits."""

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        super().process(batch.cast(pa.schema({"n": pa.int64(), "text": pa.large_string()})), input)

    def commit(self, permit: Any, committables: pa.Table) -> None:
        raise KeyboardInterrupt


def test_rows_that_release_0_1_prepared_with_large_text_are_collected_with_the_types_of_today(tmp_path: Path) -> None:
    def flow(sink: CollectSink) -> Dataflow:
        made = Dataflow("job", parallelism=1)
        rows = pa.table({"n": range(1000), "text": [str(n) for n in range(1000)]})
        made.source(MemorySource(rows, batch_rows=100), uid="rows").apply(sink, uid="out")
        return made

    with pytest.raises(KeyboardInterrupt):
        runtime(tmp_path).run(flow(CollectsLargeText()))
    sink = CollectSink()
    runtime(tmp_path).run(flow(sink))
    assert sink.table().schema == pa.schema({"n": pa.int64(), "text": pa.string()})
    assert sink.table()["text"].to_pylist() == [str(n) for n in range(1000)]


def visible_rows(directory: Path) -> dict[str, int]:
    if not directory.exists():
        return {}
    rows = pq.read_table(directory).to_pylist()
    assert len({row["name"] for row in rows}) == len(rows)
    return {row["name"]: row["rows"] for row in rows}


def files_job(directory: Path) -> Dataflow:
    """Flights of files that go on appearing, each once, with the seats of its plane."""
    flow = Dataflow("files")
    schema = {"id": pa.int64(), "tail": pa.string()}
    flights = flow.source(ParquetSource(directory / "in", schema=schema, grows=True, until="_END"), uid="flights")
    planes = flow.source(CsvSource(directory / "planes.csv"), uid="planes")
    once = flights.key_by("id").deduplicate(uid="once")
    seated = once.apply(BroadcastJoin({"tail": "tail"}, how="left"), planes.broadcast(), uid="seated")
    picked = seated.select("id", {"places": "seats"}, uid="picked")
    picked.apply(FileSink(directory / "out", durable=False, rows_per_file=30), uid="out")
    return flow


def test_a_job_over_files_that_appear_while_it_is_lost_and_run_again_writes_each_row_once(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "planes.csv").write_text("tail,seats\nN0,10\nN1,20\n")
    draw = random.Random(7)
    written = 0
    for life in range(200):
        run = runtime(tmp_path, parallelism=draw.randrange(1, 4), seed=life).begin(files_job(tmp_path))
        if isinstance(run, JobOutcome):
            break
        for _ in range(draw.randrange(20, 400)):
            if written < 8 and draw.random() < 0.02:
                # Every flight is in two files.
                ids = [50 * (written // 2) + n for n in range(50)]
                table = pa.table({"id": ids, "tail": [None if i % 5 == 0 else f"N{i % 3}" for i in ids]})
                pq.write_table(table, tmp_path / ".new")
                (tmp_path / ".new").rename(tmp_path / "in" / f"{written % 2}-{written}.parquet")
                written += 1
            elif written == 8:
                (tmp_path / "in" / "_END").touch()
            try:
                if not run.step():
                    break
            except RunDiscarded:
                break
    assert life > 2
    rows = sorted((row["id"], row["places"]) for row in pq.read_table(tmp_path / "out").to_pylist())
    seats = {0: 10, 1: 20}
    assert rows == [(i, None if i % 5 == 0 else seats.get(i % 3)) for i in range(200)]
