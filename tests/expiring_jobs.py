"""A job whose states expire, and what comes out of it, worked out in plain Python.

It has one reader, which sends a watermark behind each of its batches. So what time it is when a row
is processed depends on the rows alone, whoever runs the job; but for a restart, after which time
may stand still for a batch. So it is also told of each row when it was processed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

import stateformat as sf
from stateformat.backends import dataflow as df
from tests.conformance import Calls, Gated, Out, Told
from tests.conformance_jobs import KINDS, kinds
from tests.local_jobs import KEY, ROWS

LIVES_US = 100
VALUE = {"value": pa.int64()}


class Remembers(Told):
    """Says of each row what its states know of the key: (kind, number of the row, what)."""

    def __init__(
        self, calls: Calls, clock: Any = "event_time", lives_us: int = LIVES_US, drops: Sequence[str] = ()
    ) -> None:
        super().__init__(calls)
        self.clock, self.lives_us, self.drops = clock, lives_us, drops

    def states(self, *inputs: pa.Schema) -> Sequence[df.Descriptor]:
        written = sf.Ttl(self.lives_us, self.clock) if self.clock else None
        read = sf.Ttl(self.lives_us, self.clock, "read_and_write") if self.clock else None
        return [
            df.ValueState("written", KEY, VALUE, ttl=written, drops=self.drops),
            df.ValueState("read", KEY, VALUE, ttl=read, drops=self.drops),
            df.MapState("map", KEY, pa.int64(), VALUE, ttl=written, drops=self.drops),
            df.ListState("list", KEY, VALUE, ttl=written, drops=self.drops),
            df.Timers("timers", KEY, VALUE),
        ]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return KINDS

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        super().process(batch, input)
        context, found = self.context, []
        for row in batch.to_pylist():
            key, value = row["key"], row["value"]
            known = [(name, context.value_state(name).get_one(key)) for name in ("written", "read")]
            found += [(name, value, -1 if old is None else old["value"]) for name, old in known]
            now_us = context.processing_time_us if self.clock == "processing_time" else context.watermark
            found.append(("now", value, now_us))
            found.append(("map", value, sum(context.map_state("map").get_one(key))))
            found.append(("list", value, sum(item["value"] for item in context.list_state("list").get_one(key))))
            if value % 3 == 0:
                context.value_state("written").put_one(key, value=value)
                context.map_state("map").put_one(key, value % 10, value=value)
            if value % 3 == 1:
                context.list_state("list").append_one(key, value=value)
                context.value_state("read").put_one(key, value=value)
            # Long after all that was known of the key has expired.
            context.timers("timers").set_one(key, row["at"] + 3 * self.lives_us, str(value), value=value)
        return kinds(found)

    def on_timer(self, timers: pa.RecordBatch, name: str) -> df.Output:
        return kinds(("timer", row["value"], 0) for row in timers.to_pylist())


def some_rows(seed: int, count: int) -> list[pa.RecordBatch]:
    """Batches of rows in order of time, each with a few rows of one moment.

    Three come first, each with a key of its own: before there is a watermark.
    """
    chance, at = random.Random(seed), 1_000
    left = list(range(3, count))
    rows = [[{"key": 100 + number, "value": number, "at": at}] for number in range(3)]
    while left:
        at += chance.choice([0, 5, 20, 60, 120])
        taken, left = left[: (size := chance.randrange(1, 5))], left[size:]
        rows.append([{"key": chance.randrange(4), "value": number, "at": at} for number in taken])
    return [pa.RecordBatch.from_pylist(some, schema=ROWS) for some in rows]


class ExpiringJob:
    """A stream by key, with a gate: what :class:`Remembers` says, what passes within a while."""

    def __init__(self, directory: Any, *, seed: int = 1, count: int = 60, shut: bool = True) -> None:
        self.batches = some_rows(seed, count)
        self.stream = Gated(directory / "stream", self.batches, shut=shut)
        self.calls = Calls(directory)
        self.out, self.once = Out(), Out()
        self.expected_once = _once(self.batches)

    def flow(self, parallelism: int, **options: Any) -> df.Dataflow:
        made = df.Dataflow("expiring", parallelism=parallelism)
        by_key = made.source(self.stream, uid="in", parallelism=1, event_time="at").key_by("key")
        by_key.apply(Remembers(self.calls, **options), uid="op").apply(self.out, uid="out", parallelism=2, chain=False)
        once = by_key.deduplicate(within=LIVES_US, time="at", uid="once")
        once.apply(self.once, uid="once out", parallelism=2, chain=False)
        return made

    def primed(self, newest_id: Callable[[], int]) -> Iterator[None]:
        """Let the first batches be read, and wait until there is a watermark."""
        self.stream.let(0, 3)
        while len(self.once.seen) < 3:
            yield
        # The reader on Spark hears after the first epoch that it has all splits.
        enough = newest_id() + 1
        while newest_id() < enough:
            yield

    @property
    def times(self) -> dict[int, int]:
        """What time it was at each row, by its number."""
        return {number: time for kind, number, time in self.out.seen if kind == "now"}

    def check(self, *, restarted: bool = True, lives_us: int = LIVES_US) -> None:
        """All of the stream has been read, and everything has come out once."""
        times = self.times
        expected = said(self.batches, times, lives_us)
        expected.update(("now", number, time) for number, time in times.items())
        assert (self.out.seen - expected, expected - self.out.seen) == (Counter(), Counter())
        assert self.once.seen == self.expected_once
        if not restarted:
            # After a restart, time may stand still for a batch.
            at = [batch["at"][0].as_py() for batch in self.batches]
            assert {times[number] for number in self.batches[3]["value"].to_pylist()} == {1_000}
            for batch, before in zip(self.batches[4:], at[3:], strict=False):
                assert {times[number] for number in batch["value"].to_pylist()} == {before}


class _Memory:
    """Values of keys, each of which lives for a while after its last access."""

    def __init__(self, lives_us: int) -> None:
        self._lives_us = lives_us
        self._known: dict[Any, tuple[int, int]] = {}

    def get(self, key: Any, now: int) -> int | None:
        value, time = self._known.get(key, (None, now))
        return None if time + self._lives_us <= now else value

    def put(self, key: Any, value: int, now: int) -> None:
        self._known[key] = (value, now)


def said(batches: Sequence[pa.RecordBatch], times: Mapping[int, int], lives_us: int = LIVES_US) -> Counter[Any]:
    """What :class:`Remembers` says of batches; ``times``: what its clock says at each row.

    What is said before there is a time is of keys that do not come again.
    """
    memories = {name: _Memory(lives_us) for name in ("written", "read", "map", "list")}
    found: list[tuple[Any, ...]] = []
    for batch in batches:
        for row in batch.to_pylist():
            key, value, now = row["key"], row["value"], times[row["value"]]
            for name in ("written", "read"):
                known = memories[name].get(key, now)
                found.append((name, value, -1 if known is None else known))
                if known is not None and name == "read":
                    memories[name].put(key, known, now)
            entries = [number for number in range(10) if memories["map"].get((key, number), now) is not None]
            found.append(("map", value, sum(entries)))
            elements = [memories["list"].get((key, number), now) for number in range(value)]
            found.append(("list", value, sum(element for element in elements if element is not None)))
            if value % 3 == 0:
                memories["written"].put(key, value, now)
                memories["map"].put((key, value % 10), value, now)
            if value % 3 == 1:
                memories["list"].put((key, value), value, now)
                memories["read"].put(key, value, now)
            found.append(("timer", value, 0))
    return Counter(found)


def _once(batches: Sequence[pa.RecordBatch]) -> Counter[tuple[Any, ...]]:
    passed: dict[int, int] = {}
    found: list[tuple[Any, ...]] = []
    for row in (row for batch in batches for row in batch.to_pylist()):
        if row["key"] not in passed or row["at"] >= passed[row["key"]] + LIVES_US:
            passed[row["key"]] = row["at"]
            found.append(tuple(row.values()))
    return Counter(found)
