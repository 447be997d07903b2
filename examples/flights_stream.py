"""The flights job as a stream on Spark: killed between a publish and its commit, resumed, rescaled,
drained, and right.

    python examples/flights_stream.py [--executor spark|local] [--store DIR]

Flights come as CSV files, one for each week of 2013, into a directory that grows while the job
runs. Planes and airlines are bounded: they end, and checkpoints go on without them. What happens,
each stage shown with ``ckpt inspect``:

1. The job starts at parallelism 4, in a process of its own. A sink kills that process with SIGKILL
   where it should commit: the checkpoint is published, and what it promises is visible to nobody.
2. It is started again, at parallelism 6. It first commits what that checkpoint has prepared, then
   goes on with the flights.
3. When the state of the newest checkpoint says that every flight has been counted, ``ckpt stop
   --drain`` ends the job for good: windows that are still open are closed, totals are written,
   everything is committed.
4. What was committed is compared with SQL over the CSV files. The exit status is 0 only if not one
   row differs.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from flights_flow import DAY_US, FLIGHTS, differing_rows, flights_job, flights_of_2013, write_tables
from support import EXECUTORS, ckpt, heading, newest, run, wait_until

import stateformat
from stateformat.backends.connectors import CsvSource, FileSink
from stateformat.backends.dataflow import Source
from stateformat.publication import CommitPermit

BOUNDED = ("planes", "airlines")
COMMITS = 2
"""So many checkpoints of flights alone are committed with files of theirs; the next one is not."""
CHECKPOINT_US = 1_000_000
WEEKS_PER_S = 2.0
TIMEOUT_S = 600


# The job ------------------------------------------------------------------------------------------


class FatalSink(FileSink):
    """A sink that ends the process where it should commit: a power failure at the worst moment."""

    commits = 0

    def commit(self, permit: CommitPermit, committables: pa.Table) -> None:
        """Commit, a few times; then die, when the checkpoint is published and has files to be
        committed.
        """
        if committables.num_rows and bounded_have_ended(permit.record):
            if self.commits == COMMITS:
                os.kill(os.getpid(), signal.SIGKILL)
            self.commits += 1
        super().commit(permit, committables)


def bounded_have_ended(record: stateformat.Record) -> bool:
    """Whether planes and airlines are fully finished."""
    return all(record.graph.operator(uid).status is stateformat.Status.FULLY_FINISHED for uid in BOUNDED)


def growing_flights(data: Path, executor: str) -> Source:
    """The files of flights that are there, and those that will be."""
    if executor == "local":
        return CsvSource(data / "flights", schema=FLIGHTS, batch_rows=2_000, grows=True)
    from stateformat.backends.spark import DirectoryFrames, SparkSource

    text = ", ".join(f"{name} string" for name in FLIGHTS.names)
    return SparkSource(
        DirectoryFrames(
            str(data / "flights"), "csv", schema=text, options={"header": "true"}, grows=True, files_per_epoch=8
        ),
        # Any Spark SQL that works row by row; the JVM does it, and operators see Arrow.
        transform=lambda rows: rows.selectExpr(
            "CAST(departed_at AS TIMESTAMP_NTZ) AS departed_at",
            "carrier",
            "tailnum",
            "origin",
            "CAST(dep_delay AS DOUBLE) AS dep_delay",
        ),
        schema=FLIGHTS,
    )


def run_job(folder: Path, executor: str, parallelism: int, *, fatal: bool) -> None:
    """Run the job in this process until somebody stops it."""
    data = folder / "data"
    flow = flights_job(
        "flights-stream",
        data,
        growing_flights(data, executor),
        folder / "out",
        parallelism=parallelism,
        out_of_order_us=DAY_US,
        sink=FatalSink if fatal else FileSink,
    )
    run(flow, folder / "store", executor, checkpoint_interval_us=CHECKPOINT_US)


# The flights --------------------------------------------------------------------------------------


class Feeder(threading.Thread):
    """Puts a week of flights into the directory now and then, once the job is up; ``rows`` in
    all.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder, self._store = folder / "data" / "flights", folder / "store"
        self._flights = flights_of_2013().select(FLIGHTS.names).sort_by("departed_at")
        self.rows = len(self._flights)

    def run(self) -> None:
        """Write all weeks. A file is complete when it appears, so it gets its name last."""
        while newest(self._store) is None:
            time.sleep(1 / WEEKS_PER_S)
        weeks = pc.floor_temporal(self._flights["departed_at"], unit="week")
        for week in weeks.unique().to_pylist():
            time.sleep(1 / WEEKS_PER_S)
            hidden = self._folder / ".being-written"
            pyarrow.csv.write_csv(self._flights.filter(pc.equal(weeks, week)), hidden)
            hidden.rename(self._folder / f"week-of-{week:%Y-%m-%d}.csv")


# The stages ---------------------------------------------------------------------------------------


def start(folder: Path, executor: str, parallelism: int, *, fatal: bool = False) -> subprocess.Popen[bytes]:
    """Start the job in a process of its own."""
    command = [sys.executable, __file__, "--executor", executor, "--job", str(folder), str(parallelism)]
    return subprocess.Popen([*command, "--fatal"] if fatal else command)


def counted(checkpoint: stateformat.Checkpoint) -> int:
    """How many flights the totals of all planes come to, in the state of a checkpoint."""
    return int(pc.sum(checkpoint.read("delays", "totals").table()["flights"]).as_py() or 0)


def files(folder: Path, checkpoint_id: int) -> str:
    """How many files of a checkpoint are prepared, and how many are committed."""
    prepared = len(list((folder / "out").glob(f"*/.pending/*/{checkpoint_id:020d}-*.prepared")))
    visible = len(list((folder / "out").glob(f"*/part-{checkpoint_id:020d}-*.parquet")))
    return f"Of checkpoint {checkpoint_id} {prepared} files are prepared and {visible} are committed"


def until_killed(folder: Path, executor: str) -> stateformat.Checkpoint | None:
    """Stage 1. Returns the checkpoint that was published and not committed."""
    heading("The job starts, at parallelism 4; planes and airlines will end, flights go on")
    began = time.monotonic()
    process = start(folder, executor, 4, fatal=True)
    try:
        status = process.wait(TIMEOUT_S)
    finally:
        process.kill()
    checkpoint = newest(folder / "store")
    if status != -signal.SIGKILL or checkpoint is None:
        print(f"The job was to be killed in a commit, and ended with exit status {status}", file=sys.stderr)
        return None
    records = stateformat.open(str(folder / "store")).history()
    first = min(record.checkpoint_id for record in records if bounded_have_ended(record))
    heading(f"Planes and airlines had ended by checkpoint {first}: they are finished, and are not run again")
    ckpt("inspect", f"{folder / 'store'}@{first}")
    heading(
        f"After {time.monotonic() - began:.0f} s it was killed with SIGKILL, between the publish "
        f"of checkpoint {checkpoint.id} and its commit"
    )
    ckpt("inspect", f"{folder / 'store'}")
    print(f"\n{files(folder, checkpoint.id)}: nobody sees them")
    return checkpoint


def until_drained(folder: Path, executor: str, killed: stateformat.Checkpoint, rows: int) -> bool:
    """Stages 2 and 3. Returns whether the job has ended as it should."""
    heading(f"The job is started again, at parallelism 6; it goes on from checkpoint {killed.id}")
    store = folder / "store"
    process = start(folder, executor, 6)
    try:
        if not wait_until(lambda checkpoint: checkpoint.id > killed.id, store, process, TIMEOUT_S):
            print("It has not published a checkpoint", file=sys.stderr)
            return False
        print(f"\n{files(folder, killed.id)}")
        ckpt("inspect", str(store))
        heading(f"It goes on until all {rows:,} flights are counted in a checkpoint; then it is told to end")
        if not wait_until(lambda checkpoint: counted(checkpoint) == rows, store, process, TIMEOUT_S):
            print("It has not counted all flights", file=sys.stderr)
            return False
        ckpt("stop", str(store), "--drain")
        return process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; returns its exit status."""
    parser = argparse.ArgumentParser(description="A stream of flights, killed, resumed, rescaled and drained.")
    parser.add_argument("--executor", choices=EXECUTORS, default="spark", help="what runs the dataflow (default spark)")
    parser.add_argument("--store", type=Path, help="where to put everything: a directory that is not there yet")
    parser.add_argument("--job", nargs=2, metavar=("DIR", "PARALLELISM"), help="run the job until it is stopped")
    parser.add_argument("--fatal", action="store_true", help="with --job: a commit ends the process")
    chosen = parser.parse_args(arguments)
    if chosen.job:
        run_job(Path(chosen.job[0]), chosen.executor, int(chosen.job[1]), fatal=chosen.fatal)
        return 0
    if chosen.store and chosen.store.exists():
        print(f"{chosen.store} is there already; name a directory that is not, or none", file=sys.stderr)
        return 2
    began = time.monotonic()
    folder = chosen.store or Path(tempfile.mkdtemp(prefix="flights-stream-"))
    print(f"Data, store and output are in {folder}")
    write_tables(folder / "data")
    feeder = Feeder(folder)
    feeder.start()
    killed = until_killed(folder, chosen.executor)
    if killed is None or not until_drained(folder, chosen.executor, killed, feeder.rows):
        return 1
    heading("Everything has finished")
    ckpt("inspect", str(folder / "store"))
    ckpt("history", str(folder / "store"))
    print()
    different = differing_rows(folder / "data", folder / "out")
    print(f"{feeder.rows:,} flights, {time.monotonic() - began:.0f} s")
    if different:
        print(f"{different:,} rows DIFFER", file=sys.stderr)
        return 1
    print("Not one row differs.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
