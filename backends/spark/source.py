"""Sources whose rows are DataFrames: read by Spark, transformed by Spark SQL, epoch by epoch.

In the driver, a :class:`RangeEnumerator` keeps the *position* (``offsets``). Before an epoch
begins, the enumerator returns the next :class:`Range`, which moves the position, so the checkpoint
that ends the epoch has the position after the range. While the epoch runs, :class:`LookAhead` may
query where the next one ends, in a thread with its own connection. Its answer may be slightly out
of date when it is used, but it is still valid: it depends only on the position and on what existed
then. If nothing new existed, the caller asks again.

The part of a position that grows without end, the names it remembers, is stored as a log
(:class:`PositionLog`). Each *move* adds rows for the names it changed: a name with its new number
or text, or with neither if the name was removed. A name's row of the latest move counts. So a
checkpoint writes only what has changed. When most rows are outdated, the log is rewritten with only
the current names. A run that restored outdated rows rewrites it first.

The JVM reads and transforms the range, and Python workers turn the rows into frames
(``frames``). The source's subtasks get them as the only split of the epoch, through a
:class:`RowBuffer`: a task makes one for one reader and one epoch, adds batches, and the reader
reads them, in turn, until the task closes the buffer. Then the split ends, and the reader's
watermark comes after all of its rows (``Source.unordered``). A split finds its buffer by a token,
in this process only, and is never part of a checkpoint.

A pickled :class:`SparkSource` has only its schema: no Spark objects, no functions, no position.
"""

from __future__ import annotations

import logging
import secrets
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from copy import copy
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakValueDictionary

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.graph import brief
from stateformat.states import Columns, as_schema

from ..connectors.sources.basic import not_null
from ..dataflow.api import Chunk, NoSplit, ReaderContext, Source, Split, SplitEnumerator, StartingPoint
from .arrow import arrow_schema_of, check_fits
from .offsets import Offsets, Position
from .sessions import active_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class RowBuffer:
    """Rows for one reader in one epoch. Its split can be read as long as this object lives."""

    def __init__(self, split_id: str) -> None:
        self.split = Split(split_id, uuid.uuid4().bytes)
        """The split for the reader. The reader must not have had its id: use the epoch's number."""
        self._batches: deque[pa.RecordBatch] = deque()
        self._newest_us: int | None = None
        self._closed = False
        self.is_read = False
        _OPEN[self.split.payload] = self

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows, in the schema of the source. ``InvalidState`` after :meth:`close`."""
        if self._closed:
            raise InvalidState(f"Rows came for split {self.split.id!r} after its buffer was closed.")
        if batch.num_rows:
            self._batches.append(batch)

    def observe(self, newest_us: int) -> None:
        """Take the greatest event time, in µs, of rows of the epoch, even of other subtasks."""
        self._newest_us = newest_us if self._newest_us is None else max(self._newest_us, newest_us)

    def close(self) -> None:
        self._closed = True

    def chunks(self) -> Iterator[Chunk]:
        """Yield what has been added, each batch once, and empty chunks while there is nothing."""
        position = 0
        while self._batches or not self._closed:
            batch = self._batches.popleft() if self._batches else None
            position += 0 if batch is None else batch.num_rows
            yield Chunk(batch, position)
        if self._newest_us is not None:
            yield Chunk(None, position, self._newest_us)
        self.is_read = True

    @property
    def has_rows(self) -> bool:
        return bool(self._batches)


def chunks_of(split: Split) -> Iterator[Chunk]:
    """Read the buffer of a split. ``InvalidState`` without one, or if the split was begun."""
    buffer = _OPEN.get(split.payload)
    if buffer is None or split.position:
        why = "this process does not have its rows" if buffer is None else "the rows before were given already"
        raise InvalidState(
            f"Split {split.id!r} cannot be read from row {split.position}: {why}. The rows of a DataFrame come once "
            "in an epoch, in which their split begins and ends."
        )
    return buffer.chunks()


_OPEN: WeakValueDictionary[bytes, RowBuffer] = WeakValueDictionary()


logger = logging.getLogger(__name__)

CANCEL_SECONDS: Final = 0.2
CANCELS: Final = 5
"""When a run ends, a running query is cancelled up to this often, ``CANCEL_SECONDS`` apart."""


class LookAhead:
    """Runs one such query at a time, for one run."""

    def __init__(self, offsets: Offsets, spark: SparkSession) -> None:
        self._offsets = offsets
        self._spark = spark
        self._tag = f"stateformat-ahead-{secrets.token_hex(8)}"
        self._asked: tuple[Position, Future[Position]] | None = None
        self._questions: SimpleQueue[tuple[Position, Future[Position]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="looks ahead", daemon=True)
        self._thread.start()

    def ask(self, position: Position) -> None:
        """Ask where the epoch that begins at this position ends. Returns at once."""
        self._asked = position, Future()
        self._questions.put(self._asked)

    def answer(self, position: Position) -> Position | None:
        """Wait for the answer, once. None if this was not asked. Raises what ``latest`` raised."""
        asked, self._asked = self._asked, None
        return asked[1].result() if asked is not None and asked[0] is position else None

    def close(self) -> None:
        """End the thread, as the run has ended. Cancels a running query, and waits only briefly."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked[1].cancel()
        self._questions.put(None)
        for _ in range(CANCELS):
            self._thread.join(0 if asked is None else CANCEL_SECONDS)
            if asked is None or not self._thread.is_alive():
                return
            try:
                self._spark.sparkContext.cancelJobsWithTag(self._tag)
            except Exception as error:  # The session may be gone, and the query with it.
                logger.debug("what comes next is still asked for: %s", error)

    def _work(self) -> None:
        is_tagged = False
        while (question := self._questions.get()) is not None:
            position, answer = question
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                if not is_tagged:
                    self._spark.sparkContext.addJobTag(self._tag)
                    is_tagged = True
                found = self._offsets.latest(self._spark, position)
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(found)


SPARE_ROWS = 512
"""How many outdated rows are tolerated in any case, besides one for each name."""


def is_remembered(name: str) -> bool:
    """Return whether a name is stored in the log, if the position has one."""
    return not name.startswith("/")


class PositionLog:
    """The log of one source, and its current names."""

    columns = pa.schema(
        [*not_null(move=pa.int64(), name=pa.string()), pa.field("number", pa.int64()), pa.field("text", pa.string())]
    )

    def __init__(self) -> None:
        self.known: dict[str, int | str] = {}
        """The names and values according to the rows returned or restored so far."""
        self.is_whole = False
        """Whether the rows returned last are the whole log, which replaces all earlier rows."""
        self._rows = 0
        self._move = 0
        self._at: Position | None = None
        self._overtaken = False

    def restore(self, rows: pa.Table) -> None:
        """Load all rows, in any order."""
        names, numbers, texts = (rows.sort_by("move")[name].to_pylist() for name in self.columns.names[1:])
        said = zip(names, numbers, texts, strict=True)
        found = {name: text if number is None else number for name, number, text in said}
        self.known = {name: value for name, value in found.items() if value is not None}
        self._rows, self._overtaken = len(names), len(names) > len(self.known)
        self._move = max(rows["move"].to_pylist(), default=0)

    def rows_for(self, position: Position | None) -> pa.Table:
        """Return the rows to add for a position, or the whole log if :attr:`is_whole` is set."""
        self.is_whole = False
        if position is None or position is self._at:
            return self.columns.empty_table()
        now = {name: value for name, value in position.items() if is_remembered(name)}
        changed: dict[str, int | str | None] = {name: now[name] for name in now if self.known.get(name) != now[name]}
        changed |= dict.fromkeys(self.known.keys() - now.keys())
        self.is_whole = self._overtaken or self._rows + len(changed) > 2 * len(now) + SPARE_ROWS
        written = now if self.is_whole else changed
        self._rows = len(written) if self.is_whole else self._rows + len(written)
        self._move += 1
        self.known, self._at, self._overtaken = now, position, False
        return pa.table({"move": pa.repeat(self._move, len(written)), **columns_of(written)}, schema=self.columns)


def columns_of(values: Position | dict[str, int | str | None]) -> dict[str, list[int | str | None]]:
    """Return names with their numbers or texts, by column."""
    return {
        "name": [*values],
        "number": [value if isinstance(value, int) else None for value in values.values()],
        "text": [value if isinstance(value, str) else None for value in values.values()],
    }


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
