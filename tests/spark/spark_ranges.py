"""Sources of numbers for tests of ranges, and what a range of them holds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from stateformat.backends.dataflow import NoSplit
from stateformat.backends.spark.files import DirectoryFrames
from stateformat.backends.spark.offsets import Offsets, Position
from stateformat.backends.spark.source import Range, RangeEnumerator, SparkSource

ROWS = pa.schema([("n", pa.int64())])
NOON_MS = 1_700_000_000_000


class Folder:
    """A directory to which files of a few numbers are added, with times that the test chooses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(exist_ok=True)
        self.numbers: dict[str, list[int]] = {}

    def add(self, name: str, modified_ms: int, numbers: Sequence[int]) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f'{{"n": {n}}}\n' for n in numbers))
        os.utime(path, ns=(0, modified_ms * 1_000_000))
        self.numbers[name] = list(numbers)

    def source(self, **options: Any) -> SparkSource:
        files = DirectoryFrames(self.path, "json", schema="n bigint", **options)
        return SparkSource(files, transform=only_n, schema=ROWS)


def only_n(rows: Any) -> Any:
    return rows.select("n")


class Numbers(Offsets):
    """The numbers up to what ``there`` says, ``step`` at a time."""

    def __init__(self, there: list[int], *, end: int | None = None, step: int = 10) -> None:
        self.there = there
        self.end = end
        self.step = step
        self.bounded = end is not None

    def sample(self, spark: Any) -> Any:
        return spark.range(0).selectExpr("id as n")

    def first(self, spark: Any) -> Position:
        return {"to": 0}

    def latest(self, spark: Any, position: Position) -> Position:
        return {"to": min(self.there[0], int(position["to"]) + self.step)}

    def ended(self, position: Position) -> bool:
        return position["to"] == self.end

    def frame(self, spark: Any, start: Position, stop: Position) -> Any:
        return spark.range(start["to"], stop["to"]).selectExpr("id as n")


def numbers(spark: Any, found: Range | NoSplit) -> list[int]:
    """The numbers of a range, by a Spark job."""
    assert isinstance(found, Range)
    return sorted(row[0] for row in found.frame(spark).collect())


def names(spark: Any, found: Range | NoSplit) -> list[str]:
    """The files of a range: no job runs."""
    assert isinstance(found, Range)
    return sorted(os.path.basename(path) for path in found.frame(spark).inputFiles())  # noqa: PTH119


def ranges(spark: Any, enumerator: RangeEnumerator) -> Iterator[Range]:
    """All ranges that there are now."""
    while isinstance(found := enumerator.next_range(spark), Range):
        yield found


def restored(source: SparkSource, rows: pa.Table) -> RangeEnumerator:
    """An enumerator that goes on from a snapshot that needs no log."""
    enumerator = source.enumerator()
    enumerator.restore(rows)
    return enumerator
