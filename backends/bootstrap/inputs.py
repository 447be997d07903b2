"""The rows of one state: whether they fit what a dataflow declares, and what equal keys become.

The last row of each key is found by an order, in bounded memory. Rows whose key and order are equal
are one row if all their columns are equal. Otherwise nothing says which is the last, and the key is
undecided.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.graph import Operator, brief, shortened
from stateformat.model import Kind, Mode, State, known_names
from stateformat.schema import row_schema
from stateformat.segments import REPEATED_SHOWN, keeps_values, row_key_codes
from stateformat.states import labels_of, named
from stateformat.tables import HELD_BYTES, ArrowStream, Spill, buckets_of, python_rows, split_by_bucket
from stateformat.ttl import TTL_COLUMN

from ..dataflow.compile import Job, compile_job
from ..dataflow.flow import Dataflow
from ..dataflow.graph import ENUMERATOR, ENUMERATOR_LOG, SPLITS, graph_of

_DECLARED = frozenset({Mode.KEYED, Mode.EVEN_SPLIT, Mode.UNION, Mode.BROADCAST})


def compiled(flow: Dataflow, parallelism: int | None, per_operator: Mapping[str, int] | None) -> Job:
    """Compile a dataflow as for its first run. ``InvalidInput`` for an impossible one."""
    if not isinstance(flow, Dataflow):
        raise InvalidInput(f"the dataflow is {flow!r}. Give the Dataflow of the job that is to go on")
    graph = graph_of(flow, parallelism=parallelism, per_operator=per_operator)
    return compile_job(flow, graph, unaligned=False)


def columns_of(flow: Dataflow) -> dict[str, pa.Schema]:
    """Return the columns of the rows of each declared state, by ``operator/state``.

    ``_index`` of a list, ``_tag`` of timers and ``ttl_last_access`` may be left out.
    """
    states = declared_states(compiled(flow, None, None))
    found = {f"{state.operator}/{state.name}": columns_for(state) for state in states}
    if len(found) < len(states):
        for name in found:
            named(name, states)  # Says which two have one name.
    return found


def columns_for(state: State) -> pa.Schema:
    """The columns of rows of a state, as users give them, with what may be null."""
    nullable = {item.name: item.nullable for item in state.current.fields}
    return pa.schema([item.with_nullable(nullable.get(item.name, False)) for item in row_schema(state)])


def declared_states(job: Job) -> list[State]:
    """The states that the operators declare, without those of the runtime."""
    return [
        state
        for state in job.states
        if state.mode in _DECLARED
        and not (state.name in (SPLITS, ENUMERATOR, ENUMERATOR_LOG) and job.vertex_of(state.operator).is_source)
    ]


def find_state(job: Job, given: str) -> State:
    """The state of ``operator/state``, by the operator's uid or by its name where that is unique.

    Raises ``InvalidInput`` for an unknown one, and for a state of the runtime.
    """
    declared = declared_states(job)
    found = named(given, job.states, labels_of(job.graph.operators))
    known = [f"{state.operator}/{state.name}" for state in declared]
    if found is not None and found.state is not None and found.column is None:
        state = next((one for one in declared if (one.operator, one.name) == found[:2]), None)
        if state is not None:
            named(f"{state.operator}/{state.name}", job.states)  # Its own name, under which its rows are counted.
            return state
        raise InvalidInput(
            f"state {given!r} is the runtime's own, which a bootstrap fills. Give the positions of sources with "
            f"positions={{uid: …}}, and rows of {', '.join(known) or 'no state: the dataflow declares none'}",
            kind=ErrorKind.STATE_NOT_ALLOWED,
        )
    of_operator = any(f"{given}/".startswith(f"{uid}/") for uid in job.graph.by_uid)
    raise InvalidInput(
        f"dataflow {shortened(job.flow.job_id)} declares no state {given!r}; {known_names(known, given)}. Write "
        "OPERATOR/STATE",
        kind=ErrorKind.UNKNOWN_STATE if of_operator else ErrorKind.UNKNOWN_OPERATOR,
    )


def optional_of(state: State) -> frozenset[str]:
    """The columns that rows need not have: place in a list, tag of a timer, last access."""
    return frozenset({"_index", "_tag", *([] if state.ttl is None else [TTL_COLUMN])})


def shown(state: State) -> str:
    """The columns of a state in words, for messages."""
    found = []
    for item in columns_for(state):
        key = "key" if item.name in state.key_columns else ""
        rest = "may be left out" if item.name in optional_of(state) else ("" if item.nullable or key else "not null")
        notes = ", ".join(note for note in (key, rest) if note)
        found.append(f"{item.name} {item.type}{f' ({notes})' if notes else ''}")
    return ", ".join(found)


def is_list(state: State) -> bool:
    """Whether a state keeps any number of rows by key."""
    return state.kind is Kind.LIST


_BUCKETS: Final = 256


class Latest:
    """Takes rows with an order column, and gives the last of each key."""

    def __init__(self, row_key: Sequence[str], order: str) -> None:
        self._row_key = list(row_key)
        self._order = order
        self.undecided: list[str] = []
        """Up to :data:`REPEATED_SHOWN` keys of which several rows are the last, as text."""

    def of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The last rows, without the order column."""
        held: list[pa.Table] = []
        held_bytes = 0
        buckets: Spill[int] | None = None
        for batch in batches:
            held.append(pa.Table.from_batches([batch]))
            held_bytes += batch.nbytes
            if held_bytes >= HELD_BYTES:
                buckets = buckets or Spill()
                self._set_aside(buckets, held)
                held, held_bytes = [], 0
        if buckets is None:
            yield from self._decided(self._last(pa.concat_tables(held)) if held else None)
            return
        with buckets:
            self._set_aside(buckets, held)
            for bucket in range(_BUCKETS):
                yield from self._decided(self._last_of_bucket(buckets.read(bucket)))

    def _set_aside(self, buckets: Spill[int], held: Sequence[pa.Table]) -> None:
        for rows in held:
            keys = [rows[name] for name in self._row_key]
            for bucket, chosen in split_by_bucket(rows, buckets_of(keys, _BUCKETS, 0)):
                buckets.add(bucket, chosen)

    def _last_of_bucket(self, batches: Iterable[pa.RecordBatch]) -> pa.Table | None:
        """Of a key with more rows than memory holds, only those that may be the last are kept."""
        kept: list[pa.Table] = []
        fresh_bytes = 0
        for batch in batches:
            kept.append(pa.Table.from_batches([batch]))
            fresh_bytes += batch.nbytes
            if fresh_bytes >= HELD_BYTES:
                kept, fresh_bytes = [self._last(pa.concat_tables(kept))], 0
        return self._last(pa.concat_tables(kept)) if kept else None

    def _last(self, rows: pa.Table) -> pa.Table:
        """The different rows of each key with the greatest order."""
        keys = row_key_codes([rows[name] for name in self._row_key])
        orders = rows[self._order].to_numpy()
        by_order = np.lexsort((orders, keys))
        keys, orders = keys[by_order], orders[by_order]
        ends = np.flatnonzero(np.append(keys[1:] != keys[:-1], len(keys) > 0))
        chosen = by_order[ends]
        greatest = np.repeat(orders[ends], np.diff(ends, prepend=-1))
        tied = np.flatnonzero(orders == greatest)
        if len(tied) > len(ends):
            chosen = self._different(rows, by_order[tied], keys[tied])
        return rows.take(pa.array(np.sort(chosen)))

    def _different(self, rows: pa.Table, tied: npt.NDArray[Any], keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The rows among these that no other one equals in key and values."""
        rest = [name for name in rows.column_names if name not in (*self._row_key, self._order)]
        columns = [pa.array(keys), *(rows[name].take(pa.array(tied)) for name in rest)]
        try:
            codes = row_key_codes(columns)
        except pa.ArrowException:
            # Lists and maps cannot be compared: each row counts as different.
            return tied
        _, first = np.unique(codes, return_index=True)
        return tied[first]

    def _decided(self, rows: pa.Table | None) -> Iterator[pa.RecordBatch]:
        if rows is None:
            return
        keys = row_key_codes([rows[name] for name in self._row_key])
        _, first, counts = np.unique(keys, return_index=True, return_counts=True)
        several = np.flatnonzero(counts > 1)
        named = several[: REPEATED_SHOWN - len(self.undecided)]
        found = python_rows(rows.select(self._row_key).take(pa.array(first[named])))
        self.undecided += [f"{key!r} ({count} rows)" for key, count in zip(found, counts[named].tolist(), strict=True)]
        yield from rows.drop_columns([self._order]).to_batches()


OnDuplicate = Literal["refuse", "last"]
ORDER: Final = pa.field("_order", pa.int64(), nullable=False)
"""The column ``order_by`` as numbers, beside the columns of the state."""
SEQUENCE: Final = pa.field("_sequence", pa.int64(), nullable=False)
"""The place of a row in what was given."""


@dataclass(frozen=True, repr=False)
class Rows:
    """The rows of one state, and their options.

    - ``rows``: anything that exports the Arrow C stream, or a Spark DataFrame.
    - ``order_by``: a column of numbers, dates or timestamps, without nulls. It need not be a column
      of the state. For lists and state without keys it is the order of the entries.
    - ``on_duplicate``: what to do about several rows with the same key: ``refuse`` them, or keep
      the ``last`` by ``order_by``.
    """

    rows: Any
    order_by: str | None = None
    on_duplicate: OnDuplicate = "refuse"

    def __repr__(self) -> str:
        return brief(self, type(self.rows).__name__, *([f"by {self.order_by}"] if self.order_by else []))


@dataclass(frozen=True)
class StateInput:
    """What a task must know about the rows of one state. Picklable."""

    operator: Operator
    """With its parallelism, max parallelism and key hash."""
    state: State
    order_by: str | None
    last: bool
    """Whether the last of several rows with the same key is kept."""
    indexed: bool
    """For a list: whether the rows have an ``_index``."""
    now_us: int = field(default_factory=lambda: time.time_ns() // 1000)
    """The last access of rows without one, in processing time (µs)."""

    @property
    def name(self) -> str:
        """The name in messages: ``operator/state``."""
        return f"{self.state.operator}/{self.state.name}"

    @property
    def where(self) -> str:
        """The beginning of messages."""
        return f"the rows of state {self.state.name!r} of operator {self.state.operator!r}"

    @property
    def keyed(self) -> bool:
        """Whether each row goes to the subtask that owns its key."""
        return self.state.mode is Mode.KEYED

    def sorted_by(self, *, in_order: bool) -> tuple[str, ...]:
        """Return the columns by which rows of a key group, or of a subtask, are sorted.

        ``in_order``: the rows come in the order in which they were given.
        """
        if self.keyed:
            return (ORDER.name, "_index") if self.order_by and is_list(self.state) else ()
        return (*([ORDER.name] if self.order_by else ()), *(() if in_order else (SEQUENCE.name,)))


def state_input(operator: Operator, state: State, given: Rows, schema: pa.Schema) -> StateInput:
    """Check what is given for a state, by its columns alone. ``InvalidInput`` has all faults."""
    found = StateInput(
        operator, state, given.order_by, given.on_duplicate == "last", "_index" in schema.names and is_list(state)
    )
    _check_options(found, given, schema)
    wanted = columns_for(state)
    faults = []
    missing = [name for name in wanted.names if name not in schema.names and name not in optional_of(state)]
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    unknown = [name for name in schema.names if name not in wanted.names and name != given.order_by]
    for what, names in (("lack", missing), ("have twice", twice), ("have besides", unknown)):
        if names:
            faults.append(f"they {what} {', '.join(map(repr, names))}")
    for item in wanted:
        kind = schema.field(item.name).type if item.name in schema.names and item.name not in twice else item.type
        if not keeps_values(kind, item.type) and not (item.name == "_timestamp" and pa.types.is_timestamp(kind)):
            faults.append(f"{item.name!r} is {kind} and should be {item.type}, which cannot hold all of its values")
    if faults:
        raise InvalidState(
            f"{found.where} do not fit: {'; '.join(faults)}. The state has {shown(state)}: select, rename and cast to "
            "these",
            kind=ErrorKind.SCHEMA_MISMATCH,
            operator=state.operator,
            state=state.name,
        )
    return found


def _check_options(found: StateInput, given: Rows, schema: pa.Schema) -> None:
    if given.on_duplicate not in get_args(OnDuplicate):
        raise InvalidInput(f"on_duplicate is {given.on_duplicate!r} for {found.where}. Give 'refuse' or 'last'")
    if given.order_by is not None and schema.names.count(given.order_by) != 1:
        raise InvalidInput(
            f"{found.where} are to be ordered by {given.order_by!r}, but have "
            f"{schema.names.count(given.order_by) or 'no'} columns; they have {', '.join(schema.names)}",
            kind=ErrorKind.SCHEMA_MISMATCH,
        )
    if found.indexed and given.order_by is not None:
        raise InvalidInput(
            f"{found.where} have the column '_index', the place in the list, and order_by={given.order_by!r} says it "
            "again. Leave one of them out"
        )
    if not found.last:
        return
    if given.order_by is None:
        raise InvalidInput(
            f"on_duplicate='last' for {found.where} needs order_by, the column that says which row is the last"
        )
    if not found.keyed or is_list(found.state):
        sort = f"a {found.state.kind}" if found.keyed else f"{found.state.mode} state"
        raise InvalidInput(
            f"on_duplicate='last' for {found.where}: it is {sort}, which keeps every row. Leave on_duplicate out"
        )


def stream_of(where: str, rows: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The columns and batches of what speaks the Arrow C stream, or of a pyarrow dataset.

    Raises ``InvalidInput`` for anything else.
    """
    if type(rows).__module__.startswith("pyspark.sql"):
        raise InvalidInput(
            f"{where} are a DataFrame of Spark. Call stateformat.backends.spark.bootstrap, in which Spark writes them"
        )
    if isinstance(rows, ArrowStream):
        return rows.schema, rows.batches()
    dataset = sys.modules.get("pyarrow.dataset")
    if dataset is not None and isinstance(rows, dataset.Dataset):
        _check_int96(where, rows, dataset)
        rows = rows.scanner().to_reader()
    if isinstance(rows, pa.RecordBatch):
        rows = pa.Table.from_batches([rows])
    if not hasattr(rows, "__arrow_c_stream__"):
        raise InvalidInput(
            f"{where} are of type {type(rows).__name__}, which does not support the Arrow C stream. Give a table, a "
            "record batch reader, a DuckDB relation, a polars or pandas DataFrame, a dataset, or the state of another "
            "checkpoint"
        )
    try:
        reader = pa.RecordBatchReader.from_stream(rows)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(where, error) from error
    return reader.schema, _read(where, reader)


def _check_int96(where: str, rows: Any, dataset: Any) -> None:
    """Raise ``InvalidInput`` for a dataset that reads INT96, Spark's default, as other times."""
    in_ns = [field.name for field in rows.schema if "[ns" in str(field.type)]
    for fragment in rows.get_fragments() if in_ns else ():
        if isinstance(fragment, dataset.ParquetFileFragment):
            found = fragment.metadata.schema
            columns = [found.column(number) for number in range(len(found))]
            names = [item.path.partition(".")[0] for item in columns if item.physical_type == "INT96"]
            for name in set(names) & set(in_ns):
                raise InvalidInput(
                    f"{where} are a dataset that reads {name!r} as INT96 in nanoseconds, and so times before 1677 and "
                    "after 2262 as others. Make it with format=pyarrow.dataset.ParquetFileFormat("
                    "coerce_int96_timestamp_unit='us')",
                    kind=ErrorKind.UNSUPPORTED_TYPE,
                )


def _read(where: str, reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    try:
        yield from reader
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(where, error) from error


def _unreadable(where: str, error: Exception) -> InvalidInput:
    text = str(error).partition(" Detail: Python exception: ")[0]
    said = next((line.strip() for line in text.split("\n") if line.strip()), type(error).__name__)
    return InvalidInput(f"{where} cannot be read: {said.rstrip('.')}. Nothing was published; fix their source")
