"""A table with a column that only grows, read by ranges of it.

Theory of operation. The rows behind offset *low* up to *high*, (low, high], are one range; *high* is asked of the table before the epoch.
That is exact as long as the table keeps two promises, which nobody can check from outside: a row never changes its offset
and is not removed before it is read, and **no row appears at or below an offset that has been read**. A number that a database hands
out breaks the second one where transactions commit in another order than they got their numbers: read that far behind
(``lag``) that none is open any more. Rows of one offset are never parted.

The position is ``read``, the greatest offset that has been read, and ``until``, where there is an end. Offsets are kept as
numbers (timestamps in µs, dates in days) or, of strings and decimals, as text.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from backends.connectors.enumerators import check_at_least
from backends.spark.offsets import Offsets, Position
from stateformat.errors import ErrorKind, InvalidInput

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_US = datetime.timedelta(microseconds=1)
Step = int | datetime.timedelta


class _Kind(NamedTuple):
    """How offsets of a type are kept, and told to Spark."""

    kept: Callable[[Column], Column]
    """What is kept of a value: a number or a text."""
    literal: Callable[[Any], Column]
    """The value again. Foldable, so that filters reach the files."""
    given: Callable[[Any], int | str]
    """What is kept of a value that the user gives."""
    steps: bool
    """Whether offsets can be counted in."""
    order: Callable[[Any], Any] = lambda kept: kept
    """What is kept, in Spark's order."""


class OffsetTable(Offsets):
    """The rows of a table, in ranges of its column ``offset``.

    Example::

        SparkSource(OffsetTable(lambda spark: spark.table("orders"), "order_id", rows_per_epoch=100_000, grows=True))

    ``read``: the table, asked for again in each epoch. ``offset``: a column of whole numbers, dates, timestamps (with or without time
    zone), strings (in the order of their bytes) or decimals. Rows whose offset is null would never be read: they are refused when the job
    starts, and passed over if they come later.

    An epoch reads ``rows_per_epoch`` rows (more where the last ones share an offset), or ``step`` of the offset (a whole number; a
    ``timedelta`` for times), or everything that is there. ``since``: begin behind this offset. The source ends at the greatest
    offset that is there when the job starts; at ``until``, once the table has come so far; or with ``grows``, never. ``lag``: stay so far
    behind the greatest offset, for rows that appear late.

    Raises ``InvalidInput`` for options that contradict each other; when it is read, for a column that is not there or of another type.
    """

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
                f"rows_per_epoch={rows_per_epoch} and step={step} both say how much an epoch reads; give one"
            )
        if rows_per_epoch is not None:
            check_at_least("rows_per_epoch", rows_per_epoch, 1)
        if until is not None and grows:
            raise InvalidInput(f"until={until!r} says where the table ends and grows that it does not; give one")
        if lag is not None and not grows:
            raise InvalidInput(f"lag={lag!r} is for a table that grows, and this one has an end; give grows, or no lag")
        self._read = read
        self._offset = offset
        self._rows_per_epoch = rows_per_epoch
        self._step = step
        self._since = since
        self._until = until
        self._lag = lag
        self.bounded = not grows

    def __str__(self) -> str:
        return f"the table of offset {self._offset!r}"

    def sample(self, spark: SparkSession) -> DataFrame:
        """The table."""
        return self._read(spark)

    def first(self, spark: SparkSession) -> Position:
        """Behind ``since``. Looks at the whole column once: for nulls, and for the end."""
        from pyspark.sql import functions

        rows, kind = self._rows(spark)
        column = self._column(rows)
        newest, nulls = rows.agg(kind.kept(functions.max(column)), functions.count_if(column.isNull())).first()
        if nulls:
            raise InvalidInput(
                f"{nulls} rows of {self} have no offset, so they would never be read; leave them out of what is read, or fill them in",
                kind=ErrorKind.NULL_NOT_ALLOWED,
            )
        position: dict[str, int | str] = {}
        if self._since is not None:
            position["read"] = self._value(kind, "since", self._since)
        if self._until is not None:
            position["until"] = self._value(kind, "until", self._until)
            if "read" in position and kind.order(position["read"]) >= kind.order(position["until"]):
                raise InvalidInput(
                    f"since={self._since!r} is not below until={self._until!r}; there is nothing between"
                )
        elif self.bounded:
            # A table without rows behind `since` ends where it begins.
            end = [value for value in (newest, position.get("read")) if value is not None]
            position["until"] = max(end, key=kind.order, default="nothing")
            if newest is None:
                position["read"] = position["until"]
        return position

    def ended(self, position: Position) -> bool:
        """Whether the end has been read."""
        return "until" in position and position.get("read") == position["until"]

    def latest(self, spark: SparkSession, position: Position) -> Position:
        """One query for what there is; another one where rows are counted."""
        from pyspark.sql import functions

        rows, kind = self._rows(spark)
        column = self._column(rows)
        behind = rows.where(self._behind(kind, column, position))
        least, newest = behind.agg(kind.kept(functions.min(column)), kind.kept(functions.max(column))).first()
        if newest is None:
            return position
        high = newest - self._steps(kind, "lag", self._lag) if self._lag is not None else newest
        if "until" in position:
            until = position["until"]
            high = min(until, high, key=kind.order)  # The same number may be written in two ways: then as the end is.
            if kind.order(least) > kind.order(high):
                # The table has come past the end, in which there is nothing left.
                return {**position, "read": until}
        if kind.order(least) > kind.order(high):
            return position
        if self._step is not None:
            high = min(high, least + self._steps(kind, "step", self._step) - 1)
        elif self._rows_per_epoch is not None:
            wanted = behind.where(column <= kind.literal(high)).select(column.alias("offset")).orderBy("offset")
            high = wanted.limit(self._rows_per_epoch).agg(kind.kept(functions.max("offset"))).first()[0]
        return {**position, "read": high}

    def frame(self, spark: SparkSession, start: Position, stop: Position) -> DataFrame:
        """The rows behind ``start`` up to ``stop``."""
        rows, kind = self._rows(spark)
        column = self._column(rows)
        return rows.where(self._behind(kind, column, start) & (column <= kind.literal(stop["read"])))

    def rows_estimate(self, start: Position, stop: Position) -> int | None:  # noqa: ARG002 - it is what was asked for
        """``rows_per_epoch``."""
        return self._rows_per_epoch

    def _rows(self, spark: SparkSession) -> tuple[DataFrame, _Kind]:
        rows = self._read(spark)
        names = rows.schema.fieldNames()
        if names.count(self._offset) != 1:
            raise InvalidInput(
                f"{self} has {names.count(self._offset)} columns of that name among {', '.join(names)}; name the one that grows",
                kind=ErrorKind.SCHEMA_MISMATCH,
            )
        return rows, _kind_of(str(self), rows.schema[self._offset].dataType)

    def _column(self, rows: DataFrame) -> Column:
        return rows["`" + self._offset.replace("`", "``") + "`"]

    def _behind(self, kind: _Kind, column: Column, position: Position) -> Column:
        return column > kind.literal(position["read"]) if "read" in position else column.isNotNull()

    def _value(self, kind: _Kind, name: str, value: Any) -> int | str:
        try:
            return kind.given(value)
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise InvalidInput(f"{name}={value!r} is no offset of {self}: {error}") from error

    def _steps(self, kind: _Kind, name: str, step: Step) -> int:
        count = step // _US if isinstance(step, datetime.timedelta) else step
        if isinstance(step, datetime.timedelta) and kind.given is _days:
            count = step // datetime.timedelta(days=1)
        if not kind.steps or not isinstance(count, int) or count < (name == "step"):
            raise InvalidInput(
                f"{name}={step!r} cannot be counted in offsets of {self}; it is a whole number, or a timedelta for times, and "
                "strings and decimals are read by rows_per_epoch"
            )
        return count


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("it is a whole number")
    return value


def _days(value: Any) -> int:
    if isinstance(value, datetime.datetime):
        raise TypeError("it is a date, without a time")
    return int((value - _EPOCH.date()).days)


def _instant(value: Any) -> int:
    return int((value - _EPOCH) // _US)


def _wall(value: Any) -> int:
    return int((value - _EPOCH.replace(tzinfo=None)) // _US)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("it is a text")
    return value


def _kind_of(what: str, kind: DataType) -> _Kind:
    """How offsets of a Spark type are kept; ``InvalidInput`` for a type that has no order to rely on."""
    from pyspark.sql import functions, types

    if isinstance(kind, types.ByteType | types.ShortType | types.IntegerType | types.LongType):
        return _Kind(lambda c: c.cast("bigint"), lambda v: functions.lit(v).cast(kind), _whole, steps=True)
    if isinstance(kind, types.DateType):
        return _Kind(
            functions.unix_date,
            lambda v: functions.date_from_unix_date(functions.lit(v).cast("int")),
            _days,
            steps=True,
        )
    if isinstance(kind, types.TimestampType):
        return _Kind(
            functions.unix_micros,
            lambda v: functions.timestamp_micros(functions.lit(v).cast("bigint")),
            _instant,
            steps=True,
        )
    if isinstance(kind, types.TimestampNTZType):
        # Never by way of a timestamp with a zone: walls have hours that come twice, or not at all.
        zero = functions.expr("TIMESTAMP_NTZ'1970-01-01 00:00:00'")
        return _Kind(
            lambda c: functions.timestamp_diff("MICROSECOND", zero, c),
            lambda v: functions.timestamp_add("MICROSECOND", functions.lit(v).cast("bigint"), zero),
            _wall,
            steps=True,
        )
    if isinstance(kind, types.StringType) and kind == types.StringType():
        return _Kind(lambda c: c, functions.lit, _text, steps=False)
    if isinstance(kind, types.DecimalType):
        return _Kind(
            lambda c: c.cast("string"),
            lambda v: functions.lit(v).cast(kind),
            lambda v: str(Decimal(v)),
            steps=False,
            order=Decimal,
        )
    raise InvalidInput(
        f"{what} is of type {kind.simpleString()}; an offset is a whole number, a date, a timestamp, a string in the order of its "
        "bytes, or a decimal",
        kind=ErrorKind.UNSUPPORTED_TYPE,
    )


__all__ = ["OffsetTable"]
