"""The rows of one state: whether they fit it, and what is done with equal keys and with order."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.graph import Operator, brief
from stateformat.model import Mode, State
from stateformat.segments import keeps_values
from stateformat.tables import ArrowStream

from .declared import columns_for, is_list, optional_of, shown

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
