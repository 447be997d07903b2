"""Sources whose rows are DataFrames: read by Spark, transformed by Spark SQL, epoch by epoch.

In the driver, a :class:`RangeEnumerator` keeps the *position* (``offsets``). A checkpoint writes
the part of it that grows without end as a log (``position_log``). Before an epoch begins, the
enumerator returns the next :class:`Range`, which moves the position, so the checkpoint that ends
the epoch has the position after the range. While the epoch runs, the enumerator may query where the
next one ends (``look_ahead``). The JVM reads and transforms the range, and Python workers turn the
rows into frames (``protocol.dataframe_input``). The source's subtasks get them as the only split of
the epoch (``row_buffer``).

A pickled :class:`SparkSource` has only its schema: no Spark objects, no functions, no position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import brief
from stateformat.states import Columns, as_schema

from ...dataflow.api import Chunk, NoSplit, ReaderContext, Source, Split, SplitEnumerator, StartingPoint
from ..sessions import active_session
from .arrow import arrow_schema_of, check_fits
from .look_ahead import LookAhead
from .offsets import Offsets, Position
from .position_log import PositionLog, columns_of, is_remembered
from .row_buffer import chunks_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Transform = Callable[["DataFrame"], "DataFrame"]


class Range(NamedTuple):
    """The rows that one epoch reads."""

    frame: Callable[[SparkSession], DataFrame]
    """Builds the DataFrame, with the columns of the source, for each try of the epoch.

    Raises ``InvalidInput`` if the columns differ from those declared, and whatever Spark raises.
    """
    label: str
    """Where the rows come from, for Spark's UI."""
    check: Callable[[SparkSession], None] = lambda _: None
    """Raises ``InvalidInput`` if other rows may have been read. Called after each try."""


class SparkSource(Source):
    """Reads a growing DataFrame, range by range.

    Example::

        flights = flow.source(
            SparkSource(
                DirectoryFrames(
                    "s3a://bucket/flights/",
                    "csv",
                    schema="carrier string, delay int, at timestamp",
                    grows=True,
                ),
                transform=lambda rows: rows.where("delay is not null"),
                spark=spark,
            ),
            uid="flights",
            event_time="at",
        )

    ``offsets``: where the rows are, and how far to read at a time.

    ``transform``: Spark SQL on the rows of one epoch, before they become records. It must work row
    by row: it sees one range at a time, so an aggregation, a window, a sort or a ``distinct`` would
    apply to each epoch alone. A join with a table that does not change is fine. A plan with
    ``rand()``, ``uuid()`` and the like is refused: a task that Spark runs again would compute other
    rows.

    ``schema``: the columns of the records. Those of the transformed DataFrame (a Spark
    ``timestamp`` is ``timestamp[us, tz=UTC]``) are cast if that changes no value, as int to bigint;
    a value that does not fit, or a null in a column declared "not null", fails the job. Without it,
    the columns are those of the DataFrame, all nullable: this needs a session, ``spark`` or the
    active one.

    Raises ``InvalidInput`` if there is neither schema nor session, and for columns without an Arrow
    type.
    """

    splits_per_reader = 1
    read_by = "SparkRuntime"
    unordered = True

    def __init__(
        self,
        offsets: Offsets,
        *,
        transform: Transform | None = None,
        schema: Columns | None = None,
        spark: SparkSession | None = None,
    ) -> None:
        if not isinstance(offsets, Offsets):
            raise InvalidInput(
                f"A Spark source is made of {type(offsets).__name__}. Give an Offsets, such as DirectoryFrames."
            )
        self._offsets: Offsets | None = offsets
        self._transform = transform
        self.bounded = offsets.bounded
        self._remembers = offsets.remembers
        self.places = offsets.places
        if schema is not None:
            self._schema = as_schema(schema)
        else:
            rows = self._transformed(offsets.sample(_session(spark)))
            self._schema = arrow_schema_of(str(offsets), rows.schema)

    def __repr__(self) -> str:
        return brief(self, str(self._offsets or ""))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_offsets": None, "_transform": None}

    def __copy__(self) -> SparkSource:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def enumerator(self) -> RangeEnumerator:
        """Return a new enumerator, which keeps the position. In a worker, it has no ranges."""
        return RangeEnumerator(copy(self._offsets), self._conforming, remembers=self._remembers)

    def read(self, split: Split, context: ReaderContext) -> Iterator[Chunk]:  # noqa: ARG002 - no clock is needed
        return chunks_of(split)

    def behind(self, position: Position) -> StartingPoint:
        """Return a starting point after a position of its ``Offsets``.

        ``offsets.latest(spark, offsets.first(spark))`` is the end of what exists now.
        """
        enumerator = RangeEnumerator(copy(self._offsets), self._conforming)
        if self._offsets is not None:
            enumerator.begin_at(self._offsets.start_at(_checked(self._offsets, position)))
        return StartingPoint(enumerator.whole(), (), f"behind {dict(list(position.items())[:3])}")

    def _conforming(self, rows: DataFrame) -> DataFrame:
        """Return the rows of a range as records: transformed, with the columns of the source."""
        records = self._transformed(rows)
        check_fits(str(self._offsets), records.schema, self._schema)
        return records.select(*("`" + name.replace("`", "``") + "`" for name in self._schema.names))

    def _transformed(self, rows: DataFrame) -> DataFrame:
        from pyspark.sql.classic.dataframe import DataFrame

        if self._transform is not None:
            rows = self._transform(rows)
        if not isinstance(rows, DataFrame):
            raise InvalidInput(
                f"The transformation of {self._offsets} returned {type(rows).__name__}. It must return a DataFrame of "
                "Spark Classic."
            )
        if rows.isStreaming:
            raise InvalidInput(f"{self._offsets} is a streaming DataFrame. Read it with spark.read, by range.")
        if not rows._jdf.queryExecution().analyzed().deterministic():
            raise InvalidInput(
                f"The transformation of {self._offsets} computes something else each time (rand, uuid, "
                "monotonically_increasing_id, a function of your own that is marked nondeterministic), so an epoch "
                "that is run again would read other rows. Compute it from the columns, or in an operator."
            )
        return rows


class RangeEnumerator(SplitEnumerator):
    """Keeps how far a :class:`SparkSource` has been read, and returns ranges for epochs.

    Its rows: ``name`` (utf8), ``number`` (int64) and ``text`` (utf8), a row for each name of the
    position with its number or its text. Once reading has begun, there is also a row whose name is
    null, with the number of ranges read.

    If the ``Offsets`` remember, the names they remember are in the log. These rows have them, too,
    at a position given by a user, and in checkpoints of earlier releases.
    """

    columns = pa.schema([pa.field("name", pa.string()), pa.field("number", pa.int64()), pa.field("text", pa.string())])

    def __init__(
        self, offsets: Offsets | None, conforming: Callable[[DataFrame], DataFrame], *, remembers: bool = False
    ) -> None:
        self._offsets = offsets
        self._conforming = conforming
        self._log = PositionLog() if remembers else None
        self.log_columns = None if self._log is None else self._log.columns
        self._ahead: LookAhead | None = None
        self._position: Position | None = None
        self._ranges = 0
        self._over = False

    def begin_at(self, position: Position) -> None:
        """Begin after a position. Called before anything is read."""
        self._position = position

    def next_range(self, spark: SparkSession) -> Range | NoSplit:
        """Return what the next epoch reads, and move the position after it.

        Called once per epoch, before its barrier begins. Returns ``LATER`` if there is nothing to
        read now, and ``NEVER`` once everything has been read. Raises what ``Offsets`` raise, and
        then leaves the position as it was.
        """
        if self._offsets is None:
            raise InvalidInput(
                "This source was sent to a worker, which has no ranges of it. Ask the one in the driver."
            )
        start = self._position if self._position is not None else _checked(self._offsets, self._offsets.first(spark))
        while not self._offsets.ended(start):
            stop = _checked(self._offsets, self._latest(self._offsets, spark, start))
            if stop == start:
                self._position = start
                return NoSplit.LATER
            if self._offsets.rows_estimate(start, stop) != 0:
                self._position, self._ranges = stop, self._ranges + 1
                return self._range(self._offsets, start, stop)
            start = stop
        self._position, self._over = start, True
        return NoSplit.NEVER

    def _latest(self, offsets: Offsets, spark: SparkSession, position: Position) -> Position:
        """Return what was found during the last epoch, or what exists now if that was nothing."""
        found = self._ahead.answer(position) if self._ahead is not None else None
        return offsets.latest(spark, position) if found is None or found == position else found

    def look_ahead(self, spark: SparkSession) -> None:
        """Begin to query what follows the range returned last, while its epoch runs.

        Does nothing unless ``Offsets.looks_ahead``. :meth:`next_range` raises what goes wrong.
        """
        offsets, position = self._offsets, self._position
        if offsets is not None and offsets.looks_ahead and position is not None and not offsets.ended(position):
            self._ahead = self._ahead or LookAhead(offsets, spark)
            self._ahead.ask(position)

    def close(self) -> None:
        """End what :meth:`look_ahead` began, as the run has ended."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def _range(self, offsets: Offsets, start: Position, stop: Position) -> Range:
        label = f"range {self._ranges} of {offsets}"
        return Range(
            lambda spark: self._conforming(offsets.frame(spark, start, stop)),
            label,
            lambda spark: offsets.check(spark, start, stop),
        )

    def next_split(self, subtask: int, parallelism: int) -> NoSplit:  # noqa: ARG002 - the same for all
        """Return ``LATER``, as splits come with ranges; ``NEVER`` once :meth:`next_range` did."""
        return NoSplit.NEVER if self._over else NoSplit.LATER

    def snapshot(self) -> pa.Table:
        if self._log is None or self._position is None:
            return self.whole()
        return self._rows({name: value for name, value in self._position.items() if not is_remembered(name)})

    def whole(self) -> pa.Table:
        """Return the rows of a snapshot with the whole position, which needs no log."""
        return self.columns.empty_table() if self._position is None else self._rows(self._position)

    def _rows(self, position: Position) -> pa.Table:
        columns = columns_of(position)
        begun = {"name": None, "number": self._ranges, "text": None}
        return pa.table({name: [begun[name], *columns[name]] for name in columns}, schema=self.columns)

    def logged(self) -> pa.Table:
        if self._log is None:
            return super().logged()
        rows = self._log.rows_for(self._position)
        self.log_is_anew = self._log.is_whole
        return rows

    def restore_log(self, rows: pa.Table) -> None:
        assert self._log is not None
        self._log.restore(rows)

    def restore(self, rows: pa.Table) -> None:
        names, numbers, texts = (rows[name].to_pylist() for name in self.columns.names)
        found = {name: (number, text) for name, number, text in zip(names, numbers, texts, strict=True)}
        self._over = False
        self._ranges = found.pop(None, (0, None))[0]
        position = {name: text if number is None else number for name, (number, text) in found.items()}
        remembered = {} if self._log is None else self._log.known
        self._position = {**remembered, **position} if names else None


def _checked(offsets: Offsets, position: object) -> Position:
    """Return the position. ``InvalidInput``, the ``Offsets``' fault, if it cannot be stored."""
    if not isinstance(position, dict):
        raise InvalidInput(f"{offsets} gave {type(position).__name__} for a position. It must give a dict.")
    for name, value in position.items():
        is_kept = type(value) is str or (type(value) is int and -(2**63) <= value < 2**63)
        if not isinstance(name, str) or not is_kept:
            raise InvalidInput(
                f"{offsets} gave a position with {name!r}: {value!r}. A position has names, each with a signed whole "
                "number of 64 bits or a text."
            )
    return position


def _session(spark: SparkSession | None) -> SparkSession:
    found = spark or active_session()
    if found is None:
        raise InvalidInput(
            "A Spark source without a schema asks Spark for its columns, and no session is active. Give the schema, or "
            "the session.",
            kind=ErrorKind.MISSING_DEPENDENCY,
        )
    return found
