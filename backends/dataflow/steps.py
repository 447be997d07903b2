"""A dataflow as data: its steps, and how records reach them. ``flow`` has what users call."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from stateformat.graph import Partitioner, brief

from .api import EventTime, Operator, Source


class Feedback:
    """What a loop feeds back: columns, and the step whose output it is once it is closed."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.tail: str | None = None


@dataclass(frozen=True, repr=False)
class Input:
    """One input of a step."""

    source: str | Feedback
    schema: pa.Schema
    partitioner: Partitioner | None = None
    """None: forward where both sides have the same parallelism, else rebalance."""
    key_columns: tuple[str, ...] = ()

    def __repr__(self) -> str:
        how = "" if self.partitioner is None else self.partitioner.value
        source = self.source if isinstance(self.source, str) else repr(self.source)
        return brief(self, *filter(None, (source, how, *self.key_columns)))


@dataclass(frozen=True, repr=False)
class Step:
    """A source or operator with its place in a dataflow."""

    uid: str
    logic: Source | Operator
    inputs: tuple[Input, ...]
    schema: pa.Schema
    name: str = ""
    parallelism: int | None = None
    max_parallelism: int | None = None
    chain: bool = True
    event_time: EventTime | None = None
    idle_after: int | None = None
    """Of a source: after how long without rows a split holds no time up, µs."""

    def __repr__(self) -> str:
        return brief(self, self.uid, repr(self.logic))


class Steps:
    """The steps of a job by uid, in the order in which they were added."""

    def __init__(self, job_id: str, name: str, parallelism: int | None) -> None:
        self.job_id = job_id
        self.name = name
        self.parallelism = parallelism
        self.steps: dict[str, Step] = {}
