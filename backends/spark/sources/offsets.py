"""How far a source of DataFrames has been read: the interface that kinds of such sources implement.

A *position* says what has been read, and, if the source has an end, where that is. It is all that a
checkpoint keeps. An epoch reads what lies between two positions, both fixed before its job starts,
so a job that is run again reads the same rows. ``docs/spark-sources.md`` shows how Kafka fits in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from stateformat.graph import brief

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Position: TypeAlias = Mapping[str, int | str]
"""Names, each with a signed 64-bit number or a text: a partition and its offset, say."""


class Offsets(ABC):
    """Something of which Spark reads the rows between two positions. It stays in the driver.

    The object that a source is given is a prototype: each run works on a shallow copy.
    """

    bounded: bool = False
    """Whether there is a position at which it has :meth:`ended`."""

    remembers: bool = False
    """Whether a position gains names for as long as the job lives, such as files.

    Names that do not begin with "/" then lie in a log, to which a checkpoint adds those that have
    come, changed or gone. Otherwise each checkpoint has the whole position.
    """
    looks_ahead: bool = False
    """Whether :meth:`latest` is asked for the next epoch while one runs.

    It is called in a thread then, so it must not change what other methods use.
    """

    def __repr__(self) -> str:
        return brief(self)

    @abstractmethod
    def sample(self, spark: SparkSession) -> DataFrame:
        """A DataFrame with the columns that are read. Only its schema is used."""

    @abstractmethod
    def first(self, spark: SparkSession) -> Position:
        """Where reading begins. Called once in the life of a job, before anything is read.

        If the end is "what is there now", find it here and keep it in the position.
        """

    @abstractmethod
    def latest(self, spark: SparkSession, position: Position) -> Position:
        """How far the epoch that begins at ``position`` reads: at most what one epoch should take.

        Returns a new object, equal to ``position`` if nothing is there now.
        """

    @abstractmethod
    def frame(self, spark: SparkSession, start: Position, stop: Position) -> DataFrame:
        """The rows behind ``start`` up to ``stop``, in any order.

        Called for each try of an epoch, and returns the same rows each time.
        """

    def ended(self, position: Position) -> bool:  # noqa: ARG002 - what has no end has none anywhere
        """Whether everything has been read at this position, decided by the position alone."""
        return False

    def start_at(self, position: Position) -> Position:
        """Return a position that a user gave, behind which a job begins.

        Raises ``InvalidInput`` for one at which no job can begin.
        """
        return position

    def rows_estimate(self, start: Position, stop: Position) -> int | None:  # noqa: ARG002 - most kinds do not know
        """About how many rows lie between; None if unknown. 0 is exact: there are none."""
        return None

    def __str__(self) -> str:
        return type(self).__name__
