"""A source that makes rows up, at a rate: to try a job, for benchmarks, for endless jobs.

Row *n* of a shard, its event time included, depends on *n* alone. The clock says only when it
comes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from stateformat.errors import InvalidInput

from ...dataflow.api import Chunk, ReaderContext, Source, Split, StartingPoint
from .enumerators import ListEnumerator, check_at_least, check_position, not_null

_SECOND_US = 1_000_000
_TIME = pa.timestamp("us")
_BEGAN: Final[dict[tuple[str, str], tuple[int, int]]] = {}
"""By source and shard: the row and the time from which its rate counts in this process."""


class RateSource(Source):
    """Generates numbered rows, at a rate per second or per read.

    Example::

        ticks = flow.source(RateSource(rows_per_second=1000), uid="ticks", event_time="at")
        many = flow.source(RateSource(rows_per_read=10_000, total=5_000_000, shards=4), uid="many")

    Columns, in this order and not nullable: ``shard`` (int32, 0 … ``shards`` − 1), ``n`` (int64,
    from 0 in each shard) and ``at`` (timestamp[us], the event time: ``start_us`` + *n* steps). A
    step is ``step_us``, by default that of the rate per second, else 1000 µs.

    ``rows_per_second`` is the rate of all shards together, by the executor's clock, from when a
    process first reads a shard. ``rows_per_read`` is the rows of one batch, 1000 by default. At
    most one of the two may be given. ``total`` counts the rows of all shards; None never ends.
    Shards are assigned evenly, and a reader reads all of its own in turn. A position is *n*. Raises
    ``InvalidInput`` for illegal numbers.
    """

    splits_per_reader = None

    def __init__(
        self,
        *,
        rows_per_second: int | None = None,
        rows_per_read: int | None = None,
        total: int | None = None,
        shards: int = 1,
        start_us: int = 0,
        step_us: int | None = None,
    ) -> None:
        if rows_per_second is not None and rows_per_read is not None:
            raise InvalidInput(
                f"{rows_per_second} rows a second and {rows_per_read} rows a read are two rates. Give one of them"
            )
        check_at_least("shards", shards, 1)
        for least, options in (
            (1, {"rows_per_second": rows_per_second, "rows_per_read": rows_per_read}),
            (0, {"total": total, "step_us": step_us}),
        ):
            for name, value in options.items():
                if value is not None:
                    check_at_least(name, value, least)
        self._rows_per_second = rows_per_second
        self._rows_per_read = rows_per_read or 1000
        self._total = total
        self._shards = shards
        self._start_us = start_us
        self._step_us = step_us
        self.bounded = total is not None
        self._name = secrets.token_hex(8)

    @property
    def schema(self) -> pa.Schema:
        """``shard``, ``n``, ``at``."""
        return not_null(shard=pa.int32(), n=pa.int64(), at=_TIME)

    def enumerator(self) -> ListEnumerator:
        return ListEnumerator(self._all_shards, shared_out=True)

    def _all_shards(self) -> list[Split]:
        return [_shard(shard, self._rows_of(shard)) for shard in range(self._shards)]

    def _rows_of(self, shard: int) -> int | None:
        if self._total is None:
            return None
        rows, extra = divmod(self._total, self._shards)
        return rows + (shard < extra)

    def behind(self, position: int | Sequence[int]) -> StartingPoint:
        """Begin at this row; for several shards, give a row of each. Raises ``InvalidInput``."""
        rows = [position] if isinstance(position, int) else list(position)
        for row in rows:
            check_at_least("the position of a RateSource", row, 0)
        if len(rows) != self._shards:
            raise InvalidInput(
                f"{position!r} is the position of {len(rows)} shards, and the RateSource has {self._shards}. Give the "
                "next row of each, in a list"
            )
        for split, row in zip(self._all_shards(), rows, strict=True):
            limit = json.loads(split.payload)["rows"]
            if limit is not None and row > limit:
                raise InvalidInput(f"shard {split.id!r} of the RateSource has {limit} rows, and cannot begin at {row}")
        return rate_behind(rows, [self._rows_of(shard) for shard in range(self._shards)])

    def read(self, split: Split, context: ReaderContext) -> Iterator[Chunk]:
        """Read the rest of a shard, with empty chunks while it is too early for the next row."""
        payload = json.loads(split.payload)
        shard, rows = payload["shard"], payload["rows"]
        if rows is not None:
            check_position("that shard", split, rows)
        n = split.position
        first, began_us = self._rate_origin(split, context.now_us)
        while rows is None or n < rows:
            until = n + self._rows_per_read
            if self._rows_per_second is not None:
                passed_us = max(0, context.now_us - began_us)
                # The first row comes at once. No batch is larger than a second's worth.
                due = first + 1 + passed_us * self._rows_per_second // (_SECOND_US * self._shards)
                until = min(due, n + max(1, self._rows_per_second // self._shards))
            if rows is not None:
                until = min(until, rows)
            if until <= n:
                yield Chunk(None, n)
            else:
                yield Chunk(self._rows(shard, n, until), until)
                n = until

    def _rate_origin(self, split: Split, now_us: int) -> tuple[int, int]:
        """The row and the time from which the rate counts: when this process first read the shard.

        The rate goes on while a reader is closed and opened again.
        """
        key = (self._name, split.id)
        first, began_us = _BEGAN.get(key, (split.position, now_us))
        if split.position < first or now_us < began_us:
            first, began_us = split.position, now_us
        _BEGAN[key] = (first, began_us)
        return first, began_us

    def _rows(self, shard: int, first: int, until: int) -> pa.RecordBatch:
        numbers = np.arange(first, until, dtype=np.int64)
        if self._step_us is not None or self._rows_per_second is None:
            passed_us = numbers * (1000 if self._step_us is None else self._step_us)
        else:
            # Seconds and rest apart, so that no product exceeds 63 bits.
            seconds, rest = np.divmod(numbers * self._shards, self._rows_per_second)
            passed_us = seconds * _SECOND_US + rest * _SECOND_US // self._rows_per_second
        return pa.record_batch(
            [
                pa.array(np.full(len(numbers), shard, np.int32)),
                pa.array(numbers),
                pa.array(passed_us + self._start_us).view(_TIME),
            ],
            schema=self.schema,
        )


def rate_behind(rows: Sequence[int], totals: Sequence[int | None] = (None,)) -> StartingPoint:
    """A rate source of which each shard begins at its number of ``rows``.

    ``totals`` is how many rows each shard has; None: no end.
    """
    both = enumerate(zip(rows, totals, strict=True))
    splits = [_shard(shard, total)._replace(position=row) for shard, (row, total) in both]
    said = f"behind row {' and '.join(str(row - 1) for row in rows)}" if any(rows) else "at its first row"
    return StartingPoint(ListEnumerator.columns.empty_table(), tuple(splits), said)


def _shard(shard: int, rows: int | None) -> Split:
    return Split(f"shard-{shard:05d}", json.dumps({"shard": shard, "rows": rows}).encode())
