"""What a read returns: a stream that is planned once and split among Spark's tasks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from stateformat.errors import InvalidInput
from stateformat.inspecting import METADATA_TABLES, MetadataRows, StateChanges, StateRange
from stateformat.model import known_names
from stateformat.reading import StateRows, keys_from_json
from stateformat.store import CheckpointStore, open as open_at

from .options import ReadOptions

PART_BYTES_MAX: Final = 64 * 2**20
"""If a partition would have more stored state than this, there are more of them than cores."""
PART_BYTES_MIN: Final = 4 * 2**20
"""If a partition would have less stored state than this, there are fewer of them than cores."""


Readable = StateRows | StateRange | StateChanges | MetadataRows


def open_store(options: ReadOptions) -> CheckpointStore:
    """Return the store of a read. Reads nothing, unless the URL may be ``STORE@NAME``."""
    return open_at(options.url, allow_outside=options.allow_outside, **options.storage)


def stream_of(options: ReadOptions) -> Readable:
    """Find the checkpoints and the rows that a read asks for. The result is picklable.

    Raises ``InvalidInput`` for a table, operator, state, column or key that does not exist,
    ``NotFound``, and whatever a damaged checkpoint raises.
    """
    found = _whole(open_store(options), options)
    if options.key is not None:
        assert isinstance(found, StateRows)
        found = found.at_keys(keys_from_json(found.state, options.key, many=True))
    return found if options.columns is None else found.select(options.columns)


def _whole(store: CheckpointStore, options: ReadOptions) -> Readable:
    if options.table is not None:
        if options.table not in METADATA_TABLES:
            raise InvalidInput(
                f"a store has no table {options.table!r}; {known_names([*METADATA_TABLES], options.table)}"
            )
        ids = None if options.checkpoint is None else [options.checkpoint]
        return MetadataRows.of(options.table, store.checkpoints(ids))
    assert options.operator is not None
    assert options.state is not None
    if options.changes is not None:
        start, end = options.changes
        last = store.open().id if end is None else end
        return store.changes(
            options.operator, options.state, start, last, every=options.every, with_expired=options.with_expired
        )
    if options.all_checkpoints:
        return store.states_over(options.operator, options.state, with_expired=options.with_expired)
    rows = store.open(options.checkpoint).state(options.operator, options.state)
    return rows.with_expired() if options.with_expired else rows


def parts_of(stream: Readable, parts: int | None) -> Sequence[Readable]:
    """Split a stream into ``parts``; if None, into as many as :func:`part_count` returns."""
    return stream.split(parts or part_count(stream.stored_bytes))


def part_count(size_bytes: int) -> int:
    """Return how many tasks read this much stored state. A worker knows only its own cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(-(-size_bytes // PART_BYTES_MAX), min(cores, size_bytes // PART_BYTES_MIN), 1)
