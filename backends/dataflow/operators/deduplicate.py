"""Pass the first row of every key, forever or for a limited time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import stateformat as sf
from stateformat.errors import InvalidInput
from stateformat.graph import brief
from stateformat.segments import row_key_codes
from stateformat.ttl import NO_TIME_US, TIME_MAX_US

from ..api import Descriptor, Duration, OperatorContext, ValueState, microseconds
from .aggregate import key_names, plain
from .row_steps import check_columns
from .window import DropsLate


class Deduplicate(DropsLate):
    """Passes the first row of each key and drops the others: forever, or for a limited time.

    Example::

        hour_us = 3_600_000_000
        once = orders.key_by("order_id").apply(
            Deduplicate("order_id", within=hour_us, time="ordered_at"), uid="once"
        )

    - ``keys``: the columns that its input is keyed by, in that order.
    - ``within``: for how long (µs, or a timedelta) a row that passed blocks others of its key.
      None: forever, and the state never shrinks.
    - ``time``: the column with the event time (timestamp[us] or int64 µs). A row passes if its time
      is at least ``within`` after that of the last row of its key that passed. This depends only on
      the rows of a key and their order. Rows older than the watermark are late: whether an earlier
      row passed may be forgotten, so they are dropped, as in Spark's
      ``dropDuplicatesWithinWatermark``. Times after June 2255 count as that moment.
    - Without ``time``, ``within`` is in processing time.

    Emits the columns of its input. States: ``seen``, an expiring row per key; with ``time`` also
    ``dropped``, a row per subtask that counts ``late_records`` and ``untimed_records`` (event time
    null) since the job began, both int64. If ``within`` is added to a job that had none, all known
    keys count as passed at that moment. Raises ``InvalidInput`` when the dataflow is built.
    """

    def __init__(self, keys: str | Sequence[str], *, within: Duration | None = None, time: str | None = None) -> None:
        super().__init__()
        self._keys = key_names(keys)
        self._time = time
        self._ttl: sf.Ttl | None = None
        if within is not None:
            within_us = microseconds("within of removing duplicates", within)
            self._ttl = sf.Ttl(within_us, "processing_time" if time is None else "event_time")
        elif time is not None:
            raise InvalidInput(f"removing duplicates by the time {time!r} needs within. Give both, or leave out time.")

    def __repr__(self) -> str:
        return brief(self, *self._keys, *([] if self._ttl is None else [f"{self._ttl.duration_us:,} us"]))

    def states(self, *inputs: pa.Schema) -> list[Descriptor]:
        """``seen``: the keys, each with the column ``seen``, which is true; and ``dropped``."""
        self._check(inputs[0])
        keys = [plain(inputs[0].field(name)) for name in self._keys]
        seen = ValueState("seen", keys, {"seen": pa.bool_()}, ttl=self._ttl)
        if self._time is None:
            return [seen]
        return [seen, self.dropped()]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Return the columns of its input."""
        self._check(inputs[0])
        return inputs[0]

    def _check(self, schema: pa.Schema) -> None:
        check_columns(schema, self._keys, "removing duplicates")
        if self._time is not None:
            check_columns(schema, [self._time], "removing duplicates")
            self.check_time(schema, self._time)

    def open(self, context: OperatorContext) -> None:
        """Start. With ``time``, restore the counts of dropped rows."""
        if self._time is None:
            self.context = context
        else:
            super().open(context)

    def snapshot(self) -> None:
        """With ``time``, put the counts of dropped rows into the state."""
        if self._time is not None:
            super().snapshot()

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch | None:  # noqa: ARG002 - there is one
        """Drop rows whose key was seen before, in an earlier batch or in this one."""
        if self._time is not None:
            return self._spread_out(batch, self._time)
        if not batch.num_rows:
            return None
        keys = batch.select(self._keys)
        rows = pa.array(_first_of_each(keys))
        keys, batch = keys.take(rows), batch.take(rows)
        seen = self.context.value_state("seen")
        _, found = seen.get(keys)
        if found.all():
            return None
        if found.any():
            new = pa.array(~found)
            keys, batch = keys.filter(new), batch.filter(new)
        seen.put(keys, _seen(keys.num_rows))
        return batch

    def _spread_out(self, batch: pa.RecordBatch, time: str) -> pa.RecordBatch | None:
        """Return the rows that pass, by event time."""
        assert self._ttl is not None
        batch, times = self.timed(batch, time)
        batch, times = self.in_time(batch, times, times >= self.context.watermark)
        seen = self.context.value_state("seen")
        if batch.num_rows:
            # A row too close to one that passed in an earlier batch is dropped in any case.
            _, found = seen.get(batch.select(self._keys), at=pa.array(times))
            batch, times = batch.filter(pa.array(~found)), times[~found]
        if not batch.num_rows:
            return None
        keys = batch.select(self._keys)
        # As a time to live counts, so that batches do not matter: no further than 2**53.
        times = np.clip(times, NO_TIME_US + 1, TIME_MAX_US)
        passing = pa.array(_spaced(keys, times, self._ttl.duration_us))
        keys, batch = keys.take(passing), batch.take(passing)
        seen.put(keys, _seen(keys.num_rows), at=pa.array(times).take(passing))
        return batch


def _seen(rows: int) -> pa.RecordBatch:
    return pa.record_batch({"seen": pa.repeat(True, rows)})


def _first_of_each(keys: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Return the first row of each key, ascending."""
    _, first = np.unique(row_key_codes(keys.columns), return_index=True)
    return np.sort(first)


def _spaced(keys: pa.RecordBatch, times: npt.NDArray[np.int64], within_us: int) -> npt.NDArray[np.int64]:
    """Return the first row of each key, then the next one ``within_us`` or more later, and so on.

    The row numbers ascend.
    """
    if int(times.max()) - int(times.min()) < within_us:
        return _first_of_each(keys)
    codes = row_key_codes(keys.columns)
    by_key = np.argsort(codes, kind="stable")
    codes, times = codes[by_key], times[by_key]
    count = len(times)
    # A row that passes is the latest of its key so far. So the next one to pass is the first at
    # which the running maximum of the times reaches its own time plus ``within_us``. Key and time
    # are combined into one number, so a single search finds it for all rows.
    known, ranks = np.unique(times, return_inverse=True)
    bases = codes.astype(np.int64) * (len(known) + 1)
    latest = np.maximum.accumulate(bases + ranks)
    wanted = np.full(count, len(known))
    some = times <= known[-1] - within_us
    wanted[some] = np.searchsorted(known, times[some] + within_us, "left")
    following = np.searchsorted(latest, bases + wanted, "left")
    following[codes[np.minimum(following, count - 1)] != codes] = count
    following = np.append(following, count)
    passes = np.zeros(count + 1, np.bool_)
    passes[np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))] = True
    # Each round doubles how many steps ``following`` takes.
    reached = 0
    while (now := int(passes.sum())) > reached:
        reached = now
        passes[following[np.flatnonzero(passes)]] = True
        following = following[following]
    return np.sort(by_key[passes[:count]])
