"""How far a source of DataFrames has been read: the interface that kinds of such sources implement.

A *position* says what has been read, and where the source ends, if it does. A checkpoint stores
nothing else. An epoch reads the rows between two positions, both fixed before its job starts, so a
job that runs again reads the same rows. ``docs/spark-sources.md`` shows how Kafka fits in.

:class:`OffsetTable` is a table with a column that only grows, read in ranges of that column. A
range has the rows after offset *low* up to offset *high*, which is queried before the epoch. This
is exact if the table keeps two promises: a row never changes its offset and is not removed before
it is read, and **no row appears at or below an offset that has been read**. If transactions may
commit in another order than they got their numbers, read far enough behind (``lag``) that none of
them is still open. Its position is ``read``, the greatest offset that has been read, and ``until``,
if there is an end. Both are numbers (timestamps in µs, dates in days), or text for strings and
decimals.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import brief

from ..connectors.sources.basic import check_at_least

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType


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


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_US = datetime.timedelta(microseconds=1)
Step = int | datetime.timedelta


class OffsetKind(NamedTuple):
    """How offsets of a type are stored, and passed to Spark."""

    kept: Callable[[Column], Column]
    """From a column of values to one of numbers or text, as stored."""
    literal: Callable[[Any], Column]
    """From what is stored to a column of the value. Foldable, so that filters reach the files."""
    given: Callable[[Any], int | str]
    """From a value that a user gave to what is stored."""
    steps: bool = True
    """Whether offsets can be counted, for ``step`` and ``lag``."""
    order: Callable[[Any], Any] = lambda kept: kept
    """A sort key for stored offsets that gives Spark's order."""


class OffsetTable(Offsets):
    """Reads a table in ranges of its column ``offset``.

    Example::

        SparkSource(
            OffsetTable(
                lambda spark: spark.table("orders"), "order_id", rows_per_epoch=100_000, grows=True
            )
        )

    ``read``: returns the table, called again in each epoch. ``offset``: a column of whole numbers,
    dates, timestamps (with or without time zone), strings (in the order of their bytes) or
    decimals. Rows whose offset is null would never be read: they are refused when the job starts,
    and not read if they come later.

    An epoch reads ``rows_per_epoch`` rows (more if the last ones share an offset), or ``step`` of
    the offset (a whole number; a ``timedelta`` for times), or everything. ``since``: begin after
    this offset. ``until``: end at this offset, once the table has reached it; the default is the
    highest offset when the job starts. ``grows``: never end. ``lag``: how far to stay behind the
    highest offset, for rows that appear late.

    While an epoch runs, the table is queried for the end of the next one, so ``read`` is also
    called in another thread.

    Raises ``InvalidInput`` for options that contradict each other, and, when it is read, for a
    column that does not exist or has another type.
    """

    looks_ahead = True

    def __init__(
        self,
        read: Callable[[SparkSession], DataFrame],
        offset: str,
        *,
        rows_per_epoch: int | None = None,
        step: Step | None = None,
        since: Any = None,
        until: Any = None,
        grows: bool = False,
        lag: Step | None = None,
    ) -> None:
        if rows_per_epoch is not None and step is not None:
            raise InvalidInput(
                f"rows_per_epoch={rows_per_epoch} and step={step} both say how much an epoch reads. Give one."
            )
        if rows_per_epoch is not None:
            check_at_least("rows_per_epoch", rows_per_epoch, 1)
        if until is not None and grows:
            raise InvalidInput(f"until={until!r} says where the table ends, and grows that it does not. Give one.")
        if lag is not None and not grows:
            raise InvalidInput(
                f"lag={lag!r} is for a table that grows, and this one has an end. Give grows, or no lag."
            )
        self._read = read
        self._offset = offset
        self._rows_per_epoch = rows_per_epoch
        self._step = step
        self._since = since
        self._until = until
        self._lag = lag
        self.bounded = not grows

    def __repr__(self) -> str:
        return brief(self, self._offset)

    def __str__(self) -> str:
        return f"the table of offset {self._offset!r}"

    def sample(self, spark: SparkSession) -> DataFrame:
        return self._read(spark)

    def first(self, spark: SparkSession) -> Position:
        """Begin after ``since``. Reads the whole column once, to find nulls and the end."""
        from pyspark.sql import functions

        rows, kind = self._rows(spark)
        column = self._column(rows)
        newest, nulls = rows.agg(kind.kept(functions.max(column)), functions.count_if(column.isNull())).first()
        if nulls:
            raise InvalidInput(
                f"{nulls} rows of {self} have no offset, so they would never be read. Leave them out of what is read, "
                "or fill them in.",
                kind=ErrorKind.NULL_NOT_ALLOWED,
            )
        position: dict[str, int | str] = {}
        if self._since is not None:
            position["read"] = self._value(kind, "since", self._since)
        if self._until is not None:
            position["until"] = self._value(kind, "until", self._until)
            if "read" in position and kind.order(position["read"]) >= kind.order(position["until"]):
                raise InvalidInput(f"since={self._since!r} is not below until={self._until!r}: nothing lies between.")
        elif self.bounded:
            # A table without rows after `since` ends where it begins.
            end = [value for value in (newest, position.get("read")) if value is not None]
            position["until"] = max(end, key=kind.order, default="nothing")
            if newest is None:
                position["read"] = position["until"]
        return position

    def start_at(self, position: Position) -> Position:
        wanted = {"read", "until"} if self.bounded else {"read"}
        if {*position} != wanted:
            raise InvalidInput(
                f"the position of {self} has {', '.join(position) or 'no names'}. Give {' and '.join(sorted(wanted))}: "
                "the offset behind which it begins, and of a table with an end the one at which it ends."
            )
        return position

    def ended(self, position: Position) -> bool:
        return "until" in position and position.get("read") == position["until"]

    def latest(self, spark: SparkSession, position: Position) -> Position:
        """Query the table once, and once more if rows are counted."""
        from pyspark.sql import functions

        rows, kind = self._rows(spark)
        column = self._column(rows)
        behind = rows.where(self._behind(kind, column, position))
        least, newest = behind.agg(kind.kept(functions.min(column)), kind.kept(functions.max(column))).first()
        if newest is None:
            return position
        high = newest - self._steps(kind, "lag", self._lag) if self._lag is not None else newest
        if "until" in position:
            high = min(position["until"], high, key=kind.order)  # If equal, as the end is written.
        if kind.order(least) > kind.order(high):
            # No rows are left before the end, or before the lag.
            return {**position, "read": position["until"]} if "until" in position else position
        if self._step is not None:
            high = min(high, least + self._steps(kind, "step", self._step) - 1)
        elif self._rows_per_epoch is not None:
            wanted = behind.where(column <= kind.literal(high)).select(column.alias("offset")).orderBy("offset")
            high = wanted.limit(self._rows_per_epoch).agg(kind.kept(functions.max("offset"))).first()[0]
        return {**position, "read": high}

    def frame(self, spark: SparkSession, start: Position, stop: Position) -> DataFrame:
        rows, kind = self._rows(spark)
        column = self._column(rows)
        return rows.where(self._behind(kind, column, start) & (column <= kind.literal(stop["read"])))

    def _rows(self, spark: SparkSession) -> tuple[DataFrame, OffsetKind]:
        rows = self._read(spark)
        names = rows.schema.fieldNames()
        if names.count(self._offset) != 1:
            raise InvalidInput(
                f"{self} has {names.count(self._offset)} columns of that name among {', '.join(names)}. Name the one "
                "that grows.",
                kind=ErrorKind.SCHEMA_MISMATCH,
            )
        return rows, _kind_of(str(self), rows.schema[self._offset].dataType)

    def _column(self, rows: DataFrame) -> Column:
        return rows["`" + self._offset.replace("`", "``") + "`"]

    def _behind(self, kind: OffsetKind, column: Column, position: Position) -> Column:
        return column > kind.literal(position["read"]) if "read" in position else column.isNotNull()

    def _value(self, kind: OffsetKind, name: str, value: Any) -> int | str:
        try:
            return kind.given(value)
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise InvalidInput(f"{name}={value!r} is not an offset of {self}: {error}") from error

    def _steps(self, kind: OffsetKind, name: str, step: Step) -> int:
        count = step
        if isinstance(step, datetime.timedelta):
            count = step // (datetime.timedelta(days=1) if kind.given is _days else _US)
        if not kind.steps or not isinstance(count, int) or count < (name == "step"):
            raise InvalidInput(
                f"{name}={step!r} cannot be counted in offsets of {self}. Give a whole number, or a timedelta for "
                "times; read strings and decimals by rows_per_epoch."
            )
        return count


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("it must be a whole number")
    return value


def _days(value: Any) -> int:
    if isinstance(value, datetime.datetime):
        raise TypeError("it must be a date, without a time")
    return int((value - _EPOCH.date()).days)


def _instant(value: Any) -> int:
    return int((value - _EPOCH) // _US)


def _wall_time(value: Any) -> int:
    return int((value - _EPOCH.replace(tzinfo=None)) // _US)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("it must be a text")
    return value


def _kind_of(what: str, kind: DataType) -> OffsetKind:
    """Return how a type's offsets are stored. ``InvalidInput`` if it has no reliable order."""
    from pyspark.sql import functions as f, types

    if isinstance(kind, types.ByteType | types.ShortType | types.IntegerType | types.LongType):
        return OffsetKind(lambda c: c.cast("bigint"), lambda v: f.lit(v).cast(kind), _whole)
    if isinstance(kind, types.DateType):
        return OffsetKind(f.unix_date, lambda v: f.date_from_unix_date(f.lit(v).cast("int")), _days)
    if isinstance(kind, types.TimestampType):
        return OffsetKind(f.unix_micros, lambda v: f.timestamp_micros(f.lit(v).cast("bigint")), _instant)
    if isinstance(kind, types.TimestampNTZType):
        # Never through a timestamp with a zone: in wall time, some hours come twice or not at all.
        zero = f.expr("TIMESTAMP_NTZ'1970-01-01 00:00:00'")
        return OffsetKind(
            lambda c: f.timestamp_diff("MICROSECOND", zero, c),
            lambda v: f.timestamp_add("MICROSECOND", f.lit(v).cast("bigint"), zero),
            _wall_time,
        )
    if isinstance(kind, types.StringType) and kind == types.StringType():
        return OffsetKind(lambda c: c, f.lit, _text, steps=False)
    if isinstance(kind, types.DecimalType):
        return OffsetKind(
            lambda c: c.cast("string"),
            lambda v: f.lit(v).cast(kind),
            lambda v: str(Decimal(v)),
            steps=False,
            order=Decimal,
        )
    raise InvalidInput(
        f"{what} is of type {kind.simpleString()}. An offset is a whole number, a date, a timestamp, a string in the "
        "order of its bytes, or a decimal.",
        kind=ErrorKind.UNSUPPORTED_TYPE,
    )
