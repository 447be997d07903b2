"""A job with a state of every kind, its history in plain Python, and a job over the data world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from stateformat.backends import dataflow as df
from stateformat.backends.connectors import CollectSink, MemorySource
from stateformat.model import State
from tests.worlds import data as data_world

ROWS = pa.schema([("key", pa.int64()), ("value", pa.int64())])
KINDS = pa.schema([("kind", pa.string()), ("key", pa.int64()), ("value", pa.int64())])
RATES = pa.table({"value": pa.array([100, 200], pa.int64())})
LATER = 10**12
"""A timer of a value fires that much later, when the job ends."""
_KEY = {"key": pa.int64()}
_VALUE = {"value": pa.int64()}


def orders(count: int, first: int = 0) -> pa.Table:
    """Values from ``first`` on; every eleventh key is null."""
    values = range(first, first + count)
    keys = [None if value % 11 == 0 else value * 7 % 23 for value in values]
    return pa.table({"key": keys, "value": list(values)}, schema=ROWS)


class Shop(df.Operator):
    """Puts every row into a state of each kind, and emits them when its inputs have ended."""

    broadcast_inputs = (1,)

    def states(self, *inputs: pa.Schema) -> Sequence[df.Descriptor]:
        return [
            df.ValueState("sums", _KEY, [pa.field("sum", pa.int64(), nullable=False), pa.field("rows", pa.int32())]),
            df.MapState("latest", _KEY, pa.int64(), _VALUE),
            df.ListState("all", _KEY, _VALUE),
            df.Timers("alarms", _KEY),
            df.SplitList("mine", _VALUE),
            df.UnionList("ours", _VALUE),
            df.BroadcastState("rates", _VALUE),
        ]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return KINDS

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        context = self.context
        if input == 1:
            context.entries("rates").append(batch.select(["value"]))
            return None
        for row in batch.to_pylist():
            key, value = row["key"], row["value"]
            old = context.value_state("sums").get_one(key) or {"sum": 0, "rows": 0}
            context.value_state("sums").put_one((key,), sum=old["sum"] + value, rows=old["rows"] + 1)
            context.map_state("latest").put_one((key,), value % 3, value=value)
            context.list_state("all").append_one((key,), value=value)
            context.timers("alarms").set_one((key,), value + LATER)
        context.entries("mine").append(batch.select(["value"]))
        return None

    def on_timer(self, timers: pa.RecordBatch, name: str) -> df.Output:
        return _kinds(("alarm", row["key"], row["_timestamp"] - LATER) for row in timers.to_pylist())

    def finish(self) -> df.Output:
        context = self.context
        sums, latest, lists = (
            state.rows().to_pylist()
            for state in (context.value_state("sums"), context.map_state("latest"), context.list_state("all"))
        )
        found = [("sum", row["key"], 1000 * row["sum"] + row["rows"]) for row in sums]
        found += [("latest", 10 * (row["key"] or 0) + row["_map_key"], row["value"]) for row in latest]
        places: Counter[Any] = Counter()
        for row in lists:
            places[row["key"]] += 1
            found.append((f"place {places[row['key']]}", row["key"], row["value"]))
        found += [("mine", None, value) for value in context.entries("mine").rows()["value"].to_pylist()]
        found += [("rate", None, value) for value in context.entries("rates").rows()["value"].to_pylist()]
        return _kinds(found)


def _kinds(found: Any) -> pa.RecordBatch:
    columns = list(zip(*found, strict=True)) or [(), (), ()]
    return pa.record_batch([pa.array(column, f.type) for column, f in zip(columns, KINDS, strict=True)], schema=KINDS)


def shop_flow(values: pa.Table, out: CollectSink, *, parallelism: int = 3) -> df.Dataflow:
    """The rows by key, and the rates, into a shop."""
    flow = df.Dataflow("shop", parallelism=parallelism)
    rates = flow.source(MemorySource(RATES), uid="rates", parallelism=1)
    sold = flow.source(MemorySource(values, splits=1), uid="orders", name="Orders", parallelism=1)
    flow.apply(Shop(), sold.key_by("key"), rates.broadcast(), uid="shop", name="Shop").apply(out, uid="out")
    return flow


def shop_states(values: pa.Table) -> dict[str, pa.Table]:
    """What a shop keeps once it has seen these rows, as users may have it in tables."""
    rows = values.to_pylist()
    keys = list(dict.fromkeys(row["key"] for row in rows))
    of = {key: [row["value"] for row in rows if row["key"] == key] for key in keys}
    latest = {(row["key"], row["value"] % 3): row["value"] for row in rows}
    return {
        "shop/sums": pa.table(
            {
                # Of smaller types than declared, in another order: no value is lost.
                "rows": pa.array([len(of[key]) for key in keys], pa.int16()),
                "sum": pa.array([sum(of[key]) for key in keys], pa.int32()),
                "key": pa.array(keys, pa.int32()),
            }
        ),
        "shop/latest": pa.table(
            {
                "key": pa.array([key for key, _ in latest], pa.int64()),
                "_map_key": pa.array([rest for _, rest in latest], pa.int64()),
                "value": list(latest.values()),
            }
        ),
        "shop/all": values,
        "shop/alarms": pa.table({"key": values["key"], "_timestamp": [row["value"] + LATER for row in rows]}),
        "shop/mine": values.select(["value"]),
        "shop/ours": values.select(["value"]).slice(0, 5),
        "shop/rates": RATES,
    }


def plain(out: CollectSink) -> Counter[Any]:
    """What a sink has collected."""
    return Counter(tuple(row.values()) for row in out.table().to_pylist())


@dataclass(frozen=True)
class _As(df.Descriptor):
    """A state of the data world as an operator here declares it."""

    state: State

    def declare(self, operator: str) -> State:
        return replace(self.state, operator=operator)


class _Keeper(df.Operator):
    def __init__(self, states: Sequence[State]) -> None:
        self._states = states

    def states(self, *inputs: pa.Schema) -> Sequence[df.Descriptor]:
        return [_As(state.name, state) for state in self._states]

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        return None


def world_flow(parallelism: int) -> tuple[df.Dataflow, dict[str, data_world.Name]]:
    """A dataflow that declares the states of the data world, and where each of them comes from."""
    flow = df.Dataflow("world", parallelism=parallelism)
    columns = pa.schema([("user", pa.string()), ("day", pa.date32()), ("order", pa.int64())])
    rows = flow.source(MemorySource(columns.empty_table()), uid="rows")
    steps: dict[str, tuple[list[str], list[str]]] = {
        "users": (["user"], ["spent", "baskets", "recent", "reminders", "rates", "shards"]),
        "days": (["user", "day"], ["by_day"]),
        "refunds": (["order"], ["refunds"]),
    }
    found = {}
    declared = {state.name: state for state in data_world.states(data_world.NEWEST)}
    for uid, (keys, names) in steps.items():
        flow.apply(_Keeper([declared[name] for name in names]), rows.key_by(*keys), uid=uid)
        found |= {f"{uid}/{name}": (str(declared[name].operator), name) for name in names}
    flow.apply(_Keeper([declared["positions"]]), rows.rebalance(), uid="splits")
    return flow, {**found, "splits/positions": ("orders", "positions")}
