"""Both executors go on from a store that a job of 0.1 left when it was killed, also after a
rescale.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import stateformat
from stateformat.backends.connectors import CollectSink, RateSource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import LocalRuntime
from stateformat.backends.rewrite import publish_rescaled

LEFT = Path(__file__).resolve().parents[1] / "golden" / "v1-runtime"
WINDOW_US = 100_000
EACH = 500
"""Rows of a shard, 1 ms apart."""


def job(out: CollectSink) -> Dataflow:
    """Return the job that wrote the store."""
    flow = Dataflow("shards", parallelism=3)
    source = RateSource(total=4 * EACH, shards=4, rows_per_read=25, step_us=1_000)
    rows = flow.source(source, uid="rows", event_time="at")
    counted = {"rows": ("*", "count"), "last": ("n", "max")}
    rows.key_by("shard").window(WINDOW_US, "at", counted, uid="windows").apply(out, uid="out")
    return flow


def finish(executor: str, store: stateformat.CheckpointStore, out: CollectSink, request: pytest.FixtureRequest) -> None:
    if executor == "local":
        LocalRuntime(store).run(job(out))
    else:
        from stateformat.backends.spark import SparkRuntime

        SparkRuntime(request.getfixturevalue("spark"), store).run(job(out))


def windows(rows: list[dict[str, Any]]) -> list[tuple[int, str, int, int]]:
    return sorted((row["shard"], str(row["window_start"])[:26], row["rows"], row["last"]) for row in rows)


@pytest.mark.parametrize("rescaled", [False, True], ids=["as it is", "rescaled"])
@pytest.mark.parametrize("executor", ["local", pytest.param("spark", marks=pytest.mark.spark)])
def test_a_job_goes_on_from_a_store_of_0_1(
    executor: str, rescaled: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shutil.copytree(LEFT / "store", tmp_path / "store")
    store, out = stateformat.open(str(tmp_path / "store")), CollectSink()
    assert store.open().record.writer == "stateformat 0.1.0"
    assert stateformat.validate(store, level="full").ok
    if rescaled:
        checkpoint = store.open()
        publish_rescaled(checkpoint, checkpoint.graph.at(5), store=store)
    finish(executor, store, out, request)
    before, after = windows(json.loads((LEFT / "committed.json").read_text())), windows(out.table().to_pylist())
    assert before
    assert len(set(after)) == len(after)
    everything = sorted({*before, *after})
    assert [(shard, rows, last) for shard, _, rows, last in everything] == [
        (shard, 100, 100 * window + 99) for shard in range(4) for window in range(EACH // 100)
    ]
