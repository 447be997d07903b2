"""What one task of a rewrite does: three functions that both engines run.

They are pure but for the storage that they read from and write to: everything they need is in their arguments, which are
picklable and small, and running one twice writes another segment that nobody names (``gc`` finds it). So an engine may
run a task again whenever it likes, and takes one answer for each place.

- :func:`write_move` reads the slices of one place and writes its segment.
- :func:`deal` reads the rows of one old subtask, gives them new key groups, and says which target each batch is for.
- :func:`write_target` sorts what all sources dealt to one place, and writes its segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from stateformat.errors import InvalidInput
from stateformat.keys import range_bounds
from stateformat.model import Handle, State
from stateformat.reading import rekey
from stateformat.segments import SegmentPlace, WriteOptions, write_segment, write_unsorted
from stateformat.snapshot import WriteContext

from .planning import Move, Place, Source

Done: TypeAlias = Callable[[int], None]
"""Told of each piece of rows that is on its way to storage, with how many there are; from any thread."""


def ignored(rows: int) -> None:
    """Nobody wants to know."""


DEAL_BYTES = 8 * 2**20
"""How many bytes of rows a source hashes and sorts at once."""


def write_move(context: WriteContext, move: Move, done: Done = ignored) -> Handle:
    """Read what belongs to one place, merged and evolved, and write it. Memory: a row group and a few batches."""
    batches = _counted(move.read.batches(), done)
    return write_segment(context.storage, _where(context, move.place), batches, _options(context))


def deal(source: Source) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of rows with their new key groups, each with the number of its target.

    Columns: ``segment_schema`` of the state. Within a batch rows ascend by ``_key_group``; rows of one key group keep their
    order. Holds :data:`DEAL_BYTES` of rows at a time.
    """
    operator, state = source.operator, source.read.state
    if operator.max_parallelism is None or operator.key_hash is None:
        raise InvalidInput(f"operator {operator.uid!r} has no max parallelism or key hash; a published one has both")
    bounds = np.asarray(range_bounds(operator.parallelism, operator.max_parallelism))
    for rows in _gathered(source.read.batches(), DEAL_BYTES):
        clustered = rekey(rows, state, operator.max_parallelism, operator.key_hash).combine_chunks()
        borders = np.searchsorted(clustered["_key_group"].to_numpy(), bounds)
        for subtask, (start, end) in enumerate(pairwise(borders.tolist())):
            for batch in clustered.slice(start, end - start).to_batches():
                yield source.first_target + subtask, batch


def _gathered(batches: Iterable[pa.RecordBatch], size_bytes: int) -> Iterator[pa.Table]:
    """Batches put together to tables of at least ``size_bytes``, the last one excepted."""
    waiting: list[pa.RecordBatch] = []
    held = 0
    for batch in batches:
        waiting.append(batch)
        held += batch.nbytes
        if held >= size_bytes:
            yield pa.Table.from_batches(waiting)
            waiting, held = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def write_target(
    context: WriteContext, place: Place, batches: Iterable[pa.RecordBatch], done: Done = ignored
) -> Handle:
    """Write what was dealt to one place, by whatever sources and in whatever order, in bounded memory.

    ``batches`` are those of :func:`deal`, at least one, all with ``_key_group`` or all without. The writer sorts: keyed rows
    by key group, records in flight by key group, sender and sequence number, so that the order of a channel does not depend
    on the order in which batches come.
    """
    return write_unsorted(context.storage, _where(context, place), _counted(batches, done), _options(context))


def _counted(batches: Iterable[pa.RecordBatch], done: Done) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch
        done(batch.num_rows)


def _state(context: WriteContext, place: Place) -> State:
    return next(item for item in context.states if (item.operator, item.name) == (place.operator, place.state))


def _where(context: WriteContext, place: Place) -> SegmentPlace:
    state = _state(context, place)
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


def _options(context: WriteContext) -> WriteOptions:
    # Key groups were verified when the rows were read, or have just been computed; row keys were unique in each layer,
    # and merging layers keeps them so.
    return replace(context.options, check_unique=False, trust_key_groups=True)


__all__ = ["DEAL_BYTES", "Done", "deal", "ignored", "write_move", "write_target"]
