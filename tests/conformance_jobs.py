"""Jobs that both executors run, each with what has to come out, worked out in plain Python.

No result depends on how records are put together into batches, nor on which task is quicker: where
order matters there is one reader, and each channel keeps it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.backends import dataflow as df
from stateformat.backends.connectors import CollectSink, MemorySource
from stateformat.backends.dataflow.events import MAX_WATERMARK
from stateformat.backends.runtime import Run
from tests.conformance import Calls, Case, Gated, Out, Told, batches, plain, to_end, until
from tests.local_jobs import KEY, ROWS, rows

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
