"""Sources of rows in memory, or made up at a rate, and the enumerator of ready-made sources.

Row *n* of a shard of a :class:`RateSource`, its event time included, depends on *n* alone. The
clock says only when it comes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import brief
from stateformat.tables import table_from_python

from ...dataflow.api import Chunk, NoSplit, ReaderContext, Source, Split, SplitEnumerator, StartingPoint
from ...dataflow.casting import check_columns, made_plain, plain_schema


def not_null(**columns: pa.DataType) -> pa.Schema:
    """Columns of these types, none of which holds nulls."""
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


class ListEnumerator(SplitEnumerator):
    """Assigns the splits of a list, each once, in order.

    ``splits`` is called when the first split is requested, and never after a restore: the
    enumerator keeps what it has not assigned, and a reader's checkpoints keep what it was assigned.
    So later changes to the origin of the list do not matter.

    By default the next subtask that asks gets the next split, which suits splits that end. With
    ``shared_out``, split number *n* goes to subtask *n* mod parallelism: the first reader to ask
    would otherwise get all splits that do not end.

    Keeps ``number`` (int64, the index in the list), ``id`` (utf8) and ``payload`` (binary) of the
    remaining splits. Raises ``InvalidInput`` for two splits with the same id.
    """

    columns = not_null(number=pa.int64(), id=pa.string(), payload=pa.binary())

    def __init__(self, splits: Callable[[], Iterable[Split]], *, shared_out: bool = False) -> None:
        self._make = splits
        self._shared_out = shared_out
        self._left: dict[int, Split] | None = None

    def __repr__(self) -> str:
        return brief(self)

    @property
    def left(self) -> dict[int, Split]:
        if self._left is None:
            self._left = dict(enumerate(self._make()))
            seen: set[str] = set()
            for split in self._left.values():
                if split.id in seen:
                    raise InvalidInput(f"two splits have the id {split.id!r}. Each needs its own")
                seen.add(split.id)
        return self._left

    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:
        for number in self.left:
            if not self._shared_out or number % parallelism == subtask:
                return self.left.pop(number)
        return NoSplit.NEVER

    def snapshot(self) -> pa.Table:
        return self.keeping(self.left)

    @classmethod
    def keeping(cls, left: Mapping[int, Split]) -> pa.Table:
        """Return the snapshot of an enumerator with these splits left, by index in the list."""
        rows = ({"number": number, "id": split.id, "payload": split.payload} for number, split in left.items())
        return table_from_python(rows, cls.columns, "the splits")

    def restore(self, rows: pa.Table) -> None:
        left = sorted(rows.select(self.columns.names).to_pylist(), key=lambda row: row["number"])
        self._left = {row["number"]: Split(row["id"], row["payload"]) for row in left}


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise ``InvalidInput`` unless the option is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInput(f"{name} is {value!r}. It takes a whole number, at least {least}")


def check_position(what: str, split: Split, rows: int) -> None:
    """Raise ``InvalidInput`` for a split of ``rows`` rows that is to be read beyond its end."""
    if not 0 <= split.position <= rows:
        raise InvalidInput(
            f"split {split.id!r} is to be read from row {split.position} and {what} has {rows}. It has changed since "
            "the checkpoint was taken. Put back what was there, or start the job afresh",
            kind=ErrorKind.SCHEMA_MISMATCH,
        )


BATCH_ROWS = 65_536
"""How many rows a batch of a source has by default."""


class MemorySource(Source):
    """Reads the rows of a table, in order.

    Example::

        names = pa.table({"carrier": ["AA"], "name": ["American"]})
        airlines = flow.source(MemorySource(names), uid="airlines")

    ``rows``: a table, a batch, or batches of one schema. They are divided into ``splits``
    contiguous parts whose sizes differ by at most one row, read in batches of at most
    ``batch_rows``. A position counts the rows of a part. Types are made plain as for
    ``ParquetSource``. Raises ``InvalidInput`` for an empty iterable of batches, which has no
    schema, for two columns of one name, and for times that are no whole microseconds.
    """

    def __init__(
        self,
        rows: pa.Table | pa.RecordBatch | Iterable[pa.RecordBatch],
        *,
        splits: int = 1,
        batch_rows: int = BATCH_ROWS,
    ) -> None:
        check_at_least("splits", splits, 1)
        check_at_least("batch_rows", batch_rows, 1)
        if isinstance(rows, pa.RecordBatch):
            rows = [rows]
        if not isinstance(rows, pa.Table):
            rows = _table(rows)
        what, schema = "a MemorySource", plain_schema(rows.schema)
        check_columns(what, schema)
        self._table = made_plain(what, rows, schema).combine_chunks()
        self._splits = splits
        self._batch_rows = batch_rows

    def __repr__(self) -> str:
        return brief(self, f"{self._table.num_rows:,} rows")

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    def enumerator(self) -> ListEnumerator:
        return ListEnumerator(self._parts)

    def _parts(self) -> Iterator[Split]:
        rows, extra = divmod(self._table.num_rows, self._splits)
        first = 0
        for number in range(self._splits):
            count = rows + (number < extra)
            if count:
                yield Split(f"part-{number:05d}", json.dumps({"first_row": first, "rows": count}).encode())
            first += count

    def behind(self, position: int) -> StartingPoint:
        """Begin after this many rows of the table. Raises ``InvalidInput`` if it has fewer."""
        check_at_least("the position of a MemorySource", position, 0)
        if position > self._table.num_rows:
            raise InvalidInput(f"the MemorySource has {self._table.num_rows} rows, and cannot begin behind {position}")
        begun, left = [], {}
        for number, split in enumerate(self._parts()):
            part = json.loads(split.payload)
            if part["first_row"] >= position:
                left[number] = split
            elif position < part["first_row"] + part["rows"]:
                begun.append(split._replace(position=position - part["first_row"]))
        return StartingPoint(ListEnumerator.keeping(left), tuple(begun), f"behind {position} rows")

    def read(self, split: Split, context: ReaderContext) -> Iterator[Chunk]:  # noqa: ARG002 - no clock is needed
        part = json.loads(split.payload)
        first, rows = part["first_row"], part["rows"]
        check_position("that part", split, min(rows, self._table.num_rows - first))
        position = split.position
        rest = self._table.slice(first + position, rows - position)
        for batch in rest.to_batches(max_chunksize=self._batch_rows):
            position += batch.num_rows
            yield Chunk(batch, position)


def _table(rows: object) -> pa.Table:
    try:
        batches = list(rows)  # type: ignore[call-overload]
        if batches:
            return pa.Table.from_batches(batches)
    except (TypeError, pa.ArrowException) as error:
        raise InvalidInput(
            f"{type(rows).__name__} holds no record batches of one schema: {error}. Give an Arrow table, like "
            "pa.table(…) or pa.Table.from_pandas(…)"
        ) from error
    raise InvalidInput("no batch is given, so the columns are unknown. Give a table, which may be empty")


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
