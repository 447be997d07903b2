"""Jobs that both executors run, each with what has to come out, worked out in plain Python.

First jobs of every operator, edge, loop and kind of state; then those whose output is what a
coordinator answers, of ``apply_per_key``, of states that expire, of timers, and of directories that
grow. They stand in a module because workers of Spark import them.

No result depends on how records are put together into batches, nor on which task is quicker: where
order matters there is one reader, and each channel keeps it.

The job whose states expire has one reader, which sends a watermark behind each of its batches. So
what time it is when a row is processed depends on the rows alone, whoever runs the job; but for a
restart, after which time may stand still for a batch. So it is also told of each row when it was
processed.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import stateformat as sf
from stateformat.backends import dataflow as df
from stateformat.backends.connectors import CollectSink, DirectoryEnumerator, MemorySource, ParquetSource
from stateformat.backends.dataflow import Dataflow, OperatorCoordinator, Output
from stateformat.backends.dataflow.events import MAX_WATERMARK
from stateformat.backends.dataflow.graph import ENUMERATOR_LOG
from stateformat.backends.dataflow.operators.row_steps import Filter, Map
from stateformat.backends.runtime import Run
from tests.worlds.local import KEY, ROWS, rows
from tests.worlds.stages import Calls, Case, Gated, Out, PlayedStage, Stage, Told, batches, plain, to_end, until

Rows = list[dict[str, Any]]

WINDOW_US = 100
EVENTS: Rows = [
    # Every seventh comes 150 later than it happened: some of these are late for their windows.
    {"key": n % 5, "value": (n * 37) % 101, "at": n * 10 - (150 if n % 7 == 3 else 0) + 1000}
    for n in range(120)
]
NAMES = {0: "zero", 1: "one", 2: "two", 3: "three", 7: "seven"}
BATCH_ROWS = 8


def every_operator(parallelism: int) -> Case:
    """Maps, filters, aggregates, late windows, first rows, joins: a tree with six sinks."""
    outs = {uid: CollectSink() for uid in ("totals", "updates", "windows", "firsts", "named", "left")}
    events = pa.Table.from_pylist(EVENTS, schema=ROWS)
    names = pa.table({"id": pa.array(NAMES, pa.int64()), "name": list(NAMES.values())})

    def flow() -> df.Dataflow:
        made = df.Dataflow("every operator", parallelism=parallelism)
        source = MemorySource(events, batch_rows=BATCH_ROWS, splits=3)
        read = made.source(source, uid="events", parallelism=1, event_time="at")
        by_key = read.map(doubled, uid="doubled", parallelism=1).key_by("key")
        by_key.aggregate(AGGREGATES, emit="end", uid="sum").apply(outs["totals"], uid="totals")
        by_key.aggregate(AGGREGATES, uid="sums").apply(outs["updates"], uid="updates", chain=False)
        counts = {"n": ("*", "count"), "total": ("value", "sum")}
        windows = by_key.window(WINDOW_US, "at", counts, uid="window")
        windows.apply(outs["windows"], uid="windows", parallelism=1)
        read.key_by("value").deduplicate(uid="first").select("value", "at", uid="two").apply(
            outs["firsts"], uid="firsts"
        )
        table = made.source(MemorySource(names, splits=3), uid="names", parallelism=2).broadcast()
        odd = read.filter(lambda batch: pc.equal(pc.bit_wise_and(batch["value"], 1), 1), uid="odd", parallelism=1)
        odd.rebalance().apply(df.BroadcastJoin({"key": "id"}), table, uid="join").apply(outs["named"], uid="named")
        left = df.BroadcastJoin({"key": "id"}, how="left")
        odd.rescale().apply(left, table, uid="left join", parallelism=parallelism + 1).rebalance().apply(
            outs["left"], uid="left"
        )
        return made

    def committed() -> dict[str, Counter[tuple[Any, ...]]]:
        found = {uid: plain(out.table()) for uid, out in outs.items() if uid != "updates"}
        # Of a key, the last update has seen everything: how often there were others is nobody's
        # business.
        last = {row[0]: row for row in sorted(plain(outs["updates"].table()), key=lambda row: row[1])}
        return found | {"updates": Counter(last.values())}

    return Case(flow, committed, _every_result())


AGGREGATES = {
    "n": ("*", "count"),
    "total": ("value", "sum"),
    "least": ("value", "min"),
    "most": ("value", "max"),
    "mean": ("value", "mean"),
}


def doubled(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.set_column(1, ROWS.field("value"), pc.multiply(batch["value"], 2))


def _every_result() -> dict[str, Counter[tuple[Any, ...]]]:
    by_key: dict[int, list[int]] = defaultdict(list)
    for row in EVENTS:
        by_key[row["key"]].append(2 * row["value"])
    totals = Counter((key, len(own), sum(own), min(own), max(own), sum(own) / len(own)) for key, own in by_key.items())
    windows: dict[tuple[int, int], list[int]] = defaultdict(list)
    time = -(2**60)
    for start in range(0, len(EVENTS), BATCH_ROWS):
        batch = EVENTS[start : start + BATCH_ROWS]
        for row in batch:
            begin = row["at"] // WINDOW_US * WINDOW_US
            if begin + WINDOW_US > time:
                windows[row["key"], begin].append(2 * row["value"])
        time = max(time, *(row["at"] for row in batch))
    firsts: dict[int, int] = {}
    for row in EVENTS:
        firsts.setdefault(row["value"], row["at"])
    odd = [(row["key"], row["value"], row["at"], NAMES.get(row["key"])) for row in EVENTS if row["value"] % 2]
    assert sum(map(len, windows.values())) < len(EVENTS), "some have to be late"
    return {
        "totals": totals,
        "updates": totals,
        "windows": Counter(
            (key, begin, begin + WINDOW_US, len(own), sum(own)) for (key, begin), own in windows.items()
        ),
        "firsts": Counter(firsts.items()),
        "named": Counter(row for row in odd if row[3]),
        "left": Counter(odd),
    }


class Who(Told):
    """The key of each row becomes the subtask that got it, the time its input."""

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        return rows(*batch["value"].to_pylist(), key=self.context.subtask, at=input)


class Everything(Told):
    """Puts every row into a state of every kind, and emits them at its end: (kind, key, value)."""

    def states(self, *inputs: pa.Schema) -> Sequence[df.Descriptor]:
        value = {"value": pa.int64()}
        return [
            df.ValueState("sum", KEY, value),
            df.MapState("map", KEY, pa.int64(), value),
            df.ListState("list", KEY, value),
            df.Timers("timers", KEY),
            df.Timers("last", KEY),
            df.SplitList("split", value),
            df.BroadcastState("broadcast", value),
        ]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return KINDS

    def open(self, context: df.OperatorContext) -> None:
        super().open(context)
        self.own: list[int] = context.entries("split").rows()["value"].to_pylist()

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        context = self.context
        if input == 1:
            context.entries("broadcast").append(batch.select(["value"]))
            return None
        for row in batch.to_pylist():
            key, value = row["key"], row["value"]
            old = context.value_state("sum").get_one(key)
            context.value_state("sum").put_one((key,), value=value + (old["value"] if old else 0))
            context.map_state("map").put_one((key,), value % 3, value=value)
            context.list_state("list").append_one((key,), value=value)
            context.timers("timers").set_one((key,), value + 5)
            context.timers("last").set_one((key,), MAX_WATERMARK)
            self.own.append(value)
        return None

    def on_timer(self, timers: pa.RecordBatch, name: str) -> df.Output:
        if name == "timers":
            return kinds(("timer", row["key"], row["_timestamp"] - 5) for row in timers.to_pylist())
        sums, keys = self.context.value_state("sum"), timers["key"].to_pylist()
        return kinds(("sum", key, (sums.get_one(key) or {})["value"]) for key in keys)

    def finish(self) -> df.Output:
        context = self.context
        of_map, of_list = (state.rows().to_pylist() for state in (context.map_state("map"), context.list_state("list")))
        found = [("map", 10 * row["key"] + row["_map_key"], row["value"]) for row in of_map]
        found += [("list", row["key"], row["value"]) for row in of_list]
        found += [("split", -1, value) for value in self.own]
        told = context.entries("broadcast").rows()["value"].to_pylist()
        return kinds([*found, *(("broadcast", context.parallelism, value) for value in told)])

    def snapshot(self) -> None:
        self.context.entries("split").replace(pa.table({"value": pa.array(self.own, pa.int64())}))


KINDS = pa.schema([("kind", pa.string()), ("key", pa.int64()), ("value", pa.int64())])


def kinds(found: Any) -> pa.RecordBatch:
    """Rows of ``KINDS``."""
    columns = list(zip(*found, strict=True)) or [(), (), ()]
    return pa.record_batch([pa.array(column, f.type) for column, f in zip(columns, KINDS, strict=True)], schema=KINDS)


class StateJob:
    """A stream by key and a broadcast one, both with gates, into :class:`Everything`."""

    def __init__(self, directory: Any, values: Sequence[int], *, shut: bool = True) -> None:
        self.values = list(values)
        self.stream = Gated(
            directory / "stream", [rows(*self.values[n : n + 5]) for n in range(0, len(values), 5)], shut=shut
        )
        self.table = Gated(directory / "table", [rows(100), rows(200)], shut=shut)
        self.calls = Calls(directory)
        self.out = Out()

    def flow(self, parallelism: int) -> df.Dataflow:
        """The job. It has one reader, since its timers and lists follow the order of the stream."""
        made = df.Dataflow("states", parallelism=parallelism)
        one = made.source(self.stream, uid="in", parallelism=1, event_time="at").key_by("key")
        two = made.source(self.table, uid="table", parallelism=1, event_time="at").broadcast()
        one.apply(Everything(self.calls), two, uid="op").apply(self.out, uid="out", parallelism=2, chain=False)
        return made

    def expected(self, parallelism: int) -> Counter[tuple[Any, ...]]:
        """Everything, when both inputs have ended at this parallelism."""
        found: Counter[tuple[Any, ...]] = Counter()
        latest: dict[tuple[int, int], int] = {}
        sums: Counter[int] = Counter()
        for value in self.values:
            key = value % 4
            sums[key] += value
            latest[key, value % 3] = value
            found[("timer", key, value)] += 1
            found[("list", key, value)] += 1
            found[("split", -1, value)] += 1
        found.update(("sum", key, total) for key, total in sums.items())
        found.update(("map", 10 * key + part, value) for (key, part), value in latest.items())
        for value in (100, 200):
            found[("broadcast", parallelism, value)] += parallelism
        return found


class Shares(Told):
    """Counts rows by value modulo 8 in a union list, of which each subtask takes its share."""

    def states(self, *inputs: pa.Schema) -> Sequence[df.Descriptor]:
        return [df.UnionList("counts", {"part": pa.int64(), "n": pa.int64()})]

    def open(self, context: df.OperatorContext) -> None:
        super().open(context)
        self.counts: Counter[int] = Counter()
        for row in context.entries("counts").rows().to_pylist():
            if row["part"] % context.parallelism == context.subtask:
                self.counts[row["part"]] += row["n"]

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        self.counts.update(value % 8 for value in batch["value"].to_pylist())
        return None

    def snapshot(self) -> None:
        table = pa.table({"part": pa.array(self.counts, pa.int64()), "n": pa.array(self.counts.values(), pa.int64())})
        self.context.entries("counts").replace(table)

    def finish(self) -> df.Output:
        self.tell("finish")
        return [rows(n, key=part, at=0) for part, n in self.counts.items()]


class CountingCoordinator(df.OperatorCoordinator):
    """A coordinator that keeps a count."""

    columns = pa.schema([("count", pa.int64())])

    def __init__(self) -> None:
        self.count = 0
        self.send: df.Sender

    def open(self, send: df.Sender) -> None:
        self.send = send

    def restore(self, found: pa.Table) -> None:
        self.count = pc.sum(found["count"]).as_py() or 0

    def snapshot(self) -> pa.Table:
        return pa.table({"count": pa.array([self.count], pa.int64())})


class Tally(CountingCoordinator):
    """Adds up what subtasks have counted, and tells subtask 0 of every hundred."""

    def receive(self, subtask: int, message: bytes) -> None:
        before, self.count = self.count, self.count + int(message)
        for hundred in range(before // 100 + 1, self.count // 100 + 1):
            self.send(0, str(hundred * 100).encode())


class Counting(Told):
    """Tells its coordinator of every row, and emits what it hears from it."""

    def coordinator(self) -> df.OperatorCoordinator:
        return Tally()

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        self.context.send_to_coordinator(str(batch.num_rows).encode())
        return None

    def receive(self, message: bytes) -> df.Output:
        return rows(int(message), key=0, at=0)


HOPS = pa.schema([("node", pa.int64()), ("hops", pa.int64())])
ROUTES = {n: [(3 * n + 1) % 23, (n * n + 2) % 23, (n + 5) % 29] for n in range(31)}


class Reached(df.Operator):
    """Lets a node through the first time it is reached by so few hops, and remembers."""

    def states(self, *inputs: pa.Schema) -> Sequence[df.Descriptor]:
        return [df.ValueState("least", {"node": pa.int64()}, {"hops": pa.int64()})]

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        least = self.context.value_state("least")
        found = []
        for row in batch.to_pylist():
            known = least.get_one(row["node"])
            if known is None or row["hops"] < known["hops"]:
                least.put_one((row["node"],), hops=row["hops"])
                found.append(row)
        return pa.RecordBatch.from_pylist(found, schema=HOPS)


class Routes(df.Operator):
    """From each node to those that one hop leads to."""

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        found = [
            {"node": node, "hops": row["hops"] + 1} for row in batch.to_pylist() for node in ROUTES.get(row["node"], ())
        ]
        return pa.RecordBatch.from_pylist(found, schema=HOPS)


def hops_job(start: int = 0) -> Case:
    """Hops from one node over the routes, the least of each node."""
    out = CollectSink()

    def flow() -> df.Dataflow:
        made = df.Dataflow("hops", parallelism=3)
        loop = made.loop(HOPS)
        source = MemorySource(pa.table({"node": [start], "hops": [0]}, schema=HOPS))
        first = made.source(source, uid="first", parallelism=1).key_by("node")
        reached = first.apply(Reached(), loop.key_by("node"), uid="reached")
        loop.close(reached.rebalance().apply(Routes(), uid="routes", parallelism=2))
        reached.apply(out, uid="out", chain=False)
        return made

    def committed() -> dict[str, Counter[tuple[Any, ...]]]:
        least: dict[int, int] = {}
        for node, hops in plain(out.table()):
            least[node] = min(hops, least.get(node, hops))
        return {"out": Counter(least.items())}

    return Case(flow, committed, {"out": Counter(breadth_first(start).items())})


def breadth_first(start: int) -> dict[int, int]:
    found, edge, hops = {start: 0}, [start], 0
    while edge:
        hops += 1
        edge = sorted({node for last in edge for node in ROUTES.get(last, ()) if node not in found})
        found.update(dict.fromkeys(edge, hops))
    return found


def laps(keys: Sequence[int], left: int) -> pa.RecordBatch:
    """Rows of ``ROWS`` that have so many laps to go."""
    n = len(keys)
    return pa.record_batch([pa.array(column, pa.int64()) for column in (keys, [left] * n, [0] * n)], schema=ROWS)


class Lap(Told):
    """Takes one lap off each row; none while the file ``spins`` is there."""

    def __init__(self, calls: Calls, spins: Any) -> None:
        super().__init__(calls)
        self.spins = spins

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        less = 0 if self.spins.exists() else 1
        return batch.set_column(1, ROWS.field("value"), pc.subtract(batch["value"], less))


class Late(Told):
    """The head of a loop, with a timer at the end of time that sends two more rows round."""

    def states(self, *inputs: pa.Schema) -> Sequence[df.Descriptor]:
        return [df.Timers("wake", KEY)]

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        if 0 in batch["key"].to_pylist():
            self.context.timers("wake").set_one((0,), MAX_WATERMARK)
        return batch

    def on_timer(self, timers: pa.RecordBatch, name: str) -> df.Output:
        super().on_timer(timers, name)
        return laps([100, 101], left=2)


class LapJob:
    """in → head → body → (again → head) and (done → out). The body spins while a file is there."""

    def __init__(self, directory: Any, *, spins: bool = False, late: bool = False) -> None:
        self.calls = Calls(directory)
        self.spins = directory / "spins"
        self.late = late
        if spins:
            self.spins.touch()
        self.source = Gated(directory / "laps", [laps([n, n + 10], left=1 + n % 3) for n in range(6)])
        self.out = Out()

    def flow(self, parallelism: int = 2, body: int = 3) -> df.Dataflow:
        made = df.Dataflow("laps", parallelism=parallelism)
        loop = made.loop(ROWS)
        stream = made.source(self.source, uid="in", parallelism=1, event_time="at").key_by("key")
        head = stream.apply((Late if self.late else Told)(self.calls), loop.key_by("key"), uid="head")
        lap = head.rebalance().apply(Lap(self.calls, self.spins), uid="body", parallelism=body)
        loop.close(lap.apply(df.Filter(lambda batch: pc.greater(batch["value"], 0)), uid="again"))
        done = lap.apply(df.Filter(lambda batch: pc.less_equal(batch["value"], 0)), uid="done")
        named = done.apply(df.Map(lambda batch: batch.set_column(1, ROWS.field("value"), batch["key"])), uid="named")
        named.apply(self.out, uid="out")
        return made

    @property
    def expected(self) -> list[int]:
        return sorted([*range(6), *range(10, 16), *([100, 101] if self.late else [])])


def two_heads(parallelism: int) -> Case:
    """A loop entered at a and at b, which lead to one another, and a small loop within b."""
    out = CollectSink()
    chunks = [laps([n, n + 10], left=1 + n % 3) for n in range(5)]

    def flow() -> df.Dataflow:
        made = df.Dataflow("two heads", parallelism=parallelism)
        outer, inner = made.loop(ROWS), made.loop(ROWS)
        read = made.source(MemorySource(chunks, splits=2), uid="in", parallelism=2).key_by("key")
        a = read.apply(df.Filter(everything), outer.key_by("key"), uid="a")
        b = a.key_by("key").apply(df.Filter(everything), inner.key_by("key"), uid="b")
        less = b.rebalance().apply(df.Map(one_less), uid="less")
        some = less.apply(df.Filter(lambda batch: pc.greater(batch["value"], 0)), uid="some")
        inner.close(some.apply(df.Filter(lambda batch: is_even(batch["key"])), uid="even"))
        outer.close(some.apply(df.Filter(lambda batch: pc.invert(is_even(batch["key"]))), uid="odd"))
        less.apply(df.Filter(lambda batch: pc.less_equal(batch["value"], 0)), uid="done").apply(out, uid="out")
        return made

    expected = Counter((key, 0, 0) for chunk in chunks for key in chunk["key"].to_pylist())
    return Case(flow, lambda: {"out": plain(out.table())}, {"out": expected})


def everything(batch: pa.RecordBatch) -> pa.Array:
    return pa.array([True] * batch.num_rows, pa.bool_())


def is_even(column: pa.Array) -> pa.Array:
    return pc.equal(pc.bit_wise_and(column, 1), 0)


def one_less(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.set_column(1, ROWS.field("value"), pc.subtract(batch["value"], 1))


class Versioned(df.Operator):
    """Counts rows by key in states of all kinds, in the column ``counted``; others hold -1."""

    def __init__(self, columns: Mapping[str, pa.DataType], counted: str, said: Mapping[str, Any]) -> None:
        self._columns = pa.schema(list(columns.items()))
        self._counted = counted
        self._said = said

    def states(self, *inputs: pa.Schema) -> Sequence[df.Descriptor]:
        columns, said = self._columns, self._said
        return [
            df.ValueState("value", KEY, columns, **said),
            df.MapState("map", KEY, pa.int64(), columns, **said),
            df.ListState("list", KEY, columns, **said),
            df.SplitList("split", columns, **said),
        ]

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        context, counted = self.context, []
        for number, row in enumerate(batch.to_pylist()):
            keys = batch.select(["key"]).slice(number, 1)
            old, found = context.value_state("value").get(keys)
            count = (old[self._counted][0].as_py() or 0) + 1 if found[0] else 1
            values = pa.RecordBatch.from_pylist(
                [{name: count if name == self._counted else -1 for name in self._columns.names}], self._columns
            )
            context.value_state("value").put(keys, values)
            context.map_state("map").put(_beside(keys, pa.field("_map_key", pa.int64()), row["value"], values))
            context.list_state("list").append(keys, values)
            context.entries("split").append(values)
            counted.append(count)
        return pa.RecordBatch.from_arrays([batch["key"], pa.array(counted, pa.int64()), batch["at"]], schema=ROWS)


def _beside(keys: pa.RecordBatch, item: pa.Field, value: Any, values: pa.RecordBatch) -> pa.RecordBatch:
    schema = pa.schema([*keys.schema, item, *values.schema])
    return pa.RecordBatch.from_arrays([*keys.columns, pa.array([value], item.type), *values.columns], schema=schema)


LINE_ROWS = 12


class Line:
    """in → op → out, each in tasks of its own, read by one reader; and a count by key."""

    def __init__(self, stage: Any, executor: str) -> None:
        self.stage = stage
        self.executor = executor
        self.calls = stage.calls
        self.source = Gated(stage.directory / "in", batches(range(LINE_ROWS), 1), shut=True)
        self.out = Out(stage.calls)
        self.totals = Out()

    def flow(self, parallelism: int = 2) -> df.Dataflow:
        flow = df.Dataflow("line", parallelism=parallelism)
        read = flow.source(self.source, uid="in", parallelism=1)
        told = read.apply(Told(self.calls), uid="op", parallelism=1, chain=False)
        told.apply(self.out, uid="out", parallelism=1, chain=False)
        totals = told.key_by("key").apply(df.Aggregate("key", {"n": ("*", "count")}, emit="end"), uid="count")
        totals.apply(self.totals, uid="totals")
        return flow

    def begin(self, **options: Any) -> Run:
        return self.stage.begin(self.executor, self.flow(), **options)

    def run(self, **options: Any) -> Any:
        """Let all rows be read, and run to the end."""
        self.source.let(0)
        return self.stage.run(self.executor, self.flow(options.pop("parallelism", 2)), **options)

    def read(self, run: Run, count: int) -> None:
        """Step until so many rows have come out."""
        self.source.let(0, count)
        until(run, lambda: self.out.values == [*range(count)])

    def end(self, run: Run) -> None:
        """Step to the end, without a restart."""
        self.source.let(0)
        assert to_end(run).restarts == 0

    def check(self, per_key: int = 3) -> None:
        """Every row is out once, and counted by key."""
        assert self.out.values == [*range(LINE_ROWS)]
        assert sorted(self.totals.seen.elements()) == [(key, per_key) for key in range(4)]


class Echoes(CountingCoordinator):
    """Sends every message back to its sender, and counts them."""

    def receive(self, subtask: int, message: bytes) -> None:
        self.count += 1
        self.send(subtask, message)


class Asks(Told):
    """Sends every value to its coordinator ``trips`` times, and emits it at last."""

    def __init__(self, calls: Calls, trips: int = 1) -> None:
        super().__init__(calls)
        self.trips = trips

    def coordinator(self) -> OperatorCoordinator:
        return Echoes()

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        super().process(batch, input)
        for value in batch["value"].to_pylist():
            self.context.send_to_coordinator(f"{value} {self.trips}".encode())
        return None

    def receive(self, message: bytes) -> Output:
        super().receive(message)
        value, trips = map(int, message.split())
        if trips > 1:
            self.context.send_to_coordinator(f"{value} {trips - 1}".encode())
            return None
        return rows(value)


class AsksLap(Told):
    """The body of a loop: takes one lap off a row when its coordinator has answered."""

    def coordinator(self) -> OperatorCoordinator:
        return Echoes()

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        for row in batch.to_pylist():
            self.context.send_to_coordinator(f"{row['key']} {row['value']}".encode())
        return None

    def receive(self, message: bytes) -> Output:
        key, left = map(int, message.split())
        return laps([key], left - 1)


class AnswerJob:
    """in → op → out, and op → second → more: both operators ask, in chains."""

    def __init__(self, directory: Path, count: int = 12, *, trips: int = 2, shut: bool = False) -> None:
        self.calls = Calls(directory)
        self.trips = trips
        self.count = count
        halves = [batches(range(start, count, 2), 1) for start in (0, 1)]
        self.source = Gated(directory / "in", *halves, shut=shut)
        self.out, self.more = Out(), Out()

    def flow(self, parallelism: int = 2) -> Dataflow:
        made = Dataflow("answers", parallelism=parallelism)
        op = made.source(self.source, uid="in").apply(Asks(self.calls, self.trips), uid="op")
        op.apply(self.out, uid="out")
        op.apply(Asks(self.calls, 1), uid="second").apply(self.more, uid="more", parallelism=1)
        return made

    @property
    def committed(self) -> tuple[list[int], list[int]]:
        return self.out.values, self.more.values

    @property
    def expected(self) -> tuple[list[int], list[int]]:
        return [*range(self.count)], [*range(self.count)]


class AnswerLoopJob:
    """in → head → body → (again → head) and (done → out). Answers turn rows round."""

    def __init__(self, directory: Path) -> None:
        self.calls = Calls(directory)
        self.source = Gated(directory / "laps", [laps([n, n + 10], left=1 + n % 3) for n in range(4)])
        self.out = Out()

    def flow(self, parallelism: int = 2) -> Dataflow:
        made = Dataflow("answered laps", parallelism=parallelism)
        loop = made.loop(ROWS)
        stream = made.source(self.source, uid="in", parallelism=1).key_by("key")
        head = stream.apply(Told(self.calls), loop.key_by("key"), uid="head")
        lap = head.rebalance().apply(AsksLap(self.calls), uid="body")
        loop.close(lap.apply(Filter(lambda batch: pc.greater(batch["value"], 0)), uid="again"))
        done = lap.apply(Filter(lambda batch: pc.less_equal(batch["value"], 0)), uid="done")
        named = done.apply(Map(lambda batch: batch.set_column(1, ROWS.field("value"), batch["key"])), uid="named")
        named.apply(self.out, uid="out", parallelism=1)
        return made

    @property
    def expected(self) -> list[int]:
        return sorted([*range(4), *range(10, 14)])


VALUES = range(60)
STATES = [
    df.ValueState("sum", (), {"n": pa.int64(), "values": pa.list_(pa.int64())}),
    df.MapState("parts", (), pa.int64(), {"value": pa.int64()}),
    df.ListState("held", (), {"value": pa.int64(), "text": pa.string()}),
]


class Gathered:
    """Adds the rows of a key up in every kind of state, and lets them out by timers."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __call__(self, key: int, rows: list[tuple[int, int, int]], state: Any, timers: Any) -> None:
        assert rows
        for _, value, _ in rows:
            self._calls.obey(f"value {value}")
            state.sum.n = (state.sum.n or 0) + value
            state.sum.values = [*(state.sum.values or ()), value]
            state.parts[value % 3] = value
            state.held.append((value, f"v{value}"))
            if value % 7 == 0:
                state.parts.pop(2, None)
                state.held.clear()
            timers.set(value + 5)
            timers.set(MAX_WATERMARK)

    def on_timer(self, key: int, timestamp: int, state: Any) -> Iterator[tuple[str, int, int]]:
        if timestamp < MAX_WATERMARK:
            yield "timer", key, timestamp - 5
            return
        yield "sum", key, state.sum.n
        yield from (("value", key, value) for value in state.sum.values)
        yield from (("part", 10 * key + part, value) for part, value in state.parts.items())
        yield from (("held", key, held.value) for held in state.held)
        state.sum = None
        state.parts.clear()
        del state.held[:]


def expected() -> Counter[tuple[Any, ...]]:
    """What comes out, by plain Python."""
    found: Counter[tuple[Any, ...]] = Counter()
    for key in range(4):
        own = [value for value in VALUES if value % 4 == key]
        parts: dict[int, int] = {}
        held: list[int] = []
        for value in own:
            parts[value % 3] = value
            held.append(value)
            if value % 7 == 0:
                parts.pop(2, None)
                held = []
        found.update(("timer", key, value) for value in own)
        found.update(("value", key, value) for value in own)
        found.update(("held", key, value) for value in held)
        found.update(("part", 10 * key + part, value) for part, value in parts.items())
        found["sum", key, sum(own)] += 1
    return found


class PerKeyJob:
    """A stream by key and its timers, with a gate, into :class:`Gathered`."""

    def __init__(self, stage: Stage, *, shut: bool = False) -> None:
        values = list(VALUES)
        self.source = Gated(stage.directory / "in", [rows(*values[n : n + 5]) for n in range(0, 60, 5)], shut=shut)
        self.calls, self.out = stage.calls, Out()

    def flow(self, parallelism: int) -> df.Dataflow:
        made = df.Dataflow("per key", parallelism=parallelism)
        read = made.source(self.source, uid="in", parallelism=1, event_time="at").key_by("key")
        gathered = read.apply_per_key(Gathered(self.calls), output=KINDS, state=STATES, timers="event_time", uid="op")
        gathered.apply(self.out, uid="out", parallelism=2, chain=False)
        return made


class CallsOfEpochs:
    """Tells of each call; rows come in many small batches from two senders."""

    def __init__(self, stage: Stage) -> None:
        batches = [[rows(*range(n, 40, 8)) for n in range(start, 8, 2)] for start in (0, 1)]
        self.source = Gated(stage.directory / "in", *batches)
        self.calls, self.out = stage.calls, Out()

    def __call__(self, key: int, rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        self.calls.tell("fn", f"key {key}")
        return rows

    def flow(self) -> df.Dataflow:
        made = df.Dataflow("calls", parallelism=2)
        by_key = made.source(self.source, uid="in").map(unchanged, uid="map").key_by("key")
        by_key.apply_per_key(self, output=ROWS, uid="op").apply(self.out, uid="out")
        return made


def unchanged(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


LIVES_US = 100
VALUE = {"value": pa.int64()}


class Remembers(Told):
    """Says of each row what its states know of the key: (kind, number of the row, what)."""

    def __init__(
        self, calls: Calls, clock: Any = "event_time", lives_us: int = LIVES_US, drops: Sequence[str] = ()
    ) -> None:
        super().__init__(calls)
        self.clock, self.lives_us, self.drops = clock, lives_us, drops

    def states(self, *inputs: pa.Schema) -> Sequence[df.Descriptor]:
        written = sf.Ttl(self.lives_us, self.clock) if self.clock else None
        read = sf.Ttl(self.lives_us, self.clock, "read_and_write") if self.clock else None
        return [
            df.ValueState("written", KEY, VALUE, ttl=written, drops=self.drops),
            df.ValueState("read", KEY, VALUE, ttl=read, drops=self.drops),
            df.MapState("map", KEY, pa.int64(), VALUE, ttl=written, drops=self.drops),
            df.ListState("list", KEY, VALUE, ttl=written, drops=self.drops),
            df.Timers("timers", KEY, VALUE),
        ]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return KINDS

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        super().process(batch, input)
        context, found = self.context, []
        for row in batch.to_pylist():
            key, value = row["key"], row["value"]
            known = [(name, context.value_state(name).get_one(key)) for name in ("written", "read")]
            found += [(name, value, -1 if old is None else old["value"]) for name, old in known]
            now_us = context.processing_time_us if self.clock == "processing_time" else context.watermark
            found.append(("now", value, now_us))
            found.append(("map", value, sum(context.map_state("map").get_one(key))))
            found.append(("list", value, sum(item["value"] for item in context.list_state("list").get_one(key))))
            if value % 3 == 0:
                context.value_state("written").put_one(key, value=value)
                context.map_state("map").put_one(key, value % 10, value=value)
            if value % 3 == 1:
                context.list_state("list").append_one(key, value=value)
                context.value_state("read").put_one(key, value=value)
            # Long after all that was known of the key has expired.
            context.timers("timers").set_one(key, row["at"] + 3 * self.lives_us, str(value), value=value)
        return kinds(found)

    def on_timer(self, timers: pa.RecordBatch, name: str) -> df.Output:
        return kinds(("timer", row["value"], 0) for row in timers.to_pylist())


def some_rows(seed: int, count: int) -> list[pa.RecordBatch]:
    """Batches of rows in order of time, each with a few rows of one moment.

    Three come first, each with a key of its own: before there is a watermark.
    """
    chance, at = random.Random(seed), 1_000
    left = list(range(3, count))
    rows = [[{"key": 100 + number, "value": number, "at": at}] for number in range(3)]
    while left:
        at += chance.choice([0, 5, 20, 60, 120])
        taken, left = left[: (size := chance.randrange(1, 5))], left[size:]
        rows.append([{"key": chance.randrange(4), "value": number, "at": at} for number in taken])
    return [pa.RecordBatch.from_pylist(some, schema=ROWS) for some in rows]


class ExpiringJob:
    """A stream by key, with a gate: what :class:`Remembers` says, what passes within a while."""

    def __init__(self, directory: Any, *, seed: int = 1, count: int = 60, shut: bool = True) -> None:
        self.batches = some_rows(seed, count)
        self.stream = Gated(directory / "stream", self.batches, shut=shut)
        self.calls = Calls(directory)
        self.out, self.once = Out(), Out()
        self.expected_once = _once(self.batches)

    def flow(self, parallelism: int, **options: Any) -> df.Dataflow:
        made = df.Dataflow("expiring", parallelism=parallelism)
        by_key = made.source(self.stream, uid="in", parallelism=1, event_time="at").key_by("key")
        by_key.apply(Remembers(self.calls, **options), uid="op").apply(self.out, uid="out", parallelism=2, chain=False)
        once = by_key.deduplicate(within=LIVES_US, time="at", uid="once")
        once.apply(self.once, uid="once out", parallelism=2, chain=False)
        return made

    def primed(self, newest_id: Callable[[], int]) -> Iterator[None]:
        """Let the first batches be read, and wait until there is a watermark."""
        self.stream.let(0, 3)
        while len(self.once.seen) < 3:
            yield
        # The reader on Spark hears after the first epoch that it has all splits.
        enough = newest_id() + 1
        while newest_id() < enough:
            yield

    @property
    def times(self) -> dict[int, int]:
        """What time it was at each row, by its number."""
        return {number: time for kind, number, time in self.out.seen if kind == "now"}

    def check(self, *, restarted: bool = True, lives_us: int = LIVES_US) -> None:
        """All of the stream has been read, and everything has come out once."""
        times = self.times
        expected = said(self.batches, times, lives_us)
        expected.update(("now", number, time) for number, time in times.items())
        assert (self.out.seen - expected, expected - self.out.seen) == (Counter(), Counter())
        assert self.once.seen == self.expected_once
        if not restarted:
            # After a restart, time may stand still for a batch.
            at = [batch["at"][0].as_py() for batch in self.batches]
            assert {times[number] for number in self.batches[3]["value"].to_pylist()} == {1_000}
            for batch, before in zip(self.batches[4:], at[3:], strict=False):
                assert {times[number] for number in batch["value"].to_pylist()} == {before}


class _Memory:
    """Values of keys, each of which lives for a while after its last access."""

    def __init__(self, lives_us: int) -> None:
        self._lives_us = lives_us
        self._known: dict[Any, tuple[int, int]] = {}

    def get(self, key: Any, now: int) -> int | None:
        value, time = self._known.get(key, (None, now))
        return None if time + self._lives_us <= now else value

    def put(self, key: Any, value: int, now: int) -> None:
        self._known[key] = (value, now)


def said(batches: Sequence[pa.RecordBatch], times: Mapping[int, int], lives_us: int = LIVES_US) -> Counter[Any]:
    """What :class:`Remembers` says of batches; ``times``: what its clock says at each row.

    What is said before there is a time is of keys that do not come again.
    """
    memories = {name: _Memory(lives_us) for name in ("written", "read", "map", "list")}
    found: list[tuple[Any, ...]] = []
    for batch in batches:
        for row in batch.to_pylist():
            key, value, now = row["key"], row["value"], times[row["value"]]
            for name in ("written", "read"):
                known = memories[name].get(key, now)
                found.append((name, value, -1 if known is None else known))
                if known is not None and name == "read":
                    memories[name].put(key, known, now)
            entries = [number for number in range(10) if memories["map"].get((key, number), now) is not None]
            found.append(("map", value, sum(entries)))
            elements = [memories["list"].get((key, number), now) for number in range(value)]
            found.append(("list", value, sum(element for element in elements if element is not None)))
            if value % 3 == 0:
                memories["written"].put(key, value, now)
                memories["map"].put((key, value % 10), value, now)
            if value % 3 == 1:
                memories["list"].put((key, value), value, now)
                memories["read"].put(key, value, now)
            found.append(("timer", value, 0))
    return Counter(found)


def _once(batches: Sequence[pa.RecordBatch]) -> Counter[tuple[Any, ...]]:
    passed: dict[int, int] = {}
    found: list[tuple[Any, ...]] = []
    for row in (row for batch in batches for row in batch.to_pylist()):
        if row["key"] not in passed or row["at"] >= passed[row["key"]] + LIVES_US:
            passed[row["key"]] = row["at"]
            found.append(tuple(row.values()))
    return Counter(found)


SECOND_US = 1_000_000
FIRED = pa.schema({"key": pa.int64(), "value": pa.int64(), "set": pa.int64(), "now": pa.int64()})


class Reminders(df.Operator):
    """Sets a timer for each row, ``value`` seconds after it came, and says when it fired.

    One with a value above 100 sets another, a second later. What is left at the end fires at 0.
    """

    def __init__(self, clock: str = "processing_time") -> None:
        self.clock = clock

    def states(self, *inputs: pa.Schema) -> Sequence[df.Descriptor]:
        return [df.Timers("reminders", KEY, {"value": pa.int64(), "set": pa.int64()}, clock=self.clock)]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return FIRED

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        for row in batch.to_pylist():
            self._set(row["key"], row["value"], self.context.processing_time_us)
        return None

    def _set(self, key: int, value: int, now_us: int) -> None:
        self.context.timers("reminders").set_one(
            key, now_us + value % 100 * SECOND_US, str(value), value=value, set=now_us
        )

    def on_timer(self, timers: pa.RecordBatch, name: str) -> df.Output:
        for row in timers.to_pylist():
            if row["value"] > 100:
                self._set(row["key"], 1, self.context.processing_time_us)
        return self._said(timers, self.context.processing_time_us)

    def end_input(self, input: int) -> df.Output:
        left = self.context.timers("reminders").due(2**63 - 1)
        return None if left is None else self._said(left, 0)

    def _said(self, timers: pa.RecordBatch, now_us: int) -> pa.RecordBatch:
        now = pa.array([now_us] * len(timers), pa.int64())
        return pa.record_batch([timers["key"], timers["value"], timers["set"], now], schema=FIRED)


class Losing(Reminders):
    """The same, and a test may let it fail when timers fire."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def on_timer(self, timers: pa.RecordBatch, name: str) -> df.Output:
        self.calls.tell(f"{self.context.uid}/{self.context.subtask}", "fires")
        return super().on_timer(timers, name)


class Union(df.Operator):
    """Passes on both of its inputs."""

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        return batch


END = "_END"


class GrowingFolder(ABC):
    """Gets files, each of one row."""

    def __init__(self, stage: PlayedStage, executor: str) -> None:
        self.stage = stage
        self.executor = executor
        self.path = stage.directory / "grows"
        self.path.mkdir()
        self.out = Out()
        self.files = 0

    @abstractmethod
    def flow(self, parallelism: int = 2, *, out: Out | None = None) -> Any:
        """A job that reads the folder."""

    def stamp(self, file: Path, number: int) -> None:  # noqa: B027 - most need nothing
        """Set what else a file of this number has, before it appears."""

    def add(self, count: int) -> None:
        for number in range(self.files, self.files + count):
            hidden = self.path / f".{number}"
            pq.write_table(pa.Table.from_batches([rows(number)]), hidden)
            self.stamp(hidden, number)
            # Later files do not always sort behind earlier ones.
            hidden.rename(self.path / f"{number % 3}-{number:05}.parquet")
        self.files += count

    def end(self) -> None:
        (self.path / END).touch()

    def begin(self, flow: Any = None, executor: str | None = None, **options: Any) -> Run:
        return self.stage.begin(executor or self.executor, flow or self.flow(), **{"keep": None, **options})

    def read(self, run: Run) -> None:
        """Step a run until all files that are there are in its output."""
        until(run, lambda: self.out.values == [*range(self.files)])

    def segments(self) -> list[tuple[int, str]]:
        """Rows of each segment of the log, and its path."""
        handles = self.stage.store.open().handles
        mine = [row for row in handles.to_pylist() if row["state"] == ENUMERATOR_LOG and row["rows"]]
        return [(row["rows"], row["path"]) for row in mine]

    def rows_of_log(self) -> int:
        return sum(size for size, _ in self.segments())

    def check(self) -> None:
        assert self.out.values == [*range(self.files)], "each file once"
        assert not sf.validate(self.stage.store, level="full").problems

    def check_copy_and_rollback(self) -> None:
        """A copy of a checkpoint, and a job that went back to it, read what came behind it."""
        self.add(6)
        run = self.begin()
        self.read(run)
        then = self.stage.newest_id + 1
        until(run, lambda: self.stage.newest_id >= then)  # With nothing left to commit.
        self.add(5)
        self.read(run)
        run.close()
        copy = sf.open(str(self.stage.directory / "copy"))
        self.stage.store.copy(self.stage.store.open(then), copy)
        self.add(1)
        self.end()
        elsewhere = Out()
        begun = self.stage.at("elsewhere").begin(self.executor, self.flow(3, out=elsewhere), start_from=copy.url)
        to_end(begun)
        assert elsewhere.values == [*range(6, 12)]
        self.stage.store.rollback(then)
        again = Out()
        to_end(self.begin(self.flow(1, out=again)))
        assert again.values == [*range(6, 12)]


class WithoutLog(DirectoryEnumerator):
    """As it was in earlier releases: its snapshot has all files that were dealt."""

    log_columns = None

    def snapshot(self) -> pa.Table:
        dealt = {"file": [f"{self._directory}/{name}" for name in self._dealt]}
        nulls = {name: pa.nulls(len(dealt["file"]), self.columns.field(name).type) for name in ("id", "payload")}
        return pa.concat_tables([pa.table({**dealt, **nulls}, schema=self.columns), super().snapshot()])


class OfNames(DirectoryEnumerator):
    """As it was later: its log has names alone."""

    log_columns = pa.schema([DirectoryEnumerator.log_columns.field("file")])

    def logged(self) -> pa.Table:
        return super().logged().select(["file"])

    def restore_log(self, rows: pa.Table) -> None:
        nulls = [rows["file"], *(pa.nulls(len(rows), pa.int64()) for _ in range(2))]
        super().restore_log(pa.table(nulls, schema=DirectoryEnumerator.log_columns))


class Earlier(ParquetSource):
    kept: type[DirectoryEnumerator] = WithoutLog

    def enumerator(self) -> df.SplitEnumerator:
        assert self._directory is not None
        return self.kept(self._directory, self.suffix, self._splits_of, until=self._until)


class OfNamesAlone(Earlier):
    kept = OfNames
