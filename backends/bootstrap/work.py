"""What one task of a bootstrap does: functions that every engine runs.

Rows are first made to conform to their state (:func:`conformed`) and dealt to subtasks
(:func:`deal`). Then, for each subtask, all its rows become one segment (:func:`write_place`). The
only effect is on the storage: a task that runs twice writes one more segment, which nobody names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidState
from stateformat.model import Handle, Mode
from stateformat.schema import KEY_GROUP
from stateformat.segments import (
    SegmentPlace,
    SortedRuns,
    WriteOptions,
    groups_of_keys,
    normalize_rows,
    one_array,
    write_segment,
    write_unsorted,
)
from stateformat.snapshot import WriteContext
from stateformat.tables import take_table
from stateformat.ttl import NO_TIME_US, TTL_COLUMN

from ..rewrite import Place, by_owner, segment_place
from .declared import is_list
from .inputs import ORDER, SEQUENCE, StateInput
from .latest import Latest

_RUN_BYTES: Final = 32 << 20
"""Rows that are sorted in memory, with their numbers and as sorted."""


class Written(NamedTuple):
    """What one subtask has of a state, or why it has nothing."""

    handle: Handle | None
    repeated: tuple[str, ...] = ()
    """Up to three keys that several rows have, as text with the number of their rows."""


def conformed(rows: pa.Table, input: StateInput, first: int) -> pa.Table:
    """Return the rows with a segment's columns except ``_key_group``, then ``_order``,
    ``_sequence``.

    The last two exist only if the state needs them. ``first`` is the sequence number of the first
    row. Raises ``InvalidState`` for a value that does not fit its column's type, and for a null
    that is not allowed.
    """
    own = {}
    names = [name for name in rows.column_names if name != input.order_by or input.order_by in _columns(input)]
    sequence = pa.array(np.arange(first, first + len(rows), dtype=np.int64))
    if is_list(input.state) and not input.indexed:
        own["_index"] = sequence
    if "_tag" in _columns(input) and "_tag" not in names:
        own["_tag"] = pa.repeat(pa.scalar("", pa.string()), len(rows))
    if input.state.ttl is not None and TTL_COLUMN not in names:
        # Of event time there is none yet.
        now_us = NO_TIME_US if input.state.ttl.clock == "event_time" else input.now_us
        own[TTL_COLUMN] = pa.repeat(pa.scalar(now_us, pa.timestamp("us")), len(rows))
    if "_timestamp" in names and pa.types.is_timestamp(rows["_timestamp"].type):
        own["_timestamp"] = _numbers(rows["_timestamp"], f"{input.where}: column '_timestamp'")
    chosen = pa.table({**{name: rows[name] for name in names}, **own})
    table = normalize_rows(chosen, input.state, schema_id=input.state.current.id, delta=False, where=input.where)
    if input.order_by is not None:
        table = table.append_column(ORDER, _numbers(rows[input.order_by], f"{input.where}: column {input.order_by!r}"))
    if not input.keyed:
        table = table.append_column(SEQUENCE, pa.chunked_array([sequence]))
    return table


def _columns(input: StateInput) -> tuple[str, ...]:
    return (*input.state.row_key, *(item.name for item in input.state.current.fields))


def _numbers(column: pa.ChunkedArray, what: str) -> pa.ChunkedArray:
    """Numbers, dates and timestamps (in µs) as int64 in the same order."""
    kind = column.type
    if column.null_count:
        raise InvalidState(
            f"{what} says the order of rows and is null in {column.null_count} of {len(column)}. Fill it",
            kind=ErrorKind.NULL_NOT_ALLOWED,
        )
    try:
        if pa.types.is_timestamp(kind):
            return column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
        if pa.types.is_date(kind):
            return column.cast(pa.date32()).cast(pa.int32()).cast(pa.int64())
        if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
            return column.cast(pa.int64())
        if pa.types.is_floating(kind):
            bits = (column.cast(pa.float64()).to_numpy() + 0.0).view(np.int64)
            return pa.chunked_array([pa.array(np.where(bits < 0, bits ^ np.int64(2**63 - 1), bits))])
    except pa.ArrowException as error:
        raise InvalidState(f"{what} is {kind}, and not every value of it is a number of 64 bits: {error}") from error
    raise InvalidState(f"{what} is {kind} and says the order of rows. Cast it to a number, a date or a timestamp")


def deal(rows: pa.Table, input: StateInput, turn: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield conforming rows by the subtask that will hold them.

    Keyed rows go to the owner of their key group. Without keys: even-split entries are divided
    into a part for each subtask, beginning with subtask ``turn``; union entries all go to the first
    subtask; broadcast rows go to every subtask.
    """
    parallelism = input.operator.parallelism
    if input.keyed:
        yield from by_owner(rows, input.state, input.operator)
        return
    mode = input.state.mode
    cuts = np.linspace(0, len(rows), parallelism + 1).astype(np.int64).tolist()
    for subtask in range(parallelism if mode is not Mode.UNION else 1):
        part, owner = rows, subtask
        if mode is Mode.EVEN_SPLIT:
            part, owner = rows.slice(cuts[subtask], cuts[subtask + 1] - cuts[subtask]), (subtask + turn) % parallelism
        for batch in part.to_batches():
            if len(batch):
                yield owner, batch


def write_place(
    context: WriteContext,
    input: StateInput,
    subtask: int,
    batches: Iterable[pa.RecordBatch],
    done: Callable[[int], None],
    *,
    in_order: bool = False,
) -> Written:
    """Write all rows of one subtask, in bounded memory.

    ``batches`` may come in any order; ``in_order``: they come in the order the rows were given.
    """
    place = segment_place(context, Place(input.state.operator, input.state.name, subtask))
    options = replace(context.options, trust_key_groups=True, check_unique=not input.last)
    rows = _counted(batches, done)
    try:
        keys = input.sorted_by(in_order=in_order)
        if keys:
            rows = _sorted(rows, input, keys)
        if keys or not input.keyed:
            rows = _without(rows, ORDER.name, SEQUENCE.name)
            return Written(write_segment(context.storage, place, rows, options))
        if input.last:
            return _write_last(context, input, place, rows, options)
        return Written(write_unsorted(context.storage, place, _without(rows, ORDER.name), options))
    except InvalidState as error:
        if error.kind is not ErrorKind.DUPLICATE_ROW_KEY:
            raise
        both = zip(error.details["row_keys"], error.details["row_counts"], strict=True)
        return Written(None, tuple(f"{key!r} ({rows} rows)" for key, rows in both))


def _write_last(
    context: WriteContext,
    input: StateInput,
    place: SegmentPlace,
    rows: Iterable[pa.RecordBatch],
    options: WriteOptions,
) -> Written:
    latest = Latest(input.state.row_key, ORDER.name)
    handle = write_unsorted(context.storage, place, latest.of(rows), options)
    if latest.undecided:
        return Written(None, tuple(latest.undecided))
    return Written(handle)


def _counted(batches: Iterable[pa.RecordBatch], done: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch
        done(batch.num_rows)


def _without(batches: Iterable[pa.RecordBatch], *names: str) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.select([name for name in batch.schema.names if name not in names])


def _sorted(batches: Iterable[pa.RecordBatch], input: StateInput, keys: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows by key group, then by ``keys``. Entries of lists get new places by this order."""
    held: list[pa.Table] = []
    held_bytes = 0
    with closing(SortedRuns(input.state, keys)) as runs:

        def set_aside() -> None:
            rows = pa.concat_tables(held)
            held.clear()
            rows = take_table(rows, np.lexsort([rows[name].to_numpy() for name in reversed(keys)]))
            runs.add(rows, _groups(rows, input))

        for batch in batches:
            held.append(pa.Table.from_batches([batch]))
            held_bytes += batch.nbytes
            if held_bytes >= _RUN_BYTES:
                set_aside()
                held_bytes = 0
        if held:
            set_aside()
        first = 0
        for rows in runs.merged():
            if input.keyed:
                index = pa.array(np.arange(first, first + len(rows), dtype=np.int64))
                rows = rows.set_column(rows.column_names.index("_index"), "_index", index)
            first += len(rows)
            yield from rows.to_batches()


def _groups(rows: pa.Table, input: StateInput) -> npt.NDArray[np.int32]:
    operator = input.operator
    if not input.keyed:
        return np.zeros(len(rows), np.int32)
    if KEY_GROUP.name in rows.column_names:
        given: npt.NDArray[np.int32] = one_array(rows[KEY_GROUP.name]).to_numpy()
        return given
    keys = [rows[name] for name in input.state.key_columns]
    return groups_of_keys(keys, operator.max_parallelism or 0, operator.key_hash or "")
