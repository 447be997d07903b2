"""What authors of sources write; a part of ``api``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import pyarrow as pa

from stateformat.errors import InvalidInput
from stateformat.graph import brief
from stateformat.states import Columns, as_schema


@dataclass(frozen=True)
class EventTime:
    """The column with the event time (timestamp[us], or int64 in µs)."""

    column: str
    out_of_order_us: int = 0
    """By how much records may be out of order, µs."""

    def __post_init__(self) -> None:
        """Raises ``InvalidInput`` unless ``out_of_order_us`` is a whole number, at least 0."""
        late = self.out_of_order_us
        if isinstance(late, bool) or not isinstance(late, int) or not 0 <= late < 1 << 62:
            raise InvalidInput(
                f"event time {self.column!r} is out of order by {late!r}. Give a whole number of microseconds, at "
                "least 0."
            )


class Split(NamedTuple):
    """A part of a source that one reader reads. What ``payload`` means is up to the source."""

    id: str
    payload: bytes
    position: int = 0
    """Where to read next; 0 is the beginning."""


class NoSplit(Enum):
    """Why a reader gets no split."""

    LATER = "later"
    """There may be a split later: the enumerator is asked again."""
    NEVER = "never"
    """No more splits will come: the reader's input ends when its splits do."""


class SplitEnumerator(ABC):
    """Finds the splits of a source and assigns them to readers.

    There is one per source, in the driver; every checkpoint holds its state.
    """

    columns: Columns
    """The columns of what :meth:`snapshot` returns."""
    log_columns: Columns | None = None
    """The columns of its log: rows that it keeps for as long as the job lives. None: no log.

    Every checkpoint writes the whole snapshot, but only the new rows of the log. So what grows
    without bound belongs in the log.
    """
    log_is_anew: bool = False
    """Whether :meth:`logged` last returned the whole log, which replaces all earlier rows.

    For a log whose rows are mostly no longer needed.
    """

    def __repr__(self) -> str:
        return brief(self)

    @abstractmethod
    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:
        """Return a split for this reader, whose checkpoints hold it from now on."""

    @abstractmethod
    def snapshot(self) -> pa.Table:
        """Return the splits that are not assigned yet, and everything else it keeps."""

    @abstractmethod
    def restore(self, rows: pa.Table) -> None:
        """Restore what :meth:`snapshot` returned."""

    def logged(self) -> pa.Table:
        """Return the new rows of its log: all since the last call.

        Called after each :meth:`snapshot`. The rows are kept even if that checkpoint fails.
        """
        return as_schema(self.log_columns or {}).empty_table()

    def restore_log(self, rows: pa.Table) -> None:  # noqa: B027 - without a log there is nothing
        """Restore all rows of its log, in any order. Called before :meth:`restore`."""


class StartingPoint(NamedTuple):
    """Where a source begins in a new job: what its enumerator and readers would have kept."""

    enumerator: pa.Table
    """Rows as :meth:`SplitEnumerator.snapshot` returns them."""
    splits: tuple[Split, ...]
    """The splits that readers hold, each with its position. Split n goes to subtask n modulo the
    parallelism."""
    description: str
    """What it begins after, as the end of a sentence."""


class ReaderContext:
    """What :meth:`Source.read` can know about its reader."""

    def __init__(self, subtask: int, clock: Callable[[], int]) -> None:
        self.subtask = subtask
        """The reader's subtask."""
        self._clock = clock

    def __repr__(self) -> str:
        return brief(self, f"subtask {self.subtask}")

    @property
    def now_us(self) -> int:
        """The executor's clock, in µs. Do not use it for what must be reproducible."""
        return self._clock()


class Chunk(NamedTuple):
    """One result of :meth:`Source.read`."""

    batch: pa.RecordBatch | None
    """The rows; None if nothing is there yet."""
    position: int
    """The position in the split after these rows."""
    newest_us: int | None = None
    """An event time, in µs, that the source has reached, apart from the rows."""


class Source(ABC):
    """Where records come from: an enumerator that assigns splits, and readers that read them."""

    bounded: bool = True
    """Whether the source ends by itself."""
    splits_per_reader: int | None = 1
    """How many splits a reader reads in turn; None: as many as it gets."""
    read_by: str | None = None
    """The name of the only runtime that can read it; others refuse to start. None: any can."""
    places: Collection[str] = ()
    """The directories or URLs of which it reads everything: the job makes no savepoint there."""
    unordered: bool = False
    """Whether the rows of a split come in any order. Event time does not advance within one."""

    def __repr__(self) -> str:
        return brief(self)

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The schema of the rows."""

    @abstractmethod
    def enumerator(self) -> SplitEnumerator:
        """Return a new enumerator."""

    @abstractmethod
    def read(self, split: Split, context: ReaderContext) -> Iterator[Chunk]:
        """Read from ``split.position`` to the end of the split.

        The same position must yield the same rows again, in any reader.
        """

    def behind(self, position: Any) -> StartingPoint:
        """Return where the source begins if everything up to a position was read elsewhere.

        Each source defines what a position is. Raises ``InvalidInput`` for an invalid one, and by
        default always.
        """
        raise InvalidInput(
            f"{type(self).__name__} cannot begin behind a position ({position!r} is given). Leave its position out, "
            "and let it read what the history does not cover; or define its method behind."
        )
