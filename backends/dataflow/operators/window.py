"""Tumbling windows of event time; and the base of operators that drop rows by event time.

Accumulators of open windows are not in the state yet: the rows of a window are needed only when it
ends, and in a snapshot. Until then the accumulators of its batches are collected by window start.
They are merged when they have twice as many rows as the last merge left. So they take no more than
a few times the memory of the merged rows, and a row is merged only a few times, however many
arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import brief

from ..api import Descriptor, MapState, Operator, OperatorContext, SplitList, Timers
from .aggregate import Aggregation, key_names, plain
from .row_steps import check_columns


class DropsLate(Operator):
    """Counts what it drops, in the state ``dropped``: a row per subtask."""

    def __init__(self) -> None:
        self.late_records = 0
        self.untimed_records = 0
        """Rows whose event time is null."""

    @staticmethod
    def dropped() -> SplitList:
        """Return the state of the counts."""
        return SplitList("dropped", {"late_records": pa.int64(), "untimed_records": pa.int64()})

    @staticmethod
    def check_time(schema: pa.Schema, time: str) -> pa.DataType:
        """Return the type of a column with event time; ``InvalidInput`` for another type."""
        kind = schema.field(time).type
        if kind != pa.int64() and not (pa.types.is_timestamp(kind) and kind.unit == "us"):
            raise InvalidInput(
                f"the event time {time!r} is {kind}. Cast it to timestamp[us] or int64 (µs) before.",
                kind=ErrorKind.UNSUPPORTED_TYPE,
            )
        return kind

    def open(self, context: OperatorContext) -> None:
        """Restore the counts. After rescaling, they may be those of several subtasks, or none."""
        super().open(context)
        counted = context.entries("dropped").rows()
        self.late_records = pc.sum(counted["late_records"]).as_py() or 0
        self.untimed_records = pc.sum(counted["untimed_records"]).as_py() or 0

    def timed(self, batch: pa.RecordBatch, time: str) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
        """Return the rows that have an event time, and the times (µs). Counts the others."""
        times = batch.column(time).view(pa.int64())
        if times.null_count:
            batch = batch.filter(times.is_valid())
            self.untimed_records += times.null_count
            times = times.drop_null()
        return batch, times.to_numpy()

    def in_time(
        self, batch: pa.RecordBatch, times: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]
    ) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
        """Return the rows where the mask is true, and their times. Counts the others as late."""
        if mask.all():
            return batch, times
        self.late_records += int(len(mask) - mask.sum())
        return batch.filter(pa.array(mask)), times[mask]

    def snapshot(self) -> None:
        """Put the counts into the state."""
        counts = {"late_records": [self.late_records], "untimed_records": [self.untimed_records]}
        self.context.entries("dropped").replace(pa.record_batch(counts))


_ROWS_MIN: Final = 262_144
_PIECES_MAX: Final = 256


class _Window:
    """The accumulators of one window, in pieces."""

    def __init__(self) -> None:
        self.pieces: list[pa.RecordBatch] = []
        self.rows = 0
        self.merged = 0
        """Number of rows that the last merge left."""


class GatheredWindows:
    """Rows of key columns and accumulators, by window start."""

    def __init__(self, aggregation: Aggregation, key_count: int) -> None:
        self._aggregation = aggregation
        self._key_count = key_count
        self._windows: dict[int, _Window] = {}

    def add(self, start: int, rows: pa.RecordBatch) -> bool:
        """Take rows of a window; return whether the window is new."""
        window = self._windows.get(start)
        is_new = window is None
        if window is None:
            window = self._windows[start] = _Window()
        window.pieces.append(rows)
        window.rows += len(rows)
        if window.rows > max(_ROWS_MIN, 2 * window.merged) or len(window.pieces) == _PIECES_MAX:
            window.pieces = [self.merged(window.pieces)]
            window.rows = window.merged = len(window.pieces[0])
        return is_new

    def take(self, last: int | None = None) -> Iterator[tuple[int, list[pa.RecordBatch]]]:
        """Yield windows ordered by start, and forget them: all, or starts up to ``last``."""
        for start in sorted(self._windows):
            if last is not None and start > last:
                return
            yield start, self._windows.pop(start).pieces

    def merged(self, pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
        """Merge the rows of one window, so that each key occurs once."""
        if len(pieces) == 1:
            return pieces[0]
        rows = pa.concat_batches(pieces)
        keys, accumulated = rows.columns[: self._key_count], rows.select(rows.schema.names[self._key_count :])
        keys, accumulated = self._aggregation.regroup(keys, accumulated)
        return pa.RecordBatch.from_arrays([*keys, *accumulated.columns], schema=rows.schema)


_TIMES: Final = np.iinfo(np.int64)
_START, _END = "window_start", "window_end"
_GATHERED_MAX: Final = 256
"""A batch for more windows goes straight to the state: gathering costs a few µs per window."""


class TumblingWindow(DropsLate):
    """Aggregates by key and event-time window; windows start at multiples of their size.

    Example::

        hour_us = 3_600_000_000
        counts = TumblingWindow("origin", hour_us, "departed_at", {"flights": ("*", "count")})
        hourly = flights.key_by("origin").apply(counts, uid="hourly")

    - ``keys``: the columns that its input is keyed by, in that order.
    - ``time``: the column with the event time (timestamp[us] or int64 µs).
    - ``aggregates``: as for ``Aggregate``.
    - ``lateness_us``: how long a window waits after its end. Rows for a window that was already
      emitted are late, and dropped. So are those so near an end of int64, like the infinite times
      of databases, that no window holds them.

    Emits the key columns, ``window_start`` and ``window_end`` (of the type of ``time``; the end is
    exclusive), then the new columns: once for every key and window with records, when the watermark
    reaches the end of the window plus ``lateness_us``.

    States: ``windows``; ``ends``, its timers; ``dropped``, a row per subtask that counts
    ``late_records`` and ``untimed_records`` (event time null) since the job began, both int64.
    Raises ``InvalidInput`` for what cannot be aggregated.
    """

    def __init__(
        self,
        keys: str | Sequence[str],
        size_us: int,
        time: str,
        aggregates: Mapping[str, tuple[str, str]],
        *,
        lateness_us: int = 0,
    ) -> None:
        super().__init__()
        self._keys = key_names(keys)
        whole = all(isinstance(number, int) and not isinstance(number, bool) for number in (size_us, lateness_us))
        if not whole or size_us < 1 or lateness_us < 0 or size_us + lateness_us >= 1 << 63:
            raise InvalidInput(
                f"a window of {size_us!r} µs that waits {lateness_us!r} µs. Give whole numbers, the size at least 1, "
                "the lateness at least 0, and both together below 2**63."
            )
        self._aggregation = Aggregation(aggregates)
        taken = sorted({*self._keys, _START, _END} & set(aggregates))
        if taken:
            raise InvalidInput(f"{taken} are columns of every window. Give the new ones other names.")
        self._size_us = size_us
        self._lateness_us = lateness_us
        self._time = time
        self._accumulators = pa.schema([])
        self._output = pa.schema([])
        self._gathered = GatheredWindows(self._aggregation, len(self._keys))

    def __repr__(self) -> str:
        return brief(self, *self._keys, f"{self._size_us:,} us")

    def states(self, *inputs: pa.Schema) -> list[Descriptor]:
        """``windows`` by key and start (µs), ``ends``, ``dropped``."""
        self._learn(inputs[0])
        keys = [plain(inputs[0].field(name)) for name in self._keys]
        return [MapState("windows", keys, pa.int64(), self._accumulators), Timers("ends", keys), self.dropped()]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Return the keys, the window, the new columns."""
        self._learn(inputs[0])
        return self._output

    def _learn(self, schema: pa.Schema) -> None:
        check_columns(schema, [*self._keys, self._time], "a window")
        kind = self.check_time(schema, self._time)
        self._accumulators = self._aggregation.accumulators(schema)
        keys = [plain(schema.field(name)) for name in self._keys]
        window = [pa.field(_START, kind), pa.field(_END, kind)]
        self._output = pa.schema([*keys, *window, *self._aggregation.results(self._accumulators)])

    def open(self, context: OperatorContext) -> None:
        """Start with nothing gathered (a snapshot puts it into the state); restore the counts."""
        super().open(context)
        self._gathered = GatheredWindows(self._aggregation, len(self._keys))

    def process(self, batch: pa.RecordBatch, input: int) -> None:  # noqa: ARG002 - there is one
        """Drop late records, aggregate the others, and gather the result by window."""
        batch, starts = self._in_time(batch)
        if not batch.num_rows:
            return
        keys = [pa.array(starts), *(batch.column(name) for name in self._keys)]
        (start, *columns), new = self._aggregation.group(keys, batch, self._accumulators)
        rows = pa.RecordBatch.from_arrays([*columns, *new.columns], [*self._keys, *new.schema.names])
        begins = start.to_numpy()
        order = np.argsort(begins, kind="stable")
        ordered = begins[order]
        bounds = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(rows)]
        if len(bounds) > _GATHERED_MAX:
            self._keep(start, rows)
            return
        for first, end in pairwise(bounds):
            # A copy, so that an open window does not keep the rows of other windows in memory.
            part = rows if end - first == len(rows) else rows.take(pa.array(order[first:end]))
            self._gather(int(ordered[first]), part)

    def _gather(self, start: int, rows: pa.RecordBatch) -> None:
        """Hold the rows of a window. If it is new, one row's key sets the timer for its end."""
        if self._gathered.add(start, rows):
            self._set_timers(pa.array([start]), rows.slice(0, 1).columns[: len(self._keys)])

    def _set_timers(self, start: pa.Array, keys: Sequence[pa.Array]) -> None:
        ends = self._moved(start, self._size_us + self._lateness_us)
        self.context.timers("ends").set(pa.RecordBatch.from_arrays([*keys, ends], [*self._keys, "_timestamp"]))

    def _keep(self, start: pa.Array, rows: pa.RecordBatch) -> None:
        """Merge rows into the state ``windows``. A new entry sets the timer for its end."""
        keys, new = rows.columns[: len(self._keys)], rows.select(self._accumulators.names)
        is_new = np.zeros(0, np.bool_)

        def merged(old: pa.RecordBatch, found: npt.NDArray[np.bool_]) -> pa.RecordBatch:
            nonlocal is_new
            is_new = ~found
            return self._aggregation.merge(old, new)

        named = pa.RecordBatch.from_arrays([*keys, start], [*self._keys, "_map_key"])
        self.context.map_state("windows").update(named, merged)
        if is_new.any():
            fresh = named if is_new.all() else named.filter(pa.array(is_new))
            self._set_timers(fresh.column("_map_key"), fresh.columns[:-1])

    def _in_time(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
        """Return the records that are in time, and where their windows begin. Count the others."""
        batch, times = self.timed(batch, self._time)
        # What can be added to every start, and to the watermark, without leaving int64.
        wait_us = self._size_us + self._lateness_us
        inside = (times >= _TIMES.min + self._size_us) & (times <= _TIMES.max - wait_us)
        batch, times = self.in_time(batch, times, inside)
        starts = times - times % self._size_us
        return self.in_time(batch, starts, starts + wait_us > self.context.watermark)

    def on_timer(self, timers: pa.RecordBatch, name: str) -> pa.RecordBatch | None:  # noqa: ARG002 - there is one set
        """Emit windows that have ended, and delete them."""
        wait_us = self._size_us + self._lateness_us
        start = self._moved(timers.column("_timestamp"), -wait_us)
        rows = pa.RecordBatch.from_arrays(
            [*(timers.column(name) for name in self._keys), start], [*self._keys, "_map_key"]
        )
        accumulated, found = self.context.map_state("windows").pop(rows)
        ended = pa.RecordBatch.from_arrays(
            [*rows.columns, *accumulated.columns], [*rows.schema.names, *accumulated.schema.names]
        )
        # A window whose rows are all gathered has no entry.
        pieces = [ended if found.all() else ended.filter(pa.array(found))] if found.any() else []
        for begin, gathered in self._gathered.take(self.context.watermark - wait_us):
            for piece in gathered:
                columns, values = piece.columns[: len(self._keys)], piece.columns[len(self._keys) :]
                begins = pa.array(np.full(len(piece), begin))
                pieces.append(pa.RecordBatch.from_arrays([*columns, begins, *values], schema=ended.schema))
        return self._emitted(pa.concat_batches(pieces), several=len(pieces) > 1) if pieces else None

    def _emitted(self, rows: pa.RecordBatch, *, several: bool) -> pa.RecordBatch:
        """Return what to emit for rows of key columns, begin and accumulators.

        Rows of one key and begin become one.
        """
        (*keys, start), values = rows.columns[: len(self._keys) + 1], rows.select(self._accumulators.names)
        if several:
            (*keys, start), values = self._aggregation.regroup([*keys, start], values)
            order = pa.array(np.argsort(start.to_numpy(), kind="stable"))
            (*keys, start), values = [column.take(order) for column in (*keys, start)], values.take(order)
        end = self._moved(start, self._size_us)
        kind = self._output.field(_START).type
        results = self._aggregation.finish(values.columns)
        return pa.RecordBatch.from_arrays([*keys, start.view(kind), end.view(kind), *results], schema=self._output)

    @staticmethod
    def _moved(times: pa.Array, by_us: int) -> pa.Array:
        return pa.array(times.to_numpy() + by_us)

    def snapshot(self) -> None:
        """Put what was gathered, and the counts, into the state."""
        gathered = [(start, self._gathered.merged(pieces)) for start, pieces in self._gathered.take()]
        if gathered:
            starts = np.repeat([start for start, _ in gathered], [len(rows) for _, rows in gathered])
            self._keep(pa.array(starts), pa.concat_batches([rows for _, rows in gathered]))
        super().snapshot()
