"""How far a source of DataFrames has been read, and what is read next: the interface that kinds of such sources implement.

Theory of operation. Everything is a matter of *positions*. A position says what has been read, and, where the source has an
end, where that is; it is small, plain, and all that a checkpoint keeps. An epoch reads what lies between two positions. Both
are fixed before the epoch's job starts, so a job that is run again reads the same rows, and a job that goes on from a checkpoint
begins exactly where that ended. Nothing else is remembered: what a kind keeps beside the position may only spare it work.

``docs/spark-sources.md`` shows how Kafka fits in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Position: TypeAlias = Mapping[str, int | str]
"""Names with a number (63 bits and a sign) or a text each: a partition and its offset, a file and its size, what the kind likes."""


class Offsets(ABC):
    """Something of which Spark can read the rows between two positions. Lives in the driver and is never sent anywhere.

    An object that is given to a source is a prototype: each run works on a shallow copy of its own.
    """

    bounded: bool = False
    """Whether there is a position at which it has :meth:`ended`."""

    @abstractmethod
    def sample(self, spark: SparkSession) -> DataFrame:
        """A DataFrame of the columns that are read, of which only the schema is looked at."""

    @abstractmethod
    def first(self, spark: SparkSession) -> Position:
        """Where reading begins. Called once in the life of a job, before anything is read: an end that is "what is there now"
        is found here, and kept in the position.
        """

    @abstractmethod
    def latest(self, spark: SparkSession, position: Position) -> Position:
        """How far the epoch that begins at ``position`` reads: at most what one epoch should take. Equal to ``position`` where
        there is nothing now. Returns another object; ``position`` is not changed.
        """

    @abstractmethod
    def frame(self, spark: SparkSession, start: Position, stop: Position) -> DataFrame:
        """The rows behind ``start`` up to ``stop``. Called again when an epoch is run again, and gives the same rows, in any order."""

    def ended(self, position: Position) -> bool:  # noqa: ARG002 - what has no end has none anywhere
        """Whether everything has been read at this position and there will be no more. Decided by the position alone."""
        return False

    def rows_estimate(self, start: Position, stop: Position) -> int | None:  # noqa: ARG002 - most kinds do not know
        """About how many rows lie between; None where that is not known. 0 is no estimate: there is certainly none."""
        return None

    def __str__(self) -> str:
        return type(self).__name__


__all__ = ["Offsets", "Position"]
