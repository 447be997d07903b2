"""Tumbling windows of event time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import InvalidInput
from stateformat.graph import brief

from ..api import Descriptor, MapState, Timers
from .accumulators import Aggregation
from .aggregate import key_names, plain
from .late import DropsLate
from .row_steps import check_columns

_START, _END = "window_start", "window_end"


class TumblingWindow(DropsLate):
    """Aggregates by key and window of event time; windows begin at multiples of their size.

    Example::

        hour_us = 3_600_000_000
        counts = TumblingWindow("origin", hour_us, "departed_at", {"flights": ("*", "count")})
        hourly = flights.key_by("origin").apply(counts, uid="hourly")

    - ``keys``: the columns that its input is keyed by, in that order.
    - ``time``: the column with the event time (timestamp[us] or int64 µs).
    - ``aggregates``: as for ``Aggregate``.
    - ``lateness_us``: how long a window waits behind its end. What comes for a window that was
      emitted is late, and dropped.

    Emits the key columns, ``window_start`` and ``window_end`` (of the type of ``time``; the end is
    not part of the window), then the new columns: once for every key and window with records, when
    the watermark reaches the end of the window plus ``lateness_us``.

    States: ``windows``; ``ends``, its timers; ``dropped``, a row per subtask that counts
    ``late_records`` and ``untimed_records`` (event time null) since the job began. Raises
    ``InvalidInput`` for what cannot be aggregated.
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

    def __repr__(self) -> str:
        return brief(self, *self._keys, f"{self._size_us:,} us")

    def states(self, *inputs: pa.Schema) -> list[Descriptor]:
        """``windows`` by key and begin (µs), ``ends``, ``dropped``."""
        self._learn(inputs[0])
        keys = [plain(inputs[0].field(name)) for name in self._keys]
        return [MapState("windows", keys, pa.int64(), self._accumulators), Timers("ends", keys), self.dropped()]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """The keys, the window, the new columns."""
        self._learn(inputs[0])
        return self._output

    def _learn(self, schema: pa.Schema) -> None:
        check_columns(schema, [*self._keys, self._time], "a window")
        kind = self.check_time(schema, self._time)
        self._accumulators = self._aggregation.accumulators(schema)
        keys = [plain(schema.field(name)) for name in self._keys]
        window = [pa.field(_START, kind), pa.field(_END, kind)]
        self._output = pa.schema([*keys, *window, *self._aggregation.results(self._accumulators)])

    def process(self, batch: pa.RecordBatch, input: int) -> None:  # noqa: ARG002 - there is one
        """Merge a batch into its windows, but for late records."""
        batch, starts = self._in_time(batch)
        if not batch.num_rows:
            return
        aggregation = self._aggregation
        keys = [pa.array(starts), *(batch.column(name) for name in self._keys)]
        (start, *columns), new = aggregation.group(keys, batch, self._accumulators)
        rows = pa.RecordBatch.from_arrays([*columns, start], [*self._keys, "_map_key"])
        windows = self.context.map_state("windows")
        old, found = windows.find(rows)
        merged = aggregation.merge(old, new)
        windows.put(
            pa.RecordBatch.from_arrays([*rows.columns, *merged.columns], [*rows.schema.names, *new.schema.names])
        )
        if not found.all():
            # A window has a timer from its first record on.
            fresh = rows.filter(pa.array(~found))
            self.context.timers("ends").set(
                pa.RecordBatch.from_arrays(
                    [*fresh.columns[:-1], self._moved(fresh.column("_map_key"), self._size_us + self._lateness_us)],
                    [*self._keys, "_timestamp"],
                )
            )

    def _in_time(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
        """The records that are in time, and where their windows begin. Counts the others."""
        batch, times = self.timed(batch, self._time)
        starts = times - times % self._size_us
        return self.in_time(batch, starts, starts + (self._size_us + self._lateness_us) > self.context.watermark)

    def on_timer(self, timers: pa.RecordBatch, name: str) -> pa.RecordBatch:  # noqa: ARG002 - there is one set
        """Emit windows that have ended, and forget them."""
        start = self._moved(timers.column("_timestamp"), -self._size_us - self._lateness_us)
        keys = [timers.column(name) for name in self._keys]
        rows = pa.RecordBatch.from_arrays([*keys, start], [*self._keys, "_map_key"])
        windows = self.context.map_state("windows")
        accumulated, _ = windows.find(rows)
        windows.delete(rows)
        end = self._moved(start, self._size_us)
        kind = self._output.field(_START).type
        values = self._aggregation.finish(accumulated.columns)
        return pa.RecordBatch.from_arrays([*keys, start.view(kind), end.view(kind), *values], schema=self._output)

    @staticmethod
    def _moved(times: pa.Array, by_us: int) -> pa.Array:
        return pa.array(times.to_numpy() + by_us)
