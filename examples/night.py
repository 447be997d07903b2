"""A store to practise on: state that grows from day to day, and one customer who is far ahead.

    python examples/night.py night

makes ``night/store``: a shop's job, which ran for twelve days and took a checkpoint after each.
docs/night.md asks twelve questions about it. The job reads ``night/inbox``, one Parquet file a day,
and writes to ``night/out``. It goes on with

    ckpt run examples/night.py:shop night/store
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import stateformat
from stateformat.backends.connectors import FileSink, ParquetSource
from stateformat.backends.dataflow import Dataflow, MapState, Operator, Output, ValueState
from stateformat.backends.dataflow.api import Descriptor
from stateformat.backends.local import LocalRuntime, VirtualClock

DAYS = 12
DAY_US = 10_000_000
"""A day of this job, which is shorter than others."""
FOLDER = Path("night")
ORDERS = pa.schema({"user": pa.int64(), "item": pa.string(), "amount": pa.int64()})
USER = {"user": pa.int64()}
HOT = 4711
"""The customer who orders more and more: a reseller's program."""


def orders(day: int) -> pa.Table:
    """The orders of a day, of more customers each day, and from the sixth on of the program."""
    draw = random.Random(day)
    people = [(draw.randrange(1, 2_000 * day), f"item-{draw.randrange(50)}") for _ in range(5_000)]
    program = [(HOT, f"part-{day}-{number}") for number in range(0 if day < 6 else 400 * day)]
    rows = [{"user": user, "item": item, "amount": draw.randrange(1, 90)} for user, item in [*people, *program]]
    return pa.Table.from_pylist(rows, ORDERS)


class Accounts(Operator):
    """What each customer has spent, and how often each item was ordered."""

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        return [
            ValueState("account", USER, {"orders": pa.int64(), "amount": pa.int64()}),
            MapState("items", USER, pa.string(), {"n": pa.int64()}),
        ]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return pa.schema({"user": pa.int64(), "amount": pa.int64()})

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        account, items = self.context.value_state("account"), self.context.map_state("items")
        account.add(batch.select(["user"]), batch, {"orders": "count", "amount": "sum"})
        counted = pa.table(batch).group_by(["user", "item"]).aggregate([([], "count_all")])
        entries = counted.rename_columns(["user", "_map_key", "n"]).combine_chunks().to_batches()[0]
        known = items.find(entries.select(["user", "_map_key"]))[0]["n"]
        items.put(entries.set_column(2, "n", pc.add(entries["n"], pc.fill_null(known, 0))))
        users = pa.record_batch({"user": batch["user"].unique()})
        return pa.record_batch({"user": users["user"], "amount": account.get(users)[0]["amount"]})


class LaterAccounts(Accounts):
    """The next release: what was ``amount`` is now called ``spent``, and nobody has said so."""

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        _, items = super().states(*inputs)
        return [ValueState("account", USER, {"orders": pa.int64(), "spent": pa.int64()}), items]


def shop(accounts: type[Accounts] = Accounts) -> Dataflow:
    """The shop's job. Its files lie beside its store."""
    flow = Dataflow("shop")
    rows = flow.source(ParquetSource(FOLDER / "inbox", schema=ORDERS, grows=True), uid="orders")
    rows.key_by("user").apply(accounts(), uid="accounts").apply(FileSink(FOLDER / "out"), uid="out")
    return flow


def next_shop() -> Dataflow:
    """The shop's job in its next release."""
    return shop(LaterAccounts)


def main(folder: Path) -> None:
    """Run the job for twelve days."""
    global FOLDER
    FOLDER = folder
    (folder / "inbox").mkdir(parents=True)
    runtime = LocalRuntime(
        stateformat.open(folder / "store"),
        parallelism=4,
        clock=VirtualClock(),
        checkpoint_interval_us=DAY_US,
        keep=DAYS,
    )
    run = None
    for day in range(1, DAYS + 1):
        hidden = folder / "inbox" / f".{day:02d}"
        pq.write_table(orders(day), hidden)
        hidden.rename(folder / "inbox" / f"{day:02d}.parquet")
        run = run or runtime.begin(shop())
        while run.published < day and run.step():
            pass
    run.close()
    print(f"{folder / 'store'} has the checkpoints of {DAYS} days")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
