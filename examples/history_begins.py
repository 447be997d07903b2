"""A job begins with history: one query makes its state of the orders of 2025, and it reads only
those of 2026.

    python examples/history_begins.py [--engine local|spark] [--keep DIR]

Orders lie as Parquet files in a directory that grows.

1. One query sums the orders of 2025 by city: by DuckDB here, or by Spark.
2. ``bootstrap`` makes the first checkpoint of it: the sums are the state of the aggregate, and the
   files of 2025 those that the source has seen.
3. The orders of 2026 come. The job goes on from its checkpoint: it reads only those, and adds.
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
from stateformat.backends import bootstrap as local, spark
from stateformat.backends.connectors import FileSink, ParquetSource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import LocalRuntime

DAYS = {2025: range(1, 7), 2026: range(1, 4)}
CITIES = ["Oslo", "Rome", "Lima", "Kyiv", "Pune", "Nara", "Baku"]
SCHEMA = pa.schema({"city": pa.string(), "amount": pa.int64()})
END = "_END"
"""The file that says that no more orders come."""
HISTORY = "select city, count(*) as orders, cast(sum(amount) as bigint) as amount from {orders} group by city"

Totals = dict[str, tuple[int, int]]
"""By city: orders, and the sum of their amounts."""


def orders(year: int, day: int) -> pa.Table:
    """The orders of one day."""
    rows = [{"city": CITIES[(day + i * i) % len(CITIES)], "amount": year * day + i} for i in range(500)]
    return pa.Table.from_pylist(rows, SCHEMA)


def write(inbox: Path, year: int) -> None:
    """Write the files of a year under hidden names and rename them: they appear whole."""
    inbox.mkdir(exist_ok=True)
    for day in DAYS[year]:
        hidden = inbox / f".orders-{year}-{day}"
        pq.write_table(orders(year, day), hidden)
        hidden.rename(inbox / f"orders-{year}-{day}.parquet")


def dataflow(inbox: Path, out: Path) -> Dataflow:
    """Sum all orders by city, and write the totals when no more orders come."""
    flow = Dataflow("orders", parallelism=4)
    rows = flow.source(ParquetSource(inbox, schema=SCHEMA, grows=True, until=END), uid="orders")
    totals = rows.key_by("city").aggregate(
        {"orders": ("*", "count"), "amount": ("amount", "sum")}, emit="end", uid="totals"
    )
    totals.apply(FileSink(out), uid="out")
    return flow


def begin(inbox: Path, store: Path, flow: Dataflow, engine: str) -> str:
    """Make the first checkpoint of the orders of 2025. Returns what was written, as a sentence."""
    seen = f"{inbox}/orders-2025-*.parquet"
    if engine == "spark":
        history = spark.local_session("history").sql(HISTORY.format(orders=f"parquet.`{seen}`"))
        done = spark.bootstrap(store, flow, {"totals/totals": history}, positions={"orders": seen})
    else:
        import duckdb

        rows = duckdb.sql(HISTORY.format(orders=f"'{seen}'"))
        done = local.bootstrap(store, flow, {"totals/totals": rows}, positions={"orders": seen})
    return f"the job begins with {done.rows['totals/totals']} cities, {done.positions['orders']}"


def committed(out: Path) -> Totals:
    """The totals that the sink has committed."""
    rows: list[dict[str, Any]] = pq.read_table(out).to_pylist()
    return {row["city"]: (row["orders"], row["amount"]) for row in rows}


def wanted() -> Totals:
    """The totals of all orders, by plain Python."""
    found: Totals = {}
    for year, days in DAYS.items():
        for day in days:
            for row in orders(year, day).to_pylist():
                count, amount = found.get(row["city"], (0, 0))
                found[row["city"]] = (count + 1, amount + row["amount"])
    return found


def go_on(folder: Path, engine: str = "local") -> bool:
    """All four steps; whether the totals are right."""
    inbox, store, out = (folder / name for name in ("orders", "store", "totals"))
    write(inbox, 2025)
    flow = dataflow(inbox, out)
    print(begin(inbox, store, flow, engine))
    write(inbox, 2026)
    (inbox / END).touch()
    opened = stateformat.open(store)
    runtime = spark.SparkRuntime(spark.local_session("history"), opened) if engine == "spark" else LocalRuntime(opened)
    print(runtime.run(flow).sentence)
    right = committed(out) == wanted()
    print(f"the totals of {len(wanted())} cities are {'those of all orders' if right else 'WRONG'}")
    return right


def main() -> int:
    """Run it in a directory that is removed, or kept."""
    parser = argparse.ArgumentParser(description="A job begins with history.")
    parser.add_argument("--engine", choices=("local", "spark"), default="local")
    parser.add_argument("--keep", type=Path, help="an empty directory for everything, which stays")
    given = parser.parse_args()
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
        return 0 if go_on(given.keep, given.engine) else 1
    with tempfile.TemporaryDirectory() as folder:
        return 0 if go_on(Path(folder), given.engine) else 1


if __name__ == "__main__":
    sys.exit(main())
