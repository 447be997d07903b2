"""What both sides of the Spark benchmarks share: the rows, in files, and the function of a key.

An epoch is ``FILES`` files of equal size. Structured Streaming takes them by
``maxFilesPerTrigger``, our source gives one to each reader and nothing more before the next
checkpoint, so both process the same rows between two commits. Rows are a function of the seed and
the epoch's number.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FILES = 4
"""Files of an epoch, and subtasks and shuffle partitions of either side."""

EPOCH_US = 10_000_000
WINDOW_US = 20_000_000
"""How far the times of an epoch's rows go on, and how long a window is, in µs."""

_ROW_GROUP_ROWS = 131_072
_BEGIN_S = 1_700_000_000


class Epoch(NamedTuple):
    """What one epoch took: rows read, and seconds from its begin to its commit."""

    rows: int
    seconds: float


class Written(NamedTuple):
    """What lies in a directory, or came to it between two looks."""

    files: int
    size_bytes: int


def fold(total: int, count: int, values: list[int]) -> tuple[int, int]:
    """The function of one key: its state and its new values to its new state."""
    return total + sum(values), count + len(values)


def write_epoch(folder: str | Path, number: int, keys: Any, *, timed: bool = False) -> None:
    """Write the files of an epoch. ``timed``: rows have a time, too, which goes on with them."""
    values = np.random.default_rng(number).integers(0, 1000, len(keys))
    table = pa.table({"k": keys, "v": values})
    if timed:
        times = number * EPOCH_US + np.arange(len(keys)) * EPOCH_US // len(keys)
        table = table.append_column("at", pa.array(times, pa.timestamp("us", "UTC")))
    rows = -(-len(keys) // FILES)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for part in range(FILES):
        path = Path(folder) / f"epoch-{number:05d}-{part}.parquet"
        # Neither side sees a file before it is whole.
        hidden = path.with_name(f"_{path.name}")
        pq.write_table(table.slice(part * rows, rows), hidden, row_group_size=_ROW_GROUP_ROWS, compression="lz4")
        # The file source of Structured Streaming goes by time.
        os.utime(hidden, (_BEGIN_S + number, _BEGIN_S + number))
        hidden.rename(path)


def random_keys(number: int, *, rows: int, keys: int) -> Any:
    return np.random.default_rng([7, number]).integers(0, keys, rows)


def write_input(folder: str | Path, epochs: int, *, rows: int, keys: int, timed: bool = False) -> str:
    for number in range(epochs):
        write_epoch(folder, number, random_keys(number, rows=rows, keys=keys), timed=timed)
    return str(folder)


def lying_in(folder: str | Path) -> dict[str, int]:
    found = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(directory, name)  # noqa: PTH118
            try:
                found[path] = os.stat(path).st_size  # noqa: PTH116
            except FileNotFoundError:
                continue
    return found


def new_since(folder: str | Path, before: dict[str, int]) -> Written:
    new = [size for path, size in lying_in(folder).items() if path not in before]
    return Written(len(new), sum(new))
