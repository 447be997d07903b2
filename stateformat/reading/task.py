"""A read task: what one worker reads of one state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import DamagedCheckpoint, ErrorKind
from ..graph import shortened
from ..manifest import Manifest
from ..model import Handle, Record, SchemaVersion, State
from ..schema import segment_schema
from ..storage import Storage
from ..tables import ArrowStream, copy_rows
from .loading import missing_object
from .wanted import EVERYTHING, Wanted

if TYPE_CHECKING:
    from .cutting import Groups
    from .scan import SliceReader


class RowReader(Protocol):
    """Reads the rows of a task."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of ``batches``."""

    def batches(self, batch_rows: int = ...) -> Iterator[pa.RecordBatch]:
        """Stream the rows, as ``ReadTask.batches`` says."""

    def layers(self) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
        """Stream the layers, as ``ReadTask.layers`` says."""


@dataclass(frozen=True)
class ReadTask(ArrowStream):
    """What one worker reads: slices of one state, with the handles that they need. Picklable."""

    storage: Storage
    record: Record
    """The checkpoint's, with this operator and state alone."""
    handles: pa.Table
    """What ``slices`` number; another system's may not count their rows."""
    slices: pa.Table

    def __repr__(self) -> str:
        place = f"{self.storage.url}@{self.record.checkpoint_id}"
        return f"ReadTask({shortened(place, 40)}, {self.state!r}, {self.slices.num_rows} slices)"

    @property
    def state(self) -> State:
        """The state that is read."""
        return self.record.states[0]

    @property
    def schema(self) -> pa.Schema:
        """The columns of :meth:`batches`: ``schema.segment_schema`` of the state. Reads nothing."""
        return segment_schema(self.state)

    @property
    def stored_bytes(self) -> int:
        """About how many bytes of segments are read, as stored."""
        return pc.sum(self.slices["bytes"]).as_py() or 0

    def batches(
        self, *, as_schema: SchemaVersion | None = None, batch_rows: int = 131_072, wanted: Wanted = EVERYTHING
    ) -> Iterator[pa.RecordBatch]:
        """Stream the rows, merged and evolved to the current schema (or to ``as_schema``).

        Columns: ``schema.segment_schema`` of the state, without ``_op``, or those ``wanted``; the
        others are not read. Order: keyed state by ``_key_group``, list-like modes as their entries
        were written. Rows that had expired at the checkpoint are left out, unless
        :meth:`with_expired` includes them.

        Raises ``DamagedCheckpoint``, and ``CheckpointExpired`` if the files have been deleted.
        """
        with self._missing_explained():
            yield from self.reader(as_schema, wanted).batches(batch_rows)

    def layers(self, *, as_schema: SchemaVersion | None = None) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
        """Stream the layers of a keyed state as they were written, lowest first: number and rows.

        Columns and order are those of :meth:`batches`; above layer 0 ``_op`` (int8) comes second.
        Read the rows of a layer before you ask for the next one. Layers without rows are left out;
        expired rows are included.

        Raises as :meth:`batches` does, and ``InvalidInput`` for a state that is not keyed.
        """
        with self._missing_explained():
            for layer, batches in self.with_expired().reader(as_schema).layers():
                yield layer, self._guarded(batches)

    def table(self, *, as_schema: SchemaVersion | None = None) -> pa.Table:
        """Return the rows of :meth:`batches` as one table."""
        return pa.Table.from_batches(self.batches(as_schema=as_schema), schema=self.reader(as_schema).schema)

    def with_expired(self) -> Self:
        """Return a task for the same rows, with those that had expired at the checkpoint."""
        if self.state.ttl is None or self.state.ttl_now_us is None:
            return self
        # Without a time, nothing has expired.
        states = (replace(self.state, ttl_now_us=None), *self.record.states[1:])
        return replace(self, record=replace(self.record, states=states))

    @abstractmethod
    def with_slices(self, slices: pa.Table) -> Self:
        """Return a task for slices that are parts of this task's."""

    @abstractmethod
    def at_groups(self, groups: Groups) -> ReadTask:
        """Return a task for the rows of these key groups (ascending), and perhaps a few others."""

    @abstractmethod
    def split(self, parts: int) -> Sequence[ReadTask]:
        """Return up to ``parts`` tasks of about equal stored bytes; in order they give the rows.

        A key group stays whole. Progress and broadcast state are not split.
        """

    @abstractmethod
    def reader(self, as_schema: SchemaVersion | None, wanted: Wanted = EVERYTHING) -> RowReader:
        """Return what reads the rows, as ``as_schema`` (by default the current schema)."""

    @abstractmethod
    def missing(self, path: str) -> Exception:
        """Return the error for an object that is gone: expired, or damage."""

    def _guarded(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with self._missing_explained():
            yield from batches

    @contextmanager
    def _missing_explained(self) -> Iterator[None]:
        """Replace the error for a missing object by the right one: expired or damaged."""
        try:
            yield
        except FileNotFoundError as error:
            raise self.missing(str(error.filename or error)) from error
        except DamagedCheckpoint as error:
            if error.kind is not ErrorKind.OBJECT_MISSING:
                raise
            raise self.missing(str(error.details.get("path", ""))) from error


@dataclass(frozen=True, repr=False)
class SegmentTask(ReadTask):
    """Slices of segments."""

    bound_to_run: bool = False
    values: Callable[[], list[Handle]] | None = field(default=None, compare=False)
    """The handles as values, if the slices are these whole handles."""

    def __getstate__(self) -> dict[str, Any]:
        if self.values is None:
            return self.__dict__
        # A table that is a part of a larger one would be pickled with all of it.
        own = {"handles": copy_rows(self.handles), "slices": copy_rows(self.slices), "values": None}
        return {**self.__dict__, **own}

    def at_groups(self, groups: Groups) -> SegmentTask:
        """See ``ReadTask.at_groups``."""
        from .cutting import cut_to_groups

        return self.with_slices(cut_to_groups(self.handles, self.slices, groups))

    def split(self, parts: int) -> Sequence[SegmentTask]:
        """See ``ReadTask.split``."""
        from .cutting import split_slices

        tables = split_slices(self.state, self.handles, self.slices, parts)
        return [self] if len(tables) < 2 else [self.with_slices(slices) for slices in tables]

    def with_slices(self, slices: pa.Table) -> Self:
        """See ``ReadTask.with_slices``; the task has only the handles that they name."""
        used = pc.unique(slices["handle"])
        number = slices.schema.get_field_index("handle")
        numbers = pc.index_in(slices["handle"], used).cast(pa.int64())
        slices = slices.set_column(number, slices.schema.field(number), numbers).combine_chunks()
        return replace(self, handles=self.handles.take(used), slices=slices, values=None)

    def reader(self, as_schema: SchemaVersion | None, wanted: Wanted = EVERYTHING) -> SliceReader:
        """See ``ReadTask.reader``."""
        from .scan import SliceReader

        manifest = Manifest(self.handles)
        return SliceReader(self.storage, self.record, manifest, self.slices, as_schema, wanted, self.values)

    def missing(self, path: str) -> Exception:
        """See ``ReadTask.missing``."""
        return missing_object(self.storage, self.record, path, bound_to_run=self.bound_to_run)
