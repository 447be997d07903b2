"""The job of a soak, with every ready-made operator, a loop, state that expires, timers of both
clocks and a source that becomes idle.

``python -m tests.soak.job local|spark FOLDER`` reads what the feeder writes into FOLDER/orders,
keeps its checkpoints in FOLDER/store and writes to FOLDER/out. It ends when the feeder has stopped.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import stateformat as sf
from stateformat.backends import dataflow as df
from stateformat.backends.connectors import FileSink, ParquetSource
from stateformat.backends.dataflow.operators.join import BroadcastJoin
from stateformat.backends.local import GraceExceeded, LocalRuntime, stop_soon_on_sigterm
from tests.soak.feeding import CUSTOMERS_FILE, END, ORDERS, OUT_OF_ORDER_US

WINDOW_US = 10_000_000
FORGOTTEN_US = 6 * WINDOW_US
"""How long an order is remembered. A repeated order comes within a second."""
REMEMBERED_US = 2 * WINDOW_US
LONG_GONE_US = 2 * FORGOTTEN_US
"""Rows written this long ago have expired, whatever the steps of time were."""
DAY_US = 86_400_000_000
END_US = 2**63 - 1
LATER_US = 2_000_000
IDLE_US = 2_000_000
PARALLELISM = 2
CHECKPOINT_US = 1_000_000
LAP = pa.schema([("customer", pa.int64()), ("laps", pa.int64())])
LAPS = 4
"""An order goes around the loop (its id modulo this number) times."""


class Lap(df.Operator):
    """The head of a loop: takes one lap off every record."""

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return LAP

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch:
        laps = pc.subtract(batch["laps"], 1)
        return pa.RecordBatch.from_arrays([batch["customer"], laps], schema=LAP)


def with_laps(batch: pa.RecordBatch) -> pa.RecordBatch:
    laps = pc.bit_wise_and(batch["order"], LAPS - 1)
    return pa.RecordBatch.from_arrays([batch["customer"], laps], schema=LAP)


class Both(df.Operator):
    """Passes on both of its inputs."""

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch:
        return batch


LATER = pa.schema([("order", pa.int64()), ("customer", pa.int64())])


class Later(df.Operator):
    """Holds each order in a timer of processing time; at the end, no order waits any longer."""

    def states(self, *inputs: pa.Schema) -> Sequence[df.Descriptor]:
        return [df.Timers("held", {"order": pa.int64()}, {"customer": pa.int64()}, clock="processing_time")]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return LATER

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        due = pa.repeat(self.context.processing_time_us + LATER_US, len(batch))
        self.context.timers("held").set(batch.select(LATER.names).append_column("_timestamp", due))

    def on_timer(self, timers: pa.RecordBatch, name: str) -> pa.RecordBatch:
        return timers.select(LATER.names)

    def end_input(self, input: int) -> pa.RecordBatch | None:
        left = self.context.timers("held").due(END_US)
        return None if left is None else left.select(LATER.names)


BOUGHT = pa.schema([("customer", pa.int64()), ("until_us", pa.int64()), ("orders", pa.int64())])
COUNT = {"orders": pa.int64()}
WINDOWS = (
    # It expires only if the job stands still for a day. The timer fails if it finds no count.
    df.MapState("windows", (), pa.int64(), COUNT, ttl=sf.Ttl(DAY_US, "processing_time")),
    # The same counts again. Nothing is ever deleted from it, so it grows unless rows expire.
    df.MapState("recent", (), pa.int64(), COUNT, ttl=sf.Ttl(REMEMBERED_US)),
)


def count_by_window(key: int, rows: np.ndarray, state: Any, timers: Any) -> None:
    """Count the orders of one customer by the end of their window, with a timer at each end."""
    for at_us in rows["at"].astype(np.int64).tolist():
        until_us = (at_us // WINDOW_US + 1) * WINDOW_US
        if until_us not in state.windows:
            timers.set(until_us)
        state.recent[until_us] = state.windows[until_us] = state.windows.get(until_us, 0) + 1


def window_has_ended(key: int, timestamp: int, state: Any, timers: Any) -> tuple[int, int, int]:
    """Return the count, or -1 if ``recent`` has a different count or remembers for too long.

    Nothing expires at the end of time.
    """
    count = state.windows.pop(timestamp)
    is_known = state.recent.get(timestamp, count) == count
    is_old = timers.watermark < END_US and min(state.recent, default=timestamp) <= timestamp - LONG_GONE_US
    return key, timestamp, count if is_known and not is_old else -1


def soaked(folder: Path) -> df.Dataflow:
    """Return the job: each order once, with its customer's segment; totals, windows, a loop."""
    flow = df.Dataflow("soak", parallelism=PARALLELISM)
    customers = flow.source(ParquetSource(folder / CUSTOMERS_FILE), uid="customers", parallelism=1)
    orders = flow.source(
        ParquetSource(folder / "orders", schema=ORDERS, grows=True, until=END),
        uid="orders",
        event_time=df.EventTime("at", out_of_order_us=OUT_OF_ORDER_US),
    )
    # Its one row holds back time for everything downstream, until the source is idle.
    quiet = flow.source(
        ParquetSource(folder / "quiet", schema=ORDERS, grows=True, until=END),
        uid="quiet",
        event_time="at",
        idle_after=IDLE_US,
    )
    both = orders.apply(Both(), quiet, uid="both")
    paid = both.filter(pc.field("amount") > 0, uid="paid").select("order", "customer", "amount", "at", uid="columns")
    once = paid.key_by("order").deduplicate(within=FORGOTTEN_US, time="at", uid="once")
    named = once.apply(BroadcastJoin("customer", columns=["segment"]), customers.broadcast(), uid="segments")

    totals = {"amount": ("amount", "sum"), "orders": ("*", "count")}
    named.key_by("segment").aggregate(totals, emit="end", uid="totals").apply(sink(folder, "totals"), uid="totals-out")
    running = named.key_by("customer").aggregate(totals, uid="running")
    running.apply(sink(folder, "running"), uid="running-out")
    windows = named.key_by("segment").window(WINDOW_US, "at", totals, uid="windows")
    windows.apply(sink(folder, "windows"), uid="windows-out")

    bought = named.key_by("customer").apply_per_key(
        count_by_window,
        state=WINDOWS,
        timers="event_time",
        on_timer=window_has_ended,
        output=BOUGHT,
        uid="bought",
    )
    bought.apply(sink(folder, "bought"), uid="bought-out")

    named.key_by("order").apply(Later(), uid="later").apply(sink(folder, "later"), uid="later-out")

    loop = flow.loop(LAP)
    begun = named.map(with_laps, LAP, uid="with-laps")
    head = flow.apply(Lap(), begun.key_by("customer"), loop.key_by("customer"), uid="lap")
    loop.close(head.filter(pc.field("laps") > 0, uid="again"))
    laps = head.key_by("customer").aggregate({"laps": ("*", "count")}, emit="end", uid="laps")
    laps.apply(sink(folder, "laps"), uid="laps-out")
    return flow


def sink(folder: Path, name: str) -> FileSink:
    return FileSink(folder / "out" / name, durable=False)


def main(executor: str, folder: Path) -> int:
    store = sf.open(str(folder / "store"), durable=False)
    options: dict[str, Any] = {"checkpoint_interval_us": CHECKPOINT_US}
    if executor == "local":
        runtime: Any = LocalRuntime(store, **options)
    else:
        from stateformat.backends.spark import SparkRuntime, local_session

        # The JVM takes its heap at once. Otherwise its memory grows with the number of epochs.
        heap = {"spark.driver.memory": "1g", "spark.driver.extraJavaOptions": "-Xms1g -XX:+AlwaysPreTouch"}
        runtime = SparkRuntime(local_session("soak", **heap), store, **options)
    try:
        with stop_soon_on_sigterm(runtime):
            print(runtime.run(soaked(folder)).sentence, file=sys.stderr)
    except GraceExceeded as error:  # On a busy machine: as the programs of ckpt end then.
        print(error, file=sys.stderr)
        return 128 + signal.SIGTERM
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
