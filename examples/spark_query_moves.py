"""A Structured Streaming query moves here half way: its state and its place in the input are
imported, and SparkRuntime finishes what it has begun.

    python examples/spark_query_moves.py [--keep DIR]

Orders come as Parquet files into a directory that grows.

1. A Structured Streaming query sums them by city, from the first half of the files. It stops.
2. ``ckpt import`` makes a checkpoint of its checkpoint: the aggregation's state under the names
   that our operator declares, and the files that the query has read.
3. The other files come. A dataflow goes on: it reads only those, and adds to the totals.
4. The totals must be those of all orders. The exit status is 0 only if not one differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import stateformat
from stateformat.backends.connectors import FileSink, ParquetSource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.spark import SparkRuntime, local_session
from stateformat.tools.ckpt.main import main as ckpt

FILES = 8
CITIES = ["Oslo", "Rome", "Lima", "Kyiv", "Pune", "Nara", "Baku"]
SCHEMA = pa.schema({"city": pa.string(), "amount": pa.int64(), "weight": pa.float64()})
END = "_END"
"""The file that says that no more orders come."""

Totals = dict[str, tuple[int, int, float]]
"""By city: orders, the sum of their amounts, the greatest weight."""


def orders(number: int) -> pa.Table:
    """The orders of one file. Weights are sums of halves, so that no order of adding matters."""
    rows = [
        {"city": CITIES[(number + i * i) % len(CITIES)], "amount": number * 1000 + i, "weight": (i % 40) / 2 + number}
        for i in range(500)
    ]
    return pa.Table.from_pylist(rows, SCHEMA)


def write(inbox: Path, numbers: range) -> None:
    """Write files under hidden names and rename them: a file is whole when it appears."""
    inbox.mkdir(exist_ok=True)
    for number in numbers:
        hidden = inbox / f".orders-{number}"
        pq.write_table(orders(number), hidden)
        hidden.rename(inbox / f"orders-{number}.parquet")


def run_query(inbox: Path, checkpoint: Path) -> None:
    """The query of yore, on every file that is there, one a batch."""
    from pyspark.sql import functions

    rows = local_session("orders").readStream.schema("city string, amount long, weight double")
    totals = (
        rows.option("maxFilesPerTrigger", 1)
        .parquet(str(inbox))
        .groupBy("city")
        .agg(functions.count("*").alias("orders"), functions.sum("amount"), functions.max("weight"))
    )
    writer = totals.writeStream.format("noop").outputMode("update").option("checkpointLocation", str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()


def dataflow(inbox: Path, out: Path) -> Dataflow:
    """The same as a dataflow: it reads the directory to its end, and writes the totals then."""
    flow = Dataflow("orders", parallelism=4)
    rows = flow.source(ParquetSource(inbox, schema=SCHEMA, grows=True, until=END), uid="orders")
    aggregates = {"orders": ("*", "count"), "amount": ("amount", "sum"), "weight": ("weight", "max")}
    totals = rows.key_by("city").aggregate(aggregates, emit="end", uid="totals")
    totals.apply(FileSink(out), uid="out")
    return flow


def imported(checkpoint: Path, store: Path) -> int:
    """Import the query's checkpoint under the names of the dataflow; the exit status."""
    state = "operator-0/default"
    names = [
        *("operator-0=totals", f"{state}=totals"),
        # Spark names its buffers after the functions.
        *(f"{state}.{old}={new}" for old, new in (("count", "orders"), ("sum", "amount"), ("max", "weight"))),
    ]
    options = [part for name in names for part in ("--map", name)]
    return ckpt(
        ["import", str(checkpoint), "--to", str(store), "--job-id", "orders", "--source", "orders=files", *options]
    )


def wanted() -> Totals:
    """The totals of all files, by plain Python."""
    found: Totals = {}
    for number in range(FILES):
        for row in orders(number).to_pylist():
            count, amount, weight = found.get(row["city"], (0, 0, 0.0))
            found[row["city"]] = (count + 1, amount + row["amount"], max(weight, row["weight"]))
    return found


def committed(out: Path) -> Totals:
    """The totals that the sink has committed."""
    rows: list[dict[str, Any]] = pq.read_table(out).to_pylist()
    return {row["city"]: (row["orders"], row["amount"], row["weight"]) for row in rows}


def move(folder: Path) -> bool:
    """All four steps; whether the totals are right."""
    inbox, checkpoint, store, out = (folder / name for name in ("in", "query", "store", "out"))
    write(inbox, range(FILES // 2))
    run_query(inbox, checkpoint)
    status = imported(checkpoint, store)
    if status:
        return False
    write(inbox, range(FILES // 2, FILES))
    (inbox / END).touch()
    print(SparkRuntime(local_session("orders"), stateformat.open(store)).run(dataflow(inbox, out)).sentence)
    right = committed(out) == wanted()
    print(f"the totals of {len(wanted())} cities are {'those of all orders' if right else 'WRONG'}")
    return right


def main() -> int:
    """Run it in a directory that is removed, or kept."""
    parser = argparse.ArgumentParser(description="A Structured Streaming query goes on as a dataflow.")
    parser.add_argument("--keep", type=Path, help="an empty directory for everything, which stays")
    keep = parser.parse_args().keep
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        return 0 if move(keep) else 1
    with tempfile.TemporaryDirectory() as folder:
        return 0 if move(Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
