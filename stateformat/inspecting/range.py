"""A state over several checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from ..model import State
from ..reading import StateRows, Wanted, checked_parts, chosen_columns
from ..tables import ArrowStream
from .subjects import CHECKPOINT_ID, declared_in, newest_declaration, own_columns, packed, where_of

if TYPE_CHECKING:
    from ..reading import Checkpoint


class _At(NamedTuple):
    """The state in one checkpoint; ``rows`` is None until the manifest has been read."""

    checkpoint: Checkpoint | None
    checkpoint_id: int
    rows: StateRows | None

    def opened(self, state: State) -> StateRows:
        if self.rows is not None:
            return self.rows
        assert self.checkpoint is not None
        # A checkpoint keeps its manifest; those of a range are too many to hold.
        return copy(self.checkpoint).state(state.operator, state.name)


@dataclass(frozen=True)
class StateRange(ArrowStream):
    """The rows of a state in several checkpoints, oldest first. Picklable.

    Columns: ``_checkpoint_id`` (int64, not nullable), then those of the state in the newest
    checkpoint that has it; rows of older ones are converted to that schema. Committables have their
    own ``_checkpoint_id``; here it is named ``_prepared_checkpoint_id``. Checkpoints without the
    state contribute no rows.

    Reading raises as ``ReadTask.batches`` does: ``CheckpointExpired`` if a checkpoint is deleted in
    the meantime.
    """

    state: State
    """The state in the newest checkpoint that has it."""
    sources: tuple[_At, ...]
    columns: tuple[str, ...]

    def __repr__(self) -> str:
        return f"StateRange({self.state!r} of {len(self.sources)} checkpoints, {', '.join(self.columns)})"

    @classmethod
    def of(
        cls, checkpoints: Sequence[Checkpoint], operator: str, state: str, *, with_expired: bool = False
    ) -> StateRange:
        """Return all rows and columns. Raises as ``CheckpointStore.states_over`` does."""
        checkpoints = [one.with_expired() for one in checkpoints] if with_expired else checkpoints
        ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.id)
        newest = newest_declaration(ordered[::-1], operator, state)
        sources = [_At(one, one.id, None) for one in ordered if declared_in(one, newest) is not None]
        return cls(newest, tuple(sources), tuple(_columns(newest)))

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch. Reads nothing."""
        columns = _columns(self.state)
        return pa.schema([columns[name] for name in self.columns])

    def batches(self, *, batch_rows: int = 131_072) -> Iterator[pa.RecordBatch]:
        """Stream the rows in batches of up to ``batch_rows`` rows and 16 MiB, oldest first."""
        schema = self.schema
        names = {field.name: name for name, field in own_columns(self.state).items()}
        wanted = Wanted(tuple(names[name] for name in schema.names if name != CHECKPOINT_ID.name))
        for source in self.sources:
            task = source.opened(self.state).task
            for batch in task.batches(as_schema=self.state.current, batch_rows=batch_rows, wanted=wanted):
                number = pa.repeat(pa.scalar(source.checkpoint_id, pa.int64()), batch.num_rows)
                columns = list(batch.columns)
                if CHECKPOINT_ID.name in schema.names:
                    columns.insert(schema.names.index(CHECKPOINT_ID.name), number)
                # A batch without columns still says how many rows it has.
                yield pa.RecordBatch.from_arrays(columns, schema=schema) if columns else batch

    def select(self, columns: Sequence[str]) -> StateRange:
        """Return the same rows with these columns only, in this order; others are not read.

        Raises ``InvalidInput`` for a column that does not exist or is named twice.
        """
        return replace(self, columns=chosen_columns(where_of(self.state), [*_columns(self.state)], columns))

    @property
    def stored_bytes(self) -> int:
        """About how many stored bytes are read. Reads the manifests."""
        return sum(source.opened(self.state).stored_bytes for source in self.sources)

    def split(self, parts: int) -> list[StateRange]:
        """Return the same rows in up to ``parts`` parts of about the same stored size.

        Read in order, the parts give the rows in order. Reads the manifests. Raises
        ``InvalidInput`` for less than one part.
        """
        if checked_parts(parts) == 1:
            return [self]
        rows = [(source.checkpoint_id, source.opened(self.state)) for source in self.sources]
        share = max(1, sum(one.stored_bytes for _, one in rows) // parts)
        pieces = [(number, one.split(max(1, round(one.stored_bytes / share)))) for number, one in rows]
        sized = [(_At(None, number, one), one.stored_bytes) for number, split in pieces for one in split]
        return [replace(self, sources=tuple(sources)) for sources in packed(sized, parts)]


def _columns(state: State) -> dict[str, pa.Field]:
    return {CHECKPOINT_ID.name: CHECKPOINT_ID, **{field.name: field for field in own_columns(state).values()}}
