"""What one task of a rewrite does: the functions that both engines run.

They need only their arguments, which are small and can be pickled; their only effect is on the
storage. A task that runs twice writes one more segment, which nothing refers to (``gc`` finds it),
so an engine may repeat tasks freely if it takes one result per place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from stateformat.errors import InvalidInput
from stateformat.graph import Operator
from stateformat.keys import range_bounds
from stateformat.model import Handle, State
from stateformat.reading import rekey
from stateformat.segments import SegmentPlace, WriteOptions, write_segment, write_unsorted
from stateformat.snapshot import WriteContext
from stateformat.tables import Spill

from .naming import shaped
from .planning import Move, Place, RehashSource
from .transforming import Transformation

Done: TypeAlias = Callable[[int], None]
"""Called with the number of rows of each piece on its way to storage, from any thread."""

Seen: TypeAlias = Callable[[Place, int], None]
"""Called with a place of a state and how many rows of the state were read for it, from any
thread.
"""

DISTRIBUTE_BYTES: Final = 8 * 2**20
"""How many bytes of rows a source hashes and sorts at once."""


def _ignore(rows: int) -> None:
    pass


def write_move(context: WriteContext, move: Move, done: Done = _ignore, seen: Done = _ignore) -> Iterator[Handle]:
    """Read what belongs to one place, merged and in the current schema, and write it, and its
    copies if any.

    ``seen`` is called with the rows read. Holds a row group and a few batches in memory; rows that
    are written several times wait in a temporary file.
    """
    batches = _counted(shaped(move.read, move.shape, move.written_by, seen), done)
    options = _options(context, check_unique=isinstance(move.shape, Transformation))
    if not move.copies:
        yield write_segment(context.storage, segment_place(context, move.place), batches, options)
        return
    with Spill[int]() as rows:
        for batch in batches:
            rows.add(0, pa.Table.from_batches([batch]))
        for place in (move.place, *move.copies):
            yield write_segment(context.storage, segment_place(context, place), rows.read(0), options)


def distribute(source: RehashSource, seen: Done = _ignore) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Read a source and hash its keys: yields batches of rows, each with the number of its target.
    ``seen`` is called with the rows read.

    Columns: ``segment_schema`` of the state as it will be. Within a batch rows ascend by the new
    ``_key_group``; rows of one key group keep their order. Holds :data:`DISTRIBUTE_BYTES` of rows
    at a time.
    """
    operator = source.operator
    state = source.read.state if source.shape is None else source.shape.state
    for rows in gathered(shaped(source.read, source.shape, source.written_by, seen), DISTRIBUTE_BYTES):
        for subtask, batch in by_owner(rows, state, operator):
            yield source.first_target + subtask, batch


def by_owner(rows: pa.Table, state: State, operator: Operator) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of a keyed state by the subtask that owns their key group, ascending.

    ``rows`` has at least the key columns. Batches have ``_key_group`` first and ascend by it.
    """
    if operator.max_parallelism is None or operator.key_hash is None:
        raise InvalidInput(f"operator {operator.uid!r} has no max parallelism or key hash; a published one has both")
    bounds = np.asarray(range_bounds(operator.parallelism, operator.max_parallelism))
    clustered = rekey(rows, state, operator.max_parallelism, operator.key_hash).combine_chunks()
    borders = np.searchsorted(clustered["_key_group"].to_numpy(), bounds)
    for subtask, (start, end) in enumerate(pairwise(borders.tolist())):
        for batch in clustered.slice(start, end - start).to_batches():
            yield subtask, batch


def gathered(batches: Iterable[pa.RecordBatch], size_bytes: int) -> Iterator[pa.Table]:
    """Yield batches as tables of at least ``size_bytes`` each, except the last."""
    waiting: list[pa.RecordBatch] = []
    waiting_bytes = 0
    for batch in batches:
        waiting.append(batch)
        waiting_bytes += batch.nbytes
        if waiting_bytes >= size_bytes:
            yield pa.Table.from_batches(waiting)
            waiting, waiting_bytes = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def write_target(
    context: WriteContext,
    place: Place,
    batches: Iterable[pa.RecordBatch],
    done: Done = _ignore,
    *,
    check_unique: bool = False,
) -> Handle:
    """Write what all sources distributed to one place, in bounded memory.

    ``batches`` are those of :func:`distribute` in any order, all with ``_key_group`` or all
    without. The writer sorts keyed rows by key group, and in-flight records by key group, sender
    and sequence number. With ``check_unique`` row keys that occur in several rows raise
    ``InvalidState``, which names three of them; otherwise they are known to be unique.
    """
    options = _options(context, check_unique=check_unique)
    return write_unsorted(context.storage, segment_place(context, place), _counted(batches, done), options)


def _counted(batches: Iterable[pa.RecordBatch], done: Done) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch
        done(batch.num_rows)


def segment_place(context: WriteContext, place: Place) -> SegmentPlace:
    """Return where the segment of a place is written, at the current schema of its state."""
    state = next(item for item in context.states if (item.operator, item.name) == (place.operator, place.state))
    return SegmentPlace(
        job_id=context.job_id,
        checkpoint_id=context.checkpoint_id,
        attempt_id=context.attempt_id,
        operator=context.graph.operator(place.operator),
        state=state,
        subtask=place.subtask,
        layer=0,
        schema_id=state.current.id,
    )


def _options(context: WriteContext, *, check_unique: bool = False) -> WriteOptions:
    # The reader verified the key groups, or they have just been computed. Row keys were unique in
    # each layer, and merging layers keeps them so; a function may not.
    return replace(context.options, check_unique=check_unique, trust_key_groups=True)
