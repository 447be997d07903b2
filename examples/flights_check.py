"""Is the state in the checkpoints what the CSV files say? A check that shares nothing with the code
that wrote it.

What must be there is asked of Spark SQL, over the CSV files, without Arrow, key groups or
checkpoints. What is there is read the way a restarted job reads it: a restore is planned at some
parallelism, and each subtask reads what it is given. The two are compared row by row, together with
the key group of each row and the subtask that got it.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import SparkSession

import stateformat as sf

STATES = {
    "stats": ["tailnum", "flights", "arrival_delay_min", "departure_delay_min"],
    "by_destination": ["tailnum", "_map_key", "flights", "arrival_delay_min"],
}
"""The keyed states of ``delays``, with their columns."""


class Result(NamedTuple):
    """One checkpoint, restored at one parallelism: rows per state, and how many differ from the CSV
    files.
    """

    checkpoint_id: int
    kind: str
    max_parallelism: int
    parallelism: int
    rows: dict[str, int]
    different: int


def expected(spark: SparkSession, state: str, parallelism: int, max_parallelism: int) -> pa.Table:
    """What a state must be, by the CSV files: its columns, and before them ``subtask`` and
    ``_key_group``.
    """
    per_map_key = "dest AS _map_key, " if state == "by_destination" else ""
    departures = "" if state == "by_destination" else ", sum(nvl(dep_delay, 0)) AS departure_delay_min"
    return spark.sql(
        f"""
        WITH flights AS (SELECT *, pmod(hash(tailnum), {max_parallelism}) AS _key_group FROM flights_csv)
        SELECT CAST(floor(_key_group * {parallelism} / {max_parallelism}) AS INT) AS subtask, _key_group, tailnum,
               {per_map_key} count(*) AS flights, sum(nvl(arr_delay, 0)) AS arrival_delay_min {departures}
        FROM flights GROUP BY ALL
        """
    ).toArrow()


def restored(checkpoint: sf.Checkpoint, state: str, parallelism: int) -> pa.Table:
    """What the subtasks of ``delays`` get when the checkpoint is restored: the same columns."""
    plan = checkpoint.plan_restore(checkpoint.graph.at(parallelism))
    plan.check()
    parts = []
    for subtask in range(parallelism):
        rows = checkpoint.restore(plan, "delays", subtask)[state].table()
        parts.append(rows.add_column(0, "subtask", pa.array([subtask] * len(rows), pa.int32())))
    return pa.concat_tables(parts)


def differing_rows(one: pa.Table, other: pa.Table, columns: list[str]) -> int:
    """How many rows stand in one of two tables and not in the other, counting repetitions."""
    rows = [Counter(zip(*(table[name].to_pylist() for name in columns), strict=True)) for table in (one, other)]
    return (rows[0] - rows[1]).total() + (rows[1] - rows[0]).total()


def check(spark: SparkSession, store: sf.CheckpointStore, parallelisms: tuple[int, ...]) -> list[Result]:
    """Compare every checkpoint of the store, restored at each of these parallelisms."""
    results = []
    for record in reversed(store.history()):
        checkpoint = store.open(record.checkpoint_id)
        ceiling = checkpoint.graph.operator("delays").max_parallelism or 0
        for parallelism in parallelisms:
            rows, different = {}, 0
            for state, columns in STATES.items():
                found = restored(checkpoint, state, parallelism)
                wanted = expected(spark, state, parallelism, ceiling)
                rows[state] = len(found)
                different += differing_rows(found, wanted, ["subtask", "_key_group", *columns])
            results.append(Result(record.checkpoint_id, record.kind, ceiling, parallelism, rows, different))
    return results
