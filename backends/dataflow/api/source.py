"""What authors of sources write; a part of ``api``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple, Protocol

import pyarrow as pa

from stateformat.states import Columns


class Split(NamedTuple):
    """A part of a source that one reader reads. ``payload`` is the source's own; position 0 is its begin."""

    id: str
    payload: bytes
    position: int = 0


class NoSplit(Enum):
    """Why a reader gets no split."""

    LATER = "later"
    """There may be one later: the enumerator is asked again."""
    NEVER = "never"
    """Nothing will come: the reader's input has ended when its splits have."""


class SplitEnumerator(ABC):
    """Finds the splits of a source and deals them to readers; one per source, in the driver, kept in every checkpoint."""

    columns: Columns
    """The columns of what :meth:`snapshot` returns."""

    @abstractmethod
    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:
        """A split for this reader. It is the reader's from now on, and kept in its checkpoints."""

    @abstractmethod
    def snapshot(self) -> pa.Table:
        """What is left to deal, and all else that it keeps."""

    @abstractmethod
    def restore(self, rows: pa.Table) -> None:
        """Take back what :meth:`snapshot` gave."""


class ReaderContext(Protocol):
    """What reading may ask."""

    @property
    def subtask(self) -> int:
        """The reader's subtask."""

    @property
    def now_us(self) -> int:
        """The executor's clock, in µs. Never used for what must be the same again."""


class Chunk(NamedTuple):
    """What was read: rows (None: nothing is there yet), and the position in the split after them. ``newest_us``: an event
    time that the source knows to have come to besides the rows, µs.
    """

    batch: pa.RecordBatch | None
    position: int
    newest_us: int | None = None


class Source(ABC):
    """Where records come from: an enumerator that deals splits, and readers of them."""

    bounded: bool = True
    """Whether it ends by itself."""
    splits_per_reader: int | None = 1
    """How many splits a reader holds at a time; None: as many as it is given. Held splits are read in turn."""
    read_by: str | None = None
    """The one executor that can read it, by the name of its runtime; None: any. Others refuse to start it."""
    unordered: bool = False
    """Whether the rows of a split come in any order. Then event time stands still while a reader holds a split."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The schema of what is read."""

    @abstractmethod
    def enumerator(self) -> SplitEnumerator:
        """A new enumerator."""

    @abstractmethod
    def read(self, split: Split, context: ReaderContext) -> Iterator[Chunk]:
        """Read from ``split.position`` to the split's end. The same rows again from the same position, whoever reads."""
