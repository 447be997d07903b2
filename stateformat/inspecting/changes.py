"""What changed in a state from one checkpoint to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from ..model import State
from ..reading import checked_parts, chosen_columns
from ..tables import ArrowStream, rebatch
from .comparing import CHANGE, Side, Step, planned, side_of
from .subjects import CHECKPOINT_ID, declared_in, newest_declaration, own_columns, packed, where_of

if TYPE_CHECKING:
    from ..reading import Checkpoint


class _Pair(NamedTuple):
    """Two checkpoints, and how they are compared where that has been planned."""

    old: Checkpoint | None
    new: Checkpoint | None
    checkpoint_id: int
    steps: tuple[Step, ...] | None


@dataclass(frozen=True)
class StateChanges(ArrowStream):
    """The changes of a state between checkpoints: a feed. Picklable.

    Columns: those of the state, ``_change`` (utf8: insert, delete, update_before, update_after) and
    ``_checkpoint_id`` (int64: the checkpoint in which the change shows). An update is two rows, the
    one before it first, next to each other. Rows of the earlier checkpoint are brought to the
    schema of the later one before they are compared: a column that was added has its default or
    null there, and one that was widened has not changed.

    Rows of keyed state are told apart by their row key. All other rows have no key; each is
    inserted or deleted as often as one side has it more. Values are equal by their bits, with one
    NaN; the entries of a map are compared in their order. Order: by checkpoint, keyed state then by
    key group where both checkpoints have the same ones.

    Committables have a ``_checkpoint_id`` of their own; here it is ``_prepared_checkpoint_id``.

    A row that expired on the way is deleted, in the checkpoint at which it had; so states with a
    ttl are read whole, on both sides.

    Reading raises as ``ReadTask.batches`` does. What metadata shows to be equal is not read.
    """

    state: State
    """The state in the newest of the checkpoints that has it."""
    pairs: tuple[_Pair, ...]
    columns: tuple[str, ...]

    def __repr__(self) -> str:
        ids = ", ".join(str(pair.checkpoint_id) for pair in self.pairs)
        return f"StateChanges({self.state!r} in {ids or 'no checkpoint'}; {', '.join(self.columns)})"

    @classmethod
    def between(
        cls, checkpoints: Sequence[Checkpoint], operator: str, state: str, *, with_expired: bool = False
    ) -> StateChanges:
        """Return the changes from each checkpoint to the next; they come oldest first.

        ``CheckpointStore.changes`` says what is raised.
        """
        checkpoints = [one.with_expired() for one in checkpoints] if with_expired else checkpoints
        newest = newest_declaration(checkpoints[::-1], operator, state)
        for one in checkpoints:
            declared_in(one, newest)
        pairs = [_Pair(old, new, new.id, None) for old, new in pairwise(checkpoints)]
        return cls(newest, tuple(pairs), tuple(_columns(newest)))

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch. Reads nothing."""
        columns = _columns(self.state)
        return pa.schema([columns[name] for name in self.columns])

    def batches(self, *, batch_rows: int = 131_072) -> Iterator[pa.RecordBatch]:
        """Stream the changes in batches of up to ``batch_rows`` rows and 16 MiB."""
        for checkpoint_id, step in self._steps(1):
            with closing(step.changes()) as tables:
                made = (self._shown(table, checkpoint_id) for table in tables)
                yield from rebatch(made, self.schema, batch_rows)

    def select(self, columns: Sequence[str]) -> StateChanges:
        """Return the same changes with these columns only, in this order.

        An update stays where only a column that is left out has changed. Raises ``InvalidInput``
        for a column that is not there, or that is named twice.
        """
        return replace(self, columns=chosen_columns(where_of(self.state), [*_columns(self.state)], columns))

    @property
    def stored_bytes(self) -> int:
        """About how much is read, as it is stored. Reads the manifests."""
        return sum(step.size_bytes for _, step in self._steps(1))

    def split(self, parts: int) -> list[StateChanges]:
        """Return the same changes in up to ``parts`` parts that read about the same.

        Parts in their order give the changes in theirs. Reads the manifests. Raises
        ``InvalidInput`` for less than one part.
        """
        if checked_parts(parts) == 1:
            return [self]
        steps = self._steps(parts)
        sized = [(_Pair(None, None, number, (step,)), step.size_bytes) for number, step in steps]
        return [replace(self, pairs=tuple(pairs)) for pairs in packed(sized, parts)]

    def _steps(self, parts: int) -> Iterator[tuple[int, Step]]:
        last: Checkpoint | None = None
        for pair in self.pairs:
            steps = pair.steps
            if steps is None:
                assert pair.old is not None
                assert pair.new is not None
                # A checkpoint keeps its manifest: of many, only those of the pair are held.
                old = last if last is not None and last.id == pair.old.id else pair.old
                last = pair.new if len(self.pairs) == 1 else copy(pair.new)
                steps = planned(self._side(old), self._side(last), self.state, parts)
            yield from ((pair.checkpoint_id, step) for step in steps)

    def _side(self, checkpoint: Checkpoint) -> Side | None:
        declared = declared_in(checkpoint, self.state)
        return None if declared is None else side_of(checkpoint, declared, self.state.current)

    def _shown(self, table: pa.Table, checkpoint_id: int) -> pa.Table:
        schema = self.schema
        sources = {field.name: name for name, field in own_columns(self.state).items()}
        number = pa.repeat(pa.scalar(checkpoint_id, pa.int64()), len(table))
        columns = [number if name == CHECKPOINT_ID.name else table[sources.get(name, name)] for name in schema.names]
        return pa.Table.from_arrays(columns, schema=schema)


def _columns(state: State) -> dict[str, pa.Field]:
    own = {field.name: field for field in own_columns(state).values()}
    return {**own, CHANGE.name: CHANGE, CHECKPOINT_ID.name: CHECKPOINT_ID}
