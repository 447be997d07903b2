"""Testing: an operator alone in a harness, and a whole job in a store in memory with a virtual
clock.
"""

import pyarrow as pa

import stateformat
from stateformat.backends.connectors import CollectSink, RateSource
from stateformat.backends.dataflow import Dataflow, TumblingWindow
from stateformat.backends.dataflow.testing import OperatorHarness
from stateformat.backends.local import LocalRuntime, VirtualClock

ROW = {"city": pa.string(), "n": pa.int64(), "at": pa.int64()}


def test_what_comes_after_its_window_is_dropped_and_counted() -> None:
    window = OperatorHarness(TumblingWindow("city", 10, "at", {"n": ("n", "sum")}), ROW, key_by="city")
    window.push([{"city": "Oslo", "n": 1, "at": 3}]).advance(10).push([{"city": "Oslo", "n": 2, "at": 9}])
    assert window.take_output()["n"].to_pylist() == [1]
    assert window.operator().late_records == 1


def test_the_job_counts_every_row_once_at_any_parallelism() -> None:
    for parallelism in (1, 3):
        flow = Dataflow("counts", parallelism=parallelism)
        rows = flow.source(RateSource(total=100, rows_per_second=10, shards=2), uid="rows")
        rows.key_by("shard").aggregate({"n": ("*", "count")}, emit="end", uid="n").apply(
            out := CollectSink(), uid="out"
        )
        store = stateformat.open(f"memory://testing-{parallelism}")
        LocalRuntime(store, clock=VirtualClock(), checkpoint_interval_us=1_000_000).run(flow)  # ten seconds, at once
        assert out.table().sort_by("shard")["n"].to_pylist() == [50, 50]
        assert stateformat.validate(store).ok


test_what_comes_after_its_window_is_dropped_and_counted()
test_the_job_counts_every_row_once_at_any_parallelism()
print("2 tests passed")

# It prints:
# 2 tests passed
