"""The flights of 2013 as a dataflow: the job that two examples run, its data, and what must come
out.

The job joins the airline's and the maker's name to each flight, sums up delays by plane, and counts
flights by airport and day in windows of event time. Planes and airlines are bounded and end soon;
flights may go on for ever.
"""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
from support import all_flights, package_data

from stateformat.backends.connectors import CsvSource, FileSink
from stateformat.backends.dataflow import BroadcastJoin, Dataflow, EventTime, Source

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


# The job ------------------------------------------------------------------------------------------


def flights_job(
    job_id: str,
    data: Path,
    flights: Source,
    out: Path,
    *,
    parallelism: int,
    out_of_order_us: int,
    sink: type[FileSink] = FileSink,
) -> Dataflow:
    """The dataflow. ``flights``: of the columns of ``FLIGHTS``; what is later than
    ``out_of_order_us`` would be lost to a window.
    """
    flow = Dataflow(job_id, parallelism=parallelism, name="Flights from New York, 2013")
    planes = flow.source(
        CsvSource(data / "planes.csv", columns=["tailnum", "manufacturer"]), uid="planes", parallelism=1
    )
    airlines = flow.source(CsvSource(data / "airlines.csv"), uid="airlines", parallelism=1)
    seen = flow.source(flights, uid="flights", event_time=EventTime("departed_at", out_of_order_us))
    named = seen.apply(BroadcastJoin("carrier", how="left"), airlines.broadcast(), uid="airline names")
    made = named.apply(BroadcastJoin("tailnum", how="left"), planes.broadcast(), uid="makers")

    delays = made.key_by("tailnum").aggregate(
        {"maker": ("manufacturer", "min"), "flights": ("*", "count"), "delay": ("dep_delay", "sum")},
        emit="end",
        uid="delays",
    )
    delays.apply(sink(out / "delays"), uid="delay files")

    days = made.key_by("origin", "name").window(DAY_US, "departed_at", {"flights": ("*", "count")}, uid="days")
    columns = days.select("origin", "name", "window_start", "flights", uid="columns")
    columns.apply(sink(out / "days"), uid="day files")
    return flow


# The data -----------------------------------------------------------------------------------------


def write_tables(data: Path) -> None:
    """Planes and airlines as they are, and an empty folder for the flights."""
    (data / "flights").mkdir(parents=True)
    for name in ("planes.csv", "airlines.csv"):
        (data / name).write_bytes((package_data() / name).read_bytes())


def flights_of_2013() -> pa.Table:
    """The flights, with the columns that the job reads and ``month``."""
    table = all_flights()
    return table.append_column("departed_at", table["time_hour"].cast(pa.timestamp("us"))).select(
        [*FLIGHTS.names, "month"]
    )


# What it comes to ---------------------------------------------------------------------------------

EXPECTED = {
    "delays": """
        select tailnum, min(manufacturer) as maker, count(*) as flights, sum(dep_delay) as delay
        from flights left join planes using (tailnum) group by tailnum""",
    "days": """
        select origin, name, date_trunc('day', departed_at) as window_start, count(*) as flights
        from flights left join airlines using (carrier) group by all""",
}


def differing_rows(data: Path, out: Path) -> int:
    """Compare what was committed with SQL over the CSV files, as multisets; prints and counts what
    differs.
    """
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
