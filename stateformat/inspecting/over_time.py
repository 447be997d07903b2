"""One state over several checkpoints: its rows in each, and what changed from one to the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import pyarrow as pa

from ..errors import ErrorKind, InvalidInput, InvalidState
from ..model import Mode, State
from ..reading import StateRows, Wanted, checked_parts, chosen_columns, evolve_table
from ..schema import row_schema, segment_schema
from ..tables import ArrowStream, rebatch
from .comparing import Side, Step, planned, side_of
from .matching import CHANGE

if TYPE_CHECKING:
    from ..reading import Checkpoint


T = TypeVar("T")

CHECKPOINT_ID: Final = pa.field("_checkpoint_id", pa.int64(), nullable=False)
"""The checkpoint that a row belongs to, or in which a change appears."""
PREPARED_ID: Final = "_prepared_checkpoint_id"
"""The name of committables' own ``_checkpoint_id`` beside :data:`CHECKPOINT_ID`."""


def newest_declaration(checkpoints: Iterable[Checkpoint], operator: str, state: str) -> State:
    """Return the state in the first checkpoint that has it. Give ``checkpoints`` newest first.

    ``operator``: a uid, or the name of one operator. Raises ``InvalidInput`` if no checkpoint has
    the state: the error of the first one that has the operator.
    """
    unknown: InvalidInput | None = None
    lacking: InvalidInput | None = None
    for checkpoint in checkpoints:
        try:
            uid = checkpoint.operator_uid(operator)
        except InvalidInput as error:
            unknown = unknown or error
            continue
        try:
            return checkpoint.record.state(uid, state)
        except InvalidInput as error:
            lacking = lacking or error
    raise lacking or unknown or InvalidInput("no checkpoint was given; give at least one")


def declared_in(checkpoint: Checkpoint, state: State) -> State | None:
    """Return the state as a checkpoint declares it; None if it has none of that name.

    Raises ``InvalidInput`` if the two are different states that share a name, or if the rows cannot
    be converted to the later schema.
    """
    found = checkpoint.record.by_state.get((state.operator, state.name))
    if found is None:
        return None
    for what, here, there in (
        ("mode", found.mode, state.mode),
        ("kind", found.kind, state.kind),
        ("clock", found.clock, state.clock),
        ("key columns", _keys(found), _keys(state)),
    ):
        if here != there:
            raise InvalidInput(
                f"state {state.name!r} of {state.operator!r} has {what} {_text(here)} in checkpoint {checkpoint.id} "
                f"and {_text(there)} later: its rows cannot be brought together. Read each checkpoint by itself",
                kind=ErrorKind.SCHEMA_MISMATCH,
                checkpoint_id=checkpoint.id,
            )
    try:
        evolve_table(segment_schema(found).empty_table(), found.current, state.current)
    except InvalidState as error:
        raise InvalidInput(
            f"the rows of state {state.name!r} of {state.operator!r} in checkpoint {checkpoint.id} cannot be brought "
            f"to its later columns: {error}. Read each checkpoint by itself",
            kind=error.kind,
            checkpoint_id=checkpoint.id,
        ) from error
    return found


def _keys(state: State) -> tuple[str, ...]:
    types = segment_schema(state)
    return tuple(f"{name} {types.field(name).type}" for name in state.key_columns)


def _text(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def own_columns(state: State) -> Mapping[str, pa.Field]:
    """Return the columns of a state's rows as users see them beside :data:`CHECKPOINT_ID`, by
    stateformat's name.
    """
    fields = row_schema(state)
    if state.mode is not Mode.COMMITTABLES:
        return {field.name: field for field in fields}
    return {
        field.name: field.with_name(PREPARED_ID if field.name == CHECKPOINT_ID.name else field.name) for field in fields
    }


def where_of(state: State) -> str:
    """Return how messages name a state."""
    return f"state {state.name!r} of {state.operator!r}"


def packed(sized: Sequence[tuple[T, int]], parts: int) -> list[list[T]]:
    """Distribute items, in order, over up to ``parts`` lists of about the same total size."""
    share = max(1, sum(size for _, size in sized) // parts)
    found: list[list[T]] = [[]]
    held = 0
    for item, size in sized:
        if found[-1] and held >= share and len(found) < parts:
            found.append([])
            held = 0
        found[-1].append(item)
        held += size
    return found


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
        return cls(newest, tuple(sources), tuple(_range_columns(newest)))

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch. Reads nothing."""
        columns = _range_columns(self.state)
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
        return replace(self, columns=chosen_columns(where_of(self.state), [*_range_columns(self.state)], columns))

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


def _range_columns(state: State) -> dict[str, pa.Field]:
    return {CHECKPOINT_ID.name: CHECKPOINT_ID, **{field.name: field for field in own_columns(state).values()}}


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
        return cls(newest, tuple(pairs), tuple(_change_columns(newest)))

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch. Reads nothing."""
        columns = _change_columns(self.state)
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
        return replace(self, columns=chosen_columns(where_of(self.state), [*_change_columns(self.state)], columns))

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


def _change_columns(state: State) -> dict[str, pa.Field]:
    own = {field.name: field for field in own_columns(state).values()}
    return {**own, CHANGE.name: CHANGE, CHECKPOINT_ID.name: CHECKPOINT_ID}
