"""``bootstrap``: check what is given, write it, publish the first checkpoint.

Everything is checked before the first row is read, as far as columns and names tell it. Nothing is
published unless every state has been written: a failure, a kill or an interrupt leaves the store
without a checkpoint, and with some segments that nothing names.

Rows are first made to conform to their state (:func:`conformed`) and dealt to subtasks
(:func:`deal`). Then, for each subtask, all its rows become one segment (:func:`write_place`). The
only effect is on the storage: a task that runs twice writes one more segment, which nobody names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import stateformat as sf
from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.graph import brief, shortened
from stateformat.manifest import handles_table
from stateformat.model import PER_SUBTASK_MODES, Handle, Mode, Record, State, known_names
from stateformat.publication import CommitPermit
from stateformat.schema import KEY_GROUP
from stateformat.segments import (
    REPEATED_SHOWN,
    SegmentPlace,
    SortedRuns,
    WriteOptions,
    groups_of_keys,
    normalize_rows,
    one_array,
    write_segment,
    write_unsorted,
)
from stateformat.snapshot import Snapshot, WriteContext
from stateformat.states import coordinator_state, even_split_state
from stateformat.store import CheckpointStore
from stateformat.tables import Spill, cut, prefetch, table_from_python, take_table
from stateformat.ttl import NO_TIME_US, TTL_COLUMN

from ..dataflow.api import Source, StartingPoint
from ..dataflow.compile import Job
from ..dataflow.flow import Dataflow
from ..dataflow.graph import ENUMERATOR, SPLITS, SPLITS_SCHEMA
from ..rewrite import DISTRIBUTE_BYTES, Place, by_owner, counted, gathered, segment_place
from ..tasks import Workers
from .inputs import (
    ORDER,
    SEQUENCE,
    Latest,
    OnDuplicate,
    Rows,
    StateInput,
    compiled,
    find_state,
    is_list,
    state_input,
    stream_of,
)

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
    _noted: int,
    done: Callable[[int], None],
    *,
    in_order: bool = False,
) -> Written:
    """Write all rows of one subtask, in bounded memory.

    ``batches`` may come in any order; ``in_order``: they come in the order the rows were given.
    """
    place = segment_place(context, Place(input.state.operator, input.state.name, subtask))
    options = replace(context.options, trust_key_groups=True, check_unique=not input.last)
    rows = counted(batches, done)
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


Dealt: TypeAlias = list[tuple[int, pa.RecordBatch]]
_PIECE_ROWS: Final = 1 << 20
_AHEAD: Final = 2


class ThreadEngine:
    """Writes rows that export the Arrow C stream, and reads each batch once."""

    def __repr__(self) -> str:
        return brief(self)

    def schema(self, where: str, rows: Any) -> tuple[pa.Schema, Any]:
        """Return the columns of the rows, and what :meth:`write` reads."""
        return stream_of(where, rows)

    def write(
        self, context: WriteContext, input: StateInput, rows: Iterator[pa.RecordBatch], done: Callable[[int], None]
    ) -> list[Written]:
        """Write a state; return what each subtask with rows has of it, in order."""
        context = context.only(input.state.operator)
        buckets: Spill[int] = Spill()
        with buckets, closing(prefetch(_deals(rows, input), workers=_AHEAD, depth=_AHEAD + 1)) as dealt:
            for parts in dealt:
                for subtask, batch in parts:
                    buckets.add(subtask, pa.Table.from_batches([batch]))
            with Workers() as workers:
                write = partial(write_place, context, input, in_order=True)
                return workers.write_buckets(buckets, write, range(input.operator.parallelism), {}, done)


def _deals(rows: Iterator[pa.RecordBatch], input: StateInput) -> Generator[Callable[[], Dealt], None, None]:
    """Calls that deal the rows, a few megabytes each."""
    first = turn = 0
    for batch in rows:
        for table in gathered(cut(batch, _PIECE_ROWS, DISTRIBUTE_BYTES), DISTRIBUTE_BYTES):
            yield partial(_dealt, table, input, first, turn)
            first, turn = first + len(table), turn + 1


def _dealt(rows: pa.Table, input: StateInput, first: int, turn: int) -> Dealt:
    return list(deal(conformed(rows, input, first), input, turn))


def source_states(uid: str, start: StartingPoint) -> tuple[State, State]:
    """Return the states of a source: the splits of its readers, and its enumerator's."""
    return (
        even_split_state(uid, SPLITS, columns=SPLITS_SCHEMA),
        coordinator_state(uid, ENUMERATOR, columns=start.enumerator.schema),
    )


def source_snapshots(context: WriteContext, uid: str, start: StartingPoint) -> Iterator[Snapshot]:
    """Write the states of a source; yield the snapshots of its coordinator and each reader."""
    with context.coordinator(uid) as coordinator:
        coordinator.write(ENUMERATOR, start.enumerator)
    yield coordinator.snapshot()
    parallelism = context.graph.operator(uid).parallelism
    for subtask in range(parallelism):
        mine = start.splits[subtask::parallelism]
        rows = ({"split_id": split.id, "payload": split.payload, "position": split.position} for split in mine)
        with context.subtask(uid, subtask) as reader:
            reader.write(SPLITS, table_from_python(rows, SPLITS_SCHEMA, f"the splits of {uid!r}"))
        yield reader.snapshot()


PROPERTY: Final = "bootstrap."
"""Properties of a checkpoint that a bootstrap has published begin so."""


class Engine(Protocol):
    """Reads the rows of a state and writes them."""

    def schema(self, where: str, rows: Any) -> tuple[pa.Schema, Any]:
        """Return the columns of the given rows, and what :meth:`write` takes. Reads no row.

        Raises ``InvalidInput``, naming ``where``, for what the engine cannot read.
        """
        ...

    def write(
        self, context: WriteContext, input: StateInput, rows: Any, done: Callable[[int], None]
    ) -> Iterable[Written]:
        """Write the rows of a state; return what each subtask with rows got, in any order.

        It calls ``done`` with the number of rows just written, from any thread.
        """
        ...


@dataclass(frozen=True)
class Bootstrapped:
    """The published checkpoint, and what went into it."""

    permit: CommitPermit
    rows: Mapping[str, int]
    """The number of rows written for each given state, by ``operator/state``."""
    positions: Mapping[str, str]
    """By uid of a source, what it continues after."""

    @property
    def record(self) -> Record:
        """The record of the checkpoint."""
        return self.permit.record


def bootstrap(
    store: CheckpointStore | str | os.PathLike[str],
    flow: Dataflow,
    states: Mapping[str, Any],
    *,
    parallelism: int | None = None,
    per_operator: Mapping[str, int] | None = None,
    positions: Mapping[str, Any] | None = None,
    order_by: str | None = None,
    on_duplicate: OnDuplicate = "refuse",
    properties: Mapping[str, str] | None = None,
    options: WriteOptions | None = None,
    engine: Engine | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Bootstrapped:
    """Publish rows as the state of a job: the first checkpoint of an empty store.

    Example::

        bootstrap(
            "s3://bucket/store",
            flow,
            {"totals/totals": duckdb.sql("from 'history/*.parquet'")},
            parallelism=8,
            positions={"orders": "orders/2025/"},
        )

    - ``states``: by ``operator/state``, rows that export the Arrow C stream, or :class:`Rows` of
      them. Every other state of the dataflow is empty. :func:`columns_of` returns the columns.
    - ``parallelism``, ``per_operator``: as for a run.
    - ``positions``: by uid of a source, what the history covers; see the source's ``behind``. A
      source without one starts from the beginning.
    - ``order_by``, ``on_duplicate``: for every state that is not given as :class:`Rows`.
    - ``properties``: of the record. stateformat adds ``bootstrap.states`` and
      ``bootstrap.source.UID``.
    - ``progress``: called with ``operator/state`` and the number of rows just written, from any
      thread.

    Raises ``InvalidInput`` for what does not fit, by name, and for a store with a checkpoint;
    ``InvalidState`` for rows that contradict a state, with up to three keys if several rows have
    them; ``JobMismatch`` for another job's store; and what publishing raises.
    """
    place = store if isinstance(store, CheckpointStore) else sf.open(store)
    job = compiled(flow, parallelism, per_operator)
    _check_empty(place, flow)
    starts = _starting_points(job, positions or {})
    engine = engine or ThreadEngine()
    inputs = _inputs(job, states, Rows(None, order_by, on_duplicate), engine)
    declared = _declared(job, starts)
    pending = place.begin(
        job_id=flow.job_id,
        job_name=flow.name,
        graph=job.graph,
        states=declared,
        parent=None,
        properties={**(properties or {}), **_properties(inputs, starts)},
        options=options,
    )
    for uid in {state.operator for state in declared if state.ttl is not None}:
        pending.set_now(uid, event_time_us=NO_TIME_US, processing_time_us=time.time_ns() // 1000)
    context = pending.context
    handles: list[Handle] = []
    counts: dict[str, int] = {}
    for one, rows in inputs:
        counts[one.name] = 0
        handles += _written(one, engine.write(context, one, rows, partial(_report, progress, one.name)))
    for handle in handles:
        counts[f"{handle.operator}/{handle.state}"] += handle.rows
    for uid, start in starts.items():
        handles += [one for snapshot in source_snapshots(context, uid, start) for one in snapshot.handles]
    handles += _empty(job, declared, handles)
    pending.add_handles(handles_table(handles))
    return Bootstrapped(pending.publish(), counts, {uid: start.description for uid, start in starts.items()})


def _report(progress: Callable[[str, int], None] | None, name: str, rows: int) -> None:
    if progress is not None and rows:
        progress(name, rows)


def _check_empty(store: CheckpointStore, flow: Dataflow) -> None:
    permit = store.start(flow.job_id)
    if permit is not None:
        raise InvalidInput(
            f"{store.url} already holds checkpoint {permit.ref.checkpoint_id} of job {shortened(flow.job_id)}, and a "
            "bootstrap must be the first. Give an empty store",
            kind=ErrorKind.STORE_NOT_EMPTY,
            url=store.url,
        )


def _starting_points(job: Job, positions: Mapping[str, Any]) -> dict[str, StartingPoint]:
    if not isinstance(positions, Mapping):
        raise InvalidInput(f"the positions are {positions!r}. Give a mapping from the uid of a source to its position")
    found = {}
    sources = [uid for uid, step in job.flow.steps.items() if isinstance(step.logic, Source)]
    for given, position in positions.items():
        named = [uid for uid in sources if job.flow.steps[uid].name == given]
        uid = named[0] if given not in sources and len(named) == 1 else given
        if uid not in sources:
            raise InvalidInput(
                f"a position is given for {given!r}, which is no source of dataflow {shortened(job.flow.job_id)}; "
                f"{known_names(sources, given)}",
                kind=ErrorKind.UNKNOWN_OPERATOR,
            )
        logic = job.logic(uid)
        assert isinstance(logic, Source)
        try:
            found[uid] = logic.behind(position)
        except (TypeError, ValueError, AttributeError) as error:
            # Whatever a user gave, a source of another author may not have expected it.
            kind = error.kind if isinstance(error, InvalidInput) else ErrorKind.INVALID_ARGUMENT
            raise InvalidInput(f"source {uid!r} cannot begin behind {position!r}: {error}", kind=kind) from error
    return found


def _inputs(job: Job, states: Mapping[str, Any], given: Rows, engine: Engine) -> list[tuple[StateInput, Any]]:
    if not isinstance(states, Mapping):
        raise InvalidInput(f"the states are {type(states).__name__}. Give a mapping from OPERATOR/STATE to rows")
    found: dict[tuple[str, str], tuple[StateInput, Any]] = {}
    for name, rows in states.items():
        state = find_state(job, name)
        one = rows if isinstance(rows, Rows) else Rows(rows, given.order_by, given.on_duplicate)
        where = f"the rows of state {state.name!r} of operator {state.operator!r}"
        schema, stream = engine.schema(where, one.rows)
        checked = state_input(job.graph.operator(state.operator), state, one, schema)
        key = (state.operator, state.name)
        if key in found:
            raise InvalidInput(f"{where} are given twice, the second time as {name!r}. Give them once")
        found[key] = (checked, stream)
    return list(found.values())


def _declared(job: Job, starts: Mapping[str, StartingPoint]) -> list[State]:
    """The states of the job. Coordinators and sources without a position begin as in a first run,
    so they have none.
    """
    own = {uid: source_states(uid, start) for uid, start in starts.items()}
    kept = [
        state
        for state in job.states
        if state.mode is not Mode.COORDINATOR and not isinstance(job.logic(state.operator), Source)
    ]
    return [*kept, *(state for states in own.values() for state in states)]


def _written(input: StateInput, found: Iterable[Written]) -> list[Handle]:
    """The handles of a state. ``InvalidState`` for keys that stand on several rows."""
    found = list(found)
    repeated = [text for one in found for text in one.repeated]
    if repeated:
        keys = f"{', '.join(repeated[:REPEATED_SHOWN])}{' and perhaps more' if len(repeated) >= REPEATED_SHOWN else ''}"
        if input.last:
            what, advice = f"have several last rows by {input.order_by!r}", "Order them by a column that decides"
        else:
            what, advice = (
                "have several rows with one key",
                ("Keep the row that counts, or give on_duplicate='last' with order_by"),
            )
        raise InvalidState(
            f"{input.where} {what}: {keys}. {advice}. Nothing was published",
            kind=ErrorKind.DUPLICATE_ROW_KEY,
            operator=input.state.operator,
            state=input.state.name,
        )
    return [one.handle for one in found if one.handle is not None]


def _empty(job: Job, states: Iterable[State], handles: Iterable[Handle]) -> list[Handle]:
    """Handles of what has no rows: every subtask answers for every state."""
    answered = {(handle.operator, handle.state, handle.subtask) for handle in handles}
    return [
        Handle(state.operator, state.name, state.mode, subtask, 0, state.edge, state.current.id)
        for state in states
        if state.mode in PER_SUBTASK_MODES and state.mode is not Mode.COMMITTABLES
        for subtask in range(job.graph.operator(state.operator).parallelism)
        if (state.operator, state.name, subtask) not in answered
    ]


def _properties(inputs: Iterable[tuple[StateInput, Any]], starts: Mapping[str, StartingPoint]) -> dict[str, str]:
    names = ", ".join(one.name for one, _ in inputs)
    facts = {"states": names or "none"} | {f"source.{uid}": start.description for uid, start in starts.items()}
    return {f"{PROPERTY}{name}": text for name, text in facts.items()}
