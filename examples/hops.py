"""Hops from JFK: a dataflow with a loop, killed while records go round in it, resumed at another
parallelism.

    python examples/hops.py [--executor local|spark] [--kills N] [--store DIR]

How many flights does it take from JFK to each airport, day by day, over the routes that were flown
from New York on that day of 2013, there or back? Records (day, airport, hops) go round in the loop:
where one is better than what the keyed state ``hops`` knows of its airport, records for the
neighbours, one hop further, are fed back. The sources end while the loop turns; checkpoints go on,
and what is on its way round belongs to them. This program starts the job as a process of its own,
waits for a checkpoint that has records of the loop in it and no source that still runs, kills the
process with SIGKILL, starts it again at another parallelism, and in the end compares what was
committed with a breadth-first search in plain Python over the CSV file. The exit status is 0 only
if they are equal, and every kill has met records in the loop.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import date, timedelta
from itertools import permutations
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from support import EXECUTORS, all_flights, ckpt, heading, in_flight_rows, newest, run, wait_until

import stateformat
from stateformat.backends.connectors import CsvSource, FileSink, MemorySource
from stateformat.backends.dataflow import Aggregate, Dataflow, Descriptor, MapState, Operator, ValueState

FROM = "JFK"
PLACE = {"day": pa.date32(), "airport": pa.string()}
"""What state is keyed by."""
RECORD = pa.schema([*PLACE.items(), ("hops", pa.int64())])
ROUTE = pa.schema([*PLACE.items(), ("neighbour", pa.string())])
PARALLELISMS = (4, 6, 3, 5, 2)
SOURCES = ("start", "routes")
TIMEOUT_S = 600


# The job ------------------------------------------------------------------------------------------


class Hops(Operator):
    """The head of the loop: of each place, an airport on a day, the fewest hops, and its routes.

    Inputs: records to start with, routes, and the records that are fed back. Emits records for the
    neighbours of places that came nearer. Routes may come before or after the first record of their
    place.
    """

    def states(self, *inputs: pa.Schema) -> list[Descriptor]:
        """Keyed by place both: ``hops``, and ``routes``, a map with the neighbours as keys."""
        return [ValueState("hops", PLACE, {"hops": pa.int64()}), MapState("routes", PLACE, pa.string(), {})]

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch | None:
        """Learn routes, or records."""
        hops, routes = self.context.value_state("hops"), self.context.map_state("routes")
        if input == 1:
            routes.put(batch.rename_columns([*PLACE, "_map_key"]))
            known, found = hops.get(batch.select([*PLACE]))
            return further(batch["day"], batch["neighbour"], known["hops"]).filter(pa.array(found))
        nearest = pa.table(batch).group_by([*PLACE]).aggregate([("hops", "min")]).rename_columns(RECORD.names)
        nearest = nearest.combine_chunks().to_batches()[0]
        before, found = hops.get(nearest.select([*PLACE]))
        nearer = nearest.filter(pc.or_kleene(pc.less(nearest["hops"], before["hops"]), pa.array(~found)))
        hops.put(nearer.select([*PLACE]), nearer.select(["hops"]))
        flown, row = routes.lookup(nearer.select([*PLACE]))
        return further(flown["day"], flown["_map_key"], nearer["hops"].take(pa.array(row)))


def further(days: pa.Array, airports: pa.Array, hops: pa.Array) -> pa.RecordBatch:
    """Records of airports that are one hop further."""
    return pa.RecordBatch.from_arrays([days, airports, pc.add(hops, 1)], schema=RECORD)


def hops_job(routes: Path, out: Path, parallelism: int, *, batch_rows: int = 50_000) -> Dataflow:
    """The dataflow. ``routes``: a CSV file with the columns of ``ROUTE``.

    Large batches end the sources early: most records go round after that, for a kill to meet.
    """
    flow = Dataflow("hops", parallelism=parallelism, name=f"Hops from {FROM}")
    days = pa.csv.read_csv(routes).group_by("day").aggregate([])["day"].cast(pa.date32())
    first = pa.table([days, pa.array([FROM] * len(days)), pa.array([0] * len(days), pa.int64())], schema=RECORD)
    start = flow.source(MemorySource(first), uid="start", parallelism=1)
    flown = flow.source(CsvSource(routes, schema=ROUTE, batch_rows=batch_rows), uid="routes", parallelism=1)
    loop = flow.loop(RECORD)
    found = flow.apply(Hops(), start.key_by(*PLACE), flown.key_by(*PLACE), loop.key_by(*PLACE), uid="hops")
    loop.close(found)
    fewest = Aggregate([*PLACE], {"hops": ("hops", "min")}, emit="end")
    nearest = flow.apply(fewest, found.key_by(*PLACE), start.key_by(*PLACE), uid="nearest")
    nearest.apply(FileSink(out), uid="files")
    return flow


def write_routes(path: Path, days: int = 365) -> None:
    """Every pair of airports between which a flight was on a day, in both directions, for the first
    ``days`` of the year.
    """
    flights = all_flights()
    day = pc.cast(flights["time_hour"].cast(pa.timestamp("us")), pa.date32())
    flights = flights.append_column("on", day).filter(pc.less(day, pa.scalar(date(2013, 1, 1) + timedelta(days))))
    flown = flights.group_by(["on", "origin", "dest"]).aggregate([])
    there_and_back = (
        flown.select(["on", *ends]).rename_columns(ROUTE.names) for ends in permutations(["origin", "dest"])
    )
    pa.csv.write_csv(pa.concat_tables(there_and_back), path)


# What it comes to ---------------------------------------------------------------------------------


def breadth_first(routes: Path) -> Counter[tuple[str, str, int]]:
    """The same by the book: level after level, day after day, over the lines of the file."""
    neighbours: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    with routes.open(newline="") as file:
        for line in csv.DictReader(file):
            neighbours[line["day"]][line["airport"]].add(line["neighbour"])
    found: Counter[tuple[str, str, int]] = Counter()
    for day, of_day in neighbours.items():
        seen, level, hops = {FROM}, {FROM}, 0
        while level:
            found.update((day, airport, hops) for airport in level)
            level, hops = set().union(*(of_day[airport] for airport in level)) - seen, hops + 1
            seen |= level
    return found


def committed(out: Path) -> Counter[tuple[str, str, int]]:
    """What the job has committed."""
    return Counter((str(row["day"]), row["airport"], row["hops"]) for row in pq.read_table(out).to_pylist())


def report(folder: Path) -> int:
    """Print what was committed and compare it; returns how many rows differ."""
    found, wanted = committed(folder / "out"), breadth_first(folder / "routes.csv")
    for hops, places in sorted(Counter(hops for _, _, hops in found.elements()).items()):
        print(f"  {hops} hops from {FROM}: {places:>6,} airports, day by day")
    different = ((found - wanted) + (wanted - found)).total()
    print(f"{found.total():,} rows committed, {different} differ from a breadth-first search over the same file")
    return different


# Killing and resuming -----------------------------------------------------------------------------


def goes_round(checkpoint: stateformat.Checkpoint) -> bool:
    """Whether the sources have ended, and records are in the loop."""
    ended = all(checkpoint.graph.operator(uid).status is stateformat.Status.FULLY_FINISHED for uid in SOURCES)
    return ended and in_flight_rows(checkpoint) > 0


def run_and_kill(folder: Path, executor: str, kills: int) -> bool:
    """Run the job in processes of its own, of which the first ``kills`` are killed; False where one
    met no records.
    """
    store, seen = folder / "store", 0
    for attempt in range(kills + 1):
        parallelism = PARALLELISMS[attempt % len(PARALLELISMS)]
        heading(f"The job at parallelism {parallelism}")
        command = [sys.executable, __file__, "--executor", executor, "--job", str(folder), str(parallelism)]
        process = subprocess.Popen(command)
        if attempt == kills:
            if status := process.wait():
                raise SystemExit(f"the job ended with exit status {status}")
            return True

        def later(checkpoint: stateformat.Checkpoint, seen: int = seen) -> bool:
            return checkpoint.id > seen and goes_round(checkpoint)

        wait_until(later, store, process, TIMEOUT_S)
        process.kill()
        process.wait()
        checkpoint = newest(store)
        if checkpoint is None or not later(checkpoint):
            print("No checkpoint was found with records in the loop and sources that had ended", file=sys.stderr)
            return False
        seen = checkpoint.id
        print(f"\nKilled with SIGKILL. Its sources have ended; {in_flight_rows(checkpoint):,} records go round:")
        ckpt("inspect", str(store))
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; returns its exit status."""
    parser = argparse.ArgumentParser(description="A loop that is killed and resumed with records in it.")
    parser.add_argument("--executor", choices=EXECUTORS, default="local", help="what runs the dataflow (default local)")
    parser.add_argument("--kills", type=int, default=1, help="how often the job is killed (default 1)")
    parser.add_argument("--store", type=Path, help="where to put everything: a directory that is not there yet")
    parser.add_argument("--job", nargs=2, metavar=("DIR", "PARALLELISM"), help="run the job, once, to its end")
    chosen = parser.parse_args(arguments)
    if chosen.job:
        folder, parallelism = Path(chosen.job[0]), int(chosen.job[1])
        flow = hops_job(folder / "routes.csv", folder / "out", parallelism)
        # In one process checkpoints are taken while records are read; on Spark all is read at once,
        # and each turn is an epoch.
        interval_us = 50_000 if chosen.executor == "local" else 2_000_000
        run(flow, folder / "store", chosen.executor, checkpoint_interval_us=interval_us)
        return 0
    if chosen.store and chosen.store.exists():
        print(f"{chosen.store} is there already; name a directory that is not, or none", file=sys.stderr)
        return 2
    folder = chosen.store or Path(tempfile.mkdtemp(prefix="hops-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Routes, store and output are in {folder}")
    write_routes(folder / "routes.csv")
    if not run_and_kill(folder, chosen.executor, chosen.kills):
        return 1
    ckpt("history", str(folder / "store"))
    print()
    return 1 if report(folder) else 0


if __name__ == "__main__":
    sys.exit(main())
