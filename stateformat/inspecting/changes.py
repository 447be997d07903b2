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
    """Two checkpoints, and how they are compared if that is planned already."""

    old: Checkpoint | None
    new: Checkpoint | None
    checkpoint_id: int
    steps: tuple[Step, ...] | None


@dataclass(frozen=True)
class StateChanges(ArrowStream):
    """A feed of the changes of a state between checkpoints. Picklable.

    Columns: those of the state, then ``_change`` (utf8: insert, delete, update_before,
    update_after) and ``_checkpoint_id`` (int64: the checkpoint in which the change appears), both
    not nullable. An update is two adjacent rows, update_before first. Rows of the earlier
    checkpoint are converted to the schema of the later one before they are compared: an added
    column has its default or null there, and a widened column has not changed.

    Rows of keyed state are matched by their row key. Other rows have no key; each is inserted or
    deleted as many times as one side has it more often. Values are equal if their bits are, except
    that every NaN equals every other; map entries are compared in their order. Order: by
    checkpoint, and keyed state then by key group if both checkpoints have the same key groups.

    Committables have their own ``_checkpoint_id``; here it is named ``_prepared_checkpoint_id``.

    A row that expired in between is shown as deleted, at the checkpoint by which it had expired. So
    states with a ttl are read whole, on both sides.

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
        """Return the changes from each checkpoint to the next. Give ``checkpoints`` oldest first.

        Raises as ``CheckpointStore.changes`` does.
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

        An update remains even if only columns that are left out have changed. Raises
        ``InvalidInput`` for a column that does not exist or is named twice.
        """
        return replace(self, columns=chosen_columns(where_of(self.state), [*_columns(self.state)], columns))

    @property
    def stored_bytes(self) -> int:
        """About how many stored bytes are read. Reads the manifests."""
        return sum(step.size_bytes for _, step in self._steps(1))

    def split(self, parts: int) -> list[StateChanges]:
        """Return the same changes in up to ``parts`` parts that read about the same amount.

        Read in order, the parts give the changes in order. Reads the manifests. Raises
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
                # A checkpoint keeps its manifest: of many checkpoints, only those of the pair are
                # held.
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
