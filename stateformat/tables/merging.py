"""Merge sorted streams of tables into one, in bounded memory (SPEC.md section 5.2: records of one channel go by ``_seq``)."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def merge_sorted(streams: Sequence[Iterator[pa.Table]], keys: Sequence[str]) -> Generator[pa.Table, None, None]:
    """The rows of all streams by ``keys`` (integer columns without nulls), as tables; of equal rows the earlier stream's first.

    Each stream is sorted by the keys. One table of each is held at a time, and what is yielded has at most the rows of these.
    A stream that is not sorted, which only damage can be, loses no row.
    """
    heads = [head for head in (_Head(stream, keys) for stream in streams) if head.refill()]
    while heads:
        # What is not above the least of the last rows cannot be preceded by anything that has not been read.
        least = min(heads, key=lambda head: head.last)
        taken = [head.take(least.last, everything=head is least) for head in heads]
        table = pa.concat_tables([rows for rows, _ in taken])
        columns = np.concatenate([part for _, part in taken], axis=1)
        order = np.lexsort(columns[::-1])
        is_sorted = bool((order == np.arange(len(order))).all())
        yield table if is_sorted else table.combine_chunks().take(pa.array(order))
        heads = [head for head in heads if head.refill()]


class _Head:
    """What has been read of a stream and not been taken; ``last`` are the keys of its last row."""

    def __init__(self, stream: Iterator[pa.Table], keys: Sequence[str]) -> None:
        self._stream = stream
        self._keys = keys
        self._rows: pa.Table | None = None
        self._columns: npt.NDArray[np.int64] = np.zeros((len(keys), 0), np.int64)
        self.last: tuple[int, ...] = ()

    def refill(self) -> bool:
        """Read on where everything was taken; False at the end of the stream."""
        while not self._columns.shape[1]:
            rows = next(self._stream, None)
            if rows is None:
                return False
            self._rows = rows
            self._columns = np.stack([rows[name].to_numpy().astype(np.int64) for name in self._keys])
            if rows.num_rows:
                self.last = tuple(self._columns[:, -1].tolist())
        return True

    def take(self, bound: tuple[int, ...], *, everything: bool) -> tuple[pa.Table, npt.NDArray[np.int64]]:
        """The first rows, up to those whose keys are not above the bound, and their keys; they are gone from here."""
        assert self._rows is not None
        rows, columns = self._rows, self._columns
        count = columns.shape[1]
        if not everything:
            above = np.zeros(count, np.bool_)
            for column, value in zip(columns[::-1], reversed(bound), strict=True):
                above = (column > value) | ((column == value) & above)
            count = int(above.argmax()) if above.any() else count
        self._rows, self._columns = rows.slice(count), columns[:, count:]
        return rows.slice(0, count), columns[:, :count]
