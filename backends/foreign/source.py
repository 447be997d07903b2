"""What a foreign format provides: one checkpoint as a :class:`ForeignSource`.

``checkpoint`` makes it into what users see, so every program that reads stateformat's checkpoints
reads these too. A source is picklable and opens nothing twice that it can keep; it never writes.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import CheckpointError
from stateformat.graph import JobGraph
from stateformat.model import Record

FLINK_VERSIONS: Final = "Flink 1.13 to 2.3"
SPARK_VERSIONS: Final = "Spark 3.1 to 4.3"
"""Which are read and tested, as messages and docs/foreign.md say it."""

Level = Literal["quick", "full"]
Progress = Callable[[int, int], None]
"""Called with the bytes checked so far, and the bytes of all files."""


class Part(NamedTuple):
    """What one subtask has of one state: one handle, in stateformat's terms."""

    operator: str
    state: str
    subtask: int | None
    """None for a coordinator."""
    size_bytes: int
    """Stored bytes. If a file has several states, approximately its share."""
    path: str | None = None
    """The main file, for people; relative to the folder. None for what is in the metadata."""
    rows: int | None = None
    """Exact, if the metadata gives it; otherwise None."""
    first_group: int | None = None
    """For keyed state: the key groups that the subtask owns, both inclusive."""
    last_group: int | None = None


class Note(NamedTuple):
    """Something that a reader of the checkpoint must know: renamed, kept opaque, refused."""

    kind: Literal["renamed", "opaque", "refused", "omitted", "elsewhere"]
    """What is ``refused`` must be dropped by name before anything is made of the rest; what is
    ``omitted`` holds nothing, or follows from the rest.
    """
    subject: str
    """``operator/state``, ``operator``, a path, or ``""`` for the whole checkpoint."""
    message: str
    """A sentence, with what to do if something can be done."""

    def operator(self, graph: JobGraph) -> str:
        """Return the uid of the operator that it is about; empty if it is about none."""
        subject = f"{self.subject}/"
        return next((one.uid for one in graph.operators if subject.startswith(f"{one.uid}/")), "")


def unreadable(subject: str, why: str) -> str:
    """Return the sentence about what cannot be read, with the import that does without it."""
    if not subject:
        return f"a part of the checkpoint cannot be read: {why}"
    left_out = f"`ckpt import --drop {shlex.quote(subject)}` leaves it out, if the rest is worth something without it"
    return f"{subject} cannot be read: {why}; {left_out}"


class ForeignSource(Protocol):
    """One checkpoint of a foreign system."""

    goes_on_from_copies: ClassVar[bool]
    """Whether ``ckpt rescale`` makes a copy of it that the system goes on from."""

    @property
    def record(self) -> Record:
        """The checkpoint in stateformat's terms: graph with statuses, states, properties, totals.

        Made from metadata alone; no data file is read. ``manifest`` has an empty path. A state that
        is refused is not among ``states``; a note says so.
        """

    @property
    def parts(self) -> Sequence[Part]:
        """All parts, sorted by (operator, state, subtask); from metadata and listings alone."""

    @property
    def notes(self) -> Sequence[Note]:
        """What readers must know."""

    def used_files(self) -> int:
        """Return how many files the metadata and the parts are in, by listings."""

    def group_rows(self, part: Part) -> npt.NDArray[np.int64] | int:
        """Count rows exactly, by key group from ``part.first_group`` on; in other modes, return one
        number.

        May read data files; decodes no more than is needed to count.
        """

    def read(
        self, part: Part, first_group: int | None = None, last_group: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Stream the rows of a part, or of its key groups ``first_group`` … ``last_group``.

        Columns: ``schema.segment_schema`` of the state. Order: keyed state by ``_key_group``, the
        same order each time; other modes in the stored order of entries. Raises
        ``DamagedCheckpoint`` and ``UnsupportedFormat``.
        """


@dataclass(frozen=True)
class Opened:
    """The checkpoints of a folder, newest first."""

    sources: list[ForeignSource] = field(default_factory=list)
    damaged: dict[int, CheckpointError] = field(default_factory=dict)
    """Why checkpoints that should be there cannot be opened, by id: those newer than all
    ``sources``, and where the oldest is removed first, all that are newer than one of them.
    """

    def failed(self, checkpoint_id: int, error: CheckpointError) -> None:
        """Keep why one cannot be opened; for older ones the state is often gone, which is no
        loss.
        """
        if not self.sources:
            self.damaged[checkpoint_id] = error
