"""The job of ``apply_per_key`` that both executors run, with what has to come out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from stateformat.backends import dataflow as df
from stateformat.backends.dataflow.events import MAX_WATERMARK
from tests.conformance import Calls, Gated, Out, Stage
from tests.conformance_jobs import KINDS
from tests.local_jobs import ROWS, rows

VALUES = range(60)
STATES = [
    df.ValueState("sum", (), {"n": pa.int64(), "values": pa.list_(pa.int64())}),
    df.MapState("parts", (), pa.int64(), {"value": pa.int64()}),
    df.ListState("held", (), {"value": pa.int64(), "text": pa.string()}),
]


class Gathered:
    """Adds the rows of a key up in every kind of state, and lets them out by timers."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __call__(self, key: int, rows: list[tuple[int, int, int]], state: Any, timers: Any) -> None:
        assert rows
        for _, value, _ in rows:
            self._calls.obey(f"value {value}")
            state.sum.n = (state.sum.n or 0) + value
            state.sum.values = [*(state.sum.values or ()), value]
            state.parts[value % 3] = value
            state.held.append((value, f"v{value}"))
            if value % 7 == 0:
                state.parts.pop(2, None)
                state.held.clear()
            timers.set(value + 5)
            timers.set(MAX_WATERMARK)

    def on_timer(self, key: int, timestamp: int, state: Any) -> Iterator[tuple[str, int, int]]:
        if timestamp < MAX_WATERMARK:
            yield "timer", key, timestamp - 5
            return
        yield "sum", key, state.sum.n
        yield from (("value", key, value) for value in state.sum.values)
        yield from (("part", 10 * key + part, value) for part, value in state.parts.items())
        yield from (("held", key, held.value) for held in state.held)
        state.sum = None
        state.parts.clear()
        del state.held[:]


def expected() -> Counter[tuple[Any, ...]]:
    """What comes out, by plain Python."""
    found: Counter[tuple[Any, ...]] = Counter()
    for key in range(4):
        own = [value for value in VALUES if value % 4 == key]
        parts: dict[int, int] = {}
        held: list[int] = []
        for value in own:
            parts[value % 3] = value
            held.append(value)
            if value % 7 == 0:
                parts.pop(2, None)
                held = []
        found.update(("timer", key, value) for value in own)
        found.update(("value", key, value) for value in own)
        found.update(("held", key, value) for value in held)
        found.update(("part", 10 * key + part, value) for part, value in parts.items())
        found["sum", key, sum(own)] += 1
    return found


class PerKeyJob:
    """A stream by key and its timers, with a gate, into :class:`Gathered`."""

    def __init__(self, stage: Stage, *, shut: bool = False) -> None:
        values = list(VALUES)
        self.source = Gated(stage.directory / "in", [rows(*values[n : n + 5]) for n in range(0, 60, 5)], shut=shut)
        self.calls, self.out = stage.calls, Out()

    def flow(self, parallelism: int) -> df.Dataflow:
        made = df.Dataflow("per key", parallelism=parallelism)
        read = made.source(self.source, uid="in", parallelism=1, event_time="at").key_by("key")
        gathered = read.apply_per_key(Gathered(self.calls), output=KINDS, state=STATES, timers="event_time", uid="op")
        gathered.apply(self.out, uid="out", parallelism=2, chain=False)
        return made


class CallsOfEpochs:
    """Tells of each call; rows come in many small batches from two senders."""

    def __init__(self, stage: Stage) -> None:
        batches = [[rows(*range(n, 40, 8)) for n in range(start, 8, 2)] for start in (0, 1)]
        self.source = Gated(stage.directory / "in", *batches)
        self.calls, self.out = stage.calls, Out()

    def __call__(self, key: int, rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        self.calls.tell("fn", f"key {key}")
        return rows

    def flow(self) -> df.Dataflow:
        made = df.Dataflow("calls", parallelism=2)
        by_key = made.source(self.source, uid="in").map(unchanged, uid="map").key_by("key")
        by_key.apply_per_key(self, output=ROWS, uid="op").apply(self.out, uid="out")
        return made


def unchanged(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch
