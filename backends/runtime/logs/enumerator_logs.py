"""The logs of enumerators: what they remember for ever. A checkpoint writes only what is new.

Theory of operation. A log is an even-split state of the source, in several segments, oldest first.
A checkpoint writes at most one: what is new, joined with the *tail*, the newest segment, as long as
that is short. A tail that has grown long is joined with the segment before it if that is not much
longer, and so on, so each row is rewritten about log2(rows / ``TAIL_ROWS``) times in total, and
there are no more segments than that. Handles name all other segments again, and all of them if
nothing is new.

An enumerator that no longer needs most of its log returns the rest, which replaces all segments.

Workers report that they have no rows of the state. The driver adds the handles to those of the
first subtask that continues. What is not published is kept for the next checkpoint. A run begins
with one segment of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import pyarrow as pa

from stateformat.manifest import handles_table
from stateformat.model import Handle
from stateformat.publication import PendingCheckpoint
from stateformat.states import as_schema

from ...dataflow import events as ev
from ...dataflow.api import SplitEnumerator
from ...dataflow.casting import cast_to_schema
from ...dataflow.graph import ENUMERATOR_LOG

TAIL_ROWS = 512
"""How many rows the segment that every checkpoint adds to may have."""


class _Segment(NamedTuple):
    rows: pa.Table
    handle: Handle


class _Log:
    """The log of one enumerator."""

    def __init__(self, rows: pa.Table) -> None:
        self.new = rows
        self.is_anew = False
        """Whether ``new`` replaces all segments."""
        self.segments: list[_Segment] = []
        """As the newest checkpoint of the run has them, oldest first."""
        self.written: list[_Segment] = []
        """As the checkpoint has them that is being published."""

    @property
    def staying(self) -> list[_Segment]:
        """The segments to which new rows are added."""
        return [] if self.is_anew else [*self.segments]

    def joined(self) -> tuple[int, pa.Table]:
        """Return how many segments stay, and the rows of the one after them."""
        kept, rows = len(self.staying), self.new
        while kept:
            before = self.segments[kept - 1].rows
            if len(before) > TAIL_ROWS and (len(rows) <= TAIL_ROWS or len(before) > 2 * len(rows)):
                break
            rows, kept = pa.concat_tables([before, rows]), kept - 1
        return kept, rows.combine_chunks()


class EnumeratorLogs:
    """The logs of all enumerators that have one. ``restored``: that of a source's uid, if any."""

    def __init__(self, restored: Callable[[str], pa.Table | None]) -> None:
        self._restored = restored
        self._logs: dict[str, _Log] = {}

    def open(self, uid: str, enumerator: SplitEnumerator) -> None:
        """Give a new enumerator the log of the checkpoint, if both have one."""
        if enumerator.log_columns is None:
            return
        rows = self._restored(uid)
        if rows is not None:
            enumerator.restore_log(rows)
        self._logs[uid] = _Log(as_schema(enumerator.log_columns).empty_table() if rows is None else rows)

    def take(self, enumerators: Mapping[str, SplitEnumerator]) -> None:
        """Take what is new. Raises what ``logged`` raises, and for rows of other columns."""
        for uid, log in self._logs.items():
            rows = cast_to_schema(f"log of the enumerator of {uid!r}", enumerators[uid].logged(), log.new.schema)
            if enumerators[uid].log_is_anew:
                log.new, log.is_anew = rows, True
            elif rows.num_rows:
                log.new = pa.concat_tables([log.new, rows])

    def write(self, checkpoint: PendingCheckpoint, ended: Collection[ev.TaskId]) -> None:
        """Write what is new, and add all handles. ``ended``: also those that are ending."""
        for uid, log in self._logs.items():
            parallelism = checkpoint.context.graph.operator(uid).parallelism
            running = (number for number in range(parallelism) if ev.TaskId(uid, number) not in ended)
            owner = next(running, None)
            if owner is None:
                continue  # The source has been read to its end.
            log.written = log.staying
            if log.new.num_rows:
                kept, rows = log.joined()
                handle = checkpoint.context.subtask(uid, owner).write(ENUMERATOR_LOG, rows)
                log.written[kept:] = [_Segment(rows, handle)]
            handles = [segment.handle._replace(subtask=owner) for segment in log.written]
            if handles:
                checkpoint.add_handles(handles_table(handles))

    def published(self) -> None:
        """Note that the checkpoint written last exists."""
        for log in self._logs.values():
            log.segments, log.new, log.is_anew = log.written, log.new.slice(0, 0), False
