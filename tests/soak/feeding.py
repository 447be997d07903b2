"""The files of orders that a soak feeds to a job, one after the other, the same in every run."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ORDERS = pa.schema(
    [("order", pa.int64()), ("customer", pa.int64()), ("amount", pa.int64()), ("at", pa.timestamp("us"))]
)
ROWS, CUSTOMERS, SEGMENTS = 1_000, 5_000, 7
REPEATED = 100
"""How many rows of a file repeat rows of the file before."""
US_PER_FILE = 1_000_000
OUT_OF_ORDER_US = 3 * US_PER_FILE
CUSTOMERS_FILE = "customers.parquet"
FOLDERS = ("orders", "quiet")
"""From the second, a job reads one row at its start, and later only that no more come."""
END = "END"
"""Once a file of this name exists, no more files come."""


def orders_of(number: int) -> pa.Table:
    """Return the rows of one file: new orders, then some of the file before once more."""
    before = _new(number - 1).slice(0, REPEATED if number else 0)
    return pa.concat_tables([_new(number), before])


def _new(number: int) -> pa.Table:
    random = np.random.default_rng(max(number, 0))
    count = ROWS - REPEATED
    at = number * US_PER_FILE + random.integers(0, US_PER_FILE, count)
    columns = [
        np.arange(count) + number * count,
        random.integers(0, CUSTOMERS, count),
        random.integers(-5, 100, count),
        at.astype("datetime64[us]"),
    ]
    return pa.table([pa.array(column) for column in columns], schema=ORDERS)


def prepare(folder: Path) -> None:
    """Make the folders of a job, its bounded table, and the quiet row, which has no amount."""
    for name in (*FOLDERS, "out"):
        (folder / name).mkdir(parents=True)
    at = np.zeros(1, "datetime64[us]")
    pq.write_table(pa.table([[-1], [0], [0], at], schema=ORDERS), folder / "quiet" / "orders.parquet")
    ids = np.arange(CUSTOMERS)
    table = pa.table({"customer": ids, "segment": pa.array([f"segment {each % SEGMENTS}" for each in ids])})
    pq.write_table(table, folder / CUSTOMERS_FILE)


class Feeder(threading.Thread):
    """Puts a file of orders into each folder every ``every_s`` seconds, until :meth:`end`."""

    def __init__(self, folders: list[Path], *, every_s: float) -> None:
        super().__init__(name="feeder", daemon=True)
        self.files = 0
        self._folders = folders
        self._every_s = every_s
        self._over = threading.Event()

    def run(self) -> None:
        """Write files. A file must be complete when it appears, so it is renamed at the end."""
        while not self._over.wait(self._every_s):
            for folder in self._folders:
                hidden = folder / "orders" / ".being-written"
                pq.write_table(orders_of(self.files), hidden)
                hidden.rename(folder / "orders" / f"orders-{self.files:06d}.parquet")
            self.files += 1
        for folder in self._folders:
            for name in FOLDERS:
                (folder / name / END).touch()

    def end(self) -> None:
        """Stop feeding: the jobs end when they have read all files."""
        self._over.set()
        self.join()
