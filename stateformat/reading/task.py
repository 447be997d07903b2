"""A read task: what one worker reads of one state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True)
class ReadTask(ArrowStream):
    """What one worker reads: slices of one state, with the handles that they need. Picklable."""

    storage: Storage
    record: Record
    handles: pa.Table
    slices: pa.Table
    bound_to_run: bool = False
    _values: Callable[[], list[Handle]] | None = field(default=None, init=False, repr=False, compare=False)
    """The handles as values, if the slices are these whole handles. A changed task has none."""

    def __repr__(self) -> str:
        place = f"{self.storage.url}@{self.record.checkpoint_id}"
        return f"ReadTask({shortened(place, 40)}, {self.state!r}, {self.slices.num_rows} slices)"

    def __getstate__(self) -> dict[str, Any]:
        if self._values is None:
            return self.__dict__
        # A table that is a part of a larger one would be pickled with all of it.
        own = {"handles": copy_rows(self.handles), "slices": copy_rows(self.slices), "_values": None}
        return {**self.__dict__, **own}

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
            yield from self._reader(as_schema, wanted).batches(batch_rows)

    def layers(self, *, as_schema: SchemaVersion | None = None) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
        """Stream the layers of a keyed state as they were written, lowest first: number and rows.

        Columns and order are those of :meth:`batches`; above layer 0 ``_op`` (int8) comes second.
        Read the rows of a layer before you ask for the next one. Layers without rows are left out;
        expired rows are included.

        Raises as :meth:`batches` does, and ``InvalidInput`` for a state that is not keyed.
        """
        with self._missing_explained():
            for layer, batches in self.with_expired()._reader(as_schema).layers():
                yield layer, self._guarded(batches)

    def table(self, *, as_schema: SchemaVersion | None = None) -> pa.Table:
        """Return the rows of :meth:`batches` as one table."""
        return pa.Table.from_batches(self.batches(as_schema=as_schema), schema=self._reader(as_schema).schema)

    def with_expired(self) -> ReadTask:
        """Return a task for the same rows, with those that had expired at the checkpoint."""
        if self.state.ttl is None or self.state.ttl_now_us is None:
            return self
        # Without a time, nothing has expired.
        states = (replace(self.state, ttl_now_us=None), *self.record.states[1:])
        return replace(self, record=replace(self.record, states=states))

    def at_groups(self, groups: Groups) -> ReadTask:
        """Return a task for the rows of these key groups (ascending), and perhaps a few others."""
        from .cutting import cut_to_groups

        return self.with_slices(cut_to_groups(self.handles, self.slices, groups))

    def split(self, parts: int) -> list[ReadTask]:
        """Return up to ``parts`` tasks of about equal stored bytes; in order they give the rows.

        A key group stays whole. Progress and broadcast state are not split.
        """
        from .cutting import split_slices

        tables = split_slices(self.state, self.handles, self.slices, parts)
        return [self] if len(tables) < 2 else [self.with_slices(slices) for slices in tables]

    def with_values(self, values: Callable[[], list[Handle]] | None) -> ReadTask:
        """Set the handles as values (the slices are these whole handles), and return this task."""
        object.__setattr__(self, "_values", values)
        return self

    def with_slices(self, slices: pa.Table) -> ReadTask:
        """Return a task for slices that are parts of this task's, with the handles they name."""
        used = pc.unique(slices["handle"])
        number = slices.schema.get_field_index("handle")
        numbers = pc.index_in(slices["handle"], used).cast(pa.int64())
        return replace(
            self,
            slices=slices.set_column(number, slices.schema.field(number), numbers).combine_chunks(),
            **self._holding(used),
        )

    def _holding(self, numbers: pa.Array) -> dict[str, Any]:
        """Return the fields that hold handles, with only these."""
        return {"handles": self.handles.take(numbers)}

    def _reader(self, as_schema: SchemaVersion | None, wanted: Wanted = EVERYTHING) -> SliceReader:
        from .scan import SliceReader

        return SliceReader(
            self.storage, self.record, Manifest(self.handles), self.slices, as_schema, wanted, self._values
        )

    def _guarded(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with self._missing_explained():
            yield from batches

    @contextmanager
    def _missing_explained(self) -> Iterator[None]:
        """Replace the error for a missing object by the right one: expired or damaged."""
        try:
            yield
        except FileNotFoundError as error:
            raise self._missing(str(error.filename or error)) from error
        except DamagedCheckpoint as error:
            if error.kind is not ErrorKind.OBJECT_MISSING:
                raise
            raise self._missing(str(error.details.get("path", ""))) from error

    def _missing(self, path: str) -> Exception:
        return missing_object(self.storage, self.record, path, bound_to_run=self.bound_to_run)
