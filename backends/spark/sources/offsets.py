"""How far a source of DataFrames has been read: the interface that kinds of such sources implement.

A *position* says what has been read, and where the source ends, if it does. A checkpoint stores
nothing else. An epoch reads the rows between two positions, both fixed before its job starts, so a
job that runs again reads the same rows. ``docs/spark-sources.md`` shows how Kafka fits in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, TypeAlias

from stateformat.graph import brief

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Position: TypeAlias = Mapping[str, int | str]
"""Names, each with a signed 64-bit number or a string: for example partitions and offsets."""


class Offsets(ABC):
    """Rows that Spark can read between two positions. The object stays in the driver.

    The object given to a source is a prototype: each run uses a shallow copy.
    """

    bounded: bool = False
    """Whether it has a position at which it has :meth:`ended`."""

    remembers: bool = False
    """Whether a position gains names, such as files, as long as the job lives.

    If so, names that do not begin with "/" go to a log, and each checkpoint writes only those that
    were added, changed or removed. Otherwise each checkpoint writes the whole position.
    """
    looks_ahead: bool = False
    """Whether :meth:`latest` is called for the next epoch while an epoch runs.

    The call is then made in another thread, so it must not change what other methods use.
    """

    places: Collection[str] = ()
    """As :attr:`.Source.places`."""

    def __repr__(self) -> str:
        return brief(self)

    @abstractmethod
    def sample(self, spark: SparkSession) -> DataFrame:
        """Return a DataFrame with the columns to read. Only its schema is used."""

    @abstractmethod
    def first(self, spark: SparkSession) -> Position:
        """Return where reading begins. Called once in the life of a job, before anything is read.

        If the end is "what exists now", find it here and keep it in the position.
        """

    @abstractmethod
    def latest(self, spark: SparkSession, position: Position) -> Position:
        """Return where an epoch that begins at ``position`` ends. Limit here how much it reads.

        Returns a new object, equal to ``position`` if there is nothing to read now.
        """

    @abstractmethod
    def frame(self, spark: SparkSession, start: Position, stop: Position) -> DataFrame:
        """Return the rows after ``start`` up to ``stop``, in any order.

        Called for each attempt of an epoch, and must return the same rows each time.
        """

    def check(self, spark: SparkSession, start: Position, stop: Position) -> None:  # noqa: B027 - most have fixed rows
        """Raise ``InvalidInput`` unless the rows that Spark has read are those of this range.

        Called after they were read and before their checkpoint is published: for what may change
        while Spark reads it.
        """

    def ended(self, position: Position) -> bool:  # noqa: ARG002 - without an end, no position is one
        """Return whether everything has been read, judging by the position alone."""
        return False

    def start_at(self, position: Position) -> Position:
        """Return the position for a job that begins at a position given by a user.

        Raises ``InvalidInput`` if no job can begin there.
        """
        return position

    def rows_estimate(self, start: Position, stop: Position) -> int | None:  # noqa: ARG002 - most kinds do not know
        """Return about how many rows lie between; None if unknown; 0 only if there are none."""
        return None

    def __str__(self) -> str:
        return type(self).__name__
