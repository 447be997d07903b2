"""The other side of the Spark benchmarks: the same queries in Structured Streaming.

State lies in RocksDB with changelog checkpointing, as Spark's documentation advises for large
state, without counting rows. Nothing is synced, and output goes to the ``noop`` sink. A query runs
with the trigger ``availableNow``, a batch has the files of one epoch, and its time is
``triggerExecution`` of its own progress: planning, the job, state commits, both logs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.spark_input import FILES, WINDOW_US, Epoch, fold
from stateformat.backends.spark.sessions import local_session

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]
    from pyspark.sql import DataFrame, SparkSession

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
CONF = {
    "spark.driver.memory": "5g",
    "spark.sql.shuffle.partitions": str(FILES),
    "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    "spark.sql.streaming.numRecentProgressUpdates": "1000",
}
OUTPUT = "k long, total long, n long"
STATE = "total long, n long"
ROWS = "k long, v long"
TIMED = f"{ROWS}, at timestamp"

Query = Callable[["DataFrame"], "DataFrame"]


def session() -> SparkSession:
    return local_session("bench structured streaming", **CONF)


def start() -> None:
    session()


def native(rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions

    return rows.groupBy("k").agg(functions.sum("v").alias("total"), functions.count("*").alias("n"))


def apply_in_pandas(rows: DataFrame) -> DataFrame:
    """The same with :func:`fold`, called for each key by ``applyInPandasWithState``."""
    return rows.groupBy("k").applyInPandasWithState(_with_state, OUTPUT, STATE, "update", "NoTimeout")


def _with_state(key: tuple[int], frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    import pandas as pd

    total, count = state.get if state.exists else (0, 0)
    for frame in frames:
        total, count = fold(total, count, frame["v"].tolist())
    state.update((total, count))
    yield pd.DataFrame({"k": [key[0]], "total": [total], "n": [count]})


def transform_rows(rows: DataFrame) -> DataFrame:
    """The same with ``transformWithState``, which gives Python rows; with frames it is slower."""
    return rows.groupBy("k").transformWithState(_processor(), OUTPUT, "Update", "None")


def _processor() -> Any:
    from pyspark.sql import Row
    from pyspark.sql.streaming import StatefulProcessor

    class Totals(StatefulProcessor):  # type: ignore[misc]
        def init(self, handle: Any) -> None:
            self._totals = handle.getValueState("totals", STATE)

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: ARG002, N802, N803
            total, count = self._totals.get() or (0, 0)
            total, count = fold(total, count, [row["v"] for row in rows])
            self._totals.update((total, count))
            yield Row(k=key[0], total=total, n=count)

        def close(self) -> None:
            pass

    return Totals()


def windows(rows: DataFrame) -> DataFrame:
    """Totals of tumbling windows, each given when the watermark has reached its end."""
    from pyspark.sql import functions

    size = functions.window("at", f"{WINDOW_US} microseconds")
    timed = rows.withWatermark("at", f"{WINDOW_US // 2} microseconds").groupBy(size, "k")
    return timed.agg(functions.sum("v").alias("total"), functions.count("*").alias("n"))


def duplicates(rows: DataFrame) -> DataFrame:
    return rows.dropDuplicates(["k"])


def joined(table: str) -> Query:
    """Rows with the columns of a table, read from Parquet in each batch."""
    return partial(_joined, table)


def _joined(table: str, rows: DataFrame) -> DataFrame:
    return rows.join(session().read.parquet(table), "k")


def run(query: Query, folder: str, checkpoint: str, columns: str = ROWS, mode: str = "update") -> list[Epoch]:
    """Run a query on every epoch that it has not seen yet, one batch each; what they took."""
    spark = session()
    rows = spark.readStream.schema(columns).option("maxFilesPerTrigger", FILES).parquet(folder)
    writer = query(rows).writeStream.format("noop").outputMode(mode).option("checkpointLocation", checkpoint)
    running = writer.trigger(availableNow=True).start()
    running.awaitTermination()
    told = [progress for progress in running.recentProgress if progress["numInputRows"]]
    return [Epoch(one["numInputRows"], one["durationMs"]["triggerExecution"] / 1000) for one in told]


def restart(query: Query, folder: str, checkpoint: str) -> float:
    """Seconds from the start of a query, in a warm session, to the end of its first batch."""
    begin = time.perf_counter()
    epochs = run(query, folder, checkpoint)
    assert len(epochs) == 1
    return time.perf_counter() - begin


def repartition(checkpoint: str, partitions: int) -> float | None:
    """Seconds that Spark's offline repartition of a checkpoint takes; None before Spark 4.2."""
    manager = getattr(session(), "_streamingCheckpointManager", None)
    if manager is None:
        return None
    begin = time.perf_counter()
    manager.repartition(checkpoint, partitions)
    return time.perf_counter() - begin


def keys(checkpoint: str) -> int:
    return session().read.format("statestore").load(checkpoint).count()


def totals(checkpoint: str) -> tuple[int, int, int]:
    """Keys, sum of totals, and sum of counts that a checkpoint of :func:`native` holds."""
    frame = session().read.format("statestore").load(checkpoint)
    row = frame.selectExpr("count(*)", "sum(value.sum)", "sum(value.count)").first()
    return tuple(row)
