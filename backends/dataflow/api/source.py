"""What authors of sources write; a part of ``api``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
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
    """By how much records may be out of order."""

    def __post_init__(self) -> None:
        """Raises ``InvalidInput`` unless ``out_of_order_us`` is a whole number, at least 0."""
        late = self.out_of_order_us
        if isinstance(late, bool) or not isinstance(late, int) or not 0 <= late < 1 << 62:
            raise InvalidInput(
                f"event time {self.column!r} is out of order by {late!r}. Give a whole number of microseconds, at "
                "least 0."
            )


class Split(NamedTuple):
    """A part of a source that one reader reads. ``payload`` is the source's own."""

    id: str
    payload: bytes
    position: int = 0
    """Where to read next; 0 is the begin."""


class NoSplit(Enum):
    """Why a reader gets no split."""

    LATER = "later"
    """There may be one later: the enumerator is asked again."""
    NEVER = "never"
    """None will come: the reader's input has ended when its splits have."""


class SplitEnumerator(ABC):
    """Finds the splits of a source and assigns them to readers.

    There is one per source, in the driver; every checkpoint keeps it.
    """

    columns: Columns
    """The columns of what :meth:`snapshot` returns."""
    log_columns: Columns | None = None
    """The columns of its log: what it keeps for as long as the job lives. None: it has no log.

    A checkpoint has a snapshot whole, and of a log only what is new, so what grows without end
    belongs into the log.
    """
    log_is_anew: bool = False
    """Whether what :meth:`logged` gave last is the whole log, in place of all rows before.

    For a log of which most is needed no more.
    """

    def __repr__(self) -> str:
        return brief(self)

    @abstractmethod
    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:
        """A split for this reader, whose checkpoints keep it from now on."""

    @abstractmethod
    def snapshot(self) -> pa.Table:
        """The splits that are not assigned yet, and everything else it keeps."""

    @abstractmethod
    def restore(self, rows: pa.Table) -> None:
        """Take back what :meth:`snapshot` gave."""

    def logged(self) -> pa.Table:
        """The rows that its log gains: all since the last call. Called after each :meth:`snapshot`.

        They are kept even if that checkpoint fails.
        """
        return as_schema(self.log_columns or {}).empty_table()

    def restore_log(self, rows: pa.Table) -> None:  # noqa: B027 - without a log there is nothing
        """Take back all rows of its log, in any order. Called before :meth:`restore`."""


class StartingPoint(NamedTuple):
    """Where a source begins that has not read here: what its enumerator and readers would keep."""

    enumerator: pa.Table
    """As of :meth:`SplitEnumerator.snapshot`."""
    splits: tuple[Split, ...]
    """The splits that readers hold, each with its position. Split n is for subtask n modulo the
    parallelism."""
    description: str
    """What it begins behind, as the end of a sentence."""


class ReaderContext:
    """What :meth:`Source.read` gets to know."""

    def __init__(self, subtask: int, clock: Callable[[], int]) -> None:
        self.subtask = subtask
        """The reader's subtask."""
        self._clock = clock

    def __repr__(self) -> str:
        return brief(self, f"subtask {self.subtask}")

    @property
    def now_us(self) -> int:
        """The executor's clock, in µs. Never use it for what must be the same again."""
        return self._clock()


class Chunk(NamedTuple):
    """What was read."""

    batch: pa.RecordBatch | None
    """The rows; None: nothing is there yet."""
    position: int
    """The position in the split after the rows."""
    newest_us: int | None = None
    """An event time, in µs, that the source has reached besides that of the rows."""


class Source(ABC):
    """Where records come from: an enumerator that assigns splits, and readers that read them."""

    bounded: bool = True
    """Whether it ends by itself."""
    splits_per_reader: int | None = 1
    """How many splits a reader reads in turn; None: as many as it is given."""
    read_by: str | None = None
    """The name of the one runtime that can read it; None: any. Others refuse to start it."""
    unordered: bool = False
    """Whether the rows of a split come in any order. Event time stands still while one is read."""

    def __repr__(self) -> str:
        return brief(self)

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The schema of what is read."""

    @abstractmethod
    def enumerator(self) -> SplitEnumerator:
        """A new enumerator."""

    @abstractmethod
    def read(self, split: Split, context: ReaderContext) -> Iterator[Chunk]:
        """Read from ``split.position`` to the split's end.

        The same position gives the same rows again, whichever reader asks.
        """

    def behind(self, position: Any) -> StartingPoint:
        """Where the source begins if everything before a position has been read elsewhere.

        What a position is, each source says. Raises ``InvalidInput`` for one that it cannot have,
        and here, where a source does not say.
        """
        raise InvalidInput(
            f"{type(self).__name__} cannot begin behind a position ({position!r} is given). Leave its position out, "
            "and let it read what the history does not cover; or define its method behind."
        )
