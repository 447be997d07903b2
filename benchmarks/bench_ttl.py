"""Calls of value state whose rows expire, against the same calls of one whose rows do not.

1M keys of (int64, int64) in memory; twenty batches of 50,000 keys, drawn at random, each at its own
moment. Where half has expired, the other side has deleted as many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pyarrow as pa

import stateformat as sf
from benchmarks.measuring import Row, compare
from stateformat.backends.state import KeyedValue, SubtaskStates
from stateformat.graph import Operator, OperatorId
from stateformat.states import declare

KEYS, BATCH, BATCHES = 1_000_000, 50_000, 20
HOUR_US = 3_600_000_000
OPERATOR = Operator(OperatorId("op"), 1, 128)
LABEL = "without a ttl"
ROUNDS = 9
Call = Callable[[KeyedValue, pa.RecordBatch], object]
CALLS: dict[str, Call] = {
    "get": lambda state, batch: state.get(batch),
    "put": lambda state, batch: state.put(batch, batch.select(["v"])),
    "update": lambda state, batch: state.update(batch, lambda old, found: batch.select(["v"])),  # noqa: ARG005
    "add": lambda state, batch: state.add(batch, batch, {"v": "sum"}),
}
CASES: tuple[tuple[str, sf.Ttl, bool, str], ...] = (
    ("nothing has expired", sf.Ttl(HOUR_US), False, "≤ 1.2 ×"),
    ("half has expired", sf.Ttl(HOUR_US), True, "≤ 1.2 ×"),
    ("reads count as accesses", sf.Ttl(HOUR_US, "event_time", "read_and_write"), False, ""),
)


class Side:
    """A state with all keys, and its clock."""

    def __init__(self, ttl: sf.Ttl | None, *, half: bool) -> None:
        declared = declare.value_state("op", "v", keys={"k": pa.int64()}, values={"v": pa.int64()}, ttl=ttl)
        self.states = SubtaskStates(OPERATOR, 0, [declared])
        self.states.begin(1)
        self.now_us = 0
        for number, start in enumerate(range(0, KEYS, BATCH)):
            self.at(1 if half and number < BATCHES // 2 else HOUR_US // 2)
            keys = np.arange(start, start + BATCH)
            CALLS["put"](self.states.value("v"), pa.record_batch({"k": keys, "v": keys}))
        self.at(HOUR_US + 1)
        if half and ttl is None:
            self.states.value("v").delete(pa.record_batch({"k": np.arange(KEYS // 2)}))

    def at(self, now_us: int) -> None:
        self.now_us = now_us
        self.states.advance(event_time_us=now_us, processing_time_us=0)

    def play(self, call: Call, batches: list[pa.RecordBatch]) -> None:
        for batch in batches:
            self.at(self.now_us + 1)
            call(self.states.value("v"), batch)


def measure(line: str = "") -> Iterator[Row]:
    random = np.random.default_rng(0)
    batches = [pa.record_batch({"k": random.integers(0, KEYS, BATCH), "v": np.arange(BATCH)}) for _ in range(BATCHES)]
    for case, ttl, half, budget in CASES:
        for name, call in CALLS.items():
            what = f"`{name}` of value state with a ttl, {KEYS:,} keys, {case}"
            if line not in what:
                continue
            ours, plain = Side(ttl, half=half), Side(None, half=half)
            sides = partial(ours.play, call, batches), partial(plain.play, call, batches)
            yield compare(what, *sides, label=LABEL, budget=budget, rounds=ROUNDS)
