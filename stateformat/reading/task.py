"""A read task: what one worker reads of one state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from ..errors import DamagedCheckpoint, ErrorKind
from ..graph import shortened
from ..manifest import Manifest
from ..model import Record, SchemaVersion, State
from ..schema import segment_schema
from ..storage import Storage
from ..tables import ArrowStream
from .loading import missing_object

if TYPE_CHECKING:
    from .scan import SliceReader


@dataclass(frozen=True)
class ReadTask(ArrowStream):
    """Slices of one state with the handles that they need: what one worker reads. Picklable."""

    storage: Storage
    record: Record
    handles: pa.Table
    slices: pa.Table
    bound_to_run: bool = False

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

    def batches(self, *, as_schema: SchemaVersion | None = None, batch_rows: int = 131_072) -> Iterator[pa.RecordBatch]:
        """Stream the rows, merged and evolved to the current schema (or to ``as_schema``).

        Columns: ``schema.segment_schema`` of the state, without ``_op``. Order: keyed state by
        ``_key_group``, list-like modes as their entries were written.

        Raises ``DamagedCheckpoint``, and ``CheckpointExpired`` where the files have been deleted.
        """
        with self._missing_explained():
            yield from self._reader(as_schema).batches(batch_rows)

    def layers(self, *, as_schema: SchemaVersion | None = None) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
        """Stream the layers of a keyed state as they were written, lowest first: number and rows.

        Columns and order are those of :meth:`batches`; above layer 0 ``_op`` comes second. Read the
        rows of a layer before you ask for the next one. Layers without rows are left out.

        Raises as :meth:`batches` does, and ``InvalidInput`` for a state that is not keyed.
        """
        with self._missing_explained():
            for layer, batches in self._reader(as_schema).layers():
                yield layer, self._guarded(batches)

    def table(self, *, as_schema: SchemaVersion | None = None) -> pa.Table:
        """Return the rows of :meth:`batches` as one table."""
        return pa.Table.from_batches(self.batches(as_schema=as_schema), schema=self._reader(as_schema).schema)

    def _reader(self, as_schema: SchemaVersion | None) -> SliceReader:
        from .scan import SliceReader

        return SliceReader(self.storage, self.record, Manifest(self.handles), self.slices, as_schema)

    def _guarded(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with self._missing_explained():
            yield from batches

    @contextmanager
    def _missing_explained(self) -> Iterator[None]:
        """Turn the error for a missing object into the right one: expired or damaged."""
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
